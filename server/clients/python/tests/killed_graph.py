"""A three-node graph that calls a model. Run as a program, its second node kills the server and then itself, like a crash.

python killed_graph.py URL OWNER SERVER_PID LOG
"""

import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from langchain_core.messages import HumanMessage
from langgraph.graph import END, START, MessagesState, StateGraph

from tidegate import Tidegate
from tidegate.langchain import ChatTidegate
from tidegate.langgraph import TidegateSaver

CONFIG: Any = {"configurable": {"thread_id": "tale"}}


def graph(url: str, owner: str, log: Path, crash: Callable[[], None]) -> Any:
    """Builds the graph. Each node appends its name to `log` when it begins."""
    model = ChatTidegate(base_url=url, api_key=owner, max_tokens=8, temperature=0)  # type: ignore[arg-type]

    def noted(name: str) -> None:
        with log.open("a") as file:
            file.write(f"{name}\n")

    def first(state: MessagesState) -> Any:
        noted("first")
        return {"messages": [model.invoke(state["messages"])]}

    def second(state: MessagesState) -> Any:
        noted("second")
        crash()
        return {"messages": [HumanMessage("And then?")]}

    def third(state: MessagesState) -> Any:
        noted("third")
        return {"messages": [model.invoke(state["messages"])]}

    built = StateGraph(MessagesState)
    for name, node in (("first", first), ("second", second), ("third", third)):
        built.add_node(name, node)
    for start, end in ((START, "first"), ("first", "second"), ("second", "third"), ("third", END)):
        built.add_edge(start, end)
    return built.compile(checkpointer=TidegateSaver(Tidegate(url, api_key=owner)))


def main(url: str, owner: str, server: str, log: str) -> None:
    """Runs the graph until its second node kills the server and this process."""

    def crash() -> None:
        os.kill(int(server), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)

    # With "sync", a step begins only after the checkpoint of the previous step is stored.
    graph(url, owner, Path(log), crash).invoke({"messages": [HumanMessage("Tell me of a fox.")]}, CONFIG, durability="sync")


if __name__ == "__main__":
    main(*sys.argv[1:])
