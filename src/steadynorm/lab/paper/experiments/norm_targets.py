"""The norm that a target asks of the hidden matrices, and how far a run is from it."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch

from steadynorm import lmo
from steadynorm.groups.builder import param_groups
from steadynorm.lab.models import GPT, GPTConfig, SimpleViT, ViTConfig
from steadynorm.lab.paper.metrics import END, Metric, mean_over
from steadynorm.lab.paper.runs import Runs
from steadynorm.records import Run
from steadynorm.report import page


@functools.cache
def update_norm_sq(model: ViTConfig | GPTConfig) -> float:
    """Return the sum of U^2 over the matrices of a model whose decay ScionC corrects."""
    with torch.device("meta"):
        groups = param_groups(SimpleViT(model) if isinstance(model, ViTConfig) else GPT(model))
    return sum(
        lmo.get(group["lmo"]).update_norm_sq(p.shape, blocks=group["blocks"])
        for group in groups
        for _, p in group["params"]
        if group["weight_decay"] is None and p.ndim > 1
    )


def asked_norm(run: Run) -> float:
    """Return the norm of all matrices but the output that C^2 asks for: |theta|^2 = C^2 U^2 of each."""
    task = run.config["task"]
    model = (ViTConfig if task["kind"] == "vit" else GPTConfig)(**task["model"])
    return math.sqrt(run.config["optim"]["steady_norm_sq"] * update_norm_sq(model))


@functools.cache
def off_target(part: tuple[float, float] = END) -> Metric:
    """Return the metric: 100 ln(measured / asked norm), measured over this part of the run."""
    return lambda run: 100 * math.log(mean_over("matrix_norm", part)(run) / asked_norm(run))


def plot_over_asked(runs: Runs, arms: Sequence[str] = ()) -> page.Plot:
    """Plot measured / asked norm over the steps, of these arms (default: all)."""
    series = []
    for arm in (arm for arm in runs.complete_arms() if not arms or arm in arms):
        seeds = runs.of(arm)
        ratio = np.mean([run.columns["matrix_norm"] / asked_norm(run) for run in seeds], axis=0)
        measured = np.isfinite(ratio)
        series.append(page.Series("measured / asked", seeds[0].steps[measured], ratio[measured], toggle=arm))
    caption = "All matrices but the output. 1: the norm is where it was put. Mean over seeds."
    return page.Plot("Measured norm / asked norm", "step", "ratio", series, caption)
