"""The expected weight norm at every step of any schedule, and the alignment that momentum alone causes.

One scalar recursion per mode n of the overlap kernel (kernels.py), with the second moments of `momentum.advance`
before step t:

    N_t = (1-eta)^2 N_{t-1} + gamma^2 + 2 gamma (1-eta) sum_n a_n to_x^n D_n           N = E|theta|^2 / |u|^2
    D_n <- (1-eta) to_m^n D_n + gamma x_m^n
    E cos(theta_{t-1}, u_t) = - sum_n a_n to_x^n D_n / sqrt(N_{t-1})
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np

from steadynorm.theory.cautious import cautious_change
from steadynorm.theory.equilibrium import Kernel, as_kernel, eta_of
from steadynorm.theory.kernels import Floats, Overlap, vector_kernel
from steadynorm.theory.momentum import Filter, Step, advance, check_alpha, check_beta, ema, lion, trace

Series: TypeAlias = float | Sequence[float] | Floats

_CHUNK = 2048  # steps whose powers are taken at once: 2048 x 160 modes is 2.6 MB


@dataclass(frozen=True)
class ForecastState:
    """The state of a forecast between two steps, of one layer or of several that differ in the lengths of their updates.

    Attributes:
        norm_sq: N = E|theta|^2 / |u|^2, or one per layer.
        var: E m^2, for gradients of unit variance.
        overlaps: D_n for each mode of the kernel, (modes,) or (modes, layers).
    """

    norm_sq: float | Floats
    var: float
    overlaps: Floats


def initial_state(kernel: Overlap, *, start: float = 0.0, warm_momentum: bool = False) -> ForecastState:
    """Return the state before the first step.

    Args:
        kernel: The overlap kernel.
        start: |theta_0|^2 / |u|^2.
        warm_momentum: Whether m_0 is a gradient sample rather than 0.
    """
    return ForecastState(check_start(start), 1.0 if warm_momentum else 0.0, np.zeros(len(kernel.n)))


def steady_overlap(kernel: Overlap, step: Step, lr: float, eta: float) -> Floats:
    """Return the fixed point of D <- (1 - eta) to_m^n D + lr x_m^n: D_n after many steps with the same settings."""
    return lr * step.x_m**kernel.n / (1 - (1 - eta) * step.to_m**kernel.n)


def advance_forecast(
    state: ForecastState,
    kernel: Overlap,
    filters: Iterable[Filter],
    lr: Floats,
    eta: Floats,
    *,
    cautious: bool = False,
) -> tuple[Floats, Floats, ForecastState]:
    """Continue a forecast for len(lr) steps.

    Args:
        state: Where to start.
        kernel: The overlap kernel.
        filters: The momentum filter of each step.
        lr: gamma of each step; (steps, layers) if the state has layers, whose updates differ in length.
        eta: lr * weight_decay of each step.
        cautious: Whether only coordinates whose update and weight agree in sign decay.

    Returns:
        N after each step, the expected cosine at each step, and the state after the last one.
    """
    steps, var = [], state.var
    for filter in filters:
        steps.append(advance(filter, var))
        var = steps[-1].var_m
    to_x, to_m, x_m = (np.array([getattr(s, name) for s in steps]) for name in ("to_x", "to_m", "x_m"))
    norms, crosses = np.empty(lr.shape), np.empty(lr.shape)
    norm, overlaps = state.norm_sq, state.overlaps.copy()
    per_mode = (slice(None), *[None] * (lr.ndim - 1))  # broadcasts (modes,) over layers
    with np.errstate(over="ignore", invalid="ignore"):  # a forecast may grow without bound
        for low in range(0, len(lr), _CHUNK):
            part = slice(low, low + _CHUNK)
            weights = kernel.a * _powers(to_x[part], kernel.n)  # (steps, modes)
            keep, reach = _powers(to_m[part], kernel.n), _powers(x_m[part], kernel.n)
            for t, (g, e) in enumerate(zip(lr[part], eta[part].tolist(), strict=True)):
                cross = weights[t] @ overlaps
                crosses[low + t] = cross
                if cautious:
                    norm, kept, push = cautious_change(norm, cross, g, e, kernel)
                else:
                    norm, kept, push = (1 - e) ** 2 * norm + g * g + 2 * g * (1 - e) * cross, 1 - e, g
                norms[low + t] = norm
                overlaps *= (kept * keep[t])[per_mode]
                overlaps += push * reach[t][per_mode]
        before = np.concatenate([np.broadcast_to(state.norm_sq, lr.shape[1:])[None], norms])[: len(lr)]
        cosines = np.divide(-crosses, np.sqrt(before), out=np.zeros(lr.shape), where=before > 0)
    return norms, cosines, ForecastState(norm if lr.ndim > 1 else float(norm), var, overlaps)


def _powers(base: Floats, n: Floats) -> Floats:
    """Return base[t] ** n[k] for base in [0, 1] as (steps, modes); a constant base is computed once."""
    if len(base) and np.all(base == base[0]):
        return np.broadcast_to(base[0] ** n, (len(base), len(n)))
    with np.errstate(divide="ignore"):
        return np.exp(np.log(base)[:, None] * n)


def forecast(
    lr: Series,
    weight_decay: Series,
    alpha: Series,
    *,
    nesterov: bool = False,
    overlap: Kernel = "linear",
    start: float = 0.0,
    warm_momentum: bool = False,
) -> Floats:
    """Return the expected |theta_t|^2 / |u|^2 after each step t = 1..T of a schedule.

    Args:
        lr: One value per step, or a number for all steps; so are weight_decay and alpha. At least one is an array.
        weight_decay: lambda of each step.
        alpha: Weight of the new gradient in the momentum.
        nesterov: Whether the momentum is Nesterov's.
        overlap: "linear" or an Overlap.
        start: |theta_0|^2 / |u|^2.
        warm_momentum: Whether m_0 is a gradient sample rather than 0.

    Examples:
        >>> norm = forecast(np.full(20000, 0.01), 0.08, 0.1)
        >>> from steadynorm.theory import steady_norm_sq
        >>> round(float(norm[-1]) / steady_norm_sq(0.01, 0.08, 0.1), 6)
        1.0
    """
    return _forecast_ema(lr, weight_decay, alpha, nesterov, overlap, start, warm_momentum)[0]


def forecast_cautious(
    lr: Series,
    weight_decay: Series,
    alpha: Series,
    *,
    nesterov: bool = False,
    overlap: Kernel = "linear",
    start: float = 0.0,
) -> Floats:
    """Return the expected |theta_t|^2 / |u|^2 under cautious decay; the arguments are those of `forecast`.

    Examples:
        >>> norm = forecast_cautious(np.full(20000, 0.01), 0.08, 0.1)
        >>> from steadynorm.theory import cautious_steady_norm_sq
        >>> round(float(norm[-1]) / cautious_steady_norm_sq(0.01, 0.08, 0.1), 6)
        1.0
    """
    return _forecast_ema(lr, weight_decay, alpha, nesterov, overlap, start, False, cautious=True)[0]


def expected_alignment(
    lr: Series,
    weight_decay: Series,
    alpha: Series,
    *,
    nesterov: bool = False,
    overlap: Kernel = "linear",
    start: float = 0.0,
    warm_momentum: bool = False,
) -> Floats:
    """Return the E cos(theta_{t-1}, u_t) that momentum alone causes; the arguments are those of `forecast`.

    It is negative because theta moves by -u, and 0 while theta is 0.

    Examples:
        >>> bool(expected_alignment(np.full(100, 0.01), 0.08, 1.0).any())  # no momentum, no alignment
        False
    """
    return _forecast_ema(lr, weight_decay, alpha, nesterov, overlap, start, warm_momentum)[1]


def _forecast_ema(
    lr: Series,
    weight_decay: Series,
    alpha: Series,
    nesterov: bool,
    overlap: Kernel,
    start: float,
    warm: bool,
    *,
    cautious: bool = False,
) -> tuple[Floats, Floats]:
    kernel = as_kernel(overlap)
    gamma, decay, a = _series(lr=lr, weight_decay=weight_decay, alpha=alpha)
    filters = (ema(check_alpha(value), nesterov=nesterov) for value in a.tolist())
    state = initial_state(kernel, start=start, warm_momentum=warm)
    return advance_forecast(state, kernel, filters, gamma, gamma * decay, cautious=cautious)[:2]


def forecast_lion(
    lr: Series, weight_decay: Series, beta1: Series = 0.9, beta2: Series = 0.99, *, start: float = 0.0
) -> Floats:
    """Return the expected |theta_t|^2 / |u|^2 under Lion: the sign kernel with Lion's moments.

    |u|^2 is the number of elements.

    Examples:
        >>> len(forecast_lion(np.full(10, 1e-3), 1.0))
        10
    """
    kernel = vector_kernel(1)
    gamma, decay, b1, b2 = _series(lr=lr, weight_decay=weight_decay, beta1=beta1, beta2=beta2)
    filters = (
        lion(check_beta("beta1", one), check_beta("beta2", two))
        for one, two in zip(b1.tolist(), b2.tolist(), strict=True)
    )
    return advance_forecast(initial_state(kernel, start=start), kernel, filters, gamma, gamma * decay)[0]


def forecast_adam(lr: Series, weight_decay: Series, beta1: Series = 0.9, *, start: float = 0.0) -> Floats:
    """Return the expected theta_i^2 per element under AdamW with a settled second moment.

    `start` is the mean square of theta_0.

        u = s m,  s = 1/(1 - b1^t)
        N = (1-eta)^2 N + gamma^2 s^2 V + 2 gamma (1-eta) s b1 D,    D = (1-eta) b1 D + gamma s V

    Examples:
        >>> round(float(forecast_adam(np.full(60000, 1e-3), 0.1, 0.9)[-1]), 5)  # gamma / (2 lambda)
        0.005
    """
    gamma, decay, b1 = _series(lr=lr, weight_decay=weight_decay, beta1=beta1)
    # As in torch, bias correction under a changing beta1 is 1 - beta1^t with the current beta1.
    scales = [1 / (1 - check_beta("beta1", b) ** t) for t, b in enumerate(b1.tolist(), start=1)]
    filters = (ema(1 - b) for b in b1.tolist())
    return _forecast_linear(filters, scales, gamma, gamma * decay, start)


def forecast_sgd(
    lr: Series,
    weight_decay: Series,
    mu: Series,
    *,
    nesterov: bool = False,
    dampened: bool = False,
    start: float = 0.0,
) -> Floats:
    """Return the expected theta_i^2 under SGD with decoupled decay, for gradients of unit variance per element.

        trace: m = mu m + g        dampened: m = mu m + (1 - mu) g

    Examples:
        >>> bool(forecast_sgd(np.full(10, 0.1), 0.1, 0.9)[-1] > forecast_sgd(np.full(10, 0.1), 0.1, 0.0)[-1])
        True
    """
    gamma, decay, m = _series(lr=lr, weight_decay=weight_decay, mu=mu)
    m = [check_beta("mu", v) for v in m.tolist()]
    filters = (ema(1 - v, nesterov=nesterov) if dampened else trace(v, nesterov=nesterov) for v in m)
    return _forecast_linear(filters, [1.0] * len(gamma), gamma, gamma * decay, start)


def _forecast_linear(
    filters: Iterable[Filter], scales: Sequence[float], lr: Floats, eta: Floats, start: float
) -> Floats:
    """Forecast an update that is linear in the momentum, u = scale x, by covariances instead of correlations."""
    norm, var, overlap = check_start(start), 0.0, 0.0
    out = np.empty(len(lr))
    for t, (f, scale, g, e) in enumerate(zip(filters, scales, lr.tolist(), eta.tolist(), strict=True)):
        covariance = f.p * f.r * var + f.q * f.s
        step = advance(f, var)
        g *= scale
        norm = (1 - e) ** 2 * norm + g * g * step.var_x + 2 * g * (1 - e) * f.p * overlap
        overlap = (1 - e) * f.r * overlap + g * covariance
        var = step.var_m
        out[t] = norm
    return out


def check_start(start: float) -> float:
    """Return |theta_0|^2 / |u|^2 as a float; raise ValueError if it is negative or not finite."""
    if not (start >= 0 and math.isfinite(start)):
        raise ValueError(f"start={start} must be finite and not negative: it is |theta_0|^2 / |u|^2")
    return float(start)


def _series(**values: Series) -> list[Floats]:
    """Broadcast numbers to the arrays' common length, and check lr and decay."""
    arrays = {name: np.atleast_1d(np.asarray(value, dtype=np.float64)) for name, value in values.items()}
    if all(np.ndim(value) == 0 for value in values.values()):
        raise ValueError(f"forecast: one of {', '.join(values)} must be an array with one value per step")
    if deep := [name for name, value in values.items() if np.ndim(value) > 1]:
        raise ValueError(f"forecast: {deep[0]} has {np.ndim(values[deep[0]])} dimensions; pass one value per step")
    lengths = {name: len(array) for name, array in arrays.items() if np.ndim(values[name]) > 0}
    if len(set(lengths.values())) > 1:
        raise ValueError(f"forecast: arrays have different lengths: {lengths}")
    length = next(iter(lengths.values()))
    for name, array in arrays.items():
        if not (fine := np.isfinite(array)).all():
            raise ValueError(
                f"forecast: {name} holds {array[~fine][0]} at step {int(np.argmin(fine))}; it must be finite"
            )
    out = [np.broadcast_to(array, (length,)) for array in arrays.values()]
    if length:
        eta_of(float(out[0].min()), float(out[1].min()))
        worst = int(np.argmax(out[0] * out[1]))
        eta_of(float(out[0][worst]), float(out[1][worst]))
    return out
