"""Translate settings tuned for AdamW, Lion or torch's Muon into ScionC's, and predict what they do to the weights.

    lr, decay -> eta = lr decay, effective lr -> ScionC's lr: the same effective lr -> C^2: the same eta

Steady states and forecasts come from `theory`, factors between optimizers from `equivalents`. Functions take and return
plain numbers and need no torch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import ClassVar

import numpy as np

from steadynorm import theory
from steadynorm.conversion.equivalents import from_adamw, from_muon
from steadynorm.decay.families import ADAM, LION, MUON, Family
from steadynorm.prediction import (
    Floats,
    LrPlan,
    NormForecast,
    ParamSetting,
    Prediction,
    check_decays,
    check_start,
    predict,
)
from steadynorm.theory.momentum import check_beta
from steadynorm.theory.updates import muon_update_norm_sq
from steadynorm.views import Blocks

SCION_ALPHA = 0.1  # ScionC's default


@dataclass(frozen=True)
class Tuned(ABC):
    """Peak lr and weight decay that you tuned, in the conventions of their own optimizer."""

    family: ClassVar[Family]
    nesterov = False
    lr: float
    weight_decay: float

    def __post_init__(self) -> None:
        check_decays(self.lr, self.weight_decay)

    @property
    def name(self) -> str:
        """Name of the optimizer."""
        return type(self).__name__

    @property
    def alpha(self) -> float:
        """Alpha that `convert` gives ScionC."""
        return self.family.alpha(asdict(self))

    @property
    def effective_lr(self) -> float:
        """Total contribution of one gradient, in units of the optimizer's update."""
        return self.family.effective_lr(asdict(self))

    @property
    @abstractmethod
    def target(self) -> float:
        """Value of `steady_norm_sq=` for which `correct` sets this decay at this lr."""

    def refusal(self, shape: Sequence[int]) -> str:
        """Return why the optimizer does not train a parameter of this shape, or "" if it does."""
        return ""

    def check_shape(self, shape: Sequence[int]) -> None:
        """Raise ValueError if the optimizer does not train a parameter of this shape."""
        if refusal := self.refusal(shape):
            raise ValueError(f"shape {tuple(shape)}: {refusal}")

    @abstractmethod
    def mean_square(self, shape: Sequence[int]) -> float:
        """Return the steady E theta_i^2 of an element at constant lr if gradients are independent of the weights."""

    @abstractmethod
    def mean_squares(self, shape: Sequence[int], lr: Floats, weight_decay: Floats, start: float) -> Floats:
        """Return E theta_i^2 of an element after every step of a run that begins at `start`."""

    def scion_lr(self, setting: ParamSetting) -> float:
        """Return the lr with the same effective lr per element under this setting's lmo, shape and momentum."""
        return from_adamw(self.effective_lr, setting)


@dataclass(frozen=True)
class AdamW(Tuned):
    """Settings of torch.optim.AdamW.

    >>> tuned = AdamW(lr=1e-3, weight_decay=0.1)
    >>> round(tuned.target, 6), round(to_scionc(tuned, (384, 384)).lr, 6)
    (0.005, 0.004496)
    """

    family = ADAM
    betas: tuple[float, float] = (0.9, 0.999)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, beta in zip(("beta1", "beta2"), self.betas, strict=True):
            check_beta(name, beta)

    @property
    def target(self) -> float:
        return theory.adam_mean_square(self.lr, self.weight_decay, limit=True)

    def mean_square(self, shape: Sequence[int]) -> float:
        return theory.adam_mean_square(self.lr, self.weight_decay, self.betas[0])

    def mean_squares(self, shape: Sequence[int], lr: Floats, weight_decay: Floats, start: float) -> Floats:
        return theory.forecast_adam(lr, weight_decay, self.betas[0], start=start)


@dataclass(frozen=True)
class Lion(Tuned):
    """Settings of Lion. Its momentum has two betas and no alpha, so ScionC keeps its default alpha."""

    family = LION
    betas: tuple[float, float] = (0.9, 0.99)

    @property
    def alpha(self) -> float:
        return SCION_ALPHA

    @property
    def target(self) -> float:
        return theory.lion_steady_norm_sq(self.lr, self.weight_decay, *self.betas)

    def mean_square(self, shape: Sequence[int]) -> float:
        return self.target  # the elements of an update are 1 or -1

    def mean_squares(self, shape: Sequence[int], lr: Floats, weight_decay: Floats, start: float) -> Floats:
        return theory.forecast_lion(lr, weight_decay, *self.betas, start=start)


