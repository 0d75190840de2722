"""A table of parameter groups for people: which parameter got which rule, and why."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadynorm.decay.rule import decay_rule
from steadynorm.groups.tables import fold_rows, format_table

_TITLES = ("parameter", "shape", "role", "lmo", "lr", "decay", "reason")


def explain(groups: Iterable[Mapping[str, Any]] | Optimizer, *, full: bool = False) -> str:
    """Return a plain-text table: which parameter got which rule, and why.

    Parameters that differ only by the numbers in their names share a line: `h.{0..11}.qkv.weight`.

    Decay reads "corrected, C^2 = ..." (computed from lr, alpha and C^2 at every step), "corrected, ... at peak lr"
    or "corrected, steady_norm_sq = ..." (Adam, and optimizers under `correct`), "constant ..." or "none".

    Args:
        groups: Groups from `param_groups`, or an optimizer or its `param_groups`, which have no reasons to show.
        full: Print one line per parameter.

    Returns:
        A line of titles, then the lines of the parameters. A note on bf16 parameters follows, if an optimizer has any.

    Raises:
        ValueError: If a parameter has no shape yet.

    Examples:
        >>> from torch import nn
        >>> from steadynorm import param_groups
        >>> model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.Linear(4, 2, bias=False))
        >>> print(explain(param_groups(model, output="3")))
        parameter      shape  role    lmo       lr    decay                    reason
        {0..2}.weight  4x4    hidden  spectral  0.01  corrected, C^2 = 1.1875  weight of Linear
        3.weight       2x4    output  sign      0.2   constant 0.004           output layer, by output=
    """
    rows: list[tuple[str, ...]] = []
    made, has_reasons = getattr(groups, "members", {}), False
    for index, group in enumerate(_iter_groups(groups)):
        members = made.get(group.get("name"), group["params"])
        why, ties = (getattr(members, notes, {}) for notes in ("why", "ties"))
        has_reasons |= bool(why)
        for name, parameter in _named(index, group):
            if is_lazy(parameter):
                raise ValueError(f"explain: {name} has no shape yet (a lazy module); run the model once first")
            shown = f"{name} (also {', '.join(ties[name])})" if ties.get(name) else name
            rows.append((shown, *_rule(index, group, parameter), why.get(name, "given by hand")))
    table = [_TITLES, *(rows if full else fold_rows(rows))]
    text = format_table(table if has_reasons else [row[:-1] for row in table])
    return "\n".join([text, *_bf16_notes(groups)])


def _bf16_notes(optimizer: Any) -> Iterator[str]:
    """Yield what becomes of bf16 parameters: own optimizers keep in the state what bf16 rounds away."""
    if not isinstance(optimizer, Optimizer):
        return
    params = [p for group in optimizer.param_groups for p in group["params"] if p.dtype == torch.bfloat16]
    exact = sum("weight_residual" in optimizer.state.get(p, {}) for p in params)
    if exact:
        yield f"{exact} bf16 parameters train as fp32 weights: weight_residual keeps the other 16 bits, 2 bytes per weight."
    if exact < len(params):
        yield f"{len(params) - exact} bf16 parameters are rounded at every step, which loses small updates and decay."


def _iter_groups(groups: Any) -> Iterator[Mapping[str, Any]]:
    """Yield the groups; raise TypeError for something else, such as a model."""
    groups = getattr(groups, "param_groups", groups)
    is_list = isinstance(groups, Iterable) and not isinstance(groups, torch.nn.Module)
    for group in groups if is_list else [groups]:
        if not isinstance(group, Mapping):
            raise TypeError(
                f"explain takes groups or an optimizer, not {type(group).__name__}; pass param_groups(model)"
            )
        yield group


def _rule(index: int, group: Mapping[str, Any], parameter: torch.Tensor) -> tuple[str, str, str, str, str]:
    """Return shape, role, lmo, lr and decay of one parameter."""
    shape = "x".join(map(str, parameter.shape)) or "scalar"
    role, lmo = str(group.get("name", f"group {index}")), str(group.get("lmo") or "-")
    if (use_muon := group.get("use_muon")) is not None:
        lmo = f"muon, {group.get('lmo') or 'by shape'}" if use_muon else "adam"
    lr = f"{float(group['lr']):g}" if "lr" in group else "-"
    has_decay = group.get("weight_decay") is not None or group.get("steady_norm_sq") is not None
    return shape, role, lmo, lr, decay_rule(group, parameter).label if has_decay else "the optimizer's"


def _named(index: int, group: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor: a group holds pairs before an optimizer takes it, and `param_names` after."""
    params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(params))]
    for name, entry in zip(names, params, strict=True):
        yield entry if isinstance(entry, tuple) else (name, entry)
