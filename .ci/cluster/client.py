"""A client that retries like the official OpenAI clients, and a record of what happened to its requests."""

import asyncio
import contextlib
import dataclasses
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator

import aiohttp

# Statuses that the official clients retry, besides 5xx and requests without an answer.
RETRIED = {408, 409, 429}
ATTEMPT_S = 20.0
# The official clients give up after two retries. This client has to outlast every fault.
PATIENCE_S = 180.0


class Violation(Exception):
    """Something that must never happen."""


@dataclasses.dataclass
class Fault:
    """A fault, from its beginning until service was expected again."""

    kind: str
    began: float
    ended: float = 0.0


class Record:
    """Failed attempts, successful changes, faults and violations, with their times."""

    def __init__(self, streams_survive: bool = True) -> None:
        # With the embedded index, a stream ends with its server.
        self.streams_survive = streams_survive
        self.failures: list[tuple[float, str]] = []
        self.changes: list[float] = []
        self.latencies: list[float] = []
        self.faults: list[Fault] = []
        self.violations: list[tuple[float, str]] = []
        self.counts: Counter[str] = Counter()

    def violation(self, message: str) -> None:
        self.violations.append((time.monotonic(), message))
        print(f"VIOLATION: {message}", flush=True)

    @contextlib.contextmanager
    def fault(self, kind: str):
        fault = Fault(kind, time.monotonic())
        self.faults.append(fault)
        print(f"  {kind}", flush=True)
        try:
            yield
        finally:
            fault.ended = time.monotonic()


@dataclasses.dataclass
class Answer:
    status: int
    body: dict
    headers: dict[str, str]


def parsed(text: str) -> dict:
    """Parses the JSON of an answer. HAProxy's own errors are not JSON."""
    try:
        return json.loads(text or "{}")
    except json.JSONDecodeError:
        return {"error": {"code": "from the proxy", "message": text}}


def code_of(body: dict) -> str:
    error = body.get("error", {})
    return str(error.get("code") or error.get("type"))


@dataclasses.dataclass
class Event:
    """An event of a stream."""

    number: int
    data: str


class Api:
    """Sends the requests of one owner to the cluster."""

    def __init__(self, url: str, token: str, record: Record, dice: random.Random):
        self.url, self.token, self.record, self.dice = url, token, record, dice
        self.session = aiohttp.ClientSession(
            headers={"authorization": f"Bearer {token}"}, timeout=aiohttp.ClientTimeout(total=ATTEMPT_S),
            connector=aiohttp.TCPConnector(limit=0),
        )

    async def close(self) -> None:
        await self.session.close()

    async def attempt(self, method: str, path: str, body: object = None, headers: dict | None = None) -> Answer:
        """Sends one request. Raises aiohttp's exception if there is no answer."""
        async with self.session.request(method, self.url + path, json=body, headers=headers) as answer:
            read = parsed(await answer.text())
            return Answer(answer.status, read, {name.lower(): value for name, value in answer.headers.items()})

    def failed(self, what: str, reason: str) -> None:
        self.record.failures.append((time.monotonic(), f"{what}: {reason}"))

    async def pause(self, tries: int, headers: dict[str, str]) -> None:
        """Waits like the official clients: as long as the server says, else with exponential backoff and jitter."""
        with contextlib.suppress(ValueError):
            after = float(headers.get("retry-after", ""))
            if 0 < after <= 60:
                await asyncio.sleep(after)
                return
        await asyncio.sleep(min(0.5 * 2**tries, 8.0) * (1 - 0.25 * self.dice.random()))

    @staticmethod
    def is_retried(status: int, headers: dict[str, str]) -> bool:
        says = headers.get("x-should-retry")
        return says == "true" or (says != "false" and (status in RETRIED or status >= 500))

    async def send(self, what: str, method: str, path: str, body: object = None, headers: dict | None = None) -> Answer:
        """Sends a request, with retries."""
        began, tries = time.monotonic(), 0
        while True:
            told: dict[str, str] = {}
            try:
                answer = await self.attempt(method, path, body, headers)
                if not self.is_retried(answer.status, answer.headers):
                    if answer.status < 300 and method != "GET":
                        self.record.changes.append(time.monotonic())
                        self.record.latencies.append(time.monotonic() - began)
                    return answer
                told, reason = answer.headers, f"{answer.status} {code_of(answer.body)}"
            except asyncio.TimeoutError:
                reason = "timeout"
            except (aiohttp.ClientError, OSError) as error:
                reason = type(error).__name__
            # When the same request is sent twice at once, one has to wait for the other, which is no failure.
            if (what, reason) != ("twice", "409 idempotency_key_in_use"):
                self.failed(what, reason)
            if time.monotonic() - began > PATIENCE_S:
                raise Violation(f"{what}: no success within {PATIENCE_S} s, at last {reason}")
            await self.pause(tries, told)
            tries += 1


