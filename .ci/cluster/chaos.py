"""Faults under load: every acknowledged change exists exactly once, and every text is that of an undisturbed run.

    python .ci/cluster/chaos.py target/debug/tidegate [--minutes 1] [--clients 50] [--replicas 3] [--seed 1]

Clients take turns, append, fork, rewind, read, delete, and leave streams and resume them, through HAProxy. Replicas are
killed, stopped for longer than a lease, shut down, and cut off from PostgreSQL and S3. PostgreSQL restarts, and the S3
server does not answer or refuses connections. Then all faults end, the clients' records are compared with the cluster, and
all operations are repeated on one server with the embedded index, which must give the same texts.
"""

import argparse
import asyncio
import contextlib
import random
import signal
import statistics
import time
from collections import Counter

import aiohttp

from client import Api, Record, Refused, Stream, Violation
from ledger import Conversation, Ledger, Operation, verify
from services import Cluster, Failed, Replica, cluster, run, single

LEASE_S = 10
WORDS = "the a fox bird boy girl tree river ran saw found said and but then once little big red happy sad home".split()
MOST_SESSIONS = 4
FLAGS = ["--threads", "1", "--keep-versions", "5", "--owner-sessions", "1000", "--drain-seconds", "10"]


class Client:
    """Performs random operations on its own sessions, one after another."""

    def __init__(self, number: int, url: str, record: Record, seed: int, think: float):
        self.dice = random.Random(f"{seed}/{number}")
        self.record, self.think = record, think
        # With affinity, the proxy sends all turns of a session to one replica; other turns go to the replicas in turn.
        self.has_affinity = number % 3 == 0
        self.ledger = Ledger(f"client{number}", record)
        self.api = Api(url, self.ledger.token, record, self.dice)

    async def run(self, end: float) -> None:
        kinds = {self.turn: 34, self.stream: 20, self.append: 10, self.fork: 6, self.rewind: 8, self.read: 10,
                 self.abandon: 6, self.twice: 6, self.delete: 2}
        await self.guarded(self.create, None)
        while time.monotonic() < end:
            await asyncio.sleep(self.dice.expovariate(1 / self.think))
            conversations = list(self.ledger.conversations.values())
            if not conversations:
                await self.guarded(self.create, None)
                continue
            do = self.dice.choices(list(kinds), list(kinds.values()))[0]
            await self.guarded(do, self.dice.choice(conversations))

    async def last_turns(self) -> None:
        """Takes a last turn in every session, which must succeed."""
        for conversation in list(self.ledger.conversations.values()):
            await self.guarded(self.turn, conversation)

    async def guarded(self, do, conversation: Conversation | None) -> None:
        try:
            await (do(conversation) if conversation else do())
        except Violation as error:
            self.record.violation(f"{self.ledger.token} {error}")
            if conversation:
                conversation.doubtful |= set(self.ledger.operations)

    def text(self) -> str:
        return " " + " ".join(self.dice.choices(WORDS, k=self.dice.randint(1, 6)))

    def next_turn(self, kind: str, conversation: Conversation) -> tuple[Operation, dict]:
        body = {
            "session": conversation.id, "prompt": self.text(), "max_tokens": self.dice.randint(4, 24), "temperature": 0.9,
            "seed": self.dice.randrange(1 << 32), "ignore_eos": True,
        }
        operation = self.ledger.new(kind, conversation.root, "/v1/completions", body, conversation.id)
        body["label"] = operation.id
        return operation, self.headers(operation, conversation)

    def headers(self, operation: Operation, conversation: Conversation) -> dict:
        headers = {"idempotency-key": operation.id}
        if self.dice.random() < 0.5:
            headers["if-match"] = conversation.head
        if self.dice.random() < 0.3:
            headers["prefer"] = "wait=5"
        if self.has_affinity:
            headers["x-tidegate-session"] = conversation.id
        return headers

    async def create(self) -> None:
        body = {"text": "Once upon a time" + self.text(), "seed": self.dice.randrange(1 << 32)}
        operation = self.ledger.new("create", "", "/v1/sessions", body)
        body |= {"label": operation.id, "metadata": {"operation": operation.id}}
        answer = await self.api.send("create", "POST", operation.path, body, {"idempotency-key": operation.id})
        self.expect(answer.status == 201, operation, answer)
        operation.sessions = [answer.body["id"]]
        operation.session = answer.body["id"]
        self.acknowledge(operation, answer.body["version"], answer.body["parent"])
        self.ledger.conversations[operation.session] = Conversation(operation.session, operation.root, operation.version)

    async def turn(self, conversation: Conversation) -> None:
        operation, headers = self.next_turn("turn", conversation)
        answer = await self.api.send("turn", "POST", operation.path, operation.body, headers)
        await self.turned(operation, conversation, answer.status, answer.body)

    async def twice(self, conversation: Conversation) -> None:
        """Sends the same turn twice at the same time; both must get the same result."""
        operation, headers = self.next_turn("twice", conversation)
        send = [self.api.send("twice", "POST", operation.path, operation.body, headers) for _ in range(2)]
        first, second = await asyncio.gather(*send)
        if first.status == second.status == 200:
            same = [(answer.body["session"]["version"], answer.body["choices"][0]["text"]) for answer in (first, second)]
            self.expect(same[0] == same[1], operation, same)
        else:
            # The later request is retried and answered by the receipt, even with If-Match. A refusal is the same for both.
            self.expect(first.status == second.status, operation, (first, second))
        await self.turned(operation, conversation, first.status, first.body)

    async def stream(self, conversation: Conversation) -> None:
        operation, headers = self.next_turn("stream", conversation)
        most = operation.body["max_tokens"]
        cuts = sorted(self.dice.sample(range(1, most), self.dice.randint(0, 2)))
        stream = Stream(self.api, operation.body, headers, cuts)
        try:
            await stream.run()
        except Refused as error:
            await self.turned(operation, conversation, error.status, {})
            return
        body = {"choices": [{"text": stream.text}], "session": stream.session}
        await self.turned(operation, conversation, 200, body)

    async def turned(self, operation: Operation, conversation: Conversation, status: int, body: dict) -> None:
        if status == 412:
            await self.read_head(conversation, operation)
            return
        self.expect(status == 200, operation, (status, body))
        session = body["session"]
        self.expect(session["id"] == conversation.id, operation, session)
        operation.text = body["choices"][0]["text"]
        self.moved(operation, conversation, session["version"], session["parent"])

    async def append(self, conversation: Conversation) -> None:
        body = {"text": self.text()}
        path = f"/v1/sessions/{conversation.id}/append"
        operation = self.ledger.new("append", conversation.root, path, body, conversation.id)
        body["label"] = operation.id
        answer = await self.api.send("append", "POST", path, body, self.headers(operation, conversation))
        if answer.status == 412:
            await self.read_head(conversation, operation)
            return
        self.expect(answer.status == 200, operation, answer)
        self.moved(operation, conversation, answer.body["version"], answer.body["parent"])

    async def fork(self, conversation: Conversation) -> None:
        n = self.dice.randint(1, 2)
        if len(self.ledger.conversations) + n > MOST_SESSIONS:
            await self.turn(conversation)
            return
        path, version = f"/v1/sessions/{conversation.id}/fork", conversation.head
        body = {"n": n, "version": version}
        operation = self.ledger.new("fork", conversation.root, path, body, conversation.id)
        body["metadata"] = {"operation": operation.id}
        answer = await self.api.send("fork", "POST", path, body, {"idempotency-key": operation.id})
        self.expect(answer.status == 201, operation, answer)
        forks = answer.body["data"]
        self.expect(len(forks) == n and all(fork["version"] == version for fork in forks), operation, answer)
        operation.sessions = [fork["id"] for fork in forks]
        self.acknowledge(operation, version, None)
        for fork in forks:
            self.ledger.conversations[fork["id"]] = Conversation(fork["id"], conversation.root, version)

    async def rewind(self, conversation: Conversation) -> None:
        answer = await self.api.send("turns", "GET", f"/v1/sessions/{conversation.id}/turns")
        if answer.status != 200:
            raise Violation(f"turns of {conversation.id}: {answer}")
        kept = [turn["version"] for turn in answer.body["data"] if turn["kept"]]
        target = self.dice.choice(kept)
        path, headers = f"/v1/sessions/{conversation.id}/rewind", {"if-match": conversation.head}
        conversation.rewound.add(target)
        tries = len(self.record.failures)
        answer = await self.api.send("rewind", "POST", path, {"version": target}, headers)
        if len(self.record.failures) > tries:
            # A delayed attempt may still be executed later, whenever the head matches its If-Match again.
            conversation.targets.add(target)
        if answer.status == 412:
            # An attempt whose answer was lost did rewind, or a doubtful operation has moved the head.
            conversation.targets.add(target)
            await self.read_head(conversation, None)
            return
        # 404: a doubtful operation has released the version.
        if answer.status == 404 and not conversation.is_certain:
            return
        if answer.status != 200 or answer.body["version"] != target:
            raise Violation(f"rewind of {conversation.id} to {target}: {answer}")
        conversation.head = target

    async def read(self, conversation: Conversation) -> None:
        answer = await self.api.send("read", "GET", f"/v1/sessions/{conversation.id}")
        if answer.status != 200:
            raise Violation(f"{conversation.id} was acknowledged: {answer}")
        if conversation.is_certain and answer.body["version"] != conversation.head:
            raise Violation(f"{conversation.id} is at {answer.body['version']} after {conversation.head} was acknowledged")

    async def delete(self, conversation: Conversation) -> None:
        """Deletes a session. Its forks keep the versions that they share with it."""
        del self.ledger.conversations[conversation.id]
        self.ledger.deleted.add(conversation.id)
        path, tries = f"/v1/sessions/{conversation.id}", len(self.record.failures)
        answer = await self.api.send("delete", "DELETE", path)
        # An attempt without an answer may have deleted it.
        if answer.status >= 300 and not (answer.status == 404 and len(self.record.failures) > tries):
            raise Violation(f"delete {conversation.id}: {answer}")
        answer = await self.api.send("read", "GET", path)
        if answer.status != 404:
            raise Violation(f"{conversation.id} was deleted: {answer}")

    async def abandon(self, conversation: Conversation) -> None:
        """Sends a turn, disconnects before the answer, and never asks again."""
        operation, headers = self.next_turn("abandoned", conversation)
        operation.body["on_disconnect"] = self.dice.choice(["rollback", "continue"])
        conversation.doubtful.add(operation.id)
        try:
            async with asyncio.timeout(self.dice.uniform(0.001, 0.2)):
                answer = await self.api.attempt("POST", operation.path, operation.body, headers)
        except (asyncio.TimeoutError, aiohttp.ClientError, OSError):
            return
        if answer.status == 200:
            conversation.doubtful.discard(operation.id)
            await self.turned(operation, conversation, 200, answer.body)

    async def read_head(self, conversation: Conversation, operation: Operation | None) -> None:
        """Reads the head after a 412. Only a doubtful operation may have changed it."""
        answer = await self.api.send("read", "GET", f"/v1/sessions/{conversation.id}")
        head = answer.body.get("version")
        if conversation.is_certain:
            raise Violation(f"412 for {operation}, with {conversation} and the head {head}")
        conversation.head = head

    def moved(self, operation: Operation, conversation: Conversation, version: str, parent: str) -> None:
        if conversation.is_certain:
            self.expect(parent == conversation.head, operation, f"parent {parent}, and the head was {conversation.head}")
        self.acknowledge(operation, version, parent)
        conversation.head = version

    @staticmethod
    def acknowledge(operation: Operation, version: str, parent: str | None) -> None:
        operation.acknowledged, operation.version, operation.parent = True, version, parent

    @staticmethod
    def expect(holds: bool, operation: Operation, found: object) -> None:
        if not holds:
            raise Violation(f"{operation.kind} {operation.id}: {str(found)[:500]}")


