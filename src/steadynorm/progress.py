"""How long something takes: a bar with the time left on a terminal; one line elsewhere, said when the work starts."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LONG = 10.0  # seconds; what takes longer says so
_ENOUGH = 4.0  # seconds of work that tell its pace

Say = Callable[[str], object]


def duration(seconds: float) -> str:
    """Return a time in words.

    >>> duration(71.3), duration(250), duration(20_000)
    ('71 seconds', '4 minutes', '6 hours')
    """
    for size, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 1.6 * size:
            return f"{seconds / size:.0f} {unit}"
    return f"{seconds:.0f} seconds"


def to_stderr(line: str) -> None:
    """Print a line where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


def announce(what: str, seconds: float, say: Say = to_stderr) -> None:
    """Say how long something will take, if that is long. Nothing is said of a time that is not known (nan).

    >>> announce("training", 250, print)
    training: about 4 minutes
    >>> announce("reading", 3, print)
    """
    if seconds > LONG:
        say(f"{what}: about {duration(seconds)}")


class Pace:
    """Announces once how long some work takes, when its first seconds have told; safe from several threads.

    The time before the first amount is not counted: processes start, and what is resumed was done before.
    """

    def __init__(self, total: int, label: str, say: Say):
        self._total, self._label, self._say = total, label, say
        self._done, self._lock = 0, threading.Lock()
        self._first: tuple[float, int] | None = None  # when, and how much was done by then
        self._known = False

    def __call__(self, amount: int) -> None:
        """Be told how much has just been done."""
        with self._lock:
            now, self._done = time.monotonic(), self._done + amount
            if self._first is None and self._done > 0:
                self._first = now, self._done
            if self._known or self._first is None:
                return
            seconds, seen = now - self._first[0], self._done - self._first[1]
            self._known = seconds >= _ENOUGH and seen > 0
        if self._known:
            announce(self._label, seconds * (self._total - self._first[1]) / seen, self._say)


def bars(*extra: Any, shown: bool = True, size: bool = False) -> Any:
    """rich's Progress on the terminal of stderr: label, bar, how much, times, and what else is given.

    size: amounts are bytes. Not shown, or where there is no terminal, it draws nothing.
    """
    from rich import progress
    from rich.console import Console

    console = Console(stderr=True)
    amount = (progress.DownloadColumn(), progress.TransferSpeedColumn()) if size else (progress.MofNCompleteColumn(),)
    label = progress.TextColumn("{task.description}", markup=False)
    times = (progress.TimeElapsedColumn(), progress.TimeRemainingColumn())
    disable = not (shown and console.is_terminal)
    return progress.Progress(label, progress.BarColumn(), *amount, *times, *extra, console=console, disable=disable)


@contextmanager
def bar(
    total: int, label: str, *, shown: bool = True, size: bool = False, say: Say | None = None
) -> Iterator[Callable[[int], object]]:
    """Give a function to be told how much has just been done; safe from several threads.

    say: who is told how long it takes, if that is long; by default stderr where no bar is drawn.

    >>> with bar(10, "steps") as tell:
    ...     tell(10)
    """
    with bars(shown=shown and total > 0, size=size) as progress:
        task = progress.add_task(label, total=total)
        silent = say is None and (not shown or not progress.disable)
        pace = Pace(total, label, (lambda line: None) if silent else say or to_stderr)

        def tell(done: int) -> None:
            progress.advance(task, done)
            pace(done)

        yield tell
