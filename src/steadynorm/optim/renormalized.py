"""RenormalizedAdamW: Algorithm 1 of the paper."""

import math
from typing import Any, Never

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm.decay.rule import refuse_scion_groups
from steadynorm.optim.base import Group, SteadyOptimizer, full_precision
from steadynorm.optim.buckets import Batch, Bucket, Scalars, decay_and_step_
from steadynorm.optim.validation import check_betas, check_lr, check_range, refuse_unknown
from steadynorm.theory.equilibrium import eta_of


def renormalized_rule(batch: Batch, scalars: Scalars, settings: Any) -> None:
    """AdamW, then scaled so that only u's component along the weights changes their norm.

    |theta_t| = | |theta_{t-1}| - gamma u_par |,   u_par = <theta_{t-1}, u_t> / |theta_{t-1}|,  theta_{t-1} decayed
    """
    theta, grad, state, live = batch.theta, _squarable(batch.grad()), batch.wide_state(), batch.live
    eps, gamma, eta = scalars["eps"], scalars["gamma"] * live, scalars["eta"] * live
    state["step"] += live.flatten()  # (batch,)
    moments = []
    for key, value, beta in (("exp_avg", grad, scalars["beta1"]), ("exp_avg_sq", grad * grad, scalars["beta2"])):
        state[key].lerp_(value, (1 - beta) * live)
        bias = -torch.expm1(state["step"] * beta.log()).view(live.shape)  # 1 - beta^t; 0 before the first update
        moments.append(state[key] / torch.where(bias > 0, bias, 1.0))
    u = moments[0] / (moments[1].sqrt() + eps)
    unit = _unit(batch, theta)
    decayed = theta * ((1 - eta) / unit)
    square, along = _layer_sums(batch, decayed * decayed, decayed * u)
    size = square.sqrt()
    along, size = along / torch.where(size > 0, size, 1.0), size * unit
    decay_and_step_(theta, u, eta, scalars["gamma"], live, batch.products)
    (after,) = _layer_sums(batch, (theta / unit).square())
    scale = (size - gamma * along).abs() / (after.sqrt() * unit + eps)
    theta.mul_(torch.where((size >= eps) & (gamma > 0), scale, 1.0))  # lr = 0: not one bit, for all eps


def _squarable(grad: Tensor) -> Tensor:
    """In place: what would overflow when squared counts as the largest that does not, as Adam's step has no scale."""
    most = 2.0 ** (511 if grad.dtype == torch.float64 else 63)
    return grad.clamp_(-most, most)


def _unit(batch: Batch, theta: Tensor) -> Tensor:
    """A power of two, 1 or more, near the layer's largest weight, (batch, 1, ...): over it, squares do not overflow."""
    largest = theta.reshape(len(theta), math.prod(theta.shape[1:])).abs()
    largest = largest.amax(1) if largest.shape[1] else largest.new_zeros(len(theta))
    largest = largest if batch.most is None else batch.most(largest)
    exponent = torch.frexp(largest).exponent.clamp(min=0).to(theta.dtype)
    return torch.exp2(exponent - 1).clamp(min=1.0).view(batch.live.shape)


def _layer_sums(batch: Batch, *values: Tensor) -> Tensor:
    """Sum over each parameter of a stack, all of its shards, (values, batch, 1, ...)."""
    sums = torch.stack([x.reshape(len(x), math.prod(x.shape[1:])).sum(1) for x in values])
    sums = sums if batch.total is None else batch.total(sums)
    return sums.view(len(values), *batch.live.shape)


class RenormalizedAdamW(SteadyOptimizer):
    """AdamW whose perpendicular update component is kept from changing the weight norm (Algorithm 1 of the paper).

    For studying what that component does: after the AdamW step each parameter is scaled to the norm

        | |theta'| - gamma <theta', u> / |theta'| |,        theta' = (1 - gamma lambda) theta

    Arguments as torch's AdamW; eps is both Adam's and the algorithm's. Decay is constant, as in the paper.
    State: two fp32 buffers and a step count per parameter.

    Examples:
        >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0])); optimizer = RenormalizedAdamW([p], weight_decay=0.0)
        >>> p.grad = torch.tensor([-4.0, 3.0]); optimizer.step()  # u = (-1, 1) points along the weights by 0.2
        >>> round(p.norm().item(), 4)
        4.9998
    """

    rule = staticmethod(renormalized_rule)
    state_keys = ("step", "exp_avg", "exp_avg_sq")
    mark_keys = ("betas",)
    corrects_itself = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        check_finite: bool = False,
        maximize: bool = False,
        **unknown: Never,
    ):
        refuse_unknown(type(self), unknown)
        defaults: Group = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "check_finite": check_finite,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        return {"step": step, "exp_avg": full_precision(p), "exp_avg_sq": full_precision(p)}

    def settings(self, group: Group, p: Tensor) -> tuple[None, bool]:
        return None, False  # norms are of the whole parameter

    def check_group(self, group: Group) -> None:
        refuse_scion_groups(group)
        check_betas(group["betas"])
        check_range("eps", group["eps"], closed=True)
        check_range("weight_decay", group["weight_decay"], closed=True)

    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        check_lr(lr)
        check_betas(group["betas"])
        check_range("eps", group["eps"], closed=True)
        check_range("weight_decay", group["weight_decay"], closed=True)
        eta = eta_of(lr, group["weight_decay"])
        return {"gamma": lr, "eta": eta, "eps": float(group["eps"]), "beta1": float(beta1), "beta2": float(beta2)}
