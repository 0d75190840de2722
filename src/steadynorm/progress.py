"""A progress bar where somebody looks; silence where output goes to a file. One for counts, bytes and training runs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
def bar(total: int, label: str, *, shown: bool = True, size: bool = False) -> Iterator[Callable[[int], object]]:
    """Gives a function to be told how much has just been done; safe from several threads.

    >>> with bar(10, "steps") as tell:
    ...     tell(10)
    """
    with bars(shown=shown and total > 0, size=size) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.advance(task, done)
