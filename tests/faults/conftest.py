"""At the end: how many faults were injected; after each test: that its kills hit."""

from collections.abc import Iterator

import injecting
import pytest


@pytest.fixture(autouse=True)
def most_kills_hit() -> Iterator[None]:
    """A kill that comes after the work is done tries nothing: it is not counted, and may be the exception only."""
    injecting.KILLS.update({True: 0, False: 0})
    yield
    hit, missed = injecting.KILLS[True], injecting.KILLS[False]
    assert hit >= 3 * missed, f"{missed} of {hit + missed} kills came when the work was done"


def pytest_terminal_summary(terminalreporter):
    if injecting.COUNT:
        terminalreporter.write_line(f"faults injected: {injecting.COUNT}")
