"""Tests of the form of training texts: case, paragraphs, pieces and kinds."""

import numpy as np
import pytest
from common import TINY
from tokenizers import Tokenizer

from tidegate_training import data, texts
from tidegate_training.config import DataConfig
from tidegate_training.texts import Form


def rng():
    return np.random.default_rng(1)


@pytest.mark.parametrize(("line", "expected"), [
    ("CHAPTER XVI. OF THE FOX-HUNT", "Chapter XVI. Of the Fox-Hunt"),
    ("CHAPTER XVI THE BASS", "Chapter XVI The Bass"),
    ("XIV", "XIV"),
    ('"WALTER HAMLIN\'S WILL."', '"Walter Hamlin\'s Will."'),
    ("THROUGH the mist it came.", "Through the mist it came."),
    ("I HAVE a dog.", "I have a dog."),
    ("SIR PETER SHORT, of Exmundham, had a dog.", "Sir Peter Short, of Exmundham, had a dog."),
    ("He read the U.S. NAVY list.", "He read the U.S. NAVY list."),
    ("W. S. came.", "W. S. came."),
])
def test_capitals_that_open_a_line_become_ordinary(line, expected):
    context = "The mist, that we have, came through. My friend Sir Peter Short is short, and Peter Short it was."
    assert texts.ordinary_case(f"{context}\n{line}") == f"{context}\n{expected}"


def test_a_long_paragraph_in_capitals_stays():
    line = "WHOEVER READS THIS " * 10
    assert texts.ordinary_case(line) == line


def test_cleaning_joins_wrapped_lines_and_drops_marks():
    wrapped = ("In far bygone days, in the _North_, there lived a man who\n"
               "had seven sons and a daughter.\n\n"
               "[Illustration: The man]\n"
               '"Come," said he, and they all went with him to the shore of\n'
               "Norway.")
    assert texts.clean(wrapped) == ("In far bygone days, in the North, there lived a man who had seven sons and a daughter.\n"
                                    '"Come," said he, and they all went with him to the shore of Norway.')


def test_cleaning_keeps_verse_and_turns():
    verse = "The sea is wide,\nThe sea is deep;\nOh, leave my side\nAnd let me sleep, my love, for ever let me sleep.\n" + "x" * 120
    assert texts.clean(verse) == verse


def test_pieces_are_the_lines_of_the_text():
    lines = [f"line {i} of the text" for i in range(5000)]
    found = texts.pieces("\n".join(lines), 200, 20_000, rng())
    assert "\n".join(found).split("\n") == lines
    assert len(found) > 5 and all(len(x) <= 20_000 + 40 for x in found) and all(len(x) >= 200 for x in found[:-1])
    assert texts.pieces("short\ntext", 200, 20_000, rng()) == ["short\ntext"]


def test_kinds_mark_all_but_a_share():
    docs = [f"text {i}" for i in range(1000)]
    form = Form(kind=["A tale.", ""], unmarked=[0.25, 0.25])
    found = form.apply(0, docs, rng())
    marked = [x for x in found if x.startswith("A tale.\n")]
    assert [x.removeprefix("A tale.\n") for x in found] == docs and 650 < len(marked) < 850
    assert form.apply(1, docs, rng()) == docs == Form().apply(0, docs, rng())


def test_prepare_gives_training_texts_their_form_and_validation_texts_none(tmp_path):
    text = "CHAPTER I\n\n" + "\n\n".join(f"THE fox number {i} saw the sea, and the sea saw him." for i in range(300))
    (tmp_path / "t.txt").write_text(text)
    file = str(tmp_path / "t.txt")
    data.prepare([file, file], [1, 2], {"same": file}, TINY.vocab_size, 1, tmp_path / "out",
                 form=Form(clean=[True, False], kind=["A tale.", ""]))
    tok = Tokenizer.from_file(str(tmp_path / "out" / "tokenizer.json"))

    def read(name):
        stream = np.fromfile(tmp_path / "out" / name, dtype=np.uint16)
        marks = np.flatnonzero(stream == data.EOT_ID)
        return [tok.decode(stream[i + 1 : j].tolist()) for i, j in zip(marks, marks[1:])]

    assert sorted(read("train.bin")) == sorted([f"A tale.\n{texts.clean(text)}", text, text])
    assert texts.clean(text).startswith("Chapter I\nThe fox number 0")
    assert read("valid_same.bin") == [text]


@pytest.mark.parametrize(("settings", "refused"), [
    ({"clean": [True]}, "data.clean: must have an entry for each of the 2 texts"),
    ({"kind": ["x"]}, "data.kind: must have an entry"),
    ({"unmarked": [0.5, 1.5]}, "data.unmarked: must be from 0 to 1, found 1.5"),
    ({"cut": [10]}, "data.cut: must be the fewest and the most"),
    ({"cut": [10, 5]}, "data.cut: must be the fewest and the most"),
])
def test_impossible_forms_are_refused(settings, refused):
    with pytest.raises(ValueError, match=refused):
        DataConfig(["a.txt", "b.txt"], **settings)
