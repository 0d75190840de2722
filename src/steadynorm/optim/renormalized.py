"""RenormalizedAdamW: Algorithm 1 of the paper."""

from typing import Any, Never

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm.optim.base import (
    Group,
    SteadyOptimizer,
    check_betas,
    check_eta,
    check_lr,
    check_range,
    full_precision,
    refuse_unknown,
)
from steadynorm.optim.buckets import Bucket, Scalars, State, decayed_step


def renormalized_rule(
    theta: Tensor, grad: Tensor, state: State, scalars: Scalars, settings: Any
) -> tuple[Tensor, State]:
    """AdamW, then scaled so that only u's component along the weights changes their norm.

    |theta_t| = | |theta_{t-1}| - gamma u_par |,   u_par = <theta_{t-1}, u_t> / |theta_{t-1}|,  theta_{t-1} decayed
    """
    beta1, beta2, eps, gamma = (scalars[key] for key in ("beta1", "beta2", "eps", "gamma"))
    step = state["step"] + 1  # (batch,)
    m = state["exp_avg"] * beta1 + grad * (1 - beta1)
    v = state["exp_avg_sq"] * beta2 + grad.square() * (1 - beta2)
    bias = [-torch.expm1(step * beta.log()).view(-1, *[1] * (theta.ndim - 1)) for beta in (beta1, beta2)]  # 1 - beta^t
    u = (m / bias[0]) / ((v / bias[1]).sqrt() + eps)
    new = decayed_step(theta, u, scalars["eta"], gamma)
    decayed = theta * (1 - scalars["eta"])
    size, new_size = _layer_norm(decayed), _layer_norm(new)
    along = _layer_sum(decayed * u) / torch.where(size > 0, size, 1.0)
    scale = torch.where(size >= eps, (size - gamma * along).abs() / (new_size + eps), 1.0)
    return new * scale, {"step": step, "exp_avg": m, "exp_avg_sq": v}


def _layer_sum(x: Tensor) -> Tensor:
    """Sum over each parameter of a stack, (batch, 1, ...)."""
    return x.flatten(1).sum(1).view(-1, *[1] * (x.ndim - 1)) if x.ndim > 1 else x


def _layer_norm(x: Tensor) -> Tensor:
    return _layer_sum(x * x).sqrt()


class RenormalizedAdamW(SteadyOptimizer):
    """AdamW whose perpendicular update component is kept from changing the weight norm (Algorithm 1 of the paper).

    For studying what that component does: after the AdamW step each parameter is scaled to the norm

        | |theta'| - gamma <theta', u> / |theta'| |,        theta' = (1 - gamma lambda) theta

    Arguments as torch's AdamW; eps is both Adam's and the algorithm's. Decay is constant, as in the paper.
    State: two fp32 buffers and a step count per parameter.

    >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0])); optimizer = RenormalizedAdamW([p], weight_decay=0.0)
    >>> p.grad = torch.tensor([-4.0, 3.0]); optimizer.step()  # u = (-1, 1) points along the weights by 0.2
    >>> round(p.norm().item(), 4)
    4.9998
    """

    rule = staticmethod(renormalized_rule)
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
        refuse_unknown(type(self).__name__, unknown)
        defaults: Group = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "check_finite": check_finite,
            "maximize": maximize,
        }
        super().__init__(params, defaults)

    def fresh_state(self, p: Tensor) -> dict[str, Tensor]:
        step = torch.zeros((), dtype=torch.float32, device=p.device)
        return {"step": step, "exp_avg": full_precision(p), "exp_avg_sq": full_precision(p)}

    def settings(self, group: Group, p: Tensor) -> tuple[None, bool]:
        return None, False  # norms are of the whole parameter

    def check_group(self, group: Group) -> None:
        check_betas(group["betas"])
        check_range("eps", group["eps"], closed=True)
        check_range("weight_decay", group["weight_decay"], closed=True)

    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        lr, (beta1, beta2) = float(group["lr"]), group["betas"]
        check_lr(lr)
        check_betas(group["betas"])
        check_range("weight_decay", group["weight_decay"], closed=True)
        eta = check_eta(lr, group["weight_decay"])
        return {"gamma": lr, "eta": eta, "eps": float(group["eps"]), "beta1": float(beta1), "beta2": float(beta2)}
