"""Random systems: what weights do under independent Gaussian gradients. Shares no code with `theory`, which it checks."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch

from steadynorm import lmo as lmos
from steadynorm.polar import Polar


class Measured(NamedTuple):
    """A mean over seeds and its standard error."""

    mean: float
    error: float


@contextmanager
def _one_thread() -> Iterator[None]:
    """Small matrices gain nothing from a second thread, and lose a lot when the cores are busy."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@torch.no_grad()
@_one_thread()
def steady_norm_sq(
    lmo: str,
    shape: Sequence[int],
    *,
    lr: float,
    weight_decay: float,
    alpha: float,
    nesterov: bool = False,
    seeds: int = 16,
    half_lives: float = 10.0,
    seed: int = 0,
) -> Measured:
    """|theta|^2 / |u|^2 of theta <- (1 - lr weight_decay) theta + lr lmo(m), m an average of Gaussian noise.

    theta_0 = 0 and m_0 = g_0, as in the paper's appendix B. The first half of the run is left to settle, the second is
    averaged over time; the standard error is over seeds.

    >>> steady_norm_sq("bias", (64,), lr=0.1, weight_decay=0.5, alpha=1.0, seeds=4).mean > 0
    True
    """
    entry, polar = lmos.get(lmo), Polar("express", 12)  # 12 steps in fp64: exact to 1e-6 or better
    generator = torch.Generator().manual_seed(seed)

    def noise() -> torch.Tensor:
        return torch.randn(seeds, *shape, dtype=torch.float64, generator=generator)

    eta = lr * weight_decay
    steps = math.ceil(half_lives * math.log(2) / -math.log1p(-eta))
    theta, m = torch.zeros(seeds, *shape, dtype=torch.float64), noise()
    total = torch.zeros(seeds, dtype=torch.float64)
    for step in range(steps):
        g = noise()
        m = (1 - alpha) * m + alpha * g
        x = (1 - alpha) * m + alpha * g if nesterov else m
        theta = (1 - eta) * theta - lr * entry.update(x, polar=polar, batch_ndim=1)
        if step >= steps // 2:
            total += theta.flatten(1).square().sum(1)
    per_seed = total / (steps - steps // 2) / entry.update_norm_sq(shape)
    return Measured(per_seed.mean().item(), per_seed.std().item() / math.sqrt(seeds))
