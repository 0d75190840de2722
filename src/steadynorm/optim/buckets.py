"""Same-shape parameters of a group, stacked and updated as one batch, in chunks of bounded size.

`run` does for every optimizer what its Rule (see `batch`) does not: it stacks, spots non-finite gradients and writes
back. Nothing in it waits for the device. On an accelerator a chunk is a whole bucket, if its temporaries fit the budget. On a
CPU chunks are small enough to stay in a core's cache, and each core takes its own.
"""

import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm import machine, threads
from steadynorm.optim import idle
from steadynorm.optim.arithmetic import Arithmetic
from steadynorm.optim.batch import Batch, Descent, Scalars, Shard, cut, stack, stack_finite, write_back
from steadynorm.optim.companions import find_companions
from steadynorm.optim.idle import WHOLE, Slices
from steadynorm.optim.validation import NonFiniteGradientError

_PLAIN = (Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one group with one shape, dtype and device: one batch.

    Attributes:
        group: The index of their group.
        shape: The shape that they share.
        arithmetic: What their step is made of.
        row_separable: Whether slices along the first dimension do not see each other, so that a large parameter may be
            cut, unless blocks of it fade, which may lie along that dimension.
        settings: What their Rule needs beside scalars.
        params: The parameters.
        slices: Which of their slices wait or fade while their gradient is zero.
        shard: How they are sharded; None for plain tensors, of which every process has its own.
        is_held: Whether a step needs sums over whole parameters, so that none may be cut.
        state_keys: The state keys that a step reads and writes; it touches no others.
        chunk_elements: How many elements fit into a chunk on an accelerator.
        live: A captured step's scalars, on the device, which keep their place; empty otherwise.
    """

    group: int
    shape: tuple[int, ...]
    arithmetic: Arithmetic
    row_separable: bool
    settings: Any
    params: list[Tensor]
    slices: Slices = WHOLE
    shard: Shard | None = None
    is_held: bool = False
    state_keys: tuple[str, ...] = ()
    chunk_elements: int = 1 << 24
    live: Scalars = field(default_factory=dict, compare=False)

    def fill(self, numbers: Mapping[str, float]) -> Scalars:
        """Write a step's numbers to the live scalars, without waiting for the device, and return them."""
        device = self.params[0].device
        for key, value in numbers.items():
            if key not in self.live:
                self.live[key] = torch.empty((), dtype=machine.widest_dtype(device), device=device)
            self.live[key].fill_(value)
        return self.live


@dataclass(frozen=True)
class BucketStep:
    """One bucket's share of one step: all that the device part touches.

    Attributes:
        descent: What else happens to the weights; products are NaN for a parameter that is skipped.
        momentum_left: What is left of each parameter's momentum, (blocks,), where updates fade (see `idle`).
        finite: (parameters,) bool: where ranks have agreed which gradients are finite, and counted what is skipped.
        nonzero: (parameters, blocks) bool: where ranks have agreed which blocks have a gradient.
        counts: How many updates each parameter has had, 0-d each, where the Rule needs to know.
    """

    bucket: Bucket
    grads: list[Tensor]
    state: dict[str, list[Tensor]]
    skipped: list[Tensor]
    scalars: Scalars
    maximize: bool
    descent: Descent
    momentum_left: list[Tensor] | None = None
    finite: Tensor | None = None
    nonzero: Tensor | None = None
    counts: list[Tensor] | None = None


class Chunk(NamedTuple):
    """Some parameters of a bucket, or one large one cut by rows; None among the cuts is all of it."""

    step: BucketStep
    which: slice
    cuts: list[slice | None]


def run(steps: Sequence[BucketStep]) -> None:
    """Run the step of every bucket, chunk by chunk."""
    chunks = [Chunk(step, which, cuts) for step in steps for which, cuts in split(step.bucket, len(step.grads))]
    scratch = Scratch()
    if any(machine.is_accelerator(chunk.step.bucket.params[0].device) for chunk in chunks):
        for together in find_companions(chunks):
            if len(together) == 1:
                _run_chunk(together[0], scratch)
            else:
                _run_together(together, scratch)
    elif torch.get_num_threads() > 1 and len(chunks) > 1 and _are_plain(steps):
        # One core per chunk, the largest first, so that all cores end together.
        chunks.sort(key=lambda chunk: math.prod(chunk.step.bucket.shape), reverse=True)
        threads.for_each(lambda chunk: _run_chunk(chunk, scratch), chunks)
    else:
        for chunk in chunks:
            _run_chunk(chunk, scratch)


def _are_plain(steps: Sequence[BucketStep]) -> bool:
    """Return whether all are ordinary whole tensors and nobody (compiler, fake tensors, counters) watches their operations."""
    if torch.compiler.is_compiling() or torch._C._len_torch_dispatch_stack() > 0:
        return False
    is_whole = all(step.bucket.shard is None for step in steps)  # collectives keep their order
    return is_whole and all(type(p) in _PLAIN for step in steps for p in step.bucket.params)


@torch.no_grad()
def _run_chunk(chunk: Chunk, scratch: "Scratch") -> None:
    for batch in _batches(chunk, scratch):
        chunk.step.bucket.arithmetic.rule(batch, chunk.step.scalars, chunk.step.bucket.settings)


@torch.no_grad()
def _run_together(chunks: Sequence[Chunk], scratch: "Scratch") -> None:
    """Run chunks that share polar iterations: the momentum of all, then the updates of all, then the weights of all."""
    rule, scalars = chunks[0].step.bucket.arithmetic.split_rule, [chunk.step.scalars for chunk in chunks]
    settings, running = [chunk.step.bucket.settings for chunk in chunks], [_batches(chunk, scratch) for chunk in chunks]
    assert rule is not None and rule.normalize_all is not None
    batches, xs = list[Batch](), list[Tensor]()
    for k, chunk_batches in enumerate(running):
        batches.append(next(chunk_batches))
        xs.append(rule.accumulate(batches[k], scalars[k], settings[k]))
    for k, u in enumerate(rule.normalize_all(xs, settings)):
        batches[k].descend(u, scalars[k])
        next(running[k], None)


def _batches(chunk: Chunk, scratch: "Scratch") -> Iterator[Batch]:
    """Yield the batches of a chunk, one per cut, for a Rule to update; then write back their state and count what was skipped."""
    step, which, cuts = chunk
    is_copied = which.stop - which.start > 1
    exact = machine.exact_dtype(step.grads[0])
    grads = [gather(cut(step.grads[which], rows), exact) for rows in cuts]
    bucket, slices, products = step.bucket, step.bucket.slices, step.descent.part(which).products
    unseen = slices.waiting_ndim or step.finite is None  # else ranks have agreed on all there is to know
    largest = [idle.magnitudes(grad, slices) for grad in grads] if unseen else []
    if step.finite is not None and step.nonzero is not None:
        finite, nonzero = step.finite[which], step.nonzero[which]
    else:
        joined = idle.join(largest, slices)
        finite, nonzero = idle.is_finite(joined), joined != 0
    factors = None
    if step.momentum_left is not None and not slices.waiting_ndim:
        factors = update_momentum_left(step.momentum_left[which], nonzero, finite, step.scalars["momentum_keep"])
    counts = None if step.counts is None else count_updates(step.counts[which], finite)
    if products is not None:
        products.zero_()
    grads.reverse()  # taken from the end, so that each is free once it is used
    for k, rows in enumerate(cuts):
        shape = grads[-1].shape[1:]
        lists = {key: cut(tensors[which], rows) for key, tensors in step.state.items()}
        active = finite.to(exact).view(-1, *[1] * len(shape))
        if slices.waiting_ndim:
            active = active * idle.mask(largest[k] != 0, shape, slices, exact)
        batch = Batch(
            params=cut(bucket.params[which], rows),
            gradient=[grads.pop()],
            owns_gradient=is_copied,
            state={key: stack(tensors) for key, tensors in lists.items()},
            active=active,
            maximize=step.maximize,
            scratch=scratch.take((which.stop - which.start, *shape), exact, bucket.params[0]),
            fade=None if factors is None else spread_fade(factors, bucket, shape).to(exact),
            shard=bucket.shard,
            counts=counts,
            descent=step.descent.part(which, rows),
        )
        yield batch
        for key, tensors in lists.items():
            write_back(tensors, batch.state[key])
    if products is not None:
        torch._foreach_copy_([products], [torch.where(finite, products, torch.nan)])
    if step.finite is None:
        count_skips(step.skipped[which], finite)


def gather(grads: list[Tensor], exact: torch.dtype) -> Tensor:
    """Return gradients as a stack, on an accelerator as `Batch.owns_gradient` wants it."""
    return stack_finite(grads, exact) if len(grads) > 1 and machine.is_accelerator(grads[0].device) else stack(grads)


def update_momentum_left(left: list[Tensor], nonzero: Tensor, finite: Tensor, momentum_keep: Tensor) -> Tensor:
    """Record what is left of these parameters' momentum after this step; return the factors of their updates."""
    stacked = stack(left)
    factors = idle.fade_(stacked, nonzero, finite, momentum_keep)
    write_back(left, stacked)
    return factors


def count_skips(skipped: list[Tensor], finite: Tensor) -> None:
    """Add one to the counters of parameters whose gradient was not finite."""
    counters = stack(skipped)
    counters.add_(finite.logical_not())
    write_back(skipped, counters)


def count_updates(counts: list[Tensor], finite: Tensor) -> Tensor:
    """Count this step for the parameters whose gradient is finite; return how many each has had, (batch,)."""
    now = stack(counts)
    now.add_(finite)
    write_back(counts, now)
    return now


def spread_fade(factors: Tensor, bucket: Bucket, shape: Sequence[int]) -> Tensor:
    """Return the factors of blocks as a tensor that multiplies this process's part of the parameters."""
    if bucket.shard is None or bucket.slices.blocks == 1:
        return idle.spread(factors, shape, bucket.slices)
    return idle.spread(factors, shape, bucket.slices, *bucket.shard.window(bucket.slices.dim % len(shape)))


class Scratch:
    """Scratch memory for one step, one region per thread.

    Fresh pages for every matrix would cost more than all element-wise work.
    """

    def __init__(self) -> None:
        self._of_thread: dict[int, Tensor] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype, like: Tensor) -> Tensor | None:
        """Return uninitialised memory, the same for every chunk that a thread runs; None on an accelerator."""
        if machine.is_accelerator(like.device):
            return None
        if type(like) not in _PLAIN or torch.compiler.is_compiling():
            return torch.empty(tuple(shape), dtype=dtype, device=like.device)
        size, thread = math.prod(shape) * dtype.itemsize, threading.get_ident()
        if thread not in self._of_thread or len(self._of_thread[thread]) < size:
            self._of_thread[thread] = torch.empty(size, dtype=torch.uint8, device=like.device)
        return self._of_thread[thread][:size].view(dtype).view(tuple(shape))


