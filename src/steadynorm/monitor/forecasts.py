"""The forecasts of all layers of an optimizer, and how tracks part when their layers did not take the same steps."""

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.decay.families import Family
from steadynorm.decay.hold import BALANCE_STEPS, held_target, hold_of
from steadynorm.decay.rule import Group, applied_weight_decay, is_uncorrected
from steadynorm.monitor.layers import Layer
from steadynorm.monitor.track import ForecastTrack, Start, StepParams
from steadynorm.monitor.transfer import SKIPS, UPDATE, Values
from steadynorm.theory import Overlap


class Mark(NamedTuple):
    """Where a layer stood on its track when a record was taken."""

    at: int  # after how many of the pending steps; once its track has advanced, only those that the layer took count
    moved: bool  # whether the layer took the recorded step


class Forecasts:
    """The tracks of all layers of one optimizer."""

    def __init__(self, optimizer: Optimizer, family: Family | None):
        self.optimizer = optimizer
        self.family = family  # None: nothing to forecast
        self.tracks: list[ForecastTrack] = []  # one per set of layers that had taken the same steps at the last advance
        self.starts: dict[Layer, Start] = {}
        self.update_norms_sq: dict[Layer, float] = {}  # U^2 of each layer that has a forecast
        self.nominal_norms_sq: dict[Layer, float] = {}  # U^2 of an exact update, where the family has one
        self.skips: dict[Layer, int] = {}  # updates skipped until the last advance, where the optimizer counts them
        self.advanced: dict[Layer, ForecastTrack] = {}  # the track with each layer's last forecasts
        self._missed: defaultdict[Layer, set[int]] = defaultdict(set)  # pending steps that a layer did not take
        self._dropped: set[Layer] = set()  # layers to which only records still refer

    def add(self, layers: Iterable[Layer]) -> None:
        """Begin a forecast for layers that are new."""
        family = self.family
        if family is None:
            return
        alike: dict[tuple[int, str, bool, float], list[Layer]] = {}
        for layer in (layer for layer in layers if layer.parameter.numel()):
            group = self._group(layer)
            own = family.of(group)
            if (nominal := own.nominal_norm_sq(layer.shape, group)) is not None:
                self.nominal_norms_sq[layer] = nominal
            if hold_of(group) == "decay" and group.get("cautious"):
                continue  # the share that decays depends on the norm, so layers could not share a forecast from zero
            if (update_norm_sq := own.update_norm_sq(layer.shape, group)) is not None:
                self.update_norms_sq[layer] = update_norm_sq
                share = 1.0 if nominal is None or hold_of(group) == "decay" else nominal / update_norm_sq
                key = (layer.group, own.kernel(layer.shape, group).name, is_uncorrected(group, layer.parameter), share)
                alike.setdefault(key, []).append(layer)
        for members in alike.values():
            own, kernel = self._kind(family, members[0])
            self.tracks.append(ForecastTrack(own, kernel, tuple(members), theory.initial_state(kernel)))

    def _kind(self, family: Family, layer: Layer) -> tuple[Family, Overlap]:
        own = family.of(self._group(layer))
        return own, own.kernel(layer.shape, self._group(layer))

    def _group(self, layer: Layer) -> Group:
        return self.optimizer.param_groups[layer.group]

    def start(self, layers: Iterable[Layer], values: Values) -> None:
        """Keep where new layers started."""
        for layer in layers:
            norm, momentum, count = (values.get((kind, layer), 0.0) for kind in ("norm", "momentum", "count"))
            self.starts[layer] = Start(norm**2, momentum > 0, int(count))
        self.skips |= _skips_in(values)

    def drop(self, layers: set[Layer]) -> None:
        """Forget layers that the optimizer no longer has, once the records that show them are made."""
        self._dropped |= layers

    def _forget(self, layers: set[Layer]) -> None:
        for track in self.tracks:
            track.layers = tuple(layer for layer in track.layers if layer not in layers)
        self.tracks = [track for track in self.tracks if track.layers]

    def note_step(self, moved: set[Layer]) -> dict[Layer, Mark]:
        """Append the step just taken to the tracks of the layers that had a gradient; return where each layer stands."""
        marks = {}
        for track in self.tracks:
            if first := next((layer for layer in track.layers if layer in moved), None):
                for layer in track.layers:
                    if layer not in moved:
                        self._missed[layer].add(len(track.pending))
                # lr and kernel are the same for all layers of a track, so the decay is as well
                track.pending.append(self._step_params(track, first))
            marks |= {layer: Mark(len(track.pending), layer in moved) for layer in track.layers}
        return marks

    def _step_params(self, track: ForecastTrack, layer: Layer) -> StepParams:
        group = self._group(layer)
        lr = float(group["lr"])
        eta = lr * applied_weight_decay(self.optimizer, group, layer.parameter)
        keep, held_at = self._held_step(layer, eta) or ((1 - eta) ** 2, None)
        return StepParams(lr, eta, track.family.filter(group), keep, held_at)

    def _held_step(self, layer: Layer, eta: float) -> tuple[float, float] | None:
        """Return k and C^2 of a norm that is held, N <- k N + (1 - k) C^2; None if open-loop decay controls it."""
        group, family = self._group(layer), self.family
        hold = hold_of(group)
        if hold == "decay" or family is None or is_uncorrected(group, layer.parameter):
            return None
        norm_sq = held_target(group, family, layer.shape)
        if norm_sq is None:
            return (1.0, 0.0) if hold == "fixed" else None  # fixed where it is
        keep = 0.0 if hold == "fixed" else theory.balance_keep(eta, group.get("balance_steps", BALANCE_STEPS))
        return keep if float(group["lr"]) > 0 else 1.0, norm_sq / self.update_norms_sq[layer]

    def advance(self, records: Sequence[tuple[Mapping[Layer, Mark], Values]], now: Values) -> list[dict[Layer, Mark]]:
        """Advance all tracks; split a track whose layers did not take the same steps.

        Takes the marks and measured values of each record since the last call, and the counters of skipped updates now.
        Returns the marks among the steps taken; `advanced` has their forecasts until the next call.
        """
        self._miss_skipped(records, _skips_in(now))
        marks = [{layer: self._without_missed(layer, mark) for layer, mark in own.items()} for own, _ in records]
        lengths: defaultdict[Layer, dict[int, float]] = defaultdict(dict)
        for own, (_, values) in zip(marks, records, strict=True):
            for layer, mark in own.items():
                update_sq = values.get((UPDATE, layer), math.nan)
                if mark.moved and 0 <= update_sq < math.inf:
                    lengths[layer][mark.at - 1] = math.sqrt(update_sq / self.update_norms_sq[layer])
        before, self.tracks, self.advanced = self.tracks, [], {}
        for track in before:
            alike: dict[frozenset[int], list[Layer]] = {}
            for layer in track.layers:
                alike.setdefault(frozenset(self._missed[layer]), []).append(layer)
            for missed, layers in alike.items():
                part = track.part(layers, missed)
                part.advance(self.starts, lengths)
                self.tracks.append(part)
                self.advanced |= dict.fromkeys(layers, part)
        self._forget(self._dropped)
        self._missed.clear()
        self._dropped.clear()
        return marks

    def _miss_skipped(self, records: Sequence[tuple[Mapping[Layer, Mark], Values]], now: Mapping[Layer, int]) -> None:
        """Add the steps that each layer skipped to those that it missed.

        There are as many as its counter went up by, and they are taken to be the last ones between two records. With
        every=1 there is only one; otherwise it is unknown which they were.
        """
        last = {layer: Mark(len(track.pending), moved=False) for track in self.tracks for layer in track.layers}
        seen: dict[Layer, int] = {}
        for marks, skips in (*((marks, _skips_in(values)) for marks, values in records), (last, now)):
            for layer, count in skips.items():
                if layer in marks:
                    begin, end = seen.get(layer, 0), marks[layer].at
                    if (more := count - self.skips.get(layer, 0)) > 0:
                        taken = [k for k in range(begin, end) if k not in self._missed[layer]]
                        self._missed[layer].update(taken[-more:])
                    seen[layer] = end
            self.skips |= skips

    def _without_missed(self, layer: Layer, mark: Mark) -> Mark:
        missed = self._missed[layer]
        return Mark(mark.at - sum(k < mark.at for k in missed), mark.moved and mark.at - 1 not in missed)

    def state_dict(self) -> list[dict[str, Any]]:
        """Return the tracks, which must not have pending steps, as plain values and tensors."""
        return [track.state_dict() for track in self.tracks]

    def load_state_dict(self, state: Sequence[Mapping[str, Any]], by_name: Mapping[str, Layer]) -> None:
        """Restore saved tracks; layers in none of them keep theirs."""
        if self.family is None:
            return
        loaded = []
        for saved in state:
            layers = tuple(by_name[name] for name in saved["layers"])
            loaded.append(ForecastTrack.from_state_dict(saved, *self._kind(self.family, layers[0]), layers))
        self._forget({layer for track in loaded for layer in track.layers})
        self.tracks += loaded


def _skips_in(values: Values) -> dict[Layer, int]:
    """Return how many updates each layer has skipped, from a row's values."""
    return {layer: round(value) for (kind, layer), value in values.items() if kind == SKIPS}
