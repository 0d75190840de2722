"""AdamC: torch's AdamW with corrected decay."""

from collections.abc import Callable
from typing import Any, Never, TypeAlias

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm.decay import group_keys, group_label, own_correction, refuse_idle_target
from steadynorm.families import ADAM, refuse_scion_groups
from steadynorm.groups import settled
from steadynorm.optim.agreement import Agreement
from steadynorm.optim.base import Group, SteadyOptimizer, members, no_skips
from steadynorm.optim.checks import (
    NonFiniteGradientError,
    check_dense_gradients,
    check_lr,
    check_range,
    refuse_unknown,
    refuse_unused,
)
from steadynorm.optim.layout import is_dtensor, local
from steadynorm.optim.loading import load_exactly
from steadynorm.optim.parameters import check_parameter, check_unchanged, name_of
from steadynorm.optim.relative import base_from_plain_checkpoint

_Found: TypeAlias = tuple[int, Group, torch.device, list[Tensor], Tensor]  # alike parameters, and which are finite


class AdamC(torch.optim.AdamW):
    """torch's AdamW with corrected decay, fused and foreach included.

        lambda_t = lambda gamma_t / gamma_peak,   or gamma_t / (2 steady_norm_sq)

    Arguments as torch's AdamW (capturable=True is refused: replaying would keep the decay of the captured step), and:
        peak_lr: the schedule's maximum; default the lr given here (or `max_lr`, `initial_lr` in the group).
        steady_norm_sq: an absolute target, the mean square of an element.
        check_finite: raise on a non-finite gradient. Default: such a parameter is left as it was and its `skipped`
            counter goes up. On an accelerator fused=True skips the whole step instead, without waiting for the
            device; the other implementations wait.

    A group with `corrected=False` keeps constant decay (the output layer). With a constant lr this is AdamW, bit for
    bit. A checkpoint of `correct(AdamW)` loads here and the other way round.

    >>> p = torch.nn.Parameter(torch.ones(2)); optimizer = AdamC([p], lr=1e-3, weight_decay=0.1)
    >>> optimizer.param_groups[0]["lr"] = 5e-4
    >>> p.grad = torch.zeros(2); optimizer.step(); optimizer.param_groups[0]["weight_decay"]
    0.05
    """

    corrects_itself = True

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
        **unknown: Never,
    ):
        refuse_unknown(type(self).__name__, unknown)
        own = {"lr": lr, "weight_decay": weight_decay}
        params = settled(params, own, type(self).__name__)
        refuse_unused(type(self), params, own)
        self._extra_defaults = {"peak_lr": peak_lr, "steady_norm_sq": steady_norm_sq, "check_finite": check_finite}
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

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does, with the correction's keys and its state made; on an error nothing changes."""
        self.defaults.update(self.__dict__.pop("_extra_defaults", {}))  # torch has set its own by now
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            refuse_scion_groups(group)
            check_lr(float(group["lr"]))
            check_range("weight_decay", group["weight_decay"], closed=True)
            if group["steady_norm_sq"] is not None:
                check_range("steady_norm_sq", group["steady_norm_sq"])
            group.update(group_keys(group, ADAM))
            for k, p in enumerate(group["params"]):
                check_parameter(p, name_of(group, k))
                if group["fused"] and _has_gaps(p):
                    raise ValueError(
                        f"{name_of(group, k)} is a view with gaps, over which torch's fused kernel writes; make it "
                        "contiguous or leave fused= out"
                    )
        except ValueError as error:
            self.param_groups.pop()
            raise ValueError(f"AdamC, {group_label(len(self.param_groups), group)}: {error}") from None
        for p in group["params"]:
            self.state[p].update(self._fresh_state(group, p))
        own_correction(self, ADAM).note(self.param_groups)
        self.__dict__.pop("_agreement", None)

    def _fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        """torch's own state, made now instead of at the first step, and the count of skipped updates."""
        on_device = group["capturable"] or group["fused"]
        names = ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")
        return {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if on_device else "cpu"),
            **{name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in names},
            "skipped": no_skips(p),
        }

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()  # pyright: ignore[reportAttributeAccessIssue]
        withheld = self._withhold_non_finite()  # pyright: ignore[reportAttributeAccessIssue]
        try:
            _adamw_step()(self)
        finally:
            for p, grad in withheld:
                p.grad = grad
            if hasattr(self, "_own_found_inf"):
                del self.found_inf, self._own_found_inf
        return loss

    @torch._disable_dynamo
    def _prepare(self) -> None:
        own_correction(self, ADAM)(self)

    @torch._disable_dynamo
    def _withhold_non_finite(self) -> list[tuple[Tensor, Tensor]]:
        """Take non-finite gradients away, so that torch's step leaves those parameters alone, and those of other strides
        than a fused step can read; returns them."""
        check_dense_gradients(self)
        for index, group in enumerate(self.param_groups):
            for k, p in enumerate(group["params"]):
                if p.grad is not None:
                    check_unchanged(self, index, k, p, dtype=True)  # torch's step would fail half-way
        found = self._agreed(
            [
                (index, group, device, params, _finite([local(p.grad) for p in params if p.grad is not None], dtype))
                for index, group in enumerate(self.param_groups)
                for (device, dtype), params in _alike(group["params"]).items()
            ]
        )
        withheld = []
        for index, group, device, params, finite in found:
            if group["fused"] and device.type != "cpu" and not group["check_finite"]:
                self._skip_all_if(finite.all().logical_not())
                continue
            bad = [p for p, good in zip(params, finite.tolist(), strict=True) if not good]
            if bad and group["check_finite"]:
                k = next(k for k, p in enumerate(group["params"]) if p is bad[0])
                raise NonFiniteGradientError(type(self).__name__, index, group, k)
            withheld += [(p, p.grad) for p in bad]
        for _, _, _, params, finite in found:
            torch._foreach_add_([self.state[p]["skipped"] for p in params], list(finite.logical_not().long().unbind(0)))
        for p, _ in withheld:
            p.grad = None
        for group in self.param_groups:
            for p in group["params"] if group["fused"] else ():
                if p.grad is not None and not is_dtensor(p) and p.grad.stride() != p.stride():
                    withheld.append((p, p.grad))  # torch's fused kernel goes by memory, not by strides
                    p.grad = torch.empty_like(p).copy_(p.grad)
        return withheld

    def _agreed(self, found: list[_Found]) -> list[_Found]:
        """The same with shards of other ranks counted: a parameter is finite if all of it is."""
        agreement = self.__dict__.setdefault("_agreement", Agreement())  # neither saved nor copied
        if agreement.members is None:
            agreement.set_members(list(members(self, self.state)))
        if not agreement.members:
            return found
        flags = {id(p): flag for *_, params, finite in found for p, flag in zip(params, finite.unbind(0), strict=True)}
        flags |= agreement.finite(flags)
        return [(*each[:4], torch.stack([flags[id(p)] for p in each[3]])) for each in found]

    def _skip_all_if(self, bad: Tensor) -> None:
        """Tell torch's fused kernel, on the device, to leave everything as it is; GradScaler's word counts too."""
        found = bad.float()
        if getattr(self, "found_inf", None) is not None:
            found = torch.maximum(found, self.found_inf.to(found.device))
        if not hasattr(self, "found_inf"):
            self._own_found_inf = True
        self.found_inf = found

    skipped_steps = SteadyOptimizer.skipped_steps

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does; a plain AdamW checkpoint too: its weight_decay is the base.

        A checkpoint that does not fit raises ValueError before anything changes.
        """
        load_exactly(self, super().load_state_dict, state_dict, self._fresh_state)
        base_from_plain_checkpoint(self, state_dict)


def _has_gaps(p: Tensor) -> bool:
    """Its elements lie further apart in memory than they need to."""
    if is_dtensor(p) or p.is_contiguous():
        return False
    return sum((side - 1) * stride for side, stride in zip(p.shape, p.stride(), strict=True)) >= p.numel()


def _adamw_step() -> Callable[[torch.optim.AdamW], Any]:
    """torch's own step without the wrapper that runs step hooks: ours runs them already."""
    step: Any = torch.optim.AdamW.step
    while getattr(step, "hooked", False):
        step = step.__wrapped__
    return step


def _finite(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """Whether each gradient is finite, (gradients,). By the 2-norm, the fast one: where the sum of squares overflows,
    Adam's second moment would too. Squared, because the norm of a single element takes no square."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return torch.stack(torch._foreach_norm(grads, 2.0, dtype=wide)).square().isfinite()


def _alike(params: list[Tensor]) -> dict[tuple[torch.device, torch.dtype], list[Tensor]]:
    """Parameters that have a gradient, by device and dtype."""
    found: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for p in params:
        if p.grad is not None and p.numel():
            found.setdefault((p.device, p.dtype), []).append(p)
    return found
