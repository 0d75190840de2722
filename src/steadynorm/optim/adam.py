"""AdamC: torch's AdamW with corrected decay."""

from collections.abc import Callable
from typing import Any, NamedTuple, Never, TypeAlias

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors
from torch.optim.optimizer import ParamsT

from steadynorm.decay.correction import drop_capturable, own_correction
from steadynorm.decay.families import ADAM
from steadynorm.decay.peak import watch
from steadynorm.decay.rule import correction_keys, group_label, refuse_idle_target, refuse_scion_groups
from steadynorm.groups.builder import fill_unset
from steadynorm.optim.base import Group, SteadyOptimizer, members, no_skips
from steadynorm.optim.loading import load_exactly
from steadynorm.optim.parameters import check_parameter, check_unchanged, name_of
from steadynorm.optim.peak_relative import loading
from steadynorm.optim.settling import Settled, checked_state, settle_state
from steadynorm.optim.sharding.layout import is_dtensor, local
from steadynorm.optim.validation import (
    NonFiniteGradientError,
    check_betas,
    check_dense_gradients,
    check_lr,
    check_one,
    check_range,
    explain_group_errors,
    is_known,
    refuse_unknown,
    refuse_unused,
)
from steadynorm.theory.equilibrium import eta_of

_SMALL = 1 << 12  # elements of gradients that are looked at together: a call for each would cost more than the copy


class _Alike(NamedTuple):
    """Parameters of a group that have a gradient, of one device and dtype, DTensors or not."""

    group: int
    device: torch.device
    dtype: torch.dtype
    sharded: bool
    params: list[Tensor]

    def grads(self) -> list[Tensor]:
        grads = [p.grad for p in self.params if p.grad is not None]
        return [local(grad) for grad in grads] if self.sharded else grads


_Found: TypeAlias = tuple[_Alike, Tensor]  # and which are finite


