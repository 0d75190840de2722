"""Triton kernels for symmetric results: compute the tiles on and below the diagonal, and write each one twice.

Only `symmetric_kernels` imports this module, and only when the kernels are asked for: it needs triton.

A result of side n has T = ceil(n / BLOCK) tiles per side, of which T (T + 1) / 2 are computed. One program computes one
tile of one matrix; there are as many programs as tiles in the batch, on one grid axis, because the others hold 65,535.
Offsets of whole matrices and tiles are 64-bit, those within a tile 32-bit.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton  # pyright: ignore[reportMissingImports]
import triton.language as tl  # pyright: ignore[reportMissingImports]
from torch import Tensor

# Programs from which large tiles are used: fewer would leave processors of an A100 (108) or H100 (132) idle.
_MIN_PROGRAMS = 128
_ALIGNMENT = 16  # the multiple, of bytes or of elements, that Triton looks for in arguments
_MAX_PADDING = 1.25  # the most that large tiles may compute in the place of 1 with small ones


@dataclass(frozen=True)
class Tiling:
    """The sizes with which a kernel is compiled.

    tests/test_symmetric_kernels.py compiles every tiling for A100, H100 and B200 and sees that no register is spilled.
    """

    block: int  # rows and columns of a tile of the result
    depth: int  # summands of the inner product per pass of the loop
    warps: int
    stages: int  # passes whose operands are in flight at a time

    def constants(self) -> dict[str, int]:
        """Return the kernels' compile-time arguments."""
        return {"BLOCK": self.block, "DEPTH": self.depth}

    def options(self) -> dict[str, Any]:
        """Return the compiler's options; c R^2 + b R is one rounding with fused multiply-adds."""
        return {"num_warps": self.warps, "num_stages": self.stages, "enable_fp_fusion": True}


LARGE = Tiling(block=128, depth=64, warps=8, stages=3)
SMALL = Tiling(block=64, depth=64, warps=4, stages=3)
UNALIGNED = Tiling(block=64, depth=32, warps=8, stages=3)  # elements are loaded one by one: each takes an address


def choose_tiling(matrices: int, side: int, *, aligned: bool) -> Tiling:
    """Return large tiles if they fill the device and add little padding, else small ones; `UNALIGNED` for unaligned operands."""
    if not aligned:
        return UNALIGNED
    computed = {tiling: _lower_tiles(side, tiling) * tiling.block**2 for tiling in (LARGE, SMALL)}
    fills = matrices * _lower_tiles(side, LARGE) >= _MIN_PROGRAMS
    return LARGE if fills and computed[LARGE] <= _MAX_PADDING * computed[SMALL] else SMALL


def are_aligned(*operands: Tensor) -> bool:
    """Return whether Triton loads eight elements at a time: rows or columns without gaps, all else in multiples of 16."""
    return all(
        1 in x.stride()[1:]
        and all(stride == 1 or stride % _ALIGNMENT == 0 for stride in x.stride())
        and all(size % _ALIGNMENT == 0 for size in x.shape[1:])
        and x.data_ptr() % _ALIGNMENT == 0
        for x in operands
    )


