"""The forecast and the expected alignment equal double sums over all past updates, simulation and steady state."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import twins_theory as twin

from steadynorm.theory import (
    adam_mean_square,
    advance,
    advance_forecast,
    ema,
    expected_alignment,
    forecast,
    forecast_adam,
    forecast_lion,
    forecast_sgd,
    initial_state,
    lion_steady_norm_sq,
    overlap,
    steady_norm_sq,
    steady_overlap,
    trace,
    variance,
)

VECTORS = json.loads((Path(__file__).parent / "data" / "theory_vectors.json").read_text(encoding="utf-8"))
KERNELS = {
    "linear": (overlap("linear", None), twin.f_linear),
    "sign": (overlap("sign", None), twin.f_sign),
    "vector 8": (overlap("bias", (8,)), twin.f_vector(8)),
    "square": (overlap("spectral", (64, 64)), twin.f_square),
    "1:4": (overlap("spectral", (64, 256)), twin.f_spectral(0.25)),
}
T = 60
STEP = np.arange(T)
# Nothing constant: warmup then cosine, a decay that swings, momentum from long to none.
LR = 0.3 * np.minimum((STEP + 1) / 10, 0.5 * (1 + np.cos(np.pi * STEP / T)))
DECAY = 0.4 + 0.3 * np.sin(STEP / 5)
ALPHA = np.linspace(0.05, 1.0, T)


# --- the shared vectors


def shared_schedule(name):
    t = np.arange(600)
    ratio = np.where(t < 50, (t + 1) / 50, 0.5 * (1 + np.cos(np.pi * (t - 50) / 550)))
    decay = {"constant decay": 0.1 + 0 * t, "corrected": 0.1 * ratio, "alpha 0.05 to 1": 0.1 * ratio}[name]
    return 0.05 * ratio, decay, np.linspace(0.05, 1, 600) if name.startswith("alpha") else 0.1


@pytest.mark.parametrize("case", VECTORS["forecast"], ids=lambda c: f"{c['lmo']}-{c['nesterov']}-{c['schedule']}")
def test_forecasts_equal_their_test_vectors(case):
    kernel = overlap(case["lmo"], case["shape"])
    norms = forecast(*shared_schedule(case["schedule"]), nesterov=case["nesterov"], overlap=kernel)
    assert {t: norms[int(t)] for t in case["at"]} == pytest.approx(case["at"], rel=1e-3)


# --- against the double sum over all pairs of updates


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_the_forecast_is_the_double_sum_over_past_updates(name, nesterov):
    kernel, f = KERNELS[name]
    S = twin.overlaps(twin.ema_weights(ALPHA, nesterov=nesterov), f)
    for start in (0.0, 3.0):
        got = forecast(LR, DECAY, ALPHA, nesterov=nesterov, overlap=kernel, start=start)
        np.testing.assert_allclose(got, twin.norms_sq(LR, DECAY, S, start), rtol=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
def test_warm_momentum_starts_from_a_gradient(nesterov):
    kernel, f = KERNELS["square"]
    S = twin.overlaps(twin.ema_weights(ALPHA, nesterov=nesterov, warm=True), f)
    got = forecast(LR, DECAY, ALPHA, nesterov=nesterov, overlap=kernel, warm_momentum=True)
    np.testing.assert_allclose(got, twin.norms_sq(LR, DECAY, S), rtol=1e-9)
    cold = forecast(LR, DECAY, ALPHA, nesterov=nesterov, overlap=kernel)
    assert abs(got[20] / cold[20] - 1) > 0.01


@pytest.mark.parametrize("nesterov", [False, True])
def test_trace_momentum_with_changing_mu_is_not_ema_but_follows_the_same_recursion(nesterov):
    kernel, f = KERNELS["sign"]
    mu = np.linspace(0.95, 0.0, T)
    S = twin.overlaps(twin.trace_weights(mu, nesterov=nesterov), f)
    filters = [trace(v, nesterov=nesterov) for v in mu]
    norms, _, _ = advance_forecast(initial_state(kernel), kernel, filters, LR, LR * DECAY)
    np.testing.assert_allclose(norms, twin.norms_sq(LR, DECAY, S), rtol=1e-9)
    as_ema = forecast(LR, DECAY, 1 - mu, nesterov=nesterov, overlap=kernel)
    assert np.abs(as_ema / norms - 1).max() > 1e-3


def test_the_lion_forecast_is_the_double_sum():
    beta1, beta2 = np.linspace(0.95, 0.5, T), np.linspace(0.99, 0.9, T)
    S = twin.overlaps(twin.lion_weights(beta1, beta2), twin.f_sign)
    for start in (0.0, 3.0):
        got = forecast_lion(LR, DECAY, beta1, beta2, start=start)
        np.testing.assert_allclose(got, twin.norms_sq(LR, DECAY, S, start), rtol=1e-9)


def test_the_adam_forecast_is_the_double_sum_of_unnormalised_updates():
    beta1 = np.linspace(0.95, 0.5, T)
    W = twin.adam_weights(beta1)
    for start in (0.0, 3.0):
        got = forecast_adam(LR, DECAY, beta1, start=start)
        np.testing.assert_allclose(got, twin.norms_sq(LR, DECAY, W @ W.T, start), rtol=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("dampened", [False, True])
def test_the_sgd_forecast_is_the_double_sum_of_unnormalised_updates(nesterov, dampened):
    mu = np.linspace(0.95, 0.0, T)
    W = twin.ema_weights(1 - mu, nesterov=nesterov) if dampened else twin.trace_weights(mu, nesterov=nesterov)
    for start in (0.0, 3.0):
        got = forecast_sgd(LR, DECAY, mu, nesterov=nesterov, dampened=dampened, start=start)
        np.testing.assert_allclose(got, twin.norms_sq(LR, DECAY, W @ W.T, start), rtol=1e-9)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_the_expected_alignment_is_the_cross_term(name, nesterov):
    kernel, f = KERNELS[name]
    S = twin.overlaps(twin.ema_weights(ALPHA, nesterov=nesterov), f)
    for start in (0.0, 3.0):
        got = expected_alignment(LR, DECAY, ALPHA, nesterov=nesterov, overlap=kernel, start=start)
        np.testing.assert_allclose(got, twin.alignments(LR, DECAY, S, start), rtol=1e-9, atol=1e-15)
        assert (got[1:-1] < 0).all()  # theta moves by -u, and momentum repeats u


def test_the_alignment_vanishes_without_momentum():
    for nesterov in (False, True):
        cosines = expected_alignment(LR, DECAY, 1.0, nesterov=nesterov, overlap=KERNELS["square"][0], start=2.0)
        np.testing.assert_array_equal(cosines, 0.0)


def test_the_alignment_is_what_the_norm_gains_beyond_independent_updates():
    """N_t = (1-eta)^2 N + gamma^2 - 2 gamma (1-eta) sqrt(N) cos: one number, seen from two sides."""
    kernel = KERNELS["1:4"][0]
    norms = np.concatenate(([2.0], forecast(LR, DECAY, ALPHA, overlap=kernel, start=2.0)))
    cosines = expected_alignment(LR, DECAY, ALPHA, overlap=kernel, start=2.0)
    keep = 1 - LR * DECAY
    rebuilt = keep**2 * norms[:-1] + LR**2 - 2 * LR * keep * np.sqrt(norms[:-1]) * cosines
    np.testing.assert_allclose(rebuilt, norms[1:], rtol=1e-12)


# --- long schedules


@pytest.mark.parametrize("nesterov", [False, True])
def test_a_long_schedule_is_the_double_sum_across_chunks(nesterov):
    """Steps are processed in chunks of 2048 without changing the result."""
    steps = 2300
    t = np.arange(steps)
    lr = 0.02 * (1 + np.cos(np.pi * t / steps)) + 0.001
    decay, alpha = np.full(steps, 0.1), 0.02 + 0.3 * t / steps
    S = twin.overlaps(twin.ema_weights(alpha, nesterov=nesterov), twin.f_sign)
    got = forecast(lr, decay, alpha, nesterov=nesterov, overlap=KERNELS["sign"][0], start=1.0)
    for end in (1, 100, 2047, 2048, 2049, 2050, steps):
        assert got[end - 1] == pytest.approx(twin.norm_sq_at(end, lr, decay, S, 1.0), rel=1e-9), end


@pytest.mark.parametrize("steps", [T, 5000])
def test_a_forecast_in_two_pieces_equals_one_forecast(steps):
    kernel = KERNELS["square"][0]
    t = np.arange(steps)
    lr = 0.05 * (1 + np.cos(np.pi * t / steps))
    eta = 0.1 * lr
    filters = [ema(a, nesterov=True) for a in np.linspace(0.05, 0.9, steps)]
    norms, cosines, end = advance_forecast(initial_state(kernel, start=1.0), kernel, filters, lr, eta)
    for cut in (1, steps // 3, steps - 1):
        first, cos_first, state = advance_forecast(
            initial_state(kernel, start=1.0), kernel, filters[:cut], lr[:cut], eta[:cut]
        )
        kept = state.overlaps.copy()
        second, cos_second, last = advance_forecast(state, kernel, filters[cut:], lr[cut:], eta[cut:])
        np.testing.assert_allclose(np.concatenate((first, second)), norms, rtol=1e-12)
        np.testing.assert_allclose(np.concatenate((cos_first, cos_second)), cosines, rtol=1e-12)
        assert (last.norm_sq, last.var) == pytest.approx((end.norm_sq, end.var), rel=1e-12)
        np.testing.assert_array_equal(state.overlaps, kept)  # a state can be reused


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("name", KERNELS)
def test_a_constant_schedule_settles_on_the_steady_norm(name, nesterov):
    kernel = KERNELS[name][0]
    for start in (0.0, 10.0):
        norms = forecast(np.full(3000, 0.1), 0.1, 0.1, nesterov=nesterov, overlap=kernel, start=start)
        steady = steady_norm_sq(0.1, 0.1, 0.1, nesterov=nesterov, overlap=kernel)
        assert norms[-1] == pytest.approx(steady, rel=1e-10)
        assert abs(norms[20] / steady - 1) > 0.01  # and was on its way before


def test_lion_adam_and_sgd_settle_on_their_steady_norms():
    lr = np.full(3000, 0.1)
    assert forecast_lion(lr, 0.1, 0.9, 0.99)[-1] == pytest.approx(lion_steady_norm_sq(0.1, 0.1, 0.9, 0.99), rel=1e-10)
    assert forecast_adam(lr, 0.1, 0.9)[-1] == pytest.approx(adam_mean_square(0.1, 0.1, 0.9), rel=1e-10)
    per_update = 0.1 / 1.9  # E m^2 = (1 - mu) / (1 + mu)
    dampened = per_update * steady_norm_sq(0.1, 0.1, 0.1)
    assert forecast_sgd(lr, 0.1, 0.9, dampened=True)[-1] == pytest.approx(dampened, rel=1e-10)
    assert forecast_sgd(lr, 0.1, 0.9)[-1] == pytest.approx(100 * dampened, rel=1e-10)  # trace: m is 1/(1-mu) as large


def test_a_hundred_thousand_steps_of_a_square_matrix_are_forecast():
    kernel, steps = KERNELS["square"][0], 100_000
    lr = 0.01 * np.minimum((np.arange(steps) + 1) / 2000, 1.0)
    alpha = np.where(np.arange(steps) < 50_000, np.linspace(1.0, 0.1, steps), 0.05)
    norms = forecast(lr, 0.1, alpha, overlap=kernel, start=1.0)
    assert norms.shape == (steps,)
    assert np.isfinite(norms).all()
    assert norms[-1] == pytest.approx(steady_norm_sq(0.01, 0.1, 0.05, overlap=kernel), rel=1e-9)


# --- against simulated optimizers: many independent elements, so the mean of theta^2 has a small standard error


def simulate(update, lr, decay, elements, seed, start=0.0):
    """Simulate theta <- (1 - eta) theta - gamma u_t; return theta before each step, and u."""
    rng = np.random.default_rng(seed)
    theta = math.sqrt(start) * rng.standard_normal(elements)
    for t, (g, w) in enumerate(zip(lr, decay, strict=True)):
        u = update(t, rng.standard_normal(elements))
        yield theta, u
        theta = (1 - g * w) * theta - g * u
    yield theta, None


def assert_mean(samples, expected, worst=0.01):
    error = float(samples.std()) / math.sqrt(samples.size)
    assert error < worst * abs(expected)  # the check is worth something
    assert float(samples.mean()) == pytest.approx(expected, abs=4 * error)


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_forecast_agrees_with_simulated_sign_updates(nesterov):
    m = 0.0

    def update(t, g):
        nonlocal m
        m = (1 - ALPHA[t]) * m + ALPHA[t] * g
        return np.sign((1 - ALPHA[t]) * m + ALPHA[t] * g if nesterov else m)

    kernel = KERNELS["sign"][0]
    norms = forecast(LR, DECAY, ALPHA, nesterov=nesterov, overlap=kernel, start=0.5)
    cosines = expected_alignment(LR, DECAY, ALPHA, nesterov=nesterov, overlap=kernel, start=0.5)
    for t, (theta, u) in enumerate(simulate(update, LR, DECAY, 100_000, seed=3, start=0.5)):
        if t in (5, 15, 30, T):
            assert_mean(theta**2, norms[t - 1])
        if t == 15:
            assert_mean(theta * u / math.sqrt((theta**2).mean()), cosines[t], worst=0.02)
    linear = forecast(LR, DECAY, ALPHA, nesterov=nesterov, start=0.5)
    assert linear[-1] > 1.1 * norms[-1]  # the paper's assumption would not pass


def test_the_forecast_agrees_with_a_simulated_lion():
    m = 0.0

    def update(t, g):
        nonlocal m
        u = np.sign(0.9 * m + 0.1 * g)
        m = 0.98 * m + 0.02 * g
        return u

    norms = forecast_lion(LR, DECAY, 0.9, 0.98)
    for t, (theta, _) in enumerate(simulate(update, LR, DECAY, 100_000, seed=4)):
        if t in (5, 15, 30, T):
            assert_mean(theta**2, norms[t - 1])


def test_the_forecast_agrees_with_a_simulated_adam():
    """The second moment of the real update has settled: v starts at 1, the gradients' variance."""
    m, v, beta1, beta2 = 0.0, 1.0, 0.9, 0.9995

    def update(t, g):
        nonlocal m, v
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        return m / (1 - beta1 ** (t + 1)) / np.sqrt(v)

    norms = forecast_adam(LR, DECAY, beta1)
    for t, (theta, _) in enumerate(simulate(update, LR, DECAY, 100_000, seed=5)):
        if t in (5, 15, 30, T):
            assert_mean(theta**2, norms[t - 1])


