"""LionC: Lion with corrected decay."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm.decay.families import LION
from steadynorm.decay.hold import BALANCE_STEPS
from steadynorm.decay.rule import Group
from steadynorm.optim.arithmetic import Arithmetic
from steadynorm.optim.batch import Batch, Encoding, Scalars, SplitRule
from steadynorm.optim.buckets import Bucket
from steadynorm.optim.peak_relative import PeakRelativeOptimizer
from steadynorm.optim.state import zeros_like
from steadynorm.optim.validation import check_betas, group_defaults, refuse_momentum
from steadynorm.theory.equilibrium import eta_of


def _accumulate(batch: Batch, scalars: Scalars, settings: Any) -> Tensor:
    """x = b1 m + (1-b1) g;  m_t = b2 m + (1-b2) g."""
    m, grad, ones = batch.widen_state()["momentum_buffer"], batch.take_grad(), batch.active.new_ones(1)
    x = torch.lerp(grad, m, scalars["beta1"] * ones)
    m.lerp_(grad, (1 - scalars["beta2"]) * batch.active)
    return x


def _sign(x: Tensor, settings: Any, out: Tensor | None) -> Tensor:
    """Return u = sign(x), in place of x."""
    return x.sign_()


LION_RULE = SplitRule(
    _accumulate,
    _sign,
    lambda shape, settings: float(math.prod(shape)),
    lambda *_: Encoding(torch.bfloat16, torch.bfloat16),
)


class LionC(PeakRelativeOptimizer):
    """Lion with corrected decay.

        lambda_t = lambda (gamma_t / gamma_peak) G(betas_t)/G(betas_0),   or the decay that reaches `steady_norm_sq`

    A group with `corrected=False` keeps constant decay (the output layer).

    Args:
        params: The parameters or groups, for instance from `param_groups(model, kind="adam")`.
        lr: gamma.
        betas: The weights of the momentum in the update and in the buffer.
        weight_decay: lambda at the peak lr.
        peak_lr: The schedule's maximum. Default: the lr given here (or `max_lr`, `initial_lr` in the group).
        steady_norm_sq: An absolute target, the mean square of an element, in place of the relative rule.
        hold: "decay", "balance" or "fixed", as in Scion.
        balance_steps: T of "balance", as in Scion.
        cautious: Whether decay acts only on weights that agree with their update in sign.
        capturable: Whether a step can be captured in a CUDA graph, as in Scion.
        weight_residual: Whether bf16 parameters train as fp32 weights, as in Scion.
        check_finite: Whether to raise on a non-finite gradient, as in Scion.
        maximize: Whether to ascend.
        mesh: The DeviceMesh or ProcessGroup of replicated parameters, as in Scion.
        momentum: Refused, as in Scion.

    >>> p = torch.nn.Parameter(torch.ones(3)); optimizer = LionC([p], lr=1e-3, weight_decay=0.5)
    >>> p.grad = torch.tensor([1.0, -1.0, 0.0]); optimizer.step()
    >>> p.data
    tensor([0.9985, 1.0005, 0.9995])
    """

    arithmetic = Arithmetic(LION_RULE.rule, ("momentum_buffer",), LION_RULE, is_elementwise=True, normalizes=True)
    signature_keys = ("betas",)
    family = LION

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 1.0,
        *,
        peak_lr: float | None = None,
        steady_norm_sq: float | None = None,
        hold: str = "decay",
        balance_steps: float = BALANCE_STEPS,
        cautious: bool = False,
        capturable: bool = False,
        weight_residual: bool | None = None,
        check_finite: bool = False,
        maximize: bool = False,
        mesh: Any = None,
        momentum: None = None,
    ):
        defaults = group_defaults(locals())
        refuse_momentum(type(self), defaults.pop("momentum"))
        super().__init__(params, defaults, mesh)

    def fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": zeros_like(p, self.mesh)}

    def check_group(self, group: Group) -> None:
        check_betas(group["betas"])
        super().check_group(group)

    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        check_betas(group["betas"])
        eta = eta_of(lr, group["weight_decay"])
        return {"gamma": lr, "eta": eta, "beta1": float(beta1), "beta2": float(beta2), "momentum_keep": float(beta2)}
