"""Many training runs on a few processes: each a command of its own in a folder of its own; one that fails stops no other."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from steadynorm import progress, records
from steadynorm.files import BusyError, lock, make_folder, read_json
from steadynorm.lab.train.config import Config, plain, training_part

LOG = "log.txt"
_POLL = 0.2  # seconds
_TOLD = 60.0  # seconds between lines where there is no terminal
_TAIL = 12  # lines of a failed run's log


class Job(NamedTuple):
    """A run and the command that trains it."""

    config: Config
    command: Sequence[str]

    @property
    def folder(self) -> Path:
        return self.config.out


@dataclass
class _Started:
    process: subprocess.Popen[bytes]
    claim: ExitStack


@dataclass
class _State:
    waiting: list[Job]
    running: dict[Path, tuple[Job, _Started]] = field(default_factory=dict)
    failed: dict[Path, str] = field(default_factory=dict)


def finished(config: Config) -> bool:
    """Whether the run's folder holds this configuration, trained to its last step."""
    try:
        held = read_json(config.out / "config.json")
    except (OSError, ValueError):
        return False
    same = training_part(held) == json.loads(json.dumps(training_part(plain(config))))
    return same and records.last_step(config.out / records.FILE) == config.steps


def train_all(jobs: Sequence[Job], count: int, *, one_thread: bool = True) -> dict[Path, str]:
    """Train what is not finished, `count` runs at a time, the longest first; why some failed, by folder.

    A run that another command is training is left to it, and waited for at the end. Ctrl-C and SIGTERM stop the runs,
    which save: the same call goes on.
    """
    todo = {job.folder: job for job in jobs if not finished(job.config)}
    state = _State(sorted(todo.values(), key=lambda job: -job.config.steps))
    total = sum(job.config.steps for job in todo.values())
    with _stopping(), _Meter(len(jobs) - len(todo), len(jobs), total) as meter:
        try:
            while state.waiting or state.running:
                _start(state, count, one_thread)
                meter.others(len(state.waiting) if not state.running else 0)
                time.sleep(_POLL)
                _collect(state, meter)
                meter.steps(sum(min(job.config.steps, _step(job)) for job in todo.values()))
        except KeyboardInterrupt:
            left = len(state.waiting) + len(state.running)
            raise KeyboardInterrupt(
                f"stopped with {left} of {len(jobs)} runs to go; the same command goes on"
            ) from None
        finally:
            _stop(state)
    return state.failed


def _step(job: Job) -> int:
    return records.last_step(job.folder / records.FILE)


def _start(state: _State, count: int, one_thread: bool) -> None:
    for job in list(state.waiting):
        if len(state.running) >= count:
            return
        claim = _claim(job.folder)
        if claim is None:
            continue
        state.waiting.remove(job)
        if finished(job.config):  # by another command, meanwhile
            claim.close()
            continue
        state.running[job.folder] = job, _Started(_popen(job, one_thread), claim)


def _claim(folder: Path) -> ExitStack | None:
    """This command's right to train in the folder, unless another has it or a run still goes on there."""
    make_folder(folder)
    with ExitStack() as held:
        try:
            held.enter_context(lock(folder, busy="claimed", name=".claim"))
            with lock(folder, busy="training"):
                pass
        except BusyError:
            return None
        return held.pop_all()


def _popen(job: Job, one_thread: bool) -> subprocess.Popen[bytes]:
    threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if one_thread else {}
    with (job.folder / LOG).open("wb") as log:  # a session of its own: Ctrl-C reaches it through us, once
        return subprocess.Popen(
            executable(job.command), stdout=log, stderr=log, env=os.environ | threads, start_new_session=True
        )


def executable(command: Sequence[str]) -> list[str]:
    """The command with this very Python, wherever `steadynorm` and `torchrun` may be.

    >>> executable(["steadynorm", "train"])[1:]
    ['-m', 'steadynorm.cli', 'train']
    """
    modules = {"steadynorm": "steadynorm.cli", "torchrun": "torch.distributed.run"}
    return [sys.executable, "-m", modules[command[0]], *command[1:]]


def _collect(state: _State, meter: "_Meter") -> None:
    """Take in the runs that have ended."""
    for folder, (job, started) in list(state.running.items()):
        code = started.process.poll()
        if code is None:
            continue
        del state.running[folder]
        if code == 0 and finished(job.config):
            shutil.rmtree(folder / "checkpoints", ignore_errors=True)  # tens of megabytes that nobody needs
        else:
            state.failed[folder] = _last_words(folder, code)
        started.claim.close()
        meter.ended(folder.name, folder not in state.failed)


def _last_words(folder: Path, code: int) -> str:
    lines = (folder / LOG).read_text(errors="replace", encoding="utf-8").strip().splitlines()[-_TAIL:]
    return f"exit code {code}; the end of {folder / LOG}:\n" + "\n".join(f"  {line}" for line in lines)


def _stop(state: _State) -> None:
    for _, started in state.running.values():
        if started.process.poll() is None:
            started.process.send_signal(signal.SIGTERM)  # saves and ends
    for _, started in state.running.values():
        started.process.wait()
        started.claim.close()


@contextmanager
def _stopping() -> Iterator[None]:
    """SIGTERM stops us as Ctrl-C does."""

    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    try:
        before = signal.signal(signal.SIGTERM, stop)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class _Meter:
    """Progress over all runs, weighed by steps: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, done: int, runs: int, steps: int):
        self._runs, self._count, self._steps, self._at, self._first = done, runs, steps, 0, None
        self._began = self._told = time.monotonic()
        self._waiting = False
        self._bars = progress.bars(shown=steps > 0)
        self._task = self._bars.add_task(f"{done} of {runs} runs", total=steps)

    def __enter__(self) -> "_Meter":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def steps(self, done: int) -> None:
        self._first = done if self._first is None else self._first  # what earlier commands did tells nothing of speed
        self._at = done
        self._bars.update(self._task, completed=done)
        if self._bars.disable and time.monotonic() - self._told > _TOLD:
            self._tell("")

    def ended(self, name: str, well: bool) -> None:
        self._runs += 1
        self._bars.update(self._task, description=f"{self._runs} of {self._count} runs")
        if self._bars.disable:
            self._tell(f"{name} {'finished' if well else 'FAILED'}; ")
        elif not well:
            self._bars.console.print(f"{name} failed", markup=False, highlight=False)

    def others(self, waiting: int) -> None:
        if waiting and not self._waiting:
            print(f"waiting for {waiting} run(s) that another command is training", file=sys.stderr, flush=True)
        self._waiting = bool(waiting)

    def _tell(self, start: str) -> None:
        self._told = time.monotonic()
        gone, took = self._at - (self._first or 0), self._told - self._began
        left = took * (self._steps - self._at) / gone / 60 if gone > 0 and took > 0 else None
        time_left = "" if left is None else f", about {left:.0f} min left"
        share = 100 * self._at / max(self._steps, 1)
        print(
            f"{start}{self._runs} of {self._count} runs, {share:.0f} % of steps{time_left}", file=sys.stderr, flush=True
        )


def failures(failed: Mapping[Path, str]) -> str:
    """What to show of runs that failed."""
    return "\n".join(f"{folder.name}: {why}" for folder, why in failed.items())
