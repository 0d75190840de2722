"""Step functions: ratios, matched momentum, moving targets. `scheduler.Scheduler` writes them into parameter groups.

A step function takes the number of completed steps, so update t = 1..T uses f(t-1); past the end it keeps its last
value. Those of this module are frozen dataclasses, so they compare, print and pickle.
"""

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Literal

from steadynorm import theory

StepFunction = Callable[[int], float]

# completed part of the decay -> remaining part of the ratio
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda x: 1 - x,
    "cosine": lambda x: (1 + math.cos(math.pi * x)) / 2,
}
_GAIN_POWER = {"gamma-eff": 0.5, "gamma-prime": 1.0}  # gamma G^power is what follows the ratio


@dataclass(frozen=True)
class Ratio:
    """(step+1)/warmup for `warmup` steps, 1 for `hold` steps, then `decay` steps down to `final` (0: no decay)."""

    warmup: int = 0
    hold: int = 0
    decay: int = 0
    final: float = 0.0
    shape: str = "linear"

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        since = step - self.warmup - self.hold
        left = _SHAPES[self.shape](min(since / self.decay, 1.0)) if since > 0 and self.decay else 1.0
        return left + (1 - left) * self.final


@dataclass(frozen=True)
class Between:
    """ratio(step) * start + (1 - ratio(step)) * end."""

    start: float
    end: float
    ratio: StepFunction

    def __call__(self, step: int) -> float:
        ratio = self.ratio(step)
        return ratio * self.start + (1 - ratio) * self.end


