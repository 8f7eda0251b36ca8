"""What the tests share: one thread, a tiny model, and a data folder made from a few generated sentences."""

import dataclasses
import random
from pathlib import Path

import pytest
import torch

from tidegate_training import data
from tidegate_training.config import DataConfig, ModelConfig, RunConfig, TrainConfig
from tidegate_training.model import Decoder
from tidegate_training.randomise import randomise

torch.set_num_threads(1)

TINY = ModelConfig(vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
                   head_dim=8, proj_dim=8, output_norm=True, conv_kernel=4)


def decoder(seed: int = 0, **changes) -> Decoder:
    """A random decoder in which every tensor has an effect."""
    model = Decoder(dataclasses.replace(TINY, **changes))
    randomise(model, torch.Generator().manual_seed(seed))
    return model.eval()


def story(rng: random.Random) -> str:
    who, what = ["the fox", "a child", "the old king", "my sister"], ["saw the sea", "ran home", "kept a lamp", "sang"]
    return ".\n".join(f"{rng.choice(who)} {rng.choice(what)}".capitalize() for _ in range(rng.randint(2, 9))) + "."


@pytest.fixture(scope="session")
def folder(tmp_path_factory) -> Path:
    """A folder that `prepare` wrote, from 150 training stories and 10 validation stories."""
    at = tmp_path_factory.mktemp("data")
    rng = random.Random(3)
    for name, count in (("train.txt", 150), ("valid.txt", 10)):
        (at / name).write_text(f"\n{data.EOT}\n".join(story(rng) for _ in range(count)) + "\n", encoding="utf-8")
    data.prepare([str(at / "train.txt")], [1], {"stories": str(at / "valid.txt")}, TINY.vocab_size, 1, at)
    return at


@pytest.fixture
def run_config():
    """A function that makes a run of a few steps; keywords change `[train]`."""

    def make(**changes) -> RunConfig:
        train = TrainConfig(lanes=2, segment=32, steps=8, warmup=2, lr=1e-3, chunk=16, precision="f32", eval_every=4,
                            eval_tokens=200, save_every=100, half_life_max=64.0)
        return RunConfig(TINY, dataclasses.replace(train, **changes),
                         DataConfig(["train.txt"], [1], {"stories": "valid.txt"}))

    return make
