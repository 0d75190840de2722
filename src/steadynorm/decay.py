"""The corrected decay coefficient, and `correct(optimizer)`: the same correction for anybody's optimizer.

    lambda_t = lambda (gamma_t / gamma_peak) F_t            relative: keeps the norm that peak lr and lambda give
    lambda_t = the decay whose steady state is a target     absolute: `steady_norm_sq`

F is what a changing momentum does to the norm: G(alpha_t)/G(alpha_0) for normalised updates (Muon, Lion), 1 where
the total contribution of a gradient does not depend on it (Adam family, EMA SGD), (alpha_0/alpha_t)^2 for trace SGD.
Everything a resumed run needs is in the parameter groups, under the keys of `KEYS`.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.families import Family, family_of

KEYS = ("base_weight_decay", "peak_lr", "peak_lr_given", "base_momentum", "corrected")

Group = dict[str, Any]


def corrected_weight_decay(group: Group, family: Family, kernel: theory.Overlap | None = None) -> float:
    """lambda_t of one group, from its keys alone: floats in, a float out.

    >>> from steadynorm.families import ADAM
    >>> group = {"lr": 5e-4, "peak_lr": 1e-3, "base_weight_decay": 0.1, "betas": (0.9, 0.999)}
    >>> corrected_weight_decay(group, ADAM)
    0.05
    """
    lr = float(group["lr"])
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr={lr} must be finite and not negative")
    target = group.get("steady_norm_sq")
    if target is not None:
        return family.weight_decay_for(float(target), lr, group, kernel)
    peak = group["peak_lr"]
    if not group.get("peak_lr_given", False) and lr > peak * (1 + 1e-6):
        raise ValueError(
            f"lr={lr:g} exceeds the guessed peak_lr={peak:g}; pass peak_lr=<the schedule's maximum> to correct()"
        )
    if peak == 0:
        return 0.0
    return group["base_weight_decay"] * (lr / peak) * family.factor(group)


class Correction:
    """A step pre-hook that writes lambda_t into each corrected group; kept apart so that it can be recognised."""

    def __init__(self, family: Family):
        self.family = family
        self.known: list[Group] = []  # keys per group, for checkpoints that lack them

    def __call__(self, optimizer: Optimizer, args: Any = None, kwargs: Any = None) -> None:
        values = []
        for index, group in enumerate(optimizer.param_groups):
            if "base_weight_decay" not in group:  # added after correct()
                prepare_group(group, self.family)
            values.append(self._value(index, group))
        for group, value in zip(optimizer.param_groups, values, strict=True):
            if value is not None:
                group["weight_decay"] = value

    def _value(self, index: int, group: Group) -> float | None:
        if not group["corrected"] or group["base_weight_decay"] == 0:
            return None
        try:
            return corrected_weight_decay(group, self.family, self._kernel(group))
        except ValueError as error:
            raise ValueError(f"{group_label(index, group)}: {error}") from None

    def _kernel(self, group: Group) -> theory.Overlap | None:
        if group.get("overlap", "linear") == "linear" or self.family.lmo is None:
            return None
        kernels = {theory.overlap(self.family.lmo, p.shape) for p in group["params"]}
        if len(kernels) > 1:
            raise ValueError(
                f"overlap='exact' needs one kernel per group, but its shapes have {len(kernels)}; "
                "split the group by shape or use overlap='linear'"
            )
        return kernels.pop() if kernels else None

    def remember(self, optimizer: Optimizer) -> None:
        """Note the groups' keys, for a checkpoint that lacks them."""
        self.known = [{key: group[key] for key in KEYS if key in group} for group in optimizer.param_groups]

    def after_load(self, optimizer: Optimizer) -> None:
        """A checkpoint from before the correction: its weight_decay is the base, the rest stays as it was."""
        for index, group in enumerate(optimizer.param_groups):
            if "base_weight_decay" not in group:
                known = dict(self.known[index]) if index < len(self.known) else {}
                group.update(known | {"base_weight_decay": float(group["weight_decay"])})
                if not known:
                    prepare_group(group, self.family)


