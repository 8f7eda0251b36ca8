"""The model card: a checkpoint's description, data, recipe and scores."""

from __future__ import annotations

import dataclasses
import json
import re
import shlex
from dataclasses import dataclass
from pathlib import Path

from . import config
from .config import ModelConfig, RunConfig
from .files import read_text
from .model import Decoder, parameters
from .sample import MIN_P, REPETITION_PENALTY, TEMPERATURE

CONFIGS = Path(__file__).resolve().parent.parent / "configs"

IDENTIFIER = re.compile(r"[A-Za-z0-9][A-Za-z0-9.+_-]*")


@dataclass(frozen=True)
class About:
    """What only the owner of a model can say about it; nothing is assumed by default.

    license, language: identifiers as on Hugging Face, for example `mit` and `en`
    description: a paragraph; data_notes: a Markdown file about the texts, their origin and licenses
    prompts: prompts of the samples; if empty, the samples have no prompt
    commands: the commands that made the model, if not `prepare`, `train` and `export`
    """

    license: tuple[str, ...] = ()
    language: tuple[str, ...] = ()
    description: str = ""
    data_notes: Path | None = None
    prompts: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for key in ("license", "language"):
            for value in getattr(self, key):
                if not IDENTIFIER.fullmatch(value):
                    raise ValueError(f"--{key}: must be one identifier, as in --{key} {'mit' if key == 'license' else 'en'} "
                                     f"(repeat it for several), found {value!r}")

    def flags(self) -> list[str]:
        """Returns the options of `export` that set these values."""
        given = [("license", x) for x in self.license] + [("language", x) for x in self.language]
        given += [("description", self.description)] * bool(self.description) + [("prompt", x) for x in self.prompts]
        given += [("data-notes", str(self.data_notes))] if self.data_notes else []
        return [f"--{key} {shlex.quote(value)}" for key, value in given]


def last_scores(log: Path, step: int) -> tuple[int, dict]:
    """Returns the step and the validation scores of the last evaluation at or before `step`; (0, {}) if there is none."""
    found: tuple[int, dict] = (0, {})
    for line in log.read_text(encoding="utf-8").splitlines() if log.exists() else []:
        entry = json.loads(line)
        if entry["step"] <= step and entry.get("valid"):
            found = entry["step"], entry["valid"]
    return found


def train_command(cfg: RunConfig) -> str:
    """Returns the command that repeats this run: the closest file in `configs/`, and a `--set` for each difference."""
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


def data(cfg: RunConfig, about: About) -> str:
    """Returns the card's text about the data: the files of the run and the owner's notes.

    Absolute paths mean nothing on other machines, so only their file names appear.
    """
    named = lambda file: f"`{Path(file).name if Path(file).is_absolute() else file}`"
    copies = cfg.data.repeat or [1] * len(cfg.data.train)
    files = ", ".join(named(f) + (f" ({n} copies)" if n != 1 else "") for f, n in zip(cfg.data.train, copies))
    checks = ", ".join(named(f) for f in cfg.data.valid.values())
    held = f"the last {cfg.data.held_out:.1%} of each" if cfg.data.held_out else ""
    validated = " and ".join(x for x in (checks, held) if x)
    found = f"Trained on {files}" + (f"; validated on {validated}." if validated else ".")
    kinds = ", ".join(f"`{kind}`" for kind in dict.fromkeys(cfg.data.kind) if kind)
    if kinds:
        found += f"\n\nMost training texts begin with a line that names their kind, and a prompt may: {kinds}."
    if about.license:
        found += f"\n\nLicence of the weights: {', '.join(about.license)}."
    return found + (f"\n\n{read_text(about.data_notes).strip()}" if about.data_notes else "")


