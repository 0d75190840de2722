"""Families: the one place that recognises an optimizer, and all that the theory must know about its kind.

| family | recognised by (a class or one it derives from) | momentum read from | factor F |
|---|---|---|---|
| adam | AdamW; Adam, NAdam, RAdam with decoupled_weight_decay; "Adam" in the name and `decoupled=True` | - | 1 |
| muon | "Muon" in the name | 1 - `momentum`, `nesterov` (required if momentum moves) | G(alpha_t)/G(alpha_0) |
| scion | our Scion | `alpha`, `nesterov` | G(alpha_t)/G(alpha_0) |
| lion | "Lion" in the name | `betas` | G(betas_t)/G(betas_0) |
| sgd | our SGDC | `alpha`, `trace` | 1; with trace (alpha_0/alpha_t)^2 |
| other | `decoupled=True` | - | 1 |

Whatever the class, a group whose flags say that its decay is coupled, fixed or already corrected is refused.
"""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.decay.rule import Group
from steadynorm.theory import Filter, Overlap
from steadynorm.theory.kernels import LINEAR
from steadynorm.theory.momentum import check_alpha
from steadynorm.theory.updates import Update, muon_update_norm_sq, update_of

Momentum: TypeAlias = float | list[float]

_COUPLED = ("SGD", "ASGD", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop")
_NO_DECAY = ("LBFGS", "SparseAdam")
_FLAGGED = ("Adam", "NAdam", "RAdam")  # decoupled only if their group says so
_DECOUPLING = ("weight_decouple", "decoupled_decay")  # flags of pytorch_optimizer and timm
_UNFORECAST = ("NAdam", "RAdam", "RenormalizedAdamW")  # their steps are not those of the Adam that the theory describes


class Family:
    """One kind of optimizer: how it reads momentum from a group, its momentum filter, and the size of its updates.

    What the weight norm does follows from these by `theory`. The base class is the family of optimizers about which
    nothing is known but that their decay is decoupled.

    Attributes:
        name: what the family is called in errors and checkpoints.
        momentum_key: the group key in which a caller names the momentum; None if the decay does not depend on it.
        exact_lmo: the lmo whose overlap kernel `overlap="exact"` takes.
        has_target: whether an absolute `steady_norm_sq` determines the decay.
        has_forecast: whether the theory can forecast the norm.
        is_linear: whether updates are linear in the momentum, so that forecasts are per element.
    """

    name = "other"
    momentum_key: str | None = None
    exact_lmo: str | None = None
    has_target = False
    has_forecast = False
    is_linear = False

    def momentum(self, group: Group) -> Momentum | None:
        """Return the group's momentum, which is saved as the initial one; None if it does not matter to the norm."""
        return None

    def gain(self, momentum: Any, group: Group) -> float:
        """Return G at this momentum."""
        return 1.0

    def factor(self, group: Group) -> float:
        """Return F_t = G(momentum now) / G(initial momentum); exactly 1 while the momentum has not moved."""
        now = self.momentum(group)
        if now is None or now == group["initial_momentum"]:
            return 1.0
        return self.gain(now, group) / self.gain(group["initial_momentum"], group)

    def reference(self, group: Group, value: float | Sequence[float]) -> Momentum:
        """Return the momentum at which F = 1, given in the group's own words.

        Raises:
            ValueError: If the decay of this family does not follow momentum, or `value` is not one.
        """
        if self.momentum_key is None:
            raise ValueError(f"reference_momentum: the decay of {self.name} does not follow momentum; leave it out")
        try:
            momentum = self.momentum({**group, self.momentum_key: value})
            self.gain(momentum, group)
        except TypeError:
            raise ValueError(f"reference_momentum={value!r} is no value for group[{self.momentum_key!r}]") from None
        assert momentum is not None
        return momentum

    def require_target(self) -> None:
        """Raise ValueError if no absolute target determines the decay of this family."""
        if not self.has_target:
            raise ValueError(
                f"steady_norm_sq: the size of {self.name} updates does not follow from lr and decay; leave it out "
                "(the correction is then relative to peak_lr)"
            )

    def target_decay(self, target: float, lr: float, group: Group, kernel: Overlap | None = None) -> float:
        """Return the decay whose steady state is `target`; `kernel` None stands for the paper's linear one."""
        raise NotImplementedError(self.name)

    def alpha(self, group: Group) -> float:
        """Return the weight of the new gradient."""
        raise NotImplementedError(self.name)

    def filter(self, group: Group) -> Filter:
        """Return the momentum as a filter of past gradients."""
        raise NotImplementedError(self.name)

    def effective_lr(self, group: Group) -> float:
        """Return the size of what one gradient does in the end, in units of its update."""
        return float(group["lr"])

    def kernel(self, shape: Sequence[int], group: Group) -> Overlap:
        """Return the overlap kernel of the updates of a parameter of this shape."""
        return LINEAR

    def update_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        """Return U^2 of a parameter of this shape, None if unknown; of linear updates the number of elements."""
        return float(math.prod(shape))


class _Adam(Family):
    name, has_target, has_forecast, is_linear = "adam", True, True, True

    def target_decay(self, target: float, lr: float, group: Group, kernel: Overlap | None = None) -> float:
        return theory.adam_weight_decay_for(target, lr)

    def alpha(self, group: Group) -> float:
        return 1 - _betas(group)[0]

    def filter(self, group: Group) -> Filter:
        return theory.ema(self.alpha(group))


class _Scion(Family):
    """Normalised updates of an exponential moving average."""

    name, momentum_key, has_target, has_forecast = "scion", "alpha", True, True

    def alpha(self, group: Group) -> float:
        return float(group["alpha"])

    def is_nesterov(self, group: Group) -> bool:
        """Return whether the momentum is Nesterov's, where the decay depends on it."""
        return _nesterov(group)

    def momentum(self, group: Group) -> float:
        return self.alpha(group)

    def gain(self, momentum: float, group: Group) -> float:
        return theory.momentum_gain(momentum, nesterov=self.is_nesterov(group))

    def target_decay(self, target: float, lr: float, group: Group, kernel: Overlap | None = None) -> float:
        nesterov = self.is_nesterov(group)
        return theory.weight_decay_for(target, lr, self.alpha(group), nesterov=nesterov, overlap=kernel or "linear")

    def filter(self, group: Group) -> Filter:
        return theory.ema(self.alpha(group), nesterov=_nesterov(group))

    def effective_lr(self, group: Group) -> float:
        return theory.effective_lr(float(group["lr"]), self.alpha(group), nesterov=self.is_nesterov(group))

    def kernel(self, shape: Sequence[int], group: Group) -> Overlap:
        update, blocks = _scion_update(shape, group)
        return update.overlap(shape, blocks=blocks)

    def update_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        update, blocks = _scion_update(shape, group)
        share = update.length_share(shape, blocks, group["polar"], group["polar_steps"])
        return update.update_norm_sq(shape, blocks=blocks) * share


class _Muon(_Scion):
    name, momentum_key, exact_lmo = "muon", "momentum", "spectral"

    def alpha(self, group: Group) -> float:
        """Return 1 - momentum; 1 in a group without momentum (a Muon's auxiliary Adam groups).

        Somebody else's `alpha` in the group means something else and is not read.
        """
        return 1 - float(group.get("momentum", 0.0))

    def is_nesterov(self, group: Group) -> bool:
        if "nesterov" not in group and "momentum" in group:
            raise ValueError(
                "the decay depends on whether its momentum is Nesterov's, which the group does not say; "
                "set group['nesterov'] = True (Keller Jordan's Muon) or False"
            )
        return _nesterov(group)

    def kernel(self, shape: Sequence[int], group: Group) -> Overlap:
        return theory.overlap("spectral", shape)

    def update_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        """Return |u|^2 of torch's Muon with its lr adjustment; None for another Muon, whose scale is unknown."""
        if not {"ns_coefficients", "ns_steps", "adjust_lr_fn"} <= group.keys():
            return None
        iteration = tuple(group["ns_coefficients"]), group["ns_steps"]
        return muon_update_norm_sq(shape, group["adjust_lr_fn"] or "original", iteration)


class _Lion(Family):
    name, momentum_key, has_target, has_forecast = "lion", "betas", True, True

    def momentum(self, group: Group) -> list[float]:
        return _betas(group)

    def gain(self, momentum: list[float], group: Group) -> float:
        return theory.lion_gain(*momentum)

    def target_decay(self, target: float, lr: float, group: Group, kernel: Overlap | None = None) -> float:
        return theory.lion_weight_decay_for(target, lr, *_betas(group))

    def alpha(self, group: Group) -> float:
        return 1 - _betas(group)[1]

    def filter(self, group: Group) -> Filter:
        return theory.lion(*_betas(group))

    def effective_lr(self, group: Group) -> float:
        return float(group["lr"]) * math.sqrt(theory.lion_gain(*_betas(group)))

    def kernel(self, shape: Sequence[int], group: Group) -> Overlap:
        return theory.overlap("lion", None)


class _SGD(Family):
    name, has_forecast, is_linear = "sgd", True, True

    def momentum(self, group: Group) -> float:
        return self.alpha(group)

    def gain(self, momentum: float, group: Group) -> float:
        return check_alpha(momentum) ** -2 if group.get("trace") else 1.0

    def alpha(self, group: Group) -> float:
        return float(group["alpha"])

    def filter(self, group: Group) -> Filter:
        nesterov, alpha = _nesterov(group), self.alpha(group)
        return theory.trace(1 - alpha, nesterov=nesterov) if group["trace"] else theory.ema(alpha, nesterov=nesterov)

    def effective_lr(self, group: Group) -> float:
        return float(group["lr"]) / (self.alpha(group) if group["trace"] else 1.0)


ADAM, OTHER, SGD, MUON, SCION, LION = _Adam(), Family(), _SGD(), _Muon(), _Scion(), _Lion()
FAMILIES: dict[str, Family] = {family.name: family for family in (ADAM, OTHER, SGD, MUON, SCION, LION)}


def _betas(group: Group) -> list[float]:
    return [float(beta) for beta in group["betas"]]


def _nesterov(group: Group) -> bool:
    return bool(group.get("nesterov", False))


def _scion_update(shape: Sequence[int], group: Group) -> tuple[Update, int]:
    """Return the row of the lmo table that a Scion group uses for this shape, and the number of blocks it sees."""
    update = update_of(group["lmo"], shape)
    return update, 1 if update.row_separable else group["blocks"]


# --- recognising optimizers


def unwrap(optimizer: Optimizer, where: str = "correct") -> Optimizer:
    """Return the optimizer inside the wrappers of trainers (Accelerate's, Lightning's), which have it as `.optimizer`.

    Raises:
        TypeError: If it is something else, such as a model; the message names the caller, `where`.
    """
    while isinstance(inner := getattr(optimizer, "optimizer", None), Optimizer):
        optimizer = inner
    if not isinstance(optimizer, Optimizer):
        raise TypeError(
            f"{where} takes an optimizer, not {type(optimizer).__name__}; make one first, as in "
            f"{where}(torch.optim.AdamW(model.parameters()))"
        )
    return optimizer


def family_of(optimizer: Optimizer, *, decoupled: bool | None = None) -> Family:
    """Return the family of an optimizer.

    Raises:
        ValueError: If its decay cannot be corrected; the message says why.

    >>> import torch
    >>> family_of(torch.optim.AdamW([torch.nn.Parameter(torch.ones(1))])).name
    'adam'
    """
    names, groups = _class_names(optimizer), optimizer.param_groups
    reason = _refusal_reason(names, groups)
    if reason is None and decoupled is False:
        reason = "it was declared coupled (decoupled=False), and only decoupled decay can be corrected"
    if reason is not None:
        raise ValueError(f"correct: {names[0]}: {reason}")
    if "AdamW" in names or any(name in _FLAGGED for name in names):
        return ADAM
    for word, family in (("Scion", SCION), ("Muon", MUON), ("Lion", LION)):
        if any(word in name for name in names):
            return _require_momentum(family, optimizer)
    if not decoupled and not all("base_weight_decay" in group for group in groups):  # a corrected copy has it
        raise ValueError(
            f"correct: {names[0]} is unknown; pass decoupled=True if it does theta <- (1 - lr * weight_decay) theta - lr u"
        )
    return ADAM if any("Adam" in name for name in names) else OTHER


def forecast_family(optimizer: Optimizer) -> Family | None:
    """Return the family by which the theory can forecast the norms of an optimizer, or None.

    >>> import torch; p = torch.nn.Parameter(torch.ones(2))
    >>> forecast_family(torch.optim.AdamW([p])).name, forecast_family(torch.optim.SGD([p]))
    ('adam', None)
    """
    names = _class_names(optimizer)
    if isinstance(own := getattr(optimizer, "family", None), Family):
        return own
    if any(name in _UNFORECAST for name in names):
        return None
    if names[0] == "Adam" and all(group["weight_decay"] == 0 for group in optimizer.param_groups):
        return ADAM
    try:
        family = family_of(optimizer)
    except ValueError:  # coupled decay, or a class we do not know
        return None
    return family if family.has_forecast else None


def is_decoupled(optimizer: Optimizer) -> bool:
    """Return whether a step does theta <- (1 - lr weight_decay) theta - ...; an unknown class is taken to."""
    names = _class_names(optimizer)
    if any(flag_against(group) for group in optimizer.param_groups):
        return False
    return not any(name in _COUPLED for name in names) and not _is_flagged_coupled(names, optimizer.param_groups)


def _class_names(optimizer: Optimizer) -> list[str]:
    return [cls.__name__ for cls in type(optimizer).__mro__]


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


def _is_flagged_coupled(names: list[str], groups: list[Group]) -> bool:
    if "AdamW" in names or not any(name in _FLAGGED for name in names):
        return False
    return not all(group.get("decoupled_weight_decay", False) for group in groups)


def _refusal_reason(names: list[str], groups: list[Group]) -> str | None:
    if "Adafactor" in names:
        return "it scales its lr by the weights' RMS, so the norm does not follow lr and decay"
    if any(name in _NO_DECAY for name in names):
        return "it has no weight decay to correct"
    if any(name in _COUPLED for name in names):
        return "its decay is added to the gradient (coupled L2); use steadynorm.SGDC or AdamW"
    if _is_flagged_coupled(names, groups):
        return "its decay is added to the gradient (coupled L2); use AdamW or decoupled_weight_decay=True"
    if reason := next(filter(None, map(flag_against, groups)), None):
        return reason
    if not any("weight_decay" in group for group in groups):
        return "no group has a weight_decay to correct"
    if any("Scion" in name for name in names) and not all("alpha" in group for group in groups):
        return "its momentum= means the weight of the new gradient; use steadynorm.Scion with from_radius(lr, radius)"
    return None


def _require_momentum(family: Family, optimizer: Optimizer) -> Family:
    """Return the family if its momentum can be read from every group that has one; else raise ValueError."""
    name = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        if family is LION and "betas" not in group:
            raise ValueError(f"correct: group {index} of {name} has no 'betas' to read its momentum from")
        if family is SCION and not 0 < family.alpha(group) <= 1:
            raise ValueError(f"correct: group {index} of {name} has alpha {family.alpha(group):g}, outside (0, 1]")
        if family is MUON and not 0 < family.alpha(group) <= 1:
            raise ValueError(f"correct: group {index} of {name} has momentum {group['momentum']:g}, outside [0, 1)")
    if family is MUON and not any("momentum" in group for group in optimizer.param_groups):
        raise ValueError(f"correct: no group of {name} has a 'momentum' to read")
    return family
