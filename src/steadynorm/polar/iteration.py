"""The polar iteration: what a caller sees, and the CPU path, on x or on its Gram matrix; see the package for what makes it fast."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import torch
from torch import Tensor

from steadynorm import machine
from steadynorm.polar.accelerator import find_factors
from steadynorm.polar.coefficients import GRAM_MIN_ASPECT, GRAM_MIN_ROWS_BF16, Quintic, find_quintics

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}
_SINGLE_MIN_ROWS = 320  # rows from which a CPU takes matrices one by one


@dataclass(frozen=True)
class Sizes:
    """The sizes at which one way of computing overtakes another on a CPU, in one working dtype."""

    gram_rows: int  # rows from which the Gram form is used
    batch_max_elements: int  # elements of small matrices that are taken together
    block: int  # rows of a block in a symmetric product; half of the matrix at most


_BF16_SIZES = Sizes(gram_rows=GRAM_MIN_ROWS_BF16, batch_max_elements=600_000, block=128)
# Measured with AVX2: the Gram form wins from 32 rows at 1:4, and four blocks beat two at 384 rows.
_FP32_SIZES = Sizes(gram_rows=32, batch_max_elements=300_000, block=96)


def _sizes(dtype: torch.dtype) -> Sizes:
    return _BF16_SIZES if dtype == torch.bfloat16 else _FP32_SIZES


@dataclass(frozen=True)
class Polar:
    """A way to find polar factors, with its coefficients worked out: call it on a batch of matrices.

    Attributes:
        method: "express", "newton-schulz" or "svd".
        steps: How many.
        lower: Express is best for singular values from here to 1, relative to the Schatten-8 norm; by default from as low
            as this many steps can lift.
        dtype: The working dtype of the iteration. "auto": fp16 on an accelerator, bf16 on a CPU that has it, else fp32.
        keeps_dtype: Whether factors are in x's dtype; if not, an accelerator leaves them in the working dtype.

    >>> Polar("newton-schulz", 3).steps
    3
    """

    method: str = "express"
    steps: int = 5
    lower: float | None = None
    dtype: str = "auto"
    keeps_dtype: bool = True
    quintics: tuple[Quintic, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.dtype != "auto" and self.dtype not in DTYPES:
            raise ValueError(f"polar_dtype={self.dtype!r} is unknown; choose one of auto, {', '.join(DTYPES)}")
        object.__setattr__(self, "quintics", find_quintics(self.method, self.steps, self.lower))

    def __call__(self, x: Tensor, *, out: Tensor | None = None, scale: float = 1.0) -> Tensor:
        """Return `scale` times the polar factor of each matrix of x (..., d_out, d_in), tall or wide.

        fp64 is computed in fp64 throughout, everything else in the working dtype (svd: fp32). Any scale of x will do,
        denormals included. The result is written to `out`, contiguous memory like x or x itself, else to new memory. Autocast
        changes nothing.
        """
        if _is_autocast(x.device):
            with torch.autocast(x.device.type, enabled=False):
                return self(x, out=out, scale=scale)
        if x.ndim < 2:
            raise ValueError(f"polar: needs matrices, got shape {tuple(x.shape)}")
        if x.numel() and self._is_joint(x):
            factors = self.find_all([x], scale=scale)[0]
            return factors if out is None else out.copy_(factors)
        working = self.working_dtype(x.dtype, x.device, x.shape)
        if out is None:
            out = torch.empty_like(x, memory_format=torch.contiguous_format)
        if x.numel():
            _polar(x, self, working, out)
        return out.mul_(scale)

    def find_all(self, batches: Sequence[Tensor], *, scale: float = 1.0) -> list[Tensor]:
        """Return `scale` times the polar factors of several batches of matrices of one size and dtype.

        On an accelerator all of them go through one iteration, and none is copied for it.
        """
        first = batches[0]
        if _is_autocast(first.device):
            with torch.autocast(first.device.type, enabled=False):
                return self.find_all(batches, scale=scale)
        if not self._is_joint(first):
            return [self(x, scale=scale) for x in batches]
        working, published = self.working_dtype(first.dtype, first.device, first.shape), self.method == "newton-schulz"
        factors = find_factors(batches, self.quintics, working, published=published, scale=scale)
        factors = factors.to(first.dtype) if self.keeps_dtype else factors
        counts = [x.numel() // math.prod(x.shape[-2:]) for x in batches]
        return [part.view(x.shape) for part, x in zip(factors.split(counts), batches, strict=True)]

    def _is_joint(self, x: Tensor) -> bool:
        """Return whether all such matrices go through the iteration together: on an accelerator, and in fp16."""
        is_half = self.working_dtype(x.dtype, x.device, x.shape) == torch.float16
        return self._iterates(x.shape) and (machine.is_accelerator(x.device) or is_half)

    def _iterates(self, shape: Sequence[int]) -> bool:
        """Return whether such matrices are iterated on: svd has no iteration, and vectors need none but Muon's own."""
        return bool(self.quintics) and (min(shape[-2:]) > 1 or self.method == "newton-schulz")

    def working_dtype(self, dtype: torch.dtype, device: torch.device, shape: Sequence[int]) -> torch.dtype:
        """Return the dtype to which such matrices are rounded before the iteration, and their factors after it."""
        if dtype == torch.float64:
            return dtype
        if not self._iterates(shape):
            return torch.float32
        if self.dtype != "auto":
            return DTYPES[self.dtype]
        return machine.matmul_dtype(device) if device.type == "cpu" else torch.float16


