"""Matrices large enough for code that small ones never reach: the Gram form, products by blocks, cuts by rows."""

import math

import pytest
import torch
from bounds import LEAST, POLAR_BOUND, ROUNDED, SHARE, SHARE_OF_ONE, conditioned
from contract import snapshot
from hypothesis import strategies as st
from models import Layer, Model
from recipes import recipes
from strategies import Drawn, large, orthogonal, powers, seeds
from trying import prop

import steadynorm as sn
from steadynorm import machine
from steadynorm.lmo import LMOS
from steadynorm.polar import Polar

low_precision = st.sampled_from([torch.float32, torch.bfloat16])
kinds = st.sampled_from(["normal", "normal", "conditioned", "low rank", "sparse", "equal"])
fast_methods = st.sampled_from(["express", "newton-schulz"])


def made(shape: tuple[int, ...], kind: str, seed: int, dtype: torch.dtype) -> torch.Tensor:
    x = conditioned(shape, seed) if kind == "conditioned" else Drawn(shape, kind, seed).make()
    return x.to(dtype)


@prop(fast=12, slow=600, shape=large, kind=kinds, seed=seeds, dtype=low_precision, method=fast_methods)
def test_a_large_polar_factor_is_bounded_and_as_steep_as_can_be(shape, kind, seed, dtype, method):
    """Bound its singular values from above, and from below where x has no weak ones, and <x, u> by the dual norm of x."""
    x = made(shape, kind, seed, dtype)
    y = Polar(method)(x).double()
    found = torch.linalg.svdvals(y)
    most = POLAR_BOUND[method] + ROUNDED[dtype]
    assert found.max().item() <= most
    if kind == "conditioned":
        assert found.min().item() >= LEAST[method] - 0.03
    share = min(SHARE[method], SHARE_OF_ONE) if kind == "low rank" else SHARE[method]
    assert (x.double() * y).sum().item() >= share * torch.linalg.svdvals(x.double()).sum().item()


@prop(fast=6, slow=300, shape=large, seed=seeds, power=powers, dtype=low_precision)
def test_the_scale_of_a_large_matrix_changes_nothing(shape, seed, power, dtype):
    x = made(shape, "normal", seed, dtype)
    assert torch.equal(Polar()(x * 2.0**power), Polar()(x))


@prop(fast=4, slow=150, shape=large, seed=seeds)
def test_turning_a_large_matrix_turns_its_polar_factor(shape, seed):
    """Transpose and rotate on both sides, in fp64; no direction is weak."""
    x = conditioned(shape, seed)
    q, p = orthogonal(shape[-2], seed), orthogonal(shape[-1], seed + 1)
    u = Polar()(x)
    torch.testing.assert_close(Polar()(x.mT.contiguous()), u.mT, rtol=0, atol=1e-7)
    torch.testing.assert_close(Polar()(q @ x @ p), q @ u @ p, rtol=0, atol=1e-7)


@prop(
    fast=4, slow=150, shape=large, seed=seeds, dtype=low_precision, layout=st.sampled_from(["transposed", "contiguous"])
)
def test_a_large_step_has_the_length_of_its_formula(shape, seed, dtype, layout):
    """ScionC with the default polar factor, on two stacked parameters: |theta_1 - (1 - eta) theta_0| = gamma U."""
    layer = Layer(Drawn(shape, "normal", seed, -2), "normal", 0, layout)
    model = Model([layer, layer], dtype)
    before = {name: p.detach().double().clone() for name, p in model.params.items()}
    optimizer = sn.ScionC(model.params.values(), lr=0.1, lmo="by-shape", steady_norm_sq=4.0)
    model.step(optimizer, 0)
    name = "conv" if len(shape) > 2 else "spectral"
    for key, p in model.params.items():
        moved = (1 - 0.1 * optimizer.weight_decay_of(p)) * before[key] - p.detach().double()
        length = 0.1 * math.sqrt(LMOS[name].update_norm_sq(shape))
        off = torch.finfo(dtype).eps * (before[key].norm().item() + p.detach().double().norm().item())
        assert 0.85 * length - off <= moved.norm().item() <= 1.12 * length + off
        assert (moved * p.grad.double()).sum() > 0


CUT = (machine.CACHED_ELEMENTS // 256 + 3, 256)  # three rows more than a piece takes


@pytest.mark.parametrize("name", ["Scion", "LionC", "SGDC", "RenormalizedAdamW", "AdamC"])
@prop(fast=1, slow=12, data=st.data(), seed=seeds, lmo=st.sampled_from(["sign", "embedding", "row", "bias", "column"]))
def test_a_parameter_too_large_for_one_piece_moves_as_it_would_in_one(name, data, seed, lmo):
    """Compare one parameter with more elements than a piece to the same in a piece that has room for it."""
    recipe = data.draw(recipes([name]))
    settings = {"lmo": lmo, "blocks": 1} if name == "Scion" else {}
    layer = Layer(Drawn(CUT, "normal", seed), "normal", 0)
    whole, pieces = Model([layer], torch.float64), Model([layer], torch.float64)
    optimizer, other = recipe(whole.params, **settings), recipe(pieces.params, **settings)
    before = machine.CACHED_ELEMENTS
    for t in range(2):
        whole.step(optimizer, t)
        machine.CACHED_ELEMENTS = 1 << 30
        try:
            pieces.step(other, t)
        finally:
            machine.CACHED_ELEMENTS = before
    assert not torch.equal(whole.params["p0"].detach(), layer.weight.make())
    found, expected = snapshot(optimizer, whole.params)["p0"], snapshot(other, pieces.params)["p0"]
    for key, value in found.items():
        torch.testing.assert_close(value, expected[key], rtol=1e-9, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")
