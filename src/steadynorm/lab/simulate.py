"""Simulate weights under independent Gaussian gradients. This shares no code with `theory`, which it checks.

    m <- (1 - alpha) m + alpha g         trace: m <- (1 - alpha) m + g
    x  = m                               Nesterov: (1 - alpha) m + alpha g
    theta <- (1 - lr decay) theta - lr u,   u = -lmo(x) scaled to |u| = 1

Runs start at theta_0 = 0 and m_0 = g_0, as in the paper's appendix B.2. `random_system` is the system of B.1, without
momentum and lmo.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import as_completed, wait
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from steadynorm import lmo as lmos
from steadynorm import threads
from steadynorm.polar import Polar

Floats = NDArray[np.float64]
Series = float | Sequence[float] | Floats  # constant, or one value per step

MOMENTA = ("plain", "nesterov", "trace")
_LARGE = 192  # smaller side from which polar factors are computed in bf16, which changes the norm by 0.1 %
_MOST_STEPS = 1e9
_FAST, _EXACT = Polar("express", 4), Polar("express", 12)  # 12 steps in fp64: exact to 1e-6 or better


@dataclass(frozen=True)
class System:
    """Parameter under random gradients; lr, weight_decay and alpha may have one value per step.

    >>> System("spectral", (32, 32), lr=0.05, weight_decay=0.1, alpha=0.1).large
    False
    """

    lmo: str
    shape: tuple[int, ...]
    lr: Series
    weight_decay: Series
    alpha: Series
    momentum: str = "plain"

    def __post_init__(self) -> None:
        lmos.get(self.lmo).check(self.shape)
        if self.momentum not in MOMENTA:
            raise ValueError(f"momentum={self.momentum!r} is unknown; choose one of {', '.join(MOMENTA)}")

    @property
    def large(self) -> bool:
        """Whether the polar factor is computed the fast way."""
        return len(self.shape) > 1 and min(self.shape[0], math.prod(self.shape[1:])) >= _LARGE


class MeanWithError(NamedTuple):
    """A mean over seeds and its standard error."""

    mean: float
    error: float


@dataclass(frozen=True)
class Trajectory:
    """Course of |theta|^2 / |u|^2 in one system."""

    steps: NDArray[np.int64]  # recorded ones, counted from 1: (records,)
    norm_sq: Floats  # (seeds, records)

    def mean(self) -> Floats:
        """Return the mean over seeds at every recorded step."""
        return self.norm_sq.mean(0)

    def late_mean(self, fraction: float = 0.5, norm: bool = False) -> MeanWithError:
        """Return the mean over seeds and over the last `fraction` of the run; with `norm` of |theta|/|u|, not its square.

        The standard error is that over seeds, or over ten stretches of time if there is one seed.
        """
        late = self.norm_sq[:, -max(1, round(fraction * len(self.steps))) :]
        parts = late.mean(1) if len(late) > 1 else np.array([p.mean() for p in np.array_split(late[0], 10) if len(p)])
        mean, error = parts.mean(), parts.std(ddof=1) / math.sqrt(len(parts)) if len(parts) > 1 else math.nan
        if norm:
            mean, error = math.sqrt(mean), error / (2 * math.sqrt(mean))
        return MeanWithError(float(mean), float(error))


def run(
    systems: Sequence[System],
    steps: int,
    *,
    seeds: int = 1,
    seed: int = 0,
    records: int = 1000,
    progress: Callable[[int], object] | None = None,
    done: Callable[[int, Trajectory], object] | None = None,
) -> list[Trajectory]:
    """Simulate systems and return their trajectories, with the same gradients for equal shapes.

    Seed k of a system gives the same numbers whatever else runs beside it. About `records` evenly spaced steps are
    recorded. `progress` is called with the number of system-steps that have just been taken, `done` with the index and
    trajectory of each system that has ended.

    >>> [quick] = run([System("bias", (64,), lr=0.1, weight_decay=0.5, alpha=1.0)], 100, seeds=4)
    >>> quick.norm_sq.shape
    (4, 100)
    """
    if steps < 1 or seeds < 1:
        raise ValueError(f"simulate: steps={steps} and seeds={seeds} must be at least 1")
    stop: list[bool] = []
    kept = spread_records(steps, records)
    out: dict[int, Trajectory] = {}
    one_core_each = threads.pool(torch.get_num_threads())
    jobs = {
        one_core_each.submit(_run_batch, [systems[i] for i in which], kept, seeds, seed, progress, stop): which
        for which in _batches(systems)
    }
    try:
        for job in as_completed(jobs):
            for i, norm_sq in zip(jobs[job], job.result(), strict=True):
                out[i] = Trajectory(kept, norm_sq)
                if done is not None:
                    done(i, out[i])
    finally:
        stop.append(True)  # after an error or Ctrl-C, the other batches end at their next step
        wait(jobs)
    return [out[i] for i in range(len(systems))]


def spread_records(steps: int, records: int) -> NDArray[np.int64]:
    """Return evenly spaced steps, about `records` of them, counted from 1 and including the last."""
    return np.unique(np.linspace(1, steps, min(steps, records)).round().astype(np.int64))


def _batches(systems: Sequence[System]) -> list[list[int]]:
    """Group the indices of systems with equal lmo, shape and momentum, the largest batches first.

    A large system runs by itself; small ones form two batches, for two cores.
    """
    alike: dict[tuple[Any, ...], list[int]] = {}
    for i, system in enumerate(systems):
        alike.setdefault((system.lmo, system.shape, system.momentum, i if system.large else i % 2), []).append(i)
    return sorted(alike.values(), key=lambda which: -len(which) * math.prod(systems[which[0]].shape))


@torch.no_grad()
def _run_batch(
    systems: Sequence[System],
    kept: NDArray[np.int64],
    seeds: int,
    seed: int,
    progress: Callable[[int], object] | None,
    stop: list[bool],
) -> Floats:
    """Return norms (systems, seeds, records); the state is (systems, seeds, *shape)."""
    first, steps = systems[0], int(kept[-1])
    dtype, polar = (torch.float32, _fast_polar(first.shape)) if first.large else (torch.float64, _EXACT)
    entry, ndim = lmos.get(first.lmo), len(first.shape)
    generators = [torch.Generator().manual_seed(1_000_003 * seed + k) for k in range(seeds)]
    lr, eta, alpha = _settings(systems, steps, dtype, ndim)

    def noise() -> Tensor:
        return torch.stack([torch.randn(first.shape, dtype=dtype, generator=generator) for generator in generators])

    theta = torch.zeros(len(systems), seeds, *first.shape, dtype=dtype)
    m = noise().expand_as(theta).clone()
    out, at = np.empty((len(systems), seeds, len(kept))), 0
    for step in range(steps):
        if stop:
            break
        g, a = noise(), alpha[step]
        m = m.mul_(1 - a).add_(g) if first.momentum == "trace" else m.lerp_(g.expand_as(m), a)
        x = torch.lerp(m, g.expand_as(m), a) if first.momentum == "nesterov" else m
        u = entry.update(x, polar=polar, batch_ndim=2)
        length = torch.linalg.vector_norm(u.flatten(2), dim=-1).view(len(systems), seeds, *[1] * ndim)
        theta.mul_(1 - eta[step]).addcmul_(u, -lr[step] / length)
        if step + 1 == kept[at]:
            out[..., at] = theta.flatten(2).square().sum(-1).numpy()
            at += 1
        if progress is not None:
            progress(len(systems))
    return out


def _fast_polar(shape: Sequence[int]) -> Polar:
    """Return four steps, or two for flat matrices, whose singular values under Gaussian gradients stay away from 0."""
    small, large = sorted((shape[0], math.prod(shape[1:])))
    edge = (1 - math.sqrt(small / large)) / (1 + math.sqrt(small / large))  # smallest / largest
    lower = edge / small**0.125  # the Schatten-8 norm exceeds the largest by at most this factor
    return Polar("express", 2, lower) if lower > 0.1 else _FAST


def _settings(systems: Sequence[System], steps: int, dtype: torch.dtype, ndim: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return lr, eta and alpha, each (steps, systems, 1, 1...), to broadcast over the state of a batch."""

    def table(name: str) -> Tensor:
        rows = []
        for system in systems:
            array = np.asarray(getattr(system, name), dtype=np.float64)
            if array.ndim > 1 or (array.ndim == 1 and len(array) != steps):
                raise ValueError(
                    f"simulate: {name} has shape {array.shape}; pass a number or one value for each of the {steps} steps"
                )
            if not np.isfinite(array).all():
                raise ValueError(f"simulate: {name} is not finite")
            rows.append(np.broadcast_to(array, (steps,)))
        return torch.from_numpy(np.stack(rows, axis=1)).to(dtype).view(steps, len(systems), *[1] * (ndim + 1))

    lr, decay, alpha = map(table, ("lr", "weight_decay", "alpha"))
    if not ((alpha > 0) & (alpha <= 1)).all():
        raise ValueError("simulate: alpha must be above 0 and at most 1")
    if not ((lr * decay >= 0) & (lr * decay < 1)).all():
        raise ValueError("simulate: lr * weight_decay must be at least 0 and below 1")
    return lr, lr * decay, alpha


