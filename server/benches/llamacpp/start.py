"""Time from the start of a server's process until it is ready, and until the first token, and its memory then.

    python start.py --rounds 5 'tidegate --model MODEL --port PORT --threads 2 --data-dir FOLDER' 'llama-server -m MODEL.gguf --port PORT -t 2'

One start that does not count brings the files into the page cache. The memory is what the process has of its own (RssAnon): pages
of files that it maps belong to the page cache, and are given beside it.
"""

import argparse
import re
import time

from servers import post, running, spread, words


def measure(command):
    began = time.perf_counter()
    with running(command, interval=0.002) as (url, server):
        ready = time.perf_counter()
        post(f"{url}/completion", {"prompt": words(0, 8), "n_predict": 1})
        first = time.perf_counter()
        status = open(f"/proc/{server.pid}/status").read()
    mib = [int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024 for name in ("RssAnon", "RssFile")]
    return ready - began, first - began, *mib


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("servers", nargs="+", help="commands, with PORT in the place of the port")
parser.add_argument("--rounds", type=int, default=5)
arguments = parser.parse_args()
measured = {command: [] for command in arguments.servers}
for number in range(arguments.rounds + 1):
    for command, rounds in measured.items():
        rounds.append(measure(command))
for command, rounds in measured.items():
    ready, first, own, mapped = zip(*rounds[1:])
    print(f"ready {spread(ready, 2)} s, first token {spread(first, 2)} s, {spread(own)} MiB, mapped {spread(mapped)}: {command}")
