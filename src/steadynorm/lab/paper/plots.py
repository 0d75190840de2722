"""Finished runs as plots and tables: means over seeds with their spread, the paper's numbers beside ours."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean
from typing import Any

import numpy as np

from steadynorm.lab.paper.experiment import MissingRunsError
from steadynorm.lab.paper.metrics import Measure
from steadynorm.lab.paper.statistics import sample_sd
from steadynorm.lab.paper.trained import Runs
from steadynorm.records import QUANTITIES, Run
from steadynorm.report import page

Paper = Mapping[tuple[str, int], tuple[float, float]]  # arm, budget -> mean, sample standard deviation

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
    arms: Iterable[str],
    *,
    budget: int | None = None,
    dashed: str = "",
    caption: str = "",
    log_y: bool = False,
    zero: bool = False,
    transform: Callable[[np.ndarray], np.ndarray] | None = None,
    label: str = "",
) -> page.Plot:
    """A column over steps, one line an arm: the mean over seeds, with their standard deviation as a band."""
    series: list[page.Series] = []
    for arm in arms:
        try:
            found = runs.of(arm, budget)
        except MissingRunsError:
            continue
        series.append(_line(found, key, arm, "line", transform))
        if dashed:
            series.append(_line(found, dashed, arm, "dash", transform))
    title = label or label_of(key)
    unit = QUANTITIES[key].unit if key in QUANTITIES else "l2" if key in LABELS else ""
    return page.Plot(title, "step", unit, [each for each in series if len(each.x)], caption, log_y=log_y, zero=zero)


def _line(
    found: Sequence[Run], key: str, arm: str, style: str, transform: Callable[[np.ndarray], np.ndarray] | None
) -> page.Series:
    steps = found[0].steps
    columns = [run.columns.get(key, np.full(len(run.steps), np.nan)) for run in found]
    shortest = min(map(len, columns))
    values = np.stack([column[:shortest] for column in columns])
    values = transform(values) if transform else values
    seen = np.isfinite(values).all(axis=0)
    mean = values[:, seen].mean(axis=0)
    spread = values[:, seen].std(axis=0, ddof=1) if len(found) > 1 and style == "line" else None
    return page.Series(key, steps[:shortest][seen], mean, error=spread, style=style, toggle=arm)


def label_of(key: str) -> str:
    """What a column is called."""
    return LABELS.get(key) or (QUANTITIES[key].label if key in QUANTITIES else key)


def results(
    runs: Runs, measure: Measure, arms: Sequence[str], title: str, paper: Paper | None = None, *, digits: int = 2,
    caption: str = "",
) -> page.Table:  # fmt: skip
    """Budgets down, arms across: ours, mean ± sample standard deviation over seeds, and the paper's in brackets."""
    rows = []
    for budget in runs.budgets:
        row: list[page.Cell] = [f"{budget} {runs.baseline.unit} ({runs.baseline.steps(budget)} steps)"]
        for arm in arms:
            theirs = (paper or {}).get((arm, budget))
            row.append(_ours(runs, measure, arm, budget, digits) + (f" [{plus_minus(*theirs, 2)}]" if theirs else ""))
        rows.append(row)
    note = "In square brackets: the paper's, at its own scale. " if paper else ""
    return page.Table(title, ("budget", *arms), rows, f"Mean ± sample standard deviation over seeds. {note}{caption}")


def _ours(runs: Runs, measure: Measure, arm: str, budget: int, digits: int) -> str:
    try:
        values = runs.values(measure, arm, budget)
    except MissingRunsError:
        return runs.instead(arm, budget)
    return plus_minus(fmean(values), sample_sd(values), digits)


def measured(
    runs: Runs,
    measures: Mapping[str, Measure],
    arms: Sequence[str],
    paper: Mapping[str, Sequence[float | None]] | None = None,
) -> page.Table:
    """Measures down, arms across, at the largest budget: mean ± sample standard deviation over seeds.

    `paper`: its numbers for some of the measures, a row under ours.
    """
    rows: list[list[page.Cell]] = []
    for name, measure in measures.items():
        row: list[page.Cell] = [name]
        for arm in arms:
            try:
                values = runs.values(measure, arm)
            except MissingRunsError:
                row.append(runs.instead(arm))
                continue
            sd = sample_sd(values)
            row.append(f"{fmean(values):.4g}" + ("" if math.isnan(sd) else f" ± {sd:.2g}"))
        rows.append(row)
        if paper and name in paper:
            rows.append([f"{name}: the paper's", *paper[name]])
    steps = runs.baseline.steps(runs.budgets[-1])
    caption = f"Runs of {steps} steps. Mean ± sample standard deviation over seeds."
    return page.Table("Measured", ("", *arms), rows, caption)


def plus_minus(mean: float, sd: float, digits: int) -> str:
    """Mean and standard deviation as the paper prints them.

    >>> plus_minus(73.314, 0.092, 2), plus_minus(73.314, math.nan, 2)
    ('73.31 ± 0.09', '73.31')
    """
    return f"{mean:.{digits}f}" + ("" if math.isnan(sd) else f" ± {sd:.{digits}f}")


def numbers(runs: Runs, measures: Mapping[str, Measure], arms: Iterable[str]) -> dict[str, Any]:
    """For the summary: every value of these measures, by measure, arm and budget, one a seed."""
    out: dict[str, Any] = {}
    for name, measure in measures.items():
        for arm in arms:
            for budget in runs.budgets:
                try:
                    values = runs.values(measure, arm, budget)
                except MissingRunsError:
                    continue
                entry = {"values": [round_to(value) for value in values], "mean": round_to(fmean(values))}
                out.setdefault(name, {}).setdefault(arm, {})[str(budget)] = entry | {"sd": round_to(sample_sd(values))}
    return out


def round_to(value: float, digits: int = 6) -> float | None:
    """Significant digits; None for what is no number."""
    return float(f"{value:.{digits}g}") if math.isfinite(value) else None
