"""Builds the requests of the session routes. `wire.turn` builds the request of a turn."""

from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

from .wire import Call, present

Messages = Sequence[Mapping[str, Any]]


def _session(id: str, rest: str = "") -> str:
    return f"/v1/sessions/{quote(id, safe='')}{rest}"


def _tag(id: str, name: str) -> str:
    return _session(id, f"/tags/{quote(name, safe='')}")


def create(**fields: Any) -> Call:
    return Call("POST", "/v1/sessions", present(**fields)).with_key()


def listing(metadata: Mapping[str, str] | None = None, **params: Any) -> Call:
    wanted = {f"metadata[{key}]": value for key, value in (metadata or {}).items()}
    return Call("GET", "/v1/sessions", params={**present(**params), **wanted})


def upload(snapshot: bytes, model: str | None = None) -> Call:
    # This route does not support idempotency keys.
    return Call("POST", "/v1/snapshots", content=snapshot, params=present(model=model), repeatable=False)


def read(id: str) -> Call:
    return Call("GET", _session(id))


def patch(id: str, fields: Mapping[str, Any]) -> Call:
    return Call("PATCH", _session(id), dict(fields))


def delete(id: str) -> Call:
    return Call("DELETE", _session(id))


def append(id: str, **fields: Any) -> Call:
    return Call("POST", _session(id, "/append"), present(**fields)).with_key()


def fork(id: str, **fields: Any) -> Call:
    return Call("POST", _session(id, "/fork"), present(**fields)).with_key()


def rewind(id: str, version: str) -> Call:
    return Call("POST", _session(id, "/rewind"), {"version": version})


def snapshot(id: str, version: str | None) -> Call:
    return Call("GET", _session(id, "/snapshot"), params=present(version=version))


def part(id: str, what: str, **params: Any) -> Call:
    """Reads one part of a session: its turns, text, tokens, messages, lineage or diff."""
    return Call("GET", _session(id, f"/{what}"), params=present(**params))


def tags(id: str) -> Call:
    return Call("GET", _session(id, "/tags"))


def tag(id: str, name: str, version: str | None) -> Call:
    return Call("PUT", _tag(id, name), present(version=version))


def untag(id: str, name: str) -> Call:
    return Call("DELETE", _tag(id, name))


def end_stream(id: str) -> Call:
    return Call("DELETE", f"/v1/streams/{quote(id, safe='')}")
