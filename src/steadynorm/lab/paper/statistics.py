"""Estimates over seeds and what they allow us to conclude: floats in, floats out.

A claim is a bound on a number that every seed gives once: all arms of an experiment share their seeds, so two arms are
compared seed by seed. Its mean over seeds has a 95 % confidence interval by Student's t with seeds - 1 degrees of freedom.
The claim holds, or does not, where the whole interval is on one side of the bound; in between it is open, and we say how
many seeds would settle it. Several bounds together hold where each of them does.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any, Literal, NamedTuple

CONFIDENCE = 0.95  # of the interval, both sides together
VERDICTS = ("holds", "does not hold", "open")
LEAST = 1e-6  # smaller chances are not told apart: their digits are rounding
MOST_SHOWN = 4  # bounds that a figure spells out
MOST_SEEDS = 300  # beyond this we do not count how many would settle a claim


def student_tail(t: float, freedom: int) -> float:
    """Return P(T >= t) for Student's t with a whole number of degrees of freedom (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(student_tail(4.303, 2), 4), round(student_tail(-1.0, 1), 4)
    (0.025, 0.75)
    """
    angle = math.atan2(t, math.sqrt(freedom))
    cos_sq, term, total = math.cos(angle) ** 2, 1.0, 0.0
    odd = freedom % 2
    for k in range(freedom // 2):  # 1 + 1/2 cos^2 + 1*3/(2*4) cos^4 ..., or 1 + 2/3 cos^2 + 2*4/(3*5) cos^4 ...
        total += term
        term *= (2 * k + 1 + odd) / (2 * k + 2 + odd) * cos_sq
    total *= math.sin(angle) * (math.cos(angle) if odd else 1.0)
    inside = 2 / math.pi * (angle + total) if odd else total  # P(-t < T < t), with the sign of t
    return min(1.0, max(0.0, (1 - inside) / 2))


@functools.cache
def student_quantile(freedom: int, confidence: float = CONFIDENCE) -> float:
    """Return the t beyond which (1 - confidence)/2 is left on either side.

    >>> [round(student_quantile(freedom), 3) for freedom in (1, 2, 10)]
    [12.706, 4.303, 2.228]
    """
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > (1 - confidence) / 2:
        high *= 2
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if student_tail(middle, freedom) > (1 - confidence) / 2 else (low, middle)
    return high


class Estimate(NamedTuple):
    """A mean over seeds and its standard error, which is nan for one seed."""

    value: float
    error: float
    seeds: int

    def t_above(self, bound: float) -> float:
        """Return how many standard errors the mean lies above a bound; nan for one seed."""
        above = self.value - bound
        if self.error == 0:  # every seed gives the same number
            return math.copysign(math.inf, above) if above else 0.0
        return above / self.error

    @property
    def reach(self) -> float:
        """Half the width of the confidence interval; nan for one seed."""
        return student_quantile(self.seeds - 1) * self.error if self.seeds > 1 else math.nan


def sample_sd(values: Sequence[float]) -> float:
    """Return the sample standard deviation; nan for one value.

    >>> sample_sd([1.0, 3.0]), sample_sd([1.0])
    (1.4142135623730951, nan)
    """
    if len(values) < 2:
        return math.nan
    mean = fmean(values)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1))


def estimate(values: Sequence[float]) -> Estimate:
    """Return the mean and its standard error.

    >>> estimate([1.0, 3.0])
    Estimate(value=2.0, error=1.0, seeds=2)
    """
    return Estimate(fmean(values), sample_sd(values) / math.sqrt(len(values)), len(values))


def weighted_sums(*terms: tuple[float, Sequence[float]]) -> list[float]:
    """Return a weighted sum of some lists, seed by seed.

    >>> weighted_sums((1.0, [2.0, 4.0]), (-0.5, [2.0, 6.0]))
    [1.0, 1.0]
    """
    weights = [weight for weight, _ in terms]
    seeds = zip(*(values for _, values in terms), strict=True)
    return [math.fsum(weight * value for weight, value in zip(weights, seed, strict=True)) for seed in seeds]


def difference(ones: Sequence[float], others: Sequence[float]) -> Estimate:
    """Estimate mean(ones - others) seed by seed: both lists come from the same seeds.

    >>> difference([2.0, 6.0], [1.0, 1.0])
    Estimate(value=3.0, error=2.0, seeds=2)
    """
    return estimate(weighted_sums((1.0, ones), (-1.0, others)))


@dataclass(frozen=True)
class Bound:
    """A bound on an estimate, and how certain it is that the true value keeps it."""

    what: str
    estimate: Estimate
    side: Literal["at least", "at most", "within"]  # within: at most this far from zero
    bound: float
    unit: str = ""

    @property
    def inside(self) -> float:
        """Standard errors between the estimate and the bound, above 0 where the estimate keeps it."""
        if self.side == "at least":
            return self.estimate.t_above(self.bound)
        if self.side == "at most":
            return -self.estimate.t_above(self.bound)
        return -self.estimate._replace(value=abs(self.estimate.value)).t_above(self.bound)

    @property
    def p(self) -> tuple[float, float]:
        """Chances of an estimate as far inside, and as far outside, with the true value at the bound; 1, 1 for one seed."""
        if math.isnan(self.inside):
            return 1.0, 1.0
        freedom = self.estimate.seeds - 1
        return student_tail(self.inside, freedom), student_tail(-self.inside, freedom)

    @property
    def kept(self) -> bool:
        """Whether the whole confidence interval keeps it."""
        return self.estimate.seeds > 1 and self.inside >= student_quantile(self.estimate.seeds - 1)

    @property
    def figure(self) -> str:
        """The estimate with its interval, and the bound."""
        word = "tolerance" if self.side == "within" else "bound"
        return f"{self.what} {format_estimate(self.estimate)}{self.unit}, {word} {self.bound:.3g}{self.unit}"

    def seeds_needed(self, among: int = 1) -> int | None:
        """Return how many seeds settle it if mean and spread stay as they are; None beyond MOST_SEEDS, or if only one is known.

        Outside its bound it has to refute a claim of several bounds, at a confidence that is corrected for how many there are.
        """
        seeds, per_root = self.estimate.seeds, abs(self.inside) / math.sqrt(self.estimate.seeds)
        if seeds == 1:
            return None
        confidence = CONFIDENCE if self.inside > 0 else 1 - (1 - CONFIDENCE) / among
        while seeds <= MOST_SEEDS and per_root * math.sqrt(seeds) < student_quantile(seeds - 1, confidence):
            seeds += 1
        return seeds if seeds <= MOST_SEEDS else None


_TAIL = (1 - CONFIDENCE) / 2


@dataclass(frozen=True)
class Finding:
    """What was found about a claim: bounds that must all be kept."""

    bounds: tuple[Bound, ...]
    note: str = ""  # what to say before them
    open_because: str = ""  # why nothing is concluded, whatever the bounds say
    premise: Bound | None = None  # what the claim presupposes: without it the claim is false as well

    @property
    def tested(self) -> tuple[Bound, ...]:
        """The premise, if any, and the bounds."""
        return (*filter(None, [self.premise]), *self.bounds)

    @property
    def p(self) -> tuple[float, float]:
        """Chances to hold and to be refuted by accident: all bounds must be kept, and one of k that is not refutes them."""
        inside, outside = zip(*(bound.p for bound in self.tested), strict=True)
        return max(inside), min(1.0, len(outside) * min(outside))

    @property
    def holds(self) -> bool | None:
        """True, False, or None if the claim stays open."""
        if self.open_because:
            return None
        if all(bound.kept for bound in self.tested):
            return True
        return False if self.p[1] <= _TAIL else None

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        return VERDICTS[{True: 0, False: 1, None: 2}[self.holds]]

    @property
    def chance(self) -> float:
        """The chance of a verdict as clear as this, either way, if the truth were at the bound; 1 if nothing was tested."""
        return 1.0 if self.open_because else max(LEAST, min(1.0, 2 * min(self.p)))

    @property
    def figure(self) -> str:
        """The numbers it rests on."""
        texts = [bound.figure for bound in self.tested]
        if len(texts) > MOST_SHOWN:
            which = min if self.holds is False else max
            at = which(range(len(texts)), key=lambda k: (self.tested[k].p[0], -self.tested[k].inside))
            texts = [f"{'the worst' if self.holds is False else 'the least certain'} of {len(texts)}: {texts[at]}"]
        return "; ".join(filter(None, (self.note, *texts, self.open_because))) + self._what_is_missing()

    def _what_is_missing(self) -> str:
        """Return what would settle an open claim, as the end of its figure."""
        if self.holds is not None or self.open_because:
            return ""
        if any(math.isnan(bound.inside) for bound in self.tested):
            return ": one seed, its spread is not known; run at least 3"
        return f": open, {'many more' if self.seeds_needed is None else self.seeds_needed} seeds would settle it"

    @property
    def seeds_needed(self) -> int | None:
        """How many seeds settle it if means and spreads stay as they are; None where more seeds do not, or far too many.

        One bound that is not kept refutes the claim; to support it takes all of them.
        """
        if self.open_because:
            return None
        outside = [bound.seeds_needed(len(self.tested)) for bound in self.tested if bound.inside < 0]
        if outside:
            return min(filter(None, outside), default=None)
        needed = [bound.seeds_needed() for bound in self.tested]
        return None if None in needed else max(filter(None, needed))

    def plain(self) -> dict[str, Any]:
        """Return what a summary holds of a claim's finding."""
        needed = {"seeds_needed": self.seeds_needed} if self.holds is None else {}
        return {"verdict": self.verdict, "figure": self.figure, "p": float(f"{self.chance:.2g}"), **needed}


