"""The progress of a stream, without I/O: which text is new, and how to resume after a disconnect."""

import json
from collections.abc import Iterator

import httpx

from .errors import StreamDiverged, TidegateError, api_error
from .wire import Call, Json, Reply, reply


class Progress:
    """What has arrived of a streamed turn. `call` is the request that fetches the rest."""

    def __init__(self, call: Call) -> None:
        self.call = call
        self.text = ""
        self.done = False
        self.stream_id: str | None = None
        self._turn = call
        self._begun = False
        # Ids of the last complete event and of the event that is being read.
        self._last_event: str | None = None
        self._event_id: str | None = None
        # Position of the current response in `text`; less than its length while a turn repeats from its beginning.
        self._place = 0
        self._buffer = b""
        self._tools: dict[int, Json] = {}
        self._answer: Json = {}

    def begin(self) -> None:
        """Raises an error on a second iteration, which would begin in the middle of the text."""
        if self._begun:
            raise TidegateError("a stream can be iterated over once; `text` has what has arrived")
        self._begun = True

    def opened(self, response: httpx.Response) -> None:
        """Notes that a response has begun."""
        self._buffer, self._event_id = b"", None
        self.stream_id = response.headers.get("x-stream-id", self.stream_id)

    def broken(self) -> None:
        """Prepares to resume after a lost connection. The server keeps the events of the stream and continues the turn."""
        if self.stream_id is not None:
            headers = {} if self._last_event is None else {"last-event-id": self._last_event}
            self.call = Call("GET", f"/v1/streams/{self.stream_id}", headers=headers)
        else:
            self._place = 0

    def refused(self, status: int) -> bool:
        """Returns whether to send the turn again after an error: the stream is gone, for example after a server restart.

        The idempotency key makes this safe: a committed turn is repeated from its record, any other runs again.
        """
        if self.stream_id is None or status not in (404, 410):
            return False
        self.call, self.stream_id, self._last_event, self._place = self._turn, None, None, 0
        return True

    def feed(self, chunk: bytes) -> Iterator[str]:
        """Reads bytes and yields the text that is new.

        Splits lines at line feeds only. httpx would also split at U+2028, which JSON may contain.
        """
        *lines, self._buffer = (self._buffer + chunk).split(b"\n")
        for line in lines:
            name, _, value = line.rstrip(b"\r").decode().partition(":")
            value = value.removeprefix(" ")
            if name == "id":
                self._event_id = value
            elif name == "data":
                yield from self._event(value)
                self._last_event = self._event_id

    def _event(self, data: str) -> Iterator[str]:
        if data == "[DONE]":
            self.done = True
            return
        event = json.loads(data)
        if "error" in event:
            raise api_error(None, event)
        self._answer.update({name: value for name, value in event.items() if name != "choices" and value is not None})
        for choice in event.get("choices", []):
            delta = choice.get("delta") or {}
            if choice.get("finish_reason"):
                self._answer["choices"] = [choice]
            self._merge_tools(delta.get("tool_calls") or [])
            piece = self._unseen(choice.get("text") or delta.get("content") or "")
            if piece:
                yield piece

    def _unseen(self, piece: str) -> str:
        seen = self.text[self._place : self._place + len(piece)]
        if not piece.startswith(seen):
            raise StreamDiverged(f"the repeated turn has {piece!r} where {seen!r} was read")
        self._place += len(piece)
        self.text += piece[len(seen) :]
        return piece[len(seen) :]

    def _merge_tools(self, deltas: list[Json]) -> None:
        for delta in deltas:
            call = self._tools.setdefault(delta["index"], {"type": "function", "function": {"name": "", "arguments": ""}})
            function = delta.get("function") or {}
            if delta.get("id"):
                call["id"] = delta["id"]
                # The first part of a call. A repeated turn sends it again, which starts the call over.
                call["function"] = {"name": function.get("name", ""), "arguments": ""}
            call["function"]["arguments"] += function.get("arguments") or ""

    def reply(self) -> Reply:
        """Returns the result. Raises an error until the stream has ended."""
        if not self.done or "choices" not in self._answer:
            raise TidegateError("the stream has not ended")
        message = {"role": "assistant", "content": self.text, "tool_calls": [self._tools[i] for i in sorted(self._tools)]}
        return reply({**self._answer, "choices": [{**self._answer["choices"][0], "text": self.text, "message": message}]})
