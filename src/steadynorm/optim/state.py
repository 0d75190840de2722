"""The state of our optimizers: created with the groups, repaired where it is missing, loaded exactly as it was saved.

Parameters can be replaced and state can be cleared behind an optimizer's back: Accelerate puts sharded parameters into
the groups after the optimizer was made (FSDP2), and some loops restart with `optimizer.state = defaultdict(dict)`.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm import machine
from steadynorm.decay.hold import HOLD_STATE
from steadynorm.decay.rule import Group, group_label, name_of
from steadynorm.dtensor import is_dtensor
from steadynorm.optim.residual import RESIDUAL
from steadynorm.optim.validation import check_parameter, explain_group_errors, fill_unset

MAY_BE_MISSING = ("skipped", "momentum_left", RESIDUAL, *HOLD_STATE.values())  # checkpoints from before these were kept
_MOMENTUM_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


class StateKeeper(Optimizer):
    """An optimizer whose state is made with its groups, made again where it is missing, and loaded as it was saved.

    Attributes:
        signature_keys: Group keys without which a checkpoint belongs to another optimizer.
        group_kind: The kind of `param_groups` that it takes.
    """

    signature_keys: tuple[str, ...]
    group_kind = "adam"

    def _all_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        """Return fresh state of one parameter, in the dtypes and on the devices that it is kept in."""
        raise NotImplementedError

    def _own_keys(self, group: Group, p: Tensor) -> tuple[str, ...]:
        """Return the keys of `_all_state`, without making it."""
        raise NotImplementedError

    def _check_settings(self, group: Group) -> None:
        """Raise ValueError or TypeError if a group makes no sense, as it is added or as a checkpoint would leave it."""
        raise NotImplementedError

    def _forget(self) -> None:
        """Drop what is derived from groups and state."""
        raise NotImplementedError

    def merge_saved_group(self, saved: Group, group: Group) -> Group:
        """Return the part of a saved group that is loaded in place of `group`; by default all of it."""
        return saved

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does, with its settings checked and its state made; on an error nothing changes."""
        param_group = fill_unset(param_group, self.defaults, type(self), self.group_kind)
        with explain_group_errors(self, param_group):
            super().add_param_group(param_group)
        index, group = len(self.param_groups) - 1, self.param_groups[-1]
        try:
            for k, p in enumerate(group["params"]):
                check_parameter(p, name_of(group, k))
            self._check_settings(group)
            states = [self._checked_state(group, k) for k in range(len(group["params"]))]
        except (ValueError, TypeError) as error:
            self.param_groups.pop()
            raise type(error)(f"{type(self).__name__}, {group_label(index, group)}: {error}") from None
        pack(states)
        for p, state in zip(group["params"], states, strict=True):
            self.state[p].update(state)
        self._forget()

    def _ensure_state(self) -> None:
        """Make fresh state for parameters that lack some of it, and drop that of parameters that left the groups.

        torch keeps the latter and then cannot save: its state_dict() knows the parameters of groups only.
        """
        ids = {id(p) for group in self.param_groups for p in group["params"]}
        missing = []
        for index, group in enumerate(self.param_groups):
            for k, p in enumerate(group["params"]):
                if any(name not in self.state.get(p, {}) for name in self._own_keys(group, p)):
                    try:
                        check_parameter(p, name_of(group, k))
                        missing.append((p, self._checked_state(group, k)))
                    except (ValueError, TypeError) as error:
                        label = f"{type(self).__name__}, {group_label(index, group)}"
                        raise type(error)(f"{label}: {error}") from None
        for p in [p for p in self.state if isinstance(p, Tensor) and id(p) not in ids]:
            del self.state[p]
        pack([state for _, state in missing])
        for p, state in missing:
            self.state[p] = {**state, **self.state.get(p, {})}

    def _checked_state(self, group: Group, k: int) -> dict[str, Tensor]:
        """Return fresh state of a group's k-th parameter; raise ValueError, naming the parameter, if it cannot have any."""
        p = group["params"][k]
        try:
            state = self._all_state(group, p)
            if any(map(is_dtensor, (p, *state.values()))):
                from steadynorm.optim.sharding.layout import layout_of

                layout_of(p, state)  # raises for a placement that a weight cannot have
        except ValueError as error:
            raise ValueError(f"{name_of(group, k)} {error}") from None
        return state

    def skipped_steps(self) -> Tensor:
        """Return how many parameter updates a non-finite gradient has skipped: a 0-d tensor, on the (first) device."""
        self._ensure_state()
        counts = [self.state[p]["skipped"] for group in self.param_groups for p in group["params"]]
        return torch.stack([count.to(counts[0].device) for count in counts]).sum() if counts else torch.tensor(0)

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict, with state of every parameter that the groups have now."""
        self._ensure_state()
        return super().state_dict()

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, with state in its own dtype (torch casts it to the parameter's) and missing keys kept.

        A checkpoint that does not fit raises ValueError before anything changes. Entries that are not ours stay: tensors
        as torch has loaded them, others as they were saved (torch spoils strings). `capturable` stays as it is: how a
        step runs is up to this run and its device.
        """
        loaded: dict[str, Any] = {}
        before = [dict(group) for group in self.param_groups]

        def last_hook(_: Optimizer, final: dict[str, Any]) -> dict[str, Any]:  # sees what users' own hooks made of it
            final = self._checked_checkpoint(final)
            loaded.update(final)
            return final

        handle = self.register_load_state_dict_pre_hook(last_hook)
        try:
            super().load_state_dict(state_dict)
        finally:
            handle.remove()
        for group, old, saved in zip(self.param_groups, before, loaded["param_groups"], strict=True):
            own_states: list[dict[str, Tensor]] = []
            for key, value in old.items():
                group.setdefault(key, value)
            for p, index in zip(group["params"], saved["params"], strict=True):
                entries, own = loaded["state"].get(index, {}), self._all_state(group, p)
                values = _tensors(entries)
                foreign = {
                    key: self.state[p][key] if isinstance(value, Tensor) else value
                    for key, value in entries.items()
                    if key not in own and key != RESIDUAL  # of no use to weights that keep none
                }
                placed = {
                    key: _place_like(values[key], fresh) if key in values else fresh for key, fresh in own.items()
                }
                own_states.append(placed)
                self.state[p] = foreign
            pack(own_states)
            for p, placed in zip(group["params"], own_states, strict=True):
                self.state[p] |= placed
        self._forget()

    def _checked_checkpoint(self, saved: dict[str, Any]) -> dict[str, Any]:
        """Return the part of a checkpoint that is loaded; raise ValueError if it does not fit."""
        self._check_fits(saved)
        pairs = list(zip(saved["param_groups"], self.param_groups, strict=False))
        if not len(pairs) == len(saved["param_groups"]) == len(self.param_groups):
            return saved  # torch refuses it
        groups = [
            {**self.merge_saved_group(theirs, group), "capturable": group.get("capturable", False)}
            for theirs, group in pairs
        ]
        self._check_groups(groups)
        return {**saved, "param_groups": groups}

    def _check_fits(self, saved: dict[str, Any]) -> None:
        for index, (group, theirs) in enumerate(zip(self.param_groups, saved["param_groups"], strict=False)):
            for k, (p, key) in enumerate(zip(group["params"], theirs["params"], strict=False)):
                values = _tensors(saved["state"].get(key, {}))
                for name, fresh in self._all_state(group, p).items() if values else ():
                    shape = tuple(values[name].shape) if name in values else None
                    if shape != tuple(fresh.shape) and not (shape is None and name in MAY_BE_MISSING):
                        raise ValueError(
                            f"{type(self).__name__}, {group_label(index, group)}: the checkpoint has {name} of shape {shape} "
                            f"for {name_of(group, k)}, which takes {tuple(fresh.shape)}: it belongs to another model or "
                            "optimizer"
                        )

    def _check_groups(self, groups: list[Group]) -> None:
        for index, (saved, group) in enumerate(zip(groups, self.param_groups, strict=True)):
            label = f"{type(self).__name__}, {group_label(index, group)}"
            if missing := [key for key in self.signature_keys if key not in saved]:
                raise ValueError(
                    f"{label}: the checkpoint's group has no {missing[0]}: it belongs to another optimizer"
                )
            try:
                self._check_settings({**group, **saved, "params": group["params"]})
            except (ValueError, TypeError) as error:
                raise type(error)(f"{label}: the checkpoint's group is refused: {error}") from None


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


def _place_like(value: Tensor, fresh: Tensor) -> Tensor:
    """Return a copy of `value` with the dtype, device and placement of `fresh`, which it may overwrite."""
    if not is_dtensor(value) and not is_dtensor(fresh):
        return value.to(fresh, copy=True)
    from steadynorm.optim.sharding.mesh import place_like

    return place_like(value, fresh)


def _tensors(values: dict[str, Any]) -> dict[str, Any]:
    """Return the state of one parameter as tensors; torch once saved Adam's step as a plain number."""
    return {key: torch.tensor(value) if isinstance(value, int | float) else value for key, value in values.items()}