def front_matter(m: ModelConfig, about: About) -> str:
    """Returns the card's metadata, which Hugging Face reads."""
    listed = lambda key, values: "".join([f"{key}:\n", *(f"- {v}\n" for v in values)]) if values else ""
    return f"""---
{listed("license", about.license)}{listed("language", about.language)}pipeline_tag: text-generation
tags:
{tags(m)}
- tidegate
---"""


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
    """Names the mixer and cites its paper."""
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
    """Describes the model's memory."""
    if m.attention == "softmax":
        return f"A layer sees the last {m.sliding_window:,} tokens."
    far = "`tidegate-weights inspect` shows how far back each head remembers." if m.gate else "There is no gate to forget with."
    return far if m.attention == "rfa" else f"A layer sees the last {m.sliding_window:,} tokens one by one. {far}"


def tags(m: ModelConfig) -> str:
    """Returns the metadata tags for the kind of mixer."""
    kind = {"softmax": ["sliding-window-attention"], "hybrid": ["rfa-gate" if m.gate else "rfa", "linear-attention", "sliding-window-attention"]}
    linear = {"gaussian": "rfa", "arc_cosine": "rfa", "elu": "elu", "favor": "favor"}[m.feature_map] + ("-gate" if m.gate else "")
    return "\n".join(f"- {tag}" for tag in kind.get(m.attention, [linear, "linear-attention"]))


def write(name: str, cfg: RunConfig, step: int, log: Path, dtype: str, samples: list[tuple[str, str]], about: About = About(),
          start: dict[str, str] | None = None, averaged: bool = False) -> str:
    """Returns the text of the card.

    step: the number of optimizer steps behind the weights; samples: pairs of prompt and text
    start: name and sha256 of the weights that the run started from
    averaged: whether the weights are the run's moving average
    """
    m, t = cfg.model, cfg.train
    tokens = step * t.lanes * t.segment * t.accumulate
    carried = "The state is carried from segment to segment" if t.carry_state else "The state is zeroed before each segment"
    drawn = "\n\n".join((f"Prompt: `{p}`" if p else "Without a prompt:") + f"\n\n{quoted(s)}" for p, s in samples)
    described = f"{about.description.strip()}\n\n" if about.description.strip() else ""
    export = " ".join([f"tidegate-train export --run run --data data --out {shlex.quote(name)} --dtype {dtype}",
                       *["--averaged"] * averaged, *about.flags()])
    copied = (f"mkdir -p data && cp {shlex.quote(start['name'])}/tokenizer.json data/",) if start else ()
    commands = about.commands or (*copied, f"tidegate-train prepare {train_command(cfg).split(' ')[2]} --texts texts --data data",
                                  train_command(cfg) + (f" --from {shlex.quote(start['name'])}" if start else ""), export)
    origin = f" The run started from the weights of {start['name']} (SHA-256 {start['sha256']})." if start else ""
    origin += f" The weights are the run's average, with a decay of {t.ema} a step." if averaged else ""
    return f"""{front_matter(m, about)}

# {name}

{described}A language model for Tidegate. It reads the messages of a chat as the paragraphs of a text, without roles, and answers with
the next one.

It is a decoder with {m.num_hidden_layers} layers of {mixer(m)}
and SwiGLU: {parameters(Decoder(cfg.model)):,} parameters in {dtype}. Its state has {4 * m.state_numbers:,} bytes (f32) per
conversation, however long the text. The vocabulary is a byte-level BPE of {m.vocab_size:,}
tokens; `<|endoftext|>` (id 0) begins and ends a text. A text may have any length. {reach(m)}

## Data

{data(cfg, about)}

## Recipe

Trained with the package in `weights/training` on a packed stream of documents, split into {t.lanes} lanes and segments of
{t.segment} tokens. {carried} and zeroed at the start of a document.{origin}

{recipe_table(cfg)}

## Tokens seen

{tokens:,} tokens in {step:,} steps{" of this run" if start else ""}.

## Validation

{validation(*last_scores(log, step))}

## Samples

Unedited and not selected: temperature {TEMPERATURE}, min-p {MIN_P}, repetition penalty {REPETITION_PENALTY}, seeds 1 to {len(samples)}.

{drawn}

## Commands

From `weights/training`:

```sh
{chr(10).join(commands)}
```
"""