def at_least(mean: Estimate, bound: float, what: str, unit: str = "") -> Finding:
    """Test whether the true value is at least `bound`.

    >>> at_least(Estimate(1.0, 0.1, 3), 0.0, "gain").holds, at_least(Estimate(-1.0, 0.1, 3), 0.0, "gain").holds
    (True, False)
    >>> at_least(Estimate(0.1, 0.1, 3), 0.0, "gain", " %").figure
    'gain +0.1 (95 %: -0.33 to +0.53) %, bound 0 %: open, 15 seeds would settle it'
    """
    return Finding((Bound(what, mean, "at least", bound, unit),))


def at_most(mean: Estimate, bound: float, what: str, unit: str = "") -> Finding:
    """Test whether the true value is at most `bound`."""
    return Finding((Bound(what, mean, "at most", bound, unit),))


def within(mean: Estimate, tolerance: float, what: str, unit: str = "") -> Finding:
    """Test whether the true value is within `tolerance` of zero, on either side.

    >>> within(Estimate(0.1, 0.1, 3), 1.0, "difference").holds, within(Estimate(2.0, 0.1, 3), 1.0, "difference").holds
    (True, False)
    """
    return Finding((Bound(what, mean, "within", tolerance, unit),))


def combine_findings(findings: Sequence[Finding]) -> Finding:
    """Combine findings: all must hold, and one refutes them (corrected for how many there are).

    >>> held, open_ = at_least(Estimate(1.0, 0.1, 3), 0.0, "a"), at_least(Estimate(0.1, 0.1, 3), 0.0, "b")
    >>> combine_findings([held, held]).holds, combine_findings([held, open_]).holds
    (True, None)
    """
    bounds = tuple(bound for finding in findings for bound in finding.tested)
    notes, reasons = [finding.note for finding in findings], [finding.open_because for finding in findings]
    return Finding(bounds, "; ".join(filter(None, notes)), "; ".join(filter(None, reasons)))


