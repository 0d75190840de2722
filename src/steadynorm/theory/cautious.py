"""Cautious decay: decay only the coordinates in which update and weight agree in sign.

    theta_t = theta_{t-1} - eta 1[u_t theta_{t-1} > 0] theta_{t-1} - gamma u_t

Since 1[u theta > 0] theta = (theta + |theta| sign u) / 2, cautious decay is half the plain decay and a second update,
(eta/2) |theta| sign u, which momentum repeats just as it repeats u. Write sigma^2 = E theta_i^2 in units of E u_i^2, take
theta_i and the input x_i of the update as Gaussian with correlation -c, and let e = E|u_i| (1 for signs, sqrt(2/pi) for
Gaussian elements). Momentum then remembers updates of length

    push = gamma + (eta/2) E|theta_i u_i| = gamma + (eta/2) e sqrt(2/pi) sigma p(c)
    p(c) = sqrt(1-c^2) + c asin c  for Gaussian elements,  1 for signs

theta overlaps with the next update by

    cross = -E[theta_{t-1} u_t] = push sum_k (1-eta/2)^(k-1) f(r_k) = push (G - 1) / (2 - eta),    G = G(alpha, eta/2)
    c = e sqrt(pi/2) cross / sigma

and the mask, which spares the coordinates that momentum enlarges, decays the share g(c) of |theta|^2. The balance of
E|theta|^2 over one step is

    sigma^2 (2 eta - eta^2) g(c) = gamma^2 + 2 gamma cross + 2 gamma eta E[1[u theta > 0] theta u]
                                 = gamma (push (G + 1) - gamma)

As eta -> 0 this is the plain balance with half the decay: for the same norm, cautious decay has to be 1/g(0) = 2 times as
strong; at alpha = 0.1 it is 2.2 times at eta = 5e-4 and 3.1 times at 0.01.

Predicted over simulated sigma^2, where simulated coordinates are independent:

    alpha                 1      0.5    0.2    0.1    0.05   0.02        Nesterov 0.1   0.05
    Gaussian, eta 0.01    1.001  1.001  0.998  0.992  0.980  0.957                0.995  0.984
    sign, eta 0.01        1.001  1.001  1.000  0.998  0.995  0.985                0.999  0.994
    Gaussian, eta 0.003   1.000  1.002         1.001  0.998                       1.001  1.000
    polar, eta 0.01       1.008  1.007         1.002  0.988                       1.004

The last row is for 32x64 polar factors; its standard error is 0.6 %.

What is left out is of order eta/alpha: the tails of theta (kurtosis 4.4 at eta = 0.01 and alpha = 0.05), and past
updates (eta/2) |theta| sign u, whose overlap with sign u exceeds that with u. Where eta is not small beside alpha, the
norm is underestimated: updates then keep their sign for longer than decay remembers, and weights grow unmasked until it
flips. With eta near 1 the norm no longer falls as decay grows; of two decays for a norm, the weaker one is returned.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import TypeAlias

import numpy as np

from steadynorm.theory.equilibrium import (
    Kernel,
    UnreachableError,
    adam_update_sq,
    as_kernel,
    check_lr,
    check_target,
    eta_of,
    find_root,
    limit_decay,
    lion_correlation,
)
from steadynorm.theory.kernels import GAUSSIAN_MEAN_ABS, LINEAR, Floats, Overlap, vector_kernel
from steadynorm.theory.momentum import Correlation, check_alpha, check_beta, ema, steady_correlation

Values: TypeAlias = float | Floats


def cautious_share(c: float) -> float:
    """Return g(c), the share of |theta|^2 that cautious decay reaches when corr(theta_i, x_i) = -c.

        g(c) = 1/2 - (asin c + c sqrt(1 - c^2)) / pi

    for Gaussian theta_i and inputs x_i of the update.

    Examples:
        >>> cautious_share(0.0), cautious_share(1.0)
        (0.5, 0.0)
    """
    if not -1 <= c <= 1:
        raise ValueError(f"cautious_share: correlation c={c} is outside [-1, 1]")
    return float(_share(c))


def cautious_change(
    norm_sq: Values, cross: Values, lr: Values, eta: float, kernel: Overlap
) -> tuple[Values, float, Values]:
    """Take one step of the expected norm N = E|theta|^2 / |u|^2 under cautious decay, of one layer or an array of them.

        N <- N (1 - (2 eta - eta^2) g(c)) + gamma (2 push - gamma) + gamma (2 - eta) cross

    Args:
        norm_sq: N before the step.
        cross: -E<theta, u> / |u|^2 before the step.
        lr: gamma.
        eta: lr * weight_decay.
        kernel: The overlap kernel.

    Returns:
        N after the step, the factor 1 - eta/2 by which theta's overlap with past updates decays, and the length of the
        update that momentum remembers.
    """
    norm = np.sqrt(norm_sq)
    c = _correlation(cross, norm, kernel)
    push = _push(lr, eta, norm, c, kernel)
    decayed = norm_sq * (1 - eta * (2 - eta) * _share(c))
    return decayed + lr * (2 * push - lr) + lr * (2 - eta) * cross, 1 - eta / 2, push


def cautious_steady_norm_sq(
    lr: float, weight_decay: float, alpha: float, *, nesterov: bool = False, overlap: Kernel = "linear"
) -> float:
    """Return R^2 = E|theta|^2 / |u|^2 under cautious decay, once training has forgotten its start.

    Args:
        lr: gamma.
        weight_decay: lambda.
        alpha: Weight of the new gradient in the momentum.
        nesterov: Whether the momentum is Nesterov's.
        overlap: "linear" or an Overlap.

    Examples:
        >>> from steadynorm.theory import steady_norm_sq
        >>> plain, cautious = (norm_sq(1e-3, 0.1, 0.1) for norm_sq in (steady_norm_sq, cautious_steady_norm_sq))
        >>> round(cautious / plain, 2)  # 2 as eta -> 0
        2.09
    """
    correlation = steady_correlation(ema(check_alpha(alpha), nesterov=nesterov))
    return _norm_sq(float(lr), eta_of(lr, weight_decay), as_kernel(overlap), correlation)


def cautious_weight_decay_for(
    steady_norm_sq: float, lr: float, alpha: float, *, nesterov: bool = False, overlap: Kernel = "linear"
) -> float:
    """Return the coefficient of cautious decay whose steady state is `steady_norm_sq`.

    This is the inverse of `cautious_steady_norm_sq`, for the paper's linear kernel as well; lr = 0 gives 0.

    Raises:
        ValueError: If the target is so small that no decay up to eta = 1 reaches it.

    Examples:
        >>> decay = cautious_weight_decay_for(1.1875, 0.01, 0.1)
        >>> round(cautious_steady_norm_sq(0.01, decay, 0.1), 9)
        1.1875
    """
    correlation = steady_correlation(ema(check_alpha(alpha), nesterov=nesterov))
    target, lr = check_target("steady_norm_sq", steady_norm_sq), check_lr(lr)
    with _named(target, lr):
        return _decay_for(target, lr, as_kernel(overlap), correlation)


def cautious_lion_weight_decay_for(steady_norm_sq: float, lr: float, beta1: float, beta2: float) -> float:
    """Return the coefficient of cautious decay whose steady state under Lion is `steady_norm_sq`.

    Examples:
        >>> from steadynorm.theory import lion_weight_decay_for
        >>> ratio = cautious_lion_weight_decay_for(1.0, 1e-4, 0.9, 0.99) / lion_weight_decay_for(1.0, 1e-4, 0.9, 0.99)
        >>> round(ratio, 2)
        2.01
    """
    correlation = lion_correlation(beta1, beta2)
    target, lr = check_target("steady_norm_sq", steady_norm_sq), check_lr(lr)
    with _named(target, lr):
        return _decay_for(target, lr, vector_kernel(1), correlation)


def cautious_adam_weight_decay_for(mean_square: float, lr: float, beta1: float = 0.9) -> float:
    """Return the coefficient of cautious decay that brings AdamW's weights to this mean square per element.

    Examples:
        >>> round(cautious_adam_weight_decay_for(0.005, 1e-3), 1)  # plain decay: 0.1
        0.2
    """
    target, lr = check_target("mean_square", mean_square), check_lr(lr)
    update_sq = adam_update_sq(check_beta("beta1", beta1))
    with _named(target, lr):
        return _decay_for(target / update_sq, lr, LINEAR, steady_correlation(ema(1 - beta1)))


@contextlib.contextmanager
def _named(target: float, lr: float) -> Iterator[None]:
    """Raise UnreachableError about a target in the unit in which it was given; optimizers call each of them steady_norm_sq."""
    try:
        yield
    except UnreachableError:
        raise UnreachableError(
            f"steady_norm_sq={target:g} is unreachable at lr={lr:g} with cautious decay, however strong it is; lower lr or raise "
            "steady_norm_sq"
        ) from None


def _norm_sq(lr: float, eta: float, kernel: Overlap, correlation: Correlation) -> float:
    if lr == 0:
        return 0.0
    if eta == 0:
        return math.inf
    low = 0.5 * math.log(2 * kernel.gain_of(correlation, eta / 2) / (eta * (2 - eta)))  # the norm for c = 0, no push

    def miss(log_norm: float) -> float:
        return _surplus(math.exp(log_norm), eta, kernel, correlation)

    high = low + 0.5
    while miss(high) > 0:
        high += 0.5
    return (lr * math.exp(find_root(miss, low, high, low, -2.0))) ** 2


def _decay_for(target: float, lr: float, kernel: Overlap, correlation: Correlation) -> float:
    if lr == 0:
        return 0.0
    if lr * (lr / target) < 1e-290:  # eta would underflow; use the limit
        return limit_decay(target, lr, kernel.gain_of(correlation)) / cautious_share(0.0)
    return _eta_for(target, lr, kernel, correlation) / lr


@functools.lru_cache(maxsize=4096)
def _eta_for(target: float, lr: float, kernel: Overlap, correlation: Correlation) -> float:
    """Solve the balance for eta at sigma^2 = target, starting from its limit eta -> 0."""
    norm = math.sqrt(target) / lr

    def miss(log_eta: float) -> float:
        return _surplus(norm, math.exp(log_eta), kernel, correlation)

    low = -2 * math.log(norm)  # G >= 1 and g <= 1/2
    start = high = max(low, min(low + math.log(kernel.gain_of(correlation)), 0.0))
    before = low
    while (surplus := miss(high)) > 0:
        further = min(high + 0.5, 0.0)
        if further == high or surplus <= miss(further) < math.inf:  # with eta near 1 the norm no longer falls
            high = _lowest(miss, before, further)
            if miss(high) > 0:
                raise UnreachableError
            break
        before, high = high, further
    return math.exp(find_root(miss, low, high, start))


def _lowest(function: Callable[[float], float], low: float, high: float) -> float:
    """Return about where a function that falls and then rises is lowest, by golden sections.

    >>> round(_lowest(lambda x: (x - 1) ** 2, 0.0, 3.0), 6)
    1.0
    """
    section = (math.sqrt(5) - 1) / 2
    for _ in range(40):  # each leaves 0.62 of the interval
        left, right = high - section * (high - low), low + section * (high - low)
        low, high = (low, right) if function(left) <= function(right) else (left, high)
    return (low + high) / 2


def _surplus(norm: float, eta: float, kernel: Overlap, correlation: Correlation) -> float:
    """Return the logarithm of what one step adds to |theta|^2 over what decay removes; norm is sigma / gamma."""
    gain = kernel.gain_of(correlation, eta / 2)
    c = push = 0.0
    for _ in range(100):  # push depends on c weakly: a turn usually gains a digit or more
        push = _push(1.0, eta, norm, c, kernel)
        old, c = c, _correlation(push * (gain - 1) / (2 - eta), norm, kernel)
        if abs(c - old) < 1e-14:
            break
    removed = norm * eta * (2 - eta) * _share(c)
    return math.log((push * (gain + 1) - 1) / removed / norm) if removed > 0 else math.inf


def _share(c: Values) -> Values:
    return 0.5 - (np.arcsin(c) + c * np.sqrt(1 - c * c)) / math.pi


def _push(lr: Values, eta: float, norm: Values, c: Values, kernel: Overlap) -> Values:
    """Return gamma + (eta/2) E|theta_i u_i|; the kernel's spread takes p(c) from signs to Gaussian elements."""
    p = 1 + kernel.spread * (np.sqrt(1 - c * c) + c * np.arcsin(c) - 1)
    return lr + eta / 2 * kernel.mean_abs * GAUSSIAN_MEAN_ABS * norm * p


def _correlation(cross: Values, norm: Values, kernel: Overlap) -> Values:
    """Return c = e sqrt(pi/2) cross / sigma, at most 1; cross is 0 where theta is."""
    return np.minimum(kernel.mean_abs / GAUSSIAN_MEAN_ABS * cross / np.maximum(norm, 1e-200), 1.0)
