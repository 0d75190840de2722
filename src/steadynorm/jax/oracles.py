"""The lmos in jnp: a function of arrays for each row of `steadynorm.theory.updates.UPDATES` that JAX supports.

A function takes the momentum of one parameter as matrices (..., d_out, d_in) and returns an update of unit norm. The update
does not depend on the scale of the momentum, and it is zero where the momentum is zero.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

from steadynorm.jax.factors import PolarMethod, normalize, polar_factor
from steadynorm.theory.updates import BY_SHAPE, Update, update_of


def _spectral(x: Any, polar: PolarMethod) -> Any:
    return polar_factor(x, polar) * math.sqrt(x.shape[-2] / x.shape[-1])


_FUNCTIONS: dict[str, Callable[[Any, PolarMethod], Any]] = {
    "spectral": _spectral,
    "conv": _spectral,
    "sign": lambda x, _: jnp.sign(x) / x.shape[-1],
    "embedding": lambda x, _: jnp.sign(x),
    "bias": lambda x, _: normalize(x, -1) * math.sqrt(x.shape[-1]),
    "row": lambda x, _: normalize(x, -1) / math.sqrt(x.shape[-1]),
    "column": lambda x, _: normalize(x, -2) * math.sqrt(x.shape[-2]),
}


def find_oracle(lmo: str, shape: Sequence[int]) -> Update:
    """Return the row of an lmo for a parameter of this shape; raise ValueError if the lmo is unknown.

    >>> find_oracle("by-shape", (4, 4)).name
    'spectral'
    """
    if lmo not in _FUNCTIONS and lmo != BY_SHAPE:
        remedy = "for transposed weights use a label with role 'hidden-transposed'" if "-" in lmo else ""
        choices = ", ".join([*_FUNCTIONS, BY_SHAPE])
        raise ValueError(f"unknown lmo {lmo!r}; choose one of {choices}" + (f"; {remedy}" if remedy else ""))
    return update_of(lmo, shape)


def as_matrices(x: Any, oracle: Update, blocks: int) -> Any:
    """Return a parameter as the matrices that an lmo sees, (..., d_out, d_in)."""
    return oracle.view.to_matrices(x, blocks)


def apply_oracle(x: Any, oracle: Update, blocks: int, polar: PolarMethod, fade: Any = None) -> Any:
    """Return u = -lmo(x), of x's shape.

    Args:
        x: The momentum of one parameter.
        oracle: The row of the lmo.
        blocks: How many row blocks are matrices of their own.
        polar: How polar factors are found.
        fade: A factor for each matrix, (...); None stands for 1.

    Examples:
        >>> apply_oracle(jnp.array([[3.0, -0.5], [0.0, 1.0]]), find_oracle("sign", (2, 2)), 1, "express").tolist()
        [[0.5, -0.5], [0.0, 0.5]]
    """
    u = _FUNCTIONS[oracle.name](as_matrices(x, oracle, blocks), polar)
    u = u if fade is None else u * fade[..., None, None].astype(u.dtype)
    return u.reshape(x.shape)
