"""Labels say what each array of a parameter tree is: its role, its lmo, and how it is stored.

The lmo sees d_out x d_in, and many JAX libraries store d_in x d_out, so a label says which axes are the inputs.
"""

import math
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import jax  # pyright: ignore[reportMissingImports]

from steadynorm.groups.role_table import BLOCKED, fused_blocks
from steadynorm.groups.tables import fold_rows, format_table
from steadynorm.jax.array_roles import (
    INPUTS_FIRST,
    JAX_ROLES,
    find_outputs,
    find_role,
    first_match,
    split_path,
    suggest_role,
)
from steadynorm.jax.oracles import find_oracle
from steadynorm.suggestions import suggest
from steadynorm.views import BlockLayout

_NUMBER = re.compile(r"(?<![^/_])(\d+)(?![^/])")  # blocks/0/kernel, Block_0/kernel
_TITLES = ("parameter", "shape", "role", "lmo", "reason")


@dataclass(frozen=True)
class Label:
    """What one array is, and how the lmo sees it.

    Attributes:
        role: What it is in its model: hidden, output, embedding, vector, ...
        lmo: The rule from its momentum to its update.
        shape: Its shape.
        blocks: How many blocks of its outputs are matrices of their own (fused q, k, v: 3).
        inputs: How many axes are inputs that are stored before the outputs; 0 if it is stored outputs first, as the lmo
            sees it.
        stack: How many leading axes index independent matrices, as in experts.
        reason: Why it has this role, in words that `explain` prints.
    """

    role: str
    lmo: str
    shape: tuple[int, ...]
    blocks: int = 1
    inputs: int = 0
    stack: int = 0
    reason: str = ""

    @property
    def is_output(self) -> bool:
        return self.role in ("output", "output-transposed")

    @property
    def seen_shape(self) -> tuple[int, ...]:
        """The shape that the lmo sees."""
        if not self.inputs:
            return self.shape
        lead, first = self.shape[: self.stack], self.stack + self.inputs
        return *lead, math.prod(self.shape[first:]), math.prod(self.shape[self.stack : first])

    def to_seen(self, x: Any) -> Any:
        """Return the array as the lmo sees it."""
        if not self.inputs:
            return x
        *lead, d_out, d_in = self.seen_shape
        return x.reshape(*lead, d_in, d_out).mT

    def from_seen(self, x: Any) -> Any:
        """Return an array to its own shape; the inverse of `to_seen`."""
        return x.mT.reshape(self.shape) if self.inputs else x


Labels: TypeAlias = dict[str, Label]  # by path
Patterns: TypeAlias = Mapping[str, Any] | None  # {path or glob: value}


def label_params(
    params: Any,
    *,
    output: str | Sequence[str] | bool | None = None,
    roles: Patterns = None,
    lmos: Patterns = None,
    blocks: Patterns = None,
    inputs: Patterns = None,
    inputs_first: bool | None = None,
) -> Labels:
    """Return the label of each array of a parameter tree, by its path.

        kernel, weight -> hidden: spectral, per block where q, k, v (or gate, up) are fused, per expert where stacked
        kernel of a convolution -> conv    bias, scale -> vector: bias    table of rows -> embedding: embedding
        output weight -> output: sign

    Args:
        params: The tree: arrays, or anything with a shape.
        output: The path of the output layer or its weight, or several; False if there is none. By default the one layer
            named head, lm_head, classifier, logits, score or qa_outputs; otherwise an error asks for it.
        roles: {path or glob: role}, which overrides every other rule: hidden, stacked, conv or output (each also with
            "-transposed": inputs stored first), vector, embedding, output-bias.
        lmos: {path or glob: lmo}, in place of the role's: spectral, sign, bias, embedding, row, column or conv.
        blocks: {path or glob: number of equal blocks of the outputs}, instead of what names and shapes imply.
        inputs: {path or glob: number of input axes} for kernels of more than two axes, stored inputs first.
        inputs_first: Whether matrices with other names than `kernel`, `w` (d_in x d_out) and `weight` (d_out x d_in) are
            stored d_in x d_out.

    Returns:
        {path: Label}, in the order of the tree.

    Raises:
        ValueError: If an array or the output layer has no clear role; the error names the remedy.

    Examples:
        >>> import numpy as np
        >>> params = {"Dense_0": {"kernel": np.ones((4, 8)), "bias": np.ones(8)}, "head": {"kernel": np.ones((8, 2))}}
        >>> print(explain(label_params(params)))
        parameter       shape  role               lmo       reason
        Dense_0/bias    8      vector             bias      bias of Dense
        Dense_0/kernel  4x8    hidden-transposed  spectral  kernel of Dense: stored d_in x d_out
        head/kernel     8x2    output-transposed  sign      output layer, by the name head
    """
    shapes = {path: tuple(leaf.shape) for path, leaf in path_leaves(params)}
    if not shapes:
        raise ValueError("label_params: the tree holds no array")
    patterns = {"roles": roles or {}, "lmos": lmos or {}, "blocks": blocks or {}, "inputs": inputs or {}}
    for option, values in patterns.items():
        _check_patterns(option, values, shapes)
    outputs = find_outputs(shapes, output, patterns["roles"])
    labels = {}
    for path, shape in shapes.items():
        role, reason, count = find_role(path, shape, patterns["roles"], outputs, inputs_first)
        if (pattern := first_match(path, patterns["inputs"])) is not None:
            count = _checked_inputs(path, shape, role, patterns["inputs"][pattern])
        label = _label(path, shape, role, reason, count)
        if (pattern := first_match(path, patterns["lmos"])) is not None:
            label = replace(label, lmo=patterns["lmos"][pattern], reason=f"{label.reason}; lmos[{pattern!r}]")
        labels[path] = _with_blocks(path, label, patterns["blocks"])
        find_oracle(label.lmo, label.seen_shape).check(label.seen_shape, labels[path].blocks)
    return labels


