"""Simulate the four ways to hold a norm under random gradients, with a pull along the weights if you like.

    g = noise - pull theta / rms(theta),    m <- (1 - alpha) m + alpha g,    u = -lmo(m) scaled to |u| = 1
    decay      theta <- (1 - eta) theta - lr u
    cautious   the same, where eta acts only on elements with u theta > 0
    balance    the same, with the eta that holds the target, from means of |u|^2 and <theta, u> over T/10 steps
    fixed      theta <- theta - lr u, scaled to the target

A positive pull makes the gradient push the weights outward, as in an output layer; independence is a pull of zero. This
shares no code with the optimizers or with `theory`: it is plain numpy, to check both.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from steadynorm.lab.simulate import Floats, Series, Trajectory, spread_records

HOLDS = ("decay", "balance", "fixed", "cautious")


def _polar(x: Floats) -> Floats:
    left, _, right = np.linalg.svd(x, full_matrices=False)
    return left @ right


UPDATES: dict[str, Callable[[Floats], Floats]] = {  # the direction of u for a stack of inputs
    "spectral": _polar,
    "sign": np.sign,
    "embedding": np.sign,
    "bias": lambda x: x,
}


@dataclass(frozen=True)
class HeldSystem:
    """A parameter under random gradients and one way to hold its norm."""

    hold: str  # one of HOLDS
    lmo: str  # one of UPDATES
    shape: tuple[int, ...]
    lr: Series
    eta: Series  # decay per step of "decay" and "cautious"
    alpha: float  # weight of the new gradient in the momentum
    steady_norm_sq: float  # the target C^2 = |theta|^2 / |u|^2, at which the run starts
    nesterov: bool = False
    balance_steps: float = 100.0  # T
    pull: float = 0.0  # RMS of the gradient's outward part, in units of the noise's; negative for inward

    def __post_init__(self) -> None:
        if self.hold not in HOLDS:
            raise ValueError(f"hold {self.hold!r} is unknown; choose one of {', '.join(HOLDS)}")
        if self.lmo not in UPDATES:
            raise ValueError(f"lmo {self.lmo!r} is not simulated with a hold; choose one of {', '.join(UPDATES)}")
        if not self.balance_steps > 0:
            raise ValueError(f"balance_steps {self.balance_steps}: must be above 0")
        if not np.isfinite(self.pull):
            raise ValueError(f"pull {self.pull}: must be finite")


def run_held(
    systems: Sequence[HeldSystem],
    steps: int,
    *,
    seeds: int = 1,
    seed: int = 0,
    records: int = 1000,
    progress: Callable[[int], object] | None = None,
) -> list[Trajectory]:
    """Simulate systems and return their trajectories, with the same noise for equal shapes.

    >>> system = HeldSystem("fixed", "bias", (64,), lr=0.1, eta=0.0, alpha=0.5, steady_norm_sq=2.0)
    >>> [held] = run_held([system], 20, seeds=2)
    >>> bool(np.allclose(held.norm_sq, 2.0))
    True
    """
    kept = spread_records(steps, records)
    return [Trajectory(kept, _run(system, kept.tolist(), seeds, seed, progress)) for system in systems]


def _run(
    system: HeldSystem, kept: Sequence[int], seeds: int, seed: int, progress: Callable[[int], object] | None
) -> Floats:
    """Return |theta|^2 in units of |u|^2, (seeds, records)."""
    steps, axes = kept[-1], tuple(range(1, 1 + len(system.shape)))
    generators = [np.random.default_rng([seed, k]) for k in range(seeds)]
    rates, decays = (
        np.broadcast_to(np.asarray(values, float), (steps,)).tolist() for values in (system.lr, system.eta)
    )
    target, memory = system.steady_norm_sq, max(1.0, system.balance_steps / 10)

    def noise() -> Floats:
        return np.stack([generator.standard_normal(system.shape) for generator in generators])

    def total(x: Floats) -> Floats:
        return x.sum(axes, keepdims=True)

    theta = noise()
    theta *= np.sqrt(target / total(theta**2))
    m, size_sq, along = noise(), np.ones(1), np.zeros(1)
    out, at = np.empty((seeds, len(kept))), 0
    for step, (lr, eta) in enumerate(zip(rates, decays, strict=True), start=1):
        norm_sq = total(theta**2)
        g = noise() - system.pull * theta / np.sqrt(norm_sq / theta[0].size)
        m = (1 - system.alpha) * m + system.alpha * g
        u = UPDATES[system.lmo]((1 - system.alpha) * m + system.alpha * g if system.nesterov else m)
        u = u / np.sqrt(total(u**2))
        if system.hold == "fixed":
            theta = theta - lr * u
            theta *= np.sqrt(target / total(theta**2))
        elif system.hold == "cautious":
            theta = theta - eta * (u * theta > 0) * theta - lr * u
        else:
            rate = np.array(eta)
            if system.hold == "balance" and lr > 0:
                weight = 1.0 if step == 1 else 1 / memory
                size_sq = size_sq + weight * (total(u**2) - size_sq)
                along = along + weight * (total(theta * u) - along)
                error = np.clip(norm_sq / target - 1, -1, 1)
                rate = (lr * lr * size_sq - 2 * lr * along) / (2 * target) + error / (2 * system.balance_steps)
                rate = np.clip(rate, -0.1, 0.5)
            theta = (1 - rate) * theta - lr * u
        if step == kept[at]:
            out[:, at] = total(theta**2).reshape(seeds)
            at += 1
        if progress is not None:
            progress(1)
    return out
