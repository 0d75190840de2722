"""Polar factors in jnp: the iteration of `steadynorm.polar`, with the same coefficients, scaling and Gram form.

Products accumulate in fp32. The matrices themselves are bf16 on an accelerator and fp32 on a CPU, where XLA gains nothing
from bf16; fp64 stays fp64. Directions with no singular value (zero matrices, missing rank) stay zero. A matrix with a NaN
becomes NaN and does not affect the other matrices of its batch.
"""

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

from steadynorm.polar.coefficients import DEFAULT_STEPS, GRAM_MIN_ASPECT, GRAM_MIN_ROWS_BF16, Quintic, find_quintics

PolarMethod = str | tuple[str, int]  # a method, or a method and its number of steps

_GRAM_MIN_ROWS = {"bfloat16": GRAM_MIN_ROWS_BF16, "float32": 32, "float64": 32}  # below 32 rows it gains nothing


def split_method(polar: PolarMethod) -> tuple[str, int]:
    """Return the method and its number of steps; raise ValueError if the method is unknown.

    >>> split_method("express"), split_method(("newton-schulz", 3))
    (('express', 4), ('newton-schulz', 3))
    """
    is_pair = isinstance(polar, tuple | list) and len(polar) == 2
    if not (isinstance(polar, str) or is_pair):
        raise ValueError(f'polar={polar!r}: pass a method, or a method and its number of steps as in ("express", 4)')
    method, steps = (polar, DEFAULT_STEPS.get(polar, 0)) if isinstance(polar, str) else polar
    find_quintics(method, steps)
    return method, steps


def polar_factor(x: jax.Array, polar: PolarMethod = "express", *, dtype: str | None = None) -> jax.Array:
    """Return the polar factor of each matrix of x (..., d_out, d_in), tall or wide, in x's dtype.

        polar(x) = U V^T,   x = U diag(sigma) V^T

    Args:
        x: The matrices, of any scale.
        polar: "express" (PolarExpress), "newton-schulz" (Muon's iteration) or "svd", or such a method with its number of
            steps, as in ("express", 4).
        dtype: The dtype of the factors of each product, "float32" or "bfloat16". Default: bf16 on an accelerator, fp32 on
            a CPU.

    Examples:
        >>> x = jnp.array([[3.0, 0.0], [0.0, -1e-20]])
        >>> float(polar_factor(x, "svd")[0, 0])
        1.0
    """
    method, steps = split_method(polar)
    if x.ndim < 2:
        raise ValueError(f"polar_factor needs matrices, got shape {x.shape}")
    if x.size == 0:
        return x
    working = _working_dtype(x.dtype, method, dtype)
    matrices = _scale(x, working).reshape(-1, *x.shape[-2:])  # (matrices, d_out, d_in)
    return _factor(matrices, method, steps).astype(x.dtype).reshape(x.shape)


def _working_dtype(dtype: jnp.dtype, method: str, asked: str | None) -> jnp.dtype:
    if dtype == jnp.float64:
        return dtype
    if asked not in (None, "float32", "bfloat16"):
        raise ValueError(f"dtype={asked!r} is unknown; choose 'float32' or 'bfloat16'")
    usual = "float32" if method == "svd" or jax.default_backend() == "cpu" else "bfloat16"
    return jnp.dtype(asked or usual)


