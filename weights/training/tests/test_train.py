"""The training loop: it learns, resumes to the bit, and stops on a loss that is none."""

import json
from pathlib import Path

import pytest
import torch

from tidegate_training.train import Diverged, Trainer


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("changes", [
    {},
    {"optimizer": "muon", "pool": 6, "accumulate": 2},
    {"carry_state": False},
], ids=["adamw", "muon with a pool", "no carried state"])
def test_a_killed_run_resumes_with_the_same_losses(folder, tmp_path, run_config, changes):
    whole = run_config(save_every=3, **changes)
    scores = Trainer(whole, folder, tmp_path / "whole", "cpu").run()

    # The kill comes two steps after the last save, and those two are in the log already.
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
    a, b = (torch.load(tmp_path / n / "state.pt", weights_only=True)["model"] for n in ("whole", "killed"))
    assert all(torch.equal(a[k], b[k]) for k in a)


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


def test_another_model_in_the_folder_is_refused(folder, tmp_path, run_config):
    Trainer(run_config(), folder, tmp_path, "cpu").run(until=1)
    other = run_config()
    object.__setattr__(other, "model", type(other.model)(**{**vars(other.model), "gate": False}))
    with pytest.raises(ValueError, match="another model"):
        Trainer(other, folder, tmp_path, "cpu")
