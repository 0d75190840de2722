"""What a record says of the parameter groups: their labels, lr, alpha, effective lr, decay and target."""

import math
from collections.abc import Callable, Sequence

from torch import Tensor
from torch.optim import Optimizer

from steadynorm.decay.families import Family
from steadynorm.decay.hold import held_target, hold_of
from steadynorm.decay.rule import Group, Target, applied_weight_decay, decay_rule, is_uncorrected
from steadynorm.monitor.layers import Layer
from steadynorm.records.role_norms import ROLE_LABELS
from steadynorm.records.schema import Record, finite

_TARGET = "steady_norm_sq"


def group_labels(optimizer: Optimizer, layers: Sequence[Layer]) -> list[str]:
    """Return how records name the groups: by name, else by the roles in them ("hidden+output", "vectors").

    If several groups share a name, the first parameter of each follows it.
    """
    members: list[list[Layer]] = [[] for _ in optimizer.param_groups]
    for layer in layers:
        members[layer.group].append(layer)
    names = []
    for group, own in zip(optimizer.param_groups, members, strict=True):
        roles = [role for role in ROLE_LABELS if any(layer.role == role for layer in own)]
        names.append(str(group.get("name", "+".join(roles) or "empty")))
    return [
        name if names.count(name) == 1 else f"{name} ({own[0].name if own else index})"
        for index, (name, own) in enumerate(zip(names, members, strict=True))
    ]


def read_group_values(
    optimizer: Optimizer, labels: Sequence[str], family: Family | None, differing: set[str]
) -> Record:
    """Return lr, alpha, effective_lr, weight_decay and the target, if any, in the step just taken.

    They are those of the hidden group, else of the first. Values of another group that differ, or did so before, follow
    as "lr/<group>" and so on; `differing` remembers these keys.
    """
    main = next((k for k, label in enumerate(labels) if label.startswith("hidden")), 0)
    columns = [_values_of(optimizer, group, family) for group in optimizer.param_groups]
    others = {
        f"{key}/{label}": value
        for label, column in zip(labels, columns, strict=True)
        for key, value in column.items()
        if column is not columns[main]
    }
    differing |= {key for key, value in others.items() if value != columns[main][key.split("/")[0]]}
    values = columns[main] | {key: value for key, value in others.items() if key in differing}
    return {key: value for key, value in values.items() if value is not None or not key.startswith(_TARGET)}


def read_lr(group: Group) -> float:
    """Return a group's lr; NaN, which records show as None, if its optimizer finds one by itself (Adafactor's lr=None)."""
    return math.nan if group.get("lr") is None else float(group["lr"])


def _values_of(optimizer: Optimizer, group: Group, family: Family | None) -> Record:
    rule, family = decay_rule(group), family and family.of(group)
    first = next((p for p in group["params"] if p.numel()), None)
    values = {
        "lr": read_lr(group),
        "alpha": None if family is None else _value_or_none(group, family.alpha),
        "effective_lr": None if family is None else _value_or_none(group, family.effective_lr),
        "weight_decay": None if first is None else _decay_of(optimizer, group, first),
        _TARGET: rule.steady_norm_sq if isinstance(rule, Target) else None,
    }
    return {key: finite(value) for key, value in values.items()}


def _decay_of(optimizer: Optimizer, group: Group, p: Tensor) -> float:
    """Return the decay of the step just taken; a fixed norm replaces it, except where `correct` skips the parameter."""
    is_fixed = hold_of(group) == "fixed" and not is_uncorrected(group, p)
    return 0.0 if is_fixed else applied_weight_decay(optimizer, group, p)


def read_targets(optimizer: Optimizer, layers: Sequence[Layer], family: Family | None) -> dict[Layer, float]:
    """Return the norm at which each layer is held, or its decay aims, in the step just taken, where there is one.

    A norm that is fixed where it was has none: what decay would have aimed at does not matter to it.
    """
    targets: dict[Layer, float] = {}
    if family is None:
        return targets
    for layer in layers:
        group = optimizer.param_groups[layer.group]
        if layer.parameter.numel() and not is_uncorrected(group, layer.parameter):
            norm_sq = _value_or_none(group, lambda group, own=layer: held_target(group, family, own.shape))
            if norm_sq is not None:
                targets[layer] = math.sqrt(norm_sq)
    return targets


def _value_or_none(group: Group, quantity: Callable[[Group], float | None]) -> float | None:
    """Return a quantity, or None if a setting is missing, out of range, or the group is of another kind."""
    try:
        return quantity(group)
    except (ValueError, KeyError, ZeroDivisionError):
        return None
