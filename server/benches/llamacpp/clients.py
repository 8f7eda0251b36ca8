"""Total tokens per second of many clients that stream at once. The servers restart in each round.

    python clients.py --rounds 3 'tidegate --model MODEL.gguf --port PORT --threads 2 --slots 32 --data-dir FOLDER' \\
        'llama-server -m MODEL.gguf --port PORT -t 2 --parallel 32 --cont-batching --no-cache-prompt -c 16384'

The clients are raw sockets, which leave nearly all CPU time to the server. Token counts are the server's `predicted_n`.
"""

import json
import re
import socket
import threading
import time
from urllib.parse import urlparse

from servers import command_line, in_turn, running, spread, words


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


def measure(command):
    with running(command) as (url, _):
        # A warm-up run, because the server has not used its slots before.
        rate(url, arguments.clients, arguments.tokens)
        return rate(url, arguments.clients, arguments.tokens)


parser = command_line(__doc__)
parser.add_argument("--clients", type=int, default=32)
parser.add_argument("--tokens", type=int, default=64, help="tokens that each client requests")
arguments = parser.parse_args()
for command, rates in in_turn(arguments.servers, arguments.rounds, measure).items():
    print(f"{spread(rates)} tokens per second, {command}")
