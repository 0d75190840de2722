"""Measure what it costs the small ViT to hold its biases at a norm, beside its matrices.

python -m benchmarks.held_biases [--seeds K]

The table goes into docs/hold-the-norm.md. The runs are those of fig-hold-vit, which holds every parameter but the output
layer's weight, and the same with biases left to corrected decay. Runs of one seed have the same data in the same order.
"""

import argparse
import json
from typing import Any

import torch

from benchmarks.hold import DOCS, PAGE, Run
from benchmarks.pages import fill
from steadynorm import machine
from steadynorm.lab import bench
from steadynorm.lab.paper.baselines import VIT
from steadynorm.lab.paper.statistics import difference, estimate, format_estimate

OUT = DOCS / "out" / "held_biases.json"
BASELINE, BUDGET = VIT["desk"], 300  # 1500 steps
DECAY = "decay"
ARMS: dict[str, tuple[str, bool]] = {  # hold, and whether biases are held as well
    DECAY: ("decay", False),
    "balance, T = 20": ("balance", True),
    "balance, T = 20, but not of biases": ("balance", False),
    "fixed": ("fixed", True),
    "fixed, but not of biases": ("fixed", False),
}


def accuracy(hold: str, holds_biases: bool, seed: int) -> float:
    """Train one run and return its accuracy in percent on all test images."""
    run = Run(BASELINE.configure(BASELINE.scionc(hold=hold), BUDGET, seed))
    for group in run.optimizer.param_groups:
        if group["lmo"] == "bias" and not holds_biases:
            group["hold"] = "decay"
    for _ in run.steps():
        pass
    run.model.eval()
    with torch.no_grad():
        sums = run.task.evaluate(run.model, torch.device("cpu"))
    return 100 * float(sums["val_accuracy"] / sums["count"])


def table(measured: dict[str, Any]) -> str:
    """Return the page's table: the accuracy of every way, and by how much it differs from corrected decay, seed by seed."""
    by_arm: dict[str, list[float]] = measured["accuracy"]
    rows = []
    for arm, values in by_arm.items():
        gap = "" if arm == DECAY else format_estimate(difference(values, by_arm[DECAY]))
        rows.append([arm, f"{estimate(values).value:.2f}", gap])
    held = bench.markdown_table(["hold", "accuracy, %", "points above corrected decay"], rows, left=(0, 2))
    steps = BASELINE.steps(BUDGET)
    return f"{held}\n\n{len(by_arm[DECAY])} seeds each, {steps} steps, with {measured['machine']} products."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(1)
    measured: dict[str, list[float]] = {arm: [] for arm in ARMS}
    for seed in range(options.seeds):
        for arm, way in ARMS.items():
            measured[arm].append(accuracy(*way, seed))
            print(f"seed {seed}, {arm}: {measured[arm][-1]:.2f} %", flush=True)
    products = "native bf16" if machine.native_bf16() else "fp32"
    kept = {"machine": products, "accuracy": measured}
    OUT.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    fill(PAGE, "held biases", table(kept))


if __name__ == "__main__":
    main()
