"""Compose a record on the host from the values measured in a step and from the forecast."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import NamedTuple

from steadynorm.monitor.layers import PEAK_LMOS, Layer
from steadynorm.monitor.track import Start, TrackPosition
from steadynorm.monitor.transfer import Row, Values
from steadynorm.records.role_norms import ROLE_LABELS, SPLIT
from steadynorm.records.schema import LAYER_QUANTITIES, Record, finite

ALONG, UPDATE, BEFORE = "along", "update", "before"  # <theta, u>, |u|^2, |theta|^2, theta before the step
SKIPS = "skips"  # updates skipped so far
WAITED = "waited"  # steps in which slices of a layer had no gradient and did not move
_LEAST = 1e-30  # below it, a sum of squares has lost terms to fp32's underflow


class Snapshot(NamedTuple):
    """A record whose measured values are still on the device.

    Attributes:
        host_values: What the host knew at the step.
        labels: The groups' labels.
        lrs: The groups' lr.
        holds: How the groups hold their norm.
        targets: The norm at which the decay of each layer aims, where there is one.
        layers: The layers measured.
        positions: Where each forecast track stood.
        row: The values on the device.
    """

    host_values: Record
    labels: list[str]
    lrs: list[float]
    holds: list[str]
    targets: Mapping[Layer, float]
    layers: Sequence[Layer]
    positions: list[TrackPosition]
    row: Row


def skips_in(values: Values) -> dict[Layer, int]:
    """Return how many updates each layer has skipped, from a row's values."""
    return {layer: round(value) for (kind, layer), value in values.items() if kind == SKIPS}


def lengths_in(values: Values, update_norms_sq: Mapping[Layer, float]) -> dict[Layer, float]:
    """Return |u|/U of each layer whose update was measured, from a row's values."""
    return {
        layer: math.sqrt(value / update_norms_sq[layer])
        for (kind, layer), value in values.items()
        if kind == UPDATE and layer in update_norms_sq and 0 <= value < math.inf
    }


def compose(
    snapshot: Snapshot,
    values: Values,
    starts: Mapping[Layer, Start],
    update_norms_sq: Mapping[Layer, float],
    nominal_norms_sq: Mapping[Layer, float],
) -> Record:
    """Return the record of one step; its forecasts must be those advanced last.

    Args:
        snapshot: What was kept of the step.
        values: What was measured in it.
        starts: Where each layer started.
        update_norms_sq: The expected |u|^2 of each layer that has a forecast.
        nominal_norms_sq: That of an exact update, of the layers whose family has one.
    """
    positions = {layer: position for position in snapshot.positions for layer in position.layers}
    matrices: dict[Layer, list[float]] = {}
    for (kind, what), value in values.items():
        if kind == "spectral":
            matrices.setdefault(what[0], []).append(value)
    layers: dict[Layer, Record] = {}
    for layer in snapshot.layers:
        position, lr = positions.get(layer), snapshot.lrs[layer.group]
        forecast, forecast_measured, expected = _forecast(layer, values, position, starts, update_norms_sq)
        cosine = _cosine(layer, values)
        layers[layer] = {
            "norm": finite(values.get(("norm", layer))),
            "target": snapshot.targets.get(layer),
            "forecast": forecast,
            "forecast_measured": forecast_measured,
            "update_norm": _update_norm(layer, values, position, nominal_norms_sq),
            "relative_update": _relative_update(layer, values, lr),
            "angle": _angle(layer, values, lr, is_fixed=snapshot.holds[layer.group] == "fixed"),
            "grad": finite(values.get(("grad", layer))),
            "alignment": cosine,
            "expected": expected,
            "excess": None if cosine is None or expected is None else cosine - expected,
            "spectral": _geometric(matrices.get(layer, [])),
        }
    nonempty = [own for layer, own in layers.items() if layer.parameter.numel()]
    record: Record = {
        "step": snapshot.host_values["step"],
        "weight_norm": _total([value for (kind, _), value in values.items() if kind == "norm"]),
        "grad_norm": _total([value for (kind, _), value in values.items() if kind == "grad"]),
        **_lmo_norms(snapshot.layers, values, matrices),
        **{key: _total([own[quantity] for own in nonempty]) for key, quantity in SPLIT.items() if key != "weight_norm"},
        **_by_role(layers),
        **_means(layers, snapshot.labels),
        **{key: finite(value) for key, value in snapshot.host_values.items()},
        **{what: finite(value) for (kind, what), value in values.items() if kind == "log"},
    }
    return record | {"layers": {layer.name: own for layer, own in layers.items()}}


def _forecast(
    layer: Layer,
    values: Values,
    position: TrackPosition | None,
    starts: Mapping[Layer, Start],
    update_norms_sq: Mapping[Layer, float],
) -> tuple[float | None, float | None, float | None]:
    """Return the forecast norm after the step, that with measured updates, and the expected alignment in the step."""
    if position is None or values.get((WAITED, layer), 0) > 0:
        return None, None, None
    track, at, unit, start = position.track, position.at, update_norms_sq[layer], starts[layer]
    norm, measured = (finite(track.norm(at, unit, start, known)) for known in (None, layer))
    if not position.moved:
        return norm, measured, None
    grad, theta_sq, u_sq = (values.get((kind, layer), math.nan) for kind in ("grad", BEFORE, UPDATE))
    return norm, measured, finite(track.cosine(at, unit, start, grad, math.sqrt(theta_sq), math.sqrt(u_sq)))


