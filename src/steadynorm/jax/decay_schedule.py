"""lambda_t as an optax schedule: the formulas of `steadynorm.theory`, on values that JAX may trace.

A value is a Python number, an optax schedule (count -> value) or an array, which under `optax.inject_hyperparams` is
traced. Numbers are checked when they are passed; schedules and arrays are not, because a compiled step cannot raise.
"""

from collections.abc import Callable
from typing import Any, TypeAlias, TypeGuard

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import numpy as np
import optax  # pyright: ignore[reportMissingImports]

from steadynorm.theory import Overlap
from steadynorm.theory.equilibrium import (
    adam_weight_decay_for,
    check_lr,
    check_reachable,
    check_target,
    eta_of,
    limit_decay,
    linear_gain,
    lion_weight_decay_for,
    norm_sq_from_gain,
    relative_decay,
    weight_decay_for,
)
from steadynorm.theory.kernels import sum_gain, vector_kernel
from steadynorm.theory.momentum import check_alpha, check_beta, ema, lion, mixed_correlation

Value: TypeAlias = Any  # a number, a schedule or an array
Schedule: TypeAlias = Callable[[Any], Any]

FAMILIES = ("adam", "lion", "muon", "scion")
_NEWTON_STEPS = 12
_LARGEST_ETA = 0.999


def corrected_decay(
    learning_rate: Value,
    weight_decay: Value | None = None,
    *,
    family: str = "adam",
    peak_lr: Value | None = None,
    steady_norm_sq: Value | None = None,
    alpha: Value | None = None,
    betas: tuple[Value, Value] | None = None,
    nesterov: bool = False,
    reference: Any = None,
    overlap: str | Overlap = "linear",
) -> Schedule:
    """Return lambda_t as an optax schedule: the decay that keeps the weight norm while lr and momentum change.

        relative to the peak    lambda (gamma_t / gamma_peak) F_t
        to a target C^2         gamma_t G_t / (2 C^2)

    G is the gain of the momentum and F_t = G_t / G(reference). For Adam both are 1.

    Args:
        learning_rate: gamma: a number, a schedule or an array.
        weight_decay: lambda at the peak lr; leave it out for a target.
        family: What the decay is for: "adam", "lion", "muon" or "scion" (normalised updates of a moving average).
        peak_lr: The schedule's maximum; needed unless learning_rate is a number.
        steady_norm_sq: A target: the squared weight norm over that of one update (Adam, Lion: the mean square of an
            element).
        alpha: The weight of the new gradient, for "muon" and "scion"; 1 - beta.
        betas: Lion's betas.
        nesterov: Whether the momentum is Nesterov's.
        reference: The alpha or betas at which weight_decay applies unchanged. Default: those at the start.
        overlap: "linear", the paper's formula, or an Overlap, whose decay reaches the target at finite eta. Lion always
            uses its own.

    Returns:
        A function of the step count, which may be traced.

    Examples:
        >>> decay = corrected_decay(optax.cosine_decay_schedule(1e-3, 100), 0.1, peak_lr=1e-3)
        >>> round(float(decay(0)), 6), round(float(decay(50)), 6)
        (0.1, 0.05)
        >>> round(float(corrected_decay(0.01, family="scion", alpha=0.1, steady_norm_sq=1.1875)(0)), 6)
        0.08
    """
    momentum = _momentum(family, alpha, betas)
    _check_numbers(learning_rate, weight_decay, peak_lr, steady_norm_sq)
    if (weight_decay is None) == (steady_norm_sq is None):
        raise ValueError("corrected_decay: pass either weight_decay (relative to the peak lr) or steady_norm_sq")
    if steady_norm_sq is not None:
        if family in ("muon", "scion") and alpha is None:
            raise ValueError(f"corrected_decay: the target of family={family!r} depends on momentum; pass alpha=")
        if family == "lion" and betas is None:
            raise ValueError("corrected_decay: the target of family='lion' depends on momentum; pass betas=")

        def aim(count: Any) -> Any:
            lr, target = value_at(learning_rate, count), value_at(steady_norm_sq, count)
            return target_decay(target, lr, family, _at(momentum, count), nesterov=nesterov, overlap=overlap)

        if all(map(is_number, (learning_rate, steady_norm_sq, *_parts(momentum)))):
            check_in_reach(steady_norm_sq, learning_rate, family, momentum, nesterov=nesterov, overlap=overlap)
        return aim
    peak = find_peak("corrected_decay", learning_rate, peak_lr)
    if is_number(peak) and is_number(weight_decay):
        largest = max(peak, learning_rate) if is_number(learning_rate) else peak
        eta_of(largest, relative_decay(weight_decay, largest, peak))
    start = _reference(family, momentum, reference)

    def follow(count: Any) -> Any:
        now = _at(momentum, count)
        factor = 1.0 if start is None else _gain(family, now, nesterov) / _gain(family, start, nesterov)
        return relative_decay(value_at(weight_decay, count), value_at(learning_rate, count), peak, factor)

    return follow


