"""What we move from: every parameter of torch's AdamW, torch's Muon or the published Scion, in the theory's words."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.conversion.official_scion import Rule, rule_of
from steadynorm.conversion.translation import AdamW, Muon
from steadynorm.decay.rule import group_label
from steadynorm.groups.builder import from_radius
from steadynorm.prediction import ParamSetting

Group = dict[str, Any]
SCHEDULED = ("lr", "initial_lr", "max_lr", "min_lr")  # what torch's schedulers keep in a group
MOMENTUM = {"AdamW": "exp_avg", "Muon": "momentum_buffer", "Scion": "momentum_buffer"}


@dataclass(frozen=True)
class Source:
    """One parameter under the old optimizer."""

    kind: str  # AdamW, Muon or Scion
    name: str
    parameter: Tensor
    group: Group
    state: Mapping[str, Any]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape) or (1,)  # a scalar is a vector of one

    @property
    def peak(self) -> float:
        """The schedule's largest lr, which with the decay sets the norm: guessed as `correct` does."""
        found = [float(self.group[key]) for key in ("peak_lr", "max_lr", "initial_lr", "lr") if self.group.get(key)]
        if not found:
            raise ValueError(
                f"convert: {self.name} has lr 0 and no initial_lr; convert before training ends, or set its lr"
            )
        return found[0]

    @property
    def eta(self) -> float:
        """Decay of a step at the peak. The published Scion decays by lr itself; unconstrained it does not."""
        if self.kind == "Scion":
            return 0.0 if self.group["unconstrained"] else self.peak
        return self.peak * float(self.group.get("base_weight_decay", self.group["weight_decay"]))

    @property
    def alpha(self) -> float:
        """The weight of the new gradient: what the published Scion calls momentum."""
        if self.kind == "AdamW":
            return 1 - float(self.group["betas"][0])
        return float(self.group["momentum"]) if self.kind == "Scion" else 1 - float(self.group["momentum"])

    @property
    def nesterov(self) -> bool:
        return bool(self.group.get("nesterov", False))

    @property
    def rule(self) -> Rule:
        """Of the published Scion: our lmo, and the size of its update beside ours."""
        try:
            return rule_of(self.group["norm"], self.group["norm_kwargs"], self.parameter.shape)
        except ValueError as error:
            raise ValueError(f"convert: {self.name}: {error}") from None

    def factor(self, setting: ParamSetting) -> float:
        """Our lr / theirs for the same effective lr, that is, the same size of what one gradient does in the end."""
        if self.kind == "AdamW":
            return AdamW(1.0, 1.0).scion_lr(setting)
        if self.kind == "Muon":
            adjust = self.group["adjust_lr_fn"] or "original"
            return Muon(1.0, 1.0, float(self.group["momentum"]), self.nesterov, adjust).scion_lr(setting)
        theirs = theory.effective_lr(1.0, self.alpha, nesterov=self.nesterov)
        ours = theory.effective_lr(1.0, setting.alpha, nesterov=setting.nesterov)
        return from_radius(1.0, float(self.group["scale"]) * self.rule.size)["lr"] * theirs / ours


def sources_of(optimizer: Optimizer, names: Mapping[int, str]) -> list[Source]:
    """Every parameter of an optimizer; names: by id of the model's parameters."""
    kind, found = kind_of(optimizer), []
    for index, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if id(p) not in names:
                raise ValueError(
                    f"convert: {type(optimizer).__name__}, {group_label(index, group)}: parameter {k} of shape "
                    f"{tuple(p.shape)} is not in the model; pass the model that it trains"
                )
            found.append(Source(kind, names[id(p)], p, group, optimizer.state.get(p, {})))
    return found


def kind_of(optimizer: Optimizer) -> str:
    """AdamW, Muon or Scion, by the class's name and the groups' keys; ValueError for another."""
    names, groups = [cls.__name__ for cls in type(optimizer).__mro__], optimizer.param_groups
    if any("Scion" in name for name in names) and {"norm", "norm_kwargs", "scale", "unconstrained"} <= groups[0].keys():
        return "Scion"
    if "Muon" in names and {"adjust_lr_fn", "momentum"} <= groups[0].keys():
        return "Muon"
    if "AdamW" in names or ("Adam" in names and all(group.get("decoupled_weight_decay") for group in groups)):
        return "AdamW"
    raise ValueError(f"convert: {names[0]} is none of torch's AdamW, torch's Muon and the published Scion")
