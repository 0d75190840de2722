"""What each array of a parameter tree is, by its path and shape: its role, its lmo, and how it is stored.

JAX libraries store a dense kernel d_in x d_out (flax, haiku: `kernel`, `w`) or d_out x d_in (equinox: `weight`), and a
convolution with its channels last or first. The lmo sees d_out x d_in, so a label says which axes are the inputs.
"""

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import jax  # pyright: ignore[reportMissingImports]

from steadynorm.groups.role_table import (
    BIAS_NAME,
    BLOCKED,
    EXPERT_NAME,
    HEADS,
    NORM_CLASS,
    ROLES,
    TABLE_NAME,
    check_choice,
    fused_blocks,
)
from steadynorm.groups.tables import fold_rows, format_table
from steadynorm.jax.oracles import find_oracle
from steadynorm.suggestions import suggest
from steadynorm.views import BlockLayout

# role: (lmo of the d_out x d_in matrix, least dimensions, most dimensions)
JAX_ROLES = {role: (lmo.removesuffix("-transposed"), *sizes) for role, (lmo, *sizes) in ROLES.items()} | {
    "hidden-transposed": ("spectral", 2, 5),
    "conv-transposed": ("spectral", 3, 5),
    "output-transposed": ("sign", 2, 5),
}
_INPUTS_FIRST = {"kernel": True, "w": True, "weight": False}  # flax, haiku, equinox
_OUTPUTS = (*HEADS, "head", "logits")
_CONVOLUTION = re.compile(r"conv", re.I)
_TO_HEADS = re.compile(r"^(query|key|value|[qkv]_proj)$", re.I)  # flax's attention: (d_in, heads, d_head)
_FROM_HEADS = re.compile(r"^(out|o_proj)$", re.I)  # (heads, d_head, d_out)
_NUMBER = re.compile(r"(?<![^/_])(\d+)(?![^/])")  # blocks/0/kernel, Block_0/kernel
_INDEX = re.compile(r"_\d+$")
_TITLES = ("parameter", "shape", "role", "lmo", "reason")


@dataclass(frozen=True)
class Label:
    """What one array is.

    Attributes:
        role: What it is in its model: hidden, output, embedding, vector, ...
        lmo: The rule from its momentum to its update.
        shape: Its shape.
        blocks: How many blocks of its outputs are matrices of their own (fused q, k, v: 3).
        inputs: How many axes are inputs, stored before the outputs; 0: it is stored as the lmo sees it, outputs first.
        stack: How many axes before those number independent matrices, as in experts.
        reason: Why, for people.
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
        """Return what `to_seen` made of an array to its own shape."""
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
    """Return what each array of a parameter tree is, by its path.

        kernel, weight -> hidden: spectral, per block where q, k, v (or gate, up) are fused, per expert where stacked
        kernel of a convolution -> conv    bias, scale -> vector: bias    table of rows -> embedding: embedding
        output weight -> output: sign

    Args:
        params: The tree: arrays, or anything with a shape.
        output: The path of the output layer or its weight, or several; False if there is none. By default the one layer
            named head, lm_head, classifier, logits, score or qa_outputs; otherwise an error asks for it.
        roles: {path or glob: role}, before any other rule: hidden, stacked, conv or output (each also with
            "-transposed": inputs stored first), vector, embedding, output-bias.
        lmos: {path or glob: lmo}, in place of the role's: spectral, sign, bias, embedding, row, column or conv.
        blocks: {path or glob: number of equal blocks of the outputs}, instead of what names and shapes imply.
        inputs: {path or glob: number of input axes} for kernels of more than two axes, stored inputs first.
        inputs_first: How matrices are stored whose names do not say it; `kernel` and `w` are d_in x d_out, `weight` is
            d_out x d_in.

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
    outputs = _find_outputs(shapes, output, patterns["roles"])
    labels = {}
    for path, shape in shapes.items():
        role, reason, count = _role_of(path, shape, patterns["roles"], outputs, inputs_first)
        if (pattern := _first_match(path, patterns["inputs"])) is not None:
            count = _checked_inputs(path, shape, role, patterns["inputs"][pattern])
        label = _label(path, shape, role, reason, count)
        if (pattern := _first_match(path, patterns["lmos"])) is not None:
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
    """Return the leaves of a tree with their paths, as in "Block_0/Dense_1/kernel"."""
    pairs = jax.tree_util.tree_flatten_with_path(tree)[0]
    return [(jax.tree_util.keystr(path, simple=True, separator="/"), leaf) for path, leaf in pairs]