def _products(layer: Layer, values: Values) -> tuple[float, float, float] | None:
    """Return <theta, u>, |u|^2 and |theta|^2, theta before the step.

    None if a norm is zero, its square does not fit fp32, or the update was skipped.
    """
    along, update, before = (values.get((kind, layer), math.nan) for kind in (ALONG, UPDATE, BEFORE))
    fits = _LEAST < update < math.inf and _LEAST < before < math.inf
    return (along, update, before) if fits else None


def _cosine(layer: Layer, values: Values) -> float | None:
    """Return cos(theta_{t-1}, u_t)."""
    if (products := _products(layer, values)) is None:
        return None
    along, update, before = products
    return finite(along / math.sqrt(update * before))


def _update_norm(
    layer: Layer, values: Values, position: TrackPosition | None, nominal_norms_sq: Mapping[Layer, float]
) -> float | None:
    """Return |u| over its nominal length.

    That is the length of an exact lmo's update; of Adam's the expected one, for gradients that are only noise. Where
    slices have waited there is none, as there is no forecast: their decay waited as well.
    """
    has_waited = values.get((WAITED, layer), 0) > 0
    if position is None or not position.moved or layer not in nominal_norms_sq or has_waited:
        return None
    length = math.sqrt(values.get((UPDATE, layer), math.nan) / nominal_norms_sq[layer])
    return finite(length / position.track.gains[position.at - 1])


def _relative_update(layer: Layer, values: Values, lr: float) -> float | None:
    """Return gamma |u| / |theta|."""
    if (products := _products(layer, values)) is None:
        return None
    _, update, before = products
    return finite(lr * math.sqrt(update / before))


def _angle(layer: Layer, values: Values, lr: float, *, is_fixed: bool) -> float | None:
    """Return the angle between the weights before and after the step, in radians.

    Decay shortens theta, so only the part of u across it turns it, whatever the decay was:

        sin angle = gamma |u_across| / |theta'|,      |u_across|^2 = |u|^2 - <theta, u>^2 / |theta|^2

    The angle exceeds a right one if the step along theta is longer than theta. A fixed norm scales theta and u alike, so
    that theta' is theta - gamma u there, before it is scaled.
    """
    after = values.get(("norm", layer), math.nan)
    if (products := _products(layer, values)) is None or not 0 < after < math.inf:
        return None
    along, update, before = products
    after_sq = before - 2 * lr * along + lr**2 * update if is_fixed else after**2
    across = lr * math.sqrt(max(update - along**2 / before, 0.0))
    kept = math.sqrt(max(after_sq - across**2, 0.0))
    return finite(math.atan2(across, math.copysign(kept, before - lr * along)))


def _lmo_norms(layers: Sequence[Layer], values: Values, matrices: Mapping[Layer, list[float]]) -> Record:
    peaks = {lmo: [value for (kind, _), value in values.items() if kind == lmo] for lmo in PEAK_LMOS}
    biases = [
        values[("norm", layer)] / math.sqrt(layer.parameter.numel())
        for layer in layers
        if layer.lmo.name == "bias" and layer.parameter.numel()
    ]
    return {
        "spectral_norm": _geometric([value for norms in matrices.values() for value in norms]),
        "sign_norm": _mean(peaks["sign"]),
        "bias_norm": _mean(biases),
        "embedding_norm": _mean(peaks["embedding"]),
    }


def _by_role(layers: Mapping[Layer, Record]) -> Record:
    """Return norms by role, if there are several roles, and the mean length of updates and excess alignment."""
    present = {layer.role for layer in layers if layer.parameter.numel()}
    values: Record = {}
    for role in (role for role in ROLE_LABELS if role in present and len(present) > 1):
        own = [record for layer, record in layers.items() if layer.role == role and layer.parameter.numel()]
        values |= {f"{key}/{role}": _total([record[quantity] for record in own]) for key, quantity in SPLIT.items()}
        for quantity in ("update_norm", "excess"):
            values[f"{LAYER_QUANTITIES[quantity]}/{role}"] = _mean([record[quantity] for record in own])
    return values


def _means(layers: Mapping[Layer, Record], labels: Sequence[str]) -> Record:
    """Return means over the spectral layers, or over all if there are none; of the excess also by group.

    A group named like a role replaces that role's excess.
    """
    chosen = [own for layer, own in layers.items() if layer.is_spectral] or list(layers.values())
    means: Record = {
        LAYER_QUANTITIES[quantity]: _mean([own[quantity] for own in chosen])
        for quantity in ("update_norm", "relative_update", "angle", "alignment", "expected", "excess")
    }
    for index, label in enumerate(labels if len(labels) > 1 else ()):
        means[f"excess_alignment/{label}"] = _mean(
            [own["excess"] for layer, own in layers.items() if layer.group == index]
        )
    return means


def _total(parts: Sequence[float | None]) -> float | None:
    """Return the l2 norm of all parts; None if there are none, or one is unknown."""
    known = [part for part in parts if part is not None]
    return finite(math.hypot(*known)) if known and len(known) == len(parts) else None


def _geometric(parts: Sequence[float]) -> float | None:
    """Return the geometric mean of the nonzero parts; None if one is not finite."""
    positive = [part for part in parts if part != 0]
    return geometric_mean(positive) if positive and all(map(math.isfinite, positive)) else None


def _mean(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return finite(fmean(known)) if known else None
