"""Steady state: weight norm, the decay that reaches it, effective learning rate, half-life. Floats in, floats out.

    theta_t = (1 - eta) theta_{t-1} - gamma u_t,    eta = gamma lambda

`steady_norm_sq` is R^2 = E|theta|^2 / |u|^2, the paper's C^2.
"""

import functools
import math
from collections.abc import Callable
from typing import TypeAlias

from steadynorm.theory.kernels import LINEAR, Overlap, vector_kernel
from steadynorm.theory.momentum import Correlation, check_alpha, check_beta, check_single, ema, lion, steady_correlation

Kernel: TypeAlias = str | Overlap  # "linear" or an Overlap


def momentum_gain(alpha: float, *, nesterov: bool = False) -> float:
    """Return the paper's momentum factor, G of the linear kernel at eta -> 0.

        (2 - a) / a,    Nesterov: (2 - a) / (a (1 + 4a - 6a^2 + 2a^3))

    Examples:
        >>> round(momentum_gain(0.1), 9), round(momentum_gain(0.1, nesterov=True), 4)
        (19.0, 14.158)
    """
    return linear_gain(check_alpha(alpha), nesterov=nesterov)


def linear_gain(a: float, *, nesterov: bool = False) -> float:
    """Return `momentum_gain` unchecked, by arithmetic only: JAX traces it (`steadynorm.jax`)."""
    denominator = a * (1 + 4 * a - 6 * a**2 + 2 * a**3) if nesterov else a
    return (2 - a) / denominator


def effective_lr(lr: float, alpha: float, *, nesterov: bool = False) -> float:
    """Return gamma_eff = gamma sqrt(G), the total contribution of a minibatch when updates are normalised.

    Examples:
        >>> round(effective_lr(0.01, 0.1), 6)
        0.043589
    """
    return check_lr(lr) * math.sqrt(momentum_gain(alpha, nesterov=nesterov))


def effective_lr_trace(lr: float, mu: float, *, nesterov: bool = False) -> float:
    """Return gamma_eff under trace momentum m = mu m + g.

        gamma sqrt((1+mu)/(1-mu)),    Nesterov: divided by sqrt(1 + 2 mu - 2 mu^3)

    A normalised update does not depend on the buffer's scale, so this is the EMA case with alpha = 1 - mu.

    Examples:
        >>> effective_lr_trace(0.01, 0.9) == effective_lr(0.01, 1 - 0.9)
        True
    """
    return effective_lr(lr, 1 - check_beta("mu", mu), nesterov=nesterov)


def half_life(lr: float, weight_decay: float) -> float:
    """Return the number of steps in which decay alone halves a weight, -ln 2 / ln(1 - gamma lambda).

    Examples:
        >>> round(half_life(0.001, 0.1), 1)
        6931.1
    """
    eta = eta_of(lr, weight_decay)
    if eta == 0:
        return math.inf
    return math.log(2) / -math.log1p(-eta) if eta < 1 else 0.0


def steady_norm_sq(
    lr: float,
    weight_decay: float,
    alpha: float,
    *,
    nesterov: bool = False,
    overlap: Kernel = "linear",
    limit: bool = False,
) -> float:
    """Return R^2 = E|theta|^2 / |u|^2 once training has forgotten its start.

        R^2 = gamma^2 G(alpha, eta) / (2 eta - eta^2)         limit: gamma^2 G(alpha, 0) / (2 eta), the paper's

    Gradients are assumed independent. Without decay the result is infinite.

    Args:
        lr: gamma.
        weight_decay: lambda.
        alpha: Weight of the new gradient in the momentum.
        nesterov: Whether the momentum is Nesterov's.
        overlap: "linear" (the paper's assumption) or an Overlap.
        limit: Whether to take the limit eta -> 0.

    Examples:
        >>> round(steady_norm_sq(0.01, 0.08, 0.1, limit=True), 6)
        1.1875
    """
    alpha = check_alpha(alpha)
    eta = eta_of(lr, weight_decay)
    if limit:
        kernel = as_kernel(overlap)
        gain = momentum_gain(alpha, nesterov=nesterov) if kernel is LINEAR else kernel.gain(alpha, nesterov=nesterov)
        if weight_decay == 0:
            return math.inf
        return float(lr) * gain / (2 * float(weight_decay))
    return _norm_sq(float(lr), eta, as_kernel(overlap), steady_correlation(ema(alpha, nesterov=nesterov)))


