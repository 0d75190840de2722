"""Recognition: the one place that tells which family an optimizer belongs to, and whether its decay is decoupled.

| family | recognised by (a class or one it derives from) | momentum read from | factor F |
|---|---|---|---|
| adam | AdamW; Adam, RAdam with decoupled_weight_decay; "Adam" in the name and `decoupled=True` | - | 1 |
| nadam | NAdam with decoupled_weight_decay; "NAdam" in the name and `decoupled=True` | - | 1 |
| muon | "Muon" in the name | 1 - `momentum`, `nesterov` (required if momentum moves) | G(alpha_t)/G(alpha_0) |
| scion | "Scion" in the name, with `alpha` in every group | `alpha`, `nesterov` | G(alpha_t)/G(alpha_0) |
| lion | "Lion" in the name | `betas` | G(betas_t)/G(betas_0) |
| sgd | our SGDC | `alpha`, `trace` | 1; with trace (alpha_0/alpha_t)^2 |
| other | `decoupled=True` | - | 1 |

Whatever the class, a group whose flags say that its decay is coupled, fixed or already corrected is refused.
"""

from torch.optim import Optimizer

from steadynorm.decay.families import ADAM, LION, MUON, NADAM, OTHER, SCION, Family
from steadynorm.decay.rule import Group

_COUPLED = ("SGD", "ASGD", "Adagrad", "Adadelta", "Adamax", "RMSprop", "Rprop")
_NO_DECAY = ("LBFGS", "SparseAdam")
_FLAGGED = ("Adam", "NAdam", "RAdam")  # decoupled only if their group says so
_DECOUPLING = ("weight_decouple", "decoupled_decay")  # flags of pytorch_optimizer and timm
_UNFORECAST = ("RAdam",)  # whose first steps are not those of the Adam that the theory describes


def unwrap(optimizer: Optimizer, where: str = "correct") -> Optimizer:
    """Return the optimizer inside the wrappers of trainers (Accelerate's, Lightning's), which have it as `.optimizer`.

    Raise TypeError if it is something else, such as a model; the message names the caller, `where`.
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
    adam = NADAM if any("nadam" in name.lower() for name in names) else ADAM
    if "AdamW" in names or any(name in _FLAGGED for name in names):
        return adam
    for word, family in (("Scion", SCION), ("Muon", MUON), ("Lion", LION)):
        if any(word in name for name in names):
            return _require_momentum(family, optimizer)
    if not decoupled and not all("base_weight_decay" in group for group in groups):  # a corrected copy has it
        raise ValueError(
            f"correct: {names[0]} is unknown; pass decoupled=True if it does theta <- (1 - lr * weight_decay) theta - lr u"
        )
    return adam if adam is NADAM or any("Adam" in name for name in names) else OTHER


def forecast_family(optimizer: Optimizer) -> Family | None:
    """Return the family by which the theory can forecast the norms of an optimizer, or None.

    >>> import torch; p = torch.nn.Parameter(torch.ones(2))
    >>> forecast_family(torch.optim.AdamW([p])).name, forecast_family(torch.optim.SGD([p]))
    ('adam', None)
    """
    names = _class_names(optimizer)
    if isinstance(own := getattr(optimizer, "family", None), Family):
        return own if own.has_forecast else None
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
