"""Forecast a norm that balanced decay holds at a target C^2.

    eta_t = eta + clamp(N / C^2 - 1, -1, 1) / (2 T)

eta is the decay that cancels what updates do at the target, and T is `balance_steps`.
"""

import numpy as np

from steadynorm.theory.equilibrium import check_target
from steadynorm.theory.kernels import Floats
from steadynorm.theory.trajectory import check_start


def balance_keep(eta: float, balance_steps: float) -> float:
    """Return the factor by which one step of balanced decay multiplies a small error of the squared norm.

        (1 - eta) (1 - eta - 1/T),    at least 0

    Args:
        eta: The decay that holds the target.
        balance_steps: T.

    Examples:
        >>> round(balance_keep(0.0, 100), 9)
        0.99
    """
    return max(0.0, (1 - eta) * (1 - eta - 1 / balance_steps))


def forecast_balance(steady_norm_sq: float, eta: Floats, balance_steps: float, *, start: float = 0.0) -> Floats:
    """Return the expected |theta_t|^2 / |u|^2 after every step of balanced decay.

        N <- (1 - eta_t)^2 N + (2 eta - eta^2) C^2

    A norm that is off returns to the target as exp(-t / T), or faster where eta is not small beside 1 / T. Updates may
    have any length and any alignment with the weights, because balance measures and cancels both; `eta` is the decay that
    cancels them at the target. With independent gradients that is lr times `weight_decay_for` the target.

    Args:
        steady_norm_sq: The target C^2.
        eta: The decay that holds the target, one value per step; zero where a step is not taken.
        balance_steps: T.
        start: |theta_0|^2 / |u|^2.

    Examples:
        >>> errors = forecast_balance(1.0, np.zeros(200), 100, start=1.01) - 1
        >>> [round(float(errors[t]) / 0.01, 2) for t in (99, 199)]  # about exp(-1) and exp(-2)
        [0.36, 0.13]
    """
    target = check_target("steady_norm_sq", steady_norm_sq)
    if not balance_steps >= 1:
        raise ValueError(f"balance_steps={balance_steps} must be 1 or more")
    norm, norms = check_start(start), np.empty(len(eta))
    for t, drift in enumerate(np.asarray(eta, dtype=np.float64).tolist()):
        error = min(1.0, max(-1.0, norm / target - 1))
        norm = (1 - drift - error / (2 * balance_steps)) ** 2 * norm + (2 - drift) * drift * target
        norms[t] = norm
    return norms
