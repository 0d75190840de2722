"""Polar factors: accuracy, scale, bad matrices in a batch, and the optimality of the coefficients."""

import numpy as np
import pytest
import torch

import steadynorm as sn
from steadynorm.polar import METHODS, Polar, coefficients, iteration, polar_factor

SHAPES = [(64, 64), (32, 128), (128, 32), (17, 40), (40, 17), (1, 9), (9, 1), (1, 1), (2, 3)]


def exact(x: torch.Tensor) -> torch.Tensor:
    u, _, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return u @ vh


def error(x: torch.Tensor, y: torch.Tensor) -> float:
    return ((y.double() - exact(x)).norm() / exact(x).norm()).item()


def spectrum(rows: int, columns: int, low: float, seed: int = 0) -> torch.Tensor:
    """Return a matrix with singular values spread log-uniformly over [low, 1]."""
    g = torch.Generator().manual_seed(seed)
    u, _, vh = torch.linalg.svd(torch.randn(rows, columns, dtype=torch.float64, generator=g), full_matrices=False)
    s = torch.logspace(0, np.log10(low), min(rows, columns), dtype=torch.float64)
    return (u * s) @ vh


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_svd_is_exact(shape, dtype):
    x = torch.randn(3, *shape, dtype=torch.float64).to(dtype)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 4e-3}[dtype]
    assert polar_factor(x, method="svd").dtype == dtype
    assert all(error(a, b) < tolerance for a, b in zip(x, polar_factor(x, method="svd"), strict=True))


@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (128, 32), (17, 40)])
def test_express_is_closer_than_newton_schulz_at_the_same_cost(shape):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(1))
    assert error(x, polar_factor(x)) < 0.75 * error(x, polar_factor(x, method="newton-schulz"))


@pytest.mark.parametrize("shape", [(48, 48), (24, 96)])
def test_more_steps_converge_to_the_exact_factor_in_fp64(shape):
    x = spectrum(*shape, low=1e-3)
    errors = [error(x, polar_factor(x, steps=steps)) for steps in (3, 5, 7, 9)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-9


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(12, 20), (16, 64)])
def test_the_scale_of_the_input_does_not_matter(method, shape):
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(2))
    for power in (-100, 100):
        assert torch.equal(polar_factor(x * 2.0**power, method=method), polar_factor(x, method=method))
    for scale in (1e-30, 1e30, 1e-37):
        wrong = [error(a, b) for a, b in zip(x, polar_factor(x * scale, method=method), strict=True)]
        assert max(wrong) < {"svd": 1e-5, "express": 0.15, "newton-schulz": 0.35}[method]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("power", [-1000, -500, -130, 130, 500, 1000])