def unmeasured_products(bucket: Bucket) -> Tensor:
    """Return room for a bucket's products, (3, parameters), NaN until its step has run; zeros for an empty shard."""
    first, fill = bucket.params[0], 0.0 if bucket.shard is not None and bucket.shard.is_empty else torch.nan
    return torch.full((3, len(bucket.params)), fill, dtype=machine.exact_dtype(first), device=first.device)


def finite_gradients(step: BucketStep) -> Tensor:
    """Return whether each gradient of a bucket is finite, (parameters,) bool, on the device."""
    if step.finite is not None:
        return step.finite
    finite = []
    for which, cuts in split(step.bucket, len(step.grads)):
        largest = [idle.magnitudes(stack(cut(step.grads[which], rows)), WHOLE) for rows in cuts]
        finite.append(idle.is_finite(idle.join(largest, WHOLE)))
    return torch.cat(finite)


def check_finite(optimizer: Optimizer, steps: Sequence[BucketStep]) -> None:
    """Raise for a non-finite gradient if check_finite=True, before anything is written. Forces a device sync."""
    for step in steps:
        if not optimizer.param_groups[step.bucket.group]["check_finite"]:
            continue
        for p, is_finite in zip(step.bucket.params, finite_gradients(step).tolist(), strict=True):
            if not is_finite:
                raise NonFiniteGradientError(optimizer, step.bucket.group, p)


