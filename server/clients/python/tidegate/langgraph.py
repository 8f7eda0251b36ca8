"""LangGraph: a checkpointer that stores its checkpoints on the server, so that a graph continues wherever it can reach it.

The server stores conversations, not files. A checkpoint is therefore stored as sessions of its own: copies of the
conversation's current version, with the graph's state in their metadata, compressed and split into as many parts as needed.
Such copies take no space, and they keep the version from being deleted, so a graph that goes back to an old checkpoint
finds the model's state there. Checkpoints are as durable as turns: once `put` has returned, they survive a SIGKILL of the
server and the client.

The server's list of sessions includes their metadata and can be filtered by thread. A saver reads a thread's list once, and
then only the sessions added since, unless a session was deleted or has expired, or the cache has evicted the thread.
"""

import asyncio
import threading
import time
import uuid
import zlib
from base64 import b85decode, b85encode
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from langchain_core.messages import BaseMessage
from langchain_core.runnables import RunnableConfig
from langgraph.checkpoint.base import (
    WRITES_IDX_MAP,
    BaseCheckpointSaver,
    ChannelVersions,
    Checkpoint,
    CheckpointMetadata,
    CheckpointTuple,
    get_checkpoint_id,
    get_checkpoint_metadata,
    writes_sort_key,
)
from langgraph.checkpoint.serde.base import SerializerProtocol

from . import calls
from .client import Tidegate
from .errors import NotFound
from .langchain import mark_of
from .wire import Json

# The server's limits on metadata: 16 pairs, values of 512 characters. Four pairs say what the session holds.
_PARTS = 12
_CHARACTERS = 512
_KEYS = ("langgraph", "thread", "namespace", "checkpoint")

# Approximate memory of a session besides its metadata, in bytes.
_SESSION = 2048

# Thread, namespace and checkpoint.
_Place = tuple[str, str, str]


@dataclass
class _Record:
    """A checkpoint, or the writes of a task. It is complete once all its sessions are known."""

    thread: str
    namespace: str
    checkpoint: str
    # The kind (`checkpoint` or `writes`), the number of sessions, and the name of the serialization.
    kind: str
    count: int
    type: str
    sessions: dict[int, Json] = field(default_factory=dict)

    def value(self, serde: SerializerProtocol) -> Any:
        pieces = (self.sessions[i]["metadata"] for i in range(self.count))
        text = "".join(piece[key] for piece in pieces for key in sorted(piece) if key not in _KEYS)
        return serde.loads_typed((self.type, zlib.decompress(b85decode(text))))


class _Known:
    """The known sessions that hold checkpoints, of one thread or of all threads."""

    def __init__(self) -> None:
        self.records: dict[str, _Record] = {}
        # Ids of complete records by place, oldest first.
        self.places: dict[_Place, list[str]] = {}
        # Id of the session that was read last.
        self.last: str | None = None
        # Approximate memory of the sessions, in bytes.
        self.size = 0

    def add(self, session: Json) -> bool:
        """Adds a session if it holds a checkpoint or writes; returns whether it does."""
        metadata = session["metadata"]
        about = metadata.get("langgraph", "").split(" ", 4)
        if len(about) != 5 or not all(key in metadata for key in _KEYS):
            # Another session of the same owner.
            return False
        kind, id, part, count, type = about
        place = (metadata["thread"], metadata["namespace"], metadata["checkpoint"])
        record = self.records.setdefault(id, _Record(*place, kind, int(count), type))
        if int(part) not in record.sessions:
            self.size += _SESSION + sum(len(key) + len(value) for key, value in metadata.items())
        record.sessions[int(part)] = session
        if len(record.sessions) == int(count) and id not in self.places.setdefault(place, []):
            self.places[place].append(id)
        return True

    def copy(self) -> "_Known":
        """Returns a copy to which later sessions are not added."""
        copy = _Known()
        copy.records, copy.places = dict(self.records), {place: [*ids] for place, ids in self.places.items()}
        return copy

    def expired(self) -> bool:
        """Whether a session has expired by this machine's clock. The server goes by its own clock."""
        expiries = (session.get("expires") for record in self.records.values() for session in record.sessions.values())
        return any(expires is not None and expires <= time.time() for expires in expiries)

    def at(self, place: _Place) -> Sequence[_Record]:
        """Returns the complete records at a place."""
        return [self.records[id] for id in self.places.get(place, [])]

    def newest_first(self, thread: str | None, namespace: str | None) -> Sequence[_Place]:
        """Returns the places that have a complete checkpoint, newest first."""
        matching = (
            place
            for place in self.places
            if thread in (None, place[0])
            and namespace in (None, place[1])
            and any(record.kind == "checkpoint" for record in self.at(place))
        )
        return sorted(matching, key=lambda place: place[2], reverse=True)


