"""Linear minimisation oracles: Table 1 of the paper, with RowNorm, ColNorm, embedding and convolutions.

Each entry knows its update u = -lmo(x), its norm, an explicit init, U^2 = |u|^2 and its overlap kernel. The update
has unit norm, does not depend on the scale of x, and is zero where x is zero. `blocks` treats each of that many row
blocks as a matrix of its own (fused QKV: 3). Tensors may carry leading batch dimensions: a stack of parameters.
"spectral-transposed" is spectral for a weight that is stored d_in x d_out (Hugging Face's Conv1D), blocks by columns.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadynorm.polar import Polar
from steadynorm.theory import Overlap, matrix_sides
from steadynorm.theory.updates import UPDATES

BY_SHAPE = "by-shape"
TRANSPOSED = "spectral-transposed"

_POLAR = Polar()
_EXACT = Polar("svd")


@dataclass(frozen=True)
class Lmo:
    """One row of Table 1.

    >>> LMOS["sign"].update(torch.tensor([[3.0, -0.5], [0.0, 1.0]]))
    tensor([[ 0.5000, -0.5000],
            [ 0.0000,  0.5000]])
    """

    name: str
    # Both see matrices (..., d_out, d_in); bias sees (..., 1, numel).
    _update: Callable[[Tensor, Polar, Tensor | None], Tensor]
    _norm: Callable[[Tensor], Tensor]
    by_rows: bool = False  # rows do not see each other

    def update(
        self, x: Tensor, *, blocks: int = 1, polar: Polar = _POLAR, batch_ndim: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """u = -lmo(x), of x's shape and dtype. batch_ndim leading dimensions number independent parameters.

        out: contiguous memory like x, or x itself, that the result may be written to.
        """
        shape = x.shape[batch_ndim:]
        self.check(shape, blocks)
        if x.numel() == 0:
            return x.clone()
        matrices = _matrices(x, self.name, blocks, batch_ndim)
        if self.name == "conv-tap":
            return (self._update(matrices, polar, None) / _taps(shape)).movedim(batch_ndim, -1).reshape(x.shape)
        if self.name == TRANSPOSED and blocks > 1:  # the blocks go back between the columns
            return self._update(matrices, polar, None).movedim(-3, -2).reshape(x.shape)
        return self._update(matrices, polar, None if out is None else out.view(matrices.shape)).reshape(x.shape)

    def norm(self, x: Tensor, *, blocks: int = 1) -> Tensor:
        """The norm this lmo belongs to, of one parameter: a 0-d tensor; with blocks the largest of theirs."""
        self.check(x.shape, blocks)
        if x.numel() == 0:
            return x.new_zeros(())
        largest = self._norm(_matrices(x, self.name, blocks, 0)).amax()
        return largest * _taps(x.shape) if self.name == "conv-tap" else largest

    @torch.no_grad()
    def init_(self, x: Tensor, *, blocks: int = 1, generator: torch.Generator | None = None) -> Tensor:
        """Fill x with a random point of unit norm (bias: zero). Never called by an optimizer."""
        self.check(x.shape, blocks)
        if self.name == "bias":
            return x.zero_()
        noise = torch.randn(x.shape, dtype=torch.float64, device=x.device, generator=generator)
        return x.copy_(self.update(noise, blocks=blocks, polar=_EXACT))

    def update_norm_sq(self, shape: Sequence[int], *, blocks: int = 1) -> float:
        """U^2 = |u|^2 for an exact polar factor.

        >>> LMOS["spectral"].update_norm_sq((1536, 384))
        1536.0
        """
        return UPDATES[self.name].update_norm_sq(shape, blocks=blocks)

    def by_slices(self, shape: Sequence[int]) -> bool:
        """Slices along the first dimension do not see each other: rows, or the matrices of a stack (experts).

        Such a parameter may be handled in pieces, and by processes that each have some of the slices.

        >>> LMOS["spectral"].by_slices((8, 4, 4)), LMOS["spectral"].by_slices((4, 4))
        (True, False)
        """
        return self.by_rows or (self.name in ("spectral", TRANSPOSED, "column") and len(shape) > 2)

    def waiting_ndim(self, shape: Sequence[int]) -> int:
        """Trailing dimensions of a slice that often has no gradient: a row of an embedding, an expert of a stack; or 0.

        >>> LMOS["embedding"].waiting_ndim((8, 4)), LMOS["spectral"].waiting_ndim((8, 4, 4)), LMOS["sign"].waiting_ndim((8, 4))
        (1, 2, 0)
        """
        if self.name == "embedding":
            return 1
        return 2 if len(shape) > 2 and self.name not in ("conv", "conv-tap", "bias") else 0

    @property
    def blocks_dim(self) -> int:
        """The dimension of a parameter along which its blocks lie."""
        return UPDATES[self.name].blocks_dim

    def operations(self, shape: Sequence[int], *, blocks: int = 1, steps: int = 5) -> float:
        """About how many an update takes: for spreading the work over processes.

        >>> LMOS["spectral"].operations((2, 4)), LMOS["sign"].operations((2, 4))
        (400.0, 8.0)
        """
        if not UPDATES[self.name].is_polar:
            return float(math.prod(shape))
        rows, columns = matrix_sides(self.name, shape, blocks)
        matrices, (d, n) = math.prod(shape) / (rows * columns), sorted((rows, columns))
        return matrices * steps * (4.0 * d * d * n + 2.0 * d**3)

    def bf16_unit(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device, *, blocks: int = 1, polar: Polar = _POLAR
    ) -> float | None:
        """c such that bf16 holds all that `update` makes use of in x, and u/c exactly; None if there is no such c.

        What goes from process to process takes half the bytes then, and nothing is lost.

        >>> LMOS["sign"].bf16_unit((3, 8), torch.float32, torch.device("cpu"))
        0.125
        """
        if self.name == "bias":
            return None
        rows, columns = matrix_sides(self.name, shape, blocks)
        if UPDATES[self.name].is_polar:
            if polar.working_dtype(dtype, device, (rows, columns)) != torch.bfloat16:
                return None
            return math.sqrt(rows / columns) / (_taps(shape) if self.name == "conv-tap" else 1)
        return {"sign": 1 / columns, "embedding": 1.0}.get(self.name)

    def overlap(self, shape: Sequence[int], *, blocks: int = 1) -> Overlap:
        """How updates overlap when their inputs correlate: see steadynorm.theory.overlap."""
        return UPDATES[self.name].overlap(shape, blocks=blocks)

    def check(self, shape: Sequence[int], blocks: int = 1) -> None:
        """Raise ValueError if this lmo does not fit a parameter of this shape."""
        UPDATES[self.name].check(shape, blocks)


def get(name: str) -> Lmo:
    """The entry of this name, or an error that lists them.

    >>> get("spectral").name
    'spectral'
    """
    if name not in LMOS:
        raise ValueError(f"unknown lmo {name!r}; choose one of {', '.join(LMOS)} or {BY_SHAPE!r}")
    return LMOS[name]


def by_shape(shape: Sequence[int]) -> Lmo:
    """The entry for lmo="by-shape": convolution, matrix or vector by the number of dimensions alone.

    >>> by_shape((8, 3, 3, 3)).name, by_shape((8, 3)).name, by_shape((8,)).name
    ('conv', 'spectral', 'bias')
    """
    return LMOS["conv" if len(shape) > 2 else "spectral" if len(shape) == 2 else "bias"]


def _matrices(x: Tensor, name: str, blocks: int, batch_ndim: int) -> Tensor:
    """View a stack of parameters as (..., matrices, d_out, d_in); where stored transposed, (..., d_in, d_out)."""
    batch, shape = x.shape[:batch_ndim], x.shape[batch_ndim:]
    if name == "bias":
        return x.reshape(*batch, blocks, 1, -1)
    if name == "conv-tap":  # taps become a batch dimension
        x = x.flatten(batch_ndim + 2).movedim(-1, batch_ndim)
        return x.reshape(*batch, -1, blocks, shape[0] // blocks, shape[1])
    if name == "conv":
        return x.reshape(*batch, blocks, shape[0] // blocks, -1)
    if name == TRANSPOSED:
        return x.reshape(*batch, *shape[:-1], blocks, shape[-1] // blocks).movedim(-2, -3)
    return x.reshape(*batch, *shape[:-2], blocks, shape[-2] // blocks, shape[-1])


def _taps(shape: Sequence[int]) -> int:
    return math.prod(shape[2:])


def _unit(x: Tensor, dim: int) -> Tensor:
    """x over its l2 norm along dim, safe for any scale; zero stays zero."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return _unit(x.float(), dim).to(x.dtype)
    largest = x.abs().amax(dim, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    norm = x.norm(dim=dim, keepdim=True)
    return x / torch.where(norm > 0, norm, 1.0)


def _length(x: Tensor, dim: int) -> Tensor:
    """l2 norm along dim, safe for any scale."""
    largest = x.abs().amax(dim, keepdim=True)
    return (x / torch.where(largest > 0, largest, 1.0)).norm(dim=dim) * largest.squeeze(dim)


def _spectral(x: Tensor, polar: Polar, out: Tensor | None) -> Tensor:
    return polar(x, out=out).mul_(math.sqrt(x.shape[-2] / x.shape[-1]))


def _spectral_norm(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x, 2) * math.sqrt(x.shape[-1] / x.shape[-2])


def _spectral_transposed(x: Tensor, polar: Polar, out: Tensor | None) -> Tensor:
    """polar(x^T) = polar(x)^T, so only the scale sqrt(d_out/d_in) turns: x is (..., d_in, d_out)."""
    return polar(x, out=out).mul_(math.sqrt(x.shape[-1] / x.shape[-2]))


LMOS: dict[str, Lmo] = {
    entry.name: entry
    for entry in (
        Lmo("spectral", _spectral, _spectral_norm),
        Lmo(TRANSPOSED, _spectral_transposed, lambda x: _spectral_norm(x.mT)),
        Lmo("conv", _spectral, _spectral_norm),
        Lmo("conv-tap", _spectral, _spectral_norm),
        Lmo(
            "sign",
            lambda x, *_: x.sign() / x.shape[-1],
            lambda x: x.abs().amax((-2, -1)) * x.shape[-1],
            by_rows=True,
        ),
        Lmo(
            "embedding",
            lambda x, *_: x.sign(),
            lambda x: x.abs().amax((-2, -1)),
            by_rows=True,
        ),
        Lmo(
            "bias",
            lambda x, *_: _unit(x, -1) * math.sqrt(x.shape[-1]),
            lambda x: _length(x, -1) / math.sqrt(x.shape[-1]),
        ),
        Lmo(
            "row",
            lambda x, *_: _unit(x, -1) / math.sqrt(x.shape[-1]),
            lambda x: _length(x, -1) * math.sqrt(x.shape[-1]),
            by_rows=True,
        ),
        Lmo(
            "column",
            lambda x, *_: _unit(x, -2) * math.sqrt(x.shape[-2]),
            lambda x: _length(x, -2) / math.sqrt(x.shape[-2]),
        ),
    )
}
