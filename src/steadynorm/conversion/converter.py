"""`convert`: turn an optimizer you train with into one of ours, with its settings and the state that maps.

    theirs, per parameter -> factor: lr_ours = factor lr -> decay = eta / lr_ours -> C^2 -> groups -> state

The factor depends only on shape, lmo and momentum, so whole schedules map by it.
"""

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.conversion.changes import Change, Converted, format_changes, is_fixed_where_it_is, take_over
from steadynorm.conversion.same_steps import to_ours, to_torch
from steadynorm.conversion.source import SCHEDULED, Group, Source, sources_of
from steadynorm.decay.peak import spread_peaks
from steadynorm.decay.recognition import unwrap
from steadynorm.groups.builder import Output, param_groups
from steadynorm.optim import AdamC, MuonC, Scion, ScionC
from steadynorm.prediction import ParamSetting
from steadynorm.views import Blocks


class ConvertOptions(NamedTuple):
    """What the caller of `convert` asked for; see there."""

    to: type[Optimizer]
    keep_lr: bool
    keep_norm: bool
    steady_norm_sq: float
    settings: Mapping[str, Any]


def convert(
    optimizer: Optimizer | Sequence[Optimizer],
    model: nn.Module,
    *,
    to: type[Optimizer] | None = None,
    peak_lr: float | Sequence[float] | None = None,
    keep_lr: bool = True,
    keep_norm: bool = True,
    lr: float = 1e-2,
    steady_norm_sq: float = 1.1875,
    alpha: float | None = None,
    nesterov: bool | None = None,
    output: Output | Sequence[Output] | bool | None = None,
    roles: Mapping[str, str] | None = None,
    blocks: Mapping[str, Blocks] | None = None,
    **settings: Any,
) -> Converted:
    """Return one of our optimizers with the settings of yours and the state that maps, and a table of the changes.

        lr_ours = factor lr: the same effective lr        C^2: the steady norm that peak lr and decay had

    It takes over from torch's AdamW, torch's Muon, MuonC, the published Scion, or several together (Muon and its AdamW). The
    old optimizer is not changed, but must not step any more. Make schedulers again at `initial_lr`, which the groups keep,
    and replay their steps (docs/moving.md).

    Momentum is copied. AdamW's exp_avg_sq and step map only to AdamC. ScionLight's momentum, which is in the gradients,
    does not map. `hold`, `balance_steps`, `cautious` and `maximize` stay as they were, unless you pass others.

    Args:
        optimizer: The optimizer, or optimizers, you train with.
        model: The model, whose modules determine lmo, blocks and the output layer, which keeps constant decay.
        to: AdamC (only from AdamW, and the default there), MuonC (only from Muon and AdamW, with the same steps up to its
            polar factors), ScionC (the default elsewhere), or Scion. From MuonC also torch.optim.Muon, which returns a list
            of Muon and the AdamW beside it.
        peak_lr: The maximum of the old schedule, one number or one per group of all optimizers. Default: the peak that a group
            has, else a guess as in `correct`.
        keep_lr: Whether to keep the effective lr of every parameter. Otherwise use `lr`, and 20 lr for the output layer. This
            and the next arguments, except `output`, are for Scion and ScionC; the others continue with the same steps.
        keep_norm: Whether to keep the steady norm of every parameter. Otherwise use `steady_norm_sq`. Parameters without
            decay stay without.
        lr: The lr if it is not kept.
        steady_norm_sq: C^2 if it is not kept.
        alpha: The new momentum, by default the old one (AdamW: 1 - beta1).
        nesterov: Whether it is Nesterov's, by default as before (AdamW: not).
        output: As in `param_groups`.
        roles: As in `param_groups`.
        blocks: As in `param_groups`.
        **settings: Settings of the new optimizer, such as polar= or check_finite=.

    Examples:
        >>> model = nn.Linear(4, 4, bias=False); old = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
        >>> optimizer, table = convert(old, model, to=ScionC, output=False)
        >>> group = optimizer.param_groups[0]
        >>> round(group["lr"], 6), round(group["steady_norm_sq"], 6), table.splitlines()[1].split()[2:6]
        (0.000459, 0.02, ['AdamW', '->', 'ScionC,', 'spectral'])
    """
    several = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    if not isinstance(model, nn.Module):
        raise TypeError(f"convert takes the model second, not {type(model).__name__}")
    names = {id(p): name for name, p in model.named_parameters()}
    sources = _sources([unwrap(old, "convert") for old in several], names, peak_lr)
    kinds = {source.kind for source in sources}
    to = to or (AdamC if kinds == {"AdamW"} else ScionC)
    to_muon = to is getattr(torch.optim, "Muon", None) and kinds <= {"Muon", "AdamW"}  # torch has it since 2.9
    if to is AdamC or to is MuonC or to_muon:
        for_scion = {
            "keep_lr": not keep_lr, "keep_norm": not keep_norm, "alpha": alpha is not None,
            "nesterov": nesterov is not None, "roles": roles, "blocks": blocks,
        }  # fmt: skip
        if lost := [name for name, is_set in for_scion.items() if is_set] + (list(settings) if to_muon else []):
            raise ValueError(
                f"convert: {to.__name__} continues with the same steps and takes no {', '.join(lost)}; leave it out, or "
                "pass to=ScionC"
            )
        if to is AdamC or to is MuonC:
            return to_ours(to, sources, model, output, settings)
        return to_torch(sources)
    if to not in (Scion, ScionC):
        name = to.__name__ if isinstance(to, type) else repr(to)
        remedy = "; AdamW loads the state_dict of AdamC, then call uncorrect(adamw)" if name == "AdamW" else ""
        raise ValueError(
            f"convert: to={name} is none of AdamC, MuonC, ScionC, Scion and, from MuonC, torch.optim.Muon{remedy}"
        )
    rules = {
        id(p): group
        for group in param_groups(model, lr=lr, output=output, roles=roles, blocks=blocks)
        for _, p in group["params"]
    }
    options = ConvertOptions(to, keep_lr, keep_norm, steady_norm_sq, settings)
    changes = [_to_scion(source, _rule(source, rules, alpha, nesterov), options) for source in sources]
    new = to(_gathered(changes), **settings)
    take_over(new, sources)
    return Converted(new, format_changes(changes))


