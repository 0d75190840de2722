"""Time compiled steps of `steadynorm.jax` beside optax.contrib.muon, on the matrices of ViT-S/16; write docs/out/jax_steps.txt.

python -m benchmarks.jax_steps [rounds]          in the environment of `make test-jax`

One process, interleaved, medians. Matrices are stored d_in x d_out, as flax stores them; all of them are hidden.
"""

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import optax  # pyright: ignore[reportMissingImports]

import steadynorm.jax as sj
from steadynorm import machine
from steadynorm.groups.tables import format_table
from steadynorm.lab.bench import VIT_S16

OUT = Path(__file__).parents[1] / "docs" / "out" / "jax_steps.txt"
PEER = "optax.contrib.muon, 5 steps"
LR = optax.warmup_cosine_decay_schedule(0.0, 0.01, 10, 100)

Params = dict[str, dict[str, Any]]


def draw(seed: int) -> Params:
    keys = jax.random.split(jax.random.key(seed), len(VIT_S16))
    return {
        f"layer_{k}": {"kernel": 0.02 * jax.random.normal(key, (d_in, d_out))}
        for k, (key, (d_out, d_in)) in enumerate(zip(keys, VIT_S16, strict=True))
    }


def contenders(params: Params) -> dict[str, Any]:
    labels = sj.label_params(params, output=False)
    return {
        PEER: optax.contrib.muon(LR, weight_decay=0.1),
        "muonc, 5 steps": sj.muonc(LR, 0.1, peak_lr=0.01),
        "scionc, 5 steps": sj.scionc(LR, labels),
        "scionc, 4 steps": sj.scionc(LR, labels, polar=("express", 4)),
        "scionc, Newton-Schulz, 5 steps": sj.scionc(LR, labels, polar="newton-schulz"),
        "optax.adamw": optax.adamw(LR),
        "adamc": sj.adamc(LR, peak_lr=0.01),
    }


def stepper(tx: Any, params: Params) -> Callable[[Params], None]:
    """Return a function that takes one compiled step and waits for it."""

    @jax.jit
    def advance(params: Params, state: Any, grads: Params) -> tuple[Params, Any]:
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    held = [params, jax.jit(tx.init)(params)]

    def step(grads: Params) -> None:
        held[:] = jax.block_until_ready(advance(*held, grads))

    return step


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the seconds of every round, after one that compiles."""
    params = draw(0)
    steps = {name: stepper(tx, params) for name, tx in contenders(params).items()}
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 1):
        grads = jax.block_until_ready(draw(1 + number))
        for name, step in steps.items():
            started = time.perf_counter()
            step(grads)
            if number:
                seconds[name].append(time.perf_counter() - started)
        print(f"round {number} of {rounds}", file=sys.stderr, flush=True)
    return seconds


def factor_errors() -> dict[str, float]:
    """Return how far the factor of a Gaussian 384 x 384 matrix is from the exact one, over the norm of that."""
    x = jax.random.normal(jax.random.key(0), (384, 384))
    muon = optax.contrib.scale_by_muon(beta=0.0, nesterov=False)  # the update is the gradient's factor
    factors = {
        PEER: muon.update(x, muon.init(x))[0],
        "scionc, 5 steps": sj.polar_factor(x),
        "scionc, 4 steps": sj.polar_factor(x, ("express", 4)),
        "scionc, Newton-Schulz, 5 steps": sj.polar_factor(x, "newton-schulz"),
    }
    exact = sj.polar_factor(x, "svd")
    errors = {name: float(jnp.linalg.norm(factor - exact) / jnp.linalg.norm(exact)) for name, factor in factors.items()}
    return {**errors, "muonc, 5 steps": errors[PEER]}


def main() -> None:
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 15
    seconds, errors = measure(rounds), factor_errors()
    rows = [["optimizer", "ms per step", "speed beside the first", "error of a factor"]]
    for name, times in seconds.items():
        ratio = statistics.median(peer / own for peer, own in zip(seconds[PEER], times, strict=True))
        error = f"{errors[name]:.2f}" if name in errors else "-"
        rows.append([name, f"{1e3 * statistics.median(times):.0f}", f"{ratio:.2f}x", error])
    elements = sum(x.size for x in jax.tree.leaves(draw(0)))
    versions = f"jax {jax.__version__}, optax {optax.__version__}, {jax.default_backend()}, {jnp.float32.__name__}"
    about = (
        f"{len(VIT_S16)} matrices, {elements / 1e6:.1f} M weights; {versions}; median of {rounds} interleaved rounds"
    )
    OUT.write_text(f"{format_table(rows)}\n\n{about}\n{machine.describe()}\n", encoding="utf-8")
    print(OUT.read_text(encoding="utf-8"))


if __name__ == "__main__":
    main()
