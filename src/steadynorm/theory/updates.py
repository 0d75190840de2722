"""What the theory must know of each lmo's update u, as plain numbers: the shapes it fits, U^2 = |u|^2, its kernel.

`steadynorm.lmo` has the same rows with tensors, and takes the numbers from here; `predict` needs no torch.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steadynorm.theory.kernels import Overlap, matrix_sides, overlap

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Muon's quintic a s + b s^3 + c s^5: fast at first, never settles


@dataclass(frozen=True)
class Update:
    """One row of Table 1 in numbers."""

    name: str
    least_ndim: int  # of the parameter
    matrix_norm_sq: Callable[[int, int], float]  # |u|^2 of one d_out x d_in matrix

    def update_norm_sq(self, shape: Sequence[int], *, blocks: int = 1) -> float:
        """Return U^2 = |u|^2 for an exact polar factor.

        >>> UPDATES["spectral"].update_norm_sq((1536, 384))
        1536.0
        """
        self.check(shape, blocks)
        if self.name == "bias":
            return float(math.prod(shape))
        rows, columns = matrix_sides(self.name, shape, blocks)
        total = self.matrix_norm_sq(rows, columns) * (math.prod(shape) // (rows * columns))
        return total / math.prod(shape[2:]) ** 2 if self.name == "conv-tap" else total

    @property
    def is_polar(self) -> bool:
        """Whether the update is made of polar factors."""
        return self.matrix_norm_sq is _polar

    @property
    def blocks_dim(self) -> int:
        """The dimension of a parameter along which its blocks lie."""
        return -1 if self.name == "spectral-transposed" else 0 if self.name in ("conv", "conv-tap", "bias") else -2

    def overlap(self, shape: Sequence[int], *, blocks: int = 1) -> Overlap:
        """Return how updates overlap when their inputs correlate: see `overlap`."""
        self.check(shape, blocks)
        return overlap(self.name, shape, blocks=blocks)

    def check(self, shape: Sequence[int], blocks: int = 1) -> None:
        """Raise ValueError if this lmo does not fit a parameter of this shape."""
        shape = tuple(shape)
        if len(shape) < self.least_ndim:
            remedy = "use lmo='spectral'" if len(shape) == 2 else "use lmo='bias' for vectors and scalars"
            raise ValueError(
                f"lmo {self.name!r} needs {self.least_ndim} dimensions or more, got shape {shape}; {remedy}"
            )
        length, what = shape[self.blocks_dim] if shape else 1, "columns" if self.blocks_dim == -1 else "rows"
        if blocks < 1 or length % blocks:
            raise ValueError(f"blocks={blocks} does not divide the {length} {what} of shape {shape}; use blocks=1")


def _polar(d_out: int, d_in: int) -> float:
    return d_out / d_in * min(d_out, d_in)


@functools.lru_cache(maxsize=256)
def newton_schulz_share(d_out: int, d_in: int, coefficients: tuple[float, float, float], steps: int) -> float:
    """Return |u|^2 of Newton-Schulz over that of the exact polar factor, for a large Gaussian matrix.

    The iteration s <- a s + b s^3 + c s^5 acts on singular values over the Frobenius norm, of a d x d/c matrix

        sigma^2 = (1 + c + 2 sqrt(c) cos phi) / d,   density (2/pi) sin^2 phi / (1 + c + 2 sqrt(c) cos phi)

    and the share is the mean of s^2.

    >>> round(newton_schulz_share(384, 384, NEWTON_SCHULZ, 5), 2)
    0.86
    """
    small, large = sorted((d_out, d_in))
    ratio, grid = small / large, 4096
    phi = (np.arange(grid) + 0.5) * np.pi / grid
    x = 1 + ratio + 2 * math.sqrt(ratio) * np.cos(phi)
    s, (a, b, c) = np.sqrt(x / small), coefficients
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return float(2 / grid * np.sin(phi) ** 2 / x @ s**2)


UPDATES: dict[str, Update] = {
    update.name: update
    for update in (
        Update("spectral", 2, _polar),
        Update("spectral-transposed", 2, _polar),
        Update("conv", 3, _polar),
        Update("conv-tap", 3, _polar),
        Update("sign", 2, lambda m, n: m / n),
        Update("embedding", 2, lambda m, n: float(m * n)),
        Update("bias", 0, lambda _, n: float(n)),
        Update("row", 2, lambda m, n: m / n),
        Update("column", 2, lambda m, n: float(m * n)),
    )
}


def update_of(lmo: str, shape: Sequence[int]) -> Update:
    """Return the row of this name; "by-shape" chooses convolution, matrix or vector by the number of dimensions.

    >>> update_of("by-shape", (8, 3, 3, 3)).name, update_of("by-shape", (8,)).name
    ('conv', 'bias')
    """
    if lmo == "by-shape":
        return UPDATES["conv" if len(shape) > 2 else "spectral" if len(shape) == 2 else "bias"]
    if lmo not in UPDATES:
        raise ValueError(f"unknown lmo {lmo!r}; choose one of {', '.join(UPDATES)} or 'by-shape'")
    return UPDATES[lmo]
