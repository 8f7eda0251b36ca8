"""ListOps: the evaluator against Python's own, the guarantees of the generator, batches, and the experiment with its
report."""

import dataclasses
import json
import random
import re
import statistics
from pathlib import Path

import numpy as np
import pytest
import torch

from tidegate_experiments import classify, listops, sequences
from tidegate_experiments.__main__ import main
from tidegate_experiments.listops import ListOpsConfig, evaluate, from_text, to_text

value = lambda text: evaluate(from_text(text))[0]


@pytest.mark.parametrize("text, expected, depth", [
    ("7", 7, 0),
    ("[MAX 2 9 [MIN 4 7 ] 0 ]", 9, 2),
    ("[MIN 2 9 [MIN 4 7 ] 1 ]", 1, 2),
    ("[SM 9 9 9 ]", 7, 1),
    ("[SM 5 5 ]", 0, 1),
    ("[MED 9 1 2 ]", 2, 1),
    ("[MED 9 1 2 3 ]", 2, 1),
    ("[MED 1 2 8 9 ]", 5, 1),
    ("[SM [MED 5 [MAX 1 8 ] 6 ] [MIN [SM 4 4 4 ] 3 ] ]", 8, 3),
])
def test_values_worked_out_by_hand(text, expected, depth):
    assert evaluate(from_text(text)) == (expected, depth)
    assert to_text(from_text(text)) == text


@pytest.mark.parametrize("text", ["", "1 2", "[MAX 1 2", "[MAX 1 2 ] ]", "[MAX ]", "]", "[MAX 1 ] 3", "[MAX 1 [MIN ] ]"])
def test_invalid_expressions_are_refused(text):
    with pytest.raises(ValueError):
        value(text)


def test_unknown_words_and_tokens_are_refused():
    with pytest.raises(ValueError, match="AVG"):
        from_text("[AVG 1 2 ]")
    for token in (sequences.PAD, listops.BEGIN, 99):
        with pytest.raises(ValueError, match="not in the language"):
            evaluate([token])


def by_python(text: str) -> int:
    """Returns the value that Python's `eval` gives, with Python's minimum, maximum, sum and median."""
    source = re.sub(r"\[(\w+)", r"\1((", text).replace("]", ")),")
    source = re.sub(r"(\d)", r"\1,", source).removesuffix(",")
    operators = {"MIN": min, "MAX": max, "SM": lambda x: sum(x) % 10, "MED": lambda x: int(statistics.median(x))}
    return eval(source, {"__builtins__": {}}, operators)


def test_generated_expressions_have_the_value_that_python_gives():
    rng = random.Random(1)
    seen = set()
    for _ in range(300):
        tokens = listops.expression(rng, rng.choice([1, *range(4, 120)]), 6, 8)
        text = to_text(tokens)
        assert value(text) == by_python(text), text
        seen.add((text[:4], value(text)))
    assert len(seen) > 30


@pytest.mark.parametrize("depth, arguments", [(1, 10), (2, 5), (3, 5), (10, 10), (4, 7)])
def test_every_length_is_possible(depth, arguments):
    most = min(listops.longest(depth, arguments), 160)
    rng = random.Random(depth)
    for length in [1, *range(4, most + 1), most] * 2:
        tokens = listops.expression(rng, length, depth, arguments)
        assert len(tokens) == length
        _, found = evaluate(tokens)
        assert found <= depth
        # No operator has more arguments than allowed, or fewer than two.
        counts, stack = [], []
        for t in tokens:
            if t == listops.CLOSE:
                counts.append(stack.pop())
            if stack and t != listops.CLOSE:
                stack[-1] += 1
            if t in listops.OPERATORS:
                stack.append(0)
        assert all(2 <= n <= arguments for n in counts)


