"""Fixed norms beside decay: how far a step turns the weights, and the relative lr at which both turn them alike.

    decay       theta <- (1 - eta) theta - gamma u
    fixed       theta <- R normalise(theta - gamma_rel R normalise(u))

At the steady norm R = sqrt(C^2) |u| both turn the weights by the same angle if gamma_rel = gamma / sqrt(C^2).
"""

import math

from steadynorm.theory.equilibrium import check_lr, check_target
from steadynorm.theory.momentum import check_single


def fixed_norm_lr(lr: float, steady_norm_sq: float) -> float:
    """Return gamma_rel = gamma / sqrt(C^2), the relative lr of a fixed norm that turns the weights as decay does.

    It is also the relative update gamma |u| / |theta| at the steady norm. The equality of angles holds to first order
    in eta, the decay per step.

    Examples:
        >>> round(fixed_norm_lr(0.01, 1.1875), 6)
        0.009177
    """
    return check_lr(lr) / math.sqrt(check_target("steady_norm_sq", steady_norm_sq))


def lr_of_fixed_norm(relative_lr: float, steady_norm_sq: float) -> float:
    """Return gamma = gamma_rel sqrt(C^2), the inverse of `fixed_norm_lr`.

    Examples:
        >>> lr_of_fixed_norm(fixed_norm_lr(0.01, 4.0), 4.0)
        0.01
    """
    return check_lr(relative_lr) * math.sqrt(check_target("steady_norm_sq", steady_norm_sq))


def angle_per_step(relative_update: float, eta: float = 0.0) -> float:
    """Return the angle between the weights before and after a step that keeps their norm, in radians.

        sin^2(angle / 2) = (r^2 - eta^2) / (4 (1 - eta)),    r = gamma |u| / |theta|

    This is the law of cosines in the triangle of (1 - eta) theta, gamma u and the new theta. For small r and eta the
    angle is r.

    Args:
        relative_update: r.
        eta: Fraction of the weights that decay removes in the step.

    Raises:
        ValueError: If no step of this size keeps the norm, which needs eta <= r <= 2 - eta.

    Examples:
        >>> round(angle_per_step(0.01), 6), round(angle_per_step(1.0) / math.pi, 6)
        (0.01, 0.333333)
    """
    check_single("relative_update", relative_update)
    check_single("eta", eta)
    if not 0 <= eta < 1 or not eta <= relative_update <= 2 - eta:
        raise ValueError(
            f"relative update {relative_update} with eta {eta}: a step that keeps the norm has eta in [0, 1) and a relative "
            "update from eta to 2 - eta"
        )
    sine_sq = (relative_update - eta) * (relative_update + eta) / (4 * (1 - eta))
    return 2 * math.asin(math.sqrt(min(1.0, sine_sq)))
