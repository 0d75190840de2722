"""`correct(skip=...)`: which parameters are meant, and a group of their own for them."""

from typing import Any

import torch
from torch.optim import Optimizer

from steadynorm.families import Group, group_label


def find_skipped(groups: list[Group], skip: list[Any], *, settled: bool) -> dict[int, list[int]]:
    """Group index -> positions of skipped parameters in it, none for the whole group. Writes nothing."""
    indices = {entry for entry in skip if isinstance(entry, int)}
    names = {entry for entry in skip if isinstance(entry, str)}
    wanted = {id(entry) for entry in skip if isinstance(entry, torch.Tensor)}
    if bad := [entry for entry in skip if not isinstance(entry, int | str | torch.Tensor)]:
        raise TypeError(f"correct: skip takes parameters, names and group indices, got {bad[0]!r}")
    if bad := [index for index in indices if not -len(groups) <= index < len(groups)]:
        raise ValueError(f"correct: skip names group {bad[0]}, but there are {len(groups)} groups")
    found: dict[int, list[int]] = {index % len(groups): [] for index in indices}
    seen: set[Any] = set()
    for index, group in enumerate(groups):
        labels = group.get("param_names") or [None] * len(group["params"])
        hit = [k for k, p in enumerate(group["params"]) if id(p) in wanted or labels[k] in names]
        seen |= {id(group["params"][k]) for k in hit} | {labels[k] for k in hit}
        if hit and index not in found:
            found[index] = [] if len(hit) == len(group["params"]) else hit
    if missing := sorted(names - seen):
        raise ValueError(f"correct: skip names {missing[0]!r}, which no group has; pass model.named_parameters()")
    if wanted - seen:
        raise ValueError("correct: skip holds a parameter that this optimizer does not have")
    for index, positions in found.items():
        if positions and (settled or "initial_lr" in groups[index]):
            raise ValueError(
                f"correct: skip would split {group_label(index, groups[index])}, which has a scheduler or state; "
                "call correct() before both, or put the skipped parameters in a group of their own"
            )
    return found


def split(optimizer: Optimizer, group: Group, positions: list[int]) -> Group:
    """Move some parameters of a group to a new one with the same settings; returns the new one."""
    moved = set(positions)
    new = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key in ("params", "param_names"):
        if key in group:
            new[key] = [value for k, value in enumerate(group[key]) if k in moved]
            group[key] = [value for k, value in enumerate(group[key]) if k not in moved]
    optimizer.param_groups.append(new)
    return new