def _is_autocast(device: torch.device) -> bool:
    return device.type != "meta" and torch.is_autocast_enabled(device.type)


def polar_factor(x: Tensor, *, method: str = "express", steps: int = 5) -> Tensor:
    """Return the polar factor of each matrix of x (..., d_out, d_in), tall or wide, in x's dtype.

    >>> x = torch.tensor([[3.0, 0.0], [0.0, -1e-20]], dtype=torch.float64)
    >>> polar_factor(x, method="svd")[0, 0].item()
    1.0
    """
    return Polar(method, steps)(x)


def _polar(x: Tensor, polar: Polar, working: torch.dtype, out: Tensor) -> None:
    """Write the factors to `out` in groups of matrices, each scaled by a power of two first."""
    exact = machine.exact_dtype(x)
    matrices, results = (
        t.flatten(0, -3) if t.ndim > 2 else t.unsqueeze(0) for t in (x, out)
    )  # (matrices, d_out, d_in)
    for low, high in _groups(matrices, working, svd=not polar.quintics):
        part = _scaled(matrices.narrow(0, low, high - low), working, exact)
        torch._foreach_copy_([results.narrow(0, low, high - low)], [_factor(part, polar)])


def _scaled(x: Tensor, working: torch.dtype, exact: torch.dtype) -> Tensor:
    """Return a copy in the working dtype, times the power of two that brings the largest entry to [0.5, 1).

    The power is applied as two factors: 2^148, which the smallest denormal needs, is not a number in fp32. The first
    comes before rounding to bf16, which would take a denormal to zero.
    """
    exponent = torch.frexp(_largest(x).to(exact)).exponent
    half = exponent // 2
    first, second = (torch.exp2(-power.to(exact)) for power in (half, exponent - half))
    return (x * first).to(working).mul_(second.to(working))


def _largest(x: Tensor) -> Tensor:
    """Return max |x| of each matrix, (matrices, 1, 1), without a temporary of x's size."""
    return torch.maximum(x.amax((-2, -1), keepdim=True), -x.amin((-2, -1), keepdim=True))


