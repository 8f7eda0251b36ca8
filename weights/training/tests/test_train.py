"""The training loop: it learns, resumes to the bit, and stops if the loss diverges or a tensor does not learn."""

import dataclasses
import hashlib
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tidegate_training import features, optim
from tidegate_training.__main__ import main
from tidegate_training.config import TrainConfig
from tidegate_training.export import export_run
from tidegate_training.processes import Processes
from tidegate_training.train import LEFT_OUT, WATCHED, Diverged, Trainer, Untrained


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("changes", [
    {},
    {"optimizer": "muon", "pool": 6, "accumulate": 2},
    {"carry_state": False, "ema": 0.9},
], ids=["adamw", "muon with a pool", "no carried state, with an average"])
def test_a_killed_run_resumes_with_the_same_losses(folder, tmp_path, run_config, changes):
    whole = run_config(save_every=3, **changes)
    scores = Trainer(whole, folder, tmp_path / "whole", "cpu").run()

    # The kill comes two steps after the last save, when those two steps are already in the log.
    killed = Trainer(whole, folder, tmp_path / "killed", "cpu")
    save = killed.save
    killed.save = lambda: save() if killed.step == 3 else None
    killed.run(until=5)
    del killed
    assert len(losses(tmp_path / "killed")) == 5

    again = Trainer(whole, folder, tmp_path / "killed", "cpu")
    assert again.step == 3
    assert again.run() == scores
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")
    for part in ("model", "average") if whole.train.ema else ("model",):
        a, b = (torch.load(tmp_path / n / "state.pt", weights_only=True)[part] for n in ("whole", "killed"))
        assert all(torch.equal(a[k], b[k]) for k in a)


def test_two_processes_resume_the_run_of_one_and_share_its_lanes(folder, tmp_path, run_config):
    cfg = run_config()
    file = tmp_path / "run.toml"
    tables = {name: {k: v for k, v in table.items() if v is not None} for name, table in dataclasses.asdict(cfg).items()}
    file.write_text("\n".join(f"[{name}]\n" + "\n".join(f"{k} = {json.dumps(v)}" for k, v in table.items() if k != "valid")
                              for name, table in tables.items()))

    def two(out: Path) -> None:
        run = subprocess.run([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m",
                              "tidegate_training", "train", str(file), "--data", str(folder), "--out", str(out)],
                             cwd=Path(__file__).parents[1], capture_output=True, text=True, timeout=300)
        assert run.returncode == 0, run.stderr[-4000:]

    Trainer(cfg, folder, tmp_path / "one", "cpu").run()
    Trainer(cfg, folder, tmp_path / "both", "cpu").run(until=4)
    two(tmp_path / "both")
    assert losses(tmp_path / "both") == pytest.approx(losses(tmp_path / "one"), rel=1e-4)
    a, b = (torch.load(tmp_path / name / "state.pt", weights_only=True) for name in ("one", "both"))
    assert a["step"] == b["step"] == 8
    for x, y in zip(a["state"], b["state"], strict=True):
        # The optimizer magnifies rounding differences, but the differences between lanes are far larger.
        torch.testing.assert_close(x, y, rtol=0.02, atol=0.02)
        assert (x[0][0] - x[0][1]).abs().max() > 0.1


def test_an_average_of_the_weights_is_evaluated_beside_them_and_exported(folder, tmp_path, run_config):
    cfg = run_config(ema=0.3)
    trainer = Trainer(cfg, folder, tmp_path / "run", "cpu")
    expected = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    step = trainer.train_step

    def averaging() -> tuple[float, float]:
        at, out = trainer.step, step()
        for name, x in trainer.model.state_dict().items():
            decay = min(0.3, (1 + at) / (10 + at))
            expected[name] = decay * expected[name] + (1 - decay) * x
        return out

    trainer.train_step = averaging
    scores = trainer.run()
    own = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    assert list(scores) == ["stories", "stories, averaged"] and scores["stories"] != scores["stories, averaged"]
    for name, x in expected.items():
        torch.testing.assert_close(trainer.average.weights[name], x, msg=name)
    assert trainer.evaluate() == scores
    assert all(torch.equal(own[name], x) for name, x in trainer.model.state_dict().items()), "evaluation leaves the weights alone"

    for averaged, weights in ((False, own), (True, trainer.average.weights)):
        out = tmp_path / f"out-{averaged}"
        export_run(tmp_path / "run", folder, out, "f32", averaged=averaged)
        assert all(torch.equal(x, weights[name]) for name, x in load_file(out / "model.safetensors").items())
        card = (out / "README.md").read_text()
        assert ("--dtype f32 --averaged" in card) == ("with a decay of 0.3 a step" in card) == averaged and "| stories, averaged |" in card
    Trainer(run_config(), folder, tmp_path / "without", "cpu").run()
    with pytest.raises(ValueError, match="--averaged: .* has no average of its weights; train with train.ema"):
        export_run(tmp_path / "without", folder, tmp_path / "none", "f32", averaged=True)
    with pytest.raises(ValueError, match="train.ema: must be at least 0 and below 1, found 1.0"):
        run_config(ema=1.0)


