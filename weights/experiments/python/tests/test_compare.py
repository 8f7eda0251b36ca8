"""The comparison: only the mixer differs, each run is made once, and the report merges the runs."""

import dataclasses
import json
import random
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from common import decoder, story

from tidegate_experiments import compare
from tidegate_experiments.__main__ import main
from tidegate_experiments.compare import CompareConfig, CompareRun, block_loss
from tidegate_training import data, export
from tidegate_training.evaluate import stream_loss
from tidegate_training.model import parameters
from tidegate_training.train import Trainer

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
accumulate = 2
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
    model = dataclasses.replace(cfg.model, position_embedding="rope")
    return CompareRun(model, cfg.train, cfg.data, CompareConfig(valid="stories", window=8))


def test_only_the_mixer_differs(folder, tmp_path, run_config):
    cfg = base(run_config)
    sizes, shared, own_weights = {}, None, {}
    for mixer in compare.MIXERS:
        run = compare.configured(cfg, mixer, 1, 1)
        m = run.model
        softmax, stateful = mixer.startswith("softmax"), mixer.endswith("-stateful")
        drawn = next((n for n in (16, 256) if f"-d-{n}" in mixer), 8)
        assert m.features == (8 if m.feature_map == "elu" else 0 if softmax else 2 * drawn), mixer
        assert m.gate == ("-gate" in mixer or mixer == "hybrid"), mixer
        assert run.train.carry_state == stateful, mixer
        assert run.train.pool == (200 if mixer == "rfa-gate-pool" else 0), mixer
        assert m.position_embedding == ("none" if mixer == "rfa-gate-no-positions" else "rope"), mixer
        model = Trainer(run, folder, tmp_path / mixer, "cpu").model
        own = ("gate.weight", "gate.bias", "sigma", "far_bias")
        weights = {n: p.detach().clone() for n, p in model.named_parameters() if not n.endswith(own)}
        shared = shared or weights
        assert weights.keys() == shared.keys(), mixer
        assert all(torch.equal(p, shared[n]) and p.std() > 0 for n, p in weights.items() if "norm" not in n), mixer
        own_weights[mixer] = dict(model.state_dict())
        assert m.sliding_window == (run.train.segment if softmax else cfg.compare.window if mixer == "hybrid" else None), mixer
        lives = (1.0, 1024.0) if stateful else (cfg.train.half_life_min, cfg.train.half_life_max)
        assert (run.train.half_life_min, run.train.half_life_max) == lives, mixer
        sizes[mixer] = parameters(model)
    assert sizes["rfa-gate"] - sizes["rfa"] == 2 * 2 * 17 and sizes["rfa"] - sizes["softmax"] == 2 * 2 * 8
    assert sizes["hybrid"] - sizes["rfa-gate"] == 2 * 2
    same = lambda name, a, b: torch.equal(own_weights[a][at + name], own_weights[b][at + name])
    at = "model.layers.1.self_attn."
    assert same("gate.weight", "elu-gate", "rfa-gate") and same("random_matrices", "rfa", "hybrid")
    assert same("random_matrices", "favor", "favor-gate") and not same("random_matrices", "favor", "rfa-arccos")
    other = Trainer(compare.configured(cfg, "rfa", 2, 1), folder, tmp_path / "seed 2", "cpu").model.state_dict()
    assert not any(torch.equal(other[n], shared[n]) for n in shared if "norm" not in n)
    assert not torch.equal(other[at + "random_matrices"], own_weights["rfa"][at + "random_matrices"])


def test_a_mixer_does_not_depend_on_the_base_configuration(run_config):
    cfg = base(run_config)
    odd = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, feature_map="arc_cosine", gate=False),
                              train=dataclasses.replace(cfg.train, carry_state=True, pool=3))
    for mixer in compare.MIXERS:
        got, want = compare.configured(odd, mixer, 1, 1), compare.configured(cfg, mixer, 1, 1)
        assert got.model == want.model and got.train.carry_state == want.train.carry_state
        assert got.train.pool == (200 if mixer == "rfa-gate-pool" else 3 if got.model.proj_dim else 0)


