"""Passages: what they are cut from, the baselines they are compared with, and the experiment that reports on them."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest

from tidegate_experiments import classify, passages, sequences
from tidegate_experiments.__main__ import main
from tidegate_experiments.passages import PassagesConfig

TINY = """
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
head_dim = 8
proj_dim = 8
landmarks = 4

[data]
text = "books.txt"
books = 3
min_length = 20
max_length = 60
train_sequences = 48
test_sequences = 24

[train]
mixers = ["softmax", "rfa", "lara"]
batch = 8
steps = 4
warmup = 1
"""


@pytest.fixture
def texts(tmp_path):
    """Writes three books, each with its own letters and its last fifth in capitals."""
    book = lambda letters: (letters * 200)[:400] + (letters.upper() * 200)[:100]
    (tmp_path / "books.txt").write_text("\n<|endoftext|>\n".join(map(book, ("abc", "bcd", "éa"))), encoding="utf-8")
    return tmp_path


CFG = PassagesConfig("books.txt", 3, 20, 60, train_sequences=90, test_sequences=60)


def test_passages_are_stretches_of_their_own_part_of_their_book(texts):
    train, test = (CFG.generate(part, texts) for part in ("train", "test"))
    assert (len(train), len(test)) == (90, 60) and np.bincount(test.labels).tolist() == [20, 20, 20]
    books = CFG.parts(texts)
    for data, part in ((train, "train"), (test, "test")):
        for tokens, label in zip(data.tokens, data.labels):
            assert 20 <= len(tokens) <= 60 and tokens.min() >= passages.BYTE and tokens.max() < passages.BEGIN
            assert (tokens - passages.BYTE).astype(np.uint8).tobytes() in books[part][label].tobytes()
    lengths = {len(tokens) for tokens in train.tokens}
    assert min(lengths) < 25 and max(lengths) > 55
    text = lambda data: {bytes((tokens - passages.BYTE).astype(np.uint8)) for tokens, label in zip(data.tokens, data.labels) if label < 2}
    assert all(t == t.lower() for t in text(train)) and all(t == t.upper() for t in text(test))
    again = CFG.generate("train", texts)
    assert all(np.array_equal(a, b) for a, b in zip(train.tokens, again.tokens))


def test_a_book_is_cut_without_a_byte_in_both_parts(texts):
    whole = [text.encode() for text in passages.documents(texts / "books.txt")]
    parts = CFG.parts(texts)
    assert [a.tobytes() + b.tobytes() for a, b in zip(parts["train"], parts["test"])] == whole
    assert [len(a) for a in parts["train"]] == [len(text) * 4 // 5 for text in whole]


def test_pairs_of_bytes_tell_books_apart_and_one_class_does_not():
    make = lambda texts, labels: sequences.Sequences([np.frombuffer(t, dtype=np.uint8).astype(np.uint16) + passages.BYTE for t in texts],
                                                     np.array(labels), passages.BEGIN)
    train = make([b"abababab", b"babababa", b"acacacac", b"cacacaca", b"aaaa"], [0, 0, 1, 1, 1])
    test = make([b"abab", b"acac", b"caca", b"baba"], [0, 1, 1, 0])
    assert passages.byte_pairs(train, test, 2) == 1.0 and sequences.majority(train, test) == 0.5
    assert passages.byte_pairs(train, make([b"abab", b"acac"], [1, 1]), 2) == 0.5
    # Pairs that occur in no book say nothing, so the answer is the more common book.
    assert passages.byte_pairs(train, make([b"zzzz"], [1]), 2) == 1.0


def test_the_command_trains_and_reports(texts, tmp_path, capsys):
    (tmp_path / "tiny.toml").write_text(TINY)
    out = tmp_path / "out"
    base = ["passages", str(tmp_path / "tiny.toml"), "--texts", str(texts), "--out", str(out)]
    assert main(base + ["--seeds", "1,2"]) == 0
    report = json.loads((out / "passages.json").read_text())
    assert report["experiment"] == "passages" and [row["mixer"] for row in report["rows"]] == ["softmax", "rfa", "lara"]
    assert [seed["seed"] for seed in report["rows"][0]["seeds"]] == [1, 2]
    settings = report["settings"]
    assert settings["baselines"].keys() == {"majority_class", "byte_pairs"} and settings["data"]["books"] == 3
    assert (settings["model"]["vocab_size"], settings["model"]["classes"]) == (passages.VOCAB, 3)
    assert settings["test_distribution"]["class"] == {"0": 8, "1": 8, "2": 8}
    assert str(tmp_path) not in json.dumps(report)
    capsys.readouterr()
    for wrong, says in ((["--set", "data.books=4"], "data.books: books.txt holds 3 books"), (["--set", "data.max_length=101"], "at most 100"),
                        (["--set", "data.books=1"], "data.books: must be 2"), (["--set", "data.min_length=61"], "data.max_length"),
                        (["--set", "data.test_sequences=2"], "at least data.books"), (["--set", "train.batch=49"], "at least train.batch"),
                        (["--set", "data.text='none.txt'"], "none.txt")):
        assert main(base[:-1] + [str(tmp_path / "other")] + wrong) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line
    # Runs on another text of the same name are not mixed with these.
    (texts / "books.txt").write_text((texts / "books.txt").read_text() + "!")
    assert main(base) == 2 and "other settings" in capsys.readouterr().err


def test_books_of_different_letters_are_learned(texts, tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    exp = classify.load("passages", tmp_path / "tiny.toml", ["train.steps=60", "train.lr=0.02", "data.train_sequences=480"])
    other = dataclasses.replace(exp.data, seed=2)  # the test part has other letters
    found = classify.train_one(exp, "rfa", 1, exp.data.generate("train", texts), other.generate("train", texts))
    assert found["accuracy"] > 0.9, found


def test_the_shipped_configuration_draws_each_passage_for_one_step():
    exp = classify.load("passages", Path(__file__).parent.parent / "configs" / "passages.toml")
    assert (exp.data.min_length, exp.data.max_length) == (1000, 4000)
    assert exp.data.train_sequences >= exp.train.steps * exp.train.batch
