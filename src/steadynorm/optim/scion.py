"""Scion and ScionC (Algorithm 2 of the paper)."""

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm import lmo as lmos
from steadynorm import theory
from steadynorm.decay.families import SCION
from steadynorm.decay.hold import BALANCE_STEPS, HOLD_KEYS
from steadynorm.decay.rule import OVERLAPS, Constant, Group, decay_rule, group_label, weight_decay_now
from steadynorm.optim.arithmetic import CHUNK_MIB
from steadynorm.optim.base import SteadyOptimizer
from steadynorm.optim.buckets import Bucket
from steadynorm.optim.idle import Slices
from steadynorm.optim.scion_rule import SCION_ARITHMETIC, ScionSettings, settings_of, with_polar_steps
from steadynorm.optim.state import check_momentum_dtype, zero_momentum
from steadynorm.optim.validation import (
    check_group_numbers,
    check_range,
    find_parameter,
    group_defaults,
    is_role_group,
    refuse_momentum,
)
from steadynorm.theory.equilibrium import eta_of
from steadynorm.theory.momentum import check_alpha
from steadynorm.views import Blocks


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
        blocks: Blocks that are matrices of their own: 3 (fused QKV), (2048, 512, 512) (its sizes) or ("inputs", 16) (heads).
        polar: "express", "newton-schulz" (Muon's own iteration, whose updates are up to 7 % shorter) or "svd".
        polar_steps: How many steps. Default: 4, and 5 for "newton-schulz". 5 steps of "express" are more exact and take a
            quarter to a third longer.
        polar_dtype: The dtype of the polar iteration: "float16", "bfloat16", "float32", or "auto", which is fp16 on an
            accelerator, bf16 on a CPU that has it and fp32 elsewhere.
        momentum_dtype: "bfloat16" halves the state. Default: fp32 (fp64 for fp64 parameters).
        own_time: Whether rows of embeddings and matrices of stacks (experts) stand still in steps without a gradient,
            so that rare ones settle where frequent ones do. If False, they keep moving along what is left of their
            momentum.
        hold: How the weight norm is held: "decay", "balance" (ScionC only: the decay follows measured updates, so the
            target is met even where gradients depend on the weights), or "fixed" (weights are scaled to
            the target, or without one to their first norm, after every step).
        balance_steps: T, over how many steps "balance" averages, and returns a norm that is off.
        cautious: Whether decay acts only on weights that agree with their update in sign.
        chunk_mib: How many MiB the temporaries of a step may take on an accelerator. Parameters of one shape are processed
            together as far as they fit: fewer launches for more memory.
        capturable: Whether a step can be captured in a CUDA graph: its numbers are then on the device, and
            `steadynorm.fill_scalars(optimizer)` writes them before every replay.
        weight_residual: Whether bf16 parameters keep the 16 bits that they lack in the state (2 bytes per parameter), so that
            they train as fp32 weights. Default: those that are bf16 do. True refuses other parameters; False rounds away
            whatever is below half a bf16 step.
        check_finite: Whether to raise on a non-finite gradient, which forces a device sync. By default such a parameter
            is left as it was, and its `skipped` counter goes up.
        maximize: Whether to ascend.
        mesh: The DeviceMesh or ProcessGroup of processes with equal parameters and gradients (DDP). They share the work, and
            each of the W processes keeps 1/W of the momentum. DTensor parameters (FSDP2, tensor parallel) need no
            option.
        momentum: Refused, because it means opposite things to Scion and to torch; use `alpha`.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 2, bias=False)
        >>> optimizer = Scion(model.parameters(), lr=0.1, lmo="spectral", weight_decay=0.01)
        >>> model(torch.ones(1, 4)).sum().backward(); optimizer.step()
    """

    arithmetic = SCION_ARITHMETIC
    signature_keys = ("alpha", "lmo")
    setting_keys = (
        "lmo",
        "blocks",
        "nesterov",
        "polar",
        "polar_steps",
        "polar_dtype",
        "own_time",
        "chunk_mib",
        *HOLD_KEYS,
    )
    group_kind = "scion"
    family = SCION
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
        blocks: Blocks = 1,
        polar: str = "express",
        polar_steps: int | None = None,
        polar_dtype: str = "auto",
        momentum_dtype: str | None = None,
        own_time: bool = True,
        hold: str = "decay",
        balance_steps: float = BALANCE_STEPS,
        cautious: bool = False,
        chunk_mib: float = CHUNK_MIB,
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

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does."""
        super().add_param_group(with_polar_steps(param_group, self.defaults))

    def fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        return {"momentum_buffer": zero_momentum(p, group["momentum_dtype"], self.mesh)}

    def settings(self, group: Group, p: Tensor) -> tuple[ScionSettings, bool]:
        lmo = lmos.get(group["lmo"], p.shape)
        return settings_of(group, p.shape, lmo), lmo.slice_separable(p.shape)

    def slices(self, group: Group, p: Tensor) -> Slices:
        return self.settings(group, p)[0].slices(p.shape, own_time=group["own_time"])

    def check_group(self, group: Group) -> None:
        refuse_momentum(type(self), group.get("momentum"))
        if group["lmo"] is None:
            raise ValueError(
                "no lmo; use steadynorm.param_groups(model), which picks one per role, or put one in the group: "
                f'{{"params": [...], "lmo": "spectral"}}, or {", ".join(name for name in lmos.LMOS if name != "spectral")}. '
                "'by-shape' looks only at the shape, so it gives embeddings the spectral lmo"
            )
        check_group_numbers(group, "alpha")
        check_range("chunk_mib", group["chunk_mib"])
        check_momentum_dtype(group["momentum_dtype"])
        if group["weight_decay"] is not None:
            check_range("weight_decay", group["weight_decay"], closed=True)
        elif "steady_norm_sq" not in self.defaults:
            raise ValueError("weight_decay=None means corrected: use ScionC, or param_groups(model, weight_decay=...)")

    def _weight_decay(self, group: Group, shape: tuple[int, ...]) -> float:
        """Return lambda_t of parameters of this shape."""
        if group.get("overlap") != "exact" or isinstance(decay_rule(group), Constant):
            return weight_decay_now(group, SCION)
        return weight_decay_now(group, SCION, SCION.kernel(shape, group), SCION.length_share(shape, group))

    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        lr, alpha = float(group["lr"]), check_alpha(float(group["alpha"]))
        decay = self._weight_decay(group, bucket.shape)
        return {"gamma": lr, "alpha": alpha, "eta": eta_of(lr, decay), "momentum_keep": 1 - alpha}


