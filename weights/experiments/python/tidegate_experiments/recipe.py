"""The shipped model's recipe, one change at a time, at equal time: does a change earn what it costs?

A variant changes settings of the trainer, or the mixer itself (`MIXERS`), which then is an experiment and nothing the server
reads. `cost` is the processor time of a variant's step over that of the first variant (`measure`); its run has 1/cost of the
steps. A finished run is not repeated, so that several processes may share the variants.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
import statistics
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from tqdm import tqdm

from tidegate_training import config
from tidegate_training.data import prepare_run
from tidegate_training.model import parameters

from .compare import CompareConfig, ComparedTrainer, CompareRun, Validation, machine, read_runs, remove_leftovers, write_json
from .recipe_mixers import MIXERS, RecipeDecoder


@dataclass(frozen=True)
class Variant:
    """Changes of `[model]`, `[train]` and `[compare]`, a mixer of `MIXERS`, the factor by which averaged weights keep their past at
    each step (0: the last weights are measured), and the processor time of a step over the first variant's."""

    model: dict[str, int | float | str] = field(default_factory=dict)
    train: dict[str, int | float | str] = field(default_factory=dict)
    compare: dict[str, int | float | str] = field(default_factory=dict)
    mixer: str = "rfa"
    ema: float = 0.0
    cost: float = 1.0

    def __post_init__(self) -> None:
        if self.mixer not in MIXERS:
            raise ValueError(f"variants.mixer: must be one of {', '.join(MIXERS)}, found {self.mixer!r}")
        if not 0.0 <= self.ema < 1.0:
            raise ValueError(f"variants.ema: must be at least 0 and below 1, found {self.ema}")
        if self.cost <= 0.0:
            raise ValueError(f"variants.cost: must be above 0, found {self.cost}")


@dataclass(frozen=True)
class RecipeRun(CompareRun):
    """The settings that variants change, and the variants."""

    variants: dict[str, Variant] = field(default_factory=dict)


def load(path: Path, overrides: list[str] = ()) -> RecipeRun:
    """Reads a run's TOML with its `[compare]` and `[variants]`; each override is `table.key=value`."""
    raw = config.read(path, overrides, ("model", "data", "train", "compare", "variants"))
    variants = {name: config.build(Variant, table, f"variants.{name}") for name, table in raw.get("variants", {}).items()}
    if not variants:
        raise ValueError(f"{path}: [variants] must name at least one")
    compare = config.build(CompareConfig, raw.get("compare", {}), "compare")
    base = RecipeRun(**config.build_run(raw), compare=compare, variants=variants)
    for name in variants:
        configured(base, name, 1)  # refuses unknown settings before anything is computed
    return base


def check(base: RecipeRun, only: list[str]) -> None:
    """ValueError for a variant that is none."""
    unknown = sorted(set(only) - set(base.variants))
    if unknown:
        raise ValueError(f"--only: unknown variants {unknown}; known are {', '.join(base.variants)}")


def configured(base: RecipeRun, name: str, seed: int) -> RecipeRun:
    """The run of one variant and seed, as long in time as the first variant's."""
    variant, tables = base.variants[name], {}
    for table, cls in (("model", config.ModelConfig), ("train", config.TrainConfig), ("compare", CompareConfig)):
        changed = dataclasses.asdict(getattr(base, table)) | getattr(variant, table)
        tables[table] = config.build(cls, {k: v for k, v in changed.items() if v is not None}, f"variants.{name}.{table}")
    t = tables["train"]
    steps, warmup = (max(1, round(n / variant.cost)) for n in (t.steps, t.warmup))
    # An average of weights is not in a checkpoint, so such a run is not resumed but repeated.
    save_every = steps if variant.ema else t.save_every
    tables["train"] = dataclasses.replace(t, seed=seed, steps=steps, warmup=warmup, save_every=save_every)
    return dataclasses.replace(base, **tables)


def prepare(base: RecipeRun, texts: Path, data: Path) -> None:
    """Encodes the texts for each size of vocabulary, in `data`/SIZE."""
    for size in dict.fromkeys(configured(base, name, 1).model.vocab_size for name in base.variants):
        run = dataclasses.replace(base, model=dataclasses.replace(base.model, vocab_size=size))
        prepare_run(run, texts, data / str(size))


