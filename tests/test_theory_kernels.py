"""The overlap kernels f(r) and the gain G: against closed forms, plain sums, Monte Carlo and the shared vectors."""

import json
import math
import pickle
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import twins_theory as twin

from steadynorm.theory import advance, ema, lion, matrix_sides, overlap, steady_correlation, trace

VECTORS = json.loads((Path(__file__).parent / "data" / "theory_vectors.json").read_text(encoding="utf-8"))

# lmo, shape, and the same kernel written plainly
TWINS = {
    "linear": ("linear", None, twin.f_linear),
    "adam": ("adam", (8, 8), twin.f_linear),
    "sign": ("sign", (64, 64), twin.f_sign),
    "lion": ("lion", None, twin.f_sign),
    "embedding": ("embedding", (100, 8), twin.f_sign),
    "vector 2": ("bias", (2,), twin.f_vector(2)),
    "vector 8": ("bias", (8,), twin.f_vector(8)),
    "vector 1024": ("bias", (1024,), twin.f_vector(1024)),
    "row": ("row", (16, 24), twin.f_vector(24)),
    "column": ("column", (16, 24), twin.f_vector(16)),
    "square": ("spectral", (64, 64), twin.f_square),
    "1:4": ("spectral", (64, 256), twin.f_spectral(1 / 4)),
    "3:1": ("spectral", (192, 64), twin.f_spectral(1 / 3)),
    "transposed": ("spectral-transposed", (192, 64), twin.f_spectral(1 / 3)),
    "conv": ("conv", (32, 16, 3, 3), twin.f_spectral(32 / 144)),
    "conv tap": ("conv-tap", (32, 16, 3, 3), twin.f_spectral(1 / 2)),
}
FAMILIES = {  # the shape of each closed formula, and shapes that stress it
    **{f"vector {d}": ("bias", (d,)) for d in (1, 2, 3, 17, 300, 10_000, 10_000_000)},
    **{f"spectral {a}:{b}": ("spectral", (a, b)) for a, b in ((2, 2), (2, 3), (9, 10), (999, 1000), (2, 100_000))},
}
R = [0.0, 1e-6, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.97, 0.99, 0.999, 0.9999]


@pytest.mark.parametrize("case", VECTORS["overlap"], ids=lambda c: f"{c['lmo']}-{c['shape']}-{c['r']}")
def test_overlaps_equal_their_test_vectors(case):
    assert overlap(case["lmo"], case["shape"])(case["r"]) == pytest.approx(case["f"], rel=1e-4)


@pytest.mark.parametrize("name", TWINS)
def test_a_kernel_equals_its_plain_form(name):
    lmo, shape, f = TWINS[name]
    kernel = overlap(lmo, shape)
    for r in (0.01, 0.1, 0.5, 0.9, 0.99, 0.999):
        assert kernel(r) == pytest.approx(float(f(np.array(r))), rel=1e-9), r


@pytest.mark.parametrize("name", FAMILIES)
def test_the_weights_are_a_probability_on_odd_modes(name):
    kernel = overlap(*FAMILIES[name])
    assert (kernel.a >= 0).all()
    assert math.fsum(kernel.a) == pytest.approx(1.0, abs=1e-8)
    assert (kernel.n >= 1).all()
    assert kernel.n[0] == 1.0  # no constant term: uncorrelated inputs do not overlap
    head = kernel.n[:10]
    np.testing.assert_array_equal(head % 2, 1)
    assert len(kernel.n) < 400  # compressed: what makes a long forecast cheap


@pytest.mark.parametrize("name", FAMILIES)
def test_the_overlap_is_odd_below_its_input_correlation_and_one_at_one(name):
    kernel = overlap(*FAMILIES[name])
    assert kernel(1.0) == pytest.approx(1.0, abs=1e-6)
    assert kernel(-1.0) == pytest.approx(-1.0, abs=1e-6)
    values = [kernel(r) for r in R]
    assert values == [-kernel(-r) for r in R]
    assert all(f <= r * (1 + 1e-8) for f, r in zip(values, R, strict=True))
    assert values == sorted(values)


def test_the_sign_kernel_is_the_closed_form_to_the_last_bit():
    f = overlap("sign", None)
    for r in (-1.0, -0.3, 0.0, 0.99, 1 - 1e-12, 1.0):
        assert f(r) == 2 / math.pi * math.asin(r)


