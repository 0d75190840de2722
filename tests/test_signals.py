"""A stopped command saves, says how to resume, and exits as shells and schedulers expect."""

import os
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from tiny_run import before_update

from steadynorm.cli import main
from steadynorm.lab import demo
from steadynorm.lab.paper import pool
from steadynorm.lab.train import checkpoint
from steadynorm.signals import sigterm_as_interrupt

CODES = pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
TINY = shlex.split(
    "train gpt --steps 4 --batch 2 --task.model.layers 1 --task.model.width 16 --task.model.heads 2 "
    "--task.eval-tokens 1536 --no-bf16 --no-tensorboard"
)


@pytest.fixture(autouse=True)
def _interruptible() -> Iterator[None]:
    """Take SIGINT as Python does by default; a shell starts what runs in its background with SIGINT ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@CODES
def test_a_stopped_run_exits_with_its_signal_and_resumes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], number: int, code: int
):
    words = [*TINY, "--out", str(tmp_path / "run")]
    with before_update(lambda _: os.kill(os.getpid(), number), 1):
        assert main(words) == code
    said = capsys.readouterr()
    assert "stopped at step 2; run the same command to resume" in said.err
    assert "stopped at step 2" in said.out
    assert checkpoint.list_checkpoints(tmp_path / "run" / "checkpoints")
    assert main(words) == 0
    assert "resumed after step 2" in capsys.readouterr().err


def test_a_signal_in_the_last_step_stops_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    with before_update(lambda _: os.kill(os.getpid(), signal.SIGTERM), 3):
        assert main([*TINY, "--out", str(tmp_path / "run")]) == 0
    assert "finished at step 4" in capsys.readouterr().out


@CODES
@pytest.mark.parametrize(
    "words", [["demo"], ["paper", "run", "fig-nanogpt", "--quick", "--pool", "pool", "--jobs", "2"]]
)
def test_a_command_of_many_runs_stops_them_and_exits_with_its_signal(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    number: int,
    code: int,
):
    trained: list[subprocess.Popen[bytes]] = []

    def start(*_: object) -> subprocess.Popen[bytes]:
        trained.append(subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(600)"]))
        return trained[-1]

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(demo, "compare_systems", list)
    monkeypatch.setattr(pool, "_popen", start)
    monkeypatch.setattr(pool._Meter, "count_steps", lambda *_: os.kill(os.getpid(), number))
    assert main([*words, "--out", "out"]) == code
    last = capsys.readouterr().err.splitlines()[-1]
    assert last == "steadynorm: stopped with 2 of 2 runs to go; the same command resumes them"
    assert [process.returncode for process in trained] == [-signal.SIGTERM] * 2
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signals_are_left_to_others_outside_the_main_thread():
    entered: list[bool] = []

    def work() -> None:
        with sigterm_as_interrupt():
            entered.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert entered == [True]
