"""Draw the picture of the README: what Scion and ScionC do to the weight norm, forecast and simulated.

Run from the repository's root: .venv/bin/python docs/pictures.py
"""

from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

import steadynorm as sn

mpl.use("svg")
import matplotlib.pyplot as plt

STEPS, WARMUP, LR, ALPHA, DECAY, SHAPE, COPIES = 3000, 150, 0.05, 0.1, 0.1, (32, 32), 32


def simulate(optimizer_class: type, **settings: float | str) -> np.ndarray:
    """|theta|^2 / |u|^2 after each step, mean over copies, of a real optimizer fed random gradients."""
    torch.manual_seed(0)
    params = [torch.nn.Parameter(torch.zeros(SHAPE, dtype=torch.float64)) for _ in range(COPIES)]
    optimizer = optimizer_class(params, lr=LR, alpha=ALPHA, lmo="spectral", polar_steps=9, **settings)
    scheduler = sn.Scheduler(optimizer, scale={"lr": sn.schedule.cosine(STEPS, warmup=WARMUP)})
    norms = []
    for _ in range(STEPS):
        for p in params:
            p.grad = torch.randn_like(p)
        optimizer.step()
        scheduler.step()
        norms.append(sum(p.detach().square().sum().item() for p in params) / COPIES / 32)
    return np.array(norms)


def main() -> None:
    torch.set_num_threads(1)
    lr = LR * np.array([sn.schedule.cosine(STEPS, warmup=WARMUP)(step) for step in range(STEPS)])
    kernel = sn.theory.overlap("spectral", SHAPE)
    target = sn.theory.steady_norm_sq(LR, DECAY, ALPHA, overlap=kernel)
    exact = np.array([sn.theory.weight_decay_for(target, value, ALPHA, overlap=kernel) for value in lr])
    runs = (
        ("Scion: constant decay", "#c2410c", simulate(sn.Scion, weight_decay=DECAY), DECAY),
        ("ScionC: corrected decay", "#1d4ed8", simulate(sn.ScionC, steady_norm_sq=target, overlap="exact"), exact),
    )
    figure, (top, axis) = plt.subplots(
        2, 1, figsize=(7.2, 4.4), height_ratios=(1, 3.2), sharex=True, constrained_layout=True
    )
    top.plot(lr, color="#475569")
    top.set_ylabel("lr")
    for label, colour, seen, decay in runs:
        forecast = sn.theory.forecast(lr, decay, ALPHA, overlap=kernel)
        axis.plot(np.sqrt(forecast), color=colour, label=f"{label}, forecast")
        axis.plot(range(0, STEPS, 75), np.sqrt(seen[::75]), "o", ms=3.5, mfc="none", color=colour, label="simulated")
    axis.axhline(np.sqrt(target), color="#94a3b8", lw=0.8, ls="--")
    axis.set_ylabel("weight norm / update norm")
    axis.set_xlabel("step")
    axis.set_ylim(0)
    axis.legend(frameon=False, ncols=2, loc="lower center")
    for each in (top, axis):
        each.spines[["top", "right"]].set_visible(False)
    out = Path(__file__).parent / "img" / "norms.svg"
    out.parent.mkdir(exist_ok=True)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
