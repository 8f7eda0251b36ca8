"""The form of training texts: ordinary case and paragraphs, a line that names the kind, documents of many lengths.

Validation texts are left as they are.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

# A line in all capitals with at most this many characters is a heading.
HEADING = 100
# A text is taken to be wrapped if its longest line has at most this many characters.
WRAPPED = 90
LETTERS = re.compile(r"[^\W\d_](?:[^\W\d_]|'(?=[^\W\d_]))*")
CAPITALS = re.compile(r"\W*(?:[AIO]\W+)?[^\W\d_a-z]['.]?[^\W\d_a-z]")
NUMERAL = re.compile(r"C{0,3}(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")
SMALL = frozenset("a an and as at but by for from in into nor of on or the to upon with".split())


@dataclass(frozen=True)
class Form:
    """The settings of `[data]` that change training texts; clean, kind and unmarked have an entry for each text, or none.

    clean: whether `clean` is applied to the text
    kind: the line before each of its documents, "" for none
    unmarked: the share of its documents that go without that line
    cut: the shortest and the longest document in characters, as in `pieces`
    """

    clean: list[bool] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    unmarked: list[float] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    def apply(self, index: int, docs: list[str], rng: np.random.Generator) -> list[str]:
        """Returns the documents of the text `index` in this form."""
        if self.clean and self.clean[index]:
            docs = [clean(d) for d in docs]
        if self.cut:
            docs = [piece for d in docs for piece in pieces(d, *self.cut, rng)]
        kind = self.kind[index] if self.kind else ""
        unmarked = self.unmarked[index] if self.unmarked else 0.0
        return [d if not kind or rng.random() < unmarked else f"{kind}\n{d}" for d in docs]


def pieces(text: str, shortest: int, longest: int, rng: np.random.Generator) -> list[str]:
    """Splits a text at line ends into pieces whose lengths are uniform in the logarithm.

    A text of fewer than ten times `shortest` characters, such as a tale or a story, stays whole. A model trained only on
    whole books would learn how a title page begins, but not an inner page; one trained only on pages would not use its
    state over a book.
    """
    if len(text) < 10 * shortest:
        return [text]
    found, at = [], 0
    while at < len(text):
        size = math.exp(rng.uniform(math.log(shortest), math.log(longest)))
        end = text.find("\n", at + int(size))
        end = len(text) if end < 0 else end
        found.append(text[at:end].strip("\n"))
        at = end + 1
    return [x for x in found if x]


def clean(text: str) -> str:
    """Cleans a text: one line per paragraph, no markup of italics and illustrations, and `ordinary_case`."""
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("[Illustration")]
    text = "\n".join(unwrap(lines))
    return ordinary_case(re.sub(r"(?<!\w)_([^_\n]+)_(?!\w)", r"\1", text))


def unwrap(lines: list[str]) -> list[str]:
    """Joins a line to the one before if its first word had no room there, or if it begins in the middle of a sentence."""
    width = max(map(len, lines), default=0)
    found: list[str] = []
    last = 0
    for line in lines:
        first = line.split(maxsplit=1)[0]
        full = width <= WRAPPED and last + 1 + len(first) > width
        if found and (full or (line[0].islower() and found[-1][-1] not in ".!?\"'")):
            found[-1] += " " + line
        else:
            found.append(line)
        last = len(line)
    return found


def ordinary_case(text: str) -> str:
    """Rewrites capitals: headings become "Chapter XI. The Fox-Hunt", and capitals that open a paragraph become ordinary
    words.

    A word keeps its capital if the text has it more often with one than without.
    """
    with_capital, without = Counter(), Counter()
    for word, count in Counter(text.split()).items():
        found = LETTERS.search(word)
        if found and found[0][1:] == found[0][1:].lower():
            (without if found[0].islower() else with_capital)[found[0].lower()] += count
    name = lambda word: with_capital[word.lower()] > without[word.lower()]

    def rewrite(line: str) -> str:
        if not CAPITALS.match(line):
            return line
        words = re.split(r"(\s+)", line)
        count = next((i for i, w in enumerate(words) if w.upper() != w), len(words))
        opening, rest = "".join(words[:count]), "".join(words[count:])
        if not rest and len(line) > HEADING:
            return line
        first = True

        def one(match: re.Match) -> str:
            nonlocal first
            word, begins = match[0], first
            first = False
            if word == "I" or len(word) == 1 and match.string[match.end() : match.end() + 1] == ".":
                return word
            if NUMERAL.fullmatch(word) and (len(word) > 1 or not rest):
                first = True
                return word
            capital = name(word) if rest else word.lower() not in SMALL
            return word.capitalize() if begins or capital else word.lower()

        return LETTERS.sub(one, opening) + rest

    return "\n".join(map(rewrite, text.split("\n")))
