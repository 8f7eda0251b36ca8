"""Compares the mixers on equal terms: one decoder, one text in one order, one schedule; only the mixer differs.

A run is one mixer with one seed: `work/` holds it during training, `checkpoints/<mixer>-<seed>` is its checkpoint folder,
and `runs/<mixer>-<seed>.json` has its results, which the report merges. A finished run is not repeated, so several
processes may share the mixers.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import platform
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from tidegate_training import config
from tidegate_training.config import RunConfig
from tidegate_training.data import EOT_ID, Lanes, fingerprint, positions
from tidegate_training.evaluate import Score, score, stream_loss
from tidegate_training.export import write_folder
from tidegate_training.model import Decoder, parameters
from tidegate_training.train import Diverged, Trainer

UNITS = ("nats per character", "bits per byte")


@dataclass(frozen=True)
class CompareConfig:
    """The settings of a comparison.

    experiment: the name of the report; corpus: the text in words; unit: of the losses
    valid: the validation text of `[data]` on which the losses are measured; eval_tokens: how many of its first tokens, 0
    for all
    window: the number of tokens in the hybrid's window
    resets: the probability that a lane of a stateful mixer begins a segment with an empty state, so that it also learns to
    read separate blocks
    """

    experiment: str = "language"
    corpus: str = ""
    unit: str = "bits per byte"
    valid: str = ""
    window: int = 16
    resets: float = 0.0
    eval_tokens: int = 0
    seeds: list[int] = field(default_factory=lambda: [1, 2, 3])

    def __post_init__(self) -> None:
        if self.unit not in UNITS:
            raise ValueError(f"compare.unit: must be one of {UNITS}, found {self.unit!r}")
        if not 0.0 <= self.resets < 1.0:
            raise ValueError(f"compare.resets: must be at least 0 and below 1, found {self.resets}")


@dataclass(frozen=True)
class CompareRun(RunConfig):
    """The settings of a run and of the comparison."""

    compare: CompareConfig = CompareConfig()


def load(path: Path, overrides: list[str] = ()) -> CompareRun:
    """Reads a run's TOML file with its `[compare]`; each override is `table.key=value`."""
    raw = config.read(path, overrides, ("model", "data", "train", "compare"))
    return CompareRun(**config.build_run(raw), compare=config.build(CompareConfig, raw.get("compare", {}), "compare"))


