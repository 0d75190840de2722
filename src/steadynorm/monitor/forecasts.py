"""The forecasts of all layers of an optimizer, and how tracks split when their layers stop moving together."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.decay.families import Family
from steadynorm.decay.hold import BALANCE_STEPS, held_target, hold_of
from steadynorm.decay.rule import Group, applied_weight_decay, is_skipped
from steadynorm.monitor.layers import Layer
from steadynorm.monitor.track import ForecastTrack, HeldStep, RecordView, Start, StepParams, TrackPosition
from steadynorm.theory import Overlap

_NONE_SKIPPED: frozenset[int] = frozenset()


class Forecasts:
    """The tracks of all layers of one optimizer.

    Attributes:
        tracks: One per set of layers that have moved together.
        update_norms_sq: U^2 of each layer that has a forecast.
        nominal_norms_sq: U^2 of an exact update, where the family has one.
        skips: Updates that each layer had skipped at the last advance, where the optimizer counts them.
    """

    def __init__(self, optimizer: Optimizer, family: Family | None):
        self.optimizer = optimizer
        self.family = family  # None: nothing to forecast
        self.tracks: list[ForecastTrack] = []
        self.update_norms_sq: dict[Layer, float] = {}
        self.nominal_norms_sq: dict[Layer, float] = {}
        self.skips: dict[Layer, int] = {}

    def add(self, layers: Iterable[Layer]) -> None:
        """Start a forecast for layers that are new."""
        family = self.family
        if family is None:
            return
        alike: dict[tuple[int, str, bool, float], list[Layer]] = {}
        for layer in (layer for layer in layers if layer.parameter.numel()):
            group = self.optimizer.param_groups[layer.group]
            own = family.of(group)
            if (nominal := own.nominal_norm_sq(layer.shape, group)) is not None:
                self.nominal_norms_sq[layer] = nominal
            if hold_of(group) == "decay" and group.get("cautious"):
                continue  # the share that decays depends on the norm, so layers could not share a forecast from zero
            if (unit := own.update_norm_sq(layer.shape, group)) is not None:
                self.update_norms_sq[layer] = unit
                share = 1.0 if nominal is None or hold_of(group) == "decay" else nominal / unit
                key = (layer.group, self._kernel(layer, own).name, is_skipped(group, layer.parameter), share)
                alike.setdefault(key, []).append(layer)
        for members in alike.values():
            own = family.of(self._group(members[0]))
            kernel = self._kernel(members[0], own)
            self.tracks.append(ForecastTrack(own, kernel, tuple(members), theory.initial_state(kernel)))

    def _kernel(self, layer: Layer, own: Family) -> Overlap:
        return own.kernel(layer.shape, self._group(layer))

    def _group(self, layer: Layer) -> Group:
        return self.optimizer.param_groups[layer.group]

    def drop(self, layers: set[Layer]) -> None:
        """Forget layers that the optimizer no longer has."""
        for track in self.tracks:
            track.layers = tuple(layer for layer in track.layers if layer not in layers)
        self.tracks = [track for track in self.tracks if track.layers]

    def note_step(self, moved: set[Layer]) -> list[TrackPosition]:
        """Append the step just taken to the tracks of the layers that had a gradient; return where each track stands."""
        for track in list(self.tracks):
            if moved.issuperset(track.layers):
                continue
            behind = tuple(layer for layer in track.layers if layer not in moved)
            if len(behind) < len(track.layers):
                track.layers = tuple(layer for layer in track.layers if layer in moved)
                self.tracks.append(track.copy(behind))
        positions = []
        for track in self.tracks:
            if moves := track.layers[0] in moved:
                track.pending.append(self._step_params(track))
            positions.append(TrackPosition(track, track.layers, len(track.pending), moves))
        return positions

    def _step_params(self, track: ForecastTrack) -> StepParams:
        first = track.layers[0]  # lr and kernel are the same for all layers, so the decay is as well
        group = self.optimizer.param_groups[first.group]
        lr = float(group["lr"])
        decay = applied_weight_decay(self.optimizer, group, first.parameter)
        held = self._held_step(first, lr * decay)
        return StepParams(lr, lr * decay, track.family.filter(group), held)

    def _held_step(self, layer: Layer, eta: float) -> HeldStep | None:
        """Return what holds the norm of a layer in place of open-loop decay, if anything does."""
        group, family = self.optimizer.param_groups[layer.group], self.family
        hold = hold_of(group)
        if hold == "decay" or family is None or is_skipped(group, layer.parameter):
            return None
        norm_sq = held_target(group, family, layer.shape)
        if norm_sq is None:
            return HeldStep(1.0, 0.0) if hold == "fixed" else None  # fixed where it is
        keep = 0.0 if hold == "fixed" else theory.balance_keep(eta, group.get("balance_steps", BALANCE_STEPS))
        return HeldStep(keep if float(group["lr"]) > 0 else 1.0, norm_sq / self.update_norms_sq[layer])

    def advance(
        self, starts: Mapping[Layer, Start], views: Sequence[RecordView], skips: Mapping[Layer, int]
    ) -> list[list[TrackPosition]]:
        """Advance all tracks, including those that only records still refer to.

        Layers of a track that skipped different steps part.

        Args:
            starts: Where each layer started.
            views: What each record since the last call knows.
            skips: Updates that each layer has skipped until now.

        Returns:
            The positions of each record, whose forecasts are available until the next call.
        """
        skipped, lengths = self._skipped_steps(views, skips), _lengths(views)
        followers: dict[ForecastTrack, dict[Layer, None]] = {t: dict.fromkeys(t.layers) for t in self.tracks}
        for position in (position for view in views for position in view.positions):
            followers.setdefault(position.track, {}).update(dict.fromkeys(position.layers))
        parted = {
            track: self._advance_track(track, layers, starts, lengths, skipped) for track, layers in followers.items()
        }
        return [
            [part for position in view.positions for part in _split(position, parted[position.track], skipped)]
            for view in views
        ]

    def _advance_track(
        self,
        track: ForecastTrack,
        layers: Iterable[Layer],
        starts: Mapping[Layer, Start],
        lengths: Mapping[Layer, Mapping[int, float]],
        skipped: Mapping[Layer, frozenset[int]],
    ) -> dict[frozenset[int], ForecastTrack]:
        """Advance a track, split into as many as there are sets of skipped steps among its layers."""
        alike: dict[frozenset[int], list[Layer]] = {}
        for layer in layers:
            alike.setdefault(skipped.get(layer, _NONE_SKIPPED), []).append(layer)
        current, parts = set(track.layers), {}
        copies = [track.copy() for _ in range(len(alike) - 1)]
        for (steps, members), part in zip(alike.items(), (track, *copies), strict=True):
            part.layers = tuple(layer for layer in members if layer in current)
            part.advance({layer: starts[layer] for layer in members}, lengths, steps)
            parts[steps] = part
        self.tracks += [part for part in copies if part.layers]
        return parts

    def _skipped_steps(self, views: Sequence[RecordView], skips: Mapping[Layer, int]) -> dict[Layer, frozenset[int]]:
        """Return the pending steps that each layer did not take.

        There are as many as its counter went up by, and they are taken to be the last ones between two records. With
        every=1 there is only one; otherwise it is unknown which they were.
        """
        steps: dict[Layer, set[int]] = {layer: set() for layer, now in skips.items() if now > self.skips.get(layer, 0)}
        at, count = dict.fromkeys(steps, 0), {layer: self.skips.get(layer, 0) for layer in steps}
        ends = [(layer, len(track.pending), skips) for track in self.tracks for layer in track.layers]
        seen = [(layer, p.at, view.skips) for view in views for p in view.positions for layer in p.layers]
        for layer, end, counts in (*seen, *ends) if steps else ():
            if layer in steps and layer in counts:
                more = counts[layer] - count[layer]
                steps[layer].update(range(max(at[layer], end - more), end))
                at[layer], count[layer] = end, counts[layer]
        self.skips |= skips
        return {layer: frozenset(indices) for layer, indices in steps.items() if indices}

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
            own = self.family.of(self._group(layers[0]))
            loaded.append(ForecastTrack.from_state_dict(saved, own, self._kernel(layers[0], own), layers))
        self.drop({layer for track in loaded for layer in track.layers})
        self.tracks += loaded


def _lengths(views: Sequence[RecordView]) -> dict[Layer, dict[int, float]]:
    """Return the measured lengths of each layer by index of the pending step."""
    lengths: dict[Layer, dict[int, float]] = {}
    for view in views:
        for position in (position for position in view.positions if position.moved):
            for layer in (layer for layer in position.layers if layer in view.lengths):
                lengths.setdefault(layer, {})[position.at - 1] = view.lengths[layer]
    return lengths


def _split(
    position: TrackPosition,
    parted: Mapping[frozenset[int], ForecastTrack],
    skipped: Mapping[Layer, frozenset[int]],
) -> list[TrackPosition]:
    """Return a position per track that its layers follow after their track has parted."""
    parts = []
    for steps, track in parted.items():
        layers = tuple(layer for layer in position.layers if skipped.get(layer, _NONE_SKIPPED) == steps)
        if layers:
            moved = position.moved and position.at - 1 not in steps
            parts.append(TrackPosition(track, layers, position.at, moved))
    return parts
