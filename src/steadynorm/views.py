"""Views: how an lmo sees a parameter as a stack of matrices, each d_out x d_in.

A view says which dimensions are the outputs and which the inputs, and how a tensor becomes matrices and back. A
`BlockLayout` says which blocks of a fused parameter are matrices of their own: a number of equal ones or their sizes,
along the outputs or the inputs. Neighbours of one size are a `BlockRun`, which is handled as one batch. Nothing here
imports torch: sides are plain integers, and tensors are handled by their own methods, so `theory` and `predict` can use
views as well.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from torch import Tensor

OUTPUTS, INPUTS = "outputs", "inputs"


@dataclass(frozen=True)
class BlockLayout:
    """The blocks of a parameter that are matrices of their own.

    Attributes:
        parts: How many equal blocks there are, or the size of every block.
        side: Along which side they lie, "outputs" or "inputs".

    >>> BlockLayout.of(3), BlockLayout.of([16, 8, 8]).label, BlockLayout.of(("inputs", 4)).label
    (BlockLayout(parts=3, side='outputs'), 'blocks 16+8+8', '4 blocks of inputs')
    """

    parts: int | tuple[int, ...] = 1
    side: str = OUTPUTS

    @classmethod
    def of(cls, blocks: "Blocks", where: str = "blocks") -> "BlockLayout":
        """Return the layout that a group's `blocks` describes; raise ValueError, which names `where`, if none."""
        if isinstance(blocks, BlockLayout):
            return blocks
        side, parts = OUTPUTS, blocks
        if isinstance(blocks, list | tuple) and len(blocks) == 2 and blocks[0] in (OUTPUTS, INPUTS):
            side, parts = str(blocks[0]), blocks[1]
        sizes: list[Any] = list(parts) if isinstance(parts, list | tuple) else [parts]
        if not sizes or any(type(size) is not int or size < 1 for size in sizes):
            raise ValueError(
                f"{where}={blocks!r}: pass the number of equal blocks of the outputs as an int (fused q, k, v: 3), the "
                "sizes of all blocks as a tuple of ints (grouped queries: (2048, 512, 512)), or either of them as "
                "('inputs', 16) for blocks of the inputs"
            )
        return cls(sizes[0] if isinstance(parts, int) else tuple(sizes), side)

    @property
    def count(self) -> int:
        """How many blocks there are."""
        return self.parts if isinstance(self.parts, int) else len(self.parts)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of every block; empty if they are equal and only their number is known."""
        return () if isinstance(self.parts, int) else self.parts

    @property
    def plain(self) -> "Blocks":
        """The layout as groups and checkpoints have it: ints, tuples and a string."""
        return self.parts if self.side == OUTPUTS else (self.side, self.parts)

    @property
    def name(self) -> str:
        """The layout as the names of groups have it: 3, 16+8+8 or 4-inputs."""
        return ("+".join(map(str, self.sizes)) or str(self.parts)) + ("" if self.side == OUTPUTS else f"-{self.side}")

    @property
    def label(self) -> str:
        """The layout in words."""
        blocks = f"blocks {'+'.join(map(str, self.sizes))}" if self.sizes else f"{self.parts} blocks"
        return blocks if self.side == OUTPUTS else f"{blocks} of {self.side}"

    def mismatch(self, length: int) -> str | None:
        """Return why a side of this length does not consist of these blocks; None if it does."""
        if not isinstance(self.parts, int):
            return None if sum(self.parts) == length else f"sums to {sum(self.parts)}, not to"
        return "does not divide" if length % self.parts else None


# What `blocks=` and groups take: a number, sizes, or ("inputs", either of them).
Blocks: TypeAlias = int | Sequence[int] | tuple[str, int | Sequence[int]] | BlockLayout


class BlockRun(NamedTuple):
    """Neighbouring blocks of one size, of which each is a matrix: in every matrix of a stack, in every tap of a kernel.

    Attributes:
        start: Their first position along the dimension of the blocks.
        length: How many positions they take.
        blocks: How many blocks there are.
        d_out: The outputs of each matrix.
        d_in: The inputs of each matrix.
        matrices: How many matrices there are in the parameter, stack and taps included.
        divisor: By what the update of each is divided, so that the parameter's update has unit norm.
    """

    start: int
    length: int
    blocks: int
    d_out: int
    d_in: int
    matrices: int
    divisor: float


class MatrixView:
    """A matrix stored d_out x d_in; leading dimensions number the matrices of a stack, such as experts.

    Attributes:
        least_ndim: the fewest dimensions that a parameter must have.
        block_dims: the dimension of a parameter along which blocks of each side lie.
        is_transposed: whether `to_matrices` leaves the matrices d_in x d_out, as they are stored.
    """

    least_ndim = 2
    block_dims: Mapping[str, int] = MappingProxyType({OUTPUTS: -2, INPUTS: -1})
    is_transposed = False

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        """Return (d_out, d_in) of one of the matrices in a parameter of this shape without blocks."""
        return shape[-2], shape[-1]

    def runs(self, shape: Sequence[int], blocks: Blocks = 1) -> list[BlockRun]:
        """Return the matrices in a parameter of this shape, as few runs as there can be.

        What blocks of the inputs contribute adds up in the outputs, so they share the norm, each by its share of the
        inputs: then no update enlarges the RMS of what it multiplies. Blocks of outputs do not see each other.

        >>> [(run.start, run.blocks, run.d_out) for run in MATRIX.runs((32, 16), (16, 8, 8))]
        [(0, 1, 16), (16, 2, 8)]

        Raises:
            ValueError: If the shape does not consist of these blocks.
        """
        layout = BlockLayout.of(blocks)
        self.check_blocks(shape, layout)
        dim = self.block_dims[layout.side]
        length = shape[dim] if shape else 1
        runs, start = [], 0
        for size, count in _merge_equal(layout.sizes) if layout.sizes else [(length // layout.count, layout.count)]:
            block = list(shape)
            if shape:
                block[dim] = size
            d_out, d_in = self.sides(block)
            matrices = count * (math.prod(block) // (d_out * d_in)) if math.prod(block) else 0
            divisor = self.divisor(shape) * (length / size if layout.side == INPUTS and size else 1)
            runs.append(BlockRun(start, size * count, count, d_out, d_in, matrices, divisor))
            start += size * count
        return runs

    def to_matrices(self, x: "Tensor", count: int = 1, side: str = OUTPUTS, batch_ndim: int = 0) -> "Tensor":
        """View a stack of parameters, or a run of them, (*batch, *shape), as (*batch, ..., count, d_out, d_in)."""
        *leading, rows, columns = x.shape
        if self.block_dims[side] == -2:
            return x.reshape(*leading, count, rows // count, columns)
        return x.reshape(*leading, rows, count, columns // count).movedim(-2, -3)

    def from_matrices(
        self, matrices: "Tensor", shape: Sequence[int], side: str = OUTPUTS, batch_ndim: int = 0
    ) -> "Tensor":
        """Return what `to_matrices` made of parameters to their shape (*batch, *shape)."""
        return (matrices if self.block_dims[side] == -2 else matrices.movedim(-3, -2)).reshape(shape)

    def keeps_order(self, count: int, side: str = OUTPUTS) -> bool:
        """Return whether the matrices have their elements in the parameter's own order."""
        return count == 1 or self.block_dims[side] == -2

    def divisor(self, shape: Sequence[int]) -> int:
        """Return how many matrices without blocks add up in the outputs, and share the norm."""
        return 1

    def is_stack(self, shape: Sequence[int]) -> bool:
        """Return whether slices along the first dimension are matrices of their own."""
        return len(shape) > 2

    def check_blocks(self, shape: Sequence[int], blocks: Blocks) -> None:
        """Raise ValueError if a parameter of this shape does not consist of these blocks."""
        layout = BlockLayout.of(blocks)
        if layout.side not in self.block_dims:
            raise ValueError(
                f"blocks={layout.plain!r}: only matrices have blocks of their {layout.side}, not shape {tuple(shape)} "
                "under this lmo; use blocks=1"
            )
        dim = self.block_dims[layout.side]
        length = shape[dim] if shape else 1
        if problem := layout.mismatch(length):
            what, remedy = "columns" if dim == -1 else "rows", "use blocks=1"
            if layout.sizes:
                remedy = f"pass the {what[:-1]} counts of all blocks, or blocks=1"
            raise ValueError(f"blocks={layout.plain!r} {problem} the {length} {what} of shape {tuple(shape)}; {remedy}")


