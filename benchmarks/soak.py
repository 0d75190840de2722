"""`make soak`: does anything grow, drift or wander off in a long run? Prints, and writes docs/out/soak.json.

python -m benchmarks.soak steps [--steps 1000000]     a million optimizer steps under a Monitor, random gradients
python -m benchmarks.soak training [--minutes 30]     the training command with evaluations and checkpoints

Both exit with 1 where a limit is passed.
"""

import argparse
import contextlib
import json
import math
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.memory import resident
from steadynorm import Monitor, ScionC, records
from steadynorm.progress import duration
from steadynorm.scheduler import Scheduler
from steadynorm.signals import exit_code

Floats = NDArray[Any]

RESULTS = Path(__file__).parents[1] / "docs" / "out" / "soak.json"

ALPHA, LR, TARGET = 0.1, 0.01, 0.75  # eta is near 1e-3 at the peak
CYCLE = 50_000  # steps of one fall and rise of the lr, to 0.3 of its peak
EVERY = 20  # steps between measurements, and between moves of the matrices that take longest
SELDOM = ("spectral", "fast")
WARMUP = 50_000  # steps: one cycle, until theory's cache of solved decays has all it will ever have
# 40,000, 40,000 and 25,600 elements: the noise of their norms is 0.35 to 0.45 %
COUNTED = ("vector", "sign", "spectral")

NORM_LIMIT = 0.02  # of the norm against its forecast, of each counted parameter, at every measurement
# Persisted power iteration over SVD: its mean below 1, and the change from the first to the last third.
POWER_LIMIT = 0.01
POWER_LEAST = 0.95  # and the smallest; started anew each time it would be near 0.8
STEP_LIMIT = 4096.0  # bytes per 1000 steps: a number kept at each step would be 32,000
TRAINING_LIMIT = 0.01  # of the resident memory, over the run
LIMITS = {
    "steps": {"memory": STEP_LIMIT, "norm": NORM_LIMIT, "power iteration": POWER_LIMIT, "power least": POWER_LEAST},
    "training": {"memory": TRAINING_LIMIT},
}

_BLOCKS, _STUDENT = 20, 2.101  # and the quantile that makes 95 % of 18 degrees of freedom


class Slope(NamedTuple):
    """A straight line's slope, and half the width of its 95 % interval."""

    value: float
    error: float


def slope(x: Sequence[float] | Floats, y: Sequence[float] | Floats, *, warmup: float = 0.2) -> Slope:
    """By least squares over means of 20 blocks, so that neighbours' likeness does not count as evidence.

    warmup: the part at the beginning that is left out.

    >>> slope(range(1000), [3.0 * k for k in range(1000)])
    Slope(value=3.0, error=0.0)
    """
    first = round(warmup * len(x))
    blocks = min(_BLOCKS, len(x) - first)
    if blocks < 3:
        raise ValueError(f"slope: {len(x)} points are too few")
    means = [np.array([b.mean() for b in np.array_split(np.asarray(v, float)[first:], blocks)]) for v in (x, y)]
    at, value = means[0] - means[0].mean(), means[1] - means[1].mean()
    found = float(at @ value / (at @ at))
    left = value - found * at
    error = math.sqrt(max(float(left @ left), 0.0) / (blocks - 2) / float(at @ at))
    return Slope(round(found, 9), round(_STUDENT * error, 9))


# --- a million steps


