"""The official `openai` package against a running server: completions, chat, streaming, errors, many streams at once, and
responses. `openai_pressure.py` tests it against a full server and one that shuts down.

    python .ci/openai_client.py http://127.0.0.1:8080/v1
"""

import asyncio
import sys
import time

import openai
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

STREAMS = 32
PROMPTS = [
    "Once upon a time",
    "The old lighthouse keeper",
    "It was late in the autumn, and",
    "“Where have you been?” said the fox",
]


def request(prompt: str) -> dict:
    """A greedy request, so that every way to make it gives the same text."""
    return {"prompt": prompt, "max_tokens": 48, "temperature": 0}


def one_by_one(client: openai.OpenAI, model: str) -> dict[str, str]:
    """Completes each prompt alone, with and without streaming; returns the texts by prompt."""
    texts = {}
    for prompt in PROMPTS:
        whole = client.completions.create(model=model, **request(prompt))
        Completion.model_validate(whole.to_dict(), strict=True)
        text = whole.choices[0].text
        assert text.strip(), f"empty text for {prompt!r}"
        assert whole.choices[0].finish_reason in ("length", "stop"), whole
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage

        chunks = list(
            client.completions.create(model=model, stream=True, stream_options={"include_usage": True}, **request(prompt))
        )
        streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert streamed == text, f"streamed {streamed!r}, whole {text!r}"
        assert sum(bool(chunk.choices) for chunk in chunks) > 4, "the text came in too few chunks"
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
        texts[prompt] = text
    return texts


def chat(client: openai.OpenAI, model: str) -> None:
    """Chat with and without streaming; all objects have the package's types."""
    request_fields = {
        "model": model,
        "messages": [
            {"role": "system", "content": "You tell tales."},
            {"role": "user", "content": [{"type": "text", "text": "Tell me of a fox."}]},
        ],
        "max_completion_tokens": 24,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**request_fields)
    ChatCompletion.model_validate(whole.to_dict(), strict=True)
    choice = whole.choices[0]
    assert choice.message.role == "assistant" and choice.message.content.strip(), whole
    assert choice.finish_reason in ("length", "stop"), whole
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage

    chunks = list(client.chat.completions.create(stream=True, stream_options={"include_usage": True}, **request_fields))
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk.to_dict(), strict=True)
    assert len({chunk.id for chunk in chunks}) == 1 and chunks[0].choices[0].delta.role == "assistant", chunks[0]
    pieces = [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]
    assert "".join(pieces) == choice.message.content, pieces
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
    assert all(chunk.usage is None for chunk in chunks[:-1])

    with client.chat.completions.stream(stream_options={"include_usage": True}, **request_fields) as stream:
        try:
            final = stream.get_final_completion()
        except openai.LengthFinishReasonError as error:
            # The package raises this if `max_completion_tokens` ended the text.
            assert choice.finish_reason == "length", choice
            final = error.completion
    assert final.choices[0].message.content == choice.message.content, final
    assert final.system_fingerprint == whole.system_fingerprint, final


def errors(client: openai.OpenAI, model: str) -> None:
    """Errors have the class, status, parameter and code that the package expects."""
    messages = [{"role": "user", "content": "x"}]
    cases = [
        (openai.BadRequestError, "temperature", None, lambda: client.completions.create(model=model, prompt="x", temperature=9)),
        (openai.BadRequestError, "prompt", None, lambda: client.completions.create(model=model, prompt=[])),
        (openai.BadRequestError, "max_tokens", None, lambda: client.completions.create(model=model, prompt="x", max_tokens=0)),
        (openai.BadRequestError, "messages", None, lambda: client.chat.completions.create(model=model, messages=[])),
        (openai.BadRequestError, "top_p", None, lambda: client.chat.completions.create(model=model, messages=messages, top_p=7)),
        (openai.BadRequestError, "temperature", None, lambda: client.responses.create(model=model, input="x", temperature=-1)),
        (openai.NotFoundError, "model", "model_not_found", lambda: client.completions.create(model="gpt-x", prompt="x")),
        (openai.NotFoundError, "model", "model_not_found", lambda: client.models.retrieve("gpt-x")),
        (openai.NotFoundError, None, "not_found", lambda: client.files.list()),
        (openai.UnprocessableEntityError, "idempotency-key", "idempotency_key_reused", lambda: twice(client, model)),
    ]
    for kind, param, code, call in cases:
        try:
            call()
        except openai.APIStatusError as error:
            found = (type(error), error.param, error.code)
            assert found == (kind, param, code), f"{found} instead of {(kind, param, code)}: {error.body}"
            assert error.body["message"] and error.type == "invalid_request_error", error.body
            assert error.request_id, "an error without the id of its request"
        else:
            raise AssertionError(f"no error where {kind.__name__} was expected ({param})")


