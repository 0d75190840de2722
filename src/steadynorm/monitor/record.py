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
        layers: The layers measured.
        positions: Where each forecast track stood.
        row: The values on the device.
    """

    host_values: Record
    labels: list[str]
    layers: Sequence[Layer]
    positions: list[TrackPosition]
    row: Row


def skips_in(values: Values) -> dict[Layer, int]:
    """Return how many updates each layer has skipped, from a row's values."""
    return {layer: round(value) for (kind, layer), value in values.items() if kind == SKIPS}


def compose(
    snapshot: Snapshot, values: Values, starts: Mapping[Layer, Start], update_norms_sq: Mapping[Layer, float]
) -> Record:
    """Return the record of one step; its forecasts must be those advanced last."""
    positions = {layer: position for position in snapshot.positions for layer in position.layers}
    matrices: dict[Layer, list[float]] = {}
    for (kind, what), value in values.items():
        if kind == "spectral":
            matrices.setdefault(what[0], []).append(value)
    layers: dict[Layer, Record] = {}
    for layer in snapshot.layers:
        forecast, expected = _forecast(layer, values, positions.get(layer), starts, update_norms_sq)
        cosine = _cosine(layer, values)
        layers[layer] = {
            "norm": finite(values.get(("norm", layer))),
            "forecast": forecast,
            "grad": finite(values.get(("grad", layer))),
            "alignment": cosine,
            "expected": expected,
            "excess": None if cosine is None or expected is None else cosine - expected,
            "spectral": _geometric(matrices.get(layer, [])),
        }
    record: Record = {
        "step": snapshot.host_values["step"],
        "weight_norm": _total([value for (kind, _), value in values.items() if kind == "norm"]),
        "grad_norm": _total([value for (kind, _), value in values.items() if kind == "grad"]),
        **_lmo_norms(snapshot.layers, values, matrices),
        "forecast_norm": _total([own["forecast"] for layer, own in layers.items() if layer.parameter.numel()]),
        **_role_norms(layers),
        **_alignments(layers, snapshot.labels),
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
) -> tuple[float | None, float | None]:
    """Return the forecast norm after the step, and the expected alignment in it."""
    if position is None or values.get((WAITED, layer), 0) > 0:
        return None, None
    track, at, unit, start = position.track, position.at, update_norms_sq[layer], starts[layer]
    norm = finite(track.norm(at, unit, start))
    if not position.moved:
        return norm, None
    grad, theta_sq, u_sq = (values.get((kind, layer), math.nan) for kind in ("grad", BEFORE, UPDATE))
    return norm, finite(track.cosine(at, unit, start, grad, math.sqrt(theta_sq), math.sqrt(u_sq)))


def _cosine(layer: Layer, values: Values) -> float | None:
    """Return cos(theta_{t-1}, u_t); None if a norm is zero, its square does not fit fp32, or the update was skipped."""
    along, update, before = (values.get((kind, layer), math.nan) for kind in (ALONG, UPDATE, BEFORE))
    fits = _LEAST < update < math.inf and _LEAST < before < math.inf
    return finite(along / math.sqrt(update * before)) if fits else None


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


def _role_norms(layers: Mapping[Layer, Record]) -> Record:
    """Return measured and forecast norm by role, if there are several roles."""
    present = {layer.role for layer in layers if layer.parameter.numel()}
    norms: Record = {}
    for role in (role for role in ROLE_LABELS if role in present and len(present) > 1):
        own = [record for layer, record in layers.items() if layer.role == role and layer.parameter.numel()]
        norms |= {f"{key}/{role}": _total([record[quantity] for record in own]) for key, quantity in SPLIT.items()}
    return norms


def _alignments(layers: Mapping[Layer, Record], labels: Sequence[str]) -> Record:
    """Return means over the spectral layers, or over all if there are none; of the excess also by group."""
    chosen = [own for layer, own in layers.items() if layer.is_spectral] or list(layers.values())
    means: Record = {
        LAYER_QUANTITIES[quantity]: _mean([own[quantity] for own in chosen])
        for quantity in ("alignment", "expected", "excess")
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