def holm(chances: Sequence[float], level: float = 1 - CONFIDENCE) -> list[bool]:
    """Return which findings stay if the chance of even one wrong verdict among them may be at most `level` (Holm 1979).

    >>> holm([0.01, 0.04, 0.03])
    [True, False, False]
    """
    kept = [False] * len(chances)
    for rank, which in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
        if chances[which] > level / (len(chances) - rank):
            break
        kept[which] = True
    return kept


def format_estimate(mean: Estimate) -> str:
    """Format a mean and its confidence interval.

    >>> format_estimate(Estimate(1.0, 0.1, 3)), format_estimate(Estimate(1.0, math.nan, 1))
    ('+1 (95 %: +0.57 to +1.43)', '+1')
    """
    if math.isnan(mean.reach):
        return f"{mean.value:+.3g}"
    low, high = mean.value - mean.reach, mean.value + mean.reach
    return f"{mean.value:+.3g} ({100 * CONFIDENCE:g} %: {low:+.3g} to {high:+.3g})"


def parabola_peak(x: Sequence[float], y: Sequence[float]) -> tuple[float, bool]:
    """Return the top of the parabola through the best point and its two neighbours, and whether the points bracket it.

    With the best at an end of the range that end is returned: the optimum lies there or beyond.

    >>> parabola_peak([0.0, 1.0, 2.0, 3.0], [0.0, 3.0, 4.0, 3.0])
    (2.0, True)
    >>> parabola_peak([0.0, 1.0, 2.0], [3.0, 2.0, 1.0])
    (0.0, False)
    """
    best = max(range(len(y)), key=y.__getitem__)
    if best in (0, len(y) - 1):
        return x[best], False
    (a, b, c), (p, q, r) = x[best - 1 : best + 2], y[best - 1 : best + 2]
    left, right = (q - p) / (b - a), (r - q) / (c - b)  # left >= 0 >= right
    if left == right:  # flat
        return b, True
    middle_left, middle_right = (a + b) / 2, (b + c) / 2
    return middle_left + left / (left - right) * (middle_right - middle_left), True
