"""The official `openai` package against a running server: several texts at once, log probabilities, structured
outputs, and tool calls.

    python .ci/openai_forms.py http://127.0.0.1:8080/v1
"""

import json
import math
import sys
from typing import Annotated

import openai
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, Field, TypeAdapter

SIZES = ["small", "large"]


class Animal(BaseModel):
    """The schema of a structured output."""

    legs: Annotated[int, Field(ge=0, le=9)]
    wild: bool


def several(client: openai.OpenAI, model: str) -> None:
    """Text i of n equals the text of seed + i; best_of returns one of them."""
    request = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 1}
    answer = client.completions.create(n=3, seed=7, **request)
    assert [choice.index for choice in answer.choices] == [0, 1, 2], answer
    alone = [client.completions.create(seed=seed, **request).choices[0].text for seed in (7, 8, 9)]
    assert [choice.text for choice in answer.choices] == alone, (answer, alone)
    best = client.completions.create(best_of=3, seed=7, **request)
    assert best.choices[0].text in alone, best
    texts = ["", "", ""]
    for chunk in client.completions.create(n=3, seed=7, stream=True, **request):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == alone, texts


def log_probabilities(client: openai.OpenAI, model: str) -> None:
    """Log probabilities come with their tokens, whose texts concatenate to the whole text."""
    request = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    choice = client.completions.create(logprobs=3, echo=True, **request).choices[0]
    logprobs = choice.logprobs
    # The first token begins every sequence and has no text.
    assert "".join(logprobs.tokens[1:]) == choice.text and choice.text.startswith(request["prompt"]), logprobs
    assert logprobs.token_logprobs[0] is None and all(logprob <= 0 for logprob in logprobs.token_logprobs[1:]), logprobs
    places = zip(logprobs.tokens[1:], logprobs.text_offset[1:])
    assert all(choice.text[at:].startswith(token) for token, at in places), logprobs
    assert all(len(top) in (3, 4) for top in logprobs.top_logprobs[1:]), logprobs

    messages = [{"role": "user", "content": "Tell me of a fox."}]
    chat = {"model": model, "messages": messages, "max_tokens": 8, "temperature": 0, "logprobs": True, "top_logprobs": 2}
    chat["extra_body"] = {"repetition_penalty": 1}  # with the model's default penalty, greedy may not take the likeliest
    choice = client.chat.completions.create(**chat).choices[0]
    tokens = choice.logprobs.content
    assert "".join(token.token for token in tokens) == choice.message.content, tokens
    assert all(len(token.top_logprobs) == 2 and math.exp(token.logprob) <= 1 for token in tokens), tokens
    assert all(token.top_logprobs[0].token == token.token for token in tokens), "greedy takes the likeliest"


def structured_outputs(client: openai.OpenAI, model: str) -> None:
    """Answers follow the schema or the regular expression."""
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
        raise AssertionError("an invalid regular expression was accepted")


def tools(client: openai.OpenAI, model: str) -> None:
    """A tool call has the tool's name and arguments that follow its schema, streamed or not."""
    parameters = {
        "type": "object",
        "properties": {"size": {"enum": SIZES}},
        "required": ["size"],
        "additionalProperties": False,
    }
    tool = {"type": "function", "function": {"name": "measure", "parameters": parameters}}
    messages = [{"role": "user", "content": "How large is a fox?"}]
    request = {"model": model, "messages": messages, "tools": [tool], "tool_choice": "required", "max_tokens": 100, "seed": 7}
    choice = client.chat.completions.create(**request).choices[0]
    assert choice.finish_reason == "tool_calls" and choice.message.content is None, choice
    call = choice.message.tool_calls[0]
    assert call.function.name == "measure" and json.loads(call.function.arguments)["size"] in SIZES, call
    with client.chat.completions.stream(**request) as stream:
        final = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert (final.function.name, final.function.arguments) == (call.function.name, call.function.arguments), final
    answered = [*messages, choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Not large."}]
    answer = client.chat.completions.create(model=model, messages=answered, max_tokens=4)
    assert answer.choices[0].message.role == "assistant", answer


def response_tools(client: openai.OpenAI, model: str) -> None:
    """Tool calls are items of a response, streamed or not; their outputs alone continue it; tools and a schema combine."""
    parameters = {"type": "object", "properties": {"size": {"enum": SIZES}}, "required": ["size"], "additionalProperties": False}
    tool = {"type": "function", "name": "measure", "description": "Measures.", "parameters": parameters, "strict": True}
    request = {"model": model, "tools": [tool], "max_output_tokens": 100, "extra_body": {"seed": 7}, "parallel_tool_calls": False}
    asked = {"input": "How large is a fox?", "tool_choice": {"type": "function", "name": "measure"}, **request}
    first = client.responses.create(**asked)
    Response.model_validate(first.to_dict())
    [call] = first.output
    assert (call.type, call.name, call.status) == ("function_call", "measure", "completed"), call
    assert json.loads(call.arguments)["size"] in SIZES, call
    events = list(client.responses.create(stream=True, **asked))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments == events[-1].response.output[0].arguments, events[-1]
    with client.responses.stream(**asked) as stream:
        assert stream.get_final_response().output[0].arguments == call.arguments
    output = {"type": "function_call_output", "call_id": call.call_id, "output": "Not large."}
    second = client.responses.create(input=[output], previous_response_id=first.id, tool_choice="none", **request)
    assert second.usage.input_tokens > first.usage.total_tokens and second.output[0].type == "message", second
    history = [{"role": "user", "content": "How large is a fox?"}, *first.output, output]
    third = client.responses.create(input=history, store=False, tool_choice="none", **request)
    assert third.output[0].type == "message", third
    either = client.responses.parse(input="Tell me of a fox.", text_format=Animal, **request)
    kinds = [item.type for item in either.output]
    assert kinds == ["function_call"] or isinstance(either.output_parsed, Animal), either
    try:
        client.responses.create(input="x", model=model, tools=[{"type": "file_search", "vector_store_ids": ["x"]}])
    except openai.BadRequestError as error:
        assert error.param == "tools" and "file_search" in error.message, error.body
    else:
        raise AssertionError("a built-in tool was accepted")


def main(base_url: str) -> None:
    """Runs all checks and prints a line for each."""
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=120)
    model = client.models.list().data[0].id
    several(client, model)
    print("openai: n, best_of and their seeds, the same with and without streaming")
    log_probabilities(client, model)
    print("openai: log probabilities in completions, with echo, and in chat")
    structured_outputs(client, model)
    print("openai: structured outputs, parsed by the package")
    tools(client, model)
    print("openai: tool calls, with and without streaming, and tool results")
    response_tools(client, model)
    print("openai: tool calls in responses, streamed, continued by their outputs, and beside a schema")


if __name__ == "__main__":
    main(sys.argv[1])
