"""`steadynorm demo`: constant against corrected decay on random gradients, measured and forecast, as one page."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np

from steadynorm import predict, progress, report, simulate
from steadynorm.paper.experiment import record

LR, DECAY, ALPHA, SEEDS = 0.05, 0.1, 0.1, 8
PLAN = predict.Plan(steps=3000, warmup=150)  # 20 half-lives
SHAPES: Mapping[str, tuple[int, ...]] = {"vector, 512": (512,), "square, 32 x 32": (32, 32), "1:4, 16 x 64": (16, 64)}


class Row(NamedTuple):
    """How one parameter fared: norms |theta| / |u|."""

    parameter: str
    decay: str
    middle: float
    end: float
    forecast_end: float


def run(folder: Path) -> tuple[list[Row], Path]:
    """Simulate every shape under both decays; write their records and the page."""
    ratios, cases = PLAN.ratios(), {}
    for name, shape in SHAPES.items():
        setting = predict.Setting(LR, ALPHA, shape, weight_decay=DECAY)
        ahead, unit = predict.forecast(setting, PLAN), setting.update_norm_sq
        for decay, series, norms in (
            ("constant", DECAY, ahead.constant),
            ("corrected", DECAY * ratios, ahead.corrected),
        ):
            system = simulate.System(setting.entry.name, shape, LR * ratios, series, ALPHA)
            cases[name, decay] = (system, norms**2 / unit)
    with progress.bar(len(cases) * PLAN.steps, "simulating") as tell:
        seen = simulate.run(
            [system for system, _ in cases.values()], PLAN.steps, seeds=SEEDS, records=300, progress=tell
        )
    rows, folders = [], []
    for ((name, decay), (_, forecast)), trajectory in zip(cases.items(), seen, strict=True):
        label = f"{name}, {decay} decay"
        where = folder / label.replace(", ", "-").replace(" ", "").replace(":", "to")
        config = {
            "parameter": name,
            "decay": decay,
            "lr": LR,
            "alpha": ALPHA,
            "steps": PLAN.steps,
            "warmup": PLAN.warmup,
        }
        record(where, label, config, trajectory, forecast)
        mean = np.sqrt(trajectory.mean())
        middle = float(mean[len(mean) // 2])
        rows.append(Row(name, decay, middle, float(mean[-1]), math.sqrt(forecast[-1])))
        folders.append(where)
    page = report.report(folders, folder / "report.html", title="steadynorm demo: the norm stays where you put it")
    return rows, page