def constant(warmup: int = 0) -> Ratio:
    """Return the ratio 1 after a linear warmup, t/warmup at update t.

    Examples:
        >>> [constant(warmup=4)(step) for step in range(5)]
        [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    _check_count("warmup", warmup)
    return Ratio(warmup)


def cosine(total: int, warmup: int = 0, final: float = 0.0) -> Ratio:
    """Return half a cosine from 1 to `final`: (1 + cos(pi (t-1)/T))/2 at update t, after a warmup over the rest of T.

    Examples:
        >>> [round(cosine(4)(step), 3) for step in range(6)]
        [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return constant_then_decay(total, _after_warmup(total, warmup), warmup, final, "cosine")


def linear(total: int, warmup: int = 0, final: float = 0.0) -> Ratio:
    """Return a straight line from 1 to `final`: 1 - (t-1)/T at update t, after a warmup over the rest of T.

    Examples:
        >>> [linear(6, warmup=2)(step) for step in range(7)]
        [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return constant_then_decay(total, _after_warmup(total, warmup), warmup, final, "linear")


def constant_then_decay(
    total: int, decay: int, warmup: int = 0, final: float = 0.0, shape: Literal["linear", "cosine"] = "linear"
) -> Ratio:
    """Return the ratio 1 until the last `decay` steps, then a line or half a cosine to `final` (trapezoid, WSD).

    Examples:
        >>> [constant_then_decay(8, decay=4, warmup=2)(step) for step in range(9)]
        [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    hold = _after_warmup(total, warmup) - decay
    _check_count("decay", decay)
    _check_choice("shape", shape, _SHAPES)
    if hold < 0:
        raise ValueError(f"decay={decay} and warmup={warmup} exceed total={total}; shorten one or raise total")
    if not 0 <= final <= 1:
        raise ValueError(f"final={final} is outside [0, 1]; it is the ratio left at the end")
    return Ratio(warmup, hold, decay, final, shape)


def between(start: float, end: float, ratio: StepFunction) -> Between:
    """Return r start + (1 - r) end, which goes from `start` (ratio 1) to `end` (ratio 0).

    Examples:
        >>> [between(3.0, 1.0, linear(4))(step) for step in range(5)]
        [3.0, 2.5, 2.0, 1.5, 1.0]
    """
    return Between(start, end, ratio)


def linear_alpha(start: float, end: float, total: int) -> Between:
    """Return an alpha that goes straight from `start` to `end` (the paper's stress test: 0.01 to 1).

    Examples:
        >>> [linear_alpha(0.5, 1.0, 4)(step) for step in range(5)]
        [0.5, 0.625, 0.75, 0.875, 1.0]
    """
    _check_alpha("start", start)
    _check_alpha("end", end)
    return between(start, end, linear(total))


def cosine_norm(start: float, end: float, total: int) -> Between:
    """Return a norm target that moves like a cosine lr: C_t^2 = r C_0^2 + (1 - r) C_T^2, r = (1 + cos(pi (t-1)/T))/2.

    Examples:
        >>> [round(cosine_norm(4.0, 1.0, 2)(step), 6) for step in range(3)]
        [4.0, 2.5, 1.0]
    """
    for name, norm in (("start", start), ("end", end)):
        if not 0 < norm < math.inf:
            raise ValueError(f"{name}={norm} is not a steady_norm_sq; pass a finite number above 0")
    return between(start, end, cosine(total))


@dataclass(frozen=True)
class MatchedMomentum:
    """Decay the effective learning rate by raising alpha, so that gamma_eff(t) = ratio(t) gamma_eff(0) at every step.

        G(alpha_t) = r_t^2 G(alpha_0);   plain momentum: s = sqrt((2 - alpha_0)/alpha_0) r_t,  alpha_t = 2/(1 + s^2)

    gamma is constant until alpha reaches alpha_max; from there alpha is constant and gamma decays. A warmup inside `ratio`
    would also be followed by alpha, down from alpha_max; `warmup` therefore ramps lr instead, with alpha at its start.

    The step function `.alpha` gives values, `.lr` ratios to the group's own lr.

    Args:
        alpha_0: Where alpha starts, 0 < alpha_0 <= alpha_max.
        alpha_max: Where alpha stops, at most 1.
        ratio: step -> [0, 1], which gamma_eff follows, counted from the end of warmup.
        warmup: Steps of linear lr warmup before that.
        nesterov: Whether the optimizer uses Nesterov momentum, which changes G.
        match: "gamma-prime" lets gamma' = gamma G follow the ratio, the paper's erroneous match, for comparison only.

    Examples:
        >>> matched = MatchedMomentum(0.1, 0.5, cosine(1000))
        >>> round(matched.alpha(0), 6), round(matched.alpha(500), 6), matched.alpha(900)
        (0.1, 0.347826, 0.5)
        >>> matched.lr(500), round(matched.lr(900), 6)
        (1.0, 0.061586)
    """

    alpha_0: float
    alpha_max: float
    ratio: StepFunction
    warmup: int = 0
    nesterov: bool = False
    match: Literal["gamma-eff", "gamma-prime"] = "gamma-eff"

    def __post_init__(self) -> None:
        _check_alpha("alpha_0", self.alpha_0)
        _check_alpha("alpha_max", self.alpha_max)
        _check_count("warmup", self.warmup)
        _check_choice("match", self.match, _GAIN_POWER)
        if self.alpha_max < self.alpha_0:
            raise ValueError(f"alpha_max={self.alpha_max} is below alpha_0={self.alpha_0}; alpha only rises, swap them")

    @property
    def alpha(self) -> "MatchedPart":
        return MatchedPart(self, 0)

    @property
    def lr(self) -> "MatchedPart":
        return MatchedPart(self, 1)

    def at(self, step: int) -> tuple[float, float]:
        """Return alpha and the lr ratio at this step."""
        if step < self.warmup:
            return self.alpha_0, (step + 1) / self.warmup
        ratio = float(self.ratio(step - self.warmup))
        if not 0 <= ratio <= 1 + 1e-9:  # rejects NaN as well
            raise ValueError(f"MatchedMomentum: ratio is {ratio} at step {step}, outside [0, 1]; let 1 be its maximum")
        ratio = min(ratio, 1.0)
        power, start = _GAIN_POWER[self.match], theory.momentum_gain(self.alpha_0, nesterov=self.nesterov)
        least = theory.momentum_gain(self.alpha_max, nesterov=self.nesterov)
        gain = start * ratio ** (1 / power)
        if gain <= least:
            return self.alpha_max, ratio * (start / least) ** power
        return alpha_for_gain(gain, self.alpha_0, self.alpha_max, nesterov=self.nesterov), 1.0


@dataclass(frozen=True)
class MatchedPart:
    """One of the two step functions of a MatchedMomentum."""

    matched: MatchedMomentum
    index: int

    def __call__(self, step: int) -> float:
        return self.matched.at(step)[self.index]


def alpha_for_gain(gain: float, low: float, high: float, *, nesterov: bool = False) -> float:
    """Return the alpha in [low, high] with momentum_gain(alpha) = gain: 2/(1 + gain), for Nesterov by bisection.

    Both gains fall strictly from alpha = 0 to 1 (Nesterov's with slope 0 at 1), so there is one such alpha.

    >>> round(alpha_for_gain(19.0, 0.01, 1.0), 12)
    0.1
    """
    if not nesterov:
        return min(max(2 / (1 + gain), low), high)
    while low < (middle := (low + high) / 2) < high:
        if theory.momentum_gain(middle, nesterov=True) > gain:
            low = middle
        else:
            high = middle
    return low


def _after_warmup(total: int, warmup: int) -> int:
    _check_count("total", total, least=1)
    _check_count("warmup", warmup)
    if warmup > total:
        raise ValueError(f"warmup={warmup} exceeds total={total}; total counts the warmup, so raise it")
    return total - warmup


def _check_count(name: str, count: int, least: int = 0) -> None:
    if not isinstance(count, int) or count < least:
        raise ValueError(f"{name}={count!r} is not a number of steps; pass an int of at least {least}")


def _check_alpha(name: str, alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise ValueError(f"{name}={alpha} is outside (0, 1]; alpha is the weight of the new gradient, 1 - momentum")


def _check_choice(name: str, choice: str, choices: Collection[str]) -> None:
    if choice not in choices:
        raise ValueError(f"{name}={choice!r} is unknown; choose from {sorted(choices)}")
