"""What an experiment keeps of a run: the columns it draws, thinned, small enough to be committed. Verdicts rest on it."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from steadynorm import records
from steadynorm.records import Run

MOST_RECORDS = 64  # records kept of each run
DIGITS = 6  # of a number
ALWAYS = ("val_loss", "val_accuracy")
OUTPUTS = ("head.weight", "embedding.weight")  # the output layer's weight: ViT, GPT (tied)
# column -> quantity and layers of over_hidden
DERIVED = {
    f"{layers}_{name}": (quantity, layers)
    for layers in ("hidden", "matrix", "vector")
    for name, quantity in (("norm", "norm"), ("forecast", "forecast"))
}
VECTOR_DECAY = "weight_decay/vector"  # what gains and biases decay by, where they are a group of their own


def keep(run: Run, path: Path, name: str, columns: Sequence[str], layers: Sequence[str] = ()) -> None:
    """Write a run's slim records: `columns`, the validation, and these quantities of every layer."""
    wanted = {key: run.columns[key] for key in (*columns, *ALWAYS) if key in run.columns}
    wanted |= {key: over_hidden(run, *DERIVED[key]) for key in columns if key in DERIVED}
    parts = {layer: {q: each[q] for q in layers if q in each} for layer, each in run.layers.items()} if layers else {}
    everything = [*wanted.values(), *(values for part in parts.values() for values in part.values())]
    rows = np.flatnonzero(np.isfinite(np.array(everything)).any(axis=0)) if everything else np.arange(0)
    rows = np.union1d(rows, [len(run.steps) - 1])
    slim = records.thin(_rows(run, wanted | _time(run), parts, rows), MOST_RECORDS)
    whole = path.with_name(f".{path.name}.new")  # half of a run must not pass for the run
    whole.unlink(missing_ok=True)
    with records.Recorder(whole, name=name, config=run.config, created=run.created) as recorder:
        for i, step in enumerate(slim.steps.tolist()):
            by_layer = {layer: _at(part, i) for layer, part in slim.layers.items()}
            extra = {"layers": by_layer} if any(by_layer.values()) else {}
            recorder.write({"step": step, **_at(slim.columns, i), **extra})
        recorder.sync()
    whole.replace(path)


def over_hidden(run: Run, quantity: str, layers: str = "hidden") -> np.ndarray:
    """l2 norm over all layers but the output's weight, at every step; of "matrix" or "vector" ones alone, where asked.

    "hidden" leaves out vectors that are not decayed: gains of normalisation layers start at one and stay near it, and
    would hide what the matrices do.
    """
    decay = run.columns.get(VECTOR_DECAY)
    if layers == "hidden" and decay is not None and not (decay > 0).any():
        layers = "matrix"
    parts = [
        each[quantity]
        for name, each in run.layers.items()
        if name not in OUTPUTS and quantity in each and layers in ("hidden", _kind(each))
    ]
    return np.sqrt(sum(np.square(part) for part in parts)) if parts else np.full(len(run.steps), np.nan)


def _kind(layer: Mapping[str, np.ndarray]) -> str:
    return "matrix" if np.isfinite(layer.get("spectral", np.nan)).any() else "vector"


def _time(run: Run) -> dict[str, np.ndarray]:
    """How long it took, at the last record alone."""
    seconds = np.full(len(run.steps), np.nan)
    if "seconds" in run.columns:
        seconds[-1] = run.columns["seconds"][-1]
    return {"seconds": seconds}


def _rows(
    run: Run, columns: Mapping[str, np.ndarray], layers: Mapping[str, Mapping[str, np.ndarray]], rows: np.ndarray
) -> Run:
    chosen = {layer: {key: values[rows] for key, values in part.items()} for layer, part in layers.items()}
    return Run(
        run.name,
        run.config,
        run.created,
        run.path,
        run.steps[rows],
        {key: values[rows] for key, values in columns.items()},
        chosen,
    )


def _at(columns: Mapping[str, np.ndarray], index: int) -> dict[str, float]:
    return {key: rounded(values[index]) for key, values in columns.items() if np.isfinite(values[index])}


def rounded(value: float) -> float:
    """Six significant digits.

    >>> rounded(1234.56789), rounded(0.0)
    (1234.57, 0.0)
    """
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else math.nan
