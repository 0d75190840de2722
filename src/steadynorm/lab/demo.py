"""Train a small GPT with Scion and with ScionC on the embedded texts, side by side, for `steadynorm demo`."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steadynorm import records, theory
from steadynorm.lab import simulate
from steadynorm.lab.paper import pool
from steadynorm.lab.train.config import Config, Gpt, OptimizerName
from steadynorm.lab.train.recipes import with_optimizer
from steadynorm.report import content as report

RECIPE = "gpt"
OPTIMIZERS: tuple[OptimizerName, ...] = ("scion", "scionc")
_OUTPUT = "embedding.weight"  # the output layer, tied
SYSTEMS = (
    ("vector of 512", "bias", (512,)),
    ("square, 32 x 32", "spectral", (32, 32)),
    ("1:4, 16 x 64", "spectral", (16, 64)),
)


class SystemNorm(NamedTuple):
    """Steady |theta|^2/|u|^2 of a random system, predicted and simulated."""

    label: str
    paper: float
    exact: float
    simulated: simulate.MeanWithError


def compare_systems(lr: float = 0.05, weight_decay: float = 0.1, alpha: float = 0.1) -> list[SystemNorm]:
    """Simulate the paper's three kinds of parameter under random gradients, in a few seconds."""
    systems = [simulate.System(lmo, shape, lr, weight_decay, alpha) for _, lmo, shape in SYSTEMS]
    trajectories = simulate.run(systems, simulate.half_life_steps(10, lr, weight_decay), seeds=8)
    paper, norms = theory.steady_norm_sq(lr, weight_decay, alpha, limit=True), []
    for (label, lmo, shape), trajectory in zip(SYSTEMS, trajectories, strict=True):
        exact = theory.steady_norm_sq(lr, weight_decay, alpha, overlap=theory.overlap(lmo, shape))
        norms.append(SystemNorm(label, paper, exact, trajectory.late_mean()))
    return norms


class Summary(NamedTuple):
    """Figures of one run; pairs are means over the middle 3 % and over the last 3 % of its steps."""

    name: str
    val_loss: float  # the last one
    norm: tuple[float, float]  # of all weights
    hidden: tuple[float, float]  # norm of the hidden layers
    spread: float  # largest over smallest norm of all weights in the last two thirds
    grad: tuple[float, float]  # norm
    over_forecast: float  # measured over forecast norm of the hidden layers at the end
    excess_hidden: float  # excess alignment, mean over the run
    excess_output: float


def configs(folder: Path, steps: int) -> list[Config]:
    """Return both runs: the small GPT of the recipes, with fewer records and evaluations than it has by default.

    The page needs no more, and the rest would take a minute longer.
    """
    runs = []
    for name in OPTIMIZERS:
        config = with_optimizer(RECIPE, name)
        assert isinstance(config.task, Gpt)
        task = replace(config.task, eval_tokens=32_768)
        every = {"monitor_every": min(5, steps), "eval_every": 230}
        runs.append(replace(config, task=task, out=folder / name, name=name, steps=steps, **every))
    return runs


def train(runs: Sequence[Config]) -> list[Path]:
    """Train these runs at once on one core each, resuming interrupted ones, and return their folders."""
    jobs = [pool.Job(config, pool.train_command(config, RECIPE)) for config in runs]
    if failed := pool.train_all(jobs, len(jobs)):
        raise RuntimeError("\n".join(f"{folder}: training failed: {reason}" for folder, reason in failed.items()))
    return [job.folder for job in jobs]


def summarise(folder: Path) -> Summary:
    """Return the figures of a finished run."""
    whole = records.read(folder)
    run = whole.at(np.isfinite(whole.columns["weight_norm"]))  # the last record may be of an evaluation only
    count = len(run.steps)
    span = max(1, round(0.03 * count))
    start = (count - span) // 2

    def ends(values: np.ndarray) -> tuple[float, float]:
        return float(np.nanmean(values[start : start + span])), float(np.nanmean(values[-span:]))

    def hidden(quantity: str) -> np.ndarray:
        return np.sqrt(sum(np.square(layer[quantity]) for name, layer in run.layers.items() if name != _OUTPUT))

    norms = run.columns["weight_norm"][count // 3 :]
    return Summary(
        run.name,
        float(whole.columns["val_loss"][-1]),
        ends(run.columns["weight_norm"]),
        ends(hidden("norm")),
        float(norms.max() / norms.min()),
        ends(run.columns["grad_norm"]),
        ends(hidden("norm") / hidden("forecast"))[1],
        float(np.nanmean(run.columns["excess_alignment/hidden"])),
        float(np.nanmean(run.columns["excess_alignment/output"])),
    )


def run(folder: Path, steps: int) -> tuple[list[Summary], Path]:
    """Train both runs and write the page that compares them."""
    folders = train(configs(folder, steps))
    page = report.report(folders, folder / "report.html", title="Scion against ScionC: the norm stays where you put it")
    return [summarise(run_folder) for run_folder in folders], page