# Each mixer's changes to `[model]`. With sine and cosine, D random vectors give 2 D features; the other maps get 2 D
# vectors. With D of half the head size, RFA has as many features as ELU. A window of `context` is a whole segment; `window`
# is the hybrid's window.
PLAIN = {"attention": "rfa", "feature_map": "gaussian", "gate": True, "sliding_window": None}
MIXERS: dict[str, dict] = {
    "softmax": {"attention": "softmax", "gate": False, "sliding_window": "context"},
    "softmax-stateful": {"attention": "softmax", "gate": False, "sliding_window": "context"},
    "elu": {"feature_map": "elu", "gate": False},
    "elu-gate": {"feature_map": "elu"},
    "elu-gate-stateful": {"feature_map": "elu"},
    "favor": {"feature_map": "favor", "gate": False},
    "favor-gate": {"feature_map": "favor"},
    "rfa": {"gate": False},
    "rfa-gate": {},
    "rfa-gate-stateful": {},
    "rfa-gate-no-positions": {"position_embedding": "none"},
    "rfa-gate-d-16": {"proj_dim": 16},
    "rfa-gate-d-16-stateful": {"proj_dim": 16},
    "rfa-gate-d-256-stateful": {"proj_dim": 256},
    "rfa-gate-pool": {},
    "rfa-gate-fixed-sigma": {},
    "rfa-arccos": {"feature_map": "arc_cosine", "gate": False},
    "rfa-arccos-gate": {"feature_map": "arc_cosine"},
    "hybrid": {"attention": "hybrid", "sliding_window": "window"},
}
# Stateful mixers are trained with the state carried from segment to segment, and with half-lives to match; the half-lives
# of the others fit a block. Softmax then sees the last context of the stream, as in Transformer-XL.
CARRIED = {"carry_state": True, "half_life_min": 1.0, "half_life_max": 1024.0}
STATEFUL = {mixer: CARRIED for mixer in MIXERS if mixer.endswith("-stateful")}
# The size of the pool of random matrices that training draws from; for other mixers it is `train.pool`.
POOLS = {"rfa-gate-pool": 200}
# Mixers whose sigma stays 1; in all others it is learned, starting from 1.
FIXED_SIGMA = ("rfa-gate-fixed-sigma",)
# Settings of `[model]` and `[train]` that may differ between the runs of a report: a mixer's own, the seed, and threads.
OWN = {"model": tuple(PLAIN), "train": ("seed", "threads", "carry_state")}
NOTES = {
    "parameters": "All mixers have weights of the same shapes. Only the gate (heads * (hidden + 1) numbers per layer), sigma "
                  "(heads * head_dim) and the hybrid's far_bias (heads) are specific to a mixer.",
    "judging": "The loss covers blocks of one context, each read from an empty state. stream_loss carries the state through "
               "the text. Both are given for all mixers. Judge a stateful mixer by its stream_loss, against the stream_loss "
               "of the others.",
    "learning": "One schedule and one learning rate for all mixers, not tuned for any. Seeds differ in initial weights, "
                "random matrices, and where in the text reading starts. For one seed, shared initial weights and data order "
                "are the same in all mixers.",
}


def notes(cfg: CompareRun) -> dict[str, str]:
    """Returns the notes for readers of the report."""
    m, t = cfg.model, cfg.train
    return {
        "note_on_parameters": NOTES["parameters"],
        "note_on_features": f"{2 * m.proj_dim} features per head, from {m.proj_dim} random vectors with sine and cosine or "
                            f"from {2 * m.proj_dim} with arc-cosine and FAVOR+. Mixers with -d-N in their names have 2 N "
                            f"features. ELU has head_dim = {m.head_dim} features. The size of the state is proportional to "
                            "the number of features.",
        "note_on_judging": NOTES["judging"],
        "note_on_half_lives": f"Initial half-lives are {t.half_life_min:g} to {t.half_life_max:g} tokens, chosen for blocks "
                              f"of {t.segment} tokens. In stateful mixers they are {CARRIED['half_life_min']:g} to "
                              f"{CARRIED['half_life_max']:g} tokens.",
        "note_on_resets": f"At the start of each segment of {t.segment} tokens, every lane of a stateful mixer is "
                          f"independently reset to an empty state with probability {cfg.compare.resets:g}.",
        "note_on_learning": NOTES["learning"],
    }


def vectors(feature_map: str, proj_dim: int) -> int:
    """Returns how many random vectors give a map as many features as `proj_dim` vectors give with sine and cosine."""
    return 2 * proj_dim if feature_map in ("favor", "arc_cosine") else proj_dim


def configured(base: CompareRun, mixer: str, seed: int, threads: int) -> CompareRun:
    """Returns the settings of the run of one mixer and seed."""
    changes = PLAIN | MIXERS[mixer]
    windows = {"context": base.train.segment, "window": base.compare.window}
    changes["sliding_window"] = windows.get(changes["sliding_window"])
    changes.setdefault("proj_dim", vectors(changes["feature_map"], base.model.proj_dim))
    model = dataclasses.replace(base.model, **changes)
    pool = POOLS.get(mixer, base.train.pool) if model.proj_dim else 0
    own = {"carry_state": False, "pool": pool} | STATEFUL.get(mixer, {})
    train = dataclasses.replace(base.train, seed=seed, threads=threads, **own)
    return dataclasses.replace(base, model=model, train=train)


