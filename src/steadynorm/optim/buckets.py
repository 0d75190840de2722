"""Same-shape parameters of a group, stacked and handled as one batch, in pieces of bounded size.

A `Rule` is the pure part of an optimizer: weights, gradient and state in, new weights and state out, all stacked
(batch, *shape). `run` does the rest for every optimizer: it stacks, keeps a parameter with a non-finite gradient as
it was, and writes. Nothing in it waits for the device.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

State: TypeAlias = dict[str, Tensor]
Scalars: TypeAlias = dict[str, Tensor]  # 0-d, on the CPU: values that change from step to step without recompiling
Rule: TypeAlias = Callable[[Tensor, Tensor, State, Scalars, Any], tuple[Tensor, State]]

MAX_ELEMENTS = 1 << 22  # of one piece: 16 MiB for each fp32 temporary


@dataclass(frozen=True)
class Bucket:
    """Parameters of one group with one shape, dtype and device: one batch. `settings` is what their Rule needs."""

    group: int
    shape: tuple[int, ...]
    by_rows: bool  # slices along the first dimension do not see each other: a large parameter may be cut
    settings: Any
    params: list[Tensor]


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


def decayed_step(theta: Tensor, u: Tensor, eta: Tensor, gamma: Tensor) -> Tensor:
    """theta_t = (1 - eta) theta_{t-1} - gamma u_t."""
    return theta * (1 - eta) - u * gamma


def write(tensors: Sequence[Tensor], values: Tensor) -> None:
    """The one function that writes weights and state: values (batch, *shape) into a list of tensors."""
    torch._foreach_copy_(list(tensors), list(values.unbind(0)))


def run(works: Sequence[Work]) -> None:
    """Carry out a step: every bucket, piece by piece."""
    for work in works:
        for which, cuts in pieces(len(work.grads), work.bucket.shape, work.bucket.by_rows):
            grads = [stack(_cut(work.grads[which], rows)) for rows in cuts]
            finite = _finite(grads)
            for grad, rows in zip(grads, cuts, strict=True):
                _run_piece(work, grad, finite, which, rows)
            torch._foreach_add_(work.skipped[which], list((~finite).long().unbind(0)))


def finite_gradients(work: Work) -> Tensor:
    """Whether each gradient of a bucket is finite, (parameters,) bool, on the device."""
    found = pieces(len(work.grads), work.bucket.shape, work.bucket.by_rows)
    return torch.cat([_finite([stack(_cut(work.grads[which], rows)) for rows in cuts]) for which, cuts in found])


def _finite(parts: Sequence[Tensor]) -> Tensor:
    """(batch,): the largest magnitude tells, for NaN wins every comparison. torch's infinity norm is slower by ten."""
    return torch.stack([part.abs().reshape(len(part), -1).amax(1) for part in parts]).amax(0).isfinite()


def _run_piece(work: Work, grad: Tensor, finite: Tensor, which: slice, rows: slice | None) -> None:
    params = _cut(work.bucket.params[which], rows)
    state = {key: _cut(tensors[which], rows) for key, tensors in work.state.items()}
    exact = torch.float64 if grad.dtype == torch.float64 else torch.float32
    theta = stack(params).to(exact)
    grad = torch.where(_over(finite, grad), -grad if work.maximize else grad, 0.0).to(exact)
    old = {key: stack(tensors).to(exact) for key, tensors in state.items()}
    new_theta, new = work.rule(theta, grad, old, work.scalars, work.bucket.settings)
    write(params, torch.where(_over(finite, theta), new_theta, theta))
    for key, tensors in state.items():
        write(tensors, torch.where(_over(finite, old[key]), new[key], old[key]))


def pieces(count: int, shape: Sequence[int], by_rows: bool) -> Iterator[tuple[slice, list[slice | None]]]:
    """Cut `count` parameters of one shape into pieces of bounded size: (which of them, which rows or None for all).

    >>> list(pieces(3, (2, 2), False))
    [(slice(0, 3, None), [None])]
    """
    size = math.prod(shape)
    if size > MAX_ELEMENTS and by_rows:
        rows = max(1, MAX_ELEMENTS * shape[0] // size)
        cuts: list[slice | None] = [slice(low, min(low + rows, shape[0])) for low in range(0, shape[0], rows)]
        yield from ((slice(k, k + 1), cuts) for k in range(count))
        return
    together = max(1, MAX_ELEMENTS // size)
    for low in range(0, count, together):
        yield slice(low, min(low + together, count)), [None]


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """(batch, *shape); a single tensor is viewed, not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _cut(tensors: Sequence[Tensor], rows: slice | None) -> list[Tensor]:
    return [t if rows is None else t[rows] for t in tensors]


def _over(flags: Tensor, like: Tensor) -> Tensor:
    """(batch,) flags as (batch, 1, ...), to broadcast over `like`."""
    return flags.view(-1, *[1] * (like.ndim - 1))
