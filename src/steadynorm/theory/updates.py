"""Table 1 of the paper in plain numbers: the shapes each lmo fits, U^2 = |u|^2 of its update u, and its overlap kernel.

`steadynorm.lmo` completes each row with its functions of tensors. `predict` needs the numbers only, and no torch.
"""

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steadynorm import views
from steadynorm.theory.kernels import LINEAR, Overlap, mean_kernel, spectral_kernel, vector_kernel
from steadynorm.views import INPUTS, BlockLayout, BlockRun, Blocks, MatrixView

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Muon's quintic a s + b s^3 + c s^5: fast at first, never converges
BY_SHAPE = "by-shape"
MUON_ADJUST = ("original", "match_rms_adamw")
MUON_ROWS = ("spectral", "spectral-transposed", "conv")  # how Muon may see a parameter as matrices
MUON_ITERATION = (NEWTON_SCHULZ, 5)  # torch.optim.Muon's default ns_coefficients and ns_steps


@dataclass(frozen=True)
class Update:
    """One row of Table 1 in numbers.

    Attributes:
        name: what the row is called in a parameter group.
        view: how it sees a parameter as matrices.
        matrix_norm_sq: |u|^2 of one d_out x d_in matrix.
        kernel: the overlap kernel of one d_out x d_in matrix.
        is_polar: whether the update is made of polar factors.
        is_elementwise: whether elements do not see each other, so that the kernel does not depend on the shape.
        row_separable: whether rows do not see each other.
    """

    name: str
    view: MatrixView
    matrix_norm_sq: Callable[[int, int], float]
    kernel: Callable[[int, int], Overlap]
    is_polar: bool = False
    is_elementwise: bool = False
    row_separable: bool = False

    def update_norm_sq(self, shape: Sequence[int], *, blocks: Blocks = 1) -> float:
        """Return U^2 = |u|^2 for an exact polar factor: the sum of that of all blocks.

        >>> UPDATES["spectral"].update_norm_sq((1536, 384)), UPDATES["spectral"].update_norm_sq((24, 16), blocks=(16, 8))
        (1536.0, 20.0)
        """
        self.check(shape, blocks)
        if not math.prod(shape):
            return 0.0
        return sum(map(self._run_norm_sq, self.view.runs(shape, blocks)))

    def sides(self, shape: Sequence[int], blocks: Blocks = 1) -> list[tuple[int, int]]:
        """Return (d_out, d_in) of the matrices in a parameter of this shape, one pair per run of equal blocks."""
        return [(run.d_out, run.d_in) for run in self.view.runs(shape, blocks)]

    def _run_norm_sq(self, run: BlockRun) -> float:
        return self.matrix_norm_sq(run.d_out, run.d_in) * run.matrices / run.divisor**2

    def overlap(self, shape: Sequence[int], *, blocks: Blocks = 1) -> Overlap:
        """Return the overlap kernel for a parameter of this shape: the mean of its blocks', weighted by their U^2."""
        self.check(shape, blocks)
        kernels = tuple(self.kernel(*pair) for pair in self.sides(shape, blocks))
        if len(kernels) == 1 or not math.prod(shape):
            return kernels[0]
        return mean_kernel(kernels, tuple(map(self._run_norm_sq, self.view.runs(shape, blocks))))

    def check(self, shape: Sequence[int], blocks: Blocks = 1) -> None:
        """Raise ValueError if this lmo does not fit a parameter of this shape."""
        if len(shape) < self.view.least_ndim:
            remedy = "use lmo='spectral'" if len(shape) == 2 else "use lmo='bias' for vectors and scalars"
            raise ValueError(
                f"lmo {self.name!r} needs {self.view.least_ndim} dimensions or more, got shape {tuple(shape)}; {remedy}"
            )
        layout = BlockLayout.of(blocks)
        if layout.side == INPUTS and not self.is_polar:
            raise ValueError(
                f"blocks={layout.plain!r}: only spectral lmos see blocks of the inputs, not {self.name!r}; use blocks=1"
            )
        self.view.check_blocks(shape, layout)

    def length_share(self, shape: Sequence[int], blocks: Blocks, method: str, steps: int) -> float:
        """Return |u|^2 over that of an exact lmo, given how polar factors are found; for Gaussian momentum.

        Only Newton-Schulz falls short. Of blocks it is the mean of theirs, weighted by their U^2.
        """
        if method != "newton-schulz" or not self.is_polar:
            return 1.0
        shares = [newton_schulz_share(*pair, NEWTON_SCHULZ, steps) for pair in self.sides(shape, blocks)]
        if len(shares) == 1 or not math.prod(shape):
            return shares[0]
        return float(np.average(shares, weights=[self._run_norm_sq(run) for run in self.view.runs(shape, blocks)]))


