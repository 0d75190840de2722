"""A table of parameter groups for people: which parameter got which rule, and why."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from steadynorm.decay.rule import decay_rule

_NUMBER = re.compile(r"(?<![^.])(\d+)(?![^.])")
_TITLES = ("parameter", "shape", "role", "lmo", "lr", "decay", "reason")


def explain(groups: Iterable[Mapping[str, Any]] | Optimizer, *, full: bool = False) -> str:
    """Return a plain-text table: which parameter got which rule, and why.

    Parameters that differ only by the numbers in their names share a line: `h.{0..11}.qkv.weight`.

    Decay reads "corrected, C^2 = ..." (computed from lr, alpha and C^2 at every step), "corrected, ... at peak lr"
    or "corrected, steady_norm_sq = ..." (Adam, and optimizers under `correct`), "constant ..." or "none".

    Args:
        groups: What `param_groups` returned, or an optimizer or its `param_groups`, which have no reasons to show.
        full: Print one line per parameter.

    Returns:
        A line of titles, then the lines of the parameters.

    Examples:
        >>> from torch import nn
        >>> from steadynorm import param_groups
        >>> model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(3)), nn.Linear(4, 2, bias=False))
        >>> print(explain(param_groups(model, output="3")))
        parameter      shape  role    lmo       lr    decay                    reason
        {0..2}.weight  4x4    hidden  spectral  0.01  corrected, C^2 = 1.1875  weight of Linear
        3.weight       2x4    output  sign      0.2   constant 0.004           output layer, by output=
    """
    why, ties = getattr(groups, "why", None), getattr(groups, "ties", {})
    rows: list[tuple[str, ...]] = []
    for index, group in enumerate(_iter_groups(groups)):
        for name, parameter in _named(index, group):
            shown = f"{name} (also {', '.join(ties[name])})" if ties.get(name) else name
            rows.append((shown, *_rule(index, group, parameter), (why or {}).get(name, "given by hand")))
    table = [_TITLES, *(rows if full else fold_rows(rows))]
    return format_table(table if why is not None else [row[:-1] for row in table])


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
    role, lmo = str(group.get("name", f"group {index}")), str(group.get("lmo", "-"))
    lr = f"{float(group['lr']):g}" if "lr" in group else "-"
    return shape, role, lmo, lr, _decay_text(group, parameter)


def _named(index: int, group: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield name and tensor: a group holds pairs before an optimizer takes it, and `param_names` after."""
    params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(params))]
    for name, entry in zip(names, params, strict=True):
        yield entry if isinstance(entry, tuple) else (name, entry)


def _decay_text(group: Mapping[str, Any], parameter: torch.Tensor) -> str:
    if group.get("weight_decay") is None and group.get("steady_norm_sq") is None:
        return "the optimizer's"
    return decay_rule(group, parameter).label


def fold_rows(rows: Sequence[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Join rows that differ only by numbers in their first cells, at the place of the first of them.

    >>> fold_rows([("h.0.fc", "4x4"), ("h.0.out", "4x8"), ("h.1.fc", "4x4"), ("h.1.out", "4x8"), ("h.2.fc", "4x9")])
    [('h.{0..1}.fc', '4x4'), ('h.{0..1}.out', '4x8'), ('h.2.fc', '4x9')]
    """
    split = [(_split(name), rest) for name, *rest in rows]
    for place in range(max((len(parts) for parts, _ in split), default=0) - 2, 0, -2):  # the last number first
        joined: dict[Any, tuple[list[Any], list[str]]] = {}
        for parts, rest in split:
            key = (*parts[:place], None, *parts[place + 1 :], *rest) if place < len(parts) else (*parts, *rest)
            held = joined.setdefault(key, (parts, rest))
            if held[0] is not parts:
                held[0][place] += parts[place]
        split = list(joined.values())
    return [("".join(map(_text, parts)), *rest) for parts, rest in split]


def _split(name: str) -> list[Any]:
    """Split a name into alternating text and 1-tuples of numbers. Numbers stand between dots: w1 is text.

    >>> _split("h.10.w1.weight")
    ['h.', (10,), '.w1.weight']
    """
    return [(int(part),) if k % 2 else part for k, part in enumerate(_NUMBER.split(name))]


def _text(part: str | tuple[int, ...]) -> str:
    """Return text unchanged and numbers as ranges.

    >>> _text((3,)), _text((0, 1, 2)), _text((0, 2, 3, 4, 7))
    ('3', '{0..2}', '{0,2..4,7}')
    """
    if isinstance(part, str):
        return part
    ranges: list[list[int]] = []
    for number in sorted(part):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    text = ",".join("..".join(map(str, ends)) for ends in ranges)
    return text if len(part) == 1 else f"{{{text}}}"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text with aligned columns.

    >>> print(format_table([["a", "shape"], ["longer", "2x4"]]))
    a       shape
    longer  2x4
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