def wide_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Return a dtype that is at least fp32."""
    return jnp.promote_types(dtype, jnp.float32)


def _scale(x: jax.Array, working: jnp.dtype) -> jax.Array:
    """Return x in the working dtype, times the power of two that brings the largest entry of a matrix to [0.5, 1).

    The power is applied as two factors, because the largest one overflows fp32.
    """
    x = x.astype(wide_dtype(x.dtype))
    exponent = jnp.frexp(jnp.abs(x).max((-2, -1), keepdims=True))[1]
    half = exponent // 2
    first, second = (jnp.exp2(-power.astype(x.dtype)) for power in (half, exponent - half))
    return (x * first * second).astype(working)


def _factor(x: jax.Array, method: str, steps: int) -> jax.Array:
    tall = x.shape[-2] > x.shape[-1]
    y = x.mT if tall else x  # (matrices, d, n), d <= n
    d, n = y.shape[-2:]
    if d == 1 and method != "newton-schulz":  # a vector: nothing to iterate, but Muon does
        return normalize(x, (-2, -1))
    if method == "svd":
        return _svd(x)
    quintics = find_quintics(method, steps)
    published = method == "newton-schulz"
    flat = d >= _GRAM_MIN_ROWS[y.dtype.name] and n >= GRAM_MIN_ASPECT * d
    y = _steps_on_gram(y, quintics) if flat and not published else _steps_on_x(y, quintics, published)
    return y.mT if tall else y


def normalize(x: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """Return x over its l2 norm along the axes, in at least fp32, safe for any scale; zero stays zero."""
    wide = x.astype(wide_dtype(x.dtype))
    largest = jnp.abs(wide).max(axis, keepdims=True)
    wide = wide / jnp.where(largest > 0, largest, 1.0)
    norm = jnp.sqrt(jnp.square(wide).sum(axis, keepdims=True))
    return (wide / jnp.where(norm > 0, norm, 1.0)).astype(x.dtype)


def _svd(x: jax.Array) -> jax.Array:
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    rank = s > s.max(-1, keepdims=True) * (max(x.shape[-2:]) * jnp.finfo(x.dtype).eps)
    factor = _product(u * rank[..., None, :], vh)
    return jnp.where(jnp.isnan(s).any(-1)[..., None, None], jnp.nan, factor)


def _steps_on_x(y: jax.Array, quintics: tuple[Quintic, ...], published: bool) -> jax.Array:
    """Iterate on the matrix: y <- a y + (b A + c A^2) y with A = y y^T, 3 products per step, the sum rounded once."""
    y = _product(_first_polynomial(_product(y, y.mT), quintics[0], published), y)
    for a, b, c in quintics[1:]:
        gram = _product(y, y.mT)
        inner = _combine(gram, _product(gram, gram), 0.0, b, c)
        y = (a * y.astype(wide_dtype(y.dtype)) + _wide_product(inner, y)).astype(y.dtype)
    return y


def _steps_on_gram(y: jax.Array, quintics: tuple[Quintic, ...]) -> jax.Array:
    """Iterate on the small matrix R = y y^T: with P = a I + b R + c R^2, Q <- P Q and R <- P R P, then y <- Q y.

    After two steps rounding swamps R's small eigenvalues, so y <- Q y and R is computed from it again. If the number of
    steps is odd, the single one comes before the last two, as in `steadynorm.polar.iteration`.
    """
    k = 0
    while (left := len(quintics) - k) > 0:
        alone = left in (1, 3)
        gram = _product(y, y.mT)
        q = _first_polynomial(gram, quintics[0], False) if k == 0 else _polynomial(gram, quintics[k])
        if not alone:
            gram = _product(_product(q, gram), q)
            q = _product(_polynomial(gram, quintics[k + 1]), q)
        y = _product(q, y)
        k += 1 if alone else 2
    return y


def _first_polynomial(gram: jax.Array, quintic: Quintic, published: bool) -> jax.Array:
    """Return the polynomial of the matrix scaled by its norm s: (a/s) I + (b/s^3) R + (c/s^5) R^2.

    s is the Schatten-8 norm, |R^2|_F^(1/4), a bound on the largest singular value that costs nothing here. Muon and the
    published Scion divide by the Frobenius norm instead, (trace R)^(1/2).
    """
    square, exact = _product(gram, gram), wide_dtype(gram.dtype)
    if published:
        size = jnp.sqrt(jnp.trace(gram.astype(exact), axis1=-2, axis2=-1))
    else:
        size = jnp.sqrt(jnp.square(square.astype(exact)).sum((-2, -1))) ** 0.25
    inverse = jnp.where(size > 0, 1 / jnp.where(size > 0, size, 1.0), 0.0 * size)[..., None, None]  # NaN stays
    a, b, c = quintic
    return _combine(gram, square, a * inverse, b * inverse**3, c * inverse**5)


def _polynomial(gram: jax.Array, quintic: Quintic) -> jax.Array:
    return _combine(gram, _product(gram, gram), *quintic)


def _combine(gram: jax.Array, square: jax.Array, a, b, c) -> jax.Array:
    """Return a I + b R + c R^2, rounded once."""
    exact = wide_dtype(gram.dtype)
    out = b * gram.astype(exact) + c * square.astype(exact) + a * jnp.eye(gram.shape[-1], dtype=exact)
    return out.astype(gram.dtype)


def _product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a b in the dtype of a, rounded once."""
    return _wide_product(a, b).astype(a.dtype)


def _wide_product(a: jax.Array, b: jax.Array) -> jax.Array:
    """Return a b, accumulated and returned in at least fp32; fp32 matrices are multiplied in full precision."""
    precision = None if a.dtype == jnp.bfloat16 else jax.lax.Precision.HIGHEST
    return jnp.matmul(a, b, precision=precision, preferred_element_type=wide_dtype(a.dtype))
