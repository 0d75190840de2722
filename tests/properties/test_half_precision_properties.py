"""fp16 on an accelerator: Gram matrices and their powers cannot overflow, whatever the matrix and however wide it is.

A matrix is scaled to Frobenius norm S = 8 first. Then |R_ij| <= |y_i| |y_j| <= S^2 for R = y y^T, and |(R^2)_ij| <= |R_i| |R_j| <= S^4,
with equality for one row, and no partial sum of either is larger (Cauchy-Schwarz), so that it does not matter in which order or in which
dtype a GPU adds up. S^4 = 4096 is a sixteenth of the largest fp16 number, at any width.
"""

import math

import pytest
import torch
from hypothesis import strategies as st
from strategies import Drawn, seeds
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from trying import FEWER, prop

from benchmarks.polar_errors import TensorCoreProducts
from steadynorm.polar import Polar
from steadynorm.polar.accelerator import _SIZE, find_factors, scale_and_round

FP16 = torch.float16
LARGEST = torch.finfo(FP16).max
WIDEST = 16384
METHODS = (Polar(steps=4), Polar(steps=5), Polar("newton-schulz", 5))
shapes = st.sampled_from([(2, 2), (2, 64), (16, 16), (48, 16), (16, 24), (2, 4096), (31, 33)])
exponents = st.one_of(st.just(0), st.integers(-44, 37))  # of ten: from denormal to almost too large for fp32


class LargestEntry(TorchDispatchMode):
    """Note the largest entry of all fp16 results, infinities and NaN included."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.is_finite, self.results = 0.0, True, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        is_new = (
            not func.is_view and "empty" not in func._schema.name
        )  # memory that nobody has written yet may hold anything
        if is_new and isinstance(result, Tensor) and result.dtype == FP16 and result.numel():
            self.results += 1
            self.is_finite &= bool(result.isfinite().all())
            self.value = max(self.value, result.abs().max().item())
        return result


def iterate(x: Tensor, polar: Polar) -> tuple[Tensor, LargestEntry]:
    """Return the fp16 factor of a matrix, and the largest entry on the way."""
    with LargestEntry() as largest, TensorCoreProducts():
        published = polar.method == "newton-schulz"
        factor = find_factors([x.unsqueeze(0)], polar.quintics, FP16, published=published, scale=1.0).squeeze(0)
    return factor, largest


def worst_cases(rows: int, columns: int) -> dict[str, Tensor]:
    """Return matrices that make some entry, product or sum as large as it can be."""
    equal, single, rank_one = (torch.zeros(rows, columns) for _ in range(3))
    equal.fill_(1.0)
    single[-1, -1] = 1.0
    rank_one.copy_(torch.outer(torch.arange(1.0, rows + 1), torch.linspace(-1, 1, columns)))
    alternating = equal * (1 - 2 * (torch.arange(columns) % 2))
    dominated = torch.eye(rows, columns) * 1e-3 + single
    return {
        "all entries equal": equal,
        "one entry": single,
        "rank one": rank_one,
        "identity": torch.eye(rows, columns),
        "signs that cancel": alternating,
        "one direction far above the others": dominated,
        "one row": torch.cat([equal[:1], torch.zeros(rows - 1, columns)]),
    }


@pytest.mark.parametrize("polar", METHODS, ids=lambda polar: f"{polar.method} {polar.steps}")
@pytest.mark.parametrize("scale", [1e-44, 1.0, 3e37], ids=str)
@pytest.mark.parametrize("case", worst_cases(2, 2))
def test_the_worst_cases_stay_finite_and_give_a_factor(case, scale, polar):
    for shape in ((16, 16), (16, 64), (64, 16), (2, 4096)):
        x = worst_cases(*shape)[case]
        factor, largest = iterate((x.double() * scale / x.abs().max()).float(), polar)
        assert largest.is_finite and largest.results > 2 * polar.steps
        assert largest.value <= 1.01 * _SIZE**4
        norms = torch.linalg.matrix_norm(factor.double(), 2)
        assert 0.6 < norms < 1.25, shape


@prop(
    fast=60,
    slow=FEWER,
    shape=shapes,
    kind=st.sampled_from(["normal", "zeros", "equal", "sparse", "low rank", "mixed", "one"]),
    seed=seeds,
    exponent=exponents,
    polar=st.sampled_from(METHODS),
)
def test_no_matrix_overflows(shape, kind, seed, exponent, polar):
    x = Drawn(shape, kind, seed, exponent).make().clamp(-3e38, 3e38).float()
    factor, largest = iterate(x, polar)
    assert largest.is_finite
    assert largest.value <= 1.01 * _SIZE**4
    assert torch.linalg.matrix_norm(factor.double(), 2) < 1.3


@pytest.mark.parametrize("case", worst_cases(2, 2))
def test_powers_of_the_gram_matrix_at_width_16384_are_bounded(case):
    """Two rows of full width have all that a row of a square matrix has, and the bounds are reached."""
    y = scale_and_round([worst_cases(2, WIDEST)[case].unsqueeze(0)], FP16).squeeze(0).double()
    row = y.norm(dim=-1)
    partial = (y[:, None] * y[None]).cumsum(-1).abs().amax(-1)  # every partial sum of y y^T in order
    assert row.square().sum().sqrt() == pytest.approx(_SIZE, rel=2e-3)
    assert (partial <= torch.outer(row, row) * (1 + 1e-9)).all()
    gram = y @ y.mT
    assert gram.abs().max() <= 1.01 * _SIZE**2
    assert (gram @ gram).abs().max() <= 1.01 * _SIZE**4
    if case in ("one entry", "one row"):
        assert (gram @ gram).abs().max() == pytest.approx(_SIZE**4, rel=0.01)


def test_the_bound_of_any_width_leaves_room_below_the_largest_number():
    """S^4 bounds entries of R^2 at every width, and a polynomial of the first step only divides by norms of R^2."""
    assert 8 * _SIZE**4 < LARGEST
    assert (2 * _SIZE) ** 4 > LARGEST  # and twice the size would not do


def test_square_matrices_of_width_16384_do_not_underflow():
    """The flattest spectrum has the smallest entries: an orthogonal matrix, and Gaussian entries of S / width."""
    tiny, smallest = torch.finfo(FP16).tiny, torch.finfo(FP16).smallest_normal / 2**10
    gaussian_entry, gram_diagonal = _SIZE / WIDEST, _SIZE**2 / WIDEST
    assert gaussian_entry >= 8 * tiny and gram_diagonal > 60 * tiny
    square_diagonal = gram_diagonal**2  # of an orthogonal matrix: denormal, with eight bits left
    assert square_diagonal > 2**7 * smallest
    schatten8 = _SIZE * WIDEST ** (1 / 8 - 1 / 2)
    assert 0.05 < schatten8 < math.inf  # accelerator._NEVER_ZERO does not cut it off
