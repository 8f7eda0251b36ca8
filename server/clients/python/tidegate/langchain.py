"""LangChain: a chat model that keeps one session per conversation and sends only new messages.

The model object itself has no state. Each answer carries a mark in its `response_metadata`: the session, its version, and a
digest of all messages up to and including that answer. A history that begins with those messages continues from that
version; a history that was edited, trimmed or never seen is sent whole. A history that is stored, moved or branched
therefore still finds its state.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import suppress
from hashlib import sha256
from typing import Any, cast
from weakref import WeakKeyDictionary

from langchain_core.callbacks import AsyncCallbackManagerForLLMRun, CallbackManagerForLLMRun
from langchain_core.language_models import BaseChatModel, LangSmithParams, LanguageModelInput
from langchain_core.messages import (
    AIMessage,
    AIMessageChunk,
    BaseMessage,
    InvalidToolCall,
    ToolCall,
    convert_to_openai_messages,
)
from langchain_core.messages.ai import UsageMetadata
from langchain_core.messages.tool import tool_call_chunk
from langchain_core.output_parsers.openai_tools import make_invalid_tool_call, parse_tool_call
from langchain_core.outputs import ChatGeneration, ChatGenerationChunk, ChatResult
from langchain_core.runnables import Runnable
from langchain_core.tools import BaseTool
from langchain_core.utils.function_calling import convert_to_openai_tool
from pydantic import Field, PrivateAttr, SecretStr

from .aio import AsyncTidegate
from .client import Tidegate
from .errors import APIError, Conflict, Gone, NotFound, TidegateError, VersionMismatch
from .wire import Json, Reply, Turn

MARK = "tidegate"
# Errors that call for the next attempt: the session has moved on, is busy, or is gone with its versions.
_ELSEWHERE = (Conflict, Gone, NotFound, VersionMismatch)


def mark_of(message: BaseMessage) -> dict[str, str] | None:
    """Returns the session, version and digest that an answer carries, or None."""
    mark = message.response_metadata.get(MARK) if isinstance(message, AIMessage) else None
    return mark if isinstance(mark, dict) else None


def _wire_form(messages: Sequence[BaseMessage]) -> list[Json]:
    return convert_to_openai_messages(list(messages))


def _digest(messages: Sequence[BaseMessage]) -> str:
    return sha256(json.dumps(_wire_form(messages), sort_keys=True).encode()).hexdigest()


def _known(messages: Sequence[BaseMessage]) -> tuple[dict[str, str] | None, int]:
    """Returns the mark of the last answer whose digest matches the history, and how many messages its version has read."""
    for count in range(len(messages) - 1, 0, -1):
        mark = mark_of(messages[count - 1])
        if mark and mark.get("digest") == _digest(messages[:count]):
            return mark, count
    return None, 0


class ChatTidegate(BaseChatModel):
    """Tidegate as a chat model. Its sessions stay until they are deleted, unless `ttl_seconds` sets an expiry."""

    base_url: str | None = None
    api_key: SecretStr | None = None
    max_retries: int = 2
    # Default: the model that the server runs.
    model: str | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    ttl_seconds: int | None = None
    # Further request fields of the server.
    extra: dict[str, Any] = Field(default_factory=dict)
    _client: Tidegate | None = PrivateAttr(None)
    # One client per event loop: connections belong to a loop, and a model may be used in several.
    _aio: WeakKeyDictionary[asyncio.AbstractEventLoop, AsyncTidegate] = PrivateAttr(default_factory=WeakKeyDictionary)

    @property
    def _llm_type(self) -> str:
        return "tidegate"

    @property
    def _identifying_params(self) -> dict[str, Any]:
        return {"base_url": self.base_url, "max_tokens": self.max_tokens, "temperature": self.temperature}

    def _get_ls_params(self, stop: list[str] | None = None, **kwargs: Any) -> LangSmithParams:
        params = super()._get_ls_params(stop=stop, **kwargs)
        return {**params, "ls_provider": "tidegate", "ls_model_name": kwargs.get("model") or self.model or "tidegate"}

    def _settings(self) -> dict[str, Any]:
        key = self.api_key.get_secret_value() if self.api_key else None
        return {"base_url": self.base_url, "api_key": key, "max_retries": self.max_retries}

    def _sync(self) -> Tidegate:
        self._client = self._client or Tidegate(**self._settings())
        return self._client

    def _async(self) -> AsyncTidegate:
        # A client keeps its loop alive, so the weak keys alone never release either of them.
        for closed in [loop for loop in self._aio if loop.is_closed()]:
            del self._aio[closed]
        loop = asyncio.get_running_loop()
        if loop not in self._aio:
            self._aio[loop] = AsyncTidegate(**self._settings())
        return self._aio[loop]

    def _options(self, stop: list[str] | None, kwargs: dict[str, Any]) -> Turn:
        names = ("model", "max_tokens", "temperature", "top_p", "seed")
        fields = {name: getattr(self, name) for name in names if getattr(self, name) is not None}
        if stop or self.stop:
            fields["stop"] = stop or self.stop
        given = {name: value for name, value in kwargs.items() if value is not None}
        return cast(Turn, {**fields, **given, "extra": {**self.extra, **given.get("extra", {})}})

    def _attempts(self, messages: list[BaseMessage], options: Turn) -> Iterator[tuple[Json, Turn]]:
        """Yields what to try, in order: the session itself, a fork of its version, and a new session that reads everything.

        Each item has the session's id or the fields to create one with, and the turn.
        """
        mark, count = _known(messages)
        if mark:
            fresh = _wire_form(messages[count:])
            new = cast(Turn, {**options, "messages": fresh})
            if any(message["role"] == "assistant" for message in fresh):
                # Answers that another model gave, or that were edited, are read like other messages.
                new["extra"] = {**options["extra"], "history": "append"}
            yield {"id": mark["session"]}, cast(Turn, {**new, "if_version": mark["version"]})
            yield {"version": mark["version"]}, new
        yield {}, cast(Turn, {**options, "messages": _wire_form(messages)})

    def _generate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        for place, turn in self._attempts(messages, self._options(stop, kwargs)):
            session = None
            try:
                session = self._session(place, turn)
                return _result(messages, session.say(**turn))
            except APIError as refused:
                self._discard(place, session)
                if not place or not isinstance(refused, _ELSEWHERE):
                    raise
        raise AssertionError("unreachable")

    def _session(self, place: Json, turn: Turn) -> Any:
        client = self._sync()
        if "id" in place:
            return client.handle(place["id"])
        return client.create(**place, ttl_seconds=self.ttl_seconds, model=turn.get("model"))

    def _discard(self, place: Json, session: Any) -> None:
        """Deletes a session that was created for a turn that the server refused, because nothing refers to it."""
        if session is not None and "id" not in place:
            with suppress(TidegateError):
                session.delete()

    def _stream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: CallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> Iterator[ChatGenerationChunk]:
        for place, turn in self._attempts(messages, self._options(stop, kwargs)):
            begun, session = False, None
            try:
                session = self._session(place, turn)
                with session.stream(**turn) as stream:
                    for text in stream:
                        begun = True
                        chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
                        if run_manager:
                            run_manager.on_llm_new_token(text, chunk=chunk)
                        yield chunk
                    yield _last_chunk(messages, stream.reply)
                return
            except APIError as refused:
                if begun:
                    raise
                self._discard(place, session)
                if not place or not isinstance(refused, _ELSEWHERE):
                    raise

    async def _agenerate(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> ChatResult:
        for place, turn in self._attempts(messages, self._options(stop, kwargs)):
            session = None
            try:
                session = await self._asession(place, turn)
                return _result(messages, await session.say(**turn))
            except APIError as refused:
                await self._adiscard(place, session)
                if not place or not isinstance(refused, _ELSEWHERE):
                    raise
        raise AssertionError("unreachable")

    async def _asession(self, place: Json, turn: Turn) -> Any:
        client = self._async()
        if "id" in place:
            return client.handle(place["id"])
        return await client.create(**place, ttl_seconds=self.ttl_seconds, model=turn.get("model"))

    async def _adiscard(self, place: Json, session: Any) -> None:
        """`_discard` for asyncio."""
        if session is not None and "id" not in place:
            with suppress(TidegateError):
                await session.delete()

    async def _astream(
        self,
        messages: list[BaseMessage],
        stop: list[str] | None = None,
        run_manager: AsyncCallbackManagerForLLMRun | None = None,
        **kwargs: Any,
    ) -> AsyncIterator[ChatGenerationChunk]:
        for place, turn in self._attempts(messages, self._options(stop, kwargs)):
            begun, session = False, None
            try:
                session = await self._asession(place, turn)
                async with session.stream(**turn) as stream:
                    async for text in stream:
                        begun = True
                        chunk = ChatGenerationChunk(message=AIMessageChunk(content=text))
                        if run_manager:
                            await run_manager.on_llm_new_token(text, chunk=chunk)
                        yield chunk
                    yield _last_chunk(messages, stream.reply)
                return
            except APIError as refused:
                if begun:
                    raise
                await self._adiscard(place, session)
                if not place or not isinstance(refused, _ELSEWHERE):
                    raise

    def bind_tools(
        self,
        tools: Sequence[dict[str, Any] | type | Callable[..., Any] | BaseTool],
        *,
        tool_choice: str | bool | dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Runnable[LanguageModelInput, AIMessage]:
        """Lets the model call tools. `tool_choice` forces a call: `any`, or the name of a tool."""
        choice: Any = tool_choice
        if tool_choice is True or tool_choice == "any":
            choice = "required"
        elif isinstance(tool_choice, str) and tool_choice not in ("auto", "none", "required"):
            choice = {"type": "function", "function": {"name": tool_choice}}
        known = [convert_to_openai_tool(tool) for tool in tools]
        return self.bind(tools=known, tool_choice=choice or None, **kwargs)


def _answer(messages: Sequence[BaseMessage], reply: Reply) -> AIMessage:
    """Converts a reply into a message that carries its mark."""
    calls: list[ToolCall] = []
    invalid: list[InvalidToolCall] = []
    for raw in reply.tool_calls:
        try:
            calls.append(cast(ToolCall, parse_tool_call(raw, return_id=True)))
        except Exception as error:
            invalid.append(make_invalid_tool_call(raw, str(error)))
    usage = UsageMetadata(
        input_tokens=reply.prompt_tokens,
        output_tokens=reply.completion_tokens,
        total_tokens=reply.prompt_tokens + reply.completion_tokens,
    )
    message = AIMessage(content=reply.text, tool_calls=calls, invalid_tool_calls=invalid, usage_metadata=usage)
    mark = {"session": reply.session, "version": reply.version, "digest": _digest([*messages, message])}
    name = reply.raw.get("model")
    message.response_metadata = {
        "finish_reason": reply.finish_reason,
        "model_name": name,
        "model_provider": "tidegate",
        MARK: mark,
    }
    return message


def _result(messages: Sequence[BaseMessage], reply: Reply) -> ChatResult:
    return ChatResult(generations=[ChatGeneration(message=_answer(messages, reply))])


def _last_chunk(messages: Sequence[BaseMessage], reply: Reply) -> ChatGenerationChunk:
    """Returns the last chunk of a stream: tool calls, usage and the mark."""
    answer = _answer(messages, reply)
    calls = [
        tool_call_chunk(id=raw.get("id"), name=raw["function"]["name"], args=raw["function"]["arguments"], index=index)
        for index, raw in enumerate(reply.tool_calls)
    ]
    chunk = AIMessageChunk(
        content="",
        tool_call_chunks=calls,
        usage_metadata=answer.usage_metadata,
        response_metadata=answer.response_metadata,
        chunk_position="last",
    )
    return ChatGenerationChunk(message=chunk)