def test_a_vector_of_one_element_is_the_sign():
    one, sign = overlap("bias", (1,)), overlap("sign", None)
    assert [one(r) for r in R] == [sign(r) for r in R]
    np.testing.assert_array_equal(one.a, sign.a)


def test_sign_modes_sum_to_the_closed_form():
    """The gain uses the modes, the call uses asin: they must be one function."""
    f = overlap("sign", None)
    for r in (0.1, 0.5, 0.9, 0.99, 0.999):
        assert float(f.a @ r**f.n) == pytest.approx(2 / math.pi * math.asin(r), rel=1e-9)


def test_a_vector_tends_to_the_papers_assumption_as_it_grows():
    gaps = [0.5 - overlap("bias", (d,))(0.5) for d in (1, 4, 16, 64, 1024, 16384)]
    assert gaps == sorted(gaps, reverse=True)
    assert 0 < gaps[-1] < 2e-5
    assert overlap("bias", (64,)).gain(0.1) < overlap("bias", (1024,)).gain(0.1) < overlap("linear", None).gain(0.1)


def test_a_matrix_with_one_row_is_a_vector():
    vector = overlap("bias", (24,))
    for shape in ((1, 24), (24, 1)):
        thin = overlap("spectral", shape)
        assert [thin(r) for r in R] == [vector(r) for r in R]


def test_the_spectral_kernel_does_not_change_under_transpose_or_scale():
    wide, tall, twice = (overlap("spectral", s) for s in ((64, 192), (192, 64), (128, 384)))
    for r in R:
        assert wide(r) == tall(r) == pytest.approx(twice(r), rel=1e-12)


def test_the_square_kernel_is_the_limit_of_nearly_square_ones():
    """Closed form and Fourier form meet: f is smooth in the aspect ratio across the switch between them."""
    square = overlap("spectral", (64, 64))
    near, twice = overlap("spectral", (99_998, 100_000)), overlap("spectral", (99_996, 100_000))
    for r in (0.1, 0.5, 0.9, 0.99):
        assert near(r) == pytest.approx(square(r), rel=2e-5)
        assert 2 * near(r) - twice(r) == pytest.approx(square(r), rel=1e-7)
    assert near.gain(0.01) == pytest.approx(square.gain(0.01), rel=1e-4)


def test_square_matrices_overlap_least():
    """The closer to square, the more singular values near 0, the less linear the polar factor."""
    values = [overlap("spectral", (100, d))(0.5) for d in (100, 101, 110, 150, 200, 400, 10_000)]
    assert all(closer < further for closer, further in pairwise(values))
    assert values[-1] > 0.49


def test_blocks_use_the_kernel_of_one_block():
    assert overlap("spectral", (192, 64), blocks=3)(0.5) == overlap("spectral", (64, 64))(0.5)
    assert overlap("spectral", (192, 64))(0.5) != overlap("spectral", (64, 64))(0.5)
    assert overlap("column", (192, 64), blocks=3)(0.5) == overlap("bias", (64,))(0.5)
    assert overlap("row", (192, 64), blocks=3)(0.5) == overlap("bias", (64,))(0.5)


def test_unequal_blocks_have_the_mean_kernel_weighted_by_their_squared_updates():
    """U^2 is 64 of the 64x64 queries, and 64 (16/64)^2 = 4 of the keys and the values each."""
    grouped, square, flat = (
        overlap("spectral", shape, blocks=blocks)
        for shape, blocks in (((96, 64), (64, 16, 16)), ((64, 64), 1), ((16, 64), 1))
    )
    for r in R:
        assert grouped(r) == pytest.approx((64 * square(r) + 8 * flat(r)) / 72, rel=1e-12)
    for alpha in (0.02, 0.1, 0.5):
        mean = (64 * square.gain(alpha, eta=1e-3) + 8 * flat.gain(alpha, eta=1e-3)) / 72
        assert grouped.gain(alpha, eta=1e-3) == pytest.approx(mean, rel=1e-12)
    assert math.fsum(grouped.a) == pytest.approx(1)


