"""Streams whose server is killed, each resumed on another one.

    python .ci/cluster/streams.py target/debug/tidegate [--streams 100] [--replicas 3] [--seed 1]

In each round, clients begin streams on one replica, which is killed while they read. They resume at the next event on another
replica. No event may be missing or come twice, and each text must be that of one server that nothing disturbs.
"""

import argparse
import asyncio
import random
import time

from client import Api, Record, Stream
from services import Replica, cluster, on_sigterm, single

FLAGS = ["--threads", "1", "--owner-sessions", "100000", "--drain-seconds", "10"]
# Streams of one round.
AT_ONCE = 10


class Reader:
    """A client that reads one stream."""

    def __init__(self, number: int, record: Record, dice: random.Random):
        self.record, self.dice = record, dice
        self.api = Api("", f"reader{number}", record, dice)
        self.text = {"text": f"Once upon a time there were {number} foxes", "seed": number}
        self.turn = {"prompt": " and", "max_tokens": dice.randint(60, 240), "temperature": 0.9, "seed": number, "ignore_eos": True}
        self.number = number
        self.stream: Stream | None = None

    async def session(self, url: str) -> str:
        self.api.url = url
        answer = await self.api.send("create", "POST", "/v1/sessions", self.text)
        assert answer.status == 201, answer
        return answer.body["id"]

    async def read(self, server: Replica, other: Replica, opened: asyncio.Event) -> None:
        """Reads the stream to its end: from `server` while it lives, and then from the other one."""
        self.turn["session"] = await self.session(server.url)
        self.stream = Stream(self.api, self.turn, {"idempotency-key": f"stream{self.number}"}, [])
        take = self.stream.take

        def taken(event, told) -> None:
            take(event, told)
            opened.set()
            # From here on a failure leads to the other one.
            self.api.url = other.url

        self.stream.take = taken
        await self.stream.run()

    async def undisturbed(self, server: Replica) -> str:
        api = Api(server.url, "undisturbed", self.record, self.dice)
        self.api.url = server.url
        session = await self.session(server.url)
        answer = await api.send("turn", "POST", "/v1/completions", {**self.turn, "session": session})
        answer = await self.api.send("turn", "POST", "/v1/completions", {**self.turn, "session": session})
        await api.close()
        assert answer.status == 200, answer
        return answer.body["choices"][0]["text"]
