"""Same-shape parameters of a group, stacked and handled as one batch, in pieces of bounded size.

A `Rule` is the arithmetic of an optimizer on one piece: weights, gradient and state, stacked (batch, *shape), updated
in place. `run` does the rest for every optimizer: it stacks, spots non-finite gradients, writes back. Nothing in it
waits for the device. On a CPU the pieces are small, so that one stays in a core's cache, and each core takes its own.
"""

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from steadynorm import threads
from steadynorm.optim import idle
from steadynorm.optim.idle import WHOLE, Slices
from steadynorm.optim.sharding.layout import Layout

State: TypeAlias = dict[str, Tensor]
Scalars: TypeAlias = dict[str, Tensor]  # 0-d, on the CPU: values that change from step to step without recompiling

MAX_ELEMENTS = 1 << 22  # of a piece on an accelerator: 16 MiB for each fp32 temporary
MAX_ELEMENTS_CPU = 1 << 18  # on a CPU: 1 MiB; a larger matrix is a piece by itself


class Batch(NamedTuple):
    """One piece of a bucket, stacked. A Rule updates theta and state in place."""

    theta: Tensor  # (batch, *shape), at least fp32
    raw_grad: Tensor  # as it came
    state: State  # in the dtype it is kept in
    # (batch, 1, ...), or finer where slices wait (idle.py): where 0, theta and state must stay as they are, because the
    # gradient was not finite or a slice had none; else 1
    live: Tensor
    maximize: bool
    scratch: Tensor  # like theta, of no value: where grad() goes, and what comes of it may
    products: Tensor | None = None  # (3, batch), for decay_and_step_: gains <theta, u>, |u|^2, |theta|^2
    total: Callable[[Tensor], Tensor] | None = None  # where theta is a shard: sums over all shards, in place
    most: Callable[[Tensor], Tensor] | None = None  # and the largest of all shards
    fade: Tensor | None = None  # (batch, ...): factor of the update; None: 1

    def grad(self) -> Tensor:
        """The gradient to descend along: a copy in `scratch`, finite throughout."""
        torch.nan_to_num(self.raw_grad.to(self.scratch.dtype), 0.0, 0.0, 0.0, out=self.scratch)
        return self.scratch.neg_() if self.maximize else self.scratch

    def wide_state(self) -> State:
        """The state, from now on in the dtype that is computed in; written back, it is rounded to what it is kept in."""
        self.state.update({key: value.to(self.theta.dtype) for key, value in self.state.items()})
        return self.state

    def descend(self, u: Tensor, scalars: Scalars) -> None:
        """Write the weights: decay and step with this update."""
        step = self.live if self.fade is None else self.live * self.fade
        decay_and_step_(self.theta, u, scalars["eta"] * self.live, scalars["gamma"], step, self.products)


Rule: TypeAlias = Callable[[Batch, Scalars, Any], None]


class Parts(NamedTuple):
    """A Rule in three parts, the last being Batch.descend: so that between them data can go from rank to rank."""

    direction: Callable[[Batch, Scalars, Any], Tensor]  # updates the state, element by element; x, maybe in scratch
    update: Callable[[Tensor, Any, Tensor | None], Tensor]  # u of x and settings; may be written to the third or x
    cost: Callable[[tuple[int, ...], Any], float]  # of `update` for one parameter: operations
    # of shape, settings, dtype, device: c such that `update` loses nothing if x and u/c travel in bf16; None: it would
    bf16_unit: Callable[[tuple[int, ...], Any, torch.dtype, torch.device], float | None]

    def rule(self, batch: Batch, scalars: Scalars, settings: Any) -> None:
        """The Rule they make."""
        x = self.direction(batch, scalars, settings)
        batch.descend(self.update(x, settings, batch.scratch), scalars)


@dataclass(frozen=True)
class Bucket:
    """Parameters of one group with one shape, dtype and device: one batch. `settings` is what their Rule needs."""

    group: int
    shape: tuple[int, ...]
    by_rows: bool  # slices along the first dimension do not see each other: a large parameter may be cut
    settings: Any
    params: list[Tensor]
    layout: Layout | None = None  # None: plain tensors, of which every process has its own
    plan: tuple[tuple[slice, tuple[int, ...]], ...] = ()  # pieces to exchange: which, and how many each rank owns
    slices: Slices = WHOLE  # which parts wait or fade while their gradient is zero


