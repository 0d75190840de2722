"""Optimizers, layers and noise that the tests of the monitor share."""

import math

import torch
from torch import Tensor, nn

import steadynorm as sn


def noise(shape, *seeds: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(1000**k * s for k, s in enumerate(seeds))))


def parameters(*shapes, seed=0, dtype=torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(noise(shape, seed, k).to(dtype)) for k, shape in enumerate(shapes)]


def set_noise(params, t: int) -> None:
    for k, p in enumerate(params):
        p.grad = noise(p.shape, t, k, 7).to(p.dtype)


def train(optimizer, params, steps: int, *, start: int = 0, each=lambda t: None) -> None:
    for t in range(start, start + steps):
        set_noise(params, t)
        each(t)
        optimizer.step()


def assert_alike(records, others, rel=1e-9) -> None:
    """Assert equality up to the last digits of forecasts, which depend on how many steps are computed at once."""
    if isinstance(records, list):
        assert len(records) == len(others)
        for one, two in zip(records, others, strict=True):
            assert_alike(one, two, rel)
    elif isinstance(records, dict):
        assert list(records) == list(others)
        for key in records:
            assert_alike(records[key], others[key], rel)
    else:
        assert records is others is None or math.isclose(records, others, rel_tol=rel, abs_tol=1e-12)


OWN = {
    "Scion": lambda p: sn.Scion(p, lr=0.05, lmo="by-shape", weight_decay=0.1),
    "Scion sign": lambda p: sn.Scion(p[:2], lr=0.05, lmo="sign", weight_decay=0.1),
    "ScionC": lambda p: sn.ScionC(p, lr=0.05, lmo="by-shape", nesterov=True),
    "LionC": lambda p: sn.LionC(p, lr=0.02),
    "SGDC": lambda p: sn.SGDC(p, lr=0.05, peak_lr=0.05),
    "SGDC trace": lambda p: sn.SGDC(p, lr=0.02, trace=True, nesterov=True),
}
FOREIGN = {
    "Muon": lambda p: torch.optim.Muon(p[:3], lr=0.02),
    "corrected Muon": lambda p: sn.correct(torch.optim.Muon(p[:3], lr=0.02)),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.02, weight_decay=0.5),
    "AdamC": lambda p: sn.AdamC(p, lr=0.02, weight_decay=0.5),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.02, weight_decay=0.0, momentum=0.9),
}
LAYERS = [(12, 12), (12, 12), (8, 20), (10,), (4, 3, 2, 2)]
