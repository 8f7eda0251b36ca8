"""The processes of a cluster on this machine: PostgreSQL, an S3 server, HAProxy and replicas of Tidegate.

Each replica reaches PostgreSQL and the S3 server through a gate of its own, a TCP proxy that can refuse or hold up all traffic.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import NoReturn

import aiohttp

from ports import HOST, free_port

BUCKET, FOLDER = "tidegate-ci", "cluster"
# It must not appear in any log.
SECRET = "chaos-and-order"
STORE = ["--store", f"s3://{BUCKET}/{FOLDER}"]
PATIENCE_S = 120
# Headers for our own requests to the S3 server, which verifies no signatures.
SIGNED = {"authorization": "AWS4-HMAC-SHA256 Credential=ci/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0"}
# What the tests need, by package name, for the error message.
PACKAGES = "postgresql and haproxy from Debian, moto[server] and aiohttp from PyPI"


class Failed(Exception):
    """A failure that ends the program."""


def found(name: str, *folders: str) -> str:
    """Returns the path of a program."""
    places = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", *folders])
    path = shutil.which(name, path=places)
    if path is None:
        raise Failed(f"{name} not found; these tests need {PACKAGES}")
    return path


async def until(holds: Callable[[], object], what: str, patience: float = PATIENCE_S) -> None:
    """Waits until a function, or coroutine function, returns something true."""
    end = time.monotonic() + patience
    while True:
        result = holds()
        if asyncio.iscoroutine(result):
            result = await result
        if result:
            return
        if time.monotonic() > end:
            raise Failed(f"{what} takes more than {patience} s")
        await asyncio.sleep(0.05)


class Child:
    """A process that can be restarted. All its output goes to one file."""

    def __init__(self, name: str, folder: pathlib.Path, command: list[str], user: str | None = None, **env: str):
        self.name, self.command, self.user = name, command, user
        self.log = folder / f"{name}.log"
        self.env = {**os.environ, **env}
        self.process: subprocess.Popen | None = None

    def start(self) -> None:
        with self.log.open("ab") as log:
            rights = {"user": self.user, "group": self.user} if self.user else {}
            self.process = subprocess.Popen(
                self.command, stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=self.env,
                start_new_session=True, **rights,
            )

    def running(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def check_running(self) -> None:
        if not self.running():
            raise Failed(f"{self.name} has ended with {self.process.returncode}:\n{self.last_lines()}")

    def signal(self, number: signal.Signals) -> None:
        if self.running():
            self.process.send_signal(number)

    async def ended(self, patience: float = PATIENCE_S) -> int:
        """Waits until the process has ended; returns its exit code."""
        await until(lambda: not self.running(), f"the end of {self.name}", patience)
        return self.process.returncode

    def kill(self) -> None:
        if self.running():
            self.process.kill()
            self.process.wait()

    def last_lines(self, count: int = 20) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-count:])


class Postgres(Child):
    """A PostgreSQL server with its own data folder."""

    def __init__(self, folder: pathlib.Path, user: str | None):
        versions = sorted(pathlib.Path("/usr/lib/postgresql").glob("*/bin"), key=lambda path: float(path.parent.name))
        bin_folder = str(versions[-1]) if versions else ""
        self.port = free_port()
        self.psql = found("psql", bin_folder)
        data, password = folder / "postgres", folder / "password"
        data.mkdir()
        password.write_text(SECRET)
        if user:
            shutil.chown(data, user, user)
        made = subprocess.run(
            [found("initdb", bin_folder), "-D", str(data), "-U", "tidegate", "-A", "scram-sha-256", "-E", "UTF8",
             "--pwfile", str(password), "--locale=C.UTF-8"],
            user=user, cwd="/", capture_output=True, text=True,
        )
        if made.returncode != 0:
            raise Failed(f"initdb failed:\n{made.stdout}{made.stderr}")
        settings = {
            "listen_addresses": HOST, "port": str(self.port), "unix_socket_directories": "", "max_connections": "200",
            "shared_preload_libraries": "pg_stat_statements", "pg_stat_statements.max": "10000",
        }
        command = [found("postgres", bin_folder), "-D", str(data)]
        command += [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        super().__init__("postgresql", folder, command, user)

    def query(self, sql: str) -> str:
        command = [self.psql, "-XAtqw", "-F", " ", "-h", HOST, "-p", str(self.port), "-U", "tidegate", "-c", sql, "postgres"]
        done = subprocess.run(command, env={**os.environ, "PGPASSWORD": SECRET}, capture_output=True, text=True)
        if done.returncode != 0:
            raise RuntimeError(done.stderr)
        return done.stdout.strip()

    def answers(self) -> bool:
        with contextlib.suppress(RuntimeError):
            return self.query("select 1") == "1"
        return False

    async def restart(self, how: signal.Signals) -> None:
        """Restarts the server: fast (SIGINT: ends all connections) or immediate (SIGQUIT: as after a crash)."""
        self.signal(how)
        await self.ended()
        self.start()
        await until(self.answers, "the restart of PostgreSQL")


class Gate:
    """A TCP proxy that can refuse connections or hold up all traffic."""

    def __init__(self, target: int):
        self.target, self.port = target, free_port()
        self.server: asyncio.Server | None = None
        self.open = asyncio.Event()
        self.open.set()
        self.writers: set[asyncio.StreamWriter] = set()

    async def start(self) -> None:
        if self.server is None:
            self.server = await asyncio.start_server(self.accept, HOST, self.port)

    async def refuse(self) -> None:
        """Stops listening and resets all connections."""
        if self.server is not None:
            self.server.close()
            self.server = None
        for writer in list(self.writers):
            writer.transport.abort()

    def hold(self) -> None:
        """Lets nothing pass but keeps connections open, as in a network partition. Data sent meanwhile arrives later."""
        self.open.clear()

    async def heal(self) -> None:
        self.open.set()
        await self.start()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            there = await asyncio.open_connection(HOST, self.target)
        except OSError:
            writer.transport.abort()
            return
        self.writers |= {writer, there[1]}
        try:
            await asyncio.gather(self.pump(reader, there[1]), self.pump(there[0], writer))
        except OSError:
            pass
        finally:
            for end in (writer, there[1]):
                end.transport.abort()
                self.writers.discard(end)

    async def pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1 << 18):
            await self.open.wait()
            writer.write(data)
            await writer.drain()
        await self.open.wait()
        if writer.can_write_eof():
            writer.write_eof()


class Replica(Child):
    """A Tidegate server."""

    def __init__(self, name: str, folder: pathlib.Path, program: str, flags: list[str], gates: dict[str, Gate], **env: str):
        self.port, self.gates = free_port(), gates
        self.url = f"http://{HOST}:{self.port}"
        command = [program, "serve", "--device", "cpu", "--port", str(self.port), "--data-dir", str(folder / name), *flags]
        super().__init__(name, folder, command, **env)

    async def is_ready(self) -> bool:
        self.check_running()
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError, OSError):
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session,
                session.get(f"{self.url}/ready") as answer,
            ):
                return answer.status == 200
        return False

    async def ready(self) -> None:
        await until(self.is_ready, f"the start of {self.name}")


class Cluster:
    """Replicas behind HAProxy. With the embedded index, there is one replica, with the index in its folder."""

    def __init__(
        self, folder: pathlib.Path, program: str, replicas: int, embedded: bool, flags: list[str], gated: bool
    ):
        # PostgreSQL does not run as root.
        user = "postgres" if os.getuid() == 0 else None
        self.folder, self.program = folder, program
        self.postgres = None if embedded else Postgres(folder, user)
        self.s3_port = s3_port = free_port()
        # By default moto answers with HTTP/1.0, so that every request would need a new connection.
        serve = "import sys, werkzeug.serving as w; w.WSGIRequestHandler.protocol_version = 'HTTP/1.1'; " \
            "from moto.server import main; main(sys.argv[1:])"
        self.s3 = Child("s3", folder, [sys.executable, "-c", serve, "-H", HOST, "-p", str(s3_port)], TMPDIR=str(folder))
        self.s3_url = f"http://{HOST}:{s3_port}"
        self.replicas = []
        for number in range(1 if embedded else replicas):
            ports = {"store": s3_port, **({"index": self.postgres.port} if self.postgres else {})}
            gates = {name: Gate(port) for name, port in ports.items()} if gated else {}
            ports |= {name: gate.port for name, gate in gates.items()}
            index = self.index(ports["index"]) if self.postgres else []
            aws = self.aws(ports["store"])
            self.replicas.append(Replica(f"replica{number}", folder, program, [*index, *STORE, *flags], gates, **aws))
        self.proxy = Proxy(folder, self.replicas)
        self.url = self.proxy.url

    @staticmethod
    def index(port: int) -> list[str]:
        return ["--index", f"postgres://tidegate:{SECRET}@{HOST}:{port}/postgres"]

    @staticmethod
    def aws(port: int) -> dict[str, str]:
        return {
            "AWS_ENDPOINT": f"http://{HOST}:{port}", "AWS_ALLOW_HTTP": "true", "AWS_REGION": "us-east-1",
            "AWS_ACCESS_KEY_ID": "ci", "AWS_SECRET_ACCESS_KEY": SECRET,
        }

    async def verify(self) -> str:
        """Runs `tidegate sessions verify`, which compares index and snapshots, while the replicas run."""
        verify = Child("verify", self.folder, [self.program, "sessions", "verify", *self.index(self.postgres.port), *STORE],
                       **self.aws(self.s3_port))
        verify.start()
        if await verify.ended() != 0:
            raise Failed(f"`tidegate sessions verify`:\n{verify.last_lines()}")
        return verify.last_lines(1)

    async def start(self) -> None:
        for child in (self.postgres, self.s3):
            if child:
                child.start()
        if self.postgres:
            await until(self.postgres.answers, "the start of PostgreSQL")
            self.postgres.query("create extension pg_stat_statements")
        await until(self.bucket, "the start of the S3 server")
        for replica in self.replicas:
            for gate in replica.gates.values():
                await gate.start()
            replica.start()
        for replica in self.replicas:
            await replica.ready()
        self.proxy.start()
        await until(self.answers, "the start of HAProxy")

    async def bucket(self) -> bool:
        """Creates the bucket; returns whether that succeeded."""
        with contextlib.suppress(aiohttp.ClientError):
            async with aiohttp.ClientSession() as session, session.put(f"{self.s3_url}/{BUCKET}", headers=SIGNED) as answer:
                return answer.status == 200
        return False

    async def answers(self) -> bool:
        """Whether a request gets through HAProxy to a replica that is ready."""
        self.proxy.check_running()
        with contextlib.suppress(aiohttp.ClientError, asyncio.TimeoutError):
            timeout = aiohttp.ClientTimeout(total=5)
            async with aiohttp.ClientSession(timeout=timeout) as session, session.get(f"{self.url}/v1/models") as answer:
                return answer.status == 200
        return False

    async def heal(self) -> None:
        """Ends all faults, and waits until everything is ready."""
        self.s3.signal(signal.SIGCONT)
        if self.postgres and not self.postgres.running():
            self.postgres.start()
        for replica in self.replicas:
            for gate in replica.gates.values():
                await gate.heal()
            replica.signal(signal.SIGCONT)
            if not replica.running():
                replica.start()
        for replica in self.replicas:
            await replica.ready()
        await until(self.answers, "an answer through HAProxy")

    async def stop(self) -> None:
        """Ends the replicas with SIGTERM; each must exit with 0."""
        for replica in self.replicas:
            replica.signal(signal.SIGTERM)
        for replica in self.replicas:
            code = await replica.ended()
            if code != 0:
                raise Failed(f"{replica.name} exited with {code} after SIGTERM:\n{replica.last_lines()}")

    def leaks(self) -> list[str]:
        """Returns the logs of replicas that contain the secret."""
        return [str(replica.log) for replica in self.replicas if SECRET in replica.log.read_text(errors="replace")]

    def kill(self) -> None:
        children = [self.proxy, *self.replicas, self.s3, *([self.postgres] if self.postgres else [])]
        for child in children:
            child.signal(signal.SIGCONT)
            if child is self.postgres:
                # SIGKILL would leave its processes and shared memory behind.
                child.signal(signal.SIGQUIT)
                child.process and child.process.wait()
            child.kill()


class Proxy(Child):
    """HAProxy, as docker/haproxy.cfg configures it."""

    CONFIG = pathlib.Path(__file__).parents[2] / "docker" / "haproxy.cfg"

    def __init__(self, folder: pathlib.Path, replicas: list[Replica]):
        bind = f"{HOST}:{free_port()}"
        self.url = f"http://{bind}"
        servers = "".join(f"    server {replica.name} {HOST}:{replica.port}\n" for replica in replicas)
        text, lists = re.subn(r"(?m)(^    server \w+ .*\n?)+", servers, self.CONFIG.read_text())
        assert lists == 2, f"{self.CONFIG} has {lists} lists of servers"
        config = folder / "haproxy.cfg"
        config.write_text(text)
        super().__init__("haproxy", folder, [found("haproxy"), "-db", "-f", str(config)], TIDEGATE_BIND=bind)


@contextlib.asynccontextmanager
async def cluster(
    program: str, replicas: int, embedded: bool = False, flags: list[str] | None = None, keep: bool = False,
    gated: bool = True,
) -> AsyncIterator[Cluster]:
    """Runs a cluster in a temporary folder, which is kept if `keep` is set or something fails. Gates cost CPU time."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tidegate-cluster-"))
    # PostgreSQL may run as another user.
    folder.chmod(0o755)
    made = Cluster(folder, program, replicas, embedded, flags or [], gated)
    try:
        await made.start()
        yield made
    except BaseException:
        keep = True
        raise
    finally:
        made.kill()
        if keep:
            print(f"logs and data are in {folder}", file=sys.stderr)
        else:
            shutil.rmtree(folder, ignore_errors=True)


