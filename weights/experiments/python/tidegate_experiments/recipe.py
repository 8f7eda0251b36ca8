"""Tests changes to the shipped model's recipe, one at a time and at equal training time: is a change worth its cost?

A variant changes settings of the trainer, or the mixer itself (`MIXERS`), which the server then cannot read. `cost` is the
processor time of a variant's step relative to the first variant's (see `measure`); the variant's run has 1/cost of the
steps. A finished run is not repeated, so several processes may share the variants.
"""

from __future__ import annotations

import dataclasses
import datetime
import functools
import json
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from tidegate_training import config
from tidegate_training.data import fingerprint, prepare_run
from tidegate_training.model import parameters

from .compare import CompareConfig, ComparedTrainer, CompareRun, Validation, machine, read_runs, remove_leftovers, write_json
from .recipe_mixers import MIXERS, RecipeDecoder


@dataclass(frozen=True)
class Variant:
    """A variant of the recipe: changes to `[model]`, `[train]` and `[compare]`, a mixer of `MIXERS`, and a cost.

    cost: the processor time of a step, relative to the first variant's
    """

    model: dict[str, int | float | str] = field(default_factory=dict)
    train: dict[str, int | float | str] = field(default_factory=dict)
    compare: dict[str, int | float | str] = field(default_factory=dict)
    mixer: str = "rfa"
    cost: float = 1.0

    def __post_init__(self) -> None:
        if self.mixer not in MIXERS:
            raise ValueError(f"variants.mixer: must be one of {', '.join(MIXERS)}, found {self.mixer!r}")
        if self.cost <= 0.0:
            raise ValueError(f"variants.cost: must be above 0, found {self.cost}")


@dataclass(frozen=True)
class RecipeRun(CompareRun):
    """The base settings, and the variants that change them."""

    variants: dict[str, Variant] = field(default_factory=dict)


def load(path: Path, overrides: list[str] = ()) -> RecipeRun:
    """Reads a run's TOML file with its `[compare]` and `[variants]`; each override is `table.key=value`."""
    raw = config.read(path, overrides, ("model", "data", "train", "compare", "variants"))
    variants = {name: config.build(Variant, table, f"variants.{name}") for name, table in raw.get("variants", {}).items()}
    if not variants:
        raise ValueError(f"{path}: [variants] must name at least one")
    compare = config.build(CompareConfig, raw.get("compare", {}), "compare")
    base = RecipeRun(**config.build_run(raw), compare=compare, variants=variants)
    for name in variants:
        configured(base, name, 1)  # refuses unknown settings before anything is computed
    return base


def chosen(base: RecipeRun, only: list[str]) -> list[str]:
    """Returns the variants of `only`, or all if it is empty; ValueError for an unknown variant."""
    unknown = sorted(set(only) - set(base.variants))
    if unknown:
        raise ValueError(f"--only: unknown variants {unknown}; known are {', '.join(base.variants)}")
    return only or list(base.variants)


def configured(base: RecipeRun, name: str, seed: int) -> RecipeRun:
    """Returns the settings of the run of one variant and seed, which takes as much time as the first variant's."""
    variant, tables = base.variants[name], {}
    for table, cls in (("model", config.ModelConfig), ("train", config.TrainConfig), ("compare", CompareConfig)):
        changed = dataclasses.asdict(getattr(base, table)) | getattr(variant, table)
        tables[table] = config.build(cls, {k: v for k, v in changed.items() if v is not None}, f"variants.{name}.{table}")
    t = tables["train"]
    steps, warmup = (max(1, round(n / variant.cost)) for n in (t.steps, t.warmup))
    tables["train"] = dataclasses.replace(t, seed=seed, steps=steps, warmup=warmup)
    return dataclasses.replace(base, **tables)


def prepare(base: RecipeRun, texts: Path, data: Path) -> None:
    """Encodes the texts for each vocabulary size, in `data`/SIZE."""
    for size in dict.fromkeys(configured(base, name, 1).model.vocab_size for name in base.variants):
        run = dataclasses.replace(base, model=dataclasses.replace(base.model, vocab_size=size))
        prepare_run(run, texts, data / str(size))


class RecipeTrainer(ComparedTrainer):
    """A run with a variant's mixer."""

    def __init__(self, cfg: RecipeRun, variant: Variant, data: Path, out: Path):
        self.mixer = variant.mixer
        super().__init__(cfg, data / str(cfg.model.vocab_size), out, "cpu")

    def new_model(self) -> RecipeDecoder:
        return RecipeDecoder(self.cfg.model, self.mixer)


