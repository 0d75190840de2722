"""The forecast of every layer, carried along with training: floats on the host, one walk for all layers alike.

The expected norm is linear in where it starts (theory.forecast: D does not depend on N), so layers that share group
and overlap kernel share one walk from zero, and each adds what is left of its own start:

    E|theta_t|^2 = U^2 N_t + |theta_0|^2 K_t,      K_t = prod (1-eta)^2
    E cos(theta_{t-1}, u_t) = - X_t / sqrt(N_{t-1} + K_{t-1} |theta_0|^2 / U^2),     X = sum_n a_n to_x^n D_n

During training a step only notes its numbers (`Forecasts.note`); the walks are taken when records are.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.decay.families import Family
from steadynorm.decay.rule import applied_weight_decay, is_skipped
from steadynorm.monitor.layers import Layer
from steadynorm.theory import Filter, ForecastState, Overlap

_NEXT_TO_NOTHING = 1e-200  # in place of N = 0, at which theory.advance_forecast has no cosine to give


class Start(NamedTuple):
    """A layer when the monitor first saw it."""

    norm_sq: float
    warm: bool  # its momentum was not zero
    updates: int  # it had had, where the optimizer counts them


class StepParams(NamedTuple):
    """One step's numbers."""

    lr: float
    eta: float
    filter: Filter


@dataclass(eq=False)
class ForecastTrack:
    """Layers of one group and kernel that have taken the same steps, and their walk from zero."""

    family: Family
    kernel: Overlap
    layers: tuple[Layer, ...]
    walk: ForecastState
    keep: float = 1.0  # K
    count: int = 0
    begun: bool = False
    pending: list[StepParams] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)  # N, index 0 before the pending strides
    keeps: list[float] = field(default_factory=list)  # K likewise
    crosses: list[float] = field(default_factory=list)  # X of each pending stride
    gains: list[float] = field(default_factory=list)  # |u| of an element of it, gradients of unit variance

    def advance(self, starts: Sequence[Start], skipped: frozenset[int] = frozenset()) -> None:
        """ForecastState the pending strides; their norms and cosines can be asked for until the next time.

        skipped: which of them were not taken; the norm stands still there, and there is no cosine.
        """
        pending = [stride for k, stride in enumerate(self.pending) if k not in skipped]
        if not self.begun and pending:
            self._begin(starts, pending[0])
        walk, self.gains = self.walk, []
        var = walk.var
        for stride in pending:
            self.count += 1
            step = theory.advance(stride.filter, var)
            self.gains.append(self._gain(stride, step.var_x))
            var = step.var_m
        lr = np.array([stride.lr for stride in pending]) * np.array(self.gains)
        eta = np.array([stride.eta for stride in pending], dtype=np.float64)
        filters = [stride.filter for stride in pending]
        after, cosines, self.walk = theory.advance_forecast(walk, self.kernel, filters, lr, eta)
        self.norms = [walk.norm_sq, *after.tolist()]
        self.crosses = (-cosines * np.sqrt(self.norms[:-1])).tolist()
        self.keeps = [self.keep, *(self.keep * np.cumprod((1 - eta) ** 2)).tolist()]
        self.keep = self.keeps[-1]
        if skipped:
            self._spread(skipped)
        self.pending = []

    def _spread(self, skipped: frozenset[int]) -> None:
        """Results of the strides taken, put where they were among all that are pending."""
        taken = [k not in skipped for k in range(len(self.pending))]
        so_far = [0, *np.cumsum(taken).tolist()]
        self.norms, self.keeps = ([each[k] for k in so_far] for each in (self.norms, self.keeps))
        crosses, gains = iter(self.crosses), iter(self.gains)
        self.crosses = [next(crosses) if each else math.nan for each in taken]
        self.gains = [next(gains) if each else math.nan for each in taken]

    def _gain(self, stride: StepParams, var_x: float) -> float:
        """Size of an element of u = s x where that is linear in x; Adam's s = 1/(1 - b1^t)."""
        if not self.family.is_linear:
            return 1.0
        corrected = self.family.name == "adam" and self.count > 0
        return math.sqrt(var_x) / (1 - stride.filter.r**self.count if corrected else 1.0)

    def _begin(self, starts: Sequence[Start], stride: StepParams) -> None:
        """A cold start has no momentum; a warm one is taken to have moved at today's numbers for long."""
        self.begun = True
        self.count = max(start.updates for start in starts)
        if not any(start.warm for start in starts) or stride.filter.r >= 1:
            return
        young = self.family.name == "adam" and self.count
        var = theory.variance(stride.filter, self.count if young else None)
        step = theory.advance(stride.filter, var)
        lr = stride.lr * self._gain(stride, step.var_x)
        self.walk = ForecastState(_NEXT_TO_NOTHING, var, theory.steady_overlap(self.kernel, step, lr, stride.eta))

    def norm(self, at: int, unit: float, start: Start) -> float | None:
        """Forecast of |theta| after `at` of the strides just settled; None for SGD, whose gradients set the scale."""
        if self.family.name == "sgd":
            return None
        return math.sqrt(unit * self.norms[at] + start.norm_sq * self.keeps[at])

    def cosine(self, at: int, unit: float, start: Start, grad: float, theta: float, u: float) -> float | None:
        """Expected cos(theta_{t-1}, u_t) in stride `at`; 0 while theta is 0, None where its norm is not known.

        SGD: of the measured gradient, weights and update, E<theta, u> = -|g|^2 sqrt(E x^2) X.
        """
        cross = self.crosses[at - 1]
        if self.family.name == "sgd":
            size = theta * u
            return -(grad**2) * self.gains[at - 1] * cross / size if 0 < size < math.inf else None
        norm_sq = self.norms[at - 1] + start.norm_sq * self.keeps[at - 1] / unit
        if not norm_sq < math.inf:
            return None
        return -cross / math.sqrt(norm_sq) if norm_sq > 0 else 0.0


