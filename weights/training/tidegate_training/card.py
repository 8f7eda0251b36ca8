"""The model card: a checkpoint's description, data, recipe and scores."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

from . import config
from .config import ModelConfig, RunConfig
from .model import Decoder
from .sample import PROMPTS, TEMPERATURE, TOP_P
from .train import parameters

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

# By the folder of a text of `[data]`.
SOURCES = {
    "novels": ("English novels of the 19th and early 20th century", "public domain",
               "[computationalstylistics/100_english_novels](https://github.com/computationalstylistics/100_english_novels)"
               " at 143e601875d7"),
    "fairytales": ("fairy tales in English", "public domain; the collection Apache-2.0",
                   "[uci-soe/FairytaleQAData](https://github.com/uci-soe/FairytaleQAData)"),
    "tinystories": ("a small part of TinyStories", "CDLA-Sharing-1.0",
                    "[roneneldan/TinyStories](https://huggingface.co/datasets/roneneldan/TinyStories), from copies in"
                    " public repositories"),
}


def last_scores(log: Path, step: int) -> tuple[int, dict]:
    """Step and validation scores of the last evaluation at or before `step`; (0, {}) if there is none."""
    found: tuple[int, dict] = (0, {})
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        entry = json.loads(line)
        if entry["step"] <= step and entry.get("valid"):
            found = entry["step"], entry["valid"]
    return found


def train_command(cfg: RunConfig) -> str:
    """The command that repeats this run: the nearest file of `configs/`, and a `--set` for each difference."""
    best: tuple[Path | None, list[str]] = (None, [])
    for path in sorted(CONFIGS.glob("*.toml")):
        base = config.load(path)
        if base.data != cfg.data:
            continue
        sets = []
        for table in ("model", "train"):
            old, new = (dataclasses.asdict(getattr(c, table)) for c in (base, cfg))
            sets += [f"--set '{table}.{k}={json.dumps(new[k])}'" for k in new if new[k] != old[k]]
        if best[0] is None or len(sets) < len(best[1]):
            best = path, sets
    where = f"configs/{best[0].name}" if best[0] else "RUN.toml"
    return " \\\n    ".join([f"tidegate-train train {where} --data data --out run", *best[1]])


def table(head: list[str], rows: list[list]) -> str:
    line = lambda cells: "| " + " | ".join(str(c) for c in cells) + " |"
    return "\n".join([line(head), line(["---"] * len(head)), *(line(r) for r in rows)])


def data_table(cfg: RunConfig) -> str:
    names = sorted({Path(f).parts[0] for f in cfg.data.train})
    unknown = ("a text of the user", "not recorded", "not recorded")
    return table(["texts", "content", "licence", "source"], [[n, *SOURCES.get(n, unknown)] for n in names])


def validation(step: int, scores: dict) -> str:
    if not scores:
        return "This run logged no validation."
    rows = [[n, f"{s['tokens']:,}", f"{s['nats']:.4f}", f"{s['perplexity']:.2f}", f"{s['bits_per_byte']:.4f}"]
            for n, s in scores.items()]
    found = table(["text", "tokens", "nats per token", "perplexity", "bits per byte"], rows)
    return f"""After {step:,} steps, on texts that were not part of the training. Every token is predicted, including `<|endoftext|>`; bytes
are those of the texts only. Each text is read in four pieces, each from an empty state, with f32 weights;
`tidegate-weights eval` reads it as one stream, with the weights of this folder.

