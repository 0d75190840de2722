"""Table 1: update, norm, init, U^2 and kernel of every lmo, against plain formulas."""

import math

import pytest
import torch

import steadynorm as sn
from steadynorm import theory
from steadynorm.decay.families import SCION
from steadynorm.lmo import LMOS, get
from steadynorm.optim.batch import Encoding
from steadynorm.optim.scion_rule import ScionSettings, encode
from steadynorm.polar import Polar
from steadynorm.views import BlockLayout, Blocks

SHAPES = {
    "spectral": [(6, 12), (12, 6), (3, 8, 10)],
    "spectral-transposed": [(6, 12), (12, 6), (3, 8, 10)],
    "conv": [(8, 4, 3, 3), (6, 5, 3), (4, 2, 3, 3, 2)],
    "conv-tap": [(8, 4, 3, 3), (6, 5, 3)],
    "sign": [(6, 9), (2, 4, 5)],
    "embedding": [(10, 6)],
    "bias": [(12,), (), (4, 3)],
    "row": [(6, 9), (2, 4, 5)],
    "column": [(6, 9), (2, 4, 5)],
}
CUT = {"spectral": -2, "sign": -2, "row": -2, "column": -2, "spectral-transposed": -1}  # the side that blocks divide
CASES = [
    (name, shape, blocks)
    for name, shapes in SHAPES.items()
    for shape in shapes
    for blocks in (1, 2)
    if blocks == 1 or (shape and shape[CUT.get(name, 0)] % 2 == 0)
] + [
    ("spectral", (12, 6), (6, 3, 3)),
    ("spectral", (3, 8, 10), (2, 2, 4)),
    ("spectral", (6, 12), ("inputs", 3)),
    ("spectral", (3, 8, 10), ("inputs", (7, 3))),
    ("spectral-transposed", (6, 12), (6, 3, 3)),
    ("spectral-transposed", (12, 6), ("inputs", 3)),
    ("spectral-transposed", (12, 6), ("inputs", (6, 3, 3))),
    ("conv", (8, 4, 3, 3), (5, 3)),
    ("conv-tap", (8, 4, 3, 3), (2, 3, 3)),
    ("bias", (12,), (8, 4)),
    ("column", (6, 9), (2, 4)),
]
EXACT = Polar("svd")


def sample(shape, seed=0):
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def update(name, x, blocks=1, **kwargs):
    return get(name).update(x, blocks=blocks, polar=EXACT, **kwargs)


def polar_of(x):
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    return u @ vh


def test_every_lmo_is_in_these_tests():
    assert set(SHAPES) == set(LMOS)


@pytest.mark.parametrize(("name", "shape", "blocks"), CASES)
def test_every_update_has_unit_norm_and_the_stated_size(name, shape, blocks):
    u = update(name, sample(shape), blocks)
    assert u.shape == shape
    assert get(name).norm(u, blocks=blocks).item() == pytest.approx(1)
    assert u.square().sum().item() == pytest.approx(get(name).update_norm_sq(shape, blocks=blocks))


NORMS = {  # Table 1, of one d_out x d_in matrix, by loops
    "spectral": lambda x: math.sqrt(x.shape[1] / x.shape[0]) * torch.linalg.svdvals(x)[0],
    "spectral-transposed": lambda x: math.sqrt(x.shape[0] / x.shape[1]) * torch.linalg.svdvals(x)[0],
    "sign": lambda x: x.shape[1] * max(abs(each) for row in x.tolist() for each in row),
    "embedding": lambda x: max(abs(each) for row in x.tolist() for each in row),
    "row": lambda x: math.sqrt(x.shape[1]) * max(math.hypot(*row) for row in x.tolist()),
    "column": lambda x: max(math.hypot(*column) for column in x.T.tolist()) / math.sqrt(x.shape[0]),
}


@pytest.mark.parametrize("name", NORMS)
def test_the_norm_is_that_of_table_1(name):
    x = sample((6, 9))
    assert get(name).norm(x).item() == pytest.approx(float(NORMS[name](x)))


