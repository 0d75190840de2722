"""Claims as values: weighted sums of what runs measure, bounds on them, and what runs say about these bounds.

A claim is declared once, as a text and the test that it must pass, and judged on any `Outcomes`: on finished runs, and on
noise by `null`.

    {"AdamC performs as AdamW does": difference(ACCURACY, "AdamC", "AdamW").within(1.0, "AdamC - AdamW", " points")}
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Protocol

from steadynorm.lab.paper.metrics import Metric, Score
from steadynorm.lab.paper.statistics import (
    Estimate,
    Finding,
    at_least,
    at_most,
    combine_findings,
    estimate,
    weighted_sums,
    within,
)


class MissingRunsError(ValueError):
    """Raised where runs that a claim needs are missing."""


class Outcomes(Protocol):
    """What a claim may rest on: the values of a metric over the seeds of an arm."""

    def values(self, metric: Metric, arm: str, budget: int | None = None) -> list[float]:
        """Return one value per seed, at a budget (default: the longest)."""
        ...


Test = Callable[[Outcomes], Finding]


@dataclass(frozen=True)
class Contrast:
    """A weighted sum of metrics of arms, which every seed gives once.

    Sums and differences of contrasts, and their products with numbers, are contrasts.
    """

    weights: dict[tuple[Metric, str, int | None], float]  # by metric, arm and budget (None: the longest)

    def __add__(self, other: "Contrast") -> "Contrast":
        keys = self.weights | other.weights
        return Contrast({key: self.weights.get(key, 0.0) + other.weights.get(key, 0.0) for key in keys})

    def __rmul__(self, factor: float) -> "Contrast":
        return Contrast({key: factor * weight for key, weight in self.weights.items()})

    def __sub__(self, other: "Contrast") -> "Contrast":
        return self + -1.0 * other

    def by_seed(self, outcomes: Outcomes) -> list[float]:
        """Return the sum for each seed."""
        return weighted_sums(*((weight, outcomes.values(*key)) for key, weight in self.weights.items()))

    def over_seeds(self, outcomes: Outcomes) -> Estimate:
        """Return the mean over seeds."""
        return estimate(self.by_seed(outcomes))

    def at_least(self, bound: float, what: str, unit: str = "") -> Test:
        """Test whether the true value is at least `bound`."""
        return lambda outcomes: at_least(self.over_seeds(outcomes), bound, what, unit)

    def at_most(self, bound: float, what: str, unit: str = "") -> Test:
        """Test whether the true value is at most `bound`."""
        return lambda outcomes: at_most(self.over_seeds(outcomes), bound, what, unit)

    def within(self, tolerance: float, what: str, unit: str = "") -> Test:
        """Test whether the true value is within `tolerance` of zero."""
        return lambda outcomes: within(self.over_seeds(outcomes), tolerance, what, unit)


def value(metric: Metric, arm: str, budget: int | None = None) -> Contrast:
    """Return the contrast that is a metric of one arm."""
    return Contrast({(metric, arm, budget): 1.0})


def difference(metric: Metric, one: str, other: str, budget: int | None = None) -> Contrast:
    """Return the contrast `one` - `other`."""
    return value(metric, one, budget) - value(metric, other, budget)


def no_worse(score: Score, one: str, other: str, margin: float | None = None) -> Test:
    """Return the test that `one` scores no worse than `other` by more than the margin (default: the score's)."""
    gap, margin = difference(score.metric, one, other), score.margin if margin is None else margin
    what, unit = score.gap.format(one, other), f" {score.unit}"
    return gap.at_least(-margin, what, unit) if score.sign > 0 else gap.at_most(margin, what, unit)


def same(score: Score, one: str, other: str) -> Test:
    """Return the test that two arms score the same, within the score's margin."""
    return difference(score.metric, one, other).within(score.margin, score.gap.format(one, other), f" {score.unit}")


def weighted(weights: Iterable[float], contrasts: Iterable[Contrast]) -> Contrast:
    """Return a weighted sum of contrasts."""
    terms = (weight * contrast for weight, contrast in zip(weights, contrasts, strict=True))
    return sum(terms, Contrast({}))


def mean(contrasts: Iterable[Contrast]) -> Contrast:
    """Return the mean of some contrasts."""
    terms = list(contrasts)
    return weighted([1 / len(terms)] * len(terms), terms)


def coefficient(direction: Sequence[float], contrasts: Iterable[Contrast]) -> Contrast:
    """Return the least-squares coefficient along a direction, centred here, that is orthogonal to the others."""
    centred = [x - fmean(direction) for x in direction]
    length = sum(x**2 for x in centred)
    return weighted([x / length for x in centred], contrasts)


def all_of(tests: Iterable[Test]) -> Test:
    """Return the test that all `tests` hold, corrected for their number."""
    tests = tuple(tests)
    return lambda outcomes: combine_findings([test(outcomes) for test in tests])


def judge(test: Test, outcomes: Outcomes) -> Finding:
    """Test a claim; where runs are missing it stays open and says which."""
    try:
        return test(outcomes)
    except MissingRunsError as error:
        return Finding((), open_because=str(error))
