"""The state of own optimizers: created with the groups, repaired where it is missing, loaded exactly as it was saved.

Parameters can be replaced and state can be cleared behind an optimizer's back: Accelerate puts sharded parameters into
the groups after the optimizer was made (FSDP2), and some loops restart with `optimizer.state = defaultdict(dict)`.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm import machine
from steadynorm.decay.hold import HOLD_STATE
from steadynorm.decay.rule import Group, group_label
from steadynorm.optim.placement import is_dtensor
from steadynorm.optim.residual import RESIDUAL
from steadynorm.optim.validation import check_parameter, name_of

MAY_BE_MISSING = ("skipped", "momentum_left", RESIDUAL, *HOLD_STATE.values())  # checkpoints from before these were kept
_MOMENTUM_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}
FreshState = Callable[[Group, Tensor], dict[str, Tensor]]


def ensure_state(optimizer: Optimizer, keys: Callable[[Group, Tensor], Sequence[str]], fresh_state: FreshState) -> None:
    """Make fresh state for parameters that lack some of it, and drop that of parameters that left the groups.

    torch keeps the latter and then cannot save: its state_dict() knows the parameters of groups only.
    """
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = []
    for index, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if any(name not in optimizer.state.get(p, {}) for name in keys(group, p)):
                try:
                    check_parameter(p, name_of(group, k))
                    missing.append((p, checked_state(group, k, fresh_state)))
                except (ValueError, TypeError) as error:
                    label = f"{type(optimizer).__name__}, {group_label(index, group)}"
                    raise type(error)(f"{label}: {error}") from None
    for p in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in ids]:
        del optimizer.state[p]
    pack([state for _, state in missing])
    for p, state in missing:
        optimizer.state[p] = {**state, **optimizer.state.get(p, {})}


def checked_state(group: Group, k: int, fresh_state: FreshState) -> dict[str, Tensor]:
    """Return fresh state of a group's k-th parameter; raise ValueError, by name, if it cannot be had."""
    p = group["params"][k]
    try:
        state = fresh_state(group, p)
        if any(map(is_dtensor, (p, *state.values()))):
            from steadynorm.optim.sharding.layout import layout_of

            layout_of(p, state)  # raises for a placement that a weight cannot have
    except ValueError as error:
        raise ValueError(f"{name_of(group, k)} {error}") from None
    return state


def pack(states: Sequence[dict[str, Tensor]]) -> None:
    """Move state that several parameters have alike into one memory, so that a step sees it as one stack without a copy.

    Each parameter's entry becomes a view of its part. Gathering it for every kernel would cost an accelerator more than the
    kernel. It stays as it is on a CPU, in DTensors, and where it is not contiguous.
    """
    alike: dict[Any, list[dict[str, Tensor]]] = {}
    for state in states:
        largest = max((value.shape for value in state.values()), key=math.prod)  # parameters of other shapes step apart
        for key, value in state.items():
            if machine.is_accelerator(value.device) and not is_dtensor(value) and value.is_contiguous():
                alike.setdefault((key, value.shape, value.dtype, value.device, largest), []).append(state)
    for (key, *_), owners in alike.items():
        if len(owners) > 1:
            for state, part in zip(owners, torch.stack([state[key] for state in owners]).unbind(0), strict=True):
                state[key] = part


def no_skips(p: Tensor) -> Tensor:
    """Return a counter of skipped updates, at zero."""
    return torch.zeros((), dtype=torch.int64, device=p.device)


def no_updates(p: Tensor) -> Tensor:
    """Return a counter of updates, at zero; a float, as torch's AdamW keeps it."""
    return torch.zeros((), dtype=torch.float32, device=p.device)


def zeros_like(p: Tensor, mesh: Any = None) -> Tensor:
    """Return a zero buffer of p's shape in at least fp32, sharded as p is, or over the mesh."""
    dtype = machine.exact_dtype(p)
    if mesh is None:
        return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
    from steadynorm.optim.sharding.mesh import sharded_zeros

    return sharded_zeros(p, dtype, mesh)


def zero_momentum(p: Tensor, dtype: str | None, mesh: Any = None) -> Tensor:
    """Return a zero momentum buffer like `zeros_like`, in another dtype if a group's `momentum_dtype` names one."""
    m = zeros_like(p, mesh)
    return m if dtype is None else m.to(_MOMENTUM_DTYPES[dtype])


def check_momentum_dtype(dtype: str | None) -> None:
    """Raise ValueError if a group's `momentum_dtype` is not one of those that momentum is kept in."""
    if dtype is not None and dtype not in _MOMENTUM_DTYPES:
        raise ValueError(f"momentum_dtype={dtype!r} is unknown; choose one of {', '.join(_MOMENTUM_DTYPES)}")


