"""Checkpoint folders: what is written is read back, evaluated, and described."""

import dataclasses
import json
import math
import os
import shlex
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from common import decoder
from safetensors.torch import load_file

from tidegate_training import card, config, export, fixtures, sample
from tidegate_training.__main__ import arguments
from tidegate_training.data import EOT_ID, documents
from tidegate_training.model import parameters
from tidegate_training.train import Trainer

# The keys that `tidegate-model` accepts; it refuses any other.
KEYS = """model_type architectures vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads head_dim
hidden_act rms_norm_eps tie_word_embeddings attention feature_map gate proj_dim denominator_eps output_norm conv_kernel
position_embedding rope_theta bos_token_id eos_token_id torch_dtype""".split()


@pytest.mark.parametrize("changes", [
    {}, {"gate": False, "conv_kernel": 0}, {"tie_word_embeddings": False, "output_norm": False}, {"feature_map": "elu"},
    {"feature_map": "favor"}, {"attention": "softmax", "sliding_window": 9}, {"attention": "hybrid", "sliding_window": 9}])
@torch.no_grad()
def test_a_folder_is_read_back(folder, tmp_path, changes):
    model = decoder(**changes)
    export.write_folder(model, folder / "tokenizer.json", tmp_path, "f32")
    again, tok = export.load_folder(tmp_path)
    x = torch.randint(300, (2, 80))
    assert torch.equal(again(x, again.new_state(2))[0], model(x, model.new_state(2))[0])
    assert tok.encode("a").ids[0] == EOT_ID
    found = list(json.loads((tmp_path / "config.json").read_text()))
    if model.cfg.sliding_window is None:
        assert found == KEYS
    else:
        silent = ("feature_map", "gate", "proj_dim", "denominator_eps") if model.cfg.attention == "softmax" else ()
        assert sorted(found) == sorted({*KEYS, "sliding_window"} - {*silent})
    assert set(load_file(tmp_path / "model.safetensors")) == set(model.state_dict())


@pytest.mark.parametrize(("dtype", "torch_dtype"), [("bf16", torch.bfloat16), ("f16", torch.float16)])
def test_tensors_sensitive_to_rounding_stay_f32(folder, tmp_path, dtype, torch_dtype):
    export.write_folder(decoder(attention="hybrid", sliding_window=9), folder / "tokenizer.json", tmp_path, dtype)
    for name, x in load_file(tmp_path / "model.safetensors").items():
        assert x.dtype == (torch.float32 if name.endswith(("gate.bias", "sigma", "far_bias", "random_matrices")) else torch_dtype), name
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == str(torch_dtype).split(".")[1]


def test_the_written_tokenizer_settings_equal_the_shipped_ones(folder, tmp_path):
    shipped = Path(__file__).resolve().parents[2] / "checkpoints" / "tidegate-tiny"
    export.write_folder(decoder(), folder / "tokenizer.json", tmp_path, "f32")
    for name in ("tokenizer_config.json", "generation_config.json"):
        assert (shipped / name).read_bytes() == (tmp_path / name).read_bytes(), name