def _lower_tiles(side: int, tiling: Tiling) -> int:
    """Return T (T + 1) / 2: how many of a matrix's tiles lie on or below the diagonal."""
    tiles = -(-side // tiling.block)
    return tiles * (tiles + 1) // 2


def launch_product(left: Tensor, right: Tensor, out: Tensor, tiling: Tiling | None = None) -> None:
    """Write left @ right, known to be symmetric, to `out`.

    Args:
        left: (matrices, side, length), fp16 or bf16.
        right: (matrices, length, side).
        out: (matrices, side, side), contiguous.
        tiling: By default what `choose_tiling` says.
    """
    tiling = tiling or choose_tiling(*out.shape[:2], aligned=are_aligned(left, right))
    _launch(product_kernel, product_arguments(left, right, out), {}, out, tiling)


def launch_polynomial(
    gram: Tensor, coefficients: Sequence[float | Tensor], out: Tensor, tiling: Tiling | None = None
) -> None:
    """Write a I + b R + c R^2 to `out`.

    Args:
        gram: R, (matrices, side, side), symmetric, fp16 or bf16.
        coefficients: a, b and c: three numbers, or three contiguous fp32 tensors of (matrices,).
        out: (matrices, side, side), contiguous.
        tiling: By default what `choose_tiling` says.
    """
    tiling = tiling or choose_tiling(*out.shape[:2], aligned=are_aligned(gram))
    constants = {"PER_MATRIX": isinstance(coefficients[0], Tensor)}
    _launch(polynomial_kernel, polynomial_arguments(gram, coefficients, out), constants, out, tiling)


def product_arguments(left: Tensor, right: Tensor, out: Tensor) -> tuple:
    """Return the arguments of product_kernel, without its compile-time ones."""
    return left, right, out, *left.shape[1:], *left.stride(), *right.stride()


def polynomial_arguments(gram: Tensor, coefficients: Sequence[float | Tensor], out: Tensor) -> tuple:
    """Return the arguments of polynomial_kernel, without its compile-time ones."""
    return gram, out, *coefficients, gram.shape[-1], *gram.stride()


def _launch(kernel: Any, arguments: tuple, constants: dict[str, bool], out: Tensor, tiling: Tiling) -> None:
    programs = len(out) * _lower_tiles(out.shape[-1], tiling)
    if programs:
        with _on_device(out.device):
            kernel[(programs,)](*arguments, **constants, **tiling.constants(), **tiling.options())


def _on_device(device: torch.device) -> AbstractContextManager:
    """Return a context in which kernels are launched on this device; Triton's interpreter runs on the CPU."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


@triton.jit
def _place(program, side, BLOCK: tl.constexpr):
    """Return matrix, tile row and tile column of a program: tile t = row (row + 1) / 2 + column, column <= row."""
    tiles = tl.cdiv(side, BLOCK)
    lower = tiles * (tiles + 1) // 2
    matrix = program // lower
    t = program % lower
    row = ((tl.sqrt_rn(8.0 * t + 1.0) - 1.0) * 0.5).to(tl.int32)
    row -= (row * (row + 1) // 2 > t).to(tl.int32)  # where the square root was rounded up, from some 4,000 tiles on
    return matrix.to(tl.int64), row, t - row * (row + 1) // 2


@triton.jit
def _tile_pointers(
    start, first_row, first_column, row_stride, column_stride, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return pointers to the tile (ROWS, COLUMNS) whose first element is (first_row, first_column)."""
    start += first_row.to(tl.int64) * row_stride + first_column.to(tl.int64) * column_stride
    return start + tl.arange(0, ROWS)[:, None] * row_stride + tl.arange(0, COLUMNS)[None, :] * column_stride


@triton.jit
def _multiply(left, right, row, column, side, length, left_row_stride, left_column_stride, right_row_stride,
              right_column_stride, BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """Return one tile of left @ right, (BLOCK, BLOCK) in fp32."""
    zero = row * 0
    left_tile = _tile_pointers(left, row * BLOCK, zero, left_row_stride, left_column_stride, BLOCK, DEPTH)
    right_tile = _tile_pointers(right, zero, column * BLOCK, right_row_stride, right_column_stride, DEPTH, BLOCK)
    row_inside = (tl.arange(0, BLOCK) < side - row * BLOCK)[:, None]
    column_inside = (tl.arange(0, BLOCK) < side - column * BLOCK)[None, :]
    k = tl.arange(0, DEPTH)
    total = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for low in range(0, length, DEPTH):
        a = tl.load(left_tile, mask=row_inside & (k < length - low)[None, :], other=0.0)
        b = tl.load(right_tile, mask=column_inside & (k < length - low)[:, None], other=0.0)
        total = tl.dot(a, b, total)
        left_tile += DEPTH * left_column_stride
        right_tile += DEPTH * right_row_stride
    return total


@triton.jit
def _store_twice(out, tile, row, column, side, BLOCK: tl.constexpr):
    """Write a tile and its mirror image into a contiguous matrix; one on the diagonal takes its lower half for both."""
    tile = tile.to(out.dtype.element_ty)
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    if row == column:
        tile = tl.where(i >= j, tile, tl.trans(tile))
    inside = (i < side - row * BLOCK) & (j < side - column * BLOCK)
    tl.store(_tile_pointers(out, row * BLOCK, column * BLOCK, side, 1, BLOCK, BLOCK), tile, mask=inside)
    if row != column:
        inside = (i < side - column * BLOCK) & (j < side - row * BLOCK)
        mirror = _tile_pointers(out, column * BLOCK, row * BLOCK, side, 1, BLOCK, BLOCK)
        tl.store(mirror, tl.trans(tile), mask=inside)


@triton.jit
def product_kernel(left, right, out, side, length, left_stride, left_row_stride, left_column_stride, right_stride,
                   right_row_stride, right_column_stride, BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """out = left @ right, known to be symmetric: (matrices, side, length) by (matrices, length, side)."""
    matrix, row, column = _place(tl.program_id(0), side, BLOCK)
    total = _multiply(left + matrix * left_stride, right + matrix * right_stride, row, column, side, length,
                      left_row_stride, left_column_stride, right_row_stride, right_column_stride, BLOCK, DEPTH)  # fmt: skip
    _store_twice(out + matrix * side * side, total, row, column, side, BLOCK)


@triton.jit
def polynomial_kernel(gram, out, a, b, c, side, stride, row_stride, column_stride, PER_MATRIX: tl.constexpr,
                      BLOCK: tl.constexpr, DEPTH: tl.constexpr):  # fmt: skip
    """out = a I + b R + c R^2 for symmetric R (matrices, side, side); a, b, c: fp32, or pointers to one per matrix."""
    matrix, row, column = _place(tl.program_id(0), side, BLOCK)
    if PER_MATRIX:
        a = tl.load(a + matrix)
        b = tl.load(b + matrix)
        c = tl.load(c + matrix)
    gram += matrix * stride
    square = _multiply(gram, gram, row, column, side, side, row_stride, column_stride, column_stride, row_stride,
                       BLOCK, DEPTH)  # fmt: skip
    i = row * BLOCK + tl.arange(0, BLOCK)[:, None]
    j = column * BLOCK + tl.arange(0, BLOCK)[None, :]
    tile = _tile_pointers(gram, row * BLOCK, column * BLOCK, row_stride, column_stride, BLOCK, BLOCK)
    linear = tl.load(tile, mask=(i < side) & (j < side), other=0.0).to(tl.float32)
    total = c * square + b * linear + tl.where(i == j, a, 0.0)
    _store_twice(out + matrix * side * side, total, row, column, side, BLOCK)
