"""What `convert` converts: every parameter of torch's AdamW, torch's Muon, MuonC or the published Scion, in our terms."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.conversion.equivalents import from_adamw
from steadynorm.conversion.official_scion import LmoScale, lmo_scale_of
from steadynorm.decay.families import ADAM, MUON, OTHER, OWN_MUON, Family
from steadynorm.decay.hold import BALANCE_STEPS
from steadynorm.decay.peak import check_guess
from steadynorm.decay.rule import (
    DecayRule,
    Relative,
    Target,
    correction_keys,
    decay_rule,
    group_label,
    is_uncorrected,
    weight_decay_now,
)
from steadynorm.groups.builder import from_radius
from steadynorm.prediction import ParamSetting

Group = dict[str, Any]
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr")  # what torch's schedulers keep in a group
CHOICES = {"hold": "decay", "cautious": False, "maximize": False}  # what must not get lost, and its default
MOMENTUM = {"AdamW": "exp_avg", "Muon": "momentum_buffer", "Scion": "momentum_buffer"}


@dataclass(frozen=True)
class Source:
    """One parameter under the old optimizer, whose kind is AdamW, Muon or Scion."""

    kind: str
    name: str
    parameter: Tensor
    group: Group
    state: Mapping[str, Any]
    peak_keys: Group  # `peak_lr` of the group and `peak_lr_given`, as `correct` finds them
    is_under_way: bool  # whether the old optimizer has state, and so may have seen its largest lr

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape) or (1,)  # a scalar is a vector of one

    @property
    def peak(self) -> float:
        """The schedule's largest lr, which together with the decay determines the norm."""
        if self.peak_keys["peak_lr"] == 0:
            raise ValueError(f"convert: the peak lr of {self.name} is 0; pass peak_lr=<the schedule's maximum>")
        return self.peak_keys["peak_lr"]

    @property
    def eta(self) -> float:
        """The decay per step at the peak, with the momentum of now."""
        return self.peak * self.weight_decay

    @property
    def weight_decay(self) -> float:
        """The decay at the peak lr with the momentum of now, which together give the norm.

        base_weight_decay G(momentum now) / G(the momentum to which the base belongs), where the decay is corrected
        """
        if not isinstance(self.decay_rule, Relative):
            return self.base_weight_decay
        own = {"initial_momentum": self.family.momentum(self.group)}  # of a group that was never corrected
        return self.base_weight_decay * self.family.factor({**own, **self.group})

    @property
    def base_weight_decay(self) -> float:
        """The decay that was set, not that of the moment; for a target the one that reaches it at the peak.

        The published Scion decays by lr itself, or not at all.
        """
        if self.kind == "Scion":
            return 0.0 if self.group["unconstrained"] else 1.0
        if not isinstance(rule := self.decay_rule, Target):
            return rule.weight_decay
        at_peak = {**self.group, "lr": self.peak, "cautious": False}  # cautious decay aims at the same norm
        exact = rule.overlap == "exact" and self.family.exact_lmo is not None
        kernel = self.family.kernel(self.shape, at_peak) if exact else None
        return weight_decay_now(at_peak, self.family, kernel)

    @property
    def decay_rule(self) -> DecayRule:
        """What its group asks of the decay; not of the published Scion, whose groups say it in another way."""
        return decay_rule(self.group, self.parameter)

    @property
    def family(self) -> Family:
        """What the theory must know of AdamW, of torch's Muon or of MuonC."""
        if self.kind == "AdamW":
            return ADAM
        return OWN_MUON if "use_muon" in self.group else MUON

    def choices(self, settings: Mapping[str, Any]) -> Group:
        """Return how its norm is held and whether it ascends, where that is not the default and `settings` does not say it."""
        uncorrected = is_uncorrected(self.group, self.parameter)  # then it is not held
        chosen = {
            key: self.group[key]
            for key, default in CHOICES.items()
            if self.group.get(key, default) != default and (key == "maximize" or not uncorrected)
        }
        if "hold" in chosen:
            chosen["balance_steps"] = self.group.get("balance_steps", BALANCE_STEPS)
        return {key: value for key, value in chosen.items() if key not in settings}

    @property
    def alpha(self) -> float:
        """The weight of the new gradient, which the published Scion calls momentum."""
        if self.kind == "AdamW":
            return 1 - float(self.group["betas"][0])
        return float(self.group["momentum"]) if self.kind == "Scion" else 1 - float(self.group["momentum"])

    @property
    def nesterov(self) -> bool:
        return self.kind != "AdamW" and bool(self.group.get("nesterov", False))

    @property
    def lmo_scale(self) -> LmoScale:
        """For the published Scion, our lmo and the size of its update relative to ours."""
        try:
            return lmo_scale_of(self.group["norm"], self.group["norm_kwargs"], self.parameter.shape)
        except ValueError as error:
            raise ValueError(f"convert: {self.name}: {error}") from None

    @property
    def update_norm_sq(self) -> float:
        """|u|^2 of Muon's update with an exact polar factor, for torch's Muon and ours."""
        own = {"lmo": "spectral", "blocks": 1, **self.group, "polar": "svd", "polar_steps": 1}
        norm_sq = OWN_MUON.update_norm_sq(self.shape, own)
        assert norm_sq is not None
        return norm_sq

    def factor(self, setting: ParamSetting) -> float:
        """Return our lr / theirs at equal effective lr, so that one gradient contributes as much in total."""
        if self.kind == "AdamW":
            return from_adamw(1.0, setting)
        theirs = theory.effective_lr(1.0, self.alpha, nesterov=self.nesterov)
        ours = theory.effective_lr(1.0, setting.alpha, nesterov=setting.nesterov)
        if self.kind == "Muon":
            return math.sqrt(self.update_norm_sq / setting.update_norm_sq) * theirs / ours
        return from_radius(1.0, float(self.group["scale"]) * self.lmo_scale.size)["lr"] * theirs / ours


