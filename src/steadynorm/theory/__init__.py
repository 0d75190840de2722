"""Predict weight norms: overlap kernels, steady state, the decay for a target, forecasts. No torch in here."""

from steadynorm.theory.forecast import (
    Walk,
    begin,
    expected_alignment,
    forecast,
    forecast_adam,
    forecast_lion,
    forecast_sgd,
    walk,
)
from steadynorm.theory.kernels import Overlap, matrix_sides, overlap
from steadynorm.theory.momentum import Correlation, Filter, advance, ema, lion, steady, trace
from steadynorm.theory.steady import (
    adam_mean_square,
    adam_weight_decay_for,
    effective_lr,
    effective_lr_trace,
    half_life,
    lion_gain,
    lion_steady_norm_sq,
    lion_weight_decay_for,
    momentum_gain,
    steady_norm_sq,
    weight_decay_for,
)

__all__ = [
    "Correlation",
    "Filter",
    "Overlap",
    "Walk",
    "adam_mean_square",
    "adam_weight_decay_for",
    "advance",
    "begin",
    "effective_lr",
    "effective_lr_trace",
    "ema",
    "expected_alignment",
    "forecast",
    "forecast_adam",
    "forecast_lion",
    "forecast_sgd",
    "half_life",
    "lion",
    "lion_gain",
    "lion_steady_norm_sq",
    "lion_weight_decay_for",
    "matrix_sides",
    "momentum_gain",
    "overlap",
    "steady",
    "steady_norm_sq",
    "trace",
    "walk",
    "weight_decay_for",
]