@pytest.mark.parametrize("nesterov", [False, True])
def test_the_forecast_agrees_with_a_simulated_sgd(nesterov):
    m, mu = 0.0, 0.9

    def update(t, g):
        nonlocal m
        m = mu * m + g
        return mu * m + g if nesterov else m

    norms = forecast_sgd(LR, DECAY, mu, nesterov=nesterov)
    for t, (theta, _) in enumerate(simulate(update, LR, DECAY, 100_000, seed=6)):
        if t in (5, 15, 30, T):
            assert_mean(theta**2, norms[t - 1])


# --- what a schedule may look like


def test_one_array_is_enough_and_numbers_stay_constant():
    full = forecast(np.full(T, 0.1), np.full(T, 0.2), np.full(T, 0.3))
    for lr, decay, alpha in ((np.full(T, 0.1), 0.2, 0.3), (0.1, [0.2] * T, 0.3), (0.1, 0.2, np.full(T, 0.3))):
        np.testing.assert_array_equal(forecast(lr, decay, alpha), full)


def test_a_zero_lr_leaves_the_norm_where_it_is():
    norms = forecast(np.zeros(5), 0.1, 0.1, start=2.0, overlap=KERNELS["sign"][0])
    np.testing.assert_array_equal(norms, 2.0)
    np.testing.assert_array_equal(forecast(np.zeros(5), 0.1, 0.1), 0.0)