def measure(base: RecipeRun, data: Path, work: Path, steps: int, only: list[str]) -> dict[str, float]:
    """Returns the median processor time of a step, in seconds, by variant.

    Takes one step of each variant in turn, after two that are not counted. Other work on the machine changes processor time
    less than wall-clock time; on one thread the two are otherwise the same.
    """
    torch.set_num_threads(1)
    names = chosen(base, only)
    trainers = {name: RecipeTrainer(configured(base, name, 1), base.variants[name], data, work / name) for name in names}
    taken: dict[str, list[float]] = {name: [] for name in names}
    for turn in tqdm(range(steps + 2), unit="round"):
        for name, trainer in trainers.items():
            before = time.process_time()
            trainer.train_step()
            if turn > 1:  # the first ones compile
                taken[name].append(time.process_time() - before)
    return {name: statistics.median(times) for name, times in taken.items()}


def run_one(base: RecipeRun, name: str, seed: int, data: Path, out: Path) -> None:
    """Trains and measures one variant with one seed; resumes a killed run."""
    cfg, variant, work = configured(base, name, seed), base.variants[name], out / "work" / f"{name}-{seed}"
    trainer = RecipeTrainer(cfg, variant, data, work)
    trainer.run()
    trainer.as_served()
    validation = Validation(cfg, trainer.data)
    lines = [json.loads(line) for line in (work / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    write_json(out / "runs" / f"{name}-{seed}.json", row(base, name, data) | {
        "parameters": parameters(trainer.model), "seed": seed,
        "loss": validation.in_unit(validation.carried(trainer.model, cfg.compare.eval_tokens, lanes=4)),
        "curve": [[line["step"], line["valid"][cfg.compare.valid]["bits_per_byte"]] for line in lines if "valid" in line],
        "machine": machine(), "settings": settings(base),
    })
    shutil.rmtree(work)


fingerprint_once = functools.cache(fingerprint)  # cached, because many runs share a folder


def row(base: RecipeRun, name: str, data: Path) -> dict:
    """Returns the fields that the runs of a variant share."""
    cfg, variant = configured(base, name, 1), dataclasses.asdict(base.variants[name])
    t, plain = cfg.train, dataclasses.asdict(Variant(cost=variant["cost"]))
    return {"variant": name, "changes": {key: x for key, x in variant.items() if x != plain[key]}, "cost": variant["cost"],
            "steps": t.steps, "tokens": t.steps * t.lanes * t.segment * t.accumulate, "data": fingerprint_once(data / str(cfg.model.vocab_size))}


def settings(base: RecipeRun) -> dict:
    """Returns the settings that all runs of a report share, except for the changes of variants."""
    tables = {name: dataclasses.asdict(getattr(base, name)) for name in ("model", "train")}
    return {"corpus": base.compare.corpus, "unit": base.compare.unit, "evaluated_tokens": base.compare.eval_tokens} | tables


def finished(base: RecipeRun, data: Path, out: Path) -> list[dict]:
    """Returns the runs of a folder; ValueError if one was made with other settings, other data, or another variant of the
    same name."""
    runs = read_runs(out / "runs", json.loads(json.dumps(settings(base))))
    for run in runs:
        want = row(base, run["variant"], data) if run["variant"] in base.variants else {}
        other = [key for key in want or run if run[key] != want.get(key)]
        if other:
            raise ValueError(f"{out}: {run['variant']}, seed {run['seed']}, was made with another {', '.join(other)}; use another folder")
    return runs


def report(base: RecipeRun, data: Path, out: Path, command: str) -> Path:
    """Merges `runs/*.json` into `recipe.json`, with the variants in their order. command: without the variants and seeds"""
    rows: dict[str, dict] = {}
    machines, made = {}, {}
    for run in finished(base, data, out):
        made.setdefault(run["seed"], []).append(run["variant"])
        seed = {key: run.pop(key) for key in ("seed", "loss", "curve")}
        machines[run.pop("machine")] = None
        rows.setdefault(run["variant"], run | {"seeds": []})["seeds"].append(seed)
    commands = [f"{command} --seeds {seed} --only {','.join(filter(made[seed].__contains__, base.variants))}" for seed in sorted(made)]
    value = {"experiment": base.compare.experiment, "command": "; ".join(commands), "machine": "; ".join(machines),
             "date": datetime.date.today().isoformat(), "settings": settings(base),
             "rows": [rows[name] for name in base.variants if name in rows]}
    path = out / f"{base.compare.experiment}.json"
    write_json(path, value)
    return path


def recipe(base: RecipeRun, data: Path, out: Path, only: list[str], seeds: list[int], command: str) -> Path:
    """Makes the missing runs, the first seed of every variant before the second; returns the path of the report."""
    names = chosen(base, only)
    finished(base, data, out)  # refuses another experiment's folder before anything is computed
    remove_leftovers(out)
    torch.set_num_threads(1)
    for seed in seeds or base.compare.seeds:
        for name in names:
            if not (out / "runs" / f"{name}-{seed}.json").exists():
                print(f"{name}, seed {seed}", flush=True)
                run_one(base, name, seed, data, out)
    return report(base, data, out, command)
