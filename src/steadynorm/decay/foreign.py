"""`correct(optimizer)`: corrected decay for somebody else's optimizer, and the way back."""

import copyreg
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer

from steadynorm.decay.correction import Correction, check_held, exact_kernel
from steadynorm.decay.families import FAMILIES, Family
from steadynorm.decay.hold import BALANCE_STEPS, keys_of_correct, refuse_hold, refuse_idle_balance
from steadynorm.decay.peak import LARGEST, check_guess, spread_peaks, watch
from steadynorm.decay.recognition import family_of, unwrap
from steadynorm.decay.rule import (
    KEYS,
    OVERLAPS,
    UNCORRECTED,
    Group,
    correction_keys,
    group_label,
    refuse_idle_target,
)
from steadynorm.decay.skip import drop_hold, find_uncorrected, keep_constant, output_weights


def correct(
    optimizer: Optimizer,
    model: nn.Module | None = None,
    *,
    skip: Any = None,
    peak_lr: float | Sequence[float] | None = None,
    steady_norm_sq: float | None = None,
    overlap: str = "linear",
    reference_momentum: float | Sequence[float] | None = None,
    decoupled: bool | None = None,
    hold: str = "decay",
    balance_steps: float = BALANCE_STEPS,
    cautious: bool = False,
) -> Optimizer:
    """Correct the decoupled weight decay of an optimizer, and return the optimizer.

        lambda_t = lambda (gamma_t / gamma_peak) F_t     at every step, for any schedule

    The correction is a step pre-hook, and everything that it needs is saved with the groups. A copy (copy, deepcopy or
    pickle) is corrected as well. You can call this at any point of a run; `uncorrect` undoes it. On an error the
    optimizer stays as it was.

    Args:
        optimizer: AdamW; Adam, NAdam or RAdam with decoupled decay; torch's Muon; Lion; and others (see
            `decay.recognition`). It may be inside Accelerate's or Lightning's wrapper.
        model: The model that it trains. Its output layer, found as `param_groups` finds it, keeps constant decay unless
            `skip` says otherwise, and its names can be used in `skip`.
        skip: What keeps constant decay: parameters, modules, names of either, globs of names, group indices, or a list
            of these. The output layer under cross-entropy belongs here. Groups, their order and state do not change.
        peak_lr: The schedule's maximum, one number or one per group. Default: the group's `max_lr` (OneCycle), else
            `initial_lr` (torch schedulers), else `lr`.
        steady_norm_sq: An absolute target in place of peak and base decay: E|theta|^2/|u|^2 for Muon and Lion, the mean
            square of an element for the Adam family.
        overlap: For a Muon target, "linear" (the paper's formula) or "exact" (groups of one side ratio).
        reference_momentum: The momentum at which the decay is what you set, in the group's own words: Muon's
            `momentum`, Lion's `betas`. Default: the current momentum, which is wrong if it has yet to warm up.
        decoupled: True for an unknown class whose decay is decoupled.
        hold: How norms are held: "decay" (lambda_t, open loop), "balance" (decay that measures what updates do to the
            norm and keeps it at the target) or "fixed" (scaled after every step to `steady_norm_sq`, or else to the norm
            of the first step). The optimizer then steps without decay, and a post-hook scales the weights: two more
            reads and one more write of the weights per step, and at most two floats of state per parameter.
        balance_steps: Over how many steps "balance" brings a norm back.
        cautious: Whether to decay only where weight and update agree in sign. For Adam, AdamW and RAdam only; it needs
            temporary memory for one parameter at a time.

    A group that has `hold`, `balance_steps` or `cautious` itself keeps its own, and what is skipped is not held.

    Examples:
        >>> import torch; p = nn.Parameter(torch.ones(2))
        >>> optimizer = correct(torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1))
        >>> optimizer.param_groups[0]["lr"] = 5e-4  # what a scheduler does
        >>> p.grad = torch.zeros(2); optimizer.step(); optimizer.param_groups[0]["weight_decay"]
        0.05
    """
    wrapped, optimizer = optimizer, unwrap(optimizer)
    if getattr(optimizer, "corrects_itself", False):
        raise ValueError(f"correct: {type(optimizer).__name__} corrects its own decay; leave correct() out")
    if correction_of(optimizer) is not None:
        raise ValueError(f"correct: this {type(optimizer).__name__} is corrected already; call correct() once")
    if not isinstance(model, nn.Module | None):
        raise TypeError(f"correct takes the model second, not {type(model).__name__}; pass what to leave out as skip=")
    family, groups = family_of(optimizer, decoupled=decoupled), optimizer.param_groups
    target = _target_keys(family, steady_norm_sq, overlap)
    if target and reference_momentum is not None:
        raise ValueError("correct: reference_momentum has no meaning beside steady_norm_sq; leave it out")
    if skip is None and model is not None:
        trained = {id(p) for group in groups for p in group["params"]}
        skip = [p for p in output_weights(model) if id(p) in trained]
    uncorrected = find_uncorrected(groups, () if skip is None else skip, model)
    held = {"hold": hold, "balance_steps": balance_steps} if hold != "decay" else {}
    held |= {"cautious": cautious} if cautious else {}
    plans = []
    for index, (group, peak) in enumerate(zip(groups, spread_peaks("correct", peak_lr, len(groups)), strict=True)):
        try:
            keys = {**correction_keys(group, family, peak_lr=peak), **target}
            if uncorrected.get(index) != []:  # or the whole group is skipped
                keys |= {key: value for key, value in held.items() if key not in group}
            check_guess(optimizer, group, keys)
            if reference_momentum is not None and (family.momentum_key is None or family.momentum_key in group):
                keys["initial_momentum"] = family.reference(group, reference_momentum)
            exact_kernel({**group, **keys}, family)
            if target:
                family.gain(family.momentum(group), group)  # raises if the group does not say enough for a target
            check_held({**group, **keys, UNCORRECTED: uncorrected.get(index)}, family)
            _refuse_what_ours_do(optimizer, group, held)
        except ValueError as error:
            raise ValueError(f"correct: {group_label(index, group)}: {error}") from None
        plans.append((group, keys))
    refuse_idle_target("correct", (keys for _, keys in plans))
    refuse_idle_balance("correct", [{**group, **keys} for group, keys in plans])

    optimizer.defaults.update(held)  # torch gives them to groups that are added later
    for group, keys in plans:
        group.update(keys)
        if not optimizer.state:  # a run that is joined may have seen its largest lr
            watch(group)
    for index, positions in uncorrected.items():
        if positions:
            groups[index][UNCORRECTED] = sorted({*groups[index].get(UNCORRECTED, ()), *positions})
        else:
            keep_constant(optimizer, groups[index])
    choices = {"peak_lr": peak_lr, "steady_norm_sq": steady_norm_sq, "initial_momentum": reference_momentum}
    choices |= {UNCORRECTED: skip} | {key: held.get(key) for key in ("hold", "cautious")}
    correction = Correction(family, [key for key, choice in choices.items() if choice is not None])
    correction.record_written(optimizer.param_groups)
    _attach(optimizer, correction)
    return wrapped


