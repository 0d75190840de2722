"""Guessed peaks: which lr no peak can be guessed from, and whether a guess is ever approached.

A run that is joined late may have a decayed lr, and `AdamW(lr=1.0)` under a Noam lambda never comes near 1.0.
"""

import warnings
from collections.abc import Sequence

from torch.optim import Optimizer

from steadynorm.decay.rule import Group, Relative, decay_rule, group_label, guesses_peak, names_peak

LARGEST = "largest_lr"  # in a group whose peak was guessed: the largest lr since its first step
_FAR = 0.5  # of the peak
_PATIENCE = 10_000  # steps without a larger lr that end a warmup; one that rises by epochs pauses for thousands


def spread_peaks(where: str, peak_lr: float | Sequence[float] | None, groups: int) -> list[float | None]:
    """Return the `peak_lr` that a caller passes, one number or one per group, for each group."""
    if not isinstance(peak_lr, Sequence):
        return [peak_lr] * groups
    if len(peak_lr) != groups:
        raise ValueError(f"{where}: peak_lr has {len(peak_lr)} values for {groups} groups")
    return list(peak_lr)


def check_guess(optimizer: Optimizer, group: Group, keys: Group) -> None:
    """Raise ValueError if the peak was guessed from the lr of a run under way, which a hand-written loop has decayed."""
    made_with = float(optimizer.defaults.get("lr", 0.0))
    guessed = not (keys["peak_lr_given"] or names_peak(group))
    if optimizer.state and guessed and keys.get("steady_norm_sq") is None and keys["peak_lr"] < made_with:
        raise ValueError(
            f"the run is under way and its lr={keys['peak_lr']:g} is below lr={made_with:g}, with which the optimizer was "
            "made, so the peak cannot be guessed; pass peak_lr=<the schedule's maximum>"
        )


def watch(group: Group) -> None:
    """Put a guessed peak on trial, from the first step of a run on."""
    if not group["peak_lr_given"] and group.get("steady_norm_sq") is None:
        group[LARGEST] = 0.0


def watch_on(group: Group, old: Group, is_under_way: bool) -> None:
    """Let a group continue the trial that another one began; a run that is joined may have seen its largest lr."""
    if LARGEST in group and LARGEST in old:
        group[LARGEST] = old[LARGEST]
    elif is_under_way:
        group.pop(LARGEST, None)


def warn_of_late_guess(optimizer: Optimizer) -> None:
    """Warn if the group added last guesses its peak from its lr while a schedule has others below their peaks."""
    *others, added = optimizer.param_groups
    below = next((k for k, group in enumerate(others) if _is_below_peak(group)), None)
    if below is None or not guesses_peak(added):
        return
    lr, peak = float(others[below]["lr"]), others[below]["peak_lr"]
    warnings.warn(
        f"{type(optimizer).__name__}, {group_label(len(others), added)}: it names no peak, so peak_lr={added['peak_lr']:g} was "
        f"taken from its lr={float(added['lr']):g}, at which its decay is {added['base_weight_decay']:g}. The run is under way, and "
        f"{group_label(below, others[below])} is at lr={lr:g}, below its peak_lr={peak:g}; put peak_lr=<the largest lr of its "
        "schedule> in the group",
        stacklevel=4,
    )


def _is_below_peak(group: Group) -> bool:
    """Return whether a group has taken steps, which write its decay or largest lr, and is now below its peak."""
    if not isinstance(rule := decay_rule(group), Relative):
        return False
    took_steps = group.get(LARGEST, 0.0) > 0 or group["weight_decay"] != rule.weight_decay
    return took_steps and float(group["lr"]) < rule.peak_lr * (1 - 1e-6)


class PeakWatch:
    """Judges each guessed peak once, when the first warmup, if any, is over: the lr falls, or rises no more."""

    def __init__(self) -> None:
        self.pause: dict[int, int] = {}  # steps since the largest lr
        self.judged: set[int] = set()

    def see(self, index: int, group: Group, lr: float) -> None:
        """Take note of a step's lr; warn if the peak turns out to be far above the largest."""
        largest = group.get(LARGEST)
        if largest is None or lr == 0:  # torch's DCP makes a step with lr 0 to build state
            return
        if lr > largest:
            group[LARGEST] = lr
            self.pause[index] = 0
            return
        self.pause[index] = self.pause.get(index, 0) + 1
        over = self.pause[index] >= _PATIENCE or lr < largest
        if not over or index in self.judged:
            return
        self.judged.add(index)
        if not group["peak_lr_given"] and largest < _FAR * group["peak_lr"]:
            warnings.warn(
                f"{group_label(index, group)}: the largest lr so far is {largest:g}, far below the guessed peak_lr="
                f"{group['peak_lr']:g}, so the decay has been {largest / group['peak_lr']:.2g} of the one you set at most; "
                f"pass peak_lr=<the schedule's maximum>, or put it in the group",
                stacklevel=5,
            )
