"""bf16 weights with their residual are fp32 weights: every step, every checkpoint, whoever else writes them."""

import copy
from functools import partial
from typing import Any

import pytest
import torch
from contract import LR, Entry, Params, assert_same, engine, ratio, set_gradients, snapshot, vary
from torch import Tensor, nn

import steadynorm as sn
from steadynorm.optim import halves
from steadynorm.optim.residual import RESIDUAL

BF16 = torch.bfloat16
TINY = 2.0**-133  # the smallest bf16 number


def residual_of(optimizer: Any, p: Tensor) -> Tensor:
    return optimizer.state[p][RESIDUAL].view(torch.int16).squeeze(-1)


def master(optimizer: Any, p: Tensor) -> Tensor:
    """Return the fp32 weights that a bf16 parameter and its state stand for."""
    return halves.merge(p.detach(), residual_of(optimizer, p))


def same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.int32), b.contiguous().view(torch.int32))


def pair(entry: Any) -> tuple[tuple[Any, Params], tuple[Any, Params]]:
    """Return two optimizers and their parameters, equal but for their dtype: bf16 and fp32."""
    half = entry.params(BF16)
    single = {name: nn.Parameter(p.detach().float()) for name, p in half.items()}
    return (entry(half), half), (entry(single), single)


def set_lr(optimizer: Any, t: int) -> None:
    """Change the settings, and let the lr fall to where bf16 alone would lose the decay."""
    for group in optimizer.param_groups:
        group["lr"] = LR * ratio(t) / (10 if t > 3 else 1)
    vary(optimizer, t)


def step(optimizer: Any, params: Params, t: int) -> None:
    """Take a step on gradients some of which are missing, not finite, or zero in part."""
    set_gradients(params, t)
    params["wide too"].grad = None if t == 2 else params["wide too"].grad
    params["conv"].grad.view(-1)[3] = torch.nan if t == 3 else 0.0
    params["tall"].grad[t % 6] = 0.0
    set_lr(optimizer, t)
    optimizer.step()


def step_both(one: tuple[Any, Params], two: tuple[Any, Params], t: int) -> None:
    """Take a step on the gradients of the first."""
    step(*one, t)
    for name, p in two[1].items():
        grad = one[1][name].grad
        p.grad = None if grad is None else grad.float()
    set_lr(two[0], t)
    two[0].step()


# --- steps


@engine
def test_steps_on_bf16_weights_are_those_of_fp32_weights_bit_for_bit(entry: Entry):
    one, two = pair(entry)
    for t in range(8):
        step_both(one, two, t)
        for name, p in one[1].items():
            assert same_bits(master(one[0], p), two[1][name]), (t, name)
            assert (p.detach() - two[1][name]).abs().le(2**-8 * two[1][name].abs()).all(), (t, name)
    for name, p in one[1].items():
        for key, value in two[0].state[two[1][name]].items():
            assert torch.equal(one[0].state[p][key], value), (name, key)


@pytest.mark.parametrize("nesterov", [False, True])
def test_bf16_weights_with_bf16_momentum_equal_fp32_weights_with_it(nesterov):
    settings = {"momentum_dtype": "bfloat16", "nesterov": nesterov}
    one, two = pair(Entry("ScionC", partial(sn.ScionC, lmo="by-shape", **settings)))
    for t in range(6):
        step_both(one, two, t)
    assert all(same_bits(master(one[0], p), two[1][name]) for name, p in one[1].items())


def test_large_matrices_that_are_cut_by_rows_equal_fp32_ones():
    half = nn.Parameter(torch.randn(700, 800, generator=torch.Generator().manual_seed(0)).to(BF16))
    single = nn.Parameter(half.detach().float())
    grad = torch.randn(700, 800, generator=torch.Generator().manual_seed(1)).to(BF16)
    optimizers = [sn.Scion([p], lr=1e-4, lmo="sign", weight_decay=0.1) for p in (half, single)]
    for p, optimizer in zip((half, single), optimizers, strict=True):
        for _ in range(3):
            p.grad = grad.to(p.dtype)
            optimizer.step()
    assert same_bits(master(optimizers[0], half), single)


def test_a_weight_halfway_between_two_bf16_numbers_is_rounded_away_from_zero():
    theta = torch.tensor([1 + 2**-8, -1 - 2**-8, 1 + 3 * 2**-8])
    weights, low = halves.split(theta.clone())
    assert weights.tolist() == [1 + 2**-7, -1 - 2**-7, 1 + 2 * 2**-7]
    assert low.tolist() == [-(2**15)] * 3
    assert same_bits(halves.merge(weights, low), theta)


