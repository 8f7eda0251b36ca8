"""The official `openai` package against a running server: completing, streaming, failing, many at once, and responses.

    python .ci/openai_client.py http://127.0.0.1:8080/v1
"""

import asyncio
import sys
import time

import openai
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
    """Greedy, so that the text must be the same however it is asked for."""
    return {"prompt": prompt, "max_tokens": 48, "temperature": 0}


def one_by_one(client: openai.OpenAI, model: str) -> dict[str, str]:
    """Each prompt alone, whole and streamed; the texts by prompt."""
    texts = {}
    for prompt in PROMPTS:
        whole = client.completions.create(model=model, **request(prompt))
        text = whole.choices[0].text
        assert text.strip(), f"empty text for {prompt!r}"
        assert whole.choices[0].finish_reason in ("length", "stop"), whole
        assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens, whole.usage

        chunks = list(
            client.completions.create(model=model, stream=True, stream_options={"include_usage": True}, **request(prompt))
        )
        streamed = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
        assert streamed == text, f"streamed {streamed!r}, whole {text!r}"
        assert sum(bool(chunk.choices) for chunk in chunks) > 4, "the text came in too few pieces"
        assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, chunks[-1]
        texts[prompt] = text
    return texts


def failing(client: openai.OpenAI, model: str) -> None:
    """A wrong value is told as the package expects to be told."""
    try:
        client.completions.create(model=model, prompt="x", temperature=9)
    except openai.BadRequestError as error:
        assert error.param == "temperature", error.body
        assert "2" in error.body["message"], error.body
    else:
        raise AssertionError("temperature 9 was accepted")


def responses(client: openai.OpenAI, model: str) -> None:
    """Responses made, streamed, gone on with, read again and deleted, each as the package's types say."""
    asked = {"model": model, "max_output_tokens": 24, "temperature": 0}
    first = client.responses.create(input="Tell me of a fox.", instructions="Be brief.", metadata={"tale": "1"}, **asked)
    Response.model_validate(first.to_dict())
    assert first.output_text.strip() and first.status in ("completed", "incomplete"), first
    assert first.usage.total_tokens == first.usage.input_tokens + first.usage.output_tokens, first.usage

    going_on = {"input": [{"role": "user", "content": "And then?"}], "previous_response_id": first.id, **asked}
    second = client.responses.create(**going_on)
    assert second.usage.input_tokens > first.usage.total_tokens, second.usage
    assert second.usage.input_tokens - second.usage.input_tokens_details.cached_tokens < 12, second.usage

    events = list(client.responses.create(stream=True, **going_on))
    for event in events:
        TypeAdapter(ResponseStreamEvent).validate_python(event.to_dict())
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == second.output_text
    assert events[-1].response.output_text == second.output_text, events[-1]

    with client.responses.stream(**going_on) as stream:
        third = stream.get_final_response() if second.status == "completed" else list(stream)[-1].response
    assert third.output_text == second.output_text, third

    read = client.responses.retrieve(second.id)
    assert read.to_dict() == second.to_dict(), read
    assert read.previous_response_id == first.id
    client.responses.delete(first.id)
    for gone in (
        lambda: client.responses.retrieve(first.id),
        lambda: client.responses.create(**going_on),
        lambda: client.with_options(api_key="another").responses.retrieve(second.id),
    ):
        try:
            gone()
        except openai.NotFoundError as error:
            assert error.code == "not_found", error.body
        else:
            raise AssertionError("a response was found that should not be there")
    try:
        client.responses.create(input="x", tools=[{"type": "web_search"}], **asked)
    except openai.BadRequestError as error:
        assert error.param == "tools", error.body
    else:
        raise AssertionError("tools were accepted")


async def all_at_once(base_url: str, model: str, texts: dict[str, str]) -> int:
    """Many streams together, each of which must get the text that its prompt got alone; the tokens in all."""

    async def stream(client: openai.AsyncOpenAI, number: int) -> int:
        prompt = PROMPTS[number % len(PROMPTS)]
        text, tokens = "", 0
        async for chunk in await client.completions.create(
            model=model, stream=True, stream_options={"include_usage": True}, **request(prompt)
        ):
            text += chunk.choices[0].text if chunk.choices else ""
            tokens = chunk.usage.completion_tokens if chunk.usage else tokens
        assert text == texts[prompt], f"stream {number}: {text!r} among others, {texts[prompt]!r} alone"
        return tokens

    async with openai.AsyncOpenAI(base_url=base_url, api_key="none", timeout=300) as client:
        return sum(await asyncio.gather(*(stream(client, number) for number in range(STREAMS))))


def main(base_url: str) -> None:
    """Runs all, prints a line for each."""
    client = openai.OpenAI(base_url=base_url, api_key="none", timeout=120)
    model = client.models.list().data[0].id
    texts = one_by_one(client, model)
    print(f"openai {openai.__version__}: {len(texts)} prompts, whole and streamed alike ({model})")
    failing(client, model)
    print("openai: a wrong temperature is a BadRequestError that names it")
    responses(client, model)
    print("openai: responses made, streamed, gone on with, read again and deleted")
    began = time.perf_counter()
    tokens = asyncio.run(all_at_once(base_url, model, texts))
    seconds = time.perf_counter() - began
    print(f"openai: {STREAMS} streams at once, each with its right text, {tokens / seconds:.0f} tokens/s together")


if __name__ == "__main__":
    main(sys.argv[1])