def test_the_scale_of_an_fp64_input_does_not_matter_at_all(method, power):
    x = torch.randn(2, 5, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    assert torch.allclose(
        polar_factor(x * 2.0**power, method=method), polar_factor(x, method=method), rtol=0, atol=1e-12
    )


@pytest.mark.parametrize("method", METHODS)
def test_the_transpose_of_a_matrix_gives_the_transpose(method):
    x = torch.randn(3, 10, 24, dtype=torch.float64)
    assert torch.allclose(polar_factor(x.mT, method=method), polar_factor(x, method=method).mT, atol=1e-12)


@pytest.mark.parametrize("method", METHODS)
def test_zero_and_missing_rank_stay_zero(method):
    assert not polar_factor(torch.zeros(2, 5, 7), method=method).any()
    x = torch.zeros(6, 8, dtype=torch.float64)
    x[0, 0], x[1, 1] = 3.0, -2.0
    y = polar_factor(x, method=method, steps=12)
    assert y[2:].abs().max() < 1e-12
    assert y[:, 2:].abs().max() < 1e-12
    assert abs(y[0, 0] - 1) < 0.35  # newton-schulz hovers around 1
    assert abs(y[1, 1] + 1) < 0.35


@pytest.mark.parametrize("method", METHODS)
def test_a_bad_matrix_leaves_its_neighbours_alone(method):
    x = torch.randn(4, 8, 16)
    alone = polar_factor(x, method=method)
    x[1, 2, 3] = float("nan")
    x[2] = float("inf")
    together = polar_factor(x, method=method)
    assert torch.equal(together[[0, 3]], alone[[0, 3]])
    assert together[1].isnan().all()
    assert not together[2].isfinite().all()


def test_batch_dimensions_are_kept_and_empty_ones_pass():
    assert polar_factor(torch.randn(2, 3, 4, 5)).shape == (2, 3, 4, 5)
    assert polar_factor(torch.empty(0, 4, 5)).shape == (0, 4, 5)
    assert polar_factor(torch.empty(3, 0, 5)).shape == (3, 0, 5)


def test_fp64_never_goes_through_bf16():
    x = spectrum(16, 16, low=0.9)
    assert error(x, polar_factor(x, steps=9)) < 1e-12


def test_a_single_row_is_a_normalised_vector_in_every_method_but_muons():
    x = torch.randn(1, 300)
    for method in set(METHODS) - {"newton-schulz"}:
        assert torch.allclose(polar_factor(x, method=method), x / x.norm(), atol=1e-6)


@pytest.mark.parametrize("steps", [3, 4, 5])
def test_express_beats_every_perturbed_composition_on_its_interval(steps, monkeypatch):
    """The composed polynomial's worst error over the interval rises when a coefficient of its last step is nudged."""
    monkeypatch.setattr(coefficients, "_SAFETY", 1.0)
    lower = coefficients._lower_bound(steps)
    s = np.geomspace(lower, 1, 20_000)

    def worst(quintics):
        y = s.copy()
        for a, b, c in quintics:
            y = a * y + b * y**3 + c * y**5
        return np.abs(1 - y).max()

    quintics, bound = coefficients._compose(steps, lower)
    assert worst(quintics) == pytest.approx(bound, rel=1e-4) == pytest.approx(coefficients._MAX_ERROR, rel=1e-4)
    for k in range(3):
        for factor in (0.98, 1.02):
            nudged = list(quintics[-1])
            nudged[k] *= factor
            assert worst([*quintics[:-1], tuple(nudged)]) > bound * 1.01


def test_more_steps_reach_smaller_singular_values():
    bounds = [coefficients._lower_bound(steps) for steps in range(1, 8)]
    assert bounds[:5] == sorted(bounds[:5], reverse=True)
    assert bounds[5:] == [coefficients._LOWER] * 2


def test_the_best_quintic_equioscillates():
    a, b, c = coefficients._best_quintic(0.1, 1.0)
    s = np.linspace(0.1, 1, 20001)
    miss = 1 - (a * s + b * s**3 + c * s**5)
    turns = [miss[0], *miss[1:-1][np.diff(np.sign(np.diff(miss))) != 0], miss[-1]]
    assert len(turns) == 4
    assert np.allclose(np.abs(turns), np.abs(turns[0]), rtol=1e-5)
    assert np.all(np.sign(turns[1:]) == -np.sign(turns[:-1]))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: Polar("qr"), "polar='qr'.*express"),
        (lambda: Polar(steps=0), "polar_steps=0"),
        (lambda: Polar(steps=2.5), "polar_steps=2.5"),  # type: ignore[arg-type]
        (lambda: (Polar(steps=4), Polar(steps=4.0)), r"polar_steps=4\.0"),  # type: ignore[arg-type]
        (lambda: (Polar(steps=1), Polar(steps=True)), "polar_steps=True"),
        (lambda: polar_factor(torch.ones(3)), r"needs matrices.*\(3,\)"),
    ],
)
def test_errors_quote_what_was_passed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


# --- the engine's forms give the same factor


def frobenius_express(x, steps=5, lower=1e-3):
    """Return what peers do at best: PolarExpress after scaling by the Frobenius norm, in bf16."""
    y = (x / (1.01 * x.norm(dim=(-2, -1), keepdim=True))).bfloat16()
    for a, b, c in coefficients._compose(steps, lower)[0]:
        gram = y @ y.mT
        y = a * y + (b * gram + c * (gram @ gram)) @ y
    return y


