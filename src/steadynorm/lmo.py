"""Linear minimisation oracles: Table 1 of the paper, with RowNorm, ColNorm, embedding and convolutions.

Each row of `LMOS` has an update u = -lmo(x), the norm it belongs to, and (from `theory.updates`) the view under which it
sees a parameter, U^2 = |u|^2 and its overlap kernel. The update has unit norm, does not depend on the scale of x, and is
zero where x is zero. `blocks` says which blocks of a parameter are matrices of their own (`views.BlockLayout`): 3 of
equal size (fused QKV), (2048, 512, 512) rows (grouped queries), or ("inputs", 16) (an output projection, per head).
Tensors may carry leading batch dimensions: a stack of parameters.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from steadynorm.machine import widest_dtype
from steadynorm.polar import Polar
from steadynorm.theory import Overlap
from steadynorm.theory.updates import BY_SHAPE, UPDATES, Update, update_of
from steadynorm.views import BlockLayout, BlockRun, Blocks, MatrixView

_POLAR = Polar()
_EXACT = Polar("svd")


@dataclass(frozen=True)
class Lmo:
    """One row of Table 1.

    Attributes:
        numbers: the view, U^2 and the overlap kernel.
        rows_wait: whether single rows often have no gradient, as in an embedding.
        entry_size: of an update whose entries are all c or -c: c for a d_out x d_in matrix.
        polar_scale: of an update that is a polar factor: what that of a d_out x d_in matrix is multiplied by.
        starts_at_zero: whether `init_` fills with zeros.

    >>> LMOS["sign"].update(torch.tensor([[3.0, -0.5], [0.0, 1.0]]))
    tensor([[ 0.5000, -0.5000],
            [ 0.0000,  0.5000]])
    """

    numbers: Update
    # Both see matrices (..., d_out, d_in), transposed where the view says so. Polar factors need no function of their own.
    _update: Callable[[Tensor], Tensor] | None
    _norm: Callable[[Tensor], Tensor]
    rows_wait: bool = False
    entry_size: Callable[[int, int], float] | None = None
    polar_scale: Callable[[int, int], float] | None = None
    starts_at_zero: bool = False

    @property
    def name(self) -> str:
        return self.numbers.name

    @property
    def row_separable(self) -> bool:
        return self.numbers.row_separable

    @property
    def view(self) -> MatrixView:
        return self.numbers.view

    def update(
        self, x: Tensor, *, blocks: Blocks = 1, polar: Polar = _POLAR, batch_ndim: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """Return u = -lmo(x), of x's shape and dtype (unless `polar` leaves its factors in another).

        Args:
            x: the parameter's momentum, or a stack of several.
            blocks: which blocks are matrices of their own.
            polar: how polar factors are found.
            batch_ndim: how many leading dimensions number independent parameters.
            out: contiguous memory like x, or x itself, that the result may be written to.
        """
        self.check(x.shape[batch_ndim:], blocks)
        return self.checked_update(x, BlockLayout.of(blocks), polar, batch_ndim, out)

    def checked_update(
        self, x: Tensor, layout: BlockLayout, polar: Polar, batch_ndim: int, out: Tensor | None
    ) -> Tensor:
        """Return the same for a shape and blocks that have passed `check`, as those of an optimizer have."""
        if x.numel() == 0:
            return x.clone()
        shape = x.shape[batch_ndim:]
        runs = self.view.runs(shape, layout)
        if len(runs) == 1:
            return self._update_run(x, runs[0], layout.side, polar, batch_ndim, out)
        u = torch.empty_like(x, memory_format=torch.contiguous_format) if out is None else out
        dim = self.view.block_dims[layout.side] % len(shape) + batch_ndim
        for run in runs:
            part, target = (whole.narrow(dim, run.start, run.length) for whole in (x, u))
            is_direct = (
                self.numbers.is_polar and target.is_contiguous() and self.view.keeps_order(run.blocks, layout.side)
            )
            own = target if is_direct else None
            updated = self._update_run(part, run, layout.side, polar, batch_ndim, own)
            if not is_direct:
                target.copy_(updated)
        return u

    def _update_run(
        self, x: Tensor, run: BlockRun, side: str, polar: Polar, batch_ndim: int, out: Tensor | None
    ) -> Tensor:
        """Return the update of one run of blocks of every parameter."""
        matrices = self.view.to_matrices(x, run.blocks, side, batch_ndim)
        target = out.view(matrices.shape) if out is not None and self.view.keeps_order(run.blocks, side) else None
        if self._update is not None:
            u = self._update(matrices)
        else:
            assert self.polar_scale is not None
            u = polar(matrices, out=target, scale=self.polar_scale(run.d_out, run.d_in))
        if run.divisor != 1:
            u = u.div_(run.divisor)
        return self.view.from_matrices(u, x.shape, side, batch_ndim)

    def norm(self, x: Tensor, *, blocks: Blocks = 1) -> Tensor:
        """Return the norm that this lmo belongs to, of one parameter: a 0-d tensor; with blocks the largest of theirs."""
        self.check(x.shape, layout := BlockLayout.of(blocks))
        if x.numel() == 0:
            return x.new_zeros(())
        runs, dim = self.view.runs(x.shape, layout), self.view.block_dims[layout.side]
        parts = [x.narrow(dim, run.start, run.length) for run in runs] if len(runs) > 1 else [x]
        norms = [
            self._norm(self.view.to_matrices(part, run.blocks, layout.side)).amax() * run.divisor
            for part, run in zip(parts, runs, strict=True)
        ]
        return torch.stack(norms).amax()

    @torch.no_grad()
    def init_(self, x: Tensor, *, blocks: Blocks = 1, generator: torch.Generator | None = None) -> Tensor:
        """Fill x with a random point of unit norm (bias: zero). No optimizer calls this."""
        self.check(x.shape, blocks)
        if self.starts_at_zero:
            return x.zero_()
        noise = torch.randn(x.shape, dtype=widest_dtype(x.device), device=x.device, generator=generator)
        return x.copy_(self.update(noise, blocks=blocks, polar=_EXACT))

    def update_norm_sq(self, shape: Sequence[int], *, blocks: Blocks = 1) -> float:
        """Return U^2 = |u|^2 for an exact polar factor.

        >>> LMOS["spectral"].update_norm_sq((1536, 384))
        1536.0
        """
        return self.numbers.update_norm_sq(shape, blocks=blocks)

    def slice_separable(self, shape: Sequence[int]) -> bool:
        """Return whether slices along the first dimension, rows or matrices of a stack, do not see each other.

        Such a parameter may be processed in chunks, and by processes that each have some of the slices.

        >>> LMOS["spectral"].slice_separable((8, 4, 4)), LMOS["spectral"].slice_separable((4, 4))
        (True, False)
        """
        return self.row_separable or self.view.is_stack(shape)

    def waiting_ndim(self, shape: Sequence[int]) -> int:
        """Return the dimensions of a slice that often has no gradient: 1 (row of an embedding), 2 (expert) or 0 (none).

        >>> LMOS["embedding"].waiting_ndim((8, 4)), LMOS["spectral"].waiting_ndim((8, 4, 4)), LMOS["sign"].waiting_ndim((8, 4))
        (1, 2, 0)
        """
        return 1 if self.rows_wait else 2 if self.view.is_stack(shape) else 0

    def operations(self, shape: Sequence[int], *, blocks: Blocks = 1, steps: int = 5) -> float:
        """Estimate how many operations an update takes, for spreading the work over processes.

        >>> LMOS["spectral"].operations((2, 4)), LMOS["sign"].operations((2, 4))
        (400.0, 8.0)
        """
        if not self.numbers.is_polar:
            return float(math.prod(shape))
        total = 0.0
        for run in self.view.runs(shape, blocks):
            d, n = sorted((run.d_out, run.d_in))
            total += run.matrices * steps * (4.0 * d * d * n + 2.0 * d**3)
        return total

    def overlap(self, shape: Sequence[int], *, blocks: Blocks = 1) -> Overlap:
        """Return how updates overlap when their inputs correlate: see `steadynorm.theory.overlap`."""
        return self.numbers.overlap(shape, blocks=blocks)

    def check(self, shape: Sequence[int], blocks: Blocks = 1) -> None:
        """Raise ValueError if this lmo does not fit a parameter of this shape."""
        self.numbers.check(shape, blocks)


def get(name: str, shape: Sequence[int] | None = None) -> Lmo:
    """Return the row of this name; "by-shape" needs the shape, and chooses by the number of dimensions.

    >>> get("spectral").name, get("by-shape", (8, 3, 3, 3)).name, get("by-shape", (8,)).name
    ('spectral', 'conv', 'bias')
    """
    if name == BY_SHAPE and shape is None:
        raise ValueError(f"lmo {name!r} depends on the shape; pass the parameter's shape")
    return LMOS[update_of(name, () if shape is None else shape).name]


def _unit(x: Tensor, dim: int) -> Tensor:
    """Return x over its l2 norm along dim, safe for any scale; zero stays zero."""
    if x.dtype in (torch.bfloat16, torch.float16):
        return _unit(x.float(), dim).to(x.dtype)
    largest = x.abs().amax(dim, keepdim=True)
    x = x / torch.where(largest > 0, largest, 1.0)
    norm = x.norm(dim=dim, keepdim=True)
    return x / torch.where(norm > 0, norm, 1.0)


def _length(x: Tensor, dim: int) -> Tensor:
    """Return the l2 norm along dim, safe for any scale."""
    largest = x.abs().amax(dim, keepdim=True)
    return (x / torch.where(largest > 0, largest, 1.0)).norm(dim=dim) * largest.squeeze(dim)


def _rms_to_rms(d_out: int, d_in: int) -> float:
    """Return what a polar factor is multiplied by to have unit norm as a map from RMS to RMS."""
    return math.sqrt(d_out / d_in)


def _spectral_norm(x: Tensor) -> Tensor:
    return torch.linalg.matrix_norm(x, 2) * math.sqrt(x.shape[-1] / x.shape[-2])


LMOS: dict[str, Lmo] = {
    row.name: row
    for row in (
        Lmo(UPDATES["spectral"], None, _spectral_norm, polar_scale=_rms_to_rms),
        # polar(x^T) = polar(x)^T, so a matrix that is stored transposed has the same update.
        Lmo(UPDATES["spectral-transposed"], None, lambda x: _spectral_norm(x.mT), polar_scale=_rms_to_rms),
        Lmo(UPDATES["conv"], None, _spectral_norm, polar_scale=_rms_to_rms),
        Lmo(UPDATES["conv-tap"], None, _spectral_norm, polar_scale=_rms_to_rms),
        Lmo(
            UPDATES["sign"],
            lambda x: x.sign().div_(x.shape[-1]),
            lambda x: x.abs().amax((-2, -1)) * x.shape[-1],
            entry_size=lambda m, n: 1 / n,
        ),
        Lmo(
            UPDATES["embedding"],
            lambda x: x.sign(),
            lambda x: x.abs().amax((-2, -1)),
            rows_wait=True,
            entry_size=lambda m, n: 1.0,
        ),
        Lmo(
            UPDATES["bias"],
            lambda x: _unit(x, -1) * math.sqrt(x.shape[-1]),
            lambda x: _length(x, -1) / math.sqrt(x.shape[-1]),
            starts_at_zero=True,
        ),
        Lmo(
            UPDATES["row"],
            lambda x: _unit(x, -1) / math.sqrt(x.shape[-1]),
            lambda x: _length(x, -1) * math.sqrt(x.shape[-1]),
        ),
        Lmo(
            UPDATES["column"],
            lambda x: _unit(x, -2) * math.sqrt(x.shape[-2]),
            lambda x: _length(x, -2) / math.sqrt(x.shape[-2]),
        ),
    )
}