@dataclass(frozen=True)
class Work:
    """One bucket's share of one step: all that the device part touches."""

    rule: Rule
    bucket: Bucket
    grads: list[Tensor]
    state: dict[str, list[Tensor]]
    skipped: list[Tensor]
    scalars: Scalars
    maximize: bool
    products: Tensor | None = None  # (3, parameters): where a monitor wants Batch.products; NaN if skipped
    left: list[Tensor] | None = None  # (blocks,) each: what is left of their momentum, where updates fade (idle.py)
    finite: Tensor | None = None  # (parameters,) bool: where ranks have agreed on it, and counted what is skipped
    nonzero: Tensor | None = None  # (parameters, blocks) bool: likewise


class Piece(NamedTuple):
    """Some parameters of a bucket, or one large one cut by rows."""

    work: Work
    which: slice
    cuts: list[slice | None]  # None: whole


def decay_and_step_(
    theta: Tensor, u: Tensor, eta: Tensor, gamma: Tensor, step: Tensor, products: Tensor | None = None
) -> None:
    """theta <- (1 - eta) theta - gamma step u, in place: the one function that changes weights.

    step: how much of the update is taken, 0 to 1. products: as Batch has it; what a monitor learns of the update, at
    the only moment both factors are at hand.
    """
    if products is not None:
        before, along = theta.reshape(len(theta), -1), (u * step).reshape(len(u), -1)
        parts = (torch.linalg.vecdot(x, y) for x, y in ((before, along), (along, along), (before, before)))
        products += torch.stack(list(parts))
    theta.mul_(1 - eta).addcmul_(u, -gamma * step)


def run(works: Sequence[Work]) -> None:
    """Carry out a step: every bucket, piece by piece."""
    found = [Piece(work, which, cuts) for work in works for which, cuts in pieces(work.bucket, len(work.grads))]
    scratch = Scratch()
    if torch.get_num_threads() > 1 and len(found) > 1 and not torch.compiler.is_compiling() and _on_plain_cpu(works):
        # One core for each piece; the largest first, so that all cores end together.
        found.sort(key=lambda piece: math.prod(piece.work.bucket.shape), reverse=True)
        threads.for_each(lambda piece: _run_piece(piece, scratch), found)
        return
    for piece in found:
        _run_piece(piece, scratch)


def _on_plain_cpu(works: Sequence[Work]) -> bool:
    """Ordinary CPU tensors and no dispatch mode (fake tensors, counters), which other threads would not see."""
    plain = all(p.device.type == "cpu" and type(p) in _PLAIN for work in works for p in work.bucket.params)
    plain = plain and all(work.bucket.layout is None for work in works)  # collectives keep their order
    return plain and torch._C._len_torch_dispatch_stack() == 0


_PLAIN = (Tensor, torch.nn.Parameter)


@torch.no_grad()
def _run_piece(piece: Piece, scratch: "Scratch") -> None:
    work, which, cuts = piece
    grads = [stack(_cut(work.grads[which], rows)) for rows in cuts]
    slices, layout = work.bucket.slices, work.bucket.layout
    look = slices.waiting_ndim or work.finite is None  # else ranks have agreed on all that is to be known
    seen = [idle.extremes(grad, slices) for grad in grads] if look else []
    if work.finite is not None and work.nonzero is not None:
        finite, nonzero = work.finite[which], work.nonzero[which]
    else:
        whole = idle.join(seen, slices)
        finite, nonzero = whole.finite(), whole.nonzero()
    fading = None
    if work.left is not None and not slices.waiting_ndim:
        fading = faded(work.left[which], nonzero, finite, work.scalars["keep"])
    mine = None if work.products is None else work.products.narrow(1, which.start, which.stop - which.start)
    products = None if mine is None else torch.zeros_like(mine)
    for k, (grad, rows) in enumerate(zip(grads, cuts, strict=True)):
        params = _cut(work.bucket.params[which], rows)
        lists = {key: _cut(tensors[which], rows) for key, tensors in work.state.items()}
        exact = torch.float64 if grad.dtype == torch.float64 else torch.float32
        theta = stack(params).to(exact)
        live = finite.to(exact).view(-1, *[1] * (grad.ndim - 1))
        if slices.waiting_ndim:
            live = live * idle.mask(seen[k].nonzero(), grad.shape[1:], slices, exact)
        batch = Batch(
            theta,
            grad,
            {key: stack(tensors) for key, tensors in lists.items()},
            live,
            work.maximize,
            scratch.like(theta),
            products,
            None if layout is None else layout.total,
            None if layout is None else layout.largest,
            None if fading is None else _fade_of(fading, work.bucket, grad.shape[1:]).to(exact),
        )
        work.rule(batch, work.scalars, work.bucket.settings)
        write_back(params, batch.theta)
        for key, tensors in lists.items():
            write_back(tensors, batch.state[key])
    if mine is not None and products is not None:
        torch._foreach_copy_([mine], [torch.where(finite, products, torch.nan)])
    if work.finite is None:
        torch._foreach_add_(work.skipped[which], list(finite.logical_not().long().unbind(0)))


