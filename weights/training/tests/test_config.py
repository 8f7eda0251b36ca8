"""Tests of run files: unknown keys are refused, and overrides are TOML."""

from pathlib import Path

import pytest

from tidegate_training import config

SHIPPED = sorted((Path(__file__).parent.parent / "configs").glob("*.toml"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.name)
def test_the_shipped_runs_load(path):
    run = config.load(path)
    assert len(run.data.repeat) == len(run.data.train) and (run.data.valid or run.data.held_out)


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


@pytest.mark.parametrize(("changes", "message"), [
    ({"attention": "linear"}, "model.attention: must be one of rfa, softmax, hybrid, found 'linear'"),
    ({"feature_map": "relu"}, "model.feature_map: must be one of gaussian, arc_cosine, elu, favor"),
    ({"attention": "softmax"}, "model.sliding_window: must be 1 or more if attention is softmax, found None"),
    ({"attention": "hybrid", "sliding_window": 0}, "model.sliding_window: must be 1 or more"),
    ({"sliding_window": 8}, "model.sliding_window: must be absent if attention is rfa, found 8"),
    ({"attention": "hybrid", "sliding_window": 8, "feature_map": "favor"}, "model.feature_map: must be gaussian"),
    ({"proj_dim": 0}, "model.proj_dim: must be 1 to 4096"),
    ({"proj_dim": 4097}, "model.proj_dim: must be 1 to 4096"),
    ({"conv_kernel": 17}, "model.conv_kernel: must be 0 for none, or 2 to 16"),
    ({"position_embedding": "alibi"}, "model.position_embedding: must be none or rope"),
    ({"position_embedding": "rope", "head_dim": 7}, "model.head_dim: must be even for rope"),
    ({"conv_kernel": 1}, "model.conv_kernel: must be 0 for none, or 2 to 16"),
])
def test_an_impossible_model_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        config.ModelConfig(**changes)


def test_unused_settings_have_one_value():
    softmax = config.ModelConfig(attention="softmax", sliding_window=8)
    assert (softmax.gate, softmax.proj_dim, softmax.position_embedding, softmax.features) == (False, 0, "rope", 0)
    elu = config.ModelConfig(feature_map="elu", proj_dim=64, head_dim=32)
    assert (elu.gate, elu.proj_dim, elu.position_embedding, elu.features) == (True, 0, "none", 32)
    assert config.ModelConfig(attention="hybrid", sliding_window=8).position_embedding == "rope"
