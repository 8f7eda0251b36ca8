"""ListOps: nested lists of digits and operators, classified by their value (Nangia and Bowman 2018, arXiv 1804.06028).

`[MAX 2 9 [MIN 4 7 ] 0 ]` is 9. Operators are MIN, MAX, MED (the median; for an even count the mean of the middle two,
rounded down) and SM (the sum modulo 10). The length in tokens is drawn uniformly from a range and met exactly: an operator's
tokens are divided among its arguments at random.

Lengths, depth, operators and classes are those of the Long Range Arena (Tay et al. 2020, arXiv 2011.04006). The distribution
of the numbers of arguments, and so of depths and values, differs: there an expression grows argument by argument and is
rejected if too short or too long. Accuracies are therefore not comparable with those published for that task.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from functools import cache

import numpy as np

PAD, CLOSE, BEGIN = 0, 15, 16
DIGIT = 1  # the digit i is token DIGIT + i
OPERATORS = {11: "MIN", 12: "MAX", 13: "MED", 14: "SM"}
VOCAB = 17
CLASSES = 10
NAMES = {CLOSE: "]", **{DIGIT + i: str(i) for i in range(10)}, **{token: f"[{name}" for token, name in OPERATORS.items()}}
TOKENS = {name: token for token, name in NAMES.items()}


@dataclass(frozen=True)
class ListOpsConfig:
    """Sequences of `min_length` to `max_length` tokens; operators nested at most `max_depth` deep, with 2 to `max_arguments`."""

    min_length: int = 500
    max_length: int = 2000
    max_depth: int = 10
    max_arguments: int = 10
    train_sequences: int = 10_000
    test_sequences: int = 1000
    seed: int = 1

    def __post_init__(self):
        # Below 5 some lengths are impossible: an operator takes 2 tokens, and an argument 1, or 4 and more.
        if self.max_arguments < 5:
            raise ValueError(f"max_arguments: expected at least 5, found {self.max_arguments}")
        if self.max_depth < 1:
            raise ValueError(f"max_depth: expected at least 1, found {self.max_depth}")
        most = longest(self.max_depth, self.max_arguments)
        if not 4 <= self.min_length <= self.max_length <= most:
            raise ValueError(f"lengths: expected 4 <= min_length <= max_length <= {most}, "
                             f"found {self.min_length} and {self.max_length}")


@cache
def longest(depth: int, arguments: int) -> int:
    """Tokens of the longest expression of a depth; a digit has depth 0."""
    return 1 if depth == 0 else 2 + arguments * longest(depth - 1, arguments)


def share(rng: random.Random, total: int, most: int, arguments: int) -> list[int]:
    """Tokens of each of an operator's arguments, 1 or from 4 to `most`, which sum to `total`."""
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
    """Tokens of a random expression of exactly `length` tokens (1, or 4 and more), nested at most `depth` deep."""
    if length == 1:
        return [DIGIT + rng.randrange(10)]
    out = [rng.choice(list(OPERATORS))]
    for size in share(rng, length - 2, longest(depth - 1, arguments), arguments):
        out += expression(rng, size, depth - 1, arguments)
    return out + [CLOSE]


def apply(operator: int, values: list[int]) -> int:
    """The value of an operator over digits."""
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
    """The value of an expression and its depth; `ValueError` for anything else."""
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
    """The text of an expression, such as `[MAX 2 9 ]`."""
    return " ".join(NAMES[t] for t in tokens)


def from_text(text: str) -> list[int]:
    """The tokens of an expression's text."""
    unknown = [word for word in text.split() if word not in TOKENS]
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not in the language")
    return [TOKENS[word] for word in text.split()]


@dataclass(frozen=True)
class Sequences:
    """Expressions with their values and depths."""

    tokens: list[np.ndarray]  # each uint8 (length)
    labels: np.ndarray  # int64 (sequences)
    depths: np.ndarray  # int64 (sequences)

    def __len__(self) -> int:
        return len(self.tokens)


def generate(cfg: ListOpsConfig, part: str) -> Sequences:
    """The `train` or `test` sequences of a configuration; each part has its own stream of random numbers."""
    rng = random.Random(f"{part} {cfg.seed}")
    tokens, labels, depths = [], [], []
    for _ in range({"train": cfg.train_sequences, "test": cfg.test_sequences}[part]):
        made = expression(rng, rng.randint(cfg.min_length, cfg.max_length), cfg.max_depth, cfg.max_arguments)
        value, depth = evaluate(made)
        tokens.append(np.array(made, dtype=np.uint8))
        labels.append(value)
        depths.append(depth)
    return Sequences(tokens, np.array(labels), np.array(depths))


def batches(data: Sequences, size: int, rng: random.Random | None = None) -> list[np.ndarray]:
    """Batches of indices of sequences of similar length, `size` each, so that there is little padding.

    With `rng`, batches are in random order, equal lengths are grouped at random, and an incomplete batch is omitted. Without,
    all sequences are included, the longest last.
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
    """Ids of BEGIN and the expression, padded to the longest (sequences, time), and labels (sequences), both int64."""
    out = np.full((len(index), 1 + max(len(data.tokens[i]) for i in index)), PAD, dtype=np.int64)
    out[:, 0] = BEGIN
    for row, i in enumerate(index):
        out[row, 1 : 1 + len(data.tokens[i])] = data.tokens[i]
    return out, data.labels[index]


def describe(data: Sequences) -> dict:
    """The distributions of lengths, depths and classes."""
    lengths = np.array([len(t) for t in data.tokens])
    depths, classes = Counter(data.depths.tolist()), Counter(data.labels.tolist())
    return {
        "sequences": len(data),
        "length": {"least": int(lengths.min()), "mean": round(float(lengths.mean()), 1), "most": int(lengths.max()),
                   "quartiles": [int(x) for x in np.quantile(lengths, [0.25, 0.5, 0.75])]},
        "depth": {str(d): depths[d] for d in sorted(depths)},
        "class": {str(c): classes[c] for c in range(CLASSES)},
    }


def nearest(tokens: np.ndarray) -> tuple[int, int]:
    """The outermost operator and its value over those of its arguments that are digits, -1 without any; for a digit, 0 and the digit."""
    if tokens[0] not in OPERATORS:
        return 0, int(tokens[0]) - DIGIT
    depth, digits = 0, []
    for token in tokens.tolist():
        depth += (token in OPERATORS) - (token == CLOSE)
        if depth == 1 and DIGIT <= token < DIGIT + 10:
            digits.append(token - DIGIT)
    return int(tokens[0]), apply(int(tokens[0]), digits) if digits else -1


def baselines(train: Sequences, test: Sequences) -> dict[str, float]:
    """Accuracies on `test` of three simple guesses, learned from `train`.

    majority_class: always the commonest class; first_operator: the commonest class under the outermost operator;
    first_level: the commonest under the outermost operator and its value over its own digits, without what is nested
    """
    def learned(kind) -> float:
        by_kind: dict = {}
        for tokens, label in zip(train.tokens, train.labels.tolist()):
            by_kind.setdefault(kind(tokens), Counter())[label] += 1
        overall = Counter(train.labels.tolist())
        guesses = [by_kind.get(kind(tokens), overall).most_common(1)[0][0] for tokens in test.tokens]
        return float((np.array(guesses) == test.labels).mean())

    return {"majority_class": learned(lambda tokens: None), "first_operator": learned(lambda tokens: int(tokens[0])),
            "first_level": learned(nearest)}
