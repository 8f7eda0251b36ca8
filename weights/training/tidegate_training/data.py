"""Tokenizer, token streams and lanes: from text files with `<|endoftext|>` between documents to ids.

Every document begins with the token `<|endoftext|>` (id 0), which is both the start and the end mark; the state is zeroed
before it. A packed stream is therefore `0 doc 0 doc 0 ...`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from tqdm import tqdm

from .config import RunConfig
from .files import read_text, read_tokenizer
from .texts import Form

EOT = "<|endoftext|>"
EOT_ID = 0
MIN_VOCABULARY = 257


def divide(path: Path, share: float) -> tuple[str, str]:
    """Splits a text before its last `share` of characters."""
    text = read_text(path)
    cut = int(len(text) * (1 - share))
    return text[:cut], text[cut:]


def fingerprint(data: Path, train: tuple[str, ...] = ("train.bin",)) -> str:
    """A hash of the streams and `data.json` in a folder that `prepare` wrote, which identifies its data.

    train: the training streams
    """
    found = hashlib.sha256()
    for path in [data / "data.json", *(data / name for name in train), *sorted(data.glob("valid_*.bin"))]:
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def documents(path: str | Path) -> list[str]:
    """The documents of a file, without the marks and the line breaks around them, and without empty ones."""
    text = read_text(path)
    return [d for d in (part.strip("\n") for part in text.split(EOT)) if d]


def train_tokenizer(files: list[str], vocab_size: int, out: Path) -> None:
    """`fit_tokenizer` to the documents of text files."""
    fit_tokenizer((d for f in files for d in documents(f)), vocab_size, out)


def fit_tokenizer(texts: Iterable[str], vocab_size: int, out: Path) -> None:
    """A byte-level BPE whose post-processor puts `<|endoftext|>` before a text."""
    tok = Tokenizer(models.BPE())
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tok.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=True,
    )
    tok.train_from_iterator(texts, trainer=trainer)
    tok.post_processor = processors.TemplateProcessing(
        single=f"{EOT} $A", pair=f"{EOT} $A $B", special_tokens=[(EOT, EOT_ID)]
    )
    tok.save(str(out))


def encode(tok: Tokenizer, docs: list[str], order: np.ndarray | None = None) -> np.ndarray:
    """One stream of uint16 ids with `EOT_ID` before every document and at the end."""
    parts = []
    index = range(len(docs)) if order is None else order
    for i in tqdm(index, desc="encode", unit="doc", leave=False):
        parts.append(np.array(tok.encode(docs[i]).ids, dtype=np.uint16))
    parts.append(np.array([EOT_ID], dtype=np.uint16))
    return np.concatenate(parts)


def texts_of(path: str) -> list[str]:
    """The documents of a file; ValueError if it has none."""
    found = documents(path)
    if not found:
        raise ValueError(f"{path}: holds no text")
    return found


def prepare(train: list[str], repeat: list[int], valid: dict[str, str], vocab_size: int, seed: int, out: Path,
            held_out: float = 0.0, exact: bool = True, form: Form = Form()) -> dict:
    """Writes `tokenizer.json`, `train.bin`, `valid_<name>.bin` (uint16) and `data.json` into `out`; returns the latter.

    held_out: the last share of each training text validates; `train_<n>.txt` and `held_out.txt` are the two parts.
    exact: whether a text that gives fewer than `vocab_size` tokens is refused. A `tokenizer.json` in `out` is kept.
    form: of the training texts
    """
    if not train:
        raise ValueError("data.train: must name at least one text file")
    if not MIN_VOCABULARY <= vocab_size <= 1 << 16:
        raise ValueError(f"model.vocab_size: must be {MIN_VOCABULARY} (the bytes and {EOT}) to 65,536, found {vocab_size:,}")
    if (out / "data.json").exists():
        raise ValueError(f"{out}: holds prepared data; delete it or use another folder")
    # Everything is read before anything is written.
    texts, checked = {file: texts_of(file) for file in train}, {name: texts_of(path) for name, path in valid.items()}
    out.mkdir(parents=True, exist_ok=True)
    if held_out:
        kept, last = zip(*(divide(Path(file), held_out) for file in train))
        train = [str(out / f"train_{i}.txt") for i in range(len(train))]
        for name, text in zip([*train, out / "held_out.txt"], [*kept, EOT.join(last)]):
            Path(name).write_text(text, encoding="utf-8", newline="")
        texts = {file: texts_of(file) for file in train}
        checked["held_out"] = texts_of(str(out / "held_out.txt"))
    rng = np.random.default_rng(seed)
    formed = [[form.apply(i, texts[file], rng) for _ in range(copies)]
              for i, (file, copies) in enumerate(zip(train, repeat or [1] * len(train), strict=True))]
    tok = vocabulary([d for copies in formed for d in copies[0]], vocab_size, out / "tokenizer.json", exact)
    docs = [d for copies in formed for copy in copies for d in copy]
    order = rng.permutation(len(docs))
    stream = encode(tok, docs, order)
    stream.tofile(out / "train.bin")
    info = {"train_tokens": int(stream.size), "train_bytes": sum(len(d.encode()) for d in docs), "valid": {}}
    for name, docs in checked.items():
        ids = encode(tok, docs)
        ids.tofile(out / f"valid_{name}.bin")
        info["valid"][name] = {"tokens": int(ids.size), "bytes": sum(len(d.encode()) for d in docs)}
    (out / "data.json").write_text(json.dumps(info, indent=2) + "\n")
    return info


def vocabulary(docs: list[str], size: int, path: Path, exact: bool) -> Tokenizer:
    """The tokenizer at `path`, or a new one of these documents; ValueError if it must have `size` tokens and has not."""
    new = not path.exists()
    if new:
        fit_tokenizer(docs, size, path)
    tok = read_tokenizer(path, "prepare")
    found = tok.get_vocab_size()
    if exact and found != size:
        if not new:
            raise ValueError(f"{path}: has {found:,} tokens, and model.vocab_size is {size:,}")
        path.unlink()
        raise ValueError(f"model.vocab_size: must be at most {found:,}, which is what these texts give, found {size:,}")
    return tok


def prepare_run(run: RunConfig, texts: Path, out: Path, exact: bool = True) -> dict:
    """`prepare` for the files of `[data]`, which are relative to `texts`."""
    given, at = run.data, lambda name: str(texts / name)
    return prepare([at(f) for f in given.train], given.repeat, {k: at(f) for k, f in given.valid.items()}, run.model.vocab_size,
                   run.train.seed, out, given.held_out, exact, Form(given.clean, given.kind, given.unmarked, given.cut))


def positions(starts: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Tokens since the document's start. starts: bool (lanes, time); before: (lanes), the first token's position
    if no document starts -> int64 (lanes, time)"""
    index = np.arange(starts.shape[1])
    last = np.maximum.accumulate(np.where(starts, index, -1), axis=1)
    return np.where(last >= 0, index - last, before[:, None] + index)


