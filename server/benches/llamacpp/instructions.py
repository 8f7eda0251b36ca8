"""Time to first token of questions that follow the same instructions, on servers that restart in each round.

    python instructions.py --rounds 3 'tidegate --model MODEL.gguf --port PORT --threads 2 --data-dir FOLDER' \\
        'llama-server -m MODEL.gguf --port PORT -t 2 -c 16384 --parallel 1'

The instructions are words of the vocabulary that models.py writes, one token each.
"""

import json
import time
import urllib.request

from servers import command_line, in_turn, running, spread, words

QUESTIONS = 5


def first_token(url, prompt):
    """Returns the time to first token in ms, and how many prompt tokens were computed and cached."""
    body = {"prompt": prompt, "n_predict": 2, "temperature": 0, "stream": True, "cache_prompt": True}
    request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode(), {"content-type": "application/json"})
    began, first, timings = time.perf_counter(), None, {}
    with urllib.request.urlopen(request) as answer:
        for line in answer:
            if line.startswith(b"data: {"):
                first = first or time.perf_counter()
                timings = json.loads(line[6:]).get("timings", timings)
    return (first - began) * 1e3, timings.get("prompt_n"), timings.get("cache_n")


def measure(command):
    instructions = words(1, arguments.length)
    with running(command) as (url, _):
        first_token(url, words(0, 8))
        return [first_token(url, instructions + words(2 + i, arguments.question)) for i in range(QUESTIONS)]


parser = command_line(__doc__)
parser.add_argument("--length", type=int, default=4000, help="words of the instructions")
parser.add_argument("--question", type=int, default=40, help="words of a question")
arguments = parser.parse_args()
for command, rounds in in_turn(arguments.servers, arguments.rounds, measure).items():
    print(f"\n{command}")
    for question, results in enumerate(zip(*rounds), 1):
        _, computed, cached = results[0]
        times = spread([ms for ms, _, _ in results])
        print(f"question {question}: {times} ms, {computed} tokens computed, {cached} known")
