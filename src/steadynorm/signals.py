"""Stop on SIGTERM and SIGINT (Ctrl-C), and exit as shells and schedulers expect."""

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType


class Terminated(KeyboardInterrupt):
    """SIGTERM stops the command as Ctrl-C does."""


def exit_code(number: int) -> int:
    """Return the exit code of a command that a signal stopped, or 0 if no signal did.

    >>> exit_code(signal.SIGINT), exit_code(signal.SIGTERM), exit_code(0)
    (130, 143, 0)
    """
    return 128 + number if number else 0


@contextlib.contextmanager
def handle_signals(handler: Callable[[int, FrameType | None], object], *numbers: int) -> Iterator[None]:
    """Call the handler on these signals; outside the main thread, somebody else handles signals."""
    before = {}
    with contextlib.suppress(ValueError):
        before = {number: signal.signal(number, handler) for number in numbers}
    try:
        yield
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)


@contextlib.contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """Raise Terminated, a KeyboardInterrupt, on SIGTERM."""

    def stop(*_: object) -> None:
        raise Terminated

    with handle_signals(stop, signal.SIGTERM):
        yield
