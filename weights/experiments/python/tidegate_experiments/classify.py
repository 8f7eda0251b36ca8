"""Sequence classification: trains one encoder with each mixer in turn on the same sequences of a task, and reports.

A run is one mixer with one seed and writes `runs/<mixer>-<seed>.json`. A finished run is not repeated, and the report
`<task>.json` is rewritten after each run from all of them, so several processes may share a folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import random
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from tidegate_training import config, optim
from tidegate_training.model import parameters
from tidegate_training.train import Diverged

from . import compare, sequences
from .encoder import Encoder, EncoderConfig
from .listops import ListOpsConfig
from .passages import PassagesConfig
from .sequences import Sequences

# The mixers by their names in reports. With sine and cosine, D random vectors give 2 D features; the other maps get 2 D
# vectors.
MIXERS = {
    "softmax": {"attention": "softmax"},
    "rfa": {"attention": "rfa", "feature_map": "gaussian"},
    "rfa-arccos": {"attention": "rfa", "feature_map": "arc_cosine"},
    "elu": {"attention": "rfa", "feature_map": "elu"},
    "favor": {"attention": "rfa", "feature_map": "favor"},
    "lara": {"attention": "lara", "lara_weights": "query-specific"},
    "lara-balance": {"attention": "lara", "lara_weights": "balance"},
    "ra": {"attention": "ra"},
}
# The tasks by the names of their commands and reports.
TaskConfig = ListOpsConfig | PassagesConfig
TASKS: dict[str, type[TaskConfig]] = {task.NAME: task for task in (ListOpsConfig, PassagesConfig)}
CURVE_EVERY = 25
BANDS = 3


@dataclass(frozen=True)
class ClassifyConfig:
    """How each run is trained: `batch` sequences per step. `optim.py` reads the fields shared with `TrainConfig`."""

    mixers: list[str] = field(default_factory=lambda: ["softmax", "rfa", "lara"])
    seeds: list[int] = field(default_factory=lambda: [1])
    batch: int = 32
    steps: int = 300
    warmup: int = 30
    optimizer: str = "adamw"
    lr: float = 2e-3
    muon_lr: float = 0.02
    min_lr_ratio: float = 0.05
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    sigma_max: float = 1.3
    precision: str = "f32"
    threads: int = 1

    def __post_init__(self):
        unknown = [m for m in self.mixers if m not in MIXERS]
        if unknown:
            raise ValueError(f"train.mixers: expected some of {sorted(MIXERS)}, found {unknown}")
        if self.precision not in ("f32", "bf16"):
            raise ValueError(f"train.precision: expected 'f32' or 'bf16', found {self.precision!r}")
        if min(self.batch, self.steps) < 1 or not self.seeds or not self.mixers:
            raise ValueError("train: batch and steps must be at least 1, and mixers and seeds not empty")


@dataclass(frozen=True)
class Experiment:
    model: EncoderConfig
    data: TaskConfig
    train: ClassifyConfig

    def __post_init__(self):
        if self.data.train_sequences < self.train.batch or self.data.test_sequences < 1:
            raise ValueError(f"data: train_sequences must be at least train.batch, {self.train.batch}, and test_sequences 1 or more, "
                             f"found {self.data.train_sequences} and {self.data.test_sequences}")

    def settings(self) -> dict:
        """Returns the settings of a run other than its mixer and seed, as plain JSON."""
        sized = dataclasses.replace(self.model, vocab_size=self.data.vocab_size, classes=self.data.classes)
        model, train = dataclasses.asdict(sized), dataclasses.asdict(self.train)
        for key in ("attention", "feature_map", "lara_weights"):
            del model[key]
        for key in ("mixers", "seeds", "threads"):
            del train[key]
        return {"model": model, "data": dataclasses.asdict(self.data), "train": train}


def load(task: str, path: Path, overrides: list[str] = ()) -> Experiment:
    """Reads `[model]`, `[data]` and `[train]` of a task's TOML file; each override is `table.key=value`."""
    raw = config.read(path, overrides, ("model", "data", "train"))
    build = lambda cls, table: config.build(cls, raw.get(table, {}), table)
    if {"attention", "feature_map", "lara_weights", "vocab_size", "classes"} & set(raw.get("model", {})):
        raise ValueError("[model]: train.mixers says which attentions are used, the task how many tokens and classes there are")
    return Experiment(build(EncoderConfig, "model"), build(TASKS[task], "data"), build(ClassifyConfig, "train"))