def test_lanes_that_processes_cannot_share_are_refused(monkeypatch):
    processes = Processes()
    monkeypatch.setattr(processes, "size", 2)
    with pytest.raises(ValueError, match="train.lanes: must be a multiple of the 2 processes, found 3"):
        processes.share(3)
    monkeypatch.setattr(processes, "rank", 1)
    assert processes.share(4) == slice(2, 4)


def test_rates_rise_in_a_line_and_fall_in_a_curve_or_a_line():
    cfg = TrainConfig(steps=110, warmup=10, min_lr_ratio=0.1)
    at = lambda step, decay: optim.schedule(step, cfg, decay)
    for decay in ("cosine", "linear"):
        assert [at(step, decay) for step in (0, 4, 10, 60, 110)] == pytest.approx([0.1, 0.5, 1.0, 0.55, 0.1])
    assert at(35, "linear") == pytest.approx(0.775) and at(35, "cosine") > 0.86
    with pytest.raises(ValueError, match="train.decay: must be one of cosine, linear, found 'step'"):
        dataclasses.replace(cfg, decay="step")


def test_a_bf16_run_evaluates_in_f32(folder, tmp_path, run_config):
    trainer = Trainer(run_config(precision="bf16", carry_state=True), folder, tmp_path / "run", "cpu")
    layers = trainer.model.model.layers
    trainer.train_step()
    assert all(layer.self_attn.products == torch.bfloat16 for layer in layers)
    trainer.evaluate()
    assert all(layer.self_attn.products is None for layer in layers)


def test_a_run_killed_before_its_first_save_starts_again(folder, tmp_path, run_config):
    cfg = run_config()
    Trainer(cfg, folder, tmp_path / "whole", "cpu").run()
    killed = Trainer(cfg, folder, tmp_path / "killed", "cpu")
    killed.save = lambda: None
    killed.run(until=3)
    (tmp_path / "killed" / "state.tmp").write_bytes(b"half a file")
    assert len(losses(tmp_path / "killed")) == 3
    again = Trainer(cfg, folder, tmp_path / "killed", "cpu")
    assert not (tmp_path / "killed" / "state.tmp").exists()
    again.run()
    assert losses(tmp_path / "killed") == losses(tmp_path / "whole")


@pytest.mark.parametrize(("changes", "refused"), [
    ({"lr": 2e-3}, "train.lr (0.001, now 0.002)"), ({"seed": 2, "clip": 0.5}, "train.seed (1, now 2), train.clip (1.0, now 0.5)"),
    ({"carry_state": False}, "train.carry_state"), ({"threads": 1}, None), ({"steps": 12}, None)])
def test_a_run_is_resumed_with_its_own_settings(folder, tmp_path, run_config, changes, refused):
    Trainer(run_config(), folder, tmp_path, "cpu").run(until=2)
    if refused is None:
        assert Trainer(run_config(**changes), folder, tmp_path, "cpu").step == 2
    else:
        with pytest.raises(ValueError, match=re.escape(refused)):
            Trainer(run_config(**changes), folder, tmp_path, "cpu")


def test_a_run_of_other_data_is_refused(folder, tmp_path, run_config):
    other = shutil.copytree(folder, tmp_path / "other")
    Trainer(run_config(), folder, tmp_path / "run", "cpu").run(until=2)
    Trainer(run_config(), other, tmp_path / "run", "cpu")
    with open(other / "train.bin", "ab") as file:
        file.write(b"\0\0")
    with pytest.raises(ValueError, match="other data"):
        Trainer(run_config(), other, tmp_path / "run", "cpu")
    # A run without a record of its data resumes.
    blob = torch.load(tmp_path / "run" / "state.pt", weights_only=True)
    del blob["data"]
    torch.save(blob, tmp_path / "run" / "state.pt")
    assert Trainer(run_config(), other, tmp_path / "run", "cpu").step == 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_it_learns(folder, tmp_path, run_config, optimizer):
    cfg = run_config(steps=40, lr=1e-2, lanes=4, optimizer=optimizer, eval_every=40)
    scores = Trainer(cfg, folder, tmp_path, "cpu").run()
    found = losses(tmp_path)
    assert sum(found[-5:]) / 5 < 0.7 * found[0]
    assert scores["stories"]["bits_per_byte"] > 0
    assert (tmp_path / "loss.png").stat().st_size > 1000
    assert not list(tmp_path.glob("*.tmp"))