def _groups(x: Tensor, working: torch.dtype, *, svd: bool) -> list[tuple[int, int]]:
    """Return which matrices are processed together: all on an accelerator, on a CPU what stays in its cache."""
    count, rows, columns = x.shape
    if svd or x.device.type != "cpu":
        return [(0, count)]
    together = (
        1 if min(rows, columns) >= _SINGLE_MIN_ROWS else max(2, _sizes(working).batch_max_elements // (rows * columns))
    )
    return [(low, min(low + together, count)) for low in range(0, count, together)]


def _factor(x: Tensor, polar: Polar) -> Tensor:
    quintics, published = polar.quintics, polar.method == "newton-schulz"
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x  # (matrices, d, n), d <= n
    if y.shape[-2] == 1 and not published:  # a vector: nothing to iterate, but Muon does
        norm = y.norm(dim=-1, keepdim=True)
        return x / torch.where(norm > 0, norm, 1.0)
    if not quintics:
        return _svd(x)
    if len(y) == 1 and not torch.compiler.is_compiling():  # inductor (2.13) gets NaN out of the two-dimensional form
        y = y.squeeze(0)  # two dimensions: their products need no copies
    flat = y.shape[-2] >= _sizes(y.dtype).gram_rows and y.shape[-1] >= GRAM_MIN_ASPECT * y.shape[-2]
    if flat and not published:
        return _steps_on_gram(y, quintics, tall).view(x.shape)
    return _steps_on_x(y, quintics, tall, _frobenius if published else _schatten8).view(x.shape)


def _svd(x: Tensor) -> Tensor:
    finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    u, s, vh = torch.linalg.svd(torch.where(finite, x, 0.0), full_matrices=False)
    rank = s > s.amax(-1, keepdim=True) * (max(x.shape[-2:]) * torch.finfo(x.dtype).eps)
    return torch.where(finite, (u * rank.unsqueeze(-2)) @ vh, math.nan)


def _steps_on_x(y: Tensor, quintics: Sequence[Quintic], tall: bool, norm: "Norm") -> Tensor:
    """y <- a y + (b A + c A^2) y,  A = y y^T: 3 products per step, two of them symmetric. tall: y^T in the last step."""
    last = len(quintics) - 1
    y = _apply(_first_polynomial(_symmetric(y, y.mT), quintics[0], norm), y, tall and last == 0)
    for k, (a, b, c) in enumerate(quintics[1:], start=1):
        gram = _symmetric(y, y.mT)
        inner = _symmetric(gram, gram, b / c)
        product = torch.addmm if y.ndim == 2 else torch.baddbmm  # rounds once
        y = product(y.mT, y.mT, inner, beta=a, alpha=c) if tall and k == last else product(y, inner, y, beta=a, alpha=c)
    return y


def _steps_on_gram(y: Tensor, quintics: Sequence[Quintic], tall: bool) -> Tensor:
    """Iterate on the small matrix R = y y^T: with P = a I + b R + c R^2, Q <- P Q and R <- P R P, then y <- Q y.

    All of them are polynomials of one R, so they commute and every product is symmetric. R's small eigenvalues drown
    in bf16 rounding after two steps (without a restart the iteration diverges): then y <- Q y, and R again from y. An odd step
    goes by itself before the last two: as the last, it would enlarge what their rounding pushed out of its interval. y is
    overwritten: of the long matrices there are two at a time.
    """
    spare, k = None, 0
    while (left := len(quintics) - k) > 0:
        alone = left in (1, 3)
        gram = _symmetric(y, y.mT)
        q = _first_polynomial(gram, quintics[0], _schatten8) if k == 0 else _polynomial(gram, quintics[k])
        if not alone:
            gram = _symmetric(_symmetric(q, gram), q)
            q = _symmetric(_polynomial(gram, quintics[k + 1]), q)
        k += 1 if alone else 2
        y, spare = _apply(q, y, tall and k == len(quintics), spare), y
    return y


def _apply(p: Tensor, y: Tensor, transpose: bool, spare: Tensor | None = None) -> Tensor:
    """Return p y, or (p y)^T = y^T p for symmetric p, contiguous; in the memory of `spare` if that is given."""
    if spare is None or spare.ndim > 2:
        return y.mT @ p if transpose else p @ y
    return torch.mm(y.mT, p, out=spare.mT) if transpose else torch.mm(p, y, out=spare)


def _polynomial(gram: Tensor, quintic: Quintic) -> Tensor:
    """Return a I + b R + c R^2."""
    a, b, c = quintic
    out = torch.add(_symmetric(gram, gram), gram, alpha=b / c).mul_(c)
    out.diagonal(dim1=-2, dim2=-1).add_(a)
    return out


Norm: TypeAlias = Callable[[Tensor, Tensor, torch.dtype], Tensor]  # of y, given R = y y^T and R^2: (..., 1, 1)


def _schatten8(gram: Tensor, square: Tensor, exact: torch.dtype) -> Tensor:
    """(sum sigma^8)^(1/8) = |R^2|_F^(1/4): the tightest bound on the largest singular value to be had for nothing."""
    return torch.linalg.vector_norm(square, dim=(-2, -1), keepdim=True, dtype=exact).pow(0.25)


def _frobenius(gram: Tensor, square: Tensor, exact: torch.dtype) -> Tensor:
    """(sum sigma^2)^(1/2) = (trace R)^(1/2): what Muon and the published Scion divide by."""
    return gram.diagonal(dim1=-2, dim2=-1).sum(-1, dtype=exact).sqrt()[..., None, None]


def _first_polynomial(gram: Tensor, quintic: Quintic, norm: Norm) -> Tensor:
    """Return the polynomial of the matrix scaled by its norm s: (a/s) I + (b/s^3) R + (c/s^5) R^2."""
    a, b, c = quintic
    square = _symmetric(gram, gram)
    exact = machine.exact_dtype(gram)
    size = norm(gram, square, exact)
    inverse = torch.where(size > 0, 1 / size, 0.0)
    out = (square * (c * inverse**5)).addcmul_(gram.to(exact), b * inverse**3)
    out.diagonal(dim1=-2, dim2=-1).add_(a * inverse.squeeze(-1))
    return out.to(gram.dtype)


def _symmetric(a: Tensor, b: Tensor, plus: float = 0.0) -> Tensor:
    """Return a b + plus a, known to be symmetric: of one large matrix, only the blocks on and below the diagonal.

    The sum is rounded once: in bf16, rounding the product first would double or triple the error of five steps.
    """
    side = a.shape[-2]
    if a.ndim > 2 or side < _SINGLE_MIN_ROWS or a.device.type != "cpu":
        if not plus:
            return a @ b
        return (torch.addmm if a.ndim == 2 else torch.baddbmm)(a, a, b, beta=plus)
    out = a.new_empty(side, side)
    width = _block(side, a.shape[-1], a.dtype)
    for low in range(0, side, width):
        high = min(low + width, side)
        part = out[low:high, :high]
        if plus:
            torch.addmm(a[low:high, :high], a[low:high], b[:, :high], beta=plus, out=part)
        else:
            torch.mm(a[low:high], b[:, :high], out=part)
        if low:
            out[:low, low:high] = out[low:high, :low].mT
    return out


def _block(side: int, length: int, dtype: torch.dtype) -> int:
    """Return how many rows a block has; short calls are kept few, because threads share the interpreter."""
    block = _sizes(dtype).block
    if dtype != torch.bfloat16:
        return block if side <= 4 * block else 2 * block
    return block if side > 4 * block or length >= 2 * side else (side + 1) // 2
