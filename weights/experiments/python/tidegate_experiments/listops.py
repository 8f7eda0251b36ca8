"""ListOps: nested lists of digits and operators, classified by their value (Nangia and Bowman 2018, arXiv 1804.06028).

`[MAX 2 9 [MIN 4 7 ] 0 ]` is 9. Operators are MIN, MAX, MED (the median; for an even count the mean of the middle two,
rounded down) and SM (the sum modulo 10). The length in tokens is drawn uniformly from a range and met exactly: an
operator's tokens are divided among its arguments at random.

Lengths, depth, operators and classes are those of the Long Range Arena (Tay et al. 2020, arXiv 2011.04006). The
distribution of the number of arguments, and so of depths and values, differs: the Long Range Arena grows an expression
argument by argument and rejects it if it is too short or too long. Accuracies are therefore not comparable with those
published for that task.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import ClassVar

import numpy as np

from . import sequences
from .sequences import Sequences

CLOSE, BEGIN = 15, 16
DIGIT = 1  # the digit i is token DIGIT + i
OPERATORS = {11: "MIN", 12: "MAX", 13: "MED", 14: "SM"}
VOCAB = 17
CLASSES = 10
NAMES = {CLOSE: "]", **{DIGIT + i: str(i) for i in range(10)}, **{token: f"[{name}" for token, name in OPERATORS.items()}}
TOKENS = {name: token for token, name in NAMES.items()}


@dataclass(frozen=True)
class ListOpsConfig:
    """Sequences of `min_length` to `max_length` tokens; operators nested at most `max_depth` deep, with 2 to `max_arguments`."""

    NAME: ClassVar[str] = "listops"
    NOTE: ClassVar[str] = ("The sequences were generated here and distribute arguments differently from those of the Long "
                           "Range Arena, so the accuracies are not comparable with published ones. standard_error reflects "
                           "only the choice of test sequences. The variation between seeds is larger.")
    vocab_size: ClassVar[int] = VOCAB
    classes: ClassVar[int] = CLASSES

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    train_sequences: int = 10_000
    test_sequences: int = 1000
    seed: int = 1

    def __post_init__(self):
        # Below 5, some lengths are impossible: an operator takes 2 tokens, and an argument takes 1, or 4 or more.
        if self.max_arguments < 5:
            raise ValueError(f"max_arguments: expected at least 5, found {self.max_arguments}")
        if self.max_depth < 1:
            raise ValueError(f"max_depth: expected at least 1, found {self.max_depth}")
        most = longest(self.max_depth, self.max_arguments)
        if not 4 <= self.min_length <= self.max_length <= most:
            raise ValueError(f"lengths: expected 4 <= min_length <= max_length <= {most}, "
                             f"found {self.min_length} and {self.max_length}")

    def source(self, texts: Path | None = None) -> dict:
        """Returns nothing, because the sequences come from the seed."""
        return {}

    def generate(self, part: str, texts: Path | None = None) -> Sequences:
        """Returns the `train` or `test` sequences; each part has its own stream of random numbers. texts: not used"""
        rng = random.Random(f"{part} {self.seed}")
        tokens, labels = [], []
        for _ in range({"train": self.train_sequences, "test": self.test_sequences}[part]):
            made = expression(rng, rng.randint(self.min_length, self.max_length), self.max_depth, self.max_arguments)
            tokens.append(np.array(made, dtype=np.uint8))
            labels.append(evaluate(made)[0])
        return Sequences(tokens, np.array(labels), BEGIN)

    def facts(self, train: Sequences, test: Sequences) -> dict:
        """Returns the facts about the data for the report."""
        return {"baselines": baselines(train, test), "train_distribution": describe(train), "test_distribution": describe(test)}


@cache
def longest(depth: int, arguments: int) -> int:
    """Returns the number of tokens in the longest expression of a depth; a digit has depth 0."""
    return 1 if depth == 0 else 2 + arguments * longest(depth - 1, arguments)


def share(rng: random.Random, total: int, most: int, arguments: int) -> list[int]:
    """Divides `total` tokens at random among an operator's arguments; each gets 1, or from 4 to `most`."""
    can = lambda n: total == n or (total - n >= 3 and total <= n * most and most >= 4)
    n = rng.choice([n for n in range(2, arguments + 1) if can(n)])
    over = total - n
    if not over:
        return [1] * n
    # Each nested argument has at least 3 tokens more than a digit; the rest is divided in random proportions.
    nested = rng.randint(-(-over // (most - 1)), min(n, over // 3))
    sizes, rest = [4] * nested, over - 3 * nested
    weight = [rng.expovariate(1.0) for _ in sizes]
    for i in range(nested):
        room_after = (most - 4) * (nested - i - 1)
        part = round(rest * weight[i] / sum(weight[i:]))
        part = max(rest - room_after, min(part, most - 4, rest))
        sizes[i] += part
        rest -= part
    sizes += [1] * (n - nested)
    rng.shuffle(sizes)
    return sizes


def expression(rng: random.Random, length: int, depth: int, arguments: int) -> list[int]:
    """Returns the tokens of a random expression of exactly `length` tokens (1, or 4 or more), nested at most `depth`
    deep."""
    if length == 1:
        return [DIGIT + rng.randrange(10)]
    out = [rng.choice(list(OPERATORS))]
    for size in share(rng, length - 2, longest(depth - 1, arguments), arguments):
        out += expression(rng, size, depth - 1, arguments)
    return out + [CLOSE]


def apply(operator: int, values: list[int]) -> int:
    """Returns the value of an operator applied to digits."""
    name = OPERATORS[operator]
    if name == "MIN":
        return min(values)
    if name == "MAX":
        return max(values)
    if name == "SM":
        return sum(values) % 10
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) // 2


def evaluate(tokens: list[int]) -> tuple[int, int]:
    """Returns the value of an expression and its depth; `ValueError` for anything else."""
    if not tokens:
        raise ValueError("an expression has no tokens")
    stack: list[tuple[int, list[int]]] = []
    deepest = 0
    for place, token in enumerate(tokens):
        if token in OPERATORS:
            stack.append((token, []))
            deepest = max(deepest, len(stack))
            continue
        if token == CLOSE:
            if not stack or not stack[-1][1]:
                raise ValueError(f"token {place}: the bracket closes nothing")
            value = apply(*stack.pop())
        elif DIGIT <= token < DIGIT + 10:
            value = token - DIGIT
        else:
            raise ValueError(f"token {place}: {token} is not in the language")
        if stack:
            stack[-1][1].append(value)
        elif place + 1 < len(tokens):
            raise ValueError(f"token {place + 1}: the expression has already ended")
        else:
            return value, deepest
    raise ValueError("a bracket is not closed")


def to_text(tokens: list[int]) -> str:
    """Returns the text of an expression, such as `[MAX 2 9 ]`."""
    return " ".join(NAMES[t] for t in tokens)


def from_text(text: str) -> list[int]:
    """Returns the tokens of an expression's text."""
    unknown = [word for word in text.split() if word not in TOKENS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not in the language")
    return [TOKENS[word] for word in text.split()]


def nearest(tokens: np.ndarray) -> tuple[int, int]:
    """Returns the outermost operator and its value over only those of its arguments that are digits, -1 if there are none.

    For a single digit, returns 0 and the digit.
    """
    if tokens[0] not in OPERATORS:
        return 0, int(tokens[0]) - DIGIT
    depth, digits = 0, []
    for token in tokens.tolist():
        depth += (token in OPERATORS) - (token == CLOSE)
        if depth == 1 and DIGIT <= token < DIGIT + 10:
            digits.append(token - DIGIT)
    return int(tokens[0]), apply(int(tokens[0]), digits) if digits else -1


def describe(data: Sequences) -> dict:
    """Returns the distributions of lengths, depths and classes."""
    depths = Counter(evaluate(tokens.tolist())[1] for tokens in data.tokens)
    return sequences.describe(data, CLASSES) | {"depth": {str(d): depths[d] for d in sorted(depths)}}


def baselines(train: Sequences, test: Sequences) -> dict[str, float]:
    """Returns the accuracies on `test` of three simple guesses, learned from `train`.

    majority_class: always the most common class
    first_operator: the most common class under the outermost operator
    first_level: the most common class under the outermost operator and its value over its own digits, ignoring nested
    expressions
    """
    def learned(kind) -> float:
        by_kind: dict = {}
        for tokens, label in zip(train.tokens, train.labels.tolist()):
            by_kind.setdefault(kind(tokens), Counter())[label] += 1
        overall = Counter(train.labels.tolist())
        guesses = [by_kind.get(kind(tokens), overall).most_common(1)[0][0] for tokens in test.tokens]
        return float((np.array(guesses) == test.labels).mean())

    return {"majority_class": sequences.majority(train, test), "first_operator": learned(lambda tokens: int(tokens[0])),
            "first_level": learned(nearest)}
