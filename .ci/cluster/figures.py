"""Measures what a cluster costs: latency of commits, turns per second, and rows, bytes and requests of each back end.

    python .ci/cluster/figures.py target/release/tidegate [--requests 200] [--seconds 10] [--sessions 200]

Prints Markdown. Everything runs on this machine: the replicas, PostgreSQL, the S3 server (moto), HAProxy and the clients.
"""

import argparse
import asyncio
import contextlib
import datetime
import os
import pathlib
import platform
import random
import re
import statistics
import sys
import time
from collections import Counter

from client import Api, Record
from services import BUCKET, SIGNED, Cluster, cluster, commit_of, run, single

ONE_THREAD = ["--threads", "1", "--owner-sessions", "1000000"]
APPEND, TURN = "append of one token", "turn of one token"


def api_to(url: str, token: str = "figures") -> Api:
    return Api(url, token, Record(), random.Random(0))


async def create(api: Api) -> str:
    answer = await api.send("create", "POST", "/v1/sessions", {"text": "Once upon a time"})
    assert answer.status == 201, answer
    return answer.body["id"]


async def do(api: Api, kind: str, session: str, tokens: int = 1) -> None:
    if kind == APPEND:
        answer = await api.send(kind, "POST", f"/v1/sessions/{session}/append", {"text": " a"})
    else:
        body = {"session": session, "prompt": " a", "max_tokens": tokens, "seed": 1, "ignore_eos": True}
        answer = await api.send(kind, "POST", "/v1/completions", body)
    assert answer.status == 200, answer


async def latency(program: str, requests: int) -> None:
    """Measures the latency of commits, with one request at a time to each server in turn."""
    async with (
        single(program, ONE_THREAD) as folder,
        cluster(program, 1, embedded=True, flags=ONE_THREAD, gated=False) as s3,
        cluster(program, 1, flags=ONE_THREAD, gated=False) as shared,
    ):
        servers = {
            "embedded index, snapshots in a folder": api_to(folder.url),
            "embedded index, snapshots in S3": api_to(s3.replicas[0].url),
            "PostgreSQL, snapshots in S3": api_to(shared.replicas[0].url),
        }
        sessions = {name: await create(api) for name, api in servers.items()}
        times: dict[tuple[str, str], list[float]] = {}
        for kind in (APPEND, TURN):
            for number in range(requests + 10):
                for name, api in servers.items():
                    began = time.perf_counter()
                    await do(api, kind, sessions[name])
                    if number >= 10:
                        times.setdefault((kind, name), []).append(1000 * (time.perf_counter() - began))
        for api in servers.values():
            await api.close()
    print("\n| latency of a commit, ms | | p50 | p99 |\n| --- | --- | --- | --- |")
    for (kind, name), values in times.items():
        cut = statistics.quantiles(values, n=100)
        print(f"| {kind} | {name} | {cut[49]:.1f} | {cut[98]:.1f} |")


async def throughput(program: str, seconds: float, clients: int, tokens: int) -> None:
    """Measures turns per second with `clients` concurrent clients and one to three replicas."""
    print(f"\n| replicas | turns of {tokens} tokens per second, {clients} clients | p50, ms | p99, ms |")
    print("| --- | --- | --- | --- |")
    for replicas in (1, 2, 3):
        async with cluster(program, replicas, flags=ONE_THREAD, gated=False) as there:
            times: list[float] = []
            apis = [api_to(there.url, f"client{n}") for n in range(clients)]
            end = time.perf_counter() + seconds + 2

            async def one(api: Api) -> None:
                session = await create(api)
                while (began := time.perf_counter()) < end:
                    await do(api, TURN, session, tokens)
                    if end - seconds < began:
                        times.append(time.perf_counter() - began)

            await asyncio.gather(*(one(api) for api in apis))
            for api in apis:
                await api.close()
        cut = [1000 * value for value in statistics.quantiles(times, n=100)]
        print(f"| {replicas} | {len(times) / seconds:.1f} | {cut[49]:.0f} | {cut[98]:.0f} |", flush=True)


class Meter:
    """Counts the requests of a cluster to PostgreSQL and the S3 server."""

    def __init__(self, there: Cluster):
        self.there = there
        self.began = self.now()

    def now(self) -> Counter[str]:
        counts: Counter[str] = Counter()
        sql = "select sum(calls) from pg_stat_statements where query !~* 'pg_stat|^(begin|commit|rollback|start transaction)'"
        counts["SQL statements"] = int(float(self.there.postgres.query(sql) or 0))
        sql = "select sum(calls) from pg_stat_statements where query ~* '^(commit|rollback)'"
        counts["explicit transactions"] = int(float(self.there.postgres.query(sql) or 0))
        log = self.there.s3.log.read_text(errors="replace")
        for method in re.findall(r'"(GET|PUT|POST|DELETE|HEAD) /', log):
            # A POST deletes many objects at once.
            counts[f"S3 {method}"] += 1
        return counts

    def lap(self) -> Counter[str]:
        """Returns the requests since the last lap."""
        now = self.now()
        spent = Counter({name: now[name] - self.began[name] for name in now})
        self.began = now
        return spent


