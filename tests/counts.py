"""Count what tests try, for the summary; the counts are added up over the processes of pytest-xdist (see conftest.py)."""

import os
from collections import Counter

PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")
EXAMPLES: Counter[str] = Counter()  # property -> examples that were run
FAULTS: Counter[str] = Counter()  # "injected" -> how many


def dump() -> dict[str, dict[str, int]]:
    """Return the counts of this process as plain values."""
    return {"examples": dict(EXAMPLES), "faults": dict(FAULTS)}


def add(counts: dict[str, dict[str, int]]) -> None:
    """Add the counts of another process."""
    EXAMPLES.update(counts["examples"])
    FAULTS.update(counts["faults"])


def lines() -> list[str]:
    """Return the lines of the summary."""
    found = []
    if EXAMPLES:
        found.append(f"properties: {EXAMPLES.total():,} examples of {len(EXAMPLES)} properties (profile {PROFILE})")
    if FAULTS:
        found.append(f"faults injected: {FAULTS.total():,}")
    return found