class TidegateSaver(BaseCheckpointSaver[str]):
    """A checkpointer on a Tidegate server, which any number of threads of a program may share.

    If the server has several models, `model` names the one that the graph talks to: versions belong to a model, and so do
    the sessions with the checkpoints. With `ttl_seconds`, checkpoints are deleted that long after they were written. The
    saver caches about `cache_bytes` of what it has read and written; it evicts the least recently used LangGraph threads
    and reads them again when needed.
    """

    def __init__(
        self,
        client: Tidegate,
        *,
        model: str | None = None,
        ttl_seconds: int | None = None,
        cache_bytes: int = 64 << 20,
        serde: SerializerProtocol | None = None,
    ) -> None:
        super().__init__(serde=serde)
        self._client = client
        self._model = model
        self._ttl = ttl_seconds
        self._cache_bytes = cache_bytes
        # Held while the cache changes, never during a request to the server.
        self._lock = threading.Lock()
        # The cache by LangGraph thread, least recently used first.
        self._threads: OrderedDict[str, _Known] = OrderedDict()
        self._size = 0
        # A version without text, if one is known.
        self._blank: str | None = None

    def _read(self, thread: str | None) -> _Known:
        """Returns what the server has of a thread, or of all threads (None). Reads only new sessions of a cached thread."""
        while True:
            with self._lock:
                known = None if thread is None else self._threads.get(thread)
                if known is not None and known.expired():
                    known = None
                after = None if known is None else known.last
            sessions = self._sessions(thread, after)
            with self._lock:
                current = None if thread is None else self._threads.get(thread)
                if sessions is None:
                    # The session that was read last was deleted, and perhaps others: start over.
                    if thread is not None and current is known:
                        self._forget(thread)
                    continue
                if known is None or after is None:
                    # After a full read, nothing is kept of the cache: what it holds may have been deleted by now.
                    known = _Known()
                elif current is not known:
                    # Meanwhile the cache entry was evicted, forgotten or replaced.
                    continue
                if thread is None:
                    for session in sessions:
                        known.add(session)
                    return known
                self._store(thread, known, sessions)
                if sessions:
                    known.last = sessions[-1]["id"]
                return known.copy()

    def _sessions(self, thread: str | None, after: str | None) -> Sequence[Json] | None:
        """Returns the sessions of a thread, or of all threads (None), after session `after`; None if it was deleted."""
        wanted = None if thread is None else {"thread": thread}
        sessions: list[Json] = []
        while True:
            try:
                page = self._client.send(calls.listing(wanted, limit=100, order="asc", after=after, model=self._model)).json()
            except NotFound:
                return None
            sessions += page["data"]
            after = page["next"]
            if after is None:
                return sessions

    def _store(self, thread: str, known: _Known, sessions: Iterable[Json]) -> None:
        """Adds sessions to a thread's cache and makes it the most recently used one. The caller holds the lock."""
        self._forget(thread)
        for session in sessions:
            if known.add(session) and session["tokens"] == 0:
                self._blank = session["version"]
        self._threads[thread] = known
        self._size += known.size
        while self._size > self._cache_bytes:
            self._size -= self._threads.popitem(last=False)[1].size

    def _forget(self, thread: str) -> None:
        """Removes a thread from the cache. The caller holds the lock."""
        known = self._threads.pop(thread, None)
        if known is not None:
            self._size -= known.size

    def _write(self, place: _Place, kind: str, value: Any, version: str | None) -> None:
        type, data = self.serde.dumps_typed(value)
        text = b85encode(zlib.compress(data)).decode()
        pieces = [text[i : i + _CHARACTERS] for i in range(0, len(text), _CHARACTERS)]
        parts = [pieces[i : i + _PARTS] for i in range(0, len(pieces), _PARTS)]
        id = uuid.uuid4().hex
        for number, part in enumerate(parts):
            about = dict(zip(_KEYS, (f"{kind} {id} {number} {len(parts)} {type}", *place), strict=True))
            session = self._create(version, {**about, **{f"{i:02}": piece for i, piece in enumerate(part)}})
            with self._lock:
                self._store(place[0], self._threads.get(place[0]) or _Known(), [session])
            version = session["version"]

    def _create(self, version: str | None, metadata: dict[str, str]) -> Json:
        """Creates a session at `version`; if that is not possible, an empty one."""
        for start in (version, self._blank):
            if start is None:
                continue
            try:
                return self._client.create(version=start, metadata=metadata, ttl_seconds=self._ttl, model=self._model).info
            except NotFound:
                # The version is no longer kept. A turn from this checkpoint will read the conversation again.
                pass
        return self._client.create(metadata=metadata, ttl_seconds=self._ttl, model=self._model).info

    def put(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Stores a checkpoint, at the version of the last answer that it contains."""
        thread, namespace, parent = _place(config)
        value = {"checkpoint": checkpoint, "metadata": get_checkpoint_metadata(config, metadata), "parent": parent}
        self._write((thread, namespace, checkpoint["id"]), "checkpoint", value, _version(checkpoint))
        return _config(thread, namespace, checkpoint["id"])

    def put_writes(self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = "") -> None:
        """Stores the writes that a task has made before the next checkpoint."""
        thread, namespace, checkpoint = _place(config)
        numbered = [(WRITES_IDX_MAP.get(channel, index), channel, value) for index, (channel, value) in enumerate(writes)]
        value = {"task": task_id, "path": task_path, "writes": numbered}
        place = (thread, namespace, checkpoint or "")
        self._write(place, "writes", value, self._version_at(place))

    def _version_at(self, place: _Place) -> str | None:
        with self._lock:
            known = self._threads.get(place[0])
            for record in known.at(place) if known else ():
                return str(record.sessions[0]["version"])
        return None

    def get_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Returns the checkpoint that the config names, or the latest of its thread."""
        thread, namespace, checkpoint = _place(config)
        known = self._read(thread)
        for place in known.newest_first(thread, namespace):
            if checkpoint is None or place[2] == checkpoint:
                return self._tuple(known, place)
        return None

    def list(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> Iterator[CheckpointTuple]:
        """Yields the matching checkpoints, newest first."""
        configurable = config["configurable"] if config else {}
        thread = None if configurable.get("thread_id") is None else str(configurable["thread_id"])
        only, end = configurable.get("checkpoint_id"), get_checkpoint_id(before) if before else None
        known = self._read(thread)
        for place in known.newest_first(thread, configurable.get("checkpoint_ns")):
            if (only and place[2] != only) or (end and place[2] >= end):
                continue
            found = self._tuple(known, place)
            if found is None or any(found.metadata.get(key) != wanted for key, wanted in (filter or {}).items()):
                continue
            if limit is not None:
                limit -= 1
                if limit < 0:
                    return
            yield found

    def _tuple(self, known: _Known, place: _Place) -> CheckpointTuple | None:
        thread, namespace, id = place
        stored: Json | None = None
        writes: dict[tuple[str, int], tuple[tuple[str, str, int], str, Any]] = {}
        for record in known.at(place):
            value = record.value(self.serde)
            if record.kind == "checkpoint":
                stored = value
                continue
            for index, channel, written in value["writes"]:
                # The first write at an index stays. Special writes (errors, interrupts, resumes) have negative indexes and
                # are replaced by later ones.
                if index < 0 or (value["task"], index) not in writes:
                    order = writes_sort_key(value["path"], value["task"], index)
                    writes[value["task"], index] = (order, channel, written)
        if stored is None:
            return None
        ordered = sorted(writes.items(), key=lambda item: item[1][0])
        return CheckpointTuple(
            config=_config(thread, namespace, id),
            checkpoint=stored["checkpoint"],
            metadata=stored["metadata"],
            parent_config=_config(thread, namespace, stored["parent"]) if stored["parent"] else None,
            pending_writes=[(task, channel, written) for (task, _), (_, channel, written) in ordered],
        )

    def delete_thread(self, thread_id: str) -> None:
        """Deletes a thread's checkpoints. The conversation's own session stays."""
        thread = str(thread_id)
        for record in self._read(thread).records.values():
            # Deletes the first part first, so that a crash in between leaves the record incomplete.
            for number in sorted(record.sessions):
                try:
                    self._client.send(calls.delete(record.sessions[number]["id"]))
                except NotFound:
                    pass
        with self._lock:
            self._forget(thread)

    async def aget_tuple(self, config: RunnableConfig) -> CheckpointTuple | None:
        """Runs `get_tuple` in a worker thread."""
        return await asyncio.to_thread(self.get_tuple, config)

    async def alist(
        self,
        config: RunnableConfig | None,
        *,
        filter: dict[str, Any] | None = None,
        before: RunnableConfig | None = None,
        limit: int | None = None,
    ) -> AsyncIterator[CheckpointTuple]:
        """Runs `list` in a worker thread."""
        found = await asyncio.to_thread(lambda: [*self.list(config, filter=filter, before=before, limit=limit)])
        for item in found:
            yield item

    async def aput(
        self,
        config: RunnableConfig,
        checkpoint: Checkpoint,
        metadata: CheckpointMetadata,
        new_versions: ChannelVersions,
    ) -> RunnableConfig:
        """Runs `put` in a worker thread."""
        return await asyncio.to_thread(self.put, config, checkpoint, metadata, new_versions)

    async def aput_writes(
        self, config: RunnableConfig, writes: Sequence[tuple[str, Any]], task_id: str, task_path: str = ""
    ) -> None:
        """Runs `put_writes` in a worker thread."""
        await asyncio.to_thread(self.put_writes, config, writes, task_id, task_path)

    async def adelete_thread(self, thread_id: str) -> None:
        """Runs `delete_thread` in a worker thread."""
        await asyncio.to_thread(self.delete_thread, thread_id)

    def get_next_version(self, current: str | None, channel: None) -> str:
        """Returns the next version of a channel, with a random part, because branches may reach the same number."""
        number = 0 if current is None else int(str(current).split(".")[0])
        return f"{number + 1:032}.{uuid.uuid4().int % 10**16:016}"


def _place(config: RunnableConfig) -> tuple[str, str, str | None]:
    configurable = config["configurable"]
    return str(configurable["thread_id"]), configurable.get("checkpoint_ns", ""), get_checkpoint_id(config)


def _config(thread: str, namespace: str, checkpoint: str) -> RunnableConfig:
    return {"configurable": {"thread_id": thread, "checkpoint_ns": namespace, "checkpoint_id": checkpoint}}


def _version(checkpoint: Checkpoint) -> str | None:
    """Returns the server's version of the last answer in a graph's state, or None."""
    for value in checkpoint["channel_values"].values():
        for message in reversed(value if isinstance(value, list) else []):
            mark = mark_of(message) if isinstance(message, BaseMessage) else None
            if mark:
                return mark["version"]
    return None