def split(bucket: Bucket, count: int) -> Iterator[tuple[slice, list[slice | None]]]:
    """Split a bucket of `count` parameters into chunks of bounded size: (which of them, which rows or None for all).

    >>> p = torch.zeros(2, 2)
    >>> list(split(Bucket(0, (2, 2), Arithmetic(print, ()), False, None, [p, p, p]), 3))
    [(slice(0, 3, None), [None])]
    """
    shape, size = bucket.shape, math.prod(bucket.shape)
    most = max_elements(bucket)
    fades_in_blocks = bucket.slices.blocks > 1 and not bucket.slices.waiting_ndim
    if size > most and bucket.row_separable and not bucket.is_held and not fades_in_blocks:
        rows = max(1, most * shape[0] // size)
        cuts: list[slice | None] = [slice(low, min(low + rows, shape[0])) for low in range(0, shape[0], rows)]
        yield from ((slice(k, k + 1), cuts) for k in range(count))
        return
    together = max(1, most // max(size, 1))
    for low in range(0, count, together):
        yield slice(low, min(low + together, count)), [None]


def max_elements(bucket: Bucket) -> int:
    """Return how many elements to process at once: on a CPU what stays in a core's cache, else what fits the budget."""
    if not machine.is_accelerator(bucket.params[0].device) and not torch.compiler.is_compiling():
        return machine.CACHED_ELEMENTS  # a larger matrix is a chunk by itself
    return bucket.chunk_elements
