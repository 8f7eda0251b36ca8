"""Makes a model from texts in a given time: prepares the data, chooses a size, trains, and exports.

The work folder holds a `config.toml`, so that `prepare`, `train` and `export` can repeat or continue every step.
"""

from __future__ import annotations

import dataclasses
import json
import math
import shlex
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from tokenizers import Tokenizer

from . import card, config
from .config import DataConfig, ModelConfig, RunConfig, TrainConfig
from .data import prepare_run
from .export import Written, check_free, export_run
from .files import read_text
from .model import Decoder, parameters
from .train import Trainer, usable

# Layers, hidden size, heads, head size, and SwiGLU's hidden size; the fifth is the shipped model's shape.
SHAPES = ((2, 64, 2, 32, 192), (3, 96, 3, 32, 256), (4, 128, 4, 32, 352), (4, 192, 3, 64, 512), (6, 256, 4, 64, 704),
          (8, 384, 6, 64, 1024), (8, 512, 8, 64, 1408), (12, 768, 12, 64, 2048))
# Vocabulary sizes for texts of at least the given number of bytes.
VOCABULARIES = ((10_000_000, 4096), (1_000_000, 2048), (100_000, 1024), (0, 512))
# Lanes and segments, the largest batch first.
BATCHES = ((16, 256), (8, 256), (8, 128), (4, 128), (4, 64), (2, 64), (1, 64), (1, 32))
# The fewest steps in a pass over the text, and in the whole run; a batch that leaves fewer is too large.
STEPS_A_PASS = 16
STEPS = 400
# Rules of thumb: the tokens that a model needs per parameter, and the passes over a text after which it learns little more.
TOKENS_A_PARAMETER = 5
PASSES = 8
HELD_OUT = 0.05
# Share of the time that is kept for validation, samples and the export.
RESERVE = 0.1
MIN_STEPS = 20


@dataclass(frozen=True)
class Plan:
    """A model shape and the steps that fit the time.

    passes: whether the length of the text, rather than the time, sets the number of steps
    """

    model: ModelConfig
    steps: int
    seconds_a_step: float
    passes: bool


def vocabulary_for(size: int) -> int:
    """Returns the vocabulary size for a text of `size` bytes."""
    return next(count for least, count in VOCABULARIES if size >= least)


def batch_for(stream: int, budget: float) -> tuple[int, int]:
    """Returns lanes and segment: the largest that leave enough steps, else the smallest.

    stream: the number of tokens in the text; budget: the number of tokens that can be read in the time
    """
    enough = lambda lanes, segment: stream - 1 >= lanes * segment * STEPS_A_PASS and budget >= lanes * segment * STEPS
    return next((batch for batch in BATCHES if enough(*batch)), BATCHES[-1])


def shaped(shape: tuple[int, int, int, int, int], vocab_size: int) -> ModelConfig:
    layers, hidden, heads, head_dim, intermediate = shape
    return ModelConfig(vocab_size=vocab_size, hidden_size=hidden, intermediate_size=intermediate, num_hidden_layers=layers,
                       num_attention_heads=heads, head_dim=head_dim)


def counted(model: ModelConfig) -> int:
    """Counts the parameters of a model without allocating memory for them."""
    with torch.device("meta"):
        return parameters(Decoder(model))


