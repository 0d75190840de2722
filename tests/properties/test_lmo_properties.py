"""Lmos and polar factors are as steep as possible, finite, scale-free, equivariant and in the unit ball, whatever
the input.
"""

import math

import pytest
import torch
import twins_optim as twins
from bounds import EPS, LEAST, POLAR_BOUND, ROUNDED, SHARE, conditioned, full_rank
from hypothesis import strategies as st
from strategies import (
    DTYPES,
    Drawn,
    dtypes,
    exponents,
    kernels,
    laid_out,
    matrices,
    orthogonal,
    powers,
    seeds,
    shapes_for,
    side,
    stacks,
    tensors,
    wide,
)
from trying import FEWER, SLOW, prop

from steadynorm.lmo import LMOS, get
from steadynorm.polar import METHODS, Polar
from steadynorm.theory.updates import UPDATES

names = st.sampled_from(sorted(LMOS))
EXACT = Polar("svd")


def any_input(exponent: st.SearchStrategy[int] = exponents) -> st.SearchStrategy[tuple[str, Drawn]]:
    """Draw an lmo and a tensor that it takes."""
    return names.flatmap(lambda name: st.tuples(st.just(name), tensors(shapes_for(name), exponent=exponent)))


@prop(fast=150, drawn=any_input(), dtype=dtypes, layout=st.sampled_from(["contiguous", "transposed", "strided"]))
def test_an_update_is_finite_keeps_the_shape_and_lies_in_the_unit_ball(drawn, dtype, layout):
    """|u| <= 1 in the lmo's own norm, |u|^2 <= U^2, zero where x is zero; x itself is left alone."""
    name, given = drawn
    plain = given.make(dtype)
    x, memory = laid_out(plain, layout)
    before = memory.clone()
    u = get(name).update(x, polar=EXACT)
    assert (u.shape, u.dtype) == (plain.shape, dtype)
    assert u.isfinite().all()
    assert get(name).norm(u.double()).item() <= 1 + EPS[dtype]
    assert u.double().square().sum().item() <= get(name).update_norm_sq(given.shape) * (1 + 2 * EPS[dtype])
    assert u.any() == plain.any()
    assert torch.equal(memory, before)


@prop(fast=150, slow=FEWER, drawn=any_input(), dtype=dtypes)
def test_a_fast_update_is_finite_and_nearly_in_the_unit_ball(drawn, dtype):
    """This is the default polar factor, in bf16 where that is fast."""
    name, given = drawn
    u = get(name).update(given.make(dtype))
    assert u.isfinite().all()
    assert get(name).norm(u.double()).item() <= POLAR_BOUND["express"] + ROUNDED[dtype]


