"""Where the parts of a sharded parameter are, and how a stack of parameters moves between two placements.

A stack of same-shape parameters is either "cut" (every rank has its box of each) or "whole" (every rank has all of
some). Boxes say everything: rows of FSDP2, columns of tensor parallel, uneven and empty shards are all the same case.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from steadynorm.dtensor import is_dtensor, local

Shape: TypeAlias = tuple[int, ...]


class Box(NamedTuple):
    """One rank's part of a tensor; of size 0 along a dimension where it has none."""

    start: Shape
    size: Shape

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def slice(self, x: Tensor) -> Tensor:
        """Return a view of this part of each tensor of a stack x (batch, *shape), or of one (*shape)."""
        extra = x.ndim - len(self.size)
        for dim, (low, length) in enumerate(zip(self.start, self.size, strict=True)):
            x = x.narrow(dim + extra, low, length)
        return x


@dataclass(frozen=True)
class Layout:
    """How parameters of one shape are spread over the ranks of a group.

    Attributes:
        group: The process group's name, None if nothing has to move. (The group itself, kept alive, would end its
            threads too late.)
        rank: This process's rank in the group.
        boxes: The part of each rank of the group.
        whole: The whole tensor as a box.
        replicated: Whether the weights are whole on every rank, and only the state is cut.
    """

    group: str | None
    rank: int
    boxes: tuple[Box, ...]
    whole: Box
    replicated: bool

    @property
    def mine(self) -> Box:
        return self.boxes[self.rank]

    @property
    def ranks(self) -> int:
        return len(self.boxes)

    @property
    def keeps_rows_whole(self) -> bool:
        """Whether tensors are cut along the first dimension only."""
        return all(box.size[1:] == self.whole.size[1:] for box in self.boxes)

    @property
    def is_empty(self) -> bool:
        """Whether this rank writes no weights."""
        return not self.replicated and not self.mine.numel

    def window(self, dim: int) -> tuple[int, int]:
        """Return this part's first position along a dimension, and the length of the whole."""
        return self.mine.start[dim], self.whole.size[dim]

    def sum_over_shards(self, x: Tensor) -> Tensor:
        """Sum x over the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, group=process_group(self.group))
        return x

    def max_over_shards(self, x: Tensor) -> Tensor:
        """Take the largest x of the ranks, in place."""
        if self.group is not None:
            dist.all_reduce(x, dist.ReduceOp.MAX, group=process_group(self.group))
        return x


class Transfer:
    """A stack in transit: `get()` waits for it and returns it, (batch, *shape), in the order it had."""

    def __init__(
        self, layout: Layout, send: Tensor, lengths: Sequence[int], arriving: Sequence[tuple[int, Box]], to: Box
    ):
        """Start a transfer.

        Args:
            layout: Who takes part.
            send: What this rank sends, flat.
            lengths: How much of it goes to each rank.
            arriving: How many parameters arrive from each rank, and which part of `to`.
            to: What is assembled here.
        """
        self.arriving, self.to = arriving, to
        expected = [count * box.numel for count, box in arriving]
        self.send, self.received = send, send.new_empty(sum(expected))  # kept until it has arrived
        assert layout.group is not None
        group = process_group(layout.group)
        self.handle = dist.all_to_all_single(self.received, send, expected, list(lengths), group=group, async_op=True)

    def get(self, *, stacked: bool) -> Tensor:
        """Wait, then return what arrived.

        Args:
            stacked: Whether each rank sent other parameters, rather than another part of the same ones.
        """
        if self.handle is not None:
            self.handle.wait()
        self.handle = None
        if stacked:
            return self.received.view(sum(count for count, _ in self.arriving), *self.to.size)
        count = self.arriving[0][0]
        whole = self.received.new_empty(count, *self.to.size)
        parts = self.received.split([n * box.numel for n, box in self.arriving])
        for part, (_, box) in zip(parts, self.arriving, strict=True):
            box.slice(whole).copy_(part.view(count, *box.size))
        return whole


def to_owners(x: Tensor, layout: Layout, counts: Sequence[int]) -> Transfer:
    """Send parts to owners: x (batch, *my box) in the order of owners, `counts` of them per rank."""
    lengths = [count * layout.mine.numel for count in counts]
    arriving = [(counts[layout.rank], box) for box in layout.boxes]
    return Transfer(layout, x.reshape(-1), lengths, arriving, layout.whole)


def from_owners(u: Tensor, layout: Layout, counts: Sequence[int], *, whole: bool) -> Transfer:
    """Send what this rank owns, u (count, *shape), to every rank: all of it, or the rank's box."""
    targets = [layout.whole] * layout.ranks if whole else layout.boxes
    send = torch.cat([box.slice(u).reshape(-1) for box in targets])
    mine = targets[layout.rank]
    return Transfer(layout, send, [len(u) * box.numel for box in targets], [(count, mine) for count in counts], mine)


