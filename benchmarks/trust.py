"""Write the tables of docs/trust.md, and the README's sentence, from docs/out/mutants.json and soak.json.

python -m benchmarks.trust
"""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.pages import fill

ROOT = Path(__file__).parents[1]
PAGE, README = ROOT / "docs" / "trust.md", ROOT / "README.md"
_COLUMNS = ("", "measured", "limit", "")


def mutants(found: Mapping[str, Any]) -> str:
    """Return the count and the table of the mutation check."""
    rows = [(f"`{mutant['place']}`", mutant["breaks"], _noticed(mutant)) for mutant in found["outcomes"]]
    return (
        f"**{found['killed']} of {found['mutants']} mutants killed**, in {found['seconds'] / 60:.0f} minutes of wall time in total."
        f"\n\n{_table(('place', 'what is broken', 'noticed by'), rows)}"
    )


def _noticed(mutant: Mapping[str, Any]) -> str:
    if mutant["outcome"] != "killed":
        return f"**{mutant['outcome']}**"
    file, _, test = mutant["by"].partition("::")
    return f"{test.partition('[')[0].removeprefix('test_').replace('_', ' ')} (`{file}`)"


def soak(found: Mapping[str, Any]) -> str:
    """Return what both parts measured, or say that they were not run."""
    return "\n\n".join(
        show(found[part]) if part in found else f"Not run yet: `python -m benchmarks.soak {part}`."
        for part, show in {"steps": _steps, "training": _training}.items()
    )


def _steps(found: Mapping[str, Any]) -> str:
    limits, held = found["limits"], found["checks"]
    elements = ", ".join(f"{name} ({found['elements'][name]:,} elements)" for name in found["counted"])
    worst = ", ".join(f"{name} {value:.2%}" for name, value in sorted(found["norm_worst_of"].items()))
    mean = ", ".join(f"{name} {value:+.2%}" for name, value in sorted(found["norm_mean_of"].items()))
    rows = [
        (
            "memory growth, bytes per 1000 steps",
            f"{found['memory_bytes_per_1000_steps']:.0f} ± {found['memory_error']:.0f}",
            f"at most {limits['memory']:.0f}",
            _word(held["memory"]),
        ),
        (
            "largest distance of a norm from its forecast",
            f"{found['norm_worst']:.2%}",
            f"at most {limits['norm']:.0%}",
            _word(held["norm"]),
        ),
        (
            "spectral norm by power iteration, over SVD",
            f"{found['power_mean']:.4f}, {found['power_least']:.4f} to {found['power_most']:.4f}",
            f"mean {1 - limits['power iteration']:.2f}, from {limits['power least']:.2f} to 1",
            _word(held["power iteration"]),
        ),
        (
            "its mean, last third minus first third",
            f"{found['power_drift']:+.4f}",
            f"at most {limits['power iteration']:.2f} in either direction",
            _word(held["power iteration"]),
        ),
    ]
    return (
        f"### {found['steps']:,} optimizer steps\n\n"
        f"`python -m benchmarks.soak steps --steps {found['asked']}`"
        f"{'' if found['steps'] == found['asked'] else ', ended early'}: {found['seconds'] / 60:.0f} minutes, "
        f"{found['measurements']:,} measurements, {found['power_checks']:,} comparisons with an SVD.\n\n"
        f"{_table(_COLUMNS, rows)}\n\n"
        f"The norms of {elements} are judged separately, at every measurement. The largest distances are {worst}; the mean distances are {mean}. "
        f"The matrix with fast polar factors has only {found['elements']['fast']} elements, too few to be judged at a single moment."
    )


def _training(found: Mapping[str, Any]) -> str:
    rows = [
        (
            "memory growth, KiB per hour",
            f"{found['memory_kib_per_hour']:.0f} ± {found['memory_error']:.0f}",
            f"{found['limits']['memory']:.0%} of {found['resident_mib']:.0f} MiB over the run",
            _word(found["checks"]["memory"]),
        ),
        ("memory growth, bytes per 1000 steps", f"{found['memory_bytes_per_1000_steps']:.0f}", "", ""),
    ]
    return (
        f"### {found['minutes']:.0f} minutes of training\n\n"
        f"`python -m benchmarks.soak training --minutes {found['asked']:g}`: {found['steps']:,} steps, "
        f"{found['evaluations']:,} evaluations, {found['checkpoints']:,} checkpoints, {found['samples']:,} samples of the "
        f"resident memory.\n\n{_table(_COLUMNS, rows)}"
    )


def _word(held: bool) -> str:
    return "holds" if held else "**fails**"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _summary(mutants: Mapping[str, Any]) -> str:
    noticed = "every one" if mutants["killed"] == mutants["mutants"] else f"{mutants['killed']} of them"
    return f"`make mutants` breaks {mutants['mutants']} formulas on purpose, one at a time, and the tests notice {noticed}."


def write(page: Path = PAGE, readme: Path = README, out: Path = ROOT / "docs" / "out") -> None:
    """Write both sections and the README's sentence from the results that exist."""
    found = {}
    for name, section in (("mutants", mutants), ("soak", soak)):
        path = out / f"{name}.json"
        found[name] = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
        fill(page, name, section(found[name]) if found[name] else f"Not run yet: `make {name}`.")
    if found["mutants"]:
        fill(readme, "trust", _summary(found["mutants"]))


if __name__ == "__main__":
    write()