def same_lmo(lmo: str) -> Callable[[Any], Labels]:
    """Return labels of any tree whose arrays all have this lmo and are stored as it sees them."""

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
        raise ValueError(f"{path} {shape}: {role!r} ({reason}) takes {least} to {most} dimensions; {_remedy(path)}")
    stack = len(shape) - 2 if role.startswith("stacked") else 0
    return Label(role, lmo, shape, inputs=inputs, stack=stack, reason=reason)


def _role_of(
    path: str, shape: tuple[int, ...], roles: Mapping[str, str], outputs: Mapping[str, str], inputs_first: bool | None
) -> tuple[str, str, int]:
    """Return the role of an array, the reason for it, and how many of its axes are inputs that come first."""
    if (pattern := _first_match(path, roles)) is not None:
        role, reason = roles[pattern], f"roles[{pattern!r}]"
        check_choice(reason, role, tuple(JAX_ROLES))
        all_but_last = role in ("conv-transposed", "output-transposed")
        return role, reason, len(shape) - 1 if all_but_last else int(role.endswith("-transposed"))
    *_, owner, name = ["", *_words(path)]
    first = _INPUTS_FIRST.get(name) if inputs_first is None or name in _INPUTS_FIRST else inputs_first
    if path in outputs:
        if len(shape) <= 1:
            return "output-bias", outputs[path], 0
        transposed = first and not TABLE_NAME.search(name)
        return ("output-transposed", outputs[path], len(shape) - 1) if transposed else ("output", outputs[path], 0)
    holders = [_INDEX.sub("", word) for word in _words(path)[:-1] if not word.isdigit()]  # the number is in the path
    reason = f"{name} of {holders[-1]}" if holders else name
    wide = sum(size > 1 for size in shape)
    if len(shape) <= 1 or NORM_CLASS.search(_INDEX.sub("", owner)) or BIAS_NAME.search(name):
        return "vector", reason, 0
    if wide <= 1:
        return "vector", f"{reason}: only one dimension above 1", 0
    if wide == 2 and (TABLE_NAME.search(name) or (name == "weight" and TABLE_NAME.search(owner))):
        return "embedding", f"{reason}: a table whose rows are looked up", 0
    if first is None:
        raise ValueError(
            f"{path} {shape}: its name does not say whether it is stored d_in x d_out; pass inputs_first=True (x @ w) or "
            f"False, or {_remedy(path)}"
        )
    if (role := _matrix_role(path, owner, shape, first)) is None:
        raise ValueError(f"{path} {shape}: its role is ambiguous; {_remedy(path)}")
    role, inputs = role
    return role, reason + _storage_note(role, shape, inputs), inputs


def _matrix_role(path: str, owner: str, shape: tuple[int, ...], first: bool) -> tuple[str, int] | None:
    """Return the role of a weight of at least two dimensions, and its input axes; None if it is ambiguous."""
    suffix, ndim = "-transposed" if first else "", len(shape)
    if ndim == 2:
        return f"hidden{suffix}", int(first)
    if ndim == 3 and EXPERT_NAME.search(".".join(_words(path))):
        return f"stacked{suffix}", int(first)
    if first and (_TO_HEADS.search(owner) or _FROM_HEADS.search(owner)):
        return ("hidden-transposed", 1 if _TO_HEADS.search(owner) else 2) if ndim == 3 else None
    if ndim >= 4 or _CONVOLUTION.search(owner):
        return f"conv{suffix}", ndim - 1 if first else 0
    return None


def _storage_note(role: str, shape: tuple[int, ...], inputs: int) -> str:
    if not inputs:
        return ""
    if role == "hidden-transposed" and len(shape) > 2:
        return f": heads apart, {inputs} of {len(shape)} axes are inputs"
    return ": stored taps x d_in x d_out" if role == "conv-transposed" else ": stored d_in x d_out"


