"""Gradients that are exactly zero: which slices of a parameter wait, and which updates fade.

A normalised update has full size however small the momentum is. Without a rule for missing gradients, what is left of
the last one would move the weights for hundreds of steps, always the same way. There are two rules.

Slices wait. A row of an embedding that no token used, or an expert that no token was sent to, stands still until its
next gradient: momentum, decay and update alike, as a parameter without a gradient does in torch. Each slice then runs
in its own time, and the theory holds for each whatever its frequency.

Updates fade. A whole parameter, a block of a fused one, or a matrix of a stack that does not wait: when its gradients
stop, it keeps decaying, and its update fades once the momentum is next to nothing. What is left of the momentum is
counted, not measured, so the scale of gradients does not matter:

    left_t = 1 where the gradient is not zero, else keep * left_{t-1},     keep = 1 - alpha
    update = min(1, left_t / FADES_BELOW) u

With alpha = 0.1 an update has full size for 109 steps after the last gradient, and is gone 20 steps later.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

FADES_BELOW = 1e-5


class Slices(NamedTuple):
    """The parts of a parameter whose gradients may be zero independently. Blocks fade where no slices wait."""

    waiting_ndim: int = 0  # trailing dimensions of a slice that waits: 1 for rows, 2 for matrices of a stack; 0: none
    blocks: int = 1  # parts along `dim` that fade
    dim: int = 0


WHOLE = Slices()


class Extremes(NamedTuple):
    """Largest and smallest gradient entry of every slice of a stack of parameters, (batch, slices)."""

    largest: Tensor
    smallest: Tensor

    def finite(self) -> Tensor:
        """Return whether the momentum can take the gradient, (batch,): the difference of two must be finite as well."""
        limit = torch.finfo(self.largest.dtype).max / 2
        return ((self.largest <= limit) & (self.smallest >= -limit)).all(1)  # NaN fails every comparison

    def nonzero(self) -> Tensor:
        """Return whether each slice has a gradient, (batch, slices)."""
        return (self.largest != 0) | (self.smallest != 0)


def extremes(grad: Tensor, slices: Slices) -> Extremes:
    """Return the extremes of a stack (batch, *shape) from one pass over it, in at least fp32."""
    exact = torch.float64 if grad.dtype == torch.float64 else torch.float32
    x = grad.unsqueeze(1) if grad.ndim == 1 else grad  # a stack of 0-d parameters
    if slices.waiting_ndim:
        kept = range(1, x.ndim - slices.waiting_ndim)
    elif slices.blocks > 1:
        dim = slices.dim % (x.ndim - 1) + 1
        x, kept = x.unflatten(dim, (slices.blocks, -1)), (dim,)
    else:
        kept = ()
    others = [dim for dim in range(1, x.ndim) if dim not in kept]
    return Extremes(*(end(others).to(exact).reshape(len(x), -1) for end in (x.amax, x.amin)))


def join(parts: Sequence[Extremes], slices: Slices) -> Extremes:
    """Join the extremes of parameters that were inspected in parts, cut along their first dimension."""
    if len(parts) == 1:
        return parts[0]
    if slices.waiting_ndim:
        return Extremes(*(torch.cat(ends, 1) for ends in zip(*parts, strict=True)))
    largest, smallest = (torch.stack(ends) for ends in zip(*parts, strict=True))
    return Extremes(largest.amax(0), smallest.amin(0))


def mask(nonzero: Tensor, shape: Sequence[int], slices: Slices, dtype: torch.dtype) -> Tensor:
    """Return 0 where slices wait and 1 elsewhere, given which slices (batch, slices) of this shape are nonzero.

    >>> mask(torch.tensor([[True, False]]), (2, 3), Slices(waiting_ndim=1), torch.float32).shape
    torch.Size([1, 2, 1])
    """
    leading = shape[: len(shape) - slices.waiting_ndim]
    return nonzero.view(len(nonzero), *leading, *[1] * slices.waiting_ndim).to(dtype)


def fade(left: Tensor, nonzero: Tensor, finite: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return what is left of the momentum after this step, and the factor of each block's update: (batch, blocks).

    >>> fade(torch.tensor([[1.0, 2e-6]]), torch.tensor([[True, False]]), torch.tensor([True]), torch.tensor(0.5))[1]
    tensor([[1.0000, 0.1000]])
    """
    now = torch.where(nonzero, 1.0, left * keep.to(left.dtype))
    now = torch.where(finite.unsqueeze(1), now, left)
    return now, (now / FADES_BELOW).clamp(max=1.0)


def spread(factors: Tensor, shape: Sequence[int], slices: Slices, start: int = 0, length: int | None = None) -> Tensor:
    """Spread factors of blocks (batch, blocks) along the blocks' dimension, to multiply a tensor (batch, *shape).

    start, length: where the parameters are shards, their first position along that dimension, and how many there are.
    """
    if slices.blocks == 1:
        return factors.view(len(factors), *[1] * len(shape))
    dim = slices.dim % len(shape)
    return factors[:, block_of(shape[dim], slices, start, length, factors.device)].view(
        len(factors), *[shape[k] if k == dim else 1 for k in range(len(shape))]
    )


def block_of(count: int, slices: Slices, start: int, length: int | None, device: torch.device) -> Tensor:
    """Return the block to which each of `count` positions along the blocks' dimension belongs.

    >>> block_of(4, Slices(blocks=3), 1, 6, torch.device("cpu"))
    tensor([0, 1, 1, 2])
    """
    return (torch.arange(count, device=device) + start) // ((length or count) // slices.blocks)
