"""Say which commit and which kind of machine kept experiments come from."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from steadynorm import records
from steadynorm.files import read_json
from steadynorm.lab.paper import runner

_DIGITS = 9  # of a commit, where it is shown


class Provenance(NamedTuple):
    """Where the runs of one kept experiment come from."""

    name: str  # of its folder
    commits: frozenset[str]  # by what the records of its runs say; the summary's where they say nothing
    machines: frozenset[str]  # kinds of machines that trained them; empty where the records say nothing
    created: str  # ISO time of its latest run


def shorten(commit: str) -> str:
    """Return the first digits of a commit, and the + of a checkout that had changes.

    >>> shorten("691ea37488e644446104499da7f18756f1d3c95b+")
    '691ea3748+'
    """
    return commit[:_DIGITS] + "+" * commit.endswith("+")


def trace(folder: Path) -> Provenance:
    """Return where the runs in a kept folder come from."""
    runs = [records.read(path.parent, max_points=2) for path in sorted(folder.glob(f"records/*/{records.FILE}"))]
    commits, machines = (
        frozenset(str(run.origin[key]) for run in runs if run.origin.get(key)) for key in ("commit", "machine")
    )
    commits = commits or frozenset([str(read_json(folder / runner.SUMMARY)["commit"])])
    return Provenance(folder.name, commits, machines, max((run.created for run in runs), default=""))


def describe(traces: Iterable[Provenance]) -> str:
    """Say in words which experiments are of the commit of the latest run and which are older, the latest commits first.

    >>> runs = [("b", "222", "2026-02"), ("a", "111", "2026-01"), ("c", "111", "2026-03")]
    >>> print(describe(Provenance(name, frozenset([commit]), frozenset(), created) for name, commit, created in runs))
    These experiments come from 2 commits. The newest is `111` (a, c); 1 of 3 are of older commits:
    <BLANKLINE>
    - `222`: b
    """
    ordered = sorted(traces, key=lambda kept: kept.created, reverse=True)
    if not ordered:
        return "No experiment has been run."
    newest = min(ordered[0].commits)
    older: dict[str, list[str]] = {}
    for kept in ordered:
        for commit in sorted(kept.commits - {newest}):
            older.setdefault(commit, []).append(kept.name)
    if not older:
        return f"All {len(ordered)} experiments come from one commit, `{shorten(newest)}`."
    current = sorted(kept.name for kept in ordered if kept.commits == {newest})
    lines = [
        f"These experiments come from {len(older) + 1} commits. The newest is `{shorten(newest)}` ({', '.join(current)}); "
        f"{len(ordered) - len(current)} of {len(ordered)} are of older commits:",
        "",
        *(f"- `{shorten(commit)}`: {', '.join(sorted(names))}" for commit, names in older.items()),
    ]
    return "\n".join(lines)
