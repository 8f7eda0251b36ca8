"""The family of mixers on equal terms: one decoder, one text in one order, one schedule, and only the mixer differs.

Each mixer and seed is a run of its own: `work/` holds it while it trains, `checkpoints/<mixer>-<seed>` is what Rust
evaluates and serves, `runs/<mixer>-<seed>.json` what it measured, and the report merges all of those. A run that is there
is not made again, so that several processes may each take some of the mixers.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shutil
from pathlib import Path

import numpy as np
import torch

from . import config
from .config import RunConfig
from .evaluate import Score, block_loss, stream_loss
from .export import write_folder
from .train import Trainer, parameters

# What each mixer changes in `[model]`. D random vectors give 2 D features of sine and cosine: the other maps have 2 D of
# their own. A window of `context` is all of a segment, that of `window` the hybrid's part of it.
MIXERS: dict[str, dict] = {
    "softmax": {"attention": "softmax", "sliding_window": "context"},
    "elu": {"feature_map": "elu", "gate": False},
    "elu-gate": {"feature_map": "elu"},
    "favor": {"feature_map": "favor", "gate": False},
    "favor-gate": {"feature_map": "favor"},
    "rfa": {"gate": False},
    "rfa-gate": {},
    "rfa-gate-stateful": {},
    "rfa-gate-no-positions": {"position_embedding": "none"},
    "rfa-arccos": {"feature_map": "arc_cosine", "gate": False},
    "rfa-arccos-gate": {"feature_map": "arc_cosine"},
    "hybrid": {"attention": "hybrid", "sliding_window": "window"},
}
# Trained with the state carried from segment to segment, and judged by the loss with the state carried.
STATEFUL = ("rfa-gate-stateful",)
EQUAL_TERMS = ("the same weights in all; only gates (heads * (hidden + 1) numbers a layer), sigma (heads * head_dim) and the "
               "hybrid's far_bias (heads) are a mixer's own")


def configured(base: RunConfig, mixer: str, seed: int, threads: int) -> RunConfig:
    """The run of one mixer and seed."""
    changes = dict(MIXERS[mixer])
    if "sliding_window" in changes:
        changes["sliding_window"] = {"context": base.train.segment, "window": base.compare.window}[changes["sliding_window"]]
    model = dataclasses.replace(base.model, gate=changes.pop("gate", True), **changes)
    if model.feature_map in ("favor", "arc_cosine"):
        model = dataclasses.replace(model, proj_dim=2 * base.model.proj_dim)
    train = dataclasses.replace(base.train, seed=seed, carry_state=mixer in STATEFUL, threads=threads)
    return dataclasses.replace(base, model=model, train=train)


class Judge:
    """Measures a model on the validation text, in the unit of the report."""

    def __init__(self, cfg: RunConfig, data: Path):
        self.cfg = cfg
        found = json.loads((data / "data.json").read_text(encoding="utf-8"))["valid"]
        if cfg.compare.valid not in found:
            raise ValueError(f"compare.valid: must be one of {sorted(found)}, found {cfg.compare.valid!r}")
        self.bytes = found[cfg.compare.valid]["bytes"]
        self.stream = np.fromfile(data / f"valid_{cfg.compare.valid}.bin", dtype=np.uint16)

    def in_unit(self, score: Score) -> float:
        """A score as the report states it; in a text of one byte a character, tokens of one byte are characters."""
        return score.nats if self.cfg.compare.unit == "nats per character" else score.bits_per_byte

    def blocks(self, model, limit: int) -> Score:
        """Each block of a context from an empty state."""
        return block_loss(model, self.stream, self.bytes, self.cfg.train.segment, limit or None)

    def carried(self, model, limit: int, lanes: int = 1) -> Score:
        """The state carried through the text."""
        return stream_loss(model, self.stream, self.bytes, limit or None, lanes)


class ComparedTrainer(Trainer):
    """A run whose curve is the loss that it is judged by, on the first `train.eval_tokens` of the text."""

    def evaluate(self) -> dict[str, dict]:
        judge, limit = Judge(self.cfg, self.data), self.cfg.train.eval_tokens
        score = judge.carried(self.model, limit, lanes=4) if self.cfg.train.carry_state else judge.blocks(self.model, limit)
        return {self.cfg.compare.valid: dataclasses.asdict(score)}


def run_one(base: RunConfig, mixer: str, seed: int, data: Path, out: Path, threads: int) -> None:
    """Trains, measures and exports one mixer with one seed; goes on where a run that was killed stood."""
    name = f"{mixer}-{seed}"
    cfg, work = configured(base, mixer, seed, threads), out / "work" / name
    trainer = ComparedTrainer(cfg, data, work, "cpu")
    trainer.run()
    judge, limit = Judge(cfg, data), cfg.compare.eval_tokens
    write_folder(trainer.model, data / "tokenizer.json", out / "checkpoints" / name, "f32")
    log = [json.loads(line) for line in (work / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    result = {
        "mixer": mixer, "seed": seed, "parameters": parameters(trainer.model), "state_bytes": 4 * cfg.model.state_numbers,
        "judged": "stream_loss" if cfg.train.carry_state else "loss",
        "loss": judge.in_unit(judge.blocks(trainer.model, limit)),
        "stream_loss": judge.in_unit(judge.carried(trainer.model, limit)),
        "seconds": sum(line["seconds"] for line in log),
        "curve": [[line["step"], judge.in_unit(Score(**line["valid"][cfg.compare.valid]))] for line in log if "valid" in line],
        "train_curve": train_curve(log, cfg.train.eval_every // 5 or 1),
        "settings": settings(cfg),
    }
    write_json(out / "runs" / f"{name}.json", result)
    shutil.rmtree(work)


def train_curve(log: list[dict], every: int) -> list[list]:
    """Steps and the mean training loss (nats per token) of the `every` steps up to each."""
    return [[log[i + every - 1]["step"], sum(x["loss"] for x in log[i : i + every]) / every]
            for i in range(0, len(log) - every + 1, every)]


def settings(cfg: RunConfig) -> dict:
    """What all runs of a report share."""
    m, t, c = cfg.model, cfg.train, cfg.compare
    return {"corpus": c.corpus, "unit": c.unit, "vocab_size": m.vocab_size, "layers": m.num_hidden_layers,
            "hidden": m.hidden_size, "heads": m.num_attention_heads, "head_dim": m.head_dim, "context": t.segment,
            "batch": t.lanes, "steps": t.steps, "tokens": t.steps * t.lanes * t.segment, "optimizer": t.optimizer, "lr": t.lr,
            "warmup": t.warmup, "weight_decay": t.weight_decay, "hybrid_window": c.window,
            "evaluated_tokens": c.eval_tokens or "all", "parameters": EQUAL_TERMS}


def write_json(path: Path, value: dict) -> None:
    """Whole or not at all, also beside another process that writes the same."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def machine() -> str:
    """The processor, how many of its cores there are, and the numbers' type."""
    info = Path("/proc/cpuinfo")
    names = [x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")] if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores, f32, PyTorch {torch.__version__}"


def report(base: RunConfig, out: Path, command: str) -> Path:
    """Merges `runs/*.json` into the report of the experiment, mixers in the order of `MIXERS`; a run with other settings
    than the experiment's is refused."""
    rows: dict[str, dict] = {}
    want = json.loads(json.dumps(settings(base)))
    for path in sorted((out / "runs").glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        if run.pop("settings") != want:
            raise ValueError(f"{path}: was made with other settings; use another folder")
        seed = {key: run.pop(key) for key in ("seed", "loss", "stream_loss", "seconds", "curve", "train_curve")}
        rows.setdefault(run["mixer"], run | {"seeds": []})["seeds"].append(seed)
    value = {"experiment": base.compare.experiment, "command": command, "machine": machine(),
             "date": datetime.date.today().isoformat(), "settings": want,
             "rows": [rows[mixer] for mixer in MIXERS if mixer in rows]}
    for row in value["rows"]:
        row["seeds"].sort(key=lambda seed: seed["seed"])
    path = out / f"{base.compare.experiment}.json"
    write_json(path, value)
    return path


def compare(path: Path, data: Path, out: Path, only: list[str], seeds: list[int], threads: int, overrides: list[str]) -> Path:
    """Makes the runs that are not there yet, the first seed of every mixer before the second; returns the report."""
    base = config.load(path, overrides)
    unknown = sorted(set(only) - set(MIXERS))
    if unknown:
        raise ValueError(f"--only: unknown mixers {unknown}; known are {', '.join(MIXERS)}")
    command = f"tidegate-train compare configs/{path.name} --data DATA --out FOLDER"
    command += "".join(f" --set '{item}'" for item in overrides)
    for seed in seeds or base.compare.seeds:
        for mixer in only or MIXERS:
            if not (out / "runs" / f"{mixer}-{seed}.json").exists():
                print(f"{mixer}, seed {seed}", flush=True)
                run_one(base, mixer, seed, data, out, threads)
                report(base, out, command)
    return report(base, out, command)
