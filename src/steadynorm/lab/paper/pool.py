"""Many training runs on a few processes: each is a command with a folder of its own, and one that fails stops no other."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple

from steadynorm import progress, records
from steadynorm.files import BusyError, lock, make_folder, read_json
from steadynorm.lab.paper.runs import recorded_part
from steadynorm.lab.train.config import Config, training_part
from steadynorm.lab.train.recipes import RECIPES, with_optimizer
from steadynorm.signals import sigterm_as_interrupt

LOG = "log.txt"
_POLL = 0.2  # seconds
_TOLD = 60.0  # seconds between lines without a terminal
_TAIL = 12  # lines of a failed run's log


class Job(NamedTuple):
    """A run and the command that trains it."""

    config: Config
    command: Sequence[str]

    @property
    def folder(self) -> Path:
        """The run's folder."""
        return self.config.out


def finished(config: Config) -> bool:
    """Return whether the run's folder holds this configuration, trained to its last step."""
    try:
        held = read_json(config.out / "config.json")
    except (OSError, ValueError):
        return False
    same = training_part(held) == recorded_part(config)
    return same and records.last_step(config.out / records.FILE) == config.steps


def train_all(jobs: Sequence[Job], count: int, *, one_thread: bool = True) -> dict[Path, str]:
    """Train what is not finished, `count` runs at a time, the longest first; return why some failed, by folder.

    A run that another command is training is left to it, and waited for at the end. Ctrl-C and SIGTERM stop the runs,
    which save; calling again resumes them.
    """
    todo = {job.folder: job for job in jobs if not finished(job.config)}
    longest_first = sorted(todo.values(), key=lambda job: -job.config.steps)
    waiting = {job.folder: run_one(job, one_thread) for job in longest_first}
    processes: dict[Path, subprocess.Popen[bytes]] = {}
    failed: dict[Path, str] = {}
    total = sum(job.config.steps for job in todo.values())
    with sigterm_as_interrupt(), _Meter(len(jobs) - len(todo), len(jobs), total) as meter:
        try:
            while waiting:
                for folder, task in list(waiting.items()):
                    if folder not in processes and len(processes) >= count:
                        continue
                    try:
                        process = next(task)
                    except StopIteration as end:
                        del waiting[folder]
                        processes.pop(folder, None)
                        if end.value is not None:
                            failed[folder] = end.value
                        meter.count_ended(folder.name, failed=folder in failed)
                    else:
                        if process is not None:
                            processes[folder] = process
                meter.tell_waiting(len(waiting) if not processes else 0)
                time.sleep(_POLL)
                meter.count_steps(
                    sum(min(job.config.steps, records.last_step(job.folder / records.FILE)) for job in todo.values())
                )
        except KeyboardInterrupt as stop:
            stop.args = (f"stopped with {len(waiting)} of {len(jobs)} runs to go; the same command resumes them",)
            raise
        finally:
            for process in processes.values():
                if process.poll() is None:
                    process.send_signal(signal.SIGTERM)  # the run saves and ends
            for task in waiting.values():
                task.close()
    return failed


def run_one(job: Job, one_thread: bool) -> Generator[subprocess.Popen[bytes] | None, None, str | None]:
    """Train one run in a process of its own and return why it failed, or None if it is finished.

    Each `next` polls it and yields the process, or None while another command is training this run.
    """
    while (claim := _claim(job.folder)) is None:
        yield None
    with claim:
        if finished(job.config):  # by another command in the meantime
            return None
        process = _popen(job, one_thread)
        try:
            while process.poll() is None:
                yield process
        except KeyboardInterrupt:
            process.send_signal(signal.SIGTERM)
            raise
        finally:
            code = process.wait()
        if code == 0 and finished(job.config):
            shutil.rmtree(job.folder / "checkpoints", ignore_errors=True)  # tens of megabytes that nobody needs
            return None
        lines = (job.folder / LOG).read_text(errors="replace", encoding="utf-8").strip().splitlines()[-_TAIL:]
        return "\n  ".join([f"exit code {code}; the end of {job.folder / LOG}:", *lines])


