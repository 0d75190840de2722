"""Watch whether a guessed peak is ever approached: `AdamW(lr=1.0)` under a Noam lambda never comes near 1.0."""

import warnings

from steadynorm.decay.rule import Group, group_label

LARGEST = "largest_lr"  # in a group whose peak was guessed: the largest lr since its first step
_FAR = 0.5  # of the peak
_PATIENCE = 10_000  # steps without a larger lr that end a warmup; one that rises by epochs pauses for thousands


def watch(group: Group) -> None:
    """Put a guessed peak on trial, from the first step of a run on."""
    if not group["peak_lr_given"] and group.get("steady_norm_sq") is None:
        group[LARGEST] = 0.0


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