def faded(left: list[Tensor], nonzero: Tensor, finite: Tensor, keep: Tensor) -> Tensor:
    """Note what is left of these parameters' momentum after this step; returns the factors of their updates."""
    now, factors = idle.fade(torch.stack(left), nonzero, finite, keep)
    torch._foreach_copy_(left, list(now.unbind(0)))
    return factors


def _fade_of(factors: Tensor, bucket: Bucket, shape: Sequence[int]) -> Tensor:
    """Factors of blocks, for the part of the parameters that this process has."""
    if bucket.layout is None or bucket.slices.blocks == 1:
        return idle.spread(factors, shape, bucket.slices)
    dim = bucket.slices.dim % len(shape)
    return idle.spread(factors, shape, bucket.slices, bucket.layout.mine.start[dim], bucket.layout.whole.size[dim])


class Scratch:
    """Scratch memory for one step, a piece of it for each thread.

    Fresh pages for every matrix would cost more than all element-wise work.
    """

    def __init__(self) -> None:
        self._of_thread: dict[int, Tensor] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Return uninitialised memory of this shape; on a CPU the same for every piece that a thread runs."""
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


def no_products(bucket: Bucket) -> Tensor:
    """Room for a bucket's products, (3, parameters), NaN until its step has run; an empty shard, of zeros, has none."""
    dtype = torch.float64 if bucket.params[0].dtype == torch.float64 else torch.float32
    empty = bucket.layout is not None and not bucket.layout.replicated and not bucket.layout.mine.numel
    fill = 0.0 if empty else torch.nan
    return torch.full((3, len(bucket.params)), fill, dtype=dtype, device=bucket.params[0].device)


def finite_gradients(work: Work) -> Tensor:
    """Whether each gradient of a bucket is finite, (parameters,) bool, on the device."""
    found = []
    for which, cuts in pieces(work.bucket, len(work.grads)):
        ends = [idle.extremes(stack(_cut(work.grads[which], rows)), WHOLE) for rows in cuts]
        found.append(idle.join(ends, WHOLE).finite())
    return torch.cat(found)


def pieces(bucket: Bucket, count: int) -> Iterator[tuple[slice, list[slice | None]]]:
    """Cut a bucket of `count` parameters into pieces of bounded size: (which of them, which rows or None for all).

    >>> p = torch.zeros(2, 2)
    >>> list(pieces(Bucket(0, (2, 2), False, None, [p, p, p]), 3))
    [(slice(0, 3, None), [None])]
    """
    shape, size = bucket.shape, math.prod(bucket.shape)
    most = most_elements(bucket.params[0].device)
    if size > most and bucket.by_rows:
        rows = max(1, most * shape[0] // size)
        cuts: list[slice | None] = [slice(low, min(low + rows, shape[0])) for low in range(0, shape[0], rows)]
        yield from ((slice(k, k + 1), cuts) for k in range(count))
        return
    together = max(1, most // max(size, 1))
    for low in range(0, count, together):
        yield slice(low, min(low + together, count)), [None]


def most_elements(device: torch.device) -> int:
    """How many to handle at once: on a CPU what stays in a core's cache."""
    small = device.type == "cpu" and not torch.compiler.is_compiling()
    return MAX_ELEMENTS_CPU if small else MAX_ELEMENTS


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """(batch, *shape); a single tensor is viewed, not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _cut(tensors: Sequence[Tensor], rows: slice | None) -> list[Tensor]:
    return [t if rows is None else t.narrow(0, rows.start, rows.stop - rows.start) for t in tensors]
