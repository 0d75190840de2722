"""What becomes of each parameter when an optimizer is converted: its new settings, its state, and a line of the table."""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.conversion.source import MOMENTUM, Group, Source
from steadynorm.decay.hold import HOLD_STATE
from steadynorm.decay.rule import Target
from steadynorm.groups.tables import format_table
from steadynorm.optim.residual import RESIDUAL
from steadynorm.views import BlockLayout

_STATE = ("momentum_buffer", "step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", HOLD_STATE["fixed"], RESIDUAL)
_TITLES = ("parameter", "shape", "rule", "lr", "decay", "steady rms", "state")


class Converted(NamedTuple):
    """What `convert` returns.

    Attributes:
        optimizer: The new optimizer; with `to=torch.optim.Muon` a list of two, Muon and its AdamW.
        table: What changed, one line per parameter.
    """

    optimizer: Any
    table: str


class Change(NamedTuple):
    """What becomes of one parameter."""

    source: Source  # the parameter under the old optimizer
    to: type[Optimizer]
    values: Group  # of its new group
    element_update_sq: float = 0.0  # U^2 per element
    was: float = 0.0  # C^2 before
    now: float = 0.0  # C^2 after


def is_fixed_where_it_is(source: Source, values: Group) -> bool:
    """Return whether the norm of a parameter stays fixed where it was, which no target says, in a group with these values."""
    return values.get("hold") == "fixed" and not isinstance(source.decay_rule, Target)


@torch.no_grad()
def take_over(new: Optimizer, sources: Sequence[Source], *also: str) -> None:
    """Copy the state that the new optimizer has as well: momentum from its old name, other keys from their own.

    `also` names state that only an optimizer with the same updates can use.
    """
    for source in sources:
        for key in (*_STATE, *also):
            old = source.state.get(MOMENTUM[source.kind] if key == "momentum_buffer" else key)
            if isinstance(old, Tensor) and key in new.state[source.parameter]:
                new.state[source.parameter][key].copy_(old)


# --- the table


def format_changes(changes: Sequence[Change]) -> str:
    """Return a line of titles, then a line per parameter."""
    return format_table([_TITLES, *map(_row, changes)])


def _row(change: Change) -> list[str]:
    source, values = change.source, change.values
    blocks = BlockLayout.of(values.get("blocks", 1))
    is_scion = "lmo" in values and "use_muon" not in values
    rule = f"{source.kind} -> {change.to.__name__}" + (f", {values['lmo']}" if is_scion else "")
    return [
        source.name,
        "x".join(map(str, source.parameter.shape)) or "scalar",
        rule + (f", {blocks.label}" if blocks.count > 1 else ""),
        f"{float(source.group['lr']):.4g} -> {float(values['lr']):.4g}",
        f"{source.eta / source.peak:.4g} -> {_decay(values)}",
        _rms(change),
        _state(change),
    ]


def _decay(values: Group) -> str:
    how = {"fixed": ", fixed norm", "balance": ", balanced"}.get(values.get("hold", "decay"), "")
    return _rule(values) + how + (", cautious" if values.get("cautious") else "")


def _rule(values: Group) -> str:
    if values["weight_decay"] is None:
        return f"corrected, C^2 = {values['steady_norm_sq']:.4g}"
    if values["weight_decay"] == 0:
        return "none"
    return f"{values['weight_decay']:.4g}" + (", corrected" if values.get("corrected") else "")


def _rms(change: Change) -> str:
    """Return the root mean square of the weights at steady state."""
    if is_fixed_where_it_is(change.source, change.values):
        return "stays"
    if change.source.eta == 0:
        return "grows"
    if change.source.kind == "AdamW" and "lmo" not in change.values:
        peak = change.source.peak
        rms = math.sqrt(theory.adam_mean_square(peak, change.source.eta / peak, limit=True))
        return f"{rms:.3g} -> {rms:.3g}"
    return " -> ".join(f"{math.sqrt(norm_sq * change.element_update_sq):.3g}" for norm_sq in (change.was, change.now))


def _state(change: Change) -> str:
    source = change.source
    if not source.state:
        return "none yet"
    if "lmo" not in change.values or "use_muon" in change.values:
        return "all"
    if MOMENTUM[source.kind] not in source.state:
        return "no momentum found: starts at zero"
    return "exp_avg -> momentum_buffer; exp_avg_sq, step dropped" if source.kind == "AdamW" else "momentum_buffer"