def test_the_elements_of_unequal_blocks_are_weighted_like_their_kernel():
    """A vector of 1 has |u| = 1, one of 9 has nearly Gaussian elements; 1/10 and 9/10 of U^2."""
    mixed, parts = overlap("bias", (10,), blocks=(1, 9)), (overlap("bias", (1,)), overlap("bias", (9,)))
    sizes = [share * part.mean_abs for share, part in zip((0.1, 0.9), parts, strict=True)]
    assert mixed.mean_abs == pytest.approx(sum(sizes))
    assert mixed.spread == pytest.approx((sizes[0] * parts[0].spread + sizes[1] * parts[1].spread) / sum(sizes))


def test_blocks_of_one_kernel_share_it():
    assert overlap("spectral", (96, 64), blocks=(64, 32)) is not overlap("spectral", (96, 64), blocks=(32, 64))
    assert overlap("sign", (6, 4), blocks=(2, 4)) is overlap("sign", (6, 4))
    assert overlap("spectral", (64, 96), blocks=("inputs", (32, 32, 32))) is overlap("spectral", (64, 32))
    assert overlap("row", (6, 4), blocks=(2, 4)) is overlap("row", (6, 4))


def test_the_sides_of_a_matrix_follow_from_its_view():
    assert matrix_sides("conv", (64, 3, 7, 7)) == (64, 147)
    assert matrix_sides("conv-tap", (64, 3, 7, 7)) == (64, 3)
    assert matrix_sides("spectral", (5, 96, 32)) == (96, 32)  # leading dimensions are a batch
    assert matrix_sides("spectral", (96, 32), blocks=3) == (32, 32)
    assert matrix_sides("spectral", (96, 32), blocks=(64, 16, 16)) == (64, 32)  # of the first
    assert matrix_sides("spectral", (96, 32), blocks=("inputs", 4)) == (96, 8)
    assert matrix_sides("spectral-transposed", (32, 96), blocks=("inputs", 4)) == (96, 8)
    assert matrix_sides("spectral-transposed", (5, 32, 192), blocks=3) == (64, 32)  # stored d_in x d_out


# --- Monte Carlo: the formulas are about Gaussian inputs, so draw some


def polar(x):
    left, _, right = np.linalg.svd(x, full_matrices=False)
    return left @ right


@pytest.mark.parametrize("shape", [(96, 96), (48, 192)])
def test_the_spectral_kernel_agrees_with_random_matrices(shape):
    rng = np.random.default_rng(1)
    kernel, draws = overlap("spectral", shape), 50  # standard error 0.3 %
    measured = {0.5: 0.0, 0.9: 0.0}
    for _ in range(draws):
        x, z = rng.standard_normal((2, *shape))
        ux = polar(x)
        for r in measured:
            measured[r] += float((ux * polar(r * x + math.sqrt(1 - r * r) * z)).sum()) / min(shape) / draws
    for r, value in measured.items():
        assert value == pytest.approx(kernel(r), rel=0.01)
        assert abs(value / r - 1) > 0.01  # the paper's assumption f = r is visibly off


@pytest.mark.parametrize("d", [1, 3, 8])
def test_the_vector_kernel_agrees_with_random_vectors(d):
    rng = np.random.default_rng(2)
    x, z = rng.standard_normal((2, 400_000, d))
    for r in (0.5, 0.9):
        y = r * x + math.sqrt(1 - r * r) * z
        cosine = (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1)
        assert float(cosine.mean()) == pytest.approx(overlap("bias", (d,))(r), rel=0.01)


# --- gain


