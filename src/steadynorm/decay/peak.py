"""Watch whether a guessed peak is ever approached: `AdamW(lr=1.0)` under a Noam lambda never comes near 1.0."""

import warnings

from torch.optim import Optimizer

from steadynorm.decay.rule import Group, Relative, decay_rule, group_label, guesses_peak

LARGEST = "largest_lr"  # in a group whose peak was guessed: the largest lr since its first step
_FAR = 0.5  # of the peak
_PATIENCE = 10_000  # steps without a larger lr that end a warmup; one that rises by epochs pauses for thousands


def watch(group: Group) -> None:
    """Put a guessed peak on trial, from the first step of a run on."""
    if not group["peak_lr_given"] and group.get("steady_norm_sq") is None:
        group[LARGEST] = 0.0


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
    """Judges each guessed peak once, when the first warmup is over: the lr has risen and falls, or rises no more."""

    def __init__(self) -> None:
        self.risen: set[int] = set()  # groups by index
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
            if largest > 0:
                self.risen.add(index)
            return
        self.pause[index] = self.pause.get(index, 0) + 1
        over = self.pause[index] >= _PATIENCE or (index in self.risen and lr < largest)
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