async def events(answer: aiohttp.ClientResponse) -> AsyncIterator[Event]:
    """Yields the events of a stream. Events without a number get -1."""
    number, data = -1, []
    async for raw in answer.content:
        line = raw.decode().rstrip("\r\n")
        if line.startswith("id:"):
            number = int(line[3:])
        elif line.startswith("data:"):
            data.append(line[5:].removeprefix(" "))
        elif not line and data:
            yield Event(number, "\n".join(data))
            number, data = -1, []


class Broken(Exception):
    """A stream ended with an error or never began, so its turn has to be sent again."""

    def __init__(self, reason: str, headers: dict[str, str]):
        super().__init__(reason)
        self.headers = headers


class Later(Exception):
    """The server refuses to resume a stream for now."""

    def __init__(self, reason: str, headers: dict[str, str]):
        super().__init__(reason)
        self.headers = headers


class Refused(Exception):
    """A streamed turn got a refusal that is not retried."""

    def __init__(self, status: int, code: str):
        super().__init__(f"{status} {code}")
        self.status = status


class Stream:
    """A streamed turn. The client leaves it after each number of events in `cuts`, and resumes at the next event."""

    def __init__(self, api: Api, body: dict, headers: dict, cuts: list[int], on_cut=None):
        self.api, self.headers, self.cuts, self.on_cut = api, headers, cuts, on_cut
        self.body = {**body, "stream": True, "on_disconnect": "continue"}
        self.reset()

    def reset(self) -> None:
        self.id: str | None = None
        self.texts: list[str] = []
        self.session: dict | None = None
        self.next, self.done = 0, False

    async def run(self) -> None:
        """Reads the stream to its end. Sends the turn again, with the same idempotency key, if necessary."""
        began, tries = time.monotonic(), 0
        while not self.done:
            told: dict[str, str] = {}
            try:
                tries = 0 if await self.read() else tries + 1
                if tries == 0:
                    continue
                reason = "ended early"
            except Broken as error:
                reason, told, tries = str(error), error.headers, tries + 1
                self.reset()
            except Later as error:
                reason, told, tries = str(error), error.headers, tries + 1
            except asyncio.TimeoutError:
                reason, tries = "timeout", tries + 1
            except (aiohttp.ClientError, OSError) as error:
                reason, tries = type(error).__name__, tries + 1
            self.api.failed("resume" if self.id else "stream", reason)
            if time.monotonic() - began > PATIENCE_S:
                raise Violation(f"stream {self.id}: no success within {PATIENCE_S} s, at last {reason}")
            await self.api.pause(tries - 1, told)
        self.api.record.changes.append(time.monotonic())

    async def read(self) -> bool:
        """Reads events until the next cut or the end; returns false if the connection ended before that."""
        api, timeout = self.api, aiohttp.ClientTimeout(total=None, sock_connect=ATTEMPT_S, sock_read=ATTEMPT_S)
        if self.id is None:
            request = api.session.post(f"{api.url}/v1/completions", json=self.body, headers=self.headers, timeout=timeout)
        else:
            api.record.counts["streams resumed"] += 1
            last = {"last-event-id": str(self.next - 1)} if self.next else {}
            request = api.session.get(f"{api.url}/v1/streams/{self.id}", headers=last, timeout=timeout)
        async with request as answer:
            told = {name.lower(): value for name, value in answer.headers.items()}
            if answer.status != 200:
                await self.refused(answer, told)
            # A retry may be answered with the stored result, which is not a stream that can be resumed.
            self.id = self.id or told.get("x-stream-id")
            async for event in events(answer):
                self.take(event, told)
                if self.cuts and not self.done and self.next >= self.cuts[0]:
                    self.cuts.pop(0)
                    api.record.counts["streams cut"] += 1
                    if self.on_cut:
                        await self.on_cut()
                    return True
        if self.id is None and not self.done:
            raise Broken("ended early", told)
        return self.done

    async def refused(self, answer: aiohttp.ClientResponse, told: dict[str, str]) -> None:
        """Raises the exception for an answer that is not a stream."""
        code = code_of(parsed(await answer.text()))
        reason = f"{answer.status} {code}"
        if self.api.is_retried(answer.status, told):
            if self.id is None:
                raise Broken(reason, told)
            raise Later(reason, told)
        if self.id is None:
            raise Refused(answer.status, code)
        if self.api.record.streams_survive:
            self.api.record.violation(f"stream {self.id} is lost after event {self.next - 1}: {reason}")
        raise Broken(f"lost: {reason}", told)

    def take(self, event: Event, told: dict[str, str]) -> None:
        """Adds an event, which must be the next one."""
        if self.id is not None:
            if event.number != self.next:
                raise Violation(f"event {event.number} of stream {self.id} follows {self.next - 1}: {event.data[:200]}")
            self.next += 1
        if self.done:
            raise Violation(f"stream {self.id} goes on after its end: {event.data[:200]}")
        if event.data == "[DONE]":
            self.done = True
            return
        chunk = json.loads(event.data)
        if "error" in chunk:
            raise Broken(f"error event {chunk['error'].get('code')}", told)
        self.texts += [choice["text"] for choice in chunk["choices"]]
        self.session = chunk.get("session", self.session)

    @property
    def text(self) -> str:
        return "".join(self.texts)
