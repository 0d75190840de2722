"""From device to record: rows of values, their transfer, and what is worked out of them on the host."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from statistics import fmean, geometric_mean
from typing import Any, NamedTuple, Protocol, Self

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm.decay.families import Family
from steadynorm.decay.rule import Group, Target, applied_weight_decay, decay_rule
from steadynorm.monitor.layers import Layer
from steadynorm.monitor.track import Start, TrackPosition
from steadynorm.records.role_norms import ROLE_LABELS, SPLIT

Record = dict[str, Any]


class Records(list[Record]):
    """Records as `Monitor.measure` returns them, with where they stand in their run."""

    resumed: bool = False  # the monitor continues a run that another one began
    source: object = None  # the same for all records of one monitor


Key = tuple[str, Any]  # what a value is, and of what
Values = dict[Key, float]

_LEAST = 1e-30  # sums of squares below it are of squares that fp32 has lost
ALONG, UPDATE, BEFORE = "along", "update", "before"  # <theta, u>, |u|^2, |theta|^2, theta before the step
TARGET = "steady_norm_sq"
SKIPS = "skips"  # updates skipped so far
WAITED = "waited"  # steps in which slices of a layer had no gradient and stood still


class Row:
    """Values of one record on their way to the host: a tensor for each device, and what each value means."""

    def __init__(self) -> None:
        self.parts: dict[torch.device, list[Tensor]] = {}
        self.keys: dict[torch.device, list[Key]] = {}

    def put(self, values: Tensor, keys: Iterable[Key]) -> None:
        """Add a tensor of as many values as keys."""
        self.parts.setdefault(values.device, []).append(values.detach().reshape(-1).float())
        self.keys.setdefault(values.device, []).extend(keys)

    def close(self) -> Self:
        """Make one tensor of the parts, a copy."""
        self.parts = {device: [torch.cat(parts)] for device, parts in self.parts.items()}
        return self


class Taken(NamedTuple):
    """A record whose values are still on the device."""

    known: Record  # what the host knew at the step
    labels: list[str]  # of the groups
    layers: Sequence[Layer]
    marks: list[TrackPosition]
    row: Row


def fetch(rows: Sequence[Row]) -> list[Values]:
    """The values of closed rows: one transfer a device for all of them together."""
    out: list[Values] = [{} for _ in rows]
    for device in {device: None for row in rows for device in row.parts}:
        here = [(values, row) for values, row in zip(out, rows, strict=True) if device in row.parts]
        numbers = iter(torch.cat([part for _, row in here for part in row.parts[device]]).cpu().tolist())
        for values, row in here:
            values.update(zip(row.keys[device], numbers, strict=False))
    return out


def skips_in(values: Values) -> dict[Layer, int]:
    """Skipped updates of each layer, of a row's values."""
    return {layer: round(value) for (kind, layer), value in values.items() if kind == SKIPS}


def group_labels(optimizer: Optimizer, layers: Sequence[Layer]) -> list[str]:
    """Return how records name the groups: by name, else by what is in them ("hidden+output", "vectors").

    Names that several groups share are followed by the first parameter of each.
    """
    members: list[list[Layer]] = [[] for _ in optimizer.param_groups]
    for layer in layers:
        members[layer.group].append(layer)
    names = []
    for group, own in zip(optimizer.param_groups, members, strict=True):
        parts = [part for part in ROLE_LABELS if any(layer.part_of == part for layer in own)]
        names.append(str(group.get("name", "+".join(parts) or "empty")))
    return [
        name if names.count(name) == 1 else f"{name} ({own[0].name if own else index})"
        for index, (name, own) in enumerate(zip(names, members, strict=True))
    ]


def group_numbers(optimizer: Optimizer, labels: Sequence[str], family: Family | None, apart: set[str]) -> Record:
    """lr, alpha, effective_lr, weight_decay and the target, if any, of the step just taken: the hidden group's, else the
    first's.

    And "lr/<group>" and so on of every group that differs from it now or did before: `apart` keeps the keys.
    """
    main = next((k for k, label in enumerate(labels) if label.startswith("hidden")), 0)
    columns = [_numbers_of(optimizer, group, family) for group in optimizer.param_groups]
    beside = {
        f"{key}/{label}": value
        for label, column in zip(labels, columns, strict=True)
        for key, value in column.items()
        if column is not columns[main]
    }
    apart |= {key for key, value in beside.items() if value != columns[main][key.split("/")[0]]}
    found = columns[main] | {key: value for key, value in beside.items() if key in apart}
    return {key: value for key, value in found.items() if value is not None or not key.startswith(TARGET)}


