"""Can a parameter be trained, does it still fit its state, which one is meant, and what is it called in errors?"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadynorm.decay.rule import Group, group_label
from steadynorm.groups.roles import TRAINABLE
from steadynorm.suggestions import suggest


def check_parameter(p: Tensor, name: str) -> None:
    if is_lazy(p):
        raise ValueError(f"{name} has no shape yet (a lazy module); run the model once, then make the optimizer")
    if p.layout is not torch.strided:
        raise ValueError(f"{name} is sparse; only dense parameters are supported")
    if p.dtype not in TRAINABLE:
        raise ValueError(
            f"{name} is of {p.dtype}; only real floating-point parameters of 16 bits or more are supported: freeze it "
            "and leave it out, or train a wider copy"
        )


def check_unchanged(
    optimizer: Optimizer, index: int, k: int, p: Tensor, keys: Sequence[str], *, dtype: bool = False
) -> None:
    """ValueError if a parameter no longer fits its state under these keys: of another shape or on another device
    (dtype: or of another dtype) than when the optimizer was made."""
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


def find_parameter(optimizer: Optimizer, wanted: Tensor | str, method: str) -> tuple[Group, Tensor]:
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
    raise ValueError(f"{type(optimizer).__name__}.{method}: no group has {what}; {remedy}")


def name_of(group: Group, k: int) -> str:
    names, p = group.get("param_names"), group["params"][k]
    return repr(names[k]) if names else f"parameter {k}" + ("" if is_lazy(p) else f" (shape {tuple(p.shape)})")
