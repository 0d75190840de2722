"""A model's modules become roles, and roles become parameter groups: each with its lmo, lr and decay rule.

module, name, shape -> role -> group. Every trainable parameter is in exactly one group, or an error names it.
"""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from steadynorm.groups.roles import (
    BLOCKED,
    ROLES,
    Placed,
    check_choice,
    check_patterns,
    check_supported,
    find_outputs,
    places,
    role_of,
    row_blocks,
)
from steadynorm.theory import weight_decay_for

Output = nn.Module | nn.Parameter | str  # one layer: itself, its weight, or the dotted name of either
Rules = dict[str, dict[str, Any]]  # role -> the values of its group


class ParamGroups(list[dict[str, Any]]):
    """Groups as any optimizer takes them; per parameter also the reason (`why`) and its other names (`ties`)."""

    why: dict[str, str]
    ties: dict[str, tuple[str, ...]]
    made: functools.partial["ParamGroups"]  # the same anew, with other settings in place of those it was not given
    given: frozenset[str]  # the settings it was given

    def settled(self, settings: Mapping[str, Any]) -> "ParamGroups":
        """With an optimizer's own settings where `param_groups` was left to its defaults.

        What you have changed in a group since then stays.

        >>> groups = param_groups(nn.Linear(4, 4, bias=False), output=False)
        >>> groups.settled({"lr": 0.02})[0]["lr"]
        0.02
        """
        changes = {key: value for key, value in settings.items() if key not in self.given and value is not None}
        if self.made.keywords["kind"] == "scion" and not changes.get("weight_decay"):
            changes.pop("weight_decay", None)  # Scion's default; no decay at all must be said here
        if not changes:
            return self
        before, after = ({group["name"]: group for group in each} for each in (self.made(), self.made(**changes)))
        for group in self:
            old, new = before.get(group.get("name", ""), {}), after.get(group.get("name", ""), {})
            group.update({key: new[key] for key in new if key != "params" and group.get(key) == old.get(key)})
        return self


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
    alpha: float | None = None,
    steady_norm_sq: float | None = None,
    weight_decay: float | None = None,
    nesterov: bool | None = None,
) -> ParamGroups:
    """Every trainable parameter in exactly one group, by its role in the model; `explain` shows which and why.

        hidden matrix -> spectral, per block where q, k, v (or gate, up) are fused, per expert where stacked
        convolution -> conv    vector -> bias
        output weight, tied or not -> sign with constant decay          embedding not tied -> embedding
        output_lr = 20 lr,  output_weight_decay = eta_0 / output_lr,  eta_0 = lr lambda_0

    lambda_0 is the corrected decay at the start. `weight_decay` None in a group means corrected. With
    `kind="adam"`: one lr, decay on matrices only; `corrected` is False in the output weight's group. Frozen
    parameters are left out: hand them to `add_param_group` when you unfreeze them.

    Args:
        model: the module whose parameters are grouped; a tied parameter is listed once, under its first name.
        kind: "scion" or "adam".
        lr: of every group but the output's; by default 1e-2 ("adam": 1e-3).
        output_lr: by default 20 lr ("adam": lr).
        output_weight_decay: by default as above ("adam": weight_decay).
        output: the output layer, or several; False if there is none. By default it is found by
            `get_output_embeddings()`, `get_classifier()`, a weight tied to an embedding or Hugging Face's names for
            heads; else an error asks.
        output_bias: "corrected" like other vectors, or "constant" with the decay lambda_0.
        blocks: {parameter name or glob: number of equal blocks of the outputs}, instead of what names and shapes tell.
        roles: {parameter name or glob: role}, before any other rule: hidden, stacked (matrices), both also with
            "-transposed" (stored d_in x d_out), conv, vector, embedding or output.
        alpha, steady_norm_sq: as in ScionC (0.1, 1.1875); not used by "adam".
        weight_decay: "scion": constant decay in place of the corrected one; "adam": 0.1 by default.
        nesterov: as in ScionC (False), which lambda_0 depends on; not used by "adam".

    Returns:
        A list of groups for one optimizer: named parameters and plain values. One of ours takes lr, alpha,
        steady_norm_sq, weight_decay and nesterov that are not given here from its own arguments.

    >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    >>> [(group["name"], group["lmo"], group["lr"]) for group in param_groups(model, output="2")]
    [('hidden', 'spectral', 0.01), ('vector', 'bias', 0.01), ('output', 'sign', 0.2), ('output-bias', 'bias', 0.01)]
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"param_groups takes the model itself, whose modules tell the roles, not {type(model).__name__}"
        )
    check_choice("kind", kind, ("scion", "adam"))
    check_choice("output_bias", output_bias, ("corrected", "constant"))
    given = {
        "lr": lr,
        "alpha": alpha,
        "steady_norm_sq": steady_norm_sq,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
    }
    made = functools.partial(
        param_groups, model, kind=kind, output_lr=output_lr, output_weight_decay=output_weight_decay, output=output,
        output_bias=output_bias, blocks=blocks, roles=roles, **given,
    )  # fmt: skip
    scion, roles, blocks = kind == "scion", roles or {}, blocks or {}
    lr = _checked("lr", (1e-2 if scion else 1e-3) if lr is None else lr)
    output_lr = _checked("output_lr", (20 * lr if scion else lr) if output_lr is None else output_lr)
    decay = None if weight_decay is None else _checked("weight_decay", weight_decay)
    if scion and decay is not None and steady_norm_sq is not None:
        raise ValueError(
            f"param_groups: weight_decay={decay:g} makes the decay constant, and steady_norm_sq={steady_norm_sq:g} asks for a "
            "corrected one; give one"
        )
    if scion:
        alpha, target = (
            default if value is None else float(value) for value, default in ((alpha, 0.1), (steady_norm_sq, 1.1875))
        )
        rules = _scion_rules(lr, output_lr, alpha, target, decay, nesterov, output_bias == "constant")
    else:
        rules = _adam_rules(lr, output_lr, 0.1 if decay is None else decay)
    if output_weight_decay is not None:
        rules["output"]["weight_decay"] = _checked("output_weight_decay", output_weight_decay)

    everything = places(model)
    trainable = [placed for placed in everything if placed.parameter.requires_grad]
    if not trainable:
        raise ValueError(f"{type(model).__name__} has no trainable parameter: nothing to group")
    for placed in trainable:
        check_supported(placed)
    check_patterns("roles", roles, trainable, "trainable parameter", "roles")
    outputs = find_outputs(model, everything, output, roles)
    found = [(placed, *role_of(placed, roles, outputs, strict=scion)) for placed in trainable]
    matrices = [(placed, role) for placed, role, _ in found if scion and ROLES[role][0] in BLOCKED]
    candidates = [placed for placed, _ in matrices]
    check_patterns("blocks", blocks, candidates, "matrix with the spectral lmo", "numbers of equal blocks")
    groups = _gather(found, rules, {placed.name: row_blocks(placed, role, blocks) for placed, role in matrices})
    groups.made, groups.given = made, frozenset(key for key, value in given.items() if value is not None)
    return groups


def settled(params: Any, settings: Mapping[str, Any], optimizer: str, kind: str = "adam") -> Any:
    """Fill settings left unset in `param_groups` from the optimizer's arguments; return other parameters as they are.

    Raise TypeError for a model in place of its parameters, ValueError for groups made for another kind of optimizer.
    """
    if isinstance(params, nn.Module):
        how = "" if kind == "scion" else f", kind={kind!r}"
        raise TypeError(
            f"{optimizer} takes parameters, not the model; pass {optimizer}(param_groups(model{how})), which groups "
            f"{type(params).__name__}'s by role"
        )
    if not isinstance(params, ParamGroups):
        return params
    if params.made.keywords["kind"] != kind:
        raise ValueError(
            f"{optimizer}: these groups are for {'Adam' if kind == 'scion' else 'Scion'}; "
            f"use param_groups(model, kind={kind!r})"
        )
    known = {key: settings.get(key) for key in ("lr", "alpha", "steady_norm_sq", "weight_decay")}
    numbers = {key: None if value is None else float(value) for key, value in known.items()}
    return params.settled(numbers | {"nesterov": True if kind == "scion" and settings.get("nesterov") else None})


def _gather(found: list[tuple[Placed, str, str]], rules: Rules, blocks: dict[str, tuple[int, str]]) -> ParamGroups:
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


def _scion_rules(
    lr: float, output_lr: float, alpha: float, norm_sq: float, decay: float | None, nesterov: bool | None, bias: bool
) -> Rules:
    """eta = lr lambda starts the same in every group; bias: whether the output's bias has constant decay."""
    corrected = weight_decay_for(
        norm_sq, lr, alpha, nesterov=bool(nesterov)
    )  # checks its arguments, so called also where decay is given
    decay_0 = corrected if decay is None else decay
    rule: dict[str, Any] = {"lr": lr, "alpha": alpha, "blocks": 1, "weight_decay": decay}
    if nesterov is not None:
        rule["nesterov"] = bool(nesterov)
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
