"""The contract of tests/contract.py: dtypes, strides and scales."""

import math

import pytest
import torch
from contract import (
    LR,
    Entry,
    assert_same,
    engine,
    entries,
    every,
    own,
    set_gradients,
    snapshot,
    train,
    unmeasured,
)
from torch import nn

# --- numbers


@unmeasured
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_state_of_half_precision_parameters_is_that_of_fp32_ones(entry: Entry, dtype):
    """Momentum is not rounded to the parameter's precision: for the same gradients it is the same bit for bit."""
    half, single = entry.params(dtype), entry.params()
    optimizer, reference = entry(half), entry(single)
    for t in range(5):
        set_gradients(half, t, pull=0.0)
        for name, p in single.items():
            p.grad = half[name].grad.float()
        optimizer.step()
        reference.step()
    for name, p in half.items():
        assert p.dtype == dtype
        assert p.isfinite().all()
        for key, value in reference.state[single[name]].items():  # bf16 parameters have a residual as well
            assert torch.equal(optimizer.state[p][key], value), (name, key)
        torch.testing.assert_close(p.float(), single[name], rtol=0.05, atol=0.05)


@engine
def test_the_state_of_fp64_parameters_is_fp64(entry: Entry):
    params = entry.params(torch.float64)
    optimizer = entry(params)
    train(optimizer, params, range(2))
    for p in params.values():
        for key, value in optimizer.state[p].items():
            assert value.shape == () or value.dtype == torch.float64, key
            assert p.dtype == torch.float64


@entries(lambda entry: entry.own and not entry.engine)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torch_built_state_has_the_dtypes_torch_gives_it(entry: Entry, dtype):
    params, plain = entry.params(dtype), entry.params(dtype)
    optimizer, reference = entry(params), torch.optim.AdamW(plain.values(), lr=LR)
    train(optimizer, params, range(2))
    train(reference, plain, range(2))
    for name, p in params.items():
        assert p.isfinite().all()
        for key, value in reference.state[plain[name]].items():
            assert optimizer.state[p][key].dtype == value.dtype, key


@own
def test_half_precision_with_small_gradients_trains_or_is_refused(entry: Entry):
    """torch's AdamW would divide by a second moment of 0 and an eps of 0."""
    params = entry.params(torch.float16)
    if not entry.engine:
        with pytest.raises(
            ValueError, match=r"AdamC, group 0: parameter 0 .*torch\.float16.*fp32 \(with autocast\) or bf16"
        ):
            entry(params)
        return
    optimizer = entry(params)
    for _ in range(5):
        for p in params.values():
            p.grad = torch.full_like(p, 1e-4)
        optimizer.step()
    assert all(p.isfinite().all() for p in params.values())
    assert optimizer.skipped_steps().item() == 0


@every
def test_non_contiguous_parameters_equal_contiguous_ones(entry: Entry):
    plain = entry.params(torch.float64)
    params = {}
    for name, p in plain.items():
        value = p.detach()
        strided = value.mT.contiguous().mT if value.ndim >= 2 else value
        params[name] = nn.Parameter(strided)
    assert not params["wide"].is_contiguous()
    optimizer, reference = entry(params), entry(plain)
    train(optimizer, params, range(4))
    train(reference, plain, range(4))
    for name, p in params.items():
        torch.testing.assert_close(p, plain[name], rtol=1e-10, atol=1e-10)


@engine
def test_gradients_may_have_other_strides_than_their_parameters(entry: Entry):
    params, plain = entry.params(torch.float64), entry.params(torch.float64)
    optimizer, reference = entry(params), entry(plain)
    set_gradients(params, 0)
    set_gradients(plain, 0)
    params["wide"].grad = params["wide"].grad.mT.contiguous().mT
    optimizer.step()
    reference.step()
    torch.testing.assert_close(params["wide"], plain["wide"], rtol=1e-10, atol=1e-10)


@entries(lambda entry: "scalar" in entry.shapes)
def test_scalar_and_empty_parameters_train(entry: Entry):
    params = entry.params()
    optimizer = entry(params)
    start = params["scalar"].item()
    train(optimizer, params, range(3))
    assert params["scalar"].shape == ()
    assert math.isfinite(params["scalar"].item())
    assert params["scalar"].item() != start
    assert params["empty"].shape == (0, 3)


@entries(lambda entry: entry.own and entry.normalised)
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_the_scale_of_the_gradient_does_not_matter_to_normalised_rules(entry: Entry, scale):
    params, plain = entry.params(), entry.params()
    optimizer, reference = entry(params), entry(plain)
    train(optimizer, params, range(5), scale=scale)
    train(reference, plain, range(5))
    for name in params:
        assert torch.equal(params[name], plain[name]), name


@every
def test_the_order_and_grouping_of_parameters_change_nothing(entry: Entry):
    """Parameters are permuted, and each is put in a group of its own so that nothing is batched."""
    params, turned, apart = (entry.params(torch.float64) for _ in range(3))
    optimizer = entry(params)
    backwards = entry(list(turned.values())[::-1])
    single = entry([{"params": [p]} for p in apart.values()])
    for each, values in ((optimizer, params), (backwards, turned), (single, apart)):
        train(each, values, range(5))
    assert_same(snapshot(backwards, turned), snapshot(optimizer, params), rtol=1e-10)
    assert_same(snapshot(single, apart), snapshot(optimizer, params), rtol=1e-10)


@own
def test_the_default_device_does_not_matter(entry: Entry):
    """Under set_default_device("cuda") the numbers of a step would be copied there, and CPU parameters fail."""
    params, twins = entry.params(), entry.params()
    optimizer, twin = entry(params), entry(twins)
    for t in range(2):
        for each, its in ((optimizer, params), (twin, twins)):
            set_gradients(its, t)
            with torch.device("meta" if each is optimizer else "cpu"):
                each.step()
    assert_same(snapshot(optimizer, params), snapshot(twin, twins))
