"""Optimizer state out of a checkpoint, exactly as it was saved."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm.decay.rule import Group, group_label
from steadynorm.optim.parameters import name_of
from steadynorm.optim.sharding.placement import placed_like

MAY_BE_MISSING = ("skipped", "momentum_left")  # checkpoints from before these were kept


def load_exactly(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    fresh_state: Callable[[Group, Tensor], dict[str, Tensor]],
    own_keys: Sequence[str],
    adopted: Callable[[Group, Group], Group] = lambda saved, group: saved,
    check_group: Callable[[Group], None] = lambda group: None,
) -> None:
    """torch's load, then the state again in the dtype and device of `fresh_state`, and group keys that were missing.

    Entries that are not ours stay: tensors as torch has loaded them, others as they were saved (torch spoils strings).
    own_keys: a saved group without one of these is another optimizer's. adopted: what of a saved group is taken, given
    the present one. check_group: raises where the group as it would be makes no sense.
    """
    loaded: dict[str, Any] = {}
    before = [dict(group) for group in optimizer.param_groups]

    def last_hook(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:  # sees what users' own hooks made of it
        _check_fits(optimizer, final, fresh_state)
        pairs = zip(final["param_groups"], optimizer.param_groups, strict=False)
        groups = [adopted(saved, group) for saved, group in pairs]
        if len(groups) == len(final["param_groups"]) == len(optimizer.param_groups):  # else torch says so
            _check_groups(optimizer, groups, own_keys, check_group)
            final = {**final, "param_groups": groups}
        loaded.update(final)
        return final

    handle = optimizer.register_load_state_dict_pre_hook(last_hook)
    try:
        load(state_dict)
    finally:
        handle.remove()
    for group, old, saved in zip(optimizer.param_groups, before, loaded["param_groups"], strict=True):
        for key, value in old.items():
            group.setdefault(key, value)
        for p, index in zip(group["params"], saved["params"], strict=True):
            given, own = loaded["state"].get(index, {}), fresh_state(group, p)
            values = _tensors(given)
            theirs = {
                key: optimizer.state[p][key] if isinstance(value, Tensor) else value
                for key, value in given.items()
                if key not in own
            }
            optimizer.state[p] = theirs | {
                key: placed_like(values[key], fresh) if key in values else fresh for key, fresh in own.items()
            }


def _tensors(values: dict[str, Any]) -> dict[str, Any]:
    """State of one parameter; torch once saved Adam's step as a plain number."""
    return {key: torch.tensor(value) if isinstance(value, int | float) else value for key, value in values.items()}


def _check_fits(
    optimizer: Optimizer, state_dict: dict[str, Any], fresh_state: Callable[[Group, Tensor], dict[str, Tensor]]
) -> None:
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=False)):
        for k, (p, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
            values = _tensors(state_dict["state"].get(key, {}))
            for name, fresh in fresh_state(group, p).items() if values else ():
                shape = tuple(values[name].shape) if name in values else None
                if shape != tuple(fresh.shape) and not (shape is None and name in MAY_BE_MISSING):
                    raise ValueError(
                        f"{type(optimizer).__name__}, {group_label(index, group)}: the checkpoint has {name} of shape "
                        f"{shape} for {name_of(group, k)} of shape {tuple(p.shape)}: it is of another model or optimizer"
                    )


def _check_groups(
    optimizer: Optimizer, groups: list[Group], own_keys: Sequence[str], check_group: Callable[[Group], None]
) -> None:
    for index, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        label = f"{type(optimizer).__name__}, {group_label(index, group)}"
        if missing := [key for key in own_keys if key not in saved]:
            raise ValueError(f"{label}: the checkpoint's group has no {missing[0]}: it is of another optimizer")
        try:
            check_group({**group, **saved, "params": group["params"]})
        except (ValueError, TypeError) as error:
            raise type(error)(f"{label}: the checkpoint's group is refused: {error}") from None