def cycle(step: int) -> float:
    """lr over its peak: from 1 down to 0.3 and back, as a cosine in treads of 10 steps."""
    return 0.65 + 0.35 * math.cos(2 * math.pi * (step // 10 * 10) / CYCLE)


def problem(seed: int = 0) -> tuple[nn.ParameterDict, ScionC, Scheduler]:
    """A vector with corrected decay, a matrix with constant decay, whose norm follows the lr, and spectral ones.

    The large one has exact polar factors, as its forecast; the small one those that users have.
    """
    torch.manual_seed(seed)
    shapes = {"vector": (40_000,), "sign": (200, 200), "spectral": (160, 160), "fast": (24, 24)}
    model = nn.ParameterDict({name: nn.Parameter(torch.zeros(shape)) for name, shape in shapes.items()})
    groups: list[dict[str, Any]] = [
        {"params": [model["vector"]], "lmo": "bias", "name": "vector", "lr": LR},
        {"params": [model["sign"]], "lmo": "sign", "name": "sign", "lr": LR, "weight_decay": 0.1},
        {"params": [model["spectral"]], "lmo": "spectral", "name": "spectral", "lr": LR, "polar": "svd"},
        {"params": [model["fast"]], "lmo": "spectral", "name": "fast", "lr": LR},
    ]
    optimizer = ScionC(groups, lr=LR, alpha=ALPHA, steady_norm_sq=TARGET, overlap="exact", polar_steps=5)
    return model, optimizer, Scheduler(optimizer, scale={"lr": cycle})


def soak_steps(
    steps: int, *, report: Callable[[str], object] = print, after: Callable[[int], object] | None = None
) -> dict[str, Any]:
    """Run, measure and judge; Ctrl-C ends it early, and what was done is judged.

    after: called with the number of every step (a test lets it leak).
    """
    model, optimizer, scheduler = problem()
    generator = torch.Generator().manual_seed(1)
    settled = min(10_000, steps // 4)  # from zero weights; before that a forecast of next to nothing is all noise
    between = max(EVERY, steps // 1000 // EVERY * EVERY)  # steps between checkpoints
    # Room for everything beforehand: what the soak itself keeps must not look like a leak.
    memory, at = np.full(steps // between, np.nan), between * np.arange(1, steps // between + 1)
    power = np.full(steps // between, np.nan)
    ratios = {name: np.full(steps // EVERY, np.nan) for name in model}
    started = told = time.monotonic()
    done = 0  # steps of whole stretches
    with contextlib.suppress(KeyboardInterrupt), Monitor(optimizer, model, every=EVERY) as monitor:
        for step in range(1, steps + 1):
            for name, p in model.items():
                if name in SELDOM and step % EVERY:
                    p.grad = None
                    continue
                p.grad = torch.empty_like(p) if p.grad is None else p.grad
                p.grad.normal_(generator=generator)
            optimizer.step()
            scheduler.step()
            if after is not None:
                after(step)
            if step % between:
                continue
            for record in monitor.measure():
                for name, each in ratios.items() if record["step"] > settled else ():
                    layer = record["layers"][name]
                    each[record["step"] // EVERY - 1] = layer["norm"] / layer["forecast"]
            if step > settled:
                exact = torch.linalg.matrix_norm(model["spectral"].detach(), 2).item()
                power[step // between - 1] = record["layers"]["spectral"]["spectral"] / exact
            memory[step // between - 1], done = resident(), step
            if (now := time.monotonic()) - told > 30:
                told, left = now, (now - started) / step * (steps - step)
                worst = np.nanmax([np.abs(ratios[name] - 1) for name in COUNTED]) if step > settled + EVERY else 0.0
                report(
                    f"{step:>9,} of {steps:,} steps, {duration(left)} left: {memory[step // between - 1] / 2**20:.1f} MiB, "
                    f"norm within {worst:.2%} of its forecast"
                )
    seconds, stretches, seen = time.monotonic() - started, done // between, done // EVERY
    found = _judged(
        done, seconds, {name: p.numel() for name, p in model.items()}, at[:stretches], memory[:stretches],
        power[:stretches], {name: each[:seen] for name, each in ratios.items()},
    )  # fmt: skip
    found["checks"]["all steps"] = done == steps
    return found | {"asked": steps}


def _judged(
    steps: int, seconds: float, elements: dict[str, int], at: Floats, memory: Floats, power: Floats,
    ratios: dict[str, Floats],
) -> dict[str, Any]:  # fmt: skip
    """What is written down, and whether it holds."""
    ratios = {name: each[np.isfinite(each)] for name, each in ratios.items()}
    power = power[np.isfinite(power)]
    warmup = max(0.2, min(0.6, WARMUP / steps))
    grows, third = slope(at, memory, warmup=warmup), len(power) // 3
    off = {name: float(np.abs(each - 1).max()) for name, each in ratios.items()}
    worst, drift = max(off[name] for name in COUNTED), float(power[-third:].mean() - power[:third].mean())
    found = {
        "steps": steps,
        "seconds": round(seconds, 1),
        "elements": elements,
        "counted": list(COUNTED),
        "measurements": len(ratios[COUNTED[0]]),
        "memory_bytes_per_1000_steps": round(1000 * grows.value, 1),
        "memory_error": round(1000 * grows.error, 1),
        "memory_mib": [round(float(memory[k]) / 2**20, 2) for k in (round(warmup * len(memory)), -1)],
        "norm_worst": round(worst, 5),
        "norm_worst_of": {name: round(each, 5) for name, each in off.items()},
        "norm_mean_of": {name: round(float(each.mean()) - 1, 6) for name, each in ratios.items()},
        "power_checks": len(power),
        "power_mean": round(float(power.mean()), 5),
        "power_least": round(float(power.min()), 5),
        "power_most": round(float(power.max()), 6),
        "power_drift": round(drift, 6),
    }
    checks = {
        "memory": 1000 * grows.value <= STEP_LIMIT,
        "norm": worst <= NORM_LIMIT,
        # What is reported is |A^T A v| / |A v|: never more than the norm, but for rounding.
        "power iteration": POWER_LEAST <= float(power.min()) <= float(power.max()) <= 1.0001
        and 1 - float(power.mean()) <= POWER_LIMIT
        and abs(drift) <= POWER_LIMIT,
    }
    return {**found, "checks": checks}


# --- half an hour of training


def soak_training(minutes: float, *, report: Callable[[str], object] = print) -> dict[str, Any]:
    """The command line trains a small GPT on the embedded text, evaluating and saving often; watched from outside."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run"
        command = [sys.executable, "-m", "steadynorm.cli", "train", "gpt", "--out", str(out), "--steps", "10000000"]
        command += ["--task.model.layers", "1", "--task.model.width", "32", "--task.model.heads", "2"]
        command += ["--task.length", "32", "--task.eval-tokens", "2048", "--batch", "4", "--schedule.lr", "constant"]
        command += ["--eval-every", "50", "--save-every", "100", "--monitor-every", "10", "--device", "cpu"]
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        samples: list[tuple[float, float]] = []
        saved: set[str] = set()  # all checkpoints that were ever seen: the run keeps a few
        with (Path(folder) / "said").open("w", encoding="utf-8") as said:
            process = subprocess.Popen(command, stdout=said, stderr=subprocess.STDOUT, env=environment)
        started = told = time.monotonic()
        try:
            while (spent := time.monotonic() - started) < 60 * minutes and process.poll() is None:
                samples.append((spent, float(resident(process.pid))))
                saved |= {path.name for path in out.glob("checkpoints/step-*")}
                time.sleep(min(1.0, minutes))
                if time.monotonic() - told > 60:
                    told = time.monotonic()
                    report(
                        f"{duration(60 * minutes - spent)} of training left: {samples[-1][1] / 2**20:.1f} MiB resident"
                    )
        finally:
            process.send_signal(signal.SIGTERM)  # it saves, and ends after the step under way
            code = process.wait(timeout=120)
        if code != exit_code(signal.SIGTERM):
            raise RuntimeError(
                f"the training ended with {code}:\n{(Path(folder) / 'said').read_text(encoding='utf-8')[-2000:]}"
            )
        run = records.read(out)
        steps = int(run.steps[-1])
        evaluations = int(np.isfinite(run.columns["val_loss"]).sum())
    seconds = samples[-1][0]
    grows = slope(*zip(*samples, strict=True))
    mean = float(np.mean([value for _, value in samples[len(samples) // 5 :]]))
    found = {
        "minutes": round(seconds / 60, 2),
        "steps": steps,
        "evaluations": evaluations,
        "checkpoints": len(saved),
        "samples": len(samples),
        "resident_mib": round(mean / 2**20, 2),
        "memory_kib_per_hour": round(3600 * grows.value / 1024, 2),
        "memory_error": round(3600 * grows.error / 1024, 2),
        "memory_bytes_per_1000_steps": round(1000 * grows.value * seconds / steps, 1),
    }
    checks = {
        "memory": grows.value * seconds <= TRAINING_LIMIT * mean,
        "evaluations and checkpoints": min(evaluations, len(saved)) > minutes,  # a minute, or it was no soak of them
    }
    return {**found, "asked": minutes, "checks": checks}


# --- command


def keep(path: Path, part: str, found: dict[str, Any]) -> None:
    """Put one part's results beside the other's."""
    held = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    versions = {"python": platform.python_version(), "torch": torch.__version__}
    held[part] = {**found, "limits": LIMITS[part], "versions": versions}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(dict(sorted(held.items())), indent=1) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """0 if all held."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.soak", description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("steps", "training"))
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    given = parser.parse_args(arguments)
    torch.set_num_threads(1)
    found = soak_steps(given.steps) if given.part == "steps" else soak_training(given.minutes)
    for key, value in found.items():
        print(f"{key}: {value}")
    keep(given.out, given.part, found)
    failed = [name for name, held in found["checks"].items() if not held]
    print(f"FAILED: {', '.join(failed)}" if failed else "all held")
    return 1 if failed else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it early, as Ctrl-C does
    sys.exit(main())
