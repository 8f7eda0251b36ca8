"""Sessions through the client: turns, forks, versions, files and errors."""

import asyncio
import inspect
from collections.abc import Callable
from pathlib import Path

import pytest

import tidegate
from tidegate import AsyncTidegate, Tidegate

from .conftest import REPOSITORY, Server

TALE = "Once upon a time there was"


def test_a_turn_continues_the_session(client: Tidegate) -> None:
    session = client.create(TALE, seed=1)
    before = session.version
    reply = session.say(prompt=" a fox", max_tokens=12)
    assert reply.text and reply.finish_reason in ("length", "stop")
    assert (reply.parent, reply.session) == (before, session.id)
    assert session.version == reply.version != before
    assert reply.completion_tokens <= 12 and reply.tokens > reply.prompt_tokens

    again = client.create(TALE, seed=1)
    whole = again.say(prompt=" a fox", max_tokens=24).text
    assert reply.text + session.say(max_tokens=12).text == whole, "a turn without new text continues the answer"


def test_a_session_may_name_its_model(client: Tidegate) -> None:
    session = client.create(model="tidegate-tiny")
    assert [found.id for found in client.sessions(model="tidegate-tiny")] == [session.id]
    for refused in (lambda: client.create(model="other"), lambda: list(client.sessions(model="other"))):
        with pytest.raises(tidegate.NotFound, match="`other` does not exist"):
            refused()


def test_a_file_is_loaded_into_the_model_that_is_named(start: Callable[..., Server]) -> None:
    folder = REPOSITORY / "weights/checkpoints/tidegate-tiny"
    with Tidegate(start("--model", f"{folder}=a", "--model", f"{folder}=b").url) as client:
        session = client.create(TALE, model="b")
        session.load(client.load(session.snapshot(), model="b").snapshot(), model="b")
        for load in (client.load, session.load):
            with pytest.raises(tidegate.NotFound, match="`other` does not exist"):
                load(session.snapshot(), model="other")


def test_what_is_said_is_a_message(client: Tidegate) -> None:
    said = client.create(seed=1).say("Tell me of a fox.", max_tokens=12)
    written = client.create(seed=1).say(messages=[{"role": "user", "content": "Tell me of a fox."}], max_tokens=12)
    assert said.text == written.text and said.raw["object"] == "chat.completion"
    with pytest.raises(ValueError):
        client.create().say("Tell me of a fox.", prompt="Tell me of a fox.")


def test_a_stream_has_the_text_of_the_turn(client: Tidegate) -> None:
    session = client.create(TALE, seed=1)
    copy = session.fork()[0]
    with session.stream(prompt=" a fox", max_tokens=16) as stream:
        pieces = list(stream)
    assert "".join(pieces) == stream.reply.text == copy.say(prompt=" a fox", max_tokens=16).text
    assert len(pieces) > 4 and stream.reply.completion_tokens == 16
    assert session.version == stream.reply.version == session.refresh()["version"]
    said = session.stream("And then?", max_tokens=8)
    assert "".join(said) == said.reply.text


def test_a_stream_that_is_left_keeps_its_text_so_far(client: Tidegate) -> None:
    session = client.create(TALE)
    with session.stream(prompt=" a fox", max_tokens=100_000, extra={"ignore_eos": True}) as stream:
        for _ in stream:
            break
    # The session is free again as soon as the turn has ended.
    session.say(prompt=" and", max_tokens=1, wait=60)
    turn = session.turns()[1]
    assert turn["kind"] == "interrupted" or turn["completion_tokens"] < 100_000, turn


def test_forks_are_independent_and_a_rewind_goes_back(client: Tidegate) -> None:
    session = client.create(TALE)
    start = session.version
    forks = session.fork(2, metadata={"tale": "fox"})
    assert [fork.info["metadata"] for fork in forks] == [{"tale": "fox"}] * 2
    assert forks[0].say(prompt=" a fox", max_tokens=8, seed=1).version != forks[1].version
    first = session.say(prompt=" a fox", max_tokens=8, seed=1)
    session.rewind(start)
    assert session.version == start
    assert session.say(prompt=" a fox", max_tokens=8, seed=1).text == first.text
    assert [turn["parent"] for turn in session.turns()] == [None, start, start]
    assert {session.id, *(fork.id for fork in forks)} == {found.id for found in client.sessions()}
    forks[0].delete()
    with pytest.raises(tidegate.NotFound):
        client.session(forks[0].id)
    assert session.append(" and so on") > 0
    assert session.update(metadata={"tale": "crow"}, ttl_seconds=60)["ttl_seconds"] == 60


def test_a_file_continues_on_another_server(client: Tidegate, start: Callable[..., Server], tmp_path: Path) -> None:
    session = client.create(TALE, seed=1)
    session.say(prompt=" a fox", max_tokens=8)
    session.save(tmp_path / "fox.tidegate")
    expected = session.say(prompt=" who", max_tokens=8).text
    with Tidegate(start().url) as elsewhere:
        assert elsewhere.load(tmp_path / "fox.tidegate").say(prompt=" who", max_tokens=8).text == expected
    session.append(" and something else")
    session.load(tmp_path / "fox.tidegate")
    assert session.say(prompt=" who", max_tokens=8).text == expected
    assert [found.id for found in client.sessions()] == [session.id], "the session of the upload is deleted"


