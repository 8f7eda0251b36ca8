"""The settings of a run, read from one TOML file with `[model]`, `[data]` and `[train]`. Unknown keys are refused."""

from __future__ import annotations

import dataclasses
import tomllib
from dataclasses import dataclass, field
from pathlib import Path


ATTENTIONS = ("rfa", "softmax", "hybrid")
OPTIMIZERS = ("adamw", "muon")
DECAYS = ("cosine", "linear")
PRECISIONS = ("auto", "f32", "tf32", "bf16")
FEATURE_MAPS = ("gaussian", "arc_cosine", "elu", "favor")
# The largest `proj_dim` and `conv_kernel` that `tidegate-model` loads.
MAX_VECTORS = 4096
MAX_TAPS = 16


@dataclass(frozen=True)
class ModelConfig:
    """The settings of a decoder under their Hugging Face names; written as `config.json` and read by `tidegate-model`'s
    `DecoderConfig`.

    `attention` is `rfa` (with a `feature_map`), `softmax` or `hybrid`. Settings that a mixer does not use are set to a
    fixed value (`proj_dim` 0 without random matrices, `gate` false for softmax). An empty `position_embedding` becomes
    `none` for rfa and `rope` for the mixers with a window. Raises ValueError for an impossible combination.
    """

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
    output_norm: bool = False
    conv_kernel: int = 0
    position_embedding: str = ""
    rope_theta: float = 10000.0
    initializer_range: float = 0.02
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        refuse = lambda key, bound: ValueError(f"model.{key}: must be {bound}, found {getattr(self, key)!r}")
        put = lambda key, value: object.__setattr__(self, key, value)
        if self.attention not in ATTENTIONS:
            raise refuse("attention", f"one of {', '.join(ATTENTIONS)}")
        if self.feature_map not in FEATURE_MAPS:
            raise refuse("feature_map", f"one of {', '.join(FEATURE_MAPS)}")
        if self.attention != "rfa" and self.feature_map != "gaussian":
            raise refuse("feature_map", f"gaussian if attention is {self.attention}")
        if self.attention == "rfa" and self.sliding_window is not None:
            raise refuse("sliding_window", "absent if attention is rfa")
        if self.attention != "rfa" and (self.sliding_window is None or self.sliding_window < 1):
            raise refuse("sliding_window", f"1 or more if attention is {self.attention}")
        if self.attention == "softmax":
            put("gate", False)
        if self.attention == "softmax" or self.feature_map == "elu":
            put("proj_dim", 0)
        elif not 1 <= self.proj_dim <= MAX_VECTORS:
            raise refuse("proj_dim", f"1 to {MAX_VECTORS} with random matrices")
        if not self.position_embedding:
            put("position_embedding", "none" if self.attention == "rfa" else "rope")
        if self.position_embedding not in ("none", "rope"):
            raise refuse("position_embedding", "none or rope")
        if self.position_embedding == "rope" and self.head_dim % 2:
            raise refuse("head_dim", "even for rope")
        if self.conv_kernel != 0 and not 2 <= self.conv_kernel <= MAX_TAPS:
            raise refuse("conv_kernel", f"0 for none, or 2 to {MAX_TAPS}")

    @property
    def has_sigma(self) -> bool:
        """Whether the random matrices are multiplied by a learned `sigma`."""
        return self.attention != "softmax" and self.feature_map in ("gaussian", "arc_cosine")

    @property
    def has_floor(self) -> bool:
        """Whether denominators are clamped at `denominator_eps` times c, the total weight of the keys seen, because
        features may be negative."""
        return self.attention != "softmax" and self.feature_map == "gaussian"

    @property
    def denominator_floor(self) -> float:
        """The smallest allowed denominator as a share of c, the total weight of the keys seen; 0 where no feature is
        negative."""
        return self.denominator_eps if self.has_floor else 0.0

    @property
    def features(self) -> int:
        """The number of features per head, F; 0 for softmax."""
        if self.attention == "softmax":
            return 0
        return {"gaussian": 2 * self.proj_dim, "elu": self.head_dim}.get(self.feature_map, self.proj_dim)

    @property
    def state_numbers(self) -> int:
        """The number of values in the state of all layers, however long the text; a window counts as full."""
        head = 0
        if self.attention != "softmax":
            head += self.features * (self.head_dim + 1) + 1 + (self.feature_map == "favor")
        if self.sliding_window is not None:
            head += self.sliding_window * (2 * self.head_dim + (self.attention == "hybrid" and self.gate))
        return self.num_hidden_layers * self.num_attention_heads * head + self.conv_numbers

    @property
    def conv_numbers(self) -> int:
        """The part of `state_numbers` that convolutions keep: their last inputs."""
        heads = self.num_hidden_layers * self.num_attention_heads
        return heads * 3 * max(0, self.conv_kernel - 1) * self.head_dim


