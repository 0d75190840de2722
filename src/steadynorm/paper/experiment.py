"""What an experiment is: a name, what the paper found, and a function from a context to plots and verdicts."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from steadynorm import page, progress, records, simulate
from steadynorm.files import atomic_write

VERDICTS = ("holds", "does not hold", "not testable at this scale")


@dataclass(frozen=True)
class Claim:
    """Something the paper or we say, what became of it here, and the figure that rests on."""

    text: str
    verdict: str
    figure: str

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is unknown; choose one of {', '.join(VERDICTS)}")


def judged(text: str, holds: bool, figure: str) -> Claim:
    """A claim that could be tested.

    >>> judged("1 < 2", 1 < 2, "1 and 2").verdict
    'holds'
    """
    return Claim(text, VERDICTS[0] if holds else VERDICTS[1], figure)


@dataclass(frozen=True)
class Outcome:
    """What an experiment shows: blocks of a page, verdicts, and the numbers behind them."""

    blocks: Sequence[page.Block]
    claims: Sequence[Claim]
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Context:
    """Where an experiment writes and how much it may do."""

    folder: Path
    quick: bool = False
    seeds: int | None = None  # None: the experiment's own choice
    seed: int = 0
    only: tuple[str, ...] = ()  # parts by the beginning of their names; none: all

    def wants(self, name: str) -> bool:
        """Whether a part of this name is asked for."""
        return not self.only or name.startswith(self.only)


@dataclass(frozen=True)
class Experiment:
    """A figure or table: its name, title, what the paper found, and how to get it."""

    name: str
    title: str
    found: str
    run: Callable[[Context], Outcome]


def carry_out(experiment: Experiment, context: Context) -> tuple[Outcome, Path]:
    """Run, write summary.json and the page; the page's path. Finished runs in the folder are used again."""
    context.folder.mkdir(parents=True, exist_ok=True)
    outcome = experiment.run(context)
    verdicts = page.Table(
        "Claims", ("claim", "verdict", "figure"), [(each.text, each.verdict, each.figure) for each in outcome.claims]
    )
    summary = {
        "experiment": experiment.name,
        "quick": context.quick,
        "only": list(context.only),
        "claims": [vars(each) for each in outcome.claims],
        **outcome.summary,
    }
    text = json.dumps(summary, indent=1, allow_nan=False) + "\n"
    with atomic_write(context.folder / "summary.json") as file:
        file.write(text.encode())
    whole = page.Page(
        experiment.title,
        f"{experiment.name}: {experiment.found}",
        [verdicts, *outcome.blocks],
        {f"{experiment.name}.json": text},
    )
    return outcome, page.write(whole, context.folder / "report.html")


def simulated(
    context: Context,
    systems: Mapping[str, simulate.System],
    steps: int,
    seeds: int,
    forecasts: Mapping[str, np.ndarray],
) -> dict[str, simulate.Trajectory]:
    """Trajectories of these systems, each recorded in a file of its own as soon as it ends; finished ones are read."""

    def config(name: str) -> dict[str, Any]:
        return {**simulate.describe(systems[name]), "steps": steps, "seeds": seeds, "seed": context.seed}

    found = {name: recorded(context.folder / name, config(name)) for name in systems}
    missing = [name for name, each in found.items() if each is None]
    with progress.bar(len(missing) * steps, f"{len(missing)} of {len(systems)} systems") as tell:

        def done(which: int, trajectory: simulate.Trajectory) -> None:
            name = missing[which]
            record(context.folder / name, name, config(name), trajectory, forecasts[name])
            found[name] = trajectory

        simulate.run([systems[n] for n in missing], steps, seeds=seeds, seed=context.seed, progress=tell, done=done)
    return {name: each for name, each in found.items() if each is not None}


def record(
    folder: Path, name: str, config: Mapping[str, Any], norms: simulate.Trajectory, forecast: np.ndarray
) -> None:
    """records.jsonl of a simulated run: every seed's |theta|^2/|u|^2, their mean as a norm, the forecast beside it.

    forecast: |theta|^2/|u|^2 after every step, from the first.
    """
    path = folder / records.FILE
    path.unlink(missing_ok=True)  # unfinished, or of another configuration
    with records.Recorder(path, name=name, config=config) as recorder:
        for i, step in enumerate(norms.steps.tolist()):
            seeds = {f"norm_sq/{k}": float(values[i]) for k, values in enumerate(norms.norm_sq)}
            norm, expected = float(np.sqrt(norms.mean()[i])), float(np.sqrt(forecast[step - 1]))
            recorder.write({"step": step, "weight_norm": norm, "forecast_norm": expected, **seeds})


def recorded(folder: Path, config: Mapping[str, Any]) -> simulate.Trajectory | None:
    """The finished run in this folder, if it has this configuration."""
    try:
        run = records.read(folder)
    except records.RecordError:
        return None
    if dict(run.config) != dict(config) or not len(run.steps) or run.steps[-1] != config["steps"]:
        return None
    seeds = [run.columns[f"norm_sq/{k}"] for k in range(config["seeds"])]
    return simulate.Trajectory(run.steps, np.stack(seeds))
