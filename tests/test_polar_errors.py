"""The polar errors by dtype of docs/benchmarks.md: emulated products, recorded numbers, and the page."""

import json

import pytest
import torch

from benchmarks import polar_errors
from benchmarks.pages import filled
from benchmarks.polar_errors import DTYPES, TensorCoreProducts, emulated_factor
from steadynorm.lab import bench
from steadynorm.polar import Polar
from steadynorm.polar.accelerator import find_factors

RECORDS = json.loads(polar_errors.RESULTS.read_text(encoding="utf-8"))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_emulated_products_are_summed_in_fp32_and_rounded_once(dtype):
    generator = torch.Generator().manual_seed(0)
    x, y, z = (torch.randn(2, 16, 16, generator=generator).to(dtype) for _ in range(3))
    with TensorCoreProducts():
        product, added = x @ y, torch.baddbmm(z, x, y, beta=-0.3, alpha=1.7)
    torch.testing.assert_close(product, (x.double() @ y.double()).to(dtype), rtol=torch.finfo(dtype).eps, atol=0)
    exact = 1.7 * (x.double() @ y.double()) - 0.3 * z.double()
    torch.testing.assert_close(added, exact.to(dtype), rtol=torch.finfo(dtype).eps, atol=1e-6)
    with pytest.raises(NotImplementedError, match="out="), TensorCoreProducts():
        torch.bmm(x, y, out=z)


def test_wide_products_are_left_as_they_are():
    x = torch.randn(4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    with TensorCoreProducts():
        assert torch.equal(x @ x, x.mm(x))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_an_emulated_factor_is_about_that_of_torchs_own_products(dtype):
    """They round differently, by much less than the factor's error."""
    x = bench.spectra(24, 48)["hard"]
    own = find_factors([x.unsqueeze(0)], Polar().quintics, dtype, published=False, scale=1.0).squeeze(0).float()
    assert (emulated_factor(x, dtype, 5) - own).norm() / own.norm() < {torch.float16: 0.01, torch.bfloat16: 0.05}[dtype]


def test_the_page_shows_the_recorded_errors():
    text = polar_errors.PAGE.read_text(encoding="utf-8")
    shown = filled(text, polar_errors.MARKER, polar_errors.table(RECORDS))
    assert shown == text, "run python -m benchmarks.polar_errors"


def test_the_recorded_errors_of_small_matrices_are_still_true():
    for record in RECORDS:
        if record["shape"] == [96, 96]:
            dtype, steps = DTYPES[record["dtype"]], record["steps"]
            errors = bench.polar_errors(lambda x, d=dtype, s=steps: emulated_factor(x, d, s), [(96, 96)])
            assert errors == pytest.approx(record["errors"], rel=0.05), "run python -m benchmarks.polar_errors"


def test_fp16_has_the_error_of_fp32_and_bf16_has_not():
    errors = {(entry["steps"], *entry["shape"], entry["dtype"]): entry["errors"] for entry in RECORDS}
    for (*key, dtype), by_kind in errors.items():
        if dtype == "fp16":
            for kind, error in by_kind.items():
                assert abs(error - errors[*key, "fp32"][kind]) < 0.005, (key, kind)
    flat = 5, 384, 1536
    assert errors[*flat, "bf16"]["hard"] > 1.3 * errors[*flat, "fp16"]["hard"]
