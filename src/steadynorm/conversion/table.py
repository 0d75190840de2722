"""What `convert` changed, as a table: was -> is."""

import math
from collections.abc import Sequence
from typing import NamedTuple

from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.conversion.source import MOMENTUM, Group, Source
from steadynorm.groups.explanation import format_table

_TITLES = ("parameter", "shape", "rule", "lr", "decay", "steady rms", "state")


class Change(NamedTuple):
    """One parameter: what it was, and its new group's values."""

    source: Source
    to: type[Optimizer]
    values: Group
    unit: float = 0.0  # U^2 an element
    was: float = 0.0  # C^2 that it had
    now: float = 0.0  # C^2 that it will have


def table(changes: Sequence[Change]) -> str:
    """A line of titles, then a line for each parameter."""
    return format_table([_TITLES, *map(_row, changes)])


def _row(change: Change) -> list[str]:
    source, values = change.source, change.values
    blocks = values.get("blocks", 1)
    rule = f"{source.kind} -> {change.to.__name__}" + (f", {values['lmo']}" if "lmo" in values else "")
    return [
        source.name,
        "x".join(map(str, source.parameter.shape)) or "scalar",
        rule + (f", {blocks} blocks" if blocks > 1 else ""),
        f"{float(source.group['lr']):.4g} -> {float(values['lr']):.4g}",
        f"{source.eta / source.peak:.4g} -> {_decay(values)}",
        _rms(change),
        _state(change),
    ]


def _decay(values: Group) -> str:
    if values["weight_decay"] is None:
        return f"corrected, C^2 = {values['steady_norm_sq']:.4g}"
    if values["weight_decay"] == 0:
        return "none"
    return f"{values['weight_decay']:.4g}" + (", corrected" if values.get("corrected") else "")


def _rms(change: Change) -> str:
    """Root mean square of the weights at steady state."""
    if change.source.eta == 0:
        return "grows"
    if "lmo" not in change.values:
        peak = change.source.peak
        rms = math.sqrt(theory.adam_mean_square(peak, change.source.eta / peak, limit=True))
        return f"{rms:.3g} -> {rms:.3g}"
    return " -> ".join(f"{math.sqrt(norm_sq * change.unit):.3g}" for norm_sq in (change.was, change.now))


def _state(change: Change) -> str:
    source = change.source
    if not source.state:
        return "none yet"
    if "lmo" not in change.values:
        return "all"
    if MOMENTUM[source.kind] not in source.state:
        return "no momentum found: starts at zero"
    return "exp_avg -> momentum_buffer; exp_avg_sq, step dropped" if source.kind == "AdamW" else "momentum_buffer"
