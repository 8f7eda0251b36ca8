"""One TOML describes one run: `[model]`, `[data]`, `[train]`. Unknown keys are refused."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True)
class ModelConfig:
    """Hugging Face names; written as `config.json` and read by `tidegate-model`'s `DecoderConfig`."""

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    num_hidden_layers: int = 6
    num_attention_heads: int = 4
    head_dim: int = 64
    rms_norm_eps: float = 1e-5
    tie_word_embeddings: bool = True
    attention: str = "rfa"
    feature_map: str = "gaussian"
    gate: bool = True
    proj_dim: int = 64
    denominator_eps: float = 0.02
    output_norm: bool = True
    conv_kernel: int = 0
    position_embedding: str = "none"
    rope_theta: float = 10000.0
    initializer_range: float = 0.02


@dataclass(frozen=True)
class TrainConfig:
    """How a run is trained. `segment` tokens per lane and step; the state is carried between steps."""

    seed: int = 1
    lanes: int = 16
    segment: int = 256
    accumulate: int = 1
    steps: int = 1000
    warmup: int = 100
    optimizer: str = "adamw"
    lr: float = 3e-3
    muon_lr: float = 0.02
    min_lr_ratio: float = 0.1
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    sigma_max: float = 1.3
    pool: int = 0
    half_life_min: float = 8.0
    half_life_max: float = 2048.0
    carry_state: bool = True
    chunk: int = 64
    precision: str = "auto"
    compile: bool = False
    threads: int = 0
    eval_every: int = 250
    eval_tokens: int = 65536
    save_every: int = 250


@dataclass(frozen=True)
class DataConfig:
    """Text files with `<|endoftext|>` between documents; `repeat` copies of each in the training stream."""

    train: list[str] = field(default_factory=list)
    repeat: list[int] = field(default_factory=list)
    valid: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig
    train: TrainConfig
    data: DataConfig


def _build(cls, table: dict, where: str):
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(table) - known)
    if unknown:
        raise ValueError(f"[{where}]: unknown keys {unknown}; known are {sorted(known)}")
    return cls(**table)


def load(path: str | Path, overrides: list[str] = ()) -> RunConfig:
    """Reads a run's TOML; each override is `table.key=value` with the value in TOML syntax."""
    text = Path(path).read_text(encoding="utf-8")
    raw = tomllib.loads(text)
    for item in overrides:
        name, _, value = item.partition("=")
        table, _, key = name.partition(".")
        raw.setdefault(table, {})[key] = tomllib.loads(f"x = {value}")["x"]
    unknown = sorted(set(raw) - {"model", "train", "data"})
    if unknown:
        raise ValueError(f"{path}: unknown tables {unknown}")
    return RunConfig(
        model=_build(ModelConfig, raw.get("model", {}), "model"),
        train=_build(TrainConfig, raw.get("train", {}), "train"),
        data=_build(DataConfig, raw.get("data", {}), "data"),
    )