def trainer(run_config, folder, out, mixer="rfa-gate-stateful", seed=1, resets=0.0, fixed_sigma=False):
    cfg = base(run_config)
    cfg = dataclasses.replace(cfg, compare=dataclasses.replace(cfg.compare, resets=resets))
    return compare.ComparedTrainer(compare.configured(cfg, mixer, seed, 1), folder, out, "cpu", fixed_sigma)


def test_each_seed_begins_elsewhere_in_the_text(folder, tmp_path, run_config):
    """If all seeds read the same tokens in the same order, the spread between them would be too small."""
    first = lambda mixer, seed: trainer(run_config, folder, tmp_path / f"{mixer} {seed}", mixer, seed).lanes.step(0)[0]
    one, two = first("rfa", 1), first("rfa", 2)
    assert not np.array_equal(one, two)
    assert np.array_equal(one, first("softmax", 1)) and np.array_equal(two, first("elu-gate-stateful", 2))
    made = trainer(run_config, folder, tmp_path / "all")
    assert np.array_equal(np.sort(made.lanes.stream), np.sort(made.stream))


@pytest.mark.parametrize("mixer", compare.STATEFUL)
def test_a_reset_lane_reads_as_if_its_text_began(folder, tmp_path, run_config, mixer):
    made = trainer(run_config, folder, tmp_path / "a", mixer, resets=0.5)
    lanes = made.cfg.train.lanes
    chosen = ((step, np.random.default_rng((1, step)).random(lanes) < 0.5) for step in range(100))
    made.step, gone = next((step, gone) for step, gone in chosen if gone.any() and not gone.all())
    ids = torch.randint(1, made.cfg.model.vocab_size, (lanes, 8))
    with torch.no_grad():
        _, made.state = made.model(ids, made.model.new_state(lanes))
        carried, _ = made.model(ids, made.state)
        fresh, _ = made.model(ids, made.model.new_state(lanes))
        made.reset_lanes()
        got, _ = made.model(ids, made.state)
    for lane in range(lanes):
        assert torch.allclose(got[lane], (fresh if gone[lane] else carried)[lane], atol=1e-6), (lane, gone)
    assert not torch.allclose(carried, fresh, atol=1e-3)
    # Training resets lanes before a step, and never if the probability is 0.
    calls = []
    made.reset_lanes = lambda: calls.append(made.step)
    made.train_step()
    assert calls == [made.step - 1]
    never = trainer(run_config, folder, tmp_path / "b", mixer)
    never.reset_lanes = lambda: calls.append("never")
    never.train_step()
    assert "never" not in calls


def test_a_fixed_sigma_stays_and_a_learned_one_moves(folder, tmp_path, run_config):
    def trained(mixer: str) -> list:
        made = trainer(run_config, folder, tmp_path / mixer, mixer, fixed_sigma=mixer in compare.FIXED_SIGMA)
        before = [layer.self_attn.q_proj.weight.clone() for layer in made.model.model.layers]
        made.train_step()
        made.train_step()
        assert all(not torch.equal(b, layer.self_attn.q_proj.weight) for b, layer in zip(before, made.model.model.layers))
        return [layer.self_attn.sigma for layer in made.model.model.layers]

    assert all((sigma == 1.0).all() for sigma in trained("rfa-gate-fixed-sigma"))
    assert all((sigma != 1.0).any() for sigma in trained("rfa-gate"))


