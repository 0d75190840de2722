"""What the tests of torch's matrix share: optimizers and settings, and something small to train."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.testing._internal.common_optimizers import (
    OptimizerInfo,
    _get_optim_inputs_including_global_cliquey_kwargs,
)
from torch_optims import CORRECTED, OPTIM_DB

FP64 = torch.float64


def optims(test: Callable[[OptimizerInfo], bool] = lambda info: True) -> Any:
    chosen = [info for info in OPTIM_DB if test(info)]
    return pytest.mark.parametrize("info", chosen, ids=[info.name for info in chosen])


every = optims()
with_impls = optims(lambda info: bool(info.supported_impls))
chosen = [*OPTIM_DB, CORRECTED]
every_and_corrected = pytest.mark.parametrize("info", chosen, ids=[info.name for info in chosen])


def all_inputs(info: OptimizerInfo) -> Iterator[dict[str, Any]]:
    """Return the keyword arguments of every setting, with and without foreach and fused where they exist."""
    for each in _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info):
        if not (each.kwargs.get("foreach") and isinstance(each.kwargs.get("lr"), Tensor)):  # torch refuses that
            yield each.kwargs


def problem(
    dtype: torch.dtype = torch.float32, *, contiguous: bool = True
) -> tuple[list[nn.Parameter], Callable[[], Tensor]]:
    """Return weight and bias, and a function that computes the loss and its gradients."""
    torch.manual_seed(0)
    if contiguous:
        params = [nn.Parameter(torch.randn(10, 5, dtype=dtype)), nn.Parameter(torch.randn(10, dtype=dtype))]
    else:
        params = [
            nn.Parameter(torch.randn(10, 5, 2, dtype=dtype)[..., 0]),
            nn.Parameter(torch.randn(10, 2, dtype=dtype)[..., 0]),
        ]
    x = torch.randn(5, dtype=dtype)

    def closure() -> Tensor:
        for p in params:
            p.grad = None
        loss = (params[0].mv(x) + params[1]).pow(2).sum()
        loss.backward()
        return loss

    return params, closure


def train(optimizer: Any, closure: Callable[[], Tensor], steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.step(closure)


def assert_same_state(a: dict[str, Any], b: dict[str, Any], *, names: bool = True) -> None:
    """Assert that state dicts are equal to the bit and dtype; with names=False, param_names may differ."""
    assert a["state"].keys() == b["state"].keys()
    for key, values in a["state"].items():
        assert values.keys() == b["state"][key].keys()
        for name, value in values.items():
            other = b["state"][key][name]
            assert torch.equal(value, other), (key, name)
            assert value.dtype == other.dtype, (key, name)
    drop = set() if names else {"param_names"}
    groups = [[{k: v for k, v in group.items() if k not in drop} for group in each["param_groups"]] for each in (a, b)]
    assert groups[0] == groups[1]


def model_of(dtype: torch.dtype) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(dtype)
    return model, torch.arange(1, 7, dtype=torch.float64).div(10).reshape(3, 2).to(dtype)