def _sources(
    optimizers: Sequence[Optimizer], names: Mapping[int, str], peak_lr: float | Sequence[float] | None
) -> list[Source]:
    """Return every parameter of the old optimizers, given the peaks that were passed."""
    count = sum(len(old.param_groups) for old in optimizers)
    if len(optimizers) > 1 and peak_lr is not None and not isinstance(peak_lr, Sequence):
        raise ValueError(
            f"convert: peak_lr={peak_lr} is one number for {len(optimizers)} optimizers; pass a list of {count}, one per group"
        )
    peaks = iter(spread_peaks("convert", peak_lr, count))
    return [
        source for old in optimizers for source in sources_of(old, names, list(islice(peaks, len(old.param_groups))))
    ]


# --- to Scion and ScionC


def _rule(source: Source, rules: Mapping[int, Group], alpha: float | None, nesterov: bool | None) -> Group:
    """Return role, lmo, blocks and momentum of a parameter; the published Scion has an lmo of its own."""
    if id(source.parameter) not in rules:
        raise ValueError(
            f"convert: {source.name} is frozen; unfreeze it (requires_grad), or leave it out of the optimizer"
        )
    rule = dict(rules[id(source.parameter)])
    if source.kind == "Scion":
        rule |= {"lmo": source.lmo_scale.lmo, "blocks": 1}
    rule["alpha"] = source.alpha if alpha is None else float(alpha)
    rule["nesterov"] = source.nesterov if nesterov is None else bool(nesterov)
    return rule


def _to_scion(source: Source, rule: Group, options: ConvertOptions) -> Change:
    """Return what becomes of one parameter under Scion or ScionC."""
    momentum = {"alpha": rule["alpha"], "nesterov": rule["nesterov"]}
    setting = ParamSetting(
        1.0, shape=source.shape, lmo=rule["lmo"], blocks=rule["blocks"], weight_decay=1.0, **momentum
    )
    same = source.factor(setting) * source.peak
    peak = same if options.keep_lr else rule["lr"]
    values = {"name": rule["name"], "lmo": rule["lmo"], "blocks": rule["blocks"], **momentum}
    values |= source.choices(options.settings)
    values |= {
        key: float(source.group[key]) * peak / source.peak for key in SCHEDULED if source.group.get(key) is not None
    }
    element_update_sq = setting.update_norm_sq / source.parameter.numel() if source.parameter.numel() else 0.0
    if source.eta == 0:
        return Change(source, options.to, {**values, "weight_decay": 0.0}, element_update_sq)
    exact = options.settings.get("overlap") == "exact"
    overlap = setting.kernel if exact else "linear"
    was = theory.steady_norm_sq(same, source.eta / same, **momentum, overlap=overlap, limit=not exact)
    now = was if options.keep_norm else options.steady_norm_sq
    if rule["name"] == "output" and not options.keep_norm:
        now = theory.steady_norm_sq(peak, rule["weight_decay"], **momentum, overlap=overlap, limit=not exact)
    decay = theory.weight_decay_for(now, peak, **momentum, overlap=overlap)
    if peak * decay > 1:
        raise ValueError(
            f"convert: {source.name}: C^2 = {now:.3g} is unreachable at lr={peak:.3g}: it would take a decay of "
            f"{peak * decay:.3g} per step; lower lr=, or pass keep_lr=True or keep_norm=False"
        )
    if options.to is ScionC and rule["name"] != "output" and not is_fixed_where_it_is(source, values):
        values |= {"weight_decay": None, "steady_norm_sq": now}
    else:
        values |= {"weight_decay": decay}
    return Change(source, options.to, values, element_update_sq, was, now)


def _gathered(changes: Sequence[Change]) -> list[Group]:
    """Return one group per set of equal values; a role's second group is called role-2, and so on."""
    groups: dict[tuple[Any, ...], Group] = {}
    count: dict[str, int] = {}
    for change in changes:
        key, name = tuple(change.values.items()), change.values["name"]
        if key not in groups:
            count[name] = count.get(name, 0) + 1
            groups[key] = {**change.values, "name": name if count[name] == 1 else f"{name}-{count[name]}", "params": []}
        groups[key]["params"].append((change.source.name, change.source.parameter))
    return list(groups.values())
