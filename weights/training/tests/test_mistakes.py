"""Mistakes on the command line: each gives one line that names it and exit status 2, and writes nothing."""

import json
import re
import shutil

import pytest
import torch

from tidegate_training import card, config, export
from tidegate_training.__main__ import main
from tidegate_training.train import Trainer

MODEL = """[model]
vocab_size = 300
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 1
num_attention_heads = 2
head_dim = 8
proj_dim = 8
"""
TRAIN = """
[train]
lanes = 2
segment = 32
steps = 2
chunk = 16
eval_every = 2
"""


@pytest.fixture
def refused(capsys):
    """A function that runs a command which must fail with one line, and returns the line."""

    def run(*words) -> str:
        capsys.readouterr()
        assert main([str(word) for word in words]) == 2
        (line,) = [x for x in capsys.readouterr().err.splitlines() if x.strip()]
        assert line.startswith("tidegate-train: ")
        return line

    return run


@pytest.fixture
def toml(tmp_path):
    """A function that writes the configuration of a tiny run, with changes to its text."""

    def write(data: str = '[data]\ntrain = ["train.txt"]\n', model: str = MODEL, train: str = TRAIN):
        (tmp_path / "run.toml").write_text(model + data + train)
        return tmp_path / "run.toml"

    return write


def test_a_configuration_without_texts(refused, toml, tmp_path, folder):
    """Without texts, a stream of a single token must not be written."""
    for data in ("", "[data]\ntrain = []\n"):
        line = refused("prepare", toml(data), "--texts", folder, "--data", tmp_path / "data")
        assert "data.train: must name at least one text file" in line
    line = refused("prepare", toml('[data]\ntrain = ["train.txt"]\nrepeat = [1, 2]\n'), "--texts", folder, "--data", tmp_path / "data")
    assert "data.repeat: must have an entry for each of the 1 texts" in line
    assert not (tmp_path / "data").exists()


def test_weights_to_start_from_that_do_not_fit(refused, toml, tmp_path, folder):
    words = ("train", toml(), "--data", folder, "--out", tmp_path / "run", "--from")
    assert "config.json" in refused(*words, tmp_path / "nowhere")
    Trainer(config.load(toml()), folder, tmp_path / "other", "cpu").run(until=1)
    export.export_run(tmp_path / "other", folder, tmp_path / "model", "f32")
    assert "has another model.num_hidden_layers (1, now 2)" in refused(*words, tmp_path / "model", "--set", "model.num_hidden_layers=2")
    assert not (tmp_path / "run").exists()


def test_texts_that_are_missing_empty_or_not_utf_8(refused, toml, tmp_path):
    texts, data = tmp_path / "texts", tmp_path / "data"
    texts.mkdir()
    assert "train.txt" in refused("prepare", toml(), "--texts", texts, "--data", data)
    (texts / "train.txt").write_text("\n<|endoftext|>\n")
    assert "train.txt: holds no text" in refused("prepare", toml(), "--texts", texts, "--data", data)
    (texts / "train.txt").write_bytes("naïve".encode("latin-1"))
    line = refused("prepare", toml(), "--texts", texts, "--data", data)
    assert re.search(r"train\.txt: must be UTF-8, found the byte 0xef at offset 2$", line), line
    line = refused("new", texts / "train.txt", "--out", tmp_path / "out")
    assert "train.txt: must be UTF-8" in line
    # A validation text that is not UTF-8 is refused too, before anything is written.
    (texts / "good.txt").write_text("a good text")
    line = refused("prepare", toml('[data]\ntrain = ["good.txt"]\nvalid = { v = "train.txt" }\n'), "--texts", texts, "--data", data)
    assert "train.txt: must be UTF-8" in line
    assert not data.exists() and not (tmp_path / "out").exists()