@torch.no_grad()
def blocks_by_hand(model, folder, context: int) -> float:
    """Returns the bits per byte of the validation text, computed block by block."""
    stream, total = np.fromfile(folder / "valid_stories.bin", dtype=np.uint16).astype(np.int64), 0.0
    count = (stream.size - 1) // context
    for i in range(count):
        piece = stream[None, context * i : context * (i + 1) + 1]
        starts = piece[:, :-1] == data.EOT_ID
        place = data.positions(starts, np.zeros(1, dtype=np.int64))
        ids, starts, place = (torch.from_numpy(x) for x in (piece, starts, place))
        total += model(ids[:, :-1], model.new_state(1), starts, place, targets=ids[:, 1:])[0].item()
    size = json.loads((folder / "data.json").read_text())["valid"]["stories"]["bytes"]
    return total / np.log(2) / (size * context * count / (stream.size - 1))


def test_runs_are_made_once_and_merged(folder, tmp_path, toml, capsys):
    out = tmp_path / "out"
    path = compare.compare(toml, folder, out, ["softmax", "rfa-gate-stateful"], [1], 1, [])
    before = (out / "runs" / "softmax-1.json").stat().st_mtime_ns
    capsys.readouterr()
    compare.compare(toml, folder, out, ["softmax", "rfa-gate-stateful"], [2, 1], 1, [])
    printed = [line for line in capsys.readouterr().out.splitlines() if "seed" in line]
    assert printed == ["softmax, seed 2", "rfa-gate-stateful, seed 2"]
    assert (out / "runs" / "softmax-1.json").stat().st_mtime_ns == before
    found = json.loads(path.read_text())
    assert (path.name, found["experiment"]) == ("language-test.json", "language-test")
    assert found["settings"]["unit"] == "bits per byte" and found["settings"]["tokens"] == 4 * 64 * 2
    assert [row["mixer"] for row in found["rows"]] == ["softmax", "rfa-gate-stateful"]
    assert [row["judged"] for row in found["rows"]] == ["loss", "stream_loss"]
    for row in found["rows"]:
        assert [s["seed"] for s in row["seeds"]] == [1, 2] and row["seeds"][0]["loss"] != row["seeds"][1]["loss"]
        assert [step for step, _ in row["seeds"][0]["curve"]] == [2, 4]
        assert set(row["seeds"][0]) >= {"machine", "loss", "stream_loss"} and "settings" not in row and "command" not in row
        # The exported checkpoint is the model that was measured.
        model, tok = export.load_folder(out / "checkpoints" / f"{row['mixer']}-1")
        got = export.evaluate_folder(out / "checkpoints" / f"{row['mixer']}-1", folder / "valid.txt")
        assert got["bits_per_byte"] == pytest.approx(row["seeds"][0]["stream_loss"], rel=1e-5)
        assert row["seeds"][0]["loss"] == pytest.approx(blocks_by_hand(model, folder, 32), rel=1e-5)
        assert row["state_bytes"] == 4 * model.cfg.state_numbers
    assert not list((out / "work").iterdir())
    for change, table in (("train.lr=1e-2", "train"), ("train.clip=0.5", "train"), ("model.rope_theta=9.0", "model"),
                          ("model.proj_dim=4", "model"), ("compare.window=9", "hybrid_window"), ("compare.resets=0.1", "resets"), ("compare.eval_tokens=64", "evaluated")):
        with pytest.raises(ValueError, match=rf"other settings \(.*{table}"):
            compare.compare(toml, folder, out, ["softmax"], [3], 1, [change])
    compare.compare(toml, folder, out, ["softmax"], [1], 2, ["compare.seeds=[1]"])  # neither threads nor seeds are settings
    other = shutil.copytree(folder, tmp_path / "other")
    content = bytearray((other / "train.bin").read_bytes())
    content[40] ^= 1
    (other / "train.bin").write_bytes(content)
    with pytest.raises(ValueError, match=r"other settings \(data\)"):
        compare.compare(toml, other, out, ["softmax"], [1], 1, [])
    with pytest.raises(ValueError, match="unknown mixers.*known are softmax"):
        compare.compare(toml, folder, out, ["sotfmax"], [1], 1, [])


