"""What the optimizers refuse, and how they say it: optimizer, group, parameter."""

import inspect
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any, Never

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm.decay.rule import Group, group_label
from steadynorm.groups.builder import ParamGroups
from steadynorm.optim.parameters import name_of
from steadynorm.suggestions import suggest


def check_dense_gradients(optimizer: Optimizer) -> None:
    """ValueError naming the first parameter whose gradient is sparse."""
    for index, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise ValueError(
                    f"{type(optimizer).__name__}, {group_label(index, group)}: the gradient of {name_of(group, k)} is "
                    "sparse; use a dense one (nn.Embedding(sparse=False))"
                )


class NonFiniteGradientError(ValueError):
    """check_finite=True met a gradient with a NaN or an infinity; nothing was written."""

    def __init__(self, optimizer: str, index: int, group: Group, k: int):
        super().__init__(
            f"{optimizer}, {group_label(index, group)}: the gradient of {name_of(group, k)} is not finite; "
            "nothing was written (check_finite=True)"
        )


def refuse_unknown(optimizer: type[Optimizer], unknown: dict[str, Never]) -> None:
    """Raise TypeError for a keyword that does not exist, with those that are like it; for `momentum`, with the reason."""
    if "momentum" in unknown:
        raise TypeError(
            f"{optimizer.__name__} has no momentum=: Scion's and torch's mean opposite things; "
            "pass alpha=<weight of the new gradient>, that is 1 - torch's momentum"
        )
    if unknown:
        name = next(iter(unknown))
        near = suggest(name, inspect.signature(optimizer).parameters, least=0.6)
        raise TypeError(f"{optimizer.__name__} got an unexpected keyword argument {name!r}" + (near and f"; {near}"))


@contextmanager
def explain_group_errors(optimizer: Optimizer, group: Any) -> Iterator[None]:
    """Around torch's `add_param_group`: say what to write where it is no group, or named as the others are not."""
    where = f"{type(optimizer).__name__}.add_param_group"
    if not isinstance(group, dict):
        raise TypeError(f'{where} takes a dict, not {type(group).__name__}; pass {{"params": [...]}} with its settings')
    try:
        yield
    except ValueError as error:
        if "param groups should be with/without names" not in str(error):
            raise
        named = "param_names" in optimizer.param_groups[0]
        lmo = ', "lmo": "spectral"' if "lmo" in optimizer.defaults else ""
        how = f'name them: {{"params": [("head.weight", p)]{lmo}}}' if named else "leave the names out"
        raise ValueError(f"{where}: {error}; {how}") from None  # in torch's words, which its tests look for


def refuse_unused(optimizer: type[Optimizer], params: Any, given: Mapping[str, Any]) -> None:
    """ValueError for a setting that would change nothing, because the groups all bring their own.

    Of Scion's groups in a plain list (of `param_groups`, or made by hand) the lr alone; of others none, as in torch,
    where an lr for groups to come is usual beside layer-wise ones."""
    if not isinstance(params, ParamGroups):
        groups = params if isinstance(params, list | tuple) else []
        if not all(isinstance(group, dict) and {"lr", "lmo"} <= group.keys() for group in groups) or "lr" not in given:
            return
        check_one(given["lr"])
        params, given = groups, {"lr": given["lr"]}
    usual = inspect.signature(optimizer).parameters
    for key, value in given.items():
        own = [group[key] for group in params if key in group]
        if own and key in usual and value not in (usual[key].default, *own):
            raise ValueError(
                f"{optimizer.__name__}: {key}={value} would not be used, the groups have their own; "
                f"pass it to them: param_groups(model, {key}={value}), or group[{key!r}]"
            )


def check_one(lr: float | Tensor) -> None:
    """A tensor lr must have one element; in torch's words."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")


def check_lr(lr: float) -> None:
    """lr must be finite and not negative."""
    if not (lr >= 0 and math.isfinite(lr)):
        raise ValueError(f"lr={lr} must be finite and not negative")


def check_range(name: str, value: float, *, above: float = 0.0, most: float = math.inf, closed: bool = False) -> None:
    """`above` < value <= most (closed: `above` allowed), and finite."""
    if not isinstance(value, Real | Tensor):
        raise ValueError(f"{name}={value!r} must be a number")
    low = value >= above if closed else value > above
    if not (low and value <= most and math.isfinite(value)):
        raise ValueError(f"{name}={value} must be finite and in {'[' if closed else '('}{above:g}, {most:g}]")


def is_known(value: float | Tensor) -> bool:
    """Whether a number can be read without waiting for a device."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def check_betas(betas: tuple[float | Tensor, float | Tensor]) -> None:
    """There must be two, both in [0, 1); AdamC's may be tensors, on a device unread."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas={betas} must be two numbers")
    for k, beta in enumerate(betas):
        if is_known(beta) and not 0 <= beta < 1:
            raise ValueError(f"betas[{k}]={float(beta)} is outside [0, 1)")