class _Transposed(MatrixView):
    """A matrix stored d_in x d_out, as in Hugging Face's Conv1D; the blocks of its outputs lie along the columns."""

    block_dims = MappingProxyType({OUTPUTS: -1, INPUTS: -2})
    is_transposed = True

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        return shape[-1], shape[-2]


class _Flattened(MatrixView):
    """A convolution kernel (d_out, d_in, *taps) seen as one d_out x (d_in taps) matrix."""

    least_ndim = 3
    block_dims = MappingProxyType({OUTPUTS: 0})

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        return shape[0], math.prod(shape[1:])

    def to_matrices(self, x: "Tensor", count: int = 1, side: str = OUTPUTS, batch_ndim: int = 0) -> "Tensor":
        return x.reshape(*x.shape[:batch_ndim], count, x.shape[batch_ndim] // count, -1)

    def from_matrices(
        self, matrices: "Tensor", shape: Sequence[int], side: str = OUTPUTS, batch_ndim: int = 0
    ) -> "Tensor":
        return matrices.reshape(shape)

    def keeps_order(self, count: int, side: str = OUTPUTS) -> bool:
        return True

    def is_stack(self, shape: Sequence[int]) -> bool:
        return False


class _PerTap(_Flattened):
    """A convolution kernel seen as one d_out x d_in matrix per tap, whose updates share the norm."""

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        return shape[0], shape[1]

    def to_matrices(self, x: "Tensor", count: int = 1, side: str = OUTPUTS, batch_ndim: int = 0) -> "Tensor":
        batch, (d_out, d_in) = x.shape[:batch_ndim], x.shape[batch_ndim : batch_ndim + 2]
        taps_first = x.flatten(batch_ndim + 2).movedim(-1, batch_ndim)
        return taps_first.reshape(*batch, -1, count, d_out // count, d_in)

    def from_matrices(
        self, matrices: "Tensor", shape: Sequence[int], side: str = OUTPUTS, batch_ndim: int = 0
    ) -> "Tensor":
        return matrices.movedim(batch_ndim, -1).reshape(shape)

    def keeps_order(self, count: int, side: str = OUTPUTS) -> bool:
        return False

    def divisor(self, shape: Sequence[int]) -> int:
        return math.prod(shape[2:])


class _Vector(_Flattened):
    """A parameter of any shape seen as one row vector per block."""

    least_ndim = 0

    def sides(self, shape: Sequence[int]) -> tuple[int, int]:
        return 1, math.prod(shape)

    def to_matrices(self, x: "Tensor", count: int = 1, side: str = OUTPUTS, batch_ndim: int = 0) -> "Tensor":
        return x.reshape(*x.shape[:batch_ndim], count, 1, -1)


MATRIX, TRANSPOSED, FLATTENED, PER_TAP, VECTOR = MatrixView(), _Transposed(), _Flattened(), _PerTap(), _Vector()


def _merge_equal(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Return (size, how many) of neighbours that have the same size.

    >>> _merge_equal((16, 8, 8))
    [(16, 1), (8, 2)]
    """
    merged: list[tuple[int, int]] = []
    for size in sizes:
        if merged and merged[-1][0] == size:
            merged[-1] = (size, merged[-1][1] + 1)
        else:
            merged.append((size, 1))
    return merged