class Overtaken(Client):
    """Takes turns on a replica that is about to be stopped, then continues on another: the first will be too late."""

    SESSIONS = 4

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self.leaving: list[asyncio.Task] = []

    async def begin(self, replica: Replica) -> list[Conversation]:
        """Sends turns to the replica, and returns once they run."""
        known = set(self.ledger.conversations)
        for _ in range(self.SESSIONS):
            await self.guarded(self.create, None)
        conversations = [new for id, new in self.ledger.conversations.items() if id not in known]
        direct = Api(replica.url, self.ledger.token, self.record, self.dice)
        for conversation in conversations:
            operation, _ = self.next_turn("overtaken", conversation)
            operation.body |= {"max_tokens": 400, "on_disconnect": "continue"}
            conversation.doubtful.add(operation.id)
            self.leaving.append(asyncio.create_task(self.leave(direct, operation)))
        with contextlib.suppress(asyncio.TimeoutError, aiohttp.ClientError, OSError):
            async with asyncio.timeout(1):
                for conversation in conversations:
                    path = f"/v1/sessions/{conversation.id}"
                    while not (await direct.attempt("GET", path)).body.get("in_use"):
                        await asyncio.sleep(0.005)
        return conversations

    async def leave(self, direct: Api, operation: Operation) -> None:
        """Sends a turn without an idempotency key, and waits at most 2 s for the answer."""
        try:
            async with asyncio.timeout(2):
                await direct.attempt("POST", operation.path, operation.body)
        except (asyncio.TimeoutError, aiohttp.ClientError, OSError):
            self.record.counts["turns left on a replica that stops"] += 1

    async def go_on(self, conversations: list[Conversation], other: Replica) -> None:
        """Takes a turn in each session on the other replica, which may run it once the first one has lost its lease."""
        usual, self.api.url = self.api.url, other.url
        await asyncio.gather(*(self.guarded(self.turn, conversation) for conversation in conversations))
        self.api.url = usual


