"""A model's modules become roles, and roles become parameter groups: each with its lmo, lr and decay rule.

module, name, shape -> role -> group. Every trainable parameter is in exactly one group, or an error names it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

Output = nn.Module | nn.Parameter | str  # one layer: itself, its weight, or the dotted name of either
Rules = dict[str, dict[str, Any]]  # role -> the values of its group

# role: (lmo, least dimensions, most dimensions)
ROLES = {
    "hidden": ("spectral", 2, 2),
    "stacked": ("spectral", 3, 5),
    "conv": ("conv", 3, 5),
    "vector": ("bias", 0, math.inf),
    "embedding": ("embedding", 2, 5),
    "output": ("sign", 2, 2),
    "output-bias": ("bias", 0, 1),
}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
_NORM_CLASS = re.compile(r"norm(\d?d)?$", re.I)
_TABLE_NAME = re.compile(r"(^|[._])(pos|position\w*|tokens?|embed|embeddings?)(_\w*|\d*)(\.\d+)?$", re.I)
_BIAS_NAME = re.compile(r"bias\w*(\.\d+)?$", re.I)
_EXPERT_NAME = re.compile(r"expert|gate_up|(gate|up|down)_proj|(^|[._])(moe|w[123])([._]|$)", re.I)
_FUSED_NAME = re.compile(r"(qkv|c_attn|in_proj|query_key_value)[^.]*(\.weight)?$", re.I)


class ParamGroups(list[dict[str, Any]]):
    """Groups as any optimizer takes them; per parameter also the reason (`why`) and its other names (`ties`)."""

    why: dict[str, str]
    ties: dict[str, tuple[str, ...]]


@dataclass(frozen=True)
class _Placed:
    """One parameter and every place in the model that holds it."""

    parameter: nn.Parameter
    names: tuple[str, ...]  # the first is the one used, the others are ties
    owners: tuple[nn.Module, ...]  # one per name

    @property
    def name(self) -> str:
        return self.names[0]

    def held_by(self, *kinds: type[nn.Module]) -> bool:
        return any(isinstance(owner, kinds) for owner in self.owners)

    def first_match(self, patterns: Iterable[str]) -> str | None:
        return next((p for p in patterns if any(name == p or fnmatchcase(name, p) for name in self.names)), None)


def param_groups(
    model: nn.Module,
    *,
    kind: str = "scion",
    lr: float | None = None,
    output_lr: float | None = None,
    output_weight_decay: float | None = None,
    output: Output | Sequence[Output] | bool | None = None,
    output_bias: str = "corrected",
    blocks: Mapping[str, int] | None = None,
    roles: Mapping[str, str] | None = None,
    alpha: float = 0.1,
    steady_norm_sq: float = 1.1875,
    weight_decay: float | None = None,
) -> ParamGroups:
    """Every trainable parameter in exactly one group, by its role in the model; `explain` shows which and why.

        hidden matrix -> spectral, per block where q, k, v are fused    convolution -> conv    vector -> bias
        output weight, tied or not -> sign with constant decay          embedding not tied -> embedding
        output_lr = 20 lr,  output_weight_decay = eta_0 / output_lr,  eta_0 = lr lambda_0

    lambda_0 is the corrected decay at the start (no Nesterov). `weight_decay` None in a group means corrected. With
    `kind="adam"`: one lr, decay on matrices only; `corrected` is False in the output weight's group. Frozen
    parameters are left out: hand them to `add_param_group` when you unfreeze them.

    Args:
        model: the module whose parameters are grouped; a tied parameter is listed once, under its first name.
        kind: "scion" or "adam".
        lr: of every group but the output's; by default 1e-2 ("adam": 1e-3).
        output_lr: by default 20 lr ("adam": lr).
        output_weight_decay: by default as above ("adam": weight_decay).
        output: the output layer, or several; False if there is none. By default it is found by
            `get_output_embeddings()`, `get_classifier()` or a weight tied to an embedding; else an error asks.
        output_bias: "corrected" like other vectors, or "constant" with the decay lambda_0.
        blocks: {parameter name or glob: number of row blocks}, instead of what names and shapes tell.
        roles: {parameter name or glob: role}, before any other rule: hidden, stacked (matrices), conv, vector,
            embedding or output.
        alpha, steady_norm_sq: as in ScionC; not used by "adam".
        weight_decay: "scion": constant decay in place of the corrected one; "adam": 0.1 by default.

    Returns:
        A list of groups for one optimizer: named parameters and plain values.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [(group["name"], group["lmo"], group["lr"]) for group in param_groups(model, output="2")]
    [('hidden', 'spectral', 0.01), ('vector', 'bias', 0.01), ('output', 'sign', 0.2), ('output-bias', 'bias', 0.01)]
    """
    _check_choice("kind", kind, ("scion", "adam"))
    _check_choice("output_bias", output_bias, ("corrected", "constant"))
    scion, roles, blocks = kind == "scion", roles or {}, blocks or {}
    lr = _checked("lr", (1e-2 if scion else 1e-3) if lr is None else lr)
    output_lr = _checked("output_lr", (20 * lr if scion else lr) if output_lr is None else output_lr)
    decay = None if weight_decay is None else _checked("weight_decay", weight_decay)
    if scion:
        rules = _scion_rules(lr, output_lr, float(alpha), float(steady_norm_sq), decay, output_bias == "constant")
    else:
        rules = _adam_rules(lr, output_lr, 0.1 if decay is None else decay)
    if output_weight_decay is not None:
        rules["output"]["weight_decay"] = _checked("output_weight_decay", output_weight_decay)

    everything = _places(model)
    trainable = [placed for placed in everything if placed.parameter.requires_grad]
    if not trainable:
        raise ValueError(f"{type(model).__name__} has no trainable parameter: nothing to group")
    for placed in trainable:
        _check_supported(placed)
    _check_patterns("roles", roles, trainable, "trainable parameter")
    outputs = _find_outputs(model, everything, output, roles)
    found = [(placed, *_role(placed, roles, outputs, strict=scion)) for placed in trainable]
    matrices = [placed for placed, role, _ in found if scion and ROLES[role][0] == "spectral"]
    _check_patterns("blocks", blocks, matrices, "matrix with the spectral lmo")
    return _gather(found, rules, {placed.name: _row_blocks(placed, blocks) for placed in matrices})


def _gather(found: list[tuple[_Placed, str, str]], rules: Rules, blocks: dict[str, tuple[int, str]]) -> ParamGroups:
    """Parameters under the same rule in one group; groups and parameters in the order of the model."""
    by_name: Rules = {}
    why: dict[str, str] = {}
    for placed, role, reason in found:
        count, note = blocks.get(placed.name, (1, ""))
        rule = rules[role] if count == 1 else {**rules[role], "name": f"{role}-blocks{count}", "blocks": count}
        by_name.setdefault(rule["name"], {**rule, "params": []})["params"].append((placed.name, placed.parameter))
        why[placed.name] = reason + note
    groups = ParamGroups(by_name.values())
    groups.why, groups.ties = why, {placed.name: placed.names[1:] for placed, _, _ in found}
    return groups


def _scion_rules(lr: float, output_lr: float, alpha: float, norm_sq: float, decay: float | None, bias: bool) -> Rules:
    """eta = lr lambda starts the same in every group; bias: whether the output's bias has constant decay."""
    from steadynorm.theory import weight_decay_for

    corrected = weight_decay_for(norm_sq, lr, alpha)  # checks its arguments, so called also where decay is given
    decay_0 = corrected if decay is None else decay
    rule = {"lr": lr, "alpha": alpha, "blocks": 1, "weight_decay": decay}
    target = {"steady_norm_sq": norm_sq} if decay is None else {}
    rules = {role: {"name": role, "lmo": lmo, **rule, **target} for role, (lmo, _, _) in ROLES.items()}
    output_decay = lr * decay_0 / output_lr if output_lr > 0 else 0.0
    rules["output"] = {"name": "output", "lmo": "sign", **rule, "lr": output_lr, "weight_decay": output_decay}
    if bias:
        rules["output-bias"] = {"name": "output-bias", "lmo": "bias", **rule, "weight_decay": decay_0}
    return rules


