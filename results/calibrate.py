"""How the baselines of the desk experiments were chosen: short sweeps with one seed, kept in calibration.json.

.venv/bin/python results/calibrate.py      (half an hour of one core; docs/paper/calibration.md shows what came out)
"""

from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from steadynorm.files import write_json
from steadynorm.lab import origin
from steadynorm.lab.paper.baselines import GPT, VIT, Baseline
from steadynorm.lab.train.config import Config
from steadynorm.lab.train.loop import train

HERE = Path(__file__).parent
ADAM = [(lr, decay) for lr in (0.002, 0.005, 0.01) for decay in (0.1, 0.5, 2.0)]
SWEEPS: list[tuple[str, str, int, list[dict[str, Any]]]] = [
    ("vit", "scionc", 450, [{"lr": lr, "eta": eta} for lr in (0.005, 0.01, 0.02, 0.04) for eta in (0.005, 0.015)]),
    ("vit", "scionc", 450, [{"lr": 0.01, "eta": 0.0025}, {"lr": 0.01, "eta": 0.005, "output_lr": 0.1},
                            {"lr": 0.01, "eta": 0.005, "output_lr": 0.6}, {"lr": 0.007, "eta": 0.0025, "output_lr": 0.2}]),
    ("vit", "adamw", 450, [{"lr": lr, "weight_decay": decay} for lr, decay in ADAM]),
    ("vit", "adamw", 450, [{"lr": lr, "weight_decay": decay} for lr in (0.0005, 0.001) for decay in (0.5, 4.0)]),
    ("vit", "scionc", 1500, [{"lr": 0.01, "eta": eta} for eta in (0.0025, 0.00375, 0.005, 0.01)]),
    ("vit", "scion", 1500, [{"lr": 0.01, "eta": eta} for eta in (0.00125, 0.0025, 0.005)]),
    ("vit", "adamw", 1500, [{"lr": lr, "weight_decay": d} for lr, d in ((0.002, 0.5), (0.004, 0.5), (0.002, 2.0))]),
    ("vit", "adamc", 1500, [{"lr": 0.002, "weight_decay": 1.0}]),
    ("vit", "lionc", 1500, [{"lr": 0.0004, "weight_decay": 2.5}]),
    ("gpt", "scionc", 450, [{"lr": lr, "eta": eta} for lr in (0.01, 0.02, 0.04) for eta in (0.005, 0.015)]),
    ("gpt", "scionc", 1500, [{"lr": 0.02, "eta": eta} for eta in (0.003, 0.006)]),
    ("gpt", "scion", 1500, [{"lr": 0.02, "eta": eta} for eta in (0.003, 0.006)]),
    ("gpt", "muon", 450, [{"lr": lr, "eta": 0.004, "output_lr": other} for lr in (0.02, 0.03, 0.05) for other in (0.01, 0.02, 0.03)]),
    ("gpt", "scionc, nesterov", 450, [{"lr": lr, "eta": 0.004, "output_lr": other} for lr in (0.02, 0.03) for other in (0.3, 0.6)]),
]  # fmt: skip


def config(baseline: Baseline, name: str, options: dict[str, Any]) -> Config:
    if "eta" not in options:
        more = {"betas": (0.9, 0.99)} if name == "lionc" else {}
        return baseline.adam(name, **options, **more)
    swept = replace(
        baseline, lr=options["lr"], decay=options["eta"] / options["lr"], output_lr=options.get("output_lr", 0.3)
    )
    if name == "muon":
        return replace(swept, muon_lr=swept.lr, muon_output_lr=swept.output_lr).muon()
    if name == "scionc, nesterov":
        return swept.nesterov()
    return swept.scion() if name == "scion" else swept.scionc()


def main() -> None:
    torch.set_num_threads(1)
    rows = []
    for task, name, steps, sweep in SWEEPS:
        baseline = {"vit": VIT, "gpt": GPT}[task]["desk"]
        for options in sweep:
            with TemporaryDirectory() as folder:
                every = {"steps": steps, "eval_every": steps, "monitor_every": steps}
                final = train(replace(config(baseline, name, options), out=Path(folder), **every), quiet=True).final
            rounded = {key: round(value, 4) for key, value in final.items()}
            rows.append({"task": task, "optimizer": name, "steps": steps, **options, **rounded})
            print(rows[-1], flush=True)
            write_json(HERE / "calibration.json", {**origin.describe(), "runs": rows})


if __name__ == "__main__":
    main()
