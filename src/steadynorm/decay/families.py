"""What the correction must know of an optimizer: is its decay decoupled, and what does its momentum do to the norm?

| family | recognised by (a class or one it derives from) | momentum read from | factor F |
|---|---|---|---|
| adam | AdamW; Adam, NAdam, RAdam with decoupled_weight_decay; "Adam" in the name and `decoupled=True` | - | 1 |
| muon | "Muon" in the name | 1 - `momentum`, `nesterov` (must be there if momentum moves) | G(alpha_t)/G(alpha_0) |
| scion | our Scion | `alpha`, `nesterov` | G(alpha_t)/G(alpha_0) |
| lion | "Lion" in the name | `betas` | G(betas_t)/G(betas_0) |
| sgd | our SGDC | `alpha`, `trace` | 1; with trace (alpha_0/alpha_t)^2 |
| other | `decoupled=True` | - | 1 |

Whatever the class, a group whose flags say that its decay is coupled, fixed or corrected already is refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.theory.momentum import check_alpha

Group = dict[str, Any]
Momentum = float | list[float]
Target = Callable[[float, float, Group, theory.Overlap | None], float]

_COUPLED = ("SGD", "ASGD", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop")
_NO_DECAY = ("LBFGS", "SparseAdam")
_FLAGGED = ("Adam", "NAdam", "RAdam")  # decoupled only if their group says so
_DECOUPLING = ("weight_decouple", "decoupled_decay")  # flags of pytorch_optimizer and timm


@dataclass(frozen=True)
class Family:
    """How one kind of optimizer's norm depends on its momentum.

    momentum: the group's momentum, saved as the initial one; None where it does not matter.
    gain: G of such a momentum; F = gain(now)/gain(initial).
    target: (steady_norm_sq, lr, group, kernel) -> decay, or None where there is no absolute target.
    word: the group's key for its momentum, in which a caller names the reference.
    """

    name: str
    momentum: Callable[[Group], Momentum] | None = None
    gain: Callable[[Any, Group], float] | None = None
    target: Target | None = None
    word: str | None = None
    lmo: str | None = None  # whose overlap kernel overlap="exact" takes

    def factor(self, group: Group) -> float:
        """F_t = G(momentum now) / G(initial momentum); exactly 1 while it has not moved."""
        if self.momentum is None or self.gain is None:
            return 1.0
        now, initial = self.momentum(group), group["initial_momentum"]
        return 1.0 if now == initial else self.gain(now, group) / self.gain(initial, group)

    def reference(self, group: Group, value: float | Sequence[float]) -> Momentum:
        """Return the momentum at which F = 1, given in the group's own words; ValueError if there is no such thing."""
        if self.momentum is None or self.gain is None or self.word is None:
            raise ValueError(f"reference_momentum: the decay of {self.name} does not follow momentum; leave it out")
        try:
            momentum = self.momentum({**group, self.word: value})
            self.gain(momentum, group)
        except TypeError:
            raise ValueError(f"reference_momentum={value!r} is no value for group[{self.word!r}]") from None
        return momentum

    def require_target(self) -> Target:
        """How a target becomes a decay, or ValueError if this family has none."""
        if self.target is None:
            raise ValueError(
                f"steady_norm_sq: the size of {self.name} updates does not follow from lr and decay; leave it out "
                "(the correction is then relative to peak_lr)"
            )
        return self.target


def alpha_of(group: Group) -> float:
    """Return alpha, the weight of the new gradient, of one of our own groups."""
    return float(group["alpha"])


def muon_alpha_of(group: Group) -> float:
    """Return 1 - momentum; 1 in a group without momentum (a Muon's auxiliary Adam groups).

    Somebody else's `alpha` in the group means something else and is not read.
    """
    return 1 - float(group.get("momentum", 0.0))


def nesterov_of(group: Group) -> bool:
    """Whether the momentum is Nesterov's; a group that does not say is taken not to."""
    return bool(group.get("nesterov", False))


def betas_of(group: Group) -> list[float]:
    """Both betas, as floats."""
    return [float(beta) for beta in group["betas"]]


def _ema_gain(alpha: float, group: Group) -> float:
    return theory.momentum_gain(alpha, nesterov=nesterov_of(group))


def _ema_target(target: float, lr: float, alpha: float, group: Group, kernel: theory.Overlap | None) -> float:
    return theory.weight_decay_for(target, lr, alpha, nesterov=nesterov_of(group), overlap=kernel or "linear")


def said(group: Group) -> Group:
    """A Muon's group, if it says whether its momentum is Nesterov's. Keller Jordan's always is and has no such key."""
    if "nesterov" not in group and "momentum" in group:
        raise ValueError(
            "the decay depends on whether its momentum is Nesterov's, which the group does not say; "
            "set group['nesterov'] = True (Keller Jordan's Muon) or False"
        )
    return group


ADAM = Family("adam", target=lambda target, lr, *_: theory.adam_weight_decay_for(target, lr))
OTHER = Family("other")
SGD = Family("sgd", alpha_of, lambda alpha, group: check_alpha(alpha) ** -2 if group.get("trace") else 1.0)
MUON = Family(
    "muon",
    muon_alpha_of,
    lambda alpha, group: _ema_gain(alpha, said(group)),
    lambda target, lr, group, kernel: _ema_target(target, lr, muon_alpha_of(group), said(group), kernel),
    word="momentum",
    lmo="spectral",
)
SCION = Family(
    "scion",
    alpha_of,
    _ema_gain,
    lambda target, lr, group, kernel: _ema_target(target, lr, alpha_of(group), group, kernel),
    word="alpha",
)
LION = Family(
    "lion",
    betas_of,
    lambda betas, _: theory.lion_gain(*betas),
    lambda target, lr, group, _: theory.lion_weight_decay_for(target, lr, *betas_of(group)),
    word="betas",
)

