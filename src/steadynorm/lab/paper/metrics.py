"""Numbers of one finished run, from its records."""

import math
from collections.abc import Callable

import numpy as np

from steadynorm.records import Run

Measure = Callable[[Run], float]
MIDDLE, END = (0.4, 0.6), (0.95, 1.0)  # parts of a run that are averaged


def final(key: str, scale: float = 1.0) -> Measure:
    """The last value, times `scale`."""

    def measure(run: Run) -> float:
        values = run.columns[key][np.isfinite(run.columns[key])]
        return scale * float(values[-1]) if len(values) else math.nan

    return measure


ACCURACY, LOSS = final("val_accuracy", 100.0), final("val_loss")  # accuracy in percent


def mean_over(key: str, part: tuple[float, float]) -> Measure:
    """The mean over a part of the run, such as (0.95, 1.0) of its steps."""

    def measure(run: Run) -> float:
        at = run.steps / run.config["steps"]
        values = run.columns[key][(at >= part[0]) & (at <= part[1])]
        values = values[np.isfinite(values)]
        return float(values.mean()) if len(values) else math.nan

    return measure


def drift(key: str) -> Measure:
    """How far a norm moves from the middle of the run to its end, either way, in percent: 100 |ln(end / middle)|."""
    middle, end = mean_over(key, MIDDLE), mean_over(key, END)
    return lambda run: 100 * abs(math.log(end(run) / middle(run)))


def growth(key: str) -> Measure:
    """The same with its sign: above 0 it grows."""
    middle, end = mean_over(key, MIDDLE), mean_over(key, END)
    return lambda run: 100 * math.log(end(run) / middle(run))


def swing(key: str, start: float = 0.2) -> Measure:
    """Largest against smallest after this part of the run, in percent: 100 ln(largest / smallest)."""

    def measure(run: Run) -> float:
        values = run.columns[key][run.steps >= start * run.config["steps"]]
        values = values[np.isfinite(values)]
        return 100 * math.log(float(values.max() / values.min()))

    return measure


def log_ratio(key: str, to: str, part: tuple[float, float] = END) -> Measure:
    """100 ln(key / to), both averaged over this part of the run."""
    one, other = mean_over(key, part), mean_over(to, part)
    return lambda run: 100 * math.log(one(run) / other(run))


def log_of(measure: Measure) -> Measure:
    """100 ln of it: differences of two are percent."""
    return lambda run: 100 * math.log(measure(run))
