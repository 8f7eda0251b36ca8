"""Tests docker/haproxy.cfg and docker/nginx.conf in front of two scripted servers: affinity, streams, retries, servers
that are not ready or gone, and clients that leave.

    python .ci/cluster/proxies.py       (needs haproxy and nginx)
"""

import http.client
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from ports import free_port

CONFIG = pathlib.Path(__file__).parents[2] / "docker"
PATIENCE_S = 30
EVENTS = 50
SESSIONS = [f"ses_{number:032x}" for number in range(40)]


def until(what: str, condition: Callable[[], bool]) -> None:
    end = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > end:
            raise SystemExit(f"after {PATIENCE_S} s: {what}")
        time.sleep(0.02)


class Listener(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, *_: object) -> None:
        """Ignores errors, because proxies may close connections at any time."""


class Server:
    """A server whose attributes determine its answers. It names itself in each answer."""

    def __init__(self, name: str):
        self.name, self.port = name, free_port()
        self.ready = self.alive = True
        # "answer", "refuse" (503) or "die" (close the connection after reading the request).
        self.does = "answer"
        self.seen: list[str] = []
        self.events, self.client_left = threading.Semaphore(), threading.Event()
        self.start()

    def start(self) -> None:
        self.http = Listener(("127.0.0.1", self.port), type("Handler", (Handler,), {"owner": self}))
        threading.Thread(target=self.http.serve_forever, args=(0.01,), daemon=True).start()

    def stop(self) -> None:
        self.http.shutdown()
        self.http.server_close()


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    owner: Server

    def log_message(self, *_: object) -> None:
        pass

    def answer(self, status: int, **headers: str) -> None:
        body = json.dumps({"server": self.owner.name}).encode()
        self.send_response(status)
        for name, value in {**headers, "content-length": str(len(body)), "x-server": self.owner.name}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        self.wfile.write(body)

    def stream(self) -> None:
        """Sends events, each when the test releases it, and then nothing until the client is gone."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.send_header("x-server", self.owner.name)
        self.end_headers()
        for number in range(EVENTS):
            self.owner.events.acquire(timeout=PATIENCE_S)
            self.chunk(f"data: {number}\n\n")
        with suppress(ConnectionError):
            while self.connection.recv(1):
                pass
        self.owner.client_left.set()
        self.close_connection = True

    def chunk(self, text: str) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(text), text.encode()))

    def do_GET(self) -> None:
        owner = self.owner
        if self.path in ("/ready", "/health"):
            self.answer(200 if (owner.ready if self.path == "/ready" else owner.alive) else 503)
            return
        self.rfile.read(int(self.headers.get("content-length", 0)))
        owner.seen.append(self.headers["x-request-id"])
        if owner.does == "die":
            self.close_connection = True
        elif owner.does == "refuse":
            self.answer(503, retry_after="1")
        elif self.path == "/events":
            self.stream()
        else:
            made = self.headers.get("x-makes-stream")
            self.answer(200, **({"x_stream_id": made} if made else {}))

    do_POST = do_GET


class Proxy:
    def __init__(self, port: int, a: Server, b: Server):
        self.port, self.a, self.b = port, a, b
        # One connection for all turns. With two, HAProxy may receive a turn before it has noted the end of the previous
        # one; it would then count its server as busier than the other and send the session elsewhere (hash-balance-factor).
        self.turns = self.connect()
        until("the proxy does not answer", lambda: self.served("GET", "/") in ("a", "b"))

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=PATIENCE_S)

    def send(
        self, connection: http.client.HTTPConnection, method: str, path: str, size: int = 2, **headers: str
    ) -> http.client.HTTPResponse:
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        connection.request(method, path, None if method == "GET" else bytes(size), named)
        return connection.getresponse()

    def served(self, method: str, path: str, size: int = 2, **headers: str) -> str | int:
        """Returns the name of the server that answered with 200, or else the status (0 without an answer)."""
        try:
            answer = self.send(self.turns, method, path, size, **headers)
            answer.read()
        except OSError:
            self.turns.close()
            return 0
        return answer.headers["x-server"] if answer.status == 200 else answer.status

    def places(self) -> dict[str, str | int]:
        """Returns the server that gets the turns of each session. Their bodies exceed a proxy's buffer."""
        path, size = "/v1/completions", 64 << 10
        return {session: self.served("POST", path, size, x_tidegate_session=session) for session in SESSIONS}


def check_affinity(proxy: Proxy) -> dict[str, str | int]:
    places = proxy.places()
    assert set(places.values()) == {"a", "b"}, places
    assert proxy.places() == places
    for session, place in places.items():
        assert proxy.served("GET", f"/v1/sessions/{session}") == place
        assert proxy.served("POST", f"/v1/sessions/{session}/fork") == place
    spread = {proxy.served("POST", "/v1/completions") for _ in range(40)}
    assert spread == {"a", "b"}, f"requests without a session: {spread}"
    return places


