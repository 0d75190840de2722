"""Predict what settings do to the weights before training: steady norm, half-life, effective lr, decay, whole runs.

Functions take and return plain numbers and need no torch; `steadynorm predict` prints them.
"""

import contextlib
import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from steadynorm import schedule, theory
from steadynorm.schedule import StepFunction
from steadynorm.theory.equilibrium import check_reachable
from steadynorm.theory.updates import Update, update_of
from steadynorm.views import Blocks

Floats = NDArray[np.float64]

SCHEDULES = ("constant", "cosine", "linear")


@dataclass(frozen=True)
class ParamSetting:
    """Describe a parameter and how it is trained, with either a weight decay or a target.

    Raises:
        ValueError: If both or neither of `weight_decay` and `steady_norm_sq` are set, or a value is out of range.
    """

    lr: float  # gamma at its peak
    alpha: float  # weight of the new gradient in the momentum
    shape: tuple[int, ...]
    lmo: str = "by-shape"
    nesterov: bool = False
    weight_decay: float | None = None  # lambda
    steady_norm_sq: float | None = None  # target C^2 = |theta|^2 / |u|^2, from which the decay is derived
    blocks: Blocks = 1  # treated as separate matrices, as in ScionC

    def __post_init__(self) -> None:
        if (self.weight_decay is None) == (self.steady_norm_sq is None):
            raise ValueError("give exactly one of a weight decay and a target steady_norm_sq")
        if not self.shape or min(self.shape) < 1:
            raise ValueError(f"shape {self.shape}: every side must be at least 1, such as 384x1536")
        check_decays(self.lr, self.weight_decay)
        self.entry.check(self.shape, self.blocks)

    @property
    def entry(self) -> Update:
        """Row of the lmo table."""
        return update_of(self.lmo, self.shape)

    @functools.cached_property
    def kernel(self) -> theory.Overlap:
        """Kernel that says how updates overlap."""
        return self.entry.overlap(self.shape, blocks=self.blocks)

    @property
    def update_norm_sq(self) -> float:
        """Squared update norm U^2 = |u|^2."""
        return self.entry.update_norm_sq(self.shape, blocks=self.blocks)

    def decay(self, overlap: theory.Overlap | str) -> float:
        """Return the decay as set, or the decay that reaches the target under this kernel; raise ValueError if none does."""
        target = self.steady_norm_sq
        if target is None:
            return self.weight_decay or 0.0
        decay = theory.weight_decay_for(target, self.lr, self.alpha, nesterov=self.nesterov, overlap=overlap)
        return check_reachable(target, self.lr, decay)


def check_decays(lr: float, weight_decay: float | None) -> None:
    """Raise ValueError unless lr, and the decay if there is one, are above 0."""
    if weight_decay is not None and not weight_decay > 0:
        raise ValueError(f"weight decay {weight_decay}: without decay the norm grows forever; pass a decay above 0")
    if not lr > 0:
        raise ValueError(f"lr {lr}: must be above 0")


def check_start(start_rms: float) -> None:
    """Raise ValueError unless the RMS of the initial weights is finite and at least 0."""
    if not (math.isfinite(start_rms) and start_rms >= 0):
        raise ValueError(f"start_rms {start_rms}: pass the RMS of the initial weights, 0 or more")


@dataclass(frozen=True)
class Level:
    """Steady state that one decay leads to under the exact kernel, beside the paper's formula."""

    weight_decay: float
    eta: float  # lr times decay
    half_life: float  # in steps
    formula_norm_sq: float  # C^2 by the paper's formula
    steady_norm_sq: float  # C^2 = |theta|^2 / |u|^2 by the exact kernel
    weight_norm: float  # |theta|
    rms: float  # per element


@dataclass(frozen=True)
class Prediction:
    """Steady states with the decay by the paper's formula and by the exact kernel; equal if the decay is set."""

    setting: ParamSetting
    effective_lr: float
    update_norm: float
    paper: Level
    exact: Level

    @property
    def response(self) -> float:
        """Distance that one gradient moves the weights in total, in units of |u|: effective lr * sqrt(a_1).

        a_1 = f'(0) is the linear part of the lmo, the only part of a gradient's effect that lasts.
        """
        return self.effective_lr * math.sqrt(self.setting.kernel(1e-6) / 1e-6)


def predict(setting: ParamSetting) -> Prediction:
    """Return the steady state of a setting.

    >>> p = predict(ParamSetting(lr=0.01, alpha=0.1, shape=(384, 1536), lmo="spectral", steady_norm_sq=1.1875))
    >>> round(p.paper.weight_decay, 6), round(p.paper.steady_norm_sq, 2), round(p.exact.steady_norm_sq, 4)
    (0.08, 1.13, 1.1875)
    """
    effective = theory.effective_lr(setting.lr, setting.alpha, nesterov=setting.nesterov)
    levels = [_level(setting, setting.decay(overlap)) for overlap in ("linear", setting.kernel)]
    return Prediction(setting, effective, math.sqrt(setting.update_norm_sq), *levels)


def convert_half_life(
    steps: float, tokens_per_step: float | None = None, steps_per_epoch: float | None = None
) -> dict[str, float]:
    """Return a half-life in steps and, where their sizes are known, in tokens and epochs.

    >>> convert_half_life(100, steps_per_epoch=50)
    {'steps': 100.0, 'epochs': 2.0}
    """
    for name, amount in (("tokens_per_step", tokens_per_step), ("steps_per_epoch", steps_per_epoch)):
        if amount is not None and not 0 < amount < math.inf:
            raise ValueError(f"{name} {amount}: must be above 0 and finite")
    per_step = {
        "steps": 1.0,
        "tokens": tokens_per_step,
        "epochs": None if steps_per_epoch is None else 1 / steps_per_epoch,
    }
    return {unit: steps * amount for unit, amount in per_step.items() if amount is not None}


