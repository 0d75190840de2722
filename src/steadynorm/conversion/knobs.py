"""Find the settings that meet a wish: a longer half-life, another norm, another relative update.

    eta = 1 - 2^(-1 / half-life),    C^2 = lr^2 G(alpha, eta) / (2 eta - eta^2),    r = lr / sqrt(C^2)

Two of lr, C^2 and eta determine the third, so each wish can be met in two ways, which keep different things. Numbers are
those of the exact kernel. Functions take and return plain numbers and need no torch.
"""

import math
from dataclasses import dataclass

from steadynorm import theory
from steadynorm.prediction import ParamSetting, predict

HALF_LIFE, RMS, RELATIVE_UPDATE, LR = "half-life", "RMS", "relative update", "lr"


@dataclass(frozen=True)
class Knob:
    """Settings of a parameter that meet one wish, and what else they do."""

    wish: str  # HALF_LIFE, RMS or RELATIVE_UPDATE; "" for the settings as they are
    kept: str  # what stays as it is: RMS, LR or HALF_LIFE
    lr: float
    weight_decay: float  # at that lr
    steady_norm_sq: float  # target C^2 for which this is the decay
    half_life: float  # of the weights, in steps
    rms: float  # per element, at the steady norm
    relative_update: float  # lr |u| / |theta| at the steady norm, the angle per step in radians


def describe_setting(setting: ParamSetting) -> Knob:
    """Return a setting as it is, in the terms of the knobs.

    >>> now = describe_setting(ParamSetting(lr=0.01, alpha=0.1, shape=(64,), steady_norm_sq=1.0))
    >>> round(now.relative_update, 9), round(now.rms, 9)
    (0.01, 1.0)
    """
    level = predict(setting).exact
    return _knob(setting, "", "", setting.lr, level.eta)


def find_knobs(
    setting: ParamSetting,
    *,
    half_life: float | None = None,
    rms: float | None = None,
    relative_update: float | None = None,
) -> list[Knob]:
    """Return the two ways to meet each of three wishes at the same alpha.

        half-life          keeps the norm by another lr, or keeps the lr at another norm
        norm               keeps the lr, or keeps the half-life by another lr
        relative update    keeps the norm by another lr, or keeps the lr at another norm

    By default the wishes are twice the half-life, in steps, twice the RMS per element, and half the relative update.

    Raises:
        ValueError: If a wish is out of range or cannot be met.

    >>> setting = ParamSetting(lr=0.01, alpha=0.1, shape=(384, 384), steady_norm_sq=1.1875)
    >>> slower, larger = find_knobs(setting)[:2]  # twice the half-life
    >>> round(slower.lr / 0.01, 2), round(larger.steady_norm_sq / 1.1875, 2)
    (0.71, 2.0)
    """
    now = describe_setting(setting)
    half_life = _check("half_life", 2 * now.half_life or 1.0 if half_life is None else half_life)
    rms = _check("rms", 2 * now.rms if rms is None else rms)
    relative_update = _check("relative_update", now.relative_update / 2 if relative_update is None else relative_update)
    lr, norm_sq = now.lr, now.steady_norm_sq
    eta = -math.expm1(-math.log(2) / half_life)
    rms_norm_sq = norm_sq * (rms / now.rms) ** 2
    return [
        _knob(setting, HALF_LIFE, RMS, lr * math.sqrt(norm_sq / _norm_sq(setting, lr, eta)), eta),
        _knob(setting, HALF_LIFE, LR, lr, eta),
        _knob(setting, RMS, LR, lr, _eta(setting, lr, rms_norm_sq)),
        _knob(setting, RMS, HALF_LIFE, lr * rms / now.rms, now.lr * now.weight_decay),
        _reach(setting, RMS, theory.lr_of_fixed_norm(relative_update, norm_sq), norm_sq),
        _reach(setting, LR, lr, (lr / relative_update) ** 2),
    ]


def _reach(setting: ParamSetting, kept: str, lr: float, norm_sq: float) -> Knob:
    return _knob(setting, RELATIVE_UPDATE, kept, lr, _eta(setting, lr, norm_sq))


def _knob(setting: ParamSetting, wish: str, kept: str, lr: float, eta: float) -> Knob:
    norm_sq = _norm_sq(setting, lr, eta)
    rms = math.sqrt(norm_sq * setting.update_norm_sq / math.prod(setting.shape))
    half_life = theory.half_life(lr, eta / lr)
    return Knob(wish, kept, lr, eta / lr, norm_sq, half_life, rms, theory.fixed_norm_lr(lr, norm_sq))


def _norm_sq(setting: ParamSetting, lr: float, eta: float) -> float:
    """Return the C^2 at which this lr and this decay per step settle."""
    return theory.steady_norm_sq(lr, eta / lr, setting.alpha, nesterov=setting.nesterov, overlap=setting.kernel)


def _eta(setting: ParamSetting, lr: float, norm_sq: float) -> float:
    """Return the decay per step that reaches C^2 at this lr."""
    return lr * theory.weight_decay_for(norm_sq, lr, setting.alpha, nesterov=setting.nesterov, overlap=setting.kernel)


def _check(name: str, value: float) -> float:
    if not (math.isfinite(value) and value > 0):
        raise ValueError(f"{name} {value}: must be above 0")
    return value
