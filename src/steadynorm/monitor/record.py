"""Compose a record on the host from the values measured in a step and from the forecast."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import NamedTuple

from steadynorm.monitor.forecasts import Forecasts, Mark
from steadynorm.monitor.layers import MAX_ENTRY_LMOS, Layer
from steadynorm.monitor.transfer import ALONG, BEFORE, UPDATE, WAITED, Row, Values
from steadynorm.records.role_norms import ROLE_LABELS, SPLIT
from steadynorm.records.schema import LAYER_QUANTITIES, Record, finite

_LEAST = 1e-30  # below it, a sum of squares has lost terms to fp32's underflow


class Snapshot(NamedTuple):
    """A record whose measured values are still on the device."""

    host_values: Record  # what the host knew at the step
    labels: list[str]  # of the groups, as are the next two
    lrs: list[float]
    holds: list[str]
    targets: Mapping[Layer, float]  # the norm at which the decay of a layer aims, where there is one
    layers: Sequence[Layer]
    marks: Mapping[Layer, Mark]
    row: Row  # the values on the device


def compose(snapshot: Snapshot, values: Values, marks: Mapping[Layer, Mark], forecasts: Forecasts) -> Record:
    """Return the record of one step from what was measured in it, and its marks in the last advance of the forecasts."""
    matrices: dict[Layer, list[float]] = {}
    for (kind, what), value in values.items():
        if kind == "spectral":
            matrices.setdefault(what[0], []).append(value)
    layers: dict[Layer, Record] = {}
    for layer in snapshot.layers:
        mark, lr = marks.get(layer), snapshot.lrs[layer.group]
        if values.get((WAITED, layer), 0) > 0:
            mark = None  # slices that waited did not decay either
        forecast, forecast_measured, expected = _forecast(layer, values, mark, forecasts)
        cosine, relative_update, angle = _motion(layer, values, lr, is_fixed=snapshot.holds[layer.group] == "fixed")
        layers[layer] = {
            "norm": finite(values.get(("norm", layer))),
            "target": snapshot.targets.get(layer),
            "forecast": forecast,
            "forecast_measured": forecast_measured,
            "update_norm": _update_norm(layer, values, mark, forecasts),
            "relative_update": relative_update,
            "angle": angle,
            "grad": finite(values.get(("grad", layer))),
            "alignment": cosine,
            "expected": expected,
            "excess": None if cosine is None or expected is None else cosine - expected,
            "spectral": _geometric(matrices.get(layer, [])),
        }
    nonempty = {layer: record for layer, record in layers.items() if layer.parameter.numel()}
    record: Record = {
        "step": snapshot.host_values["step"],
        "weight_norm": _total([value for (kind, _), value in values.items() if kind == "norm"]),
        "grad_norm": _total([value for (kind, _), value in values.items() if kind == "grad"]),
        **_lmo_norms(snapshot.layers, values, matrices),
        **{key: _total([record[SPLIT[key]] for record in nonempty.values()]) for key in SPLIT if key != "weight_norm"},
        **_by_role(nonempty),
        **_means(layers, snapshot.labels),
        **{key: finite(value) for key, value in snapshot.host_values.items()},
        **{what: finite(value) for (kind, what), value in values.items() if kind == "log"},
    }
    return record | {"layers": {layer.name: record for layer, record in layers.items()}}


def _forecast(
    layer: Layer, values: Values, mark: Mark | None, forecasts: Forecasts
) -> tuple[float | None, float | None, float | None]:
    """Return the forecast norm after the step, that with measured updates, and the expected alignment in the step."""
    if mark is None:
        return None, None, None
    track, at = forecasts.advanced[layer], mark.at
    update_norm_sq, start = forecasts.update_norms_sq[layer], forecasts.starts[layer]
    norm, measured = (finite(track.norm(at, update_norm_sq, start, known)) for known in (None, layer))
    if not mark.moved:
        return norm, measured, None
    grad, theta_sq, u_sq = (values.get((kind, layer), math.nan) for kind in ("grad", BEFORE, UPDATE))
    return norm, measured, finite(track.cosine(at, update_norm_sq, start, grad, math.sqrt(theta_sq), math.sqrt(u_sq)))


def _update_norm(layer: Layer, values: Values, mark: Mark | None, forecasts: Forecasts) -> float | None:
    """Return |u| over its nominal length: that of an exact lmo; of Adam's the expected one, for gradients of pure noise."""
    if mark is None or not mark.moved or layer not in forecasts.nominal_norms_sq:
        return None
    length = math.sqrt(values.get((UPDATE, layer), math.nan) / forecasts.nominal_norms_sq[layer])
    return finite(length / forecasts.advanced[layer].gains[mark.at - 1])


