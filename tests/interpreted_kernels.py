"""Run the Triton kernels under Triton's interpreter and print what came out, for test_symmetric_kernels.py.

A process of its own, because TRITON_INTERPRET=1 counts only when it is set before triton is imported. Everything is
fp16: the interpreter's bf16 products are wrong. Inputs lie in memory full of NaN, which shows what is read from beside
them and used, or before a page that must not be read at all, which ends this process.
"""

import ctypes
import json
import mmap
import sys

import torch
import triton
import triton.language as tl
from torch import Tensor

from steadynorm.polar import iteration, symmetric_kernels, triton_kernels
from steadynorm.polar.coefficients import find_quintics

TILINGS = {"large": triton_kernels.LARGE, "small": triton_kernels.SMALL, "unaligned": triton_kernels.UNALIGNED}
SENTINEL = 7.0
HALF_ULP = 2.0**-11  # of fp16, relative
# tiling, matrices, side, length, layout: multiples of the block and not, less than a block, one row, no summand.
PRODUCTS = [
    ("small", 2, 128, 64, "contiguous"), ("small", 2, 100, 130, "transposed"), ("unaligned", 2, 130, 40, "strided"),
    ("small", 1, 1, 5, "before a wall"), ("small", 1, 70, 9, "before a wall"), ("small", 2, 5, 0, "contiguous"),
    ("large", 2, 128, 128, "transposed"), ("large", 1, 200, 70, "strided"),
]  # fmt: skip
# tiling, matrices, side, layout, whether each matrix has coefficients of its own
POLYNOMIALS = [
    ("small", 2, 100, "contiguous", False), ("small", 3, 64, "transposed", True), ("large", 1, 128, "contiguous", False),
    ("large", 2, 150, "strided", True), ("small", 1, 9, "before a wall", False),
]  # fmt: skip
COEFFICIENTS = (0.7, -1.3, 0.4)


