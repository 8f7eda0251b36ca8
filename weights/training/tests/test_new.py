"""Tests of `tidegate-train new`: a size that fits the text and the time, and a model from one command."""

import json
import random
from pathlib import Path

import pytest
from common import story

from tidegate_training import config, export, new
from tidegate_training.__main__ import main
from tidegate_training.config import DataConfig, RunConfig, TrainConfig
from tidegate_training.model import Decoder, parameters

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "sonnets.txt"


def plan(text_bytes: int, seconds: float, speed: float = 1e11) -> new.Plan:
    """Plans for a machine that computes `speed` parameters times tokens per second."""
    step = 4096
    return new.choose(4096, text_bytes, text_bytes // 4, step, seconds, lambda model: new.counted(model) * step / speed)


def test_more_time_and_more_text_give_a_larger_model():
    count = lambda *given: new.counted(plan(*given).model)
    by_time = [count(10**9, seconds) for seconds in (1, 600, 60_000, 6_000_000)]
    assert by_time == sorted(set(by_time))
    by_text = [count(size, 1e9) for size in (10**4, 3 * 10**6, 10**7, 10**9)]
    assert by_text == sorted(set(by_text))
    assert all(n <= size for n, size in zip(by_text[1:], (3 * 10**6, 10**7, 10**9)))


def test_the_steps_fit_the_time_and_end_after_a_few_passes():
    short, long = plan(10**9, 100), plan(10**6, 1e9)
    assert not short.passes and short.steps == int(100 / short.seconds_a_step)
    assert long.passes and long.steps == new.PASSES * (10**6 // 4) // 4096
    assert plan(10**9, 0).steps == new.MIN_STEPS


def test_parameters_are_counted_without_making_them():
    model = new.shaped(new.SHAPES[0], 300)
    assert new.counted(model) == parameters(Decoder(model))


def test_no_size_is_measured_that_the_text_cannot_fill():
    seen = []
    new.choose(512, 10**6, 10**6 // 3, 4096, 1e9, lambda model: seen.append(new.counted(model)) or 1e-3)
    assert len(seen) > 1 and all(n <= 10**6 for n in seen)


def test_batches_leave_enough_steps():
    assert new.batch_for(10**6, 1e9) == (16, 256)
    for stream, budget in ((60_000, 1e9), (20_000, 1e9), (6_000, 1e9), (10**9, 500_000), (10**9, 30_000)):
        lanes, segment = new.batch_for(stream, budget)
        assert (stream - 1) // (lanes * segment) >= new.STEPS_A_PASS and budget / (lanes * segment) >= new.STEPS
        assert lanes * segment < 16 * 256
    assert new.batch_for(300, 1e9) == new.batch_for(10**9, 100) == new.BATCHES[-1]


def test_the_written_configuration_is_the_run(tmp_path):
    run = RunConfig(new.shaped(new.SHAPES[1], 1234), TrainConfig(lanes=2, steps=7, lr=1e-5),
                    DataConfig(['a "quoted" näme.txt'], held_out=0.05))
    (tmp_path / "run.toml").write_text(new.toml(run), encoding="utf-8")
    assert config.load(tmp_path / "run.toml") == run


def test_one_command_makes_a_model(tmp_path, capsys):
    out = tmp_path / "my model"
    words = ["--minutes", "0.01", "--threads", "1", "--license", "cc0-1.0", "--prompt", "Shall I"]
    assert main(["new", str(EXAMPLE), "--out", str(out), *words]) == 0
    said = capsys.readouterr().out
    for part in ("1/4 prepare", "2/4 choose a size", "3/4 train", "4/4 export", f"serve it:  tidegate --model '{out}'"):
        assert part in said, part
    scores = export.evaluate_folder(out, EXAMPLE, limit=100)
    assert scores["tokens"] == 100
    card = (out / "README.md").read_text(encoding="utf-8")
    assert card.startswith("---\nlicense:\n- cc0-1.0\npipeline_tag") and str(tmp_path) not in card
    assert "tidegate-train new sonnets.txt --minutes 0.01 --out 'my model' --license cc0-1.0 --prompt 'Shall I'\n" in card
    # The run in the work folder can be continued and exported again by the other commands.
    work = tmp_path / "my model.run"
    steps = config.load(work / "config.toml").train.steps
    again = ["train", str(work / "config.toml"), "--data", str(work / "data"), "--out", str(work / "run")]
    assert main([*again, "--set", f"train.steps={steps + 1}"]) == 0
    assert json.loads((work / "run" / "log.jsonl").read_text().splitlines()[-1])["step"] == steps + 1
    capsys.readouterr()

    for missing, message in ((None, "exists and is not empty"), (out, "my model.run: exists; continue it by")):
        if missing:
            missing.rename(tmp_path / "moved")
        assert main(["new", str(EXAMPLE), "--out", str(out), *words]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert message in line
    # If a text cannot be prepared, nothing is replaced.
    (tmp_path / "short.txt").write_text("Too short.")
    before = {path: path.read_bytes() for path in work.rglob("*") if path.is_file()}
    assert main(["new", str(tmp_path / "short.txt"), "--out", str(out), *words, "--force"]) == 2
    assert {path: path.read_bytes() for path in work.rglob("*") if path.is_file()} == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["moved", "my model.run", "short.txt"]
    assert main(["new", str(EXAMPLE), "--out", str(out), *words, "--force"]) == 0


def test_a_folder_that_is_not_a_work_folder_is_never_deleted(tmp_path):
    (tmp_path / "m.run").mkdir()
    (tmp_path / "m.run" / "mine").write_text("mine")
    with pytest.raises(ValueError, match="m.run: exists; name another --out"):
        new.new(new.Request([EXAMPLE], 1.0, tmp_path / "m", force=True))
    assert (tmp_path / "m.run" / "mine").read_text() == "mine"


def test_a_text_too_short_leaves_nothing_behind(tmp_path, capsys):
    (tmp_path / "short.txt").write_text(story(random.Random(1))[:20])
    assert main(["new", str(tmp_path / "short.txt"), "--out", str(tmp_path / "m")]) == 2
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("tidegate-train")]
    assert "short" in line
    assert [path.name for path in tmp_path.iterdir()] == ["short.txt"]
