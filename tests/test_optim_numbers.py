"""Large numbers, and memory that torch's fused kernel would misread."""

import math

import pytest
import torch
import torch.distributed as dist
from contract import noise, parameters
from optim_shapes import FP64
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import steadynorm as sn

# --- large numbers


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_adam_skips_a_gradient_whose_square_overflows(shape, foreach):
    """A single element is also skipped: its 2-norm takes no square, so that test is not enough."""
    p = nn.Parameter(torch.ones(shape))
    optimizer = sn.AdamC([p], lr=0.1, foreach=foreach)
    p.grad = torch.full(shape, 1e30)
    optimizer.step()
    assert torch.equal(p, torch.ones(shape))
    assert optimizer.skipped_steps().item() == 1
    assert all(value.isfinite().all() for value in optimizer.state[p].values())


@pytest.mark.parametrize("shape", [(3,), (80, 80)])
def test_adam_skips_none_where_only_the_sum_over_all_gradients_overflows(shape):
    """They are checked together first, then one by one."""
    params = parameters(dict.fromkeys("abcd", shape))
    optimizer = sn.AdamC(params.values())
    most = (torch.finfo(torch.float32).max / 2 / math.prod(shape)) ** 0.5
    for p in params.values():
        p.grad = torch.full_like(p, most)
    params["c"].grad[0] = math.nan
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer.step()
    assert optimizer.skipped_steps() == optimizer.state[params["c"]]["skipped"] == 1
    assert [name for name, p in params.items() if torch.equal(p, before[name])] == ["c"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_renormalized_weights_and_gradients_may_be_too_large_to_square(dtype):
    """The norm obeys the algorithm where |theta|^2 is not an fp32 number, and a huge gradient is a direction."""
    p = nn.Parameter(torch.tensor([3e30, 4e30], dtype=dtype))
    optimizer = sn.RenormalizedAdamW([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.tensor([-4.0, 3.0], dtype=dtype)
    optimizer.step()
    assert p.double().norm().item() == pytest.approx(0.95 * 5e30, rel=0.01)
    p = nn.Parameter(torch.tensor([3.0, 4.0], dtype=dtype))
    optimizer = sn.RenormalizedAdamW([p], lr=0.1, weight_decay=0.0)
    p.grad = torch.tensor([-4e30, 3e30], dtype=dtype)  # u = (-1, 1), along the weights 0.2
    optimizer.step()
    assert p.double().norm().item() == pytest.approx(5 - 0.1 * 0.2, rel=0.01)
    assert all(value.isfinite().all() for value in optimizer.state[p].values())


def test_a_renormalized_step_at_lr_zero_changes_no_bit_in_fp64():
    """The algorithm divides by |theta| + eps, which in fp64 is not |theta|."""
    p = nn.Parameter(torch.tensor([3.0, 4.0], dtype=FP64))
    optimizer = sn.RenormalizedAdamW([p], lr=0.0)
    p.grad = torch.tensor([1.0, 2.0], dtype=FP64)
    optimizer.step()
    assert torch.equal(p, torch.tensor([3.0, 4.0], dtype=FP64))


# --- torch's fused kernel goes by memory, not by strides


def test_fused_adam_refuses_a_view_with_gaps_and_leaves_them_alone():
    """torch's own AdamW(fused=True) writes over what lies between the elements (2.13, CPU)."""
    base = torch.randn(4, 3, 2)
    before = base.clone()
    with pytest.raises(ValueError, match=r"group 0: 'view' is a view with gaps.*fused"):
        sn.AdamC([("view", nn.Parameter(base[..., 0]))], fused=True)
    p = nn.Parameter(base[..., 0])
    optimizer = sn.AdamC([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(base[..., 1], before[..., 1])
    assert not torch.equal(base[..., 0], before[..., 0])


def test_fused_adam_takes_gradients_of_other_strides():
    values = torch.randn(5, 4)
    turned, plain = nn.Parameter(values.mT.contiguous().mT), nn.Parameter(values.clone())
    for p, fused in ((turned, True), (plain, False)):
        optimizer = sn.AdamC([p], lr=0.1, fused=fused)
        for t in range(3):
            p.grad = noise("p", t, p.shape).float()
            given = p.grad
            optimizer.step()
            assert p.grad is given
    torch.testing.assert_close(turned, plain)


@pytest.mark.parametrize("when", ["in the middle of a run", "before loading"])
@pytest.mark.parametrize("amsgrad", [False, True])
def test_fused_adam_follows_a_conversion_to_channels_last(when: str, amsgrad: bool):
    """The moments keep the strides that the weights had, and so does a checkpoint."""
    steps = {}
    for fused in (True, False):
        conv = nn.Conv2d(4, 8, 3, bias=False)
        conv.weight.data = noise("weight", 0, conv.weight.shape).float()
        optimizer = sn.AdamC(conv.parameters(), lr=0.01, amsgrad=amsgrad, fused=fused)
        for t in range(6):
            if t == 3:
                saved = optimizer.state_dict()
                conv.to(memory_format=torch.channels_last)
                if when == "before loading":
                    optimizer = sn.AdamC(conv.parameters(), lr=0.01, amsgrad=amsgrad, fused=fused)
                    optimizer.load_state_dict({**saved, "param_groups": [{**saved["param_groups"][0], "fused": fused}]})
            conv.weight.grad = noise("gradient", t, conv.weight.shape).float()
            optimizer.step()
        steps[fused] = conv.weight.detach()
    torch.testing.assert_close(steps[True], steps[False])


@pytest.mark.skipif(not dist.is_available(), reason="this torch has no distributed package")
def test_fused_adam_takes_sharded_gradients_of_other_strides():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, values = init_device_mesh("cpu", (1,)), torch.randn(5, 4)
        sharded, plain = nn.Parameter(distribute_tensor(values, mesh, [Shard(0)])), nn.Parameter(values.clone())
        for p in (sharded, plain):
            optimizer = sn.AdamC([p], lr=0.1, fused=p is sharded)
            for t in range(3):
                grad = noise("p", t, p.shape).float().mT.contiguous().mT
                p.grad = DTensor.from_local(grad, mesh, [Shard(0)], run_check=False) if p is sharded else grad
                optimizer.step()
        torch.testing.assert_close(sharded.full_tensor(), plain)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("alpha", [0.0, 1.5, math.nan])
def test_a_bad_alpha_at_step_time_is_refused_with_trace(alpha):
    p = nn.Parameter(torch.ones(2))
    optimizer = sn.SGDC([p], trace=True)
    optimizer.param_groups[0]["alpha"] = alpha
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"group 0: alpha="):
        optimizer.step()
    assert torch.equal(p, torch.ones(2))
