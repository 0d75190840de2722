"""The simulated 384 x 384 system against one torch.linalg.svd a step: time, and what the fast polar factor does to the norm."""

import math
import time

import torch

from steadynorm.lab import simulate

SIDE, ALPHA, LR, DECAY = 384, 0.1, 0.05, 0.4  # eta = 0.02: settled after some hundred steps


def by_svd(steps: int) -> tuple[float, float]:
    """(seconds a step, |theta|^2 averaged over the second half), by the paper's lines."""
    generator = torch.Generator().manual_seed(0)
    theta, m, total = torch.zeros(SIDE, SIDE), torch.randn(SIDE, SIDE, generator=generator), 0.0
    start = time.perf_counter()
    for step in range(steps):
        m = (1 - ALPHA) * m + ALPHA * torch.randn(SIDE, SIDE, generator=generator)
        u, _, vh = torch.linalg.svd(m, full_matrices=False)
        theta = (1 - LR * DECAY) * theta - LR / math.sqrt(SIDE) * (u @ vh)
        total += theta.square().sum().item() if step >= steps // 2 else 0.0
    return (time.perf_counter() - start) / steps, total / (steps - steps // 2)


def fast(steps: int, systems: int = 2) -> tuple[float, float]:
    """The same by `simulate`, as many systems at once as there are cores; seconds a step and system."""
    same = [simulate.System("spectral", (SIDE, SIDE), LR, DECAY, ALPHA)] * systems
    start = time.perf_counter()
    trajectory = simulate.run(same, steps, records=steps)[0]
    seconds = (time.perf_counter() - start) / steps / systems
    return seconds, float(trajectory.norm_sq[0, steps // 2 :].mean())


def compare(steps: int) -> dict[str, float]:
    """Ratio of times, and relative difference of the norms squared, on the same random numbers."""
    slow_seconds, exact = by_svd(steps)
    fast_seconds, found = fast(steps)
    return {
        "svd_seconds": slow_seconds,
        "seconds": fast_seconds,
        "faster": slow_seconds / fast_seconds,
        "norm_sq_difference": found / exact - 1,
    }
