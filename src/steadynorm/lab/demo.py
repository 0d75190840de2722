"""`steadynorm demo`: train a small GPT with Scion and with ScionC on the embedded texts, side by side, and show it."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steadynorm import progress, records, theory
from steadynorm.lab import simulate
from steadynorm.progress import Say
from steadynorm.report import content as report

OPTIMIZERS = ("scion", "scionc")
# A page needs no more; the recipe's own records and evaluations would take a minute longer.
BRIEFLY = ("--monitor-every", "5", "--eval-every", "230", "--task.eval-tokens", "32768")
_OUTPUT = "embedding.weight"  # tied: the output layer
SYSTEMS = (
    ("vector of 512", "bias", (512,)),
    ("square, 32 x 32", "spectral", (32, 32)),
    ("1:4, 16 x 64", "spectral", (16, 64)),
)


class Settled(NamedTuple):
    """Where |theta|^2/|u|^2 of a random system settles, and what was predicted."""

    label: str
    paper: float
    exact: float
    simulated: simulate.Measured


def settle(lr: float = 0.05, weight_decay: float = 0.1, alpha: float = 0.1) -> list[Settled]:
    """The paper's three kinds of parameter under random gradients, in some seconds."""
    paper, found = theory.steady_norm_sq(lr, weight_decay, alpha, limit=True), []
    for label, lmo, shape in SYSTEMS:
        exact = theory.steady_norm_sq(lr, weight_decay, alpha, overlap=theory.overlap(lmo, shape))
        seen = simulate.steady_norm_sq(lmo, shape, lr=lr, weight_decay=weight_decay, alpha=alpha, seeds=8)
        found.append(Settled(label, paper, exact, seen))
    return found


class Summary(NamedTuple):
    """How one run went. `end` is the mean over the last 3 % of steps, `middle` over the 3 % around one half."""

    name: str
    val_loss: float
    norm: tuple[float, float]  # of all weights: middle, end
    hidden: tuple[float, float]  # of the hidden layers
    spread: float  # of the norm of all weights: largest / smallest over the last two thirds
    grad: tuple[float, float]
    over_forecast: float  # measured / forecast norm of the hidden layers, end
    excess_hidden: float  # alignment, mean over the run
    excess_output: float


def train(folder: Path, steps: int, extra: Sequence[str] = (), *, say: Say = lambda line: None) -> list[Path]:
    """Train both at once, on one core each, resuming what was interrupted; `say` is told how long it will take."""
    folders = [folder / name for name in OPTIMIZERS]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for name, out in zip(OPTIMIZERS, folders, strict=True):
            out.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, "-m", "steadynorm.cli", "train", "gpt", "--out", str(out), "--name", name]
            command += ["--optim.name", name, "--steps", str(steps), *BRIEFLY, *extra]
            with (out / "log.txt").open("ab") as log:
                processes.append(subprocess.Popen(command, stderr=log, stdout=log, env=_one_thread()))
        _watch(processes, folders, steps, say)
    finally:
        for each in processes:
            if each.poll() is None:
                each.send_signal(signal.SIGTERM)  # saves and ends
        for each in processes:
            each.wait()
    return folders


def _one_thread() -> Mapping[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def _watch(processes: Sequence[subprocess.Popen[bytes]], folders: Sequence[Path], steps: int, say: Say) -> None:
    done = 0
    with progress.bar(steps * len(folders), "training Scion and ScionC", say=say) as tell:
        while True:
            ended = [each.poll() for each in processes]
            for code, out in zip(ended, folders, strict=True):
                if code:
                    last = (out / "log.txt").read_text(errors="replace", encoding="utf-8").strip().splitlines()[-1:]
                    raise RuntimeError(f"{out}: training failed ({' '.join(last)}); see {out / 'log.txt'}")
            # The slower run tells the pace: each writes its records some twenty steps at a time.
            now = len(folders) * min(records.last_step(out / records.FILE) for out in folders)
            if now > 0:
                tell(now - done)
                done = now
            if None not in ended:
                return
            time.sleep(0.5)


def summarise(folder: Path) -> Summary:
    """The figures of a finished run."""
    run = records.read(folder)
    count = len(run.steps)
    span = max(1, round(0.03 * count))
    start = (count - span) // 2

    def ends(values: np.ndarray) -> tuple[float, float]:
        return float(np.nanmean(values[start : start + span])), float(np.nanmean(values[-span:]))

    def hidden(quantity: str) -> np.ndarray:
        return np.sqrt(sum(np.square(each[quantity]) for name, each in run.layers.items() if name != _OUTPUT))

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
    """Train both, write the page."""
    folders = train(folder, steps, say=say)
    page = report.report(folders, folder / "report.html", title="Scion against ScionC: the norm stays where you put it")
    return [summarise(each) for each in folders], page
