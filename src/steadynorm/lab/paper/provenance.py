"""Say which commit and which kind of machine kept experiments come from."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from steadynorm import records
from steadynorm.files import read_json
from steadynorm.lab.paper import runner

SHORT = 9  # digits of a commit that are shown


class Provenance(NamedTuple):
    """Where the runs of one kept experiment come from."""

    name: str  # of its folder
    commits: frozenset[str]  # by what the records of its runs say; the summary's where they say nothing
    machines: frozenset[str]  # kinds of machines that trained them; empty where the records say nothing
    created: str  # ISO time of its latest run


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
        return f"All {len(ordered)} experiments come from one commit, `{newest[:SHORT]}`."
    current = sorted(kept.name for kept in ordered if kept.commits == {newest})
    lines = [
        f"These experiments come from {len(older) + 1} commits. The newest is `{newest[:SHORT]}` ({', '.join(current)}); "
        f"{len(ordered) - len(current)} of {len(ordered)} are of older commits:",
        "",
        *(f"- `{commit[:SHORT]}`: {', '.join(sorted(names))}" for commit, names in older.items()),
    ]
    return "\n".join(lines)