class RecipeTrainer(ComparedTrainer):
    """A run with a variant's mixer, and the average of its weights."""

    def __init__(self, cfg: RecipeRun, variant: Variant, data: Path, out: Path):
        self.variant = variant
        super().__init__(cfg, data / str(cfg.model.vocab_size), out, "cpu")
        self.averaged = {name: p.detach().clone() for name, p in self.model.named_parameters()} if variant.ema else {}

    def new_model(self) -> RecipeDecoder:
        return RecipeDecoder(self.cfg.model, self.variant.mixer)

    def train_step(self) -> tuple[float, float]:
        done = super().train_step()
        with torch.no_grad():
            for name, p in self.model.named_parameters() if self.averaged else ():
                self.averaged[name].lerp_(p, 1 - self.variant.ema)
        return done

    def use_average(self) -> None:
        """Puts the averaged weights in the place of the last ones."""
        self.model.load_state_dict(self.averaged, strict=False)


def measure(base: RecipeRun, data: Path, work: Path, steps: int, only: list[str]) -> dict[str, float]:
    """The median processor time of a step, in seconds, by variant: one step of each in turn, after two that are not
    counted.

    Processor time, because other work on the machine changes it less than the time on the clock; on one thread it is the same."""
    torch.set_num_threads(1)
    names = only or list(base.variants)
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
    if variant.ema:
        shutil.rmtree(work, ignore_errors=True)  # the average of a run that was killed is lost
    trainer = RecipeTrainer(cfg, variant, data, work)
    trainer.run()
    trainer.as_served()
    if variant.ema:
        trainer.use_average()
    validation = Validation(cfg, data / str(cfg.model.vocab_size))
    lines = [json.loads(line) for line in (work / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    t, plain = cfg.train, dataclasses.asdict(Variant(cost=variant.cost))
    write_json(out / "runs" / f"{name}-{seed}.json", {
        "variant": name, "changes": {key: x for key, x in dataclasses.asdict(variant).items() if x != plain[key]},
        "cost": variant.cost, "parameters": parameters(trainer.model), "steps": t.steps,
        "tokens": t.steps * t.lanes * t.segment, "seed": seed,
        "loss": validation.in_unit(validation.carried(trainer.model, cfg.compare.eval_tokens, lanes=4)),
        "curve": [[line["step"], line["valid"][cfg.compare.valid]["bits_per_byte"]] for line in lines if "valid" in line],
        "machine": machine(), "settings": settings(base),
    })
    shutil.rmtree(work)


def settings(base: RecipeRun) -> dict:
    """The settings that all runs of a report share, but for a variant's changes."""
    tables = {name: dataclasses.asdict(getattr(base, name)) for name in ("model", "train")}
    return {"corpus": base.compare.corpus, "unit": base.compare.unit, "evaluated_tokens": base.compare.eval_tokens} | tables


def report(base: RecipeRun, out: Path, command: str) -> Path:
    """Merges `runs/*.json` into `recipe.json`, variants in their order."""
    rows: dict[str, dict] = {}
    machines = {}
    for run in read_runs(out / "runs", json.loads(json.dumps(settings(base)))):
        seed = {key: run.pop(key) for key in ("seed", "loss", "curve")}
        machines[run.pop("machine")] = None
        rows.setdefault(run["variant"], run | {"seeds": []})["seeds"].append(seed)
    value = {"experiment": base.compare.experiment, "command": command, "machine": "; ".join(machines),
             "date": datetime.date.today().isoformat(), "settings": settings(base),
             "rows": [rows[name] for name in base.variants if name in rows]}
    path = out / f"{base.compare.experiment}.json"
    write_json(path, value)
    return path


def recipe(base: RecipeRun, data: Path, out: Path, only: list[str], seeds: list[int], command: str) -> Path:
    """Makes the missing runs, the first seed of every variant before the second; returns the report."""
    remove_leftovers(out)
    torch.set_num_threads(1)
    for seed in seeds or base.compare.seeds:
        for name in only or base.variants:
            if not (out / "runs" / f"{name}-{seed}.json").exists():
                print(f"{name}, seed {seed}", flush=True)
                run_one(base, name, seed, data, out)
    return report(base, out, command)
