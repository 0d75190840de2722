"""The theory as functions of floats: kernels, gains, steady norms and their inverses, forecasts."""

import math

import numpy as np
import pytest
from hypothesis import assume
from hypothesis import strategies as st
from strategies import log_floats
from trying import FEWER, prop

from steadynorm import theory
from steadynorm.theory.momentum import advance

# A few kernels, made once: a vector's takes a million modes.
KERNELS = [
    theory.overlap("linear", None),
    theory.overlap("sign", None),
    theory.overlap("bias", (10,)),
    theory.overlap("spectral", (64, 64)),
    theory.overlap("spectral", (32, 128)),
]
kernels = st.sampled_from(KERNELS)
correlations = st.floats(-1, 1)
lrs = log_floats(1e-12, 0.5)
decays = log_floats(1e-8, 1.0)
alphas = log_floats(1e-6, 1.0)
betas = st.floats(0, 0.999)
nesterovs = st.booleans()
factors = log_floats(0.1, 10.0)


# --- kernels and gains


@prop(fast=200, kernel=kernels, r=correlations, s=correlations)
def test_a_kernel_is_odd_rising_convex_and_never_above_linear(kernel, r, s):
    """f(0) = 0, f(1) = 1, f(-r) = -f(r), 0 <= f(r) <= r for r >= 0: updates overlap less than their inputs."""
    f, g = kernel(r), kernel(s)
    assert kernel(0.0) == 0
    assert kernel(1.0) == pytest.approx(1, abs=1e-6)
    assert kernel(-r) == pytest.approx(-f, abs=1e-12)
    assert abs(f) <= abs(r) + 1e-9
    assert (f - g) * (r - s) >= -1e-12
    if r >= 0 and s >= 0:
        assert kernel((r + s) / 2) <= (f + g) / 2 + 1e-9
    assert (kernel.a >= 0).all()


@prop(fast=200, kernel=kernels, alpha=alphas, other=alphas, nesterov=nesterovs, eta=st.floats(0, 1))
def test_the_gain_is_at_least_one_falls_with_alpha_and_is_at_most_the_linear_one(kernel, alpha, other, nesterov, eta):
    gain = kernel.gain(alpha, nesterov=nesterov, eta=eta)
    low, high = sorted((alpha, other))
    assert 1 <= gain <= KERNELS[0].gain(alpha, nesterov=nesterov, eta=eta) * (1 + 1e-9)
    assert kernel.gain(high, nesterov=nesterov, eta=eta) <= kernel.gain(low, nesterov=nesterov, eta=eta) * (1 + 1e-9)
    assert gain <= kernel.gain(alpha, nesterov=nesterov) * (1 + 1e-9)  # decay forgets
    assert kernel.gain(1.0, nesterov=nesterov, eta=eta) == pytest.approx(1)


@prop(fast=100, alpha=alphas, nesterov=nesterovs)
def test_the_papers_gain_is_that_of_the_linear_kernel(alpha, nesterov):
    gain = theory.momentum_gain(alpha, nesterov=nesterov)
    assert gain == pytest.approx(KERNELS[0].gain(alpha, nesterov=nesterov), rel=1e-9)
    assert gain <= theory.momentum_gain(alpha) * (1 + 1e-12)  # Nesterov leans on the new gradient
    assert theory.effective_lr(0.3, alpha, nesterov=nesterov) == pytest.approx(0.3 * math.sqrt(gain))


@prop(
    fast=100,
    slow=FEWER,
    kind=st.sampled_from(["ema", "nesterov", "trace", "lion"]),
    one=st.floats(0, 0.99),
    two=st.floats(0, 0.99),
    var=log_floats(1e-6, 1e3),
)
def test_the_moments_of_a_filter_are_correlations_and_settle(kind, one, two, var):
    made = {
        "ema": lambda: theory.ema(1 - one),
        "nesterov": lambda: theory.ema(1 - one, nesterov=True),
        "trace": lambda: theory.trace(one),
        "lion": lambda: theory.lion(one, two),
    }[kind]()
    step = advance(made, var)
    assert all(0 <= value <= 1 + 1e-12 for value in (step.to_x, step.to_m, step.x_m))
    assert step.var_x > 0
    for _ in range(3000):
        step = advance(made, step.var_m)
    settled = theory.steady_correlation(made)
    assert step.var_m == pytest.approx(made.s**2 / (1 - made.r**2), rel=1e-6)
    assert step.x_m * step.to_x == pytest.approx(settled.first, rel=1e-6, abs=1e-12)