def test_momentum_is_remembered_through_steps_of_zero_lr():
    """The buffer continues while lr is 0, so the update after the gap overlaps less with the one before."""
    kernel = KERNELS["square"][0]
    together = forecast([1.0, 1.0], 0.0, 0.1, overlap=kernel, warm_momentum=True)
    apart = forecast([1.0, 0.0, 0.0, 1.0], 0.0, 0.1, overlap=kernel, warm_momentum=True)
    S = twin.overlaps(twin.ema_weights(np.full(4, 0.1), warm=True), twin.f_square)
    assert apart[-1] == pytest.approx(2 + 2 * S[0, 3], rel=1e-9)
    assert 2 < apart[-1] < together[-1]


def test_an_empty_schedule_has_no_norms():
    assert forecast([], 0.1, 0.1).shape == (0,)


def test_a_forecast_does_not_write_to_its_inputs():
    lr, decay, alpha = LR.copy(), DECAY.copy(), ALPHA.copy()
    forecast(lr, decay, alpha, overlap=KERNELS["sign"][0])
    for array, before in ((lr, LR), (decay, DECAY), (alpha, ALPHA)):
        np.testing.assert_array_equal(array, before)


# --- bad input

FLAT = np.full(3, 0.1)


def with_value(value):
    return [0.1, value, 0.1]


