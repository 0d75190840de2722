"""Gradients that are exactly zero: which slices of a parameter wait, and which updates fade.

A normalised update has full size however small the momentum is. Without a rule for missing gradients, what is left of
the last one would move the weights for hundreds of steps, always the same way. There are two rules.

Slices wait. A row of an embedding that no token used, or an expert that no token was sent to, stands still until its
next gradient: momentum, decay and update alike, as a parameter without a gradient does in torch. Each slice then runs
in its own time, and the theory holds for each whatever its frequency.

Updates fade. A whole parameter, a block of a fused one, or a matrix of a stack that does not wait: when its gradients
stop, it keeps decaying, and its update fades once the momentum is next to nothing. What is left of the momentum is
counted, not measured, so the scale of gradients does not matter:

    left_t = 1 where the gradient is not zero, else (1 - alpha) left_{t-1}
    update = min(1, left_t / FADES_BELOW) u

With alpha = 0.1 an update has full size for 109 steps after the last gradient, and is gone 20 steps later.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from steadynorm import machine
from steadynorm.theory.momentum import FADES_BELOW


class Slices(NamedTuple):
    """The parts of a parameter whose gradients may be zero independently. Blocks fade where no slices wait."""

    waiting_ndim: int = 0  # trailing dimensions of a slice that waits: 1 for rows, 2 for matrices of a stack; 0: none
    blocks: int = 1  # parts along `dim` that fade
    dim: int = 0
    sizes: tuple[int, ...] = ()  # of the blocks; empty if they are equal


WHOLE = Slices()


def magnitudes(grad: Tensor, slices: Slices) -> Tensor:
    """Return the largest |entry| of every slice of a stack (batch, *shape), (batch, slices), in at least fp32; NaN propagates."""
    exact = machine.exact_dtype(grad)
    x = grad.unsqueeze(1) if grad.ndim == 1 else grad  # a stack of 0-d parameters
    if slices.waiting_ndim:
        kept = range(1, x.ndim - slices.waiting_ndim)
    elif slices.blocks > 1:
        dim = slices.dim % (x.ndim - 1) + 1
        if slices.sizes:
            return torch.cat([magnitudes(part, WHOLE) for part in x.split(list(slices.sizes), dim)], 1)
        x, kept = x.unflatten(dim, (slices.blocks, -1)), (dim,)
    else:
        kept = ()
    others = [dim for dim in range(1, x.ndim) if dim not in kept]
    if machine.is_accelerator(grad.device):
        largest = torch.linalg.vector_norm(x, torch.inf, others, dtype=exact)
    else:  # faster than a norm there
        largest = torch.maximum(x.amax(others), -x.amin(others)).to(exact)
    return largest.reshape(len(x), -1)


def is_finite(largest: Tensor) -> Tensor:
    """Return whether each gradient is finite, and small enough that the difference of two is finite as well, (batch,)."""
    finite = largest <= torch.finfo(largest.dtype).max / 2  # NaN fails every comparison
    return finite.all(1) if finite.shape[1] > 1 else finite.flatten()


def join(parts: Sequence[Tensor], slices: Slices) -> Tensor:
    """Join the magnitudes of parameters that were inspected in parts, cut along their first dimension."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts), 1) if slices.waiting_ndim else torch.stack(list(parts)).amax(0)


def mask(nonzero: Tensor, shape: Sequence[int], slices: Slices, dtype: torch.dtype) -> Tensor:
    """Return 0 where slices wait and 1 elsewhere, given which slices (batch, slices) of this shape are nonzero.

    >>> mask(torch.tensor([[True, False]]), (2, 3), Slices(waiting_ndim=1), torch.float32).shape
    torch.Size([1, 2, 1])
    """
    leading = shape[: len(shape) - slices.waiting_ndim]
    return nonzero.view(len(nonzero), *leading, *[1] * slices.waiting_ndim).to(dtype)


def fade_(left: Tensor, nonzero: Tensor, finite: Tensor, momentum_keep: Tensor) -> Tensor:
    """Update, in place, what is left of the momentum; return the factor of each block's update: (batch, blocks).

    >>> fade_(torch.tensor([[1.0, 2e-6]]), torch.tensor([[True, False]]), torch.tensor([True]), torch.tensor(0.5))
    tensor([[1.0000, 0.1000]])
    """
    now = (left * momentum_keep.to(left.dtype)).masked_fill_(nonzero, 1.0)
    torch.where(finite.unsqueeze(1), now, left, out=left)
    return (left / FADES_BELOW).clamp_(max=1.0)


def spread(factors: Tensor, shape: Sequence[int], slices: Slices, start: int = 0, length: int | None = None) -> Tensor:
    """Spread factors of blocks (batch, blocks) along the blocks' dimension, to multiply a tensor (batch, *shape).

    start, length: where the parameters are shards, their first position along that dimension, and how many there are.
    """
    if slices.blocks == 1:
        return factors.view(len(factors), *[1] * len(shape))
    dim = slices.dim % len(shape)
    return factors.index_select(1, block_of(shape[dim], slices, start, length, factors.device)).view(
        len(factors), *[shape[k] if k == dim else 1 for k in range(len(shape))]
    )


def block_of(count: int, slices: Slices, start: int, length: int | None, device: torch.device) -> Tensor:
    """Return the block to which each of `count` positions along the blocks' dimension belongs.

    >>> cpu = torch.device("cpu")
    >>> block_of(4, Slices(blocks=3), 1, 6, cpu), block_of(4, Slices(blocks=3, sizes=(3, 1, 2)), 1, 6, cpu)
    (tensor([0, 1, 1, 2]), tensor([0, 0, 1, 2]))
    """
    if slices.sizes:
        at = torch.arange(count, device=device) + start
        return torch.stack([at >= end for end in itertools.accumulate(slices.sizes)]).sum(0)
    return (torch.arange(count, device=device) + start) // ((length or count) // slices.blocks)
