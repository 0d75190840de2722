"""Show how long work takes: a bar with the time left on a terminal, one line at the start elsewhere."""

import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
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


def print_to_stderr(line: str) -> None:
    """Print a line where it does not mix with results."""
    print(line, file=sys.stderr, flush=True)


def announce(what: str, seconds: float, say: Say = print_to_stderr) -> None:
    """Announce how long something will take, unless that is short or unknown (nan).

    >>> announce("training", 250, print)
    training: about 4 minutes
    >>> announce("reading", 3, print)
    """
    if seconds > LONG:
        say(f"{what}: about {duration(seconds)}")


def _pace(total: int, label: str, say: Say) -> Generator[None, int, None]:
    """Take amounts of work that have just been done; announce once how long all takes, after its first seconds.

    Time before the first amount does not count: processes start, and resumed work was done before.
    """
    first = since = 0
    while first <= 0:
        first += yield
    start = time.monotonic()
    while since <= 0 or time.monotonic() - start < _ENOUGH:
        since += yield
    announce(label, (time.monotonic() - start) * (total - first) / since, say)
    while True:
        yield


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
def bar(total: int, label: str, *, shown: bool = True, size: bool = False) -> Iterator[Callable[[int], object]]:
    """Yield a thread-safe function that takes the amount of work that has just been done, in bytes if `size`.

    If no bar is drawn, a long expected time is printed to stderr.

    >>> with bar(10, "steps") as advance:
    ...     advance(10)
    """
    with bars(shown=shown and total > 0, size=size) as progress:
        task = progress.add_task(label, total=total)
        say = print_to_stderr if shown and progress.disable else lambda line: None
        pace, lock = _pace(total, label, say), threading.Lock()
        next(pace)

        def advance(amount: int) -> None:
            progress.advance(task, amount)
            with lock:
                pace.send(amount)

        yield advance
