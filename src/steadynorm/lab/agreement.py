"""Compare simulated parameters with their predictions."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from steadynorm import progress, theory
from steadynorm.lab import holds, simulate
from steadynorm.prediction import LrPlan, ParamSetting, predict

_RESPONSE_SEEDS = 64


@dataclass(frozen=True)
class Comparison:
    """Steady |theta|/|u| of one simulated setting, beside its predictions."""

    alpha: float
    simulated: float  # mean over seeds
    error: float  # standard error of that mean
    exact: float  # by the exact kernel
    paper: float  # by the paper's formula

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


@dataclass(frozen=True)
class HeldNorm:
    """|theta|/|u| of one simulated setting and one way to hold it."""

    alpha: float
    hold: str  # one of holds.HOLDS
    target: float
    mean: float  # root mean square over seeds and the last two thirds of the run
    error: float  # standard error of that mean
    end: float  # root mean square over seeds after the last step

    @property
    def mean_ratio(self) -> float:
        """Mean over target."""
        return self.mean / self.target

    @property
    def end_ratio(self) -> float:
        """End over target."""
        return self.end / self.target


def compare(
    settings: Sequence[ParamSetting], momentum: str, steps: int, *, seeds: int, seed: int = 0
) -> list[Comparison]:
    """Simulate settings that have a weight decay as one batch, and compare their second half with the prediction."""
    systems = [
        simulate.System(setting.entry.name, setting.shape, setting.lr, setting.decay("linear"), setting.alpha, momentum)
        for setting in settings
    ]
    with progress.bar(steps * len(systems), "simulating") as advance:
        trajectories = simulate.run(systems, steps, seeds=seeds, seed=seed, progress=advance)
    comparisons = []
    for setting, trajectory in zip(settings, trajectories, strict=True):
        predicted, measured = predict(setting), trajectory.late_mean(norm=True)
        exact, paper = math.sqrt(predicted.exact.steady_norm_sq), math.sqrt(predicted.paper.formula_norm_sq)
        comparisons.append(Comparison(setting.alpha, measured.mean, measured.error, exact, paper))
    return comparisons


def compare_holds(
    setting: ParamSetting,
    names: Sequence[str],
    plan: LrPlan,
    *,
    balance_steps: float = 100.0,
    pull: float = 0.0,
    seeds: int = 8,
    seed: int = 0,
) -> list[HeldNorm]:
    """Simulate ways to hold the norm (`holds.HOLDS`) at which a setting with a weight decay settles, with the same noise."""
    target = predict(setting).exact.steady_norm_sq
    lrs = setting.lr * plan.ratios()
    systems = []
    for name in names:
        decay_for = theory.cautious_weight_decay_for if name == "cautious" else theory.weight_decay_for
        decays = [
            decay_for(target, lr, setting.alpha, nesterov=setting.nesterov, overlap=setting.kernel)
            for lr in lrs.tolist()
        ]
        systems.append(
            holds.HeldSystem(
                name, setting.entry.name, setting.shape, lrs, lrs * np.array(decays), setting.alpha, target,
                setting.nesterov, balance_steps, pull,
            )
        )  # fmt: skip
    with progress.bar(plan.steps * len(systems), "simulating") as advance:
        trajectories = holds.run_held(systems, plan.steps, seeds=seeds, seed=seed, progress=advance)
    norms = []
    for name, trajectory in zip(names, trajectories, strict=True):
        late, end = trajectory.late_mean(2 / 3, norm=True), math.sqrt(float(trajectory.mean()[-1]))
        norms.append(HeldNorm(setting.alpha, name, math.sqrt(target), late.mean, late.error, end))
    return norms


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
