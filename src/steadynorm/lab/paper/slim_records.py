"""What an experiment keeps: thinned records of runs and simulations, small enough to commit. Verdicts rest on them."""

import contextlib
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from steadynorm import records
from steadynorm.lab import origin, simulate
from steadynorm.lab.paper.claims import MissingRunsError
from steadynorm.lab.paper.experiment import Context
from steadynorm.records import Run

MOST_RECORDS = 64  # kept of each run
SIMULATED_RECORDS = 60  # kept of each simulated system
DIGITS = 6  # of a number
ALWAYS = ("val_loss", "val_accuracy")
OUTPUTS = ("head.weight", "embedding.weight")  # the output layer's weight: ViT, GPT (tied)
# column -> quantity and layers of over_hidden
DERIVED = {
    f"{layers}_{quantity}": (quantity, layers)
    for layers in ("hidden", "matrix", "vector")
    for quantity in ("norm", "forecast")
}
VECTOR_DECAY = "weight_decay/vector"  # the decay of gains and biases, where they are a group of their own


def keep(run: Run, path: Path, name: str, columns: Sequence[str], layers: Sequence[str] = ()) -> None:
    """Write a run's slim records: `columns`, the validation, and these quantities of every layer."""
    wanted = {key: run.columns[key] for key in (*columns, *ALWAYS) if key in run.columns}
    wanted |= {key: over_hidden(run, *DERIVED[key]) for key in columns if key in DERIVED}
    parts = {layer: {q: part[q] for q in layers if q in part} for layer, part in run.layers.items()} if layers else {}
    seconds = np.full(len(run.steps), np.nan)  # only the last record says how long the run took
    seconds[-1] = run.columns.get("seconds", seconds)[-1]
    arrays = [seconds, *wanted.values(), *(values for part in parts.values() for values in part.values())]
    rows = np.asarray(np.isfinite(arrays).any(axis=0))
    rows[-1] = True
    chosen = replace(run, columns=wanted | {"seconds": seconds}, layers=parts).at(rows)
    slim = records.thin(chosen, MOST_RECORDS)
    whole = path.with_name(f".{path.name}.new")  # half a run must not pass for a run
    whole.unlink(missing_ok=True)
    with records.Recorder(whole, name=name, config=run.config, created=run.created, origin=run.origin) as recorder:
        for i, step in enumerate(slim.steps.tolist()):
            by_layer = {layer: _at(part, i) for layer, part in slim.layers.items()}
            extra = {"layers": by_layer} if any(by_layer.values()) else {}
            recorder.write({"step": step, **_at(slim.columns, i), **extra})
        recorder.sync()
    whole.replace(path)


def over_hidden(run: Run, quantity: str, layers: str = "hidden") -> np.ndarray:
    """Return the l2 norm of a quantity over all layers but the output's weight, at every step.

    Args:
        run: The run, with its layers.
        quantity: A quantity of layers that is a norm.
        layers: "matrix" or "vector" for only these layers. "hidden" takes both, but leaves out vectors that are not
            decayed: gains of normalisation layers start at one and stay near it, and would hide what the matrices do.
    """
    decay = run.columns.get(VECTOR_DECAY)
    if layers == "hidden" and decay is not None and not (decay > 0).any():
        layers = "matrix"
    parts = [
        layer[quantity]
        for name, layer in run.layers.items()
        if name not in OUTPUTS and quantity in layer and layers in ("hidden", _kind(layer))
    ]
    return np.sqrt(sum(np.square(part) for part in parts)) if parts else np.full(len(run.steps), np.nan)


def _kind(layer: Mapping[str, np.ndarray]) -> str:
    return "matrix" if np.isfinite(layer.get("spectral", np.nan)).any() else "vector"


def _at(columns: Mapping[str, np.ndarray], index: int) -> dict[str, float]:
    return {key: rounded(values[index]) for key, values in columns.items() if np.isfinite(values[index])}


def rounded(value: float) -> float:
    """Round to six significant digits.

    >>> rounded(1234.56789), rounded(0.0)
    (1234.57, 0.0)
    """
    return float(f"{value:.{DIGITS}g}")


# Simulations


def read_simulated(context: Context, name: str, config: Mapping[str, Any], last_step: int) -> Run | None:
    """Return the records of a simulation, or None if it has to be run: there are none of this configuration to this step.

    Raises:
        MissingRunsError: It has to be run, and the context forbids that.
    """
    with contextlib.suppress(records.RecordError):
        run = records.read(context.records / name)
        if dict(run.config) == dict(config) and len(run.steps) and run.steps[-1] == last_step:
            return run
    if context.kept_only:
        raise MissingRunsError(f"{context.records}: no finished records of {name}")
    return None


def keep_simulated(
    context: Context, name: str, config: Mapping[str, Any], rows: Iterable[tuple[int, Mapping[str, float]]]
) -> Run:
    """Write a simulation's steps to records as they arrive, and return the run read back."""
    folder = context.records / name
    path = folder / records.FILE
    path.unlink(missing_ok=True)  # unfinished, or of another configuration
    with records.Recorder(path, name=name, config=config, origin=origin.describe()) as recorder:
        for step, values in rows:
            recorder.write({"step": step, **{key: rounded(value) for key, value in values.items()}})
    return records.read(folder)


def trajectory_rows(norms: simulate.Trajectory, forecast: np.ndarray) -> Iterator[tuple[int, dict[str, float]]]:
    """Yield |theta|^2/|u|^2 of every seed, the root of their mean, and that of the forecast, which has a value per step."""
    for i, step in enumerate(norms.steps.tolist()):
        norm, expected = math.sqrt(norms.mean()[i]), math.sqrt(forecast[step - 1])
        seeds = {f"norm_sq/{k}": values[i] for k, values in enumerate(norms.norm_sq)}
        yield step, {"weight_norm": norm, "forecast_norm": expected, **seeds}


def trajectory(run: Run) -> simulate.Trajectory:
    """Return the system that `trajectory_rows` recorded."""
    return simulate.Trajectory(run.steps, np.stack([run.columns[f"norm_sq/{k}"] for k in range(run.config["seeds"])]))