def test_a_killed_run_resumes(folder, tmp_path, toml):
    results = []
    for killed in (False, True):
        out = tmp_path / str(killed)
        if killed:
            (out / "runs").mkdir(parents=True)
            (out / "runs" / ".softmax-1.json.999999999").write_text("{")
            cfg = compare.configured(compare.load(toml), "hybrid", 1, 1)
            compare.ComparedTrainer(cfg, folder, out / "work" / "hybrid-1", "cpu").run(until=3)
        compare.compare(toml, folder, out, ["hybrid"], [1], 1, [])
        run = json.loads((out / "runs" / "hybrid-1.json").read_text())
        results.append({k: v for k, v in run.items() if k != "seconds"})
        assert [x.name for x in (out / "runs").iterdir()] == ["hybrid-1.json"]
    assert results[0] == results[1]


def test_partial_work_needs_the_same_settings_and_is_removed_after_its_run(folder, tmp_path, toml):
    out = tmp_path / "out"
    work = out / "work" / "rfa-1"
    cfg = compare.configured(compare.load(toml), "rfa", 1, 1)
    compare.ComparedTrainer(cfg, folder, work, "cpu").run(until=3)
    for change in ("train.steps=5", "train.beta2=0.9"):
        with pytest.raises(ValueError, match=rf"another {change.split('=')[0]}"):
            compare.compare(toml, folder, out, ["rfa"], [1], 1, [change])
    kept = shutil.copytree(work, tmp_path / "kept")
    compare.compare(toml, folder, out, ["rfa"], [1], 1, [])
    shutil.copytree(kept, work)
    compare.compare(toml, folder, out, ["rfa"], [1], 1, [])
    assert not work.exists()


def test_a_diverged_run_is_reported_and_the_others_run(folder, tmp_path, toml, monkeypatch, capsys):
    real = compare.ComparedTrainer.train_step
    def step(trainer):
        if trainer.cfg.model.feature_map == "elu" and trainer.step == 2:
            raise compare.Diverged(f"step 2: loss nan; see {trainer.out / 'state.pt'}")
        return real(trainer)

    monkeypatch.setattr(compare.ComparedTrainer, "train_step", step)
    out = tmp_path / "out"
    command = ["compare", str(toml), "--data", str(folder), "--out", str(out), "--only", "elu,rfa", "--seeds", "1", "--set", "train.lr=2e-3"]
    for _ in range(2):
        assert main(command) == 1
        assert "elu, seed 1 (step 2: loss nan" in capsys.readouterr().err
        found = json.loads((out / "language-test.json").read_text())
        assert [row["mixer"] for row in found["rows"]] == ["rfa"]
        (note,) = found["settings"]["diverged"]
        assert note.startswith("elu, seed 1: step 2") and str(tmp_path) not in json.dumps(found)
        assert found["command"] == (f"python -m tidegate_experiments compare test.toml --data {folder.name} --out out --only elu,rfa --seeds 1 "
                                    "--set train.lr=2e-3")


@pytest.mark.parametrize(("arguments", "says"), [
    (["--set", "train.lr=fast"], "--set train.lr=fast"), (["--set", "train.steps=1.5"], "train.steps: must be of type int, found 1.5"),
    (["--set", "model.gate=1"], "model.gate: must be of type bool"), (["--set", "compare.seeds=['a']"], "compare.seeds"),
    (["--only", "sotfmax"], "--only: unknown mixers"), (["--set", "compare.valid='x'"], "compare.valid"),
    (["--set", "compare.resets=1.0"], "compare.resets: must be at least 0 and below 1, found 1.0"),
    (["--set", "compare.unit='nats per character'"], "compare.unit: must be 'bits per byte' where tokens are not bytes"),
])
def test_errors_take_one_line(folder, tmp_path, toml, capsys, arguments, says):
    assert main(["compare", str(toml), "--data", str(folder), "--out", str(tmp_path / "out"), *arguments]) == 2
    printed = capsys.readouterr().err.splitlines()
    assert len(printed) == 1 and printed[0].startswith("tidegate_experiments: ") and says in printed[0]