def _level(setting: ParamSetting, decay: float) -> Level:
    lr, alpha, nesterov = setting.lr, setting.alpha, setting.nesterov
    formula = theory.steady_norm_sq(lr, decay, alpha, nesterov=nesterov, limit=True)
    exact = theory.steady_norm_sq(lr, decay, alpha, nesterov=nesterov, overlap=setting.kernel)
    square = exact * setting.update_norm_sq
    rms = math.sqrt(square / math.prod(setting.shape))
    return Level(decay, lr * decay, theory.half_life(lr, decay), formula, exact, math.sqrt(square), rms)


@dataclass(frozen=True)
class Match:
    """Another lr or alpha, and the decay that keeps the steady norm there, by the paper's formula and exactly."""

    lr: float
    alpha: float
    effective_lr: float
    paper_decay: float
    exact_decay: float


def matches(setting: ParamSetting, alphas: Sequence[float], lrs: Sequence[float] = ()) -> list[Match]:
    """Return the decay that keeps the steady norm at each other alpha and at each other lr.

    Without `lrs` these are a quarter, half, twice and four times the lr, as far as the norm can be reached there.

    >>> s = ParamSetting(lr=0.01, alpha=0.1, shape=(384, 384), lmo="spectral", weight_decay=0.08)
    >>> [round(m.paper_decay, 4) for m in matches(s, [0.1, 1.0], [0.005])]
    [0.08, 0.0042, 0.04]
    """
    before, nesterov = predict(setting), setting.nesterov

    def match(lr: float, alpha: float) -> Match:
        paper = theory.weight_decay_for(before.paper.formula_norm_sq, lr, alpha, nesterov=nesterov)
        exact = theory.weight_decay_for(
            before.exact.steady_norm_sq, lr, alpha, nesterov=nesterov, overlap=setting.kernel
        )
        return Match(lr, alpha, theory.effective_lr(lr, alpha, nesterov=nesterov), paper, exact)

    out = [match(setting.lr, alpha) for alpha in alphas] + [match(lr, setting.alpha) for lr in lrs]
    for ratio in () if lrs else (0.25, 0.5, 2, 4):
        with contextlib.suppress(ValueError):  # one update is longer than this norm
            out.append(match(ratio * setting.lr, setting.alpha))
    return out


@dataclass(frozen=True)
class LrPlan:
    """Learning rate schedule of a whole run; raises ValueError if a value is out of range."""

    steps: int
    warmup: int = 0  # steps of linear warmup
    schedule: str = "cosine"  # after the warmup
    final: float = 0.0  # last lr as a fraction of the peak

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ValueError(f"schedule {self.schedule!r} is unknown; choose one of {', '.join(SCHEDULES)}")
        if self.steps < 1 or not 0 <= self.warmup < max(self.steps, 1):
            raise ValueError(f"steps {self.steps}, warmup {self.warmup}: pass at least one step and a shorter warmup")
        if not 0 <= self.final <= 1:
            raise ValueError(f"final {self.final}: pass the last lr as a fraction of the peak, from 0 to 1")
        if self.schedule == "constant" and self.final:
            raise ValueError(
                f"final {self.final}: a constant schedule ends at its peak; leave it out, or choose another"
            )

    @property
    def ratio(self) -> StepFunction:
        """lr / peak as a function of the step."""
        if self.schedule == "constant":
            return schedule.constant(self.warmup)
        return getattr(schedule, self.schedule)(self.steps, self.warmup, self.final)

    def ratios(self) -> Floats:
        """Return lr / peak at every step."""
        return np.array(list(map(self.ratio, range(self.steps))))


@dataclass(frozen=True)
class NormForecast:
    """Weight norm after every step of a run, with constant and with corrected decay."""

    lr: Floats
    constant: Floats
    corrected: Floats


def forecast(setting: ParamSetting, plan: LrPlan, *, start_rms: float = 0.0) -> NormForecast:
    """Return the expected norm along a run that starts from weights of this RMS per element.

    >>> s = ParamSetting(lr=0.05, alpha=0.1, shape=(32, 32), lmo="spectral", weight_decay=0.1)
    >>> f = forecast(s, LrPlan(steps=2000))
    >>> bool(f.constant[-1] < 0.8 * f.constant.max()), bool(f.corrected[-1] > 0.9 * f.corrected.max())
    (True, True)
    """
    check_start(start_rms)
    ratios = plan.ratios()
    lr, decay, update_norm_sq = setting.lr * ratios, setting.decay(setting.kernel), setting.update_norm_sq
    start = start_rms**2 * math.prod(setting.shape) / update_norm_sq
    constant, corrected = (
        np.sqrt(
            update_norm_sq
            * theory.forecast(lr, decays, setting.alpha, nesterov=setting.nesterov, overlap=setting.kernel, start=start)
        )
        for decays in (decay, decay * ratios)
    )
    return NormForecast(lr, constant, corrected)


def spark(values: Sequence[float] | Floats, width: int = 40) -> str:
    """Draw values as a line of bars that starts at zero.

    >>> spark([0, 1, 2, 4, 8], width=5)
    ' ▁▂▄█'
    """
    array = np.asarray(values, dtype=np.float64)
    at = np.linspace(0, len(array) - 1, min(width, len(array))).round().astype(int)
    top = array.max() or 1.0
    return "".join(" ▁▂▃▄▅▆▇█"[int(8 * value / top)] for value in array[at])
