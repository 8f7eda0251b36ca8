"""Sentence pairs: two text files, line by line, to token streams with one tokenizer for both sides, and batches of them.

A stream is as `data.py` has it, `0 text 0 text 0`. A source is the tokenizer's ids of a text, 0 first; a target is read by
the decoder from its start token on, and what it has to say is the text's tokens and a last 0.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from tidegate_training.data import EOT, EOT_ID, encode, fit_tokenizer, fingerprint
from tidegate_training.seq2seq import IGNORED

PARTS = ("train", "valid", "test")
SIDES = ("source", "target")


@dataclass(frozen=True)
class PairsConfig:
    """Text files with a sentence a line; `held_out`: the last pairs of the training files, which only validate.

    max_target: most tokens of a target with its last; prepared data that has a longer one is refused
    """

    source: str = "train.en"
    target: str = "train.de"
    test_source: str = "val.en"
    test_target: str = "val.de"
    held_out: int = 500
    max_target: int = 128

    def __post_init__(self) -> None:
        for key in ("held_out", "max_target"):
            if getattr(self, key) < 1:
                raise ValueError(f"data.{key}: must be 1 or more, found {getattr(self, key)}")


def lines(path: Path) -> list[str]:
    """The sentences of a file, without blanks around them. Only a line feed ends a line: the two files have as many."""
    with open(path, encoding="utf-8", newline="\n") as file:  # a carriage return is a blank, not another end
        text = file.read()
    if EOT in text:
        raise ValueError(f"{path}: must not hold the mark {EOT}")
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def both(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """The sentences of two files that translate each other."""
    a, b = lines(source), lines(target)
    if len(a) != len(b):
        raise ValueError(f"{target}: must have as many lines as {source}, {len(a)}, found {len(b)}")
    return a, b


def prepare(cfg: PairsConfig, texts: Path, vocab_size: int, out: Path) -> dict:
    """Writes `tokenizer.json`, `<part>_<side>.bin` (uint16), `test_target.txt` (the references) and `data.json` into `out`.

    The tokenizer learns from what is trained on alone, both sides.
    """
    out.mkdir(parents=True, exist_ok=True)
    known = both(texts / cfg.source, texts / cfg.target)
    if len(known[0]) <= cfg.held_out:
        raise ValueError(f"data.held_out: must be below the pairs of {cfg.source}, {len(known[0])}, found {cfg.held_out}")
    test = both(texts / cfg.test_source, texts / cfg.test_target)
    parts = {"train": [x[: -cfg.held_out] for x in known], "valid": [x[-cfg.held_out :] for x in known], "test": test}
    fit_tokenizer((text for side in parts["train"] for text in side), vocab_size, out / "tokenizer.json")
    tok = Tokenizer.from_file(str(out / "tokenizer.json"))
    info: dict = {"vocab_size": tok.get_vocab_size()}
    for part in PARTS:
        info[part] = {"pairs": len(parts[part][0])}
        for side, text in zip(SIDES, parts[part]):
            stream = encode(tok, text)
            stream.tofile(out / f"{part}_{side}.bin")
            longest = int(np.diff(np.flatnonzero(stream == EOT_ID)).max())
            info[part] |= {f"{side}_tokens": int(stream.size - 1), f"longest_{side}": longest}
    # Of what is not in the streams of training and validation, so that the fingerprint holds the test too.
    info["test"]["sha256"] = hashlib.sha256("\n".join([*test[0], *test[1]]).encode()).hexdigest()[:16]
    (out / "test_target.txt").write_text("".join(line + "\n" for line in test[1]), encoding="utf-8")
    (out / "data.json").write_text(json.dumps(info, indent=2) + "\n")
    return info


def fingerprint_of(data: Path) -> str:
    """`data.fingerprint` of a folder of pairs."""
    return fingerprint(data, tuple(f"train_{side}.bin" for side in SIDES))


@dataclass(frozen=True)
class Pairs:
    """The tokens of each text, without any 0."""

    source: list[np.ndarray]
    target: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.source)


def divide(stream: np.ndarray) -> list[np.ndarray]:
    """The texts of a stream."""
    marks = np.flatnonzero(stream == EOT_ID)
    return [stream[a + 1 : b].astype(np.int64) for a, b in zip(marks[:-1], marks[1:])]


def read(data: Path, part: str) -> Pairs:
    """One of `PARTS` of a folder that `prepare` wrote."""
    return Pairs(*(divide(np.fromfile(data / f"{part}_{side}.bin", dtype=np.uint16)) for side in SIDES))


def batches(pairs: Pairs, tokens: int, rng: np.random.Generator | None = None) -> list[np.ndarray]:
    """Which pairs stand in which batch: of nearly equal lengths, at most `tokens` target places each, padding counted; or one
    pair, where its target alone is longer.

    With `rng` in random order, and pairs of equal lengths in other company each time; there are always as many batches.
    """
    long = np.array([len(x) + 1 for x in pairs.target])
    source = np.array([len(x) + 1 for x in pairs.source], dtype=np.float64)
    if rng is not None:
        source += rng.uniform(-2.0, 2.0, size=source.shape)
    order = np.lexsort((source, long))
    found, begin = [], 0
    for end in range(1, len(order) + 1):
        if end == len(order) or (end + 1 - begin) * long[order[end]] > tokens:
            found.append(order[begin:end])
            begin = end
    if rng is not None:
        rng.shuffle(found)
    return found


def padded(rows: list[np.ndarray], fill: int) -> Tensor:
    """Rows of ids as one tensor, int64 (rows, longest)."""
    out = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for place, row in zip(out, rows):
        place[: len(row)] = row
    return torch.from_numpy(out)


def sources(pairs: Pairs, index: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Source ids (batch, source), the first of each 0, and their mask: bool, false for padding, or None where there is none."""
    rows = [np.concatenate([[EOT_ID], pairs.source[i]]) for i in index]
    mask = padded([np.ones(len(row)) for row in rows], 0).bool()
    return padded(rows, EOT_ID), None if bool(mask.all()) else mask


def targets(pairs: Pairs, index: np.ndarray, start: int) -> tuple[Tensor, Tensor]:
    """What the decoder reads, `start` and the text, and what it has to say, the text and 0: both (batch, time), the second
    `IGNORED` where the first is padding."""
    read_ids = padded([np.concatenate([[start], pairs.target[i]]) for i in index], EOT_ID)
    return read_ids, padded([np.concatenate([pairs.target[i], [EOT_ID]]) for i in index], IGNORED)
