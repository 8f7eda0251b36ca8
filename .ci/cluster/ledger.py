"""A ledger of what clients sent and what they were told, and its comparison with the cluster at the end."""

import asyncio
import dataclasses
from collections import Counter

from client import Api, Record


@dataclasses.dataclass
class Operation:
    """A request that makes a version or sessions. Its id is the version's label, or is in the sessions' metadata."""

    id: str
    kind: str
    # The tree that it belongs to: the id of the operation that created the first session.
    root: str
    path: str
    body: dict
    session: str = ""
    # What the answer said, if there was one.
    acknowledged: bool = False
    version: str = ""
    parent: str | None = None
    text: str | None = None
    sessions: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass
class Conversation:
    """A session as its client knows it."""

    id: str
    root: str
    head: str
    # Operations without an answer, which may have happened or may happen later; and the targets of such rewinds.
    doubtful: set[str] = dataclasses.field(default_factory=set)
    targets: set[str] = dataclasses.field(default_factory=set)
    # All versions to which it was rewound.
    rewound: set[str] = dataclasses.field(default_factory=set)

    @property
    def is_certain(self) -> bool:
        return not self.doubtful and not self.targets


class Ledger:
    """All operations of one client."""

    def __init__(self, token: str, record: Record):
        self.token, self.record = token, record
        self.operations: dict[str, Operation] = {}
        self.conversations: dict[str, Conversation] = {}
        self.deleted: set[str] = set()

    def new(self, kind: str, root: str, path: str, body: dict, session: str = "") -> Operation:
        number = f"{self.token}-{len(self.operations)}"
        operation = Operation(number, kind, root or number, path, body, session)
        self.operations[number] = operation
        return operation


@dataclasses.dataclass
class Found:
    """A version that exists in the cluster."""

    id: str
    parent: str | None
    label: str | None
    # A session that lists it.
    session: str


async def pages(api: Api) -> list[dict]:
    """Returns all sessions of the owner."""
    sessions, after = [], ""
    while True:
        answer = await api.send("list", "GET", f"/v1/sessions?limit=100{after}")
        assert answer.status == 200, answer
        sessions += answer.body["data"]
        if not answer.body["has_more"]:
            return sessions
        after = f"&after={answer.body['next']}"


async def compare(api: Api, ledger: Ledger) -> dict[str, Found]:
    """Compares a ledger with its owner's sessions in the cluster; returns their versions."""
    violation = ledger.record.violation
    sessions = {session["id"]: session for session in await pages(api)}
    compare_sessions(ledger, sessions)
    versions: dict[str, Found] = {}
    listed: dict[str, set[str]] = {}
    for session in sessions:
        answer = await api.send("turns", "GET", f"/v1/sessions/{session}/turns")
        assert answer.status == 200, answer
        rows = answer.body["data"]
        listed[session] = {row["version"] for row in rows}
        if len(listed[session]) != len(rows):
            violation(f"{session} lists a version twice")
        compare_order(ledger, session, rows)
        for row in rows:
            found = Found(row["version"], row["parent"], row["label"], session)
            known = versions.setdefault(found.id, found)
            if (known.parent, known.label) != (found.parent, found.label):
                violation(f"{found.id} differs between {known.session} and {session}")
    times = Counter(found.label for found in versions.values())
    for label, count in times.items():
        if label not in ledger.operations:
            violation(f"versions with the label {label} were made by no request")
        elif count > 1:
            violation(f"{label} was executed {count} times")
    for operation in ledger.operations.values():
        if not operation.acknowledged or operation.kind == "fork" or operation.session in ledger.deleted:
            continue
        found = versions.get(operation.version)
        if found is None or operation.version not in listed.get(operation.session, ()):
            violation(f"{operation.kind} {operation.id} was acknowledged, and {operation.version} is gone")
        elif found.label != operation.id or found.parent != operation.parent:
            violation(f"{operation.kind} {operation.id} was acknowledged after {operation.parent}, and is {found}")
    for conversation in ledger.conversations.values():
        head = sessions.get(conversation.id, {}).get("version")
        label = versions[head].label if head in versions else None
        if head != conversation.head and label not in conversation.doubtful and head not in conversation.targets:
            violation(f"the head of {conversation.id} is {head} ({label}), not {conversation.head}")
    return versions


def compare_order(ledger: Ledger, session: str, rows: list[dict]) -> None:
    """Checks that each version continues the previous one, or a version to which the session was rewound."""
    conversation = ledger.conversations.get(session)
    for before, row in zip(rows, rows[1:]):
        if row["parent"] != before["version"] and not (conversation and row["parent"] in conversation.rewound):
            after = f"{row['version']} ({row['label']}) continues {row['parent']}"
            ledger.record.violation(f"{after}, and the head of {session} was {before['version']} ({before['label']})")


