"""MuonC: Muon for hidden matrices and Adam for everything else in one optimizer, with corrected decay."""

import dataclasses
import functools
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm.decay.families import MUON_AND_ADAM
from steadynorm.decay.hold import BALANCE_STEPS, HOLD_KEYS
from steadynorm.decay.rule import Group
from steadynorm.lmo import LMOS, Lmo
from steadynorm.optim.adam_rule import ADAM_ARITHMETIC, MOMENTS, adam_scalars
from steadynorm.optim.arithmetic import CHUNK_MIB, Arithmetic
from steadynorm.optim.buckets import Bucket
from steadynorm.optim.idle import WHOLE, Slices
from steadynorm.optim.peak_relative import PeakRelativeOptimizer
from steadynorm.optim.scion_rule import SCION_ARITHMETIC, ScionSettings, settings_of, with_polar_steps
from steadynorm.optim.state import check_momentum_dtype, zero_momentum, zeros_like
from steadynorm.optim.validation import check_group_numbers, check_lr_type, check_range, group_defaults
from steadynorm.theory.equilibrium import eta_of
from steadynorm.theory.updates import MUON_ADJUST, muon_adam_lr, muon_factor, muon_row
from steadynorm.views import Blocks


@functools.cache
def muon_lmo(name: str, adjust: str) -> Lmo:
    """Return an lmo whose update is Muon's: polar factors times `muon_factor`."""
    return dataclasses.replace(LMOS[name], polar_scale=lambda d_out, d_in: muon_factor(adjust, (d_out, d_in)))


