"""Decay of a step that is captured in a CUDA graph: factors that live on the device, filled between replays.

A graph replays kernels with the numbers they were captured with. torch's own steps read the decay as a number, so that a
captured one would keep the decay of the step that was captured. Here the step runs without decay, and the weights are
multiplied by 1 - lr lambda_t before it, a 0-d tensor that `fill_scalars` writes outside the graph.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm.decay.rescale import took_step
from steadynorm.decay.rule import Group, is_live
from steadynorm.decay.skip import uncorrected_positions
from steadynorm.machine import exact_dtype


class LiveDecay:
    """The factors 1 - lr lambda_t of an optimizer's groups, one per device and dtype."""

    def __init__(self) -> None:
        self._factors: dict[Any, Tensor] = {}

    @torch.no_grad()
    def fill(self, groups: Sequence[Group]) -> None:
        """Write the factors of this step, given groups whose `weight_decay` is lambda_t."""
        for index, group in enumerate(groups):
            if is_live(group):
                value = 1 - float(group["lr"]) * float(group["weight_decay"])
                for kind, p in {(p.device, p.dtype): p for p in group["params"]}.items():
                    if (index, kind) not in self._factors:
                        self._factors[index, kind] = torch.empty((), device=p.device, dtype=exact_dtype(p))
                    self._factors[index, kind].fill_(value)

    @torch.no_grad()
    def apply(self, optimizer: Optimizer) -> None:
        """Decay the weights that have a gradient. It reads nothing on the host, so it can be captured.

        Raises:
            RuntimeError: If a step is captured before the factors exist.
        """
        for index, group in enumerate(optimizer.param_groups):
            if not is_live(group):
                continue
            uncorrected, kinds = uncorrected_positions(group), {}
            for k, p in enumerate(group["params"]):
                if p.grad is not None and k not in uncorrected:
                    kinds.setdefault((p.device, p.dtype), []).append(p)
            for kind, params in kinds.items():
                if (index, kind) not in self._factors:
                    raise RuntimeError(
                        f"{type(optimizer).__name__}: its decay is not on the device yet; call "
                        "steadynorm.fill_scalars(optimizer), or take a step, before you capture one"
                    )
                factor = self._factors[index, kind]
                torch._foreach_mul_(params, torch.where(took_step(optimizer, factor), factor, 1.0))