def test_the_longest_expression_of_a_depth():
    tokens = listops.expression(random.Random(1), listops.longest(3, 5), 3, 5)
    assert len(tokens) == 2 + 5 * (2 + 5 * (2 + 5)) and evaluate(tokens)[1] == 3
    with pytest.raises(ValueError, match="max_length <= 187"):
        ListOpsConfig(min_length=100, max_length=188, max_depth=3, max_arguments=5)
    with pytest.raises(ValueError, match="max_arguments"):
        ListOpsConfig(max_arguments=4)


def test_the_default_data_have_the_lengths_depths_and_classes_of_the_task():
    cfg = ListOpsConfig(train_sequences=60, test_sequences=40)
    train, test = cfg.generate("train"), cfg.generate("test")
    facts = listops.describe(train)
    assert facts["sequences"] == 60 and sum(facts["class"].values()) == 60 and len(facts["class"]) == 10
    assert 500 <= facts["length"]["least"] < 700 and 1800 < facts["length"]["most"] <= 2000
    assert max(int(d) for d in facts["depth"]) == 10
    # The data is reproducible, another seed gives other data, and the parts share nothing.
    same = cfg.generate("train")
    assert all(np.array_equal(a, b) for a, b in zip(train.tokens, same.tokens)) and (train.labels == same.labels).all()
    texts = lambda data: {t.tobytes() for t in data.tokens}
    assert not texts(train) & texts(dataclasses.replace(cfg, seed=2).generate("train"))
    assert not texts(train) & texts(test)
    assert [value(to_text(t.tolist())) for t in test.tokens] == test.labels.tolist()


def test_baselines_are_learned_from_the_training_part():
    make = lambda *texts: sequences.Sequences([np.array(from_text(t), dtype=np.uint8) for t in texts],
                                              np.array([value(t) for t in texts]), listops.BEGIN)
    train = make("[MAX 9 1 ]", "[MAX 9 2 ]", "[MAX 3 1 ]", "[MIN 0 1 ]", "[MIN 0 3 ]", "[SM 9 0 ]")
    test = make("[MAX 9 5 ]", "[MIN 9 0 ]", "[SM 1 1 ]", "[MED 4 5 6 ]")
    # In training, [MAX 9 .. was always 9; [MIN 9 0 ] has the value 0 over its digits, like the MINs of training.
    assert listops.baselines(train, test) == {"majority_class": 0.25, "first_operator": 0.5, "first_level": 0.5}
    train = make("[MAX 3 [MIN 9 9 ] ]", "[MAX 3 [MIN 9 8 ] ]", "[MAX 3 [MIN 9 8 ] ]", "[MAX 5 4 ]", "[MAX 5 1 ]", "[MAX [MIN 7 7 ] ]")
    test = make("[MAX 2 3 ]", "[MAX 1 3 [MIN 8 9 ] ]", "[MAX 5 0 ]", "[MAX [MIN 7 9 ] ]")
    assert listops.baselines(train, test)["first_level"] == 0.75
    assert listops.nearest(np.array(from_text("[SM 9 [MAX 8 [MIN 1 2 ] ] 4 ]"))) == (14, 3)
    assert listops.nearest(np.array(from_text("7"))) == (0, 7)


def test_batches_hold_sequences_of_nearly_one_length():
    data = ListOpsConfig(50, 400, train_sequences=203).generate("train")
    whole = sequences.batches(data, 10)
    assert sorted(i for b in whole for i in b) == list(range(203))
    first, second = (sequences.batches(data, 10, random.Random(seed)) for seed in (1, 2))
    assert [b.tolist() for b in first] != [b.tolist() for b in second]
    assert all(len(b) == 10 for b in first) and len({i for b in first for i in b}) == 200
    cells = sum(sequences.collate(data, b)[0].size for b in first)
    assert sum(len(data.tokens[i]) for b in first for i in b) / cells > 0.93
    ids, labels = sequences.collate(data, first[0])
    for row, i in enumerate(first[0]):
        n = len(data.tokens[i])
        assert ids[row, 0] == listops.BEGIN and not ids[row, n + 1 :].any()
        assert ids[row, 1 : n + 1].tolist() == data.tokens[i].tolist()
    assert labels.tolist() == data.labels[first[0]].tolist()