def test_a_vocabulary_other_than_the_prepared_one(refused, toml, tmp_path, folder):
    line = refused("train", toml(), "--data", folder, "--out", tmp_path / "run", "--set", "model.vocab_size=400")
    assert f"model.vocab_size: must be 300, as prepared in {folder}, found 400" in line
    line = refused("prepare", toml(), "--texts", folder, "--data", tmp_path / "data", "--set", "model.vocab_size=60000")
    assert re.search(r"model\.vocab_size: must be at most \d+, which is what these texts give, found 60,000", line), line
    assert not (tmp_path / "data" / "tokenizer.json").exists()
    for size in (256, 65537):
        line = refused("prepare", toml(), "--texts", folder, "--data", tmp_path / "data", "--set", f"model.vocab_size={size}")
        assert "model.vocab_size: must be 257" in line
    (tmp_path / "kept").mkdir()
    shutil.copy(folder / "tokenizer.json", tmp_path / "kept")
    line = refused("prepare", toml(), "--texts", folder, "--data", tmp_path / "kept", "--set", "model.vocab_size=301")
    assert "tokenizer.json: has 300 tokens, and model.vocab_size is 301" in line
    assert not (tmp_path / "run").exists()


def test_devices_that_are_not_there(refused, toml, tmp_path, folder, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    for device, message in (("cuda", "PyTorch finds 0 usable GPUs; use --device cpu"), ("cuda:3", "--device cuda:3"),
                            ("gpu", "must be cpu or cuda, found 'gpu'"), ("meta", "must be cpu or cuda")):
        assert message in refused("train", toml(), "--data", folder, "--out", tmp_path / "run", "--device", device)
        assert message in refused("new", folder / "train.txt", "--out", tmp_path / "out", "--device", device)
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_data_too_short_for_the_run(refused, toml, tmp_path, folder):
    line = refused("train", toml(), "--data", folder, "--out", tmp_path / "run", "--set", "train.lanes=9999")
    assert re.search(r"a stream of [\d]+ tokens is too short for 9999 lanes of segment 32: add text", line), line
    short = shutil.copytree(folder, tmp_path / "short")
    info = json.loads((short / "data.json").read_text())
    info["valid"]["stories"]["tokens"] = 4
    (short / "data.json").write_text(json.dumps(info))
    line = refused("train", toml(), "--data", short, "--out", tmp_path / "run")
    assert "the validation text stories is too short: must have more than 4 tokens, found 4" in line
    assert "train.eval_tokens" in refused("train", toml(), "--data", folder, "--out", tmp_path / "run", "--set", "train.eval_tokens=3")
    assert not (tmp_path / "run").exists()


def test_missing_and_damaged_files(refused, toml, tmp_path, folder):
    train = ("train", toml(), "--out", tmp_path / "run", "--data")
    assert "has no data.json; `tidegate-train prepare` writes it" in refused(*train, tmp_path / "none")
    for name, message in (("data.json", "must be JSON"), ("tokenizer.json", "must be a tokenizer"), ("train.bin", "has no train.bin")):
        broken = shutil.copytree(folder, tmp_path / f"broken {name}")
        (broken / name).unlink() if name == "train.bin" else (broken / name).write_text("{")
        assert message in refused(*train, broken)
    export_words = ("export", "--data", folder, "--out", tmp_path / "out", "--run")
    assert "has no state.pt; `tidegate-train train` writes it" in refused(*export_words, tmp_path / "none")
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "state.pt").write_bytes(b"not a state")
    assert "must be a state that `tidegate-train train` wrote" in refused(*export_words, tmp_path / "odd")
    assert "has no config.json" in refused("eval", "--model", tmp_path / "none", "--text", folder / "valid.txt")
    assert "none.toml" in refused("prepare", tmp_path / "none.toml", "--data", tmp_path / "d")
    (tmp_path / "odd.toml").write_bytes(b"[model]\n# \xff\n")
    assert "odd.toml: must be UTF-8" in refused("prepare", tmp_path / "odd.toml", "--data", tmp_path / "d")
    (tmp_path / "flat.toml").write_text("model = 3\n")
    assert "flat.toml: model must be a table" in refused("prepare", tmp_path / "flat.toml", "--data", tmp_path / "d")
    assert "notes.md" in refused(*export_words, tmp_path / "run", "--data-notes", tmp_path / "notes.md")
    assert not (tmp_path / "run").exists() and not (tmp_path / "out").exists()


