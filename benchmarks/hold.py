"""Measure how well each way to hold the norm keeps it, in real runs of the small GPT and ViT.

python -m benchmarks.hold [--seeds K] [--tasks gpt vit] [--arms ...] [--cost-only]

The table goes into docs/hold-the-norm.md. For every weight of every run: |weights|^2 over the target at the end, and the furthest it strays after it first comes
within 2 % of it. ScionC with the output layer corrected as well, so that every parameter has a target.
"""

import argparse
import json
import statistics
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.pages import fill
from steadynorm import machine
from steadynorm.decay.hold import target_norm_sq
from steadynorm.lab import bench
from steadynorm.lab.paper.baselines import GPT, VIT, Baseline
from steadynorm.lab.train import tasks
from steadynorm.lab.train.config import Config
from steadynorm.lab.train.optimizers import build
from steadynorm.optim import ScionC

DOCS = Path(__file__).parents[1] / "docs"
OUT, PAGE = DOCS / "out" / "hold.json", DOCS / "hold-the-norm.md"
BUDGETS = {"gpt": (GPT["desk"], 40), "vit": (VIT["desk"], 120)}  # 600 steps each
TITLES = {"gpt": "GPT", "vit": "ViT"}
ARMS: dict[str, dict[str, Any]] = {
    "decay": {},
    "balance, T = 20": {"hold": "balance", "balance_steps": 20.0},
    "balance, T = 200": {"hold": "balance", "balance_steps": 200.0},
    "fixed": {"hold": "fixed"},
}
NULL = "decay again"
REACHED, CLASSES = 0.02, ("hidden", "embedding", "vector", "output", "other")


class Run:
    """One training run, whose groups can be changed before its first step."""

    def __init__(self, config: Config):
        self.config = config
        torch.manual_seed(config.seed)
        self.task = tasks.make(config)
        self.model = self.task.model(torch.Generator().manual_seed(config.seed))
        ((optimizer, self.scheduler),) = build(self.model, config.optim, config.schedule, config.steps)
        self.optimizer = cast(ScionC, optimizer)

    def steps(self) -> Iterator[int]:
        """Train, and yield the number of each step after it."""
        batches = self.task.batches()
        for step in range(1, self.config.steps + 1):
            self.optimizer.zero_grad()
            self.task.loss(self.model, next(batches)).backward()
            if self.config.clip:
                torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
            self.optimizer.step()
            self.scheduler.step()
            yield step


def ratios(baseline: Baseline, budget: int, seed: int, settings: dict[str, Any]) -> Iterator[dict[str, float]]:
    """Train one run; yield |weights|^2 over the target of each parameter after each step."""
    run = Run(baseline.configure(baseline.scionc(correct_output=True, **settings), budget, seed))
    for _ in run.steps():
        yield {
            f"{group['name']}/{name}": float(p.detach().square().sum())
            / target_norm_sq(group, run.optimizer.family, p.shape)
            for group in run.optimizer.param_groups
            for name, p in zip(group["param_names"], group["params"], strict=True)
        }


def summary(history: list[dict[str, float]]) -> dict[str, dict[str, float]]:
    """Return by class of parameter: the worst end, and the worst excursion after the target was first reached, of the norm."""
    rows: dict[str, dict[str, float]] = {}
    for name in history[0]:
        kind = next((kind for kind in CLASSES if name.startswith(kind)), "other")
        norms = [step[name] ** 0.5 for step in history]
        first = next((t for t, norm in enumerate(norms) if abs(norm - 1) < REACHED), None)
        astray = max((abs(norm - 1) for norm in norms[first:]), default=1.0) if first is not None else 1.0
        row = rows.setdefault(kind, {"least": norms[-1], "most": norms[-1], "astray": 0.0, "parameters": 0})
        row |= {"least": min(row["least"], norms[-1]), "most": max(row["most"], norms[-1])}
        row |= {"astray": max(row["astray"], astray), "parameters": row["parameters"] + 1}
    return rows