async def requests(there: Cluster) -> None:
    """Measures the requests to each back end per operation, and at rest."""
    first, second = (api_to(replica.url) for replica in there.replicas[:2])
    count = 50
    session = await create(first)
    meter = Meter(there)
    rest = 10
    await asyncio.sleep(rest)
    idle = Counter({name: value / rest for name, value in meter.lap().items()})
    rows = {f"at rest, per second, {len(there.replicas)} replicas": dict(idle)}

    async def measured(name: str, each) -> None:
        meter.lap()
        began = time.monotonic()
        for number in range(count):
            await each(number)
        spent, seconds = meter.lap(), time.monotonic() - began
        rows[name] = {key: max(0.0, (value - idle[key] * seconds) / count) for key, value in spent.items()}

    await measured("creating a session", lambda _: create(first))
    await measured("a turn on the replica that had the last one", lambda _: do(first, TURN, session))
    await measured("a turn on another replica", lambda number: do((second, first)[number % 2], TURN, session))
    await measured("reading a session", lambda _: first.send("read", "GET", f"/v1/sessions/{session}"))
    columns = sorted({key for row in rows.values() for key in row})
    print(f"\n| requests to back ends | {' | '.join(columns)} |\n| --- |{' --- |' * len(columns)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{row.get(column, 0):.1f}' for column in columns)} |")
    await first.close()
    await second.close()


async def space(there: Cluster, sessions: int, turns: int) -> None:
    """Measures the rows and bytes that sessions take."""
    api = api_to(there.url, "space")
    tables = "select relid, relname, pg_table_size(relid), pg_indexes_size(relid) from pg_stat_user_tables order by relname"

    def sizes() -> dict[str, tuple[int, int, int]]:
        there.postgres.query("vacuum analyze")
        found = {}
        for line in there.postgres.query(tables).splitlines():
            relid, name, table, indexes = line.split()
            qualified = there.postgres.query(f"select {relid}::regclass")
            found[name] = (int(there.postgres.query(f"select count(*) from {qualified}")), int(table), int(indexes))
        return found

    before, objects_before = sizes(), await objects(there)
    some = asyncio.Semaphore(8)

    async def one(number: int) -> None:
        async with some:
            session = await create(api)
            for turn in range(turns):
                body = {"session": session, "prompt": f" a fox {number}", "max_tokens": 20, "seed": turn, "ignore_eos": True}
                headers = {"idempotency-key": f"{number}-{turn}"}
                answer = await api.send("turn", "POST", "/v1/completions", body, headers)
                assert answer.status == 200, answer

    await asyncio.gather(*(one(number) for number in range(sessions)))
    after, objects_after = sizes(), await objects(there)
    print(f"\n| per session of {turns} turns with idempotency keys, {sessions} sessions | rows | bytes of rows | of indexes |")
    print("| --- | --- | --- | --- |")
    total = [0.0, 0.0, 0.0]
    for name, now in after.items():
        each = [(new - old) / sessions for new, old in zip(now, before.get(name, (0, 0, 0)))]
        total = [a + b for a, b in zip(total, each)]
        if max(each) > 0.1:
            print(f"| PostgreSQL, {name} | {each[0]:.1f} | {each[1]:.0f} | {each[2]:.0f} |")
    print(f"| PostgreSQL in all | {total[0]:.1f} | {total[1]:.0f} | {total[2]:.0f} |")
    count, size = ((new - old) / sessions for new, old in zip(objects_after, objects_before))
    print(f"| S3, objects | {count:.1f} | {size:.0f} | |")
    await api.close()


async def objects(there: Cluster) -> tuple[int, int]:
    """Returns the number and total bytes of the objects in the bucket."""
    api = api_to(there.s3_url)
    count = size = 0
    token = ""
    while True:
        async with api.session.get(f"{there.s3_url}/{BUCKET}?list-type=2{token}", headers=SIGNED) as answer:
            text = await answer.text()
        sizes = re.findall(r"<Size>(\d+)</Size>", text)
        count, size = count + len(sizes), size + sum(map(int, sizes))
        more = re.search(r"<NextContinuationToken>(.*?)<", text)
        if not more:
            await api.close()
            return count, size
        token = f"&continuation-token={more.group(1)}"


def machine() -> str:
    model = platform.machine()
    with contextlib.suppress(OSError, AttributeError):
        model = re.search(r"model name\s*: (.*)", pathlib.Path("/proc/cpuinfo").read_text()).group(1)
    return f"{len(os.sched_getaffinity(0))} cores of {model}, which servers, back ends and clients share"


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=10)
    parser.add_argument("--clients", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--sessions", type=int, default=200)
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    print(f"`{' '.join(sys.argv)}`, {commit_of(options.program)}, {machine()}, {datetime.date.today()}")
    await latency(options.program, options.requests)
    await throughput(options.program, options.seconds, options.clients, options.tokens)
    async with cluster(options.program, 2, flags=ONE_THREAD, gated=False) as there:
        await requests(there)
        await space(there, options.sessions, options.turns)


if __name__ == "__main__":
    run(main)
