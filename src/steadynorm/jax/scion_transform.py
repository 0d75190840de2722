"""Scion and ScionC as optax transformations (Algorithm 2 of the paper).

    m_t = (1 - alpha) m_{t-1} + alpha g_t
    theta_t = (1 - gamma lambda_t) theta_{t-1} + gamma lmo(m_t)

`stacks` has the arithmetic. This module evaluates what changes from step to step, and keeps the state.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax  # pyright: ignore[reportMissingImports]
import jax.numpy as jnp  # pyright: ignore[reportMissingImports]
import optax  # pyright: ignore[reportMissingImports]

from steadynorm.groups.role_table import OUTPUT_LR_RATIO
from steadynorm.jax.decay_schedule import (
    Value,
    check_decay,
    corrected_decay,
    find_peak,
    is_number,
    target_decay,
    value_at,
)
from steadynorm.jax.factors import PolarMethod, split_method, wide_dtype
from steadynorm.jax.labels import Label, Labels, label_params, path_leaves, same_lmo
from steadynorm.jax.mesh_axes import on_automatic_axes
from steadynorm.jax.oracles import find_oracle
from steadynorm.jax.stacks import Gradient, accumulate, blocks_of, decay_and_step, find_updates, fresh_left, split_left
from steadynorm.suggestions import suggest
from steadynorm.theory.equilibrium import check_lr, eta_of
from steadynorm.theory.kernels import vector_kernel
from steadynorm.theory.momentum import check_alpha

LabelsLike = Labels | str | Callable[[Any], Labels] | None

_MOMENTUM_DTYPES = (None, "bfloat16", "float32")
_OVERLAPS = ("linear", "exact")


class ScionState(NamedTuple):
    """The state of `scion` and `scionc`.

    Attributes:
        count: Completed steps.
        momentum: The moving average of the gradients, a tree like the parameters.
        left: How much is left of the momentum of each matrix whose updates fade, in the order of the tree. It is one array
            because `optax.tree_map_params` needs a structure that does not depend on the labels.
    """

    count: Any
    momentum: Any
    left: Any


class _Settings(NamedTuple):
    """The choices that stay the same in every step."""

    labels: LabelsLike
    nesterov: bool
    polar: PolarMethod
    momentum_dtype: str | None
    own_time: bool


def scionc(
    learning_rate: Value,
    labels: LabelsLike = None,
    *,
    alpha: Value = 0.1,
    steady_norm_sq: Value = 1.1875,
    overlap: str = "linear",
    nesterov: bool = False,
    output_lr: Value | None = None,
    output_weight_decay: Value | None = None,
    peak_lr: Value | None = None,
    polar: PolarMethod = "express",
    momentum_dtype: str | None = None,
    own_time: bool = True,
) -> Any:
    """Return Scion with corrected decay: the weight norm stays where you put it while lr and momentum change.

        lambda_t = (2 - alpha_t) / (2 alpha_t C_t^2) gamma_t        (Nesterov: over 1 + 4a - 6a^2 + 2a^3)

    lr, alpha and steady_norm_sq may be numbers, schedules, or arrays under `optax.inject_hyperparams`. The update needs the
    parameters: `tx.update(gradients, state, params)`.

    Args:
        learning_rate: gamma.
        labels: What `label_params(params)` returned; a function that returns it; or one lmo for every array, stored
            d_out x d_in ("by-shape": chosen by the number of dimensions). None labels the parameters with the defaults.
        alpha: The weight of the new gradient, in (0, 1]; 1 - beta.
        steady_norm_sq: C^2, the squared weight norm over that of one update, at which the weights settle.
        overlap: "linear", the paper's formula, or "exact", the decay that reaches C^2 given the overlap kernel of each
            array's lmo and shape.
        nesterov: Whether the lmo sees (1 - alpha) m_t + alpha g_t.
        output_lr: The lr of the output weight; 20 lr by default.
        output_weight_decay: The constant decay of the output weight. By default its lr lambda at the peak equals that of
            the other arrays, for which the peak must be known.
        peak_lr: The schedule's maximum, needed only for that default.
        polar: "express", "newton-schulz" or "svd", or with a number of steps, as in ("express", 4).
        momentum_dtype: "bfloat16" halves the state. Default: fp32 (fp64 for fp64 parameters).
        own_time: Whether rows of embeddings and matrices of stacks (experts) stand still in steps without a gradient.

    Returns:
        An `optax.GradientTransformation`; its state is a `ScionState`.

    Examples:
        >>> params = {"up": {"kernel": jnp.ones((4, 8))}, "head": {"kernel": jnp.ones((8, 2))}}
        >>> tx = scionc(0.01, label_params(params))
        >>> updates, state = tx.update(jax.tree.map(jnp.ones_like, params), tx.init(params), params)
        >>> float(jnp.linalg.norm(optax.apply_updates(params, updates)["up"]["kernel"])) < float(jnp.sqrt(32.0))
        True
    """
    if overlap not in _OVERLAPS:
        raise ValueError(f"overlap={overlap!r} is unknown; choose 'linear' or 'exact'")
    any_kernel = "linear" if overlap == "linear" else vector_kernel(1)  # one update alone has lr^2, whatever the kernel
    corrected_decay(  # checks that the numbers are in range and the target is in reach
        learning_rate, family="scion", alpha=alpha, steady_norm_sq=steady_norm_sq, nesterov=nesterov, overlap=any_kernel
    )

    def start_decay(peak: Any) -> Any:
        alpha_0, target_0 = _start("alpha", alpha), _start("steady_norm_sq", steady_norm_sq)
        return target_decay(target_0, peak, "scion", alpha_0, nesterov=nesterov)

    def decay(label: Label, count: Any) -> Any:
        kernel: Any = "linear"
        target, lr = value_at(steady_norm_sq, count), value_at(learning_rate, count)
        if overlap == "exact":
            seen, oracle = label.seen_shape, find_oracle(label.lmo, label.seen_shape)
            blocks = blocks_of(label, oracle)
            kernel = oracle.overlap(seen, blocks=blocks)
            target = target / oracle.length_share(seen, blocks, *split_method(polar))
        return target_decay(target, lr, "scion", value_at(alpha, count), nesterov=nesterov, overlap=kernel)

    settings = _Settings(labels, nesterov, polar, momentum_dtype, own_time)
    rates = _Rates("scionc", learning_rate, alpha, output_lr, output_weight_decay, peak_lr, decay, start_decay)
    return _transformation(settings, rates)


def scion(
    learning_rate: Value,
    labels: LabelsLike = None,
    *,
    alpha: Value = 0.1,
    weight_decay: Value = 0.0,
    nesterov: bool = False,
    output_lr: Value | None = None,
    output_weight_decay: Value | None = None,
    peak_lr: Value | None = None,
    polar: PolarMethod = "express",
    momentum_dtype: str | None = None,
    own_time: bool = True,
) -> Any:
    """Return constrained Scion with the decoupled decay that you set, in the paper's parametrisation.

    Args:
        weight_decay: lambda: a number, a schedule or an array.
        learning_rate, labels, alpha, nesterov, output_lr, output_weight_decay, peak_lr, polar, momentum_dtype, own_time: As
            in `scionc`.

    Examples:
        >>> tx = scion(0.1, "spectral", weight_decay=0.01)
    """

    if is_number(weight_decay):
        check_decay("weight_decay", weight_decay)
        if is_number(learning_rate):
            eta_of(learning_rate, weight_decay)

    def start_decay(peak: Any) -> Any:
        return _start("weight_decay", weight_decay)

    def decay(label: Label, count: Any) -> Any:
        return value_at(weight_decay, count)

    settings = _Settings(labels, nesterov, polar, momentum_dtype, own_time)
    rates = _Rates("scion", learning_rate, alpha, output_lr, output_weight_decay, peak_lr, decay, start_decay)
    return _transformation(settings, rates)


class _Now(NamedTuple):
    """The values of one step: alpha, and lr and eta = lr lambda by path."""

    alpha: Any
    lr: dict[str, Any]
    eta: dict[str, Any]


class _Rates(NamedTuple):
    """The lr, momentum and decay of each array, which may change in every step."""

    name: str
    learning_rate: Value
    alpha: Value
    output_lr: Value | None
    output_weight_decay: Value | None
    peak_lr: Value | None
    decay: Callable[[Label, Any], Any]  # (label, count) -> lambda of arrays other than the output weight
    start_decay: Callable[[Any], Any]  # peak lr -> that lambda with the momentum and target of the start

    def lr_of(self, label: Label, count: Any) -> Any:
        lr = value_at(self.learning_rate, count)
        if not label.is_output:
            return lr
        return OUTPUT_LR_RATIO * lr if self.output_lr is None else value_at(self.output_lr, count)

    def decay_of(self, label: Label, count: Any) -> Any:
        if not label.is_output:
            return self.decay(label, count)
        if self.output_weight_decay is not None:
            return value_at(self.output_weight_decay, count)
        return self.default_output_decay()

    def at(self, count: Any, labels: Mapping[str, Label]) -> "_Now":
        """Return the values of this step; arrays of one shape and lmo share their decay."""
        lrs = {path: self.lr_of(label, count) for path, label in labels.items()}
        rules = {path: (label.is_output, label.lmo, label.seen_shape, label.blocks) for path, label in labels.items()}
        examples = {rule: labels[path] for path, rule in rules.items()}
        decays = {rule: self.decay_of(label, count) for rule, label in examples.items()}
        return _Now(value_at(self.alpha, count), lrs, {path: lrs[path] * decays[rules[path]] for path in labels})

    def default_output_decay(self) -> Any:
        """Return eta_0 / output_lr, with eta_0 = lr lambda_0 at the peak of the schedule."""
        where = f"{self.name}: output_weight_decay is not set"
        peak = find_peak(where, self.learning_rate, self.peak_lr)
        if self.output_lr is None:
            return self.start_decay(peak) / OUTPUT_LR_RATIO
        if not is_number(self.output_lr):
            raise ValueError(f"{where}, and its default needs an output_lr that is a number; pass output_weight_decay=")
        return self.start_decay(peak) * peak / self.output_lr


def _start(name: str, value: Value) -> Any:
    """Return a value at the start; raise ValueError if it is injected, because then it is not known yet."""
    if is_number(value) or callable(value):
        return value_at(value, 0)
    raise ValueError(f"the default of output_weight_decay needs a known {name}; pass output_weight_decay=")


def _transformation(settings: _Settings, rates: _Rates) -> Any:
    """Build the transformation; raise ValueError if a number or a choice is out of range."""
    split_method(settings.polar)
    if settings.momentum_dtype not in _MOMENTUM_DTYPES:
        raise ValueError(f"momentum_dtype={settings.momentum_dtype!r} is unknown; choose 'bfloat16' or 'float32'")
    for value, check in ((rates.learning_rate, check_lr), (rates.output_lr, check_lr), (rates.alpha, check_alpha)):
        if is_number(value):
            check(value)
    if is_number(rates.output_weight_decay):
        check_decay("output_weight_decay", rates.output_weight_decay)
        ratio, lr = (OUTPUT_LR_RATIO, rates.learning_rate) if rates.output_lr is None else (1, rates.output_lr)
        if is_number(lr):
            eta_of(ratio * lr, rates.output_weight_decay)

    def init(params: Any) -> ScionState:
        labels = resolve_labels(settings.labels, params)
        if any(labels[path].is_output for path, _ in path_leaves(params)) and rates.output_weight_decay is None:
            rates.default_output_decay()  # raises now rather than in a compiled step
        momentum = jax.tree.map(lambda p: jnp.zeros_like(p, _momentum_dtype(p, settings.momentum_dtype)), params)
        dtype = jnp.result_type(jnp.float32, *(leaf.dtype for leaf in jax.tree.leaves(params)))
        left = fresh_left([labels[path] for path, _ in path_leaves(params)], settings.own_time, dtype)
        return ScionState(jnp.zeros([], jnp.int32), momentum, left)

    def advance(updates: Any, state: ScionState, params: Any, now: _Now) -> tuple[Any, ScionState]:
        labels, treedef = resolve_labels(settings.labels, params), jax.tree.structure(updates)
        pairs = zip(path_leaves(updates), jax.tree.leaves(state.momentum), jax.tree.leaves(params), strict=True)
        parts = split_left(state.left, [labels[path] for path, _ in path_leaves(params)], settings.own_time)
        leaves, momenta, left = [], [], [state.left[:0]]
        for ((path, grad), m, theta), part in zip(pairs, parts, strict=True):
            gradient = Gradient(path, labels[path], grad, now.alpha, settings.nesterov, settings.own_time)
            leaf, momentum, part = accumulate(gradient, m, theta, part)
            leaves.append(leaf)
            momenta.append(momentum)
            left += [] if part is None else [part.reshape(-1)]
        deltas = [
            decay_and_step(leaf, u, now.lr[leaf.path], now.eta[leaf.path])
            for leaf, u in zip(leaves, find_updates(leaves, settings.polar), strict=True)
        ]
        momentum = jax.tree.unflatten(treedef, momenta)
        state = ScionState(optax.safe_increment(state.count), momentum, jnp.concatenate(left))
        return jax.tree.unflatten(treedef, deltas), state

    def update(updates: Any, state: ScionState, params: Any = None) -> tuple[Any, ScionState]:
        if params is None:
            raise ValueError(f"{rates.name}: decay needs the weights; call update(gradients, state, params)")
        labels = resolve_labels(settings.labels, params)
        now = rates.at(state.count, {path: labels[path] for path, _ in path_leaves(params)})
        return on_automatic_axes(advance, updates, state, params, now)

    return optax.GradientTransformation(init, update)


def resolve_labels(labels: LabelsLike, params: Any) -> Mapping[str, Label]:
    """Return the label of every array of a tree; raise ValueError if one is missing or has another shape."""
    if not path_leaves(params):
        return {}  # everything is masked, or optax.tree_map_params asks for the state's structure
    if labels is None:
        return label_params(params)
    labels = same_lmo(labels) if isinstance(labels, str) else labels
    labels = labels(params) if callable(labels) else labels
    for path, leaf in path_leaves(params):
        if path not in labels:
            remedy = suggest(path, labels, 0.6) or "label the tree that you train: label_params(params)"
            raise ValueError(f"{path} has no label; {remedy}")
        if labels[path].shape != tuple(leaf.shape):
            raise ValueError(
                f"{path} has shape {tuple(leaf.shape)}, and its label is for {labels[path].shape}; call label_params again"
            )
    return labels


def _momentum_dtype(p: Any, asked: str | None) -> Any:
    return wide_dtype(p.dtype) if asked is None else jnp.dtype(asked)
