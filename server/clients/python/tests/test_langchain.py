"""ChatTidegate: one session per conversation, however its history is stored, branched or edited."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.messages.base import message_to_dict
from langchain_core.messages.utils import messages_from_dict
from langchain_core.tools import tool

import tidegate
from tidegate import Tidegate
from tidegate.langchain import ChatTidegate

from .conftest import Server

QUESTIONS = ["Tell me of a fox.", "And then?", "What did the crow say?"]


@pytest.fixture
def model(server: Server, client: Tidegate, request: pytest.FixtureRequest) -> ChatTidegate:
    """A model with the same owner as `client`, which therefore sees its sessions."""
    return ChatTidegate(base_url=server.url, api_key=request.node.name, max_tokens=12, temperature=0)


def mark(message: BaseMessage) -> dict[str, str]:
    return dict(message.response_metadata["tidegate"])


def talk(model: ChatTidegate) -> list[BaseMessage]:
    history: list[BaseMessage] = [SystemMessage("You tell tales.")]
    for question in QUESTIONS:
        history.append(HumanMessage(question))
        history.append(model.invoke(history))
    return history


def test_a_conversation_is_one_session_that_reads_new_messages_alone(model: ChatTidegate, client: Tidegate) -> None:
    history = talk(model)
    answers = [message for message in history if isinstance(message, AIMessage)]
    (session,) = client.sessions()
    assert {mark(answer)["session"] for answer in answers} == {session.id}
    assert [turn["version"] for turn in session.turns()][1:] == [mark(answer)["version"] for answer in answers]
    # Only the question is read, not what came before.
    sizes = [answer.usage_metadata["input_tokens"] for answer in answers if answer.usage_metadata]
    alone = model.invoke([HumanMessage(QUESTIONS[2])]).usage_metadata
    assert alone and sizes[2] <= alone["input_tokens"] + 3 < session.turns()[2]["tokens"], sizes


def test_a_model_is_chosen_by_its_name(model: ChatTidegate, client: Tidegate) -> None:
    question = [HumanMessage(QUESTIONS[0])]
    assert model.model_copy(update={"model": "tidegate-tiny"}).invoke(question).content
    other = model.model_copy(update={"model": "other"})
    with pytest.raises(tidegate.NotFound, match="`other` does not exist"):
        other.invoke(question)
    with pytest.raises(tidegate.NotFound, match="`other` does not exist"):
        asyncio.run(other.ainvoke(question))
    assert len(list(client.sessions())) == 1


def test_branches_of_a_history_get_sessions_of_their_own(model: ChatTidegate, client: Tidegate) -> None:
    history = talk(model)
    again = model.invoke([*history[:5], HumanMessage(QUESTIONS[2])])
    assert again.content == history[-1].content and mark(again)["session"] != mark(history[-1])["session"]
    others = model.batch([[*history[:3], HumanMessage(f"Tell me of a {animal}.")] for animal in ("crow", "hare", "hen")])
    assert len({mark(other)["version"] for other in others}) == 3
    for other in others:
        versions = {turn["version"]: turn["parent"] for turn in client.session(mark(other)["session"]).turns()}
        assert versions[mark(other)["version"]] == mark(history[2])["version"]


def test_a_history_survives_storage(model: ChatTidegate, client: Tidegate) -> None:
    history = talk(model)
    stored = messages_from_dict([message_to_dict(message) for message in history])
    answer = model.invoke([*stored, HumanMessage("Why?")])
    assert mark(answer)["session"] == mark(history[-1])["session"]


def test_an_edited_history_is_read_anew(model: ChatTidegate, client: Tidegate) -> None:
    history = talk(model)
    edited = [SystemMessage("You tell jokes."), *history[1:], HumanMessage("Why?")]
    answer = model.invoke(edited)
    assert mark(answer)["session"] != mark(history[-1])["session"]
    assert client.session(mark(answer)["session"]).turns()[1]["prompt_tokens"] > 60
    # Versions from before an edit are still used.
    late = model.invoke([*history[:5], HumanMessage("Who?"), AIMessage("A hen."), HumanMessage("Why?")])
    versions = {turn["version"] for turn in client.session(mark(late)["session"]).turns()}
    assert mark(history[4])["version"] in versions


def test_a_deleted_session_is_no_error(model: ChatTidegate, client: Tidegate) -> None:
    history = talk(model)
    for session in client.sessions():
        session.delete()
    answer = model.invoke([*history, HumanMessage("Why?")])
    assert client.session(mark(answer)["session"]).turns()[1]["prompt_tokens"] > 60


def test_streams_have_the_same_answers(model: ChatTidegate) -> None:
    history = [HumanMessage(QUESTIONS[0])]
    whole = model.invoke(history)
    chunks = list(model.stream(history))
    assert len(chunks) > 4 and "".join(str(chunk.content) for chunk in chunks) == whole.content
    streamed = chunks[0]
    for chunk in chunks[1:]:
        streamed += chunk
    assert streamed.usage_metadata == whole.usage_metadata and mark(streamed)["digest"] == mark(whole)["digest"]
    follow_up = model.invoke([*history, streamed, HumanMessage("And then?")])
    assert mark(follow_up)["session"] == mark(streamed)["session"]

    async def both() -> tuple[AIMessage, str]:
        return await model.ainvoke(history), "".join([str(chunk.content) async for chunk in model.astream(history)])

    # In two event loops, one after the other.
    for _ in range(2):
        answer, text = asyncio.run(both())
        assert answer.content == text == whole.content


def test_errors_are_raised(model: ChatTidegate) -> None:
    with pytest.raises(tidegate.BadRequest):
        model.bind(temperature=9).invoke("x")
    with pytest.raises(tidegate.BadRequest):
        list(model.bind(temperature=9).stream("x"))


def test_tools_are_called_and_answered_in_one_session(model: ChatTidegate) -> None:
    @tool
    def size(animal: str) -> str:
        """How large an animal is."""
        return "large"

    bound = ChatTidegate(**{**model.model_dump(), "api_key": model.api_key, "max_tokens": 300}).bind_tools(
        [size], tool_choice="any"
    )
    history: list[BaseMessage] = [HumanMessage("How large is a fox?")]
    call = bound.invoke(history)
    assert isinstance(call, AIMessage)
    assert call.tool_calls or call.invalid_tool_calls, call
    for found in call.tool_calls:
        assert found["name"] == "size" and isinstance(found["args"]["animal"], str)
    history += [call, *(ToolMessage("large", tool_call_id=str(found["id"])) for found in call.tool_calls)]
    answer = model.invoke([*history, HumanMessage("Thank you.")])
    assert mark(answer)["session"] == mark(call)["session"]
    streamed = list(bound.stream([HumanMessage("How large is a fox?")]))
    assert any(chunk.tool_call_chunks for chunk in streamed if hasattr(chunk, "tool_call_chunks"))


def test_a_refused_first_turn_leaves_no_session(model: ChatTidegate, client: Tidegate) -> None:
    bound = model.bind(temperature=9)

    async def stream() -> None:
        async for _ in bound.astream("x"):
            pass

    for refused in (lambda: bound.invoke("x"), lambda: list(bound.stream("x")), lambda: asyncio.run(stream())):
        with pytest.raises(tidegate.BadRequest):
            refused()
        assert list(client.sessions()) == []
    with pytest.raises(tidegate.BadRequest):
        asyncio.run(bound.ainvoke("x"))
    assert list(client.sessions()) == []
    # A session that already existed stays.
    history = talk(model)
    with pytest.raises(tidegate.BadRequest):
        bound.invoke([*history, HumanMessage("Why?")])
    assert len(list(client.sessions())) == 1


def test_fields_of_a_call_add_to_those_of_the_model(model: ChatTidegate, client: Tidegate) -> None:
    bodies: list[dict[str, object]] = []

    def noted(request: httpx.Request) -> None:
        if request.url.path.endswith("completions"):
            bodies.append(json.loads(request.content))

    model.extra = {"user": "fox", "presence_penalty": 0.5}
    model._sync()._http.event_hooks = {"request": [noted]}
    call: dict[str, Any] = {"extra": {"presence_penalty": 0.25, "frequency_penalty": 0.125}}
    question = HumanMessage(QUESTIONS[0])
    answer = model.invoke([question], **call)
    model.invoke([question, answer, HumanMessage("Who?"), AIMessage("A hen."), HumanMessage("Why?")], **call)
    sent = [(body["user"], body["presence_penalty"], body["frequency_penalty"]) for body in bodies]
    assert sent == [("fox", 0.25, 0.125)] * 2
    assert [body.get("history") for body in bodies] == [None, "append"]


def test_clients_of_closed_loops_are_dropped(model: ChatTidegate) -> None:
    for _ in range(3):
        asyncio.run(model.ainvoke("x"))
    assert len(model._aio) == 1
