"""The example in the documentation: it runs, and the documentation shows it verbatim."""

import importlib.util
from collections.abc import Callable

import pytest

from .conftest import REPOSITORY, Server

EXAMPLE = REPOSITORY / "server/clients/python/examples/agent.py"


def test_the_agent_runs(server: Server, start: Callable[..., Server], capsys: pytest.CaptureFixture[str]) -> None:
    spec = importlib.util.spec_from_file_location("agent", EXAMPLE)
    assert spec and spec.loader
    agent = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(agent)
    agent.main(server.url, start().url)
    printed = capsys.readouterr().out
    _, called, moved = printed.partition("after the call:")
    called, _, moved = moved.partition("on the second server:")
    assert "There is fog at the" in called
    # The rewind removed the tool's result before the conversation moved.
    assert "lighthouse" in moved and "Good night" in moved and "There is fog" not in moved


def test_the_documentation_shows_the_agent() -> None:
    assert f"```python\n{EXAMPLE.read_text()}```\n" in (REPOSITORY / "docs/clients.md").read_text()
