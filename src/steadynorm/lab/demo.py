"""Train a small GPT with Scion and with ScionC on the embedded texts, side by side, for `steadynorm demo`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steadynorm import progress, records, theory
from steadynorm.lab import simulate
from steadynorm.progress import Say
from steadynorm.report import content as report

OPTIMIZERS = ("scion", "scionc")
# The page needs no more, and the recipe's own records and evaluations would take a minute longer.
BRIEFLY = ("--monitor-every", "5", "--eval-every", "230", "--task.eval-tokens", "32768")
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
    simulated: simulate.Measured


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


def train(folder: Path, steps: int, extra: Sequence[str] = (), *, say: Say = lambda line: None) -> list[Path]:
    """Train both runs at once on one core each, resuming interrupted ones; `say` gets the expected time."""
    folders = [folder / name for name in OPTIMIZERS]
    one_thread = os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, out in zip(OPTIMIZERS, folders, strict=True):
            out.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "steadynorm.cli", "train", "gpt", "--out", str(out), "--name", name]
            command += ["--optim.name", name, "--steps", str(steps), *BRIEFLY, *extra]
            with (out / "log.txt").open("ab") as log:
                processes.append(subprocess.Popen(command, stderr=log, stdout=log, env=one_thread))
        _watch(processes, folders, steps, say)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)  # it saves a checkpoint and ends
        for process in processes:
            process.wait()
    return folders


def _watch(processes: Sequence[subprocess.Popen[bytes]], folders: Sequence[Path], steps: int, say: Say) -> None:
    reported = 0
    with progress.bar(steps * len(folders), "training Scion and ScionC", say=say) as advance:
        while True:
            exit_codes = [process.poll() for process in processes]
            for code, out in zip(exit_codes, folders, strict=True):
                if code:
                    last = (out / "log.txt").read_text(errors="replace", encoding="utf-8").strip().splitlines()[-1:]
                    raise RuntimeError(f"{out}: training failed ({' '.join(last)}); see {out / 'log.txt'}")
            # The slower run sets the pace: runs write their records some twenty steps at a time.
            finished = len(folders) * min(records.last_step(out / records.FILE) for out in folders)
            if finished > 0:
                advance(finished - reported)
                reported = finished
            if None not in exit_codes:
                return
            time.sleep(0.5)


def summarise(folder: Path) -> Summary:
    """Return the figures of a finished run."""
    run = records.read(folder)
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
        float(run.columns["val_loss"][-1]),
        ends(run.columns["weight_norm"]),
        ends(hidden("norm")),
        float(norms.max() / norms.min()),
        ends(run.columns["grad_norm"]),
        ends(hidden("norm") / hidden("forecast"))[1],
        float(np.nanmean(run.columns["excess_alignment/hidden"])),
        float(np.nanmean(run.columns["excess_alignment/output"])),
    )


def run(folder: Path, steps: int, say: Say) -> tuple[list[Summary], Path]:
    """Train both runs and write the page that compares them."""
    folders = train(folder, steps, say=say)
    page = report.report(folders, folder / "report.html", title="Scion against ScionC: the norm stays where you put it")
    return [summarise(run_folder) for run_folder in folders], page