def test_a_pool_is_not_judged(folder, tmp_path, toml):
    """The exported matrices are the ones that are measured, in the curve and at the end."""
    compare.compare(toml, folder, tmp_path / "out", ["rfa"], [1], 1, ["train.pool=3"])
    run = json.loads((tmp_path / "out" / "runs" / "rfa-1.json").read_text())
    model, _ = export.load_folder(tmp_path / "out" / "checkpoints" / "rfa-1")
    assert run["loss"] == pytest.approx(blocks_by_hand(model, folder, 32), rel=1e-5)
    stream = np.fromfile(folder / "valid_stories.bin", dtype=np.uint16)
    validation = compare.Validation(compare.configured(compare.load(toml), "rfa", 1, 1), folder)
    assert run["curve"][-1][1] == pytest.approx(validation.in_unit(validation.blocks(model, 128)), rel=1e-5)
    assert stream.size > 128


def test_nats_per_character_are_those_of_bytes(folder, tmp_path, toml):
    (tmp_path / "t.txt").write_text("\n".join(story(random.Random(i)) for i in range(40)))
    data.prepare([str(tmp_path / "t.txt")], [1], {}, 257, 1, tmp_path / "bytes", held_out=0.25)
    changes = ["compare.unit='nats per character'", "compare.valid='held_out'", "model.vocab_size=257"]
    compare.compare(toml, tmp_path / "bytes", tmp_path / "out", ["elu"], [1], 1, changes)
    run = json.loads((tmp_path / "out" / "runs" / "elu-1.json").read_text())
    size = json.loads((tmp_path / "bytes" / "data.json").read_text())["valid"]["held_out"]["bytes"]
    got = export.evaluate_folder(tmp_path / "out" / "checkpoints" / "elu-1", tmp_path / "bytes" / "held_out.txt")
    assert run["stream_loss"] == pytest.approx(got["nats"], rel=1e-5) and got["tokens"] == size + 1


def test_the_notes_say_what_differs(run_config):
    notes = compare.notes(base(run_config))
    assert "stream_loss" in notes["note_on_judging"] and "head_dim = 8" in notes["note_on_features"]
    assert notes["note_on_resets"].endswith("with probability 0.")
    assert "1 to 1024" in notes["note_on_half_lives"] and "8 to 64" in notes["note_on_half_lives"]


@torch.no_grad()
def test_blocks_are_independent_texts(folder):
    model = decoder(attention="hybrid", sliding_window=5)
    stream = np.fromfile(folder / "valid_stories.bin", dtype=np.uint16)
    got = block_loss(model, stream, 1000, 16, rows=3)
    total, count = 0.0, (stream.size - 1) // 16
    for i in range(count):
        piece = torch.from_numpy(stream[16 * i : 16 * i + 17].astype(np.int64))
        # A document mark inside a block empties the state too.
        cuts = sorted({0, 16} | {j for j in range(16) if piece[j] == data.EOT_ID})
        for a, b in zip(cuts, cuts[1:]):
            logits, _ = model(piece[None, a:b], model.new_state(1))
            total += F.cross_entropy(logits[0], piece[a + 1 : b + 1], reduction="sum").item()
    assert got.tokens == 16 * count
    assert got.nats == pytest.approx(total / (16 * count), rel=1e-5)
    assert got.bits_per_byte == pytest.approx(total / np.log(2) / (1000 * 16 * count / (stream.size - 1)), rel=1e-5)
    assert block_loss(model, stream, 1000, 16, limit=50).tokens == 48
    assert stream_loss(model, stream, 1000).nats != pytest.approx(got.nats, rel=1e-3)
