"""State where it is missing, and what is worked out from it anew: parameters can be replaced, state can be cleared.

Accelerate puts sharded parameters into the groups after the optimizer was made (FSDP2); some loops restart with
`optimizer.state = defaultdict(dict)`.
"""

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from steadynorm.decay.rule import Group, group_label
from steadynorm.optim.parameters import check_parameter, name_of
from steadynorm.optim.sharding.consensus import Agreement
from steadynorm.optim.sharding.layout import layout_of

Made = TypeVar("Made")


class Settled(Generic[Made]):
    """What an optimizer works out from its groups, parameters and their state. Neither saved nor copied."""

    def __init__(self) -> None:
        self.agreement = Agreement()
        self._made: dict[Any, Made] = {}
        self._params: list[Tensor] = []  # all of them, held: so an id in a key is nobody else's

    def get(self, optimizer: Optimizer, setting_keys: Sequence[str], make: Callable[[], Made]) -> Made:
        """What `make` gives for these parameters, their gradients and settings, worked out once."""
        key = tuple(
            (
                *(group[name] for name in setting_keys),
                *[
                    (id(p), None if (grad := p.grad) is None else grad.layout, p.shape, p.dtype, p.device)
                    for p in group["params"]
                ],
            )
            for group in optimizer.param_groups
        )
        if key not in self._made:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if list(map(id, params)) != list(map(id, self._params)):
                self.__init__()
                self._params = params
            if len(self._made) > 16:  # gradients come and go at random: do not hoard
                self._made.clear()
            self._made[key] = make()
        return self._made[key]


def settle_state(
    optimizer: Optimizer, keys: Callable[[Group], Sequence[str]], fresh_state: Callable[[Group, Tensor], Any]
) -> None:
    """Fresh state for parameters that lack some of it, none for those that left the groups.

    torch keeps the latter, and then cannot save: its state_dict() knows the parameters of groups alone.
    """
    ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
    missing = []
    for index, group in enumerate(optimizer.param_groups):
        names = keys(group)
        for k, p in enumerate(group["params"]):
            has = optimizer.state.get(p, {})
            if any(name not in has for name in names):
                try:
                    check_parameter(p, name_of(group, k))
                    missing.append((p, checked_state(group, k, fresh_state)))
                except (ValueError, TypeError) as error:
                    label = f"{type(optimizer).__name__}, {group_label(index, group)}"
                    raise type(error)(f"{label}: {error}") from None
    for p in [p for p in optimizer.state if isinstance(p, Tensor) and id(p) not in ids]:
        del optimizer.state[p]
    for p, state in missing:
        optimizer.state[p] = {**state, **optimizer.state.get(p, {})}


def checked_state(group: Group, k: int, fresh_state: Callable[[Group, Tensor], Any]) -> dict[str, Tensor]:
    """Fresh state of a group's k-th parameter; ValueError, by name, where it cannot be had or is placed oddly."""
    p = group["params"][k]
    try:
        state = fresh_state(group, p)
        layout_of(p, state)
    except ValueError as error:
        raise ValueError(f"{name_of(group, k)} {error}") from None
    return state