def _adam_rules(lr: float, output_lr: float, decay: float) -> Rules:
    """`corrected` False tells AdamC to keep the decay constant."""
    matrix = {"name": "matrix", "lr": lr, "weight_decay": decay, "corrected": True}
    vector = {"name": "vector", "lr": lr, "weight_decay": 0.0, "corrected": True}
    output = {"name": "output", "lr": output_lr, "weight_decay": decay, "corrected": False}
    return dict.fromkeys(ROLES, matrix) | {"vector": vector, "output-bias": vector, "output": output}


def _places(model: nn.Module) -> list[_Placed]:
    """Every parameter once, in model order, with all its names and owners."""
    held: dict[nn.Parameter, list[tuple[str, nn.Module]]] = {}  # tensors hash by identity
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(prefix, recurse=False, remove_duplicate=False):
            held.setdefault(parameter, []).append((name, module))
    return [_Placed(parameter, *zip(*places, strict=True)) for parameter, places in held.items()]


def _role(placed: _Placed, roles: Mapping[str, str], outputs: dict[int, str], *, strict: bool) -> tuple[str, str]:
    """Role and reason: by the caller's word, the output layer, the module's type, or name and shape."""
    shape = tuple(placed.parameter.shape)
    role, reason = "", f"{len(shape)} dimensions"
    if (pattern := placed.first_match(roles)) is not None:
        role, reason = roles[pattern], f"roles[{pattern!r}]"
        _check_choice(reason, role, tuple(ROLES))
    elif id(placed.parameter) in outputs:
        role, reason = "output", outputs[id(placed.parameter)]
    elif known := _role_by_module(placed) or _role_by_name(placed):
        role, reason = known
    if role == "output" and len(shape) <= 1:
        role = "output-bias"
    if not strict:  # Adam needs no more than matrix or vector
        return role or "hidden", reason
    _, least, most = ROLES.get(role, ("", 0, math.inf))
    if role and least <= len(shape) <= most:
        return role, reason
    problem = f"{role!r} ({reason}) takes {least} to {most} dimensions" if role else "its role is ambiguous"
    remedy = f'pass roles={{"{placed.name}": <role>}}, one of {", ".join(ROLES)}'
    raise ValueError(f"{placed.name} {shape} in {type(placed.owners[0]).__name__}: {problem}; {remedy}")