def _motion(
    layer: Layer, values: Values, lr: float, *, is_fixed: bool
) -> tuple[float | None, float | None, float | None]:
    """Return cos(theta, u), gamma |u| / |theta|, and the angle between theta and the weights theta' after the step.

    All are None if a norm is zero, its square does not fit fp32, or the update was skipped. Decay shortens theta, so only
    the part of u across it turns it, whatever the decay was:

        sin angle = gamma |u_across| / |theta'|,      |u_across|^2 = |u|^2 - <theta, u>^2 / |theta|^2

    The angle exceeds a right one if the step along theta is longer than theta. A fixed norm scales theta and u alike, so
    that theta' is theta - gamma u there, before it is scaled.
    """
    along, update, before = (values.get((kind, layer), math.nan) for kind in (ALONG, UPDATE, BEFORE))
    if not (_LEAST < update < math.inf and _LEAST < before < math.inf):
        return None, None, None
    cosine, relative_update = finite(along / math.sqrt(update * before)), finite(lr * math.sqrt(update / before))
    after = values.get(("norm", layer), math.nan)
    if not 0 < after < math.inf:
        return cosine, relative_update, None
    after_sq = before - 2 * lr * along + lr**2 * update if is_fixed else after**2
    across = lr * math.sqrt(max(update - along**2 / before, 0.0))
    kept = math.sqrt(max(after_sq - across**2, 0.0))
    return cosine, relative_update, finite(math.atan2(across, math.copysign(kept, before - lr * along)))


def _lmo_norms(layers: Sequence[Layer], values: Values, matrices: Mapping[Layer, list[float]]) -> Record:
    max_entry_norms = {lmo: [value for (kind, _), value in values.items() if kind == lmo] for lmo in MAX_ENTRY_LMOS}
    biases = [
        values[("norm", layer)] / math.sqrt(layer.parameter.numel())
        for layer in layers
        if layer.lmo.name == "bias" and layer.parameter.numel()
    ]
    return {
        "spectral_norm": _geometric([value for norms in matrices.values() for value in norms]),
        "sign_norm": _mean(max_entry_norms["sign"]),
        "bias_norm": _mean(biases),
        "embedding_norm": _mean(max_entry_norms["embedding"]),
    }


def _by_role(layers: Mapping[Layer, Record]) -> Record:
    """Return norms by role, if there are several roles, and the mean length of updates and excess alignment."""
    present = {layer.role for layer in layers}
    values: Record = {}
    for role in (role for role in ROLE_LABELS if role in present and len(present) > 1):
        records = [record for layer, record in layers.items() if layer.role == role]
        values |= {f"{key}/{role}": _total([record[quantity] for record in records]) for key, quantity in SPLIT.items()}
        for quantity in ("update_norm", "excess"):
            values[f"{LAYER_QUANTITIES[quantity]}/{role}"] = _mean([record[quantity] for record in records])
    return values


def _means(layers: Mapping[Layer, Record], labels: Sequence[str]) -> Record:
    """Return means over the spectral layers, or over all if there are none; of the excess also by group.

    A group named like a role replaces that role's excess.
    """
    chosen = [record for layer, record in layers.items() if layer.is_spectral] or list(layers.values())
    means: Record = {
        LAYER_QUANTITIES[quantity]: _mean([record[quantity] for record in chosen])
        for quantity in ("update_norm", "relative_update", "angle", "alignment", "expected", "excess")
    }
    for index, label in enumerate(labels if len(labels) > 1 else ()):
        means[f"excess_alignment/{label}"] = _mean(
            [record["excess"] for layer, record in layers.items() if layer.group == index]
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