def cost(rounds: int = 60) -> dict[str, float]:
    """Return the time of a ScionC step on hidden matrices over that of open-loop decay in the same round: medians of rounds.

    Each round starts with another way, so that none always follows the same one. Decay is measured twice: how far its ratio is from 1
    says how well the others are known.
    """
    shapes = [(768, 768), (2304, 768), (3072, 768), (768, 3072)]
    ways = {
        "decay": {},
        NULL: {},
        "balance": {"hold": "balance"},
        "fixed": {"hold": "fixed"},
        "cautious": {"cautious": True},
    }
    steppers = {
        way: ScionC(bench.parameters(shapes), lr=0.01, lmo="spectral", polar_steps=5, **settings)
        for way, settings in ways.items()
    }
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    order = list(ways)
    for _ in range(rounds):
        order.append(order.pop(0))
        for way in order:
            seconds[way].append(bench.wall_seconds(steppers[way].step))
    both = [statistics.mean(pair) for pair in zip(seconds["decay"], seconds[NULL], strict=True)]
    return {
        way: statistics.median(
            own / plain for own, plain in zip(seconds[way], seconds["decay"] if way == NULL else both, strict=True)
        )
        for way in list(ways)[1:]
    }


def table(measured: dict[str, Any]) -> str:
    """Return the page's table: by task, way and role, how far norms end from their target and stray from it."""
    cases: dict[tuple[str, str, str], list[dict[str, Any]]] = {}
    for row in measured["rows"]:
        cases.setdefault((row["task"], row["hold"], row["role"]), []).append(row)
    cells = []
    for (task, hold, role), own in cases.items():
        least, most = min(row["least"] for row in own), max(row["most"] for row in own)
        # What never reached its target, or starts at it by chance, has no excursion to speak of in open loop.
        astray = "" if hold == "decay" else f"{100 * max(row['astray'] for row in own):.2g} %"
        end = f"{least:.3f} to {most:.3f}" if most - least >= 5e-4 else f"{least:.4f}"
        cells.append([TITLES[task], hold, role, own[0]["parameters"], end, astray])
    columns = ["run", "hold", "role", "parameters", "norm / target at the end", "largest deviation afterwards"]
    seeds = len({row["seed"] for row in measured["rows"]})
    names = {NULL: "decay measured a second time, as a control,"}
    costs = ", ".join(f"{names.get(way, way)} {ratio:.3f}" for way, ratio in measured["cost"].items())
    return (
        f"{bench.markdown_table(columns, cells, left=(0, 1, 2, 4))}\n\n"
        f"{seeds} seeds each, 600 steps, on two cores with {measured['machine']} products. Step time of ScionC on the four hidden "
        f"matrices of a GPT-124M layer, over that of open-loop decay: {costs}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--tasks", nargs="+", default=list(BUDGETS), choices=list(BUDGETS))
    parser.add_argument("--arms", nargs="+", default=list(ARMS), choices=list(ARMS))
    parser.add_argument(
        "--cost-only",
        action="store_true",
        help="measure only the cost of a step, and keep the runs that were made before",
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = json.loads(OUT.read_text(encoding="utf-8"))["rows"] if options.cost_only else []
    for task in () if options.cost_only else options.tasks:
        for arm in options.arms:
            for seed in range(options.seeds):
                for kind, row in summary(list(ratios(*BUDGETS[task], seed, ARMS[arm]))).items():
                    rows.append({"task": task, "hold": arm, "seed": seed, "role": kind} | row)
                    print(json.dumps(rows[-1]), flush=True)
    torch.set_num_threads(2)
    products = "native bf16" if machine.native_bf16() else "fp32"
    measured = {"machine": products, "cost": cost(), "rows": rows}
    OUT.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
    fill(PAGE, "measured", table(measured))


if __name__ == "__main__":
    main()
