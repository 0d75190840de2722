"""A step over many processes: element-wise parts on shards, whole matrices on the rank that owns them.

    gradient shard -> momentum shard -> x  ==>  whole matrices, spread over ranks by cost -> u  ==>  weights

The first arrow between ranks takes "cut" to "whole", the second takes u to what each rank writes: its shard (FSDP2,
tensor parallel) or everything (DDP with mesh=). While one piece is on its way the next are computed.
"""

import dataclasses
from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from steadynorm.optim import buckets as single
from steadynorm.optim.buckets import Batch, Bucket, Parts, Work
from steadynorm.optim.layout import Layout, Moving, from_owners, is_dtensor, local, to_all, to_owners

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


def finite_shards(grads: Sequence[Tensor], bucket: Bucket) -> list[Tensor]:
    """Whether each gradient shard is finite: 0-d bool tensors. An empty one is."""
    if not grads[0].numel():
        return [torch.ones((), dtype=torch.bool, device=grads[0].device)] * len(grads)
    found = single.pieces(dataclasses.replace(bucket, shape=tuple(grads[0].shape), by_rows=False), len(grads))
    return [flag for which, _ in found for flag in single.finite_stacks([single.stack(grads[which])]).unbind(0)]


# --- the step


class _Stage(NamedTuple):
    """A piece of a bucket on its way."""

    work: Work
    which: slice
    counts: tuple[int, ...]
    live: Tensor
    moving: Moving


@torch.compiler.disable
@torch.no_grad()
def run_exchanging(works: Sequence[Work], parts: Parts) -> None:
    """Carry out the step of buckets whose data moves. Every rank starts the same collectives in the same order."""
    to_whole: deque[_Stage] = deque()
    to_writers: deque[_Stage] = deque()
    todo = deque((work, which, counts) for work in works for which, counts in work.bucket.plan)
    while todo or to_whole or to_writers:
        if todo and len(to_whole) < IN_FLIGHT:
            stage = _direct(*todo.popleft(), parts)
            (to_whole if stage.counts else to_writers).append(stage)
        elif to_whole:
            to_writers.append(_update(to_whole.popleft(), parts))
        if len(to_writers) > IN_FLIGHT or not (todo or to_whole):
            _write(to_writers.popleft())


def _direct(work: Work, which: slice, counts: tuple[int, ...], parts: Parts) -> _Stage:
    """Momentum and x on shards; x leaves for the owners, or where it needs none, u for everyone."""
    layout, finite = work.bucket.layout, work.finite
    assert layout is not None and finite is not None
    grad = single.stack(work.grads[which])  # (batch, *my box)
    exact = torch.float64 if grad.dtype == torch.float64 else torch.float32
    live = finite[which].to(exact).view(-1, *[1] * (grad.ndim - 1))
    lists = {key: tensors[which] for key, tensors in work.state.items()}
    state = {key: single.stack(tensors).to(exact) for key, tensors in lists.items()}
    scratch = torch.empty(grad.shape, dtype=exact, device=grad.device)  # its own: it stays while x is on its way
    x = parts.direction(Batch(scratch, grad, state, live, work.maximize, scratch), work.scalars, work.bucket.settings)
    for key, tensors in lists.items():
        single.write_back(tensors, state[key])
    if counts:
        return _Stage(work, which, counts, live, to_owners(x, layout, counts))
    u = parts.update(x, work.bucket.settings, scratch) if x.numel() else x
    return _Stage(work, which, counts, live, to_all(u, layout))


def _update(stage: _Stage, parts: Parts) -> _Stage:
    """The lmo of the matrices this rank owns; the updates leave for those that write them."""
    work, layout = stage.work, stage.work.bucket.layout
    assert layout is not None
    x = stage.moving.get(stacked=False)  # (mine, *shape)
    u = parts.update(x, work.bucket.settings, None) if len(x) else x
    return stage._replace(moving=from_owners(u, layout, stage.counts))


def _write(stage: _Stage) -> None:
    """Decay and step of the weights this rank has."""
    work, which, live = stage.work, stage.which, stage.live
    u = stage.moving.get(stacked=bool(stage.counts))  # (batch, *what this rank writes)
    params = work.bucket.params[which]
    theta = single.stack(params).to(u.dtype)
    products = None if work.products is None else work.products[:, which].zero_()
    Batch(theta, u, {}, live, work.maximize, u, products).descend(u, work.scalars)
    single.write_back(params, theta)
    if products is not None:
        products.masked_fill_(live.view(-1) == 0, torch.nan)