@functools.lru_cache(maxsize=256)
def newton_schulz_share(d_out: int, d_in: int, coefficients: tuple[float, float, float], steps: int) -> float:
    """Return |u|^2 of Newton-Schulz over that of the exact polar factor, for a Gaussian matrix, in the limit of a large one.

    The iteration s <- a s + b s^3 + c s^5 acts on the singular values over the Frobenius norm, for a d x d/c matrix

        sigma^2 = (1 + c + 2 sqrt(c) cos phi) / d,   density (2/pi) sin^2 phi / (1 + c + 2 sqrt(c) cos phi)

    and the result is the mean of s^2. No singular value exceeds the Frobenius norm, although this law would let some do so
    in a matrix of two or three rows; that of a vector equals it.

    >>> round(newton_schulz_share(384, 384, NEWTON_SCHULZ, 5), 2)
    0.86
    """
    small, large = sorted((d_out, d_in))
    ratio, grid = small / large, 4096
    phi = (np.arange(grid) + 0.5) * np.pi / grid
    x = 1 + ratio + 2 * math.sqrt(ratio) * np.cos(phi)
    s = np.minimum(np.sqrt(x / small), 1.0) if small > 1 else np.ones(grid)
    a, b, c = coefficients
    for _ in range(steps):
        s = a * s + b * s**3 + c * s**5
    return float(2 / grid * np.sin(phi) ** 2 / x @ s**2)


def muon_factor(adjust: str, shape: Sequence[int]) -> float:
    """Return what torch.optim.Muon multiplies lr by: sqrt(max(1, d_out/d_in)), or 0.2 sqrt(max(d_out, d_in)).

    >>> muon_factor("original", (1536, 384)), muon_factor("match_rms_adamw", (100, 25))
    (2.0, 2.0)
    """
    if adjust not in MUON_ADJUST:
        raise ValueError(f"adjust={adjust!r} is unknown; choose one of {', '.join(MUON_ADJUST)}")
    rows, columns = shape[0], shape[1]
    return math.sqrt(max(1, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))


def muon_adam_lr(lr: float, adjust: str | None) -> float:
    """Return the lr of the AdamW beside Muon, by default: Muon's if its updates have AdamW's RMS, else a twentieth of it.

    >>> muon_adam_lr(0.02, "original"), muon_adam_lr(1e-3, "match_rms_adamw")
    (0.001, 0.001)
    """
    return lr if adjust == "match_rms_adamw" else lr / 20


def muon_update_norm_sq(
    shape: Sequence[int], adjust: str = "original", iteration: tuple[tuple[float, float, float], int] = MUON_ITERATION
) -> float:
    """Return |u|^2 of torch.optim.Muon, its lr adjustment included, for Gaussian momentum.

        muon_factor^2 min(d_out, d_in) * the share that Newton-Schulz reaches of an exact polar factor

    >>> round(muon_update_norm_sq((384, 384)) / 384, 2)
    0.86
    """
    return muon_factor(adjust, shape) ** 2 * min(shape) * newton_schulz_share(shape[0], shape[1], *iteration)


def _polar_row(name: str, view: MatrixView) -> Update:
    return Update(name, view, lambda m, n: m / n * min(m, n), spectral_kernel, is_polar=True)


def _element_row(name: str, matrix_norm_sq: Callable[[int, int], float]) -> Update:
    return Update(
        name, views.MATRIX, matrix_norm_sq, lambda m, n: vector_kernel(1), is_elementwise=True, row_separable=True
    )