def test_nan_stops_with_a_clear_message(folder, tmp_path, run_config):
    trainer = Trainer(run_config(), folder, tmp_path, "cpu")
    trainer.run(until=2)
    with torch.no_grad():
        trainer.model.model.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    before = (tmp_path / "state.pt").read_bytes()
    with pytest.raises(Diverged, match=r"step 2: loss nan.*state\.pt.*train\.lr"):
        trainer.run()
    assert (tmp_path / "state.pt").read_bytes() == before
    assert all(p.isfinite().all() for p in Trainer(run_config(), folder, tmp_path, "cpu").model.parameters())


def weights(trainer: Trainer) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_steps_whose_gradient_is_not_finite_are_left_out(folder, tmp_path, run_config, bad):
    trainer = Trainer(run_config(steps=40), folder, tmp_path, "cpu")
    trainer.run(until=2)
    spoilt = trainer.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * bad)
    before = weights(trainer)
    for _ in range(LEFT_OUT):
        loss, norm = trainer.train_step()
        assert math.isfinite(loss) and not math.isfinite(norm)
    assert trainer.step == 2 + LEFT_OUT
    assert all(torch.equal(p, before[name]) for name, p in trainer.model.named_parameters())
    # A resumed run has as few left to leave out.
    trainer.save()
    assert Trainer(run_config(steps=40), folder, tmp_path, "cpu").left_out == LEFT_OUT

    # The next step with a finite gradient is taken.
    spoilt.remove()
    trainer.train_step()
    after = weights(trainer)
    assert all(p.isfinite().all() for p in after.values())
    assert not torch.equal(after["model.embed_tokens.weight"], before["model.embed_tokens.weight"])

    trainer.model.model.layers[0].mlp.up_proj.weight.register_hook(lambda grad: grad * bad)
    with pytest.raises(Diverged, match=rf"step {3 + LEFT_OUT}: .*{LEFT_OUT + 1} steps left out"):
        trainer.train_step()
    assert all(torch.equal(p, after[name]) for name, p in trainer.model.named_parameters())


def test_a_tensor_without_a_gradient_stops_the_run(folder, tmp_path, run_config, monkeypatch):
    """The loss may fall although a tensor gets no gradient, as when compiled Gaussian features gave none to q, k and
    sigma."""
    whole = features.gaussian_features
    monkeypatch.setattr(features, "gaussian_features", lambda x, w: whole(x, w).detach())
    trainer = Trainer(run_config(steps=40), folder, tmp_path, "cpu")
    with pytest.raises(Untrained, match=rf"step {WATCHED - 1}: no gradient has reached .*layers\.1\.self_attn\.q_proj\.weight") as e:
        trainer.run()
    assert all(name in str(e.value) for name in ("layers.0.self_attn.k_proj.weight", "layers.0.self_attn.sigma", "train.compile"))
    assert "mlp" not in str(e.value) and len(losses(tmp_path)) == WATCHED - 1


def test_one_gradient_in_the_first_steps_is_enough(folder, tmp_path, run_config):
    trainer = Trainer(run_config(steps=40), folder, tmp_path / "zero", "cpu")
    trainer.model.model.norm.weight.register_hook(torch.zeros_like)
    trainer.run(until=WATCHED - 1)
    # A resumed run watches the same tensors.
    trainer.save()
    assert Trainer(run_config(steps=40), folder, tmp_path / "zero", "cpu").silent == {"model.norm.weight"}
    with pytest.raises(Untrained, match=r"no gradient has reached model\.norm\.weight;"):
        trainer.train_step()

    trainer = Trainer(run_config(steps=40), folder, tmp_path / "late", "cpu")
    zero = trainer.model.model.norm.weight.register_hook(torch.zeros_like)
    trainer.run(until=WATCHED - 1)
    zero.remove()
    trainer.run(until=WATCHED + 2)
    assert trainer.step == WATCHED + 2


def test_an_exploding_loss_stops(folder, tmp_path, run_config):
    trainer = Trainer(run_config(), folder, tmp_path, "cpu")
    trainer.run(until=1)
    with torch.no_grad():
        trainer.model.model.norm.weight.mul_(1e4)
    with pytest.raises(Diverged, match="step 1"):
        trainer.run()


