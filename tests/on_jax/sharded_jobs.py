"""Train on one device and on a mesh of four, and print how far apart they end. Run by test_jax_package.py."""

import needs_jax  # noqa: F401  # isort: skip

import contextlib
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import steadynorm.jax as sj

SPECS = {
    "up": {"kernel": ((8, 16), P("x", "y"))},
    "down": {"kernel": ((16, 8), P(None, "y"))},
    "also": {"kernel": ((8, 16), P("y", None))},  # stacked with `up`, placed otherwise
    "qkv": {"kernel": ((8, 24), P("x", "y"))},
    "experts": {"up_proj": {"kernel": ((4, 8, 8), P("x", None, "y"))}},
    "embed": {"embedding": ((12, 8), P("x", None))},
    "norm": {"scale": ((8,), P("x"))},
    "head": {"kernel": ((8, 4), P(None, "x")), "bias": ((4,), P())},
}
STEPS, LR = 8, optax.warmup_cosine_decay_schedule(0.005, 0.02, 3, 8)


def draw(seed: int, mesh: jax.sharding.Mesh | None):
    random = np.random.default_rng(seed)

    def place(leaf):
        x = random.standard_normal(leaf[0]).astype(np.float32)
        return jnp.asarray(x) if mesh is None else jax.device_put(x, NamedSharding(mesh, leaf[1]))

    return jax.tree.map(place, SPECS, is_leaf=lambda leaf: isinstance(leaf, tuple))


def train(tx, mesh: jax.sharding.Mesh | None):
    params = draw(0, mesh)
    state = tx.init(params)

    @jax.jit
    def advance(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(STEPS):
        params, state = advance(params, state, draw(1 + step, mesh))
    return params, state


def main() -> None:
    axis = AxisType.Explicit if sys.argv[1] == "explicit" else AxisType.Auto
    mesh = jax.make_mesh((2, 2), ("x", "y"), axis_types=(axis, axis))
    labels = sj.label_params(draw(0, None))
    makers = {
        "scionc": lambda: sj.scionc(LR, labels, overlap="exact", peak_lr=0.02),
        "injected": lambda: optax.inject_hyperparams(sj.scionc)(LR, labels, output_weight_decay=0.004),
        "adamc": lambda: sj.adamc(LR, peak_lr=0.02),
    }
    makers["mesh-not-set"] = makers["scionc"]  # the parameters' sharding names the mesh
    for name, make in makers.items():
        alone, _ = train(make(), None)
        with contextlib.nullcontext() if name == "mesh-not-set" else jax.set_mesh(mesh):
            together, state = train(make(), mesh)
        apart = jax.tree.map(lambda a, b: np.abs(jax.device_get(a) - jax.device_get(b)).max(), alone, together)
        state = getattr(state, "inner_state", state)
        momentum = state.momentum if name != "adamc" else state[0].mu
        follows = jax.tree.map(lambda m, p: m.sharding.is_equivalent_to(p.sharding, p.ndim), momentum, draw(0, mesh))
        stays = jax.tree.map(lambda a, p: a.sharding.is_equivalent_to(p.sharding, p.ndim), together, draw(0, mesh))
        print(
            name,
            len(jax.devices()),
            max(jax.tree.leaves(apart)),
            all(jax.tree.leaves(follows)),
            all(jax.tree.leaves(stays)),
        )


if __name__ == "__main__":
    main()