@pytest.mark.parametrize("alpha", [1e-3, 1e-2, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("name", ["linear", "sign", "vector 2", "vector 8", "square", "1:4"])
def test_the_gain_is_the_sum_over_lags(name, alpha):
    lmo, shape, f = TWINS[name]
    kernel = overlap(lmo, shape)
    for eta in (1e-8, 1e-4, 0.5):
        for nesterov in (False, True):
            expected = twin.gain(f, alpha, nesterov, eta)
            assert kernel.gain(alpha, nesterov=nesterov, eta=eta) == pytest.approx(expected, rel=1e-9), (eta, nesterov)


@pytest.mark.parametrize("name", TWINS)
def test_without_momentum_there_is_no_gain(name):
    lmo, shape, _ = TWINS[name]
    kernel = overlap(lmo, shape)
    assert kernel.gain(1.0) == kernel.gain(1.0, nesterov=True) == kernel.gain(1.0, eta=0.5) == 1.0
    assert kernel.gain(0.1, eta=1.0) == 1.0  # nor when every step forgets the last


def test_the_linear_gain_at_no_decay_is_the_papers():
    for alpha in (1e-3, 0.02, 0.1, 0.5, 0.9):
        a = alpha
        kernel = overlap("linear", None)
        assert kernel.gain(a) == pytest.approx((2 - a) / a, rel=1e-12)
        nesterov = (2 - a) / (a * (1 + 4 * a - 6 * a**2 + 2 * a**3))
        assert kernel.gain(a, nesterov=True) == pytest.approx(nesterov, rel=1e-12)


# --- momentum as a filter


@pytest.mark.parametrize("alpha", [1e-3, 0.1, 0.5, 1.0])
def test_the_steady_correlation_is_kappa_times_a_power(alpha):
    for nesterov in (False, True):
        first, ratio, *_ = steady_correlation(ema(alpha, nesterov=nesterov))
        assert first == pytest.approx(twin.kappa(alpha, nesterov) * (1 - alpha), rel=1e-12)
        assert ratio == 1 - alpha


@pytest.mark.parametrize("nesterov", [False, True])
def test_trace_momentum_is_ema_to_a_normalised_update(nesterov):
    """While mu is constant: the correlations agree, the scale does not."""
    for mu in (0.0, 0.5, 0.9, 0.999):
        same = steady_correlation(trace(mu, nesterov=nesterov)), steady_correlation(ema(1 - mu, nesterov=nesterov))
        assert same[0] == pytest.approx(same[1], rel=1e-9)


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.95, 0.98), (0.5, 0.9)])
def test_lions_correlation_follows_from_its_weights(betas):
    first, ratio, *_ = steady_correlation(lion(*betas))
    expected = twin.lion_correlation(*betas, count=6)
    np.testing.assert_allclose(first * ratio ** np.arange(5), expected[1:], rtol=1e-10)


@pytest.mark.parametrize("nesterov", [False, True])
def test_second_moments_advance_to_their_steady_state(nesterov):
    filter, var = ema(0.1, nesterov=nesterov), 0.0
    for _ in range(400):
        step = advance(filter, var)
        var = step.var_m
    assert var == pytest.approx(0.1 / 1.9, rel=1e-12)  # alpha / (2 - alpha)
    assert step.to_m == pytest.approx(0.9, rel=1e-12)
    assert step.to_x * step.x_m == pytest.approx(steady_correlation(filter).first, rel=1e-12)


# --- bad input: the message carries what was passed

BAD = {
    "unknown lmo": (lambda: overlap("spektral", (4, 4)), "spektral"),
    "unknown lmo, no shape": (lambda: overlap("spektral", None), "unknown lmo 'spektral'"),
    "matrix lmo on a vector": (lambda: overlap("spectral", (7,)), r"\(7,\)"),
    "row on a vector": (lambda: overlap("row", (7,)), r"\(7,\)"),
    "conv on a vector": (lambda: overlap("conv", (7,)), r"\(7,\)"),
    "no shape": (lambda: overlap("column", None), "'column'"),
    "correlation above 1": (lambda: overlap("bias", (8,))(1.5), r"1\.5"),
    "correlation nan": (lambda: overlap("sign", None)(math.nan), "nan"),
    "blocks that do not divide": (lambda: overlap("spectral", (7, 4), blocks=3), "3"),
    "blocks zero": (lambda: overlap("spectral", (8, 4), blocks=0), "0"),
    "gain at alpha 0": (lambda: overlap("bias", (8,)).gain(0.0), r"alpha=0\.0"),
    "gain at alpha above 1": (lambda: overlap("bias", (8,)).gain(1.5), r"alpha=1\.5"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, what = BAD[name]
    with pytest.raises(ValueError, match=what):
        call()


@pytest.mark.parametrize("name", TWINS)
def test_kernels_can_be_pickled(name):
    kernel = overlap(*TWINS[name][:2])
    copied = pickle.loads(pickle.dumps(kernel))
    assert (copied(0.3), copied.gain(0.1)) == (kernel(0.3), kernel.gain(0.1))
