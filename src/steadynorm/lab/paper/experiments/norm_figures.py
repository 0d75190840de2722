"""What the figures of norms share: corrected decay must halve the drift of a norm, and schedules and targets say what to expect."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from steadynorm import lmo, theory
from steadynorm.groups.builder import param_groups
from steadynorm.lab import models
from steadynorm.lab.paper.baselines import GPT, VIT
from steadynorm.lab.paper.claims import Outcomes, Test, all_of, no_worse, value
from steadynorm.lab.paper.experiment import TrainedExperiment
from steadynorm.lab.paper.metrics import (
    ACCURACY,
    BY_ACCURACY,
    END,
    LOSS,
    MIDDLE,
    NEGLIGIBLE_PERCENT,
    Metric,
    at_end,
    drift,
    growth,
    log_ratio,
    mean_over,
)
from steadynorm.lab.paper.plots import Curve, Shown, show
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.paper.statistics import Finding
from steadynorm.lab.train.config import Config
from steadynorm.records import Run
from steadynorm.report import page

STABLE = 0.5  # corrected decay must at least halve the drift that constant decay leaves
HALVED = f"a drift of {NEGLIGIBLE_PERCENT:g} % or more at least halved"
COLUMNS = ("weight_norm", "hidden_norm", "hidden_forecast", "grad_norm", "effective_lr", "weight_decay")
# At the desk, norms are watched over the longest budget because half-lives are scarce.
vit_figure = functools.partial(TrainedExperiment, baselines=VIT, columns=COLUMNS, desk_budgets=(300,))
gpt_figure = functools.partial(TrainedExperiment, baselines=GPT, columns=COLUMNS, budgets=(100,))
NORMS = ("weight_norm", "hidden_norm", "grad_norm")


def rise(run: Run) -> float:
    """Return by how many percent measured / forecast norm rises from the middle of the run to its end."""
    return growth("hidden_norm")(run) - growth("hidden_forecast")(run)


AGAINST_FORECAST: Mapping[str, Metric] = {
    "100 ln(measured / forecast norm), middle": log_ratio("hidden_norm", "hidden_forecast", MIDDLE),
    "100 ln(measured / forecast norm), end": log_ratio("hidden_norm", "hidden_forecast", END),
    "rise of measured / forecast norm, %": rise,
}


def halves_drift(key: str, corrected: str, constant: str) -> Test:
    """Return the test that a norm drifts at most half as far under corrected decay as under constant decay, seed by seed.

    Half of nothing is nothing: if neither is shown to move, constant decay must move the norm for the claim to be true.
    """
    ours, theirs = value(drift(key), corrected), value(drift(key), constant)
    halved = (STABLE * theirs - ours).at_least(0.0, f"half of {constant}'s drift - {corrected}'s,", " %")
    moves = [
        contrast.at_least(NEGLIGIBLE_PERCENT, f"drift of {arm},", " %")
        for contrast, arm in ((theirs, constant), (ours, corrected))
    ]

    def test(outcomes: Outcomes) -> Finding:
        means = [contrast.over_seeds(outcomes).value for contrast in (ours, theirs)]
        note = f"{key}: {corrected} drifts by {means[0]:.1f} %, {constant} by {means[1]:.1f} %"
        shown = [test(outcomes) for test in moves]
        premise = None if any(finding.holds for finding in shown) else shown[0].bounds[0]
        return replace(halved(outcomes), note=note, premise=premise)

    return test


def drift_claims(corrected: str, constant: str, name: str) -> dict[str, Test]:
    """Return the claims that corrected decay keeps the norm of all weights, and of the hidden ones, more stable."""
    norms = {"weight norm": "weight_norm", "hidden norm, of all layers but the output,": "hidden_norm"}
    return {
        f"{name}: the {norm} is more stable ({HALVED})": halves_drift(key, corrected, constant)
        for norm, key in norms.items()
    }


def stability_claims(corrected: str, constant: str, name: str) -> dict[str, Test]:
    """Return the claims of every figure of norms."""
    gradient = halves_drift("grad_norm", corrected, constant)
    accuracy = f"{name}: accuracy is no worse (by more than {BY_ACCURACY.margin_words})"
    return drift_claims(corrected, constant, name) | {
        f"{name}: the gradient norm is more stable ({HALVED})": gradient,
        accuracy: no_worse(BY_ACCURACY, corrected, constant),
    }


def why_it_moves(corrected: str, constant: str) -> dict[str, Test]:
    """Return the claim that not the schedule but updates that are not independent move the corrected norm."""
    text = (
        f"Ours, why: updates independent of each other would leave the hidden norm of {corrected} where it is (within {NEGLIGIBLE_PERCENT:g} %). "
        "Real ones are not: with both optimizers measured / forecast rises towards the end, as the lr falls; of the fall "
        "that constant decay brings, this hides a part"
    )
    rises = (
        value(rise, arm).at_least(0.0, f"rise of measured / forecast, {arm},", " %") for arm in (corrected, constant)
    )
    still = value(growth("hidden_forecast"), corrected).within(NEGLIGIBLE_PERCENT, "drift of the forecast", " %")
    return {text: all_of([still, *rises])}


def show_norms(runs: Runs, more: Mapping[str, Metric] | None = None, keys: Sequence[str] = NORMS) -> Shown:
    """Show the norms in these columns, accuracy and schedules of all arms side by side, and tabulate `more` metrics."""
    caption = "Dashed: the norm that updates independent of the weights would give."
    curves = [
        *(Curve(key, log_y=key == "grad_norm") for key in keys),
        Curve("hidden_norm", dashed="hidden_forecast", label="Against the forecast", zero=True, caption=caption),
        *map(Curve, ("val_accuracy", "effective_lr", "weight_decay")),
    ]
    metrics = {"accuracy": ACCURACY, "val_loss": LOSS, **norm_metrics(keys), **(more or {})}
    blocks, summary = show(runs, curves, metrics)
    return [*blocks, *expected_drifts(runs)], summary


def norm_metrics(keys: Sequence[str]) -> dict[str, Metric]:
    """Return the drift of these norms and their value at the end, by name."""
    return {
        **{f"drift of {key}, %": drift(key) for key in keys},
        **{f"{key} at the end": at_end(key) for key in keys},
    }


@functools.cache
def forecast_drift(config: Config) -> float | None:
    """Return the growth, in percent, of the norm that the schedule of Scion or ScionC leads to; None for other optimizers."""
    optim, schedule = config.optim, config.schedule
    if optim.name not in ("scion", "scionc") or schedule.momentum != "constant":
        return None
    ratio = schedule.plan(config.steps).ratios()
    lr, end = optim.lr * ratio, schedule.steady_norm_sq_end
    target = optim.steady_norm_sq if end is None else ratio * optim.steady_norm_sq + (1 - ratio) * end
    gain = theory.momentum_gain(optim.alpha, nesterov=optim.nesterov)
    corrected = gain / (2 * target) * lr
    decay = optim.weight_decay if optim.name == "scion" and optim.weight_decay is not None else corrected
    norm = np.sqrt(theory.forecast(lr, decay, optim.alpha, nesterov=optim.nesterov, start=optim.steady_norm_sq))
    middle, last = (norm[round(a * config.steps) : round(b * config.steps)].mean() for a, b in (MIDDLE, END))
    return 100 * math.log(last / middle)


def expected_drifts(runs: Runs) -> list[page.Table]:
    """Tabulate the drifts that the schedules lead to, here and at the paper's scale: where they differ, verdicts may."""
    desk_configs = {arm: config for (arm, _, _), config in runs.plan.configs.items()}
    rows: list[tuple[page.Cell, ...]] = []
    for arm in runs.complete_arms():
        drifts = [forecast_drift(configs[arm]) for configs in (desk_configs, runs.plan.paper_configs) if arm in configs]
        if None not in drifts:
            rows.append((arm, *drifts))
    header = ("", "here", "at the paper's scale")
    caption = (
        "By the linear kernel, started at the first target. The paper's runs have some 130 half-lives, ours a few."
    )
    return [page.Table("Forecast of 100 ln(norm at the end / in the middle), %", header, rows, caption)] if rows else []


# The norm that a target asks of the hidden matrices


@functools.cache
def update_norm_sq(model: models.ViTConfig | models.GPTConfig) -> float:
    """Return the sum of U^2 over the matrices of a model whose decay ScionC corrects."""
    with torch.device("meta"):
        groups = param_groups(models.SimpleViT(model) if isinstance(model, models.ViTConfig) else models.GPT(model))
    return sum(
        lmo.get(group["lmo"]).update_norm_sq(p.shape, blocks=group["blocks"])
        for group in groups
        for _, p in group["params"]
        if group["weight_decay"] is None and p.ndim > 1
    )


def asked_norm(run: Run) -> float:
    """Return the norm of all matrices but the output that C^2 asks for: |theta|^2 = C^2 U^2 of each."""
    task = run.config["task"]
    model = (models.ViTConfig if task["kind"] == "vit" else models.GPTConfig)(**task["model"])
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
