"""A step over many processes: element-wise parts on shards, whole matrices on the rank that owns them.

    gradient shard -> momentum shard -> x  ==>  whole matrices, spread over ranks by cost -> u  ==>  weights

The first transfer turns shards into whole matrices on their owners, the second takes u to what each rank writes: its
shard (FSDP2, tensor parallel) or everything (DDP with mesh=). While one chunk is in transit the next are computed.
Transfers use bf16 where that is lossless, because the lmo rounds to it anyway.
"""

import dataclasses
import math
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm import machine
from steadynorm.dtensor import local
from steadynorm.optim import buckets, idle
from steadynorm.optim.batch import Batch, Encoding, SplitRule, stack, write_back
from steadynorm.optim.buckets import Bucket, BucketStep
from steadynorm.optim.placement import Placement
from steadynorm.optim.sharding.consensus import Consensus, members
from steadynorm.optim.sharding.layout import Box, Layout, from_owners, layout_of, local_gradient, to_all, to_owners
from steadynorm.optim.sharding.ownership import ShardedBucket, layout_in, plan_exchange

IN_FLIGHT = 4  # chunks under way at the same time


class Sharded(Placement):
    """Parameters or state are DTensors: ranks agree before a step, and exchange what has to be whole."""

    is_collective = True

    def __init__(self) -> None:
        self._consensus = Consensus()

    def shard_of(self, p: Tensor, state: Mapping[str, Tensor]) -> Layout | None:
        return layout_of(p, dict(state))

    def plan(self, buckets: list[Bucket]) -> list[Bucket]:
        return plan_exchange(buckets)

    def gradients(self, bucket: Bucket) -> list[Tensor]:
        if bucket.shard is None:
            return super().gradients(bucket)
        return [local_gradient(p, layout_in(bucket)) for p in bucket.params]

    def agree(self, optimizer: Any, steps: list[BucketStep]) -> list[BucketStep]:
        """Agree with all ranks on which parameters to skip; raise on all of them if they do not have the same ones."""
        if self._consensus.members is None:
            groups = optimizer.param_groups
            blocks = {id(p): optimizer.slices(group, p).blocks for group in groups for p in group["params"]}
            sharded = members(
                optimizer, lambda group: optimizer.arithmetic_of(group).state_keys, optimizer.setting_keys
            )
            self._consensus.set_members(list(sharded), blocks)
        if not self._consensus.members:
            return steps
        flags: dict[int, Tensor] = {}
        for step in steps:
            if step.bucket.shard is not None and layout_in(step.bucket).group is not None:
                flags_here = shard_flags(step.grads, step.bucket)
                flags |= {id(p): flag for p, flag in zip(step.bucket.params, flags_here, strict=True)}
        agreed = self._consensus.min_over_shards(flags)
        return [self._with_flags(step, agreed) for step in steps]

    @staticmethod
    def _with_flags(step: BucketStep, agreed: Mapping[int, Tensor]) -> BucketStep:
        """Return the step with the flags that ranks agreed on, as `shard_flags` has them."""
        if not (rows := [agreed[id(p)] for p in step.bucket.params if id(p) in agreed]):
            return step
        flags = torch.stack(rows)  # (parameters, 1 + blocks)
        return dataclasses.replace(step, finite=flags[:, 0], nonzero=~flags[:, 1:])

    def localize(self, steps: list[BucketStep]) -> list[BucketStep]:
        for step in steps:
            if step.finite is not None:
                buckets.count_skips(step.skipped, step.finite)
        return [_localize(step) for step in steps]

    def run(self, steps: Sequence[BucketStep]) -> None:
        exchanged = [step for step in steps if isinstance(step.bucket, ShardedBucket)]
        # Of row-separable buckets a rank may have no row; all others take part in sums over shards.
        local_steps = [step for step in steps if not isinstance(step.bucket, ShardedBucket)]
        has_part = [bool(math.prod(step.bucket.shape)) or not step.bucket.row_separable for step in local_steps]
        buckets.run([step for step, runs in zip(local_steps, has_part, strict=True) if runs])
        for step, runs in zip(local_steps, has_part, strict=True):
            if not runs:
                _count_without_part(step)
        if exchanged:
            run_interleaved(
                exchange_chunk(step, which, owned, step.bucket.arithmetic.split_rule)
                for step in exchanged
                for which, owned in step.bucket.plan  # pyright: ignore[reportAttributeAccessIssue]
                if step.bucket.arithmetic.split_rule is not None
            )

    def agree_on_finite(self, optimizer: Optimizer, flags: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        if self._consensus.members is None:
            self._consensus.set_members(list(members(optimizer, lambda group: ())))
        return {**flags, **self._consensus.min_over_shards(flags)}


# --- this rank's part


def _localize(step: BucketStep) -> BucketStep:
    """Return the same step on this rank's parts: plain tensors throughout."""
    if step.bucket.shard is None:
        return step
    layout = layout_in(step.bucket)
    shape, row_separable = step.bucket.shape, False  # chunks that sum over shards must be the same on all ranks
    if not isinstance(step.bucket, ShardedBucket) and step.bucket.row_separable and not step.bucket.is_held:
        shape, row_separable = layout.mine.size, bool(layout.mine.size)
    bucket = dataclasses.replace(
        step.bucket,
        params=[local(p) for p in step.bucket.params],
        shape=shape,
        row_separable=row_separable,
        shard=layout if layout.group is not None else None,
    )
    state = {key: [local(value) for value in values] for key, values in step.state.items()}
    return dataclasses.replace(step, bucket=bucket, state=state)


def _count_without_part(step: BucketStep) -> None:
    """Count a step for parameters of which this rank has no row, because a checkpoint may take the counters from any rank."""
    if step.finite is None or step.nonzero is None:
        return
    if step.counts is not None:
        buckets.count_updates(step.counts, step.finite)
    if step.momentum_left is not None and not step.bucket.slices.waiting_ndim:
        buckets.update_momentum_left(step.momentum_left, step.nonzero, step.finite, step.scalars["momentum_keep"])


def shard_flags(grads: Sequence[Tensor], bucket: Bucket) -> list[Tensor]:
    """Return (1 + blocks,) per gradient shard: it is finite; each block is zero in it. Ranks agree on the minimum."""
    blocks, (first, *_) = bucket.slices.blocks, grads
    if not first.numel():
        return [torch.ones(1 + blocks, dtype=torch.bool, device=first.device)] * len(grads)
    layout, flags = layout_in(bucket), []
    for which, _ in buckets.split(
        dataclasses.replace(bucket, shape=tuple(first.shape), row_separable=False), len(grads)
    ):
        stacked = stack(grads[which])
        if blocks == 1:
            largest = idle.magnitudes(stacked, idle.WHOLE)
            nonzero = largest != 0
        else:  # a shard has positions of some blocks
            dim = bucket.slices.dim % first.ndim
            largest = idle.magnitudes(stacked, idle.Slices(blocks=first.shape[dim], dim=dim))
            owner = idle.block_of(first.shape[dim], bucket.slices, *layout.window(dim), first.device)
            nonzero = torch.zeros(len(stacked), blocks, device=first.device)
            nonzero = nonzero.index_add_(1, owner, (largest != 0).float()) > 0
        flags += torch.cat([idle.is_finite(largest).unsqueeze(1), ~nonzero], 1).unbind(0)
    return flags


# --- the step of one chunk


@torch._disable_dynamo
@torch.no_grad()
def run_interleaved(tasks: Iterable[Iterator[None]]) -> None:
    """Run generators that yield where they wait, IN_FLIGHT at a time, in the same order on every rank."""
    queue: deque[Iterator[None]] = deque()
    source = iter(tasks)
    while True:
        task = next(source, None) if len(queue) < IN_FLIGHT else None
        if task is None and not queue:
            return
        task = task or queue.popleft()
        if next(task, _FINISHED) is not _FINISHED:
            queue.append(task)


_FINISHED: Any = object()


def exchange_chunk(step: BucketStep, which: slice, counts: tuple[int, ...], rule: SplitRule) -> Iterator[None]:
    """Take one chunk through a step; each `yield` gives others a turn while a transfer is under way.

    Args:
        step: The step of the chunk's bucket.
        which: The chunk's parameters, in the order of their owners.
        counts: How many of them each rank owns; empty if a shard of the update is the update of the shard.
        rule: The optimizer's arithmetic in parts.
    """
    settings, layout, grads = step.bucket.settings, layout_in(step.bucket), step.grads[which]
    exact = machine.exact_dtype(grads[0])
    encoding = rule.encode(step.bucket.shape, settings, exact, grads[0].device)
    active, active_weights = _active(step, which, exact)
    x = _accumulate(step, which, rule, active, encoding.x_dtype if counts else exact)
    fade = _fade(step, which, exact)

    if not counts:  # every rank normalizes its own part, and sends it to everyone
        u = _normalize(rule, x, settings) if x.numel() else x
        transfer, is_stacked = to_all(_pack(u, encoding), layout), False
        yield
    else:  # whole matrices go to their owners, which normalize them
        transfer = to_owners(x, layout, counts)
        yield
        x = transfer.get(stacked=False).to(exact)  # (owned, *shape)
        u = _pack(_normalize(rule, x, settings) if len(x) else x, encoding)
        two_hops = takes_two_hops(layout, counts)
        transfer = from_owners(u, layout, counts, whole=layout.replicated and not two_hops)
        is_stacked = not two_hops
        yield
        if two_hops:  # from shards to everyone: all ranks send the same amount
            transfer = to_all(transfer.get(stacked=True), layout)
            yield

    u = transfer.get(stacked=is_stacked).to(exact)  # (batch, *what this rank writes)
    _write(step, which, u if encoding.scale == 1 else u.mul_(encoding.scale), active_weights, fade)


def takes_two_hops(layout: Layout, counts: Sequence[int]) -> bool:
    """Return whether updates that everyone needs go to shards first: few owners would each send theirs to all others."""
    return layout.replicated and max(counts) * layout.ranks > 2 * sum(counts)


def _accumulate(step: BucketStep, which: slice, rule: SplitRule, active: Tensor, dtype: torch.dtype) -> Tensor:
    """Update the momentum shards; return x, (batch, *my box), in the dtype in which it is transferred."""
    grads, lists = step.grads[which], {key: tensors[which] for key, tensors in step.state.items()}
    updates = None
    if step.counts is not None and step.finite is not None:
        updates = buckets.count_updates(step.counts[which], step.finite[which])
    x = torch.empty(len(grads), *grads[0].shape, dtype=dtype, device=grads[0].device)
    for some in _subsets(grads):
        state = {key: stack(tensors[some]) for key, tensors in lists.items()}
        count = None if updates is None else updates[some]
        grad = buckets.gather(grads[some], active.dtype)
        batch = Batch(
            params=(),
            gradient=[grad],
            owns_gradient=len(grads[some]) > 1,
            state=state,
            active=active[some],
            maximize=step.maximize,
            counts=count,
        )
        x[some].copy_(rule.accumulate(batch, step.scalars, step.bucket.settings))
        for key, tensors in lists.items():
            write_back(tensors[some], state[key])
    return x


def _active(step: BucketStep, which: slice, exact: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return `Batch.active` of this rank's state, and of the weights that it writes. Waiting slices may span ranks."""
    layout, slices, grads = layout_in(step.bucket), step.bucket.slices, step.grads[which]
    assert step.finite is not None
    finite = step.finite[which].to(exact).view(-1, *[1] * grads[0].ndim)
    if not slices.waiting_ndim:
        return finite, finite
    leading = len(layout.whole.size) - slices.waiting_ndim
    nonzero = torch.zeros(len(grads), *layout.whole.size[:leading], dtype=exact, device=grads[0].device)
    my_slices = Box(layout.mine.start[:leading], layout.mine.size[:leading]).slice(nonzero)  # a view
    if grads[0].numel():
        my_slices.copy_((idle.magnitudes(stack(grads), slices) != 0).view(my_slices.shape))
    layout.max_over_shards(nonzero)
    mine, whole = (finite * mask.reshape(*mask.shape, *[1] * slices.waiting_ndim) for mask in (my_slices, nonzero))
    return mine, whole if layout.replicated else mine


def _fade(step: BucketStep, which: slice, exact: torch.dtype) -> Tensor | None:
    """Return the factor of the update, for the weights that this rank writes."""
    slices, layout = step.bucket.slices, layout_in(step.bucket)
    if step.momentum_left is None or step.nonzero is None or step.finite is None or slices.waiting_ndim:
        return None
    left, momentum_keep = step.momentum_left[which], step.scalars["momentum_keep"]
    factors = buckets.update_momentum_left(left, step.nonzero[which], step.finite[which], momentum_keep).to(exact)
    if layout.replicated:
        return idle.spread(factors, layout.whole.size, slices)
    return buckets.spread_fade(factors, step.bucket, layout.mine.size)


def _normalize(rule: SplitRule, x: Tensor, settings: Any) -> Tensor:
    """Return the update: in place of x, or on an accelerator in the dtype in which it was found."""
    return rule.normalize(x, settings, None if machine.is_accelerator(x.device) else x)


def _pack(u: Tensor, encoding: Encoding) -> Tensor:
    return (u if encoding.scale == 1 else u / encoding.scale).to(encoding.u_dtype)


def _write(step: BucketStep, which: slice, u: Tensor, active: Tensor, fade: Tensor | None) -> None:
    """Decay and step the weights that this rank has."""
    params, layout, descent = step.bucket.params[which], layout_in(step.bucket), step.descent.part(which)
    if descent.products is not None:
        descent.products.zero_()
    for some in _subsets(params):
        batch = Batch(
            params=params[some],
            gradient=[],
            owns_gradient=False,
            state={},
            active=active[some],
            fade=None if fade is None else fade[some],
            shard=None if layout.replicated else layout,
            descent=descent.part(some),
        )
        batch.descend(u[some], step.scalars)
    if descent.products is not None and step.finite is not None:
        descent.products.masked_fill_(~step.finite[which], torch.nan)


def _subsets(tensors: Sequence[Tensor]) -> list[slice]:
    """Return what is handled as one stack: on a CPU, gathering tensors costs more than one call per tensor."""
    together = 1 if tensors[0].device.type == "cpu" else len(tensors)
    return [slice(low, low + together) for low in range(0, len(tensors), together)]
