"""Run files: what is unknown is refused, and overrides are TOML."""

from pathlib import Path

import pytest

from tidegate_training import config

SHIPPED = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_the_shipped_runs_load(path):
    run = config.load(path)
    assert len(run.data.repeat) == len(run.data.train) and run.data.valid


@pytest.mark.parametrize(("text", "name"), [
    ("[model]\nhiden_size = 3", "hiden_size"),
    ("[train]\nlearning_rate = 3", "learning_rate"),
    ("[data]\ntest = 3", "test"),
    ("[optim]\nlr = 3", "optim"),
])
def test_an_unknown_key_is_named(tmp_path, text, name):
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ValueError, match=name):
        config.load(tmp_path / "r.toml")


def test_overrides(tmp_path):
    (tmp_path / "r.toml").write_text("[train]\nlr = 1.0\nsteps = 3")
    run = config.load(tmp_path / "r.toml", ["train.lr=2e-3", 'train.optimizer="muon"', "model.gate=false"])
    assert (run.train.lr, run.train.steps, run.train.optimizer, run.model.gate) == (2e-3, 3, "muon", False)
    with pytest.raises(ValueError, match="lrr"):
        config.load(tmp_path / "r.toml", ["train.lrr=1"])
