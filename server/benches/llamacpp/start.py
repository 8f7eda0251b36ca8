"""Time from process start until a server is ready and until its first token, and its memory use after that.

    python start.py --rounds 5 'tidegate --model MODEL --port PORT --threads 2 --data-dir FOLDER' \\
        'llama-server -m MODEL.gguf --port PORT -t 2'

The first start loads the files into the page cache and is not counted. Memory is what the process allocates (RssAnon);
pages of mapped files (RssFile) are shown separately, because they belong to the page cache.
"""

import re
import time

from servers import command_line, in_turn, post, running, spread, words


def measure(command):
    began = time.perf_counter()
    with running(command, interval=0.002) as (url, server):
        ready = time.perf_counter()
        post(f"{url}/completion", {"prompt": words(0, 8), "n_predict": 1})
        first = time.perf_counter()
        status = open(f"/proc/{server.pid}/status").read()
    mib = [int(re.search(rf"{name}:\s+(\d+) kB", status)[1]) / 1024 for name in ("RssAnon", "RssFile")]
    return ready - began, first - began, *mib


arguments = command_line(__doc__).parse_args()
for command, rounds in in_turn(arguments.servers, arguments.rounds + 1, measure).items():
    ready, first, own, mapped = zip(*rounds[1:])
    print(f"ready {spread(ready, 2)} s, first token {spread(first, 2)} s, {spread(own)} MiB, mapped {spread(mapped)}: {command}")