def test_the_norm_of_vectors_and_convolutions_is_that_of_table_1():
    x, kernel = sample((12,)), sample((6, 4, 3, 3))
    assert get("bias").norm(x).item() == pytest.approx(math.hypot(*x.tolist()) / math.sqrt(12))
    assert get("conv").norm(kernel).item() == pytest.approx(float(NORMS["spectral"](kernel.reshape(6, 36))))
    taps = [float(NORMS["spectral"](kernel[:, :, i, j])) for i in range(3) for j in range(3)]
    assert get("conv-tap").norm(kernel).item() == pytest.approx(9 * max(taps))


@pytest.mark.parametrize(("name", "shape", "blocks"), CASES)
def test_an_update_is_the_steepest_point_of_the_unit_ball(name, shape, blocks):
    """<x, u> = max over |w| <= 1: no other unit-norm point does better."""
    x = sample(shape)
    best = (x * update(name, x, blocks)).sum()
    for seed in range(1, 20):
        other = sample(shape, seed)
        other = other / get(name).norm(other, blocks=blocks)
        assert (x * other).sum() <= best + 1e-12


@pytest.mark.parametrize(("name", "shape", "blocks"), CASES)
def test_the_scale_does_not_matter_and_zero_stays_zero(name, shape, blocks):
    x = sample(shape).float()
    for scale in (1e-30, 1e30):
        assert torch.allclose(update(name, x * scale, blocks), update(name, x, blocks), atol=1e-5)
    assert torch.equal(update(name, torch.zeros(shape), blocks), torch.zeros(shape))
    assert get(name).norm(torch.zeros(shape), blocks=blocks).item() == 0


@pytest.mark.parametrize(("name", "shape", "blocks"), CASES)
def test_stacked_parameters_are_independent(name, shape, blocks):
    x = torch.stack([sample(shape, seed) for seed in range(3)])
    together = update(name, x, blocks, batch_ndim=1)
    for k in range(3):
        assert torch.allclose(together[k], update(name, x[k], blocks), atol=1e-12)


def test_updates_follow_the_formulas_of_table_1():
    x = sample((6, 12))
    assert torch.allclose(update("spectral", x), math.sqrt(6 / 12) * polar_of(x))
    assert torch.equal(update("sign", x), x.sign() / 12)
    assert torch.equal(update("embedding", x), x.sign())
    b = sample((7,))
    assert torch.allclose(update("bias", b), b / b.square().mean().sqrt())
    assert torch.allclose(update("row", x), x / (x.norm(dim=1, keepdim=True) * math.sqrt(12)))
    assert torch.allclose(update("column", x), x / x.square().mean(0).sqrt())


def test_blocks_are_matrices_of_their_own():
    x = sample((12, 5))
    parts = torch.cat([update("spectral", part) for part in x.chunk(3)])
    assert torch.allclose(update("spectral", x, 3), parts)
    assert not torch.allclose(update("spectral", x, 3), update("spectral", x))


def test_sizes_of_equal_blocks_are_the_same_as_their_number():
    x = sample((2, 12, 5))
    assert torch.equal(update("spectral", x, (4, 4, 4), batch_ndim=1), update("spectral", x, 3, batch_ndim=1))