@pytest.mark.parametrize("shape", [(384, 384), pytest.param((384, 1536), marks=pytest.mark.slow)])
@pytest.mark.parametrize("kind", ["gaussian", "hard"])
def test_four_steps_are_no_worse_than_five_of_the_peers(shape, kind):
    g = torch.Generator().manual_seed(5)
    xs = (
        torch.randn(1, *shape, generator=g)
        if kind == "gaussian"
        else torch.stack([spectrum(*shape, 1e-3, k).float() for k in range(1)])
    )
    ours = np.mean([error(x, polar_factor(x, steps=4)) for x in xs])
    assert ours <= np.mean([error(x, frobenius_express(x)) for x in xs])


@pytest.mark.parametrize("shape", [(40, 40), (40, 100), (33, 140)])
@pytest.mark.parametrize("steps", [1, 2, 3, 4, 5, 6])
def test_the_gram_form_equals_the_direct_form_in_fp64(shape, steps):
    x = torch.randn(3, *shape, dtype=torch.float64)
    quintics = Polar(steps=steps).quintics
    for tall in (False, True):
        wanted = iteration._steps_on_x(x, quintics, tall, iteration._schatten8)
        assert wanted.shape == (x.mT.shape if tall else x.shape)
        assert torch.allclose(iteration._steps_on_gram(x, quintics, tall), wanted, atol=1e-9)


def test_the_gram_form_without_its_restart_diverges_in_bf16(monkeypatch):
    """This is why the restart is there: on a hard spectrum R's small eigenvalues drown in rounding."""
    x = spectrum(96, 384, 1e-3).float().bfloat16().unsqueeze(0)
    quintics = Polar(steps=6).quintics
    gram = iteration._symmetric(x, x.mT)
    total = iteration._first_polynomial(gram, quintics[0], iteration._schatten8)
    gram = total @ gram @ total
    for quintic in quintics[1:]:
        step = iteration._polynomial(gram, quintic)
        total, gram = step @ total, step @ gram @ step
    assert not error(x[0], (total @ x)[0]) < 1
    assert error(x[0], iteration._steps_on_gram(x, quintics, False)[0]) < 0.3


@pytest.mark.parametrize("steps", [3, 4, 5, 6, 7])
@pytest.mark.parametrize(("shape", "in_bf16"), [((192, 384), True), ((768, 192), True), ((384, 1536), False)])
def test_no_direction_is_enlarged_in_the_gram_form(shape, in_bf16, steps, monkeypatch):
    """The bound is 1.11 in fp64. Bfloat16 adds 0.03, unless an odd step comes last: then 0.15."""
    if in_bf16:  # fp32 rounds too little to show it; where it is emulated, large products take long
        monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "1")
    for x in (torch.randn(shape, generator=torch.Generator().manual_seed(4)), spectrum(*shape, 1e-3).float()):
        assert torch.linalg.matrix_norm(polar_factor(x, steps=steps), 2) < 1.11 + 0.04


@pytest.mark.parametrize("side", [3, 7, 96, 100])
def test_a_symmetric_product_by_blocks_equals_the_whole(side, monkeypatch):
    monkeypatch.setattr(iteration, "_SINGLE_MIN_ROWS", 1)
    monkeypatch.setattr(iteration, "_FP32_SIZES", iteration.Sizes(gram_rows=32, batch_max_elements=1000, block=32))
    x = torch.randn(side, 50, dtype=torch.float64)
    assert torch.allclose(iteration._symmetric(x, x.mT), x @ x.mT, atol=1e-12)


@pytest.mark.parametrize("shape", [(5, 24, 24), (5, 24, 60), (5, 60, 24)])
def test_a_matrix_has_the_same_factor_alone_in_groups_and_together(shape, monkeypatch):
    x = torch.randn(shape, dtype=torch.float64)
    together = polar_factor(x)
    for alone, cached in ((8, 10), (512, 10), (512, 2500)):
        monkeypatch.setattr(iteration, "_SINGLE_MIN_ROWS", alone)
        monkeypatch.setattr(iteration, "_FP32_SIZES", iteration.Sizes(gram_rows=16, batch_max_elements=cached, block=9))
        assert torch.allclose(polar_factor(x), together, atol=1e-9)