@contextlib.asynccontextmanager
async def single(program: str, flags: list[str] | None = None) -> AsyncIterator[Replica]:
    """Runs one undisturbed server with the embedded index and its snapshots in a folder."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="tidegate-single-"))
    server = Replica("single", folder, program, flags or [], {})
    try:
        server.start()
        await server.ready()
        yield server
    finally:
        server.kill()
        shutil.rmtree(folder, ignore_errors=True)


def run(main: Callable[[], Coroutine]) -> NoReturn:
    """Runs a program to its end. SIGTERM ends it like Ctrl-C, so that it stops the processes that it has started."""
    # asyncio would log every connection that is open when a program fails.
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)

    async def cancellable() -> None:
        task = asyncio.current_task()
        asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
        await main()

    try:
        asyncio.run(cancellable())
    except Failed as failure:
        raise SystemExit(f"failed: {failure}") from None
    raise SystemExit(0)


def commit_of(program: str) -> str:
    version = subprocess.run([program, "--version"], capture_output=True, text=True, check=True).stdout.strip()
    return re.sub(r"\s+", " ", version)


def options_of(switches: dict[str, str] | None = None, **numbers: int) -> argparse.Namespace:
    """Parses a command line: the server's program, integers and switches by name, and how to run the cluster."""
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    for name, default in {**numbers, "replicas": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    switches = {**(switches or {}), "embedded": "one server with the embedded index", "keep": "keep logs and data"}
    for name, what in switches.items():
        parser.add_argument(f"--{name}", action="store_true", help=what)
    return parser.parse_args()
