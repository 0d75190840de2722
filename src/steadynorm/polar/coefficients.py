"""Coefficients of the polynomials that take singular values to 1: PolarExpress's, and Muon's Newton-Schulz."""

import functools
import math
from typing import TypeAlias

import numpy as np

from steadynorm.theory.updates import NEWTON_SCHULZ

# Four steps of PolarExpress train as well as five (fig-polar-steps of the experiments); Muon takes five of its own. An SVD
# takes none, but the method may be changed in the middle of a run.
DEFAULT_STEPS = {"express": 4, "newton-schulz": 5, "svd": 5}
METHODS = tuple(DEFAULT_STEPS)

Quintic: TypeAlias = tuple[float, float, float]  # p(s) = a s + b s^3 + c s^5

# The iteration works on the Gram matrix from this d_in/d_out on, where that takes fewer operations. In bf16 it also needs
# this many rows: with fewer, rounding errors do not average out and the Gram form diverges.
GRAM_MIN_ASPECT = 1.5
GRAM_MIN_ROWS_BF16 = 192

_LOWER = 1e-3  # the composition need not be optimal for smaller relative singular values than this
_MAX_ERROR = 0.11  # nor for values so small that the worst error would exceed this (measured: best for 4 and 5 steps)
_SAFETY = 1.01  # room for bf16 rounding above 1
_CUSHION = 0.024  # keeps the early polynomials from being too steep for bf16


@functools.lru_cache(maxsize=64, typed=True)  # 4.0 is refused even where 4 is known
def find_quintics(method: str, steps: int, lower: float | None = None) -> tuple[Quintic, ...]:
    """Return the quintics of a method; none for svd.

    >>> len(find_quintics("express", 4))
    4
    """
    if method not in METHODS:
        raise ValueError(f"polar={method!r} is unknown; choose one of {', '.join(METHODS)}")
    if method == "svd":
        return ()
    if type(steps) is not int or not 1 <= steps <= 50:
        raise ValueError(f"polar_steps={steps!r} must be a whole number from 1 to 50")
    if method == "newton-schulz":
        return (NEWTON_SCHULZ,) * steps
    if lower is not None and not 0 < lower < 1:
        raise ValueError(f"polar: lower={lower} is outside (0, 1)")
    return _compose(steps, _lower_bound(steps) if lower is None else lower)[0]


def _lower_bound(steps: int) -> float:
    """Return, by bisection, the smallest lower bound at which this many steps keep the error within _MAX_ERROR.

    Few steps cannot lift tiny singular values to 1; trying would spoil all the others.
    """
    low, high = math.log(_LOWER), 0.0
    if _compose(steps, _LOWER)[1] <= _MAX_ERROR:
        return _LOWER
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if _compose(steps, math.exp(middle))[1] <= _MAX_ERROR else (middle, high)
    return math.exp(high)


def _compose(steps: int, lower: float) -> tuple[tuple[Quintic, ...], float]:
    """Return the quintics whose composition is minimax-optimal on [lower, 1], and its largest error.

    Greedy is optimal (Amsel et al., PolarExpress): each quintic is best for the interval the ones before it leave.
    """
    low, high = lower, 1.0
    quintics = []
    for k in range(steps):
        a, b, c = _best_quintic(max(low, _CUSHION * high), high)

        def p(s: float, a: float = a, b: float = b, c: float = c) -> float:
            return s * (a + s * s * (b + s * s * c))

        centre = (p(low) + p(high)) / 2 if low < _CUSHION * high else 1.0  # the cushion shifted it
        a, b, c = a / centre, b / centre, c / centre
        low = low * (a + low**2 * (b + low**2 * c))
        high = 2 - low
        shrink = _SAFETY if k < steps - 1 else 1.0
        quintics.append((a / shrink, b / shrink**3, c / shrink**5))
    return tuple(quintics), 1 - low


def _best_quintic(low: float, high: float) -> Quintic:
    """Return the odd quintic that minimises max |1 - p(s)| over [low, high], by Remez exchange on four points."""
    if low / high > 1 - 1e-5:
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    q, r = (3 * low + high) / 4, (low + 3 * high) / 4
    a = b = c = 0.0
    before = math.inf
    for _ in range(100):
        points = np.array([low, q, r, high])
        system = np.stack([points, points**3, points**5, np.array([1.0, -1.0, 1.0, -1.0])], axis=1)
        a, b, c, error = np.linalg.solve(system, np.ones(4))
        if abs(error - before) < 1e-15:
            break
        before = error
        root = math.sqrt(9 * b * b - 20 * a * c)
        q, r = (math.sqrt((-3 * b - sign * root) / (10 * c)) for sign in (1, -1))
    return float(a), float(b), float(c)
