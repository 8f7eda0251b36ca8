"""The recipe's variants: what each changes, how long it trains, and that each run is made only once."""

import json
import random

import pytest
import torch
from common import story
from test_compare import TOML

from tidegate_experiments import recipe
from tidegate_experiments.__main__ import main
from tidegate_experiments.recipe_mixers import MIXERS, RecipeDecoder
from tidegate_training.config import ModelConfig
from tidegate_training.data import EOT

MODEL = ModelConfig(vocab_size=300, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2, head_dim=8,
                    proj_dim=8)
VARIANTS = """
[variants.as-shipped]
[variants.dear]
mixer = "output-gate"
cost = 2.0
[variants.small-vocabulary]
model = { vocab_size = 280 }
"""


@pytest.fixture
def toml(tmp_path):
    (tmp_path / "test.toml").write_text(TOML + VARIANTS)
    rng = random.Random(3)
    for name, count in (("train", 150), ("valid", 10)):
        (tmp_path / f"{name}.txt").write_text(f"\n{EOT}\n".join(story(rng) for _ in range(count)) + "\n")
    return tmp_path / "test.toml"


def model(mixer: str) -> RecipeDecoder:
    made = RecipeDecoder(MODEL, mixer)
    made.init_weights(8.0, 64.0, 1)
    return made


def logits(made: RecipeDecoder, ids: torch.Tensor, state) -> torch.Tensor:
    return made(ids, state, torch.zeros_like(ids, dtype=torch.bool))


@pytest.mark.parametrize("mixer", ["value-residual", "output-gate-per-head", "input-gate"])
def test_a_change_without_effect_is_none(mixer):
    ids = torch.randint(300, (2, 40), generator=torch.Generator().manual_seed(1))
    plain, changed = model("rfa"), model(mixer)
    for layer in list(changed.model.layers)[1:] if mixer == "value-residual" else ():
        torch.nn.init.zeros_(layer.self_attn.share)
    both = [logits(m, ids, m.new_state(2))[0] for m in (plain, changed)]
    torch.testing.assert_close(both[0], both[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mixer", MIXERS)
def test_a_text_in_two_parts_is_the_same_text(mixer):
    made, g = model(mixer), torch.Generator().manual_seed(2)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(0.1 * torch.randn(p.shape, generator=g))
    ids = torch.randint(300, (2, 40), generator=g)
    whole = logits(made, ids, made.new_state(2))[0]
    first, state = logits(made, ids[:, :23], made.new_state(2))
    last, _ = logits(made, ids[:, 23:], state)
    torch.testing.assert_close(torch.cat([first, last], 1), whole, rtol=1e-3, atol=1e-4)
    # The random parameters give the change an effect.
    plain = model("rfa")
    plain.load_state_dict(made.state_dict(), strict=False)
    assert (mixer == "rfa") == torch.allclose(logits(plain, ids, plain.new_state(2))[0], whole, rtol=1e-3, atol=1e-4)


def test_a_dear_variant_has_fewer_steps(toml):
    base = recipe.load(toml)
    assert [recipe.configured(base, name, 3).train.steps for name in base.variants] == [4, 2, 4]
    assert recipe.configured(base, "dear", 3).train.warmup == 1
    assert recipe.configured(base, "small-vocabulary", 3).model.vocab_size == 280


@pytest.mark.parametrize("table, found", [
    ('mixer = "other"', "variants.mixer: must be one of rfa, value-residual"),
    ("cost = 0", "variants.cost: must be above 0"),
    ("model = { width = 3 }", r"\[variants.wrong.model\]: unknown keys"),
    ('train = { decay = "step" }', "train.decay: must be one of"),
])
def test_wrong_variants_are_refused(toml, table, found):
    toml.write_text(f"{TOML}{VARIANTS}[variants.wrong]\n{table}\n")
    with pytest.raises(ValueError, match=found):
        recipe.load(toml)


def test_unknown_variants_are_refused(toml, capsys):
    assert main(["recipe", str(toml), "--data", "none", "--out", "none", "--only", "ema"]) == 2
    assert "--only: unknown variants ['ema']; known are as-shipped, dear" in capsys.readouterr().err


@pytest.mark.parametrize("mixer", MIXERS)
def test_every_tensor_of_a_mixer_learns(toml, tmp_path, mixer):
    toml.write_text(f'{TOML}{VARIANTS}[variants.tried]\nmixer = "{mixer}"\n')
    base = recipe.load(toml)
    recipe.prepare(base, tmp_path, tmp_path / "data")
    trainer = recipe.RecipeTrainer(recipe.configured(base, "tried", 1), base.variants["tried"], tmp_path / "data", tmp_path / "run")
    for _ in range(10):
        trainer.train_step()
    assert not trainer.silent


def test_runs_are_made_once_and_reported(toml, tmp_path):
    arguments = [str(toml), "--data", str(tmp_path / "data")]
    assert main(["prepare-recipe", *arguments, "--texts", str(tmp_path)]) == 0
    assert main(["recipe", *arguments, "--out", str(tmp_path / "out"), "--measure", "1", "--only", "as-shipped,dear"]) == 0
    assert main(["recipe", *arguments, "--out", str(tmp_path / "out"), "--seeds", "1"]) == 0
    report = json.loads((tmp_path / "out" / "language-test.json").read_text())
    assert report["command"].endswith("--out FOLDER --seeds 1 --only as-shipped,dear,small-vocabulary")
    assert [(row["variant"], row["steps"], row["changes"]) for row in report["rows"]] == [
        ("as-shipped", 4, {}), ("dear", 2, {"mixer": "output-gate"}),
        ("small-vocabulary", 4, {"model": {"vocab_size": 280}}),
    ]
    assert all(0 < row["seeds"][0]["loss"] < 20 for row in report["rows"])
    kept = tmp_path / "out" / "runs" / "as-shipped-1.json"
    before = kept.stat().st_mtime_ns
    assert main(["recipe", *arguments, "--out", str(tmp_path / "out"), "--seeds", "1"]) == 0
    assert kept.stat().st_mtime_ns == before
    # Other settings, or another variant of the same name, are refused before anything is computed.
    for change in (["--set", "train.lr=0.5"], ["--set", "variants.dear={cost=3.0}"]):
        assert main(["recipe", *arguments, "--out", str(tmp_path / "out"), "--seeds", "2", *change]) == 2
    assert len(list((tmp_path / "out" / "runs").glob("*.json"))) == 3
