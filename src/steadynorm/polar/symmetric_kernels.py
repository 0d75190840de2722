"""Symmetric products and polynomials on CUDA by Triton kernels that compute half of the result; off by default.

    STEADYNORM_TRITON=1    use the kernels of `triton_kernels` for fp16 and bf16 matrices on CUDA devices
    STEADYNORM_TRITON=0    use torch's products, as without the variable

Nobody has run them on a GPU yet. Their values are tested by Triton's interpreter on a CPU, and their machine code for
A100, H100 and B200 by compiling it. The variable is read at every call.

Each kernel is an operator of torch's dispatcher, so that fake tensors, dispatch modes and torch.compile see one
operation and no launch:

    torch.ops.steadynorm.symmetric_product(left, right)
    torch.ops.steadynorm.symmetric_polynomial(gram, a, b, c)                 coefficients are floats
    torch.ops.steadynorm.symmetric_polynomial.per_matrix(gram, a, b, c)      coefficients are fp32 tensors
"""

import os

import torch
from torch import Tensor

VARIABLE = "STEADYNORM_TRITON"
DTYPES = (torch.float16, torch.bfloat16)
_MIN_CAPABILITY = (8, 0)  # of a device: from here on there are tensor cores for bf16


def is_enabled(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether symmetric results of this dtype are computed by the Triton kernels on this device.

    Raises:
        RuntimeError: If STEADYNORM_TRITON=1 asks for them and something that they need is missing.
        ValueError: If STEADYNORM_TRITON is neither 0 nor 1.

    >>> is_enabled(torch.device("cpu"), torch.float16)
    False
    """
    if device.type != "cuda" or dtype not in DTYPES:
        return False
    match os.environ.get(VARIABLE, ""):
        case "" | "0":
            return False
        case "1":
            if problem := _missing(device):
                raise RuntimeError(
                    f"{VARIABLE}=1 asks for Triton kernels, but {problem}; unset {VARIABLE} to use torch's products"
                )
            return True
        case other:
            raise ValueError(f"{VARIABLE}={other!r} is not understood; set it to 0 or 1, or leave it unset")


def symmetric_product(left: Tensor, right: Tensor) -> Tensor:
    """Return left @ right, known to be symmetric: the upper half is a copy of the lower.

    Args:
        left: (..., side, length) with any strides.
        right: (..., length, side), for instance `left.mT`.

    Returns:
        (..., side, side), contiguous and exactly symmetric: what rounding would make differ comes from the lower half.
    """
    return torch.ops.steadynorm.symmetric_product.default(left, right)


def symmetric_polynomial(gram: Tensor, a: float | Tensor, b: float | Tensor, c: float | Tensor) -> Tensor:
    """Return a I + b R + c R^2 of each symmetric matrix R, rounded once.

    Args:
        gram: R, (..., side, side) with any strides.
        a: A number, or a tensor on the device with one element per matrix; likewise b and c, all three the same way.
        b: The coefficient of R.
        c: The coefficient of R^2.
    """
    if isinstance(a, Tensor):
        return torch.ops.steadynorm.symmetric_polynomial.per_matrix(gram, a, b, c)
    return torch.ops.steadynorm.symmetric_polynomial.default(gram, a, b, c)


def _missing(device: torch.device) -> str:
    """Return what the kernels need and do not find, or an empty string."""
    if torch.version.hip is not None:
        return "this torch is built for ROCm, and the kernels are compiled and tested for CUDA only"
    try:
        import triton  # noqa: F401  # pyright: ignore[reportMissingImports]
    except ImportError as error:
        return f"triton cannot be imported ({error}); install it with pip install triton"
    if torch.cuda.is_available() and (capability := torch.cuda.get_device_capability(device)) < _MIN_CAPABILITY:
        return f"{device} has compute capability {capability[0]}.{capability[1]}, and the kernels need 8.0 or more"
    return ""


def _check_product(left: Tensor, right: Tensor) -> None:
    if left.ndim < 2 or left.mT.shape != right.shape:
        raise ValueError(
            f"symmetric_product: shapes {tuple(left.shape)} and {tuple(right.shape)} do not give square matrices; pass "
            "(..., side, length) and (..., length, side)"
        )
    if left.dtype not in DTYPES or left.dtype != right.dtype:
        raise ValueError(f"symmetric_product: needs two fp16 or two bf16 tensors, got {left.dtype} and {right.dtype}")
    if left.device != right.device:
        raise ValueError(f"symmetric_product: needs tensors on one device, got {left.device} and {right.device}")


def _check_polynomial(gram: Tensor) -> None:
    if gram.ndim < 2 or gram.shape[-2] != gram.shape[-1]:
        raise ValueError(f"symmetric_polynomial: needs square matrices, got shape {tuple(gram.shape)}")
    if gram.dtype not in DTYPES:
        raise ValueError(f"symmetric_polynomial: needs fp16 or bf16, got {gram.dtype}")


def _check_coefficients(gram: Tensor, coefficients: tuple[Tensor, ...]) -> None:
    matrices = gram.shape[:-2].numel()
    for value in coefficients:
        if value.numel() != matrices or value.dtype != torch.float32 or value.device != gram.device:
            raise ValueError(
                f"symmetric_polynomial: a coefficient has {value.numel()} elements of {value.dtype} on {value.device}; "
                f"pass {matrices} of torch.float32 on {gram.device}, one per matrix"
            )


def compute_product(left: Tensor, right: Tensor) -> Tensor:
    """Run the kernel behind torch.ops.steadynorm.symmetric_product."""
    from steadynorm.polar import triton_kernels

    out = _empty_product(left, right)
    triton_kernels.launch_product(_batch(left), _batch(right), _batch(out))
    return out


def compute_polynomial(gram: Tensor, a: float | Tensor, b: float | Tensor, c: float | Tensor) -> Tensor:
    """Run the kernel behind torch.ops.steadynorm.symmetric_polynomial and its per_matrix form."""
    from steadynorm.polar import triton_kernels

    coefficients = tuple(value.reshape(-1) if isinstance(value, Tensor) else value for value in (a, b, c))
    out = _empty_polynomial(gram, a, b, c)
    triton_kernels.launch_polynomial(_batch(gram), coefficients, _batch(out))
    return out


def _empty_product(left: Tensor, right: Tensor) -> Tensor:
    _check_product(left, right)
    return left.new_empty((*left.shape[:-1], left.shape[-2]))


def _empty_polynomial(gram: Tensor, a: float | Tensor, b: float | Tensor, c: float | Tensor) -> Tensor:
    _check_polynomial(gram)
    _check_coefficients(gram, tuple(value for value in (a, b, c) if isinstance(value, Tensor)))
    return gram.new_empty(gram.shape)


def _batch(x: Tensor) -> Tensor:
    """Return x as (matrices, rows, columns)."""
    return x.flatten(0, -3) if x.ndim > 2 else x.unsqueeze(0)


_LIBRARY = torch.library.Library("steadynorm", "FRAGMENT")
_LIBRARY.define("symmetric_product(Tensor left, Tensor right) -> Tensor")
_LIBRARY.define("symmetric_polynomial(Tensor gram, float a, float b, float c) -> Tensor")
_LIBRARY.define("symmetric_polynomial.per_matrix(Tensor gram, Tensor a, Tensor b, Tensor c) -> Tensor")
for _name, _compute, _empty in (
    ("symmetric_product", compute_product, _empty_product),
    ("symmetric_polynomial", compute_polynomial, _empty_polynomial),
    ("symmetric_polynomial.per_matrix", compute_polynomial, _empty_polynomial),
):
    _LIBRARY.impl(_name, _compute, "CUDA")
    torch.library.register_fake(f"steadynorm::{_name}", _empty, lib=_LIBRARY)