@dataclass(frozen=True)
class Muon(Tuned):
    """Settings of torch.optim.Muon, for matrices; `adjust` is its adjust_lr_fn.

    >>> to_scionc(Muon(lr=0.02, weight_decay=0.1), (64, 64)).lr
    0.02
    """

    family = MUON
    momentum: float = 0.95
    nesterov: bool = True
    adjust: str = "original"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_beta("momentum", self.momentum)

    @property
    def target(self) -> float:
        return theory.steady_norm_sq(self.lr, self.weight_decay, self.alpha, nesterov=self.nesterov, limit=True)

    def refusal(self, shape: Sequence[int]) -> str:
        return "" if len(shape) == 2 else "torch's Muon takes matrices only; give this shape the settings of its AdamW"

    def mean_square(self, shape: Sequence[int]) -> float:
        kernel = theory.overlap("spectral", shape)
        steady = theory.steady_norm_sq(self.lr, self.weight_decay, self.alpha, nesterov=self.nesterov, overlap=kernel)
        return steady * self._element_norm_sq(shape)

    def mean_squares(self, shape: Sequence[int], lr: Floats, weight_decay: Floats, start: float) -> Floats:
        element_norm_sq = self._element_norm_sq(shape)
        kernel = theory.overlap("spectral", shape)
        return element_norm_sq * theory.forecast(
            lr, weight_decay, self.alpha, nesterov=self.nesterov, overlap=kernel, start=start / element_norm_sq
        )

    def scion_lr(self, setting: ParamSetting) -> float:
        same_step = from_muon(self.lr, setting, self.adjust)
        ours = theory.effective_lr(self.lr, setting.alpha, nesterov=setting.nesterov)
        return same_step * self.effective_lr / ours

    def _element_norm_sq(self, shape: Sequence[int]) -> float:
        return muon_update_norm_sq(shape, self.adjust) / math.prod(shape)


TUNED: dict[str, type[Tuned]] = {"adamw": AdamW, "lion": Lion, "muon": Muon}


@dataclass(frozen=True)
class Steady:
    """Steady state of a parameter under the optimizer it was tuned for."""

    eta: float  # lr times decay
    half_life: float  # of the weights, in steps
    effective_lr: float  # total contribution of one gradient, in units of the optimizer's update
    target: float  # for `correct(steady_norm_sq=...)`
    weight_norm: float  # |theta|
    rms: float  # per element


def steady(tuned: Tuned, shape: Sequence[int]) -> Steady:
    """Return the steady state of a parameter.

    >>> round(steady(AdamW(1e-3, 0.1), (384, 384)).rms, 4)  # sqrt(lr / (2 decay))
    0.0707
    """
    tuned.check_shape(shape)
    mean_square = tuned.mean_square(shape)
    return Steady(
        tuned.lr * tuned.weight_decay,
        theory.half_life(tuned.lr, tuned.weight_decay),
        tuned.effective_lr,
        tuned.target,
        math.sqrt(mean_square * math.prod(shape)),
        math.sqrt(mean_square),
    )


def to_scionc(
    tuned: Tuned, shape: Sequence[int], lmo: str = "by-shape", *, blocks: Blocks = 1, alpha: float | None = None
) -> ParamSetting:
    """Return ScionC's lr and C^2 with the effective lr and the half-life that were tuned, as `convert` does.

    Equal effective lr and half-life give equal steady RMS by the paper's formula. Lmo, blocks and alpha (by default
    `tuned.alpha`) are ScionC's.
    """
    tuned.check_shape(shape)
    alpha, nesterov = tuned.alpha if alpha is None else alpha, tuned.nesterov
    unit_setting = ParamSetting(1.0, alpha, tuple(shape), lmo, nesterov, weight_decay=1.0, blocks=blocks)
    lr = tuned.scion_lr(unit_setting)
    decay = tuned.lr * tuned.weight_decay / lr
    target = theory.steady_norm_sq(lr, decay, alpha, nesterov=nesterov, limit=True)
    return ParamSetting(lr, alpha, tuple(shape), lmo, nesterov, steady_norm_sq=target, blocks=blocks)


def forecast(tuned: Tuned, shape: Sequence[int], plan: LrPlan, *, start_rms: float = 0.0) -> NormForecast:
    """Return the expected norm along a run with the decay as it is, and corrected (times lr / peak).

    >>> run = forecast(AdamW(1e-2, 1.0), (32, 32), LrPlan(steps=1000))
    >>> bool(run.constant[-1] < 0.7 * run.constant.max()), bool(run.corrected[-1] > 0.95 * run.corrected.max())
    (True, True)
    """
    tuned.check_shape(shape)
    check_start(start_rms)
    ratios = plan.ratios()
    lr, decay = tuned.lr * ratios, np.full(len(ratios), tuned.weight_decay)
    constant, corrected = (
        np.sqrt(math.prod(shape) * tuned.mean_squares(shape, lr, decays, start_rms**2))
        for decays in (decay, decay * ratios)
    )
    return NormForecast(lr, constant, corrected)


@dataclass(frozen=True)
class Translation:
    """Steady state of one shape and ScionC's prediction for it, or the reason why there are none."""

    shape: tuple[int, ...]
    refusal: str = ""
    steady: Steady | None = None
    prediction: Prediction | None = None  # of ScionC's setting


def translate(
    tuned: Tuned,
    shapes: Sequence[tuple[int, ...]],
    lmo: str = "by-shape",
    *,
    blocks: Blocks = 1,
    alpha: float | None = None,
) -> list[Translation]:
    """Return one translation per shape; arguments are those of `to_scionc`.

    Raises:
        ValueError: If the optimizer trains none of the shapes.
    """
    translations = []
    for shape in shapes:
        if refusal := tuned.refusal(shape):
            translations.append(Translation(shape, refusal))
        else:
            setting = to_scionc(tuned, shape, lmo, blocks=blocks, alpha=alpha)
            translations.append(Translation(shape, "", steady(tuned, shape), predict(setting)))
    if all(row.refusal for row in translations):
        first = translations[0]
        raise ValueError(f"--shape {'x'.join(map(str, first.shape))}: {first.refusal}")
    return translations