def test_nan_stays_nan_in_weight_and_pair():
    bits = [0x7F800001, 0x7FFFFFFF, 0x7FC00000, -1, 0xFF800001 - 2**32]
    theta = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    weights, low = halves.split(theta)
    assert weights.isnan().all()
    assert halves.merge(weights, low).isnan().all()


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_step_equals_an_eager_one(backend):
    entry = Entry("ScionC", partial(sn.ScionC, lmo="by-shape"))
    optimizer, reference = entry(params := entry.params(BF16)), entry(plain := entry.params(BF16))
    compiled = torch.compile(optimizer.step, backend=backend)
    for t in range(3):
        for values, take_step in ((params, compiled), (plain, reference.step)):
            set_gradients(values, t, pull=0.0)
            take_step()
    for name, p in params.items():
        torch.testing.assert_close(master(optimizer, p), master(reference, plain[name]), rtol=1e-3, atol=1e-5)


# --- the norm: the example of the FAQ


def norm_after(dtype: torch.dtype, **settings: Any) -> tuple[float, float]:
    """Return the norm of a 64 x 64 matrix before and after 700 steps of ScionC at lr 1e-3, under random gradients."""
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter((0.3 * torch.randn(64, 64, generator=g)).to(dtype))
    optimizer, start = sn.ScionC([p], lr=1e-3, lmo="spectral", steady_norm_sq=0.03, **settings), p.float().norm().item()
    for _ in range(700):
        p.grad = torch.randn(64, 64, generator=g).to(BF16).to(dtype)
        optimizer.step()
    return start, p.float().norm().item()


def test_the_norm_of_bf16_weights_decays_as_that_of_fp32_weights():
    start, exact = norm_after(torch.float32)
    assert exact < 0.9 * start
    assert norm_after(BF16)[1] == pytest.approx(exact, rel=1e-3)  # bf16 rounds the last weights
    assert norm_after(BF16, weight_residual=False)[1] > 0.97 * start


# --- whether it is kept


def test_it_is_kept_for_bf16_parameters_only_at_two_bytes_each():
    params = [nn.Parameter(torch.ones(3, 5, dtype=dtype)) for dtype in (BF16, torch.float32, torch.float16)]
    optimizer = sn.ScionC(params, lmo="by-shape")
    assert [RESIDUAL in optimizer.state[p] for p in params] == [True, False, False]
    assert optimizer.state[params[0]][RESIDUAL].nbytes == 2 * params[0].numel()


@engine
def test_without_it_the_fp32_step_is_rounded_to_the_nearest_bf16_weight(entry: Entry):
    half = entry.params(BF16)
    single = {name: nn.Parameter(p.detach().float()) for name, p in half.items()}
    optimizer, reference = entry(half, weight_residual=False), entry(single)
    assert not any(RESIDUAL in state for state in optimizer.state.values())
    set_gradients(half, 0)
    for name, p in single.items():
        p.grad = half[name].grad.float()
    optimizer.step()
    reference.step()
    for name, p in half.items():
        assert torch.equal(p, single[name].to(BF16)), name


def test_true_refuses_other_parameters_by_name():
    named = [("w", nn.Parameter(torch.ones(2, 2, dtype=BF16))), ("norm", nn.Parameter(torch.ones(2)))]
    with pytest.raises(
        ValueError, match=r"LionC, group 0: weight_residual=True .* 'norm' has dtype torch\.float32; leave"
    ):
        sn.LionC(named, weight_residual=True)
    assert RESIDUAL in sn.LionC(named[:1], weight_residual=True).state[named[0][1]]
    with pytest.raises(ValueError, match="weight_residual='bf16' is unknown"):
        sn.LionC(named, weight_residual="bf16")  # pyright: ignore[reportArgumentType]


def test_groups_decide_for_themselves():
    first, second = (nn.Parameter(torch.ones(4, dtype=BF16)) for _ in range(2))
    optimizer = sn.SGDC([{"params": [first], "weight_residual": False}, {"params": [second]}])
    assert [RESIDUAL in optimizer.state[p] for p in (first, second)] == [False, True]
    for p in (first, second):
        p.grad = torch.ones_like(p)
    optimizer.step()
    optimizer.param_groups[0]["weight_residual"] = None  # changed one's mind
    optimizer.step()
    assert RESIDUAL in optimizer.state[first]


def test_a_model_that_becomes_bf16_later_gets_it_then():
    p = nn.Parameter(torch.ones(4))
    optimizer = sn.SGDC([p], lr=1e-4, alpha=1.0, weight_decay=0.0)
    p.data = p.data.bfloat16()
    for _ in range(3):
        p.grad = torch.ones_like(p)
        optimizer.step()
    torch.testing.assert_close(master(optimizer, p), torch.full((4,), 1 - 3e-4), rtol=1e-7, atol=0)


