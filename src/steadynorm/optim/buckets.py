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
        finite = finite_gradients(work.grads)  # (parameters,)
        for which, rows in pieces(len(work.grads), work.bucket.shape, work.bucket.by_rows):
            _run_piece(work, finite[which], which, rows)
        torch._foreach_add_(work.skipped, list((~finite).long().unbind(0)))


def finite_gradients(grads: Sequence[Tensor]) -> Tensor:
    """Whether each gradient is finite, (gradients,) bool, on the device."""
    return torch.stack(torch._foreach_norm(list(grads), math.inf)).isfinite()


def _run_piece(work: Work, finite: Tensor, which: slice, rows: slice | None) -> None:
    params, grads = _cut(work.bucket.params, which, rows), _cut(work.grads, which, rows)
    state = {key: _cut(tensors, which, rows) for key, tensors in work.state.items()}
    exact = torch.float64 if params[0].dtype == torch.float64 else torch.float32
    theta, grad = stack(params).to(exact), stack(grads).to(exact)
    grad = torch.where(_over(finite, grad), -grad if work.maximize else grad, 0.0)
    old = {key: stack(tensors).to(exact) for key, tensors in state.items()}
    new_theta, new = work.rule(theta, grad, old, work.scalars, work.bucket.settings)
    write(params, torch.where(_over(finite, theta), new_theta, theta))
    for key, tensors in state.items():
        write(tensors, torch.where(_over(finite, old[key]), new[key], old[key]))


def pieces(count: int, shape: Sequence[int], by_rows: bool) -> Iterator[tuple[slice, slice | None]]:
    """Cut `count` parameters of one shape into (which of them, which of their first dimension or all).

    >>> list(pieces(3, (2, 2), False))
    [(slice(0, 3, None), None)]
    """
    size = math.prod(shape)
    if size > MAX_ELEMENTS and by_rows:
        rows = max(1, MAX_ELEMENTS * shape[0] // size)
        for k in range(count):
            for low in range(0, shape[0], rows):
                yield slice(k, k + 1), slice(low, min(low + rows, shape[0]))
        return
    together = max(1, MAX_ELEMENTS // size)
    for low in range(0, count, together):
        yield slice(low, min(low + together, count)), None


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """(batch, *shape); a single tensor is viewed, not copied."""
    return tensors[0].unsqueeze(0) if len(tensors) == 1 else torch.stack(list(tensors))


def _cut(tensors: Sequence[Tensor], which: slice, rows: slice | None) -> list[Tensor]:
    return [t if rows is None else t[rows] for t in tensors[which]]


def _over(flags: Tensor, like: Tensor) -> Tensor:
    """(batch,) flags as (batch, 1, ...), to broadcast over `like`."""
    return flags.view(-1, *[1] * (like.ndim - 1))