class ScionC(Scion):
    """Scion with corrected decay: the decay follows lr and momentum so that the weight norm stays where you put it.

        lambda_t = (2 - alpha_t) / (2 alpha_t C_t^2) gamma_t        (Nesterov: over 1 + 4a - 6a^2 + 2a^3)

    lr, alpha and steady_norm_sq are read from the group at every step, so you can schedule any of them. Weights may be fp32
    (with autocast or FSDP2's mixed precision) or bf16, which train alike because the state keeps what bf16 rounds away
    (`weight_residual`).

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
        nesterov, blocks, polar, polar_steps, polar_dtype, momentum_dtype, own_time, chunk_mib, capturable, weight_residual,
            check_finite, maximize, mesh: As in Scion.
        hold, balance_steps, cautious: As in Scion. Groups with constant decay have no target, so "balance" leaves them as
            they are.
        momentum: Refused, as in Scion.

    Examples:
        >>> import torch
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
        blocks: Blocks = 1,
        polar: str = "express",
        polar_steps: int | None = None,
        polar_dtype: str = "auto",
        momentum_dtype: str | None = None,
        own_time: bool = True,
        hold: str = "decay",
        balance_steps: float = BALANCE_STEPS,
        cautious: bool = False,
        chunk_mib: float = CHUNK_MIB,
        capturable: bool = False,
        weight_residual: bool | None = None,
        check_finite: bool = False,
        maximize: bool = False,
        mesh: Any = None,
        momentum: None = None,
    ):
        defaults = group_defaults(locals())
        refuse_momentum(type(self), defaults.pop("momentum"))
        if weight_decay:
            raise ValueError(_constant_for_all(weight_decay, float(lr), alpha, nesterov))
        groups: Any = list(params) if isinstance(params, Iterator) else params
        if _are_constant(groups):
            raise ValueError(
                f"{type(self).__name__}: every group has a constant weight_decay, so nothing would be corrected; leave "
                "weight_decay out of param_groups, or use Scion"
            )
        SteadyOptimizer.__init__(self, groups, defaults, mesh)

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
                self._weight_decay(group, tuple(p.shape))

    def merge_saved_group(self, saved: Group, group: Group) -> Group:
        """Keep a corrected group corrected when a checkpoint of Scion, which knows only constant decay, is loaded."""
        plain = "steady_norm_sq" not in saved and group["weight_decay"] is None
        return {**saved, "weight_decay": None} if plain else saved

    def weight_decay_of(self, parameter: Tensor | str) -> float:
        """Return the corrected lambda_t of this parameter now, given itself or by its name in the groups.

        With `hold="balance"` or `"fixed"` a step uses what it measures instead.
        """
        group, p = find_parameter(self, parameter)
        return self._weight_decay(group, tuple(p.shape))


def _are_constant(params: Any) -> bool:
    """Return whether all are groups from `param_groups` with constant decay."""
    if not isinstance(params, list | tuple) or not params:
        return False
    return all(is_role_group(group) and "lmo" in group and group["weight_decay"] is not None for group in params)


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
