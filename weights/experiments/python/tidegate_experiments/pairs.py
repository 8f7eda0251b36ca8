"""Sentence pairs: two text files with a sentence per line become token streams with one tokenizer, and batches.

A stream is `0 text 0 text 0`, as in the trainer's `data.py`. A source is a 0 and the ids of a text. The decoder reads its
start token and a target's ids, and predicts those ids and a final 0.
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
    """The text files, with a sentence per line.

    held_out: the number of pairs at the end of the training files that are used only for validation
    max_target: the maximum number of tokens in a target, including the final 0; longer ones are refused
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
    """Returns the sentences of a file, without whitespace around them. Only a line feed ends a line."""
    with open(path, encoding="utf-8", newline="\n") as file:  # a carriage return is whitespace, not a line end
        text = file.read()
    if EOT in text:
        raise ValueError(f"{path}: must not contain the mark {EOT}")
    return [line.strip() for line in text.removesuffix("\n").split("\n")]


def both(source: Path, target: Path) -> tuple[list[str], list[str]]:
    """Returns the sentences of two parallel files."""
    a, b = lines(source), lines(target)
    if len(a) != len(b):
        raise ValueError(f"{target}: must have as many lines as {source}, {len(a)}, found {len(b)}")
    return a, b


def prepare(cfg: PairsConfig, texts: Path, vocab_size: int, out: Path) -> dict:
    """Writes `tokenizer.json`, `<part>_<side>.bin` (uint16), `test_target.txt` (the references) and `data.json` into `out`.

    The tokenizer is trained on both sides of the training part only.
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
    # `fingerprint` does not read the test streams, so this hash in `data.json` covers them.
    info["test"]["sha256"] = hashlib.sha256("\n".join([*test[0], *test[1]]).encode()).hexdigest()[:16]
    (out / "test_target.txt").write_text("".join(line + "\n" for line in test[1]), encoding="utf-8")
    (out / "data.json").write_text(json.dumps(info, indent=2) + "\n")
    return info


def fingerprint_of(data: Path) -> str:
    """Returns the hash that identifies a folder of pairs (see `data.fingerprint`)."""
    return fingerprint(data, tuple(f"train_{side}.bin" for side in SIDES))


@dataclass(frozen=True)
class Pairs:
    """The tokens of each text, without the marks."""

    source: list[np.ndarray]
    target: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.source)


def divide(stream: np.ndarray) -> list[np.ndarray]:
    """Splits a stream into its texts."""
    marks = np.flatnonzero(stream == EOT_ID)
    return [stream[a + 1 : b].astype(np.int64) for a, b in zip(marks[:-1], marks[1:])]


def read(data: Path, part: str) -> Pairs:
    """Reads one of `PARTS` from a folder that `prepare` wrote."""
    return Pairs(*(divide(np.fromfile(data / f"{part}_{side}.bin", dtype=np.uint16)) for side in SIDES))


def batches(pairs: Pairs, tokens: int, rng: np.random.Generator | None = None) -> list[np.ndarray]:
    """Groups pairs of similar length into batches of at most `tokens` target places, padding included.

    A longer target gets a batch of its own. With `rng`, the batches are in random order, and pairs with equal target
    lengths are grouped partly at random; the number of batches is the same.
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
    """Pads rows of ids into one tensor, int64 (rows, longest)."""
    out = np.full((len(rows), max(len(row) for row in rows)), fill, dtype=np.int64)
    for place, row in zip(out, rows):
        place[: len(row)] = row
    return torch.from_numpy(out)


def sources(pairs: Pairs, index: np.ndarray) -> tuple[Tensor, Tensor | None]:
    """Returns source ids (batch, source), each beginning with 0, and their mask.

    The mask is bool, false for padding, or None without padding.
    """
    rows = [np.concatenate([[EOT_ID], pairs.source[i]]) for i in index]
    mask = padded([np.ones(len(row)) for row in rows], 0).bool()
    return padded(rows, EOT_ID), None if bool(mask.all()) else mask


def targets(pairs: Pairs, index: np.ndarray, start: int) -> tuple[Tensor, Tensor]:
    """Returns the decoder's inputs and labels, both (batch, time).

    The inputs are `start` and the text; the labels are the text and 0, with `IGNORED` for padding.
    """
    read_ids = padded([np.concatenate([[start], pairs.target[i]]) for i in index], EOT_ID)
    return read_ids, padded([np.concatenate([pairs.target[i], [EOT_ID]]) for i in index], IGNORED)
