"""The official `openai` package against a server that is full, too slow for its client, or shutting down: which errors
it raises, and that its retries succeed.

    python .ci/openai_pressure.py http://127.0.0.1:8080/v1 PROCESS

The server must have been started with `--slots 1 --queue 1 --drain-seconds 600`; at the end it gets a SIGTERM (PROCESS
is its id).
"""

import asyncio
import json
import os
import re
import signal
import sys
import time
import urllib.error
import urllib.request

import openai

CLIENTS = 6
# Seconds within which the server must be seen in an expected state.
SOON = 120


def client(base_url: str, **options) -> openai.AsyncOpenAI:
    """A client without retries, unless `options` say otherwise."""
    return openai.AsyncOpenAI(base_url=base_url, api_key="none", **{"timeout": 60, "max_retries": 0, **options})


async def endless(caller: openai.AsyncOpenAI, model: str):
    """A stream that has started and continues until it is closed."""
    request = {"model": model, "prompt": "On and on", "max_tokens": 1_000_000, "extra_body": {"ignore_eos": True}}
    stream = await caller.completions.create(stream=True, **request)
    await anext(stream)
    return stream


async def refusal(caller: openai.AsyncOpenAI, model: str) -> openai.APIStatusError:
    """The error with which the server refuses a request; it says when to try again."""
    try:
        await caller.completions.create(model=model, prompt="x", max_tokens=2)
    except openai.APIStatusError as error:
        assert int(error.response.headers["retry-after"]) >= 1, error.response.headers
        return error
    raise AssertionError("the server refused no request")


def is_waiting(base_url: str) -> bool:
    """Whether a request waits in the queue."""
    with urllib.request.urlopen(base_url.removesuffix("/v1") + "/metrics", timeout=10) as metrics:
        lines = metrics.read().decode().splitlines()
    return any(re.fullmatch(r"tidegate_num_requests_waiting(\{.*\})? 1(\.0)?", line) for line in lines)


async def full(base_url: str, model: str) -> None:
    """One request runs, one waits, the third is refused; clients that retry all get their text."""
    caller = client(base_url)
    running = await endless(caller, model)
    waiting = asyncio.create_task(caller.completions.create(model=model, prompt="x", max_tokens=2))
    async with asyncio.timeout(SOON):
        while not is_waiting(base_url):
            await asyncio.sleep(0.05)
    error = await refusal(caller, model)
    assert isinstance(error, openai.RateLimitError), error
    assert (error.code, error.type) == ("queue_full", "rate_limit_error"), error.body

    patient = client(base_url, max_retries=20)
    start = time.perf_counter()
    request = {"model": model, "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
    tries = [asyncio.create_task(patient.completions.create(**request)) for _ in range(CLIENTS)]
    await asyncio.sleep(1)
    await running.close()
    texts = {answer.choices[0].text for answer in await asyncio.gather(*tries)}
    await waiting
    assert len(texts) == 1, texts
    print(f"openai: a full queue is a RateLimitError; {CLIENTS} clients with retries all got their text "
          f"in {time.perf_counter() - start:.1f} s")


async def late(base_url: str, model: str) -> None:
    """A client that times out gets its package's error, and its slot becomes free."""
    request = {"model": model, "prompt": "On and on", "max_tokens": 1_000_000, "extra_body": {"ignore_eos": True}}
    start = time.perf_counter()
    try:
        await client(base_url, timeout=0.5).completions.create(**request)
    except openai.APITimeoutError:
        waited = time.perf_counter() - start
    else:
        raise AssertionError("a million tokens came in half a second")
    answer = await client(base_url, timeout=20).completions.create(model=model, prompt="x", max_tokens=2)
    assert answer.choices[0].finish_reason in ("length", "stop"), answer
    print(f"openai: a timeout is an APITimeoutError (after {waited:.1f} s), and the slot is free again")


def draining(base_url: str) -> bool:
    """Whether the server has begun to shut down."""
    try:
        with urllib.request.urlopen(base_url.removesuffix("/v1") + "/health", timeout=10):
            return False
    except urllib.error.HTTPError as error:
        return json.load(error)["error"]["code"] == "shutting_down"


async def closing(base_url: str, model: str, process: int) -> None:
    """A server that shuts down finishes running requests and refuses new ones."""
    caller = client(base_url)
    request = {"model": model, "prompt": "On and on", "max_tokens": 4_000, "extra_body": {"ignore_eos": True}}
    running = await caller.completions.create(stream=True, **request)
    await anext(running)
    os.kill(process, signal.SIGTERM)
    # A request that arrived before the signal took effect would wait in the queue, get its text, and then find no
    # server any more.
    async with asyncio.timeout(SOON):
        while not draining(base_url):
            await asyncio.sleep(0.01)
    error = await refusal(caller, model)
    assert isinstance(error, openai.InternalServerError), error
    assert (error.status_code, error.code) == (503, "shutting_down"), error.body
    reason = None
    async for chunk in running:
        reason = chunk.choices[0].finish_reason if chunk.choices else reason
    assert reason == "length", reason
    print("openai: shutting down is an InternalServerError of status 503, and running requests finish")


async def main(base_url: str, process: int) -> None:
    """Runs all checks and prints a line for each."""
    model = (await client(base_url).models.list()).data[0].id
    await full(base_url, model)
    await late(base_url, model)
    await closing(base_url, model, process)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
