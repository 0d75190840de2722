"""Simulated systems of an experiment: each recorded as soon as it ends; finished ones are read, not run again."""

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from steadynorm import progress, records
from steadynorm.lab import simulate
from steadynorm.lab.paper.experiment import Context, MissingRunsError
from steadynorm.lab.paper.slim_records import rounded

RECORDS = 60  # of each system


def simulated(
    context: Context,
    systems: Mapping[str, simulate.System],
    steps: int,
    seeds: int,
    forecast: Callable[[str], np.ndarray],
) -> dict[str, simulate.Trajectory]:
    """Trajectories of these systems, each recorded in a file of its own as soon as it ends; finished ones are read.

    forecast: |theta|^2/|u|^2 after every step, by the name of a system; computed for those that are run.
    """

    def config(name: str) -> dict[str, Any]:
        return {**simulate.describe(systems[name]), "steps": steps, "seeds": seeds, "seed": context.seed}

    found = {name: recorded(context.records / name, config(name)) for name in systems}
    missing = [name for name, each in found.items() if each is None]
    if missing and context.kept_only:
        raise MissingRunsError(f"{context.records}: no finished records of {', '.join(missing)}")
    with progress.bar(len(missing) * steps, f"{len(missing)} of {len(systems)} systems") as tell:

        def done(which: int, trajectory: simulate.Trajectory) -> None:
            name = missing[which]
            found[name] = record(context.records / name, name, config(name), trajectory, forecast(name))

        chosen = [systems[name] for name in missing]
        simulate.run(chosen, steps, seeds=seeds, seed=context.seed, records=RECORDS, progress=tell, done=done)
    return {name: each for name, each in found.items() if each is not None}


def record(
    folder: Path, name: str, config: Mapping[str, Any], norms: simulate.Trajectory, forecast: np.ndarray
) -> simulate.Trajectory:
    """records.jsonl of a simulated run: every seed's |theta|^2/|u|^2, their mean as a norm, the forecast beside it.

    forecast: |theta|^2/|u|^2 after every step, from the first. Gives back what the records hold.
    """
    path = folder / records.FILE
    path.unlink(missing_ok=True)  # unfinished, or of another configuration
    with records.Recorder(path, name=name, config=config) as recorder:
        for i, step in enumerate(norms.steps.tolist()):
            seeds = {f"norm_sq/{k}": rounded(values[i]) for k, values in enumerate(norms.norm_sq)}
            norm, expected = rounded(math.sqrt(norms.mean()[i])), rounded(math.sqrt(forecast[step - 1]))
            recorder.write({"step": step, "weight_norm": norm, "forecast_norm": expected, **seeds})
    kept = recorded(folder, config)
    assert kept is not None
    return kept


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
