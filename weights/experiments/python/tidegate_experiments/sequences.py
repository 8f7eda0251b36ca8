"""Labeled sequences of tokens for any task: batches of similar length, and distributions of lengths and classes."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np

PAD = 0


@dataclass(frozen=True)
class Sequences:
    """Sequences with their classes. begin: the token that is put before each sequence, which a classifier may read"""

    tokens: list[np.ndarray]  # each unsigned (length), without PAD
    labels: np.ndarray  # int64 (sequences)
    begin: int

    def __len__(self) -> int:
        return len(self.tokens)


def batches(data: Sequences, size: int, rng: random.Random | None = None) -> list[np.ndarray]:
    """Returns batches of `size` indices of sequences of similar length, so that there is little padding.

    With `rng`, batches are in random order, sequences of equal length are grouped at random, and an incomplete batch is
    omitted. Without it, all sequences are included, the longest last.
    """
    order = list(range(len(data)))
    if rng is not None:
        rng.shuffle(order)
    order.sort(key=lambda i: len(data.tokens[i]))
    cut = [np.array(order[i : i + size]) for i in range(0, len(order), size)]
    if rng is not None:
        cut = [b for b in cut if len(b) == size]
        rng.shuffle(cut)
    return cut


def collate(data: Sequences, index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns padded ids (sequences, 1 + time) and labels (sequences), both int64.

    A row of ids is `begin` and the tokens, padded to the longest sequence.
    """
    out = np.full((len(index), 1 + max(len(data.tokens[i]) for i in index)), PAD, dtype=np.int64)
    out[:, 0] = data.begin
    for row, i in enumerate(index):
        out[row, 1 : 1 + len(data.tokens[i])] = data.tokens[i]
    return out, data.labels[index]


def describe(data: Sequences, classes: int) -> dict:
    """Returns the distributions of lengths and classes."""
    lengths, counts = np.array([len(t) for t in data.tokens]), Counter(data.labels.tolist())
    return {
        "sequences": len(data),
        "length": {"least": int(lengths.min()), "mean": round(float(lengths.mean()), 1), "most": int(lengths.max()),
                   "quartiles": [int(x) for x in np.quantile(lengths, [0.25, 0.5, 0.75])]},
        "class": {str(c): counts[c] for c in range(classes)},
    }


def majority(train: Sequences, test: Sequences) -> float:
    """Returns the accuracy on `test` of always answering with the most common class of `train`."""
    return float((test.labels == Counter(train.labels.tolist()).most_common(1)[0][0]).mean())
