"""Cross-entropy of a linear layer with many outputs, without all its logits in memory at once."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import cross_entropy, linear

LOGITS_AT_ONCE = 2**28  # elements: 1 GiB in fp32
_NOTHING = -(2**62)  # ignore_index: a target of -100 is an error, not a token to skip


def linear_cross_entropy(x: Tensor, weight: Tensor, targets: Tensor, *, at_once: int = LOGITS_AT_ONCE) -> Tensor:
    """Return the mean of -log softmax(x W^T)[target], with logits, softmax and sum in fp32.

    More than `at_once` logits are computed in pieces together with their gradient: no product is computed twice, and
    memory is that of one piece and of the gradient of `weight`. Products use autocast's dtype. In pieces there is no
    second derivative.

    Args:
        x: (tokens, width).
        weight: (vocabulary, width).
        targets: (tokens,), each below vocabulary.
        at_once: Largest number of logits in memory.

    >>> x, weight, targets = torch.eye(3), torch.eye(3), torch.tensor([0, 1, 1])
    >>> whole, pieces = (linear_cross_entropy(x, weight, targets, at_once=n) for n in (9, 3))
    >>> round(whole.item(), 4), round(pieces.item(), 4)
    (0.8848, 0.8848)
    """
    if targets.shape != x.shape[:1]:
        raise ValueError(f"targets {tuple(targets.shape)} for x {tuple(x.shape)}: pass one target per row of x")
    targets = targets.long()
    rows = max(1, at_once // weight.shape[0])
    if len(x) <= rows:
        return cross_entropy(linear(x, weight).float(), targets, ignore_index=_NOTHING)
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    return _InPieces.apply(x, weight, targets, rows, dtype, torch.is_grad_enabled())  # pyright: ignore[reportReturnType]


class _InPieces(torch.autograd.Function):
    """Use d loss / d logits = (softmax - one-hot) / tokens, available as soon as the logits are."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, targets: Tensor, rows: int, dtype: torch.dtype, with_grad: bool
    ) -> Tensor:
        low_x, low_weight = x.to(dtype), weight.to(dtype)
        total = torch.zeros((), dtype=torch.float32, device=x.device)
        x_grads, weight_grad = [], torch.zeros_like(weight) if with_grad else None
        for piece, target in zip(low_x.split(rows), targets.unsqueeze(1).split(rows), strict=True):
            logits = linear(piece, low_weight).float()  # (rows, vocabulary)
            log_sum = logits.logsumexp(1, keepdim=True)
            total += (log_sum - logits.gather(1, target)).sum()
            if weight_grad is not None:
                slope = logits.sub_(log_sum).exp_().scatter_add_(1, target, torch.full_like(log_sum, -1.0)).to(dtype)
                x_grads.append(slope @ low_weight)
                weight_grad += slope.T @ piece
        if weight_grad is not None:
            ctx.save_for_backward(torch.cat(x_grads).to(x.dtype), weight_grad)
        return total / len(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_grad, weight_grad = ctx.saved_tensors
        scale = grad / len(x_grad)
        return x_grad * scale, weight_grad * scale, None, None, None, None
