"""The polar iteration on an accelerator: all matrices of a batch per kernel, few launches, little traffic.

Entries are read once to find each matrix's Frobenius norm, and once to scale and round the matrix to the working dtype.
From there on everything is a batched product in that dtype, with the polynomial's coefficients folded into its `alpha`
and `beta`. No operation waits for the device.

fp16 has three bits more than bf16, and products cost the same. Its range is no danger here: a matrix of Frobenius norm
`_SIZE` has singular values of at most `_SIZE`, so that no entry of R = y y^T or R^2 exceeds `_SIZE`^4 = 4096, whatever the
width, while 65504 is the largest number. The entries of a 16384 x 16384 matrix are then about 5e-4, well above 6e-5, below
which fp16 loses digits.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from steadynorm.machine import exact_dtype, widest_dtype
from steadynorm.polar import symmetric_kernels
from steadynorm.polar.coefficients import GRAM_MIN_ASPECT, GRAM_MIN_ROWS_BF16, Quintic

_SIZE = 8.0  # the Frobenius norm to which matrices are scaled
_GRAM_MIN_ROWS = {torch.bfloat16: GRAM_MIN_ROWS_BF16}  # other dtypes bear any number
_MOST_INVERSE = 20.0  # above 1 / norm of every scaled matrix of up to 10^5 rows but the zero matrix


def find_factors(
    batches: Sequence[Tensor], quintics: Sequence[Quintic], working: torch.dtype, *, published: bool, scale: float
) -> Tensor:
    """Return `scale` times the polar factor of each matrix, (matrices, d_out, d_in), in the working dtype.

    Args:
        batches: The matrices, (..., d_out, d_in) each, tall or wide, of any scale. All go through one iteration.
        quintics: The polynomials, one per step.
        working: fp16, bf16, or whatever x is in.
        published: Whether the first polynomial refers to the Frobenius norm, as published for Muon, or to Schatten-8.
        scale: What the factors are multiplied with; it costs nothing here.
    """
    d_out, d_in = batches[0].shape[-2:]
    tall, (rows, columns) = d_out > d_in, sorted((d_out, d_in))
    # No name is bound to the rounded matrices here: they are free as soon as the first step has used them.
    if not published and columns >= GRAM_MIN_ASPECT * rows and rows >= _GRAM_MIN_ROWS.get(working, 0):
        return _steps_on_gram(_wide(scale_and_round(batches, working)), quintics, tall, scale)
    return _steps_on_x(_wide(scale_and_round(batches, working)), quintics, tall, scale, published)


def _wide(x: Tensor) -> Tensor:
    """Return x or its transpose, (matrices, d, n) with d <= n."""
    return x.mT if x.shape[-2] > x.shape[-1] else x


def scale_and_round(batches: Sequence[Tensor], working: torch.dtype) -> Tensor:
    """Return the matrices of all batches, (matrices, d_out, d_in), scaled to Frobenius norm `_SIZE`; zero stays zero.

    The norm is summed in fp64, where the square of any fp32 number has room. One kernel divides in fp64, rounds to the
    working dtype and writes to where the matrices of this batch lie, so that joining batches copies nothing. A device
    without fp64 divides by the largest entry first.

    >>> scale_and_round([torch.full((1, 2, 2), 1e-44)], torch.float16)
    tensor([[[4., 4.],
             [4., 4.]]], dtype=torch.float16)
    """
    sides, counts = batches[0].shape[-2:], [x.numel() // math.prod(x.shape[-2:]) for x in batches]
    out = torch.empty(sum(counts), *sides, dtype=working, device=batches[0].device)
    wide = widest_dtype(out.device)
    tiny = max(1e-200, torch.finfo(wide).tiny)
    for x, part in zip(batches, out.split(counts), strict=True):
        if wide == torch.float32:
            x = x / torch.linalg.vector_norm(x, torch.inf, (-2, -1), keepdim=True, dtype=wide).clamp_(min=tiny)
        norm = torch.linalg.vector_norm(x, dim=(-2, -1), keepdim=True, dtype=wide)
        torch.div(x, torch.rsub(norm, tiny, alpha=-1 / _SIZE), out=part.view(x.shape))  # norm / _SIZE, never zero
    return out


def _steps_on_x(y: Tensor, quintics: Sequence[Quintic], tall: bool, scale: float, published: bool) -> Tensor:
    """y <- a y + (b A + c A^2) y,  A = y y^T: three products per step."""
    last = len(quintics) - 1
    y = _apply(
        _first_polynomial(symmetric(y, y.mT), quintics[0], published), y, tall and not last, 1.0 if last else scale
    )
    for k, (a, b, c) in enumerate(quintics[1:], start=1):
        gram, factor = symmetric(y, y.mT), scale if k == last else 1.0
        inner = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
        del gram  # each name that is let go is memory that a step does not need
        if tall and k == last:
            y = torch.baddbmm(y.mT, y.mT, inner, beta=a * factor, alpha=factor)
        else:
            y = torch.baddbmm(y, inner, y, beta=a * factor, alpha=factor)
        del inner
    return y


def _steps_on_gram(y: Tensor, quintics: Sequence[Quintic], tall: bool, scale: float) -> Tensor:
    """Iterate on R = y y^T: with P = a I + b R + c R^2, Q <- P Q and R <- P R P; then y <- Q y, and R again from y."""
    k = 0
    for count in _runs(len(quintics), y.dtype):
        gram = symmetric(y, y.mT)
        step = q = polynomial(gram, quintics[k]) if k else _first_polynomial(gram, quintics[0], published=False)
        for quintic in quintics[k + 1 : k + count]:
            gram = symmetric(symmetric(step, gram), step)
            step = polynomial(gram, quintic)
            q = symmetric(step, q)
        del gram, step
        k += count
        is_last = k == len(quintics)
        y = _apply(q, y, tall and is_last, scale if is_last else 1.0)
    return y


def _runs(steps: int, dtype: torch.dtype) -> list[int]:
    """Return how many steps go on one Gram matrix before it is computed again: its small eigenvalues drown in rounding.

    In bf16 they do so after two steps. An odd step goes before the last two, because as the last it would enlarge what
    their rounding pushed out of its interval. fp16 bears three steps once the first two have narrowed the spectrum.

    >>> _runs(5, torch.bfloat16), _runs(5, torch.float16), _runs(4, torch.float16)
    ([2, 1, 2], [2, 3], [2, 2])
    """
    runs: list[int] = []
    while (left := steps - sum(runs)) > 0:
        takes_all = left < 3 or (left == 3 and runs and dtype != torch.bfloat16)
        runs.append(left if takes_all else 1 if left == 3 else 2)
    return runs


def _apply(p: Tensor, y: Tensor, transpose: bool, scale: float) -> Tensor:
    """Return scale p y, or scale (p y)^T = scale y^T p for symmetric p."""
    left, right = (y.mT, p) if transpose else (p, y)
    return left @ right if scale == 1 else torch.baddbmm(y.new_empty(1, 1, 1), left, right, beta=0, alpha=scale)


def symmetric(a: Tensor, b: Tensor) -> Tensor:
    """Return a b, known to be symmetric."""
    if symmetric_kernels.is_enabled(a.device, a.dtype):
        return symmetric_kernels.symmetric_product(a, b)
    return a @ b


def polynomial(gram: Tensor, quintic: Quintic) -> Tensor:
    """Return a I + b R + c R^2."""
    a, b, c = quintic
    if symmetric_kernels.is_enabled(gram.device, gram.dtype):
        return symmetric_kernels.symmetric_polynomial(gram, a, b, c)
    out = torch.baddbmm(gram, gram, gram, beta=b, alpha=c)
    out.diagonal(dim1=-2, dim2=-1).add_(a)
    return out


def _first_polynomial(gram: Tensor, quintic: Quintic, published: bool) -> Tensor:
    """Return the polynomial of y over its norm s: (a/s) I + (b/s^3) R + (c/s^5) R^2, with an s for each matrix.

    s is the Frobenius norm, (trace R)^(1/2), or the Schatten-8 norm, |R^2|_F^(1/4).
    """
    a, b, c = quintic
    square, exact = symmetric(gram, gram), exact_dtype(gram)
    if published:
        inverse = gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=exact).pow_(-0.5)[..., None, None]
    else:
        inverse = torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=exact).pow_(-0.25)
    inverse.clamp_(max=_MOST_INVERSE)
    out = torch.mul(square, inverse.pow(5).mul_(c), out=square)  # in place, whatever dtype the factor has
    torch.addcmul(out, gram, inverse.pow(3), value=b, out=out)  # a method with `value` would be decomposed by dynamo
    out.diagonal(dim1=-2, dim2=-1).add_(inverse.squeeze(-1), alpha=a)
    return out