def check_streams(proxy: Proxy) -> None:
    answer = proxy.send(proxy.connect(), "POST", "/events")
    server = proxy.a if answer.headers["x-server"] == "a" else proxy.b
    began = time.monotonic()
    # The server writes each event only after the previous one has arrived.
    for number in range(EVENTS):
        assert (answer.readline(), answer.readline()) == (b"data: %d\n" % number, b"\n")
        server.events.release()
    # If the proxy lets the kernel delay small writes (up to 200 ms each), this takes ten seconds, else a tenth of a second.
    assert time.monotonic() - began < 5, "events are held up"
    answer.close()
    assert server.client_left.wait(PATIENCE_S), "the server was not told that its client left"


def check_retries(proxy: Proxy, places: dict[str, str | int], *, keys: bool) -> None:
    session = next(session for session, place in places.items() if place == "a")

    def turn(request: str, **headers: str) -> str | int:
        return proxy.served("POST", "/v1/completions", x_tidegate_session=session, x_request_id=request, **headers)

    proxy.a.does = "refuse"
    assert turn("refused") == 503
    assert "refused" not in proxy.b.seen
    if keys:
        assert turn("refused-with-key", idempotency_key="k") == "b"
    assert proxy.served("GET", f"/v1/sessions/{session}") == "b"
    # nginx avoids a server for two seconds after three failures.
    until("the server is used again", lambda: turn("again") == 503)
    proxy.a.does = "die"
    assert turn("died") in (502, 0)
    assert "died" in proxy.a.seen
    assert "died" not in proxy.b.seen
    proxy.a.does = "answer"
    until("the server is used again", lambda: proxy.places() == places)

    proxy.a.stop()
    assert all(place == "b" for place in proxy.places().values()), "a turn was not sent to the server that is there"
    proxy.a.start()
    until("the server is used again", lambda: proxy.places() == places)


def check_health(proxy: Proxy, places: dict[str, str | int]) -> None:
    proxy.a.ready = False
    until("a server that is not ready gets requests", lambda: set(proxy.places().values()) == {"b"})
    # No server is ready: requests still reach the servers, which say what is wrong.
    proxy.b.ready = False
    until("requests go to servers that are alive", lambda: set(proxy.places().values()) == {"a", "b"})
    proxy.a.does = proxy.b.does = "refuse"
    answer = proxy.send(proxy.connect(), "POST", "/v1/completions")
    assert (answer.status, answer.headers["retry-after"]) == (503, "1"), answer.status
    assert json.loads(answer.read())["server"] in ("a", "b")
    proxy.a.does = proxy.b.does = "answer"
    # One of the two shuts down.
    proxy.a.alive = False
    until("a server that shuts down gets requests", lambda: set(proxy.places().values()) == {"b"})
    proxy.a.alive = proxy.a.ready = proxy.b.ready = True
    until("sessions are where they were", lambda: proxy.places() == places)


def check_resumption(proxy: Proxy) -> None:
    for number in range(20):
        stream = f"strm_{number:032x}"
        place = proxy.served("POST", "/v1/completions", x_makes_stream=stream)
        assert proxy.served("GET", f"/v1/streams/{stream}") == place


@contextmanager
def running(*command: str, **variables: str) -> Iterator[None]:
    """Runs a proxy. Prints the end of its log if a check fails."""
    with tempfile.TemporaryFile() as log:
        process = subprocess.Popen(command, env={**os.environ, **variables}, stdout=log, stderr=log)
        try:
            yield
        except BaseException:
            log.seek(0)
            print(log.read().decode()[-4000:], file=sys.stderr)
            raise
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)


def main() -> None:
    a, b, port = Server("a"), Server("b"), free_port()
    variables = {
        "TIDEGATE_BIND": f"127.0.0.1:{port}",
        "TIDEGATE_A": f"127.0.0.1:{a.port}",
        "TIDEGATE_B": f"127.0.0.1:{b.port}",
    }
    with running("haproxy", "-f", str(CONFIG / "haproxy.cfg"), **variables):
        proxy = Proxy(port, a, b)
        until("both servers are ready", lambda: set(proxy.places().values()) == {"a", "b"})
        places = check_affinity(proxy)
        check_streams(proxy)
        check_resumption(proxy)
        check_retries(proxy, places, keys=True)
        check_health(proxy, places)
    print("HAProxy: affinity, streams and their resumption, retries, health")

    a, b, port = Server("a"), Server("b"), free_port()
    text = (CONFIG / "nginx.conf").read_text()
    for given, used in (("127.0.0.1:8080", port), ("127.0.0.1:8081", a.port), ("127.0.0.1:8082", b.port)):
        assert text.count(given) == 1, given
        text = text.replace(given, f"127.0.0.1:{used}")
    with tempfile.TemporaryDirectory() as folder:
        changed = pathlib.Path(folder) / "nginx.conf"
        changed.write_text(text)
        # If nginx runs as root, its workers run as another user.
        os.chmod(folder, 0o755)
        with running("nginx", "-p", folder, "-c", str(changed), "-g", "daemon off;"):
            proxy = Proxy(port, a, b)
            places = check_affinity(proxy)
            check_streams(proxy)
            check_retries(proxy, places, keys=False)
    print("nginx: affinity, streams, retries")


if __name__ == "__main__":
    main()
