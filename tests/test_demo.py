"""A short demo from end to end, whose figures come from the records."""

import json
import shlex
import sys
from pathlib import Path
from typing import IO

import forked
import pytest

from steadynorm import records
from steadynorm.cli import main
from steadynorm.lab import demo, origin

TINY = shlex.split(
    "--task.model.layers 1 --task.model.width 16 --task.model.heads 2 --task.eval-tokens 1536 --save-every 10 --no-bf16"
)


def test_both_runs_are_trained_and_summarised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def start(command: list[str], stdout: IO[bytes], **_: object) -> forked.Command:
        assert command[:3] == [sys.executable, "-m", "steadynorm.cli"]
        return forked.Command(command[3:], Path(stdout.name))

    monkeypatch.setattr(demo.subprocess, "Popen", start)
    monkeypatch.setattr(origin, "commit", lambda: "abc")  # asked of git, by the Popen that is replaced here
    folders = demo.train(tmp_path, 20, TINY)
    assert [records.read(each).config["optim"]["name"] for each in folders] == ["scion", "scionc"]
    one, two = (demo.summarise(each) for each in folders)
    run = records.read(folders[0])
    assert one.norm[1] == pytest.approx(run.columns["weight_norm"][-1])
    output, everything = run.layers["embedding.weight"]["norm"][-1], run.columns["weight_norm"][-1]
    assert one.hidden[1] ** 2 == pytest.approx(everything**2 - output**2, rel=1e-5)
    assert (one.name, two.name) == ("scion", "scionc")
    assert two.excess_output < two.excess_hidden  # the output layer pushes outward from the first steps


def test_the_time_left_is_reported_once_when_both_runs_are_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Start-up does not count: 20 steps of each took the 10 seconds after both had begun, and 580 of each are left."""
    at, clock = {"scion": 0, "scionc": 0}, [0.0]
    progress = iter([("scion", 20, 100.0), ("scionc", 20, 100.0), ("scion", 40, 110.0), ("scionc", 40, 110.0)])

    class Training:
        returncode = None

        def poll(self):
            return self.returncode

    runs = [Training(), Training()]

    def sleep(_seconds):
        name, at_step, now = next(progress, ("scion", 600, 400.0))
        at[name], clock[0] = at_step, now
        if at_step == 600:
            runs[0].returncode = runs[1].returncode = 0

    monkeypatch.setattr(demo.records, "last_step", lambda path: at[path.parent.name])
    monkeypatch.setattr(demo.time, "sleep", sleep)
    monkeypatch.setattr(demo.time, "monotonic", lambda: clock[0])
    said: list[str] = []
    demo._watch(runs, [tmp_path / "scion", tmp_path / "scionc"], 600, said.append)  # type: ignore[arg-type]
    assert said == ["training Scion and ScionC: about 5 minutes"]


def test_a_run_that_fails_is_named_with_its_last_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    program = tmp_path / "python"
    program.write_text("#!/bin/sh\necho first\necho 5 does not divide 12\nexit 2\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(demo.sys, "executable", str(program))
    with pytest.raises(RuntimeError, match=r"scion.*training failed \(5 does not divide 12\); see .*log\.txt"):
        demo.train(tmp_path, 20)


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