@pytest.mark.parametrize("polar", [Polar(), EXACT], ids=["express", "svd"])
@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("blocks", [(6, 3, 3), ("inputs", (2, 2, 4)), ("inputs", 4)])
@pytest.mark.parametrize("name", ["spectral", "spectral-transposed"])
def test_an_update_of_blocks_may_be_written_over_its_input(name, blocks, batch, polar):
    """Runs of blocks are written one after the other, where memory allows without a copy."""
    shape = (12, 8) if name == "spectral" else (8, 12)
    x = torch.stack([sample(shape, seed).float() for seed in range(batch)])
    expected = get(name).update(x.clone(), blocks=blocks, polar=polar, batch_ndim=1)
    for out in (torch.full_like(x, torch.nan), x.clone()):
        given = x.clone() if out.isnan().any() else out
        u = get(name).update(given, blocks=blocks, polar=polar, batch_ndim=1, out=out)
        torch.testing.assert_close(u, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("blocks", [1, 3, (6, 3, 3), ("inputs", 4), ("inputs", (5, 3))])
def test_no_update_enlarges_an_rms_whatever_its_blocks(blocks):
    """Blocks of outputs do not see each other's; blocks of inputs add up, and share the norm."""
    for seed in range(10):
        u = update("spectral", sample((12, 8), seed), blocks)
        norm = torch.linalg.matrix_norm(u, 2).item() * math.sqrt(8 / 12)
        assert norm <= 1 + 1e-9
    aligned = update("spectral", sample((12, 1)) @ sample((1, 8), 1) + 1e-9 * sample((12, 8), 2), ("inputs", 2))
    assert torch.linalg.matrix_norm(aligned, 2).item() * math.sqrt(8 / 12) > 1 / 2


@pytest.mark.parametrize("blocks", [1, 3])
@pytest.mark.parametrize("shape", [(5, 12), (12, 3), (4, 5, 12)])
def test_a_weight_stored_transposed_moves_as_if_stored_the_usual_way(shape, blocks):
    x = sample(shape)
    assert torch.allclose(update("spectral-transposed", x, blocks), update("spectral", x.mT, blocks).mT)
    transposed, usual = get("spectral-transposed"), get("spectral")
    turned = (*shape[:-2], shape[-1], shape[-2])
    assert transposed.norm(x, blocks=blocks) == pytest.approx(usual.norm(x.mT, blocks=blocks).item())
    assert transposed.update_norm_sq(shape, blocks=blocks) == usual.update_norm_sq(turned, blocks=blocks)
    assert transposed.operations(shape, blocks=blocks) == usual.operations(turned, blocks=blocks)
    assert transposed.overlap(shape, blocks=blocks) is usual.overlap(turned, blocks=blocks)


def test_convolutions_are_taken_flattened_or_per_tap():
    x = sample((8, 4, 3, 3))
    flat = update("spectral", x.reshape(8, 36)).reshape(x.shape)
    assert torch.allclose(update("conv", x), flat)
    tap = update("conv-tap", x)
    for i in range(3):
        for j in range(3):
            assert torch.allclose(tap[:, :, i, j], math.sqrt(8 / 4) / 9 * polar_of(x[:, :, i, j]))


@pytest.mark.parametrize(("name", "shape", "blocks"), CASES)
def test_the_init_is_a_point_of_unit_norm_or_zero(name, shape, blocks):
    x = torch.full(shape, 7.0)
    assert get(name).init_(x, blocks=blocks, generator=torch.Generator().manual_seed(0)) is x
    assert get(name).norm(x, blocks=blocks).item() == pytest.approx(0 if name == "bias" else 1, abs=1e-5)
    again = get(name).init_(torch.empty(shape), blocks=blocks, generator=torch.Generator().manual_seed(0))
    assert torch.equal(x, again)


def test_the_spectral_init_is_orthogonal_per_block():
    w = get("spectral").init_(torch.empty(12, 4, dtype=torch.float64), blocks=3)
    for part in w.chunk(3):
        assert torch.allclose(part.mT @ part, torch.eye(4, dtype=torch.float64), atol=1e-12)


@pytest.mark.parametrize(
    ("name", "shape", "blocks", "kernel"),
    [
        ("spectral", (1152, 384), 3, theory.overlap("spectral", (384, 384))),
        ("conv", (64, 16, 3, 3), 1, theory.overlap("spectral", (64, 144))),
        ("conv-tap", (64, 16, 3, 3), 1, theory.overlap("spectral", (64, 16))),
        ("bias", (24,), 1, theory.overlap("bias", (24,))),
        ("bias", (24,), 2, theory.overlap("bias", (12,))),
        ("row", (6, 24), 1, theory.overlap("bias", (24,))),
        ("column", (6, 24), 1, theory.overlap("bias", (6,))),
        ("embedding", (6, 24), 1, theory.overlap("sign", None)),
    ],
)
def test_the_kernel_is_that_of_what_the_lmo_normalises(name, shape, blocks, kernel):
    assert get(name).overlap(shape, blocks=blocks)(0.7) == pytest.approx(kernel(0.7))


def test_the_kernel_agrees_with_the_measured_overlap():
    """Two inputs that correlate by r give updates that overlap by f(r) U^2."""
    r = 0.8
    cases: list[tuple[str, tuple[int, ...], Blocks]] = [
        ("spectral", (48, 48), 1),
        ("spectral", (72, 48), (48, 12, 12)),
        ("spectral", (48, 64), ("inputs", (48, 16))),
        ("spectral-transposed", (64, 48), 1),
        ("bias", (36,), (32, 1, 1, 2)),
        ("conv", (32, 8, 3, 3), 1),
        ("conv-tap", (48, 32, 2, 2), 1),
        ("row", (64, 3), 1),
        ("column", (3, 64), 1),
        ("sign", (40, 40), 1),
        ("embedding", (40, 40), 1),
    ]
    assert {name for name, _, _ in cases} == set(LMOS)
    for name, shape, blocks in cases:
        count = 4000 if name == "bias" else 40
        a, b = sample((count, *shape), 1), sample((count, *shape), 2)
        ua, ub = (update(name, x, blocks, batch_ndim=1) for x in (a, r * a + math.sqrt(1 - r * r) * b))
        measured = (ua * ub).sum().item() / count / get(name).update_norm_sq(shape, blocks=blocks)
        assert measured == pytest.approx(get(name).overlap(shape, blocks=blocks)(r), rel=0.015)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_input_gives_half_precision_updates(dtype):
    for name, shapes in SHAPES.items():
        u = get(name).update(sample(shapes[0]).to(dtype) * 1e-4, polar=Polar("express"))
        assert u.dtype == dtype
        assert u.isfinite().all()


def test_empty_parameters_pass():
    for name, shape in (("spectral", (0, 4)), ("sign", (0, 4)), ("bias", (0,)), ("row", (3, 0))):
        assert update(name, torch.empty(shape)).shape == shape
        assert get(name).norm(torch.empty(shape)).item() == 0


def test_by_shape_chooses_the_lmo_by_dimension():
    assert [get("by-shape", shape).name for shape in ((), (3,), (3, 3), (3, 3, 3), (3, 3, 3, 3))] == [
        "bias",
        "bias",
        "spectral",
        "conv",
        "conv",
    ]


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: get("spectrall"), "unknown lmo 'spectrall'.*spectral"),
        (lambda: update("spectral", torch.ones(3)), r"'spectral' needs 2.*\(3,\).*bias"),
        (lambda: update("sign", torch.ones(3)), "'sign' needs 2"),
        (lambda: update("conv", torch.ones(3, 3)), "'conv' needs 3.*spectral"),
        (lambda: update("spectral", torch.ones(4, 3), blocks=3), "blocks=3 does not divide the 4 rows"),
        (lambda: update("spectral-transposed", torch.ones(3, 4), blocks=3), "blocks=3 does not divide the 4 columns"),
        (lambda: update("bias", torch.ones(4), blocks=3), "blocks=3"),
    ],
)
def test_errors_quote_what_was_passed(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(
    ("name", "shape", "blocks"),
    [
        ("spectral", (24, 40), 1),
        ("spectral", (250, 400), 1),
        ("spectral", (27, 9), 3),
        ("spectral-transposed", (9, 27), 3),
        ("spectral", (9, 27), ("inputs", 3)),
        ("spectral", (28, 7), (7, 7, 7, 7)),
        ("conv", (6, 3, 3, 3), 1),
        ("conv-tap", (6, 4, 3, 3), 2),
        ("sign", (5, 7), 1),
        ("embedding", (5, 7), 1),
    ],
)
def test_bf16_transfers_are_lossless(name, shape, blocks, monkeypatch):
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "1")
    lmo, x = get(name), torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 1e-5
    encoding = encode(shape, ScionSettings(lmo, BlockLayout.of(blocks), False, Polar()), x.dtype, x.device)
    assert encoding.x_dtype == encoding.u_dtype == torch.bfloat16
    unit = encoding.scale
    u = lmo.update(x.clone(), blocks=blocks)
    arrived = x.bfloat16().float()
    torch.testing.assert_close(lmo.update(arrived, blocks=blocks), u, rtol=1e-6, atol=0)
    torch.testing.assert_close((u / unit).bfloat16().float() * unit, u, rtol=2e-7, atol=0)


