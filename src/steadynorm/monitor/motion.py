"""How each family of optimizers moves weights, as the theory puts it: filter, overlap kernel, update norm."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm import theory
from steadynorm.conversion import equivalents
from steadynorm.decay import families
from steadynorm.decay.families import Group, alpha_of, betas_of, flag_against, muon_alpha_of, nesterov_of, said
from steadynorm.decay.skip import decay_of
from steadynorm.monitor.layers import Layer
from steadynorm.optim.scion import ScionC
from steadynorm.theory import Filter, Overlap

_LINEAR = theory.overlap("linear", None)


@dataclass(frozen=True)
class Motion:
    """What the theory must know of a family of optimizers; group values in, floats out.

    unit: U^2, None where it is not known; of an update linear in its momentum (Adam, SGD) the number of elements, and
    the walk is per element.
    """

    name: str
    alpha: Callable[[Group], float]
    effective_lr: Callable[[Group], float]
    filter: Callable[[Group], Filter]
    kernel: Callable[[Layer], Overlap]
    unit: Callable[[Layer, Group], float | None]

    @property
    def is_linear(self) -> bool:
        return self.name in ("adam", "sgd")


def muon_update_norm_sq(shape: Sequence[int], group: Group) -> float | None:
    """Return |u|^2 of torch's Muon with its lr adjustment, for Gaussian momentum. None for another Muon: its scale is unknown.

    >>> group = {"ns_coefficients": (3.4445, -4.775, 2.0315), "ns_steps": 5, "adjust_lr_fn": None}
    >>> round(muon_update_norm_sq((384, 384), group) / 384, 2)
    0.86
    """
    if not {"ns_coefficients", "ns_steps", "adjust_lr_fn"} <= group.keys():
        return None
    iteration = tuple(group["ns_coefficients"]), group["ns_steps"]
    return equivalents.muon_update_norm_sq(shape, group["adjust_lr_fn"] or "original", iteration)


def _scion_update_norm_sq(layer: Layer, group: Group) -> float:
    settings = ScionC.settings_of(group, layer.shape)
    return settings.lmo.update_norm_sq(layer.shape, blocks=settings.blocks) * settings.share(layer.shape)


def _ema(group: Group, alpha: Callable[[Group], float] = alpha_of) -> Filter:
    return theory.ema(alpha(group), nesterov=nesterov_of(group))


def _lr(group: Group) -> float:
    return float(group["lr"])


def _normalised_lr(group: Group, alpha: Callable[[Group], float] = alpha_of) -> float:
    return theory.effective_lr(_lr(group), alpha(group), nesterov=nesterov_of(group))


def _sgd_filter(group: Group) -> Filter:
    return theory.trace(1 - alpha_of(group), nesterov=group["nesterov"]) if group["trace"] else _ema(group)


def _elements(layer: Layer, _: Group) -> float:
    return float(layer.parameter.numel())


MOTIONS = {
    "scion": Motion(
        "scion",
        alpha_of,
        _normalised_lr,
        _ema,
        lambda layer: layer.lmo.overlap(layer.shape, blocks=layer.blocks),
        _scion_update_norm_sq,
    ),
    "muon": Motion(
        "muon",
        muon_alpha_of,
        lambda group: _normalised_lr(said(group), muon_alpha_of),
        lambda group: _ema(group, muon_alpha_of),
        lambda layer: theory.overlap("spectral", layer.shape),
        lambda layer, group: muon_update_norm_sq(layer.shape, group),
    ),
    "lion": Motion(
        "lion",
        lambda group: 1 - betas_of(group)[1],
        lambda group: _lr(group) * math.sqrt(theory.lion_gain(*betas_of(group))),
        lambda group: theory.lion(*betas_of(group)),
        lambda _: theory.overlap("sign", None),
        _elements,
    ),
    "adam": Motion(
        "adam",
        lambda group: 1 - betas_of(group)[0],
        _lr,
        lambda group: theory.ema(1 - betas_of(group)[0]),
        lambda _: _LINEAR,
        _elements,
    ),
    "sgd": Motion(
        "sgd",
        alpha_of,
        lambda group: _lr(group) / (alpha_of(group) if group["trace"] else 1.0),
        _sgd_filter,
        lambda _: _LINEAR,
        _elements,
    ),
}


def motion_of(optimizer: Optimizer) -> Motion | None:
    """How this optimizer moves weights, or None where the theory has no forecast for it.

    >>> p = torch.nn.Parameter(torch.ones(2))
    >>> motion_of(torch.optim.AdamW([p])).name, motion_of(torch.optim.SGD([p]))
    ('adam', None)
    """
    own = getattr(optimizer, "family", None)
    names = {cls.__name__ for cls in type(optimizer).__mro__}
    if isinstance(own, families.Family):
        return MOTIONS.get(own.name)
    if names & {"NAdam", "RAdam", "RenormalizedAdamW"}:
        return None
    if type(optimizer) is torch.optim.Adam and all(group["weight_decay"] == 0 for group in optimizer.param_groups):
        return MOTIONS["adam"]
    try:
        return MOTIONS.get(families.family_of(optimizer).name)
    except ValueError:  # coupled decay, or a class we do not know
        return None


def weight_decay_of(optimizer: Optimizer, group: Group, p: Tensor) -> float:
    """lambda_t of a parameter as the step just taken used it."""
    if isinstance(optimizer, ScionC):
        return optimizer.weight_decay_of(p)
    return decay_of(group, p)


def target_of(optimizer: Optimizer, group: Group) -> float | None:
    """C^2 that the group is steered to; None where its decay is given, or it has none."""
    target = group.get("steady_norm_sq")
    if isinstance(optimizer, ScionC):
        steered = group["weight_decay"] is None
    else:
        steered = group.get("corrected", True) and group.get("base_weight_decay") != 0
    return float(target) if steered and target is not None else None


def is_decoupled(optimizer: Optimizer) -> bool:
    """Whether a step does theta <- (1 - lr weight_decay) theta - ...; a class we do not know is taken to."""
    names = [cls.__name__ for cls in type(optimizer).__mro__]
    if any(flag_against(group) for group in optimizer.param_groups):
        return False
    if any(name in families._FLAGGED for name in names) and "AdamW" not in names:
        return all(group.get("decoupled_weight_decay", False) for group in optimizer.param_groups)
    return not any(name in families._COUPLED for name in names)