TINY = """
[model]
hidden_size = 16
intermediate_size = 24
num_hidden_layers = 2
num_attention_heads = 2
head_dim = 8
proj_dim = 8
landmarks = 4
pooling = "first"

[data]
min_length = 4
max_length = 12
max_depth = 2
train_sequences = 64
test_sequences = 24

[train]
mixers = ["softmax", "rfa"]
batch = 8
steps = 4
warmup = 1
"""


@pytest.fixture
def tiny(tmp_path):
    (tmp_path / "tiny.toml").write_text(TINY)
    return tmp_path / "tiny.toml"


def test_the_command_resumes_and_reports(tiny, tmp_path, capsys, monkeypatch):
    out = tmp_path / "out"
    base = ["listops", str(tiny), "--out", str(out)]
    assert main(base) == 0
    made = []
    real = classify.train_one
    watched = lambda exp, mixer, seed, *rest: made.append((mixer, seed)) or real(exp, mixer, seed, *rest)
    monkeypatch.setattr(classify, "train_one", watched)
    before = (out / "runs" / "rfa-1.json").read_bytes()
    (out / "runs" / "softmax-1.json").unlink()
    assert main(base + ["--only", "softmax,rfa,lara", "--seeds", "1,2"]) == 0
    assert made == [("softmax", 1), ("lara", 1), ("softmax", 2), ("rfa", 2), ("lara", 2)]
    assert (out / "runs" / "rfa-1.json").read_bytes() == before

    report = json.loads((out / "listops.json").read_text())
    assert set(report) == {"experiment", "command", "machine", "date", "settings", "rows"}
    assert report["experiment"] == "listops" and "--only softmax,rfa,lara" in report["command"]
    assert [r["mixer"] for r in report["rows"]] == ["softmax", "rfa", "lara"]
    assert report["rows"][1]["parameters"] == report["rows"][0]["parameters"] + 2 * 2 * 8  # sigma
    for row in report["rows"]:
        assert [s["seed"] for s in row["seeds"]] == [1, 2]
        for s in row["seeds"]:
            assert {"accuracy", "loss", "steps", "sequences_per_second"} <= set(s)
            assert 0 <= s["accuracy"] <= 1 and s["steps"] == 4
            assert s["standard_error"] == pytest.approx((s["accuracy"] * (1 - s["accuracy"]) / 24) ** 0.5, abs=1e-4)
    assert set(report["settings"]["baselines"]) == {"majority_class", "first_operator", "first_level"}
    assert sum(report["settings"]["test_distribution"]["class"].values()) == 24
    assert '"majority_class"' in capsys.readouterr().out and not list(out.rglob(".*"))

    assert {s["machine"] for s in report["rows"][0]["seeds"]} and str(tmp_path) not in json.dumps(report)
    first = "python -m tidegate_experiments listops tiny.toml --out out"  # the first call made only rfa with seed 1
    assert sorted(report["command"].split("; ")) == [first, first + " --only softmax,rfa,lara --seeds 1,2"]

    capsys.readouterr()
    for wrong, says in ((["--set", "train.lr=0.1"], "other settings"), (["--only", "sotfmax"], "--only: unknown mixers")):
        assert main(base + wrong) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert says in line


def test_a_diverged_run_does_not_stop_the_others(tiny, tmp_path, capsys, monkeypatch):
    real = classify.train_one
    def one(exp, mixer, *rest):
        if mixer == "softmax":
            raise classify.Diverged("softmax, seed 1, step 3: loss nan")
        return real(exp, mixer, *rest)

    monkeypatch.setattr(classify, "train_one", one)
    assert main(["listops", str(tiny), "--out", str(tmp_path / "out")]) == 1
    assert "softmax, seed 1, step 3" in capsys.readouterr().err
    report = json.loads((tmp_path / "out" / "listops.json").read_text())
    assert [row["mixer"] for row in report["rows"]] == ["rfa"]
    assert report["settings"]["diverged"] == ["softmax, seed 1, step 3: loss nan"]