def _numbers_of(optimizer: Optimizer, group: Group, family: Family | None) -> Record:
    first = next((p for p in group["params"] if p.numel()), None)
    decay = None if first is None else applied_weight_decay(optimizer, group, first)
    alpha, effective_lr = (
        (None, None) if family is None else (_of(group, family.alpha), _of(group, family.effective_lr))
    )
    values = (float(group["lr"]), alpha, effective_lr, decay, _target_of(group))
    return dict(zip(("lr", "alpha", "effective_lr", "weight_decay", TARGET), map(number, values), strict=True))


def _target_of(group: Group) -> float | None:
    rule = decay_rule(group)
    return rule.steady_norm_sq if isinstance(rule, Target) else None


def _of(group: Group, quantity: Callable[[Group], float]) -> float | None:
    """None where a number is out of range, not said, or the group of another kind."""
    try:
        return quantity(group)
    except (ValueError, KeyError, ZeroDivisionError):
        return None


def number(value: float | None) -> float | None:
    """None where it is not finite.

    >>> number(2.0), number(float("nan"))
    (2.0, None)
    """
    return None if value is None or not math.isfinite(value) else value


def compose(taken: Taken, values: Values, starts: Mapping[Layer, Start], units: Mapping[Layer, float]) -> Record:
    """The record of one step; its forecasts must have been settled, and no others since."""
    marks = {layer: mark for mark in taken.marks for layer in mark.layers}
    matrices: dict[Layer, list[float]] = {}
    for (kind, what), value in values.items():
        if kind == "spectral":
            matrices.setdefault(what[0], []).append(value)
    layers: dict[Layer, Record] = {}
    for layer in taken.layers:
        forecast, expected = _forecast(layer, values, marks.get(layer), starts, units)
        cosine = _cosine(layer, values)
        layers[layer] = {
            "norm": number(values.get(("norm", layer))),
            "forecast": forecast,
            "grad": number(values.get(("grad", layer))),
            "alignment": cosine,
            "expected": expected,
            "excess": None if cosine is None or expected is None else cosine - expected,
            "spectral": _geometric(matrices.get(layer, [])),
        }
    record: Record = {
        "step": taken.known["step"],
        "weight_norm": _length(values, "norm"),
        "grad_norm": _length(values, "grad"),
        **_role_norms(taken.layers, values, matrices),
        "forecast_norm": _total([each["forecast"] for layer, each in layers.items() if layer.parameter.numel()]),
        **_by_part(layers),
        **_alignments(layers, taken.labels),
        **{key: number(value) for key, value in taken.known.items()},
        **{what: number(value) for (kind, what), value in values.items() if kind == "log"},
    }
    return record | {"layers": {layer.name: each for layer, each in layers.items()}}


def _by_part(layers: Mapping[Layer, Record]) -> Record:
    """Measured and forecast norm of hidden matrices, output layer, embeddings and vectors, where there are several."""
    present = {layer.part_of for layer in layers if layer.parameter.numel()}
    out: Record = {}
    for part in ROLE_LABELS if len(present) > 1 else ():
        if part in present:
            own = [each for layer, each in layers.items() if layer.part_of == part and layer.parameter.numel()]
            for key, quantity in zip(SPLIT, ("norm", "forecast"), strict=True):
                out[f"{key}/{part}"] = _total([each[quantity] for each in own])
    return out


def _cosine(layer: Layer, values: Values) -> float | None:
    """cos(theta_{t-1}, u_t); None if either is zero, does not fit fp32 when squared, or the update was skipped."""
    along, update, before = (values.get((kind, layer), math.nan) for kind in (ALONG, UPDATE, BEFORE))
    fits = _LEAST < update < math.inf and _LEAST < before < math.inf
    return number(along / math.sqrt(update * before)) if fits else None


