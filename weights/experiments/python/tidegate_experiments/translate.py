"""The translation experiment: trains one encoder-decoder with each mixer in turn on the same sentence pairs, and measures
BLEU.

A run is one mixer with one seed. `work/` holds it during training, so that it resumes after a kill;
`checkpoints/<mixer>-<seed>` is its checkpoint folder, `runs/<mixer>-<seed>.json` has its results and `hypotheses/` its
translations. The report `translation.json` merges all runs; a finished run is not repeated, so several processes may share
a folder.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import shutil
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from tqdm import tqdm

from tidegate_training import config, optim
from tidegate_training.data import EOT_ID
from tidegate_training.export import write_folder
from tidegate_training.model import parameters
from tidegate_training.seq2seq import Seq2Seq, Seq2SeqConfig
from tidegate_training.train import Diverged

from . import compare, pairs
from .pairs import Pairs, PairsConfig


@dataclass(frozen=True)
class Mixer:
    """What the decoder's attention to its own past and to the source is, and how attention to the source is trained.

    model: changes to `[model]`
    sigma: the first value of sigma in attention to the source; elsewhere it is 1
    sigma_max: its upper bound, None for `train.sigma_max`, which applies elsewhere. A query that matches one of 16 orthogonal
    keys can give it 27 % of its weight at sigma 1.3, and 78 % at 2: 1 / (1 + 15 exp(-sigma^2))
    exact: the share of the steps, below 1, in which attention to the source uses the Gaussian kernel itself. The gradient of
    its estimate is noisier than the estimate: each cosine's is larger by the length of its random vector
    """

    model: dict
    sigma: float = 1.0
    sigma_max: float | None = None
    exact: float = 0.0


# The encoder is always softmax.
SOFTMAX = {"attention": "softmax", "gate": False}
RFA = {"attention": "rfa", "gate": True}
CROSS = RFA | {"feature_map": "gaussian", "cross_proj_dim": 512}
MIXERS = {
    "softmax": Mixer(SOFTMAX),
    "softmax-conv": Mixer(SOFTMAX | {"conv_kernel": 4}),
    "rfa-gate": Mixer(RFA),
    "rfa-gate-sigma-2.0": Mixer(RFA, sigma_max=2.0),
    "rfa-gate-sigma-2.5": Mixer(RFA, sigma_max=2.5),
    "rfa-gate-sigma-2.0-d-256": Mixer(RFA | {"proj_dim": 256}, sigma_max=2.0),
    "rfa-gate-sigma-2.5-d-256": Mixer(RFA | {"proj_dim": 256}, sigma_max=2.5),
    "rfa-gate-cross-512": Mixer(CROSS, sigma=2.0, sigma_max=4.0, exact=0.6),
    "rfa-gate-cross-512-conv": Mixer(CROSS | {"conv_kernel": 4}, sigma=2.0, sigma_max=4.0, exact=0.6),
    "rfa-arccos-gate": Mixer(RFA | {"feature_map": "arc_cosine"}),
    "elu-gate": Mixer(RFA | {"feature_map": "elu"}),
}
# The keys of `[model]` that only mixers set.
OWN = ("attention", "gate", "sliding_window", "conv_kernel", "cross_proj_dim")
NOTES = {
    "note_on_test": "The test pairs are those named in the settings. For Multi30k they are its validation file and not "
                    "test2016, so scores are not comparable with those published for test2016. The test pairs were used once, "
                    "at the end of each run, and nothing was tuned on them, except as note_on_convolution says. valid_loss "
                    "and the curves are measured on pairs held out of the training file. Every checkpoint is that of the "
                    "last step, without any selection.",
    "note_on_bleu": "Greedy decoding: the most likely token at each step, no beam search, no averaged weights.",
    "note_on_learning": "One schedule and one learning rate for all mixers, not tuned. Muon was chosen because its loss with "
                        "softmax was 5.0 nats after 80 steps, against 5.3 with AdamW. For one seed, shared initial weights "
                        "and batches are the same in all mixers. Dropout and label smoothing are used only in training.",
    "note_on_sigma": "sigma starts at 1 and is at most train.sigma_max. If a mixer has a number after -sigma- in its name, that "
                     "number is the limit in cross-attention instead. If it has -cross- in its name, sigma of cross-attention "
                     "starts at 2 and is at most 4. With arc-cosine features sigma has no upper limit, because a factor "
                     "common to a head cancels out.",
    "note_on_features": "2 * model.proj_dim features per head, from as many random vectors with arc-cosine and from half as "
                        "many with sine and cosine. ELU has head_dim features. A mixer with -d-N in its name has N random "
                        "vectors instead, and one with -cross-N has N in cross-attention only.",
    "note_on_exact_kernel": "Mixers with -cross- in their names are trained with the exact Gaussian kernel in cross-attention "
                            "for 60 % of the steps, and with its random features after that. Their curves have the losses of "
                            "what was trained. The kernel and the values of sigma were chosen by validation losses of the "
                            "first 400 steps; 60 % was not tuned.",
    "note_on_convolution": "A mixer with -conv in its name has a causal convolution over four tokens on the queries, keys and "
                           "values of self-attention. The others have none. It was added when the BLEU of rfa-gate-cross-512 "
                           "was known.",
    "note_on_state": "state_bytes is the size of the state for one source and its target. For softmax it has room for the "
                     "longest of each, and for the other mixers it is the same for any length. state_bytes_filled is the part "
                     "in use after a test pair of mean length.",
    "note_on_seconds": "seconds is wall-clock time on a shared machine and cpu_seconds is CPU time, both for training only. "
                       "decode_tokens_per_second is the number of tokens per second of CPU time, summed over all threads "
                       "(machine gives their number), in PyTorch with batches of 64.",
}


@dataclass(frozen=True)
class TranslateConfig:
    """How each run is trained: batches of at most `batch_tokens` target places. `optim.py` reads the fields shared with
    `TrainConfig`."""

    mixers: list[str] = field(default_factory=lambda: ["softmax", "rfa-gate"])
    seeds: list[int] = field(default_factory=lambda: [1, 2])
    batch_tokens: int = 1500
    steps: int = 3000
    warmup: int = 200
    optimizer: str = "adamw"
    lr: float = 3e-3
    muon_lr: float = 0.02
    min_lr_ratio: float = 0.02
    weight_decay: float = 0.05
    beta1: float = 0.9
    beta2: float = 0.98
    clip: float = 1.0
    dropout: float = 0.2
    label_smoothing: float = 0.1
    sigma_max: float = 1.3
    half_life_min: float = 1.0
    half_life_max: float = 32.0
    eval_every: int = 250
    save_every: int = 100
    threads: int = 1

    def __post_init__(self) -> None:
        unknown = sorted(set(self.mixers) - set(MIXERS))
        if unknown:
            raise ValueError(f"train.mixers: must be some of {', '.join(MIXERS)}, found {unknown}")
        for key in ("batch_tokens", "steps", "eval_every", "save_every"):
            if getattr(self, key) < 1:
                raise ValueError(f"train.{key}: must be 1 or more, found {getattr(self, key)}")
        for key in ("dropout", "label_smoothing"):
            if not 0.0 <= getattr(self, key) < 1.0:
                raise ValueError(f"train.{key}: must be at least 0 and below 1, found {getattr(self, key)}")


@dataclass(frozen=True)
class Experiment:
    model: Seq2SeqConfig
    data: PairsConfig
    train: TranslateConfig

    def configured(self, mixer: str) -> Seq2SeqConfig:
        """Returns the model of one mixer; softmax sees the whole target, and arc-cosine has as many features as sine and
        cosine."""
        own = MIXERS[mixer].model
        window = self.data.max_target if own["attention"] == "softmax" else None
        vectors = compare.vectors(own.get("feature_map", "gaussian"), self.model.proj_dim)
        return dataclasses.replace(self.model, **{"sliding_window": window, "proj_dim": vectors} | own)

    def settings(self, data: Path) -> dict:
        """Returns the settings that all runs of a report share, as plain JSON."""
        without = lambda table, keys: {k: v for k, v in dataclasses.asdict(table).items() if k not in keys}
        info = json.loads((data / "data.json").read_text(encoding="utf-8"))
        tables = {"model": without(self.model, OWN), "data": dataclasses.asdict(self.data),
                  "train": without(self.train, ("mixers", "seeds", "threads"))}
        return tables | {"unit": "nats per target token, its end counted", "pairs": info, "fingerprint": pairs.fingerprint_of(data)}


def load(path: Path, overrides: list[str] = ()) -> Experiment:
    """Reads `[model]`, `[data]` and `[train]` of a TOML file; each override is `table.key=value`."""
    raw = config.read(path, overrides, ("model", "data", "train"))
    if set(OWN) & set(raw.get("model", {})):
        raise ValueError(f"[model]: {', '.join(OWN)} are each mixer's own; train.mixers says which are trained")
    make = lambda cls, table: config.build(cls, raw.get(table, {}), table)
    return Experiment(make(Seq2SeqConfig, "model"), make(PairsConfig, "data"), make(TranslateConfig, "train"))


def bleu(hypotheses: list[str], references: list[str]) -> tuple[float, str]:
    """Returns the BLEU of a corpus, 0 to 100, and sacrebleu's signature."""
    from sacrebleu.metrics import BLEU  # slow to import

    metric = BLEU()
    return metric.corpus_score(hypotheses, [references]).score, str(metric.get_signature())


