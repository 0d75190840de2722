"""`correct` on Lion and Muon of pytorch_optimizer and timm: what it refuses, and that the decay they apply is ours."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from needs import library
from torch.optim import Optimizer

import steadynorm as sn

library("pytorch_optimizer")
library("timm")

import pytorch_optimizer
import timm.optim

LR, DECAY = 1e-2, 0.1


def matrix() -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(4, 4, dtype=torch.float64))


def shrinks(optimizer: Optimizer, *params: torch.nn.Parameter) -> list[float]:
    """Return the shrink in a step on zero gradients, where only the decay moves the weights."""
    for p in params:
        torch.nn.init.ones_(p)
        p.grad = torch.zeros_like(p)
    optimizer.step()
    return [1 - p[0, 0].item() for p in params]


def their_muon(*params: torch.nn.Parameter, **flags: Any) -> Optimizer:
    group = {"params": list(params), "use_muon": True, "lr": LR, "weight_decay": DECAY}
    return pytorch_optimizer.Muon([group], **flags)


def with_defaults(cls: Any) -> Callable[..., Optimizer]:
    return lambda *params, **flags: cls(list(params), lr=LR, weight_decay=DECAY, **flags)


MAKERS: dict[str, Callable[..., Optimizer]] = {
    "pytorch_optimizer.Lion": with_defaults(pytorch_optimizer.Lion),
    "pytorch_optimizer.Muon": their_muon,
    "timm.Lion": with_defaults(timm.optim.Lion),
    "timm.Muon": with_defaults(timm.optim.Muon),
    "timm.AdamWLegacy": with_defaults(timm.optim.AdamWLegacy),
}
REFUSED = [
    ("pytorch_optimizer.Lion", {"weight_decouple": False}, "coupled L2"),
    ("pytorch_optimizer.Muon", {"weight_decouple": False}, "coupled L2"),
    ("pytorch_optimizer.Lion", {"fixed_decay": True}, "does not scale with the lr"),
    ("timm.Lion", {"corrected_weight_decay": True}, "corrects its decay itself"),
    ("timm.AdamWLegacy", {"corrected_weight_decay": True}, "corrects its decay itself"),
]


@pytest.mark.parametrize(("name", "flags", "reason"), REFUSED)
def test_their_flags_are_read(name: str, flags: dict[str, bool], reason: str) -> None:
    optimizer = MAKERS[name](matrix(), **flags)
    with pytest.raises(ValueError, match=reason):
        sn.correct(optimizer, decoupled=True)


@pytest.mark.parametrize("name", MAKERS)
def test_the_shrink_goes_with_the_square_of_the_lr(name: str) -> None:
    p = matrix()
    optimizer = sn.correct(MAKERS[name](p), decoupled=True)
    optimizer.param_groups[0]["lr"] = LR / 10
    assert shrinks(optimizer, p) == pytest.approx([LR * DECAY / 100], rel=1e-6)


@pytest.mark.parametrize("name", MAKERS)
def test_a_skipped_parameter_shrinks_with_the_lr_itself_and_their_counters_count(name: str) -> None:
    params = [matrix(), matrix()]
    optimizer = sn.correct(MAKERS[name](*params), skip=params[1], decoupled=True)
    optimizer.param_groups[0]["lr"] = LR / 10
    for _ in range(3):
        assert shrinks(optimizer, *params) == pytest.approx([LR * DECAY / 100, LR * DECAY / 10], rel=1e-6)
    assert optimizer.param_groups[0].get("step", 3) == 3
