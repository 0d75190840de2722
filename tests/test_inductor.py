"""torch.compile with its real backend; the contract table counts compilations with the eager one."""

import shutil

import pytest
import torch

import steadynorm as sn


@pytest.mark.slow  # 25 s of C++ compiler; the contract compares compiled steps with another backend
@pytest.mark.filterwarnings("ignore")  # inductor's own
@pytest.mark.skipif(shutil.which("c++") is None, reason="inductor needs a C++ compiler")
def test_a_step_compiled_by_inductor_equals_eager_to_rounding():
    """It takes a single matrix, a tall one and a vector: the two-dimensional polar form once came out NaN here."""
    shapes = [(24, 24), (48, 24), (24,)]
    compiled, eager = ([torch.nn.Parameter(torch.full(shape, 0.1)) for shape in shapes] for _ in range(2))
    first, second = (sn.ScionC(params, lr=0.01, lmo="by-shape") for params in (compiled, eager))
    step = torch.compile(first.step)
    for t in range(2):
        for k, (p, q) in enumerate(zip(compiled, eager, strict=True)):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * t + k))
            q.grad = p.grad.clone()
        step()
        second.step()
    for p, q in zip(compiled, eager, strict=True):
        assert (p - q).abs().max() < 2e-3  # bf16 rounding of updates of size 0.01
