"""The arithmetic of one step. Arrays of one shape and lmo are stacked, and one vmapped lmo updates all of them.

Gradients that are exactly zero are treated as in `steadynorm.optim.idle`. Rows of embeddings and matrices of stacks wait
for their next gradient: their momentum, decay and update all pause. Other matrices keep decaying, and their updates fade
out once almost nothing is left of the momentum: left_t is 1 where the gradient is not zero and (1 - alpha) left_{t-1}
elsewhere, and the update is multiplied by min(1, left_t / FADES_BELOW).
"""

import math
from typing import Any, NamedTuple

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]

from steadynorm.jax.factors import PolarMethod, wide_dtype
from steadynorm.jax.labels import Label
from steadynorm.jax.oracles import apply_oracle, as_matrices, find_oracle
from steadynorm.theory.momentum import FADES_BELOW
from steadynorm.theory.updates import Update


class Gradient(NamedTuple):
    """The gradient of one array, and how it enters the momentum."""

    path: str
    label: Label
    value: Any
    alpha: Any
    nesterov: bool
    own_time: bool


class Leaf(NamedTuple):
    """One array within a step.

    Attributes:
        path: Where it is in the tree.
        label: What it is.
        oracle: The row of its lmo.
        theta: The weights, in their own dtype.
        x: The input of the lmo, in at least fp32.
        fade: The factor of each matrix's update; None if slices wait instead.
        active: 1 where the step is taken and 0 where a slice waits; None if no slice ever waits.
    """

    path: str
    label: Label
    oracle: Update
    theta: Any
    x: Any
    fade: Any
    active: Any


def accumulate(gradient: Gradient, m: Any, theta: Any, left: Any) -> tuple[Leaf, Any, Any]:
    """Update the momentum of one array; return the leaf, the momentum, and how much is left of it.

        m_t = (1 - alpha) m_{t-1} + alpha g_t
        x_t = m_t,   Nesterov: (1 - alpha) m_t + alpha g_t

    Args:
        gradient: g and alpha.
        m: The momentum, in the dtype of the state.
        theta: The weights.
        left: What was left of the momentum of each matrix; None if slices wait.
    """
    label, alpha, wide = gradient.label, gradient.alpha, wide_dtype(theta.dtype)
    grad, before, oracle = gradient.value.astype(wide), m.astype(wide), find_oracle(label.lmo, label.seen_shape)
    active = fade = None
    if left is None:
        ndim = len(label.shape)
        axes = tuple(range(ndim - _waiting_ndim(label, gradient.own_time), ndim))
        active = (grad != 0).any(axes, keepdims=True).astype(wide)
    else:
        matrices = as_matrices(label.to_seen(grad), oracle, blocks_of(label, oracle))
        left = jnp.where((matrices != 0).any((-2, -1)), 1.0, left * (1 - alpha)).astype(left.dtype)
        fade = jnp.minimum(1.0, left / FADES_BELOW)
    now = before + (alpha if active is None else alpha * active) * (grad - before)
    x = now + alpha * (grad - now) if gradient.nesterov else now
    return Leaf(gradient.path, label, oracle, theta, x, fade, active), now.astype(m.dtype), left


def find_updates(leaves: list[Leaf], polar: PolarMethod) -> list[Any]:
    """Return the update of every leaf, in the order of the leaves."""
    buckets: dict[Any, list[int]] = {}
    for k, leaf in enumerate(leaves):
        own_key = leaf.path if leaf.oracle.is_elementwise else ""  # stacking would only cost a copy
        key = leaf.oracle.name, leaf.label.seen_shape, leaf.label.blocks, leaf.fade is None, leaf.x.dtype, own_key
        buckets.setdefault(key, []).append(k)
    updates: list[Any] = [None] * len(leaves)
    for members in buckets.values():
        for k, u in zip(members, _bucket_updates([leaves[k] for k in members], polar), strict=True):
            updates[k] = u
    return updates


def _bucket_updates(leaves: list[Leaf], polar: PolarMethod) -> list[Any]:
    """Return the updates of leaves of one shape and lmo."""
    oracle, blocks = leaves[0].oracle, blocks_of(leaves[0].label, leaves[0].oracle)
    stack = jnp.stack([leaf.label.to_seen(leaf.x) for leaf in leaves])  # (batch, *seen shape)
    if leaves[0].fade is None:
        stack = jax.vmap(lambda x: apply_oracle(x, oracle, blocks, polar))(stack)
    else:
        fades = jnp.stack([leaf.fade for leaf in leaves])  # (batch, ..., blocks)
        stack = jax.vmap(lambda x, fade: apply_oracle(x, oracle, blocks, polar, fade))(stack, fades)
    return [leaf.label.from_seen(u) for leaf, u in zip(leaves, stack, strict=True)]


def decay_and_step(leaf: Leaf, u: Any, gamma: Any, eta: Any) -> Any:
    """Return the change of the weights in their dtype: -eta theta - gamma u, and 0 where a slice waits."""
    delta = -(eta * leaf.theta.astype(u.dtype)) - gamma * u
    return (delta if leaf.active is None else delta * leaf.active).astype(leaf.theta.dtype)


def fresh_left(labels: list[Label], own_time: bool, dtype: Any) -> Any:
    """Return `left` at the start: 1 for each matrix whose updates fade, those of all arrays in one array."""
    shapes = (_fading_shape(label, own_time) for label in labels)
    return jnp.ones(sum(math.prod(shape) for shape in shapes if shape is not None), dtype)


def split_left(left: Any, labels: list[Label], own_time: bool) -> list[Any]:
    """Return the part of `left` that belongs to each array; None where slices wait."""
    parts, first = [], 0
    for label in labels:
        shape = _fading_shape(label, own_time)
        last = first + (0 if shape is None else math.prod(shape))
        parts.append(None if shape is None else left[first:last].reshape(shape))
        first = last
    return parts


def _fading_shape(label: Label, own_time: bool) -> tuple[int, ...] | None:
    """Return the shape of the stack of matrices whose updates fade; None if slices wait instead."""
    if _waiting_ndim(label, own_time):
        return None
    oracle, seen = find_oracle(label.lmo, label.seen_shape), jax.ShapeDtypeStruct(label.seen_shape, jnp.float32)
    return jax.eval_shape(lambda x: as_matrices(x, oracle, blocks_of(label, oracle)), seen).shape[:-2]


def blocks_of(label: Label, oracle: Update) -> int:
    """Return how many blocks an lmo sees: 1 if its rows are independent anyway."""
    return 1 if oracle.row_separable else label.blocks


def _waiting_ndim(label: Label, own_time: bool) -> int:
    """Return how many trailing dimensions a slice that waits for its gradient has; 0 if updates fade instead."""
    if not own_time:
        return 0
    if label.lmo == "embedding":
        return 1
    return len(label.shape) - label.stack if label.stack else 0
