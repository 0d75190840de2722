"""Polar factor of a batch of matrices: U V^T of the reduced SVD, without the SVD.

    polar(x) = U V^T,   x = U diag(sigma) V^T

"express" is PolarExpress: odd quintics composed so that the worst error over [lower, 1] is least; "newton-schulz"
uses one fixed quintic (the peers' choice); "svd" is exact. Matrices are scaled by their largest entry first and, in
the iterations, by the Schatten-8 norm, which the first Gram matrix gives away: |(x x^T)^2|_F^(1/4) >= sigma_max.
Directions with no singular value (zero matrices, missing rank) stay zero; a matrix with a NaN stays NaN and leaves
its neighbours alone.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

import numpy as np
import torch
from torch import Tensor

METHODS = ("express", "newton-schulz", "svd")

Quintic: TypeAlias = tuple[float, float, float]  # p(s) = a s + b s^3 + c s^5

_NEWTON_SCHULZ: Quintic = (3.4445, -4.7750, 2.0315)  # Muon's: fast at first, never settles
_LOWER = 1e-3  # smallest relative singular value the composition is optimal for
_SAFETY = 1.01  # room for bf16 rounding above 1
_CUSHION = 0.024  # keeps the early polynomials from being too steep for bf16


@dataclass(frozen=True)
class Polar:
    """A way to find polar factors, with its coefficients worked out: call it on a batch of matrices.

    >>> Polar("newton-schulz", 3).steps
    3
    """

    method: str = "express"
    steps: int = 5
    quintics: tuple[Quintic, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "quintics", coefficients(self.method, self.steps))

    def __call__(self, x: Tensor) -> Tensor:
        """Polar factor of each matrix of x (..., d_out, d_in), tall or wide, in x's dtype.

        fp64 is computed in fp64 throughout, everything else in bf16 (svd: fp32). Scale does not matter.
        """
        if x.ndim < 2:
            raise ValueError(f"polar: needs matrices, got shape {tuple(x.shape)}")
        return x.clone() if x.numel() == 0 else _polar(x, self.quintics)


def polar(x: Tensor, *, method: str = "express", steps: int = 5) -> Tensor:
    """Polar factor of each matrix of x (..., d_out, d_in), tall or wide, in x's dtype.

    >>> x = torch.tensor([[3.0, 0.0], [0.0, -1e-20]], dtype=torch.float64)
    >>> polar(x, method="svd")[0, 0].item()
    1.0
    """
    return Polar(method, steps)(x)


def _polar(x: Tensor, quintics: Sequence[Quintic]) -> Tensor:
    """Wide, scaled by the largest entry, then iterated; no quintics: by SVD."""
    tall = x.shape[-2] > x.shape[-1]
    wide = (x.mT if tall else x).to(torch.float64 if x.dtype == torch.float64 else torch.float32)
    largest = wide.abs().amax((-2, -1), keepdim=True)
    wide = wide / torch.where(largest > 0, largest, 1.0)
    if wide.shape[-2] == 1:  # a vector: nothing to iterate
        norm = wide.norm(dim=-1, keepdim=True)
        out = wide / torch.where(norm > 0, norm, 1.0)
    elif quintics:
        out = _iterate(wide, quintics)
    else:
        out = _svd(wide)
    return (out.mT if tall else out).to(x.dtype)


def _svd(x: Tensor) -> Tensor:
    finite = x.isfinite().all(-1, keepdim=True).all(-2, keepdim=True)
    u, s, vh = torch.linalg.svd(torch.where(finite, x, 0.0), full_matrices=False)
    rank = s > s.amax(-1, keepdim=True) * (max(x.shape[-2:]) * torch.finfo(x.dtype).eps)
    return torch.where(finite, (u * rank.unsqueeze(-2)) @ vh, math.nan)


def _iterate(x: Tensor, quintics: Sequence[Quintic]) -> Tensor:
    """x <- a x + (b A + c A^2) x with A = x x^T, after scaling x by its Schatten-8 norm."""
    y = x if x.dtype == torch.float64 else x.bfloat16()
    for k, (a, b, c) in enumerate(quintics):
        gram = y @ y.mT  # (..., d, d)
        square = gram @ gram
        if k == 0:
            size = square.to(x.dtype).norm(dim=(-2, -1), keepdim=True).sqrt().sqrt()
            scale = torch.where(size > 0, 1 / size, 1.0)
            y, gram, square = ((t * scale**power).to(y.dtype) for t, power in ((y, 1), (gram, 2), (square, 4)))
        y = a * y + (b * gram + c * square) @ y
    return y


@functools.lru_cache(maxsize=64)
def coefficients(method: str, steps: int) -> tuple[Quintic, ...]:
    """The quintics of a method; none for svd.

    >>> len(coefficients("express", 4))
    4
    """
    if method not in METHODS:
        raise ValueError(f"polar={method!r} is unknown; choose one of {', '.join(METHODS)}")
    if method == "svd":
        return ()
    if not (isinstance(steps, int) and 1 <= steps <= 50):
        raise ValueError(f"polar_steps={steps!r} must be a whole number from 1 to 50")
    if method == "newton-schulz":
        return (_NEWTON_SCHULZ,) * steps
    return _compose(steps, _LOWER)


def _compose(steps: int, lower: float) -> tuple[Quintic, ...]:
    """The composition of quintics that is minimax-optimal for singular values in [lower, 1].

    Greedy is optimal (Amsel et al., PolarExpress): each quintic is best for the interval the ones before it leave.
    """
    low, high = lower, 1.0
    found = []
    for k in range(steps):
        a, b, c = _best_quintic(max(low, _CUSHION * high), high)

        def p(s: float, a: float = a, b: float = b, c: float = c) -> float:
            return s * (a + s * s * (b + s * s * c))

        centre = (p(low) + p(high)) / 2 if low < _CUSHION * high else 1.0  # the cushion shifted it
        a, b, c = a / centre, b / centre, c / centre
        low = low * (a + low**2 * (b + low**2 * c))
        high = 2 - low
        shrink = _SAFETY if k < steps - 1 else 1.0
        found.append((a / shrink, b / shrink**3, c / shrink**5))
    return tuple(found)


def _best_quintic(low: float, high: float) -> Quintic:
    """argmin over odd quintics of max |1 - p(s)|, s in [low, high]: Remez exchange on four points."""
    if low / high > 1 - 1e-5:
        return 15 / 8 / high, -10 / 8 / high**3, 3 / 8 / high**5
    q, r = (3 * low + high) / 4, (low + 3 * high) / 4
    a = b = c = 0.0
    before = math.inf
    for _ in range(100):
        points = np.array([low, q, r, high])
        system = np.stack([points, points**3, points**5, np.array([1.0, -1.0, 1.0, -1.0])], axis=1)
        a, b, c, error = np.linalg.solve(system, np.ones(4))
        if abs(error - before) < 1e-15:
            break
        before = error
        root = math.sqrt(9 * b * b - 20 * a * c)
        q, r = (math.sqrt((-3 * b - sign * root) / (10 * c)) for sign in (1, -1))
    return float(a), float(b), float(c)
