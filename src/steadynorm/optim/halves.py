"""An fp32 weight as two halves of 16 bits: the nearest bf16 weight, and the residual that makes the pair exact.

    bits of theta = 2^16 (bits of w) + r,        -2^15 <= r < 2^15

w is theta rounded to the nearest bf16 number, so that the model computes with the best weights that bf16 has. Halfway
between two of them, w is the one further from zero. (Ties to even would round 2^16 + 1 fp32 numbers to every even w, one
more than 16 bits can tell apart.) Infinities, zeros of both signs and subnormal numbers are kept; of a NaN, only that it
is one.
"""

import torch
from torch import Tensor

_NAN_BITS = 0x7FC00000


def merge(weights: Tensor, residual: Tensor) -> Tensor:
    """Return the fp32 weights of bf16 weights and their residuals (int16).

    A pair that belongs to no fp32 number, such as 0 and -1, has the residual of an older weight, which somebody has
    overwritten. Then the bf16 weight counts, without its residual.

    >>> merge(*split(torch.tensor([1.00390625, -2.001])))
    tensor([ 1.0039, -2.0010])
    """
    bits = weights.view(torch.int16).to(torch.int32).mul_(1 << 16).add_(residual)
    theta = bits.view(torch.float32)
    return torch.where(theta.isnan(), weights, theta, out=theta)


def split(theta: Tensor) -> tuple[Tensor, Tensor]:
    """Return fp32 weights, which may be overwritten, as the nearest bf16 weights and their residuals (int16).

    >>> split(torch.tensor([1.00390625, -2.001]))
    (tensor([ 1.0078, -2.0000], dtype=torch.bfloat16), tensor([-32768,   4194], dtype=torch.int16))
    """
    bits = theta.view(torch.int32).masked_fill_(theta.isnan(), _NAN_BITS)
    high = (bits + (1 << 15)).bitwise_right_shift_(16)
    low = bits.sub_(high, alpha=1 << 16)  # in the range of int16, as is high
    return high.to(torch.int16).view(torch.bfloat16), low.to(torch.int16)