def random(*shape: int) -> Tensor:
    """Return numbers of which 64 or so summands have a variance of about 1."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))) / 8


def surround(x: Tensor, layout: str) -> Tensor:
    """Return x in fp16 in one of the layouts, amid NaN."""
    if layout == "before a wall":
        return put_before_wall(x.half())
    matrices, rows, columns = x.shape
    shape = (matrices + 2, columns, rows) if layout == "transposed" else (matrices + 2, rows, columns)
    if layout == "strided":
        shape = (matrices + 2, rows + 3, 2 * columns + 1)
    memory = torch.full(shape, torch.nan, dtype=torch.float16)
    view = memory[1:-1].mT if layout == "transposed" else memory[1:-1]
    if layout == "strided":
        view = view[:, 2 : 2 + rows, 1::2]
    return view.copy_(x)


def put_before_wall(x: Tensor) -> Tensor:
    """Return a copy of x that ends where a page begins that nobody may read."""
    size = -(-x.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE
    memory = mmap.mmap(-1, size + mmap.PAGESIZE)
    wall = ctypes.addressof(ctypes.c_char.from_buffer(memory)) + size
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(wall), ctypes.c_size_t(mmap.PAGESIZE), 0) == 0
    return torch.frombuffer(memory, dtype=x.dtype, count=x.numel(), offset=size - x.nbytes).view(x.shape).copy_(x)


def guard(matrices: int, side: int) -> Tensor:
    """Return memory for a result, with a matrix before and after it that must stay as it is."""
    return torch.full((matrices + 2, side, side), SENTINEL, dtype=torch.float16)


def compare(memory: Tensor, expected: Tensor) -> dict:
    """Return by how much an entry is further off than one rounding to fp16 takes it, and what else must hold."""
    out = memory[1:-1]
    beyond = (out.float() - expected).abs() - HALF_ULP * expected.abs()
    return {
        "beyond rounding": beyond.max().item() if out.isfinite().all() else "not finite",
        "size": expected.abs().max().item(),
        "symmetric": torch.equal(out, out.mT),
        "untouched": bool((memory[[0, -1]] == SENTINEL).all()),
    }


def products(tiling: str, matrices: int, side: int, length: int, layout: str) -> dict:
    x = surround(random(matrices, side, length), layout)
    memory = guard(matrices, side)
    triton_kernels.launch_product(x, x.mT, memory[1:-1], TILINGS[tiling])
    return compare(memory, x.float() @ x.float().mT)


def unsymmetric_product(tiling: str) -> dict:
    """Multiply what has no symmetric product: only the lower half can be where the result comes from."""
    left, right = (surround(random(2, *shape), "strided") for shape in ((150, 70), (70, 150)))
    memory = guard(2, 150)
    triton_kernels.launch_product(left, right, memory[1:-1], TILINGS[tiling])
    whole = left.float() @ right.float()
    return compare(memory, whole.tril() + whole.tril(-1).mT)


def polynomials(tiling: str, matrices: int, side: int, layout: str, per_matrix: bool) -> dict:
    lower = random(matrices, side, side).tril()
    gram = surround(lower + lower.tril(-1).mT, layout)
    scale = torch.arange(1.0, matrices + 1) if per_matrix else torch.ones(matrices)
    a, b, c = (value * scale for value in COEFFICIENTS)
    memory = guard(matrices, side)
    triton_kernels.launch_polynomial(gram, (a, b, c) if per_matrix else COEFFICIENTS, memory[1:-1], TILINGS[tiling])
    a, b, c = (value[:, None, None] for value in (a, b, c))
    exact = gram.float()
    return compare(memory, a * torch.eye(side) + b * exact + c * (exact @ exact))


@triton.jit
def places_kernel(programs, out, side, count, BLOCK: tl.constexpr, STEP: tl.constexpr):
    k = tl.program_id(0) * STEP + tl.arange(0, STEP)
    matrix, row, column = triton_kernels._place(tl.load(programs + k, mask=k < count), side, BLOCK)
    tl.store(out + 3 * k, matrix, mask=k < count)
    tl.store(out + 3 * k + 1, row, mask=k < count)
    tl.store(out + 3 * k + 2, column, mask=k < count)


def misplaced(tiles: int, rows: Tensor) -> int:
    """Count those of the first and last tiles of rows, in the second matrix, that get another place."""
    first = rows * (rows + 1) // 2
    expected = torch.cat([torch.stack([rows, 0 * rows], 1), torch.stack([rows, rows], 1)])  # row, column
    programs = (torch.cat([first, first + rows]) + tiles * (tiles + 1) // 2).int()
    out = torch.full((len(programs), 3), -1)
    step = 1 << 14
    places_kernel[(-(-len(programs) // step),)](programs, out, 64 * tiles - 1, len(programs), 64, step)
    return int(((out[:, 0] != 1) | (out[:, 1:] != expected).any(1)).sum())


def iterate(rows: int, columns: int) -> float:
    """Return how far the Gram form and the form on x are from the torch path, as the polar factor sees it."""
    library = torch.library.Library("steadynorm", "IMPL")
    library.impl("symmetric_product", symmetric_kernels.compute_product, "CPU")
    library.impl("symmetric_polynomial", symmetric_kernels.compute_polynomial, "CPU")
    quintics = find_quintics("express", 3)
    results = []
    for use in (lambda device, dtype: False, lambda device, dtype: True):
        symmetric_kernels.is_enabled = use
        x = random(1, rows, columns).half() / 4
        results.append(iteration._steps_on_gram(x, quintics, tall=False))
        results.append(iteration._steps_on_x(x.mT.contiguous().mT, quintics, False, iteration._schatten8))
    off_gram, off_x, on_gram, on_x = results
    return max((on_gram - off_gram).abs().max().item(), (on_x - off_x).abs().max().item())


def main() -> None:
    torch.set_num_threads(1)
    report = {
        "products": {str(case): products(*case) for case in PRODUCTS},
        "polynomials": {str(case): polynomials(*case) for case in POLYNOMIALS},
        "unsymmetric products": {tiling: unsymmetric_product(tiling) for tiling in ("large", "small")},
        "misplaced": {tiles: misplaced(tiles, torch.arange(tiles)) for tiles in (1, 2, 3, 1024, 16384)},
        "iteration": iterate(70, 110),
    }
    json.dump(report, sys.stdout)


if __name__ == "__main__":
    main()
