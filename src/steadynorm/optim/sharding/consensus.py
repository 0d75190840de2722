"""What ranks agree on before a step: which parameters have a gradient, whether it is finite, and where it is zero."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from steadynorm.decay.rule import Group, group_label, name_of
from steadynorm.optim.sharding.layout import Layout, layout_of, process_group


class Member(NamedTuple):
    """A sharded parameter, and how errors and other ranks know it."""

    p: Tensor
    layout: Layout
    label: str
    traits: str  # what must be the same on every rank


class Consensus:
    """One small all-reduce per step and process group; its length does not depend on which gradients exist.

    A gradient that is missing on one rank is therefore reported on all ranks, instead of hanging a later collective. On
    an accelerator, where reading the result forces a sync, a rank reads it at its first step and whenever its own set
    of gradients has changed.
    """

    def __init__(self) -> None:
        self.members: dict[str, list[Member]] | None = None  # by process group's name
        self.flags: Mapping[int, int] = {}  # how many a parameter has
        self._constants: dict[tuple[Any, ...], Tensor] = {}

    def set_members(self, members: Sequence[Member], blocks: Mapping[int, int] | None = None) -> None:
        """Set the sharded parameters of the optimizer, in its order, and compare them with the other ranks'.

        Args:
            members: The parameters.
            blocks: How many flags each parameter (by id) has beside the one that says whether it is finite.
        """
        self.members, self.flags = {}, {id_: 1 + count for id_, count in (blocks or {}).items()}
        for member in members:
            assert member.layout.group is not None
            self.members.setdefault(member.layout.group, []).append(member)
        for group, mine in self.members.items():
            _compare(group, mine)

    def min_over_shards(self, own: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Return, for each parameter by id, the minimum of its shards' flags, given those of this rank's shards."""
        assert self.members is not None
        agreed: dict[int, Tensor] = {}
        for group, members in self.members.items():
            has = tuple(id(member.p) in own for member in members)
            constants = self._constants.get((group, has))
            new = constants is None
            if constants is None:
                if len(self._constants) > 64:
                    self._constants.clear()
                values = [*map(int, has), *(-int(flag) for flag in has), 1]
                constants = torch.tensor(values, device=members[0].p.device)
                self._constants[group, has] = constants
            sizes = [self.flags.get(id(member.p), 1) for member in members]
            flags = [
                own[id(member.p)].to(constants.dtype) if id(member.p) in own else constants[-1:].expand(size)
                for member, size in zip(members, sizes, strict=True)
            ]
            vector = torch.cat([*flags, constants])
            dist.all_reduce(vector, dist.ReduceOp.MIN, group=process_group(group))
            *flags, least = vector.split([*sizes, len(constants)])
            if new or vector.device.type == "cpu":
                _check_gradients(members, (least != constants).tolist())
            agreed |= {id(member.p): flag.bool() for member, flag in zip(members, flags, strict=True)}
        return agreed


def _check_gradients(members: list[Member], differs: list[bool]) -> None:
    for k, member in enumerate(members):
        if differs[k] or differs[k + len(members)]:
            raise ValueError(
                f"{member.label} has a gradient on some ranks and none on others; nothing was written. Give every rank "
                "the same set of gradients (zeros where a rank did not use the parameter)"
            )


def _compare(name: str, members: list[Member]) -> None:
    """Raise ValueError on every rank, naming the first parameter that is not the same everywhere."""
    group = process_group(name)
    lists: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(lists, [(member.label, member.traits) for member in members], group=group)  # noqa: TID251
    for rank, other in enumerate(lists):
        for k in range(max(len(lists[0]), len(other))):
            first, second = (entries[k] if k < len(entries) else ("nothing", "") for entries in (lists[0], other))
            if first != second:
                raise ValueError(
                    f"sharded parameter {k} is {' '.join(first)} on rank 0 of its group and {' '.join(second)} on rank "
                    f"{rank}; give every rank the same parameters in the same order"
                )


def members(
    optimizer: Optimizer, state_keys: Callable[[Group], Sequence[str]], setting_keys: Sequence[str] = ()
) -> Iterator[Member]:
    """Yield the parameters of an optimizer that are sharded, or whose state is under the keys of their group."""
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: group[key] for key in setting_keys}
        for k, p in enumerate(group["params"]):
            layout = layout_of(p, {key: optimizer.state[p][key] for key in state_keys(group)})
            if layout is not None and layout.group is not None and p.numel():
                label = f"{type(optimizer).__name__}, {group_label(index, group)}: {name_of(group, k)}"
                yield Member(p, layout, label, f"of shape {tuple(p.shape)}, {p.dtype}, {settings}")
