"""Tokens per second of Tidegate and llama.cpp, measured in turn on the same GGUF files.

    python speed.py --rounds 3 --tidegate tidegate --llama-bench llama-bench FILE.gguf ...

Prints a Markdown table: median of the rounds (least–most).
"""

import argparse
import collections
import json
import pathlib
import statistics
import subprocess
import sys

from servers import spread


def output(command, model, arguments):
    print(f"{model.stem}: {command[0]}", end="\r", file=sys.stderr, flush=True)
    line = [*command, str(model), *arguments]
    return subprocess.run(line, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, check=True).stdout.decode()


def tidegate(model, given):
    flags = f"--threads 1,2 --depths 0 --batch 1 --prompt {given.prompt} --steps {given.steps} --rounds 1 --output json"
    for line in output([given.tidegate, "bench", "--model"], model, flags.split()).splitlines():
        row = json.loads(line)
        yield ("prompt" if row["kind"] == "prefill" else "decode", row["threads"]), row


def llama(model, given):
    flags = f"-t 1,2 -p {given.prompt} -n {given.steps} -r 1 -o json"
    for row in json.loads(output([given.llama_bench, "-m"], model, flags.split())):
        yield ("prompt" if row["n_prompt"] else "decode", row["n_threads"]), row["avg_ts"]


parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
parser.add_argument("models", nargs="+", type=pathlib.Path)
parser.add_argument("--tidegate", default="tidegate")
parser.add_argument("--llama-bench", default="llama-bench")
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
print("| model | | threads | Tidegate | llama.cpp | ratio | share of the machine's limit |\n| --- | --- | --- | --- | --- | --- | --- |")
for model, kind, threads in ours:
    a, b, share = (table[model, kind, threads] for table in (ours, theirs, shares))
    ratio = statistics.median(a) / statistics.median(b)
    print(f"| {model.stem} | {kind} | {threads} | {spread(a, 1)} | {spread(b, 1)} | {ratio:.2f} | {statistics.median(share):.2f} |")
