"""Tokens per second of many clients that stream at once, on servers that start anew in each round.

    python clients.py --rounds 3 'tidegate --model MODEL.gguf --port PORT --threads 2 --slots 32 --data-dir FOLDER' \\
        'llama-server -m MODEL.gguf --port PORT -t 2 --parallel 32 --cont-batching --no-cache-prompt -c 16384'

The clients are raw sockets, which take little of the cores that the server needs. What counts is the number of tokens that
the server says it has generated.
"""

import argparse
import json
import re
import socket
import threading
import time
from urllib.parse import urlparse

from servers import running, spread, words


def stream(address, number, tokens, start, generated):
    prompt = words(number, 8)
    body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.8, "seed": number, "stream": True}
    body = json.dumps(body | {"ignore_eos": True, "cache_prompt": False}).encode()
    head = f"POST /completion HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
    with socket.create_connection(address) as server:
        start.wait(timeout=60)
        server.sendall(f"{head}connection: close\r\n\r\n".encode() + body)
        answer = b"".join(iter(lambda: server.recv(1 << 16), b""))
    if not answer.startswith(b"HTTP/1.1 200"):
        generated["error"] = answer[:500].decode(errors="replace")
        return
    generated[number] = int(re.findall(rb'"predicted_n":\s*(\d+)', answer)[-1])


def rate(url, clients, tokens):
    address = (urlparse(url).hostname, urlparse(url).port)
    start, generated = threading.Barrier(clients + 1), {}
    threads = [threading.Thread(target=stream, args=(address, i, tokens, start, generated)) for i in range(clients)]
    for thread in threads:
        thread.start()
    began = time.perf_counter()
    start.wait(timeout=60)
    for thread in threads:
        thread.join()
    seconds = time.perf_counter() - began
    if "error" in generated or len(generated) < clients:
        raise SystemExit(generated.get("error", f"{clients - len(generated)} clients got no answer"))
    return sum(generated.values()) / seconds


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("servers", nargs="+", help="commands, with PORT in the place of the port")
parser.add_argument("--clients", type=int, default=32)
parser.add_argument("--tokens", type=int, default=64, help="that each client wants")
parser.add_argument("--rounds", type=int, default=3)
arguments = parser.parse_args()
measured = {command: [] for command in arguments.servers}
for number in range(arguments.rounds):
    for command, rates in measured.items():
        with running(command) as (url, _):
            # The first time, memory is new to the server.
            rate(url, arguments.clients, arguments.tokens)
            rates.append(rate(url, arguments.clients, arguments.tokens))
        print(f"round {number + 1}: {rates[-1]:,.0f} tokens per second, {command}", flush=True)
for command, rates in measured.items():
    print(f"{spread(rates)} tokens per second, {command}")
