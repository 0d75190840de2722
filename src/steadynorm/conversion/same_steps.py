"""Between optimizers that take the same steps: AdamW to AdamC, torch's pair of Muon and AdamW to MuonC, and MuonC back."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from steadynorm import theory
from steadynorm.conversion.changes import Change, Converted, format_changes, take_over
from steadynorm.conversion.source import CHOICES, SCHEDULED, Group, Source
from steadynorm.decay.hold import HOLD_STATE
from steadynorm.decay.peak import watch_on
from steadynorm.decay.rule import KEYS, UNCORRECTED, is_uncorrected
from steadynorm.dtensor import is_dtensor
from steadynorm.groups.roles import find_outputs, param_sites
from steadynorm.optim import AdamC, MuonC

_TORCH_KEYS = {
    "Muon": ("momentum", "nesterov", "adjust_lr_fn", "weight_decay", "name"),
    "AdamW": ("betas", "eps", "weight_decay", "name"),
}
_OWN_KEYS = {
    AdamC: ("amsgrad", "foreach", "differentiable", "fused"),
    MuonC: ("lmo", "blocks", "polar", "polar_steps", "momentum_dtype", "own_time"),
}
_STATE = {"Muon": ("momentum_buffer",), "AdamW": ("step", "exp_avg", "exp_avg_sq")}


def to_ours(
    to: type[AdamC | MuonC], sources: Sequence[Source], model: nn.Module, output: Any, settings: Mapping[str, Any]
) -> Converted:
    """Return AdamC or MuonC with the groups as they are; the output layer's weight has its own, with constant decay.

    The same hidden matrices are orthogonalised as before, each as one matrix: fused q, k, v stay fused.
    """
    kinds = {source.kind for source in sources}
    if to is AdamC and kinds != {"AdamW"}:
        raise ValueError(f"convert: AdamC takes over only from AdamW, not from {', '.join(sorted(kinds))}; use ScionC")
    if "Scion" in kinds:
        raise ValueError("convert: MuonC takes over only from Muon and AdamW, not from Scion; use ScionC")
    if to is MuonC and any(source.group.get("amsgrad") for source in sources):
        raise ValueError("convert: MuonC has no amsgrad; leave it out, or keep AdamW for those parameters")
    outputs = find_outputs(model, param_sites(model), output, {})

    def values(source: Source) -> Group:
        is_muon, p = source.kind == "Muon", source.parameter
        known: Group = {"corrected": True}
        if to is MuonC:
            known |= {"use_muon": is_muon} | ({"lmo": "spectral"} if is_muon and p.ndim == 2 else {})
        known |= _kept(source, *_OWN_KEYS[to], *KEYS) | source.peak_keys | source.choices(settings)
        constant = (id(p) in outputs and p.ndim > 1) or is_uncorrected(source.group, p)
        return known | ({"corrected": False, "weight_decay": source.base_weight_decay} if constant else {})

    groups, changes = _gather(sources, values, to)
    new = to(groups, **settings)
    sources_by_id = {id(source.parameter): source for source in sources}
    for group in new.param_groups:
        first = sources_by_id[id(group["params"][0])]
        watch_on(group, first.group, first.is_under_way)
    take_over(new, sources, HOLD_STATE["balance"])
    return Converted(new, format_changes(changes))


def to_torch(sources: Sequence[Source]) -> Converted:
    """Return torch's Muon and AdamW, as many of the two as there are parameters for, with the decay at the peak.

    `correct` corrects them: their groups keep the peak.
    """
    if bad := [source for source in sources if source.kind == "Muon" and source.parameter.ndim != 2]:
        raise ValueError(
            f"convert: torch's Muon takes matrices only, and {bad[0].name} has shape {tuple(bad[0].parameter.shape)}; put it "
            "in a group with use_muon=False before training"
        )

    for source in sources:
        known = ("maximize",) if source.kind == "AdamW" else ()
        if lost := [key for key in source.choices({}) if key in CHOICES and key not in known]:
            key, value = lost[0], source.group[lost[0]]
            after = "negate the loss" if key == "maximize" else f"pass {key}={value!r} to `correct` afterwards"
            raise ValueError(
                f"convert: torch's {source.kind} has no {key}={value!r}, which the group of {source.name} has; set "
                f"{key}={CHOICES[key]!r} there first, and {after}"
            )

    def values(source: Source) -> Group:
        return {**_kept(source), **source.peak_keys, **source.choices({}), "weight_decay": source.weight_decay}

    optimizers, changes = [], []
    for kind, cls in (("Muon", torch.optim.Muon), ("AdamW", torch.optim.AdamW)):
        own = [source for source in sources if source.kind == kind]
        groups, changed = _gather(own, values, cls)
        if groups:
            optimizers.append(cls(groups))
            for source in own:
                optimizers[-1].state[source.parameter].update(_torch_state(source))
        changes += changed
    return Converted(optimizers, format_changes(changes))


def _kept(source: Source, *more: str) -> Group:
    """Return what a parameter's new group has from its old one: torch's settings, those of schedulers, and `more`."""
    keys = (*_TORCH_KEYS[source.kind], *SCHEDULED, *more)
    return {key: source.group[key] for key in keys if key != UNCORRECTED and source.group.get(key) is not None}


def _gather(
    sources: Sequence[Source], values_of: Callable[[Source], Group], to: Any
) -> tuple[list[Group], list[Change]]:
    """Return one group for each old one, in two if parts of it differ now, and what changes for each parameter."""
    groups: dict[tuple[int, Any, float], Group] = {}
    changes = []
    for source in sources:
        values = values_of(source)
        key = id(source.group), values.get("corrected"), values["weight_decay"]
        group = groups.setdefault(key, {**values, "params": []})
        group["params"].append((source.name, source.parameter))
        decay = values["weight_decay"] if values.get("corrected") is False else source.weight_decay
        changes.append(Change(source, to, {**values, "weight_decay": decay}, *_steady(source, decay)))
    return list(groups.values()), changes


def _steady(source: Source, decay: float) -> tuple[float, float, float]:
    """Return U^2 per element of a matrix of Muon's, and C^2 with the decay before and after."""
    if source.kind != "Muon" or not source.eta or not source.parameter.numel():
        return 0.0, 0.0, 0.0
    was, now = (
        theory.steady_norm_sq(source.peak, either, source.alpha, nesterov=source.nesterov, limit=True)
        for either in (source.weight_decay, decay)
    )
    return source.update_norm_sq / source.parameter.numel(), was, now


def _torch_state(source: Source) -> dict[str, Tensor]:
    """Return the state as torch keeps it: in the dtype of the weights, and the number of steps on the CPU."""
    state: dict[str, Tensor] = {}
    for key in _STATE[source.kind]:
        value = source.state.get(key)
        if isinstance(value, Tensor):
            if not is_dtensor(source.parameter) and (gather := getattr(value, "full_tensor", None)) is not None:
                value = gather()  # sharded over a mesh
            state[key] = value.cpu().clone() if key == "step" else value.to(source.parameter.dtype, copy=True)
    return state
