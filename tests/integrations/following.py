"""A run under somebody else's trainer: what each optimizer step really did, and what theory says it must be."""

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import steadynorm as sn
from steadynorm.decay.recognition import unwrap

LR, ALPHA, TARGET, DECAY = 0.05, 0.1, 1.1875, 0.2

# name -> model -> optimizer; output: what keeps constant decay
MAKERS: dict[str, Callable[[nn.Module], Optimizer]] = {
    "ScionC": lambda model: sn.ScionC(sn.param_groups(model, lr=LR)),
    "AdamC": lambda model: sn.AdamC(sn.param_groups(model, kind="adam", lr=LR, weight_decay=DECAY)),
    "correct(AdamW)": lambda model: sn.correct(torch.optim.AdamW(model.named_parameters(), lr=LR, weight_decay=DECAY)),
}


@dataclass
class Steps:
    """Record lr and decay of every group at each optimizer step, and what the decay did to a parameter without gradient."""

    optimizer: Optimizer
    rows: list[list[tuple[float, float]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = unwrap(self.optimizer)
        self.optimizer.register_step_post_hook(torch.compiler.disable(self._note))

    def _note(self, *_: Any) -> None:
        self.rows.append([(float(group["lr"]), self._decay(group)) for group in self.optimizer.param_groups])

    def _decay(self, group: dict[str, Any]) -> float:
        if isinstance(self.optimizer, sn.ScionC):
            return self.optimizer.weight_decay_of(group["params"][0])
        return float(group["weight_decay"])

    def lrs(self, group: int = 0) -> list[float]:
        return [row[group][0] for row in self.rows]

    def check(self, ratios: list[float]) -> None:
        """Check that every group's lr is its peak times the scheduler's ratio, and its decay the theory's for that lr."""
        assert len(self.rows) == len(ratios)
        for k, group in enumerate(self.optimizer.param_groups):
            peak = float(group["initial_lr"])
            for ratio, (lr, decay) in zip(ratios, (row[k] for row in self.rows), strict=True):
                assert math.isclose(lr, peak * ratio, rel_tol=1e-9, abs_tol=1e-15)
                assert math.isclose(decay, expected_decay(self.optimizer, group, peak, lr), rel_tol=1e-9, abs_tol=1e-15)


class AppliedDecay:
    """Read the decay that each AdamW step really applied to each parameter off its weights and moments:

    theta' = (1 - lr lambda) theta - lr m / (sqrt(v) + eps)
    """

    def __init__(self, optimizer: Optimizer):
        self.optimizer = unwrap(optimizer)
        self.before: dict[Tensor, Tensor] = {}
        self.rows: list[tuple[list[float], dict[Tensor, float]]] = []  # lr of each group, lambda of each parameter
        self.optimizer.register_step_pre_hook(self._start)
        self.optimizer.register_step_post_hook(self._end)

    def _start(self, *_: Any) -> None:
        self.before = {p: p.detach().clone() for group in self.optimizer.param_groups for p in group["params"]}

    def _end(self, *_: Any) -> None:
        found = {}
        for group in self.optimizer.param_groups:
            lr, (beta1, beta2) = float(group["lr"]), group["betas"]
            for p in (p for p in group["params"] if lr > 0 and p.grad is not None):
                state, theta = self.optimizer.state[p], self.before[p].double()
                step = float(state["step"])
                m = state["exp_avg"].double() / (1 - beta1**step)
                v = state["exp_avg_sq"].double() / (1 - beta2**step)
                lost = theta - lr * m / (v.sqrt() + group["eps"]) - p.detach().double()
                found[p] = float((lost * theta).sum() / (lr * theta.square().sum()))
        self.rows.append(([float(group["lr"]) for group in self.optimizer.param_groups], found))

    def check(self, expected: Callable[[int], dict[Tensor, float]], first: int, last: int) -> None:
        """Check that every step from `first` to before `last` applied these decays; a step with lr 0 applies none."""
        assert len(self.rows) == last - first
        for step, (_, found) in enumerate(self.rows, start=first):
            for p, decay in expected(step).items() if found else ():
                assert math.isclose(found[p], decay, rel_tol=1e-2, abs_tol=1e-3 * DECAY), (step, found[p], decay)


def expected_decay(optimizer: Optimizer, group: dict[str, Any], peak: float, lr: float) -> float:
    """Return (2 - a)/(2 a C^2) lr for ScionC and base lr/peak for the Adam family; the output layer's decay is constant."""
    if isinstance(optimizer, sn.ScionC):
        if group["name"] == "output":
            return LR * (2 - ALPHA) / (2 * ALPHA * TARGET) * LR / peak
        return (2 - ALPHA) / (2 * ALPHA * TARGET) * lr
    base = 0.0 if group.get("name") == "vector" else DECAY
    return base if group.get("name") == "output" else base * lr / peak


def warmup_linear(step: int, warmup: int, total: int) -> float:
    """Return Hugging Face's linear schedule at an optimizer step, counted from 0."""
    return step / max(1, warmup) if step < warmup else max(0.0, (total - step) / max(1, total - warmup))


def warmup_cosine(step: int, warmup: int, total: int) -> float:
    if step < warmup:
        return step / max(1, warmup)
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.detach().clone() for name, value in copy.deepcopy(model.state_dict()).items()}


def assert_same(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    """Assert equality bit for bit."""
    assert one.keys() == other.keys()
    differing = [name for name in one if not torch.equal(one[name], other[name])]
    assert not differing, f"{len(differing)} of {len(one)} differ, first {differing[0]}"
