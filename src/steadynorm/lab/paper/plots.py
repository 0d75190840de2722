"""Finished runs as plots and tables: means over seeds with their spread, beside the paper's numbers."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np

from steadynorm.lab.paper.metrics import Metric
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.paper.slim_records import rounded
from steadynorm.lab.paper.statistics import estimate, sample_sd
from steadynorm.records import QUANTITIES, Quantity, Run
from steadynorm.report import page

Shown = tuple[list[page.Block], dict[str, Any]]  # the blocks of a page, and the numbers of the summary
PaperValues = Mapping[tuple[str, int], tuple[float, float]]  # arm, budget -> mean, sample standard deviation

_QUANTITIES = {
    **QUANTITIES,
    "hidden_norm": Quantity("Norm of all layers but the output", "l2", ""),
    "matrix_norm": Quantity("Norm of all matrices but the output", "l2", ""),
    "vector_norm": Quantity("Norm of biases and gains", "l2", ""),
}


@dataclass(frozen=True)
class Curve:
    """A column over the steps of the longest budget: the mean over seeds, and their standard deviation as a band."""

    key: str
    arms: Sequence[str] = ()  # to draw; none for all
    dashed: str = ""  # a second column
    caption: str = ""
    log_y: bool = False
    zero: bool = False  # whether the y axis starts there
    label: str = ""  # the title, if it is not the column's

    def plot(self, runs: Runs) -> page.Plot:
        """Return the plot of finished runs."""
        styles = {self.key: "line"} | ({self.dashed: "dash"} if self.dashed else {})
        arms = [arm for arm in runs.complete_arms() if not self.arms or arm in self.arms]
        lines = [_line(runs.of(arm), key, arm, style) for arm in arms for key, style in styles.items()]
        series = [line for line in lines if len(line.x)]
        quantity = _QUANTITIES.get(self.key, Quantity(self.key, "", ""))
        title = self.label or quantity.label
        return page.Plot(title, "step", quantity.unit, series, self.caption, log_y=self.log_y, zero=self.zero)


def show(
    runs: Runs,
    curves: Sequence[Curve],
    metrics: Mapping[str, Metric],
    paper: Mapping[str, Sequence[float | None]] | None = None,
) -> Shown:
    """Plot curves and tabulate metrics, beside the paper's numbers where there are any."""
    plots = [curve.plot(runs) for curve in curves]
    return [*plots, table_of_metrics(runs, metrics, paper)], numbers(runs, metrics)


def _line(runs: Sequence[Run], key: str, arm: str, style: str) -> page.Series:
    columns = [run.columns.get(key, np.full(len(run.steps), np.nan)) for run in runs]
    shortest = min(map(len, columns))
    values = np.stack([column[:shortest] for column in columns])
    measured = np.isfinite(values).all(axis=0)
    mean = values[:, measured].mean(axis=0)
    spread = values[:, measured].std(axis=0, ddof=1) if len(runs) > 1 and style == "line" else None
    return page.Series(key, runs[0].steps[:shortest][measured], mean, error=spread, style=style, toggle=arm)


def table_by_budget(
    runs: Runs, metric: Metric, title: str, paper: PaperValues | None = None, *, digits: int = 2
) -> page.Table:
    """Tabulate a metric, budgets down and arms across, with the paper's numbers in brackets."""
    rows = []
    for budget in runs.plan.budgets:
        row: list[page.Cell] = [f"{budget} {runs.plan.baseline.unit} ({runs.plan.baseline.steps(budget)} steps)"]
        for arm in runs.plan.arms:
            theirs = (paper or {}).get((arm, budget))
            ours = cell(runs, metric, arm, budget, f".{digits}f", f".{digits}f")
            row.append(ours + (f" [{plus_minus(*theirs)}]" if theirs else ""))
        rows.append(row)
    note = "In square brackets: the paper's, at its own scale. " if paper else ""
    caption = f"Mean ± sample standard deviation over seeds. {note}"
    return page.Table(title, ("budget", *runs.plan.arms), rows, caption)