BAD = {
    "negative lr": (lambda: forecast(with_value(-0.25), 0.1, 0.1), r"lr.*-0\.25"),
    "nan lr": (lambda: forecast(with_value(math.nan), 0.1, 0.1), "lr.*nan"),
    "infinite lr": (lambda: forecast(with_value(math.inf), 0.1, 0.1), "lr.*inf"),
    "negative decay": (lambda: forecast(FLAT, with_value(-0.25), 0.1), r"weight_decay.*-0\.25"),
    "nan decay": (lambda: forecast_adam(FLAT, math.nan), "weight_decay.*nan"),
    "alpha 0": (lambda: forecast(FLAT, 0.1, with_value(0.0)), r"alpha=0\.0"),
    "alpha above 1": (lambda: expected_alignment(FLAT, 0.1, with_value(1.5)), r"alpha=1\.5"),
    "alpha nan": (lambda: forecast(FLAT, 0.1, with_value(math.nan)), "alpha.*nan"),
    "lengths": (lambda: forecast(FLAT, np.full(4, 0.1), 0.1), "'lr': 3, 'weight_decay': 4"),
    "lengths, lion": (lambda: forecast_lion(FLAT, 0.1, [0.9, 0.9]), "'lr': 3, 'beta1': 2"),
    "no array": (lambda: forecast(0.1, 0.1, 0.1), "must be an array"),
    "no array, sgd": (lambda: forecast_sgd(0.1, 0.1, 0.9), "must be an array"),
    "lr * decay above 1": (lambda: forecast(with_value(0.5), with_value(3.0), 0.1), r"1\.5 exceeds 1"),
    "lr * decay above 1, adam": (lambda: forecast_adam(with_value(0.5), 3.0), r"1\.5 exceeds 1"),
    "negative start": (lambda: forecast(FLAT, 0.1, 0.1, start=-2.5), r"start=-2\.5"),
    "nan start": (lambda: forecast_sgd(FLAT, 0.1, 0.9, start=math.nan), "start=nan"),
    "lmo name for a kernel": (lambda: forecast(FLAT, 0.1, 0.1, overlap="spectral"), "'spectral'.*theory.overlap"),
    "beta1 of lion": (lambda: forecast_lion(FLAT, 0.1, with_value(1.0)), r"beta1=1\.0"),
    "negative beta1 of lion": (lambda: forecast_lion(FLAT, 0.1, with_value(-0.5)), r"beta1=-0\.5"),
    "negative beta2 of lion": (lambda: forecast_lion(FLAT, 0.1, 0.9, with_value(-0.5)), r"beta2=-0\.5"),
    "beta1 of adam": (lambda: forecast_adam(FLAT, 0.1, with_value(1.0)), r"beta1=1\.0"),
    "negative beta1 of adam": (lambda: forecast_adam(FLAT, 0.1, with_value(-0.5)), r"beta1=-0\.5"),
    "mu of sgd": (lambda: forecast_sgd(FLAT, 0.1, with_value(1.5)), r"mu=1\.5"),
    "negative mu of sgd": (lambda: forecast_sgd(FLAT, 0.1, with_value(-0.5)), r"mu=-0\.5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, what = BAD[name]
    with pytest.raises(ValueError, match=what):
        call()


@pytest.mark.parametrize("momentum", [ema(0.3), ema(0.1, nesterov=True), trace(0.8)], ids=str)
def test_the_steady_variance_and_overlap_are_where_a_long_forecast_arrives(momentum):
    kernel, lr, decay = KERNELS["square"][0], 0.05, 0.2
    var = 0.0
    for updates in range(1, 400):
        var = advance(momentum, var).var_m
        assert variance(momentum, updates) == pytest.approx(var, rel=1e-12)
    assert variance(momentum) == pytest.approx(var, rel=1e-12)
    _, _, arrived = advance_forecast(
        initial_state(kernel), kernel, [momentum] * 3000, np.full(3000, lr), np.full(3000, lr * decay)
    )
    settled = steady_overlap(kernel, advance(momentum, variance(momentum)), lr, lr * decay)
    np.testing.assert_allclose(settled, arrived.overlaps, rtol=1e-9)


def test_the_momentum_of_a_tiny_alpha_keeps_its_digits():
    assert variance(ema(1e-17)) == pytest.approx(1e-17 / 2, rel=1e-12)