def test_fp32_stands_in_where_bf16_is_not_native(monkeypatch):
    x = spectrum(24, 24, 0.05).float()
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "0")
    assert error(x, polar_factor(x, steps=7)) < 1e-4
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "1")
    assert error(x, polar_factor(x, steps=7)) > 1e-4


DENORMAL = {torch.float64: 5e-324, torch.float32: 1e-45, torch.bfloat16: 9.2e-41, torch.float16: 6e-8}


@pytest.mark.parametrize("native", ["0", "1"])
@pytest.mark.parametrize("dtype", DENORMAL)
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(6, 6), (4, 32, 32), (40, 160)])
def test_denormal_matrices_have_finite_factors_of_full_size(shape, method, dtype, native, monkeypatch):
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", native)
    signs = torch.randn(shape, generator=torch.Generator().manual_seed(0)).sign()
    for multiple in (1, 3, 50, 10**4):
        x = (signs.double() * multiple * DENORMAL[dtype]).to(dtype)
        largest = torch.linalg.matrix_norm(polar_factor(x, method=method).double(), 2)
        assert ((largest > 0.6) & (largest < 1.3)).all()


@pytest.mark.parametrize("shape", [(24, 24), (2, 20, 50), (50, 20)])
def test_newton_schulz_takes_the_published_steps(shape, monkeypatch):
    """Compare with Muon's code, in fp32 instead of bf16 so that rounding does not hide a difference."""
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "0")
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    y = x.mT if shape[-2] > shape[-1] else x
    y = y / y.norm(dim=(-2, -1), keepdim=True)
    for _ in range(5):
        gram = y @ y.mT
        y = 3.4445 * y + (-4.7750 * gram + 2.0315 * gram @ gram) @ y
    published = y.mT if shape[-2] > shape[-1] else y
    assert torch.allclose(polar_factor(x, method="newton-schulz"), published, atol=1e-5)


@pytest.mark.parametrize("steps", [4, 5, 6])
@pytest.mark.parametrize(
    ("d", "n", "count"), [(12, 30, 300), (16, 64, 200), (32, 96, 100), (64, 160, 60), (192, 400, 6)]
)
def test_no_singular_value_is_thrown_far_above_one(d: int, n: int, count: int, steps: int):
    """Random spectra, spread over up to four orders. In the Gram form few rows diverged: bf16 rounding overshot the
    interval a polynomial was made for, and the next one made it worse."""
    generator = torch.Generator().manual_seed(0)
    u = torch.linalg.qr(torch.randn(count, d, d, generator=generator)).Q
    v = torch.linalg.qr(torch.randn(count, n, d, generator=generator)).Q
    spread = -4 * torch.rand(count, 1, generator=generator)
    sigma = 10 ** (spread * torch.rand(count, d, generator=generator))
    x = (u * sigma.unsqueeze(-2)) @ v.mT
    assert torch.linalg.matrix_norm(polar_factor(x, steps=steps), 2).max() < 1.4
    assert torch.linalg.matrix_norm(polar_factor(x.mT, steps=steps), 2).max() < 1.4


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("shape", [(2, 12, 20), (330, 340)])
def test_autocast_changes_nothing(method, shape):
    """Autocast would round the products to bf16."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = polar_factor(x, method=method)
        assert torch.is_autocast_enabled("cpu")
    assert inside.dtype == torch.float32
    assert torch.equal(inside, polar_factor(x, method=method))


@pytest.mark.parametrize("make", [sn.Scion, sn.ScionC, lambda groups, **k: sn.MuonC(groups, use_muon=True, **k)])
def test_four_steps_are_the_default_and_newton_schulz_takes_five(make):
    """A group may have its own method, and what is asked for stays."""
    p, q, r = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(3))
    groups = [{"params": [p]}, {"params": [q], "polar": "newton-schulz"}, {"params": [r], "polar_steps": 3}]
    optimizer = make([{"lmo": "spectral", **group} for group in groups])
    assert [group["polar_steps"] for group in optimizer.param_groups] == [4, 5, 3]
    optimizer = make([{"params": [torch.nn.Parameter(torch.ones(4, 4))], "lmo": "spectral"}], polar="newton-schulz")
    assert optimizer.param_groups[0]["polar_steps"] == 5