def uncorrect(optimizer: Optimizer) -> Optimizer:
    """Take `correct` back: every group has its base decay again, as a constant; returns the optimizer.

    Also for an optimizer that was never corrected here but has loaded a corrected checkpoint, whose `weight_decay` is
    the momentary one, near zero late in a run. A group with `corrected=False` keeps that key.

    Examples:
        >>> import torch; p = nn.Parameter(torch.ones(2))
        >>> optimizer = correct(torch.optim.AdamW([p], lr=1e-3, weight_decay=0.1))
        >>> optimizer.param_groups[0]["lr"] = 5e-4
        >>> p.grad = torch.zeros(2); optimizer.step(); uncorrect(optimizer).param_groups[0]["weight_decay"]
        0.1
    """
    wrapped, optimizer = optimizer, unwrap(optimizer, "uncorrect")
    if getattr(optimizer, "corrects_itself", False):
        raise ValueError(
            f"uncorrect: {type(optimizer).__name__} corrects its own decay; set corrected=False in its groups"
        )
    correction = correction_of(optimizer)
    if correction is None and not any("base_weight_decay" in group for group in optimizer.param_groups):
        raise ValueError(f"uncorrect: this {type(optimizer).__name__} is not corrected")
    for handle in correction.handles if correction is not None else ():
        handle.remove()
    for key in keys_of_correct(optimizer):
        optimizer.defaults.pop(key, None)
    for group in optimizer.param_groups:
        if "base_weight_decay" in group:
            kept = {"corrected": False} if group.get("corrected") is False else {}
            if not kept:
                group["weight_decay"] = group["base_weight_decay"]
            for key in (*KEYS, LARGEST):
                group.pop(key, None)
            drop_hold(optimizer, group)
            group.update(kept)
    return wrapped