def half_life_steps(half_lives: float, lr: float, weight_decay: float) -> int:
    """Return the steps for which (1 - lr weight_decay)^steps = 2^-half_lives.

    >>> half_life_steps(10, 0.001, 0.1)  # the paper's
    69312
    """
    if not (math.isfinite(half_lives) and half_lives > 0):
        raise ValueError(f"half-lives {half_lives}: must be above 0")
    if lr * weight_decay >= 1:
        raise ValueError(f"lr * weight_decay = {lr * weight_decay:g} leaves nothing of the weights; lower one of them")
    steps = half_lives * math.log(2) / -math.log1p(-lr * weight_decay)
    if steps > _MOST_STEPS:
        raise ValueError(f"half-lives {half_lives}: {steps:.2g} steps are more than a run can have; ask for fewer")
    return math.ceil(steps)


def random_system(
    lr: Series, weight_decay: float, steps: int, *, size: int = 1000, seeds: int = 4, seed: int = 0, records: int = 1000
) -> Trajectory:
    """Simulate theta <- theta - lr (weight_decay theta + N(0, 1)), the paper's B.1, and return |theta|^2.

    >>> random_system(0.01, 10.0, 50, seeds=2).norm_sq.shape
    (2, 50)
    """
    rates = np.broadcast_to(np.asarray(lr, dtype=np.float64), (steps,))
    generators = [np.random.default_rng([seed, k]) for k in range(seeds)]
    kept = spread_records(steps, records)
    theta, out, at = np.zeros((seeds, size)), np.empty((seeds, len(kept))), 0
    noise = np.empty_like(theta)
    for step, rate in enumerate(rates.tolist(), start=1):
        for row, generator in zip(noise, generators, strict=True):
            generator.standard_normal(out=row)
        theta *= 1 - rate * weight_decay
        noise *= rate
        theta -= noise
        if step == kept[at]:
            out[:, at] = np.square(theta).sum(1)
            at += 1
    return Trajectory(kept, out)