def test_blocks_with_scales_of_their_own_are_sent_unchanged(monkeypatch):
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "1")
    settings = ScionSettings(get("spectral"), BlockLayout.of((16, 8, 8)), False, Polar())
    encoding = encode((32, 16), settings, torch.float32, torch.device("cpu"))
    assert encoding == Encoding(torch.float32, torch.float32)


@pytest.mark.parametrize("name", ["bias", "row", "column"])
def test_updates_that_bf16_would_round_are_sent_unchanged(name):
    encoding = encode(
        (4, 6), ScionSettings(get(name), BlockLayout(), False, Polar()), torch.float32, torch.device("cpu")
    )
    assert encoding == Encoding(torch.float32, torch.float32)


def test_exact_factors_are_sent_unchanged(monkeypatch):
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "0")
    express, svd = (ScionSettings(get("spectral"), BlockLayout(), False, polar) for polar in (Polar(), Polar("svd")))
    fp32, fp64 = (Encoding(dtype, dtype) for dtype in (torch.float32, torch.float64))
    assert encode((4, 6), express, torch.float32, torch.device("cpu")) == fp32
    assert encode((4, 6), svd, torch.float32, torch.device("cpu")) == fp32
    assert encode((4, 6), express, torch.float64, torch.device("cpu")) == fp64
    assert encode((1, 6), express, torch.float32, torch.device("cuda")) == fp32