@dataclass(frozen=True)
class TrainConfig:
    """The settings of training. `segment` tokens are read per lane at a time; `carry_state` carries the state between
    segments.

    The defaults are the best row of the table in `weights/README.md`. `ema`: the share of the weights' moving average that
    each step keeps; 0 for no average. Raises ValueError for a value out of range.
    """

    seed: int = 1
    lanes: int = 16
    segment: int = 256
    accumulate: int = 1
    steps: int = 1000
    warmup: int = 100
    optimizer: str = "muon"
    lr: float = 3e-3
    muon_lr: float = 0.02
    min_lr_ratio: float = 0.1
    decay: str = "cosine"
    weight_decay: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    ema: float = 0.0
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

    def __post_init__(self) -> None:
        refuse = lambda key, bound: ValueError(f"train.{key}: must be {bound}, found {getattr(self, key)!r}")
        for key in ("lanes", "segment", "accumulate", "steps", "chunk", "eval_every", "save_every"):
            if getattr(self, key) < 1:
                raise refuse(key, "1 or more")
        for key in ("warmup", "threads", "pool", "eval_tokens"):
            if getattr(self, key) < 0:
                raise refuse(key, "0 or more")
        for key, known in (("optimizer", OPTIMIZERS), ("decay", DECAYS), ("precision", PRECISIONS)):
            if getattr(self, key) not in known:
                raise refuse(key, f"one of {', '.join(known)}")
        if not 0.0 <= self.ema < 1.0:
            raise refuse("ema", "at least 0 and below 1")


@dataclass(frozen=True)
class DataConfig:
    """The texts of a run: text files with `<|endoftext|>` between documents.

    `repeat`: the number of copies of each training text in the stream.
    `held_out`: the share of characters at the end of each training file that is used for validation instead, as `held_out`.
    `clean`, `kind`, `unmarked` and `cut` set the form of the training texts (see `texts.Form`).
    """

    train: list[str] = field(default_factory=list)
    repeat: list[int] = field(default_factory=list)
    valid: dict[str, str] = field(default_factory=dict)
    held_out: float = 0.0
    clean: list[bool] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    unmarked: list[float] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        if not 0.0 <= self.held_out < 1.0:
            raise ValueError(f"data.held_out: must be at least 0 and below 1, found {self.held_out}")
        for share in self.unmarked:
            if not 0.0 <= share <= 1.0:
                raise ValueError(f"data.unmarked: must be from 0 to 1, found {share}")
        for key in ("repeat", "clean", "kind", "unmarked"):
            found = getattr(self, key)
            if found and len(found) != len(self.train):
                raise ValueError(f"data.{key}: must have an entry for each of the {len(self.train)} texts of data.train, or none "
                                 f"at all, found {len(found)}")
        if self.cut and not (len(self.cut) == 2 and 1 <= self.cut[0] <= self.cut[1]):
            raise ValueError(f"data.cut: must be the fewest and the most characters of a document, found {self.cut}")


@dataclass(frozen=True)
class RunConfig:
    model: ModelConfig
    train: TrainConfig
    data: DataConfig


def build(cls, table: dict, where: str):
    """Builds a settings class from a table; ValueError for an unknown key or a value of the wrong type."""
    known = {f.name for f in dataclasses.fields(cls)}
    unknown = sorted(set(table) - known)
    if unknown:
        raise ValueError(f"[{where}]: unknown keys {unknown}; known are {sorted(known)}")
    for f in dataclasses.fields(cls):
        if f.name in table and not is_a(table[f.name], str(f.type)):
            raise ValueError(f"{where}.{f.name}: must be of type {f.type}, found {table[f.name]!r}")
    return cls(**table)


def is_a(value, kind: str) -> bool:
    """Returns whether a TOML value has a field's annotated type. An integer counts as a float; a boolean does not count as
    a number."""
    if isinstance(value, bool):
        return kind == "bool"
    kinds = {"int": int, "float": (int, float), "bool": bool, "str": str, "None": type(None), "list": list, "dict": dict}
    if not any(isinstance(value, kinds[part.split("[")[0]]) for part in kind.split(" | ")):
        return False
    inside = kind.partition("[")[2].removesuffix("]").split(", ")
    if isinstance(value, list):
        return all(is_a(item, inside[0]) for item in value)
    return not isinstance(value, dict) or all(is_a(item, inside[-1]) for item in value.values())


def read(path: str | Path, overrides: list[str], tables: tuple[str, ...]) -> dict[str, dict]:
    """Reads the tables of a TOML file and applies the overrides, each `table.key=value` with a TOML value; ValueError for a
    table that is not in `tables`."""
    try:
        raw = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except UnicodeDecodeError as e:
        raise ValueError(f"{path}: must be UTF-8 ({e.reason} at offset {e.start:,})") from e
    except tomllib.TOMLDecodeError as e:
        raise ValueError(f"{path}: {e}") from e
    for name, table in raw.items():
        if not isinstance(table, dict):
            raise ValueError(f"{path}: {name} must be a table, found {table!r}")
    for item in overrides:
        name, _, value = item.partition("=")
        table, _, key = name.partition(".")
        try:
            raw.setdefault(table, {})[key] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError as e:
            raise ValueError(f"--set {item}: expected TABLE.KEY=VALUE, the value as in TOML ({e})") from e
    unknown = sorted(set(raw) - set(tables))
    if unknown:
        raise ValueError(f"{path}: unknown tables {unknown}")
    return raw


def build_run(raw: dict[str, dict]) -> dict:
    """Builds the arguments of `RunConfig` from a TOML file's tables."""
    tables = {"model": ModelConfig, "train": TrainConfig, "data": DataConfig}
    return {name: build(cls, raw.get(name, {}), name) for name, cls in tables.items()}


def load(path: str | Path, overrides: list[str] = ()) -> RunConfig:
    """Reads a run's TOML file; overrides as in `read`."""
    return RunConfig(**build_run(read(path, overrides, ("model", "data", "train"))))
