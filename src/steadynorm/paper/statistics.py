"""Means over seeds, their differences, and what may be concluded from them: floats in, floats out.

A claim is a bound on an estimate. It holds, or does not, when the estimate is on that side of the bound by two standard
errors; in between it is open, and we say how many seeds would settle it.
"""

import math
from collections.abc import Sequence
from statistics import fmean, stdev
from typing import NamedTuple

ERRORS = 2.0  # standard errors between an estimate and the bound that it is judged by


class Estimate(NamedTuple):
    """A mean over seeds and its standard error: nan of one seed."""

    value: float
    error: float
    seeds: int


class Finding(NamedTuple):
    """True, False, or None where it cannot be told; and the figure it rests on."""

    holds: bool | None
    figure: str


def sample_sd(values: Sequence[float]) -> float:
    """Sample standard deviation; nan of one value.

    >>> sample_sd([1.0, 3.0]), sample_sd([1.0])
    (1.4142135623730951, nan)
    """
    return stdev(values) if len(values) > 1 else math.nan


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and standard error.

    >>> estimate([1.0, 3.0])
    Estimate(value=2.0, error=1.0, seeds=2)
    """
    return Estimate(fmean(values), sample_sd(values) / math.sqrt(len(values)), len(values))


def difference(ones: Sequence[float], others: Sequence[float]) -> Estimate:
    """mean(ones) - mean(others), with the standard error of the two together.

    >>> difference([2.0, 4.0], [1.0, 1.0])
    Estimate(value=2.0, error=1.0, seeds=2)
    """
    one, other = estimate(ones), estimate(others)
    return Estimate(one.value - other.value, math.hypot(one.error, other.error), min(one.seeds, other.seeds))


def mean_of(parts: Sequence[Estimate]) -> Estimate:
    """The mean of independent estimates, such as one for each budget.

    >>> mean_of([Estimate(1.0, 0.3, 3), Estimate(2.0, 0.4, 3)])
    Estimate(value=1.5, error=0.25, seeds=3)
    """
    error = math.hypot(*(part.error for part in parts)) / len(parts)
    return Estimate(fmean(part.value for part in parts), error, min(part.seeds for part in parts))


def at_least(found: Estimate, bound: float, what: str, unit: str = "") -> Finding:
    """Whether the true value is at least `bound`.

    >>> at_least(Estimate(1.0, 0.1, 3), 0.0, "gain").holds, at_least(Estimate(-1.0, 0.1, 3), 0.0, "gain").holds
    (True, False)
    >>> at_least(Estimate(0.1, 0.1, 3), 0.0, "gain", " %")
    Finding(holds=None, figure='gain +0.1 ± 0.1 %, bound 0 %: open, 12 seeds would settle it')
    """
    return _judged(found, found.value - bound, f"{what} {_shown(found, unit)}, bound {bound:.3g}{unit}")


def at_most(found: Estimate, bound: float, what: str, unit: str = "") -> Finding:
    """Whether the true value is at most `bound`."""
    return _judged(found, bound - found.value, f"{what} {_shown(found, unit)}, bound {bound:.3g}{unit}")


def within(found: Estimate, tolerance: float, what: str, unit: str = "") -> Finding:
    """Whether the true value is within `tolerance` of zero, on both sides.

    >>> within(Estimate(0.1, 0.1, 3), 1.0, "difference").holds, within(Estimate(2.0, 0.1, 3), 1.0, "difference").holds
    (True, False)
    """
    return _judged(
        found, tolerance - abs(found.value), f"{what} {_shown(found, unit)}, tolerance {tolerance:.3g}{unit}"
    )


def every(findings: Sequence[Finding]) -> Finding:
    """All of them together: false if one is, open if one is and none is false.

    >>> every([Finding(True, "a"), Finding(None, "b")])
    Finding(holds=None, figure='a; b')
    """
    verdicts = [each.holds for each in findings]
    holds = False if False in verdicts else None if None in verdicts else True
    return Finding(holds, "; ".join(each.figure for each in findings))


def _judged(found: Estimate, inside: float, text: str) -> Finding:
    """`inside`: how far the estimate is on the right side of the bound."""
    if math.isnan(found.error):
        return Finding(None, f"{text}: one seed, its spread is not known; run at least 3")
    if abs(inside) >= ERRORS * found.error:
        return Finding(inside >= 0, text)
    needed = found.seeds * (ERRORS * found.error / inside) ** 2 if inside else math.inf
    return Finding(
        None, f"{text}: open, {f'{math.ceil(needed)} seeds' if needed < 1000 else 'no number of seeds'} would settle it"
    )


def _shown(found: Estimate, unit: str) -> str:
    error = "" if math.isnan(found.error) else f" ± {found.error:.2g}"
    return f"{found.value:+.3g}{error}{unit}"


def parabola_peak(x: Sequence[float], y: Sequence[float]) -> tuple[float, bool]:
    """Where the parabola through the best point and its two neighbours has its top, and whether the points bracket it.

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
