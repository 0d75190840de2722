"""The heat maps of a report: measured / forecast norm and excess alignment of every layer."""

from collections.abc import Sequence
from dataclasses import replace
from functools import reduce

import numpy as np

from steadynorm import records
from steadynorm.records import Run
from steadynorm.report import page

_MAX_VALUES = 200_000  # numbers drawn, all runs together
_MAX_STEPS = 240  # columns of a heat map
_LEAST_REACH = 0.02  # of a scale, on either side of its middle
_SCALE = "All runs share a scale, which leaves out the outermost 1 %."


def layer_records(run: Run, runs: Sequence[Run]) -> Run:
    """Return a run at the steps that have layer values, thinned so that the heat maps of all `runs` together stay small."""
    count = sum(len(layer) for some in runs for layer in some.layers.values())
    columns = [values for layer in run.layers.values() for values in layer.values()]
    keep = np.any([np.isfinite(values) for values in columns], axis=0) if columns else np.zeros(len(run.steps), bool)
    return records.thin(replace(run, columns={}).at(keep), min(_MAX_STEPS, max(20, _MAX_VALUES // max(count, 1))))


def layer_blocks(runs: Sequence[Run]) -> list[page.Block]:
    """Return the heat maps of runs that `layer_records` made."""
    norms = page.Text(
        "Layer norms",
        [f"Measured / forecast norm of each layer: 1 is where independent updates would put it. {_SCALE}"],
    )
    excess = page.Text(
        "Layer alignment",
        [
            "Near 0: correct the layer's decay. Clearly negative: its gradient pushes the weights outward, keep its decay "
            f"constant. {_SCALE}"
        ],
    )
    return [
        *_section(runs, norms, "Measured / forecast norm", "measured / forecast", 1.0, "norm", "forecast"),
        *_section(runs, excess, "Excess alignment", "excess", 0.0, "excess"),
    ]


def _section(
    runs: Sequence[Run], heading: page.Text, title: str, label: str, middle: float, *keys: str
) -> list[page.Block]:
    """Return heat maps of a quantity of layers, or of the ratio of two, on one scale; none if no layer has it."""
    grids = [_grid(run, *keys) for run in runs]
    distances = np.concatenate([np.abs(z[np.isfinite(z)] - middle) for _, z in grids])
    if not len(distances):
        return []
    reach = max(float(np.quantile(distances, 0.99)), _LEAST_REACH)
    low, high = middle - reach, middle + reach
    titles = [f"{title} · {run.name}" if len(runs) > 1 else title for run in runs]
    maps = [
        page.HeatMap(own, "step", label, run.steps, names, z, middle=middle, low=low, high=high, toggle=run.name)
        for own, run, (names, z) in zip(titles, runs, grids, strict=True)
        if names
    ]
    return [heading, *maps]


def _grid(run: Run, *keys: str) -> tuple[list[str], np.ndarray]:
    """Return the names of the layers that have the quantities, and their ratio at every step, (layers, steps)."""
    names = [name for name, layer in run.layers.items() if all(key in layer for key in keys)]
    with np.errstate(divide="ignore", invalid="ignore"):
        ratios = [reduce(np.divide, (run.layers[name][key] for key in keys)) for name in names]
    z = np.array(ratios).reshape(len(names), len(run.steps))
    z[~np.isfinite(z)] = np.nan
    seen = np.flatnonzero(np.isfinite(z).any(axis=1))
    return [names[index] for index in seen], z[seen]
