"""Parameter groups from a model: module, name and shape decide a role, and the role decides lmo, lr and decay.

Every trainable parameter is in exactly one group, or an error names it.
"""

import inspect
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from steadynorm.groups.fusion import find_blocks, has_heads
from steadynorm.groups.role_table import BLOCKED, OUTPUT_LR_RATIO, ROLES, check_choice
from steadynorm.groups.roles import (
    ParamSite,
    check_patterns,
    check_supported,
    find_outputs,
    param_sites,
    role_of,
)
from steadynorm.theory import weight_decay_for
from steadynorm.theory.updates import MUON_ADJUST, muon_adam_lr
from steadynorm.views import BlockLayout, Blocks

Output = nn.Module | nn.Parameter | str  # one layer: itself, its weight, or the dotted name of either
Rules = dict[str, dict[str, Any]]  # role -> the values of its group
KINDS = {"scion": "Scion", "adam": "Adam", "muon": "Muon"}
# What `Members.fill_unset` fills.
_FILLED = ("lr", "alpha", "steady_norm_sq", "weight_decay", "nesterov", "adam_lr", "adjust_lr_fn")


class Members(list[tuple[str, nn.Parameter]]):
    """The named parameters of a group, with what the group was made from.

    It is the group's entry "params", so it stays with the group in any list, slice or copy of a list, until an optimizer
    takes the parameters out of it.
    """

    def __init__(self, role: str, asked: Mapping[str, Any]):
        super().__init__()
        self.role = role  # of the first parameter; the others have the same rule
        self.asked = asked  # what `param_groups` was asked for: the arguments of `_make_rules`, None where unset
        self.why: dict[str, str] = {}  # the reason for each parameter's role, by its name
        self.ties: dict[str, tuple[str, ...]] = {}  # the other names of each parameter, by its name

    def fill_unset(
        self, group: Mapping[str, Any], settings: Mapping[str, Any], optimizer: str, kind: str
    ) -> dict[str, Any]:
        """Return a copy of the group with settings left unset in `param_groups` filled from an optimizer's.

        What you changed in the group since then stays.

        Raises:
            ValueError: If the group was made for another kind of optimizer.

        >>> [group] = param_groups(nn.Linear(4, 4, bias=False), output=False)
        >>> group["params"].fill_unset(group, {"lr": 0.02}, "ScionC", "scion")["lr"], group["lr"]
        (0.02, 0.01)
        """
        if self.asked["kind"] != kind:
            raise ValueError(
                f"{optimizer}: these groups are for {KINDS[self.asked['kind']]}; use param_groups(model, kind={kind!r})"
            )
        unset = {key: settings.get(key) for key in _FILLED if self.asked[key] is None}
        changes: dict[str, Any] = {key: value for key, value in unset.items() if value is not None}
        if kind == "scion" and not changes.get("weight_decay"):
            changes.pop("weight_decay", None)  # 0 is Scion's default; pass it to param_groups to mean no decay
        before, after = (_make_rules(**{**self.asked, **more})[self.role] for more in ({}, changes))
        filled = {key: after[key] for key in after if _is_same(group.get(key), before.get(key))}
        if "lr" in filled:
            lr = changes.get("adam_lr" if after.get("use_muon") is False and "adam_lr" in changes else "lr")
            filled["lr"] = _like_passed(filled["lr"], lr)
        return {**group, **filled}


class ParamGroups(list[dict[str, Any]]):
    """Groups as any optimizer takes them."""

    def __init__(self, groups: Iterable[dict[str, Any]]):
        super().__init__(groups)
        self.members: dict[str, Members] = {group["name"]: group["params"] for group in self}  # as they were made

    @property
    def why(self) -> dict[str, str]:
        """The reason for each parameter's role, by its name."""
        return {name: reason for members in self.members.values() for name, reason in members.why.items()}


