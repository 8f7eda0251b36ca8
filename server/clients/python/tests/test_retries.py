"""Lost answers, broken streams and refusals: no turn runs twice, and none is lost."""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest

import tidegate
from tidegate import AsyncTidegate, Tidegate
from tidegate import client as client_module
from tidegate.wire import Call, pause, turn

from .conftest import Server
from .faults import AsyncCutsStreams, CutsStreams, LosesAnswers


@pytest.fixture(autouse=True)
def waits(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Records the waits between attempts instead of sleeping."""
    waits: list[float] = []
    monkeypatch.setattr(client_module, "time", SimpleNamespace(sleep=waits.append))
    return waits


def is_turn(request: httpx.Request) -> bool:
    return request.url.path.endswith("completions")


def test_a_turn_whose_answer_is_lost_runs_once(server: Server) -> None:
    with Tidegate(server.url, api_key="lost", transport=LosesAnswers(is_turn, 2)) as client:
        session = client.create("Once upon a time")
        reply = session.say(prompt=" there", max_tokens=8)
        assert [turn["version"] for turn in session.turns()][1:] == [reply.version]
        transport = client._http._transport
        assert isinstance(transport, LosesAnswers) and len(transport.seen) == 3
        assert len({request.headers["idempotency-key"] for request in transport.seen}) == 1


def test_retries_end(server: Server, waits: list[float]) -> None:
    with Tidegate(server.url, api_key="end", transport=LosesAnswers(is_turn, 9), max_retries=3) as client:
        session = client.create("Once upon a time")
        with pytest.raises(tidegate.ConnectionFailed):
            session.say(prompt=" there", max_tokens=1)
    assert len(waits) == 3 and 0.375 <= waits[0] <= 0.5 and 1.5 <= waits[2] <= 2, waits


def test_forks_whose_answer_is_lost_are_made_once(server: Server) -> None:
    with Tidegate(server.url, api_key="forks", transport=LosesAnswers(lambda request: request.method == "POST", 2)) as client:
        forks = client.create("Once upon a time").fork(3)
        assert len(forks) == 3 and len(list(client.sessions())) == 4


def test_an_upload_whose_answer_is_lost_is_not_sent_again(server: Server) -> None:
    with Tidegate(
        server.url, api_key="upload", transport=LosesAnswers(lambda request: "snapshots" in request.url.path)
    ) as client:
        file = client.create("Once upon a time").snapshot()
        with pytest.raises(tidegate.ConnectionFailed):
            client.load(file)
        assert len(list(client.sessions())) == 2


def test_a_deletion_whose_answer_is_lost_succeeds(server: Server) -> None:
    with Tidegate(server.url, api_key="delete", transport=LosesAnswers(lambda request: request.method == "DELETE")) as client:
        client.create("Once upon a time").delete()
        assert list(client.sessions()) == []


def refusal(status: int, **headers: str) -> httpx.Response:
    return httpx.Response(status, headers={name.replace("_", "-"): value for name, value in headers.items()})


def test_waits_follow_the_server() -> None:
    turn = Call("POST", "/v1/completions")
    once = Call("POST", "/v1/snapshots", repeatable=False)
    for attempt in range(50):
        wait = pause(turn, attempt, 100, refusal(429, retry_after="7"))
        assert wait is not None and 7 <= wait <= 7.25
        backoff = pause(turn, attempt, 100, refusal(503))
        assert backoff is not None and backoff <= 8
    assert len({pause(turn, 1, 2, refusal(503)) for _ in range(9)}) == 9, "waits have jitter"
    for never in (refusal(400), refusal(412), refusal(501), refusal(507), refusal(429, x_should_retry="false")):
        assert pause(turn, 0, 2, never) is None, never
    assert pause(turn, 2, 2, refusal(503)) is None
    assert pause(once, 0, 2, refusal(503)) is not None and pause(once, 0, 2, refusal(500)) is None
    assert pause(once, 0, 2, httpx.ConnectError("refused")) is not None
    assert pause(once, 0, 2, httpx.ReadError("lost")) is None


def test_a_stream_goes_on_after_disconnects(server: Server, client: Tidegate) -> None:
    expected = client.create("Once upon a time", seed=1).say(prompt=" there", max_tokens=40)
    transport = CutsStreams(3, 0, 1, 5)
    with Tidegate(server.url, api_key="cut", transport=transport) as cut:
        session = cut.create("Once upon a time", seed=1)
        stream = session.stream(prompt=" there", max_tokens=40)
        assert "".join(stream) == stream.reply.text == expected.text
        assert stream.reply.tokens == expected.tokens and len(session.turns()) == 2
    resumed = "GET /v1/streams/strm"
    assert transport.seen == ["POST /v1/completions None", f"{resumed} 2", f"{resumed} 2", f"{resumed} 3", f"{resumed} 8"]


def test_a_stream_goes_on_in_asyncio(server: Server, client: Tidegate) -> None:
    expected = client.create("Once upon a time", seed=1).say("Tell me.", max_tokens=20).text

    async def cut() -> str:
        async with AsyncTidegate(server.url, api_key="cut", transport=AsyncCutsStreams(1500)) as client:
            session = await client.create("Once upon a time", seed=1)
            text = "".join([piece async for piece in session.stream("Tell me.", max_tokens=20)])
            assert len(await session.turns()) == 2
            return text

    assert asyncio.run(cut()) == expected


def test_a_stream_survives_a_crash_of_the_server(start: Any) -> None:
    server = start()
    with Tidegate(server.url) as calm:
        expected = calm.create("Once upon a time", seed=1).say(prompt=" there", max_tokens=60).text

    def crash() -> None:
        server.kill()
        server.start()

    transport = CutsStreams(3, then=crash)
    with Tidegate(server.url, transport=transport) as client:
        session = client.create("Once upon a time", seed=1)
        stream = session.stream(prompt=" there", max_tokens=60)
        assert "".join(stream) == expected
        assert len(session.turns()) == 2 and session.version == session.refresh()["version"]
    assert transport.seen == ["POST /v1/completions None"] * 2


def test_a_line_separator_in_the_text_does_not_split_an_event(client: Tidegate) -> None:
    text = "fox\u2028crow\u0085hare"
    stream = client.create().stream(prompt="x", max_tokens=40, regex=text)
    assert "".join(stream) == text


def test_a_repeated_turn_with_another_text_is_an_error() -> None:
    def chunk(text: str) -> bytes:
        return f'data: {{"choices": [{{"index": 0, "text": "{text}", "finish_reason": null}}]}}\n\n'.encode()

    texts = [[chunk("a fox"), b"data: "], [chunk("a crow")]]

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, content=b"".join(texts.pop(0)))

    with Tidegate("http://server", transport=httpx.MockTransport(answer)) as client:
        with pytest.raises(tidegate.StreamDiverged):
            list(client.handle("ses").stream(prompt="x"))


def test_an_error_within_a_stream_is_raised() -> None:
    body = b'data: {"error": {"message": "the session was deleted", "type": "x", "param": null, "code": "session_deleted"}}\n\n'
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
    with Tidegate("http://server", transport=transport) as client:
        with pytest.raises(tidegate.APIError) as failed:
            list(client.handle("ses").stream(prompt="x"))
    assert failed.value.code == "session_deleted" and failed.value.status is None


def test_the_package_declares_its_types() -> None:
    assert (Path(tidegate.__file__).parent / "py.typed").is_file()


def test_waits_are_whole_seconds() -> None:
    headers = [turn("ses", "x", cast(Any, {"wait": wait})).headers["prefer"] for wait in (2, 0.5, 1_000_000)]
    assert headers == ["wait=2", "wait=1", "wait=1000000"]


def test_a_full_queue_within_a_stream_is_a_rate_limit() -> None:
    body = b'data: {"error": {"message": "full", "type": "rate_limit_error", "param": null, "code": "queue_full"}}\n\n'
    transport = httpx.MockTransport(lambda request: httpx.Response(200, content=body))
    with Tidegate("http://server", transport=transport) as client:
        with pytest.raises(tidegate.RateLimited) as failed:
            list(client.handle("ses").stream(prompt="x"))
    assert failed.value.status is None


def test_a_stream_is_iterated_over_once(server: Server, client: Tidegate) -> None:
    stream = client.create("Once upon a time").stream(prompt=" there", max_tokens=8)
    for _ in stream:
        break
    with pytest.raises(tidegate.TidegateError, match="once"):
        list(stream)

    async def twice() -> None:
        async with AsyncTidegate(server.url, api_key="twice") as other:
            stream = (await other.create("Once upon a time")).stream(prompt=" there", max_tokens=8)
            assert [piece async for piece in stream]
            with pytest.raises(tidegate.TidegateError, match="once"):
                [piece async for piece in stream]

    asyncio.run(twice())
