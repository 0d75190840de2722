"""l2 norms and inner products of large tensors that keep their digits.

On a CPU torch adds the squares of a tensor one after another, in fp32 if that is its dtype. Of 40 million weights, the size of an
embedding table, that loses 0.5 % of the sum. Here sums are short or taken in pairs. Accelerators add in pairs by themselves.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from steadynorm import machine

_LONG = 1 << 16  # elements from which the loss can be seen


def l2_lengths(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Return the l2 norm of each tensor, 0-d, computed in this dtype: on a CPU that of its rows first.

    >>> l2_lengths([torch.tensor([3.0, 4.0]), torch.zeros(0)], torch.float32)
    [tensor(5.), tensor(0.)]
    """
    rows = [torch.linalg.vector_norm(x, dim=-1, dtype=dtype) if _adds_one_by_one(x) else x for x in tensors]
    return list(torch._foreach_norm(rows, 2.0, dtype=dtype))


def _adds_one_by_one(x: Tensor) -> bool:
    return x.ndim > 1 and x.numel() >= _LONG and not machine.is_accelerator(x.device)


def inner_product(x: Tensor, y: Tensor) -> Tensor:
    """Return <x, y> of every pair of two stacks (batch, ...), (batch,).

    >>> inner_product(torch.ones(2, 3), torch.full((2, 3), 2.0))
    tensor([6., 6.])
    """
    if machine.is_accelerator(x.device) and x.ndim > 2 and x.numel():  # no copy of the product is made
        first, second = (z.reshape(-1, z.shape[-1]) for z in (x, y))
        return torch.bmm(first.unsqueeze(1), second.unsqueeze(2)).view(len(x), -1).sum(1)
    return (x * y).flatten(1).sum(1) if x.ndim > 1 else x * y
