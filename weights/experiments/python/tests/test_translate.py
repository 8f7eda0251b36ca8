"""Sentence pairs and the translation experiment: tokens of both sides, batches, resuming, BLEU and the report."""

import json
import random
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from tidegate_experiments import __main__, pairs, translate
from tidegate_training import export
from tidegate_training.seq2seq import IGNORED

WORDS = {"the": "das", "red": "rote", "blue": "blaue", "child": "Kind", "house": "Haus", "sees": "sieht", "and": "und"}
TOML = """
[model]
vocab_size = 300
hidden_size = 16
intermediate_size = 24
encoder_layers = 1
num_hidden_layers = 1
num_attention_heads = 2
head_dim = 8
proj_dim = 8
max_source_positions = 40
position_embedding = "rope"
[data]
source = "a.en"
target = "a.de"
test_source = "b.en"
test_target = "b.de"
held_out = 10
max_target = 40
[train]
seeds = [1]
batch_tokens = 200
steps = 6
warmup = 2
eval_every = 3
save_every = 2
"""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Returns a folder with a configuration, and what `prepare` makes of 120 training pairs and 12 test pairs."""
    at = tmp_path_factory.mktemp("pairs")
    rng = random.Random(5)
    for name, count in (("a", 120), ("b", 12)):
        texts = [[rng.choice(list(WORDS)) for _ in range(rng.randint(1, 6))] for _ in range(count)]
        texts[3] = []  # a line may be empty
        (at / f"{name}.en").write_text("".join(" ".join(t) + " \n" for t in texts), encoding="utf-8")
        (at / f"{name}.de").write_text("".join(" ".join(WORDS[w] for w in t) + "\n" for t in texts), encoding="utf-8")
    (at / "run.toml").write_text(TOML)
    exp = translate.load(at / "run.toml")
    pairs.prepare(exp.data, at, exp.model.vocab_size, at / "data")
    return at, exp


def test_tokens_of_both_sides(made):
    at, exp = made
    data = at / "data"
    tok = Tokenizer.from_file(str(data / "tokenizer.json"))
    texts = pairs.lines(at / "a.en"), pairs.lines(at / "a.de")
    train, valid, test = (pairs.read(data, part) for part in pairs.PARTS)
    assert (len(train), len(valid), len(test)) == (110, 10, 12)
    assert all(tok.decode(x) == y for x, y in zip([*train.source, *valid.source], texts[0]))
    index = np.array([0, 1, 2, 3])
    source, mask = pairs.sources(train, index)
    target, labels = pairs.targets(train, index, start=7)
    for row, i in enumerate(index):
        # A source is the output of the server's tokenizer; a target begins with the start token and predicts its end.
        ids, own = tok.encode(texts[0][i]).ids, tok.encode(texts[1][i], add_special_tokens=False).ids
        assert ids[0] == 0 and source[row, : len(ids)].tolist() == ids and int(mask[row].sum()) == len(ids)
        assert target[row, : len(own) + 1].tolist() == [7, *own]
        assert labels[row].tolist() == [*own, 0] + [IGNORED] * (labels.shape[1] - len(own) - 1)
    assert pairs.sources(train, index[:1])[1] is None
    assert (data / "test_target.txt").read_text(encoding="utf-8").split("\n")[:-1] == pairs.lines(at / "b.de")


def test_files_that_do_not_pair_are_refused(made, tmp_path):
    (tmp_path / "a").write_text("one\ntwo\u2028still two\n", encoding="utf-8")
    (tmp_path / "b").write_text("eins\n", encoding="utf-8")
    assert len(pairs.lines(tmp_path / "a")) == 2
    with pytest.raises(ValueError, match="must have as many lines"):
        pairs.both(tmp_path / "a", tmp_path / "b")
    (tmp_path / "b").write_text("eins\nzwei <|endoftext|>\n", encoding="utf-8")
    with pytest.raises(ValueError, match="must not contain the mark"):
        pairs.both(tmp_path / "a", tmp_path / "b")
    with pytest.raises(ValueError, match="data.held_out: must be 1 or more, found 0"):
        pairs.PairsConfig(held_out=0)
    with pytest.raises(ValueError, match="data.held_out: must be below the pairs of a.en, 120"):
        pairs.prepare(translate.load(made[0] / "run.toml", ["data.held_out=120"]).data, made[0], 300, tmp_path)


def test_batches_hold_every_pair_once_and_little_padding(made):
    train = pairs.read(made[0] / "data", "train")
    plain = pairs.batches(train, 100)
    drawn = [pairs.batches(train, 100, np.random.default_rng(n)) for n in (1, 1, 2)]
    for found in (plain, *drawn):
        assert len(found) == len(plain) and sorted(np.concatenate(found)) == list(range(len(train)))
        assert all(len(b) * max(len(train.target[i]) + 1 for i in b) <= 100 for b in found)
    same = lambda a, b: all(np.array_equal(x, y) for x, y in zip(a, b))
    assert same(drawn[0], drawn[1]) and not same(drawn[0], drawn[2])


@pytest.mark.parametrize("mixer", list(translate.MIXERS))
def test_a_killed_run_resumes_with_the_same_results(made, tmp_path, mixer):
    at, exp = made
    run = lambda name: translate.Run(exp, mixer, 1, at / "data", tmp_path / name)
    whole = run("whole")
    whole.run()
    killed = run("killed")
    killed.run(until=4)
    killed.train_step()  # past its last save
    again = run("killed")
    assert again.step == 4
    again.run()
    assert again.curve == whole.curve
    a, b = whole.model.state_dict(), again.model.state_dict()
    assert all(torch.equal(a[key], b[key]) for key in a)
    with pytest.raises(ValueError, match="holds a run with other settings"):
        translate.Run(translate.load(at / "run.toml", ["train.lr=1e-3"]), mixer, 1, at / "data", tmp_path / "killed")


def test_it_learns_to_translate_word_by_word(made, tmp_path):
    at, _ = made
    exp = translate.load(at / "run.toml", ["train.steps=120", "train.dropout=0.0", "train.lr=1e-2", "train.eval_every=120"])
    run = translate.Run(exp, "rfa-gate", 1, at / "data", tmp_path)
    before = translate.mean_loss(run.model, run.valid, 200)
    run.run()
    assert run.curve[-1][1] < before / 2
    assert run.model.training  # measuring does not change the mode


@pytest.mark.parametrize(("mixer", "first", "bound", "features"), [
    ("rfa-gate", 1.0, 1.3, (16, 16)), ("rfa-gate-sigma-2.0", 1.0, 2.0, (16, 16)), ("rfa-gate-sigma-2.5-d-256", 1.0, 2.5, (512, 512)),
    ("rfa-gate-cross-512-conv", 2.0, 4.0, (16, 1024)), ("rfa-arccos-gate", 1.0, None, (16, 16))])
def test_a_mixer_says_how_sharp_attention_to_the_source_may_be(made, tmp_path, mixer, first, bound, features):
    at, exp = made
    run = translate.Run(exp, mixer, 1, at / "data", tmp_path)
    assert (run.cfg.features, run.cfg.of_cross_attention.features) == features
    (layer,) = run.model.model.layers
    assert layer.self_attn.sigma.unique().tolist() == [1.0]
    assert layer.cross_attn.sigma.unique().tolist() == pytest.approx([first])
    with torch.no_grad():
        for attention in (layer.self_attn, layer.cross_attn):
            attention.sigma.fill_(9.0)
    run.train_step()
    if bound is None:
        assert all(attention.sigma.min() > 8 for attention in (layer.self_attn, layer.cross_attn))
        return
    assert layer.cross_attn.sigma.unique().tolist() == pytest.approx([bound])
    assert layer.self_attn.sigma.unique().tolist() == pytest.approx([1.3])


def test_attention_to_the_source_changes_from_the_kernel_to_its_features(made, tmp_path):
    at, _ = made
    for steps, want in ((5, [True] * 3 + [False] * 2), (1, [False])):
        exp = translate.load(at / "run.toml", [f"train.steps={steps}"])
        run = translate.Run(exp, "rfa-gate-cross-512", 1, at / "data", tmp_path / str(steps))
        (layer,) = run.model.model.layers
        found = []
        for _ in range(steps):
            run.train_step()
            found.append(layer.cross_attn.exact)
        assert found == want


def test_bleu_of_the_reference_is_100():
    text = ["Ein Mann schläft auf einem Sofa.", "Zwei junge Männer sind im Freien."]
    score, signature = translate.bleu(text, text)
    assert score == pytest.approx(100.0) and "tok:13a" in signature and "version:" in signature
    assert translate.bleu(["Ein Hund läuft im Schnee .", "Zwei"], text)[0] < 20


def test_runs_are_made_once_and_merged(made, tmp_path, capsys):
    at, exp = made
    ask = lambda *more: __main__.main(["translate", str(at / "run.toml"), "--data", str(at / "data"), "--out", str(tmp_path), *more])
    assert ask("--only", "rfa-gate") == 0 and ask("--threads", "1") == 0
    report = json.loads((tmp_path / "translation.json").read_text())
    assert report["experiment"] == "translation" and re.fullmatch(r"\d{4}-\d\d-\d\d", report["date"])
    assert report["command"] == "python -m tidegate_experiments translate configs/run.toml --data DATA --out FOLDER"
    assert str(tmp_path) not in json.dumps(report) and str(at) not in json.dumps(report)
    assert [row["mixer"] for row in report["rows"]] == ["softmax", "rfa-gate"]
    for row in report["rows"]:
        (seed,) = row["seeds"]
        assert {"seed", "bleu", "loss", "valid_loss", "seconds", "curve", "machine", "decode_tokens_per_second"} <= set(seed)
        assert [step for step, _ in seed["curve"]] == [3, 6] and row["bleu_signature"].startswith("nrefs:1")
        model, tok = export.load_folder(tmp_path / "checkpoints" / f"{row['mixer']}-1")
        assert row["parameters"] == sum(p.numel() for p in model.parameters()) and row["state_bytes"] == 4 * model.cfg.state_numbers
        # The exported checkpoint gives the same translations as the model that was measured.
        text, _, _ = translate.translations(model, pairs.read(at / "data", "test"), tok, 40)
        assert text == (tmp_path / "hypotheses" / f"{row['mixer']}-1.txt").read_text(encoding="utf-8").split("\n")[:-1]
    assert not (tmp_path / "work").exists() or not list((tmp_path / "work").iterdir())
    capsys.readouterr()
    assert ask("--set", "train.lr=1e-3") == 2
    assert "was made with other settings (train)" in capsys.readouterr().err


@pytest.mark.parametrize(("override", "says"), [
    ("model.max_source_positions=3", "model.max_source_positions: must be at least the longest text's"),
    ("data.max_target=3", "data.max_target: must be at least the longest text's"),
    ("model.vocab_size=258", "model.vocab_size: must be at least the tokenizer's"),
    ("model.gate=false", "are each mixer's own"), ("train.dropout=1.0", "train.dropout: must be at least 0 and below 1"),
    ('train.mixers=["elu"]', "train.mixers: must be some of softmax, softmax-conv, rfa-gate"), ("train.steps=0", "train.steps: must be 1 or more"),
    ("model.encoder_layers=0", "model.encoder_layers: must be 1 to 1024")])
def test_errors_take_one_line(made, tmp_path, capsys, override, says):
    at, _ = made
    assert __main__.main(["translate", str(at / "run.toml"), "--data", str(at / "data"), "--out", str(tmp_path), "--set", override]) == 2
    err = capsys.readouterr().err
    assert says in err and err.count("\n") == 1


def test_the_shipped_configuration_loads():
    exp = translate.load(Path(__file__).parent.parent / "configs" / "translate-multi30k.toml")
    softmax, rfa = (exp.configured(mixer) for mixer in ("softmax", "rfa-gate"))
    assert softmax.sliding_window == exp.data.max_target and rfa.gate and rfa.features == 128
    conv = exp.configured("softmax-conv")
    assert (conv.sliding_window, conv.conv_kernel) == (exp.data.max_target, 4)
    pair = pairs.Pairs([[0, 5]], [[6, 7]])  # 6 tokens with their marks
    assert translate.filled(softmax, pair) == 4 * 4 * 4 * 2 * 32 * 6
    assert translate.filled(conv, pair) == translate.filled(softmax, pair) + 4 * 4 * 4 * 3 * 3 * 32