# --- steady state


@prop(fast=150, lr=lrs, decay=decays, alpha=alphas, nesterov=nesterovs, factor=factors, kernel=kernels)
def test_the_steady_norm_scales_with_lr_over_decay(lr, decay, alpha, nesterov, factor, kernel):
    """In the limit R^2 = gamma G / (2 lambda): linear in lr, inverse in decay.

    Exactly, R^2/gamma^2 depends only on eta.
    """
    how = {"nesterov": nesterov, "overlap": kernel}
    assume(lr * decay * factor <= 1 and lr * factor * decay / factor <= 1)
    limit = theory.steady_norm_sq(lr, decay, alpha, limit=True, **how)
    assert theory.steady_norm_sq(lr * factor, decay, alpha, limit=True, **how) == pytest.approx(factor * limit)
    assert theory.steady_norm_sq(lr, decay * factor, alpha, limit=True, **how) == pytest.approx(limit / factor)
    exact = theory.steady_norm_sq(lr, decay, alpha, **how)
    same_eta = theory.steady_norm_sq(lr * factor, decay / factor, alpha, **how)
    assert same_eta == pytest.approx(factor**2 * exact, rel=1e-9)
    assert exact >= lr * lr * (1 - 1e-9)  # one update is already that large


@prop(
    fast=100,
    lr=log_floats(1e-6, 1e-3),
    decay=log_floats(1e-4, 1e-2),
    alpha=log_floats(0.05, 1.0),
    nesterov=nesterovs,
    kernel=kernels,
)
def test_the_steady_norm_tends_to_its_limit(lr, decay, alpha, nesterov, kernel):
    """Here eta is at most 1e-5, far below alpha."""
    exact, limit = (
        theory.steady_norm_sq(lr, decay, alpha, nesterov=nesterov, overlap=kernel, limit=limit)
        for limit in (False, True)
    )
    assert exact == pytest.approx(limit, rel=1e-3)


@prop(fast=150, lr=lrs, alpha=alphas, nesterov=nesterovs, kernel=kernels, above=log_floats(1.001, 1e6))
def test_the_decay_for_a_target_inverts_the_steady_norm(lr, alpha, nesterov, kernel, above):
    target = above * lr * lr
    decay = theory.weight_decay_for(target, lr, alpha, nesterov=nesterov, overlap=kernel)
    assert 0 < lr * decay <= 1 + 1e-9
    reached = theory.steady_norm_sq(lr, min(decay, 1 / lr), alpha, nesterov=nesterov, overlap=kernel)
    assert reached == pytest.approx(target, rel=1e-6)
    letter = theory.weight_decay_for(target, lr, alpha, nesterov=nesterov)
    if lr * letter <= 1:
        assert theory.steady_norm_sq(lr, letter, alpha, nesterov=nesterov, limit=True) == pytest.approx(
            target, rel=1e-9
        )


@prop(fast=100, lr=lrs, alpha=alphas, kernel=kernels, below=st.floats(1e-6, 0.999))
def test_a_target_below_one_update_is_refused(lr, alpha, kernel, below):
    with pytest.raises(ValueError, match="unreachable"):
        theory.weight_decay_for(below * lr * lr, lr, alpha, overlap=kernel)


@prop(fast=100, lr=lrs, beta1=betas, beta2=betas, above=log_floats(1.001, 1e5))
def test_lions_decay_inverts_lions_steady_norm(lr, beta1, beta2, above):
    target = above * lr * lr
    decay = theory.lion_weight_decay_for(target, lr, beta1, beta2)
    assert theory.lion_steady_norm_sq(lr, min(decay, 1 / lr), beta1, beta2) == pytest.approx(target, rel=1e-6)


@prop(fast=100, lr=lrs, target=log_floats(1e-6, 1e3), beta1=betas)
def test_adams_decay_inverts_adams_mean_square(lr, target, beta1):
    decay = theory.adam_weight_decay_for(target, lr)
    assume(lr * decay <= 1)
    assert theory.adam_mean_square(lr, decay, beta1, limit=True) == pytest.approx(target)


