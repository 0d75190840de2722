"""Norms and inner products of large tensors keep their digits, in the step, in the monitor and in `correct`."""

import pytest
import torch

import steadynorm as sn
from steadynorm.lengths import inner_product, l2_lengths
from steadynorm.optim.batch import inner_products

SHAPE = (8192, 512)  # 4 million elements: added one after another in fp32, 1e-4 of the sum of squares is lost


def large(seed: int) -> torch.Tensor:
    return torch.randn(SHAPE, generator=torch.Generator().manual_seed(seed)) + 0.1


def test_norms_of_large_tensors_are_exact_to_rounding():
    x = large(0)
    (length,) = l2_lengths([x], torch.float32)
    assert length.item() == pytest.approx(x.double().norm().item(), rel=1e-6)


def test_inner_products_of_large_parameters_are_exact_to_rounding():
    theta, u = large(0), large(1)
    sums = inner_products(theta.unsqueeze(0), u.unsqueeze(0), torch.ones(1, 1, 1))
    exact = [(x.double() * y.double()).sum().item() for x, y in ((theta, u), (u, u), (theta, theta))]
    assert sums[1:].flatten().tolist() == pytest.approx(exact[1:], rel=1e-6)
    assert sums[0].item() == pytest.approx(exact[0], abs=1e-6 * exact[1])


@pytest.mark.parametrize("shape", [(3,), (3, 0), (3, 4, 5), (3, 0, 5), (3, 2, 4, 5)])
def test_inner_product_takes_stacks_of_any_shape(shape):
    x, y = torch.randn(shape, dtype=torch.float64), torch.randn(shape, dtype=torch.float64)
    torch.testing.assert_close(inner_product(x, y), (x * y).reshape(3, x[0].numel()).sum(1))


def test_fixed_norm_of_a_large_matrix_stays_to_rounding():
    p = torch.nn.Parameter(large(0))
    optimizer = sn.Scion([p], lr=0.1, lmo="sign", hold="fixed")
    start = p.detach().double().norm().item()
    for t in range(3):
        p.grad = large(t + 1)
        optimizer.step()
    assert p.detach().double().norm().item() == pytest.approx(start, rel=2e-6)


def test_monitor_measures_the_norm_of_a_large_table_to_rounding():
    p = torch.nn.Parameter(large(0))
    optimizer = sn.Scion([p], lr=0.01, lmo="embedding")
    monitor = sn.Monitor(optimizer)
    p.grad = large(1)
    optimizer.step()
    [record] = monitor.measure()
    assert record["weight_norm"] == pytest.approx(p.detach().double().norm().item(), rel=2e-6)
