"""AdamC: torch's AdamW with corrected decay."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm.decay.correction import check_held, own_correction, refuse_residual
from steadynorm.decay.families import ADAM
from steadynorm.decay.hold import BALANCE_STEPS, fresh_hold_state, hold_state_keys, refuse_idle_balance
from steadynorm.decay.peak import warn_of_late_guess, watch
from steadynorm.decay.rule import Group, correction_keys, group_label, refuse_idle_target, refuse_scion_groups
from steadynorm.dtensor import is_dtensor
from steadynorm.optim.finite_guard import NonFiniteSkipper
from steadynorm.optim.peak_relative import loading
from steadynorm.optim.state import no_skips
from steadynorm.optim.validation import (
    check_group_numbers,
    check_lr_type,
    check_range,
    is_on_host,
    refuse_momentum,
    take_params,
)
from steadynorm.theory.equilibrium import check_lr, eta_of

_NUMBERS = ("betas", "eps", "weight_decay")  # torch checks them in its constructor only


class AdamC(NonFiniteSkipper, torch.optim.AdamW):
    """torch's AdamW with corrected decay, fused and foreach included.

        lambda_t = lambda gamma_t / gamma_peak,   or gamma_t / (2 steady_norm_sq)

    With a constant lr this is AdamW, bit for bit. A group with `corrected=False` keeps constant decay (the output layer).
    Weights are fp32, fp64 or bf16, because Adam's second moment does not fit fp16. A checkpoint of `correct(AdamW)`
    loads here, and the other way round.

    Args:
        params: The parameters or groups, for instance from `param_groups(model, kind="adam")`.
        lr, betas, eps: As in torch's AdamW.
        weight_decay: lambda at the peak lr; 0.1 by default, not torch's 0.01.
        peak_lr: The schedule's maximum. Default: the lr given here (or `max_lr`, `initial_lr` in the group).
        steady_norm_sq: An absolute target, the mean square of an element.
        amsgrad, maximize, foreach, differentiable, fused: As in torch's AdamW.
        capturable: Whether a step can be captured in a CUDA graph, which takes `fused=True`; see `fill_scalars`.
        check_finite: Whether to raise on a non-finite gradient. By default such a parameter is left as it was and its
            `skipped` counter goes up; the same holds for a gradient that is finite but too large to be squared. On an
            accelerator fused=True skips the whole step instead, without a sync; the other implementations sync.
        momentum: Refused, as in Scion.
        hold, balance_steps, cautious: As in `correct`: the weights are scaled after torch's step, which has no decay then.
        weight_residual: Refused if True, because torch's step writes the weights. In bf16 they lose what is below half a step.

    Examples:
        >>> p = torch.nn.Parameter(torch.ones(2)); optimizer = AdamC([p], lr=1e-3, weight_decay=0.1)
        >>> optimizer.param_groups[0]["lr"] = 5e-4
        >>> p.grad = torch.zeros(2); optimizer.step(); optimizer.param_groups[0]["weight_decay"]
        0.05
    """

    corrects_itself = True
    signature_keys = ("betas",)

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.1,
        *,
        peak_lr: float | None = None,
        steady_norm_sq: float | None = None,
        amsgrad: bool = False,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
        check_finite: bool = False,
        momentum: None = None,
        hold: str = "decay",
        balance_steps: float = BALANCE_STEPS,
        cautious: bool = False,
        weight_residual: bool | None = None,
    ):
        refuse_momentum(type(self), momentum)
        refuse_residual(weight_residual)
        own = {"lr": lr, "weight_decay": weight_decay}
        params = take_params(params, own, type(self), self.group_kind)
        self._extra_defaults = {"peak_lr": peak_lr, "steady_norm_sq": steady_norm_sq, "check_finite": check_finite}
        self._extra_defaults |= {"hold": hold, "balance_steps": balance_steps, "cautious": cautious}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            differentiable=differentiable,
            fused=fused,
        )
        refuse_idle_target(type(self).__name__, self.param_groups)
        refuse_idle_balance(type(self).__name__, self.param_groups)

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does, with the correction's keys and its state made; on an error nothing changes."""
        self.defaults.update(self.__dict__.pop("_extra_defaults", {}))  # torch has set its own by now
        super().add_param_group(param_group)
        watch(self.param_groups[-1])
        warn_of_late_guess(self)
        own_correction(self, ADAM).record_written(self.param_groups)

    def _check_settings(self, group: Group) -> None:
        refuse_scion_groups(group)
        check_lr_type(group["lr"])
        check_lr(float(group["lr"]))
        check_group_numbers(group, *_NUMBERS)
        if group["steady_norm_sq"] is not None:
            check_range("steady_norm_sq", group["steady_norm_sq"])
        group.update(correction_keys(group, ADAM))
        check_held(group, ADAM)
        if group["capturable"] and not group["fused"]:
            raise ValueError(
                "capturable=True: torch's other steps cannot skip a non-finite gradient on the device; pass fused=True"
            )

    def merge_saved_group(self, saved: Group, group: Group) -> Group:
        """Keep the fused step that a capturable one takes, whatever the checkpoint was trained with."""
        return {**saved, "fused": True} if group["capturable"] else saved

    def _all_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        """Return torch's own state, made now instead of at the first step, and the count of skipped updates."""
        if p.dtype == torch.float16:
            raise ValueError(
                "has dtype torch.float16, in which torch's AdamW would keep its moments: squares of usual gradients are 0 "
                "there, and so is eps=1e-8; hold the weights in fp32 (with autocast) or bf16"
            )
        if group["fused"] and _has_gaps(p):
            raise ValueError(
                "is a view with gaps, over which torch's fused kernel writes; make it contiguous or leave fused= out"
            )
        return {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu"),
            **{name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in _moments(group)},
            **fresh_hold_state(group, p),
            "skipped": no_skips(p),
        }

    def moment_keys(self, group: Group) -> tuple[str, ...]:
        return _moments(group)

    def _own_keys(self, group: Group, p: Tensor) -> tuple[str, ...]:
        return "step", *_moments(group), "skipped", *hold_state_keys(group)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()  # pyright: ignore[reportAttributeAccessIssue]
        withheld = self.withhold_non_finite()  # pyright: ignore[reportAttributeAccessIssue]
        correction = own_correction(self, ADAM)
        correction.live.apply(self)
        try:
            _adamw_step()(correction.stand_in.prepare(self))  # pyright: ignore[reportArgumentType]
            if correction.rescaler.pending:
                correction.rescaler.apply(self)
        finally:
            correction.stand_in.take_back()
            self.give_back(withheld)
        return loss

    @torch._disable_dynamo
    def _prepare(self) -> None:
        """Write lambda_t; refuse what torch's step would fail on half-way, or turn into NaN; measure what is held."""
        own_correction(self, ADAM)(self)
        for index, group in enumerate(self.param_groups):
            try:
                check_group_numbers(group, *_NUMBERS)
                if is_on_host(group["lr"]):  # groups with corrected=False: the correction has seen the others
                    eta_of(float(group["lr"]), group["weight_decay"])
            except ValueError as error:
                raise ValueError(f"AdamC, {group_label(index, group)}: {error}") from None
        own_correction(self, ADAM).rescaler.measure(self, ADAM)

    def fill_scalars(self) -> None:
        """Write this step's decay to the device, where a captured step reads it; see `steadynorm.fill_scalars`."""
        own_correction(self, ADAM).fill(self)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does. The weight_decay of a plain AdamW checkpoint becomes the base.

        A checkpoint that does not fit raises ValueError before anything changes.
        """
        with loading(self, ADAM, state_dict):
            super().load_state_dict(state_dict)


def _moments(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


def _has_gaps(p: Tensor) -> bool:
    """Return whether p's elements lie further apart in memory than they need to."""
    if is_dtensor(p) or p.is_contiguous():
        return False
    return sum((side - 1) * stride for side, stride in zip(p.shape, p.stride(), strict=True)) >= p.numel()


def _adamw_step() -> Callable[[torch.optim.AdamW], Any]:
    """Return torch's own step without the wrapper that runs step hooks, because ours runs them already."""
    step: Any = torch.optim.AdamW.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step
