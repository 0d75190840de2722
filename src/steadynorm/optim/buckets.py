"""Same-shape parameters of a group, stacked and updated as one batch, in chunks of bounded size.

A `Rule` is the arithmetic of an optimizer on one chunk: weights, gradient and state, stacked (batch, *shape), updated
in place. `run` does the rest for every optimizer: it stacks, spots non-finite gradients and writes back. Nothing in it
waits for the device. On a CPU chunks are small enough to stay in a core's cache, and each core takes its own.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from steadynorm import threads
from steadynorm.optim import idle
from steadynorm.optim.idle import WHOLE, Slices

State: TypeAlias = dict[str, Tensor]
Scalars: TypeAlias = dict[str, Tensor]  # 0-d, on the CPU: values that change from step to step without recompiling

MAX_ELEMENTS = 1 << 22  # of a chunk on an accelerator: 16 MiB for each fp32 temporary
MAX_ELEMENTS_CPU = 1 << 18  # on a CPU: 1 MiB; a larger matrix is a chunk by itself
_PLAIN = (Tensor, torch.nn.Parameter)


class Batch(NamedTuple):
    """One chunk, stacked. A Rule updates theta and state in place.

    Attributes:
        theta: The weights, (batch, *shape), in at least fp32.
        raw_grad: The gradient as it came.
        state: The optimizer state, in the dtype it is kept in.
        active: 1 where the step is taken, 0 where theta and state must stay as they are, because the gradient was not
            finite or a slice had none: (batch, 1, ...), or finer where slices wait (see `idle`).
        maximize: Whether to ascend.
        scratch: Memory like theta, of no value, for `grad` and what comes of it.
        products: (3, batch), to which `decay_and_step_` adds <theta, u>, |u|^2 and |theta|^2.
        fade: The factor of the update, (batch, ...); None stands for 1.
        sum_over_shards: Sums a tensor over all shards, in place; None if theta is whole.
        max_over_shards: Takes the maximum over all shards likewise.
    """

    theta: Tensor
    raw_grad: Tensor
    state: State
    active: Tensor
    maximize: bool
    scratch: Tensor
    products: Tensor | None = None
    fade: Tensor | None = None
    sum_over_shards: Callable[[Tensor], Tensor] | None = None
    max_over_shards: Callable[[Tensor], Tensor] | None = None

    def grad(self) -> Tensor:
        """Return the gradient to descend along: a copy in `scratch`, finite throughout."""
        torch.nan_to_num(self.raw_grad.to(self.scratch.dtype), 0.0, 0.0, 0.0, out=self.scratch)
        return self.scratch.neg_() if self.maximize else self.scratch

    def wide_state(self) -> State:
        """Return the state in the dtype that is computed in; written back, it is rounded to what it is kept in."""
        self.state.update({key: value.to(self.theta.dtype) for key, value in self.state.items()})
        return self.state

    def descend(self, u: Tensor, scalars: Scalars) -> None:
        """Write the weights: decay and step with this update."""
        step = self.active if self.fade is None else self.active * self.fade
        decay_and_step_(self.theta, u, scalars["eta"] * self.active, scalars["gamma"], step, self.products)


Rule: TypeAlias = Callable[[Batch, Scalars, Any], None]


class SplitRule(NamedTuple):
    """A Rule in three parts, the last being `Batch.descend`, so that data can move between ranks in between.

    Attributes:
        accumulate: Updates the state element by element and returns the momentum x, maybe in scratch.
        normalize: Returns the update u of x, given settings; may write it to the third argument or to x.
        cost: How many operations `normalize` takes for one parameter of a shape, given settings.
        bf16_scale: Of shape, settings, dtype and device: c such that `normalize` loses nothing if x and u/c are
            transferred in bf16; None if there is no such c.
    """

    accumulate: Callable[[Batch, Scalars, Any], Tensor]
    normalize: Callable[[Tensor, Any, Tensor | None], Tensor]
    cost: Callable[[tuple[int, ...], Any], float]
    bf16_scale: Callable[[tuple[int, ...], Any, torch.dtype, torch.device], float | None]

    def rule(self, batch: Batch, scalars: Scalars, settings: Any) -> None:
        """Apply all three parts: the Rule of a chunk that is whole on this process."""
        x = self.accumulate(batch, scalars, settings)
        batch.descend(self.normalize(x, settings, batch.scratch), scalars)


class Shard(Protocol):
    """What a step must know about a parameter of which this process has a part."""

    @property
    def is_empty(self) -> bool: ...

    def window(self, dim: int) -> tuple[int, int]:
        """Return this part's first position along a dimension, and the length of the whole."""
        ...

    def sum_over_shards(self, x: Tensor) -> Tensor: ...

    def max_over_shards(self, x: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Bucket:
    """Parameters of one group with one shape, dtype and device: one batch.

    Attributes:
        group: The index of their group.
        shape: The shape that they share.
        row_separable: Whether slices along the first dimension do not see each other, so that a large parameter may be
            cut.
        settings: What their Rule needs beside scalars.
        params: The parameters.
        slices: Which of their slices wait or fade while their gradient is zero.
        shard: How they are sharded; None for plain tensors, of which every process has its own.
    """

    group: int
    shape: tuple[int, ...]
    row_separable: bool
    settings: Any
    params: list[Tensor]
    slices: Slices = WHOLE
    shard: Shard | None = None


@dataclass(frozen=True)
class BucketStep:
    """One bucket's share of one step: all that the device part touches.

    Attributes:
        momentum_left: What is left of each parameter's momentum, (blocks,), where updates fade (see `idle`).
        products: (3, parameters), where a monitor wants `Batch.products`; NaN if skipped.
        finite: (parameters,) bool: where ranks have agreed which gradients are finite, and counted what is skipped.
        nonzero: (parameters, blocks) bool: where ranks have agreed which blocks have a gradient.
    """

    rule: Rule
    bucket: Bucket
    grads: list[Tensor]
    state: dict[str, list[Tensor]]
    skipped: list[Tensor]
    scalars: Scalars
    maximize: bool
    momentum_left: list[Tensor] | None = None
    products: Tensor | None = None
    finite: Tensor | None = None
    nonzero: Tensor | None = None


class Chunk(NamedTuple):
    """Some parameters of a bucket, or one large one cut by rows; None among the cuts is all of it."""

    step: BucketStep
    which: slice
    cuts: list[slice | None]


def decay_and_step_(
    theta: Tensor, u: Tensor, eta: Tensor, gamma: Tensor, step: Tensor, products: Tensor | None = None
) -> None:
    """theta <- (1 - eta) theta - gamma step u, in place: the one function that changes weights.

    Args:
        theta: The weights.
        u: The update.
        eta: The decay, lr lambda, 0 where nothing may change.
        gamma: The lr.
        step: How much of the update is taken, 0 to 1.
        products: As in `Batch`: what a monitor learns of the update, at the only moment both factors are at hand.
    """
    if products is not None:
        before, along = theta.reshape(len(theta), -1), (u * step).reshape(len(u), -1)
        parts = (torch.linalg.vecdot(x, y) for x, y in ((before, along), (along, along), (before, before)))
        products += torch.stack(list(parts))
    theta.mul_(1 - eta).addcmul_(u, -gamma * step)


def run(steps: Sequence[BucketStep]) -> None:
    """Run the step of every bucket, chunk by chunk."""
    chunks = [Chunk(step, which, cuts) for step in steps for which, cuts in split(step.bucket, len(step.grads))]
    scratch = Scratch()
    if torch.get_num_threads() > 1 and len(chunks) > 1 and not torch.compiler.is_compiling() and _on_plain_cpu(steps):
        # One core per chunk, the largest first, so that all cores end together.
        chunks.sort(key=lambda chunk: math.prod(chunk.step.bucket.shape), reverse=True)
        threads.for_each(lambda chunk: _run_chunk(chunk, scratch), chunks)
        return
    for chunk in chunks:
        _run_chunk(chunk, scratch)


def _on_plain_cpu(steps: Sequence[BucketStep]) -> bool:
    """Return whether all are ordinary CPU tensors and no dispatch mode (fake tensors, counters) is active."""
    plain = all(p.device.type == "cpu" and type(p) in _PLAIN for step in steps for p in step.bucket.params)
    plain = plain and all(step.bucket.shard is None for step in steps)  # collectives keep their order
    return plain and torch._C._len_torch_dispatch_stack() == 0


@torch.no_grad()
def _run_chunk(chunk: Chunk, scratch: "Scratch") -> None:
    step, which, cuts = chunk
    grads = [stack(_cut(step.grads[which], rows)) for rows in cuts]
    bucket, slices, shard = step.bucket, step.bucket.slices, step.bucket.shard
    unseen = slices.waiting_ndim or step.finite is None  # else ranks have agreed on all there is to know
    extremes = [idle.extremes(grad, slices) for grad in grads] if unseen else []
    if step.finite is not None and step.nonzero is not None:
        finite, nonzero = step.finite[which], step.nonzero[which]
    else:
        joined = idle.join(extremes, slices)
        finite, nonzero = joined.finite(), joined.nonzero()
    factors = None
    if step.momentum_left is not None and not slices.waiting_ndim:
        factors = update_momentum_left(step.momentum_left[which], nonzero, finite, step.scalars["keep"])
    totals = None if step.products is None else step.products.narrow(1, which.start, which.stop - which.start)
    products = None if totals is None else torch.zeros_like(totals)
    for k, (grad, rows) in enumerate(zip(grads, cuts, strict=True)):
        params = _cut(bucket.params[which], rows)
        lists = {key: _cut(tensors[which], rows) for key, tensors in step.state.items()}
        exact = torch.float64 if grad.dtype == torch.float64 else torch.float32
        theta = stack(params).to(exact)
        active = finite.to(exact).view(-1, *[1] * (grad.ndim - 1))
        if slices.waiting_ndim:
            active = active * idle.mask(extremes[k].nonzero(), grad.shape[1:], slices, exact)
        batch = Batch(
            theta,
            grad,
            {key: stack(tensors) for key, tensors in lists.items()},
            active,
            step.maximize,
            scratch.like(theta),
            products,
            None if factors is None else spread_fade(factors, bucket, grad.shape[1:]).to(exact),
            None if shard is None else shard.sum_over_shards,
            None if shard is None else shard.max_over_shards,
        )
        step.rule(batch, step.scalars, bucket.settings)
        write_back(params, batch.theta)
        for key, tensors in lists.items():
            write_back(tensors, batch.state[key])
    if totals is not None and products is not None:
        torch._foreach_copy_([totals], [torch.where(finite, products, torch.nan)])
    if step.finite is None:
        torch._foreach_add_(step.skipped[which], list(finite.logical_not().long().unbind(0)))


def update_momentum_left(left: list[Tensor], nonzero: Tensor, finite: Tensor, keep: Tensor) -> Tensor:
    """Record what is left of these parameters' momentum after this step; return the factors of their updates."""
    now, factors = idle.fade(torch.stack(left), nonzero, finite, keep)
    torch._foreach_copy_(left, list(now.unbind(0)))
    return factors


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

    def like(self, tensor: Tensor) -> Tensor:
        """Return uninitialised memory of this shape; on a CPU the same for every chunk that a thread runs."""
        if tensor.device.type != "cpu" or type(tensor) not in _PLAIN or torch.compiler.is_compiling():
            return torch.empty_like(tensor, memory_format=torch.contiguous_format)
        size, thread = tensor.numel() * tensor.element_size(), threading.get_ident()
        if thread not in self._of_thread or len(self._of_thread[thread]) < size:
            self._of_thread[thread] = torch.empty(size, dtype=torch.uint8)
        return self._of_thread[thread][:size].view(tensor.dtype).view(tensor.shape)


def write_back(tensors: list[Tensor], stacked: Tensor) -> None:
    """Copy a stack into its tensors, unless it is a view of the only one."""
    if len(tensors) > 1 or stacked.dtype != tensors[0].dtype:
        torch._foreach_copy_(tensors, list(stacked.unbind(0)))


def unmeasured_products(bucket: Bucket) -> Tensor:
    """Return room for a bucket's products, (3, parameters), NaN until its step has run; zeros for an empty shard."""
    dtype = torch.float64 if bucket.params[0].dtype == torch.float64 else torch.float32
    fill = 0.0 if bucket.shard is not None and bucket.shard.is_empty else torch.nan
    return torch.full((3, len(bucket.params)), fill, dtype=dtype, device=bucket.params[0].device)


def finite_gradients(step: BucketStep) -> Tensor:
    """Return whether each gradient of a bucket is finite, (parameters,) bool, on the device."""
    if step.finite is not None:
        return step.finite
    finite = []
    for which, cuts in split(step.bucket, len(step.grads)):
        extremes = [idle.extremes(stack(_cut(step.grads[which], rows)), WHOLE) for rows in cuts]
        finite.append(idle.join(extremes, WHOLE).finite())
    return torch.cat(finite)


def split(bucket: Bucket, count: int) -> Iterator[tuple[slice, list[slice | None]]]:
    """Split a bucket of `count` parameters into chunks of bounded size: (which of them, which rows or None for all).

    >>> p = torch.zeros(2, 2)
    >>> list(split(Bucket(0, (2, 2), False, None, [p, p, p]), 3))
    [(slice(0, 3, None), [None])]
    """
    shape, size = bucket.shape, math.prod(bucket.shape)
    most = max_elements(bucket.params[0].device)
    if size > most and bucket.row_separable:
        rows = max(1, most * shape[0] // size)
        cuts: list[slice | None] = [slice(low, min(low + rows, shape[0])) for low in range(0, shape[0], rows)]
        yield from ((slice(k, k + 1), cuts) for k in range(count))
        return
    together = max(1, most // max(size, 1))
    for low in range(0, count, together):
        yield slice(low, min(low + together, count)), [None]


def max_elements(device: torch.device) -> int:
    """Return how many elements to process at once: on a CPU what stays in a core's cache."""
    small = device.type == "cpu" and not torch.compiler.is_compiling()
    return MAX_ELEMENTS_CPU if small else MAX_ELEMENTS


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return (batch, *shape); a single tensor is viewed, not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _cut(tensors: Sequence[Tensor], rows: slice | None) -> list[Tensor]:
    return [t if rows is None else t.narrow(0, rows.start, rows.stop - rows.start) for t in tensors]