def explain(labels: Labels, *, full: bool = False) -> str:
    """Return a plain-text table: which array got which rule, and why.

    Arrays that differ only by the numbers in their paths share a line: `Block_{0..11}/qkv/kernel`.

    Args:
        labels: What `label_params` returned.
        full: Print one line per array.
    """
    rows = [
        (path, "x".join(map(str, label.shape)) or "scalar", label.role, label.lmo, label.reason)
        for path, label in labels.items()
    ]
    return format_table([_TITLES, *(rows if full else fold_rows(rows, _NUMBER))])


def path_leaves(tree: Any) -> list[tuple[str, Any]]:
    """Return the leaves of a tree with their paths, as in "Block_0/Dense_1/kernel".

    A variable of flax's nnx is a node whose array is its `value`, but `nnx.Optimizer` passes on the arrays without it. Paths
    leave it out, so that labels of `nnx.state(model, nnx.Param)` fit both.
    """
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    value = jax.tree_util.GetAttrKey("value")
    leaves_below = Counter(path[:depth] for path, _ in pairs for depth in range(1, len(path)))
    paths = [path[:-1] if path[-1:] == (value,) and leaves_below[path[:-1]] == 1 else path for path, _ in pairs]
    names = (jax.tree_util.keystr(path, simple=True, separator="/") for path in paths)
    return [(name, leaf) for name, (_, leaf) in zip(names, pairs, strict=True)]


def same_lmo(lmo: str) -> Callable[[Any], Labels]:
    """Return a function that labels any tree with one lmo, for arrays that are stored d_out x d_in."""

    def label(params: Any) -> Labels:
        labels = {}
        for path, leaf in path_leaves(params):
            shape = tuple(leaf.shape)
            row = find_oracle(lmo, shape)
            row.check(shape)
            stack = len(shape) - 2 if row.view.is_stack(shape) else 0
            labels[path] = Label(row.name, row.name, shape, stack=stack, reason=f"labels={lmo!r}")
        return labels

    return label


def _label(path: str, shape: tuple[int, ...], role: str, reason: str, inputs: int) -> Label:
    """Return the label of a role; raise ValueError if the role does not fit the shape."""
    lmo, least, most = JAX_ROLES[role]
    if not least <= len(shape) <= most:
        raise ValueError(
            f"{path} {shape}: {role!r} ({reason}) takes {least} to {most} dimensions; {suggest_role(path)}"
        )
    stack = len(shape) - 2 if role.startswith("stacked") else 0
    return Label(role, lmo, shape, inputs=inputs, stack=stack, reason=reason)


def _checked_inputs(path: str, shape: tuple[int, ...], role: str, count: Any) -> int:
    if not role.endswith("-transposed") or type(count) is not int or not 0 < count < len(shape):
        raise ValueError(
            f"inputs: {path} {shape} with role {role!r} cannot have {count!r} input axes; pass 1 to {len(shape) - 1} for a "
            "weight stored inputs first"
        )
    return count


def _with_blocks(path: str, label: Label, blocks: Mapping[str, int]) -> Label:
    """Return the label with its number of blocks: the caller's, or what names and shapes imply."""
    if (pattern := first_match(path, blocks)) is not None:
        if type(BlockLayout.of(blocks[pattern], f"blocks[{pattern!r}]").plain) is not int:
            raise ValueError(
                f"blocks[{pattern!r}]={blocks[pattern]!r}: blocks of different sizes are not supported here; leave 1, or make "
                "each block its own array"
            )
        return replace(label, blocks=blocks[pattern], reason=f"{label.reason}; blocks[{pattern!r}]")
    if label.lmo not in BLOCKED or not label.role.startswith(("hidden", "stacked")) or len(label.seen_shape) < 2:
        return label
    side = "column" if label.inputs else "row"
    dotted = ".".join(word if word not in INPUTS_FIRST else "weight" for word in split_path(path))
    d_out, d_in = label.seen_shape[-2:]
    count, note = fused_blocks(dotted, d_out, d_in, side)
    return replace(label, blocks=count, reason=label.reason + note)


def _check_patterns(option: str, patterns: Any, paths: Iterable[str]) -> None:
    if not isinstance(patterns, Mapping):
        raise TypeError(f"{option}={patterns!r}: pass a dict from paths or globs to values")
    for pattern in patterns:
        if not any(first_match(path, [pattern]) for path in paths):
            raise ValueError(f"{option}[{pattern!r}] matches no array; {suggest(pattern, paths)}")