def param_groups(
    model: nn.Module,
    *,
    kind: str = "scion",
    lr: float | None = None,
    output_lr: float | None = None,
    output_weight_decay: float | None = None,
    output: Output | Sequence[Output] | bool | None = None,
    output_bias: str = "corrected",
    blocks: Mapping[str, Blocks] | None = None,
    heads: bool = False,
    roles: Mapping[str, str] | None = None,
    alpha: float | None = None,
    steady_norm_sq: float | None = None,
    weight_decay: float | None = None,
    nesterov: bool | None = None,
    adam_lr: float | None = None,
    adjust_lr_fn: str | None = None,
) -> ParamGroups:
    """Put every trainable parameter into exactly one group, by its role in the model.

        hidden matrix -> spectral, per block where q, k, v (or gate, up) are fused, per expert where stacked
        convolution -> conv    vector -> bias
        output weight, tied or not -> sign with constant decay          embedding not tied -> embedding
        output_lr = 20 lr,  output_weight_decay = eta_0 / output_lr,  eta_0 = lr lambda_0

    lambda_0 is the corrected decay at the start. A `weight_decay` of None in a group means corrected decay. With
    `kind="adam"` there is one lr, only matrices decay, and `corrected` is False in the group of the output weight.
    `kind="muon"` gives the roles that are spectral or conv above to Muon and the rest to Adam (`use_muon`).
    Frozen parameters are left out: pass them to `add_param_group` when you unfreeze them. `explain` shows which
    parameter got which rule, and why.

    Args:
        model: The model. A tied parameter is listed once, under its first name.
        kind: "scion", "adam" or "muon".
        lr: The lr of every group except the output's; 1e-2 by default ("adam": 1e-3). "muon": that of Muon, 0.02 by default.
        output_lr: The lr of the output weight; 20 lr by default ("adam": lr, "muon": adam_lr).
        output_weight_decay: The decay of the output weight; as above by default ("adam", "muon": weight_decay).
        output: The output layer, or several; False if there is none. By default it is found by
            `get_output_embeddings()`, `get_classifier()`, a weight tied to an embedding or Hugging Face's names for
            heads; otherwise an error asks for it.
        output_bias: "corrected" like other vectors, or "constant" with the decay lambda_0.
        blocks: {parameter name or glob: blocks as in ScionC}, instead of what the model implies: a number of equal blocks
            of the outputs, their sizes, or ("inputs", either of them).
        heads: Whether every head of an attention is a matrix of its own: blocks of outputs in the projections to queries,
            keys and values, of inputs in the output projection. The attention, or its configuration, must say how many
            heads it has.
        roles: {parameter name or glob: role}, before any other rule: hidden or stacked (matrices), both also with
            "-transposed" (stored d_in x d_out), conv, vector, embedding or output.
        alpha: As in ScionC, 0.1 by default; only "scion" uses it.
        steady_norm_sq: As in ScionC, 1.1875 by default; as in MuonC, None by default; "adam" does not use it.
        weight_decay: With "scion", constant decay in place of corrected decay; with "adam" and "muon", 0.1 by default.
        nesterov: As in ScionC, False by default; lambda_0 depends on it. Only "scion" uses it.
        adam_lr: As in MuonC; only "muon" uses it.
        adjust_lr_fn: As in MuonC, "original" by default; only "muon" uses it.

    Returns:
        Groups for one optimizer: named parameters and plain values. Our optimizers fill lr, alpha, steady_norm_sq,
        weight_decay, nesterov, adam_lr and adjust_lr_fn from their own arguments where they are not passed here, in
        whatever list a group is. A group whose "params" you replace by another list counts as written by hand.

    Raises:
        ValueError: If a parameter or the output layer has no clear role, or a setting is out of range.

    Examples:
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
        >>> [(group["name"], group["lmo"], group["lr"]) for group in param_groups(model, output="2")]
        [('hidden', 'spectral', 0.01), ('vector', 'bias', 0.01), ('output', 'sign', 0.2), ('output-bias', 'bias', 0.01)]
    """
    asked = {key: value for key, value in locals().items() if key in _ASKED}  # as they were passed
    if not isinstance(model, nn.Module):
        raise TypeError(f"param_groups takes the model, whose modules decide the roles, not {type(model).__name__}")
    rules = _make_rules(**asked)
    strict, roles, blocks = kind != "adam", roles or {}, blocks or {}

    sites = param_sites(model)
    trainable = [site for site in sites if site.parameter.requires_grad]
    if not trainable:
        raise ValueError(f"{type(model).__name__} has no trainable parameter: nothing to group")
    for site in trainable:
        check_supported(site)
    check_patterns("roles", roles, trainable, "trainable parameter", "roles")
    outputs = find_outputs(model, sites, output, roles)
    decided = [(site, *role_of(site, roles, outputs, strict=strict)) for site in trainable]
    matrices = {site: role for site, role, _ in decided if strict and ROLES[role][0] in BLOCKED}
    check_patterns(
        "blocks", blocks, [*matrices], "matrix with the spectral lmo", "numbers of equal blocks or their sizes"
    )
    layouts = {site.name: find_blocks(site, role, blocks, heads=heads) for site, role in matrices.items()}
    if heads and strict and not any(has_heads(site, role) for site, role in matrices.items()):
        raise ValueError(
            f"heads=True: no attention of {type(model).__name__} says how many heads it has; pass blocks= instead: "
            '{"*.q.weight": 16, "*.out.weight": ("inputs", 16)}'
        )
    return _gather(decided, rules, layouts, asked)


