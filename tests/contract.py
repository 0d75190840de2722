"""The registry that drives tests/test_contract*.py: to put a new optimizer under the whole contract, add one line.

Also what all those tests share: parameters, gradients that depend on the weights, settings that change at every step,
snapshots. Everything is keyed by the parameter's name, so order and grouping can be varied.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import steadynorm as sn

Params: TypeAlias = dict[str, nn.Parameter]
Snapshot: TypeAlias = dict[str, dict[str, Tensor]]

SHAPES = {
    "wide": (4, 6),
    "tall": (6, 4),
    "vector": (5,),
    "wide too": (4, 6),
    "conv": (3, 2, 2, 2),
    "stack": (2, 4, 3),
    "row": (1, 7),
    "scalar": (),
    "empty": (0, 3),
}
MATRICES = {name: SHAPES[name] for name in ("wide", "tall", "wide too", "row")}
LR = 0.02


@dataclass(frozen=True)
class Entry:
    """Describe one optimizer in one setting.

    make: (params, **overrides) -> optimizer; `params` as torch takes them.
    engine: made of our step loop (not torch's): state in fp32 or better.
    own: our class; False for torch's with correct(), which promises less.
    normalised: the update does not depend on the gradient's scale.
    follows: how closely the decay is proportional to lr, relative; None: constant decay.
    tensor_lr: takes its lr as a tensor.
    gain: G of a group's momentum, where the decay is relative and OneCycleLR can cycle the momentum.
    compilations: how many torch.compile(optimizer.step) takes at most.
    held: the norm is measured, so rounded weights change the state; and there must be decay to hold it by.
    """

    name: str
    make: Callable[..., Any]
    engine: bool = True
    own: bool = True
    normalised: bool = False
    follows: float | None = 1e-12
    tensor_lr: bool = True
    gain: Callable[[dict[str, Any]], float] | None = None
    compilations: int = 1
    shapes: tuple[str, ...] = tuple(SHAPES)
    held: bool = False

    def __call__(self, params: Any, **overrides: Any) -> Any:
        if isinstance(params, dict):
            params = list(params.values())
        return self.make(params, **{"lr": LR} | overrides)

    def params(self, dtype: torch.dtype = torch.float32, seed: int = 0) -> Params:
        """Return fresh parameters of the shapes this optimizer takes."""
        return parameters({name: SHAPES[name] for name in self.shapes}, dtype, seed)


def corrected(cls: type[Optimizer], **choices: Any) -> Callable[..., Optimizer]:
    """Return a factory of torch's optimizer with the correction."""

    def make(params: Any, **settings: Any) -> Optimizer:
        return sn.correct(cls(params, **settings), **choices)

    return make


def balanced(cls: Any) -> Callable[..., Any]:
    """Return a factory of an optimizer with balanced decay; without decay there is no balance to ask for."""
    return lambda params, **settings: cls(
        params, hold="decay" if settings.get("weight_decay") == 0 else "balance", **settings
    )


ScionC = partial(sn.ScionC, lmo="by-shape")
ADAM = {"engine": False, "gain": lambda group: 1.0, "compilations": 2}
TORCH = {"own": False}


def lion_gain(group: dict[str, Any]) -> float:
    return sn.theory.lion_gain(*group["betas"])


def muon_gain(group: dict[str, Any]) -> float:
    return sn.theory.momentum_gain(1 - group["momentum"], nesterov=True)


def muonc(params: Any, *, use_muon: bool, lr: Any, **settings: Any) -> Any:
    """Return MuonC with groups of one kind, whose lr is `lr`."""
    return sn.MuonC(params, use_muon=use_muon, lr=lr, adam_lr=lr, **settings)


MUON = {"gain": muon_gain, "shapes": (*MATRICES, "conv", "stack", "empty"), "normalised": True}


REGISTRY = [
    Entry("Scion", partial(sn.Scion, lmo="by-shape", weight_decay=0.1), normalised=True, follows=None),
    Entry("ScionC", ScionC, normalised=True),
    Entry("ScionC nesterov", partial(ScionC, nesterov=True), normalised=True),
    Entry("ScionC exact", partial(ScionC, overlap="exact"), normalised=True, follows=0.05),
    Entry("ScionC balance", partial(ScionC, hold="balance"), normalised=True, held=True),
    Entry("ScionC fixed", partial(ScionC, hold="fixed"), normalised=True, held=True),
    Entry("ScionC cautious", partial(ScionC, cautious=True), normalised=True, follows=0.5),
    Entry("AdamC", sn.AdamC, **ADAM),
    Entry("AdamC foreach", partial(sn.AdamC, foreach=True), **ADAM, tensor_lr=False),
    Entry("AdamC fused", partial(sn.AdamC, fused=True), **ADAM),
    Entry("AdamC balance", balanced(sn.AdamC), **ADAM),
    Entry("AdamC fixed", partial(sn.AdamC, hold="fixed"), **ADAM),
    Entry("RenormalizedAdamW", sn.RenormalizedAdamW, follows=None),
    Entry("LionC", sn.LionC, normalised=True, gain=lion_gain),
    Entry("MuonC", partial(muonc, use_muon=True), **MUON),
    Entry("MuonC balance", partial(muonc, use_muon=True, hold="balance"), **MUON, held=True),
    Entry("MuonC rest", partial(muonc, use_muon=False), gain=lambda group: 1.0),
    Entry("SGDC", sn.SGDC),
    Entry("SGDC nesterov", partial(sn.SGDC, nesterov=True)),
    Entry("SGDC trace", partial(sn.SGDC, trace=True)),
    Entry("correct(AdamW)", corrected(torch.optim.AdamW), **ADAM, **TORCH),
    Entry("correct(AdamW) fixed", corrected(torch.optim.AdamW, hold="fixed"), **ADAM, **TORCH),
    Entry(
        "correct(Muon)",
        corrected(torch.optim.Muon),
        engine=False,
        **TORCH,
        gain=muon_gain,
        shapes=tuple(MATRICES),
        compilations=3,
    ),
]


def parameters(shapes: dict[str, tuple[int, ...]], dtype: torch.dtype = torch.float32, seed: int = 0) -> Params:
    generator = torch.Generator().manual_seed(seed)
    values = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()}
    return {name: nn.Parameter(value.to(dtype)) for name, value in values.items()}


