"""Passages: the task of naming the book that a stretch of bytes is from.

It replaces the byte-level tasks of the Long Range Arena (Tay et al. 2020, arXiv 2011.04006), IMDb and AAN, whose texts are
not available here. Accuracies are not comparable with theirs. Training passages begin anywhere in the first four fifths of
a book and test passages in the last fifth, so that no byte is in both.
"""

from __future__ import annotations

import hashlib
import random
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import numpy as np

from tidegate_training.data import documents

from . import sequences
from .sequences import Sequences

VOCAB = 258  # padding, the bytes, and the mark before a passage
BYTE = 1  # the byte b is token BYTE + b
BEGIN = 257


@dataclass(frozen=True)
class PassagesConfig:
    """Passages of `min_length` to `max_length` bytes, equally many from each of the first `books` documents of `text`."""

    NAME: ClassVar[str] = "passages"
    NOTE: ClassVar[str] = ("The task is to name the book that a passage is from, given its bytes. It substitutes for the "
                           "byte-level tasks of the Long Range Arena and is not comparable with them. standard_error reflects "
                           "only the choice of test passages, as if none overlapped. The variation between seeds is larger.")
    vocab_size: ClassVar[int] = VOCAB

    text: str = "novels/train.txt"
    books: int = 20
    min_length: int = 1000
    max_length: int = 4000
    train_sequences: int = 3200
    test_sequences: int = 1000
    seed: int = 1

    def __post_init__(self):
        if self.books < 2:
            raise ValueError(f"data.books: must be 2 or more, found {self.books}")
        if min(self.train_sequences, self.test_sequences) < self.books:
            raise ValueError(f"data.train_sequences and data.test_sequences: must be at least data.books, {self.books}, found "
                             f"{self.train_sequences} and {self.test_sequences}")
        if not 1 <= self.min_length <= self.max_length:
            raise ValueError(f"data.max_length: must be at least min_length, and that 1 or more, found {self.min_length} and "
                             f"{self.max_length}")

    @property
    def classes(self) -> int:
        return self.books

    def source(self, texts: Path) -> dict:
        """Returns the digest of the text, which all runs of a report share. texts: the folder of `text`"""
        return {"text_sha256": hashlib.sha256((texts / self.text).read_bytes()).hexdigest()[:16]}

    def parts(self, texts: Path) -> dict[str, list[np.ndarray]]:
        """Returns the bytes of each book, split into a training part and a test part."""
        found = [np.frombuffer(text.encode(), dtype=np.uint8) for text in documents(texts / self.text)[: self.books]]
        if len(found) < self.books:
            raise ValueError(f"data.books: {self.text} holds {len(found)} books, {self.books} are wanted")
        cuts = [len(book) * 4 // 5 for book in found]
        short = min(min(cut, len(book) - cut) for book, cut in zip(found, cuts))
        if short < self.max_length:
            raise ValueError(f"data.max_length: must be at most {short}, the least part of a book, found {self.max_length}")
        return {"train": [book[:cut] for book, cut in zip(found, cuts)], "test": [book[cut:] for book, cut in zip(found, cuts)]}

    def generate(self, part: str, texts: Path) -> Sequences:
        """Returns the `train` or `test` passages; each part has its own stream of random numbers. texts: the folder of
        `text`"""
        rng, books = random.Random(f"{part} {self.seed}"), self.parts(texts)[part]
        count = {"train": self.train_sequences, "test": self.test_sequences}[part]
        labels, tokens = [i % self.books for i in range(count)], []
        for label in labels:
            length = rng.randint(self.min_length, self.max_length)
            at = rng.randint(0, len(books[label]) - length)
            tokens.append(books[label][at : at + length].astype(np.uint16) + BYTE)
        return Sequences(tokens, np.array(labels), BEGIN)

    def facts(self, train: Sequences, test: Sequences) -> dict:
        """Returns the facts about the data for the report.

        The baselines are the accuracies of two guesses learned from the training part: always the most common class, and
        `byte_pairs`, naive Bayes over pairs of bytes with one added to each count.
        """
        return {"baselines": {"majority_class": sequences.majority(train, test), "byte_pairs": byte_pairs(train, test, self.books)},
                "train_distribution": sequences.describe(train, self.books),
                "test_distribution": sequences.describe(test, self.books)}


def pairs(tokens: np.ndarray) -> np.ndarray:
    """Returns the pairs of consecutive bytes, as numbers below 65,536."""
    given = tokens.astype(np.int64) - BYTE
    return given[:-1] * 256 + given[1:]


def byte_pairs(train: Sequences, test: Sequences, classes: int) -> float:
    """Returns the accuracy of naive Bayes over pairs of bytes; the prior is the frequency of the classes in `train`."""
    counts = np.ones((classes, 1 << 16))
    for tokens, label in zip(train.tokens, train.labels):
        counts[label] += np.bincount(pairs(tokens), minlength=1 << 16)
    frequent = np.log(np.bincount(train.labels, minlength=classes).clip(min=1))
    likely = np.log(counts / counts.sum(1, keepdims=True))
    guesses = [int((frequent + likely[:, pairs(tokens)].sum(1)).argmax()) for tokens in test.tokens]
    return float((np.array(guesses) == test.labels).mean())