def _role_by_module(placed: _Placed) -> tuple[str, str] | None:
    owner = type(placed.owners[0]).__name__
    reason = f"{placed.name.rsplit('.', 1)[-1]} of {owner}"
    if placed.parameter.ndim <= 1 or _NORM_CLASS.search(owner):
        return "vector", reason
    if placed.held_by(*_CONVOLUTIONS):
        return "conv", reason
    if placed.held_by(*_TRANSPOSED):
        return "conv", f"{reason}: input channels come first, so it is flattened to d_in x rest"
    if placed.held_by(*_EMBEDDINGS):
        return "embedding", f"{reason}: one-hot input"
    if owner == "Conv1D":  # Hugging Face GPT-2
        return "hidden", f"{reason}: stored d_in x d_out, so its update is d_in/d_out times a Linear's"
    return ("hidden", reason) if placed.held_by(nn.Linear) else None


def _role_by_name(placed: _Placed) -> tuple[str, str] | None:
    """For a bare nn.Parameter of at least two dimensions."""
    wide = sum(size > 1 for size in placed.parameter.shape)
    if wide <= 1:
        return "vector", "only one dimension above 1"
    if wide == 2 and _TABLE_NAME.search(placed.name):
        return "embedding", "bare parameter named like a table whose rows are looked up"
    if _BIAS_NAME.search(placed.name):
        return "vector", "bare parameter named like a bias"
    if placed.parameter.ndim == 2:
        return "hidden", "bare two-dimensional parameter"
    if placed.parameter.ndim == 3 and _EXPERT_NAME.search(placed.name):
        return "stacked", "bare parameter named like experts, one matrix each"
    return None