def _checked_inputs(path: str, shape: tuple[int, ...], role: str, count: Any) -> int:
    if not role.endswith("-transposed") or type(count) is not int or not 0 < count < len(shape):
        raise ValueError(
            f"inputs: {path} {shape} with role {role!r} cannot have {count!r} input axes; pass 1 to {len(shape) - 1} for a "
            "weight stored inputs first"
        )
    return count


def _with_blocks(path: str, label: Label, blocks: Mapping[str, int]) -> Label:
    """Return the label with the blocks that the caller, or names and shapes, say."""
    if (pattern := _first_match(path, blocks)) is not None:
        if type(BlockLayout.of(blocks[pattern], f"blocks[{pattern!r}]").plain) is not int:
            raise ValueError(
                f"blocks[{pattern!r}]={blocks[pattern]!r}: blocks of different sizes are not supported here; leave 1, or make "
                "each block its own array"
            )
        return replace(label, blocks=blocks[pattern], reason=f"{label.reason}; blocks[{pattern!r}]")
    if label.lmo not in BLOCKED or not label.role.startswith(("hidden", "stacked")) or len(label.seen_shape) < 2:
        return label
    side = "column" if label.inputs else "row"
    dotted = ".".join(word if word not in _INPUTS_FIRST else "weight" for word in _words(path))
    d_out, d_in = label.seen_shape[-2:]
    count, note = fused_blocks(dotted, d_out, d_in, side)
    return replace(label, blocks=count, reason=label.reason + note)


def _find_outputs(shapes: Mapping[str, tuple[int, ...]], output: Any, roles: Mapping[str, str]) -> dict[str, str]:
    """Return {path: how it was found} of the arrays of the output layer."""
    if output is False or (output is None and any(role.startswith("output") for role in roles.values())):
        return {}
    matrices = [path for path, shape in shapes.items() if len(shape) >= 2]
    if output is None:
        named = {path.rpartition("/")[0] for path in matrices if (["", *_words(path)])[-2] in _OUTPUTS}
        if len(named) != 1:
            problem = f"several layers are named like one: {', '.join(sorted(named))}" if named else "no name says it"
            raise ValueError(
                f"label_params: cannot tell which layer is the output ({problem}); pass output=<path>, or False if there "
                f"is none. Matrices, last first: {', '.join(matrices[:-9:-1]) or 'none'}"
            )
        output, source = named.pop(), "the name "
        return {path: f"output layer, by {source}{output.rpartition('/')[2]}" for path in _below(output, shapes)}
    outputs: dict[str, str] = {}
    for item in [output] if isinstance(output, str) else output:
        paths = _below(item, shapes)
        if not any(path in matrices for path in paths):
            problem = "is a vector; name the layer or its weight" if paths else f"is not there; {suggest(item, shapes)}"
            raise ValueError(f"label_params: output={item!r} {problem}")
        outputs |= dict.fromkeys(paths, "output layer, by output=")
    return outputs


def _below(item: str, paths: Iterable[str]) -> list[str]:
    return [path for path in paths if path == item or path.startswith(f"{item}/") or fnmatchcase(path, item)]


def _words(path: str) -> list[str]:
    """Return the parts of a path; flax's nnx puts the array of a variable under `value`."""
    words = path.split("/")
    return words[:-1] if len(words) > 1 and words[-1] == "value" else words


def _first_match(path: str, patterns: Iterable[str]) -> str | None:
    return next((pattern for pattern in patterns if pattern == path or fnmatchcase(path, pattern)), None)


def _check_patterns(option: str, patterns: Any, paths: Iterable[str]) -> None:
    if not isinstance(patterns, Mapping):
        raise TypeError(f"{option}={patterns!r}: pass a dict from paths or globs to values")
    for pattern in patterns:
        if not any(_first_match(path, [pattern]) for path in paths):
            raise ValueError(f"{option}[{pattern!r}] matches no array; {suggest(pattern, paths)}")


def _remedy(path: str) -> str:
    return f'pass roles={{"{path}": <role>}}, one of {", ".join(JAX_ROLES)}'