def weight_decay_for(
    steady_norm_sq: float, lr: float, alpha: float, *, nesterov: bool = False, overlap: Kernel = "linear"
) -> float:
    """Return the decay coefficient lambda_t whose steady state is `steady_norm_sq`.

    overlap="linear" is the paper's formula to the letter, (2 - a) / (2 a C^2) gamma (Nesterov: divided by
    1 + 4a - 6a^2 + 2a^3). An Overlap solves gamma^2 G(alpha, eta) = C^2 (2 eta - eta^2) for eta, the exact inverse
    of `steady_norm_sq`; a target below gamma^2 is then unreachable, because a single update is already
    larger. lr = 0 gives 0.

    Examples:
        >>> round(weight_decay_for(1.1875, 0.01, 0.1), 12)
        0.08
    """
    alpha, lr, target = check_alpha(alpha), check_lr(lr), check_target("steady_norm_sq", steady_norm_sq)
    if lr == 0:
        return 0.0
    if isinstance(overlap, Overlap):
        return _decay_for(target, lr, overlap, steady_correlation(ema(alpha, nesterov=nesterov)))
    as_kernel(overlap)
    return limit_decay(target, lr, momentum_gain(alpha, nesterov=nesterov))


def lion_steady_norm_sq(lr: float, weight_decay: float, beta1: float, beta2: float) -> float:
    """Return R^2 for Lion: the sign kernel with x = b1 m + (1-b1) g, m = b2 m + (1-b2) g.

    Examples:
        >>> lion_steady_norm_sq(1e-4, 1.0, 0.9, 0.99) > steady_norm_sq(1e-4, 1.0, 1.0)
        True
    """
    return _norm_sq(float(lr), eta_of(lr, weight_decay), vector_kernel(1), lion_correlation(beta1, beta2))


def lion_weight_decay_for(steady_norm_sq: float, lr: float, beta1: float, beta2: float) -> float:
    """Return the decay whose steady state under Lion is `steady_norm_sq`, the inverse of `lion_steady_norm_sq`.

    Examples:
        >>> decay = lion_weight_decay_for(0.01, 1e-3, 0.9, 0.99)
        >>> round(lion_steady_norm_sq(1e-3, decay, 0.9, 0.99), 9)
        0.01
    """
    correlation, lr, target = (
        lion_correlation(beta1, beta2),
        check_lr(lr),
        check_target("steady_norm_sq", steady_norm_sq),
    )
    return _decay_for(target, lr, vector_kernel(1), correlation) if lr > 0 else 0.0


def lion_gain(beta1: float, beta2: float, *, eta: float = 0.0) -> float:
    """Return G of Lion, which replaces (2 - alpha)/alpha.

    Examples:
        >>> lion_gain(0.9, 0.99) > 1
        True
    """
    return vector_kernel(1).gain_of(lion_correlation(beta1, beta2), float(eta))


def adam_mean_square(lr: float, weight_decay: float, beta1: float = 0.9, *, limit: bool = False) -> float:
    """Return the steady E theta_i^2 per element under AdamW: linear kernel, |u|^2 = (1-b1)/(1+b1) per element.

    The limit eta -> 0 is gamma / (2 lambda), which does not depend on beta1.

    Examples:
        >>> round(adam_mean_square(1e-3, 0.1, limit=True), 6)
        0.005
    """
    eta, beta1 = eta_of(lr, weight_decay), check_beta("beta1", beta1)
    if limit:
        return math.inf if weight_decay == 0 else float(lr) / (2 * float(weight_decay))
    return adam_update_sq(beta1) * _norm_sq(float(lr), eta, LINEAR, steady_correlation(ema(1 - beta1)))


def adam_update_sq(beta1: float) -> float:
    """Return |u|^2 of Adam per element, (1-b1)/(1+b1), once its second moment has settled."""
    return (1 - beta1) / (1 + beta1)


def adam_weight_decay_for(mean_square: float, lr: float) -> float:
    """Return lambda = gamma / (2 target), the decay that brings AdamW's weights to this mean square per element.

    Examples:
        >>> adam_weight_decay_for(0.005, 1e-3)
        0.1
    """
    return check_lr(lr) / (2 * check_target("mean_square", mean_square))


def lion_correlation(beta1: float, beta2: float) -> Correlation:
    """Return the correlation of successive inputs of Lion's sign."""
    return steady_correlation(lion(check_beta("beta1", beta1), check_beta("beta2", beta2)))


def _norm_sq(lr: float, eta: float, kernel: Overlap, correlation: Correlation) -> float:
    if lr == 0:
        return 0.0
    if eta == 0:
        return math.inf
    return norm_sq_from_gain(lr, eta, kernel.gain_of(correlation, eta))


def norm_sq_from_gain(lr: float, eta: float, gain: float) -> float:
    """Return R^2 = gamma^2 G / (2 eta - eta^2), unchecked, by arithmetic only: JAX traces it (`steadynorm.jax`)."""
    return lr / (eta * (2 - eta)) * lr * gain


