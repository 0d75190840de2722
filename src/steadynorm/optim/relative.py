"""Own optimizers corrected relative to their peak lr: the same keys and formula as `correct(optimizer)`."""

from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steadynorm.decay import group_keys, own_correction, refuse_idle_target
from steadynorm.families import Family, refuse_scion_groups
from steadynorm.optim.base import Group, SteadyOptimizer
from steadynorm.optim.checks import check_range


class RelativelyCorrected(SteadyOptimizer):
    """Writes lambda_t into each corrected group before a step; a group with `corrected=False` is left alone."""

    family: Family

    def __init__(self, params: ParamsT, defaults: Group, mesh: Any = None):
        super().__init__(params, defaults, mesh)
        refuse_idle_target(type(self).__name__, self.param_groups)

    def settings(self, group: Group, p: Tensor) -> tuple[Any, bool]:
        return None, True  # element-wise

    def check_group(self, group: Group) -> None:
        refuse_scion_groups(group)
        check_range("weight_decay", group["weight_decay"], closed=True)
        if group.get("steady_norm_sq") is not None:
            self.family.require_target()
            check_range("steady_norm_sq", group["steady_norm_sq"])
        group.update(group_keys(group, self.family))

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        own_correction(self, self.family).note(self.param_groups)

    def before_step(self) -> None:
        own_correction(self, self.family)(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict(state_dict)
        base_from_plain_checkpoint(self, state_dict)


def base_from_plain_checkpoint(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """A checkpoint from before the correction: its weight_decay is the base, the rest stays as it was."""
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        if "base_weight_decay" not in saved:
            group["base_weight_decay"] = float(group["weight_decay"])
