"""Say which commit and which kind of machine kept experiments come from, and whether their verdicts follow from their records."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from steadynorm import records
from steadynorm.files import read_json
from steadynorm.lab.paper import runner
from steadynorm.lab.paper.experiment import Experiment, TrainedExperiment

SHORT = 9  # digits of a commit that are shown


class Provenance(NamedTuple):
    """Where the runs of one kept experiment come from.

    Attributes:
        name: The experiment's folder.
        commits: The commits of its runs, by what their records say; the summary's where they say nothing.
        machines: The kinds of machines that trained them; empty where the records say nothing.
        created: ISO time of its latest run.
    """

    name: str
    commits: frozenset[str]
    machines: frozenset[str]
    created: str


def trace(folder: Path) -> Provenance:
    """Return where the runs in a kept folder come from."""
    runs = [records.read(path.parent, max_points=2) for path in sorted(folder.glob(f"records/*/{records.FILE}"))]
    commits, machines = (
        frozenset(str(run.origin[key]) for run in runs if run.origin.get(key)) for key in ("commit", "machine")
    )
    commits = commits or frozenset([str(read_json(folder / runner.SUMMARY)["commit"])])
    return Provenance(folder.name, commits, machines, max((run.created for run in runs), default=""))


def older(traces: Iterable[Provenance]) -> dict[str, list[str]]:
    """Return the folders with runs of another commit than the latest run, by commit, the latest commits first.

    >>> made = [("b", "222", "2026-02"), ("a", "111", "2026-01"), ("c", "111", "2026-03")]
    >>> older([Provenance(name, frozenset([commit]), frozenset(), created) for name, commit, created in made])
    {'222': ['b']}
    """
    ordered = sorted(traces, key=lambda made: made.created, reverse=True)
    newest = newest_commit(ordered)
    stale: dict[str, list[str]] = {}
    for made in ordered:
        for commit in sorted(made.commits - {newest}):
            stale.setdefault(commit, []).append(made.name)
    return {commit: sorted(names) for commit, names in stale.items()}


def newest_commit(traces: Iterable[Provenance]) -> str:
    """Return the commit of the experiment with the latest run."""
    return min(max(traces, key=lambda made: made.created).commits)


def describe(traces: Iterable[Provenance]) -> str:
    """Say in words which experiments are of the newest commit and which are older."""
    traces = list(traces)
    if not traces:
        return "No experiment has been run."
    newest, stale = newest_commit(traces), older(traces)
    if not stale:
        return f"All {len(traces)} experiments come from one commit, `{newest[:SHORT]}`."
    older_names = {name for names in stale.values() for name in names}
    current = sorted(made.name for made in traces if made.name not in older_names)
    lines = [
        f"These experiments come from {len(stale) + 1} commits. The newest is `{newest[:SHORT]}` ({', '.join(current)}); "
        f"{len(older_names)} of {len(traces)} are of older commits:",
        "",
        *(f"- `{commit[:SHORT]}`: {', '.join(names)}" for commit, names in stale.items()),
    ]
    return "\n".join(lines)


def find_faults(folder: Path, experiment: Experiment | TrainedExperiment) -> list[str]:
    """Return what is wrong with a kept experiment: verdicts that its records do not give, and mixed commits or machines."""
    made, held = trace(folder), read_json(folder / runner.SUMMARY)
    _, context = runner.context_of(folder)
    outcome, _ = runner.judge(experiment, context)
    kept = {claim["text"]: claim["verdict"] for claim in held["claims"]}
    judged = {claim.text: claim.verdict for claim in outcome.claims}
    differing = [text for text in {**kept, **judged} if kept.get(text) != judged.get(text)]
    faults = [
        f"{folder.name}: {text}: the summary says {kept.get(text)}, the records {judged.get(text)}"
        for text in differing
    ]
    for what, values in (("commits", made.commits), ("kinds of machines", made.machines)):
        if len(values) > 1:
            faults.append(f"{folder.name}: its runs come from {len(values)} {what}: {', '.join(sorted(values))}")
    return faults