def _row_blocks(placed: _Placed, blocks: Mapping[str, int]) -> tuple[int, str]:
    """How many row blocks are matrices of their own, and a note for the reason."""
    rows, columns = placed.parameter.shape[-2:]
    if (pattern := placed.first_match(blocks)) is not None:
        count = blocks[pattern]
        if type(count) is not int or count < 1 or rows % count:
            raise ValueError(f"blocks[{pattern!r}]={count!r} does not divide the {rows} rows of {placed.name}")
        return count, f"; blocks[{pattern!r}]"
    fused = _FUSED_NAME.search(placed.name)
    if fused is None:
        return 1, ""
    if type(placed.owners[0]).__name__ == "Conv1D":
        return 1, "; q, k, v are columns here: one matrix"
    if rows != 3 * columns:
        return 1, f"; fused, but {rows} rows are not 3 x {columns}: one matrix unless blocks= says more"
    if fused[1].lower() == "query_key_value":  # GPT-NeoX, BLOOM, Falcon: the rows go head by head
        return 1, "; fused, but by this name usually head by head: one matrix unless blocks= says more"
    return 3, "; fused q, k, v: 3 row blocks"


def _find_outputs(model: nn.Module, everything: list[_Placed], output: Any, roles: Mapping[str, str]) -> dict[int, str]:
    """id of each parameter of the output layer -> how it was found."""
    if output is False or (output is None and "output" in roles.values()):
        return {}
    given, source = _known_output(model, everything) if output is None else (output, "output=")
    several = given if isinstance(given, list | tuple) else [given]
    weights = {id(_output_weight(item, source, model, everything)) for item in several}
    layers = {owner for placed in everything if id(placed.parameter) in weights for owner in placed.owners}
    biases = {id(getattr(layer, "bias", None)) for layer in layers}
    return dict.fromkeys(weights | biases, f"output layer, by {source}")


def _known_output(model: nn.Module, everything: list[_Placed]) -> tuple[list[Any], str]:
    for method in ("get_output_embeddings", "get_classifier"):
        for holder in (model, getattr(model, "module", None)):  # .module: inside DistributedDataParallel
            layers = getattr(holder, method)() if hasattr(holder, method) else None
            layers = layers if isinstance(layers, list | tuple) else [layers]
            if layers := [layer for layer in layers if isinstance(layer, nn.Module) and list(layer.parameters())]:
                return layers, f"{method}()"
    tied = [placed.parameter for placed in everything if placed.held_by(nn.Embedding) and placed.held_by(nn.Linear)]
    if tied:
        return tied, "a weight tied to an embedding"
    linear = [name or "(the model)" for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    raise ValueError(
        f"{type(model).__name__}: cannot tell which layer is the output; pass output=<name>, or False if none is. "
        f"Linear layers, last first: {', '.join(linear[:-9:-1]) or 'none'}"
    )


def _output_weight(item: Any, source: str, model: nn.Module, everything: list[_Placed]) -> nn.Parameter:
    """The parameter meant by a parameter, a module that has one matrix, or the name of either."""
    where = f"{source}{item!r}" if isinstance(item, str) else f"{source}<{type(item).__name__}>"
    if isinstance(item, str):
        named = {name: placed.parameter for placed in everything for name in placed.names}
        item = {**named, **dict(model.named_modules(remove_duplicate=False))}.get(item)
    if isinstance(item, nn.Module):
        matrices = {name: parameter for name, parameter in item.named_parameters() if parameter.ndim >= 2}
        if len(matrices) != 1:
            raise ValueError(f"{where} should hold one matrix, not {len(matrices)}; name one of {', '.join(matrices)}")
        (item,) = matrices.values()
    if not any(item is placed.parameter for placed in everything):
        raise ValueError(f"{where} is not in {type(model).__name__}; pass a module or parameter of it, or its name")
    if item.ndim < 2:
        raise ValueError(f"{where} is a vector; name the output layer's weight, its bias follows")
    return item


def explain(groups: Iterable[Mapping[str, Any]]) -> str:
    """A plain-text table: which parameter got which rule, and why.

    Decay reads "corrected, C^2 = ..." (computed anew from lr, alpha and C^2 at every step), "corrected, ... at peak lr"
    (Adam), "constant ..." or "none".

    Args:
        groups: what `param_groups` returned; or `optimizer.param_groups`, which has no reasons to show.

    Returns:
        A line of titles, then a line for each parameter.

    >>> model = nn.Linear(4, 2, bias=False)
    >>> print(explain(param_groups(model, output=model)))
    parameter  shape  role    lmo   lr   decay           reason
    weight     2x4    output  sign  0.2  constant 0.004  output layer, by output=
    """
    why, ties = getattr(groups, "why", None), getattr(groups, "ties", {})
    table = [["parameter", "shape", "role", "lmo", "lr", "decay", "reason"]]
    for index, group in enumerate(groups):
        role, lmo = str(group.get("name", f"group {index}")), str(group.get("lmo", "-"))
        lr = f"{float(group['lr']):g}" if "lr" in group else "-"
        for name, parameter in _named(index, group):
            shown = f"{name} (also {', '.join(ties[name])})" if ties.get(name) else name
            shape = "x".join(map(str, parameter.shape)) or "scalar"
            table.append([shown, shape, role, lmo, lr, _decay_text(group), (why or {}).get(name, "given by hand")])
    rows = table if why is not None else [row[:-1] for row in table]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)


