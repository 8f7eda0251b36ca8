"""The official `openai` package against a running server: completing, streaming, failing, and many at once.

    python .ci/openai_client.py http://127.0.0.1:8080/v1
"""

import asyncio
import sys
import time

import openai

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
    began = time.perf_counter()
    tokens = asyncio.run(all_at_once(base_url, model, texts))
    seconds = time.perf_counter() - began
    print(f"openai: {STREAMS} streams at once, each with its right text, {tokens / seconds:.0f} tokens/s together")


if __name__ == "__main__":
    main(sys.argv[1])