def _claim(folder: Path) -> ExitStack | None:
    """Claim the right to train in the folder, unless another command has it or a run is still under way there."""
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
    """Return the command run by this very Python, wherever `steadynorm` and `torchrun` may be.

    >>> executable(["steadynorm", "train"])[1:]
    ['-m', 'steadynorm.cli', 'train']
    """
    modules = {"steadynorm": "steadynorm.cli", "torchrun": "torch.distributed.run"}
    return [sys.executable, "-m", modules[command[0]], *command[1:]]


class _Meter:
    """Progress over all runs, weighted by steps: a bar on a terminal, a line now and then elsewhere."""

    def __init__(self, ended: int, runs: int, steps: int):
        self._ended, self._runs, self._steps, self._at, self._first = ended, runs, steps, 0, None
        self._began = self._told = time.monotonic()
        self._waiting = False
        self._bars = progress.bars(shown=steps > 0)
        self._task = self._bars.add_task(f"{ended} of {runs} runs", total=steps)

    def __enter__(self) -> "_Meter":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def count_steps(self, steps: int) -> None:
        self._first = steps if self._first is None else self._first  # steps of earlier commands say nothing about speed
        self._at = steps
        self._bars.update(self._task, completed=steps)
        if self._bars.disable and time.monotonic() - self._told > _TOLD:
            self._tell("")

    def count_ended(self, name: str, *, failed: bool) -> None:
        self._ended += 1
        self._bars.update(self._task, description=f"{self._ended} of {self._runs} runs")
        if self._bars.disable:
            self._tell(f"{name} {'FAILED' if failed else 'finished'}; ")
        elif failed:
            self._bars.console.print(f"{name} failed", markup=False, highlight=False)

    def tell_waiting(self, waiting: int) -> None:
        if waiting and not self._waiting:
            progress.print_to_stderr(f"waiting for {waiting} run(s) that another command is training")
        self._waiting = bool(waiting)

    def _tell(self, start: str) -> None:
        self._told = time.monotonic()
        gone, took = self._at - (self._first or 0), self._told - self._began
        left = took * (self._steps - self._at) / gone / 60 if gone > 0 and took > 0 else None
        time_left = "" if left is None else f", about {left:.0f} min left"
        share = 100 * self._at / max(self._steps, 1)
        progress.print_to_stderr(f"{start}{self._ended} of {self._runs} runs, {share:.0f} % of steps{time_left}")


# Commands


def train_command(config: Config, recipe: str, processes: int = 0) -> list[str]:
    """Return `steadynorm train RECIPE ...`, or the same command under torchrun if `processes` is given."""
    start = ["steadynorm"]
    if processes:
        start = ["torchrun", "--standalone", "--nproc-per-node", str(processes), "-m", "steadynorm.cli"]
    return [*start, "train", recipe, *options(config, recipe)]


def options(config: Config, recipe: str) -> list[str]:
    """Return the options with which the recipe becomes this configuration.

    >>> from dataclasses import replace
    >>> base = RECIPES["gpt"]
    >>> options(replace(base, steps=5, clip=1.0, bf16=False, optim=replace(base.optim, betas=(0.9, 0.95))), "gpt")
    ['--steps', '5', '--optim.betas', '0.9', '0.95', '--clip', '1.0', '--bf16', 'False']
    """
    start = with_optimizer(recipe, config.optim.name)
    named = [["--optim.name", config.optim.name]] if config.optim.name != RECIPES[recipe].optim.name else []
    return [word for option in (*named, *_differing(config, start, "")) for word in option]


def _differing(new: Any, old: Any, prefix: str) -> Iterator[list[str]]:
    if type(new) is not type(old):
        raise ValueError(
            f"{prefix.rstrip('.') or 'config'}: a {type(new).__name__} where the recipe has {type(old).__name__}"
        )
    for field in fields(new):
        value, default = getattr(new, field.name), getattr(old, field.name)
        name = prefix + field.name.replace("_", "-")
        if is_dataclass(value):
            yield from _differing(value, default, f"{name}.")
        elif value != default and field.type is bool:
            yield [f"--{name}" if value else f"--{prefix}no-{name.removeprefix(prefix)}"]
        elif value != default:
            values = value if isinstance(value, tuple) else (value,)
            yield [f"--{name}", *(str(word) if isinstance(word, str | Path) else repr(word) for word in values)]