def _gather(
    decided: list[tuple[ParamSite, str, str]],
    rules: Rules,
    layouts: dict[str, tuple[BlockLayout, str]],
    asked: Mapping[str, Any],
) -> ParamGroups:
    """Put parameters under the same rule into one group; keep groups and parameters in model order."""
    by_name: Rules = {}
    for site, role, reason in decided:
        layout, note = layouts.get(site.name, (BlockLayout(), ""))
        rule = rules[role]
        if layout.count > 1:
            rule = {**rule, "name": f"{role}-blocks{layout.name}", "blocks": layout.plain}
        members = by_name.setdefault(rule["name"], {**rule, "params": Members(role, asked)})["params"]
        members.append((site.name, site.parameter))
        members.why[site.name], members.ties[site.name] = reason + note, site.names[1:]
    return ParamGroups(by_name.values())


def _make_rules(
    kind: str,
    lr: float | None,
    output_lr: float | None,
    output_weight_decay: float | None,
    output_bias: str,
    alpha: float | None,
    steady_norm_sq: float | None,
    weight_decay: float | None,
    nesterov: bool | None,
    adam_lr: float | None,
    adjust_lr_fn: str | None,
) -> Rules:
    """Return the values of each role's group, given arguments of `param_groups`; raise ValueError if one is out of range."""
    check_choice("kind", kind, tuple(KINDS))
    check_choice("output_bias", output_bias, ("corrected", "constant"))
    lr = _non_negative("lr", {"scion": 1e-2, "adam": 1e-3, "muon": 0.02}[kind] if lr is None else lr)
    adjust = adjust_lr_fn or "original"
    check_choice("adjust_lr_fn", adjust, MUON_ADJUST)
    adam_lr = _non_negative("adam_lr", muon_adam_lr(lr, adjust) if adam_lr is None else adam_lr)
    usual = {"scion": OUTPUT_LR_RATIO * lr, "adam": lr, "muon": adam_lr}[kind]
    output_lr = _non_negative("output_lr", usual if output_lr is None else output_lr)
    decay = None if weight_decay is None else _non_negative("weight_decay", weight_decay)
    if kind == "scion":
        if decay is not None and steady_norm_sq is not None:
            raise ValueError(
                f"param_groups: weight_decay={decay:g} makes the decay constant, and steady_norm_sq={steady_norm_sq:g} asks for a "
                "corrected one; pass only one of them"
            )
        alpha = 0.1 if alpha is None else float(alpha)
        target = 1.1875 if steady_norm_sq is None else float(steady_norm_sq)
        rules = _scion_rules(lr, output_lr, alpha, target, decay, nesterov, output_bias == "constant")
    elif kind == "muon":
        rules = _muon_rules(lr, adam_lr, output_lr, 0.1 if decay is None else decay, steady_norm_sq, adjust)
    else:
        rules = _adam_rules(lr, output_lr, 0.1 if decay is None else decay)
    if output_weight_decay is not None:
        rules["output"]["weight_decay"] = _non_negative("output_weight_decay", output_weight_decay)
    return rules


