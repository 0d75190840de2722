"""What ranks must agree on before a step: which parameters have a gradient, whether it is finite, and where it is zero."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from steadynorm.optim.sharding.layout import Layout, process_group


class Member(NamedTuple):
    """A sharded parameter, and how errors and other ranks know it."""

    p: Tensor
    layout: Layout
    label: str
    traits: str  # what must be the same on every rank


class Agreement:
    """One small all-reduce a step and process group; its length does not depend on which gradients exist.

    So a gradient that is missing on one rank is found there, on all ranks, instead of hanging a later collective. On
    an accelerator, where looking at the result would wait for the device, a rank looks at its first step and
    whenever its own set of gradients has changed.
    """

    def __init__(self) -> None:
        self.members: dict[str, list[Member]] | None = None  # by process group's name
        self.flags: Mapping[int, int] = {}  # how many a parameter has
        self._constants: dict[tuple[Any, ...], Tensor] = {}

    def set_members(self, members: Sequence[Member], blocks: Mapping[int, int] | None = None) -> None:
        """All sharded parameters of the optimizer, in its order. Ranks compare theirs: collective.

        blocks: how many flags each parameter (by id) has beside the one that says whether it is finite; default 0.
        """
        self.members, self.flags = {}, {id_: 1 + count for id_, count in (blocks or {}).items()}
        for member in members:
            assert member.layout.group is not None
            self.members.setdefault(member.layout.group, []).append(member)
        for group, mine in self.members.items():
            _compare(group, mine)

    def least(self, found: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """id of a parameter with a gradient -> flags of its shard; returned: the least of all its shards' flags."""
        assert self.members is not None
        agreed: dict[int, Tensor] = {}
        for group, members in self.members.items():
            has = tuple(id(member.p) in found for member in members)
            constants = self._constants.get((group, has))
            new = constants is None
            if constants is None:
                if len(self._constants) > 64:
                    self._constants.clear()
                values = [*map(int, has), *(-int(each) for each in has), 1]
                constants = torch.tensor(values, device=members[0].p.device)
                self._constants[group, has] = constants
            sizes = [self.flags.get(id(member.p), 1) for member in members]
            flags = [
                found[id(member.p)].to(constants.dtype) if id(member.p) in found else constants[-1:].expand(size)
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
    """ValueError on every rank, naming the first parameter that is not the same everywhere."""
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
