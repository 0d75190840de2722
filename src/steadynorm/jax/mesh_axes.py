"""Run the update on meshes with explicit axes, which are JAX's default.

On explicit axes JAX infers the sharding of every result, and it refuses to stack, reshape and multiply sharded matrices
where it cannot. The update therefore runs on automatic axes, where XLA chooses the sharding, and its results return to the
sharding of the weights and the state.
"""

from collections.abc import Callable
from typing import Any

import jax  # pyright: ignore[reportMissingImports]


def on_automatic_axes(advance: Callable[..., tuple[Any, Any]], updates: Any, state: Any, params: Any, now: Any) -> Any:
    """Return advance(updates, state, params, now), computed on automatic axes of the mesh of params.

    Args:
        advance: A function that returns trees like params and state. Traced values must reach it as arguments, not by
            closure.
        updates: The gradients.
        state: The optimizer's state.
        params: The weights, whose sharding names the mesh.
        now: The scalars of this step.
    """
    meshes = [mesh for leaf in jax.tree.leaves(params) if (mesh := jax.typeof(leaf).sharding.mesh).explicit_axes]
    if not meshes:
        return advance(updates, state, params, now)
    everywhere = jax.sharding.NamedSharding(meshes[0], jax.sharding.PartitionSpec())

    def placement(leaf: Any) -> Any:
        sharding = jax.typeof(leaf).sharding
        return everywhere if sharding.mesh.empty else sharding  # without jax.set_mesh, counts are on no mesh

    placed = jax.tree.map(placement, (params, state))
    run = jax.sharding.auto_axes(advance, axes=meshes[0].explicit_axes, out_sharding=placed)
    return run(updates, state, params, now)
