"""Tokens per second of Tidegate and llama.cpp, measured in turn on the same GGUF files.

    python speed.py --rounds 3 --tidegate tidegate --llama-bench llama-bench FILE.gguf ...

A model SHAPE:TYPE=FILE.gguf compares a shape of `tidegate bench` in a type of weights with llama.cpp and that file, such as
125m:q8_0=llama-125m-q8_0.gguf. llama.cpp then runs with and without flash attention, and the faster counts. Prints a Markdown
table: median of the rounds (least–most).
"""

import argparse
import collections
import json
import pathlib
import statistics
import subprocess
import sys

from servers import spread


def output(command, arguments):
    print(*command, end="\033[K\r", file=sys.stderr, flush=True)
    line = [*command, *arguments.split()]
    return subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout.decode()


def tidegate(model, given):
    shape, _, file = model.rpartition("=")
    kind, _, weights = shape.partition(":")
    served = ["--shape", kind, "--weights", weights] if shape else ["--model", file]
    flags = f"--threads 1,2 --depths {given.depths} --batch 1 --prompt {given.prompt} --steps {given.steps}"
    for line in output([given.tidegate, "bench", *served], f"{flags} --rounds 1 --output json").splitlines():
        row = json.loads(line)
        yield ("prompt" if row["kind"] == "prefill" else "decode", row["depth"], row["threads"]), row


def llama(model, given):
    shape, _, file = model.rpartition("=")
    # The Llama models of the shapes have attention: flash attention makes prompts faster, and long contexts slower.
    flags = f"-t 1,2 -d {given.depths} -p {given.prompt} -n {given.steps} -r 1 -o json {'-fa 0,1' if shape else ''}"
    fastest = collections.defaultdict(float)
    for row in json.loads(output([given.llama_bench, "-m", file], flags)):
        key = "prompt" if row["n_prompt"] else "decode", row["n_depth"], row["n_threads"]
        fastest[key] = max(fastest[key], row["avg_ts"])
    return fastest.items()


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("models", nargs="+")
parser.add_argument("--tidegate", default="tidegate")
parser.add_argument("--llama-bench", default="llama-bench")
parser.add_argument("--depths", default="0")
parser.add_argument("--prompt", type=int, default=512)
parser.add_argument("--steps", type=int, default=24)
parser.add_argument("--rounds", type=int, default=3)
given = parser.parse_args()
ours, theirs, shares = (collections.defaultdict(list) for _ in range(3))
for _ in range(given.rounds):
    for model in given.models:
        for case, row in tidegate(model, given):
            ours[model, *case].append(row["tokens_per_second"])
            shares[model, *case].append(row["roof_share"])
        for case, rate in llama(model, given):
            theirs[model, *case].append(rate)
print("| model | | depth | threads | Tidegate | llama.cpp | ratio | share of the machine's limit |")
print("| --- | --- | --- | --- | --- | --- | --- | --- |")
for model, kind, depth, threads in ours:
    a, b, share = (table[model, kind, depth, threads] for table in (ours, theirs, shares))
    figures = f"{spread(a, 1)} | {spread(b, 1)} | {statistics.median(a) / statistics.median(b):.2f} | {statistics.median(share):.2f}"
    print(f"| {pathlib.Path(model).stem} | {kind} | {depth} | {threads} | {figures} |")
