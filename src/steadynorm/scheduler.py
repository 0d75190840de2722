"""A scheduler that writes any key of the parameter groups and checkpoints like torch's."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from steadynorm.decay.rule import Constant, decay_rule, group_label
from steadynorm.schedule import StepFunction

PerGroup = StepFunction | Sequence[StepFunction | None] | Mapping[str, StepFunction | None]
Group = dict[str, Any]


class Scheduler(LRScheduler):
    """A torch LRScheduler that writes any key of the parameter groups at every step.

        scale:  group[key] = f(step) * group["initial_" + key]        value:  group[key] = f(step)

    The base of a scaled key is captured once, in the group, so `optimizer.state_dict()` carries it and a resumed group
    does not take its decayed value for the base. Values are written at construction (step 0), by `step()` and by
    `load_state_dict()`. The functions are not saved: build the Scheduler with them again, then load.

    Args:
        optimizer: The optimizer whose groups are written.
        scale: key -> a step function for all groups that have the key (not None); or a list with one per group; or a dict
            by the groups' "name", with "*" for all others. In list and dict, None leaves a group alone.
        value: Likewise, for functions that return the value itself.
        last_epoch: The last completed step as in torch, -1 for a new run.

    Examples:
        >>> import torch
        >>> from steadynorm.schedule import MatchedMomentum, linear
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = torch.optim.SGD([{"params": [weight], "alpha": 0.1}], lr=0.02)
        >>> matched = MatchedMomentum(0.1, 1.0, linear(4))
        >>> scheduler = Scheduler(optimizer, scale={"lr": matched.lr}, value={"alpha": matched.alpha})
        >>> optimizer.step(); scheduler.step()
        >>> optimizer.param_groups[0]["lr"], round(optimizer.param_groups[0]["alpha"], 4)
        (0.02, 0.1711)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scale: Mapping[str, PerGroup] | None = None,
        value: Mapping[str, PerGroup] | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.scale, self.value = dict(scale or {}), dict(value or {})
        if both := self.scale.keys() & self.value.keys():
            raise ValueError(f"Scheduler: {sorted(both)} in scale= and in value=; keep one of the two")
        if not self.scale and not self.value:
            raise ValueError('Scheduler: nothing to write; pass e.g. scale={"lr": cosine(1000)}')
        self.optimizer = optimizer
        for where, group, key, _ in self._assignments():
            if last_epoch != -1 and key in self.scale and f"initial_{key}" not in group:
                raise ValueError(f'{where}: last_epoch={last_epoch} but no "initial_{key}"; load the optimizer first')
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Write this step's values, after computing all of them; every stepping path of torch calls this."""
        values = [(group, key, self._value(where, group, key, f)) for where, group, key, f in self._assignments()]
        _own_tensors(self.optimizer.param_groups, {key for _, key, _ in values})
        for group, key, value in values:
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
        return [_copy(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """Return the step count, and which keys of how many groups are written, as numbers and strings."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved step and write its values."""
        mine, saved = self._identity(), {key: state_dict.get(key) for key in self._identity()}
        if saved != mine:
            raise ValueError(f"Scheduler: saved with {saved}, loaded into {mine}; build it as it was, then load")
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
        self._last_lr = self.get_lr()

    def _identity(self) -> dict[str, Any]:
        return {"scale": sorted(self.scale), "value": sorted(self.value), "groups": len(self.optimizer.param_groups)}

    def _value(self, where: str, group: Group, key: str, function: StepFunction) -> float:
        value = float(function(self.last_epoch))
        if not 0 <= value < math.inf:
            raise ValueError(f"{where} is given {value} at step {self.last_epoch}; return a finite number, 0 or more")
        if key in self.scale:
            value *= float(group.setdefault(f"initial_{key}", _copy(group[key])))
        return value

    def _assignments(self) -> Iterator[tuple[str, Group, str, StepFunction]]:
        """Yield (where, group, key, function) for every value to write."""
        groups: list[Group] = self.optimizer.param_groups
        for key, spec in (self.scale | self.value).items():
            functions, written = _per_group(key, spec, groups), 0
            for index, (group, function) in enumerate(zip(groups, functions, strict=True)):
                meant = isinstance(spec, Sequence) or (isinstance(spec, Mapping) and group.get("name") in spec)
                if function is None or (group.get(key) is None and not meant):
                    continue
                where = group_label(index, group)
                if isinstance(group.get(key), bool) or not isinstance(group.get(key), float | int | Tensor):
                    raise ValueError(f"{where}: {key}={group.get(key)!r} is not a number to schedule; pass None for it")
                if not callable(function):
                    raise TypeError(f"{where}: {key} is given {function!r}; pass a function of the step")
                if key == "weight_decay" and not isinstance(decay_rule(group), Constant):
                    raise ValueError(
                        f"{where}: weight_decay is computed at every step; schedule base_weight_decay, or set "
                        "corrected=False in the group"
                    )
                written += 1
                yield f"{where}: {key}", group, key, function
            if not written:
                keys = sorted({name for group in groups for name in group} - {"params"})
                raise ValueError(f"Scheduler: no group has a number under {key!r}; the groups' keys are {keys}")


def _per_group(key: str, spec: PerGroup, groups: list[Group]) -> Sequence[StepFunction | None]:
    if isinstance(spec, Mapping):
        names = [group.get("name", "*") for group in groups]
        if unknown := set(spec) - {*names, "*"}:
            raise ValueError(f'Scheduler: {key} for {sorted(unknown)}, but the groups\' "name" are {names}')
        return [spec.get(name, spec.get("*")) for name in names]
    if isinstance(spec, Sequence):
        if len(spec) != len(groups):
            raise ValueError(f"Scheduler: {key} has {len(spec)} functions for {len(groups)} groups; pass one per group")
        return spec
    return [spec] * len(groups)


def _own_tensors(groups: list[Group], keys: set[str]) -> None:
    """Give each group its own tensor: groups that took one from the optimizer's defaults share it."""
    seen: set[int] = set()
    for group in groups:
        for key in keys & group.keys():
            if isinstance(group[key], Tensor):
                group[key] = group[key].clone() if id(group[key]) in seen else group[key]
                seen.add(id(group[key]))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else float(value)