class Lanes:
    """Cuts a stream into `lanes` equal parts and reads them side by side, `segment` tokens at a time.

    The position depends only on the step, so a resumed run reads the same tokens as an uninterrupted one.
    """

    def __init__(self, stream: np.ndarray, lanes: int, segment: int):
        self.length = (stream.size - 1) // lanes // segment * segment
        if self.length == 0:
            raise ValueError(f"a stream of {stream.size} tokens is too short for {lanes} lanes of segment {segment}: "
                             "add text, or lower train.lanes or train.segment")
        self.stream, self.lanes, self.segment = stream, lanes, segment
        self.steps_per_epoch = self.length // segment

    def step(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """ids, targets (lanes, segment) and starts, true if the state is zeroed before the token."""
        at = (index % self.steps_per_epoch) * self.segment
        rows = np.arange(self.lanes)[:, None] * self.length + at + np.arange(self.segment + 1)[None, :]
        ids = self.stream[rows].astype(np.int64)
        starts = ids[:, :-1] == EOT_ID
        if at == 0:
            starts[:, 0] = True
        return ids[:, :-1], ids[:, 1:], starts

    def before(self, index: int) -> np.ndarray:
        """The number of tokens of its document that each lane has read before step `index`: (lanes), int64."""
        at = (index % self.steps_per_epoch) * self.segment
        found = np.zeros(self.lanes, dtype=np.int64)
        for lane in range(self.lanes):
            seen = self.stream[lane * self.length : lane * self.length + at]
            marks = np.flatnonzero(seen == EOT_ID)
            found[lane] = at - (marks[-1] if marks.size else 0)
        return found