{found}"""


def recipe_table(cfg: RunConfig) -> str:
    rows = [[f"`{t}.{k}`", f"`{json.dumps(v)}`"] for t in ("model", "train") for k, v in dataclasses.asdict(getattr(cfg, t)).items()]
    return table(["setting", "value"], rows)


def quoted(text: str) -> str:
    return "\n".join("> " + line if line else ">" for line in text.split("\n"))


def mixer(m: ModelConfig) -> str:
    """The mixer and its paper."""
    gate = "a learned gate per head" if m.gate else "no gate"
    rfa = f'random feature attention with {gate} (Peng et al., "Random Feature Attention", ICLR 2021)'
    if m.attention == "rfa":
        return {
            "gaussian": rfa, "arc_cosine": f"{rfa}, its features by ReLU,",
            "elu": f"linear attention by ELU + 1 (Katharopoulos et al., ICML 2020) with {gate}",
            "favor": f"FAVOR+ (Choromanski et al., \"Rethinking Attention with Performers\", ICLR 2021) with {gate}",
        }[m.feature_map]
    window = f"softmax attention to the last {m.sliding_window:,} tokens"
    return window if m.attention == "softmax" else f"{window} and, to all older ones, {rfa}"


def reach(m: ModelConfig) -> str:
    """How far back the model remembers."""
    if m.attention == "softmax":
        return f"A layer sees the last {m.sliding_window:,} tokens."
    far = "`tidegate-weights inspect` shows how far back each head remembers." if m.gate else "There is no gate to forget with."
    return far if m.attention == "rfa" else f"A layer sees the last {m.sliding_window:,} tokens one by one. {far}"


def tags(m: ModelConfig) -> str:
    """Tags of the mixer's kind."""
    kind = {"softmax": ["sliding-window-attention"], "hybrid": ["rfa-gate" if m.gate else "rfa", "linear-attention", "sliding-window-attention"]}
    linear = {"gaussian": "rfa", "arc_cosine": "rfa", "elu": "elu", "favor": "favor"}[m.feature_map] + ("-gate" if m.gate else "")
    return "\n".join(f"- {tag}" for tag in kind.get(m.attention, [linear, "linear-attention"]))


def write(name: str, cfg: RunConfig, step: int, log: Path, dtype: str, samples: list[str]) -> str:
    """The text of the card. step: optimiser steps behind the weights; samples: one for each of `PROMPTS`."""
    m, t = cfg.model, cfg.train
    tokens = step * t.lanes * t.segment * t.accumulate
    carried = "The state is carried from segment to segment" if t.carry_state else "The state is zeroed before each segment"
    drawn = "\n\n".join(f"Prompt: `{p}`\n\n{quoted(s)}" for p, s in zip(PROMPTS, samples))
    return f"""---
license:
- mit
- apache-2.0
language:
- en
pipeline_tag: text-generation
tags:
{tags(m)}
- tidegate
---

# {name}

A small English language model for [Tidegate](../../../README.md). It continues stories; it knows no facts, follows no
instructions and was not tuned for chat. It reads the messages of a chat as the paragraphs of a story, without roles, and
answers with the story's continuation.

It is a decoder with {m.num_hidden_layers} layers of {mixer(m)}
and SwiGLU: {parameters(Decoder(cfg.model)):,} parameters in {dtype}. Its state has {4 * m.state_numbers:,} bytes (f32) per
conversation, however long the text. The vocabulary is a byte-level BPE of {m.vocab_size:,}
tokens; `<|endoftext|>` (id 0) begins and ends a text. A text may have any length. {reach(m)}

## Data and licences

{data_table(cfg)}

The weights are licensed under MIT or Apache-2.0, at your option.

## Recipe

Trained with the package in `weights/training` on a packed stream of documents, split into {t.lanes} lanes and segments of
{t.segment} tokens. {carried} and zeroed at the start of a document.

{recipe_table(cfg)}

## Tokens seen

{tokens:,} tokens in {step:,} steps.

## Validation

{validation(*last_scores(log, step))}

## Samples

Unedited and not selected: temperature {TEMPERATURE}, top-p {TOP_P}, seeds 1 to {len(PROMPTS)}.

{drawn}

## Commands

From `weights/training`, with the texts under `texts/`:

```sh
tidegate-train prepare {train_command(cfg).split(" ")[2]} --texts texts --data data
{train_command(cfg)}
tidegate-train export --run run --data data --out {name} --dtype {dtype}
```
"""
