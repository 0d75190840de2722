"""Draw the pictures of docs/theory.md and docs/schedules.md from the library's own functions.

Run from the repository's root: .venv/bin/python docs/theory_pictures.py
"""

import math
from collections.abc import Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch

import steadynorm as sn
from steadynorm import lmo, polar

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

IMAGES = Path(__file__).parent / "img"
STYLE = {"svg.hashsalt": "steadynorm", "font.size": 9, "axes.spines.top": False, "axes.spines.right": False,
         "legend.frameon": False, "figure.facecolor": "white"}  # fmt: skip
KERNELS = {  # label -> (lmo, shape, colour, pairs to measure)
    "the paper: f(r) = r": ("linear", None, "#94a3b8", 0),
    "1:4, 32 x 128": ("spectral", (32, 128), "#15803d", 24),
    "square, 64 x 64": ("spectral", (64, 64), "#1d4ed8", 24),
    "sign": ("sign", (64, 64), "#c2410c", 24),
}


def measured(name: str, shape: tuple[int, int], r: float, pairs: int) -> float:
    """<u(X), u(Y)> / |u|^2 of Gaussian X and Y that correlate by r, by the exact lmo."""
    x, z = torch.randn(2, pairs, *shape, dtype=torch.float64)
    exact = polar.Polar("svd")
    u, v = (lmo.get(name).update(each, polar=exact, batch_ndim=1) for each in (x, r * x + math.sqrt(1 - r * r) * z))
    return float((u * v).sum() / (u * u).sum())


def law(axis: Axes) -> None:
    """The singular values of a square Gaussian matrix, with both signs: a semicircle."""
    values = torch.linalg.svdvals(torch.randn(600, 600, dtype=torch.float64)).numpy() / math.sqrt(600)
    x = np.linspace(-2, 2, 401)
    axis.hist(np.concatenate([values, -values]), bins=40, density=True, color="#cbd5e1", label="600 x 600, sampled")
    axis.plot(x, np.sqrt(4 - x * x) / (2 * np.pi), color="#1d4ed8", label="semicircle")
    axis.set(title="law of the Hermitised matrix", xlabel="singular value, both signs", ylim=(0, 0.45))


def expansion(axis: Axes) -> None:
    """sign(x) and its partial sums in the polynomials of that law, U_n(x/2)."""
    theta = np.linspace(1e-3, np.pi - 1e-3, 801)
    x, partial = 2 * np.cos(theta), np.zeros(801)
    axis.plot(x, np.sign(x), color="#94a3b8", lw=1)
    for n, colour in zip(range(1, 10, 2), ("#fbbf24", "", "#f97316", "", "#b91c1c"), strict=True):
        coefficient = 2 / np.pi * math.sin(n * np.pi / 2) * (1 / n + 1 / (n + 2))
        partial += coefficient * np.sin((n + 1) * theta) / np.sin(theta)
        if colour:
            axis.plot(x, partial, color=colour, label=f"up to n = {n}")
    axis.set(title="polar is its sign", xlabel="x", ylim=(-1.6, 1.6))


def weights(axis: Axes) -> None:
    """a_n: how much of an update is of which degree in its input."""
    for label, (name, shape, colour, pairs) in KERNELS.items():
        kernel = sn.theory.overlap(name, shape)
        if pairs:
            axis.loglog(kernel.n[:24], kernel.a[:24], "o-", ms=2.5, lw=0.8, color=colour, label=label.split(",")[0])
    axis.set(title="share of degree n", xlabel="n", ylabel=r"$a_n$", ylim=(1e-6, 2))


def kernels(axis: Axes) -> None:
    r = np.linspace(0, 1, 201)
    for label, (name, shape, colour, pairs) in KERNELS.items():
        kernel = sn.theory.overlap(name, shape)
        axis.plot(r, [kernel(float(each)) for each in r], color=colour, label=label)
        if pairs and shape is not None:
            at = np.linspace(0.1, 0.95, 8)
            axis.plot(
                at, [measured(name, shape, float(each), pairs) for each in at], "o", ms=4, mfc="none", color=colour
            )
    axis.set(title="overlap of two updates (dots: measured)", xlabel="correlation r of their inputs", ylabel="f(r)")


def misses(axis: Axes) -> None:
    """By how much the linear formula overstates the norm."""
    alphas = np.geomspace(0.01, 1, 60)
    for label, (name, shape, colour, _) in KERNELS.items():
        kernel, linear = sn.theory.overlap(name, shape), sn.theory.overlap("linear", None)
        ratio = [math.sqrt(linear.gain(float(a)) / kernel.gain(float(a))) for a in alphas]
        axis.semilogx(alphas, ratio, color=colour, label=label)
    axis.set(title="the paper's norm / the exact one", xlabel="alpha", ylabel="ratio")


def matched(axes: Sequence[Axes]) -> None:
    """A cosine of lr, and the momentum schedule with the same effective lr."""
    steps, start = np.arange(1000), 0.01
    cosine = sn.schedule.cosine(1000)
    found = sn.schedule.MatchedMomentum(0.1, 1.0, cosine)
    runs = {
        "cosine of lr": ([start * cosine(int(t)) for t in steps], [0.1] * len(steps), "#c2410c", "-"),
        "matched momentum": ([start * found.lr(int(t)) for t in steps], [found.alpha(int(t)) for t in steps], "#1d4ed8", "--"),
    }  # fmt: skip
    for label, (lr, alpha, colour, line) in runs.items():
        effective = [sn.theory.effective_lr(g, a) for g, a in zip(lr, alpha, strict=True)]
        decay = [sn.theory.weight_decay_for(1.1875, g, a) for g, a in zip(lr, alpha, strict=True)]
        for axis, values in zip(axes, (lr, alpha, effective, decay), strict=True):
            axis.plot(steps, values, line, color=colour, label=label)
    for axis, title in zip(axes, ("lr", "alpha", "effective lr", "decay at C² = 1.1875"), strict=True):
        axis.set(title=title, xlabel="step", ylim=(0, None))


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    with mpl.rc_context(STYLE):
        for name, width, drawers in (("spectral", 10, (law, expansion, weights)), ("overlap", 9, (kernels, misses))):
            figure, axes = plt.subplots(1, len(drawers), figsize=(width, 3.2), layout="constrained")
            for axis, draw in zip(axes, drawers, strict=True):
                draw(axis)
                axis.legend(fontsize=7.5)
            figure.savefig(IMAGES / f"{name}.svg", metadata={"Date": None})
        figure, axes = plt.subplots(2, 2, figsize=(7.2, 4.4), sharex=True, layout="constrained")
        matched(list(axes.flat))
        axes.flat[0].legend(fontsize=7.5)
        figure.savefig(IMAGES / "matched.svg", metadata={"Date": None})


if __name__ == "__main__":
    main()
