"""A server for the tests: the program named by TIDEGATE_BIN, with the shipped model, on a free port."""

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import pytest

from tidegate import Tidegate

REPOSITORY = Path(__file__).parents[4]


class Server:
    """A server that can be killed and started again at the same address, with the same sessions."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.folder, self.flags = folder, flags
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        """Starts the server and waits until it is ready."""
        command = [os.environ["TIDEGATE_BIN"], "serve", "--device", "cpu", "--port", str(self.port)]
        command += ["--data-dir", str(self.folder), *self.flags]
        with open(self.folder.with_suffix(".log"), "ab") as log:
            self.process = subprocess.Popen(command, cwd=REPOSITORY, stdout=log, stderr=log)
        for _ in range(600):
            assert self.process.poll() is None, self.folder.with_suffix(".log").read_text()
            try:
                if httpx.get(f"{self.url}/ready").is_success:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.1)
        raise AssertionError("the server did not become ready")

    def kill(self) -> None:
        """Kills the server, as a crash would."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@pytest.fixture(scope="session")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Server]]:
    """Returns a function that starts a server with further flags. All servers are killed when the tests end."""
    servers = []

    def new(*flags: str) -> Server:
        servers.append(Server(tmp_path_factory.mktemp("server") / "data", *flags))
        return servers[-1]

    yield new
    for server in servers:
        server.kill()


@pytest.fixture(scope="session")
def server(start: Callable[..., Server]) -> Server:
    """The server that the tests share. Tests that kill a server start their own."""
    return start()


@pytest.fixture
def client(server: Server, request: pytest.FixtureRequest) -> Iterator[Tidegate]:
    """A client with its own owner, so that tests do not see each other's sessions."""
    with Tidegate(server.url, api_key=request.node.name) as client:
        yield client
