"""Requests and answers as values, without I/O. The synchronous and the asyncio client share this module."""

import math
import os
import random
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypedDict

import httpx

from .errors import APIError, api_error

Json = dict[str, Any]

# An answer may take long to generate, so only connecting is expected to be quick.
TIMEOUT = httpx.Timeout(600, connect=5)
_RETRIED = {408, 409, 429, 500, 502, 503, 504}
# Statuses after which the server has certainly done nothing.
_REFUSED_EARLY = {409, 429, 503}
_LONGEST_WAIT = 60.0


class Turn(TypedDict, total=False):
    """Options of a turn. Other request fields of the server go into `extra`."""

    messages: Sequence[Mapping[str, Any]]
    prompt: str
    model: str
    max_tokens: int
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    seed: int
    stop: str | Sequence[str]
    regex: str
    response_format: Json
    tools: Sequence[Mapping[str, Any]]
    tool_choice: str | Json
    label: str
    on_disconnect: str
    # Seconds to wait for a session in use; fractions are rounded up.
    wait: int
    if_version: str
    idempotency_key: str
    extra: Mapping[str, Any]


@dataclass(frozen=True)
class Call:
    """One HTTP request."""

    method: str
    path: str
    body: Json | None = None
    content: bytes | None = None
    params: Mapping[str, str | int] | None = None
    headers: Mapping[str, str] = field(default_factory=dict)
    # Whether the request is idempotent: sending it twice has the same effect as sending it once.
    repeatable: bool = True

    def with_key(self, key: str | None = None) -> "Call":
        """Returns the same request with an idempotency key."""
        return replace(self, headers={**self.headers, "idempotency-key": key or f"py-{uuid.uuid4()}"})

    def arguments(self) -> dict[str, Any]:
        """Returns the arguments of `httpx.Client.request`."""
        headers = dict(self.headers)
        if self.content is not None:
            headers["content-type"] = "application/octet-stream"
        arguments: dict[str, Any] = {"method": self.method, "url": self.path, "headers": headers}
        if self.params:
            arguments["params"] = self.params
        if self.body is not None:
            arguments["json"] = self.body
        if self.content is not None:
            arguments["content"] = self.content
        return arguments


@dataclass(frozen=True)
class Reply:
    """The result of a turn, sent after the server has committed it."""

    text: str
    finish_reason: str | None
    # The session, its new version, and the version that the turn started from.
    session: str
    version: str
    parent: str | None
    # Token counts: the whole conversation, its new input, and the answer.
    tokens: int
    prompt_tokens: int
    completion_tokens: int
    # With `best_of`: the mean log probability per token of the text that was kept.
    mean_logprob: float | None
    tool_calls: list[Json]
    # The server's JSON answer; for a stream, its last events merged.
    raw: Json


def present(**fields: Any) -> Json:
    """Returns the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def settings(base_url: str | None, api_key: str | None) -> tuple[str, dict[str, str]]:
    """Returns the base URL and the headers of a client, with defaults from the environment."""
    url = base_url or os.environ.get("TIDEGATE_BASE_URL") or "http://127.0.0.1:8080"
    key = api_key or os.environ.get("TIDEGATE_API_KEY")
    return url.rstrip("/").removesuffix("/v1"), {"authorization": f"Bearer {key}"} if key else {}


def turn(session: str, text: str | None, options: Turn, *, stream: bool = False, **more: Any) -> Call:
    """Builds a turn: `text` is a user message, `prompt` is read verbatim; with no new input, the last answer continues."""
    given = {"text": text, "prompt": options.get("prompt"), "messages": options.get("messages")}
    if sum(value is not None for value in given.values()) > 1:
        raise ValueError("give one of text, messages and prompt")
    fields = dict(options)
    wait = options.get("wait")
    fields.pop("wait", None)
    if_version, key = fields.pop("if_version", None), fields.pop("idempotency_key", None)
    extra = fields.pop("extra", {})
    body = {**present(**fields), **dict(extra), **more, "session": session}  # type: ignore[call-overload]
    if text is not None:
        body["messages"] = [{"role": "user", "content": text}]
    if stream:
        body = {"on_disconnect": "continue", **body, "stream": True, "stream_options": {"include_usage": True}}
    headers = present(prefer=None if wait is None else f"wait={math.ceil(wait)}", **{"if-match": if_version})
    path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
    return Call("POST", path, body, headers=headers).with_key(str(key) if key else None)


def reply(answer: Json) -> Reply:
    """Converts the answer to a turn into a `Reply`."""
    session, usage = answer["session"], answer.get("usage") or {}
    # If there are several texts, the one that became the new version.
    choice = next(choice for choice in answer["choices"] if choice["index"] == session.get("chosen", 0))
    message = choice.get("message") or {}
    return Reply(
        text=choice["text"] if "text" in choice else message.get("content") or "",
        finish_reason=choice.get("finish_reason"),
        session=session["id"],
        version=session["version"],
        parent=session.get("parent"),
        tokens=session.get("tokens", 0),
        prompt_tokens=usage.get("prompt_tokens", 0),
        completion_tokens=usage.get("completion_tokens", 0),
        mean_logprob=choice.get("mean_logprob"),
        tool_calls=message.get("tool_calls") or [],
        raw=answer,
    )


def error_of(response: httpx.Response) -> APIError:
    """Returns the error that a response describes. The body must have been read."""
    try:
        body = response.json()
    except ValueError:
        body = {"error": {"message": response.text[:500]}}
    return api_error(response.status_code, body, response.headers.get("x-request-id"))


def pause(call: Call, attempt: int, retries: int, failure: httpx.Response | httpx.TransportError) -> float | None:
    """Returns the seconds to wait before the next attempt, or None if a retry cannot help or could repeat an effect."""
    if attempt >= retries:
        return None
    backoff = min(0.5 * 2.0**attempt, 8.0) * random.uniform(0.75, 1.0)
    if isinstance(failure, httpx.TransportError):
        unsent = isinstance(failure, (httpx.ConnectError, httpx.ConnectTimeout, httpx.PoolTimeout))
        return backoff if call.repeatable or unsent else None
    status = failure.status_code
    if failure.headers.get("x-should-retry") == "false" or status not in _RETRIED:
        return None
    if not call.repeatable and status not in _REFUSED_EARLY:
        return None
    try:
        wait = float(failure.headers.get("retry-after", ""))
    except ValueError:
        return backoff
    # Jitter on top, so that clients that were refused together do not all return together.
    return wait + random.uniform(0, 0.25) if 0 <= wait <= _LONGEST_WAIT else backoff
