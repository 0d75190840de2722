"""kill -9 at any instant: the next start resumes, ends the same, and leaves nothing behind."""

import contextlib
import os
import random
import signal
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from brittle import assert_same_run, config, recorded
from injecting import Action, child, ended, files_in, injected, instants, killed_after, killed_at_line, lines_of, often

from steadynorm import records
from steadynorm.lab import origin
from steadynorm.lab.paper import runner, slim_records
from steadynorm.lab.paper.experiment import Context, Experiment, Outcome
from steadynorm.lab.paper.statistics import at_least, estimate
from steadynorm.lab.train import checkpoint, loop
from steadynorm.lab.train.config import Config
from steadynorm.report import content as report
from steadynorm.report.page import rendering

# Checkpoints


def save_all(folder: Path, last: int = 4) -> None:
    """Resume from the newest checkpoint and save every step up to the last, as a run does."""
    checkpoint.tidy(folder)
    saved = checkpoint.latest(folder)
    for step in range(1 if saved is None else saved[2]["step"] + 1, last + 1):
        generator = torch.Generator().manual_seed(step)
        model = {"w": torch.randn(64, 64, generator=generator)}
        checkpoint.save(folder, step, {"step": step, "momentum": model["w"] * 2}, model, keep=2)


def assert_right(saved: checkpoint.Saved) -> None:
    """Assert that weights and state belong to the same step."""
    path, model, state = saved
    assert model is not None
    step = checkpoint.step_of(path)
    expected = torch.randn(64, 64, generator=torch.Generator().manual_seed(step))
    assert state["step"] == step
    assert torch.equal(model["w"], expected)
    assert torch.equal(state["momentum"], 2 * expected)


@often
def test_saving_a_checkpoint_survives_a_kill_at_any_line(tmp_path: Path, times: int):
    save_all(tmp_path / "unbroken")
    last = lines_of(partial(save_all, tmp_path / "counted"))
    for number in instants(times, last, seed=1):
        folder = tmp_path / f"at{number}"
        killed_at_line(number, partial(save_all, folder))
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # none looks whole and is not
            saved = checkpoint.latest(folder)
        if saved is not None:
            assert_right(saved)
        save_all(folder)
        assert_right(checkpoint.load(folder / "step-000004"))
        assert not list(folder.glob(".*"))
        assert 2 <= len(checkpoint.list_checkpoints(folder)) <= 3  # a kill before the oldest went
        save_all(folder, 5)
        assert [path.name for path in checkpoint.list_checkpoints(folder)] == ["step-000004", "step-000005"]


@often
def test_saving_a_checkpoint_survives_a_kill_at_any_time(tmp_path: Path, times: int):
    """The clock decides, not the line, so a kill can also come in the middle of a write."""
    start = time.perf_counter()
    save_all(tmp_path / "unbroken")
    length, generator, folder = time.perf_counter() - start, random.Random(2), tmp_path / "run"
    newest = hits = 0
    while hits < times:
        if killed_after(generator.uniform(0, length), partial(save_all, folder, newest + 4)):
            hits += 1
        else:
            length *= 0.7  # the machine was busier when it was measured
        if (saved := checkpoint.latest(folder)) is not None:
            assert_right(saved)
            newest = saved[2]["step"]
    save_all(folder, newest + 4)
    assert len(list(folder.iterdir())) == 2


def test_a_kill_while_an_old_checkpoint_is_removed_leaves_none_that_looks_whole(tmp_path: Path):
    save_all(tmp_path, 2)

    def half(path: Path, **_: object) -> None:
        for file in sorted(path.iterdir())[:1] if path.exists() else []:
            file.unlink()
            os.kill(os.getpid(), signal.SIGKILL)

    def save() -> None:
        checkpoint.shutil.rmtree = half
        model = {"w": torch.randn(64, 64, generator=torch.Generator().manual_seed(3))}
        with contextlib.suppress(OSError):
            checkpoint.save(tmp_path, 3, {"step": 3, "momentum": model["w"] * 2}, model, keep=2)

    injected()
    assert ended(child(save)) == -signal.SIGKILL
    assert len(list(tmp_path.glob(".step-*.tmp"))) == 1
    for path in checkpoint.list_checkpoints(tmp_path):
        assert_right(checkpoint.load(path))


# TrainedExperiment


def left_of(made: Config) -> float:
    """Return the fraction of a run that is still to be trained."""
    saved = checkpoint.list_checkpoints(made.out / "checkpoints")
    return 1 - checkpoint.step_of(saved[-1]) / made.steps if saved else 1.0


def break_often(
    fresh: Callable[[int], Config], kill: Callable[[float, Action], bool], expected: Config, times: int
) -> int:
    """Kill runs, each up to three times, until `times` kills have hit; each run must end like the unbroken one.

    `kill` is given the part of a run to let pass: never more than there is left. Returned: how often there was a
    checkpoint to go on from, and something left to do.
    """
    generator, hits, halfway, number = random.Random(3), 0, 0, 0
    while hits < times:
        made, number = fresh(number), number + 1
        for _ in range(min(3, times - hits)):
            left = left_of(made)
            if left == 0:
                break
            hits += kill(generator.uniform(0.02, left), partial(loop.train, made, quiet=True))
            halfway += 0 < left_of(made) < 1
        assert loop.train(made, quiet=True).finished
        assert_same_run(made.out, expected.out)
    return halfway