def noise(name: str, t: int, shape: Iterable[int]) -> Tensor:
    """Return the random part of a gradient in fp64: the same for the same name and step."""
    seed = 1000 * t + sum(map(ord, name))
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def set_gradients(params: Params, t: int, *, scale: float = 1.0, pull: float = 0.3) -> None:
    """Set gradients to noise plus a pull towards zero, so that a wrong weight is not forgotten.

    Strides follow the weights, as autograd's do.
    """
    for name, p in params.items():
        value = scale * (noise(name, t, p.shape) + pull * p.detach().double())
        p.grad = torch.empty_like(p).copy_(value)


def vary(optimizer: Optimizer, t: int) -> None:
    """Change the groups as momentum and norm schedules do; lr is left to schedulers."""
    for group in optimizer.param_groups:
        if "alpha" in group:
            group["alpha"] = 0.1 + 0.02 * t
        if "momentum" in group:
            group["momentum"] = 0.95 - 0.02 * t
        if "betas" in group:
            group["betas"] = (0.9 - 0.02 * t, group["betas"][1])
        if group.get("steady_norm_sq") is not None:
            group["steady_norm_sq"] = 1.2 + 0.1 * t


def ratio(t: int) -> float:
    """Return lr over its peak: warmup, then cosine, over 16 steps."""
    return (t + 1) / 4 if t < 4 else 0.55 + 0.45 * math.cos(math.pi * (t - 3) / 12)


def train(optimizer: Optimizer, params: Params, steps: Iterable[int], *, lr: float = LR, **gradients: Any) -> None:
    """Train while everything changes: lr by `ratio`, the rest by `vary`. Parameters that require no grad get none."""
    for t in steps:
        for group in optimizer.param_groups:
            if isinstance(group["lr"], Tensor):
                group["lr"].fill_(lr * ratio(t))
            else:
                group["lr"] = lr * ratio(t)
        vary(optimizer, t)
        set_gradients({name: p for name, p in params.items() if p.requires_grad}, t, **gradients)
        optimizer.step()


def snapshot(optimizer: Optimizer, params: Params) -> Snapshot:
    """Return copies of weights and state by name."""
    return {
        name: {"weight": p.detach().clone()} | {key: value.clone() for key, value in optimizer.state[p].items()}
        for name, p in params.items()
    }


def assert_same(a: Snapshot, b: Snapshot, *, names: Iterable[str] | None = None, rtol: float = 0.0) -> None:
    """Assert that weights and state are equal, dtype included. With rtol = 0 they must be equal bit for bit."""
    for name in a if names is None else names:
        assert a[name].keys() == b[name].keys(), name
        for key, value in a[name].items():
            torch.testing.assert_close(
                value,
                b[name][key],
                rtol=rtol,
                atol=rtol,
                equal_nan=False,
                msg=lambda m, at=f"{name}, {key}": f"{at}: {m}",
            )


def entries(
    test: Callable[[Entry], bool] = lambda entry: True, slow: Callable[[Entry], bool] = lambda entry: False
) -> Any:
    """Parametrise over the registry, or over the entries that `test` holds for; some of them are slow."""
    marked = ((entry, [pytest.mark.slow] if slow(entry) else []) for entry in REGISTRY if test(entry))
    return pytest.mark.parametrize(
        "entry", [pytest.param(entry, id=entry.name, marks=marks) for entry, marks in marked]
    )


every = entries()
own = entries(lambda entry: entry.own)
engine = entries(lambda entry: entry.engine)
unmeasured = entries(lambda entry: entry.engine and not entry.held)