def test_a_checkpoint_whose_weights_do_not_fit(refused, tmp_path, folder, run_config):
    Trainer(run_config(), folder, tmp_path / "run", "cpu").run(until=1)
    export.export_run(tmp_path / "run", folder, tmp_path / "out", "f32", about=card.About(prompts=("a",)))
    path = tmp_path / "out" / "config.json"
    keys = json.loads(path.read_text())
    path.write_text(json.dumps(keys | {"num_hidden_layers": 3}))
    words = ("eval", "--model", tmp_path / "out", "--text", folder / "valid.txt")
    assert "model.safetensors: must have the weights that config.json describes" in refused(*words)
    (tmp_path / "out" / "model.safetensors").write_bytes(b"no weights")
    assert "model.safetensors: must have the weights" in refused(*words)


def test_folders_that_exist(refused, toml, tmp_path, folder, run_config):
    words = ("prepare", toml(), "--texts", folder, "--data", folder)
    before = (folder / "train.bin").read_bytes()
    assert "holds prepared data; delete it or use another folder" in refused(*words)
    assert (folder / "train.bin").read_bytes() == before
    other = tmp_path / "other"
    other.mkdir()
    (other / "mine").write_text("mine")
    assert "exists and holds no run" in refused("train", toml(), "--data", folder, "--out", other)
    Trainer(run_config(), folder, tmp_path / "run", "cpu").run(until=1)
    assert "exists and is not empty; name another folder, or overwrite it with --force" in refused(
        "export", "--run", tmp_path / "run", "--data", folder, "--out", other)
    assert "is a file" in refused("export", "--run", tmp_path / "run", "--data", folder, "--out", other / "mine")
    assert [path.name for path in other.iterdir()] == ["mine"]
    # A folder that holds a run is accepted, so that it can resume; another model is refused there.
    assert "another model" in refused("train", toml(), "--data", folder, "--out", tmp_path / "run")


@pytest.mark.parametrize(("setting", "message"), [
    ("train.optimizer='sgd'", "train.optimizer: must be one of adamw, muon"), ("train.precision='fp8'", "train.precision: must be one of"),
    ("train.lanes=0", "train.lanes: must be 1 or more"), ("train.steps=-1", "train.steps"), ("train.warmup=-1", "train.warmup"),
    ("data.held_out=1.5", "data.held_out"), ("train.lr", "expected TABLE.KEY=VALUE"), ("train.lr='x'", "train.lr: must be of type float")])
def test_settings_out_of_range(refused, toml, tmp_path, folder, setting, message):
    assert message in refused("train", toml(), "--data", folder, "--out", tmp_path / "run", "--set", setting)


def test_a_tokenizer_of_another_model(refused, tmp_path, folder, run_config):
    Trainer(run_config(), folder, tmp_path / "run", "cpu").run(until=1)
    other = tmp_path / "other"
    (tmp_path / "t.txt").write_text("another text")
    from tidegate_training.data import prepare

    prepare([str(tmp_path / "t.txt")], [], {}, 257, 1, other)
    line = refused("export", "--run", tmp_path / "run", "--data", other, "--out", tmp_path / "out")
    assert "has a tokenizer of 257 tokens, and the model of" in line


def test_the_next_command_is_named(tmp_path, folder, toml, capsys):
    """The next command is printed to stderr, so that stdout stays JSON."""
    data, run, out = tmp_path / "data", tmp_path / "a run", tmp_path / "out"
    assert main(["prepare", str(toml()), "--texts", str(folder), "--data", str(data)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out.splitlines()[-1])["train_tokens"] > 100
    assert f"next: tidegate-train train {tmp_path / 'run.toml'} --data {data} --out RUN\n" in said.err
    assert main(["train", str(tmp_path / "run.toml"), "--data", str(data), "--out", str(run)]) == 0
    said = capsys.readouterr()
    assert f"next: tidegate-train export --run '{run}' --data {data} --out FOLDER\n" in said.err
    assert main(["export", "--run", str(run), "--data", str(data), "--out", str(out)]) == 0
    assert f"tidegate --model {out}" in capsys.readouterr().out