def correct(
    optimizer: Optimizer,
    *,
    skip: Iterable[Any] = (),
    peak_lr: float | Sequence[float] | None = None,
    steady_norm_sq: float | None = None,
    overlap: str = "linear",
    decoupled: bool | None = None,
) -> Optimizer:
    """Correct the decoupled weight decay of an optimizer; returns it.

        lambda_t = lambda (gamma_t / gamma_peak) F_t     at every step, for any schedule

    Arguments:
        optimizer: AdamW, Adam, NAdam or RAdam with decoupled decay, torch's Muon, Lion and others (see `families`).
        skip: parameters, names or group indices that keep constant decay: the output layer under cross-entropy.
        peak_lr: the schedule's maximum, one number or one per group. Default: the group's `max_lr` (OneCycle), else
            `initial_lr` (torch schedulers), else `lr`.
        steady_norm_sq: an absolute target in place of peak and base decay: E|theta|^2/|u|^2 for Muon and Lion, the
            mean square of an element for the Adam family.
        overlap: "linear" (the paper's formula) or "exact" (Muon: one kernel a group).
        decoupled: True for a class we do not know whose decay is decoupled.

    The correction is a step pre-hook; what it needs is saved with the groups. torch drops hooks on deepcopy and
    pickle: `correct(copy)` with no arguments restores it.

    >>> p = torch.nn.Parameter(torch.ones(2))
    >>> optimizer = correct(torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1))
    >>> optimizer.param_groups[0]["lr"] = 5e-4  # what a scheduler does
    >>> p.grad = torch.zeros(2); optimizer.step(); optimizer.param_groups[0]["weight_decay"]
    0.05
    """
    if attached(optimizer):
        raise ValueError(f"correct: {type(optimizer).__name__} is corrected already; call correct() once per optimizer")
    family = family_of(optimizer, decoupled=decoupled)
    if overlap not in ("linear", "exact"):
        raise ValueError(f"correct: overlap={overlap!r} is unknown; choose 'linear' or 'exact'")
    if steady_norm_sq is not None:
        if not (steady_norm_sq > 0 and math.isfinite(steady_norm_sq)):
            raise ValueError(f"correct: steady_norm_sq={steady_norm_sq} must be positive and finite")
        family.check_target()
    peaks = _peaks(peak_lr, len(optimizer.param_groups))
    _split_skipped(optimizer, list(skip))
    if len(peaks) != len(optimizer.param_groups):  # a group was split: its parts follow at the end
        if isinstance(peak_lr, Sequence):
            raise ValueError(
                "correct: peak_lr per group and a skip that splits a group do not go together; group first"
            )
        peaks = [peaks[0]] * len(optimizer.param_groups)
    for group, peak in zip(optimizer.param_groups, peaks, strict=True):
        prepare_group(group, family, peak_lr=peak)
        if steady_norm_sq is not None:
            group["steady_norm_sq"] = float(steady_norm_sq)
        if overlap != "linear":
            group["overlap"] = overlap
    attach(optimizer, family)
    return optimizer


def attach(optimizer: Optimizer, family: Family) -> Correction:
    """Hook a Correction whose groups are prepared."""
    correction = Correction(family)
    optimizer.register_step_pre_hook(correction)
    optimizer.register_load_state_dict_pre_hook(lambda this, _: correction.remember(this))
    optimizer.register_load_state_dict_post_hook(correction.after_load)
    return correction