UPDATES: dict[str, Update] = {
    update.name: update
    for update in (
        _polar_row("spectral", views.MATRIX),
        _polar_row("spectral-transposed", views.TRANSPOSED),
        _polar_row("conv", views.FLATTENED),
        _polar_row("conv-tap", views.PER_TAP),
        _element_row("sign", lambda m, n: m / n),
        _element_row("embedding", lambda m, n: float(m * n)),
        Update("bias", views.VECTOR, lambda m, n: float(n), lambda m, n: vector_kernel(n)),
        Update("row", views.MATRIX, lambda m, n: m / n, lambda m, n: vector_kernel(n), row_separable=True),
        Update("column", views.MATRIX, lambda m, n: float(m * n), lambda m, n: vector_kernel(m)),
    )
}
_OTHER_KERNELS = {"linear": lambda: LINEAR, "adam": lambda: LINEAR, "lion": lambda: vector_kernel(1)}


def update_of(lmo: str, shape: Sequence[int]) -> Update:
    """Return the row of this name; "by-shape" chooses convolution, matrix or vector by the number of dimensions.

    >>> update_of("by-shape", (8, 3, 3, 3)).name, update_of("by-shape", (8,)).name
    ('conv', 'bias')
    """
    if lmo == BY_SHAPE:
        return UPDATES["conv" if len(shape) > 2 else "spectral" if len(shape) == 2 else "bias"]
    if lmo not in UPDATES:
        raise ValueError(f"unknown lmo {lmo!r}; choose one of {', '.join(UPDATES)} or {BY_SHAPE!r}")
    return UPDATES[lmo]


def muon_row(lmo: str | None, shape: Sequence[int]) -> Update:
    """Return the row that says how Muon sees a parameter of this shape as matrices; None chooses by shape.

    >>> muon_row(None, (8, 3, 3, 3)).name, muon_row("spectral-transposed", (4, 8)).name
    ('conv', 'spectral-transposed')
    """
    if len(shape) < 2:
        raise ValueError(
            f"Muon takes matrices, and this has shape {tuple(shape)}; put it in a group with use_muon=False (Adam)"
        )
    row = update_of(BY_SHAPE if lmo is None else lmo, shape)
    if row.name not in MUON_ROWS:
        raise ValueError(f"lmo={lmo!r} is not Muon's; choose one of {', '.join(MUON_ROWS)}, or use_muon=False for Adam")
    return row


def overlap(lmo: str, shape: Sequence[int] | None, *, blocks: Blocks = 1) -> Overlap:
    """Return the overlap kernel of an lmo on a parameter of this shape.

    The spectral kernel is that of large Gaussian matrices (free probability). A matrix with one row or column is a
    normalised vector and gets that kernel, which is exact.

    Args:
        lmo: "linear", "spectral", "spectral-transposed", "conv", "conv-tap", "sign", "embedding", "lion", "bias", "row",
            "column" or "adam".
        shape: the parameter's shape; not needed for linear, adam, sign, embedding and lion.
        blocks: which blocks are independent matrices, as in Scion (fused QKV: 3).

    Examples:
        >>> round(overlap("spectral", (384, 384))(0.5), 4)
        0.3764
    """
    if lmo in _OTHER_KERNELS:
        return _OTHER_KERNELS[lmo]()
    if lmo not in UPDATES:
        raise ValueError(f"overlap: unknown lmo {lmo!r}; choose one of {', '.join([*_OTHER_KERNELS, *UPDATES])}")
    row = UPDATES[lmo]
    if row.is_elementwise:
        return row.kernel(1, 1)
    if shape is None:
        raise ValueError(f"overlap({lmo!r}): this kernel depends on the shape; pass the parameter's shape")
    return row.overlap(tuple(int(side) for side in shape), blocks=blocks)


def matrix_sides(lmo: str, shape: Sequence[int], blocks: Blocks = 1) -> tuple[int, int]:
    """Return (d_out, d_in) of the first of the matrices that an lmo sees in a parameter of this shape.

    >>> matrix_sides("conv", (64, 3, 7, 7)), matrix_sides("spectral", (1152, 384), blocks=3)
    ((64, 147), (384, 384))
    """
    return UPDATES[lmo].sides(shape, blocks)[0]
