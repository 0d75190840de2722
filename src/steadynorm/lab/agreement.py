"""Compare simulated parameters with their predictions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from steadynorm import progress
from steadynorm.lab import simulate
from steadynorm.prediction import ParamSetting, predict

_RESPONSE_SEEDS = 64


@dataclass(frozen=True)
class Comparison:
    """Steady |theta|/|u| of one simulated setting, beside its predictions.

    Attributes:
        alpha: Weight of the new gradient.
        simulated: Mean over seeds.
        error: Standard error of that mean.
        exact: Prediction by the exact kernel.
        paper: Prediction by the paper's formula.
    """

    alpha: float
    simulated: float
    error: float
    exact: float
    paper: float

    @property
    def exact_ratio(self) -> float:
        """Exact prediction over simulation."""
        return self.exact / self.simulated

    @property
    def paper_ratio(self) -> float:
        """Paper's formula over simulation."""
        return self.paper / self.simulated


@dataclass(frozen=True)
class Response:
    """Total distance that one gradient moves the weights, measured and expected."""

    response: float
    response_error: float
    expected_response: float
    effective_lr: float


def compare(
    settings: Sequence[ParamSetting], momentum: str, steps: int, *, seeds: int, seed: int = 0
) -> list[Comparison]:
    """Simulate settings that have a weight decay as one batch, and compare their second half with the prediction."""
    systems = [_system(setting, momentum) for setting in settings]
    with progress.bar(steps * len(systems), "simulating") as advance:
        trajectories = simulate.run(systems, steps, seeds=seeds, seed=seed, progress=advance)
    comparisons = []
    for setting, trajectory in zip(settings, trajectories, strict=True):
        predicted, measured = predict(setting), trajectory.late_mean(norm=True)
        exact, paper = math.sqrt(predicted.exact.steady_norm_sq), math.sqrt(predicted.paper.formula_norm_sq)
        comparisons.append(Comparison(setting.alpha, measured.mean, measured.error, exact, paper))
    return comparisons


def measure_responses(settings: Sequence[ParamSetting], momentum: str) -> list[Response]:
    """Measure how far one gradient moves the weights in total under each setting."""
    responses = []
    with progress.bar(len(settings), "following one gradient") as advance:
        for setting in settings:
            measured = simulate.gradient_response(
                setting.entry.name, setting.shape, lr=setting.lr, alpha=setting.alpha, momentum=momentum,
                seeds=_RESPONSE_SEEDS,
            )  # fmt: skip
            predicted = predict(setting)
            responses.append(Response(measured.mean, measured.error, predicted.response, predicted.effective_lr))
            advance(1)
    return responses


def _system(setting: ParamSetting, momentum: str) -> simulate.System:
    assert setting.weight_decay is not None
    return simulate.System(setting.entry.name, setting.shape, setting.lr, setting.weight_decay, setting.alpha, momentum)
