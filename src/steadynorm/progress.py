"""A progress bar where somebody looks; silence where output goes to a file."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager


@contextmanager
def bar(total: int, label: str) -> Iterator[Callable[[int], object]]:
    """Gives a function to be told how much has just been done; safe from several threads.

    >>> with bar(10, "steps") as tell:
    ...     tell(10)
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn(label), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=total == 0 or not console.is_terminal) as shown:
        task = shown.add_task(label, total=total)

        def tell(done: int) -> None:
            shown.advance(task, done)

        yield tell
