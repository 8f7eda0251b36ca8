"""Equal terms: what differs between mixers, runs that are made once, and the report that merges them."""

import dataclasses
import json
import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from conftest import TINY, decoder, story
from tokenizers import Tokenizer

from tidegate_training import compare, data, export
from tidegate_training.config import CompareConfig
from tidegate_training.evaluate import block_loss, stream_loss
from tidegate_training.model import Decoder
from tidegate_training.train import Trainer, parameters

TOML = """
[model]
vocab_size = 300
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
head_dim = 8
proj_dim = 8
output_norm = false
position_embedding = "rope"
[data]
train = ["train.txt"]
repeat = [1]
valid = { stories = "valid.txt" }
[train]
lanes = 2
segment = 32
steps = 4
warmup = 2
lr = 1e-3
chunk = 32
eval_every = 2
eval_tokens = 128
[compare]
experiment = "language-test"
unit = "bits per byte"
valid = "stories"
window = 8
"""


@pytest.fixture
def toml(tmp_path):
    (tmp_path / "test.toml").write_text(TOML)
    return tmp_path / "test.toml"


def base(run_config):
    cfg = run_config()
    return dataclasses.replace(cfg, compare=CompareConfig(valid="stories", window=8),
                               model=dataclasses.replace(cfg.model, position_embedding="rope"))


def test_only_the_mixer_differs(run_config):
    cfg = base(run_config)
    sizes, shared = {}, None
    for mixer in compare.MIXERS:
        run = compare.configured(cfg, mixer, 1, 1)
        m = run.model
        assert m.features == (8 if m.feature_map == "elu" else 0 if mixer == "softmax" else 16), mixer
        assert m.gate == (mixer.endswith(("gate", "stateful", "no-positions")) or mixer == "hybrid"), mixer
        assert run.train.carry_state == (mixer == "rfa-gate-stateful"), mixer
        assert m.position_embedding == ("none" if mixer == "rfa-gate-no-positions" else "rope"), mixer
        model = Decoder(m)
        own = ("gate.weight", "gate.bias", "sigma", "far_bias")
        weights = {n: p.shape for n, p in model.named_parameters() if not n.endswith(own)}
        shared = shared or weights
        assert weights == shared, mixer
        sizes[mixer] = parameters(model)
    assert sizes["rfa-gate"] - sizes["rfa"] == 2 * 2 * 17 and sizes["rfa"] - sizes["softmax"] == 2 * 2 * 8
    assert sizes["hybrid"] - sizes["rfa-gate"] == 2 * 2


def test_runs_are_made_once_and_merged(folder, tmp_path, toml, capsys):
    out = tmp_path / "out"
    path = compare.compare(toml, folder, out, ["softmax", "rfa-gate-stateful"], [1], 1, [])
    before = (out / "runs" / "softmax-1.json").stat().st_mtime_ns
    capsys.readouterr()
    compare.compare(toml, folder, out, ["softmax", "rfa-gate-stateful"], [2, 1], 1, [])
    said = [line for line in capsys.readouterr().out.splitlines() if "seed" in line]
    assert said == ["softmax, seed 2", "rfa-gate-stateful, seed 2"]
    assert (out / "runs" / "softmax-1.json").stat().st_mtime_ns == before
    found = json.loads(path.read_text())
    assert (path.name, found["experiment"]) == ("language-test.json", "language-test")
    assert found["settings"]["unit"] == "bits per byte" and found["settings"]["tokens"] == 4 * 64
    assert [row["mixer"] for row in found["rows"]] == ["softmax", "rfa-gate-stateful"]
    assert [row["judged"] for row in found["rows"]] == ["loss", "stream_loss"]
    for row in found["rows"]:
        assert [s["seed"] for s in row["seeds"]] == [1, 2] and row["seeds"][0]["loss"] != row["seeds"][1]["loss"]
        assert [step for step, _ in row["seeds"][0]["curve"]] == [2, 4]
        # What was exported is what was measured.
        model, tok = export.load_folder(out / "checkpoints" / f"{row['mixer']}-1")
        got = export.evaluate_folder(out / "checkpoints" / f"{row['mixer']}-1", folder / "valid.txt")
        assert got["bits_per_byte"] == pytest.approx(row["seeds"][0]["stream_loss"], rel=1e-5)
        assert row["state_bytes"] == 4 * model.cfg.state_numbers
    assert not list((out / "work").iterdir())
    with pytest.raises(ValueError, match="other settings"):
        compare.compare(toml, folder, out, ["softmax"], [1], 1, ["train.lr=1e-2"])
    with pytest.raises(ValueError, match="unknown mixers.*known are softmax"):
        compare.compare(toml, folder, out, ["sotfmax"], [1], 1, [])


def test_a_run_that_was_killed_goes_on(folder, tmp_path, toml):
    results = []
    for killed in (False, True):
        out = tmp_path / str(killed)
        if killed:
            cfg = compare.configured(compare.config.load(toml), "hybrid", 1, 1)
            compare.ComparedTrainer(cfg, folder, out / "work" / "hybrid-1", "cpu").run(until=3)
        compare.compare(toml, folder, out, ["hybrid"], [1], 1, [])
        run = json.loads((out / "runs" / "hybrid-1.json").read_text())
        results.append({k: v for k, v in run.items() if k != "seconds"})
    assert results[0] == results[1]


@torch.no_grad()
def test_blocks_are_texts_of_their_own(folder):
    model = decoder(attention="hybrid", sliding_window=5)
    stream = np.fromfile(folder / "valid_stories.bin", dtype=np.uint16)
    got = block_loss(model, stream, 1000, 16, rows=3)
    total, count = 0.0, (stream.size - 1) // 16
    for i in range(count):
        piece = torch.from_numpy(stream[16 * i : 16 * i + 17].astype(np.int64))
        # A mark inside a block empties the state too.
        cuts = sorted({0, 16} | {j for j in range(16) if piece[j] == data.EOT_ID})
        for a, b in zip(cuts, cuts[1:]):
            logits, _ = model(piece[None, a:b], model.new_state(1))
            total += F.cross_entropy(logits[0], piece[a + 1 : b + 1], reduction="sum").item()
    assert got.tokens == 16 * count
    assert got.nats == pytest.approx(total / (16 * count), rel=1e-5)
    assert got.bits_per_byte == pytest.approx(total / np.log(2) / (1000 * 16 * count / (stream.size - 1)), rel=1e-5)
    assert block_loss(model, stream, 1000, 16, limit=50).tokens == 48
    assert stream_loss(model, stream, 1000).nats != pytest.approx(got.nats, rel=1e-3)


def test_segments_without_a_carried_state_do_not_depend_on_it(folder, tmp_path, run_config):
    """Rows are read alone whatever the state holds; with the state carried they are not."""
    for carried in (False, True):
        trainer = Trainer(run_config(carry_state=carried, lanes=1), folder, tmp_path / str(carried), "cpu")
        for state in trainer.state:
            state.s.fill_(1.0)
            state.c.fill_(1.0)
        trainer.lanes.stream = trainer.lanes.stream.copy()
        trainer.lanes.stream[:40] = 7  # neither a document's start nor a lane's
        trainer.step = 1
        loss, _ = trainer.train_step()
        fresh = Trainer(run_config(carry_state=carried, lanes=1), folder, tmp_path / f"fresh {carried}", "cpu")
        fresh.lanes.stream, fresh.step = trainer.lanes.stream, 1
        assert (fresh.train_step()[0] == loss) == (not carried)


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
