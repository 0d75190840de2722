"""The heat maps of a report: measured / forecast norm and excess alignment of every layer."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from steadynorm import records
from steadynorm.records import Run
from steadynorm.report import page

_MAX_VALUES = 200_000  # numbers drawn, all runs together
_MAX_STEPS = 240  # columns of a heat map


def layer_records(run: Run, runs: Sequence[Run]) -> Run:
    """Return the steps of a run at which layers were recorded, thinned for a heat map beside those of all runs."""
    count = sum(len(layer) for some in runs for layer in some.layers.values())
    columns = [values for layer in run.layers.values() for values in layer.values()]
    keep = np.any([np.isfinite(values) for values in columns], axis=0) if columns else np.zeros(len(run.steps), bool)
    return records.thin(replace(run, columns={}).at(keep), min(_MAX_STEPS, max(20, _MAX_VALUES // max(count, 1))))


def layer_blocks(runs: Sequence[Run]) -> list[page.Block]:
    """Return the heat maps of runs that `layer_records` made."""
    ratios = [(run, _grid(run, lambda layer: layer["norm"] / layer["forecast"], "norm", "forecast")) for run in runs]
    excess = [(run, _grid(run, lambda layer: layer["excess"], "excess")) for run in runs]
    norms = _heat_maps(ratios, "Measured / forecast norm", "measured / forecast", 1.0, 0.02)
    pushes = _heat_maps(excess, "Excess alignment", "excess", 0.0, 0.02)
    scale = "All runs share a scale, which leaves out the outermost 1 %."
    blocks: list[page.Block] = []
    if norms:
        text = f"Measured / forecast norm of each layer: 1 is where independent updates would put it. {scale}"
        blocks += [page.Text("Layer norms", [text]), *norms]
    if pushes:
        text = (
            "Near 0: correct the layer's decay. Clearly negative: its gradient pushes the weights outward, keep its decay "
            f"constant. {scale}"
        )
        blocks += [page.Text("Layer alignment", [text]), *pushes]
    return blocks


def _grid(
    run: Run, value: Callable[[Mapping[str, np.ndarray]], np.ndarray], *needed: str
) -> tuple[list[str], np.ndarray]:
    """Return the names of the layers that have what is needed, and the value of each at every step."""
    names = [name for name, layer in run.layers.items() if all(key in layer for key in needed)]
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.array([value(run.layers[name]) for name in names]).reshape(len(names), len(run.steps))
    z[~np.isfinite(z)] = np.nan
    seen = np.flatnonzero(np.isfinite(z).any(axis=1))
    return [names[index] for index in seen], z[seen]


def _heat_maps(
    grids: Sequence[tuple[Run, tuple[list[str], np.ndarray]]], title: str, label: str, middle: float, least: float
) -> list[page.HeatMap]:
    distances = np.concatenate([np.abs(z[np.isfinite(z)] - middle) for _, (_, z) in grids])
    if not len(distances):
        return []
    reach = max(float(np.quantile(distances, 0.99)), least)
    return [
        page.HeatMap(
            f"{title} · {run.name}" if len(grids) > 1 else title,
            "step",
            label,
            run.steps,
            names,
            z,
            middle=middle,
            low=middle - reach,
            high=middle + reach,
            toggle=run.name,
        )
        for run, (names, z) in grids
        if names
    ]
