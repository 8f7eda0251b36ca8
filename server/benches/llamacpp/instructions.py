"""Time to the first token of questions after the same instructions, on servers that start anew in each round.

    python instructions.py --rounds 3 'tidegate --model MODEL.gguf --port PORT --threads 2 --data-dir FOLDER' \\
        'llama-server -m MODEL.gguf --port PORT -t 2 -c 16384 --parallel 1'

The instructions are words of the vocabulary that models.py writes, a token each.
"""

import argparse
import json
import time
import urllib.request

from servers import running, spread, words

QUESTIONS = 5


def first_token(url, prompt):
    """Milliseconds, and how many tokens of the prompt were computed and known."""
    body = {"prompt": prompt, "n_predict": 2, "temperature": 0, "stream": True, "cache_prompt": True}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"content-type": "application/json"})
    began, first, timings = time.perf_counter(), None, {}
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                timings = json.loads(line[6:]).get("timings", timings)
    return (first - began) * 1e3, timings.get("prompt_n"), timings.get("cache_n")


def measure(command, length, question):
    instructions = words(1, length)
    with running(command) as (url, _):
        first_token(url, words(0, 8))
        return [first_token(url, instructions + words(2 + i, question)) for i in range(QUESTIONS)]


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("servers", nargs="+", help="commands, with PORT in the place of the port")
parser.add_argument("--length", type=int, default=4000, help="words of the instructions")
parser.add_argument("--question", type=int, default=40, help="words of a question")
parser.add_argument("--rounds", type=int, default=3)
arguments = parser.parse_args()
measured = {command: [] for command in arguments.servers}
for number in range(arguments.rounds):
    for command, rounds in measured.items():
        rounds.append(measure(command, arguments.length, arguments.question))
        print(f"round {number + 1}:", " ".join(f"{ms:.0f}" for ms, _, _ in rounds[-1]), "ms", command, flush=True)
for command, rounds in measured.items():
    print(f"\n{command}")
    for question, results in enumerate(zip(*rounds), 1):
        _, computed, cached = results[0]
        times = spread([ms for ms, _, _ in results])
        print(f"question {question}: {times} ms, {computed} tokens computed, {cached} known")