def compare_sessions(ledger: Ledger, sessions: dict[str, dict]) -> None:
    """Checks that one request made each session, and that each acknowledged session exists unless it was deleted."""
    made: dict[str, set[str]] = {}
    for session in sessions.values():
        made.setdefault(session["metadata"].get("operation", ""), set()).add(session["id"])
    for operation in ledger.operations.values():
        if operation.kind not in ("create", "fork"):
            continue
        there = made.pop(operation.id, set())
        expected = set(operation.sessions) - ledger.deleted
        if operation.acknowledged and there != expected:
            ledger.record.violation(f"{operation.kind} {operation.id} made {expected}, and there are {there}")
        elif len(there) > operation.body.get("n", 1):
            ledger.record.violation(f"{operation.kind} {operation.id} made {len(there)} sessions")
    if made:
        ledger.record.violation(f"sessions that no request has made: {made}")


async def replay(api: Api, cluster: Api, ledger: Ledger, versions: dict[str, Found]) -> int:
    """Repeats the operations that made these versions on another server; compares all texts and returns their number."""
    children: dict[str | None, list[Found]] = {}
    for found in versions.values():
        # `compare` has reported the others.
        if found.label in ledger.operations:
            children.setdefault(found.parent, []).append(found)
    texts = 0
    for first in children.get(None, []):
        operation = ledger.operations[first.label]
        answer = await api.send("create", "POST", "/v1/sessions", operation.body)
        assert answer.status == 201, answer
        session, head = answer.body["id"], answer.body["version"]
        same = {first.id: head}
        waiting = [first]
        while waiting:
            parent = waiting.pop()
            texts += await same_text(api, cluster, ledger, parent, (session, same[parent.id]))
            for child in children.get(parent.id, []):
                if head != same[parent.id]:
                    answer = await api.send("rewind", "POST", f"/v1/sessions/{session}/rewind", {"version": same[parent.id]})
                    assert answer.status == 200, answer
                head = same[child.id] = await again(api, ledger, child, session)
                waiting.append(child)
    return texts


async def again(api: Api, ledger: Ledger, found: Found, session: str) -> str:
    """Repeats the operation that made a version; returns the new version."""
    operation = ledger.operations[found.label]
    if operation.kind == "append":
        answer = await api.send("append", "POST", f"/v1/sessions/{session}/append", operation.body)
        assert answer.status == 200, answer
        return answer.body["version"]
    answer = await api.send("turn", "POST", operation.path, {**operation.body, "session": session})
    assert answer.status == 200, answer
    text = answer.body["choices"][0]["text"]
    if operation.acknowledged and text != operation.text:
        ledger.record.violation(f"{operation.kind} {operation.id} gave {operation.text!r}, and undisturbed {text!r}")
    return answer.body["session"]["version"]


async def same_text(api: Api, cluster: Api, ledger: Ledger, found: Found, same: tuple[str, str]) -> int:
    there = await cluster.send("text", "GET", f"/v1/sessions/{found.session}/text?version={found.id}")
    here = await api.send("text", "GET", f"/v1/sessions/{same[0]}/text?version={same[1]}")
    assert here.status == 200, here
    if there.status != 200 or there.body["text"] != here.body["text"]:
        ledger.record.violation(f"the text of {found.id} ({found.label}) is {there.body}, and undisturbed {here.body}")
    return 1


async def verify(clients: list[tuple[Api, Ledger]], undisturbed: Api) -> dict[str, int]:
    """Compares all ledgers with the cluster, and all texts with those of an undisturbed server."""
    totals: Counter[str] = Counter()
    some = asyncio.Semaphore(8)

    async def one(cluster: Api, ledger: Ledger) -> None:
        async with some:
            versions = await compare(cluster, ledger)
            texts = await replay(undisturbed, cluster, ledger, versions)
            totals["versions"] += len(versions)
            totals["sessions"] += len(ledger.conversations)
            totals["sessions deleted"] += len(ledger.deleted)
            totals["texts"] += texts
            made = {found.label for found in versions.values()}
            for operation in ledger.operations.values():
                kind = "acknowledged" if operation.acknowledged else "without an answer"
                totals[kind] += 1
                if not operation.acknowledged and operation.id in made:
                    totals["without an answer, and executed"] += 1

    await asyncio.gather(*(one(*client) for client in clients))
    if totals["texts"] != totals["versions"]:
        clients[0][1].record.violation(f"{totals['versions']} versions, and {totals['texts']} in trees with a root")
    return dict(totals)