def add_corrected_decay(
    learning_rate: Value,
    weight_decay: Value | None = None,
    *,
    mask: Any = None,
    family: str = "adam",
    peak_lr: Value | None = None,
    steady_norm_sq: Value | None = None,
    alpha: Value | None = None,
    betas: tuple[Value, Value] | None = None,
    nesterov: bool = False,
    reference: Any = None,
    overlap: str | Overlap = "linear",
) -> Any:
    """Return a transformation that adds lambda_t theta, in place of `optax.add_decayed_weights`.

    Args:
        mask: As in `optax.add_decayed_weights`: True where weights decay.
        learning_rate, weight_decay, family, peak_lr, steady_norm_sq, alpha, betas, nesterov, reference, overlap: As in
            `corrected_decay`. The lr is not applied here; put `optax.scale_by_learning_rate` after it in the chain.

    Examples:
        >>> lr = optax.warmup_cosine_decay_schedule(0.0, 1e-3, 10, 100)
        >>> tx = optax.chain(
        ...     optax.scale_by_adam(), add_corrected_decay(lr, 0.1, peak_lr=1e-3), optax.scale_by_learning_rate(lr)
        ... )
    """
    schedule = corrected_decay(
        learning_rate, weight_decay, family=family, peak_lr=peak_lr, steady_norm_sq=steady_norm_sq, alpha=alpha,
        betas=betas, nesterov=nesterov, reference=reference, overlap=overlap,
    )  # fmt: skip
    return keep_dtypes(optax.add_decayed_weights(schedule, mask))


def keep_dtypes(transformation: Any) -> Any:
    """Return a transformation whose updates have the dtype of gradient and weight, which an array as decay may widen."""

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        wide, state = optax.with_extra_args_support(transformation).update(updates, state, params, **extra)

        def narrow(gradient: Any, theta: Any, u: Any) -> Any:
            return None if gradient is None else u.astype(jnp.result_type(gradient, theta))

        return jax.tree.map(narrow, updates, params, wide, is_leaf=lambda leaf: leaf is None), state

    return optax.GradientTransformationExtraArgs(transformation.init, update)


def tabulate(step_function: Callable[[int], float], steps: int) -> Schedule:
    """Return an optax schedule with the values of a step function of `steadynorm.schedule`, which JAX cannot trace.

    The function is called now, once for each step, and the schedule looks its values up. After the last step it keeps the
    last value.

    Examples:
        >>> from steadynorm.schedule import MatchedMomentum, cosine
        >>> alpha = tabulate(MatchedMomentum(0.1, 1.0, cosine(100)).alpha, 100)
        >>> round(float(alpha(50)), 4)
        0.3478
    """
    table = np.array([step_function(step) for step in range(steps)], dtype=np.float64)
    return lambda count: jnp.asarray(table)[jnp.clip(count, 0, steps - 1)]


def value_at(value: Value, count: Any) -> Any:
    """Return what a number, schedule or array is worth at this count."""
    return value(count) if callable(value) else value


def is_number(value: Value) -> TypeGuard[float]:
    """Return whether a value is a plain number, known when the optimizer is made."""
    return isinstance(value, int | float | np.number) and not isinstance(value, bool)


def find_peak(where: str, learning_rate: Value, peak_lr: Value | None) -> Value:
    """Return the largest lr; raise ValueError if it is neither passed nor the lr itself."""
    if peak_lr is None and not is_number(learning_rate):
        raise ValueError(
            f"{where}: the peak of a scheduled or injected learning_rate is not known; pass peak_lr=<its maximum>"
        )
    peak = learning_rate if peak_lr is None else peak_lr
    if is_number(peak):
        check_target("peak_lr", peak)
    return peak


def target_decay(
    target: Any, lr: Any, family: str, momentum: Any, *, nesterov: bool = False, overlap: str | Overlap = "linear"
) -> Any:
    """Return the decay whose steady state is `target`, as in `steadynorm.theory`, for values that JAX may trace."""
    kernel = vector_kernel(1) if family == "lion" else overlap
    if isinstance(kernel, Overlap):
        return _exact_decay(target, lr, kernel, _log_correlation(family, momentum, nesterov))
    if kernel != "linear":
        raise ValueError(f"overlap={overlap!r}: pass 'linear' or an Overlap from steadynorm.theory.overlap(lmo, shape)")
    return limit_decay(target, lr, _gain(family, momentum, nesterov))


def check_in_reach(
    target: float, lr: float, family: str, momentum: Any, *, nesterov: bool = False, overlap: str | Overlap = "linear"
) -> None:
    """Raise ValueError if no decay brings weights to this target; in numbers only, so no JAX backend starts."""
    if family == "adam":
        decay = adam_weight_decay_for(target, lr)
    elif family == "lion":
        decay = lion_weight_decay_for(target, lr, *momentum)
    else:
        decay = weight_decay_for(target, lr, momentum, nesterov=nesterov, overlap=overlap)
    check_reachable(target, lr, decay)