@pytest.mark.parametrize("times", [6, pytest.param(60, marks=pytest.mark.slow)])
def test_training_survives_a_kill_at_any_line(tmp_path: Path, data: Path, unbroken: Config, times: int):
    last = lines_of(partial(loop.train, config(data, tmp_path / "counted"), quiet=True))
    halfway = break_often(
        lambda number: config(data, tmp_path / f"run{number}" / "run"),
        lambda part, action: killed_at_line(max(1, int(part * last)), action),
        unbroken,
        times,
    )
    assert halfway >= times / 4


@pytest.mark.parametrize("times", [4, pytest.param(40, marks=pytest.mark.slow)])
def test_training_survives_a_kill_at_any_time(tmp_path: Path, data: Path, unbroken: Config, times: int):
    start = time.perf_counter()
    assert loop.train(config(data, tmp_path / "timed"), quiet=True).finished
    length = time.perf_counter() - start

    def kill(part: float, action: Action) -> bool:
        nonlocal length
        if not (hit := killed_after(part * length, action)):
            length *= 0.7  # the machine was busier when it was measured
        return hit

    break_often(lambda number: config(data, tmp_path / f"run{number}" / "run"), kill, unbroken, times)


def test_records_are_on_disk_before_the_checkpoint_that_resumes_from_them(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch
):
    """A power cut loses what was not synced: a checkpoint ahead of its records would leave a permanent gap."""
    made, synced = config(data, tmp_path / "run", steps=6), []
    sync, save = os.fsync, checkpoint.save

    def noted(handle: int) -> None:
        if Path(f"/proc/self/fd/{handle}").readlink().name == records.FILE:
            synced.append(records.last_step(made.out / records.FILE))
        sync(handle)

    def saves(folder: Path, step: int, *rest: object, **options: object) -> Path:
        assert synced[-1] == step
        return save(folder, step, *rest, **options)  # pyright: ignore

    monkeypatch.setattr(os, "fsync", noted)
    monkeypatch.setattr(checkpoint, "save", saves)
    assert loop.train(made, quiet=True).finished
    assert synced == [3, 6]


def test_leftovers_of_a_kill_are_removed_when_a_finished_run_is_started_again(tmp_path: Path, data: Path):
    made = config(data, tmp_path / "run", steps=3)
    loop.train(made, quiet=True)
    left = made.out / "checkpoints" / ".step-000002.tmp"
    left.mkdir()
    (left / "state.pt").write_bytes(b"half")
    injected()
    assert loop.train(made, quiet=True).finished
    assert [path.name for path in left.parent.iterdir()] == ["step-000003"]


# Reports


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write pages without the 4 MB of plotly, which has nothing to do with kills."""
    monkeypatch.setattr(rendering, "_plotly", lambda: "")


@often
def test_reporting_survives_a_kill(tmp_path: Path, light: None, times: int):
    run = recorded(tmp_path / "run")
    (tmp_path / "out").mkdir()
    page = tmp_path / "out" / "report.html"
    report.report(run, page, title="old")
    old = page.read_bytes()
    last = lines_of(partial(report.report, run, tmp_path / "counted.html", title="new"))
    new = (tmp_path / "counted.html").read_bytes()
    for number in [*instants(times, last, seed=7), *range(max(last - 25, 1), last)]:  # the writing is at the end
        page.write_bytes(old)
        killed_at_line(number, partial(report.report, run, page, title="new"))
        assert page.read_bytes() in (old, new)
        report.report(run, page, title="new")
        assert files_in(page.parent) == {"report.html": new}


def experiment(context: Context) -> Outcome:
    return Outcome([], {"1 < 2": at_least(estimate([1.9, 2.0, 2.1]), 1.0, "2")}, {"seed": context.seed})


@often
def test_the_summary_and_page_of_an_experiment_survive_a_kill(
    tmp_path: Path, light: None, monkeypatch: pytest.MonkeyPatch, times: int
):
    monkeypatch.setattr(origin, "commit", lambda: None)
    tiny = Experiment("tiny", "Tiny", "nothing", experiment, {"desk": 1.0, "paper": 1.0})

    def carry(folder: Path) -> None:
        runner.run_experiment(tiny, Context(folder))

    last = lines_of(partial(carry, tmp_path / "unbroken"))
    expected = files_in(tmp_path / "unbroken")
    assert expected.keys() == {"summary.json", "report.html"}
    for number in instants(2 * times, last, seed=8):
        folder = tmp_path / f"at{number}"
        killed_at_line(number, partial(carry, folder))
        if (folder / "summary.json").exists():
            assert runner.check_folder(folder, "tiny")["numbers"] == {"seed": 0}
        carry(folder)
        assert files_in(folder) == expected


@often
def test_the_kept_records_of_an_experiment_survive_a_kill(tmp_path: Path, times: int):
    """Half of a run would pass for one that ended early, and its verdicts would rest on nothing."""
    run = records.read(recorded(tmp_path / "run", steps=30))
    slim_records.keep(run, tmp_path / "unbroken" / records.FILE, "slim", ["loss"])
    expected = files_in(tmp_path / "unbroken")
    path = tmp_path / "kept" / records.FILE
    last = lines_of(partial(slim_records.keep, run, tmp_path / "counted" / records.FILE, "slim", ["loss"]))
    for number in instants(times, last, seed=9):
        path.unlink(missing_ok=True)
        killed_at_line(number, partial(slim_records.keep, run, path, "slim", ["loss"]))
        if path.exists():
            assert records.read(path).steps[-1] == 30
        slim_records.keep(run, path, "slim", ["loss"])
        assert files_in(path.parent) == expected
