"""Clocks that jump back or far ahead: training, records, locks and the time left do not depend on them."""

import datetime as real
import random
import re
import time
from pathlib import Path

import pytest
import torch
from brittle import config, recorded, texts, tokens
from injecting import files_in, injected
from tiny_run import before_update, last_weights

from steadynorm import progress, records
from steadynorm.files import lock, write_json
from steadynorm.lab.paper import pool
from steadynorm.lab.train import loop
from steadynorm.lab.train import progress_line as display
from steadynorm.records import recorder

YEAR = 365 * 86400.0


@pytest.fixture
def wall_clock_jumps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Make time.time and datetime.now jump anywhere between 1970 and 2400 at each call; the list says where to."""
    generator, seen = random.Random(0), []

    def now() -> float:
        if not seen:
            injected()  # one clock, however often it is asked
        seen.append(generator.uniform(0, 430 * YEAR))
        return seen[-1]

    class Jumping(real.datetime):
        @classmethod
        def now(cls, tz: real.tzinfo | None = None) -> "Jumping":
            return cls.fromtimestamp(now(), tz)

    monkeypatch.setattr(time, "time", now)
    monkeypatch.setattr(time, "time_ns", lambda: int(now() * 1e9))
    monkeypatch.setattr(recorder, "datetime", Jumping)
    return seen


def test_training_does_not_ask_the_wall_clock(
    tmp_path: Path, wall_clock_jumps: list[float], monkeypatch: pytest.MonkeyPatch
):
    data = tokens(texts(tmp_path), tmp_path / "shards").folder
    run, other = (config(data, tmp_path / name) for name in ("run", "other"))

    def die(_: loop.Trainer) -> None:
        raise KeyboardInterrupt

    with before_update(die, 7), pytest.raises(KeyboardInterrupt):
        loop.train(run, quiet=True)
    created = records.read(run.out).created
    assert loop.train(run, quiet=True).finished
    assert wall_clock_jumps
    monkeypatch.undo()
    assert loop.train(other, quiet=True).finished
    one, two = last_weights(run.out), last_weights(other.out)
    assert all(torch.equal(one[key], two[key]) for key in two)
    read = records.read(run.out)
    assert read.created == created  # of its beginning, whatever the clock says later
    seconds = read.columns["seconds"]
    assert (seconds[1:] >= seconds[:-1]).all()
    assert 0 < seconds[-1] < 600


def test_records_locks_and_files_survive_a_jumping_clock(tmp_path: Path, wall_clock_jumps: list[float]):
    with lock(tmp_path, busy="taken"):
        write_json(tmp_path / "a.json", {"a": 1})
    run = records.read(recorded(tmp_path / "run"))
    assert len(run.steps) == 20
    with records.Recorder(tmp_path / "new.jsonl", name="run", config={}) as out:
        out.write({"step": 1})
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\+00:00", records.read(tmp_path / "new.jsonl").created)
    assert "a.json" in files_in(tmp_path)


def said_by_display(steps: list[tuple[int, float]], monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return what a log says when the steps come at these times of the monotonic clock."""
    clock, said = [0.0], []
    monkeypatch.setattr(display.time, "monotonic", lambda: clock[0])
    shown = display.Display(1000, "run", quiet=False)
    monkeypatch.setattr(shown, "_live", False)
    monkeypatch.setattr(shown, "say", said.append)
    injected()
    for step, clock[0] in steps:
        shown.update(step, {"loss": 1.0}, {})
    shown.close()
    return said


def test_the_time_left_counts_from_the_first_step_seen(monkeypatch: pytest.MonkeyPatch):
    """In a resumed run 500 steps were done before and loading took 100 seconds; then a step takes one second."""
    said = said_by_display([(520, 100.0), (530, 110.0), (540, 120.0), (560, 140.0)], monkeypatch)
    assert said[0] == "run: step 520/1000  loss 1"
    assert said[1] == "run: step 530/1000  loss 1  about 8 minutes left"  # as soon as it is known
    assert said[2] == "run: step 560/1000  loss 1  about 7 minutes left"  # then a line every 15 seconds
    assert len(said) == 3


@pytest.mark.parametrize("jump", [-1e9, -50.0, 0.0, 1e9])
def test_a_clock_that_jumps_gives_no_senseless_time_left(monkeypatch: pytest.MonkeyPatch, jump: float):
    said = said_by_display([(20, 100.0), (40, 120.0), (60, 120.0 + jump), (1000, 140.0 + jump)], monkeypatch)
    assert said
    assert said[-1].startswith("run: step 1000/1000")
    for line in said:
        assert "nan" not in line
        assert "-" not in line


@pytest.mark.parametrize("jump", [-1e9, 0.0, 1e9])
def test_the_pools_meter_survives_a_jumping_clock(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], jump: float
):
    clock = [1000.0]
    monkeypatch.setattr(pool.time, "monotonic", lambda: clock[0])
    with pool._Meter(0, 2, 1000) as meter:
        meter.count_steps(0)
        clock[0] += jump
        injected()
        meter.count_steps(100)
        meter.count_ended("one", failed=False)
    said = capsys.readouterr().err
    assert "one finished; 1 of 2 runs, 10 % of steps" in said
    assert "-" not in said
    assert "nan" not in said


def test_the_progress_bar_survives_a_jumping_clock(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """rich takes the speed from a clock; one that goes backwards must not stop the work."""
    generator = random.Random(1)
    monkeypatch.setenv("FORCE_COLOR", "1")  # as on a terminal
    monkeypatch.setattr("rich.console.monotonic", lambda: generator.uniform(-1e12, 1e12))
    with progress.bar(100, "steps") as tell:
        injected()
        for _ in range(5):
            tell(20)
    assert "100/100" in capsys.readouterr().err
