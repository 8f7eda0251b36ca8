"""The client for asyncio: `AsyncTidegate`, its sessions and their streams. `client` is its synchronous counterpart."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from itertools import count
from pathlib import Path
from types import TracebackType
from typing import Any, Self, Unpack

import httpx

from . import calls, wire
from .calls import Messages
from .errors import ConnectionFailed, NotFound
from .streaming import Progress
from .wire import Call, Json, Reply, Turn


class AsyncTidegate:
    """A server. `base_url` and `api_key` default to the environment variables TIDEGATE_BASE_URL and TIDEGATE_API_KEY."""

    def __init__(
        self,
        base_url: str | None = None,
        *,
        api_key: str | None = None,
        max_retries: int = 2,
        timeout: float | httpx.Timeout = wire.TIMEOUT,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        url, headers = wire.settings(base_url, api_key)
        self.max_retries = max_retries
        self._http = httpx.AsyncClient(base_url=url, headers=headers, timeout=timeout, transport=transport)

    async def create(
        self,
        text: str | None = None,
        *,
        tokens: list[int] | None = None,
        messages: Messages | None = None,
        version: str | None = None,
        seed: int | None = None,
        metadata: Mapping[str, str] | None = None,
        ttl_seconds: int | None = None,
        label: str | None = None,
        model: str | None = None,
    ) -> "AsyncSession":
        """Creates a session: empty, from text, tokens or messages to read first, or from a version of another session.

        `model` is one of several on the server; default: the first. A version needs the model that made it.
        """
        return self._handle(
            (
                await self.send(
                    calls.create(
                        text=text,
                        tokens=tokens,
                        messages=messages,
                        version=version,
                        seed=seed,
                        metadata=metadata,
                        ttl_seconds=ttl_seconds,
                        label=label,
                        model=model,
                    )
                )
            ).json()
        )

    async def session(self, id: str) -> "AsyncSession":
        """Returns an existing session, read from the server."""
        return self._handle((await self.send(calls.read(id))).json())

    async def sessions(
        self,
        *,
        order: str = "desc",
        metadata: Mapping[str, str] | None = None,
        label: str | None = None,
        tag: str | None = None,
        forked_from: str | None = None,
        model: str | None = None,
    ) -> AsyncIterator["AsyncSession"]:
        """Yields your sessions that match all given filters, newest first by default."""
        page: list[Json] = []
        after: str | None = None
        while True:
            filters = {"label": label, "tag": tag, "forked_from": forked_from, "model": model}
            call = calls.listing(metadata, limit=100, order=order, after=after, **filters)
            found = (await self.send(call)).json()
            # Yields a page only after fetching the next one, whose cursor is a session that the caller may delete.
            for info in page:
                yield self._handle(info)
            page, after = found["data"], found["next"]
            if after is None:
                for info in page:
                    yield self._handle(info)
                return

    async def load(self, snapshot: bytes | str | Path, *, model: str | None = None) -> "AsyncSession":
        """Creates a session from a snapshot, given as bytes or as the path of a file."""
        content = snapshot if isinstance(snapshot, bytes) else Path(snapshot).read_bytes()
        return self._handle((await self.send(calls.upload(content, model))).json())

    async def send(self, call: Call) -> httpx.Response:
        """Sends a request, retries it where that can help, and raises an error if the server answers with one."""
        for attempt in count():
            try:
                response = await self._http.request(**call.arguments())
            except httpx.TransportError as error:
                wait = wire.pause(call, attempt, self.max_retries, error)
                if wait is None:
                    raise ConnectionFailed(f"no answer from {self._http.base_url}: {error!r}") from error
            else:
                if response.is_success:
                    return response
                if call.method == "DELETE" and response.status_code == 404 and attempt > 0:
                    # An earlier attempt, whose answer was lost, has deleted it.
                    return response
                wait = wire.pause(call, attempt, self.max_retries, response)
                if wait is None:
                    raise wire.error_of(response)
            await asyncio.sleep(wait)
        raise AssertionError("unreachable")

    def handle(self, id: str, version: str = "") -> "AsyncSession":
        """Returns a handle to an existing session, without a request to the server."""
        return self._handle({"id": id, "version": version})

    def _handle(self, info: Json) -> "AsyncSession":
        return AsyncSession(self, info)

    async def close(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


class AsyncSession:
    """A conversation that the server keeps. `version` is the latest version that this client has seen."""

    def __init__(self, client: AsyncTidegate, info: Json) -> None:
        self._client = client
        self.info = info
        self.id: str = info["id"]
        self.version: str = info["version"]

    async def _update(self, call: Call) -> Json:
        self.info = (await self._client.send(call)).json()
        self.version = self.info["version"]
        return self.info

    async def _part(self, what: str, **params: Any) -> Json:
        answer: Json = (await self._client.send(calls.part(self.id, what, **params))).json()
        return answer

    async def say(self, text: str | None = None, **options: Unpack[Turn]) -> Reply:
        """Says `text` and returns the answer. `prompt=` continues plain text; with neither, the last answer continues."""
        reply = wire.reply((await self._client.send(wire.turn(self.id, text, options))).json())
        self.version = reply.version
        return reply

    def stream(self, text: str | None = None, **options: Unpack[Turn]) -> "AsyncStream":
        """Like `say`, but streams the answer. The stream survives disconnects and restarts of the server.

        A planned restart or `--max-seconds` may end the answer early, with the finish reason `length`; `say()` continues it.
        """
        return AsyncStream(self._client, self, wire.turn(self.id, text, options, stream=True))

    async def best_of(self, n: int, text: str | None = None, **options: Unpack[Turn]) -> Reply:
        """Like `say`, but generates `n` answers at once and keeps the one with the highest log probability per token."""
        reply = wire.reply((await self._client.send(wire.turn(self.id, text, options, n=n, keep="best"))).json())
        self.version = reply.version
        return reply

    async def append(
        self,
        text: str | None = None,
        *,
        tokens: list[int] | None = None,
        messages: Messages | None = None,
        label: str | None = None,
    ) -> int:
        """Appends text without generating an answer; returns the number of tokens read."""
        info = await self._update(calls.append(self.id, text=text, tokens=tokens, messages=messages, label=label))
        return int(info["appended_tokens"])

    async def fork(
        self, n: int = 1, *, version: str | None = None, metadata: Mapping[str, str] | None = None
    ) -> list["AsyncSession"]:
        """Creates `n` independent copies of the current version, or of another one."""
        answer = (await self._client.send(calls.fork(self.id, n=n, version=version, metadata=metadata))).json()
        return [AsyncSession(self._client, info) for info in answer["data"]]

    async def rewind(self, version: str) -> None:
        """Moves the session back to a version, given by its id or a tag. Later turns stay in `turns`."""
        await self._update(calls.rewind(self.id, version))

    async def save(self, path: str | Path, *, version: str | None = None) -> None:
        """Writes the conversation to a file that any server with the same model can load."""
        Path(path).write_bytes(await self.snapshot(version))

    async def snapshot(self, version: str | None = None) -> bytes:
        """Returns the bytes that `save` writes."""
        return (await self._client.send(calls.snapshot(self.id, version))).content

    async def load(self, snapshot: bytes | str | Path, *, model: str | None = None) -> None:
        """Continues from a snapshot, given as bytes or as the path of a file. The turns so far stay in `turns`.

        `model` is that of the session, if it is not the server's first.
        """
        loaded = await self._client.load(snapshot, model=model)
        try:
            await self.rewind(loaded.version)
        finally:
            await loaded.delete()

    async def text(self, *, version: str | None = None, start: int | None = None, end: int | None = None) -> str:
        """Returns the text of the conversation, or only of its tokens from `start` up to but not including `end`."""
        return str((await self._part("text", version=version, start=start, end=end))["text"])

    async def tokens(self, *, version: str | None = None, start: int | None = None, end: int | None = None) -> list[int]:
        """Returns the conversation as token ids."""
        return list((await self._part("tokens", version=version, start=start, end=end))["tokens"])

    async def messages(self, *, version: str | None = None, start: int | None = None, end: int | None = None) -> list[Json]:
        """Returns the conversation as messages, each with the version that added it."""
        return list((await self._part("messages", version=version, start=start, end=end))["data"])

    async def turns(self) -> list[Json]:
        """Returns all versions, oldest first."""
        return list((await self._part("turns"))["data"])

    async def lineage(self, *, version: str | None = None, other: str | None = None) -> Json:
        """Returns a version's ancestors, across forks; with `other` (a session or version), also their common ancestor."""
        return await self._part("lineage", version=version, **({} if other is None else {"with": other}))

    async def diff(self, from_: str, to: str | None = None) -> Json:
        """Compares two texts word by word. Each is given as a version, a tag or a session; `to` defaults to the head."""
        return await self._part("diff", **{"from": from_}, to=to)

    async def tags(self) -> list[Json]:
        """Returns the tags, which are names of versions."""
        return list((await self._client.send(calls.tags(self.id))).json()["data"])

    async def tag(self, name: str, version: str | None = None) -> None:
        """Tags a version, by default the current one. The server keeps tagged versions."""
        await self._client.send(calls.tag(self.id, name, version or self.version or None))

    async def untag(self, name: str) -> None:
        """Removes a tag."""
        await self._client.send(calls.untag(self.id, name))

    async def update(self, **fields: Any) -> Json:
        """Changes `metadata`, `ttl_seconds` (None: no expiry) or `label`."""
        return await self._update(calls.patch(self.id, fields))

    async def refresh(self) -> Json:
        """Reads the session from the server again."""
        return await self._update(calls.read(self.id))

    async def delete(self) -> None:
        """Deletes the session. Its forks stay."""
        await self._client.send(calls.delete(self.id))