_ASKED = frozenset(inspect.signature(_make_rules).parameters)


def _scion_rules(
    lr: float, output_lr: float, alpha: float, norm_sq: float, decay: float | None, nesterov: bool | None, bias: bool
) -> Rules:
    """Return rules under which eta = lr lambda starts the same in every group; `bias`: constant decay for the output's."""
    corrected = weight_decay_for(norm_sq, lr, alpha, nesterov=bool(nesterov))  # also checks its arguments
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
    """Return rules for AdamC, which keeps the decay constant where `corrected` is False."""
    matrix = {"name": "matrix", "lr": lr, "weight_decay": decay, "corrected": True}
    vector = {"name": "vector", "lr": lr, "weight_decay": 0.0, "corrected": True}
    output = {"name": "output", "lr": output_lr, "weight_decay": decay, "corrected": False}
    return dict.fromkeys(ROLES, matrix) | {"vector": vector, "output-bias": vector, "output": output}


def _muon_rules(lr: float, adam_lr: float, output_lr: float, decay: float, norm_sq: float | None, adjust: str) -> Rules:
    """Return rules for MuonC: Muon where the lmo would be a polar factor, Adam elsewhere."""
    hidden: dict[str, Any] = {"use_muon": True, "lr": lr, "weight_decay": decay, "corrected": True, "blocks": 1}
    hidden |= {"adjust_lr_fn": adjust} | ({} if norm_sq is None else {"steady_norm_sq": float(norm_sq)})
    rest = {"use_muon": False, "lr": adam_lr, "weight_decay": decay, "corrected": True}
    vector = {"name": "vector", **rest, "weight_decay": 0.0}
    rules = {role: {"name": role, "lmo": lmo, **hidden} for role, (lmo, _, _) in ROLES.items() if lmo in BLOCKED}
    return rules | {
        "embedding": {"name": "embedding", **rest},
        "vector": vector,
        "output-bias": vector,
        "output": {"name": "output", **rest, "lr": output_lr, "corrected": False},
    }


def from_radius(lr: float, radius: float) -> dict[str, float]:
    """Return lr and weight decay that move the weights like the original Scion's (gamma, rho).

        (1 - gamma) theta - gamma rho u  =  (1 - lr weight_decay) theta - lr u

    Args:
        lr: The original gamma, which is also eta.
        radius: rho, the radius of the norm ball. Unconstrained Scion has no decay: use only its lr.

    Returns:
        {"lr": gamma rho, "weight_decay": 1 / rho}

    Examples:
        >>> from_radius(2**-12, 50)
        {'lr': 0.01220703125, 'weight_decay': 0.02}
    """
    lr, radius = _non_negative("lr", lr), _non_negative("radius", radius)
    if radius == 0:
        raise ValueError("radius=0 leaves no weights; pass a positive radius")
    return {"lr": lr * radius, "weight_decay": 1 / radius}


def _is_same(value: Any, other: Any) -> bool:
    """Return whether a value in a group is still the other; a tensor is one that you wrote."""
    return not isinstance(value, Tensor) and value == other


def _like_passed(lr: float, passed: Any) -> Any:
    """Return a group's lr as a tensor if the optimizer's was passed as one: as the very one, if they are equal.

    torch keeps such a tensor, so that you can change the lr in place, in a captured graph for example.
    """
    if not isinstance(passed, Tensor):
        return lr
    return passed if lr == float(passed) else passed.new_tensor(lr)


def _non_negative(name: str, value: float) -> float:
    if not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{name}={value} must be finite and not negative")
    return float(value)