def sources_of(optimizer: Optimizer, names: Mapping[int, str], peaks: Sequence[float | None]) -> list[Source]:
    """Return every parameter of an optimizer.

    `names` maps the ids of the model's parameters to their names; `peaks` has the peak lr of each group where it was passed.
    """
    sources = []
    for index, (group, peak_lr) in enumerate(zip(optimizer.param_groups, peaks, strict=True)):
        kind, where = kind_of(optimizer, group), f"convert: {type(optimizer).__name__}, {group_label(index, group)}"
        try:
            keys = correction_keys(group, OTHER, peak_lr=peak_lr)
            check_guess(optimizer, group, keys)
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from None
        peak = {key: keys[key] for key in ("peak_lr", "peak_lr_given")}
        for k, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"{where}: parameter {k} of shape {tuple(p.shape)} is not in the model; pass the model that it trains"
                )
            state = optimizer.state.get(p, {})
            sources.append(Source(kind, names[id(p)], p, group, state, peak, bool(optimizer.state)))
    return sources


def kind_of(optimizer: Optimizer, group: Group) -> str:
    """Return AdamW, Muon or Scion, by the class name and the group keys; raise ValueError for another optimizer."""
    names, groups = [cls.__name__ for cls in type(optimizer).__mro__], optimizer.param_groups
    if "MuonC" in names:
        return "Muon" if group["use_muon"] else "AdamW"
    if any("Scion" in name for name in names) and {"norm", "norm_kwargs", "scale", "unconstrained"} <= groups[0].keys():
        return "Scion"
    if "Muon" in names and {"adjust_lr_fn", "momentum"} <= groups[0].keys():
        return "Muon"
    if "AdamW" in names or ("Adam" in names and all(group.get("decoupled_weight_decay") for group in groups)):
        return "AdamW"
    raise ValueError(f"convert: {names[0]} is none of torch's AdamW, torch's Muon, MuonC and the published Scion")