class AsyncStream:
    """The answer of a turn, as it is generated. Iterate over it once for the text; `reply` then has the result.

    Leaving a `with` block early ends the turn and keeps the text so far. If a stream is only dropped, its turn runs on.
    """

    def __init__(self, client: AsyncTidegate, session: AsyncSession, call: Call) -> None:
        self._client = client
        self._session = session
        self._progress = Progress(call)

    @property
    def text(self) -> str:
        """The text so far."""
        return self._progress.text

    @property
    def reply(self) -> Reply:
        """The result of the turn. Raises an error until the stream has ended."""
        return self._progress.reply()

    async def __aiter__(self) -> AsyncIterator[str]:
        progress, client, attempt = self._progress, self._client, 0
        progress.begin()
        while not progress.done:
            call = progress.call
            try:
                async with client._http.stream(**call.arguments()) as response:
                    if not response.is_success:
                        await response.aread()
                        wait = (
                            0.0
                            if progress.refused(response.status_code)
                            else wire.pause(call, attempt, client.max_retries, response)
                        )
                        if wait is None:
                            raise wire.error_of(response)
                    else:
                        progress.opened(response)
                        async for chunk in response.aiter_bytes():
                            for piece in progress.feed(chunk):
                                attempt = 0
                                yield piece
                        if progress.done:
                            break
                        raise httpx.RemoteProtocolError("the stream ended early")
            except httpx.TransportError as error:
                wait = wire.pause(call, attempt, client.max_retries, error)
                if wait is None:
                    raise ConnectionFailed(f"the stream broke: {error!r}") from error
                progress.broken()
            attempt += 1
            await asyncio.sleep(wait)
        self._session.version = self.reply.version

    async def close(self) -> None:
        """Ends the turn with the text so far, if it is still running."""
        if not self._progress.done and self._progress.stream_id is not None:
            try:
                await self._client.send(calls.end_stream(self._progress.stream_id))
            except NotFound:
                pass

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()
