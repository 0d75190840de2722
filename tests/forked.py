"""Run something in a forked child, which needs no second start of Python and no second import of torch."""

import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path

from steadynorm.cli import main


def start(action: Callable[[], object], log: Path) -> BaseProcess:
    """Start an action in a forked child whose output goes to `log`; its exit code is 1 if the action raises."""
    process = multiprocessing.get_context("fork").Process(target=_logged, args=(action, log))
    process.start()
    return process


class Command:
    """What the package uses of subprocess.Popen, for a `steadynorm` command in a forked child."""

    def __init__(self, words: Sequence[str], log: Path):
        self._process = start(lambda: sys.exit(main(words)), log)

    def poll(self) -> int | None:
        return self._process.exitcode

    def send_signal(self, number: int) -> None:
        assert self._process.pid is not None
        os.kill(self._process.pid, number)

    def wait(self) -> int | None:
        self._process.join()
        return self._process.exitcode


def _logged(action: Callable[[], object], log: Path) -> None:
    with log.open("w", encoding="utf-8", buffering=1) as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
        sys.stdout = sys.stderr = file
        warnings.simplefilter("default")  # as in a new process; under pytest they are errors
        action()