@torch.no_grad()
def mean_loss(model: Seq2Seq, given: Pairs, batch_tokens: int) -> float:
    """Returns the nats per target token, including the end, without label smoothing."""
    model.eval()
    total = 0.0
    for index in pairs.batches(given, batch_tokens):
        total += model(*pairs.sources(given, index), *pairs.targets(given, index, model.cfg.decoder_start_token_id)).item()
    model.train()
    return total / sum(len(x) + 1 for x in given.target)


def translations(model: Seq2Seq, given: Pairs, tok: Tokenizer, limit: int, rows: int = 64) -> tuple[list[str], int, float]:
    """Returns greedy translations of the sources, their number of tokens including ends, and the processor time in seconds.

    A batch holds sources of similar length, which does not change any translation.
    """
    model.eval()
    order = sorted(range(len(given)), key=lambda i: len(given.source[i]))
    found, tokens, clock = [""] * len(given), 0, time.process_time()
    for at in range(0, len(order), rows):
        index = np.array(order[at : at + rows])
        written = model.greedy(*pairs.sources(given, index), limit, EOT_ID)
        tokens += sum(min(len(ids) + 1, limit) for ids in written)
        for i, ids in zip(index, written):
            found[i] = " ".join(tok.decode(ids).splitlines()).strip()  # always one line
    model.train()
    return found, tokens, time.process_time() - clock


