"""A rolling restart under load: no request fails, with the official OpenAI client and its two retries.

    python .ci/cluster/rolling.py target/debug/tidegate [--rounds 2] [--clients 16] [--replicas 3]

Each replica in turn gets SIGTERM, must exit with 0, and is started again; the next one follows when it is ready. Meanwhile,
clients take turns (streamed or not), create, fork and append through HAProxy. Each turn must be in its session exactly
once.
"""

import asyncio
import random
import signal
import statistics
import time
from collections import Counter

from openai import AsyncOpenAI, OpenAIError

from services import Cluster, Failed, cluster, options_of, run

FLAGS = ["--threads", "1", "--owner-sessions", "100000"]
# Calls are grouped by whether a replica was restarting when they began.
RESTARTING, QUIET = "while a replica restarts", "otherwise"


class Load:
    """The measurements of all clients."""

    def __init__(self) -> None:
        self.restarting, self.over = False, False
        self.latencies: dict[str, list[float]] = {RESTARTING: [], QUIET: []}
        self.retries: Counter[str] = Counter()
        self.failed: list[str] = []


class Client:
    def __init__(self, number: int, url: str, load: Load):
        self.number, self.load, self.made = number, load, 0
        self.dice = random.Random(number)
        # Without `max_retries`, the client's own default applies.
        self.openai = AsyncOpenAI(base_url=f"{url}/v1", api_key=f"rolling{number}")
        self.turns: Counter[str] = Counter()

    def key(self) -> dict[str, str]:
        """Returns the header with an idempotency key for every second client. The official client sends none by itself."""
        self.made += 1
        return {"idempotency-key": f"{self.number}-{self.made}"} if self.number % 2 else {}

    async def run(self) -> None:
        session = (await self.sessions("", {"text": "Once upon a time"}))["id"]
        while not self.load.over:
            kind = self.dice.choices(["turn", "stream", "plain", "append", "fork"], [5, 3, 2, 2, 1])[0]
            began = time.monotonic()
            when = RESTARTING if self.load.restarting else QUIET
            try:
                if kind == "append":
                    await self.sessions(f"/{session}/append", {"text": " and then"})
                    self.turns[session] += 1
                elif kind == "fork":
                    session = (await self.sessions(f"/{session}/fork", {}))["data"][0]["id"]
                    await self.complete(session, stream=False)
                else:
                    await self.complete(session if kind != "plain" else None, stream=kind == "stream")
            except OpenAIError as error:
                self.load.failed.append(f"{kind}: {error!r}")
            self.load.latencies[when].append(time.monotonic() - began)
            await asyncio.sleep(self.dice.expovariate(1 / 0.3))

    async def sessions(self, path: str, body: dict) -> dict:
        options = {"headers": self.key()}
        return await self.openai.post(f"/sessions{path}", body=body, cast_to=object, options=options)

    async def complete(self, session: str | None, stream: bool) -> None:
        extra = {"session": session, "ignore_eos": True} if session else {"ignore_eos": True}
        answer = await self.openai.completions.with_raw_response.create(
            model="tidegate-tiny", prompt=" a fox", max_tokens=self.dice.randint(4, 24), stream=stream, extra_body=extra,
            extra_headers=self.key(),
        )
        self.load.retries[f"{answer.retries_taken} retries"] += 1
        if stream:
            reasons = [chunk.choices[0].finish_reason async for chunk in answer.parse()]
            if reasons[-1:] != ["length"]:
                self.load.failed.append(f"a stream ended with {reasons[-1:]}")
        if session:
            self.turns[session] += 1

    async def check(self) -> None:
        """Checks that each session has every acknowledged change exactly once."""
        for session, count in self.turns.items():
            listed = (await self.openai.get(f"/sessions/{session}/turns", cast_to=object))["data"]
            made = sum(turn["session"] == session and turn["kind"] in ("turn", "append") for turn in listed)
            if made != count:
                self.load.failed.append(f"{session} has {made} turns, and {count} were answered")


async def restart(there: Cluster, load: Load, rounds: int) -> list[float]:
    """Restarts every replica in turn; returns how long each took to exit."""
    drains = []
    for _ in range(rounds):
        for replica in there.replicas:
            load.restarting = True
            began = time.monotonic()
            replica.signal(signal.SIGTERM)
            code = await replica.ended()
            if code != 0:
                load.failed.append(f"{replica.name} exited with {code}:\n{replica.last_lines()}")
            drains.append(time.monotonic() - began)
            replica.start()
            await replica.ready()
            # HAProxy takes this long to notice.
            await asyncio.sleep(2)
            load.restarting = False
            await asyncio.sleep(1)
    return drains


async def main() -> None:
    options = options_of(rounds=2, clients=16)
    async with cluster(options.program, options.replicas, options.embedded, FLAGS, options.keep) as there:
        load = Load()
        clients = [Client(number, there.url, load) for number in range(options.clients)]
        running = asyncio.gather(*(client.run() for client in clients))
        await asyncio.sleep(3)
        drains = await restart(there, load, options.rounds)
        load.over = True
        await running
        for client in clients:
            await client.check()
            await client.openai.close()
        await there.stop()
        report(load, drains)
        if load.failed:
            raise Failed("\n".join([f"{len(load.failed)} failures", *load.failed[:20]]))


def report(load: Load, drains: list[float]) -> None:
    median, most = statistics.median(drains), max(drains)
    print(f"\n{len(drains)} restarts; from SIGTERM to the exit: median {median:.1f} s, most {most:.1f} s")
    print("\n| calls | number | p50, ms | p90 | p99 | most |\n| --- | --- | --- | --- | --- | --- |")
    for when, latencies in load.latencies.items():
        cut = [1000 * value for value in statistics.quantiles(latencies, n=100)]
        print(f"| {when} | {len(latencies)} | {cut[49]:.0f} | {cut[89]:.0f} | {cut[98]:.0f} | {1000 * max(latencies):.0f} |")
    retries = ", ".join(f"{count} with {name}" for name, count in sorted(load.retries.items()))
    print(f"\ncompletions of the official client: {retries}; failed requests: {len(load.failed)}")


if __name__ == "__main__":
    run(main)
