"""Show how long work takes: a bar with the time left on a terminal, one line at the start elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

LONG = 10.0  # seconds; longer work is announced
_ENOUGH = 4.0  # seconds of work after which its pace is known

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
    """Announce how long something will take, unless that is short or unknown (nan).

    >>> announce("training", 250, print)
    training: about 4 minutes
    >>> announce("reading", 3, print)
    """
    if seconds > LONG:
        say(f"{what}: about {duration(seconds)}")


class Pace:
    """Announce once how long some work takes, after its first seconds; thread-safe.

    Time before the first amount does not count: processes start, and resumed work was done before.
    """

    def __init__(self, total: int, label: str, say: Say):
        self._total, self._label, self._say = total, label, say
        self._done, self._lock = 0, threading.Lock()
        self._first: tuple[float, int] | None = None  # time of the first amount, and the amount
        self._announced = False

    def __call__(self, amount: int) -> None:
        """Add an amount of work that has just been done."""
        with self._lock:
            now, self._done = time.monotonic(), self._done + amount
            if self._first is None and self._done > 0:
                self._first = now, self._done
            if self._announced or self._first is None:
                return
            seconds, amount_since = now - self._first[0], self._done - self._first[1]
            self._announced = seconds >= _ENOUGH and amount_since > 0
        if self._announced:
            announce(self._label, seconds * (self._total - self._first[1]) / amount_since, self._say)


def bars(*extra: Any, shown: bool = True, size: bool = False) -> Any:
    """Return rich's Progress on stderr: label, bar, amount (bytes if `size`), times and further columns.

    Nothing is drawn unless `shown` and on a terminal.
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
    """Yield a thread-safe function that takes the amount of work that has just been done, in bytes if `size`.

    `say` is called with the expected time if that is long; by default it is printed to stderr if no bar is drawn.

    >>> with bar(10, "steps") as advance:
    ...     advance(10)
    """
    with bars(shown=shown and total > 0, size=size) as progress:
        task = progress.add_task(label, total=total)
        silent = say is None and (not shown or not progress.disable)
        pace = Pace(total, label, (lambda line: None) if silent else say or to_stderr)

        def advance(amount: int) -> None:
            progress.advance(task, amount)
            pace(amount)

        yield advance