@torch.no_grad()
def block_loss(model: Decoder, stream: np.ndarray, text_bytes: int | None, context: int, limit: int | None = None,
               rows: int = 32, device: str = "cpu") -> Score:
    """Scores a text in blocks of `context` tokens, each read from an empty state. A last block of fewer tokens is
    omitted."""
    blocks = min(stream.size - 1, limit or stream.size) // context
    if blocks == 0:
        raise ValueError(f"a text of {stream.size} tokens is too short for a block of {context}")
    model.eval()
    total = 0.0
    for at in range(0, blocks, rows):
        count = min(rows, blocks - at)
        index = np.arange(at, at + count)[:, None] * context + np.arange(context + 1)[None, :]
        piece = stream[index].astype(np.int64)
        starts = piece[:, :-1] == EOT_ID
        place = torch.from_numpy(positions(starts, np.zeros(count, dtype=np.int64))).to(device)
        ids, targets = (torch.from_numpy(x).to(device) for x in (piece[:, :-1], piece[:, 1:]))
        inside = torch.from_numpy(starts).to(device) if starts[:, 1:].any() else None
        total += model(ids, None, inside, place, chunk=context, targets=targets)[0].item()
    model.train()
    return score(total, blocks * context, stream.size - 1, text_bytes)


class Validation:
    """Measures a model on the validation text, in the unit of the report."""

    def __init__(self, cfg: CompareRun, data: Path):
        self.cfg = cfg
        found = json.loads((data / "data.json").read_text(encoding="utf-8"))["valid"]
        if cfg.compare.valid not in found:
            raise ValueError(f"compare.valid: must be one of {sorted(found)}, found {cfg.compare.valid!r}")
        self.bytes = found[cfg.compare.valid]["bytes"]
        self.stream = np.fromfile(data / f"valid_{cfg.compare.valid}.bin", dtype=np.uint16)
        marks = int((self.stream == EOT_ID).sum())
        if cfg.compare.unit == "nats per character" and self.stream.size != self.bytes + marks:
            raise ValueError(f"compare.unit: must be 'bits per byte' where tokens are not bytes, found {cfg.compare.unit!r} and "
                             f"{self.stream.size} tokens of {self.bytes} bytes and {marks} marks")

    def in_unit(self, score: Score) -> float:
        """Returns a score in the report's unit. Nats per token are nats per character if every token is a byte and the text
        is ASCII."""
        return score.nats if self.cfg.compare.unit == "nats per character" else score.bits_per_byte

    def blocks(self, model, limit: int) -> Score:
        """Scores blocks of one context, each read from an empty state."""
        return block_loss(model, self.stream, self.bytes, self.cfg.train.segment, limit or None)

    def carried(self, model, limit: int, lanes: int = 1) -> Score:
        """Scores the text with the state carried through it."""
        return stream_loss(model, self.stream, self.bytes, limit or None, lanes)


class ComparedTrainer(Trainer):
    """A run whose seed sets where in the text it begins to read.

    Its curve is the loss by which it is judged, on the first `train.eval_tokens` of the validation text. fixed_sigma:
    whether sigma keeps its initial value
    """

    MAY_DIFFER = ("threads",)

    def __init__(self, cfg: CompareRun, data: Path, out: Path, device: str, fixed_sigma: bool = False):
        super().__init__(cfg, data, out, device)
        t = cfg.train
        begin = np.random.default_rng(t.seed).integers(self.stream.size)
        self.lanes = Lanes(np.roll(self.stream, -begin), t.lanes, t.segment)
        for layer in self.model.model.layers if fixed_sigma else ():
            layer.self_attn.sigma.requires_grad_(False)

    def train_step(self) -> tuple[float, float]:
        if self.cfg.train.carry_state and self.cfg.compare.resets:
            self.reset_lanes()
        return super().train_step()

    def reset_lanes(self) -> None:
        """Empties the states of some lanes, chosen by seed and step, so that a resumed run chooses the same. Positions are
        not reset."""
        t = self.cfg.train
        gone = torch.from_numpy(np.random.default_rng((t.seed, self.step)).random(t.lanes) < self.cfg.compare.resets)
        empty = self.model.new_state(t.lanes, self.device)
        choose = lambda old, new: None if old is None else torch.where(gone.view(-1, *[1] * (old.ndim - 1)), new, old)
        self.state = self.model.state_from([tuple(map(choose, old.tuple(), new.tuple())) for old, new in zip(self.state, empty)])

    def evaluate(self) -> dict[str, dict]:
        self.as_served()
        validation, limit = Validation(self.cfg, self.data), self.cfg.train.eval_tokens
        score = validation.carried(self.model, limit, lanes=4) if self.cfg.train.carry_state else validation.blocks(self.model, limit)
        return {self.cfg.compare.valid: dataclasses.asdict(score)}