def limit_decay(target: float, lr: float, gain: float) -> float:
    """Return the decay for a target at eta -> 0, by arithmetic only: JAX traces it."""
    return gain / (2 * target) * lr


def relative_decay(weight_decay: float, lr: float, peak_lr: float, factor: float = 1.0) -> float:
    """Return lambda (gamma_t / gamma_peak) F_t, the decay that keeps the norm of the peak, unchecked.

    F_t = G(momentum now) / G(initial momentum) is what a changing momentum does to the norm.

    Examples:
        >>> relative_decay(0.1, 5e-4, 1e-3)
        0.05
    """
    return weight_decay * (lr / peak_lr) * factor


def _decay_for(target: float, lr: float, kernel: Overlap, correlation: Correlation) -> float:
    if lr * (lr / target) < 1e-290:  # eta would underflow; use the limit
        return limit_decay(target, lr, kernel.gain_of(correlation))
    return _eta_for(target, lr, kernel, correlation) / lr


@functools.lru_cache(maxsize=4096)
def _eta_for(target: float, lr: float, kernel: Overlap, correlation: Correlation) -> float:
    """Solve R^2(eta) = target in log-log coordinates, where the curve is nearly straight."""
    if target < lr * lr * (1 - 1e-12):
        raise ValueError(
            f"steady_norm_sq={target:g} is unreachable at lr={lr:g}: one update alone has lr^2={lr * lr:g}; "
            "lower lr or raise steady_norm_sq"
        )
    goal = math.log(target)

    def miss(log_eta: float) -> float:
        return math.log(_norm_sq(lr, math.exp(log_eta), kernel, correlation)) - goal

    low, high = 2 * math.log(lr) - goal - math.log(2), 0.0  # G >= 1, so eta >= lr^2 / (2 target); eta = 1: R = lr
    return math.exp(find_root(miss, low, high, low + math.log(kernel.gain_of(correlation))))


def find_root(miss: Callable[[float], float], low: float, high: float, start: float, slope: float = -1.0) -> float:
    """Return where a falling function crosses zero between low and high, by bracketed secant steps.

    Args:
        miss: The function.
        low: Where it is not negative.
        high: Where it is not positive.
        start: The first guess; it is moved into the bracket.
        slope: The first guess of the function's derivative.
    """
    old = max(min(start, high), low)
    old_miss = miss(old)
    new = old
    for _ in range(60):
        if abs(old_miss) < 1e-15:
            break
        low, high = (old, high) if old_miss > 0 else (low, old)
        new = old - old_miss / slope
        if not low < new < high:
            new = (low + high) / 2
        new_miss = miss(new)
        if new == old or abs(new - old) < 1e-15 * max(1.0, abs(new)):
            break
        secant = (new_miss - old_miss) / (new - old)
        slope = secant if secant < -1e-9 else slope
        old, old_miss = new, new_miss
    return new


def as_kernel(overlap: Kernel) -> Overlap:
    if isinstance(overlap, Overlap):
        return overlap
    if overlap == "linear":
        return LINEAR
    raise ValueError(f"overlap={overlap!r}: pass 'linear' or an Overlap from steadynorm.theory.overlap(lmo, shape)")


def eta_of(lr: float, weight_decay: float) -> float:
    """Return eta = lr * weight_decay; raise ValueError if a factor is out of range or eta exceeds 1."""
    check_lr(lr)
    check_single("weight_decay", weight_decay)
    if not (weight_decay >= 0 and math.isfinite(weight_decay)):
        raise ValueError(f"weight_decay={weight_decay} must be finite and not negative")
    eta = float(lr) * float(weight_decay)
    if eta > 1:
        raise ValueError(f"lr * weight_decay = {eta:g} exceeds 1: a step would flip the weights; lower one of them")
    return eta


class UnreachableError(ValueError):
    """Raised for a target that no decay up to 1 per step reaches."""


def check_reachable(target: float, lr: float, weight_decay: float) -> float:
    """Return the decay for a target; raise UnreachableError if a step with it would flip the weights."""
    if lr * weight_decay > 1:
        raise UnreachableError(
            f"steady_norm_sq={target:g} is unreachable at lr={lr:g}: it would take a decay of {lr * weight_decay:.3g} "
            "per step; raise steady_norm_sq or lower lr"
        )
    return weight_decay


def check_lr(lr: float) -> float:
    """Return lr as a float; raise ValueError if it is negative or not finite."""
    check_single("lr", lr)
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr={lr} must be finite and not negative")
    return float(lr)


def check_target(name: str, value: float) -> float:
    """Return a target as a float; raise ValueError if it is not positive and finite."""
    check_single(name, value)
    if not (value > 0 and math.isfinite(value)):
        raise ValueError(f"{name}={value} must be positive and finite")
    return float(value)
