"""What the correction must know of an optimizer: is its decay decoupled, and what does its momentum do to the norm?

| family | recognised by | momentum read from | factor F |
|---|---|---|---|
| adam | AdamW, Adam / NAdam / RAdam with decoupled_weight_decay, names with "Adam" and `decoupled=True` | - | 1 |
| muon | a class name with "Muon" or "Scion" | `alpha`, else 1 - `momentum`; `nesterov` | G(alpha_t)/G(alpha_0) |
| lion | a class name with "Lion" | `betas` | G(betas_t)/G(betas_0) |
| sgd | our SGDC | `alpha`, `trace` | 1; with trace (alpha_0/alpha_t)^2 |
| other | `decoupled=True` | - | 1 |

The official Scion calls the weight of the new gradient `momentum`: pass it through our classes instead.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch.optim import Optimizer

from steadynorm import theory

Group = dict[str, Any]

_COUPLED = ("SGD", "ASGD", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop", "LBFGS", "SparseAdam")
_FLAGGED = ("Adam", "NAdam", "RAdam")  # decoupled only if their group says so


@dataclass(frozen=True)
class Family:
    """How one kind of optimizer's norm depends on its momentum.

    momentum: the group's momentum as one float or a list of floats, saved as the base.
    gain: G of such a momentum; F = gain(now)/gain(base).
    target: (steady_norm_sq, lr, group, kernel) -> decay, or None where there is no absolute target.
    """

    name: str
    momentum: Callable[[Group], float | list[float]]
    gain: Callable[[Any, Group], float]
    target: Callable[[float, float, Group, theory.Overlap | None], float] | None
    lmo: str | None = None  # whose overlap kernel overlap="exact" takes

    def factor(self, group: Group) -> float:
        """F_t = G(momentum now) / G(momentum at the start); exactly 1 while it has not moved."""
        now, base = self.momentum(group), group.get("base_momentum")
        if base is None or now == base:
            return 1.0
        return self.gain(now, group) / self.gain(base, group)

    def weight_decay_for(self, target: float, lr: float, group: Group, kernel: theory.Overlap | None) -> float:
        """The decay that reaches an absolute target."""
        self.check_target()
        assert self.target is not None
        return self.target(target, lr, group, kernel)

    def check_target(self) -> None:
        """Raise ValueError if this family has no absolute target."""
        if self.target is None:
            raise ValueError(
                f"steady_norm_sq: {self.name} updates scale with the gradient, so no target follows from lr and decay; "
                "leave it out (the correction is relative to peak_lr)"
            )


def _ema_alpha(group: Group) -> float:
    """alpha, the weight of the new gradient; 1 in a group without momentum (Muon's auxiliary Adam groups)."""
    return float(group["alpha"]) if "alpha" in group else 1 - float(group.get("momentum", 0.0))


def _nesterov(group: Group) -> bool:
    return bool(group.get("nesterov", False))


def _betas(group: Group) -> list[float]:
    return [float(beta) for beta in group["betas"]]


def _constant(group: Group) -> float:
    return 0.0


ADAM = Family("adam", _constant, lambda now, group: 1.0, lambda c, lr, *_: theory.adam_weight_decay_for(c, lr))
OTHER = Family("other", _constant, lambda now, group: 1.0, None)
SGD = Family("sgd", _ema_alpha, lambda alpha, group: alpha**-2 if group.get("trace") else 1.0, None)
MUON = Family(
    "muon",
    _ema_alpha,
    lambda alpha, group: theory.momentum_gain(alpha, nesterov=_nesterov(group)),
    lambda c, lr, group, kernel: theory.weight_decay_for(
        c, lr, _ema_alpha(group), nesterov=_nesterov(group), overlap=kernel or "linear"
    ),
    lmo="spectral",
)
LION = Family(
    "lion",
    _betas,
    lambda betas, group: theory.lion_gain(*betas),
    lambda c, lr, group, _: theory.lion_weight_decay_for(c, lr, *_betas(group)),
)


def family_of(optimizer: Optimizer, *, decoupled: bool | None = None) -> Family:
    """The family of an optimizer, or an error that says why its decay cannot be corrected.

    >>> import torch
    >>> family_of(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])).name
    'adam'
    """
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    name = names[0]
    if decoupled is False:
        raise ValueError(
            f"correct: {name} was declared coupled (decoupled=False); only decoupled decay can be corrected"
        )
    if "Adafactor" in names:
        raise ValueError(
            "correct: Adafactor scales its lr by the weight's RMS, so the norm does not follow lr and decay"
        )
    if "AdamW" in names:
        return ADAM
    if any(entry in _FLAGGED for entry in names):
        if all(group.get("decoupled_weight_decay", False) for group in optimizer.param_groups):
            return ADAM
        raise ValueError(
            f"correct: {name} here adds decay to the gradient (coupled L2); use AdamW or decoupled_weight_decay=True"
        )
    if type(optimizer).__module__.startswith("torch.optim") and name in _COUPLED:
        raise ValueError(
            f"correct: torch's {name} adds decay to the gradient (coupled L2); use steadynorm.SGDC or AdamW"
        )
    if "Muon" in name or "Scion" in name:
        return _checked(MUON, optimizer, "momentum")
    if "Lion" in name:
        return _checked(LION, optimizer, "betas")
    if not decoupled:
        raise ValueError(
            f"correct: {name} is unknown; pass decoupled=True if it does theta <- (1 - lr * weight_decay) theta - lr u"
        )
    return ADAM if "Adam" in name else OTHER


def _checked(family: Family, optimizer: Optimizer, key: str) -> Family:
    name, groups = type(optimizer).__name__, optimizer.param_groups
    if not any(key in group or "alpha" in group for group in groups):
        raise ValueError(f"correct: no group of {name} has {key!r} to read its momentum from")
    for index, group in enumerate(groups):
        if family is MUON and not 0 < _ema_alpha(group) <= 1:
            raise ValueError(f"correct: group {index} of {name} has momentum={group['momentum']}, outside [0, 1)")
    return family
