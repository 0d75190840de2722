"""Long jobs say so when they start: once, on stderr, where no bar shows it."""

from pathlib import Path

import pytest

from steadynorm import progress, records
from steadynorm.cli import main
from steadynorm.lab import bench, paper
from steadynorm.lab.paper import pool, runner
from steadynorm.lab.paper.experiment import Context, TrainedExperiment


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


@pytest.fixture
def everything_is_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "LONG", -1.0)
    monkeypatch.setattr(progress, "_ENOUGH", 0.0)


def said_at(clock: list[float], total: int, *amounts: tuple[float, int]) -> list[str]:
    said: list[str] = []
    pace = progress._pace(total, "work", said.append)
    next(pace)
    for now, amount in amounts:
        clock[0] = now
        pace.send(amount)
    return said


def test_the_time_left_is_reported_once_after_four_seconds_of_work(clock: list[float]):
    assert said_at(clock, 1000, (0.0, 10), (3.9, 100), (4.0, 100), (6.0, 50)) == ["work: about 20 seconds"]


def test_work_done_in_an_earlier_run_does_not_count_towards_the_pace(clock: list[float]):
    """A run resumed at 900 after a minute of loading; then one takes a second."""
    assert said_at(clock, 1000, (60.0, 900), (70.0, 10)) == ["work: about 2 minutes"]


def test_a_short_job_is_not_announced(clock: list[float]):
    assert said_at(clock, 100, (0.0, 10), (2.0, 40), (4.0, 50)) == []


@pytest.mark.parametrize("jump", [-1e9, 0.0])
def test_a_clock_that_stands_still_or_jumps_back_says_nothing(clock: list[float], jump: float):
    assert said_at(clock, 100, (50.0, 10), (50.0 + jump, 40)) == []


def test_without_a_terminal_progress_goes_to_stderr_unless_silenced(
    everything_is_long: None, capsys: pytest.CaptureFixture[str]
):
    for shown in (True, False):
        with progress.bar(10, "work", shown=shown) as tell:
            tell(5)
            tell(5)
    captured = capsys.readouterr()
    assert captured.err.startswith("work: about ") and captured.err.count("\n") == 1
    assert captured.out == ""


def test_commands_that_may_take_long_say_so(
    everything_is_long: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    """`simulate` once ran silently for 71 seconds where there was no terminal."""
    for name in ("a", "b", "c"):
        (tmp_path / f"{name}.txt").write_text(name * 100, encoding="utf-8")
        with records.Recorder(tmp_path / name / records.FILE, name=name, config={}) as recorder:
            recorder.write({"step": 1, "loss": 1.0})
    runs, texts = ([str(tmp_path / f"{name}{end}") for name in "abc"] for end in ("", ".txt"))
    commands = {
        "simulating": ["simulate", "--shape", "8", "--half-lives", "1", "--alpha", "0.5", "1.0"],
        "following one gradient": ["simulate", "--shape", "8", "--half-lives", "1", "--alpha", "0.5", "1.0", "--response"],
        "reading runs": ["report", *runs, "--out", str(tmp_path / "page.html")],
        "tokenising": ["data", "tokenize", *texts, "--out", str(tmp_path / "out"), "--tokenizer", "bytes",
                       "--validation-tokens", "10", "--workers", "1"],
    }  # fmt: skip
    for label, words in commands.items():
        assert main(words) == 0
        assert f"{label}: about " in capsys.readouterr().err


def test_an_experiment_says_how_long_its_runs_take_before_it_starts_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt(capsys.readouterr().err)

    monkeypatch.setattr(pool, "train_all", stop)
    experiment = paper.get("fig-nanogpt")
    assert isinstance(experiment, TrainedExperiment)
    context, resources = Context(tmp_path / "out"), runner.Resources(tmp_path / "pool", jobs=2)
    runs, seconds = runner.estimate([experiment.plan(context)])
    with pytest.raises(KeyboardInterrupt) as stopped:
        runner.run_experiment(experiment, context, resources)
    assert str(stopped.value) == f"{runs} runs to train: about {progress.duration(seconds / 2)}\n"


def test_a_simulated_experiment_says_how_long_it_takes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    def stop(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "judge", stop)
    experiment = paper.get("fig-steady-state")
    with pytest.raises(KeyboardInterrupt):
        runner.run_experiment(experiment, Context(tmp_path / "out"))
    assert capsys.readouterr().err.startswith("fig-steady-state: about ")


def test_a_benchmark_says_how_long_its_rounds_take():
    times = iter([4.0, 1.0, *[4.0, 1.0] * 5])
    said: list[str] = []
    seconds = bench.interleaved({"a": int, "b": int}, 5, said.append, lambda action: next(times))
    assert seconds == {"a": 4.0, "b": 1.0}
    assert said == ["2 contenders, 5 rounds: about 25 seconds"]