def fill_scalars(optimizer: Optimizer) -> None:
    """Write this step's lr, decay, momentum and target to the device, where a captured step reads them.

    Call it before every replay of a CUDA graph in which a step with `capturable=True` was captured, after the scheduler.

    Raises:
        ValueError: If the optimizer is neither ours nor corrected.
    """
    optimizer = unwrap(optimizer, "fill_scalars")
    if hasattr(optimizer, "fill_scalars"):
        optimizer.fill_scalars()  # pyright: ignore[reportAttributeAccessIssue]
    elif (correction := correction_of(optimizer)) is not None:
        correction.fill(optimizer)
    else:
        raise ValueError(f"fill_scalars: {type(optimizer).__name__} is not corrected; call correct(optimizer) first")


def correction_of(optimizer: Optimizer) -> Correction | None:
    """Return the correction that `correct` attached to an optimizer, if any."""
    hooks = optimizer._optimizer_step_pre_hooks.values()
    return next((hook for hook in hooks if isinstance(hook, Correction)), None)


def _attach(optimizer: Optimizer, correction: Correction) -> None:
    after_step = optimizer.register_step_post_hook(correction.after_step)
    hooks: Any = optimizer._optimizer_step_post_hooks  # an OrderedDict
    hooks.move_to_end(after_step.id, last=False)  # the others see weights as they stay
    correction.handles = [
        optimizer.register_step_pre_hook(correction),
        after_step,
        optimizer.register_state_dict_pre_hook(correction.before_save),
        optimizer.register_load_state_dict_pre_hook(correction.before_load),
        optimizer.register_load_state_dict_post_hook(correction.after_load),
    ]
    copyreg.dispatch_table.setdefault(type(optimizer), _reduce)  # what copy and pickle ask first


def _reduce(optimizer: Optimizer) -> tuple[Any, ...]:
    """Reduce an optimizer for copy or pickle, as usual but with its correction, which torch drops."""
    make, arguments, *rest = optimizer.__reduce_ex__(4)
    correction = correction_of(optimizer)
    if correction is None:
        return make, arguments, *rest
    return _rebuild, (correction.family.name, make, *arguments), *rest


def _rebuild(family: str, make: Callable[..., Optimizer], *arguments: Any) -> Optimizer:
    """Return the copy, still empty, with a correction of its own."""
    optimizer = make(*arguments)
    for name in ("step_pre", "step_post", "state_dict_pre", "load_state_dict_pre", "load_state_dict_post"):
        vars(optimizer).setdefault(f"_optimizer_{name}_hooks", OrderedDict())
    _attach(optimizer, Correction(FAMILIES[family]))
    return optimizer


def _target_keys(family: Family, steady_norm_sq: float | None, overlap: str) -> Group:
    if overlap not in OVERLAPS:
        raise ValueError(f"correct: overlap={overlap!r} is unknown; choose 'linear' or 'exact'")
    if overlap == "exact" and (steady_norm_sq is None or family.exact_lmo is None):
        raise ValueError("correct: overlap='exact' goes with a steady_norm_sq= for Muon; leave it out")
    if steady_norm_sq is None:
        return {}
    if not (steady_norm_sq > 0 and math.isfinite(steady_norm_sq)):
        raise ValueError(f"correct: steady_norm_sq={steady_norm_sq} must be positive and finite")
    family.require_target()
    return {"steady_norm_sq": float(steady_norm_sq), "overlap": overlap}


def _refuse_what_ours_do(optimizer: Optimizer, group: Group, held: Group) -> None:
    """Raise ValueError for what an optimizer of ours (Scion, RenormalizedAdamW) does inside its own step."""
    if not hasattr(optimizer, "fill_scalars"):
        return
    name = type(optimizer).__name__
    if held and "hold" in group:
        raise ValueError(f"{name} holds norms inside its own step; pass hold= and cautious= to it, not to correct()")
    refuse_hold(name, held)
    if group.get("capturable"):
        raise ValueError(
            f"{name} fills the scalars of a captured step itself; use ScionC, or leave capturable=True out"
        )
