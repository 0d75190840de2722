"""A step over many processes: element-wise parts on shards, whole matrices on the rank that owns them.

    gradient shard -> momentum shard -> x  ==>  whole matrices, spread over ranks by cost -> u  ==>  weights

The first arrow between ranks takes "cut" to "whole", the second takes u to what each rank writes: its shard (FSDP2,
tensor parallel) or everything (DDP with mesh=). While one piece is on its way the next are computed. Where the lmo rounds
to bf16 anyway, x and u travel in it: half the bytes, the same result.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadynorm.optim import buckets as single
from steadynorm.optim import idle
from steadynorm.optim.buckets import Batch, Bucket, Parts, Work
from steadynorm.optim.sharding.layout import Box, Layout, Moving, from_owners, is_dtensor, local, to_all, to_owners

IN_FLIGHT = 3  # pieces under way at each of the two arrows


# --- what is done where


def needs_exchange(bucket: Bucket, parts: Parts | None, elementwise: bool) -> bool:
    """Whether a bucket's step moves data; if not, each rank runs the Rule on its shards (and may sum over them)."""
    layout = bucket.layout
    if layout is None or layout.group is None or parts is None:
        return False
    return layout.replicated or not _separable(bucket, elementwise)


def _separable(bucket: Bucket, elementwise: bool) -> bool:
    """A shard of the update is the update of the shard."""
    return elementwise or (bucket.by_rows and bucket.layout is not None and bucket.layout.keeps_rows_whole)


def planned(found: list[Bucket], parts: Parts | None, elementwise: bool) -> list[Bucket]:
    """The buckets with their plan: who owns which matrix, by greedy balance of cost over all buckets of a group.

    Parameters are put in the order of their owners within each piece, the same on every rank.
    """
    loads: dict[Any, list[float]] = {}
    made: dict[int, Bucket] = {}
    costs = {
        k: parts.cost(bucket.shape, bucket.settings)
        for k, bucket in enumerate(found)
        if parts is not None and needs_exchange(bucket, parts, elementwise)
    }
    for k in sorted(costs, key=lambda k: -costs[k]):
        bucket, layout = found[k], found[k].layout
        assert layout is not None
        owned = not _separable(bucket, elementwise)
        load = loads.setdefault(layout.group, [0.0] * layout.ranks)
        params, plan = [], []
        for which in _pieces(bucket, layout):
            owners = []
            for p in bucket.params[which]:
                owner = load.index(min(load)) if owned else 0
                load[owner] += costs[k] if owned else 0.0
                owners.append((owner, len(owners), p))
            params += [p for _, _, p in sorted(owners, key=lambda entry: entry[:2])]
            counts = [sum(owner == rank for owner, _, _ in owners) for rank in range(layout.ranks)]
            plan.append((which, tuple(counts) if owned else ()))
        made[k] = dataclasses.replace(bucket, params=params, plan=tuple(plan))
    return [made.get(k, bucket) for k, bucket in enumerate(found)]


def _pieces(bucket: Bucket, layout: Layout) -> list[slice]:
    """So many parameters at a time that each rank gets a single-process piece."""
    whole = dataclasses.replace(bucket, by_rows=False)
    together = next(iter(single.pieces(whole, len(bucket.params))))[0].stop * layout.ranks
    return [slice(low, min(low + together, len(bucket.params))) for low in range(0, len(bucket.params), together)]


def localised(work: Work) -> Work:
    """The same work on this rank's parts: plain tensors throughout."""
    layout = work.bucket.layout
    if layout is None:
        return work
    params = [local(p) for p in work.bucket.params]
    shape, by_rows = work.bucket.shape, False  # pieces that sum over shards must be the same on all ranks
    if not work.bucket.plan and work.bucket.by_rows:
        shape, by_rows = layout.mine.size, bool(layout.mine.size)
    bucket = dataclasses.replace(
        work.bucket, params=params, shape=shape, by_rows=by_rows, layout=layout if layout.group is not None else None
    )
    state = {key: [local(value) for value in values] for key, values in work.state.items()}
    return dataclasses.replace(work, bucket=bucket, state=state)


def local_gradient(p: Tensor, layout: Layout) -> Tensor:
    """This rank's part of p's gradient, cut as p or its state is. ValueError where the gradient is not like p."""
    grad: Any = p.grad
    if is_dtensor(p) != is_dtensor(grad):
        raise ValueError(f"is a {type(p).__name__}, but its gradient is a {type(grad).__name__}; give it one like it")
    if not is_dtensor(p):
        return layout.mine.of(grad)
    wanted: Any = p
    if grad.placements != wanted.placements:
        grad = grad.redistribute(placements=wanted.placements)
    return local(grad)