def test_a_run_is_the_same_twice_and_mixers_see_the_same_batches(tiny, monkeypatch):
    exp = classify.load("listops", tiny, ["train.steps=12"])
    train, test = exp.data.generate("train"), exp.data.generate("test")
    real, seen = classify.batch_tensors, []
    monkeypatch.setattr(classify, "batch_tensors", lambda data, index, device: (
        data is train and seen.append(index.tolist()), real(data, index, device))[1])
    order = []
    for mixer, seed in (("rfa", 1), ("lara", 1), ("softmax", 1), ("rfa", 2)):
        a, b = (classify.train_one(exp, mixer, seed, train, test) for _ in range(2))
        assert a["curve"] == b["curve"] and a["accuracy"] == b["accuracy"]
        assert len(seen) == 24 and seen[:12] == seen[12:]
        order.append(seen[:12])
        seen.clear()
    assert order[0] == order[1] == order[2] != order[3]
    # Twelve batches of eight are more than the 64 sequences; the second pass has another order.
    assert sorted(i for batch in order[0][:8] for i in batch) == list(range(64))


def test_only_the_mixer_differs(tiny):
    exp, shared, made = classify.load("listops", tiny), None, {}
    for mixer in classify.MIXERS:
        model = classify.Encoder(classify.configured(exp, mixer))
        model.init_weights(5)
        made[mixer] = model.state_dict()
        weights = {n: p for n, p in model.named_parameters() if not n.endswith("sigma")}
        shared = shared or weights
        assert weights.keys() == shared.keys() and all(torch.equal(p, shared[n]) for n, p in weights.items()), mixer
    at = "layers.1.self_attn.mixer.random_matrices"
    assert made["rfa"][at].std() > 0.5 and not torch.equal(made["rfa"][at], made["rfa"][at.replace("1", "0")])
    model.init_weights(6)
    assert not torch.equal(model.embed_tokens.weight, made["rfa"]["embed_tokens.weight"])


@pytest.mark.parametrize("mixer", list(classify.MIXERS))
def test_every_mixer_learns_small_expressions(tiny, mixer):
    changes = ["train.steps=125", "train.batch=16", "train.lr=0.02", "data.max_length=6", "data.train_sequences=160"]
    exp = classify.load("listops", tiny, changes)
    train, test = exp.data.generate("train"), exp.data.generate("test")
    curve = classify.train_one(exp, mixer, 1, train, test)["curve"]
    assert curve[-1][1] < curve[0][1] - 0.1, curve


def test_the_shipped_configuration_has_the_lengths_and_depth_of_the_task():
    exp = classify.load("listops", Path(__file__).parent.parent / "configs" / "listops.toml")
    assert (exp.data.min_length, exp.data.max_length, exp.data.max_depth) == (500, 2000, 10)
    assert exp.train.mixers == ["softmax", "rfa", "lara"]
    assert exp.data.train_sequences >= exp.train.steps * exp.train.batch  # every sequence is seen at most once
    # Maps with one feature per random vector have as many features as the map with two.
    assert [classify.configured(exp, m).proj_dim for m in ("rfa", "favor", "rfa-arccos")] == [32, 64, 64]


def test_invalid_settings_are_refused(tiny):
    for change, match in (("train.mixers=['hybrid']", "train.mixers"), ("model.attention='rfa'", "train.mixers says"),
                          ("data.depth=3", "unknown keys"), ("train.precision='f16'", "precision"),
                          ("other.x=1", "unknown tables"), ("model.pooling='last'", "pooling")):
        with pytest.raises(ValueError, match=match):
            classify.load("listops", tiny, [change])


def test_a_nan_loss_stops_the_run(tiny):
    exp = classify.load("listops", tiny, ["train.lr=1e30"])
    train, test = exp.data.generate("train"), exp.data.generate("test")
    with pytest.raises(classify.Diverged, match="softmax, seed 1, step"), torch.random.fork_rng():
        classify.train_one(exp, "softmax", 1, train, test)