@torch.no_grad()
def gradient_response(
    lmo: str, shape: Sequence[int], *, lr: float, alpha: float, momentum: str = "plain", seeds: int = 16, seed: int = 0
) -> MeanWithError:
    """Measure how far one gradient moves theta in total, to compare with the effective lr.

    Two systems without decay see the same gradients except for one, which is shifted a little in a random direction, up
    in one system and down in the other. The resulting shift of theta, per unit of that shift and times |g| / |u|, would
    be the effective lr if the lmo were linear.

    >>> gradient_response("bias", (256,), lr=1.0, alpha=0.1, seeds=2).mean > 3
    True
    """
    system, size, tiny = System(lmo, tuple(shape), lr, 0.0, alpha, momentum), math.prod(shape), 0.1
    entry, steps = lmos.get(system.lmo), math.ceil(30 / alpha)
    generator = torch.Generator().manual_seed(seed)

    def noise() -> Tensor:
        return torch.randn(seeds, *shape, dtype=torch.float64, generator=generator)

    direction = noise()
    direction /= direction.flatten(1).norm(dim=1).view(-1, *[1] * len(shape))
    changed = steps // 2  # momentum is in its steady state, and will have forgotten this gradient by the end
    m = noise().expand(2, seeds, *shape).clone()
    moved = torch.zeros(seeds, dtype=torch.float64)
    for step in range(steps):
        g = noise().expand(2, seeds, *shape).clone()
        if step == changed:
            g[0] -= tiny / 2 * math.sqrt(size) * direction
            g[1] += tiny / 2 * math.sqrt(size) * direction
        m = m * (1 - alpha) + (g if momentum == "trace" else alpha * g)
        x = (1 - alpha) * m + alpha * g if momentum == "nesterov" else m
        u = entry.update(x, polar=_EXACT, batch_ndim=2)
        u = u / u.flatten(2).norm(dim=-1).view(2, seeds, *[1] * len(shape))
        moved += lr * ((u[1] - u[0]) * direction).flatten(1).sum(1)
    response = moved / tiny
    return MeanWithError(response.mean().item(), response.std().item() / math.sqrt(seeds))


@torch.no_grad()
def overlap(lmo: str, shape: Sequence[int], r: float, *, pairs: int = 16, seed: int = 0) -> MeanWithError:
    """Measure the kernel f(r): the mean overlap of two unit updates whose Gaussian inputs correlate by r.

    >>> 0.3 < overlap("sign", (64, 64), 0.5).mean < 0.37  # (2/pi) asin 0.5 = 1/3
    True
    """
    entry, generator = lmos.get(lmo), torch.Generator().manual_seed(seed)
    overlaps = []
    for _ in range(0, pairs, 64):
        count = min(64, pairs - len(overlaps))
        x, other = torch.randn(2, count, *shape, dtype=torch.float64, generator=generator)
        y = r * x + math.sqrt(1 - r * r) * other
        u, v = (entry.update(inputs, polar=_EXACT, batch_ndim=1).flatten(1) for inputs in (x, y))
        overlaps += ((u * v).sum(1) / (u.norm(dim=1) * v.norm(dim=1))).tolist()
    return MeanWithError(float(np.mean(overlaps)), float(np.std(overlaps, ddof=1) / math.sqrt(len(overlaps))))


def describe(system: System) -> Mapping[str, Any]:
    """Return the system's settings as plain values for a record."""
    values = {**vars(system), "shape": "x".join(map(str, system.shape))}
    return {key: value if isinstance(value, int | float | str) else "scheduled" for key, value in values.items()}