class Stateless:
    """Sends completions without sessions, which need neither PostgreSQL nor the S3 server."""

    def __init__(self, number: int, url: str, record: Record, think: float):
        self.dice, self.record, self.think = random.Random(number), record, think
        self.api = Api(url, f"stateless{number}", record, self.dice)

    async def run(self, end: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(self.dice.expovariate(1 / self.think))
            body = {"prompt": "Once upon a time", "max_tokens": 8, "ignore_eos": True}
            answer = await self.api.send("stateless", "POST", "/v1/completions", body)
            if answer.status != 200:
                self.record.violation(f"a completion without a session: {answer}")
            self.record.counts["completions without sessions"] += 1


class Faults:
    """Runs two series of faults at the same time: one on single replicas, one on the services that all replicas share."""

    def __init__(self, there: Cluster, record: Record, seed: int, overtaken: Overtaken):
        self.cluster, self.record, self.overtaken = there, record, overtaken
        self.dice = random.Random(f"{seed}/faults")

    async def run(self, end: float) -> None:
        replica = {self.kill: "SIGKILL of a replica", self.stop: "SIGSTOP of a replica for longer than a lease",
                   self.term: "SIGTERM of a replica", self.cut_s3: "a replica cut off from S3"}
        shared = {self.s3_stops: "S3 server does not answer", self.s3_refuses: "S3 server refuses connections"}
        if self.cluster.postgres:
            replica |= {self.cut: "a replica cut off from PostgreSQL: refused",
                        self.hold: "a replica cut off from PostgreSQL: nothing passes"}
            shared |= {self.restart_fast: "PostgreSQL restarts (fast)",
                       self.restart_immediate: "PostgreSQL restarts (immediate)"}
        await asyncio.gather(self.track(replica, end, 1.0, True), self.track(shared, end, 4.0, False))

    async def track(self, faults: dict, end: float, pause: float, on_replica: bool) -> None:
        deck: list = []
        while True:
            await asyncio.sleep(pause * self.dice.uniform(0.5, 1.5))
            if time.monotonic() > end:
                return
            if not deck:
                deck = list(faults)
                self.dice.shuffle(deck)
            do = deck.pop()
            with self.record.fault(faults[do]):
                await (do(self.dice.choice(self.cluster.replicas)) if on_replica else do())

    async def kill(self, replica: Replica) -> None:
        replica.kill()
        await asyncio.sleep(self.dice.uniform(0.2, 2.0))
        replica.start()
        await replica.ready()

    async def stop(self, replica: Replica) -> None:
        others = [other for other in self.cluster.replicas if other is not replica]
        turns = await self.overtaken.begin(replica)
        replica.signal(signal.SIGSTOP)
        if others:
            await self.overtaken.go_on(turns, self.dice.choice(others))
        else:
            await asyncio.sleep(LEASE_S + 2)
        replica.signal(signal.SIGCONT)
        await replica.ready()

    async def term(self, replica: Replica) -> None:
        replica.signal(signal.SIGTERM)
        code = await replica.ended()
        if code != 0:
            self.record.violation(f"{replica.name} exited with {code} after SIGTERM")
        replica.start()
        await replica.ready()

    async def gated(self, replica: Replica, name: str, refuse: bool, seconds: float) -> None:
        gate = replica.gates[name]
        if refuse:
            await gate.refuse()
        else:
            gate.hold()
        await asyncio.sleep(seconds)
        await gate.heal()
        await replica.ready()

    async def cut(self, replica: Replica) -> None:
        await self.gated(replica, "index", True, self.dice.uniform(2, 6))

    async def hold(self, replica: Replica) -> None:
        await self.gated(replica, "index", False, self.dice.uniform(3, LEASE_S + 3))

    async def cut_s3(self, replica: Replica) -> None:
        await self.gated(replica, "store", self.dice.random() < 0.5, self.dice.uniform(2, 6))

    async def s3_stops(self) -> None:
        self.cluster.s3.signal(signal.SIGSTOP)
        await asyncio.sleep(self.dice.uniform(2, 6))
        self.cluster.s3.signal(signal.SIGCONT)

    async def s3_refuses(self) -> None:
        gates = [replica.gates["store"] for replica in self.cluster.replicas]
        for gate in gates:
            await gate.refuse()
        await asyncio.sleep(self.dice.uniform(2, 6))
        for gate in gates:
            await gate.heal()

    async def restart_fast(self) -> None:
        await self.cluster.postgres.restart(signal.SIGINT)

    async def restart_immediate(self) -> None:
        await self.cluster.postgres.restart(signal.SIGQUIT)


def table(record: Record, end: float) -> None:
    """Prints what happened during each kind of fault. Faults overlap; an event during two faults counts for both."""
    print("\n| fault | times | seconds | failed attempts | longest time without a change, s | violations |")
    print("| --- | --- | --- | --- | --- | --- |")
    # After `end`, clients only finish what they have begun.
    changes = sorted(at for at in record.changes if at <= end)
    gaps = [(after - before, before, after) for before, after in zip(changes, changes[1:])]
    for kind in sorted({fault.kind for fault in record.faults}):
        faults = [fault for fault in record.faults if fault.kind == kind]

        def during(at: float) -> bool:
            return any(fault.began <= at <= fault.ended + 1 for fault in faults)

        failed = sum(during(at) for at, _ in record.failures)
        longest = max((gap for gap, before, after in gaps
                       if any(before < fault.ended and after > fault.began for fault in faults)), default=0)
        violations = sum(during(at) for at, _ in record.violations)
        seconds = sum(fault.ended - fault.began for fault in faults)
        print(f"| {kind} | {len(faults)} | {seconds:.0f} | {failed} | {longest:.1f} | {violations} |")
    print(f"| in all | {len(record.faults)} | | {len(record.failures)} | "
          f"{max((gap for gap, *_ in gaps), default=0):.1f} | {len(record.violations)} |")
    print("\n| failed attempts, all of them sent again | |\n| --- | --- |")
    for what, count in Counter(what for _, what in record.failures).most_common(40):
        print(f"| {what} | {count} |")


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("program")
    parser.add_argument("--minutes", type=float, default=1)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--replicas", type=int, default=3)
    parser.add_argument("--think", type=float, default=1.0, help="mean pause of a client between two requests, in seconds")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--embedded", action="store_true", help="one server with the embedded index")
    parser.add_argument("--calm", action="store_true", help="no faults")
    parser.add_argument("--keep", action="store_true", help="keep logs and data")
    options = parser.parse_args()
    record = Record(streams_survive=not options.embedded)
    async with cluster(options.program, options.replicas, options.embedded, FLAGS, options.keep) as there:
        print(f"{len(there.replicas)} replicas are ready", flush=True)
        began = time.monotonic()
        end = began + 60 * options.minutes
        clients = [Client(n, there.url, record, options.seed, options.think) for n in range(options.clients)]
        stateless = [Stateless(n, there.url, record, options.think) for n in range(3)]
        running = asyncio.gather(*(client.run(end) for client in [*clients, *stateless]))
        overtaken = Overtaken(options.clients, there.url, record, options.seed, options.think)
        if not options.calm:
            await Faults(there, record, options.seed, overtaken).run(end)
        await asyncio.sleep(max(0.0, end - time.monotonic()))
        await there.heal()
        await asyncio.gather(running, *overtaken.leaving)
        clients.append(overtaken)
        healed, disturbed = time.monotonic(), len(record.failures)
        await asyncio.gather(*(client.last_turns() for client in clients))
        await verified(options, clients, record, there)
        for client in [*clients, *stateless]:
            await client.api.close()
        if there.postgres:
            print(f"tidegate sessions verify: {await there.verify()}")
        if any("stateless: 503 store_unavailable" in reason for _, reason in record.failures):
            record.violation("completions without sessions failed with the store")
        await there.stop()
        for log in there.leaks():
            record.violation(f"a secret is in {log}")
        report(record, began, end, healed, disturbed)
        if record.violations:
            raise Failed(f"{len(record.violations)} violations with --seed {options.seed}")


async def verified(options: argparse.Namespace, clients: list[Client], record: Record, there: Cluster) -> None:
    began = time.monotonic()
    flags = ["--keep-versions", "1000000", "--owner-sessions", "1000000", "--durability", "memory"]
    async with single(options.program, flags) as server:
        apis = Api(server.url, "undisturbed", record, random.Random(0))
        totals = await verify([(client.api, client.ledger) for client in clients], apis)
        await apis.close()
    print(f"\nverified in {time.monotonic() - began:.0f} s: "
          + ", ".join(f"{count} {name}" for name, count in sorted(totals.items())))


def report(record: Record, began: float, end: float, healed: float, disturbed: int) -> None:
    seconds = healed - began
    changes = sum(at <= healed for at in record.changes)
    kinds = ", ".join(f"{count} {name}" for name, count in sorted(record.counts.items()))
    print(f"{changes} changes in {seconds:.0f} s ({changes / seconds:.1f}/s), {kinds}; "
          f"{len(record.failures) - disturbed} failed attempts after the last fault")
    if len(record.latencies) > 100:
        cut = statistics.quantiles(record.latencies, n=100)
        print(f"latency of changes, retries included: p50 {1000 * cut[49]:.0f} ms, p99 {1000 * cut[98]:.0f} ms")
    table(record, end)


if __name__ == "__main__":
    run(main)