def run_one(base: CompareRun, mixer: str, seed: int, data: Path, out: Path, threads: int, command: str = "") -> None:
    """Trains, measures and exports one mixer with one seed; resumes a killed run."""
    name = f"{mixer}-{seed}"
    cfg, work = configured(base, mixer, seed, threads), out / "work" / name
    validation, limit = Validation(cfg, data), cfg.compare.eval_tokens
    trainer = ComparedTrainer(cfg, data, work, "cpu", mixer in FIXED_SIGMA)
    trainer.run()
    trainer.as_served()
    write_folder(trainer.model, data / "tokenizer.json", out / "checkpoints" / name, "f32")
    log = [json.loads(line) for line in (work / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    result = {
        "mixer": mixer, "seed": seed, "parameters": parameters(trainer.model), "state_bytes": 4 * cfg.model.state_numbers,
        "judged": "stream_loss" if cfg.train.carry_state else "loss",
        "loss": validation.in_unit(validation.blocks(trainer.model, limit)),
        "stream_loss": validation.in_unit(validation.carried(trainer.model, limit)),
        "seconds": sum(line["seconds"] for line in log),
        "curve": [[line["step"], validation.in_unit(Score(**line["valid"][cfg.compare.valid]))] for line in log if "valid" in line],
        "machine": machine(), "command": command, "settings": settings(base, data),
    }
    write_json(out / "runs" / f"{name}.json", result)
    shutil.rmtree(work)


def settings(base: CompareRun, data: Path) -> dict:
    """Returns the settings that all runs of a report share."""
    m, t, c = base.model, base.train, base.compare
    tables = {name: {k: v for k, v in dataclasses.asdict(getattr(base, name)).items() if k not in OWN[name]} for name in OWN}
    return {"corpus": c.corpus, "unit": c.unit, "layers": m.num_hidden_layers, "hidden": m.hidden_size, "context": t.segment,
            "batch": t.lanes * t.accumulate, "steps": t.steps, "tokens": t.steps * t.lanes * t.segment * t.accumulate, "lr": t.lr,
            "hybrid_window": c.window, "resets": c.resets, "evaluated": c.valid, "evaluated_tokens": c.eval_tokens or "all",
            "data": fingerprint(data), "stateful": STATEFUL} | tables


def write_json(path: Path, value: dict) -> None:
    """Writes a JSON file atomically, even if another process writes the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}")
    part.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    os.replace(part, path)


def machine() -> str:
    """Describes the processor, its number of cores, the number type and PyTorch's version."""
    info = Path("/proc/cpuinfo")
    names = [x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")] if info.exists() else []
    return f"{names[0] if names else platform.processor() or platform.machine()}, {os.cpu_count()} cores, f32, PyTorch {torch.__version__}"


def read_runs(folder: Path, want: dict) -> list[dict]:
    """Returns the runs of a folder; ValueError if one has other settings than `want`."""
    found = []
    for path in sorted(folder.glob("*.json")):
        run = json.loads(path.read_text(encoding="utf-8"))
        given = run.pop("settings")
        if given != want:
            other = [key for key in sorted({*given, *want}) if given.get(key) != want.get(key)]
            raise ValueError(f"{path}: was made with other settings ({', '.join(other)}); use another folder")
        found.append(run)
    return found


def distinct(runs: list[dict], key: str) -> str:
    """Returns the distinct values of a key, joined."""
    return "; ".join(dict.fromkeys(run[key] for run in runs))


def report(base: CompareRun, data: Path, out: Path) -> Path:
    """Merges `runs/*.json` into the report of the experiment, with the mixers in the order of `MIXERS`."""
    rows: dict[str, dict] = {}
    want = json.loads(json.dumps(settings(base, data)))
    runs, lost = (read_runs(out / name, want) for name in ("runs", "diverged"))
    head = {"command": distinct(runs, "command"), "machine": distinct(runs, "machine")}
    for run in runs:
        del run["command"]
        seed = {key: run.pop(key) for key in ("seed", "loss", "stream_loss", "seconds", "curve", "machine")}
        rows.setdefault(run["mixer"], run | {"seeds": []})["seeds"].append(seed)
    said = want | notes(base)
    if lost:
        said["diverged"] = [f"{run['mixer']}, seed {run['seed']}: {run['message']}" for run in lost]
    value = {"experiment": base.compare.experiment, **head, "date": datetime.date.today().isoformat(), "settings": said,
             "rows": [rows[mixer] for mixer in MIXERS if mixer in rows]}
    for row in value["rows"]:
        row["seeds"].sort(key=lambda seed: seed["seed"])
    path = out / f"{base.compare.experiment}.json"
    write_json(path, value)
    return path


def remove_leftovers(out: Path) -> None:
    """Removes what killed processes left behind: partial files, and the work of finished runs."""
    for part in [*out.glob(".*.json.*"), *(out / "runs").glob(".*.json.*"), *(out / "diverged").glob(".*.json.*")]:
        owner = part.suffix.removeprefix(".")
        if not owner.isdecimal() or not Path(f"/proc/{owner}").exists():
            part.unlink(missing_ok=True)
    for done in (out / "runs").glob("*.json"):
        shutil.rmtree(out / "work" / done.stem, ignore_errors=True)


def compare(path: Path, data: Path, out: Path, only: list[str], seeds: list[int], threads: int, overrides: list[str],
            command: str = "") -> Path:
    """Makes the missing runs, the first seed of every mixer before the second; returns the path of the report.

    command: the command for the report. A diverged run is noted in `diverged/` and the others continue; then `Diverged` is
    raised. Delete the note to try the run again.
    """
    base = load(path, overrides)
    unknown = sorted(set(only) - set(MIXERS))
    if unknown:
        raise ValueError(f"--only: unknown mixers {unknown}; known are {', '.join(MIXERS)}")
    remove_leftovers(out)
    want = json.loads(json.dumps(settings(base, data)))
    for name in ("runs", "diverged"):
        read_runs(out / name, want)  # refuses a folder of another experiment before anything is computed
    for seed in seeds or base.compare.seeds:
        for mixer in only or MIXERS:
            name = f"{mixer}-{seed}.json"
            if (out / "runs" / name).exists() or (out / "diverged" / name).exists():
                continue
            print(f"{mixer}, seed {seed}", flush=True)
            try:
                run_one(base, mixer, seed, data, out, threads, command)
            except Diverged as e:
                write_json(out / "diverged" / name, {"mixer": mixer, "seed": seed, "message": str(e).replace(f"{out}/", ""),
                                                     "settings": want})
            report(base, data, out)
    lost = read_runs(out / "diverged", want)
    made = report(base, data, out)
    if lost:
        raise Diverged(f"{made} is without " + "; ".join(f"{run['mixer']}, seed {run['seed']} ({run['message']})" for run in lost))
    return made