def test_sigma_stays_below_its_bound(folder, tmp_path, run_config):
    trainer = Trainer(run_config(), folder, tmp_path, "cpu")
    with torch.no_grad():
        for layer in trainer.model.model.layers:
            layer.self_attn.sigma.fill_(5.0)
    trainer.train_step()
    assert all(layer.self_attn.sigma.max() <= 1.3 for layer in trainer.model.model.layers)


def test_sigma_of_the_arc_cosine_has_no_upper_bound(folder, tmp_path, run_config):
    cfg = run_config()
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, feature_map="arc_cosine"))
    trainer = Trainer(cfg, folder, tmp_path, "cpu")
    with torch.no_grad():
        for layer in trainer.model.model.layers:
            layer.self_attn.sigma[:, 0], layer.self_attn.sigma[:, 1] = 5.0, 0.001
    trainer.train_step()
    for layer in trainer.model.model.layers:
        assert layer.self_attn.sigma[:, 0].min() > 4.9 and abs(layer.self_attn.sigma[:, 1].max().item() - 0.05) < 1e-6


def test_another_model_in_the_folder_is_refused(folder, tmp_path, run_config):
    Trainer(run_config(), folder, tmp_path, "cpu").run(until=1)
    other = run_config()
    object.__setattr__(other, "model", type(other.model)(**{**vars(other.model), "gate": False}))
    with pytest.raises(ValueError, match="another model"):
        Trainer(other, folder, tmp_path, "cpu")


def test_a_run_starts_from_the_weights_of_a_folder(folder, tmp_path, run_config):
    Trainer(run_config(), folder, tmp_path / "first", "cpu").run(until=2)
    export_run(tmp_path / "first", folder, tmp_path / "model", "f32")
    written = load_file(tmp_path / "model/model.safetensors")

    second = Trainer(run_config(seed=2), folder, tmp_path / "second", "cpu", tmp_path / "model")
    assert all(torch.equal(tensor, written[name]) for name, tensor in second.model.state_dict().items())
    second.run(until=1)
    origin = json.loads((tmp_path / "second/run.json").read_text())["from"]
    assert origin == {"name": "model", "sha256": hashlib.sha256((tmp_path / "model/model.safetensors").read_bytes()).hexdigest()}

    # It resumes with its own weights, with or without the option, but not as a run that started elsewhere.
    saved = torch.load(tmp_path / "second/state.pt", weights_only=True)["model"]
    for start in (None, tmp_path / "model"):
        resumed = Trainer(run_config(seed=2), folder, tmp_path / "second", "cpu", start)
        assert resumed.started_from == origin
        assert all(torch.equal(tensor, saved[name]) for name, tensor in resumed.model.state_dict().items())
    export_run(tmp_path / "second", folder, tmp_path / "other", "f32")
    card = (tmp_path / "other/README.md").read_text()
    assert f"started from the weights of model (SHA-256 {origin['sha256']})" in card
    assert "--from model\ntidegate-train export" in card
    with pytest.raises(ValueError, match="started from other weights"):
        Trainer(run_config(seed=2), folder, tmp_path / "second", "cpu", tmp_path / "other")


def test_weights_of_another_model_or_vocabulary_are_refused(folder, tmp_path, run_config):
    Trainer(run_config(), folder, tmp_path / "first", "cpu").run(until=1)
    export_run(tmp_path / "first", folder, tmp_path / "model", "f32")
    other = run_config()
    object.__setattr__(other, "model", dataclasses.replace(other.model, conv_kernel=0))
    with pytest.raises(ValueError, match=re.escape("model.conv_kernel (4, now 0)")):
        Trainer(other, folder, tmp_path / "second", "cpu", tmp_path / "model")
    tokenizer = json.loads((tmp_path / "model/tokenizer.json").read_text())
    (tmp_path / "model/tokenizer.json").write_text(json.dumps(tokenizer))  # the same content, formatted differently
    with pytest.raises(ValueError, match="another tokenizer"):
        Trainer(run_config(), folder, tmp_path / "second", "cpu", tmp_path / "model")
    assert not (tmp_path / "second").exists()


def test_segments_without_a_carried_state_do_not_depend_on_it(folder, tmp_path, run_config):
    """Without a carried state, rows are read alone whatever the state holds; with one, they depend on it."""
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


def test_the_error_names_a_missing_file_or_invalid_toml(tmp_path, capsys):
    (tmp_path / "bad.toml").write_text("[model\n")
    for name in ("none.toml", "bad.toml"):
        assert main(["train", str(tmp_path / name), "--data", "d", "--out", "o"]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert name in line