class Run:
    """One mixer and seed in a folder of its own: `state.pt` has all that resuming needs and is replaced atomically."""

    def __init__(self, exp: Experiment, mixer: str, seed: int, data: Path, out: Path):
        self.exp, self.name, self.seed, self.out = exp, f"{mixer}, seed {seed}", seed, out
        own = MIXERS[mixer]
        self.exact_steps, self.cross_sigma = int(own.exact * exp.train.steps), own.sigma_max or exp.train.sigma_max
        self.cfg = exp.configured(mixer)
        self.train, self.valid = pairs.read(data, "train"), pairs.read(data, "valid")
        self.model = Seq2Seq(self.cfg, exp.train.dropout)
        self.model.init_weights(exp.train.half_life_min, exp.train.half_life_max, seed)
        if self.cfg.has_sigma:
            for layer in self.model.model.layers:
                torch.nn.init.constant_(layer.cross_attn.sigma, own.sigma)
        self.optimizers = optim.build(self.model, exp.train)
        self.step, self.seconds, self.cpu_seconds = 0, 0.0, 0.0
        self.curve: list[list] = []  # [step, validation loss]
        self.recent: list[float] = []
        self.epoch: tuple[int, list[np.ndarray]] | None = None
        self.kept = {"model": dataclasses.asdict(self.cfg), "settings": exp.settings(data), "seed": seed}
        out.mkdir(parents=True, exist_ok=True)
        (out / "state.tmp").unlink(missing_ok=True)
        if (out / "state.pt").exists():
            self.resume()

    COUNTED = ("step", "seconds", "cpu_seconds", "curve", "recent")

    def save(self) -> None:
        """Writes `state.pt` under a temporary name and renames it, so that a kill leaves the last complete file."""
        blob = {"model": self.model.state_dict(), "optimizers": [o.state_dict() for o in self.optimizers], "of": self.kept}
        torch.save(blob | {key: getattr(self, key) for key in self.COUNTED}, self.out / "state.tmp")
        os.replace(self.out / "state.tmp", self.out / "state.pt")

    def resume(self) -> None:
        blob = torch.load(self.out / "state.pt", weights_only=True)
        if blob["of"] != self.kept:
            raise ValueError(f"{self.out}: holds a run with other settings or data; use another folder")
        self.model.load_state_dict(blob["model"])
        for o, s in zip(self.optimizers, blob["optimizers"]):
            o.load_state_dict(s)
        for key in self.COUNTED:
            setattr(self, key, blob[key])

    def batch(self) -> np.ndarray:
        """Returns the pairs of this step. They depend only on the step and the seed, so a resumed run reads the same
        ones."""
        deal = lambda epoch: pairs.batches(self.train, self.exp.train.batch_tokens, np.random.default_rng([self.seed, epoch]))
        if self.epoch is None:
            self.epoch = (0, deal(0))
        number, at = divmod(self.step, len(self.epoch[1]))
        if number != self.epoch[0]:
            self.epoch = (number, deal(number))
        return self.epoch[1][at]

    def train_step(self) -> float:
        """Takes one optimizer step; returns the loss with label smoothing, in nats per token."""
        t, index = self.exp.train, self.batch()
        for layer in self.model.model.layers:
            layer.cross_attn.exact = self.step < self.exact_steps
        torch.manual_seed(self.seed * 1_000_003 + self.step)  # for dropout
        factor = optim.schedule(self.step, t)
        for o in self.optimizers:
            for g in o.param_groups:
                g["lr"] = g["base_lr"] * factor
            o.zero_grad(set_to_none=True)
        target, labels = pairs.targets(self.train, index, self.cfg.decoder_start_token_id)
        loss = self.model(*pairs.sources(self.train, index), target, labels, t.label_smoothing)
        loss = loss / sum(len(self.train.target[i]) + 1 for i in index)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), t.clip).item()
        if not math.isfinite(loss.item()) or not math.isfinite(norm):
            raise Diverged(f"{self.name}, step {self.step}: loss {loss.item()}, gradient norm {norm}; lower train.lr or raise train.warmup")
        for o in self.optimizers:
            o.step()
        with torch.no_grad():
            for name, sigma in self.model.named_parameters():
                if name.endswith("sigma"):
                    most = self.cross_sigma if "cross_attn" in name else t.sigma_max
                    sigma.clamp_(0.05, most if self.cfg.has_floor else None)
        self.step += 1
        return loss.item()

    def run(self, until: int | None = None) -> None:
        """Trains to step `until`, by default the configured number of steps."""
        t = self.exp.train
        last = min(t.steps, until or t.steps)
        bar = tqdm(total=t.steps, initial=self.step, desc=self.name, unit="step", dynamic_ncols=True, mininterval=5.0, disable=None)
        while self.step < last:
            clock, cpu = time.perf_counter(), time.process_time()
            self.recent.append(self.train_step())
            self.seconds += time.perf_counter() - clock
            self.cpu_seconds += time.process_time() - cpu
            bar.update()
            if self.step % t.eval_every == 0 or self.step == t.steps:
                self.curve.append([self.step, round(mean_loss(self.model, self.valid, t.batch_tokens), 4)])
                trained, self.recent = sum(self.recent) / len(self.recent), []
                tqdm.write(f"{self.name}, step {self.step} of {t.steps}: training {trained:.4f} (smoothed), validation "
                           f"{self.curve[-1][1]} nats, {self.seconds / self.step:.3f} s a step, {self.cpu_seconds / self.step:.3f} s of processor")
            if self.step % t.save_every == 0 or self.step == last:
                self.save()
        bar.close()


