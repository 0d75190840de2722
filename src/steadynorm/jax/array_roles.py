"""Deduce the role of each array of a parameter tree from its path and shape, and which layer is the output.

JAX libraries store a dense kernel d_in x d_out (flax, haiku: `kernel`, `w`) or d_out x d_in (equinox: `weight`), and a
convolution with its channels last or first.
"""

import re
from collections.abc import Iterable, Mapping
from fnmatch import fnmatchcase
from typing import Any

from steadynorm.groups.role_table import BIAS_NAME, EXPERT_NAME, HEADS, NORM_CLASS, ROLES, TABLE_NAME, check_choice
from steadynorm.suggestions import suggest

# role: (lmo of the d_out x d_in matrix, least dimensions, most dimensions)
JAX_ROLES = {role: (lmo.removesuffix("-transposed"), *sizes) for role, (lmo, *sizes) in ROLES.items()} | {
    "hidden-transposed": ("spectral", 2, 5),
    "conv-transposed": ("spectral", 3, 5),
    "output-transposed": ("sign", 2, 5),
}
INPUTS_FIRST = {"kernel": True, "w": True, "weight": False}  # flax, haiku, equinox
_OUTPUTS = (*HEADS, "head", "logits")
_CONVOLUTION = re.compile(r"conv", re.I)
_TO_HEADS = re.compile(r"^(query|key|value|[qkv]_proj)$", re.I)  # flax's attention: (d_in, heads, d_head)
_FROM_HEADS = re.compile(r"^(out|o_proj)$", re.I)  # (heads, d_head, d_out)
_INDEX = re.compile(r"_\d+$")
_TABLE = re.compile(rf"{TABLE_NAME.pattern}|(^|_)(wte|wpe)$|^((tok|token|word|char|pos|type)_)?emb$", re.I)
_PROJECTION = re.compile(r"^(patch|time|timestep|rotary)_?emb", re.I)  # linear layers that are named like tables


def find_role(
    path: str, shape: tuple[int, ...], roles: Mapping[str, str], outputs: Mapping[str, str], inputs_first: bool | None
) -> tuple[str, str, int]:
    """Return the role of an array, the reason for it, and how many of its axes are inputs that come first."""
    if (pattern := first_match(path, roles)) is not None:
        role, reason = roles[pattern], f"roles[{pattern!r}]"
        check_choice(reason, role, tuple(JAX_ROLES))
        all_but_last = role in ("conv-transposed", "output-transposed")
        return role, reason, len(shape) - 1 if all_but_last else int(role.endswith("-transposed"))
    *_, owner, name = ["", *split_path(path)]
    first = INPUTS_FIRST.get(name) if inputs_first is None or name in INPUTS_FIRST else inputs_first
    if path in outputs:
        if len(shape) <= 1:
            return "output-bias", outputs[path], 0
        transposed = first and not _TABLE.search(name)
        return ("output-transposed", outputs[path], len(shape) - 1) if transposed else ("output", outputs[path], 0)
    layers = [_INDEX.sub("", word) for word in split_path(path)[:-1] if not word.isdigit()]
    reason = f"{name} of {layers[-1]}" if layers else name
    wide = sum(size > 1 for size in shape)
    if len(shape) <= 1 or NORM_CLASS.search(_INDEX.sub("", owner)) or BIAS_NAME.search(name):
        return "vector", reason, 0
    if wide <= 1:
        return "vector", f"{reason}: only one dimension above 1", 0
    names_table = (
        name == "weight" and _TABLE.search(owner) and not _PROJECTION.search(owner)
    )  # equinox: by its field only
    if wide == 2 and (_TABLE.search(name) or names_table):
        return "embedding", f"{reason}: a table whose rows are looked up", 0
    if first is None:
        raise ValueError(
            f"{path} {shape}: its name does not say whether it is stored d_in x d_out; pass inputs_first=True (x @ w) or "
            f"False, or {suggest_role(path)}"
        )
    if (role := _matrix_role(path, owner, shape, first)) is None:
        raise ValueError(f"{path} {shape}: its role is ambiguous; {suggest_role(path)}")
    role, inputs = role
    return role, reason + _storage_note(role, shape, inputs), inputs


def _matrix_role(path: str, owner: str, shape: tuple[int, ...], first: bool) -> tuple[str, int] | None:
    """Return the role of a weight of at least two dimensions, and its input axes; None if it is ambiguous."""
    suffix, ndim = "-transposed" if first else "", len(shape)
    if ndim == 2:
        return f"hidden{suffix}", int(first)
    if ndim == 3 and EXPERT_NAME.search(".".join(split_path(path))):
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


def find_outputs(shapes: Mapping[str, tuple[int, ...]], output: Any, roles: Mapping[str, str]) -> dict[str, str]:
    """Return {path: reason} of the arrays of the output layer; raise ValueError if it is not clear which layer that is."""
    if output is False or (output is None and any(role.startswith("output") for role in roles.values())):
        return {}
    matrices = [path for path, shape in shapes.items() if len(shape) >= 2]
    if output is None:
        named = {path.rpartition("/")[0] for path in matrices if (["", *split_path(path)])[-2] in _OUTPUTS}
        if len(named) != 1:
            problem = (
                f"several layers are named like one: {', '.join(sorted(named))}"
                if named
                else "none has the name of one"
            )
            raise ValueError(
                f"label_params: cannot tell which layer is the output ({problem}); pass output=<path>, or False if there "
                f"is none. Matrices, last first: {', '.join(matrices[:-9:-1]) or 'none'}"
            )
        layer = named.pop()
        return dict.fromkeys(_below(layer, shapes), f"output layer, by the name {layer.rpartition('/')[2]}")
    outputs: dict[str, str] = {}
    for item in [output] if isinstance(output, str) else output:
        paths = _below(item, shapes)
        if not any(path in matrices for path in paths):
            problem = "is a vector; name the layer or its weight" if paths else f"is not there; {suggest(item, shapes)}"
            raise ValueError(f"label_params: output={item!r} {problem}")
        outputs |= dict.fromkeys(paths, "output layer, by output=")
    return outputs


def _below(item: str, paths: Iterable[str]) -> list[str]:
    """Return the paths that a path, the path of a layer or a glob stands for."""
    return [path for path in paths if path == item or path.startswith(f"{item}/") or fnmatchcase(path, item)]


def split_path(path: str) -> list[str]:
    """Return the parts of a path; flax's nnx puts the array of a variable under `value`."""
    words = path.split("/")
    return words[:-1] if len(words) > 1 and words[-1] == "value" else words


def first_match(path: str, patterns: Iterable[str]) -> str | None:
    """Return the first path or glob that matches a path."""
    return next((pattern for pattern in patterns if pattern == path or fnmatchcase(path, pattern)), None)


def suggest_role(path: str) -> str:
    """Return the remedy for an array without a clear role, for an error message."""
    return f'pass roles={{"{path}": <role>}}, one of {", ".join(JAX_ROLES)}'