def table_of_metrics(
    runs: Runs,
    metrics: Mapping[str, Metric],
    paper: Mapping[str, Sequence[float | None]] | None = None,
    arms: Sequence[str] = (),
) -> page.Table:
    """Tabulate metrics at the longest budget, arms across; the paper's numbers, where given, in a row below ours."""
    rows: list[list[page.Cell]] = []
    arms = arms or runs.plan.arms
    for name, metric in metrics.items():
        rows.append([name, *(cell(runs, metric, arm, None, ".4g", ".2g") for arm in arms)])
        if paper and name in paper:
            rows.append([f"{name}: the paper's", *paper[name]])
    steps = runs.plan.baseline.steps(runs.plan.budgets[-1])
    caption = f"Runs of {steps} steps. Mean ± sample standard deviation over seeds."
    return page.Table("Measured", ("", *arms), rows, caption)


def cell(runs: Runs, metric: Metric, arm: str, budget: int | None, mean_format: str, sd_format: str) -> str:
    """Format an arm's mean and standard deviation over seeds, or why they are missing."""
    if arm not in runs.complete_arms(budget):
        return runs.placeholder(arm, budget)
    values = runs.values(metric, arm, budget)
    return plus_minus(fmean(values), sample_sd(values), mean_format, sd_format)


def plus_minus(mean: float, sd: float, mean_format: str = ".2f", sd_format: str = ".2f") -> str:
    """Format a mean and its standard deviation, as the paper does unless told otherwise.

    >>> plus_minus(73.314, 0.092), plus_minus(73.314, math.nan)
    ('73.31 ± 0.09', '73.31')
    """
    return f"{mean:{mean_format}}" + ("" if math.isnan(sd) else f" ± {sd:{sd_format}}")


def numbers(runs: Runs, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return every value of these metrics for the summary, by metric, arm and budget, one per seed."""
    out: dict[str, Any] = {}
    for name, metric in metrics.items():
        for arm in runs.plan.arms:
            for budget in runs.plan.budgets:
                if arm in runs.complete_arms(budget):
                    values = runs.values(metric, arm, budget)
                    out.setdefault(name, {}).setdefault(arm, {})[str(budget)] = {
                        "values": list(map(round_to, values)),
                        "mean": round_to(fmean(values)),
                        "sd": round_to(sample_sd(values)),
                    }
    return out


def points_with_errors(
    runs: Runs, metric: Metric, places: Mapping[Any, tuple[str, int | None]], label: str, toggle: str
) -> page.Series:
    """Plot a metric's mean over seeds and its standard error at every x whose arm and budget are complete."""
    complete = {x: place for x, place in places.items() if place[0] in runs.complete_arms(place[1])}
    means = [estimate(runs.values(metric, *place)) for place in complete.values()]
    errors = None if any(math.isnan(mean.error) for mean in means) else [mean.error for mean in means]
    return page.Series(label, list(complete), [mean.value for mean in means], error=errors, toggle=toggle)


def layer_maps(
    runs: Runs,
    layers: Callable[[Run], Sequence[str]],
    quantity: str,
    title: str,
    unit: str,
    caption: str,
    middle: float,
) -> list[page.HeatMap]:
    """Map a quantity by layer and step, one map per arm, mean over seeds; colours reach 0.5 to either side of the middle."""
    maps = []
    for arm in runs.complete_arms():
        seeds = runs.of(arm)
        names = layers(seeds[0])
        z = np.array([np.mean([run.layers[name][quantity] for run in seeds], axis=0) for name in names])
        measured = np.isfinite(z).any(axis=0)
        steps, colours = seeds[0].steps[measured], (middle, middle - 0.5, middle + 0.5)
        maps.append(
            page.HeatMap(f"{title} · {arm}", "step", unit, steps, names, z[:, measured], caption, *colours, toggle=arm)
        )
    return maps


def round_to(value: float) -> float | None:
    """Round to six significant digits; None if the value is not finite."""
    return rounded(value) if math.isfinite(value) else None
