"""SGDC: SGD with momentum and corrected decoupled decay."""

from typing import NamedTuple

from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm.decay.families import SGD
from steadynorm.decay.hold import BALANCE_STEPS, HOLD_KEYS
from steadynorm.decay.rule import Group
from steadynorm.optim.arithmetic import Arithmetic
from steadynorm.optim.batch import Batch, Scalars
from steadynorm.optim.buckets import Bucket
from steadynorm.optim.peak_relative import PeakRelativeOptimizer
from steadynorm.optim.state import zeros_like
from steadynorm.optim.validation import check_group_numbers, group_defaults, refuse_momentum
from steadynorm.theory.equilibrium import eta_of
from steadynorm.theory.momentum import check_alpha


class SGDSettings(NamedTuple):
    """What does not change from step to step."""

    nesterov: bool
    trace: bool


def sgd_rule(batch: Batch, scalars: Scalars, settings: SGDSettings) -> None:
    """m_t = (1-a) m + a g, trace: (1-a) m + g;  u = m_t, Nesterov: (1-a) m_t + the same share of g."""
    alpha, m = scalars["alpha"] * batch.active, batch.widen_state()["momentum_buffer"]
    share = batch.take_grad().mul_(batch.active if settings.trace else alpha)
    m.mul_(1 - alpha).add_(share)
    u = share.addcmul_(m, 1 - alpha) if settings.nesterov else m
    batch.descend(u, scalars)


class SGDC(PeakRelativeOptimizer):
    """SGD with decoupled decay that follows the lr, and the momentum where that changes the step size.

        m_t = (1 - alpha) m_{t-1} + alpha g_t      (trace: m_t = (1 - alpha) m_{t-1} + g_t)
        lambda_t = lambda (gamma_t / gamma_peak),  with trace times (alpha_0 / alpha_t)^2

    Args:
        params: The parameters or groups, for instance from `param_groups(model, kind="adam")`.
        lr: gamma.
        alpha: The weight of the new gradient; torch's momentum is 1 - alpha.
        weight_decay: lambda at the peak lr.
        nesterov: Whether the update is (1 - alpha) m_t + alpha g_t (trace: + g_t).
        trace: Whether momentum follows torch's SGD convention.
        peak_lr: The schedule's maximum, as in LionC.
        hold: "decay" or "fixed"; the size of SGD's updates is unknown, so there is no target to balance at.
        cautious: Whether decay acts only on weights that agree with their update in sign.
        capturable: Whether a step can be captured in a CUDA graph, as in Scion.
        weight_residual: Whether bf16 parameters train as fp32 weights, as in Scion.
        check_finite: Whether to raise on a non-finite gradient, as in Scion.
        maximize: Whether to ascend.
        momentum: Refused; use `alpha`.

    Examples:
        >>> import torch
        >>> p = torch.nn.Parameter(torch.ones(2)); optimizer = SGDC([p], lr=0.1, alpha=1.0, weight_decay=0.1)
        >>> p.grad = torch.ones(2); optimizer.step(); p.data
        tensor([0.8900, 0.8900])
    """

    arithmetic = Arithmetic(sgd_rule, ("momentum_buffer",), is_elementwise=True)
    signature_keys = ("alpha", "trace")
    setting_keys = ("nesterov", "trace", *HOLD_KEYS)
    family = SGD

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-1,
        *,
        alpha: float = 0.1,
        weight_decay: float = 1e-2,
        nesterov: bool = False,
        trace: bool = False,
        peak_lr: float | None = None,
        hold: str = "decay",
        cautious: bool = False,
        capturable: bool = False,
        weight_residual: bool | None = None,
        check_finite: bool = False,
        maximize: bool = False,
        momentum: None = None,
    ):
        defaults = {**group_defaults(locals()), "balance_steps": BALANCE_STEPS}
        refuse_momentum(type(self), defaults.pop("momentum"))
        super().__init__(params, defaults)

    def fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": zeros_like(p)}

    def settings(self, group: Group, p: Tensor) -> tuple[SGDSettings, bool]:
        return SGDSettings(bool(group["nesterov"]), bool(group["trace"])), True

    def check_group(self, group: Group) -> None:
        refuse_momentum(type(self), group.get("momentum"))
        check_group_numbers(group, "alpha")
        super().check_group(group)

    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        lr, alpha = float(group["lr"]), check_alpha(float(group["alpha"]))
        return {"gamma": lr, "eta": eta_of(lr, group["weight_decay"]), "alpha": alpha}