class TrackPosition(NamedTuple):
    """Where a course stood when a record was taken."""

    course: ForecastTrack
    layers: tuple[Layer, ...]
    at: int  # strides taken
    moved: bool  # the last of them in the recorded step


class RecordView(NamedTuple):
    """What a record knows of the courses: where each stood, and how many updates of each layer had been skipped."""

    marks: Sequence[TrackPosition]
    skips: Mapping[Layer, int]


class Forecasts:
    """The courses of all layers of one optimizer."""

    def __init__(self, optimizer: Optimizer, family: Family | None):
        self.optimizer = optimizer
        self.family = family  # None: nothing to forecast
        self.courses: list[ForecastTrack] = []
        self.units: dict[Layer, float] = {}
        self.skips: dict[Layer, int] = {}  # up to the strides settled last, where the optimizer counts them

    def begin(self, layers: Iterable[Layer]) -> None:
        """Take up layers that have not been seen before."""
        alike: dict[tuple[int, str, bool], list[Layer]] = {}
        family = self.family
        if family is None:
            return
        for layer in layers:
            group = self.optimizer.param_groups[layer.group]
            unit = family.update_norm_sq(layer.shape, group) if layer.parameter.numel() else None
            if unit is not None:
                self.units[layer] = unit
                key = (layer.group, family.kernel(layer.shape, group).name, is_skipped(group, layer.parameter))
                alike.setdefault(key, []).append(layer)
        for some in alike.values():
            kernel = family.kernel(some[0].shape, self.optimizer.param_groups[some[0].group])
            self.courses.append(ForecastTrack(family, kernel, tuple(some), theory.initial_state(kernel)))

    def drop(self, layers: set[Layer]) -> None:
        """Let go of layers that the optimizer no longer has."""
        for course in self.courses:
            course.layers = tuple(layer for layer in course.layers if layer not in layers)
        self.courses = [course for course in self.courses if course.layers]

    def note(self, moved: set[Layer]) -> list[TrackPosition]:
        """Note the step just taken, in which these layers had a gradient; returns where each course stands."""
        if not all(moved.issuperset(course.layers) for course in self.courses):
            self._part(moved)
        marks = []
        for course in self.courses:
            if moves := course.layers[0] in moved:
                course.pending.append(self._stride(course))
            marks.append(TrackPosition(course, course.layers, len(course.pending), moves))
        return marks

    def _stride(self, course: ForecastTrack) -> StepParams:
        first = course.layers[0]  # lr and kernel are the same for all, so the decay is
        group = self.optimizer.param_groups[first.group]
        lr = float(group["lr"])
        return StepParams(
            lr, lr * applied_weight_decay(self.optimizer, group, first.parameter), course.family.filter(group)
        )

    def _part(self, moved: set[Layer]) -> None:
        """Split courses of which only some layers moved: those that did not stay behind."""
        for course in list(self.courses):
            behind = tuple(layer for layer in course.layers if layer not in moved)
            if behind and len(behind) < len(course.layers):
                course.layers = tuple(layer for layer in course.layers if layer in moved)
                self.courses.append(replace(course, layers=behind, pending=list(course.pending)))

    def advance(
        self, starts: Mapping[Layer, Start], seen: Sequence[RecordView], skips: Mapping[Layer, int]
    ) -> list[list[TrackPosition]]:
        """ForecastState all courses, those too that only marks still hold; returns the marks of each record, to be asked now.

        skips: updates of each layer skipped up to now. Layers of a course that skipped different strides part.
        """
        skipped = self._skipped(seen, skips)
        holders: dict[ForecastTrack, dict[Layer, None]] = {
            course: dict.fromkeys(course.layers) for course in self.courses
        }
        for mark in (mark for each in seen for mark in each.marks):
            holders.setdefault(mark.course, {}).update(dict.fromkeys(mark.layers))
        walked: dict[ForecastTrack, dict[frozenset[int], ForecastTrack]] = {}
        for course, layers in holders.items():
            walked[course] = self._advance_track(course, list(layers), starts, skipped)
        return [
            [each for mark in record.marks for each in _moved(mark, walked[mark.course], skipped)] for record in seen
        ]

    def _advance_track(
        self,
        course: ForecastTrack,
        layers: list[Layer],
        starts: Mapping[Layer, Start],
        skipped: Mapping[Layer, frozenset[int]],
    ) -> dict[frozenset[int], ForecastTrack]:
        """One course, or as many as there are ways in which its layers skipped strides."""
        alike: dict[frozenset[int], list[Layer]] = {}
        for layer in layers:
            alike.setdefault(skipped.get(layer, frozenset()), []).append(layer)
        current, out = set(course.layers), {}
        copies = [replace(course, pending=list(course.pending)) for _ in range(len(alike) - 1)]
        for (which, some), each in zip(alike.items(), (course, *copies), strict=True):
            each.layers = tuple(layer for layer in some if layer in current)
            each.advance([starts[layer] for layer in some], which)
            out[which] = each
        self.courses += [each for each in copies if each.layers]
        return out

    def _skipped(self, seen: Sequence[RecordView], skips: Mapping[Layer, int]) -> dict[Layer, frozenset[int]]:
        """The pending strides that a layer did not take: as many as its counter went up by, the last ones between two
        records (with every=1 there is one; else which of them is not known)."""
        found: dict[Layer, set[int]] = {layer: set() for layer, now in skips.items() if now > self.skips.get(layer, 0)}
        at, count = dict.fromkeys(found, 0), {layer: self.skips.get(layer, 0) for layer in found}
        ends = [(layer, len(course.pending), skips) for course in self.courses for layer in course.layers]
        marked = [(layer, mark.at, each.skips) for each in seen for mark in each.marks for layer in mark.layers]
        for layer, end, counts in (*marked, *ends) if found else ():
            if layer in found and layer in counts:
                more = counts[layer] - count[layer]
                found[layer].update(range(max(at[layer], end - more), end))
                at[layer], count[layer] = end, counts[layer]
        self.skips |= skips
        return {layer: frozenset(some) for layer, some in found.items() if some}

    def state_dict(self) -> list[dict[str, Any]]:
        """Settled courses as plain values and tensors."""
        return [
            {
                "layers": [layer.name for layer in course.layers],
                "norm_sq": course.walk.norm_sq,
                "var": course.walk.var,
                "past": torch.from_numpy(np.array(course.walk.overlaps)),
                "keep": course.keep,
                "count": course.count,
                "begun": course.begun,
            }
            for course in self.courses
        ]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], by_name: Mapping[str, Layer]) -> None:
        """Courses as saved; layers that none of them has go on as they were."""
        family, loaded = self.family, []
        if family is None:
            return
        for saved in state:
            layers = tuple(by_name[name] for name in saved["layers"])
            walk = ForecastState(saved["norm_sq"], saved["var"], saved["past"].numpy().copy())
            so_far = saved["keep"], saved["count"], saved["begun"]
            loaded.append(
                ForecastTrack(
                    family,
                    family.kernel(layers[0].shape, self.optimizer.param_groups[layers[0].group]),
                    layers,
                    walk,
                    *so_far,
                )
            )
        self.drop({layer for course in loaded for layer in course.layers})
        self.courses += loaded


def _moved(
    mark: TrackPosition, walked: Mapping[frozenset[int], ForecastTrack], skipped: Mapping[Layer, frozenset[int]]
) -> list[TrackPosition]:
    """A mark after its course has parted: one for each course that its layers are in now."""
    out = []
    for which, course in walked.items():
        layers = tuple(layer for layer in mark.layers if skipped.get(layer, frozenset()) == which)
        if layers:
            out.append(TrackPosition(course, layers, mark.at, mark.moved and mark.at - 1 not in which))
    return out