def test_the_best_of_several_answers_stays(client: Tidegate) -> None:
    session = client.create(TALE, seed=1)
    start = session.version
    reply = session.best_of(4, prompt=" a fox", max_tokens=8)
    assert reply.parent == start and session.version == reply.version == session.refresh()["version"]
    assert session.text() == f"{TALE} a fox{reply.text}"

    assert reply.mean_logprob == max(choice["mean_logprob"] for choice in reply.raw["choices"])

    # Makes the same choice from the log probabilities of each answer.
    session.rewind(start)
    answers = session.say(prompt=" a fox", max_tokens=8, extra={"n": 4, "keep": "none", "logprobs": 0}).raw["choices"]
    means = [sum(found) / len(found) for found in (answer["logprobs"]["token_logprobs"] for answer in answers)]
    assert len({answer["text"] for answer in answers}) > 1
    assert answers[means.index(max(means))]["text"] == reply.text


def test_what_a_conversation_holds_can_be_read(client: Tidegate) -> None:
    session = client.create(TALE)
    start = session.version
    session.tag("start")
    reply = session.say(prompt=" a fox", max_tokens=8)
    assert session.text() == f"{TALE} a fox{reply.text}" and session.text(version=start) == TALE
    assert len(session.tokens()) == reply.tokens
    roles = [(message["role"], message["content"]) for message in session.messages()]
    assert roles == [("user", TALE), ("user", " a fox"), ("assistant", reply.text)]
    assert client.create().messages() == [] and session.text(start=0, end=1) + session.text(start=1) == session.text()
    assert [tag["name"] for tag in session.tags()] == ["start"]
    session.rewind("start")
    assert session.version == start
    session.untag("start")
    assert session.tags() == []
    lineage = session.lineage(version=reply.version, other=start)
    assert [found["version"] for found in lineage["data"]] == [reply.version, start] and lineage["common_ancestor"] == start
    added = {"op": "insert", "text": f" a fox{reply.text}"}
    assert session.diff(start, reply.version)["changes"] == [added] and session.diff(start)["changes"] == []


def test_errors_have_classes_that_say_what_was_wrong(client: Tidegate) -> None:
    session = client.create()
    with pytest.raises(tidegate.BadRequest) as refused:
        session.say("x", temperature=9)
    assert (refused.value.status, refused.value.param) == (400, "temperature") and refused.value.request_id
    with pytest.raises(tidegate.NotFound) as missing:
        client.session("ses_00000000000000000000000000000000")
    assert missing.value.code == "not_found"
    with pytest.raises(tidegate.VersionMismatch):
        session.say("x", if_version="ver_00000000000000000000000000000000")
    session.say("x", max_tokens=1, idempotency_key="once")
    with pytest.raises(tidegate.KeyReused):
        session.say("y", max_tokens=1, idempotency_key="once")
    with pytest.raises(tidegate.ConnectionFailed):
        Tidegate("http://127.0.0.1:9", max_retries=0).create()


def test_the_asyncio_client_does_the_same(server: Server, client: Tidegate) -> None:
    async def converse() -> tuple[str, str, list[str]]:
        async with AsyncTidegate(server.url, api_key="asyncio") as other:
            session = await other.create(TALE, seed=1)
            fork = (await session.fork(1))[0]
            reply = await session.say(prompt=" a fox", max_tokens=8)
            async with fork.stream(prompt=" a fox", max_tokens=8) as stream:
                text = "".join([piece async for piece in stream])
            assert text == stream.reply.text and fork.version == stream.reply.version
            await session.load(await fork.snapshot())
            assert (await session.diff(fork.id))["changes"] == []
            return reply.text, text, [found.id async for found in other.sessions(order="asc")]

    said, streamed, ids = asyncio.run(converse())
    assert said == streamed == client.create(TALE, seed=1).say(prompt=" a fox", max_tokens=8).text
    assert len(ids) == 2


@pytest.mark.parametrize("name", ["Tidegate", "Session", "Stream"])
def test_both_clients_have_the_same_methods(name: str) -> None:
    def methods(kind: type) -> dict[str, list[str]]:
        public = {name: member for name, member in vars(kind).items() if not name.startswith("_") and callable(member)}
        return {name: list(inspect.signature(member).parameters) for name, member in public.items()}

    assert methods(getattr(tidegate, name)) == methods(getattr(tidegate, f"Async{name}"))


def test_sessions_can_be_deleted_while_they_are_listed(server: Server, client: Tidegate) -> None:
    for _ in range(3):
        client.create().fork(70)
    deleted = 0
    for session in client.sessions():
        session.delete()
        deleted += 1
    assert deleted == 213 and list(client.sessions()) == []

    async def delete(key: str) -> int:
        async with AsyncTidegate(server.url, api_key=key) as other:
            await (await other.create()).fork(64)
            await (await other.create()).fork(64)
            deleted = 0
            async for session in other.sessions():
                await session.delete()
                deleted += 1
            return deleted

    assert asyncio.run(delete("deletes-while-listing")) == 130


def test_a_handle_without_a_version_names_the_current_one(client: Tidegate) -> None:
    session = client.create("Once upon a time")
    client.handle(session.id).tag("start")
    assert [tag["version"] for tag in session.tags()] == [session.version]
    assert session.say(prompt=" a fox", max_tokens=1, wait=1).version == session.version