class AdamC(torch.optim.AdamW):
    """torch's AdamW with corrected decay, fused and foreach included.

        lambda_t = lambda gamma_t / gamma_peak,   or gamma_t / (2 steady_norm_sq)

    Arguments as torch's AdamW, with weight_decay 0.1 by default, not 0.01 (capturable=True is refused: replaying would
    keep the decay of the captured step), and:
        peak_lr: the schedule's maximum; default the lr given here (or `max_lr`, `initial_lr` in the group).
        steady_norm_sq: an absolute target, the mean square of an element.
        check_finite: raise on a non-finite gradient. Default: such a parameter is left as it was and its `skipped`
            counter goes up; so is one whose gradient is finite but too large to be squared. On an accelerator
            fused=True skips the whole step instead, without waiting for the device; the other implementations wait.

    Weights are fp32, fp64 or bf16: Adam's second moment does not fit fp16.
    A group with `corrected=False` keeps constant decay (the output layer). With a constant lr this is AdamW, bit for
    bit. A checkpoint of `correct(AdamW)` loads here and the other way round.

    Examples:
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
        refuse_unknown(type(self), unknown)
        own = {"lr": lr, "weight_decay": weight_decay}
        params = fill_unset(params, own, type(self).__name__)
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
        with explain_group_errors(self, param_group):
            super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            refuse_scion_groups(group)
            check_one(group["lr"])
            check_lr(float(group["lr"]))
            _check_numbers(group)
            if group["steady_norm_sq"] is not None:
                check_range("steady_norm_sq", group["steady_norm_sq"])
            group.update(correction_keys(group, ADAM))
            for k, p in enumerate(group["params"]):
                check_parameter(p, name_of(group, k))
            states = [checked_state(group, k, self._fresh_state) for k in range(len(group["params"]))]
        except (ValueError, TypeError) as error:
            self.param_groups.pop()
            raise type(error)(f"AdamC, {group_label(len(self.param_groups), group)}: {error}") from None
        for p, state in zip(group["params"], states, strict=True):
            self.state[p].update(state)
        watch(group)
        own_correction(self, ADAM).record_written(self.param_groups)
        self.__dict__.pop("_settled", None)

    def _fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        """torch's own state, made now instead of at the first step, and the count of skipped updates."""
        if p.dtype == torch.float16:
            raise ValueError(
                "is of torch.float16, in which torch's AdamW would keep its moments: squares of usual gradients are 0 "
                "there, and so is eps=1e-8; hold the weights in fp32 (with autocast) or bf16"
            )
        if group["fused"] and _has_gaps(p):
            raise ValueError(
                "is a view with gaps, over which torch's fused kernel writes; make it contiguous or leave fused= out"
            )
        return {
            "step": torch.zeros((), dtype=torch.float32, device=p.device if group["fused"] else "cpu"),
            **{name: torch.zeros_like(p, memory_format=torch.preserve_format) for name in _moments(group)},
            "skipped": no_skips(p),
        }

    def _settle_state(self) -> None:
        settle_state(self, lambda group: ("step", *_moments(group), "skipped"), self._fresh_state)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._prepare()  # pyright: ignore[reportAttributeAccessIssue]
        withheld = self._withhold_non_finite()  # pyright: ignore[reportAttributeAccessIssue]
        stand_in = own_correction(self, ADAM).stand_in
        try:
            _adamw_step()(stand_in.of(self))  # pyright: ignore[reportArgumentType]
        finally:
            stand_in.take_back(self)
            for p, grad in withheld:
                p.grad = grad
            if hasattr(self, "_own_found_inf"):
                del self.found_inf, self._own_found_inf
        return loss

    @torch._disable_dynamo
    def _prepare(self) -> None:
        """Write lambda_t; what torch's step would fail on half-way, or turn into NaN, is refused here."""
        own_correction(self, ADAM)(self)
        for index, group in enumerate(self.param_groups):
            try:
                _check_numbers(group)
                if is_known(group["lr"]):  # groups with corrected=False: the correction has seen the others
                    eta_of(float(group["lr"]), group["weight_decay"])
            except ValueError as error:
                raise ValueError(f"AdamC, {group_label(index, group)}: {error}") from None

    @torch._disable_dynamo
    def _withhold_non_finite(self) -> list[tuple[Tensor, Tensor]]:
        """Take non-finite gradients away, so that torch's step leaves those parameters alone, and those of other strides
        than a fused step can read; returns them."""
        alike = self._known().get(self, ("amsgrad",), self._alike)
        if not all("skipped" in self.state[p] for each in alike for p in each.params):  # cleared
            self._settle_state()
        withheld, counted, together = [], [], []
        for each, finite in self._agreed(alike):
            group = self.param_groups[each.group]
            if group["fused"] and each.device.type != "cpu" and not group["check_finite"]:
                together.append((each.params, finite))
                continue
            bad = [p for p, good in zip(each.params, finite.tolist(), strict=True) if not good]
            if bad and group["check_finite"]:
                k = next(k for k, p in enumerate(group["params"]) if p is bad[0])
                raise NonFiniteGradientError(type(self).__name__, each.group, group, k)
            counted.append((bad, 1))
            withheld += [(p, p.grad) for p in bad]
        counted += self._skipped_together(together)
        for params, counts in counted:
            if params:
                torch._foreach_add_([self.state[p]["skipped"] for p in params], counts)
        for p, _ in withheld:
            p.grad = None
        for each in alike:
            for p in each.params if self.param_groups[each.group]["fused"] and not each.sharded else ():
                if (grad := p.grad) is not None and grad.stride() != p.stride():
                    withheld.append((p, grad))  # torch's fused kernel goes by memory, not by strides
                    p.grad = torch.empty_like(p).copy_(grad)
        return withheld

    def _known(self) -> Settled[list[_Alike]]:
        return self.__dict__.setdefault("_settled", Settled())

    def _alike(self) -> list[_Alike]:
        """Parameters that have a gradient, by group, device and dtype: checked, and with their state."""
        check_dense_gradients(self)
        self._settle_state()
        found: dict[tuple[int, torch.device, torch.dtype, bool], list[Tensor]] = {}
        for index, group in enumerate(self.param_groups):
            for k, p in enumerate(group["params"]):
                if p.grad is not None:
                    check_unchanged(self, index, k, p, _moments(group), dtype=True)  # torch's step would fail half-way
                    if p.numel():
                        found.setdefault((index, p.device, p.dtype, is_dtensor(p)), []).append(p)
        return [_Alike(*key, params) for key, params in found.items()]

    def _agreed(self, alike: list[_Alike]) -> list[_Found]:
        """Which parameters are finite, all shards of them; those left out are known to be."""
        agreement = self._known().agreement
        if agreement.members is None:
            agreement.set_members(list(members(self, ())))
        found = []
        for each in alike:
            grads = each.grads()
            if agreement.members or each.device.type != "cpu" or not _all_finite(grads, each.dtype):
                found.append((each, _finite(grads, each.dtype)))
        if not agreement.members:
            return found
        flags = {id(p): flag for each, finite in found for p, flag in zip(each.params, finite.split(1), strict=True)}
        flags |= agreement.least(flags)
        return [(each, torch.cat([flags[id(p)] for p in each.params])) for each, _ in found]

    def _skipped_together(self, found: list[tuple[list[Tensor], Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Have torch's fused kernels leave all of these as they are if one is not finite; what to count for each."""
        if not found:
            return []
        first = found[0][1].device
        bad = torch.stack([finite.all().to(first) for _, finite in found]).all().logical_not()
        self._skip_all_if(bad)
        return [(params, [bad.long().to(finite.device)] * len(params)) for params, finite in found]

    def _skip_all_if(self, bad: Tensor) -> None:
        """Tell torch's fused kernel, on the device, to leave everything as it is; GradScaler's word counts too."""
        found = bad.float()
        if getattr(self, "found_inf", None) is not None:
            found = torch.maximum(found, self.found_inf.to(found.device))
        if not hasattr(self, "found_inf"):
            self._own_found_inf = True
        self.found_inf = found

    skipped_steps = SteadyOptimizer.skipped_steps

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with state of every parameter that the groups have now."""
        self._settle_state()
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does; a plain AdamW checkpoint too: its weight_decay is the base.

        A checkpoint that does not fit raises ValueError before anything changes.
        """
        with loading(self, ADAM, state_dict):
            load_exactly(self, super().load_state_dict, state_dict, self._fresh_state, ("betas",))
        self.__dict__.pop("_settled", None)
        drop_capturable(self.param_groups)


def _check_numbers(group: Group) -> None:
    """ValueError for betas, eps or decay out of range: torch checks them in its constructor alone."""
    check_betas(group["betas"])
    check_range("eps", group["eps"], closed=True)
    check_range("weight_decay", group["weight_decay"], closed=True)


def _moments(group: Group) -> tuple[str, ...]:
    return ("exp_avg", "exp_avg_sq", "max_exp_avg_sq") if group["amsgrad"] else ("exp_avg", "exp_avg_sq")


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
    return torch.stack(torch._foreach_norm(grads, 2.0, dtype=_wide(dtype))).square().isfinite()


def _all_finite(grads: list[Tensor], dtype: torch.dtype) -> bool:
    """Whether all of them are, by the sum of all squares: False also where that alone overflows. Waits for the device."""
    small = [grad for grad in grads if grad.numel() <= _SMALL]
    large = [grad for grad in grads if grad.numel() > _SMALL]
    together = [_flatten_dense_tensors(small)] if small else []
    norms = torch._foreach_norm(together + large, 2.0, dtype=_wide(dtype))
    return bool(torch.stack(norms).square().sum().isfinite())


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32
