"""Runs Tidegate and llama-server in turn, each on a free port, for the measurements in this folder. Needs only Python."""

import argparse
import contextlib
import json
import random
import shlex
import socket
import statistics
import string
import subprocess
import sys
import time
import urllib.error
import urllib.request


def words(seed, count):
    """Returns random words of the vocabulary that models.py writes, one token each."""
    draw = random.Random(seed)
    return "".join(" " + "".join(draw.choices(string.ascii_lowercase, k=3)) for _ in range(count))


def post(url, body):
    """Posts JSON and returns the JSON answer."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"content-type": "application/json"})
    with urllib.request.urlopen(request) as answer:
        return json.load(answer)


def is_ready(url):
    try:
        return urllib.request.urlopen(f"{url}/health", timeout=2).status == 200
    except (urllib.error.URLError, OSError):
        return False


@contextlib.contextmanager
def running(command, interval=0.1):
    """Runs a server; yields its address and process once it is ready. PORT in the command becomes a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    server = subprocess.Popen(
        shlex.split(command.replace("PORT", str(port))), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        while not is_ready(url):
            if server.poll() is not None:
                raise SystemExit(f"{command} has ended; run it by hand to see why")
            time.sleep(interval)
        yield url, server
    finally:
        server.terminate()
        server.wait()


def command_line(doc):
    """Returns a parser for the commands that start the servers, and for the number of rounds."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("servers", nargs="+", help="commands; PORT becomes a free port")
    parser.add_argument("--rounds", type=int, default=3)
    return parser


def in_turn(commands, rounds, measure):
    """Runs `measure` for each command in every round; returns the results by command, one per round."""
    measured = {command: [] for command in commands}
    for number in range(rounds):
        for command, results in measured.items():
            print(f"round {number + 1} of {rounds}: {command}", file=sys.stderr, flush=True)
            results.append(measure(command))
    return measured


def spread(numbers, digits=0):
    """Formats the median and the range."""
    least, median, most = (f"{f(numbers):,.{digits}f}" for f in (min, statistics.median, max))
    return f"{median} ({least}–{most})"