def shard_flags(grads: Sequence[Tensor], bucket: Bucket) -> list[Tensor]:
    """(1 + blocks,) for each gradient shard: it is finite; each block is zero in it. The least over ranks is agreed on."""
    blocks, (first, *_) = bucket.slices.blocks, grads
    if not first.numel():
        return [torch.ones(1 + blocks, dtype=torch.bool, device=first.device)] * len(grads)
    layout = bucket.layout
    assert layout is not None
    flags = []
    for which, _ in single.pieces(dataclasses.replace(bucket, shape=tuple(first.shape), by_rows=False), len(grads)):
        stacked = single.stack(grads[which])
        if blocks == 1:
            ends = idle.extremes(stacked, idle.WHOLE)
            nonzero = ends.nonzero()
        else:  # a shard has positions of some blocks
            dim = bucket.slices.dim % first.ndim
            count, start, length = first.shape[dim], layout.mine.start[dim], layout.whole.size[dim]
            ends = idle.extremes(stacked, idle.Slices(blocks=count, dim=dim))
            owner = idle.block_of(count, bucket.slices, start, length, first.device)
            nonzero = torch.zeros(len(stacked), blocks, device=first.device)
            nonzero = nonzero.index_add_(1, owner, ends.nonzero().float()) > 0
        flags += torch.cat([ends.finite().unsqueeze(1), ~nonzero], 1).unbind(0)
    return flags


def with_flags(work: Work, flags: Tensor) -> Work:
    """The work with what ranks agreed on: flags as shard_flags has them, (parameters, 1 + blocks)."""
    return dataclasses.replace(work, finite=flags[:, 0], nonzero=~flags[:, 1:])


# --- the step


class _Stage(NamedTuple):
    """A piece of a bucket on its way."""

    work: Work
    which: slice
    counts: tuple[int, ...]
    live: Tensor  # of what this rank writes
    fade: Tensor | None  # likewise
    unit: float | None  # of u, which travels as bf16 multiples of it; None: as it is
    moving: Moving


@torch._disable_dynamo
@torch.no_grad()
def run_exchanging(works: Sequence[Work], parts: Parts) -> None:
    """Carry out the step of buckets whose data moves. Every rank starts the same collectives in the same order."""
    to_whole: deque[_Stage] = deque()
    to_shards: deque[_Stage] = deque()
    to_writers: deque[_Stage] = deque()
    todo = deque((work, which, counts) for work in works for which, counts in work.bucket.plan)
    while todo or to_whole or to_shards or to_writers:
        if todo and len(to_whole) < IN_FLIGHT:
            stage = _direct(*todo.popleft(), parts)
            (to_whole if stage.counts else to_writers).append(stage)
        elif to_whole:
            stage = _update(to_whole.popleft(), parts)
            (to_shards if takes_two_hops(stage.work.bucket.layout, stage.counts) else to_writers).append(stage)
        elif to_shards:
            to_writers.append(_gather(to_shards.popleft()))
        if len(to_writers) > IN_FLIGHT or not (todo or to_whole or to_shards):
            _write(to_writers.popleft())


def _direct(work: Work, which: slice, counts: tuple[int, ...], parts: Parts) -> _Stage:
    """Momentum and x on shards; x leaves for the owners, or where it needs none, u for everyone."""
    layout, finite, grads = work.bucket.layout, work.finite, work.grads[which]
    assert layout is not None and finite is not None
    exact = torch.float64 if grads[0].dtype == torch.float64 else torch.float32
    unit = parts.bf16_unit(work.bucket.shape, work.bucket.settings, exact, grads[0].device)
    live, written = _live(work, which, exact)
    lists = {key: tensors[which] for key, tensors in work.state.items()}
    travels = torch.bfloat16 if counts and unit is not None else exact
    x = torch.empty(len(grads), *grads[0].shape, dtype=travels, device=grads[0].device)  # (batch, *my box)
    for some in _subsets(grads):
        grad = single.stack(grads[some])
        state = {key: single.stack(tensors[some]) for key, tensors in lists.items()}
        scratch = torch.empty(grad.shape, dtype=exact, device=grad.device)
        batch = Batch(scratch, grad, state, live[some], work.maximize, scratch)
        x[some].copy_(parts.direction(batch, work.scalars, work.bucket.settings))
        for key, tensors in lists.items():
            single.write_back(tensors[some], state[key])
    fade = None
    if work.left is not None and work.nonzero is not None and not work.bucket.slices.waiting_ndim:
        factors = single.faded(work.left[which], work.nonzero[which], finite[which], work.scalars["keep"]).to(exact)
        box, dim = (layout.whole if layout.replicated else layout.mine), work.bucket.slices.dim
        where = (box.start[dim], layout.whole.size[dim]) if work.bucket.slices.blocks > 1 else (0, None)
        fade = idle.spread(factors, box.size, work.bucket.slices, *where)
    if counts:
        return _Stage(work, which, counts, written, fade, unit, to_owners(x, layout, counts))
    u = parts.update(x, work.bucket.settings, x) if x.numel() else x
    return _Stage(work, which, counts, written, fade, unit, to_all(_packed(u, unit), layout))


