"""Polar factors in jnp are as good as torch's, by every method, in every dtype and shape."""

import needs_jax  # noqa: F401  # isort: skip

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

import steadynorm.jax as sj
from steadynorm.jax.oracles import apply_oracle, find_oracle
from steadynorm.lmo import LMOS
from steadynorm.polar import METHODS, Polar
from steadynorm.polar.coefficients import DEFAULT_STEPS

SHAPES = [(2, 48, 48), (2, 40, 160), (2, 160, 40), (3, 8, 6), (2, 1, 5), (200, 400)]


def draw(shape, dtype=np.float64) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(dtype)


def exact_factor(x: np.ndarray) -> np.ndarray:
    u, _, vh = np.linalg.svd(x.astype(np.float64), full_matrices=False)
    return u @ vh


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_the_factor_is_torchs(shape, method):
    """In fp64 they agree to rounding, although the products are taken in another order."""
    x = draw(shape)
    with jax.enable_x64(True):
        ours = np.asarray(sj.polar_factor(jnp.asarray(x), method))
    np.testing.assert_allclose(ours, Polar(method, DEFAULT_STEPS[method])(torch.from_numpy(x)).numpy(), atol=1e-10)


@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize(("dtype", "most"), [("float32", 1e-3), ("bfloat16", 0.1)])
def test_the_error_is_torchs(shape, steps, dtype, most):
    """The distance to the exact factor is the polynomials'; in bf16 the two libraries round at different places."""
    x = draw(shape, np.float32)
    ours = np.asarray(sj.polar_factor(jnp.asarray(x), ("express", steps), dtype=dtype))
    theirs = Polar("express", steps, dtype=dtype)(torch.from_numpy(x)).numpy()
    wrong, reference = (np.linalg.norm(factor - exact_factor(x)) for factor in (ours, theirs))
    assert wrong == pytest.approx(reference, rel=most)


def test_the_gram_form_is_taken_where_matrices_are_flat(monkeypatch):
    from steadynorm.jax import factors

    shapes = []
    plain = factors._steps_on_gram
    monkeypatch.setattr(factors, "_steps_on_gram", lambda y, quintics: shapes.append(y.shape) or plain(y, quintics))
    for shape in [(48, 48), (160, 40), (16, 64)]:
        for dtype in ("float32", "bfloat16"):
            jax.eval_shape(lambda x, dtype=dtype: sj.polar_factor(x, dtype=dtype), jnp.ones(shape))
    assert shapes == [(1, 40, 160)]  # in bf16 only from 192 rows


@pytest.mark.parametrize("steps", [4, 5])
@pytest.mark.parametrize("shape", [(192, 384), (768, 192)], ids=str)
def test_no_direction_is_enlarged_in_the_gram_form(shape, steps):
    """The bound is 1.11 in fp64. Bfloat16 adds 0.03, unless the odd one of five steps comes last: then more."""
    u, _, vh = np.linalg.svd(draw(shape), full_matrices=False)
    for x in (draw(shape), (u * np.geomspace(1, 1e-3, u.shape[-1])) @ vh):
        factor = sj.polar_factor(jnp.asarray(x, jnp.float32), ("express", steps), dtype="bfloat16")
        assert np.linalg.norm(np.asarray(factor), 2) < 1.11 + 0.04


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("scale", [1e-30, 1e30])
def test_the_factor_does_not_depend_on_the_scale(method, scale):
    x = draw((6, 9), np.float32)
    plain, scaled = (np.asarray(sj.polar_factor(jnp.asarray(matrix, jnp.float32), method)) for matrix in (x, scale * x))
    np.testing.assert_allclose(plain, scaled, atol=1e-5)


@pytest.mark.parametrize("method", METHODS)
def test_zero_stays_zero_and_nan_leaves_its_neighbours_alone(method):
    x = draw((3, 4, 6), np.float32)
    x[0] = 0
    x[1, 2, 3] = np.nan
    factor = np.asarray(sj.polar_factor(jnp.asarray(x), method))
    assert (factor[0] == 0).all() and np.isnan(factor[1]).all()
    np.testing.assert_allclose(factor[2], np.asarray(sj.polar_factor(jnp.asarray(x[2]), method)), atol=1e-5)


def test_missing_rank_stays_missing_in_an_svd():
    x = np.outer(np.arange(1.0, 5.0), np.arange(1.0, 4.0)).astype(np.float32)
    np.testing.assert_allclose(sj.polar_factor(jnp.asarray(x), "svd"), x / np.linalg.norm(x), atol=1e-5)


@pytest.mark.parametrize("name", ["spectral", "conv", "sign", "embedding", "bias", "row", "column"])
def test_every_lmo_is_torchs(name):
    x = draw((6, 3, 3, 3) if name == "conv" else (6, 8))
    blocks = 3 if name in ("spectral", "conv") else 1
    with jax.enable_x64(True):
        ours = np.asarray(apply_oracle(jnp.asarray(x), find_oracle(name, x.shape), blocks, "svd"))
    theirs = LMOS[name].update(torch.from_numpy(x), blocks=blocks, polar=Polar("svd")).numpy()
    np.testing.assert_allclose(ours, theirs, atol=1e-12)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: sj.polar_factor(jnp.ones((2, 2)), "fast"), "choose one of express, newton-schulz, svd"),
        (lambda: sj.polar_factor(jnp.ones((2, 2)), ("express", 0)), "must be a whole number from 1"),
        (lambda: sj.polar_factor(jnp.ones((2, 2)), 5), "pass a method, or a method and its number of steps"),
        (lambda: sj.polar_factor(jnp.ones(2)), "needs matrices"),
        (lambda: sj.polar_factor(jnp.ones((2, 2)), dtype="float16"), "choose 'float32' or 'bfloat16'"),
        (lambda: find_oracle("spectral-transposed", (2, 2)), "role 'hidden-transposed'"),
        (lambda: find_oracle("spectrum", (2, 2)), "choose one of spectral, conv"),
    ],
)
def test_a_wrong_request_is_refused_with_a_remedy(make, message):
    with pytest.raises(ValueError, match=message):
        make()
