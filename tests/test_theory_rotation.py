"""Fixed norms beside decay: angles per step against simulation, and the way of balance back to its target."""

import math

import numpy as np
import pytest

from steadynorm import theory
from steadynorm.theory import angle_per_step, balance_keep, fixed_norm_lr, forecast_balance, lr_of_fixed_norm


def measure_angle(lr: float, eta: float, alpha: float, norm_sq: float, fixed: bool, steps: int = 3000) -> float:
    """Return the RMS angle per step of a 1000-vector with unit updates, slowly and by the definition of an angle."""
    rng = np.random.default_rng(0)
    theta, m = rng.standard_normal((2, 1000))
    theta *= math.sqrt(norm_sq) / np.linalg.norm(theta)
    angles = []
    for _ in range(steps):
        m = (1 - alpha) * m + alpha * rng.standard_normal(1000)
        u = m / np.linalg.norm(m)
        if fixed:
            radius = math.sqrt(norm_sq)
            new = theta - lr * radius * u
            new *= radius / np.linalg.norm(new)
        else:
            new = (1 - eta) * theta - lr * u
        angles.append(math.acos(min(1.0, new @ theta / np.linalg.norm(new) / np.linalg.norm(theta))))
        theta = new
    return math.sqrt(np.mean(np.square(angles[steps // 3 :])))


@pytest.mark.parametrize(("lr", "decay", "alpha"), [(0.05, 0.1, 0.1), (0.02, 0.5, 0.5), (0.1, 0.05, 1.0)])
def test_fixed_norm_turns_the_weights_by_the_angle_of_corrected_decay(lr: float, decay: float, alpha: float):
    norm_sq = theory.steady_norm_sq(lr, decay, alpha, overlap=theory.overlap("bias", (1000,)))
    relative = fixed_norm_lr(lr, norm_sq)
    by_decay = measure_angle(lr, lr * decay, alpha, norm_sq, fixed=False)
    by_norm = measure_angle(relative, 0.0, alpha, norm_sq, fixed=True)
    assert by_norm == pytest.approx(by_decay, rel=0.02)
    assert by_decay == pytest.approx(angle_per_step(relative, lr * decay), rel=0.02)
    assert lr_of_fixed_norm(relative, norm_sq) == pytest.approx(lr, rel=1e-12)


@pytest.mark.parametrize(("relative", "eta"), [(0.01, 0.0), (0.3, 0.1), (1.9, 0.05), (0.2, 0.2)])
def test_angle_is_that_of_a_triangle_with_the_weights_before_and_after(relative: float, eta: float):
    """Sides 1 - eta and 1 with the angle between them, and opposite to it a side of length r."""
    angle = angle_per_step(relative, eta)
    before, after = np.array([1 - eta, 0.0]), np.array([math.cos(angle), math.sin(angle)])
    assert np.linalg.norm(after - before) == pytest.approx(relative, rel=1e-12)


@pytest.mark.parametrize(("relative", "eta"), [(2.1, 0.0), (0.1, 0.2), (0.1, -0.1), (1.0, 1.0), (math.nan, 0.0)])
def test_impossible_angle_is_refused(relative: float, eta: float):
    with pytest.raises(ValueError, match="keeps the norm"):
        angle_per_step(relative, eta)


@pytest.mark.parametrize("function", [fixed_norm_lr, lr_of_fixed_norm])
def test_lr_of_a_fixed_norm_needs_a_norm(function):
    with pytest.raises(ValueError, match="steady_norm_sq=0"):
        function(0.01, 0.0)
    with pytest.raises(ValueError, match="lr=-1"):
        function(-1.0, 1.0)


# --- the forecast under balance


def test_balance_holds_a_norm_that_is_on_target_whatever_the_decay():
    eta = np.array([0.0, 0.01, 0.2, 0.5])
    np.testing.assert_allclose(forecast_balance(3.0, eta, 50, start=3.0), 3.0, rtol=1e-14)


@pytest.mark.parametrize("start", [0.9, 1.1])
def test_error_falls_by_e_over_the_balance_steps(start: float):
    norms = forecast_balance(1.0, np.zeros(600), 200, start=start)
    errors = (norms - 1) / (start - 1)
    assert errors[[199, 399, 599]] == pytest.approx(np.exp([-1.0, -2.0, -3.0]), rel=0.12)


@pytest.mark.parametrize("eta", [0.0, 0.01, 0.1])
def test_small_error_is_multiplied_by_what_balance_keeps(eta: float):
    after = forecast_balance(2.0, np.array([eta]), 40, start=2.0 * (1 + 1e-6))[0]
    assert (after / 2 - 1) / 1e-6 == pytest.approx(balance_keep(eta, 40), rel=1e-4)
    assert balance_keep(eta, 1.0) == 0.0


def test_correction_of_a_large_error_is_bounded():
    """However far off, a step removes at most the fraction 1/T of the norm's square."""
    assert forecast_balance(1.0, np.zeros(1), 50, start=1000.0)[0] == pytest.approx(1000 * (1 - 1 / 100) ** 2)


def test_updates_lift_a_norm_from_zero_to_the_target():
    norms = forecast_balance(2.0, np.full(3000, 0.005), 100)
    assert norms[0] == pytest.approx(2.0 * (2 - 0.005) * 0.005)
    assert norms[-1] == pytest.approx(2.0, rel=1e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [({"balance_steps": 0.5}, "balance_steps"), ({"start": -1.0}, "start"), ({"steady_norm_sq": 0.0}, "steady")],
)
def test_forecast_of_balance_refuses_what_makes_no_sense(change: dict, message: str):
    settings = {"steady_norm_sq": 1.0, "eta": np.zeros(3), "balance_steps": 100.0, "start": 1.0} | change
    with pytest.raises(ValueError, match=message):
        forecast_balance(**settings)