def _live(work: Work, which: slice, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Batch.live of this rank's part of state, and of the weights that it writes. Slices that wait may be on many ranks."""
    layout, slices, grads = work.bucket.layout, work.bucket.slices, work.grads[which]
    assert layout is not None and work.finite is not None
    live = work.finite[which].to(exact).view(-1, *[1] * grads[0].ndim)
    if not slices.waiting_ndim:
        return live, live
    leading = len(layout.whole.size) - slices.waiting_ndim
    nonzero = torch.zeros(len(grads), *layout.whole.size[:leading], dtype=exact, device=grads[0].device)
    my_slices = Box(layout.mine.start[:leading], layout.mine.size[:leading]).of(nonzero)  # a view
    if grads[0].numel():
        my_slices.copy_(idle.extremes(single.stack(grads), slices).nonzero().view(my_slices.shape))
    layout.largest(nonzero)
    mine, whole = (live * each.reshape(*each.shape, *[1] * slices.waiting_ndim) for each in (my_slices, nonzero))
    return mine, whole if layout.replicated else mine


def _subsets(tensors: Sequence[Tensor]) -> list[slice]:
    """What is handled as one stack. On a CPU a copy of all to one place costs more than a call for each."""
    together = 1 if tensors[0].device.type == "cpu" else len(tensors)
    return [slice(low, low + together) for low in range(0, len(tensors), together)]


def _update(stage: _Stage, parts: Parts) -> _Stage:
    """The lmo of the matrices this rank owns; the updates leave for those that write them."""
    work, layout = stage.work, stage.work.bucket.layout
    assert layout is not None
    x = stage.moving.get(stacked=False).to(stage.live.dtype)  # (mine, *shape)
    u = parts.update(x, work.bucket.settings, x) if len(x) else x
    whole = layout.replicated and not takes_two_hops(layout, stage.counts)
    return stage._replace(moving=from_owners(_packed(u, stage.unit), layout, stage.counts, whole=whole))


def takes_two_hops(layout: Layout | None, counts: Sequence[int]) -> bool:
    """Whether updates that everyone needs go to shards first: with few owners each would send its own to all others."""
    assert layout is not None
    return layout.replicated and max(counts) * layout.ranks > 2 * sum(counts)


def _gather(stage: _Stage) -> _Stage:
    """From shards to everyone: all send as much."""
    layout = stage.work.bucket.layout
    assert layout is not None
    return stage._replace(counts=(), moving=to_all(stage.moving.get(stacked=True), layout))


def _packed(u: Tensor, unit: float | None) -> Tensor:
    return u if unit is None else (u / unit).to(torch.bfloat16)


def _write(stage: _Stage) -> None:
    """Decay and step of the weights this rank has."""
    work, which, live, fade = stage.work, stage.which, stage.live, stage.fade
    u = stage.moving.get(stacked=bool(stage.counts))  # (batch, *what this rank writes)
    if stage.unit is not None:
        u = u.to(live.dtype).mul_(stage.unit)
    params = work.bucket.params[which]
    products = None if work.products is None else work.products[:, which].zero_()
    for some in _subsets(params):
        theta = single.stack(params[some]).to(u.dtype)
        seen = None if products is None else products[:, some]
        batch = Batch(theta, u[some], {}, live[some], work.maximize, u[some], seen)
        batch._replace(fade=None if fade is None else fade[some]).descend(u[some], work.scalars)
        single.write_back(params[some], theta)
    if products is not None and work.finite is not None:
        products.masked_fill_(~work.finite[which], torch.nan)