def band(length: int, data: TaskConfig) -> int:
    """Returns which third of the range of lengths a batch is in."""
    return min(BANDS - 1, BANDS * (length - data.min_length) // max(1, data.max_length - data.min_length))


def batch_tensors(data: Sequences, index: np.ndarray, device: str):
    """Returns token ids, mask (None without padding) and labels of a batch."""
    ids, labels = (torch.from_numpy(x).to(device) for x in sequences.collate(data, index))
    mask = ids != sequences.PAD
    return ids, None if bool(mask.all()) else mask, labels


def synchronise(device: str) -> None:
    if device.startswith("cuda"):
        torch.cuda.synchronize()


@torch.no_grad()
def evaluate(model: Encoder, data: Sequences, batch: int, device: str) -> tuple[float, float]:
    """Returns the accuracy and the mean loss in nats over all sequences."""
    model.eval()
    right, total = 0, 0.0
    for index in sequences.batches(data, batch):
        ids, mask, labels = batch_tensors(data, index, device)
        logits = model(ids, mask)
        right += int((logits.argmax(-1) == labels).sum())
        total += torch.nn.functional.cross_entropy(logits, labels, reduction="sum").item()
    model.train()
    return right / len(data), total / len(data)


def configured(exp: Experiment, mixer: str) -> EncoderConfig:
    """Returns the configuration of the encoder with one mixer."""
    cfg = dataclasses.replace(exp.model, vocab_size=exp.data.vocab_size, classes=exp.data.classes, **MIXERS[mixer])
    return dataclasses.replace(cfg, proj_dim=compare.vectors(cfg.feature_map, exp.model.proj_dim))


def train_one(exp: Experiment, mixer: str, seed: int, train: Sequences, test: Sequences, device: str = "cpu") -> dict:
    """Trains the encoder with one mixer and measures it on `test`. The batches depend only on the seed."""
    t = exp.train
    model = Encoder(configured(exp, mixer))
    model.init_weights(seed)
    model.to(device)
    torch.manual_seed(seed)  # for the noise in training
    optimizers = optim.build(model, t)
    rng = random.Random(seed)
    queue: list[np.ndarray] = []
    curve, recent = [], []
    spent, counted = [0.0] * BANDS, [0] * BANDS
    bar = tqdm(range(t.steps), desc=f"{mixer} {seed}", unit="step", dynamic_ncols=True, mininterval=2.0)
    for step in bar:
        queue = queue or sequences.batches(train, t.batch, rng)
        index = queue.pop()
        factor = optim.schedule(step, t)
        synchronise(device)
        clock = time.perf_counter()
        ids, mask, labels = batch_tensors(train, index, device)
        for o in optimizers:
            for g in o.param_groups:
                g["lr"] = g["base_lr"] * factor
            o.zero_grad(set_to_none=True)
        with torch.autocast(device_type=device.split(":")[0], dtype=torch.bfloat16, enabled=t.precision == "bf16"):
            loss = model(ids, mask, labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), t.clip)
        for o in optimizers:
            o.step()
        with torch.no_grad():
            for layer in model.layers:
                if layer.self_attn.mixer.sigma is not None:
                    # The result with arc-cosine features does not depend on sigma's scale, so sigma needs no upper bound
                    # there.
                    layer.self_attn.mixer.sigma.clamp_(0.05, t.sigma_max if model.cfg.feature_map == "gaussian" else None)
        recent.append(loss.item())
        which = band(ids.shape[1], exp.data)
        spent[which] += time.perf_counter() - clock
        counted[which] += len(index)
        if not math.isfinite(recent[-1]):
            raise Diverged(f"{mixer}, seed {seed}, step {step}: loss {recent[-1]}; lower train.lr or raise train.warmup")
        if len(recent) == CURVE_EVERY or step + 1 == t.steps:
            curve.append([step + 1, round(sum(recent) / len(recent), 4)])
            bar.set_postfix(loss=curve[-1][1])
            recent = []
    accuracy, loss = evaluate(model, test, t.batch, device)
    edges = [exp.data.min_length + i * (exp.data.max_length - exp.data.min_length) // BANDS for i in range(BANDS + 1)]
    return {
        "seed": seed,
        "accuracy": accuracy,
        "standard_error": round(math.sqrt(accuracy * (1 - accuracy) / len(test)), 4),
        "loss": round(loss, 4),
        "steps": t.steps,
        "sequences_per_second": round(sum(counted) / sum(spent), 3),
        "by_length": {f"{edges[i]}-{edges[i + 1]}": round(counted[i] / spent[i], 3) for i in range(BANDS) if counted[i]},
        "seconds": round(sum(spent), 1),
        "curve": curve,
        "parameters": parameters(model),
    }


def machine(device: str) -> str:
    """Describes the processor of a run."""
    if device.startswith("cuda"):
        return torch.cuda.get_device_name(device)
    return f"{compare.machine()}, threads used: {torch.get_num_threads()}"


def read_runs(folder: Path, settings: dict) -> dict[tuple[str, int], dict]:
    """Returns the finished runs of a folder by mixer and seed; ValueError if one had other settings."""
    found = {}
    for file in sorted(folder.glob("*.json")):
        run = json.loads(file.read_text(encoding="utf-8"))
        if run["settings"] != settings:
            raise ValueError(f"{file}: a run with other settings; use another folder")
        found[run["mixer"], run["result"]["seed"]] = run
    return found


def report(exp: Experiment, runs: dict[tuple[str, int], dict], settings: dict, facts: dict) -> dict:
    """Returns the task's report: one row per mixer, with all its seeds."""
    rows = []
    for mixer in MIXERS:
        results = [runs[key]["result"] for key in sorted(runs) if key[0] == mixer]
        if results:
            seeds = [{k: v for k, v in runs[mixer, r["seed"]]["result"].items() if k != "parameters"}
                     | {"machine": runs[mixer, r["seed"]]["machine"]} for r in results]
            rows.append({"mixer": mixer, "parameters": results[0]["parameters"], "seeds": seeds})
    given = list(runs.values())
    return {"experiment": exp.data.NAME, "command": compare.distinct(given, "command"), "machine": compare.distinct(given, "machine"),
            "date": datetime.date.today().isoformat(), "settings": settings | facts, "rows": rows}


def run_all(exp: Experiment, out: Path, only: list[str], seeds: list[int], device: str, command: str,
            texts: Path | None = None) -> dict:
    """Makes the missing runs; returns the report, which is also written to `out/<task>.json`.

    command: the command for the report; texts: the folder that a task's texts are relative to. If a run diverges, the
    others continue and then `Diverged` is raised; the next call tries that run again.
    """
    mixers = only or exp.train.mixers
    unknown = sorted(set(mixers) - set(MIXERS))
    if unknown:
        raise ValueError(f"--only: unknown mixers {unknown}; known are {', '.join(MIXERS)}")
    compare.remove_leftovers(out)
    if exp.train.threads:
        torch.set_num_threads(exp.train.threads)
    folder, path = out / "runs", out / f"{exp.data.NAME}.json"
    folder.mkdir(parents=True, exist_ok=True)
    settings = exp.settings() | exp.data.source(texts)
    read_runs(folder, settings)  # refuses a folder of another experiment before anything is computed
    train, test = (exp.data.generate(part, texts) for part in ("train", "test"))
    facts = {"unit": "accuracy", "note_on_accuracies": exp.data.NOTE} | exp.data.facts(train, test)
    print(json.dumps(facts, indent=1), flush=True)
    for seed in seeds or exp.train.seeds:
        for mixer in mixers:
            file = folder / f"{mixer}-{seed}.json"
            if file.exists():
                continue
            try:
                result = train_one(exp, mixer, seed, train, test, device)
            except Diverged as e:
                facts.setdefault("diverged", []).append(str(e))
                continue
            compare.write_json(file, {"mixer": mixer, "machine": machine(device), "command": command, "settings": settings,
                                      "result": result})
            compare.write_json(path, report(exp, read_runs(folder, settings), settings, facts))
            print(f"{mixer}, seed {seed}: accuracy {result['accuracy']:.3f}, loss {result['loss']:.3f} nats, "
                  f"{result['sequences_per_second']:.2f} sequences/s", flush=True)
    whole = report(exp, read_runs(folder, settings), settings, facts)
    compare.write_json(path, whole)
    if "diverged" in facts:
        raise Diverged(f"{path} is without " + "; ".join(facts["diverged"]))
    return whole
