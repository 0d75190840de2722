"""The `Correction`: writes lambda_t into an optimizer's groups before each step, and survives checkpoints."""

import contextlib
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from steadynorm import machine, theory
from steadynorm.decay.families import Family
from steadynorm.decay.hold import (
    HOLD_KEYS,
    HOLD_STATE,
    check_balance,
    check_cautious,
    check_hold,
    is_rescaled,
)
from steadynorm.decay.live import LiveDecay
from steadynorm.decay.peak import PeakWatch
from steadynorm.decay.rescale import Rescaler
from steadynorm.decay.rule import (
    KEYS,
    UNCORRECTED,
    Group,
    Relative,
    check_peak,
    correction_keys,
    decay_rule,
    group_label,
    guess_again,
    names_peak,
    weight_decay_now,
)
from steadynorm.decay.skip import StandIn, keep_constant, uncorrected_positions, unsplit
from steadynorm.machine import exact_dtype
from steadynorm.theory.equilibrium import check_lr

_SAVED = (*KEYS, *HOLD_KEYS, "capturable")  # what a checkpoint may lack, or must not change


class Correction:
    """Writes lambda_t into each corrected group before a step: a step pre-hook, or called by our own classes."""

    def __init__(self, family: Family, chosen_keys: Sequence[str] = ()):
        self.family = family
        self.chosen_keys = chosen_keys  # by the caller: a checkpoint that replaces one is reported
        self.handles: list[RemovableHandle] = []  # of the hooks that `correct` registers
        self.saved_keys: list[Group] = []  # the groups' keys, for checkpoints that lack them
        self.loading: dict[str, Any] | None = None  # the checkpoint that is being loaded
        self.written: list[tuple[Group, Any]] = []  # groups and the decay last seen in them; a loaded group is another
        self.guesses: list[tuple[Group, float]] = []  # groups and the peak that was guessed for them
        self.warned = False
        self.stand_in = StandIn()
        self.rescaler = Rescaler()
        self.live = LiveDecay()
        self.peak_watch = PeakWatch()

    def __call__(self, optimizer: Optimizer, args: Any = None, kwargs: Any = None) -> tuple[Any, Any] | None:
        if optimizer is self.stand_in.optimizer:  # a subclass's step calls its parent's, which runs the hooks again
            return None
        if not machine.is_capturing():
            self.fill(optimizer)
        if not args:  # our own classes say themselves what else a step needs
            return None
        self.live.apply(optimizer)
        self.rescaler.measure(optimizer, self.family)
        stepper = self.stand_in.prepare(optimizer)
        return None if stepper is optimizer else ((stepper, *args[1:]), kwargs)

    def fill(self, optimizer: Optimizer) -> None:
        """Write lambda_t of this step into the groups, and to the device where a captured step reads it."""
        values, guesses = [], {id(group): peak for group, peak in self.guesses}
        for index, group in enumerate(optimizer.param_groups):
            try:
                values.append(self._value(index, group, guesses.get(id(group))))
            except ValueError as error:
                raise ValueError(f"{group_label(index, group)}: {error}") from None
        self._warn_of_lost_decay(optimizer.param_groups, values)
        for group, value in zip(optimizer.param_groups, values, strict=True):
            if value is not None:
                group["weight_decay"] = value
        self.record_written(optimizer.param_groups)
        self.live.fill(optimizer.param_groups)

    def after_step(self, optimizer: Optimizer, *_: Any) -> None:
        """Scale the weights of groups whose norm is held, and take the groups back: a step post-hook."""
        if optimizer is not self.stand_in.optimizer:  # that is the end of a parent's step, which ran the hooks again
            self.rescaler.apply(optimizer)
            self.stand_in.take_back()

    def record_written(self, groups: Sequence[Group]) -> None:
        """Note each group's decay and guessed peak: others found before the next step were written by somebody else."""
        self.written = [(group, group.get("weight_decay")) for group in groups]
        self.record_guesses(groups)

    def record_guesses(self, groups: Sequence[Group]) -> None:
        """Note the guessed peaks."""
        self.guesses = [(group, group["peak_lr"]) for group in groups if not group.get("peak_lr_given", True)]

    def _warn_of_lost_decay(self, groups: Sequence[Group], values: Sequence[float | None]) -> None:
        """Warn once about a decay that was written and will not be used.

        This is not an error, because some trainers restore groups in place, and some write the base decay at every step.
        """
        noted = {id(group): value for group, value in self.written}
        for index, (group, value) in enumerate(zip(groups, values, strict=True)):
            decay, usual = group.get("weight_decay"), (noted.get(id(group)), group.get("base_weight_decay"))
            if self.warned or value is None or id(group) not in noted:
                continue
            if decay is not usual[0] and (isinstance(decay, torch.Tensor) or decay not in usual):
                self.warned = True
                warnings.warn(
                    f"{group_label(index, group)}: weight_decay={decay} is not used, because it is computed at every step; "
                    "set or schedule base_weight_decay, or set corrected=False in the group",
                    stacklevel=4,
                )

    def _value(self, index: int, group: Group, guess: float | None) -> float | None:
        """Return lambda_t, or None if the group's decay is left alone. A peak that is not the guess was given since."""
        lr = check_lr(float(group["lr"]))
        if "base_weight_decay" not in group:  # added after correct()
            if not group.get("weight_decay") or group.get("corrected") is False:
                return None
            group.update(self._keys_of_added(group))
        if not group["corrected"] or "weight_decay" not in group:
            return None
        if group["base_weight_decay"] == 0:
            return 0.0
        if guess is not None and group["peak_lr"] != guess:
            check_peak(group["peak_lr"])
            group["peak_lr_given"] = True
        if not group["peak_lr_given"] and group.get("max_lr") is not None:  # OneCycleLR came after correct()
            group["peak_lr"] = float(group["max_lr"])
        value = weight_decay_now(group, self.family, exact_kernel(group, self.family))
        self.peak_watch.see(index, group, lr)
        return value

    def _keys_of_added(self, group: Group) -> Group:
        """Return the keys of a group added after correct(). Its lr may be anything by now, so it must name its peak."""
        if not names_peak(group):
            raise ValueError("it was added after correct() and names no peak; put peak_lr=<its largest lr> in it")
        keys = correction_keys(group, self.family)
        check_held({**group, **keys}, self.family)
        return keys

    def before_load(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[str, Any] | None:
        """Note the groups' keys, for a checkpoint that lacks them; bring one with split groups into today's layout."""
        self.save_keys(optimizer.param_groups)
        whole = unsplit(optimizer.param_groups, state_dict)
        self.loading = state_dict if whole is None else whole
        return whole

    def save_keys(self, groups: Sequence[Group]) -> None:
        """Note the groups' keys as they are before a checkpoint is loaded."""
        self.saved_keys = [{key: group[key] for key in _SAVED if key in group} for group in groups]

    def after_load(self, optimizer: Optimizer) -> None:
        """Take the weight_decay of a checkpoint from before the correction as the base, and keep the other keys."""
        self._load_held(optimizer)
        for group, known in zip(optimizer.param_groups, self.saved_keys, strict=True):
            if "capturable" in group:  # how a step runs is up to this run and its device
                group["capturable"] = known.get("capturable", False)
            if "base_weight_decay" not in group and "base_weight_decay" in known:
                # A group that was added and has never stepped has keys of its own.
                own = {key: group[key] for key in _SAVED if key in group}
                if own.get("peak_lr") is not None:
                    own.setdefault("peak_lr_given", True)
                both = known["corrected"] and own.get("corrected", True)  # what correct() skips stays skipped
                group.update({**known, "base_weight_decay": float(group["weight_decay"]), **own, "corrected": both})
                guess_again(group)
            elif known.get(UNCORRECTED) and not group.get(UNCORRECTED):  # nobody had been skipped, or groups were split
                group.update({UNCORRECTED: known[UNCORRECTED], "corrected": known["corrected"]})
            elif not known.get("corrected", True) and group.get("corrected"):
                keep_constant(optimizer, group)
            for key in HOLD_KEYS:  # a checkpoint from before the norm was held
                if key in known:
                    group.setdefault(key, known[key])
        self.record_guesses(optimizer.param_groups)
        self.warn_of_replaced(optimizer)

    def _load_held(self, optimizer: Optimizer) -> None:
        """Take what holds norms from the checkpoint as it was saved; torch rounds it to the dtype of the weights."""
        loaded, self.loading = self.loading or {"state": {}, "param_groups": []}, None
        for group, saved in zip(optimizer.param_groups, loaded["param_groups"], strict=False):
            for p, key in zip(group["params"], saved["params"], strict=True):
                for name in HOLD_STATE.values() & loaded["state"].get(key, {}).keys():
                    value = loaded["state"][key][name]
                    optimizer.state[p][name] = value.to(exact_dtype(p), copy=True).to(p.device)

    def warn_of_replaced(self, optimizer: Optimizer) -> None:
        """Warn about the first setting that the caller gave and that differs from the checkpoint's, which wins."""
        where = type(optimizer).__name__ if hasattr(optimizer, "corrects_itself") else "correct()"
        for index, (group, known) in enumerate(zip(optimizer.param_groups, self.saved_keys, strict=True)):
            if not (group.get("corrected") and group.get("base_weight_decay")):
                continue
            for key in self.chosen_keys:
                is_chosen = known.get(key) is not None and known.get(f"{key}_given", True)
                if is_chosen and group.get(key) != known[key]:
                    warnings.warn(
                        f"{group_label(index, group)}: the checkpoint's {key}={group.get(key)} replaces the "
                        f"{known[key]} given to {where}. To use yours, set group[{key!r}] = {known[key]} after "
                        f"loading; to keep the checkpoint's, leave it out of {where}",
                        stacklevel=4,
                    )
                    return

    def before_save(self, optimizer: Optimizer) -> None:
        """Write the keys of groups added after correct(), so that a checkpoint has them even before their first step."""
        for group in optimizer.param_groups:
            if "base_weight_decay" not in group:
                with contextlib.suppress(ValueError):  # what makes no sense is refused by the step
                    group.update(self._keys_of_added(group))


def check_held(group: Group, family: Family) -> None:
    """Raise ValueError if a group asks for something that a hook around this family's step cannot do."""
    refuse_residual(group.get("weight_residual"))
    check_hold(group)
    check_balance(group, family)
    check_cautious(group, family)
    if group.get("cautious") and isinstance(rule := decay_rule(group), Relative) and rule.peak_lr > 0:
        weight_decay_now({**group, "lr": rule.peak_lr}, family)  # raises if the strongest of the run is too strong
    held = (k for k in range(len(group["params"])) if is_rescaled(group) and k not in uncorrected_positions(group))
    if (k := next((k for k in held if group["params"][k].is_complex()), None)) is not None:
        raise ValueError(f"hold and cautious are for real weights, and parameter {k} is complex; name it in skip=")
    if group.get("capturable") and is_rescaled(group):
        raise ValueError(
            "capturable=True: what holds the norm around another optimizer's step reads the lr on the host; leave hold and "
            "cautious out, or use ScionC, MuonC or LionC, which do it inside their step"
        )


def refuse_residual(weight_residual: bool | None) -> None:
    """Raise ValueError if bf16 weights are to be exact in a step that is not ours."""
    if weight_residual:
        raise ValueError(
            "weight_residual=True needs a step that writes the weights itself, and this one is torch's or somebody else's; "
            "keep the weights in fp32 (with autocast), or use ScionC, MuonC, LionC, SGDC or RenormalizedAdamW"
        )


def own_correction(optimizer: Optimizer, family: Family) -> Correction:
    """Return the correction of an optimizer that corrects itself: one object for its life, neither saved nor copied."""
    return optimizer.__dict__.setdefault("_correction", Correction(family, ("peak_lr", "steady_norm_sq")))


def exact_kernel(group: Group, family: Family) -> theory.Overlap | None:
    """Return the overlap kernel that all parameters of a group share, for overlap="exact"; None for "linear"."""
    if group.get("overlap") != "exact" or family.exact_lmo is None:
        return None
    kernels = {theory.overlap(family.exact_lmo, p.shape) for p in group["params"]}
    if len(kernels) != 1:
        raise ValueError(
            f"overlap='exact' needs one kernel per group, but its shapes have {len(kernels)}; "
            "split the group by shape or use overlap='linear'"
        )
    return kernels.pop()