@prop(fast=150, slow=SLOW // 2, drawn=any_input(), dtype=dtypes, method=st.sampled_from(METHODS))
def test_an_update_is_nearly_as_steep_as_any_point_of_the_unit_ball(drawn, dtype, method):
    """<x, u> is the dual norm of x, as in the slow twin; a fast polar factor reaches a share of that."""
    name, given = drawn
    x = given.make(dtype)
    scaled = x.double() / max(x.double().abs().max().item(), 1e-300)
    dual = (scaled * twins.update(name, scaled).nan_to_num()).sum().item()  # the twin divides by zero where x is zero
    reached = (scaled * get(name).update(x, polar=Polar(method)).double()).sum().item()
    assert reached >= (SHARE[method] - EPS[dtype]) * dual


@prop(fast=100, drawn=any_input(st.just(0)), power=powers, dtype=wide)
def test_the_scale_of_x_changes_nothing(drawn, power, dtype):
    """A power of two changes no bit; the unit ball above tests any other scale."""
    name, given = drawn
    x = given.make(dtype)
    scaled = (x.double() * 2.0**power).to(dtype)
    assert torch.equal(get(name).update(scaled), get(name).update(x))


@prop(fast=60, slow=FEWER, drawn=any_input(), dtype=dtypes)
def test_the_sign_of_x_is_the_sign_of_the_update(drawn, dtype):
    name, given = drawn
    x = given.make(dtype)
    torch.testing.assert_close(get(name).update(-x), -get(name).update(x), rtol=0, atol=EPS[dtype])


@prop(fast=60, slow=FEWER, drawn=any_input(), other=seeds)
def test_no_point_of_the_unit_ball_is_steeper(drawn, other):
    """<x, u> = max <x, w> over |w| <= 1, which is the definition."""
    name, given = drawn
    x = given.make()
    w = Drawn(given.shape, "normal", other).make()
    w = w / get(name).norm(w)
    best = (x * get(name).update(x, polar=EXACT)).sum().item()
    assert (x * w).sum().item() <= best + 1e-9 * abs(best) + 1e-12 * 10.0**given.exponent


@prop(
    fast=60,
    slow=FEWER,
    drawn=any_input(),
    dtype=dtypes,
    layout=st.sampled_from(["transposed", "strided", "channels last"]),
)
def test_memory_layout_changes_nothing(drawn, dtype, layout):
    name, given = drawn
    plain = given.make(dtype)
    x, _ = laid_out(plain, layout)
    polar = Polar() if dtype == torch.float64 else EXACT  # a fast one rounds in the order of the memory
    u, same = (get(name).update(y, polar=polar) for y in (x, plain))
    torch.testing.assert_close(u, same, rtol=0, atol=EPS[dtype])


@prop(fast=60, slow=FEWER, name=names, data=st.data(), count=st.integers(1, 4), dtype=dtypes)
def test_stacked_parameters_do_not_see_each_other(name, data, count, dtype):
    given = data.draw(tensors(shapes_for(name)))
    parts = [given.make(dtype, also=k) for k in range(count)]
    together = get(name).update(torch.stack(parts), batch_ndim=1, polar=EXACT)
    for u, x in zip(together, parts, strict=True):
        torch.testing.assert_close(u, get(name).update(x, polar=EXACT), rtol=0, atol=EPS[dtype])


# --- equivariance. Low-rank input has no unique polar factor to rotation's rounding: kinds of full rank only


TURNS = {"spectral": (True, True), "spectral-transposed": (True, True), "row": (False, True), "column": (True, False)}


@pytest.mark.parametrize("name", TURNS)
@prop(fast=30, slow=SLOW // len(TURNS), rows=side, columns=side, seed=seeds, exponent=exponents)
def test_rotating_a_matrix_rotates_its_update(name, rows, columns, seed, exponent):
    """u(Q x P) = Q u(x) P: spectral on both sides, row and column norms on theirs."""
    left, right = TURNS[name]
    x = full_rank((rows, columns), seed) * 10.0**exponent
    q = orthogonal(rows, seed) if left else torch.eye(rows, dtype=x.dtype)
    p = orthogonal(columns, seed + 1) if right else torch.eye(columns, dtype=x.dtype)
    u, turned = (get(name).update(y) for y in (x, q @ x @ p))
    torch.testing.assert_close(turned, q @ u @ p, rtol=0, atol=1e-6)


@prop(fast=60, n=st.integers(1, 40), seed=seeds, exponent=exponents)
def test_rotating_a_vector_rotates_its_update(n, seed, exponent):
    x, q = full_rank((n,), seed) * 10.0**exponent, orthogonal(n, seed)
    torch.testing.assert_close(get("bias").update(q @ x), q @ get("bias").update(x), rtol=0, atol=1e-9)


@pytest.mark.parametrize("name", ["sign", "embedding", "row", "column", "spectral"])
@prop(fast=30, slow=SLOW // 5, given=tensors(matrices), seed=seeds)
def test_permuting_rows_and_columns_permutes_the_update(name, given, seed):
    generator = torch.Generator().manual_seed(seed)
    rows, columns = (torch.randperm(n, generator=generator) for n in given.shape)
    x = given.make()
    moved = get(name).update(x[rows][:, columns])
    torch.testing.assert_close(moved, get(name).update(x)[rows][:, columns], rtol=0, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
@prop(fast=40, slow=SLOW // len(METHODS), given=tensors(st.one_of(matrices, stacks)))
def test_the_transpose_of_a_matrix_has_the_transposed_polar_factor(method, given):
    x = given.make()
    torch.testing.assert_close(Polar(method)(x.mT.contiguous()), Polar(method)(x).mT, rtol=0, atol=1e-6)


low_precision = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])


@pytest.mark.parametrize("method", METHODS)
@prop(fast=40, slow=FEWER, shape=matrices, seed=seeds, exponent=exponents, dtype=low_precision)
def test_the_transpose_has_the_transposed_factor_also_in_low_precision(method, shape, seed, exponent, dtype):
    """Sides that differ are iterated the same way round. A square is not: what bf16 rounds away is lifted with a weak
    direction, by up to twice the error of the polynomials."""
    x = (conditioned(shape, seed) * 10.0 ** (0 if dtype == torch.float16 else exponent)).to(dtype)
    u, turned = Polar(method)(x).double(), Polar(method)(x.mT.contiguous()).mT.double()
    if method == "svd" or shape[0] != shape[1]:
        torch.testing.assert_close(turned, u, rtol=0, atol=0.01)
    else:
        assert (turned - u).norm().item() <= 0.22 * math.sqrt(shape[0])


@pytest.mark.parametrize("method", METHODS)
@prop(fast=40, slow=FEWER, shape=matrices, seed=seeds, exponent=exponents, dtype=dtypes)
def test_the_singular_values_of_a_polar_factor_are_one(method, shape, seed, exponent, dtype):
    """They are one as far as its polynomials reach, from below and from above, and its directions are those of x."""
    x = (conditioned(shape, seed) * 10.0 ** (0 if dtype == torch.float16 else exponent)).to(dtype)
    y = Polar(method)(x).double()
    values = torch.linalg.svdvals(y)
    assert values.max().item() <= POLAR_BOUND[method] + ROUNDED[dtype]
    assert values.min().item() >= LEAST[method] - EPS[dtype]
    apart = (y - twins.polar(x.double())).norm().item() / math.sqrt(len(values))
    assert apart <= {"svd": 0.0, "express": 0.15, "newton-schulz": 0.35}[method] + EPS[dtype]


@pytest.mark.parametrize("method", METHODS)
@prop(fast=40, slow=FEWER, given=tensors(st.one_of(matrices, stacks)), dtype=dtypes, steps=st.integers(1, 9))
def test_a_polar_factor_is_finite_and_bounded(method, given, dtype, steps):
    """No singular value is above the bound and none is below zero: <x, polar(x)> >= 0."""
    x = given.make(dtype)
    y = Polar(method, steps)(x).double()
    assert y.isfinite().all()
    assert torch.linalg.matrix_norm(y, 2).max().item() <= POLAR_BOUND[method] + ROUNDED[dtype]
    scaled = x.double() / max(x.double().abs().max().item(), 1e-300)
    assert (scaled * y).sum().item() >= -EPS[dtype]


@prop(
    fast=60, slow=FEWER, shape=st.one_of(kernels, matrices, stacks), name=names, blocks=st.integers(-1, 7), seed=seeds
)
def test_blocks_and_shapes_that_do_not_fit_are_refused_and_others_work(shape, name, blocks, seed):
    lmo, x = get(name), Drawn(shape, "normal", seed).make()
    cut = {"spectral-transposed": -1, "conv": 0, "conv-tap": 0, "bias": 0}.get(name, -2)
    fits = len(shape) >= UPDATES[lmo.name].view.least_ndim and blocks >= 1 and shape[cut] % blocks == 0
    if not fits:
        with pytest.raises(ValueError, match=r"lmo|blocks"):
            lmo.update(x, blocks=blocks)
        return
    u = lmo.update(x, blocks=blocks, polar=EXACT)
    assert lmo.norm(u, blocks=blocks).item() == pytest.approx(1, rel=1e-6)
    assert u.square().sum().item() == pytest.approx(lmo.update_norm_sq(shape, blocks=blocks), rel=1e-6)
    assert math.isfinite(lmo.operations(shape, blocks=blocks))


@prop(
    fast=60, slow=FEWER, shape=st.one_of(matrices, stacks), side=st.sampled_from(["outputs", "inputs"]), data=st.data()
)
def test_blocks_of_any_sizes_move_as_matrices_of_their_own(shape, side, data):
    """Cut into any sizes along either side, each block moves by its own lmo; those of inputs share the norm."""
    dim = -2 if side == "outputs" else -1
    ends = sorted(data.draw(st.sets(st.integers(1, shape[dim]), max_size=4)) | {shape[dim]})
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    x, lmo = Drawn(shape, "normal", data.draw(seeds)).make(), get("spectral")
    shares = [size / shape[dim] if side == "inputs" else 1.0 for size in sizes]
    parts = [lmo.update(part, polar=EXACT) * share for part, share in zip(x.split(sizes, dim), shares, strict=True)]
    u = lmo.update(x, blocks=(side, sizes), polar=EXACT)
    torch.testing.assert_close(u, torch.cat(parts, dim), rtol=1e-6, atol=1e-9)
    assert u.square().sum().item() == pytest.approx(lmo.update_norm_sq(shape, blocks=(side, sizes)), rel=1e-6)


def test_every_dtype_and_lmo_is_drawn():
    """The tolerances above cover what the strategies make."""
    assert set(EPS) == set(ROUNDED) == set(DTYPES)
    assert set(POLAR_BOUND) == set(SHARE) == set(LEAST) == set(METHODS)