def _exact_decay(target: Any, lr: Any, kernel: Overlap, logs: tuple[Any, Any]) -> Any:
    """Solve R^2(eta) = target by Newton's method in log eta, where the curve is nearly straight; lr = 0 gives 0."""
    n, a = jnp.asarray(kernel.n), jnp.asarray(kernel.a)
    positive_lr: Any = jnp.where(lr > 0, lr, 1e-3 * jnp.sqrt(target))  # any lr that keeps Newton's method finite

    def gain(eta: Any) -> Any:
        return sum_gain(n, a, *logs, eta, jnp)

    def miss(log_eta: Any) -> Any:
        eta: Any = jnp.exp(log_eta)
        return jnp.log(norm_sq_from_gain(positive_lr, eta, gain(eta)) / target)

    most = float(np.log(_LARGEST_ETA))

    def improve(_: Any, log_eta: Any) -> Any:
        value, slope = jax.value_and_grad(miss)(log_eta)
        return jnp.minimum(log_eta - value / slope, most)

    start = jnp.log(positive_lr * limit_decay(target, positive_lr, gain(0.0)))
    log_eta = jax.lax.fori_loop(0, _NEWTON_STEPS, improve, jnp.minimum(start, most))
    return jnp.where(lr > 0, jnp.exp(log_eta) / positive_lr, 0.0)


def _log_correlation(family: str, momentum: Any, nesterov: bool) -> tuple[Any, Any]:
    """Return the logarithms of the correlation of successive inputs and of its factor from one lag to the next."""
    filter = lion(*momentum) if family == "lion" else ema(momentum, nesterov=nesterov)
    correlation = mixed_correlation(filter, filter.s)
    gaps = correlation.first_gap, correlation.ratio_gap
    return tuple(jnp.log1p(-jnp.minimum(gap, 1.0)) for gap in gaps)  # pyright: ignore[reportReturnType]


def _gain(family: str, momentum: Any, nesterov: bool) -> Any:
    """Return G at this momentum and eta -> 0."""
    if family == "adam":
        return 1.0
    if family != "lion":
        return linear_gain(momentum, nesterov=nesterov)
    kernel = vector_kernel(1)
    logs = _log_correlation(family, momentum, nesterov)
    return sum_gain(jnp.asarray(kernel.n), jnp.asarray(kernel.a), *logs, 0.0, jnp)


def _momentum(family: str, alpha: Value | None, betas: tuple[Value, Value] | None) -> Any:
    """Return the momentum that the decay of a family follows; raise ValueError if it belongs to another family."""
    if family not in FAMILIES:
        raise ValueError(f"family={family!r} is unknown; choose one of {', '.join(FAMILIES)}")
    if alpha is not None and family not in ("muon", "scion"):
        raise ValueError(f"alpha: the decay of family={family!r} does not follow it; leave it out")
    if betas is not None and family != "lion":
        raise ValueError(f"betas: the decay of family={family!r} does not follow them; leave them out")
    if alpha is not None and is_number(alpha):
        check_alpha(alpha)
    for k, beta in enumerate(betas or ()):
        if is_number(beta):
            check_beta(f"betas[{k}]", beta)
    return alpha if betas is None else tuple(betas)


def _at(momentum: Any, count: Any) -> Any:
    return tuple(value_at(b, count) for b in momentum) if isinstance(momentum, tuple) else value_at(momentum, count)


def _parts(momentum: Any) -> tuple[Any, ...]:
    """Return what a momentum consists of, without None: one alpha or two betas, each a number, schedule or array."""
    parts = momentum if isinstance(momentum, tuple) else (momentum,)
    return tuple(part for part in parts if part is not None)


def _reference(family: str, momentum: Any, reference: Any) -> Any:
    """Return the momentum at which F = 1; None if it never changes."""
    parts = _parts(momentum)
    if reference is not None:
        return _momentum(family, *((None, tuple(reference)) if family == "lion" else (reference, None)))
    if all(map(is_number, parts)):
        return None
    if any(not (is_number(part) or callable(part)) for part in parts):
        raise ValueError(
            "an injected momentum has no known start; pass reference= (lionc: reference_betas=, muonc: reference_beta=), the "
            "momentum at which weight_decay holds, or keep it a number with static_args"
        )
    return _at(momentum, 0)


def _check_numbers(lr: Value, weight_decay: Value | None, peak_lr: Value | None, target: Value | None) -> None:
    """Raise ValueError if a plain number is out of range."""
    for name, value, check in (
        ("learning_rate", lr, lambda _, number: check_lr(number)),
        ("weight_decay", weight_decay, check_decay),
        ("peak_lr", peak_lr, check_target),
        ("steady_norm_sq", target, check_target),
    ):
        if value is not None and is_number(value):
            check(name, value)


def check_decay(name: str, value: float) -> None:
    """Raise ValueError unless a decay is finite and not negative."""
    if not 0 <= value < float("inf"):
        raise ValueError(f"{name}={value} must be finite and not negative")
