"""The forecast of layers that are trained alike, as floats on the host.

The expected norm is linear in where it starts (in theory.forecast, D does not depend on N). Layers that share group and
overlap kernel therefore share one forecast from zero, and each adds what is left of its own start:

    E|theta_t|^2 = U^2 N_t + |theta_0|^2 K_t,      K_t = prod (1-eta)^2
    E cos(theta_{t-1}, u_t) = - X_t / sqrt(N_{t-1} + K_{t-1} |theta_0|^2 / U^2),     X = sum_n a_n to_x^n D_n

A second forecast knows how long updates turned out to be: N of each layer by itself, with gamma |u_t| / U in place of
gamma. Between two records the ratio is that of the last one.

Where the norm is held, N <- k N + (1 - k) C^2 and K <- k K instead: k is the factor of the error that balance leaves per
step, 0 for a norm fixed at C^2, and 1 for one fixed where it is.

During training a step only appends its parameters to a track; the forecast advances when records are made.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Self

import numpy as np
import torch

from steadynorm import theory
from steadynorm.decay.families import Family
from steadynorm.monitor.layers import Layer
from steadynorm.theory import Filter, ForecastState, Overlap

_ALMOST_ZERO = 1e-200  # replaces N = 0, for which theory.advance_forecast returns no cosine


class Start(NamedTuple):
    """A layer when the monitor first saw it."""

    norm_sq: float  # |theta_0|^2
    warm: bool  # whether its momentum was not zero
    updates: int  # that it had received, where the optimizer counts them


class StepParams(NamedTuple):
    """What the forecast needs to know of one step."""

    lr: float
    eta: float
    filter: Filter
    keep: float = 1.0  # the factor of what is left of the start, or k where the norm is held
    held_at: float | None = None  # C^2, where the norm is held


class MeasuredForecast(NamedTuple):
    """The forecast of one layer from zero, given the lengths of its updates, after the last advance."""

    norm_sq: float  # N
    overlaps: np.ndarray  # D_n
    length: float | None  # |u| over its expected length when last measured; None, which counts as 1, before that


@dataclass(eq=False)
class ForecastTrack:
    """Layers of one group and kernel that have taken the same steps, and their common forecast from zero."""

    family: Family
    kernel: Overlap
    layers: tuple[Layer, ...]
    state: ForecastState  # after the last advance, as are the next four
    keep: float = 1.0  # K
    count: int = 0  # updates so far
    begun: bool = False  # whether the momentum at the start has been taken into account
    measured: dict[Layer, MeasuredForecast] = field(default_factory=dict)
    pending: list[StepParams] = field(default_factory=list)  # the steps since
    # Of the steps last advanced over; norms and keeps begin with the value before the first one.
    norms: list[float] = field(default_factory=list)  # N
    keeps: list[float] = field(default_factory=list)  # K
    crosses: list[float] = field(default_factory=list)  # X
    gains: list[float] = field(default_factory=list)  # |u| per element, for gradients of unit variance
    measured_norms: dict[Layer, list[float]] = field(default_factory=dict)  # N; nan before the first measured length

    def part(self, layers: Sequence[Layer], missed: frozenset[int]) -> Self:
        """Return a track at the same point for some of its layers, without the pending steps that they did not take."""
        taken = [params for k, params in enumerate(self.pending) if k not in missed]
        return replace(self, layers=tuple(layers), pending=taken)

    def advance(self, starts: Mapping[Layer, Start], lengths: Mapping[Layer, Mapping[int, float]]) -> None:
        """Forecast the pending steps; their norms and cosines are available until the next call.

        `lengths` has |u|/U where it was measured, by layer and index of the pending step.
        """
        pending, self.pending = self.pending, []
        if not self.begun and pending:
            self._begin([starts[layer] for layer in self.layers], pending[0])
        before, self.gains = self.state, []
        var = before.var
        for params in pending:
            self.count += 1
            step = theory.advance(params.filter, var)
            self.gains.append(self._gain(params, step.var_x))
            var = step.var_m
        lr = np.array([params.lr for params in pending]) * np.array(self.gains)
        eta = np.array([params.eta for params in pending], dtype=np.float64)
        if self.has_norm:
            self._advance_measured(lengths, pending, lr, eta)
        filters = [params.filter for params in pending]
        if before.norm_sq == 0:  # held at the start: advance_forecast has no cosine of zeros
            before = replace(before, norm_sq=_ALMOST_ZERO)
        after, cosines, self.state = theory.advance_forecast(before, self.kernel, filters, lr, eta)
        norms = np.array([before.norm_sq, *after])
        self.crosses = (-cosines * np.sqrt(norms[:-1])).tolist()
        self.norms = _hold(norms, pending).tolist()
        self.state = replace(self.state, norm_sq=self.norms[-1])
        self.keeps = [self.keep, *(self.keep * np.cumprod([params.keep for params in pending])).tolist()]
        self.keep = self.keeps[-1]

    def _advance_measured(
        self,
        lengths: Mapping[Layer, Mapping[int, float]],
        pending: Sequence[StepParams],
        lr: np.ndarray,
        eta: np.ndarray,
    ) -> None:
        """Forecast the steps for each layer, given the lengths of its updates; `self.state` is before them."""
        start = MeasuredForecast(float(self.state.norm_sq), self.state.overlaps, None)
        before = [self.measured.get(layer, start) for layer in self.layers]
        ratios = np.tile([1.0 if past.length is None else past.length for past in before], (len(pending), 1))
        unknown = [0 if past.length is not None else len(pending) + 1 for past in before]  # how many norms are nan
        for column, layer in enumerate(self.layers):
            for k, length in sorted(lengths.get(layer, {}).items()):
                ratios[k:, column] = length / self.gains[k]
                unknown[column] = min(unknown[column], k + 1)
        norms_sq = np.array([past.norm_sq for past in before])
        state = ForecastState(norms_sq, self.state.var, np.stack([past.overlaps for past in before], axis=-1))
        filters = [params.filter for params in pending]
        after, _, state = theory.advance_forecast(state, self.kernel, filters, lr[:, None] * ratios, eta)
        norms = _hold(np.concatenate([[norms_sq], after]), pending)
        self.measured, self.measured_norms = {}, {}
        for column, (layer, past) in enumerate(zip(self.layers, before, strict=True)):
            is_known = unknown[column] <= len(pending)
            length = float(ratios[-1, column]) if is_known and pending else past.length
            self.measured[layer] = MeasuredForecast(float(norms[-1, column]), state.overlaps[:, column].copy(), length)
            norms[: unknown[column], column] = math.nan
            self.measured_norms[layer] = norms[:, column].tolist()

    def _gain(self, params: StepParams, var_x: float) -> float:
        """Return the size of an element of u = s x where u is linear in x; Adam's s is 1/(1 - b1^t)."""
        if not self.family.is_linear:
            return 1.0
        corrected = self.family.name == "adam" and self.count > 0
        return math.sqrt(var_x) / (1 - params.filter.r**self.count if corrected else 1.0)

    def _begin(self, starts: Sequence[Start], params: StepParams) -> None:
        """Set the state before the first step: without momentum, or as after many steps with these parameters."""
        self.begun = True
        self.count = max(start.updates for start in starts)
        if not any(start.warm for start in starts) or params.filter.r >= 1:
            return
        young = self.family.name == "adam" and self.count
        var = theory.variance(params.filter, self.count if young else None)
        step = theory.advance(params.filter, var)
        lr = params.lr * self._gain(params, step.var_x)
        overlaps = theory.steady_overlap(self.kernel, step, lr, params.eta)
        self.state = ForecastState(_ALMOST_ZERO, var, overlaps)

    @property
    def has_norm(self) -> bool:
        """Whether the norm can be forecast; not that of SGD, whose gradients set the scale."""
        return self.family.name != "sgd"

    def norm(self, at: int, update_norm_sq: float, start: Start, layer: Layer | None = None) -> float | None:
        """Return the forecast |theta| after `at` of the steps last advanced over; `update_norm_sq` is U^2.

        With `layer` it is the forecast that knows the lengths of its updates.
        """
        if not self.has_norm:
            return None
        norms = self.norms if layer is None else self.measured_norms[layer]
        return math.sqrt(update_norm_sq * norms[at] + start.norm_sq * self.keeps[at])

    def cosine(self, at: int, update_norm_sq: float, start: Start, grad: float, theta: float, u: float) -> float | None:
        """Return the expected cos(theta_{t-1}, u_t) in step `at`; 0 while theta is 0, None if its norm is unknown.

        For SGD it follows from the measured norms of gradient, weights and update: E<theta, u> = -|g|^2 sqrt(E x^2) X.
        """
        cross = self.crosses[at - 1]
        if not self.has_norm:
            size = theta * u
            return -(grad**2) * self.gains[at - 1] * cross / size if 0 < size < math.inf else None
        norm_sq = self.norms[at - 1] + start.norm_sq * self.keeps[at - 1] / update_norm_sq
        if not norm_sq < math.inf:
            return None
        return -cross / math.sqrt(norm_sq) if norm_sq > 0 else 0.0

    def state_dict(self) -> dict[str, Any]:
        """Return a track without pending steps as plain values and tensors."""
        own = [self.measured[layer] for layer in self.layers if layer in self.measured]
        return {
            "layers": [layer.name for layer in self.layers],
            "norm_sq": self.state.norm_sq,
            "var": self.state.var,
            "past": torch.from_numpy(np.array(self.state.overlaps)),
            "keep": self.keep,
            "count": self.count,
            "begun": self.begun,
            "measured": [[past.norm_sq, past.length, torch.from_numpy(past.overlaps)] for past in own],
        }

    @classmethod
    def from_state_dict(
        cls, saved: Mapping[str, Any], family: Family, kernel: Overlap, layers: tuple[Layer, ...]
    ) -> Self:
        """Return the track that was saved."""
        state = ForecastState(saved["norm_sq"], saved["var"], saved["past"].numpy().copy())
        measured = {
            layer: MeasuredForecast(norm_sq, overlaps.numpy().copy(), length)
            for layer, (norm_sq, length, overlaps) in zip(layers, saved.get("measured", ()), strict=False)
        }
        return cls(family, kernel, layers, state, saved["keep"], saved["count"], saved["begun"], measured=measured)


def _hold(norms: np.ndarray, pending: Sequence[StepParams]) -> np.ndarray:
    """Return N before the first and after each step, (steps + 1, ...), given that of the open loop."""
    if all(params.held_at is None for params in pending):
        return norms
    held = norms.copy()
    for t, params in enumerate(pending):
        if params.held_at is None:
            held[t + 1] = params.keep * (held[t] - norms[t]) + norms[t + 1]
        else:
            held[t + 1] = params.keep * held[t] + (1 - params.keep) * params.held_at
    return held