def filled(cfg: Seq2SeqConfig, given: Pairs) -> int:
    """Returns the bytes of the state that are in use after a pair of mean length."""
    if cfg.attention == "rfa":
        return 4 * cfg.state_numbers
    tokens = sum(len(x) + 1 for x in [*given.source, *given.target]) / len(given)
    keys = cfg.num_hidden_layers * cfg.num_attention_heads * 2 * cfg.head_dim * tokens
    return round(4 * (keys + cfg.conv_numbers))


def run_one(exp: Experiment, mixer: str, seed: int, data: Path, out: Path, command: str) -> None:
    """Trains, exports and measures one mixer with one seed; resumes a killed run."""
    name = f"{mixer}-{seed}"
    run = Run(exp, mixer, seed, data, out / "work" / name)
    run.run()
    model = run.model
    write_folder(model, data / "tokenizer.json", out / "checkpoints" / name, "f32")
    test, tok = pairs.read(data, "test"), Tokenizer.from_file(str(data / "tokenizer.json"))
    hypotheses, tokens, seconds = translations(model, test, tok, exp.data.max_target)
    (out / "hypotheses").mkdir(exist_ok=True)
    (out / "hypotheses" / f"{name}.txt").write_text("".join(line + "\n" for line in hypotheses), encoding="utf-8")
    score, signature = bleu(hypotheses, pairs.lines(data / "test_target.txt"))
    result = {
        "mixer": mixer, "seed": seed, "parameters": parameters(model), "state_bytes": 4 * model.cfg.state_numbers,
        "state_bytes_filled": filled(model.cfg, test), "bleu": round(score, 2), "bleu_signature": signature,
        "loss": round(mean_loss(model, test, exp.train.batch_tokens), 4), "valid_loss": run.curve[-1][1],
        "seconds": round(run.seconds, 1), "cpu_seconds": round(run.cpu_seconds, 1),
        "decode_tokens_per_second": round(tokens / seconds, 1), "curve": run.curve,
        "machine": f"{compare.machine()}, threads used: {torch.get_num_threads()}", "command": command,
        "settings": exp.settings(data),
    }
    compare.write_json(out / "runs" / f"{name}.json", result)
    shutil.rmtree(run.out)
    print(f"{name}: BLEU {score:.2f}, loss {result['loss']} nats", flush=True)


