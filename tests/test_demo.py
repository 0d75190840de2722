"""A short demo from end to end, whose figures come from the records."""

import json
import shlex
from dataclasses import replace
from pathlib import Path

import forked
import numpy as np
import pytest

from steadynorm import records
from steadynorm.cli import main
from steadynorm.lab import demo
from steadynorm.lab.models import GPTConfig
from steadynorm.lab.paper import pool
from steadynorm.lab.train import loop

TINY = shlex.split(
    "--task.model.layers 1 --task.model.width 16 --task.model.heads 2 --task.eval-tokens 1536 --save-every 10 --no-bf16"
)


def test_both_runs_are_trained_and_summarised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pool, "_popen", lambda job, _: forked.Command(job.command[1:], job.folder / pool.LOG))
    model = GPTConfig(layers=1, width=16, heads=2, vocab=257, context=128)
    small = {"save_every": 10, "bf16": False, "tensorboard": False}
    folders = demo.train(
        [
            replace(config, task=replace(config.task, model=model, eval_tokens=1536), **small)
            for config in demo.configs(tmp_path, 20)
        ]
    )
    assert [records.read(each).config["optim"]["name"] for each in folders] == ["scion", "scionc"]
    one, two = (demo.summarise(each) for each in folders)
    run = records.read(folders[0])
    assert one.norm[1] == pytest.approx(run.columns["weight_norm"][-1])
    output, everything = run.layers["embedding.weight"]["norm"][-1], run.columns["weight_norm"][-1]
    assert one.hidden[1] ** 2 == pytest.approx(everything**2 - output**2, rel=1e-5)
    assert (one.name, two.name) == ("scion", "scionc")
    assert two.excess_output < two.excess_hidden  # the output layer pushes outward from the first steps


@pytest.mark.parametrize("steps", [3, 12])  # neither is a multiple of the steps between two measurements
def test_a_run_of_any_length_is_summarised(tmp_path: Path, steps: int):
    config = demo.configs(tmp_path, steps)[0]
    task = replace(config.task, model=GPTConfig(layers=1, width=16, heads=2, vocab=257, context=128), eval_tokens=1536)
    config = replace(config, task=task, batch=2, bf16=False, tensorboard=False)
    assert loop.train(config, quiet=True).finished
    summary = demo.summarise(config.out)
    assert np.isfinite(np.hstack(summary[1:])).all()
    assert summary.val_loss == records.read(config.out).columns["val_loss"][-1]


def test_a_run_that_fails_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first\necho 5 does not divide 12\nexit 2\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(pool.sys, "executable", str(program))
    with pytest.raises(
        RuntimeError, match=r"(?s)scion.*: training failed: exit code 2; .*log\.txt:.*5 does not divide 12"
    ):
        demo.train(demo.configs(tmp_path, 20))


def test_the_command_of_a_run_says_what_differs_from_the_recipe(tmp_path: Path):
    config = demo.configs(tmp_path, 1150)[0]
    words = pool.train_command(config, demo.RECIPE)
    out = shlex.quote(str(tmp_path / "scion"))
    expected = (
        f"--optim.name scion --task.eval-tokens 32768 --out {out} --eval-every 230 --monitor-every 5 --name scion"
    )
    assert words == ["steadynorm", "train", "gpt", *shlex.split(expected)]


def test_the_predictions_shown_first_agree_with_the_simulation():
    for each in demo.compare_systems(weight_decay=0.3):  # half-lives a third as long as the demo's
        assert each.exact == pytest.approx(each.simulated.mean, rel=0.03, abs=3 * each.simulated.error)


def test_the_command_line_trains(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    out = tmp_path / "run"
    arguments = ["train", "gpt", "--out", str(out), "--steps", "4", "--eval-every", "2", "--optim.name", "adamc", *TINY]
    assert main([*arguments, "--optim.lr", "0.001"]) == 0
    assert "finished at step 4; val_loss" in capsys.readouterr().out
    saved = json.loads((out / "config.json").read_text(encoding="utf-8"))
    assert (saved["optim"]["name"], saved["optim"]["lr"], saved["task"]["model"]["width"]) == ("adamc", 0.001, 16)
    assert list((out / "tensorboard").iterdir())
    assert main([*arguments, "--optim.lr", "0.002"]) == 2
    assert "choose another --out" in capsys.readouterr().err
    assert main(["report", str(out), "--out", str(tmp_path / "page.html")]) == 0


def test_the_data_commands_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "a.txt").write_text("To be, or not to be. " * 40, encoding="utf-8")
    given = f"{tmp_path / 'a.txt'} --out {tmp_path / 'shards'} --tokenizer bytes --workers 1 --validation-tokens 100"
    assert main(["data", "tokenize", *given.split()]) == 0
    assert "841 tokens of 1 documents" in capsys.readouterr().out
    assert main(["data", "get", "nothing"]) == 2
    assert "cifar10" in capsys.readouterr().err
