"""Scion and ScionC (Algorithm 2 of the paper)."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm import lmo as lmos
from steadynorm import theory
from steadynorm.decay.families import SCION
from steadynorm.decay.rule import OVERLAPS, Constant, Group, decay_rule, group_label, weight_decay_now
from steadynorm.optim.base import SteadyOptimizer
from steadynorm.optim.buckets import Batch, Bucket, Scalars, SplitRule, max_elements
from steadynorm.optim.idle import Slices
from steadynorm.optim.state import zeros_like
from steadynorm.optim.validation import (
    check_group_numbers,
    check_lr,
    check_range,
    find_parameter,
    is_param_groups,
    refuse_momentum,
)
from steadynorm.polar import Polar
from steadynorm.theory.equilibrium import eta_of
from steadynorm.views import check_block_count

_DTYPES = {"bfloat16": torch.bfloat16, "float32": torch.float32}


@dataclass(frozen=True)
class ScionSettings:
    """What does not change from step to step."""

    lmo: lmos.Lmo
    blocks: int
    nesterov: bool
    polar: Polar

    def length_share(self, shape: Sequence[int]) -> float:
        """Return |u|^2 over that of an exact lmo, which Newton-Schulz falls short of; for Gaussian momentum."""
        return self.lmo.numbers.length_share(shape, self.blocks, self.polar.method, self.polar.steps)


def _accumulate(batch: Batch, scalars: Scalars, settings: ScionSettings) -> Tensor:
    """m_t = (1-a) m + a g;  x = m_t, Nesterov (1-a) m_t + a g."""
    alpha, m = scalars["alpha"] * batch.active, batch.state["momentum_buffer"]
    grad = batch.grad()
    if m.dtype != grad.dtype:
        return _from_kept(m, grad, alpha, settings.nesterov)
    m.lerp_(grad, alpha)
    return grad.lerp_(m, 1 - alpha) if settings.nesterov else m


def _from_kept(m: Tensor, grad: Tensor, alpha: Tensor, nesterov: bool) -> Tensor:
    """Do the same with momentum kept in another dtype: x replaces grad row by row, so that m is never copied whole."""
    along = min(1, grad.ndim - 1)  # a stack of 0-d parameters has no rows
    rows = max(1, max_elements(grad.device) * grad.shape[along] // max(1, grad.numel()))
    alphas = alpha.expand(*alpha.shape[:along], grad.shape[along], *alpha.shape[along + 1 :]).split(rows, along)
    for kept, x, a in zip(m.split(rows, along), grad.split(rows, along), alphas, strict=True):
        wide = kept.to(x.dtype).lerp_(x, a)
        torch._foreach_copy_([kept, x], [wide, torch.lerp(x, wide, 1 - a) if nesterov else wide])
    return grad


def _normalize(x: Tensor, settings: ScionSettings, out: Tensor | None) -> Tensor:
    """theta_t = (1-eta) theta + gamma lmo(x)."""
    return settings.lmo.update(x, blocks=settings.blocks, polar=settings.polar, batch_ndim=1, out=out)


def _cost(shape: tuple[int, ...], settings: ScionSettings) -> float:
    return settings.lmo.operations(shape, blocks=settings.blocks, steps=settings.polar.steps)


def bf16_scale(
    shape: tuple[int, ...], settings: ScionSettings, dtype: torch.dtype, device: torch.device
) -> float | None:
    """Return c such that bf16 holds all that the lmo uses of x, and u/c exactly; None if there is no such c.

    Transfers between processes then take half the bytes, and nothing is lost.
    """
    lmo, polar = settings.lmo, settings.polar
    sides = rows, columns = lmo.view.sides(shape, settings.blocks)
    if not lmo.numbers.is_polar:
        return None if lmo.entry_size is None else lmo.entry_size(*sides)
    if polar.working_dtype(dtype, device, sides) != torch.bfloat16:
        return None
    return math.sqrt(rows / columns) / lmo.view.divisor(shape)


SCION_RULE = SplitRule(_accumulate, _normalize, _cost, bf16_scale)


class Scion(SteadyOptimizer):
    """Constrained Scion with constant decoupled decay, in the paper's parametrisation.

        m_t = (1 - alpha) m_{t-1} + alpha g_t
        theta_t = (1 - gamma lambda) theta_{t-1} + gamma lmo(m_t)

    Args:
        params: Groups from `steadynorm.param_groups(model)`, or your own with an lmo each.
        lr: gamma.
        alpha: The weight of the new gradient, in (0, 1].
        lmo: "spectral", "spectral-transposed" (weights stored d_in x d_out), "sign", "embedding", "bias", "row",
            "column", "conv", "conv-tap", or "by-shape".
        weight_decay: lambda.
        nesterov: Whether the lmo sees (1 - alpha) m_t + alpha g_t.
        blocks: How many row blocks are matrices of their own (fused QKV: 3).
        polar: "express", "newton-schulz" (Muon's own iteration, whose updates are up to 7 % shorter) or "svd".
        polar_steps: How many steps; 4 is a fifth faster, at the error that others have with five.
        momentum_dtype: "bfloat16" halves the state. Default: fp32 (fp64 for fp64 parameters).
        own_time: Whether rows of embeddings and matrices of stacks (experts) stand still in steps without a gradient,
            so that rare ones settle where frequent ones do. If False, they keep moving along what is left of their
            momentum.
        check_finite: Whether to raise on a non-finite gradient, which forces a device sync. By default such a parameter
            is left as it was, and its `skipped` counter goes up.
        maximize: Whether to ascend.
        mesh: The DeviceMesh or ProcessGroup of processes with equal parameters and gradients (DDP), which then share
            the work, and of which each keeps 1/W of the momentum. DTensor parameters (FSDP2, tensor parallel) need no
            option.
        momentum: Refused, because it means opposite things to Scion and to torch; use `alpha`.

    Examples:
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> optimizer = Scion(model.parameters(), lr=0.1, lmo="spectral", weight_decay=0.01)
        >>> model(torch.ones(1, 4)).sum().backward(); optimizer.step()
    """

    rule = staticmethod(SCION_RULE.rule)
    split_rule = SCION_RULE
    state_keys = ("momentum_buffer",)
    signature_keys = ("alpha", "lmo")
    setting_keys = ("lmo", "blocks", "nesterov", "polar", "polar_steps", "own_time")
    normalizes = True
    group_kind = "scion"
    corrects_itself = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        alpha: float = 0.1,
        lmo: str | None = None,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        blocks: int = 1,
        polar: str = "express",
        polar_steps: int = 5,
        momentum_dtype: str | None = None,
        own_time: bool = True,
        check_finite: bool = False,
        maximize: bool = False,
        mesh: Any = None,
        momentum: None = None,
    ):
        super().__init__(params, _group_defaults(type(self), locals()), mesh)

    def fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        m = zeros_like(p, self.mesh)
        return {"momentum_buffer": m if group["momentum_dtype"] is None else m.to(_DTYPES[group["momentum_dtype"]])}

    @staticmethod
    def settings_of(group: Group, shape: Sequence[int]) -> ScionSettings:
        """Return what a group says of a parameter of this shape."""
        lmo = lmos.get(group["lmo"], shape)
        lmo.check(shape, group["blocks"])
        blocks = 1 if lmo.row_separable else group["blocks"]  # rows do not see each other, so neither do blocks
        return ScionSettings(lmo, blocks, bool(group["nesterov"]), Polar(group["polar"], group["polar_steps"]))

    def settings(self, group: Group, p: Tensor) -> tuple[ScionSettings, bool]:
        settings = self.settings_of(group, p.shape)
        return settings, settings.lmo.slice_separable(p.shape)

    def slices(self, group: Group, p: Tensor) -> Slices:
        settings = self.settings(group, p)[0]
        slice_ndim = settings.lmo.waiting_ndim(p.shape)
        waiting = slice_ndim if group["own_time"] else 0
        if slice_ndim == 2 and p.ndim == 3 and settings.blocks == 1:  # a stack: its matrices fade if they do not wait
            return Slices(waiting, len(p), 0)
        return Slices(waiting, settings.blocks, settings.lmo.view.blocks_dim)

    def check_group(self, group: Group) -> None:
        refuse_momentum(type(self), group.get("momentum"))
        if group["lmo"] is None:
            raise ValueError(
                "no lmo; use steadynorm.param_groups(model), which picks one per role, or put one in the group: "
                f'{{"params": [...], "lmo": "spectral"}}, or {", ".join(name for name in lmos.LMOS if name != "spectral")}. '
                "'by-shape' goes by shape alone and sends embeddings to spectral"
            )
        check_group_numbers(group, "alpha")
        check_block_count("blocks", group["blocks"])
        if group["momentum_dtype"] is not None and group["momentum_dtype"] not in _DTYPES:
            raise ValueError(
                f"momentum_dtype={group['momentum_dtype']!r} is unknown; choose one of {', '.join(_DTYPES)}"
            )
        if group["weight_decay"] is not None:
            check_range("weight_decay", group["weight_decay"], closed=True)
        elif "steady_norm_sq" not in self.defaults:
            raise ValueError("weight_decay=None means corrected: use ScionC, or param_groups(model, weight_decay=...)")

    def _weight_decay(self, group: Group, settings: ScionSettings, shape: tuple[int, ...]) -> float:
        """Return lambda_t of parameters of this shape."""
        if group.get("overlap") != "exact" or isinstance(decay_rule(group), Constant):
            return weight_decay_now(group, SCION)
        kernel = settings.lmo.overlap(shape, blocks=settings.blocks)
        return weight_decay_now(group, SCION, kernel, settings.length_share(shape))

    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        lr, alpha = float(group["lr"]), float(group["alpha"])
        check_lr(lr)
        check_group_numbers(group, "alpha")
        decay = self._weight_decay(group, bucket.settings, bucket.shape)
        check_range("weight_decay", decay, closed=True)
        return {"gamma": lr, "alpha": alpha, "eta": eta_of(lr, decay), "keep": 1 - alpha}


class ScionC(Scion):
    """Scion with corrected decay: the decay follows lr and momentum so that the weight norm stays where you put it.

        lambda_t = (2 - alpha_t) / (2 alpha_t C_t^2) gamma_t        (Nesterov: over 1 + 4a - 6a^2 + 2a^3)

    lr, alpha and steady_norm_sq are read from the group at every step, so you can schedule any of them. Keep weights in
    fp32 (with autocast or FSDP2's mixed precision): written to bf16, small updates and the decay are rounded away; at lr
    1e-4 a step changes 2 % of the weights.

    Args:
        params: Groups from `steadynorm.param_groups(model)`, or your own with an lmo each.
        lr: gamma.
        alpha: The weight of the new gradient, in (0, 1].
        lmo: The lmo of groups that have none, as in Scion.
        steady_norm_sq: C^2, the weight norm squared over the update norm squared at which the weights settle.
        weight_decay: Set it in a group to have a constant lambda there (the output layer), without steady_norm_sq. As
            an argument it is refused unless it is 0, because it would turn the correction off for every group.
        overlap: "linear", the paper's formula, or "exact", the decay that reaches C^2 given the overlap kernel of each
            parameter's lmo and shape, at finite eta.
        nesterov, blocks, polar, polar_steps, momentum_dtype, own_time, check_finite, maximize, mesh: As in Scion.
        momentum: Refused, as in Scion.

    Examples:
        >>> model = torch.nn.Linear(4, 4, bias=False)
        >>> optimizer = ScionC(model.parameters(), lr=0.01, lmo="spectral")
        >>> round(optimizer.weight_decay_of(model.weight), 6)
        0.08
    """

    corrects_itself = True

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-2,
        *,
        alpha: float = 0.1,
        lmo: str | None = None,
        steady_norm_sq: float = 1.1875,
        weight_decay: float | None = None,
        overlap: str = "linear",
        nesterov: bool = False,
        blocks: int = 1,
        polar: str = "express",
        polar_steps: int = 5,
        momentum_dtype: str | None = None,
        own_time: bool = True,
        check_finite: bool = False,
        maximize: bool = False,
        mesh: Any = None,
        momentum: None = None,
    ):
        defaults = _group_defaults(type(self), locals())
        if weight_decay:
            raise ValueError(_constant_for_all(weight_decay, float(lr), alpha, nesterov))
        groups: Any = params if is_param_groups(params) else ()
        if groups and all("lmo" in group and group["weight_decay"] is not None for group in groups):
            raise ValueError(
                f"{type(self).__name__}: every group has a constant weight_decay, so nothing would be corrected; leave "
                "weight_decay out of param_groups, or use Scion"
            )
        SteadyOptimizer.__init__(self, params, defaults, mesh)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group, with either a target or a constant decay."""
        if isinstance(param_group, dict) and param_group.get("weight_decay") is not None:
            if param_group.get("steady_norm_sq") is not None:
                label = group_label(len(self.param_groups), param_group)
                raise ValueError(
                    f"{type(self).__name__}, {label}: weight_decay={param_group['weight_decay']} makes its decay "
                    f"constant, and steady_norm_sq={param_group['steady_norm_sq']} asks for a corrected one; give one"
                )
            param_group = {**param_group, "steady_norm_sq": None}
        super().add_param_group(param_group)

    def check_group(self, group: Group) -> None:
        super().check_group(group)
        if group["weight_decay"] is None:
            check_range("steady_norm_sq", group["steady_norm_sq"])
        if group["overlap"] not in OVERLAPS:
            raise ValueError(f"overlap={group['overlap']!r} is unknown; choose 'linear' or 'exact'")
        for p in group["params"]:
            if p.numel():
                self._weight_decay(group, self.settings(group, p)[0], tuple(p.shape))

    def merge_saved_group(self, saved: Group, group: Group) -> Group:
        """Keep a corrected group corrected when a checkpoint of Scion, which knows only constant decay, is loaded."""
        plain = "steady_norm_sq" not in saved and group["weight_decay"] is None
        return {**saved, "weight_decay": None} if plain else saved

    def weight_decay_of(self, parameter: Tensor | str) -> float:
        """Return the lambda_t that a step would use now for this parameter, given itself or by its name in the groups."""
        group, p = find_parameter(self, parameter, "weight_decay_of")
        return self._weight_decay(group, self.settings(group, p)[0], tuple(p.shape))


def _constant_for_all(weight_decay: float, lr: float, alpha: float, nesterov: bool) -> str:
    """Return the error for ScionC(weight_decay=...), with the target that this decay means."""
    remedy = "pass steady_norm_sq= instead"
    if weight_decay > 0 and 0 < lr < 1 / weight_decay and 0 < alpha <= 1:
        target = theory.steady_norm_sq(lr, weight_decay, alpha, nesterov=nesterov, limit=True)
        remedy = f"at lr={lr:g} and alpha={alpha:g} it settles at steady_norm_sq={target:.4g}: pass that instead"
    return (
        f"ScionC: weight_decay={weight_decay} would be constant and switch the correction off; {remedy}, use Scion for "
        "constant decay, or set weight_decay in single groups"
    )


def _group_defaults(optimizer: type[SteadyOptimizer], arguments: Mapping[str, Any]) -> Group:
    """Return the arguments of a constructor, given as its locals(), that are settings of a group."""
    refuse_momentum(optimizer, arguments["momentum"])
    others = ("self", "params", "mesh", "momentum", "__class__")
    return {name: value for name, value in arguments.items() if name not in others}