def choose(vocab_size: int, text_bytes: int, stream: int, step: int, seconds: float,
           measure: Callable[[ModelConfig], float]) -> Plan:
    """Chooses the largest model that has at most one parameter per byte of text, and time for `TOKENS_A_PARAMETER`.

    stream: tokens per pass; step: tokens per step; measure: returns the seconds that a step of a model takes, and takes
    time itself. The smallest model is always possible.
    """
    plan: Plan | None = None
    most = max(MIN_STEPS, PASSES * stream // step)
    for shape in SHAPES:
        model = shaped(shape, vocab_size)
        count = counted(model)
        if plan and count > text_bytes:
            break
        each = measure(model)
        fit = int(seconds / each)
        if plan and min(fit, most) * step < TOKENS_A_PARAMETER * count:
            break
        plan = Plan(model, max(MIN_STEPS, min(fit, most)), each, fit > most)
    assert plan is not None, "there is a smallest shape"
    return plan


def timed(run: RunConfig, data: Path, device: str) -> float:
    """Returns the seconds per step, measured over the second and third steps of a run that is thrown away."""
    with tempfile.TemporaryDirectory() as place:
        trainer = Trainer(run, data, Path(place), device)
        trainer.train_step()
        before = time.perf_counter()
        for _ in range(2):
            trainer.train_step()
        return (time.perf_counter() - before) / 2


def toml(run: RunConfig) -> str:
    """Returns the TOML of a run, with only the settings that differ from the defaults."""
    tables = []
    for name, cls in (("model", ModelConfig), ("data", DataConfig), ("train", TrainConfig)):
        # Some defaults of `model` depend on other settings, so the reference is an instance with nothing set.
        usual, lines = dataclasses.asdict(cls()), [f"[{name}]"]
        for key, value in dataclasses.asdict(getattr(run, name)).items():
            if value != usual[key] and value != {}:
                lines.append(f"{key} = {json.dumps(value, ensure_ascii=False)}")
        tables.append("\n".join(lines) + "\n")
    return "\n".join(tables)


def work_folder(out: Path, force: bool) -> Path:
    """Returns the folder for the data and the run, beside `out`; ValueError if it exists, unless `force` is true and it
    holds only what `new` writes."""
    work = out.resolve().with_name(f"{out.resolve().name}.run")
    if work.exists():
        ours = work.is_dir() and {path.name for path in work.iterdir()} <= {"config.toml", "data", "run"}
        if not (force and ours):
            hint = ("continue it by `tidegate-train train` with its config.toml, data and run, or replace it with --force"
                    if ours else "name another --out")
            raise ValueError(f"{work}: exists; {hint}")
    return work


@dataclass(frozen=True)
class Request:
    """The options of one call of `new`."""

    texts: list[Path]
    minutes: float
    out: Path
    device: str = "cpu"
    threads: int = 0
    name: str | None = None
    about: card.About = card.About()
    force: bool = False


def new(asked: Request, say: Callable[[str], None] = print) -> Written:
    """Makes the checkpoint folder `asked.out`; `say` gets a line for each stage."""
    begin = time.monotonic()
    usable(asked.device)
    if not asked.minutes > 0:
        raise ValueError(f"--minutes: must be above 0, found {asked.minutes:g}")
    check_free(asked.out, asked.force)
    size = sum(len(read_text(path).encode()) for path in asked.texts)
    work = work_folder(asked.out, asked.force)
    work.parent.mkdir(parents=True, exist_ok=True)
    given = DataConfig(train=[str(path.resolve()) for path in asked.texts], held_out=HELD_OUT)
    run = RunConfig(ModelConfig(vocab_size=vocabulary_for(size)), TrainConfig(threads=asked.threads), given)

    say(f"1/4 prepare: {size:,} bytes of text into {work / 'data'}")
    # The data is prepared beside the work folder, so that an earlier work folder is lost only once training can begin.
    with tempfile.TemporaryDirectory(prefix=f".{work.name}-", dir=work.parent) as temporary:
        prepared = Path(temporary) / "prepared"
        data = prepared / "data"
        info = prepare_run(run, Path("."), data, exact=False)
        stream, vocab_size = info["train_tokens"], Tokenizer.from_file(str(data / "tokenizer.json")).get_vocab_size()
        say(f"2/4 choose a size: {stream:,} tokens of {vocab_size:,} kinds, {asked.minutes:g} minutes")
        remaining = lambda: max(0.0, 60 * asked.minutes * (1 - RESERVE) - (time.monotonic() - begin))

        def batched(lanes: int, segment: int) -> TrainConfig:
            return dataclasses.replace(run.train, lanes=lanes, segment=segment, chunk=min(64, segment))

        def measure(model: ModelConfig, train: TrainConfig) -> float:
            seconds = timed(RunConfig(model, train, given), data, asked.device)
            say(f"    {counted(model):,} parameters, {train.lanes} x {train.segment} tokens a step: "
                f"{train.lanes * train.segment / seconds:,.0f} tokens a second")
            return seconds

        # The smallest model shows how many tokens there is time for; a larger one is assumed to read half as many.
        lanes, segment = batch_for(stream, math.inf)
        first = measure(shaped(SHAPES[0], vocab_size), batched(lanes, segment))
        lanes, segment = batch_for(stream, lanes * segment / first * remaining() / 2)
        train = batched(lanes, segment)
        plan = choose(vocab_size, size, stream, lanes * segment, remaining(), lambda model: measure(model, train))
        if work.exists():
            shutil.rmtree(work)
        prepared.rename(work)
    data, place = work / "data", work / "run"
    # The measurements took time, so the number of steps is computed again, unless the length of the text sets them.
    steps = plan.steps if plan.passes else max(MIN_STEPS, int(remaining() / plan.seconds_a_step))
    every = max(1, steps // 10)
    train = dataclasses.replace(train, steps=steps, warmup=min(200, max(1, steps // 10)), eval_every=every, save_every=every)
    run = RunConfig(plan.model, train, given)
    (work / "config.toml").write_text(toml(run), encoding="utf-8")
    if config.load(work / "config.toml") != run:
        raise AssertionError("config.toml must describe the run")
    say(f"3/4 train: {counted(run.model):,} parameters, {steps:,} steps of {lanes * segment:,} tokens, about "
        f"{steps * plan.seconds_a_step / 60:.1f} minutes" + (f"; {PASSES} passes over this text are enough" if plan.passes else ""))
    Trainer(run, data, place, asked.device).run()
    say(f"4/4 export: {asked.out}")
    texts = " ".join(shlex.quote(path.name) for path in asked.texts)
    command = " ".join([f"tidegate-train new {texts} --minutes {asked.minutes:g} --out {shlex.quote(asked.out.name)}",
                        *asked.about.flags()])
    return export_run(place, data, asked.out, "bf16", asked.name, dataclasses.replace(asked.about, commands=(command,)), asked.force)
