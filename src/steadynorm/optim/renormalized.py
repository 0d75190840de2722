"""RenormalizedAdamW: Algorithm 1 of the paper."""

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm.decay.hold import refuse_hold
from steadynorm.decay.rule import Group, refuse_scion_groups
from steadynorm.optim.adam_rule import MOMENTS, adam_scalars, adam_update
from steadynorm.optim.arithmetic import Arithmetic
from steadynorm.optim.base import SteadyOptimizer
from steadynorm.optim.batch import Batch, Scalars, decay_and_step_, inner_products, kept_share
from steadynorm.optim.buckets import Bucket
from steadynorm.optim.state import zeros_like
from steadynorm.optim.validation import check_group_numbers, group_defaults, refuse_momentum


def renormalized_rule(batch: Batch, scalars: Scalars, settings: Any) -> None:
    """Take AdamW's step, then rescale so that only u's component along the weights changes their norm.

    |theta_t| = | |theta_{t-1}| - gamma u_par |,   u_par = <theta_{t-1}, u_t> / |theta_{t-1}|,  theta_{t-1} decayed
    """
    theta, active, u = batch.weights(), batch.active, adam_update(batch, scalars)
    eps, gamma = scalars["eps"], scalars["gamma"] * active
    weight_scale = _power_of_two_scale(batch, theta)
    keep = kept_share(scalars["eta"], active)
    decayed = theta * (keep / weight_scale)
    square, along = _layer_sums(batch, decayed * decayed, decayed * u)
    size = square.sqrt()
    along, size = along / torch.where(size > 0, size, 1.0), size * weight_scale
    if (products := batch.descent.products) is not None:
        products.add_(inner_products(theta, u, active))
    decay_and_step_(theta, u, keep, scalars["gamma"], active)
    (after,) = _layer_sums(batch, (theta / weight_scale).square())
    scale = (size - gamma * along).abs() / (after.sqrt() * weight_scale + eps)
    theta.mul_(torch.where((size >= eps) & (gamma > 0), scale, 1.0))  # lr = 0: not one bit, for all eps
    batch.write(theta)


def _power_of_two_scale(batch: Batch, theta: Tensor) -> Tensor:
    """Return a power of two of at least 1 near the layer's largest weight, (batch, 1, ...), over which squares fit."""
    largest = theta.reshape(len(theta), math.prod(theta.shape[1:])).abs()
    largest = largest.amax(1) if largest.shape[1] else largest.new_zeros(len(theta))
    largest = largest if batch.shard is None else batch.shard.max_over_shards(largest)
    exponent = torch.frexp(largest).exponent.clamp(min=0).to(theta.dtype)
    return torch.exp2(exponent - 1).clamp(min=1.0).view(batch.active.shape)


def _layer_sums(batch: Batch, *values: Tensor) -> Tensor:
    """Sum over each parameter of a stack, all of its shards, (values, batch, 1, ...)."""
    sums = torch.stack([x.reshape(len(x), math.prod(x.shape[1:])).sum(1) for x in values])
    sums = sums if batch.shard is None else batch.shard.sum_over_shards(sums)
    return sums.view(len(values), *batch.active.shape)


class RenormalizedAdamW(SteadyOptimizer):
    """AdamW whose perpendicular update component is kept from changing the weight norm (Algorithm 1 of the paper).

    For studying what that component does: after the AdamW step each parameter is scaled to the norm

        | |theta'| - gamma <theta', u> / |theta'| |,        theta' = (1 - gamma lambda) theta

    Decay is constant, as in the paper. The state is two fp32 buffers and a step count per parameter.

    Args:
        params: The parameters or groups.
        lr, betas, weight_decay, maximize: As in torch's AdamW.
        eps: Both Adam's and the algorithm's.
        capturable: Whether a step can be captured in a CUDA graph, as in Scion.
        weight_residual: Whether bf16 parameters train as fp32 weights, as in Scion.
        check_finite: Whether to raise on a non-finite gradient, as in Scion.
        momentum: Refused, as in Scion.

    Examples:
        >>> p = torch.nn.Parameter(torch.tensor([3.0, 4.0])); optimizer = RenormalizedAdamW([p], weight_decay=0.0)
        >>> p.grad = torch.tensor([-4.0, 3.0]); optimizer.step()  # u = (-1, 1) points along the weights by 0.2
        >>> round(p.norm().item(), 4)
        4.9998
    """

    arithmetic = Arithmetic(renormalized_rule, MOMENTS, counts_updates=True)
    signature_keys = ("betas",)
    corrects_itself = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        capturable: bool = False,
        weight_residual: bool | None = None,
        check_finite: bool = False,
        maximize: bool = False,
        momentum: None = None,
    ):
        defaults = group_defaults(locals())
        refuse_momentum(type(self), defaults.pop("momentum"))
        super().__init__(params, defaults)

    def fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        return {key: zeros_like(p) for key in MOMENTS}

    def settings(self, group: Group, p: Tensor) -> tuple[None, bool]:
        return None, False  # norms are those of whole parameters

    def check_group(self, group: Group) -> None:
        refuse_scion_groups(group)
        refuse_hold(type(self).__name__, group)
        check_group_numbers(group, "betas", "eps", "weight_decay")

    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        refuse_hold(type(self).__name__, group)  # a live group may have asked since
        return adam_scalars(group)
