"""Momentum as a linear filter: how the input of an update correlates with itself over time.

Every optimizer here keeps a buffer m and feeds x to its update rule, both linear in the new gradient g:

    x_t = p m_{t-1} + q g_t        m_t = r m_{t-1} + s g_t

Heavy ball, Nesterov, trace, Lion and Adam differ only in (p, q, r, s), so steady state and forecast are written once
for all of them.
"""

import math
from typing import NamedTuple

import numpy as np

FADES_BELOW = 1e-5  # the share of its momentum below which a normalised update fades, where gradients have stopped


class Filter(NamedTuple):
    """The coefficients of one step: x = p m + q g, then m = r m + s g."""

    p: float
    q: float
    r: float
    s: float


class Correlation(NamedTuple):
    """The correlation of update inputs k >= 1 steps apart, corr(x_{t-k}, x_t) = first * ratio^(k-1).

    This is the paper's kappa (1-alpha)^k with first = kappa ratio. A float near 1 loses the digits that matter, those of
    alpha, so the distance to 1 is stored as well.
    """

    first: float
    ratio: float
    first_gap: float  # 1 - first
    ratio_gap: float  # 1 - ratio


class Step(NamedTuple):
    """The second moments of one step, for independent gradients of unit variance."""

    var_x: float  # E x_t^2
    var_m: float  # E m_t^2
    to_x: float  # corr(m_{t-1}, x_t)
    to_m: float  # corr(m_{t-1}, m_t)
    x_m: float  # corr(x_t, m_t)


def ema(alpha: float, *, nesterov: bool = False) -> Filter:
    """Return the filter of an exponential moving average, m = (1-alpha) m + alpha g and x = m.

    With Nesterov, x = (1-alpha) m_t + alpha g = (1-alpha)^2 m + alpha (2-alpha) g.

    >>> ema(0.25)
    Filter(p=0.75, q=0.25, r=0.75, s=0.25)
    """
    keep = 1 - alpha
    if nesterov:
        return Filter(keep * keep, alpha * (2 - alpha), keep, alpha)
    return Filter(keep, alpha, keep, alpha)


def trace(mu: float, *, nesterov: bool = False) -> Filter:
    """Return the filter of trace momentum, m = mu m + g and x = m.

    With Nesterov, x = mu m_t + g = mu^2 m + (1 + mu) g.

    >>> trace(0.5, nesterov=True)
    Filter(p=0.25, q=1.5, r=0.5, s=1.0)
    """
    if nesterov:
        return Filter(mu * mu, 1 + mu, mu, 1.0)
    return Filter(mu, 1.0, mu, 1.0)


def lion(beta1: float, beta2: float) -> Filter:
    """Return Lion's filter, x = beta1 m + (1-beta1) g, then m = beta2 m + (1-beta2) g."""
    return Filter(beta1, 1 - beta1, beta2, 1 - beta2)


def advance(filter: Filter, var: float) -> Step:
    """Advance the second moments by one step from `var` = E m_{t-1}^2.

        V = r^2 v + s^2,   W = p^2 v + q^2
        corr(m_{t-1}, m_t) = r sqrt(v/V),  corr(m_{t-1}, x_t) = p sqrt(v/W),  corr(x_t, m_t) = (p r v + q s)/sqrt(W V)

    >>> advance(ema(0.5), 0.0).x_m
    1.0
    """
    p, q, r, s = filter
    var_m = r * r * var + s * s
    var_x = p * p * var + q * q
    to_m = r * math.sqrt(var / var_m) if var_m > 0 else 0.0
    to_x = p * math.sqrt(var / var_x) if var_x > 0 else 0.0
    both = math.sqrt(var_x * var_m)
    x_m = min((p * r * var + q * s) / both, 1.0) if both > 0 else 0.0
    return Step(var_x, var_m, to_x, to_m, x_m)


def variance(filter: Filter, updates: int | None = None) -> float:
    """Return E m^2 after a number of updates from m = 0, or in the limit (None), for gradients of unit variance.

        v_n = s^2 (1 - r^(2n)) / (1 - r^2)

    >>> variance(ema(0.5)), variance(ema(0.5), 1)
    (0.3333333333333333, 0.25)
    """
    begun = 1.0 if updates is None else 1 - filter.r ** (2 * updates)
    return filter.s**2 * begun / (_gap(filter) * (1 + filter.r))


def _gap(filter: Filter) -> float:
    """Return 1 - r; where this is alpha, return alpha itself, because r has lost its trailing digits."""
    return filter.s if filter.r == 1 - filter.s else 1 - filter.r


def steady_correlation(filter: Filter) -> Correlation:
    """Return the correlation of successive inputs at steady state, v = s^2 / (1 - r^2).

        first = p (p r v + q s) / (p^2 v + q^2)

    Numerator and denominator are divided by v, with w = 1 - r^2 and h = q/s.

    >>> steady_correlation(ema(0.25))  # plain momentum: (1-alpha)^k
    Correlation(first=0.75, ratio=0.75, first_gap=0.25, ratio_gap=0.25)
    """
    p, q, r, s = filter
    gap = _gap(filter)
    if p == r and q == s:  # x is m: avoid rounding in the most common case
        return Correlation(r, r, gap, gap)
    return mixed_correlation(filter, gap)


def mixed_correlation(filter: Filter, gap: float) -> Correlation:
    """Return the same for any filter with gap = 1 - r, by arithmetic only: JAX traces it (`steadynorm.jax`)."""
    p, q, r, s = filter
    h, w = q / s, gap * (1 + r)
    var_x = p * p + h * h * w
    return Correlation(p * (p * r + h * w) / var_x, r, gap * (p * p + h * (h - p) * (1 + r)) / var_x, gap)


def check_single(name: str, value: float) -> None:
    """Raise TypeError if there are several values, of which Python's comparisons would make an obscure error."""
    if not isinstance(value, float) and math.prod(shape := np.shape(value)) != 1:
        raise TypeError(
            f"{name} has shape {tuple(shape)}, and this takes one number; call it for each element, or use "
            "steadynorm.theory.forecast, which takes arrays"
        )


def check_alpha(alpha: float) -> float:
    """Return alpha as a float; raise ValueError if it is outside (0, 1]."""
    check_single("alpha", alpha)
    if not 0 < alpha <= 1:
        raise ValueError(f"alpha={alpha} is outside (0, 1]; alpha is the weight of the new gradient, 1 - momentum")
    return float(alpha)


def check_beta(name: str, beta: float) -> float:
    """Return beta as a float; raise ValueError if it is outside [0, 1)."""
    check_single(name, beta)
    if not 0 <= beta < 1:
        raise ValueError(f"{name}={beta} is outside [0, 1)")
    return float(beta)