def twice(client: openai.OpenAI, model: str) -> None:
    """With one idempotency key, the same request gives the same answer, and another request an error."""
    headers = {"Idempotency-Key": f"ci-{time.time_ns()}"}
    ask = lambda prompt: client.completions.create(model=model, prompt=prompt, max_tokens=4, extra_headers=headers)
    assert ask("once").to_dict() == ask("once").to_dict()
    ask("twice")


def responses(client: openai.OpenAI, model: str) -> None:
    """Responses are created, streamed, continued, retrieved and deleted; all objects have the package's types."""
    request_fields = {"model": model, "max_output_tokens": 24, "temperature": 0}
    first = client.responses.create(input="Tell me of a fox.", instructions="Be brief.", metadata={"tale": "1"}, **request_fields)
    Response.model_validate(first.to_dict())
    assert first.output_text.strip() and first.status in ("completed", "incomplete"), first
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens, first.usage

    follow_up = {"input": [{"role": "user", "content": "And then?"}], "previous_response_id": first.id, **request_fields}
    second = client.responses.create(**follow_up)
    assert second.usage.input_tokens > first.usage.total_tokens, second.usage
    assert second.usage.input_tokens - second.usage.input_tokens_details.cached_tokens < 12, second.usage

    events = list(client.responses.create(stream=True, **follow_up))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == second.output_text
    assert events[-1].response.output_text == second.output_text, events[-1]

    with client.responses.stream(**follow_up) as stream:
        third = stream.get_final_response() if second.status == "completed" else list(stream)[-1].response
    assert third.output_text == second.output_text, third

    read = client.responses.retrieve(second.id)
    assert read.to_dict() == second.to_dict(), read
    assert read.previous_response_id == first.id
    client.responses.delete(first.id)
    for gone in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(**follow_up),
        lambda: client.with_options(api_key="another").responses.retrieve(second.id),
    ):
        try:
            gone()
        except openai.NotFoundError as error:
            assert error.code == "not_found", error.body
        else:
            raise AssertionError("a deleted or foreign response was found")
    try:
        client.responses.create(input="x", tools=[{"type": "web_search"}], **request_fields)
    except openai.BadRequestError as error:
        assert error.param == "tools", error.body
    else:
        raise AssertionError("tools were accepted")


async def all_at_once(base_url: str, model: str, texts: dict[str, str]) -> int:
    """Runs many streams at once, each of which must get the text of its prompt alone; returns the number of tokens."""

    async def stream(client: openai.AsyncOpenAI, number: int) -> int:
        prompt = PROMPTS[number % len(PROMPTS)]
        text, tokens = "", 0
        async for chunk in await client.completions.create(
            model=model, stream=True, stream_options={"include_usage": True}, **request(prompt)
        ):
            text += chunk.choices[0].text if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        assert text == texts[prompt], f"stream {number}: {text!r} in a batch, {texts[prompt]!r} alone"
        return tokens

    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=300) as client:
        return sum(await asyncio.gather(*(stream(client, number) for number in range(STREAMS))))


def main(base_url: str) -> None:
    """Runs all checks and prints a line for each."""
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=120)
    model = client.models.list().data[0].id
    texts = one_by_one(client, model)
    print(f"openai {openai.__version__}: {len(texts)} prompts, the same with and without streaming ({model})")
    chat(client, model)
    print("openai: chat, the same with and without streaming")
    errors(client, model)
    print("openai: errors have the package's classes, with parameter, code and request id")
    responses(client, model)
    print("openai: responses created, streamed, continued, retrieved and deleted")
    start = time.perf_counter()
    tokens = asyncio.run(all_at_once(base_url, model, texts))
    seconds = time.perf_counter() - start
    print(f"openai: {STREAMS} streams at once, each with the expected text, {tokens / seconds:.0f} tokens/s together")


if __name__ == "__main__":
    main(sys.argv[1])
