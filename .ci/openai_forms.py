"""The official `openai` package against a running server: several texts at once, log probabilities, answers of a given
form, and calls of tools.

    python .ci/openai_forms.py http://127.0.0.1:8080/v1
"""

import json
import math
import sys
from typing import Annotated

import openai
from pydantic import BaseModel, Field

SIZES = ["small", "large"]


class Animal(BaseModel):
    """What an answer is to be."""

    legs: Annotated[int, Field(ge=0, le=9)]
    wild: bool


def several(client: openai.OpenAI, model: str) -> None:
    """Each of several texts is the one that its own seed gives; the likeliest of several is one of them."""
    asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 1}
    answer = client.completions.create(n=3, seed=7, **asked)
    assert [choice.index for choice in answer.choices] == [0, 1, 2], answer
    alone = [client.completions.create(seed=seed, **asked).choices[0].text for seed in (7, 8, 9)]
    assert [choice.text for choice in answer.choices] == alone, (answer, alone)
    best = client.completions.create(best_of=3, seed=7, **asked)
    assert best.choices[0].text in alone, best
    texts = ["", "", ""]
    for chunk in client.completions.create(n=3, seed=7, stream=True, **asked):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone, texts


def log_probabilities(client: openai.OpenAI, model: str) -> None:
    """They come with their tokens, whose texts are the text."""
    asked = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    choice = client.completions.create(logprobs=3, echo=True, **asked).choices[0]
    told = choice.logprobs
    # The first token is the one that begins every text, and has no text of its own.
    assert "".join(told.tokens[1:]) == choice.text and choice.text.startswith(asked["prompt"]), told
    assert told.token_logprobs[0] is None and all(logprob <= 0 for logprob in told.token_logprobs[1:]), told
    places = zip(told.tokens[1:], told.text_offset[1:])
    assert all(choice.text[at:].startswith(token) for token, at in places), told
    assert all(len(top) in (3, 4) for top in told.top_logprobs[1:]), told

    messages = [{"role": "user", "content": "Tell me of a fox."}]
    chat = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    choice = client.chat.completions.create(**chat).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content, tokens
    assert all(len(token.top_logprobs) == 2 and math.exp(token.logprob) <= 1 for token in tokens), tokens
    assert all(token.top_logprobs[0].token == token.token for token in tokens), "greedy takes the likeliest"


def forms(client: openai.OpenAI, model: str) -> None:
    """Whatever the model would like to say, the answer has the form that was asked for."""
    messages = [{"role": "user", "content": "What is a fox like?"}]
    parsed = client.chat.completions.parse(model=model, messages=messages, response_format=Animal, max_tokens=200, seed=7)
    assert isinstance(parsed.choices[0].message.parsed, Animal), parsed
    answer = client.completions.create(model=model, prompt="A fox is", extra_body={"regex": "(small|large) and (red|grey)"}, seed=7)
    assert answer.choices[0].text.split(" and ")[0] in SIZES, answer
    try:
        client.completions.create(model=model, prompt="x", extra_body={"regex": "("})
    except openai.BadRequestError as error:
        assert error.param == "regex", error.body
    else:
        raise AssertionError("half a regular expression was accepted")


def tools(client: openai.OpenAI, model: str) -> None:
    """A tool is called by its name and with the arguments that its schema says, whole and in pieces."""
    parameters = {
        "type": "object",
        "properties": {"size": {"enum": SIZES}},
        "required": ["size"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "measure", "parameters": parameters}}
    messages = [{"role": "user", "content": "How large is a fox?"}]
    asked = {"model": model, "messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 100, "seed": 7}
    choice = client.chat.completions.create(**asked).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
    call = choice.message.tool_calls[0]
    assert call.function.name == "measure" and json.loads(call.function.arguments)["size"] in SIZES, call
    with client.chat.completions.stream(**asked) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert (final.function.name, final.function.arguments) == (call.function.name, call.function.arguments), final
    answered = [*messages, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Not large."}]
    answer = client.chat.completions.create(model=model, messages=answered, max_tokens=4)
    assert answer.choices[0].message.role == "assistant", answer


def main(base_url: str) -> None:
    """Runs all, prints a line for each."""
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=120)
    model = client.models.list().data[0].id
    several(client, model)
    print("openai: n, best_of and their seeds, whole and streamed alike")
    log_probabilities(client, model)
    print("openai: log probabilities in completions, with echo, and in chat")
    forms(client, model)
    print("openai: answers of a given form, parsed by the package")
    tools(client, model)
    print("openai: tools called, whole and in pieces, and their results given back")


if __name__ == "__main__":
    main(sys.argv[1])
