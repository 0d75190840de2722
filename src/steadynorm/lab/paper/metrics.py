"""Metrics: numbers of one finished run, computed from its records.

The functions that make metrics are cached, so that equal arguments give the same metric: `null` draws noise per metric.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from steadynorm.records import Run

Metric = Callable[[Run], float]
MIDDLE, END, WHOLE_RUN = (0.4, 0.6), (0.95, 1.0), (0.0, 1.0)  # parts of a run that are averaged
NEGLIGIBLE_PERCENT = 5.0  # a smaller change of a norm counts as none
SMALL_PERCENT = 2 * NEGLIGIBLE_PERCENT  # where a norm is compared with another run's, or with a forecast
AFTERWARDS = "added after the runs"  # marks a claim that was not declared before its data were seen


@functools.cache
def final(key: str, scale: float = 1.0) -> Metric:
    """Return the metric: the last value of a column, times `scale`."""

    def metric(run: Run) -> float:
        values = run.columns[key][np.isfinite(run.columns[key])]
        return scale * float(values[-1]) if len(values) else math.nan

    return metric


ACCURACY, LOSS = final("val_accuracy", 100.0), final("val_loss")  # accuracy in percent


@dataclass(frozen=True)
class Score:
    """A metric by which arms are compared, and what differences of it are called."""

    metric: Metric
    name: str  # in tables and summaries
    unit: str
    digits: int  # after the point
    sign: float  # 1 if larger is better, else -1
    margin: float  # the difference within which results are called equal
    gap: str  # the words for a difference, with {} for both arms

    def shown(self, value: float, *, signed: bool = False) -> str:
        """Format a value."""
        return f"{value:{'+' if signed else ''}.{self.digits}f}"

    @property
    def margin_words(self) -> str:
        """The margin with its unit.

        >>> BY_ACCURACY.margin_words, BY_LOSS.margin_words
        ('1 point', '0.02 nats')
        """
        return f"{self.margin:g} {self.unit if self.margin != 1 else self.unit.removesuffix('s')}"


BY_ACCURACY = Score(ACCURACY, "accuracy", "points", 2, 1.0, margin=1.0, gap="accuracy, {} - {}")
BY_LOSS = Score(LOSS, "validation loss", "nats", 4, -1.0, margin=0.02, gap="loss, {} - {},")


@functools.cache
def mean_over(key: str, part: tuple[float, float], scale: float = 1.0) -> Metric:
    """Return the metric: the mean of a column over part of the run, such as (0.95, 1.0) of its steps, times `scale`."""

    def metric(run: Run) -> float:
        at = run.steps / run.config["steps"]
        values = run.columns[key][(at >= part[0]) & (at <= part[1])]
        values = values[np.isfinite(values)]
        return scale * float(values.mean()) if len(values) else math.nan

    return metric


def at_end(key: str) -> Metric:
    """Return the metric: the mean of a column over the end of the run."""
    return mean_over(key, END)


@functools.cache
def growth(key: str) -> Metric:
    """Return the metric: how much a norm grows from the middle of the run to its end, 100 ln(end / middle) percent."""
    middle, end = mean_over(key, MIDDLE), at_end(key)
    return lambda run: 100 * math.log(end(run) / middle(run))


@functools.cache
def drift(key: str) -> Metric:
    """Return the metric: how far a norm moves from the middle of the run to its end, |growth| percent."""
    return lambda run: abs(growth(key)(run))


@functools.cache
def swing(key: str, start: float = 0.2) -> Metric:
    """Return the metric: 100 ln(largest / smallest) of a norm after this part of the run, in percent."""

    def metric(run: Run) -> float:
        values = run.columns[key][run.steps >= start * run.config["steps"]]
        values = values[np.isfinite(values)]
        return 100 * math.log(float(values.max() / values.min()))

    return metric


@functools.cache
def log_ratio(key: str, to: str, part: tuple[float, float] = END) -> Metric:
    """Return the metric: 100 ln(key / to), both averaged over this part of the run."""
    one, other = mean_over(key, part), mean_over(to, part)
    return lambda run: 100 * math.log(one(run) / other(run))


@functools.cache
def log_of(metric: Metric) -> Metric:
    """Return 100 ln of a metric: the difference of two such values is in percent."""
    return lambda run: 100 * math.log(metric(run))
