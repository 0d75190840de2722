"""Checks that the optimizers share, and how errors name a parameter. (Checkpoints: `state`; holds: `decay.hold`; lmos: `lmo`.)"""

import inspect
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadynorm.decay.rule import Group, group_label, name_of
from steadynorm.suggestions import suggest


def check_dense_gradients(optimizer: Optimizer) -> None:
    """Raise ValueError naming the first parameter whose gradient is sparse."""
    for index, group in enumerate(optimizer.param_groups):
        for k, p in enumerate(group["params"]):
            if p.grad is not None and p.grad.layout is not torch.strided:
                raise ValueError(
                    f"{type(optimizer).__name__}, {group_label(index, group)}: the gradient of {name_of(group, k)} is "
                    "sparse; use a dense one (nn.Embedding(sparse=False))"
                )


class NonFiniteGradientError(ValueError):
    """Raised with check_finite=True for a gradient with a NaN or an infinity; nothing was written."""

    def __init__(self, optimizer: Optimizer, index: int, p: Tensor):
        group = optimizer.param_groups[index]
        k = next(k for k, member in enumerate(group["params"]) if member is p)
        super().__init__(
            f"{type(optimizer).__name__}, {group_label(index, group)}: the gradient of {name_of(group, k)} is not "
            "finite; nothing was written (check_finite=True)"
        )


def refuse_momentum(optimizer: type[Optimizer], momentum: Any) -> None:
    """Raise TypeError if `momentum` was passed: Scion's and torch's mean opposite things."""
    if momentum is not None:
        raise TypeError(
            f"{optimizer.__name__} has no momentum=: Scion's and torch's mean opposite things; "
            "pass alpha=<weight of the new gradient>, that is 1 - torch's momentum"
        )


@contextmanager
def explain_group_errors(optimizer: Optimizer, group: Any) -> Iterator[None]:
    """Explain what to write if torch's `add_param_group` gets no group, or one named unlike the others."""
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


def group_defaults(arguments: Mapping[str, Any]) -> Group:
    """Return the arguments of a constructor, given as its locals(), that are settings of a group."""
    return {key: value for key, value in arguments.items() if key not in ("self", "params", "mesh", "__class__")}


def is_role_group(group: Any) -> bool:
    """Return whether a group was made by `steadynorm.param_groups`, and no optimizer has taken its parameters yet."""
    return isinstance(group, dict) and hasattr(group.get("params"), "fill_unset")


def fill_unset(group: Any, settings: Mapping[str, Any], optimizer: type[Optimizer], kind: str) -> Any:
    """Return a group with settings left unset in `param_groups` filled from the optimizer's; other groups as they are.

    Raises:
        ValueError: If the group was made for another kind of optimizer.
    """
    if not is_role_group(group):
        return group
    return group["params"].fill_unset(group, settings, optimizer.__name__, kind)


def take_params(params: Any, settings: Mapping[str, Any], optimizer: type[Optimizer], kind: str) -> Any:
    """Return what torch takes as parameters, with groups from `param_groups` filled by `fill_unset`.

    Raises:
        TypeError: If `params` is a model.
        ValueError: If a group was made for another kind of optimizer, or a setting would not be used.
    """
    if isinstance(params, nn.Module):
        how = "" if kind == "scion" else f", kind={kind!r}"
        name = optimizer.__name__
        raise TypeError(
            f"{name} takes parameters, not the model; pass {name}(param_groups(model{how})), which groups "
            f"{type(params).__name__}'s by role"
        )
    if isinstance(params, Tensor) or not isinstance(params, Iterable):
        return params  # which torch refuses
    for index, group in enumerate(params if (made := getattr(params, "members", {})) else ()):
        if group.get("name") in made and not is_role_group(group):
            raise ValueError(
                f"{optimizer.__name__}, {group_label(index, group)}: its parameters were replaced after param_groups made it, "
                "by another optimizer or by hand, so nobody knows which settings were left unset; make the groups again, or "
                "pass list(groups) to take them as they are"
            )
    params = [fill_unset(entry, settings, optimizer, kind) for entry in params]
    refuse_unused(optimizer, params, settings)
    return params


def refuse_unused(optimizer: type[Optimizer], params: Sequence[Any], settings: Mapping[str, Any]) -> None:
    """Raise ValueError for a setting that would change nothing, because the groups all bring their own.

    Without groups from `param_groups` only Scion's are checked, and only for lr: as in torch, a default lr for groups added
    later is common beside layer-wise ones.
    """
    if not any(map(is_role_group, params)):
        if (
            not all(isinstance(group, dict) and {"lr", "lmo"} <= group.keys() for group in params)
            or "lr" not in settings
        ):
            return
        check_lr_type(settings["lr"])
        settings = {"lr": settings["lr"]}
    usual = inspect.signature(optimizer).parameters
    by_hand = [group for group in params if not is_role_group(group)]
    for key, value in settings.items():
        own = [group[key] for group in params if key in group]
        is_used = any(key not in group for group in by_hand)
        if own and not is_used and key in usual and value not in (usual[key].default, *own):
            raise ValueError(
                f"{optimizer.__name__}: {key}={value} would not be used, the groups have their own; "
                f"pass it to them: param_groups(model, {key}={value}), or group[{key!r}]"
            )


