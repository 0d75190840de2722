"""The state that makes bf16 parameters fp32 weights: the 16 bits that each of them lacks, its `weight_residual`.

`halves` has the arithmetic. The state holds a residual as two bytes, (*shape, 2), because neither gloo nor NCCL transfers
16-bit integers; a step sees it as int16. Whoever else writes a weight between steps leaves the residual behind, which
moves the new weight by at most half a bf16 step.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadynorm.decay.rule import Group, name_of
from steadynorm.dtensor import is_dtensor, local

RESIDUAL = "weight_residual"  # the key of a group's setting and of a parameter's state


def is_kept(group: Mapping[str, Any], p: Tensor) -> bool:
    """Return whether a parameter's residual is kept."""
    return p.dtype == torch.bfloat16 and group.get(RESIDUAL) is not False


def check_residual(group: Group) -> None:
    """Raise ValueError if a group asks for residuals that do not exist."""
    wanted = group.get(RESIDUAL)
    if wanted is not None and not isinstance(wanted, bool):
        raise ValueError(f"{RESIDUAL}={wanted!r} is unknown; choose True, False or None")
    for k, p in enumerate(group["params"]):
        if wanted and p.dtype != torch.bfloat16:
            raise ValueError(
                f"{RESIDUAL}=True keeps the bits that bf16 parameters lack, and {name_of(group, k)} has dtype {p.dtype}; "
                "leave it out, and bf16 parameters have it anyway"
            )


def fresh_residual(group: Mapping[str, Any], p: Tensor) -> dict[str, Tensor]:
    """Return a zero residual, sharded as p is; nothing if none is kept."""
    if not is_kept(group, p):
        return {}
    if is_dtensor(p):
        from steadynorm.optim.sharding.mesh import zero_bytes_like

        return {RESIDUAL: zero_bytes_like(p, 2)}
    return {RESIDUAL: torch.zeros(*p.shape, 2, dtype=torch.uint8, device=p.device)}


def low_halves(residuals: Sequence[Tensor]) -> list[Tensor]:
    """Return this rank's part of residuals as they are kept in the state, as int16 views."""
    return [local(value).view(torch.int16).squeeze(-1) for value in residuals]
