"""Transports that lose answers: the server has done its work, but the client never learns of it."""

from collections.abc import AsyncIterator, Callable, Iterator

import httpx

Hook = Callable[[], None]


class LosesAnswers(httpx.HTTPTransport):
    """Drops the answers to the first `count` requests that `chosen` selects."""

    def __init__(self, chosen: Callable[[httpx.Request], bool], count: int = 1) -> None:
        super().__init__()
        self.chosen, self.left, self.seen = chosen, count, list[httpx.Request]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if self.chosen(request):
            self.seen.append(request)
            if self.left > 0:
                self.left -= 1
                response.read()
                raise httpx.ReadError("the answer is lost", request=request)
        return response


class _Cut(httpx.SyncByteStream):
    def __init__(self, stream: httpx.SyncByteStream, events: int, then: Hook) -> None:
        self.stream, self.events, self.then = stream, events, then

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self.stream:
            whole = chunk.split(b"\n\n")
            if len(whole) > self.events:
                # Cuts in the middle of an event.
                yield b"\n\n".join(whole[: self.events]) + b"\n\n" + whole[self.events][:7]
                self.stream.close()
                self.then()
                raise httpx.ReadError("cut")
            self.events -= len(whole) - 1
            yield chunk

    def close(self) -> None:
        self.stream.close()


class CutsStreams(httpx.HTTPTransport):
    """Cuts each stream after the given number of events, one number per stream. Calls `then` at each cut."""

    def __init__(self, *events: int, then: Hook = lambda: None) -> None:
        super().__init__()
        self.events, self.then, self.seen = list(events), then, list[str]()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        response = super().handle_request(request)
        if "event-stream" in response.headers.get("content-type", ""):
            self.seen.append(f"{request.method} {request.url.path.rsplit('_', 1)[0]} {request.headers.get('last-event-id')}")
            if self.events:
                assert isinstance(response.stream, httpx.SyncByteStream)
                response.stream = _Cut(response.stream, self.events.pop(0), self.then)
        return response


class AsyncCutsStreams(httpx.AsyncHTTPTransport):
    """Cuts the first stream of an asyncio client after `bytes` bytes."""

    def __init__(self, bytes: int) -> None:
        super().__init__()
        self.bytes = bytes

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        response = await super().handle_async_request(request)
        if "event-stream" in response.headers.get("content-type", "") and self.bytes:
            assert isinstance(response.stream, httpx.AsyncByteStream)
            response.stream = _AsyncCut(response.stream, self.bytes)
            self.bytes = 0
        return response


class _AsyncCut(httpx.AsyncByteStream):
    def __init__(self, stream: httpx.AsyncByteStream, bytes: int) -> None:
        self.stream, self.bytes = stream, bytes

    async def __aiter__(self) -> AsyncIterator[bytes]:
        async for chunk in self.stream:
            yield chunk[: self.bytes]
            self.bytes -= len(chunk)
            if self.bytes <= 0:
                raise httpx.ReadError("cut")

    async def aclose(self) -> None:
        await self.stream.aclose()