class MuonC(PeakRelativeOptimizer):
    """Muon for hidden matrices, Adam for everything else, both with corrected decay: one optimizer for all parameters.

        m_t = momentum m_{t-1} + (1 - momentum) g_t      u_t = factor polar(m_t), Nesterov: of momentum m_t + (1 - momentum) g_t
        theta_t = (1 - gamma_t lambda_t) theta_{t-1} - gamma_t u_t
        lambda_t = lambda (gamma_t / gamma_peak) G(momentum_t)/G(momentum_0),   or the decay that reaches `steady_norm_sq`

    Words and steps are those of torch.optim.Muon, with polar factors from our engine: `polar="newton-schulz"` has torch's
    own. In groups with `use_muon=False` the step is AdamW's, and lambda_t = lambda gamma_t / gamma_peak. A group with
    `corrected=False` keeps constant decay (the output layer).

    Args:
        params: Groups from `param_groups(model, kind="muon")`, or your own, each with `use_muon`.
        lr: gamma of groups with `use_muon=True`.
        momentum: The weight of the old momentum, as in torch's Muon.
        nesterov: Whether the polar factor is that of Nesterov's momentum.
        weight_decay: lambda at the peak lr.
        adjust_lr_fn: "original", factor = sqrt(max(1, d_out/d_in)), or "match_rms_adamw", 0.2 sqrt(max(d_out, d_in)).
        adam_lr: gamma of groups with `use_muon=False`. Default: lr with "match_rms_adamw", else lr / 20.
        betas, eps: As in torch's AdamW, for groups with `use_muon=False`.
        peak_lr: The schedule's maximum for every group. Default: each group's lr (or `max_lr`, `initial_lr` in it).
        steady_norm_sq: An absolute target for groups with `use_muon=True`, E|theta|^2 / |u|^2. An Adam group may have one of
            its own: the mean square of an element.
        use_muon: The kind of groups that do not say it: True for matrices, False for everything else.
        lmo: How Muon sees a parameter as matrices: "spectral" (d_out x d_in; a stack of them from three dimensions on),
            "spectral-transposed" (stored d_in x d_out) or "conv". By default "spectral", and "conv" from three dimensions on.
        blocks: Blocks that are matrices of their own, as in Scion (fused QKV: 3).
        polar, polar_steps, polar_dtype, chunk_mib, capturable, weight_residual: As in Scion.
        momentum_dtype: "bfloat16" halves Muon's state. Default: fp32 (fp64 for fp64 parameters).
        own_time: Whether matrices of stacks (experts) stand still in steps without a gradient, as in Scion.
        hold, balance_steps, cautious: As in Scion. Groups with constant decay have no target to balance at.
        check_finite: Whether to raise on a non-finite gradient, as in Scion.
        maximize: Whether to ascend.
        mesh: The DeviceMesh or ProcessGroup of replicated parameters, as in Scion; Adam's moments are shared out as well.

    Examples:
        >>> import torch
        >>> model = torch.nn.Linear(4, 4)
        >>> groups = [{"params": [model.weight], "use_muon": True}, {"params": [model.bias], "use_muon": False}]
        >>> optimizer = MuonC(groups, lr=0.02)
        >>> [group["lr"] for group in optimizer.param_groups]
        [0.02, 0.001]
        >>> model(torch.ones(1, 4)).sum().backward(); optimizer.step()
        >>> [sorted(optimizer.state[p].keys() & {"momentum_buffer", "exp_avg"}) for p in model.parameters()]
        [['momentum_buffer'], ['exp_avg']]
    """

    signature_keys = ("use_muon", "momentum", "betas")
    setting_keys = (
        "use_muon", "lmo", "blocks", "nesterov", "adjust_lr_fn", "polar", "polar_steps", "polar_dtype",
        "own_time", "chunk_mib", *HOLD_KEYS,
    )  # fmt: skip
    group_kind = "muon"
    family = MUON_AND_ADAM

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 0.02,
        *,
        momentum: float = 0.95,
        nesterov: bool = True,
        weight_decay: float = 0.1,
        adjust_lr_fn: str | None = "original",
        adam_lr: float | Tensor | None = None,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        peak_lr: float | None = None,
        steady_norm_sq: float | None = None,
        use_muon: bool | None = None,
        lmo: str | None = None,
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
    ):
        super().__init__(params, group_defaults(locals()), mesh)

    # --- the two kinds of groups

    def arithmetic_of(self, group: Group) -> Arithmetic:
        # Muon's momentum is Scion's with alpha = 1 - momentum; only the scale of the update differs.
        return SCION_ARITHMETIC if group["use_muon"] else ADAM_ARITHMETIC

    def fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        if group["use_muon"]:
            return {"momentum_buffer": zero_momentum(p, group["momentum_dtype"], self.mesh)}
        return {key: zeros_like(p, self.mesh) for key in MOMENTS}

    def settings(self, group: Group, p: Tensor) -> tuple[ScionSettings | None, bool]:
        if not group["use_muon"]:
            return None, True  # element-wise
        lmo = muon_lmo(muon_row(group["lmo"], p.shape).name, group["adjust_lr_fn"] or "original")
        return settings_of(group, p.shape, lmo), lmo.slice_separable(p.shape)

    def slices(self, group: Group, p: Tensor) -> Slices:
        settings, _ = self.settings(group, p)
        return WHOLE if settings is None else settings.slices(p.shape, own_time=group["own_time"])

    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        if not group["use_muon"]:
            return adam_scalars(group)
        lr, momentum = float(group["lr"]), _check_momentum(group["momentum"])
        return {"gamma": lr, "eta": eta_of(lr, group["weight_decay"]), "alpha": 1 - momentum, "momentum_keep": momentum}

    # --- groups

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does. An Adam group gets `adam_lr` as its lr and no target, unless it sets its own."""
        if isinstance(param_group, dict) and not param_group.get("use_muon", self.defaults["use_muon"]):
            param_group = {"lr": self._adam_lr(), "steady_norm_sq": None, **param_group}
        super().add_param_group(with_polar_steps(param_group, self.defaults))
        self.param_groups[-1].pop("adam_lr")  # `check_group` has seen that no group brings its own

    def _adam_lr(self) -> float | Tensor:
        lr, adam_lr = self.defaults["lr"], self.defaults["adam_lr"]
        check_lr_type(lr)
        return muon_adam_lr(float(lr), self.defaults["adjust_lr_fn"]) if adam_lr is None else adam_lr

    def check_group(self, group: Group) -> None:
        if group["use_muon"] is None:
            raise ValueError(
                "no use_muon; use steadynorm.param_groups(model, kind='muon'), which decides by role, or put it in the "
                'group: {"params": [...], "use_muon": True} for hidden matrices, False for everything else (Adam)'
            )
        if group.get("adam_lr") not in (None, self.defaults["adam_lr"]):
            raise ValueError(f"adam_lr={group['adam_lr']} is an argument of MuonC; set the group's lr instead")
        _check_momentum(group["momentum"])
        check_group_numbers(group, "betas", "eps")
        if (adjust := group["adjust_lr_fn"]) not in (None, *MUON_ADJUST):
            raise ValueError(f"adjust_lr_fn={adjust!r} is unknown; choose one of {', '.join(MUON_ADJUST)}")
        check_range("chunk_mib", group["chunk_mib"])
        check_momentum_dtype(group["momentum_dtype"])
        super().check_group(group)


def _check_momentum(momentum: float | None) -> float:
    """Return the momentum; raise ValueError unless it is in [0, 1)."""
    if momentum is None or not 0 <= momentum < 1:
        raise ValueError(f"momentum={momentum} is outside [0, 1)")
    return float(momentum)
