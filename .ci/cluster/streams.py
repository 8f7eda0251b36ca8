"""Streams whose server is killed or shut down, each resumed on another server.

    python .ci/cluster/streams.py target/debug/tidegate [--streams 100] [--terminate] [--replicas 3] [--seed 1]

In each round, clients read streams from one replica, which gets SIGKILL (SIGTERM with --terminate) at a random point of one
of the streams. The clients resume at the next event on another replica. No event may be missing or come twice, and each
text must be that of an undisturbed server.
"""

import asyncio
import random
import signal
import statistics
import time

from client import Api, Event, Record, Stream, Violation
from services import Cluster, Failed, Replica, cluster, options_of, run, single

FLAGS = ["--threads", "1", "--drain-seconds", "10"]
AT_ONCE = 10


class End:
    """A callable that ends a server."""

    def __init__(self, server: Replica, number: signal.Signals):
        self.server, self.number, self.begun = server, number, False

    async def __call__(self) -> None:
        self.begun = True
        self.server.signal(self.number)


class Reader:
    """A client that reads one stream."""

    def __init__(self, number: int, record: Record, dice: random.Random):
        self.record, self.number = record, number
        self.delay = dice.uniform(0, 0.3)
        self.api = Api("", f"reader{number}", record, dice)
        self.first = {"text": f"Once upon a time there were {number} foxes", "seed": number}
        self.turn = {
            "prompt": " and", "max_tokens": dice.randint(60, 240), "temperature": 0.9, "seed": number, "ignore_eos": True,
        }
        self.ended_at: float | None = None
        # Events read when the server was ended, and seconds until the next one.
        self.read_before, self.silence = 0, 0.0

    async def create(self, url: str) -> str:
        self.api.url = url
        answer = await self.api.send("create", "POST", "/v1/sessions", self.first)
        if answer.status != 201:
            raise Violation(f"create: {answer}")
        return answer.body["id"]

    async def read(self, server: Replica, other: Replica, end_after: int, end: End) -> None:
        """Reads a stream. Ends its server after `end_after` events, unless that is 0."""
        self.session = await self.create(server.url)
        await asyncio.sleep(self.delay)

        headers = {"idempotency-key": f"stream{self.number}"}
        body = {**self.turn, "session": self.session}
        self.stream = Stream(self.api, body, headers, [end_after] if end_after else [], end)
        take = self.stream.take

        def taken(event: Event, told: dict[str, str]) -> None:
            if self.ended_at and not self.silence:
                self.silence = time.monotonic() - self.ended_at
            take(event, told)
            # Whatever happens, the stream resumes on the other server.
            self.api.url = other.url

        self.stream.take = taken
        reading = asyncio.create_task(self.stream.run())
        while not end.begun and not reading.done():
            await asyncio.sleep(0.001)
        self.api.url = other.url
        if self.stream.id and not self.stream.done:
            self.ended_at, self.read_before = time.monotonic(), self.stream.next
        await reading

    async def compare(self, server: Replica, url: str) -> None:
        """Compares the stream, and the final text of the session, with those of an undisturbed server."""
        self.api = Api(url, self.api.token, self.record, self.api.dice)
        there = await self.api.send("text", "GET", f"/v1/sessions/{self.session}/text")
        session = await self.create(server.url)
        answer = await self.api.send("turn", "POST", "/v1/completions", {**self.turn, "session": session})
        here = await self.api.send("text", "GET", f"/v1/sessions/{session}/text")
        text = answer.body["choices"][0]["text"]
        if self.stream.text != text:
            self.record.violation(f"stream {self.number} gave {self.stream.text!r}, and undisturbed {text!r}")
        if there.body.get("text") != here.body["text"]:
            self.record.violation(f"session {self.number} has {there.body}, and undisturbed {here.body}")
        await self.api.close()


async def round_of(there: Cluster, record: Record, dice: random.Random, number: int, terminate: bool) -> list[Reader]:
    """Reads streams from one replica, which is killed or shut down. Returns the readers that were interrupted."""
    replicas = there.replicas
    server, other = replicas[number % len(replicas)], replicas[(number + 1) % len(replicas)]
    readers = [Reader(number * AT_ONCE + n, record, dice) for n in range(AT_ONCE)]
    end = End(server, signal.SIGTERM if terminate else signal.SIGKILL)
    # The reader that begins last ends the server, so that most others are in the middle of their texts.
    last = max(readers, key=lambda reader: reader.delay)
    point = dice.randint(1, last.turn["max_tokens"] // 2)
    reading = asyncio.gather(*(reader.read(server, other, point * (reader is last), end) for reader in readers))
    while not end.begun and not reading.done():
        await asyncio.sleep(0.005)
    if end.begun and (code := await server.ended()) and terminate:
        raise Failed(f"{server.name} exited with {code} after SIGTERM:\n{server.last_lines()}")
    if server is other:
        # It is the only server, so its streams are gone.
        server.start()
    await reading
    if server is not other:
        server.start()
    await server.ready()
    for reader in readers:
        await reader.api.close()
    return [reader for reader in readers if reader.ended_at]


async def main() -> None:
    options = options_of({"terminate": "shut servers down instead of killing them"}, streams=100, seed=1)
    record, dice = Record(streams_survive=not options.embedded), random.Random(options.seed)
    interrupted: list[Reader] = []
    async with (
        single(options.program, ["--durability", "memory", "--owner-sessions", "100000"]) as undisturbed,
        cluster(options.program, options.replicas, options.embedded, FLAGS, options.keep) as there,
    ):
        number = 0
        while len(interrupted) < options.streams:
            try:
                found = await round_of(there, record, dice, number, options.terminate)
            except Violation as error:
                record.violation(str(error))
                break
            interrupted += found
            number += 1
            print(f"  round {number}: {len(found)} streams interrupted, {len(interrupted)} in all", flush=True)
            if number > options.streams:
                raise Failed("too few streams are interrupted")
        for reader in interrupted:
            await reader.compare(undisturbed, there.url)
        await there.stop()
        report(interrupted, number, record, "SIGTERM" if options.terminate else "SIGKILL")
        if record.violations:
            raise Failed(f"{len(record.violations)} violations with --seed {options.seed}")


def report(interrupted: list[Reader], rounds: int, record: Record, by: str) -> None:
    events = [reader.stream.next for reader in interrupted]
    points = sorted(reader.read_before for reader in interrupted)
    silences = sorted(reader.silence for reader in interrupted)
    print(f"\n| streams interrupted by {rounds} {by} | {len(interrupted)} |\n| --- | --- |")
    print(f"| events, each of them once | {sum(events)} |")
    middle = statistics.median(points)
    print(f"| events read before it, least, median and most | {points[0]}, {middle:.0f}, {points[-1]} |")
    print(f"| seconds until the next event, median and most | {statistics.median(silences):.2f}, {silences[-1]:.2f} |")
    print(f"| texts that differ, events missing or doubled, streams lost | {len(record.violations)} |")


if __name__ == "__main__":
    run(main)