@prop(fast=100, lr=lrs, decay=decays, factor=log_floats(1.0, 10.0))
def test_the_half_life_halves_and_falls_with_decay(lr, decay, factor):
    steps = theory.half_life(lr, decay)
    assert math.exp(steps * math.log1p(-lr * decay)) == pytest.approx(0.5, rel=1e-6)
    if lr * decay * factor <= 1:
        assert theory.half_life(lr, decay * factor) <= steps * (1 + 1e-12)


# --- forecasts: a few hundred steps each


@prop(
    fast=15,
    slow=FEWER,
    lr=log_floats(0.01, 0.3),
    decay=log_floats(0.2, 1.0),
    alpha=log_floats(0.05, 1.0),
    nesterov=nesterovs,
    kernel=kernels,
    start=log_floats(1e-3, 1e3),
)
def test_the_forecast_at_constant_settings_converges_to_the_steady_norm(lr, decay, alpha, nesterov, kernel, start):
    """It converges from any start, of which (1 - eta)^(2 T) is left."""
    total = int(12 / (lr * decay)) + int(30 / alpha)
    norms = theory.forecast(np.full(total, lr), decay, alpha, nesterov=nesterov, overlap=kernel, start=start)
    steady = theory.steady_norm_sq(lr, decay, alpha, nesterov=nesterov, overlap=kernel)
    assert norms[-1] == pytest.approx(steady, rel=1e-3)
    assert (norms > 0).all()


@prop(
    fast=60,
    slow=FEWER,
    lr=log_floats(1e-4, 0.3),
    decay=decays,
    alpha=alphas,
    nesterov=nesterovs,
    kernel=kernels,
    factor=factors,
    seed=st.integers(0, 1000),
)
def test_the_forecast_is_scale_free_positive_and_below_the_linear_one(lr, decay, alpha, nesterov, kernel, factor, seed):
    """Scaling lr and decay against each other scales the norm; less overlap gives less norm; alignment is a cosine,
    never positive.
    """
    schedule = lr * np.random.default_rng(seed).uniform(0.1, 1.0, 60)
    how = {"nesterov": nesterov, "overlap": kernel}
    norms = theory.forecast(schedule, decay, alpha, **how)
    np.testing.assert_allclose(
        theory.forecast(factor * schedule, decay / factor, alpha, **how), factor**2 * norms, rtol=1e-9
    )
    linear = theory.forecast(schedule, decay, alpha, nesterov=nesterov)
    assert (norms <= linear * (1 + 1e-9)).all()
    assert (norms >= schedule**2 * (1 - 1e-9)).all()
    cosines = theory.expected_alignment(schedule, decay, alpha, **how)
    assert (cosines <= 1e-12).all()
    assert (cosines >= -1 - 1e-9).all()


@prop(
    fast=15,
    slow=FEWER,
    lr=log_floats(0.01, 0.3),
    decay=log_floats(0.2, 1.0),
    beta1=st.floats(0, 0.95),
    beta2=st.floats(0, 0.95),
)
def test_forecasts_of_lion_adam_and_sgd_also_converge(lr, decay, beta1, beta2):
    total = int(12 / (lr * decay)) + 400
    constant = np.full(total, lr)
    lion = theory.forecast_lion(constant, decay, beta1, beta2)[-1]
    assert lion == pytest.approx(theory.lion_steady_norm_sq(lr, decay, beta1, beta2), rel=1e-3)
    adam = theory.forecast_adam(constant, decay, beta1)[-1]
    assert adam == pytest.approx(theory.adam_mean_square(lr, decay, beta1), rel=1e-3)
    plain = theory.forecast_sgd(constant, decay, 0.0)[-1]
    eta = lr * decay
    assert plain == pytest.approx(lr * lr / (2 * eta - eta * eta), rel=1e-3)
    assert theory.forecast_sgd(constant, decay, beta1)[-1] >= plain * (1 - 1e-9)


# --- what is refused


@prop(
    fast=100,
    name=st.sampled_from(["lr", "decay", "alpha"]),
    value=st.sampled_from([math.nan, math.inf, -math.inf, -0.5]),
)
def test_senseless_numbers_are_refused(name, value):
    given = {"lr": 0.1, "decay": 0.1, "alpha": 0.1} | {name: value}
    lr, decay, alpha = given["lr"], given["decay"], given["alpha"]
    with pytest.raises(ValueError, match=r"lr|weight_decay|alpha"):
        theory.steady_norm_sq(lr, decay, alpha)
    with pytest.raises(ValueError, match=r"lr|weight_decay|alpha"):
        theory.forecast(np.full(3, lr), decay, alpha)
