"""Time to first token of a short turn that continues a long conversation, after a server restart.

    python kept.py --tokens 100000 --turn 16 --rounds 3 --folder FOLDER \\
        'tidegate --model MODEL.gguf --port PORT --threads 2 --data-dir FOLDER' \\
        'llama-server -m MODEL.gguf --port PORT -t 2 -c 131072 --parallel 1 --slot-save-path FOLDER'

Tidegate continues a session, so its request has only the new tokens; timing ends with the first event of the stream.
llama-server restores a saved slot, and its request has all tokens; timing ends with the answer, which has one token. Both
load the model before timing starts.
"""

import argparse
import json
import os
import time
import urllib.request

from servers import post, running, spread, words


def tidegate(command, folder, arguments):
    with running(command.replace("FOLDER", folder)) as (url, _):
        session = post(f"{url}/v1/sessions", {"text": words(1, arguments.tokens)})
        print(f"{session['tokens']:,} tokens kept", flush=True)
    for number in range(arguments.rounds):
        with running(command.replace("FOLDER", folder)) as (url, _):
            post(f"{url}/v1/completions", {"prompt": words(0, 8), "max_tokens": 1})
            turn = {"session": session["id"], "prompt": words(2 + number, arguments.turn), "max_tokens": 1}
            body = json.dumps(turn | {"stream": True}).encode()
            began = time.perf_counter()
            request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
            with urllib.request.urlopen(request) as answer:
                next(line for line in answer if line.startswith(b"data: {"))
                yield (time.perf_counter() - began) * 1e3,
                answer.read()


def llama_server(command, folder, arguments):
    text, saved = words(1, arguments.tokens), {"filename": "kept.bin"}
    with running(command.replace("FOLDER", folder)) as (url, _):
        post(f"{url}/completion", {"prompt": text, "n_predict": 1, "id_slot": 0, "cache_prompt": True})
        post(f"{url}/slots/0?action=save", saved)
    for number in range(arguments.rounds):
        with running(command.replace("FOLDER", folder)) as (url, _):
            post(f"{url}/completion", {"prompt": words(0, 8), "n_predict": 1})
            began = time.perf_counter()
            post(f"{url}/slots/0?action=restore", saved)
            restored = time.perf_counter()
            prompt = text + words(2 + number, arguments.turn)
            post(f"{url}/completion", {"prompt": prompt, "n_predict": 1, "id_slot": 0, "cache_prompt": True})
            ended = time.perf_counter()
            yield (ended - began) * 1e3, (restored - began) * 1e3


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("tidegate", help="the command, with PORT and FOLDER")
parser.add_argument("llama_server", help="the command, with PORT and FOLDER")
parser.add_argument("--folder", required=True, help="where both keep their files; must not exist")
parser.add_argument("--tokens", type=int, default=100_000, help="of the conversation")
parser.add_argument("--turn", type=int, default=16, help="tokens of the turn")
parser.add_argument("--rounds", type=int, default=3)
arguments = parser.parse_args()
os.makedirs(arguments.folder)
for name, measure in (("tidegate", tidegate), ("llama_server", llama_server)):
    rounds = list(measure(getattr(arguments, name), os.path.abspath(arguments.folder), arguments))
    restored = f", of which {spread([r[1] for r in rounds])} restore the slot" if len(rounds[0]) > 1 else ""
    print(f"{name}: {spread([r[0] for r in rounds])} ms{restored}", flush=True)
