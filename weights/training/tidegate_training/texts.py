"""The form in which training texts are read: ordinary case and paragraphs, a line that names the kind, documents of many lengths.

Validation texts are read as they are.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

# A line of at most this many characters that is all in capitals is a heading.
HEADING = 100
# The lines of a wrapped text have at most this many characters.
WRAPPED = 90
LETTERS = re.compile(r"[^\W\d_](?:[^\W\d_]|'(?=[^\W\d_]))*")
CAPITALS = re.compile(r"\W*(?:[AIO]\W+)?[^\W\d_a-z]['.]?[^\W\d_a-z]")
NUMERAL = re.compile(r"C{0,3}(?:XC|XL|L?X{0,3})(?:IX|IV|V?I{0,3})")
SMALL = frozenset("a an and as at but by for from in into nor of on or the to upon with".split())


@dataclass(frozen=True)
class Form:
    """What `[data]` says of the form of its training texts; the lists have an entry for each text, or none.

    clean: whether `clean` prepares the text; kind: the line before each of its documents, "" for none; unmarked: the share of
    its documents that go without that line; cut: the shortest and the longest document in characters, as in `pieces`
    """

    clean: list[bool] = field(default_factory=list)
    kind: list[str] = field(default_factory=list)
    unmarked: list[float] = field(default_factory=list)
    cut: list[int] = field(default_factory=list)

    def apply(self, index: int, docs: list[str], rng: np.random.Generator) -> list[str]:
        """The documents of the text `index` in this form."""
        if self.clean and self.clean[index]:
            docs = [clean(d) for d in docs]
        if self.cut:
            docs = [piece for d in docs for piece in pieces(d, *self.cut, rng)]
        kind = self.kind[index] if self.kind else ""
        unmarked = self.unmarked[index] if self.unmarked else 0.0
        return [d if not kind or rng.random() < unmarked else f"{kind}\n{d}" for d in docs]


def pieces(text: str, shortest: int, longest: int, rng: np.random.Generator) -> list[str]:
    """Whole lines of a text in pieces whose lengths are spread evenly in the logarithm. One of fewer than ten times `shortest`
    characters, a tale or a story, stays whole.

    A model that only ever saw whole books would know how a title page begins, but no page inside; one that saw only
    pages would not use its state over a book.
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
    """One line a paragraph, no marks of italics and illustrations, and `ordinary_case`."""
    lines = [line for line in text.split("\n") if line.strip() and not line.startswith("[Illustration")]
    text = "\n".join(unwrap(lines))
    return ordinary_case(re.sub(r"(?<!\w)_([^_\n]+)_(?!\w)", r"\1", text))


def unwrap(lines: list[str]) -> list[str]:
    """Joins the lines of a wrapped text where the next word had no room, and any line that begins in the middle of a sentence."""
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
    """Headings in capitals become "Chapter XI. The Fox-Hunt", and words in capitals that open a paragraph ordinary ones.

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