@torch.no_grad()
def test_evaluation_equals_that_of_separate_documents(folder, tmp_path):
    export.write_folder(decoder(), folder / "tokenizer.json", tmp_path, "f32")
    model, tok = export.load_folder(tmp_path)
    docs = documents(folder / "valid.txt")
    total = count = 0
    for doc in docs:
        ids = torch.tensor([tok.encode(doc).ids + [EOT_ID]])
        logits, _ = model(ids[:, :-1], model.new_state(1))
        total += F.cross_entropy(logits[0], ids[0, 1:], reduction="sum").item()
        count += ids.shape[1] - 1
    got = export.evaluate_folder(tmp_path, folder / "valid.txt")
    size = sum(len(d.encode()) for d in docs)
    assert (got["tokens"], got["bytes"]) == (count, size)
    assert got["nats"] == pytest.approx(total / count, rel=1e-5)
    assert got["bits_per_byte"] == pytest.approx(total / math.log(2) / size, rel=1e-5)
    assert got["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-4)
    assert export.evaluate_folder(tmp_path, folder / "valid.txt", limit=7)["tokens"] == 7


def test_a_text_without_a_word_is_refused(folder, tmp_path):
    export.write_folder(decoder(), folder / "tokenizer.json", tmp_path, "f32")
    (tmp_path / "empty.txt").write_text("\n<|endoftext|>\n")
    with pytest.raises(ValueError, match="holds no text"):
        export.evaluate_folder(tmp_path, tmp_path / "empty.txt")


def test_a_run_is_exported_with_its_card(folder, tmp_path, run_config):
    Trainer(run_config(), folder, tmp_path / "run", "cpu").run()
    about = card.About(("mit", "apache-2.0"), ("en",), "Tells stories.", prompts=("The fox", "A child"))
    written = export.export_run(tmp_path / "run", folder, tmp_path / "out", "bf16", "my-model", about)
    text = (tmp_path / "out" / "README.md").read_text()
    scores = json.loads((tmp_path / "run" / "log.jsonl").read_text().splitlines()[-1])["valid"]["stories"]
    assert text.startswith("---\nlicense:\n- mit\n- apache-2.0\nlanguage:\n- en\npipeline_tag:")
    assert "# my-model\n\nTells stories.\n\nA language model for Tidegate." in text
    assert "layers of random feature attention with a learned gate per head (Peng" in text
    assert f"{4 * run_config().model.state_numbers:,} bytes" in text
    assert f"{scores['bits_per_byte']:.4f}" in text and "512 tokens in 8 steps" in text
    assert all(f"Prompt: `{p}`" in text for p in about.prompts)
    assert ("tidegate-train export --run run --data data --out my-model --dtype bf16 --license mit --license apache-2.0 --language en "
            "--description 'Tells stories.' --prompt 'The fox' --prompt 'A child'\n") in text
    assert written.files == {path.name: path.stat().st_size for path in (tmp_path / "out").iterdir()}
    said, out = str(written), tmp_path / "out"
    assert f"{parameters(decoder()):,} parameters in bf16" in said and f"{written.files['model.safetensors']:,} bytes" in said
    assert f"tidegate --model {out}" in said
    assert sorted(os.listdir(tmp_path / "out")) == ["README.md", "config.json", "generation_config.json",
                                                     "model.safetensors", "tokenizer.json", "tokenizer_config.json"]


def test_the_card_claims_nothing_that_nobody_said(folder, tmp_path, run_config):
    """A card states no license, language or subject that the owner did not give."""
    cfg = run_config()
    cfg = dataclasses.replace(cfg, data=config.DataConfig(["novels/mine.txt", "/home/me/secret/b.txt"], [1, 2], held_out=0.1))
    text = card.write("m", cfg, 8, tmp_path / "log.jsonl", "f32", [("", "one")] * 3)
    assert text.startswith("---\npipeline_tag: text-generation\n")
    for claim in ("icen", "English", "stor", "public domain", "language:", "secret", "Prompt"):
        assert claim not in text, claim
    assert "Trained on `novels/mine.txt`, `b.txt` (2 copies); validated on the last 10.0% of each." in text
    assert "Without a prompt:" in text
    notes = tmp_path / "notes.md"
    notes.write_text("| a | table |\n")
    assert "\n| a | table |\n" in card.write("m", cfg, 8, tmp_path / "no.jsonl", "f32", [], card.About(data_notes=notes))
    for wrong in ({"license": ("MIT OR Apache-2.0",)}, {"language": ("en\n- x",)}):
        with pytest.raises(ValueError, match="must be one identifier"):
            card.About(**wrong)


def test_the_shipped_card_has_the_command_that_writes_its_front_matter():
    shipped = Path(__file__).resolve().parents[2] / "checkpoints" / "tidegate-tiny" / "README.md"
    text = shipped.read_text(encoding="utf-8")
    block = text.split("```sh\n")[-1].split("```")[0].replace("\\\n", " ")
    args = arguments().parse_args(shlex.split([line for line in block.splitlines() if " export " in line][-1])[1:])
    about = card.About(tuple(args.license), tuple(args.language), args.description)
    run = config.load(card.CONFIGS / "tidegate-tiny-books.toml")
    assert text.startswith(card.front_matter(run.model, about) + f"\n\n# tidegate-tiny\n\n")
    flat = lambda text: " ".join(text.split())
    assert flat(args.description) in flat(text)
    assert flat((card.CONFIGS.parent / args.data_notes).read_text(encoding="utf-8")) in flat(text)
    assert [f"Prompt: `{p}`" for p in args.prompt] == [line for line in text.splitlines() if line.startswith("Prompt: ")]


def test_an_export_overwrites_nothing_and_leaves_nothing_behind(folder, tmp_path, run_config):
    Trainer(run_config(), folder, tmp_path / "run", "cpu").run()
    out = tmp_path / "out"
    out.mkdir()
    (out / "README.md").write_text("mine")
    with pytest.raises(ValueError, match="exists and is not empty; .*--force"):
        export.export_run(tmp_path / "run", folder, out, "f32")
    assert (out / "README.md").read_text() == "mine" and os.listdir(out) == ["README.md"]
    with pytest.raises(FileNotFoundError, match="notes.md"):
        export.export_run(tmp_path / "run", folder, tmp_path / "new", "f32", about=card.About(data_notes=tmp_path / "notes.md"))
    assert sorted(os.listdir(tmp_path)) == ["out", "run"]
    export.export_run(tmp_path / "run", folder, out, "f32", force=True)
    assert "# out" in (out / "README.md").read_text() and (out / "model.safetensors").exists()


def test_the_card_names_the_command_with_its_overrides():
    path = sorted(card.CONFIGS.glob("*.toml"))[0]
    command = card.train_command(config.load(path, ["train.steps=7", 'train.optimizer="adamw"']))
    assert f"configs/{path.name}" in command and "--set 'train.steps=7'" in command


@pytest.mark.parametrize(("changes", "says", "silent"), [
    ({}, ["- rfa-gate\n- linear-attention\n", "The state is carried from segment to segment", "`tidegate-weights inspect`"], ["last"]),
    ({"gate": False, "feature_map": "elu"}, ["- elu\n- linear-attention\n", "There is no gate to forget with"], ["inspect`", "rfa"]),
    ({"attention": "softmax", "sliding_window": 9}, ["- sliding-window-attention\n", "sees the last 9 tokens."], ["linear", "inspect`"]),
    ({"attention": "hybrid", "sliding_window": 9}, ["- rfa-gate\n", "the last 9 tokens one by one"], ["zero state"]),
])
def test_the_card_describes_the_model(tmp_path, run_config, changes, says, silent):
    carry = changes.get("attention") != "softmax"
    cfg = run_config(carry_state=carry)
    cfg = dataclasses.replace(cfg, model=dataclasses.replace(cfg.model, **changes))
    text = card.write("m", cfg, 8, tmp_path / "log.jsonl", "f32", [("", "one")] * 3)
    head = text[: text.index("## Recipe")]
    assert all(x in text for x in says), [x for x in says if x not in text]
    assert not [x for x in silent if x in head.replace("hundred", "")]
    assert ("The state is zeroed before each segment" in text) == (not carry)


def test_samples_are_reproducible(folder, tmp_path):
    export.write_folder(decoder(), folder / "tokenizer.json", tmp_path, "f32")
    model, tok = export.load_folder(tmp_path)
    one = sample.generate(model, tok, "The fox", 20, seed=4)
    assert one.startswith("The fox") and one == sample.generate(model, tok, "The fox", 20, seed=4)
    assert one != sample.generate(model, tok, "The fox", 20, seed=5)


def test_a_token_is_drawn_after_the_penalty_and_from_the_likely_ones():
    logits = torch.tensor([3.0, 2.9, 0.0, -1.0])
    draw = lambda seen, **keys: {sample.choose(logits, seen, torch.Generator().manual_seed(seed), **keys) for seed in range(200)}
    assert draw([], temperature=1.0, min_p=0.0, repetition_penalty=1.0) == {0, 1, 2, 3}
    # exp(-3) is 0.0498.
    assert draw([], temperature=1.0, min_p=0.0497, repetition_penalty=1.0) == {0, 1, 2}
    assert draw([], temperature=1.0, min_p=0.0499, repetition_penalty=1.0) == {0, 1}
    # 3 becomes 1.5, and -1 becomes -2.
    assert draw([0, 0, 3], temperature=1.0, min_p=0.5, repetition_penalty=2.0) == {1}
    assert draw([0, 1, 3], temperature=1.0, min_p=0.23, repetition_penalty=2.0) == {0, 1}
    assert draw([0, 1, 2, 3], temperature=1.0, min_p=0.031, repetition_penalty=2.0) == {0, 1, 2}


def test_the_written_fixtures_equal_the_committed_ones(tmp_path):
    committed = Path(__file__).resolve().parents[3] / "model" / "tests" / "fixtures"
    fixtures.write_all(tmp_path)
    for name in fixtures.CASES:
        assert (committed / name / "config.json").read_text() == (tmp_path / name / "config.json").read_text()
        for file in ("model.safetensors", "golden.safetensors"):
            old, new = load_file(committed / name / file), load_file(tmp_path / name / file)
            assert old.keys() == new.keys()
            for key in old:
                torch.testing.assert_close(new[key], old[key], rtol=1e-4, atol=1e-4)


def test_the_written_evaluation_equals_the_committed_one(tmp_path):
    committed = Path(__file__).resolve().parents[2] / "tests" / "fixtures" / "tiny"
    fixtures.write_eval(tmp_path)
    for name in ("config.json", "marked.txt", "plain.txt", "tokenizer.json"):
        assert (committed / name).read_bytes() == (tmp_path / name).read_bytes(), name
    old, new = (json.loads((at / "golden.json").read_text()) for at in (committed, tmp_path))
    for name, cases in old.items():
        for want, got in zip(cases, new[name], strict=True):
            assert (got["limit"], got["tokens"], got["bytes"]) == (want["limit"], want["tokens"], want["bytes"])
            assert got["nats"] == pytest.approx(want["nats"], abs=1e-4)
