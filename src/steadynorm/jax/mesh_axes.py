"""Meshes with explicit axes, JAX's default: the update is computed on automatic ones.

Stacking, views as matrices and products of sharded matrices have no sharding that JAX could infer, so it would refuse
them. XLA chooses one instead, and results are sharded as the weights and the state are.
"""

from collections.abc import Callable
from typing import Any

import jax  # pyright: ignore[reportMissingImports]


def on_automatic_axes(advance: Callable[..., tuple[Any, Any]], updates: Any, state: Any, params: Any, now: Any) -> Any:
    """Return advance(updates, state, params, now), which returns trees like params and state, on any mesh.

    Args:
        advance: The function. Values that JAX traces reach it as arguments only.
        updates: The gradients.
        state: The state.
        params: The weights, which say on which mesh.
        now: What else it takes: scalars.
    """
    axes = {axis for leaf in jax.tree.leaves(params) for axis in _explicit_axes(leaf)}
    if not axes:
        return advance(updates, state, params, now)
    placed = jax.tree.map(lambda leaf: jax.typeof(leaf).sharding, (params, state))
    run = jax.sharding.auto_axes(advance, axes=tuple(sorted(axes)), out_sharding=placed)
    return run(updates, state, params, now)


def _explicit_axes(leaf: Any) -> tuple[str, ...]:
    return jax.typeof(leaf).sharding.mesh.explicit_axes
