"""Finished runs as plots and tables: means over seeds with their spread, beside the paper's numbers."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from steadynorm.lab.paper.metrics import Metric
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.paper.statistics import sample_sd
from steadynorm.records import QUANTITIES, Run
from steadynorm.report import page

PaperValues = Mapping[tuple[str, int], tuple[float, float]]  # arm, budget -> mean, sample standard deviation

LABELS = {
    "hidden_norm": "Norm of all layers but the output",
    "hidden_forecast": "Forecast norm of all layers but the output",
    "matrix_norm": "Norm of all matrices but the output",
    "matrix_forecast": "Forecast norm of all matrices but the output",
    "vector_norm": "Norm of biases and gains",
    "vector_forecast": "Forecast norm of biases and gains",
}


def curves(
    runs: Runs,
    key: str,
    arms: Sequence[str] = (),
    *,
    dashed: str = "",
    caption: str = "",
    log_y: bool = False,
    zero: bool = False,
    label: str = "",
) -> page.Plot:
    """Plot a column over the steps of the longest budget: the mean over seeds, and their standard deviation as a band.

    Args:
        runs: The runs.
        key: The column.
        arms: The arms to draw; none for all.
        dashed: A second column, drawn dashed.
        caption: The caption.
        log_y: Whether the y axis is logarithmic.
        zero: Whether the y axis starts at zero.
        label: The title, if it is not the column's.
    """
    series: list[page.Series] = []
    for arm in runs.complete_arms():
        if not arms or arm in arms:
            series.append(_line(runs.of(arm), key, arm, "line"))
            if dashed:
                series.append(_line(runs.of(arm), dashed, arm, "dash"))
    unit = QUANTITIES[key].unit if key in QUANTITIES else "l2" if key in LABELS else ""
    title = label or LABELS.get(key) or (QUANTITIES[key].label if key in QUANTITIES else key)
    return page.Plot(title, "step", unit, [line for line in series if len(line.x)], caption, log_y=log_y, zero=zero)


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
        complete = runs.complete_arms(budget)
        for arm in runs.plan.arms:
            cell = runs.placeholder(arm, budget)
            if arm in complete:
                values = runs.values(metric, arm, budget)
                cell = plus_minus(fmean(values), sample_sd(values), digits)
            theirs = (paper or {}).get((arm, budget))
            row.append(cell + (f" [{plus_minus(*theirs, 2)}]" if theirs else ""))
        rows.append(row)
    note = "In square brackets: the paper's, at its own scale. " if paper else ""
    caption = f"Mean ± sample standard deviation over seeds. {note}"
    return page.Table(title, ("budget", *runs.plan.arms), rows, caption)


def table_of_metrics(
    runs: Runs, metrics: Mapping[str, Metric], paper: Mapping[str, Sequence[float | None]] | None = None
) -> page.Table:
    """Tabulate metrics at the longest budget, arms across; the paper's numbers, where given, in a row below ours."""
    rows: list[list[page.Cell]] = []
    complete = runs.complete_arms()
    for name, metric in metrics.items():
        row: list[page.Cell] = [name]
        for arm in runs.plan.arms:
            if arm not in complete:
                row.append(runs.placeholder(arm))
                continue
            values = runs.values(metric, arm)
            sd = sample_sd(values)
            row.append(f"{fmean(values):.4g}" + ("" if math.isnan(sd) else f" ± {sd:.2g}"))
        rows.append(row)
        if paper and name in paper:
            rows.append([f"{name}: the paper's", *paper[name]])
    steps = runs.plan.baseline.steps(runs.plan.budgets[-1])
    caption = f"Runs of {steps} steps. Mean ± sample standard deviation over seeds."
    return page.Table("Measured", ("", *runs.plan.arms), rows, caption)


def plus_minus(mean: float, sd: float, digits: int) -> str:
    """Format a mean and its standard deviation as the paper does.

    >>> plus_minus(73.314, 0.092, 2), plus_minus(73.314, math.nan, 2)
    ('73.31 ± 0.09', '73.31')
    """
    return f"{mean:.{digits}f}" + ("" if math.isnan(sd) else f" ± {sd:.{digits}f}")


def numbers(runs: Runs, metrics: Mapping[str, Metric]) -> dict[str, Any]:
    """Return every value of these metrics for the summary, by metric, arm and budget, one per seed."""
    out: dict[str, Any] = {}
    for name, metric in metrics.items():
        for arm in runs.plan.arms:
            for budget in runs.plan.budgets:
                if arm in runs.complete_arms(budget):
                    values = runs.values(metric, arm, budget)
                    entry = {"values": [round_to(value) for value in values], "mean": round_to(fmean(values))}
                    entry["sd"] = round_to(sample_sd(values))
                    out.setdefault(name, {}).setdefault(arm, {})[str(budget)] = entry
    return out


def points_with_errors(label: str, points: Sequence[tuple[float, float, float]], toggle: str) -> page.Series:
    """Return the series through points (x, mean, standard error); one seed has no error to show."""
    x, y, errors = zip(*points, strict=True) if points else ((), (), ())
    return page.Series(label, x, y, error=None if any(map(math.isnan, errors)) else errors, toggle=toggle)


def round_to(value: float, digits: int = 6) -> float | None:
    """Round to significant digits; None for what is no number."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