def attached(optimizer: Optimizer) -> bool:
    """Whether a Correction is hooked to this optimizer, or it corrects by itself."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return getattr(optimizer, "corrects_itself", False) or any(isinstance(hook, Correction) for hook in hooks)


def prepare_group(group: Group, family: Family, *, peak_lr: float | None = None) -> None:
    """Write the keys of the correction, keeping those a checkpoint or a copied optimizer brought."""
    group.setdefault("base_weight_decay", float(group.get("weight_decay", 0.0)))
    group.setdefault("corrected", True)
    group.setdefault("base_momentum", family.momentum(group))
    if peak_lr is not None:
        if not (peak_lr > 0 and math.isfinite(peak_lr)):
            raise ValueError(f"peak_lr={peak_lr} must be positive and finite")
        group.update(peak_lr=float(peak_lr), peak_lr_given=True)
    elif "peak_lr" not in group or group["peak_lr"] is None:
        guess = next(group[key] for key in ("max_lr", "initial_lr", "lr") if group.get(key) is not None)
        group.update(peak_lr=float(guess), peak_lr_given=False)
    group.setdefault("peak_lr_given", True)


def group_label(index: int, group: Group) -> str:
    """How errors name a group.

    >>> group_label(2, {"name": "head"}), group_label(0, {})
    ('group 2 ("head")', 'group 0')
    """
    return f'group {index} ("{group["name"]}")' if "name" in group else f"group {index}"


def _peaks(peak_lr: float | Sequence[float] | None, groups: int) -> list[float | None]:
    if isinstance(peak_lr, Sequence):
        if len(peak_lr) != groups:
            raise ValueError(f"correct: peak_lr has {len(peak_lr)} values for {groups} groups")
        return list(peak_lr)
    return [peak_lr] * groups


def _split_skipped(optimizer: Optimizer, skip: list[Any]) -> None:
    """Mark skipped groups; split a group of which only some parameters are skipped. Checks all before it writes."""
    indices = {entry for entry in skip if isinstance(entry, int)}
    names = {entry for entry in skip if isinstance(entry, str)}
    wanted = {id(entry) for entry in skip if isinstance(entry, torch.Tensor)}
    groups = optimizer.param_groups
    if bad := [entry for entry in skip if not isinstance(entry, int | str | torch.Tensor)]:
        raise TypeError(f"correct: skip takes parameters, names and group indices, got {bad[0]!r}")
    if bad := [index for index in indices if not -len(groups) <= index < len(groups)]:
        raise ValueError(f"correct: skip names group {bad[0]}, but there are {len(groups)} groups")
    indices = {index % len(groups) for index in indices}
    found: set[Any] = set()
    parts: list[tuple[int, list[int]]] = []  # group index, positions skipped in it
    for index, group in enumerate(groups):
        labels = group.get("param_names") or [None] * len(group["params"])
        hit = [k for k, p in enumerate(group["params"]) if id(p) in wanted or labels[k] in names]
        found |= {id(group["params"][k]) for k in hit} | {labels[k] for k in hit}
        if index in indices or (hit and len(hit) == len(group["params"])):
            parts.append((index, []))
        elif hit:
            parts.append((index, hit))
    if missing := sorted(names - found):
        raise ValueError(f"correct: skip names {missing[0]!r}, which no group has; pass model.named_parameters()")
    if wanted - found:
        raise ValueError("correct: skip holds a parameter that this optimizer does not have")
    split = [index for index, hit in parts if hit]
    if split and (optimizer.state or any("initial_lr" in groups[index] for index in split)):
        raise ValueError(
            f"correct: skip would split {group_label(split[0], groups[split[0]])}, which has a scheduler or state already; "
            "call correct() before both, or put the skipped parameters in a group of their own"
        )
    for index, hit in parts:
        (_split(optimizer, groups[index], hit) if hit else groups[index])["corrected"] = False


def _split(optimizer: Optimizer, group: Group, positions: list[int]) -> Group:
    """Move some parameters of a group to a new one with the same settings; returns the new one."""
    moved = set(positions)
    new = {key: value for key, value in group.items() if key not in ("params", "param_names")}
    for key in ("params", "param_names"):
        if key in group:
            new[key] = [value for k, value in enumerate(group[key]) if k in moved]
            group[key] = [value for k, value in enumerate(group[key]) if k not in moved]
    optimizer.param_groups.append(new)
    return new
