"""Draw the picture of docs/hold-the-norm.md by simulation: the ways to hold a norm as one axis.

Run from the repository's root: .venv/bin/python docs/hold_pictures.py
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np

import steadynorm as sn
from steadynorm.lab.holds import HeldSystem, run_held

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

IMAGES = Path(__file__).parent / "img"
STYLE = {"svg.hashsalt": "steadynorm", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
         "legend.frameon": False, "figure.facecolor": "white"}  # fmt: skip
STEPS, SIZE, LR, ALPHA, DECAY = 3000, 1000, 0.02, 0.1, 0.1
PULLS = {0.0: ("#475569", "no pull"), 0.1: ("#c2410c", "outward pull 0.1"), -0.05: ("#15803d", "inward pull 0.05")}
FIXED_AT, DECAY_AT = 0.25, 4000.0  # where the ends of the axis are drawn


def simulate(hold: str, pull: float, balance_steps: float = 100.0) -> np.ndarray:
    """Return |theta| over its target after each step, under a cosine of lr."""
    kernel = sn.theory.overlap("bias", (SIZE,))
    target = sn.theory.steady_norm_sq(LR, DECAY, ALPHA, overlap=kernel)
    cosine = sn.schedule.cosine(STEPS)
    lr = np.array([LR * cosine(step) for step in range(STEPS)])
    eta = lr * np.array([sn.theory.weight_decay_for(target, value, ALPHA, overlap=kernel) for value in lr.tolist()])
    system = HeldSystem(hold, "bias", (SIZE,), lr, eta, ALPHA, target, balance_steps=balance_steps, pull=pull)
    return np.sqrt(run_held([system], STEPS, records=STEPS)[0].mean() / target)


def draw_run(axis: Axes) -> None:
    """Draw one run under an outward pull, held in each way."""
    runs = {"decay": ("decay", 0.0, "#c2410c"), "balance, T = 200": ("balance", 200, "#1d4ed8"),
            "balance, T = 20": ("balance", 20, "#60a5fa"), "fixed": ("fixed", 0.0, "#111827")}  # fmt: skip
    for label, (hold, balance_steps, colour) in runs.items():
        axis.plot(simulate(hold, 0.1, balance_steps), color=colour, label=label, lw=1.2)
    axis.set(title="a run with an outward pull of 0.1", xlabel="step", ylabel="weight norm / target", yscale="log")
    axis.set_yticks([1, 2, 4], ["1", "2", "4"])
    axis.minorticks_off()


def draw_axis(axis: Axes) -> None:
    """Draw how far the norm strays from its target, from a fixed norm over T to open-loop decay."""
    ladder = [1, 3, 10, 30, 100, 300, 1000]
    for pull, (colour, label) in PULLS.items():
        strays = [np.sqrt(np.mean((simulate("balance", pull, steps) - 1) ** 2)) for steps in ladder]
        decay = np.sqrt(np.mean((simulate("decay", pull) - 1) ** 2))
        axis.loglog(ladder, strays, "o-", ms=3.5, color=colour, label=label)
        axis.loglog([ladder[-1], DECAY_AT], [strays[-1], decay], ":", color=colour)
        axis.loglog([DECAY_AT], [decay], "s", ms=5, color=colour)
    axis.axvline(FIXED_AT, color="#111827", lw=1.2)
    axis.annotate("fixed:\nexact", (FIXED_AT, 0.4), xytext=(5, 0), textcoords="offset points", fontsize=8)
    ticks = [FIXED_AT, *ladder[::2], DECAY_AT]
    axis.set_xticks(ticks, ["fixed", *map(str, ladder[::2]), "decay"])
    axis.set(title="the axis: how far the norm strays", xlabel="balance_steps T", ylabel="RMS of norm / target - 1")
    axis.minorticks_off()


def main() -> None:
    with mpl.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
        for axis, draw in zip(axes, (draw_run, draw_axis), strict=True):
            draw(axis)
            axis.legend(fontsize=7.5)
        figure.savefig(IMAGES / "hold.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