FAMILIES = {each.name: each for each in (ADAM, OTHER, SGD, MUON, SCION, LION)}


def group_label(index: int, group: Group) -> str:
    """How errors name a group.

    >>> group_label(2, {"name": "head"}), group_label(0, {})
    ('group 2 ("head")', 'group 0')
    """
    return f'group {index} ("{group["name"]}")' if "name" in group else f"group {index}"


def refuse_scion_groups(group: Group) -> None:
    """ValueError for a group that `param_groups` made for Scion: its lr and target mean another thing elsewhere."""
    if group.get("lmo") is not None:
        raise ValueError(
            f"it has lmo={group['lmo']!r}, so it is for Scion and ScionC; use param_groups(model, kind='adam')"
        )


def unwrapped(optimizer: Optimizer, where: str = "correct") -> Optimizer:
    """The optimizer inside the wrappers of trainers (Accelerate's, Lightning's), which have it as `.optimizer`.

    TypeError for something else, such as a model; `where` names who was given it."""
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{where} takes an optimizer, not {type(optimizer).__name__}; make one first, as in "
            f"{where}(torch.optim.AdamW(model.parameters()))"
        )
    return optimizer


def family_of(optimizer: Optimizer, *, decoupled: bool | None = None) -> Family:
    """The family of an optimizer, or a ValueError that says why its decay cannot be corrected.

    >>> import torch
    >>> family_of(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])).name
    'adam'
    """
    names, groups = [cls.__name__ for cls in type(optimizer).__mro__], optimizer.param_groups
    reason = _why_not(names, groups)
    if reason is None and decoupled is False:
        reason = "it was declared coupled (decoupled=False), and only decoupled decay can be corrected"
    if reason is not None:
        raise ValueError(f"correct: {names[0]}: {reason}")
    if "AdamW" in names or any(name in _FLAGGED for name in names):
        return ADAM
    if any("Scion" in name for name in names):
        return _readable(SCION, optimizer)
    if any("Muon" in name for name in names):
        return _readable(MUON, optimizer)
    if any("Lion" in name for name in names):
        return _readable(LION, optimizer)
    if not decoupled and not all("base_weight_decay" in group for group in groups):  # a corrected copy has it
        raise ValueError(
            f"correct: {names[0]} is unknown; pass decoupled=True if it does theta <- (1 - lr * weight_decay) theta - lr u"
        )
    return ADAM if any("Adam" in name for name in names) else OTHER


def flag_against(group: Group) -> str | None:
    """Return why a group's own flags rule out theta <- (1 - lr weight_decay) theta - lr u, or None if they do not.

    >>> flag_against({"weight_decouple": True, "fixed_decay": False}) is None
    True
    """
    for flag in _DECOUPLING:
        if group.get(flag) is False:
            return f"{flag}=False: its decay is added to the gradient (coupled L2); use {flag}=True or AdamW"
    if group.get("fixed_decay"):
        return (
            "fixed_decay=True: its decay does not scale with the lr; use fixed_decay=False and divide weight_decay by "
            "the peak lr"
        )
    if group.get("corrected_weight_decay"):
        return "corrected_weight_decay=True: it corrects its decay itself; turn that off, or leave correct() out"
    return None


def _why_not(names: list[str], groups: list[Group]) -> str | None:
    if "Adafactor" in names:
        return "it scales its lr by the weights' RMS, so the norm does not follow lr and decay"
    if any(name in _NO_DECAY for name in names):
        return "it has no weight decay to correct"
    if any(name in _COUPLED for name in names):
        return "its decay is added to the gradient (coupled L2); use steadynorm.SGDC or AdamW"
    flagged = "AdamW" not in names and any(name in _FLAGGED for name in names)
    if flagged and not all(group.get("decoupled_weight_decay", False) for group in groups):
        return "its decay is added to the gradient (coupled L2); use AdamW or decoupled_weight_decay=True"
    if reason := next(filter(None, map(flag_against, groups)), None):
        return reason
    if not any("weight_decay" in group for group in groups):
        return "no group has a weight_decay to correct"
    if any("Scion" in name for name in names) and not all("alpha" in group for group in groups):
        return "its momentum= means the weight of the new gradient; use steadynorm.Scion with from_radius(lr, radius)"
    return None


def _readable(family: Family, optimizer: Optimizer) -> Family:
    """The family, if its momentum can be read from every group that has one."""
    name = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        if family is LION and "betas" not in group:
            raise ValueError(f"correct: group {index} of {name} has no 'betas' to read its momentum from")
        if family is SCION and not 0 < alpha_of(group) <= 1:
            raise ValueError(f"correct: group {index} of {name} has alpha {alpha_of(group):g}, outside (0, 1]")
        if family is MUON and not 0 < muon_alpha_of(group) <= 1:
            raise ValueError(f"correct: group {index} of {name} has momentum {group['momentum']:g}, outside [0, 1)")
    if family is MUON and not any("momentum" in group for group in optimizer.param_groups):
        raise ValueError(f"correct: no group of {name} has a 'momentum' to read")
    return family