def _named(index: int, group: Mapping[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Name and tensor: pairs before an optimizer takes the group, `param_names` after."""
    params = [group["params"]] if isinstance(group["params"], torch.Tensor) else list(group["params"])
    names = group.get("param_names") or [f"group {index}, parameter {i}" for i in range(len(params))]
    for name, entry in zip(names, params, strict=True):
        yield entry if isinstance(entry, tuple) else (name, entry)


def _decay_text(group: Mapping[str, Any]) -> str:
    decay = group.get("weight_decay")
    if decay is None:
        return f"corrected, C^2 = {group['steady_norm_sq']:g}" if "steady_norm_sq" in group else "the optimizer's"
    if decay == 0:
        return "none"
    return f"corrected, {decay:g} at peak lr" if group.get("corrected") else f"constant {decay:g}"


def from_radius(lr: float, radius: float) -> dict[str, float]:
    """The original Scion's (gamma, rho) as lr and weight decay: the weights move the same way.

        (1 - gamma) theta - gamma rho u  =  (1 - lr weight_decay) theta - lr u

    Args:
        lr: the original gamma, which is also eta.
        radius: rho, the radius of the norm ball. (Unconstrained Scion has no decay: take the lr alone.)

    Returns:
        {"lr": gamma rho, "weight_decay": 1 / rho}

    >>> from_radius(2**-12, 50)
    {'lr': 0.01220703125, 'weight_decay': 0.02}
    """
    lr, radius = _checked("lr", lr), _checked("radius", radius)
    if radius == 0:
        raise ValueError("radius=0 leaves no weights; pass a positive radius")
    return {"lr": lr * radius, "weight_decay": 1 / radius}


def _checked(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value} must be finite and not negative")
    return float(value)


def _check_choice(name: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(choices)}")


def _check_patterns(option: str, patterns: Mapping[str, Any], candidates: list[_Placed], what: str) -> None:
    if not isinstance(patterns, Mapping):
        raise TypeError(f"{option}={patterns!r}: pass a dict from parameter names or globs")
    for pattern in patterns:
        if not any(placed.first_match([pattern]) for placed in candidates):
            raise ValueError(f"{option}[{pattern!r}] matches no {what}; use a name from model.named_parameters()")


def _check_supported(placed: _Placed) -> None:
    parameter = placed.parameter
    if is_lazy(parameter):
        raise ValueError(f"{placed.name} has no shape yet; run the model once before grouping")
    if parameter.is_complex():
        raise ValueError(f"{placed.name} is complex; hold real and imaginary part as two parameters")
    if parameter.layout != torch.strided or any(getattr(owner, "sparse", False) is True for owner in placed.owners):
        raise ValueError(f"{placed.name} or its gradient is sparse; make it dense (nn.Embedding: sparse=False)")
    if parameter.ndim < 2 and placed.name.split(".")[-1] == "weight" and placed.held_by(nn.Linear, *_EMBEDDINGS):
        raise ValueError(f"{placed.name} is a flattened matrix; shard with fully_shard, which keeps shapes")