def test_an_fp16_iteration_gets_momentum_as_it_is_and_sends_factors_in_fp16():
    express = ScionSettings(get("spectral"), BlockLayout(), False, Polar())
    encoding = encode((4, 16), express, torch.float32, torch.device("cuda"))
    assert encoding == Encoding(torch.float32, torch.float16, 0.5)


@pytest.mark.parametrize(
    ("shape", "blocks"), [((128, 128), 1), (((96, 384)), 1), ((384, 128), 3), ((192, 128), (128, 64))]
)
def test_newton_schulz_falls_short_by_a_known_share(shape, blocks):
    p = torch.nn.Parameter(torch.zeros(shape))
    optimizer = sn.ScionC([p], lmo="spectral", blocks=blocks, polar="newton-schulz", overlap="exact")
    settings, _ = optimizer.settings(optimizer.param_groups[0], p)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    seen = settings.lmo.update(x, blocks=blocks, polar=settings.polar).square().sum().item()
    nominal = settings.lmo.update_norm_sq(shape, blocks=blocks)
    share = SCION.length_share(shape, optimizer.param_groups[0])
    assert share == pytest.approx(seen / nominal, rel=0.02)
    assert share < 0.97
    exact = sn.ScionC([p], lmo="spectral", blocks=blocks, overlap="exact")
    assert optimizer.weight_decay_of(p) == pytest.approx(share * exact.weight_decay_of(p), rel=0.01)


def test_blocks_fall_short_by_the_mean_of_their_shares_weighted_by_their_squared_updates():
    """U^2 is 128 of the square block and 64 (64/128) = 32 of the other."""
    spectral = get("spectral").numbers
    square, flat, both = (
        spectral.length_share(shape, blocks, "newton-schulz", 5)
        for shape, blocks in (((128, 128), 1), ((64, 128), 1), ((192, 128), (128, 64)))
    )
    assert both == pytest.approx((128 * square + 32 * flat) / 160, rel=1e-9)
    assert abs(square - flat) > 0.01
