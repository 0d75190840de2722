"""Claims as values: weighted sums of what runs measure, bounds on them, and what runs say about these bounds.

A claim is declared once and judged on any `Outcomes`: on finished runs, and on noise by `null`.

    Claim(
        "AdamC performs as AdamW does (within 1 point)",
        difference(ACCURACY, "AdamC", "AdamW").within(1.0, "AdamC - AdamW", " points"),
    )
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from steadynorm.lab.paper.metrics import Metric
from steadynorm.lab.paper.statistics import Bound, Finding, combined, estimate, every

VERDICTS = ("holds", "does not hold", "not testable at this scale")
LEAST = 1e-6  # smaller chances are not told apart: their digits are rounding


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
        return combined(*((weight, outcomes.values(*key)) for key, weight in self.weights.items()))

    def at_least(self, bound: float, what: str, unit: str = "") -> "Bounded":
        """Claim that the true value is at least `bound`."""
        return Bounded(self, "at least", bound, what, unit)

    def at_most(self, bound: float, what: str, unit: str = "") -> "Bounded":
        """Claim that the true value is at most `bound`."""
        return Bounded(self, "at most", bound, what, unit)

    def within(self, tolerance: float, what: str, unit: str = "") -> "Bounded":
        """Claim that the true value is within `tolerance` of zero."""
        return Bounded(self, "within", tolerance, what, unit)


def value(metric: Metric, arm: str, budget: int | None = None) -> Contrast:
    """Return the contrast that is a metric of one arm."""
    return Contrast({(metric, arm, budget): 1.0})


def difference(metric: Metric, one: str, other: str, budget: int | None = None) -> Contrast:
    """Return the contrast `one` - `other`."""
    return value(metric, one, budget) - value(metric, other, budget)


def weighted(weights: Iterable[float], contrasts: Iterable[Contrast]) -> Contrast:
    """Return a weighted sum of contrasts."""
    terms = (weight * contrast for weight, contrast in zip(weights, contrasts, strict=True))
    return sum(terms, Contrast({}))


def mean(contrasts: Iterable[Contrast]) -> Contrast:
    """Return the mean of some contrasts."""
    terms = list(contrasts)
    return weighted([1 / len(terms)] * len(terms), terms)


@dataclass(frozen=True)
class Bounded:
    """A test: the contrast keeps this bound."""

    contrast: Contrast
    side: Literal["at least", "at most", "within"]
    bound: float
    what: str
    unit: str = ""

    def __call__(self, outcomes: Outcomes) -> Finding:
        """Test the contrast's mean over seeds."""
        over_seeds = estimate(self.contrast.by_seed(outcomes))
        return Finding((Bound(self.what, over_seeds, self.side, self.bound, self.unit),))


class All:
    """A test: all of these tests hold."""

    def __init__(self, tests: Iterable[Test]):
        self.tests = tuple(tests)

    def __call__(self, outcomes: Outcomes) -> Finding:
        """Combine the findings, corrected for how many there are."""
        return every([test(outcomes) for test in self.tests])


@dataclass(frozen=True)
class Claim:
    """Something the paper or we say, and the test that it must pass."""

    text: str
    test: Test

    def judge(self, outcomes: Outcomes) -> "JudgedClaim":
        """Test the claim; where runs are missing it stays open and says which."""
        try:
            return JudgedClaim(self.text, self.test(outcomes))
        except MissingRunsError as error:
            return JudgedClaim(self.text, Finding((), open_because=str(error)))


@dataclass(frozen=True)
class JudgedClaim:
    """A claim and what was found about it."""

    text: str
    finding: Finding

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        return VERDICTS[{True: 0, False: 1, None: 2}[self.finding.holds]]

    @property
    def figure(self) -> str:
        """The numbers that the verdict rests on."""
        return self.finding.figure

    @property
    def p(self) -> float:
        """The chance of a verdict as clear as this, either way, if the truth were at the bound; 1 if nothing was tested."""
        return max(LEAST, self.finding.chance)

    def plain(self) -> dict[str, Any]:
        """Return what a summary holds of the claim."""
        return {"text": self.text, "verdict": self.verdict, "figure": self.figure, "p": float(f"{self.p:.2g}")}
