"""Turns text files with `<|endoftext|>` between documents into a tokenizer, token streams and lanes.

Every document begins with the token `<|endoftext|>` (id 0), which marks both its start and the end of the one before; the
state is zeroed before the token. A packed stream is therefore `0 doc 0 doc 0 ...`.
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
    """Splits a text in two; the second part is the last `share` of its characters."""
    text = read_text(path)
    cut = int(len(text) * (1 - share))
    return text[:cut], text[cut:]


def fingerprint(data: Path, train: tuple[str, ...] = ("train.bin",)) -> str:
    """Returns a hash of the streams and of `data.json` in a folder that `prepare` wrote, which identifies its data.

    train: the file names of the training streams
    """
    found = hashlib.sha256()
    for path in [data / "data.json", *(data / name for name in train), *sorted(data.glob("valid_*.bin"))]:
        content = path.read_bytes()
        found.update(f"{path.name} {len(content)}\n".encode() + content)
    return found.hexdigest()[:16]


def documents(path: str | Path) -> list[str]:
    """Returns the non-empty documents of a file, without the marks and without line breaks at either end."""
    text = read_text(path)
    return [d for d in (part.strip("\n") for part in text.split(EOT)) if d]


def train_tokenizer(files: list[str], vocab_size: int, out: Path) -> None:
    """Trains a tokenizer on the documents of text files (see `fit_tokenizer`)."""
    fit_tokenizer((d for f in files for d in documents(f)), vocab_size, out)


def fit_tokenizer(texts: Iterable[str], vocab_size: int, out: Path) -> None:
    """Trains and saves a byte-level BPE tokenizer whose post-processor puts `<|endoftext|>` before a text."""
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
    """Encodes documents as one stream of uint16 ids, with `EOT_ID` before every document and at the end. order: the indices
    of the documents, in stream order"""
    parts = []
    index = range(len(docs)) if order is None else order
    for i in tqdm(index, desc="encode", unit="doc", leave=False):
        parts.append(np.array(tok.encode(docs[i]).ids, dtype=np.uint16))
    parts.append(np.array([EOT_ID], dtype=np.uint16))
    return np.concatenate(parts)


def texts_of(path: str) -> list[str]:
    """Returns the documents of a file; ValueError if it has none."""
    found = documents(path)
    if not found:
        raise ValueError(f"{path}: holds no text")
    return found


def prepare(train: list[str], repeat: list[int], valid: dict[str, str], vocab_size: int, seed: int, out: Path,
            held_out: float = 0.0, exact: bool = True, form: Form = Form()) -> dict:
    """Writes `tokenizer.json`, `train.bin`, `valid_<name>.bin` (uint16) and `data.json` into `out`; returns the contents of
    `data.json`.

    held_out: the share at the end of each training text that is held out for validation; the two parts of the texts are
    written as `train_<n>.txt` and `held_out.txt`
    exact: whether the tokenizer must have exactly `vocab_size` tokens; if not, texts that yield fewer tokens are accepted
    form: the form of the training texts
    A `tokenizer.json` that is already in `out` is kept.
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
    """Loads the tokenizer at `path`, or trains one on these documents; ValueError if `exact` and it does not have `size`
    tokens."""
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
    """Calls `prepare` for the files of `[data]`, which are relative to `texts`."""
    given, at = run.data, lambda name: str(texts / name)
    return prepare([at(f) for f in given.train], given.repeat, {k: at(f) for k, f in given.valid.items()}, run.model.vocab_size,
                   run.train.seed, out, given.held_out, exact, Form(given.clean, given.kind, given.unmarked, given.cut))


def positions(starts: np.ndarray, before: np.ndarray) -> np.ndarray:
    """Returns each token's position in its document: int64 (lanes, time).

    starts: bool (lanes, time); before: (lanes), the first token's position if it does not start a document
    """
    index = np.arange(starts.shape[1])
    last = np.maximum.accumulate(np.where(starts, index, -1), axis=1)
    return np.where(last >= 0, index - last, before[:, None] + index)


class Lanes:
    """Cuts a stream into `lanes` equal parts and reads them side by side, `segment` tokens at a time.

    What is read depends only on the step, so a resumed run reads the same tokens as an uninterrupted one.
    """

    def __init__(self, stream: np.ndarray, lanes: int, segment: int):
        self.length = (stream.size - 1) // lanes // segment * segment
        if self.length == 0:
            raise ValueError(f"a stream of {stream.size} tokens is too short for {lanes} lanes of segment {segment}: "
                             "add text, or lower train.lanes or train.segment")
        self.stream, self.lanes, self.segment = stream, lanes, segment
        self.steps_per_epoch = self.length // segment

    def step(self, index: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns the ids, targets and starts of a step, each (lanes, segment); starts is true where the state is zeroed
        before the token."""
        at = (index % self.steps_per_epoch) * self.segment
        rows = np.arange(self.lanes)[:, None] * self.length + at + np.arange(self.segment + 1)[None, :]
        ids = self.stream[rows].astype(np.int64)
        starts = ids[:, :-1] == EOT_ID
        if at == 0:
            starts[:, 0] = True
        return ids[:, :-1], ids[:, 1:], starts

    def before(self, index: int) -> np.ndarray:
        """Returns how many tokens of its current document each lane has read before step `index`: (lanes), int64."""
        at = (index % self.steps_per_epoch) * self.segment
        found = np.zeros(self.lanes, dtype=np.int64)
        for lane in range(self.lanes):
            seen = self.stream[lane * self.length : lane * self.length + at]
            marks = np.flatnonzero(seen == EOT_ID)
            found[lane] = at - (marks[-1] if marks.size else 0)
        return found
