"""Our optimizers whose decay is relative to the peak lr, by the same keys and formula as `correct(optimizer)`."""

import contextlib
from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steadynorm.decay.correction import own_correction
from steadynorm.decay.families import Family
from steadynorm.decay.hold import HOLD_KEYS
from steadynorm.decay.peak import LARGEST, warn_of_late_guess, watch
from steadynorm.decay.rule import Group, correction_keys, guess_again, refuse_idle_target, refuse_scion_groups
from steadynorm.optim.base import SteadyOptimizer
from steadynorm.optim.validation import check_range


class PeakRelativeOptimizer(SteadyOptimizer):
    """Writes lambda_t into each corrected group before a step; a group with `corrected=False` is left alone."""

    family: Family
    setting_keys = HOLD_KEYS

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
        group.update(correction_keys(group, self.family))
        self.family.of(group).factor(group)  # raises if the initial momentum is another optimizer's

    def add_param_group(self, param_group: Group) -> None:
        super().add_param_group(param_group)
        watch(self.param_groups[-1])
        warn_of_late_guess(self)
        own_correction(self, self.family).record_written(self.param_groups)

    def before_step(self) -> None:
        own_correction(self, self.family)(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        with loading(self, self.family, state_dict):
            super().load_state_dict(state_dict)


@contextlib.contextmanager
def loading(optimizer: Optimizer, family: Family, state_dict: dict[str, Any]) -> Iterator[None]:
    """Load a checkpoint inside; afterwards say which given settings it replaced.

    In a checkpoint from before the correction weight_decay is the base, and the rest stays as it was. A run that has not
    been watched from its start may have seen its largest lr, so its peak is on trial no more.
    """
    correction = own_correction(optimizer, family)
    correction.save_keys(optimizer.param_groups)
    yield
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        if "base_weight_decay" not in saved:
            group["base_weight_decay"] = float(group["weight_decay"])
            guess_again(group)
        if LARGEST not in saved:
            group.pop(LARGEST, None)
    correction.record_guesses(optimizer.param_groups)
    correction.warn_of_replaced(optimizer)
