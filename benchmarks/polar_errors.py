"""Measure the polar error of the accelerator path by working dtype: fp16, bf16 and fp32 (docs/benchmarks.md).

No GPU is needed. A CPU without fp16 instructions takes minutes for one product of two half-precision matrices, so a
dispatch mode does what tensor cores do: it multiplies the rounded operands in fp32, and rounds the result once.

python -m benchmarks.polar_errors [--quick]
"""

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.pages import fill
from steadynorm.lab import bench
from steadynorm.polar import Polar
from steadynorm.polar.accelerator import find_factors

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
RESULTS = HERE / "polar-errors.json"
MARKER = "polar errors by dtype"
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHAPES: tuple[bench.Shape, ...] = ((96, 96), (96, 384), (384, 384), (384, 1536))
STEPS = (4, 5)
_PRODUCTS = (torch.ops.aten.mm, torch.ops.aten.bmm, torch.ops.aten.addmm, torch.ops.aten.baddbmm)


class TensorCoreProducts(TorchDispatchMode):
    """Multiply half-precision matrices as tensor cores do: exact products, summed in fp32, rounded once.

    `beta` times the addend is also added in fp32, before rounding. The order of summation differs from a GPU's.

    >>> x = torch.full((1, 8), 0.1, dtype=torch.float16)
    >>> with TensorCoreProducts():
    ...     product = x @ x.mT
    >>> product.dtype
    torch.float16
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        halves = [x for x in args if isinstance(x, Tensor) and x.dtype in (torch.float16, torch.bfloat16)]
        if func._overloadpacket not in _PRODUCTS or not halves:
            return func(*args, **kwargs)
        if "out" in kwargs:
            raise NotImplementedError(f"{func}: out= is not emulated; write the product to new memory")
        wide = [x.float() if isinstance(x, Tensor) else x for x in args]
        return func(*wide, **kwargs).to(halves[0].dtype)


def emulated_factor(x: Tensor, dtype: torch.dtype, steps: int) -> Tensor:
    """Return the polar factor of a matrix as the accelerator path computes it in this working dtype, in fp32."""
    with TensorCoreProducts():
        factors = find_factors([x.unsqueeze(0)], Polar(steps=steps).quintics, dtype, published=False, scale=1.0)
    return factors.squeeze(0).float()


def measure(shapes: Sequence[bench.Shape] = SHAPES, steps: Sequence[int] = STEPS) -> list[dict[str, Any]]:
    """Return one record per number of steps, shape and dtype, with its errors by kind of spectrum."""
    records = []
    for count in steps:
        for shape in shapes:
            for name, dtype in DTYPES.items():
                factor: Callable[[Tensor], Tensor] = partial(emulated_factor, dtype=dtype, steps=count)
                errors = bench.polar_errors(factor, [shape])
                records.append({"steps": count, "shape": list(shape), "dtype": name, "errors": errors})
                print(records[-1], flush=True)
    return records


def table(records: Sequence[Mapping[str, Any]]) -> str:
    """Return the records as a Markdown table: a row per number of steps and shape, a column per spectrum and dtype."""
    kinds = list(records[0]["errors"])
    columns = ["steps", "matrix", *(f"{kind}, {name}" for kind in kinds for name in DTYPES)]
    errors: dict[tuple[int, int, int], dict[str, Mapping[str, float]]] = {}
    for record in records:
        errors.setdefault((record["steps"], *record["shape"]), {})[record["dtype"]] = record["errors"]
    rows = [
        [steps, f"{height} x {width}", *(f"{by_dtype[name][kind]:.3f}" for kind in kinds for name in DTYPES)]
        for (steps, height, width), by_dtype in errors.items()
    ]
    return bench.markdown_table(columns, rows, left=[1])


def main() -> None:
    """Measure, write the results, and fill the page from them."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.polar_errors", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument("--quick", action="store_true", help="check that it runs: one small shape, nothing written")
    arguments = parser.parse_args()
    records = measure(((24, 24),)) if arguments.quick else measure()
    print(table(records))
    if not arguments.quick:
        RESULTS.write_text(json.dumps(records, indent=1) + "\n", encoding="utf-8")
        fill(PAGE, MARKER, table(records))


if __name__ == "__main__":
    main()
