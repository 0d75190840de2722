"""Views: how an lmo sees a parameter as a stack of matrices, each d_out x d_in.

A view says which dimensions are the outputs and which the inputs, along which one the blocks of a fused parameter lie,
and how a tensor becomes matrices and back. Nothing here imports torch: sides are plain integers, and tensors are
handled by their own methods, so `theory` and `predict` can use views as well.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class MatrixView:
    """A matrix stored d_out x d_in; leading dimensions number the matrices of a stack, such as experts.

    Attributes:
        least_ndim: the fewest dimensions that a parameter must have.
        blocks_dim: the dimension of a parameter along which its blocks lie.
        is_transposed: whether `to_matrices` leaves the matrices d_in x d_out, as they are stored.
    """

    least_ndim = 2
    blocks_dim = -2
    is_transposed = False

    def sides(self, shape: Sequence[int], blocks: int = 1) -> tuple[int, int]:
        """Return (d_out, d_in) of one of the matrices in a parameter of this shape; blocks divide d_out."""
        return self._block_size(shape, blocks), shape[-1]

    def to_matrices(self, x: "Tensor", blocks: int = 1, batch_ndim: int = 0) -> "Tensor":
        """View a stack of parameters (*batch, *shape) as (*batch, ..., blocks, d_out, d_in)."""
        return x.reshape(*x.shape[:-2], blocks, x.shape[-2] // blocks, x.shape[-1])

    def from_matrices(self, matrices: "Tensor", shape: Sequence[int], batch_ndim: int = 0) -> "Tensor":
        """Return what `to_matrices` made of parameters to their shape (*batch, *shape)."""
        return matrices.reshape(shape)

    def keeps_order(self, blocks: int) -> bool:
        """Return whether the matrices have their elements in the parameter's own order."""
        return True

    def divisor(self, shape: Sequence[int]) -> int:
        """Return by what the update of each matrix is divided, so that the parameter's update has unit norm."""
        return 1

    def is_stack(self, shape: Sequence[int]) -> bool:
        """Return whether slices along the first dimension are matrices of their own."""
        return len(shape) > 2

    def check_blocks(self, shape: Sequence[int], blocks: int) -> None:
        """Raise ValueError if a parameter of this shape does not consist of this many equal blocks."""
        self._block_size(shape, blocks)

    def _block_size(self, shape: Sequence[int], blocks: int) -> int:
        length, what = shape[self.blocks_dim] if shape else 1, "columns" if self.blocks_dim == -1 else "rows"
        if blocks < 1 or length % blocks:
            raise ValueError(
                f"blocks={blocks} does not divide the {length} {what} of shape {tuple(shape)}; use blocks=1"
            )
        return length // blocks


class _Transposed(MatrixView):
    """A matrix stored d_in x d_out, as in Hugging Face's Conv1D; its blocks lie along the columns."""

    blocks_dim = -1
    is_transposed = True

    def sides(self, shape: Sequence[int], blocks: int = 1) -> tuple[int, int]:
        return self._block_size(shape, blocks), shape[-2]

    def to_matrices(self, x: "Tensor", blocks: int = 1, batch_ndim: int = 0) -> "Tensor":
        return x.reshape(*x.shape[:-1], blocks, x.shape[-1] // blocks).movedim(-2, -3)

    def from_matrices(self, matrices: "Tensor", shape: Sequence[int], batch_ndim: int = 0) -> "Tensor":
        return matrices.movedim(-3, -2).reshape(shape)

    def keeps_order(self, blocks: int) -> bool:
        return blocks == 1


class _Flattened(MatrixView):
    """A convolution kernel (d_out, d_in, *taps) seen as one d_out x (d_in taps) matrix."""

    least_ndim = 3
    blocks_dim = 0

    def sides(self, shape: Sequence[int], blocks: int = 1) -> tuple[int, int]:
        return self._block_size(shape, blocks), math.prod(shape[1:])

    def to_matrices(self, x: "Tensor", blocks: int = 1, batch_ndim: int = 0) -> "Tensor":
        return x.reshape(*x.shape[:batch_ndim], blocks, x.shape[batch_ndim] // blocks, -1)

    def is_stack(self, shape: Sequence[int]) -> bool:
        return False


class _PerTap(_Flattened):
    """A convolution kernel seen as one d_out x d_in matrix per tap, whose updates share the norm."""

    def sides(self, shape: Sequence[int], blocks: int = 1) -> tuple[int, int]:
        return self._block_size(shape, blocks), shape[1]

    def to_matrices(self, x: "Tensor", blocks: int = 1, batch_ndim: int = 0) -> "Tensor":
        batch, (d_out, d_in) = x.shape[:batch_ndim], x.shape[batch_ndim : batch_ndim + 2]
        taps_first = x.flatten(batch_ndim + 2).movedim(-1, batch_ndim)
        return taps_first.reshape(*batch, -1, blocks, d_out // blocks, d_in)

    def from_matrices(self, matrices: "Tensor", shape: Sequence[int], batch_ndim: int = 0) -> "Tensor":
        return matrices.movedim(batch_ndim, -1).reshape(shape)

    def keeps_order(self, blocks: int) -> bool:
        return False

    def divisor(self, shape: Sequence[int]) -> int:
        return math.prod(shape[2:])


class _Vector(_Flattened):
    """A parameter of any shape seen as one row vector per block."""

    least_ndim = 0

    def sides(self, shape: Sequence[int], blocks: int = 1) -> tuple[int, int]:
        self.check_blocks(shape, blocks)
        return 1, math.prod(shape) // blocks

    def to_matrices(self, x: "Tensor", blocks: int = 1, batch_ndim: int = 0) -> "Tensor":
        return x.reshape(*x.shape[:batch_ndim], blocks, 1, -1)


MATRIX, TRANSPOSED, FLATTENED, PER_TAP, VECTOR = MatrixView(), _Transposed(), _Flattened(), _PerTap(), _Vector()


def check_block_count(where: str, count: Any) -> None:
    """Raise ValueError unless `count` is a number of equal blocks."""
    if type(count) is not int or count < 1:
        raise ValueError(
            f"{where}={count!r}: pass the number of equal blocks of the outputs as an int (fused q, k, v: 3); "
            "blocks of different sizes are not supported: leave 1, or make each block its own parameter"
        )