def report(exp: Experiment, data: Path, out: Path) -> Path:
    """Merges `runs/*.json` into `translation.json`: one row per mixer, with all its seeds."""
    want = json.loads(json.dumps(exp.settings(data)))
    runs = compare.read_runs(out / "runs", want)
    head = {key: compare.distinct(runs, key) for key in ("command", "machine")}
    rows: dict[str, dict] = {}
    for run in runs:
        shared = {key: run.pop(key) for key in ("mixer", "parameters", "state_bytes", "state_bytes_filled", "bleu_signature")}
        del run["command"]
        rows.setdefault(shared["mixer"], shared | {"seeds": []})["seeds"].append(run)
    for row in rows.values():
        row["seeds"].sort(key=lambda seed: seed["seed"])
    value = {"experiment": "translation", **head, "date": datetime.date.today().isoformat(), "settings": want | NOTES,
             "rows": [rows[mixer] for mixer in MIXERS if mixer in rows]}
    compare.write_json(out / "translation.json", value)
    return out / "translation.json"


def run_all(exp: Experiment, data: Path, out: Path, only: list[str], seeds: list[int], command: str) -> Path:
    """Makes the missing runs, the first seed of every mixer before the second; returns the path of the report.

    command: the command for the report. A diverging run raises `Diverged`; its last good state is kept.
    """
    mixers = only or exp.train.mixers
    unknown = sorted(set(mixers) - set(MIXERS))
    if unknown:
        raise ValueError(f"--only: unknown mixers {unknown}; known are {', '.join(MIXERS)}")
    info = json.loads((data / "data.json").read_text(encoding="utf-8"))
    longest = {side: max(info[part][f"longest_{side}"] for part in pairs.PARTS) for side in pairs.SIDES}
    for key, most, found in (("model.max_source_positions", exp.model.max_source_positions, longest["source"]),
                             ("data.max_target", exp.data.max_target, longest["target"])):
        if found > most:
            raise ValueError(f"{key}: must be at least the longest text's {found} tokens, found {most}")
    if info["vocab_size"] > exp.model.vocab_size:
        raise ValueError(f"model.vocab_size: must be at least the tokenizer's {info['vocab_size']}, found {exp.model.vocab_size}")
    compare.remove_leftovers(out)
    compare.read_runs(out / "runs", json.loads(json.dumps(exp.settings(data))))  # refuses a folder of another experiment
    if exp.train.threads:
        torch.set_num_threads(exp.train.threads)
    for seed in seeds or exp.train.seeds:
        for mixer in mixers:
            if not (out / "runs" / f"{mixer}-{seed}.json").exists():
                run_one(exp, mixer, seed, data, out, command)
                report(exp, data, out)
    return report(exp, data, out)