def check_lr_type(lr: float | Tensor) -> None:
    """Raise ValueError unless an lr is a number, or a tensor of one element."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")  # in torch's words
    if not isinstance(lr, Tensor | Real):  # YAML reads 1e-3 as a string
        raise ValueError(f"lr={lr!r} must be a number")


def check_range(name: str, value: float, *, most: float = math.inf, closed: bool = False) -> None:
    """Raise ValueError unless 0 < value <= most (closed: 0 allowed), and finite."""
    if not isinstance(value, Real | Tensor):
        raise ValueError(f"{name}={value!r} must be a number")
    low = value >= 0 if closed else value > 0
    if not (low and value <= most and math.isfinite(value)):
        raise ValueError(f"{name}={value} must be finite and in {'[' if closed else '('}0, {most:g}]")


def check_capturable(group: Group) -> None:
    """Raise ValueError if a step that is to be captured would read something on the host."""
    if group.get("capturable") and group["check_finite"]:
        raise ValueError("check_finite=True reads gradients on the host, which a captured step cannot; leave one out")


def is_on_host(value: float | Tensor) -> bool:
    """Return whether a number can be read without a device sync."""
    return not isinstance(value, Tensor) or value.device.type == "cpu"


def check_betas(betas: tuple[float | Tensor, float | Tensor]) -> None:
    """Raise ValueError unless there are two betas in [0, 1); tensors on a device are not read."""
    if not isinstance(betas, Sequence) or len(betas) != 2:
        raise ValueError(f"betas={betas} must be two numbers")
    for k, beta in enumerate(betas):
        if is_on_host(beta) and not 0 <= beta < 1:
            raise ValueError(f"betas[{k}]={float(beta)} is outside [0, 1)")


def check_group_numbers(group: Group, *names: str) -> None:
    """Raise ValueError if one of a group's numbers is out of range; `weight_decay` must be a number here."""
    for name in names:
        if name == "betas":
            check_betas(group["betas"])
        elif name == "alpha":
            check_range("alpha", group["alpha"], most=1.0)
        else:
            check_range(name, group[name], closed=name in ("eps", "weight_decay"))


# --- parameters


def check_parameter(p: Tensor, name: str) -> None:
    """Raise ValueError if a parameter cannot be trained."""
    if is_lazy(p):
        raise ValueError(f"{name} has no shape yet (a lazy module); run the model once, then make the optimizer")
    if p.layout is not torch.strided:
        raise ValueError(f"{name} is sparse; only dense parameters are supported")
    if not (p.is_floating_point() and p.element_size() >= 2):
        raise ValueError(
            f"{name} has dtype {p.dtype}; only real floating-point parameters of 16 bits or more are supported: freeze it "
            "and leave it out, or train a wider copy"
        )


def check_unchanged(
    optimizer: Optimizer, index: int, k: int, p: Tensor, keys: Sequence[str], *, dtype: bool = False
) -> None:
    """Raise ValueError if a parameter no longer fits its state under these keys.

    It has another shape or device (dtype=True: or dtype) than when the optimizer was made.
    """
    for key in keys:
        value = optimizer.state[p][key]
        if value.ndim == 0:  # counters
            continue
        if value.shape != p.shape or value.device != p.device or (dtype and value.dtype != p.dtype):
            group = optimizer.param_groups[index]
            raise ValueError(
                f"{type(optimizer).__name__}, {group_label(index, group)}: {name_of(group, k)} is {_described(p)}, but "
                f"its {key} is {_described(value)}: the model was changed after the optimizer was made; change it first"
            )


def _described(x: Tensor) -> str:
    return f"{tuple(x.shape)} {x.dtype} on {x.device}"


def find_parameter(optimizer: Optimizer, wanted: Tensor | str) -> tuple[Group, Tensor]:
    """Return a parameter, given itself or by its name, with its group; raise ValueError if no group has it."""
    names: list[str] = []
    for group in optimizer.param_groups:
        own = group.get("param_names") or [None] * len(group["params"])
        for name, p in zip(own, group["params"], strict=True):
            if p is wanted or (isinstance(wanted, str) and name == wanted):
                return group, p
        names += filter(None, own)
    what, remedy = f"this {type(wanted).__name__}", "pass one of the optimizer's parameters, or its name"
    if isinstance(wanted, str):
        what = f"a parameter named {wanted!r}"
        remedy = suggest(wanted, names) or "their parameters have no names; pass the parameter itself"
    elif isinstance(wanted, Tensor):
        what = f"this parameter of shape {tuple(wanted.shape)}"
    raise ValueError(f"{type(optimizer).__name__}.weight_decay_of: no group has {what}; {remedy}")
