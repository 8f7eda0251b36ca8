"""Documents, tokens and lanes."""

import json
import random

import numpy as np
import pytest
from common import TINY, story
from tokenizers import Tokenizer

from tidegate_training import data
from tidegate_training.data import Lanes, positions


def test_documents_lose_marks_and_empty_ones(tmp_path):
    file = tmp_path / "t.txt"
    file.write_text("<|endoftext|>\n\none\ntwo\n<|endoftext|>\n<|endoftext|> three<|endoftext|>", encoding="utf-8")
    assert data.documents(file) == ["one\ntwo", " three"]


def test_every_document_begins_with_the_mark(folder):
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    docs = data.documents(folder / "valid.txt")
    stream = np.fromfile(folder / "valid_stories.bin", dtype=np.uint16)
    marks = np.flatnonzero(stream == data.EOT_ID)
    assert len(marks) == len(docs) + 1 and marks[0] == 0 and marks[-1] == stream.size - 1
    for doc, i, j in zip(docs, marks, marks[1:]):
        assert tok.decode(stream[i + 1 : j].tolist()) == doc


def test_bytes_outside_the_training_text_survive(folder):
    tok = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = "naïve — 雪\t🙂 \x00"
    assert tok.decode(tok.encode(text).ids) == text


@pytest.mark.parametrize(("size", "count", "segment"), [(1001, 4, 10), (97, 1, 8), (64, 3, 5)])
def test_lanes_cover_the_stream(size, count, segment):
    stream = np.arange(1, size + 1, dtype=np.uint16)
    lanes = Lanes(stream, count, segment)
    seen = []
    for i in range(lanes.steps_per_epoch):
        ids, targets, starts = lanes.step(i)
        assert ids.shape == targets.shape == starts.shape == (count, segment)
        assert (targets == ids + 1).all()
        assert starts.any() == (i == 0)
        seen.append(ids)
    seen = np.sort(np.concatenate(seen, axis=1).ravel())
    # Each token is read once, except for an end of each lane that is too short for a segment.
    assert (seen == np.arange(1, seen.size + 1)).all()
    assert size - seen.size <= count * segment + 1
    # A lane continues where it stopped, and the next epoch begins again.
    assert (lanes.step(1)[0][:, 0] == lanes.step(0)[1][:, -1]).all()
    assert (lanes.step(lanes.steps_per_epoch)[0] == lanes.step(0)[0]).all()


def test_starts_are_where_documents_begin():
    stream = np.array([0, 5, 6, 0, 7, 8, 9, 0, 4, 0], dtype=np.uint16)
    ids, _, starts = Lanes(stream, 1, 4).step(1)
    assert ids.tolist() == [[7, 8, 9, 0]] and starts.tolist() == [[False, False, False, True]]


def test_a_short_stream_is_refused():
    with pytest.raises(ValueError, match="too short for 4 lanes of segment 8"):
        Lanes(np.zeros(30, dtype=np.uint16), 4, 8)


def test_positions_count_from_each_document_and_continue_across_steps():
    stream = np.array([0, 5, 6, 7, 0, 8, 9, 5, 6, 7, 8, 0, 5, 6, 7, 8, 9], dtype=np.uint16)
    lanes = Lanes(stream, lanes=2, segment=4)
    found = [positions(lanes.step(i)[2], lanes.before(i)) for i in range(lanes.steps_per_epoch)]
    assert np.concatenate(found, axis=1).tolist() == [[0, 1, 2, 3, 0, 1, 2, 3], [0, 1, 2, 0, 1, 2, 3, 4]]


def test_the_held_out_part_is_not_trained_on(tmp_path):
    text = "\n".join(story(random.Random(i)) for i in range(60))
    (tmp_path / "t.txt").write_text(text)
    data.prepare([str(tmp_path / "t.txt")], [1], {}, TINY.vocab_size, 1, tmp_path / "out", held_out=0.25)
    cut = int(len(text) * 0.75)
    assert (tmp_path / "out" / "held_out.txt").read_text() == text[cut:]
    assert (tmp_path / "out" / "train_0.txt").read_text() == text[:cut]
    info = json.loads((tmp_path / "out" / "data.json").read_text())
    assert list(info["valid"]) == ["held_out"]
    assert abs(info["train_bytes"] - cut) <= 2 and abs(info["valid"]["held_out"]["bytes"] - (len(text) - cut)) <= 2
    stream = np.fromfile(tmp_path / "out" / "train.bin", dtype=np.uint16)
    assert Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json")).decode(stream[1:-1].tolist()) == text[:cut].strip("\n")
