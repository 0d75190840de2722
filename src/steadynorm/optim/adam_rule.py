"""Adam's arithmetic as a Rule, for optimizers that do not build on torch's AdamW."""

import math
from typing import Any

import torch
from torch import Tensor

from steadynorm.decay.rule import Group
from steadynorm.optim.arithmetic import Arithmetic
from steadynorm.optim.batch import Batch, Encoding, Scalars, SplitRule
from steadynorm.optim.validation import check_group_numbers
from steadynorm.theory.equilibrium import eta_of

MOMENTS = ("exp_avg", "exp_avg_sq")


def adam_update(batch: Batch, scalars: Scalars, settings: Any = None) -> Tensor:
    """Update the moments and return u = m_hat / (sqrt(v_hat) + eps), in scratch.

    m_t = b1 m + (1-b1) g,   v_t = b2 v + (1-b2) g^2,   m_hat = m_t / (1 - b1^t),   v_hat = v_t / (1 - b2^t)
    """
    assert batch.counts is not None
    grad, state, active = _squarable(batch.take_grad()), batch.widen_state(), batch.active
    m, v = (state[key] for key in MOMENTS)
    beta1, beta2, counts = scalars["beta1"], scalars["beta2"], batch.counts.to(grad.dtype)
    m.lerp_(grad, (1 - beta1) * active)
    v.lerp_(grad.square_(), (1 - beta2) * active)
    denominator = torch.sqrt(v, out=grad).div_(_bias(counts, beta2, grad.ndim).sqrt()).add_(scalars["eps"])
    return torch.div(m, denominator, out=denominator).div_(_bias(counts, beta1, grad.ndim))


def _bias(counts: Tensor, beta: Tensor, ndim: int) -> Tensor:
    """Return 1 - beta^t, (batch, 1, ...); 1 before the first update, when the moments are zero."""
    bias = -torch.expm1(counts * beta.log())
    return torch.where(bias > 0, bias, 1.0).view(-1, *[1] * (ndim - 1))


def _squarable(grad: Tensor) -> Tensor:
    """Clamp, in place, what would overflow when squared; Adam's step does not depend on the scale."""
    most = 2.0 ** (511 if grad.dtype == torch.float64 else 63)
    return grad.clamp_(-most, most)


def adam_scalars(group: Group) -> dict[str, float]:
    """Return this step's numbers of a group; raise ValueError if one is out of range."""
    check_group_numbers(group, "betas", "eps")
    lr, (beta1, beta2) = float(group["lr"]), group["betas"]
    eta = eta_of(lr, group["weight_decay"])
    return {"gamma": lr, "eta": eta, "eps": float(group["eps"]), "beta1": float(beta1), "beta2": float(beta2)}


ADAM_RULE = SplitRule(
    adam_update,
    lambda u, settings, out: u,
    lambda shape, settings: float(math.prod(shape)),
    lambda shape, settings, dtype, device: Encoding(dtype, dtype),
)
ADAM_ARITHMETIC = Arithmetic(ADAM_RULE.rule, MOMENTS, ADAM_RULE, is_elementwise=True, counts_updates=True)
