"""The training loop: stateful segments, checkpoints that resume exactly, a log and a plot."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import os
import time
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from . import optim
from .average import Average
from .config import ModelConfig, RunConfig, TrainConfig, build
from .data import Lanes, fingerprint, positions
from .evaluate import stream_loss
from .export import load_folder
from .features import draw_matrices
from .files import need, read_json, read_state, read_tokenizer
from .model import Decoder
from .plot import plot_log
from .processes import Processes


class Diverged(RuntimeError):
    """The loss is NaN, infinite, or more than twice the first one, or too many steps had a gradient that is not finite."""


class Untrained(RuntimeError):
    """A tensor had no nonzero gradient in the first steps, so it would keep its initial values even if the loss fell."""


# Number of steps in which every tensor must have had a nonzero gradient.
WATCHED = 10

# Maximum number of steps that are skipped because their gradient is not finite.
LEFT_OUT = 10


# Number of pieces in which a validation text is read side by side.
PIECES = 4


def usable(device: str) -> str:
    """Returns the name of a device; ValueError if it is neither the CPU nor a GPU that PyTorch finds."""
    try:
        kind = torch.device(device).type
    except RuntimeError as e:
        raise ValueError(f"--device: must be cpu or cuda, found {device!r}") from e
    if kind == "cuda":
        number, count = torch.device(device).index or 0, torch.cuda.device_count()
        if not torch.cuda.is_available() or number >= count:
            raise ValueError(f"--device {device}: PyTorch finds {count} usable GPUs; use --device cpu")
    elif kind != "cpu":
        raise ValueError(f"--device: must be cpu or cuda, found {device!r}")
    return device


class Trainer:
    """One run in one folder: `state.pt` (resume), `log.jsonl`, `loss.png`, `run.json`."""

    # Settings that may change when a run resumes: its length and the number of threads.
    MAY_DIFFER: tuple[str, ...] = ("threads", "steps")

    def __init__(self, cfg: RunConfig, data: Path, out: Path, device: str, start: Path | None = None):
        """start: a checkpoint folder whose weights a new run starts from; a resumed run keeps its own weights"""
        self.cfg, self.data, self.out, self.device = cfg, data, out, usable(device)
        self.processes = Processes()
        self.rows = self.processes.share(cfg.train.lanes)
        self.check_data()
        self.started_from: dict[str, str] | None = None
        weights = None if start is None else self.read_start(start)
        out.mkdir(parents=True, exist_ok=True)
        if cfg.train.threads:
            torch.set_num_threads(cfg.train.threads)
        self.model = self.new_model()
        self.model.init_weights(cfg.train.half_life_min, cfg.train.half_life_max, cfg.train.seed)
        torch.manual_seed(cfg.train.seed)
        if weights is not None:
            self.model.load_state_dict(weights)
        self.model.to(device)
        self.optimizers = optim.build(self.model, cfg.train, self.processes)
        self.average = Average(self.model, cfg.train.ema) if cfg.train.ema else None
        self.fingerprint = fingerprint(data)
        self.state = self.model.new_state(self.rows.stop - self.rows.start, device)
        self.step = 0
        # Tensors that have had no nonzero gradient yet.
        self.silent = {name for name, _ in self.model.named_parameters()}
        self.left_out = 0
        self.first_loss: float | None = None
        self.forward = torch.compile(self.model) if cfg.train.compile else self.model
        t = cfg.train
        if t.precision == "tf32":
            torch.set_float32_matmul_precision("high")
        self.bf16 = t.precision == "bf16" or (t.precision == "auto" and device.startswith("cuda"))
        if t.pool:
            # The pool is drawn once per run; each step picks one of its matrices per layer and head.
            gen = torch.Generator().manual_seed(t.seed + 1)
            h, m = cfg.model.num_attention_heads, cfg.model
            if not m.proj_dim:
                raise ValueError(f"train.pool: must be 0 for a mixer without random matrices, found {t.pool}")
            shape = (t.pool * h, m.proj_dim, m.head_dim)
            self.pool = draw_matrices(m.feature_map, shape, gen).view(t.pool, h, *shape[1:]).to(device)
        if self.processes.first:
            (out / "state.tmp").unlink(missing_ok=True)
        if (out / "state.pt").exists():
            self.resume()
        elif self.processes.first:
            # These lines are of a run that was killed before its first save; all of its steps are repeated.
            (out / "log.jsonl").unlink(missing_ok=True)

    def new_model(self) -> Decoder:
        """Creates the model to train, before `init_weights`; experiments override it to change the model."""
        return Decoder(self.cfg.model)

    def read_start(self, start: Path) -> dict[str, torch.Tensor]:
        """Returns the folder's weights in f32; ValueError if its model or its tokenizer is not that of this run."""
        found = load_folder(start)[0]
        if not isinstance(found, Decoder):
            raise ValueError(f"--from {start}: must be a decoder's folder, found an encoder-decoder's")
        then, now = dataclasses.asdict(found.cfg), dataclasses.asdict(self.cfg.model)
        other = [f"model.{key} ({then[key]!r}, now {now[key]!r})" for key in now
                 if then[key] != now[key] and key != "initializer_range"]
        if other:
            raise ValueError(f"--from {start}: has another {', '.join(other)}")
        if (start / "tokenizer.json").read_bytes() != (self.data / "tokenizer.json").read_bytes():
            raise ValueError(f"--from {start}: has another tokenizer than {self.data}; copy its tokenizer.json there before "
                             "`prepare`")
        weights = (start / "model.safetensors").read_bytes()
        self.started_from = {"name": start.resolve().name, "sha256": hashlib.sha256(weights).hexdigest()}
        return found.state_dict()

    def check_data(self) -> None:
        """Reads the data; ValueError if it is not prepared, does not fit the model, or is too short for the run."""
        data, vocab_size = self.data, self.cfg.model.vocab_size
        self.info = read_json(data / "data.json", "prepare")
        found = read_tokenizer(data / "tokenizer.json", "prepare").get_vocab_size()
        if found != vocab_size:
            raise ValueError(f"model.vocab_size: must be {found:,}, as prepared in {data}, found {vocab_size:,}")
        for name, info in self.info["valid"].items():
            need(data / f"valid_{name}.bin", "prepare")
            if info["tokens"] <= PIECES:
                raise ValueError(f"{data}: the validation text {name} is too short: must have more than {PIECES} tokens, found "
                                 f"{info['tokens']}")
        if 0 < self.cfg.train.eval_tokens < PIECES:
            raise ValueError(f"train.eval_tokens: must be 0 for all, or {PIECES} or more, found {self.cfg.train.eval_tokens}")
        self.stream = np.fromfile(need(data / "train.bin", "prepare"), dtype=np.uint16)
        try:
            self.lanes = Lanes(self.stream, self.cfg.train.lanes, self.cfg.train.segment)
        except ValueError as e:
            raise ValueError(f"{data}: {e}") from e

    def save(self) -> None:
        """Writes `state.pt` under a temporary name and renames it, so that a kill leaves the last complete file."""
        state = [tuple(map(self.processes.join, s.tuple())) for s in self.state]
        if not self.processes.first:
            return
        blob = {
            "model": self.model.state_dict(),
            "average": self.average.weights if self.average else None,
            "optimizers": [o.state_dict() for o in self.optimizers],
            "state": state,
            "step": self.step,
            "first_loss": self.first_loss,
            "silent": sorted(self.silent),
            "left_out": self.left_out,
            "config": dataclasses.asdict(self.cfg),
            "data": self.fingerprint,
            "from": self.started_from,
        }
        torch.save(blob, self.out / "state.tmp")
        os.replace(self.out / "state.tmp", self.out / "state.pt")

    def resume(self) -> None:
        blob = read_state(self.out / "state.pt", self.device)
        if ModelConfig(**blob["config"]["model"]) != self.cfg.model:
            raise ValueError(f"{self.out}: holds a run of another model; use another folder")
        then, now = (dataclasses.asdict(x) for x in (build(TrainConfig, blob["config"]["train"], "train"), self.cfg.train))
        other = [f"train.{key} ({then[key]!r}, now {now[key]!r})" for key in now
                 if then[key] != now[key] and key not in self.MAY_DIFFER]
        if other:
            raise ValueError(f"{self.out}: holds a run with another {', '.join(other)}; use another folder")
        if blob.get("data", self.fingerprint) != self.fingerprint:
            raise ValueError(f"{self.out}: holds a run of other data than {self.data}; use another folder")
        if self.started_from not in (None, blob.get("from")):
            raise ValueError(f"{self.out}: holds a run that started from other weights; use another folder")
        self.started_from = blob.get("from")
        self.model.load_state_dict(blob["model"])
        if self.average:
            self.average.weights = blob["average"]
        for o, s in zip(self.optimizers, blob["optimizers"]):
            o.load_state_dict(s)
        self.state = self.model.state_from([tuple(None if x is None else x[self.rows] for x in s) for s in blob["state"]])
        self.step, self.first_loss = blob["step"], blob["first_loss"]
        # Older files have neither of the two.
        self.silent, self.left_out = set(blob.get("silent", ())), blob.get("left_out", 0)
        # Lines past the checkpoint belong to steps that will be repeated.
        log = self.out / "log.jsonl"
        if log.exists() and self.processes.first:
            kept = [line for line in log.read_text().splitlines() if json.loads(line)["step"] <= self.step]
            log.write_text("".join(line + "\n" for line in kept))

    def draw_matrices(self) -> None:
        """Picks this step's random matrices from the pool. They depend only on the seed and the step, so a resumed run
        picks the same."""
        gen = torch.Generator().manual_seed(self.cfg.train.seed * 1_000_003 + self.step)
        for layer in self.model.model.layers:
            index = torch.randint(self.cfg.train.pool, (self.cfg.model.num_attention_heads,), generator=gen)
            heads = torch.arange(self.cfg.model.num_attention_heads)
            layer.self_attn.draw = self.pool[index.to(self.device), heads.to(self.device)]

    def as_served(self) -> None:
        """Sets the model up as it is served: with its fixed random matrices and f32 products."""
        for layer in self.model.model.layers:
            layer.self_attn.draw = layer.self_attn.products = None

    def train_step(self) -> tuple[float, float]:
        """Takes one optimizer step; returns the loss in nats per token and the gradient's norm."""
        t = self.cfg.train
        factor = optim.schedule(self.step, t, t.decay)
        for o in self.optimizers:
            for g in o.param_groups:
                g["lr"] = g["base_lr"] * factor
            o.zero_grad(set_to_none=True)
        if t.pool:
            self.draw_matrices()
        for layer in self.model.model.layers:
            layer.self_attn.products = torch.bfloat16 if self.bf16 else None
        total, tokens = 0.0, t.lanes * t.segment
        for micro in range(t.accumulate):
            index = self.step * t.accumulate + micro
            ids, targets, starts = (x[self.rows] for x in self.lanes.step(index))
            if not t.carry_state:
                starts[:, 0] = True
            at = None
            if self.cfg.model.position_embedding == "rope":
                at = torch.from_numpy(positions(starts, self.lanes.before(index)[self.rows])).to(self.device)
            ids, targets, starts = (torch.from_numpy(x).to(self.device) for x in (ids, targets, starts))
            if not t.carry_state and not starts[:, 1:].any():
                starts = None  # rows with one document need no masks
            with torch.autocast(device_type=self.device.split(":")[0], dtype=torch.bfloat16, enabled=self.bf16):
                loss, state = self.forward(ids, self.state if t.carry_state else None, starts, at, t.chunk, targets)
            loss = loss / (tokens * t.accumulate)
            loss.backward()
            total += loss.item()
            if t.carry_state:
                self.state = [s.detach() for s in state]
        summed = torch.tensor([total], device=self.device)
        self.processes.add([summed, *(p.grad for p in self.model.parameters() if p.grad is not None)])
        total = summed.item() if self.processes.size > 1 else total
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), t.clip).item()
        if self.first_loss is None:
            self.first_loss = total
        if not math.isfinite(norm) and math.isfinite(total):
            # A denominator near its floor can make a gradient overflow although the loss is ordinary.
            self.left_out += 1
        if not math.isfinite(total) or total > 2 * self.first_loss or self.left_out > LEFT_OUT:
            raise Diverged(
                f"step {self.step}: loss {total}, gradient norm {norm}, {self.left_out} steps left out; the last good state is in "
                f"{self.out / 'state.pt'}; lower train.lr (or train.muon_lr), or raise train.warmup"
            )
        if not math.isfinite(norm):
            self.step += 1
            return total, norm
        self.watch()
        for o in self.optimizers:
            o.step()
        with torch.no_grad():
            # Above a sigma of 1.25, signed denominators begin to vanish (see the README). Arc-cosine features are
            # never negative, and their result does not depend on the scale of sigma, so they need no upper bound.
            for layer in self.model.model.layers if self.cfg.model.has_sigma else ():
                layer.self_attn.sigma.clamp_(0.05, t.sigma_max if self.cfg.model.has_floor else None)
        if self.average:
            self.average.add(self.model, self.step)
        self.step += 1
        return total, norm

    def watch(self) -> None:
        """Raises `Untrained` if a tensor has had no nonzero gradient in the first `WATCHED` steps."""
        if not self.silent:
            return
        self.silent = {name for name, p in self.model.named_parameters()
                       if name in self.silent and (p.grad is None or not p.grad.any())}
        if self.silent and self.step + 1 >= WATCHED:
            raise Untrained(f"step {self.step}: no gradient has reached {', '.join(sorted(self.silent))}; "
                            "if train.compile is true, try false")

    def evaluate(self) -> dict[str, dict]:
        """Returns the scores on each validation text; with a moving average of the weights, also its scores, as `TEXT,
        averaged`."""
        self.as_served()
        scores = self.score()
        if self.average:
            with self.average.in_place(self.model):
                scores |= {f"{name}, averaged": score for name, score in self.score().items()}
        return scores

    def score(self) -> dict[str, dict]:
        scores = {}
        for name, info in self.info["valid"].items():
            stream = np.fromfile(self.data / f"valid_{name}.bin", dtype=np.uint16)
            score = stream_loss(self.model, stream, info["bytes"], self.cfg.train.eval_tokens, lanes=PIECES, device=self.device)
            scores[name] = dataclasses.asdict(score)
        return scores

    def run(self, until: int | None = None) -> dict:
        """Trains to step `until` (by default the configured number); returns the last validation scores, which only the
        first process has."""
        t, first = self.cfg.train, self.processes.first
        last = min(t.steps, until or t.steps)
        if first:
            recipe = dataclasses.asdict(self.cfg) | ({"from": self.started_from} if self.started_from else {})
            (self.out / "run.json").write_text(json.dumps(recipe, indent=2) + "\n")
        scores: dict = {}
        smooth, clock, counted = None, time.monotonic(), 0
        bar = tqdm(total=last, initial=self.step, unit="step", dynamic_ncols=True, mininterval=2.0, disable=None if first else True)
        with open(self.out / "log.jsonl" if first else os.devnull, "a", encoding="utf-8") as log:
            while self.step < last:
                before = time.monotonic()
                loss, norm = self.train_step()
                smooth = loss if smooth is None else 0.95 * smooth + 0.05 * loss
                counted += t.lanes * t.segment * t.accumulate
                bar.update()
                bar.set_postfix(loss=f"{smooth:.4f}", tok_s=f"{counted / (time.monotonic() - clock):.0f}")
                line = {"step": self.step, "tokens": self.step * t.lanes * t.segment * t.accumulate, "loss": loss, "grad_norm": norm,
                        "seconds": round(time.monotonic() - before, 5)}
                if first and (self.step % t.eval_every == 0 or self.step == t.steps):
                    scores = line["valid"] = self.evaluate()
                    tqdm.write(f"step {self.step}: " + ", ".join(f"{k} {v['nats']:.4f} nats {v['bits_per_byte']:.4f} bits/byte" for k, v in scores.items()))
                log.write(json.dumps(line) + "\n")
                log.flush()
                if self.step % t.save_every == 0 or self.step == last:
                    self.save()
                    if first:
                        plot_log(self.out / "log.jsonl", self.out / "loss.png")
        bar.close()
        return scores
