"""TidegateSaver: LangGraph's own conformance tests, crashes, and old or large checkpoints."""

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncGenerator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from langchain_core.messages import HumanMessage
from langgraph.checkpoint.base import empty_checkpoint
from langgraph.checkpoint.conformance import checkpointer_test, validate
from langgraph.graph import START, MessagesState, StateGraph

from tidegate import Tidegate
from tidegate import langgraph as langgraph_module
from tidegate.langchain import ChatTidegate
from tidegate.langgraph import TidegateSaver

from . import killed_graph
from .conftest import REPOSITORY, Server


def test_it_conforms(client: Tidegate) -> None:
    @checkpointer_test(name="TidegateSaver")
    async def saver() -> AsyncGenerator[TidegateSaver, None]:
        for session in list(client.sessions()):
            session.delete()
        yield TidegateSaver(client)

    report = asyncio.run(validate(saver))
    assert report.passed_all_base(), report.to_dict()


def test_a_graph_goes_on_after_a_crash_of_server_and_client(start: Any, tmp_path: Path) -> None:
    server, log = start(), tmp_path / "log"
    arguments = [server.url, "owner", str(server.process.pid), str(log)]
    killed = subprocess.run([sys.executable, killed_graph.__file__, *arguments], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    server.process.wait()
    server.start()

    graph = killed_graph.graph(server.url, "owner", log, crash=lambda: None)
    assert graph.get_state(killed_graph.CONFIG).next == ("second",)
    state = graph.invoke(None, killed_graph.CONFIG)
    assert log.read_text().split() == ["first", "second", "second", "third"], "the first node does not run again"
    kinds = [message.type for message in state["messages"]]
    assert kinds == ["human", "ai", "human", "ai"] and state["messages"][3].content
    marks = [state["messages"][i].response_metadata["tidegate"] for i in (1, 3)]
    assert marks[0]["session"] == marks[1]["session"], "the model goes on in the session from before the crash"


def test_an_old_checkpoint_has_kept_its_version(start: Any) -> None:
    """The server keeps two versions per session, and others only if something else needs them."""
    server = start("--keep-versions", "2")
    client, model = Tidegate(server.url), ChatTidegate(base_url=server.url, max_tokens=2, temperature=0)
    built = StateGraph(MessagesState)
    built.add_node("answer", lambda state: {"messages": [model.invoke(state["messages"])]})
    built.add_edge(START, "answer")
    graph = built.compile(checkpointer=TidegateSaver(client))
    config: Any = {"configurable": {"thread_id": "long"}}
    first = graph.invoke({"messages": [HumanMessage("Tell me of a fox.")]}, config)["messages"][1]
    for _ in range(3):
        graph.invoke({"messages": [HumanMessage("And then?")]}, config)
    mark = first.response_metadata["tidegate"]
    assert not client.session(mark["session"]).turns()[1]["kept"], "the conversation's own session has let it go"

    past = next(state for state in graph.get_state_history(config) if len(state.values["messages"]) == 2)
    branch = graph.invoke({"messages": [HumanMessage("Why?")]}, past.config)["messages"]
    assert len(branch) == 4
    turn = client.session(branch[3].response_metadata["tidegate"]["session"]).turns()[-1]
    assert turn["parent"] == mark["version"] and turn["prompt_tokens"] < 12


def test_checkpoints_are_sessions_of_the_model_that_is_named(start: Any, tmp_path: Path) -> None:
    shipped, other = REPOSITORY / "weights/checkpoints/tidegate-tiny", tmp_path / "other"
    shutil.copytree(shipped, other)
    # Models with equal weights would share their sessions.
    with (other / "model.safetensors").open("r+b") as weights:
        weights.seek(-1, os.SEEK_END)
        weights.write(b"\0")
    server = start("--model", f"{shipped}=a", "--model", f"{other}=b")
    client, model = Tidegate(server.url), ChatTidegate(base_url=server.url, model="b", max_tokens=2, temperature=0)
    built = StateGraph(MessagesState)
    built.add_node("answer", lambda state: {"messages": [model.invoke(state["messages"])]})
    built.add_edge(START, "answer")
    graph = built.compile(checkpointer=TidegateSaver(client, model="b"))
    config: Any = {"configurable": {"thread_id": "several"}}
    graph.invoke({"messages": [HumanMessage("Tell me of a fox.")]}, config)
    answer = graph.invoke({"messages": [HumanMessage("And then?")]}, config)["messages"][3]
    assert list(client.sessions(model="a")) == []
    stored = client.sessions(model="b", metadata={"thread": "several"})
    assert answer.response_metadata["tidegate"]["version"] in {session.version for session in stored}


def checkpoint(value: Any) -> Any:
    return {**empty_checkpoint(), "channel_values": {"value": value}, "channel_versions": {"value": "1"}}


def test_a_large_checkpoint_is_stored_in_parts(client: Tidegate) -> None:
    config: Any = {"configurable": {"thread_id": "large", "checkpoint_ns": ""}}
    value = "".join(chr(0x4E00 + (i * i * 7919) % 20000) for i in range(20_000))
    TidegateSaver(client).put(config, checkpoint(value), {"step": 1}, {"value": "1"})
    sessions = list(client.sessions())
    assert len(sessions) > 3 and len({session.version for session in sessions}) == 1, "the parts share one version"
    found = TidegateSaver(client).get_tuple(config)
    assert found and found.checkpoint["channel_values"]["value"] == value

    # An incomplete checkpoint, as a crash leaves it, is not found.
    sessions[-1].delete()
    saver = TidegateSaver(client)
    assert saver.get_tuple(config) is None
    saver.delete_thread("large")
    assert list(client.sessions()) == []


def test_savers_see_what_others_write_and_delete(client: Tidegate) -> None:
    config: Any = {"configurable": {"thread_id": "shared", "checkpoint_ns": ""}}
    one, other = TidegateSaver(client), TidegateSaver(client)
    assert one.get_tuple(config) is None
    for step in (1, 2):
        config = other.put(config, checkpoint(step), {"step": step}, {"value": "1"})
        found = one.get_tuple({"configurable": {"thread_id": "shared"}})
        assert found and found.metadata["step"] == step
    assert [item.metadata["step"] for item in one.list({"configurable": {"thread_id": "shared"}})] == [2, 1]
    other.delete_thread("shared")
    assert one.get_tuple({"configurable": {"thread_id": "shared"}}) is None


def test_what_a_saver_wrote_is_gone_once_another_deletes_it(client: Tidegate) -> None:
    config: Any = {"configurable": {"thread_id": "shared", "checkpoint_ns": ""}}
    one, other = TidegateSaver(client), TidegateSaver(client)
    one.put(config, checkpoint(1), {"step": 1}, {"value": "1"})
    other.delete_thread("shared")
    assert one.get_tuple(config) is None
    # The same holds for the list of all threads, although its last session still exists.
    one.put(config, checkpoint(1), {"step": 1}, {"value": "1"})
    kept: Any = {"configurable": {"thread_id": "kept", "checkpoint_ns": ""}}
    one.put(kept, checkpoint(2), {"step": 2}, {"value": "1"})
    assert len(list(one.list(None))) == 2
    other.delete_thread("shared")
    assert [item.metadata["step"] for item in one.list(None)] == [2]


def test_checkpoints_past_their_expiry_are_read_again(client: Tidegate, monkeypatch: pytest.MonkeyPatch) -> None:
    config: Any = {"configurable": {"thread_id": "expiring", "checkpoint_ns": ""}}
    saver = TidegateSaver(client, ttl_seconds=3600)
    saver.put(config, checkpoint(1), {"step": 1}, {"value": "1"})
    old = next(iter(client.sessions()))
    assert saver.get_tuple(config)
    saver.put(config, checkpoint(2), {"step": 2}, {"value": "1"})
    assert len(list(saver.list(config))) == 2
    # Deletes the older session, as expiry would, but not the one that was read last.
    old.delete()
    monkeypatch.setattr(langgraph_module, "time", SimpleNamespace(time=lambda: time.time() + 3601))
    assert [item.metadata["step"] for item in saver.list(config)] == [2]


def test_a_saver_remembers_a_bounded_part(client: Tidegate) -> None:
    saver, bound = TidegateSaver(client, cache_bytes=20_000), 20_000
    threads: list[Any] = [{"configurable": {"thread_id": str(number), "checkpoint_ns": ""}} for number in range(12)]
    for number, config in enumerate(threads):
        saver.put(config, checkpoint(number), {"step": number}, {"value": "1"})
        assert saver._size <= bound
    # Evicted threads are read again, and so is a thread that is larger than the bound.
    for number, config in enumerate(threads):
        found = saver.get_tuple(config)
        assert found and found.metadata["step"] == number and saver._size <= bound
    assert 0 < len(saver._threads) < 12 and saver._size == sum(known.size for known in saver._threads.values())
    assert list(saver._threads)[-1] == "11", "the one that was used last is still known"
    large = "".join(chr(0x4E00 + (i * i * 7919) % 20000) for i in range(20_000))
    config = saver.put(threads[0], checkpoint(large), {"step": 99}, {"value": "1"})
    saver.put_writes(config, [("value", "written")], "task")
    found = saver.get_tuple(threads[0])
    assert found and found.metadata["step"] == 99 and found.pending_writes and saver._size <= bound
    saver.delete_thread("0")
    assert saver.get_tuple(threads[0]) is None


class _Waits(httpx.HTTPTransport):
    """Holds requests that list the thread `slow` until they are allowed."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.allowed = threading.Event(), threading.Event()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        if "slow" in str(request.url):
            self.arrived.set()
            assert self.allowed.wait(60), "another thread waits for this one"
        return super().handle_request(request)


def test_a_slow_answer_holds_up_no_other_thread(server: Server, client: Tidegate) -> None:
    slow: Any = {"configurable": {"thread_id": "slow", "checkpoint_ns": ""}}
    other: Any = {"configurable": {"thread_id": "other", "checkpoint_ns": ""}}
    transport = _Waits()
    with Tidegate(server.url, api_key="waits", transport=transport) as waiting, ThreadPoolExecutor(1) as pool:
        saver = TidegateSaver(waiting)
        saver.put(slow, checkpoint(1), {"step": 1}, {"value": "1"})
        read = pool.submit(saver.get_tuple, slow)
        assert transport.arrived.wait(60)
        saver.put(other, checkpoint(2), {"step": 2}, {"value": "1"})
        found = saver.get_tuple(other)
        assert found and found.metadata["step"] == 2 and not read.done()
        # A checkpoint that is written in the meantime is found afterwards.
        saver.put(slow, checkpoint(3), {"step": 3}, {"value": "1"})
        transport.allowed.set()
        assert read.result()
        found = saver.get_tuple(slow)
        assert found and found.metadata["step"] == 3