def _forecast(
    layer: Layer,
    values: Values,
    mark: TrackPosition | None,
    starts: Mapping[Layer, Start],
    units: Mapping[Layer, float],
) -> tuple[float | None, float | None]:
    """Forecast norm after the step, and expected alignment in it."""
    if mark is None or values.get((WAITED, layer), 0) > 0:
        return None, None
    unit, start = units[layer], starts[layer]
    norm = number(mark.course.norm(mark.at, unit, start))
    if not mark.moved:
        return norm, None
    grad, theta_sq, u_sq = (values.get((kind, layer), math.nan) for kind in ("grad", BEFORE, UPDATE))
    return norm, number(mark.course.cosine(mark.at, unit, start, grad, math.sqrt(theta_sq), math.sqrt(u_sq)))


def _length(values: Values, kind: str) -> float | None:
    return _total([value for (each, _), value in values.items() if each == kind])


def _total(parts: Sequence[float | None]) -> float | None:
    """l2 norm of all parts; None if there are none, or one is not known."""
    known = [part for part in parts if part is not None]
    return number(math.hypot(*known)) if known and len(known) == len(parts) else None


def _geometric(parts: Sequence[float]) -> float | None:
    """Geometric mean of those that are not zero; None if one is not finite."""
    positive = [part for part in parts if part != 0]
    return geometric_mean(positive) if positive and all(map(math.isfinite, positive)) else None


def _mean(parts: Sequence[float | None]) -> float | None:
    known = [part for part in parts if part is not None]
    return number(fmean(known)) if known else None


def _role_norms(layers: Sequence[Layer], values: Values, matrices: Mapping[Layer, list[float]]) -> Record:
    biases = [
        values[("norm", layer)] / math.sqrt(layer.parameter.numel())
        for layer in layers
        if layer.lmo.name == "bias" and layer.parameter.numel()
    ]
    peaks = {role: [value for (kind, _), value in values.items() if kind == role] for role in ("sign", "embedding")}
    return {
        "spectral_norm": _geometric([value for some in matrices.values() for value in some]),
        "sign_norm": _mean(peaks["sign"]),
        "bias_norm": _mean(biases),
        "embedding_norm": _mean(peaks["embedding"]),
    }


def _alignments(layers: Mapping[Layer, Record], labels: Sequence[str]) -> Record:
    """Means over the spectral layers, all if there are none; of the excess also by group."""
    chosen = [each for layer, each in layers.items() if layer.is_spectral] or list(layers.values())
    keys = {"alignment": "alignment", "expected_alignment": "expected", "excess_alignment": "excess"}
    out: Record = {key: _mean([each[of] for each in chosen]) for key, of in keys.items()}
    for index, label in enumerate(labels if len(labels) > 1 else ()):
        out[f"excess_alignment/{label}"] = _mean(
            [each["excess"] for layer, each in layers.items() if layer.group == index]
        )
    return out


class Writer(Protocol):
    """What `log_records` needs of torch.utils.tensorboard.SummaryWriter."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None: ...


def log_records(writer: Writer, records: Iterable[Record]) -> None:
    """Write records as scalars: `weight_norm`, and `norm/<layer>` and so on; None is left out.

    >>> class Printer:
    ...     def add_scalar(self, tag, scalar_value, global_step=None): print(tag, scalar_value, global_step)
    >>> log_records(Printer(), [{"step": 3, "lr": 0.1, "loss": None, "layers": {"head": {"norm": 2.0}}}])
    lr 0.1 3
    norm/head 2.0 3
    """
    for record in records:
        for tag, value in scalars(record).items():
            writer.add_scalar(tag, value, record["step"])


def scalars(record: Record) -> dict[str, float]:
    """A record without its step as tag -> number: layers as `norm/<layer>` and so on, None left out.

    >>> scalars({"step": 3, "lr": 0.1, "loss": None, "layers": {"head": {"norm": 2.0}}})
    {'lr': 0.1, 'norm/head': 2.0}
    """
    found = {key: value for key, value in record.items() if key not in ("step", "layers")}
    for name, quantities in record.get("layers", {}).items():
        found |= {f"{quantity}/{name}": value for quantity, value in quantities.items()}
    return {tag: value for tag, value in found.items() if value is not None}
