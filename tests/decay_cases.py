"""Optimizers, schedules and helpers that the tests of `correct` share.

With a zero gradient AdamW, NAdam, RAdam, Muon and Lion do nothing but decay, so the weights themselves tell which
coefficient was applied: theta_T = theta_0 prod_t (1 - gamma_t lambda_t).
"""

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import Optimizer

LR, DECAY = 0.1, 0.2


class Lion(Optimizer):
    """x = b1 m + (1-b1) g; theta <- (1 - gamma lambda) theta - gamma sign(x); m <- b2 m + (1-b2) g."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(b1 * m + (1 - b1) * p.grad))
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Stranger(Optimizer):
    """An optimizer of an unknown class: theta <- (1 - gamma lambda) theta - gamma g."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, **more: Any):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad, alpha=group["lr"])


class SomebodysScion(Stranger):
    pass


class FusedAdam(Stranger):
    pass


def torch_with(cls: Any, **settings: Any) -> Callable[..., Optimizer]:
    return lambda params, **more: cls(params, **settings, **more)


DECOUPLED: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch_with(torch.optim.Adam, decoupled_weight_decay=True),
    "NAdam": torch_with(torch.optim.NAdam, decoupled_weight_decay=True),
    "RAdam": torch_with(torch.optim.RAdam, decoupled_weight_decay=True),
    "Muon": torch_with(torch.optim.Muon, nesterov=False, ns_steps=1),
    "Muon-Nesterov": torch_with(torch.optim.Muon, nesterov=True, ns_steps=1),
    "Lion": Lion,
    "Stranger": Stranger,
}
ADAMS = ("AdamW", "Adam", "NAdam", "RAdam")

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {  # all with their maximum at the lr given to the optimizer
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 5) * 0.9 ** max(0, t - 4)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 4, 0.3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [3, 9], 0.2),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.25, total_iters=6),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=8),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 15, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.2, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 12)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "swa": lambda o: swa_utils.SWALR(o, 0.02, anneal_epochs=6),
}


def weight(*shape: int, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape or (2, 2), dtype=dtype))


def adamw(*groups: Any, lr: Any = LR, **more: Any) -> torch.optim.AdamW:
    """Return AdamW with decay DECAY on one weight, or on the given groups."""
    return torch.optim.AdamW(list(groups) or [weight()], lr=lr, **{"weight_decay": DECAY} | more)


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer: Optimizer, *, seed: int | None = None) -> None:
    """Take one step on a zero gradient, or on a seeded random one."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for p in parameters(optimizer):
        p.grad = torch.zeros_like(p) if seed is None else torch.randn(p.shape, generator=generator, dtype=p.dtype)
    optimizer.step()


def decays(optimizer: Optimizer, lr: float | None = None, **settings: Any) -> list[float]:
    """Return the decay that each group sees in an update at this lr (and momentum, betas, ...)."""
    for group in optimizer.param_groups:
        group.update(settings if lr is None else settings | {"lr": lr})
    step(optimizer)
    return [group["weight_decay"] for group in optimizer.param_groups]


def drive(optimizer: Optimizer, scheduler: Any, steps: int = 14, *, seed: int | None = None) -> list[dict[str, Any]]:
    """Train and return what each update saw in the first group."""
    seen = []
    for t in range(steps):
        step(optimizer, seed=None if seed is None else seed + t)
        seen.append({k: copy.deepcopy(v) for k, v in optimizer.param_groups[0].items() if k != "params"})
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return seen


def snapshot(optimizer: Optimizer) -> Any:
    """Return all that a refused call must leave alone: groups, their parameters and keys, weights, state, hooks."""
    groups = [
        {key: [id(p) for p in value] if key == "params" else copy.deepcopy(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    hooks = {key: list(value) for key, value in vars(optimizer).items() if key.endswith("_hooks")}
    state = {id(p): {key: torch.as_tensor(v).tolist() for key, v in s.items()} for p, s in optimizer.state.items()}
    return groups, hooks, [p.tolist() for p in parameters(optimizer)], state


@contextmanager
def refused(optimizer: Optimizer, match: str, error: type[Exception] = ValueError) -> Iterator[None]:
    before = snapshot(optimizer)
    with pytest.raises(error, match=match):
        yield
    assert snapshot(optimizer) == before


def through_disk(*objects: Any) -> list[Any]:
    buffer = io.BytesIO()
    torch.save([each.state_dict() for each in objects], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


COPIES: dict[str, Callable[[Optimizer], Optimizer]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda o: pickle.loads(pickle.dumps(o)),
}