def to_all(u: Tensor, layout: Layout) -> Transfer:
    """Send this rank's parts, u (batch, *my box), to every rank, which assembles the whole."""
    send = u.reshape(-1).repeat(layout.ranks)
    arriving = [(len(u), box) for box in layout.boxes]
    return Transfer(layout, send, [u.numel()] * layout.ranks, arriving, layout.whole)


def layout_of(p: Tensor, state: dict[str, Tensor]) -> Layout | None:
    """Return the layout of a DTensor parameter, or of a plain one with DTensor state; None for a plain one."""
    cut: Any = p if is_dtensor(p) else next((value for value in state.values() if is_dtensor(value)), None)
    if cut is None:
        return None
    layout = _layout(cut.device_mesh, tuple(cut.placements), tuple(p.shape), not is_dtensor(p))
    if layout.mine.size != tuple(local(cut).shape):
        raise ValueError(
            f"placements {cut.placements} of shape {tuple(p.shape)} give this rank {tuple(local(cut).shape)}, not "
            f"the expected {layout.mine.size}; shard it with Shard(dim) over the mesh's dimensions"
        )
    return layout


@functools.lru_cache(maxsize=4096)
def _layout(mesh: Any, placements: tuple[Any, ...], shape: Shape, replicated: bool) -> Layout:
    cuts = [dim for dim, placement in enumerate(placements) if not placement.is_replicate()]
    if bad := [placements[dim] for dim in cuts if not hasattr(placements[dim], "dim")]:
        raise ValueError(f"placement {bad[0]} cannot be that of a weight; use Shard or Replicate")
    group, whole = _group(mesh, tuple(cuts)), Box((0,) * len(shape), shape)
    if group is None:
        return Layout(None, 0, (whole,), whole, replicated)
    where = {int(mesh.mesh[at]): at for at in map(tuple, (mesh.mesh >= 0).nonzero().tolist())}
    boxes = [_box(shape, mesh.mesh.shape, where[rank], placements) for rank in dist.get_process_group_ranks(group)]
    return Layout(group.group_name, dist.get_rank(group), tuple(boxes), whole, replicated)


def process_group(name: str) -> Any:
    """Return the process group of this name."""
    return dist.distributed_c10d._resolve_process_group(name)  # pyright: ignore[reportArgumentType]


def _group(mesh: Any, dims: tuple[int, ...]) -> Any:
    """Return the ranks among which this rank's tensors are cut: those along these dimensions of the mesh."""
    dims = tuple(dim for dim in dims if mesh.size(dim) > 1)
    if not dims:
        return None
    if len(dims) == 1:
        return mesh.get_group(dims[0])
    if math.prod(mesh.size(dim) for dim in dims) == dist.get_world_size():
        return dist.group.WORLD
    if mesh.mesh_dim_names is None:
        raise ValueError(f"sharded over dimensions {dims} of an unnamed mesh; give it mesh_dim_names=")
    return mesh[tuple(mesh.mesh_dim_names[dim] for dim in dims)]._flatten().get_group()


def _box(shape: Shape, mesh_shape: Sequence[int], at: Sequence[int], placements: Sequence[Any]) -> Box:
    """Apply DTensor's rule: chunks, mesh dimension by mesh dimension; strided shards (FSDP2 over tensor parallel) last.

    >>> from torch.distributed.tensor import Shard
    >>> _box((5, 3), (4,), (1,), [Shard(0)]), _box((5, 3), (4,), (3,), [Shard(0)])
    (Box(start=(2, 0), size=(2, 3)), Box(start=(5, 0), size=(0, 3)))
    """
    start, size = [0] * len(shape), list(shape)
    order = sorted(range(len(placements)), key=lambda k: "Strided" in type(placements[k]).__name__)
    for k in order:
        if placements[k].is_replicate():
            continue
        dim = placements[k].dim % len(shape)
        chunk = -(-size[dim] // mesh_shape[k])
        low = min(size[dim], chunk * at[k])
        start[dim], size[dim] = start[dim] + low, min(chunk, size[dim] - low)
    return Box(tuple(start), tuple(size))


def local_gradient(p: Tensor, layout: Layout) -> Tensor:
    """Return this rank's part of p's gradient, cut as p or its state is; raise ValueError if it is not like p."""
    grad: Any = p.grad
    if is_dtensor(p) != is_dtensor(grad):
        raise ValueError(f"is a {type(p).__name__}, but its gradient is a {type(grad).__name__}; give it one like it")
    if not is_dtensor(p):
        return layout.mine.slice(grad)
    wanted: Any = p
    if grad.placements != wanted.placements:
        grad = grad.redistribute(placements=wanted.placements)
    return local(grad)
