"""Polar factor of a batch of matrices: U V^T of the reduced SVD, without the SVD.

    polar(x) = U V^T,   x = U diag(sigma) V^T

"express" is PolarExpress: odd quintics composed so that the worst error over [lower, 1] is least; "newton-schulz" is
the iteration of Muon and the published Scion, one fixed quintic after division by the Frobenius norm; "svd" is exact.
Directions with no singular value (zero matrices, missing rank) stay zero; a matrix with a NaN becomes NaN and does not
affect its neighbours.

What makes it fast at a small error, each measured on two CPU cores with native bf16:

| choice | instead of | gain |
|---|---|---|
| scale by the Schatten-8 norm, given away by the first step: |(x x^T)^2|_F^(1/4) | Frobenius norm | one step less at the same error |
| sides 1:1.5 and flatter, from 192 rows: iterate on the small Gram matrix, multiply into x every second step | on x | 1.3x at 1:4 |
| symmetric products by row blocks, from 320 rows: little more than half of the work | whole products | 1.1x at 384, 1.4x at 768 |
| below that a few matrices at a time, so that they stay in cache | one by one, or all at once | 1.5x at 256 |
| one matrix to a core (optim/buckets.py) | two cores to a product | 1.2x at 384 |

On a CPU without bf16 instructions the working dtype is fp32, with sizes of its own (`Sizes`).

Tried and left: symmetric products of batches (blocks of a batch are copied first: slower), degree-9 polynomials (as many
products for the same reach), a last step by least squares instead of minimax (no gain), fp32 where bf16 is
native (2x slower).
"""

from typing import TYPE_CHECKING

from steadynorm.polar.coefficients import METHODS, find_quintics

if TYPE_CHECKING:
    from steadynorm.polar.iteration import Polar, polar_factor

__all__ = ["METHODS", "Polar", "find_quintics", "polar_factor"]


def __getattr__(name: str) -> object:
    """Import what needs torch when it is first used: `steadynorm.jax` takes the coefficients only."""
    if name not in ("Polar", "polar_factor"):
        raise AttributeError(f"module 'steadynorm.polar' has no attribute {name!r}")
    from steadynorm.polar import iteration

    return getattr(iteration, name)