@pytest.mark.parametrize(
    "make",
    [
        lambda p: sn.AdamC([p], weight_residual=True),
        lambda p: sn.AdamC([{"params": [p], "weight_residual": True}]),
        lambda p: sn.correct(torch.optim.AdamW([{"params": [p], "weight_residual": True}], weight_decay=0.1)),
    ],
)
def test_steps_that_are_not_ours_refuse_it(make):
    with pytest.raises(ValueError, match=r"weight_residual=True needs a step that writes the weights itself.*fp32"):
        make(nn.Parameter(torch.ones(2, 2, dtype=BF16)))


def test_explain_says_what_becomes_of_bf16_parameters():
    params = [nn.Parameter(torch.ones(2, 2, dtype=dtype)) for dtype in (BF16, BF16, torch.float32)]
    note = "2 bf16 parameters train as fp32 weights"
    assert note in sn.explain(sn.LionC(params))
    assert "2 bf16 parameters are rounded at every step" in sn.explain(sn.LionC(params, weight_residual=False))
    assert "2 bf16 parameters are rounded at every step" in sn.explain(sn.AdamC(params))
    assert "bf16" not in sn.explain(sn.LionC(params[2:]))


# --- checkpoints


@engine
def test_a_resumed_bf16_run_equals_an_unbroken_one_bit_for_bit(entry: Entry, tmp_path):
    optimizer = entry(params := entry.params(BF16))
    for t in range(4):
        step(optimizer, params, t)
    weights = {name: p.detach() for name, p in params.items()}
    torch.save({"model": weights, "optimizer": optimizer.state_dict()}, tmp_path / "checkpoint.pt")
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = {name: nn.Parameter(value) for name, value in saved["model"].items()}
    again = entry(resumed)
    again.load_state_dict(saved["optimizer"])
    for t in range(4, 8):
        step(optimizer, params, t)
        step(again, resumed, t)
    assert_same(snapshot(again, resumed), snapshot(optimizer, params))


@engine
def test_a_checkpoint_without_it_loads_with_zeros(entry: Entry):
    optimizer = entry(params := entry.params(BF16))
    set_gradients(params, 0)
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    assert any(state.pop(RESIDUAL).any() for state in list(saved["state"].values()))
    for state in saved["state"].values():
        state.pop(RESIDUAL, None)
    for group in saved["param_groups"]:
        del group["weight_residual"]
    other = entry(again := entry.params(BF16))
    set_gradients(again, 0)
    other.step()
    other.load_state_dict(saved)
    for p in again.values():
        assert residual_of(other, p).count_nonzero() == 0
        assert same_bits(master(other, p), p.detach().float())


def test_weights_that_keep_none_drop_it_from_a_checkpoint():
    p = nn.Parameter(torch.ones(4, dtype=BF16))
    optimizer = sn.SGDC([p], lr=1e-3)
    p.grad = torch.ones_like(p)
    optimizer.step()
    wide = sn.SGDC([nn.Parameter(torch.ones(4))])
    wide.load_state_dict(optimizer.state_dict())
    assert RESIDUAL not in wide.state_dict()["state"][0]


# --- weights that somebody else writes


@pytest.mark.parametrize("value", [0.0, -0.0, 1.0, -3.0e-5, TINY, -TINY, 3e38, torch.inf, -torch.inf])
def test_a_residual_left_behind_moves_a_weight_by_at_most_half_a_bf16_step(value):
    weights = torch.full((1 << 16,), value, dtype=BF16)
    low = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16)
    theta = halves.merge(weights, low)
    assert not theta.isnan().any()
    assert torch.equal(halves.split(theta.clone())[0], weights)
    if weights.isfinite().all():
        apart = (torch.nextafter(weights.abs(), weights.new_tensor(torch.inf)) - weights.abs()).double()
        assert ((theta.double() - weights.double()).abs() <= apart / 2).all()


@pytest.mark.parametrize("scale", [0.0, 1.0])
def test_training_resumes_from_weights_that_somebody_else_wrote(scale):
    """Zeros with residuals below zero would be NaN if halves were only put side by side."""
    g = torch.Generator().manual_seed(0)
    p = nn.Parameter(torch.randn(8, 8, generator=g).to(BF16))
    optimizer = sn.ScionC([p], lr=1e-3, lmo="spectral")
    p.grad = torch.randn(8, 8, generator=g).to(BF16)
    optimizer.step()
    assert (residual_of(optimizer, p) < 0).any()
    with torch.no_grad():
        p.copy_(written := scale * torch.randn(8, 8, generator=g).to(BF16))
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    assert torch.equal(p, written)
    for group in optimizer.param_groups:
        group["lr"] = 1e-3
    optimizer.step()
    assert p.isfinite().all()
    assert (p - written).abs().max() < 0.05