def load_exactly(
    optimizer: Optimizer,
    load: Callable[[dict[str, Any]], None],
    state_dict: dict[str, Any],
    fresh_state: FreshState,
    signature_keys: Sequence[str],
    merge_saved_group: Callable[[Group, Group], Group] = lambda saved, group: saved,
    check_group: Callable[[Group], None] = lambda group: None,
) -> None:
    """Load as torch does, then restore state in its own dtype and device, and group keys that were missing.

    Entries that are not ours stay: tensors as torch has loaded them, others as they were saved (torch spoils strings).
    `capturable` stays as it is: how a step runs is up to this run and its device.

    Args:
        optimizer: What is loaded into.
        load: torch's own load_state_dict.
        state_dict: The checkpoint.
        fresh_state: Makes the state of one parameter, whose dtypes and devices are kept.
        signature_keys: A saved group without one of these belongs to another optimizer.
        merge_saved_group: Returns what of a saved group is taken, given the present one.
        check_group: Raises if the group as it would be makes no sense.
    """
    loaded: dict[str, Any] = {}
    before = [dict(group) for group in optimizer.param_groups]

    def last_hook(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:  # sees what users' own hooks made of it
        _check_fits(optimizer, final, fresh_state)
        pairs = zip(final["param_groups"], optimizer.param_groups, strict=False)
        groups = [
            {**merge_saved_group(saved, group), "capturable": group.get("capturable", False)} for saved, group in pairs
        ]
        if len(groups) == len(final["param_groups"]) == len(optimizer.param_groups):  # else torch says so
            _check_groups(optimizer, groups, signature_keys, check_group)
            final = {**final, "param_groups": groups}
        loaded.update(final)
        return final

    handle = optimizer.register_load_state_dict_pre_hook(last_hook)
    try:
        load(state_dict)
    finally:
        handle.remove()
    for group, old, saved in zip(optimizer.param_groups, before, loaded["param_groups"], strict=True):
        own_states: list[dict[str, Tensor]] = []
        for key, value in old.items():
            group.setdefault(key, value)
        for p, index in zip(group["params"], saved["params"], strict=True):
            entries, own = loaded["state"].get(index, {}), fresh_state(group, p)
            values = _tensors(entries)
            foreign = {
                key: optimizer.state[p][key] if isinstance(value, Tensor) else value
                for key, value in entries.items()
                if key not in own and key != RESIDUAL  # of no use to weights that keep none
            }
            placed = {key: _place_like(values[key], fresh) if key in values else fresh for key, fresh in own.items()}
            own_states.append(placed)
            optimizer.state[p] = foreign
        pack(own_states)
        for p, placed in zip(group["params"], own_states, strict=True):
            optimizer.state[p] |= placed


def _place_like(value: Tensor, fresh: Tensor) -> Tensor:
    """Return a copy of `value` with the dtype, device and placement of `fresh`, which it may overwrite."""
    if not is_dtensor(value) and not is_dtensor(fresh):
        return value.to(fresh, copy=True)
    from steadynorm.optim.sharding.mesh import place_like

    return place_like(value, fresh)


def _tensors(values: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter as tensors; torch once saved Adam's step as a plain number."""
    return {key: torch.tensor(value) if isinstance(value, int | float) else value for key, value in values.items()}


def _check_fits(optimizer: Optimizer, state_dict: dict[str, Any], fresh_state: FreshState) -> None:
    for index, (group, saved) in enumerate(zip(optimizer.param_groups, state_dict["param_groups"], strict=False)):
        for k, (p, key) in enumerate(zip(group["params"], saved["params"], strict=False)):
            values = _tensors(state_dict["state"].get(key, {}))
            for name, fresh in fresh_state(group, p).items() if values else ():
                shape = tuple(values[name].shape) if name in values else None
                if shape != tuple(fresh.shape) and not (shape is None and name in MAY_BE_MISSING):
                    raise ValueError(
                        f"{type(optimizer).__name__}, {group_label(index, group)}: the checkpoint has {name} of shape "
                        f"{shape} for {name_of(group, k)} of shape {tuple(p.shape)}: it belongs to another model or optimizer"
                    )


def _check_groups(
    optimizer: Optimizer, groups: list[Group], signature_keys: Sequence[str], check_group: Callable[[Group], None]
) -> None:
    for index, (saved, group) in enumerate(zip(groups, optimizer.param_groups, strict=True)):
        label = f"{type(optimizer).__name__}, {group_label(index, group)}"
        if missing := [key for key in signature_keys if key not in saved]:
            raise ValueError(f"{label}: the checkpoint's group has no {missing[0]}: it belongs to another optimizer")
        try:
            check_group({**group, **saved, "params": group["params"]})
        except (ValueError, TypeError) as error:
            raise type(error)(f"{label}: the checkpoint's group is refused: {error}") from None
