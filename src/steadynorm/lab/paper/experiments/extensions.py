"""Ours: which decay reaches the norm that is asked for, the forecast against real training, and alignment by layer."""

import fnmatch
import functools
import math
from collections.abc import Mapping
from statistics import fmean

import numpy as np
import torch

from steadynorm import lmo, theory
from steadynorm.groups.builder import param_groups
from steadynorm.lab.models import SimpleViT, ViTConfig
from steadynorm.lab.paper.baselines import ALPHA, VIT, Baseline, short
from steadynorm.lab.paper.experiment import MissingRunsError, Outcome, claim
from steadynorm.lab.paper.experiments.norm_stability import LONG_BUDGET, NEGLIGIBLE_PERCENT
from steadynorm.lab.paper.metrics import ACCURACY, END, Measure, log_ratio, mean_over
from steadynorm.lab.paper.plots import curves, measured, numbers, round_to
from steadynorm.lab.paper.slim_records import OUTPUTS
from steadynorm.lab.paper.statistics import Finding, at_least, at_most, difference, estimate, every, within
from steadynorm.lab.paper.trained import Runs, TrainedExperiment
from steadynorm.lab.train.config import Config
from steadynorm.records import Run
from steadynorm.report import page

# The asked norm

SMALL = 0.02
SECOND_HALF = (0.5, 0.9)  # but the last tenth, where lr has left nothing to move the norm


def _target_arms(baseline: Baseline) -> dict[str, Config]:
    """At both alphas the same effective lr and the same target; the smaller alpha is where the linear formula is off."""
    root = theory.effective_lr(1.0, ALPHA) / theory.effective_lr(1.0, SMALL)
    small = {"alpha": SMALL, "lr": short(baseline.lr * root), "output_alpha": ALPHA}
    return {
        "linear, alpha 0.1": baseline.scionc(),
        "exact, alpha 0.1": baseline.scionc(overlap="exact"),
        "linear, alpha 0.02": baseline.scionc(**small),
        "exact, alpha 0.02": baseline.scionc(overlap="exact", **small),
    }


@functools.cache
def unit_norms(model: ViTConfig) -> Mapping[str, float]:
    """U^2 of every corrected matrix of a ViT, by name."""
    with torch.device("meta"):
        groups = param_groups(SimpleViT(model))
    return {
        name: lmo.get(group["lmo"]).update_norm_sq(p.shape, blocks=group["blocks"])
        for group in groups
        for name, p in group["params"]
        if group["weight_decay"] is None and p.ndim > 1
    }


def asked_norm(run: Run) -> float:
    """The norm of all matrices but the output that C^2 asks for: |theta|^2 = C^2 U^2 of each."""
    units = unit_norms(ViTConfig(**run.config["task"]["model"]))
    return math.sqrt(run.config["optim"]["steady_norm_sq"] * sum(units.values()))


def off_target(run: Run) -> float:
    """100 ln(measured / asked)."""
    return 100 * math.log(mean_over("matrix_norm", SECOND_HALF)(run) / asked_norm(run))


def distance(run: Run) -> float:
    """100 |ln(measured / asked)|."""
    return abs(off_target(run))


def _target(runs: Runs) -> Outcome:
    def closer(alpha: float) -> Finding:
        exact, linear = (runs.values(distance, f"{name}, alpha {alpha:g}") for name in ("exact", "linear"))
        return at_most(difference(exact, linear), 0.0, "distance from the asked norm, exact - linear,", " %")

    claims = [
        claim(
            f"The exact decay brings the hidden matrices closer to the asked norm than the linear formula at alpha {a:g}",
            lambda a=a: closer(a),
        )
        for a in (ALPHA, SMALL)
    ]
    claims.append(claim(
        f"Where only alpha differs, the exact decay gives the hidden matrices the same norm (within {2 * NEGLIGIBLE_PERCENT:g} %)",
        lambda: within(
            difference(runs.values(off_target, f"exact, alpha {SMALL:g}"), runs.values(off_target, f"exact, alpha {ALPHA:g}")),
            2 * NEGLIGIBLE_PERCENT, "norm, alpha 0.02 / 0.1 - 1,", " %",
        ),
    ))  # fmt: skip
    arms = runs.plan.arms
    off_forecast = log_ratio("matrix_norm", "matrix_forecast", SECOND_HALF)
    claims.append(claim(
        f"Why: these runs start above the asked norm and have not settled yet. Each is where its forecast, which knows the "
        f"start, puts it (within {2 * NEGLIGIBLE_PERCENT:g} %)",
        lambda: every([
            within(estimate(runs.values(off_forecast, arm)), 2 * NEGLIGIBLE_PERCENT, f"100 ln(measured / forecast), {arm},", " %")
            for arm in arms
        ]),
    ))  # fmt: skip
    measures: dict[str, Measure] = {
        "100 ln(measured / asked norm)": off_target,
        "100 ln(forecast / asked norm)": lambda run: off_target(run) - off_forecast(run),
        "100 ln(measured / forecast norm)": off_forecast,
        "100 ln(measured / forecast norm), biases": log_ratio("vector_norm", "vector_forecast", SECOND_HALF),
        "asked norm": asked_norm,
        "accuracy": ACCURACY,
    }
    blocks: list[page.Block] = [
        _over_asked(runs),
        curves(runs, "matrix_norm", arms, dashed="matrix_forecast", zero=True, caption="Dashed: forecast."),
        curves(runs, "weight_decay", arms),
        measured(runs, measures, arms),
    ]
    return Outcome(blocks, claims, numbers(runs, measures, arms))


def _over_asked(runs: Runs) -> page.Plot:
    series = []
    for arm in runs.plan.arms:
        try:
            found = runs.of(arm)
        except MissingRunsError:
            continue
        ratio = np.mean([run.columns["matrix_norm"] / asked_norm(run) for run in found], axis=0)
        seen = np.isfinite(ratio)
        series.append(page.Series("measured / asked", found[0].steps[seen], ratio[seen], toggle=arm))
    return page.Plot(
        "Measured norm / asked norm",
        "step",
        "ratio",
        series,
        "All matrices but the output. 1: the norm is where it was put. Mean over seeds.",
    )


EXACT_TARGET = TrainedExperiment(
    "fig-exact-target",
    "Linear against exact decay: which reaches the asked norm in real training?",
    "ours; the paper takes updates to overlap as their inputs do, and eta as small.",
    VIT, _target_arms, _target,
    ("matrix_norm", "matrix_forecast", "vector_norm", "vector_forecast", "weight_decay"), desk_budgets=LONG_BUDGET,
)  # fmt: skip


# The forecast

VECTOR_EXCESS = "excess_alignment/vector"
FORECAST = ("Scion", "ScionC", "ScionC, Nesterov", "AdamW", "AdamC", "LionC")


def _forecast_arms(baseline: Baseline) -> dict[str, Config]:
    return {
        "Scion": baseline.scion(),
        "ScionC": baseline.scionc(),
        "ScionC, Nesterov": baseline.scionc(nesterov=True),
        "AdamW": baseline.adam("adamw"),
        "AdamC": baseline.adamc(),
        "LionC": baseline.adam(
            "lionc", lr=0.2 * baseline.adam_lr, weight_decay=5 * baseline.adam_decay, betas=(0.9, 0.99)
        ),
    }


def _forecast(runs: Runs) -> Outcome:
    off: Measure = log_ratio("matrix_norm", "matrix_forecast")
    off_vectors: Measure = log_ratio("vector_norm", "vector_forecast")
    scion = FORECAST[:3]
    claims = [
        claim(
            f"{arm}: the forecast meets the measured norm of the hidden matrices at the end (within {2 * NEGLIGIBLE_PERCENT:g} %)",
            lambda arm=arm: within(
                estimate(runs.values(off, arm)), 2 * NEGLIGIBLE_PERCENT, "100 ln(measured / forecast)", " %"
            ),
        )
        for arm in FORECAST
    ]
    claims.append(claim(
        f"Scion's biases: it also meets theirs (within {2 * NEGLIGIBLE_PERCENT:g} %)",
        lambda: every([
            within(estimate(runs.values(off_vectors, arm)), 2 * NEGLIGIBLE_PERCENT, f"100 ln(measured / forecast), {arm},", " %")
            for arm in scion
        ]),
    ))  # fmt: skip
    claims.append(claim(
        "Why not theirs: a bias has its place by the loss; updates of so large a norm step over it, and the next ones point "
        "back: in the first fifth of the run biases align with their updates (excess above 0)",
        lambda: every([
            at_least(estimate(runs.values(mean_over(VECTOR_EXCESS, (0.0, 0.2)), arm)), 0.0, f"excess, {arm},")
            for arm in scion
        ]),
    ))  # fmt: skip
    measures = {
        "100 ln(measured / forecast norm) at the end, matrices": off,
        "100 ln(measured / forecast norm) at the end, biases and gains": off_vectors,
        "norm of the matrices at the end": mean_over("matrix_norm", END),
        "forecast norm of the matrices at the end": mean_over("matrix_forecast", END),
        "accuracy": ACCURACY,
    }
    blocks: list[page.Block] = [
        curves(runs, "matrix_norm", FORECAST, dashed="matrix_forecast", log_y=True, label="Measured norm and forecast, matrices",
               caption="Dashed: computed from the schedule alone, as if gradients were independent of the weights."),
        curves(runs, "vector_norm", FORECAST, dashed="vector_forecast", log_y=True, label="Biases and gains"),
        curves(runs, VECTOR_EXCESS, scion, label="Excess alignment of biases", caption="Above 0 updates pull biases inward, beyond what momentum explains."),
        measured(runs, measures, FORECAST),
    ]  # fmt: skip
    return Outcome(blocks, claims, numbers(runs, measures, FORECAST))


FORECASTS = TrainedExperiment(
    "fig-forecast",
    "Forecast norms against measured ones",
    "ours: the paper predicts the steady state alone.",
    VIT, _forecast_arms, _forecast,
    ("matrix_norm", "matrix_forecast", "vector_norm", "vector_forecast", VECTOR_EXCESS), desk_budgets=LONG_BUDGET,
)  # fmt: skip


# Alignment

CLEAR = 0.1  # a cosine beyond which a layer is not independent of its updates


def _alignment_arms(baseline: Baseline) -> dict[str, Config]:
    return {"ScionC": baseline.scionc(), "Scion": baseline.scion()}


def excess(pattern: str) -> Measure:
    """Excess alignment, mean over the second half of the run and over the layers whose names match."""

    def measure(run: Run) -> float:
        late = run.steps >= 0.5 * run.config["steps"]
        seen = [each["excess"][late] for name, each in run.layers.items() if fnmatch.fnmatch(name, pattern)]
        return fmean(float(np.nanmean(values)) for values in seen if np.isfinite(values).any())

    return measure


def _alignment(runs: Runs) -> Outcome:
    def largest_hidden(run: Run) -> float:
        return max(abs(excess(name)(run)) for name in matrices(run))

    claims = [
        claim(
            f"Hidden matrices do not align with their updates beyond momentum (each within {CLEAR:g})",
            lambda: at_most(estimate(runs.values(largest_hidden, "ScionC")), CLEAR, "largest |excess| of a hidden matrix"),
        ),
        claim(
            f"The output layer's updates push it outward (excess below -{CLEAR:g})",
            lambda: at_most(estimate(runs.values(excess(OUTPUTS[0]), "ScionC")), -CLEAR, "excess of the output layer"),
        ),
        claim(
            "The output layer aligns with its updates more than any hidden matrix",
            lambda: at_least(
                difference(
                    [-each for each in runs.values(excess(OUTPUTS[0]), "ScionC")], runs.values(largest_hidden, "ScionC")
                ), 0.0, "|excess| of the output - largest of the hidden ones",
            ),
        ),
    ]  # fmt: skip
    blocks: list[page.Block] = []
    for arm in runs.plan.arms:
        try:
            found = runs.of(arm)
        except MissingRunsError:
            continue
        blocks.append(_map(found, arm))
    summary = {}
    for arm in runs.plan.arms:
        try:
            found = runs.of(arm)
        except MissingRunsError:
            continue
        summary[arm] = {
            name: round_to(fmean(excess(name)(run) for run in found)) for name in (*matrices(found[0]), OUTPUTS[0])
        }
    rows = [(name, *(summary[arm].get(name) for arm in summary)) for name in next(iter(summary.values()), {})]
    blocks.append(
        page.Table("Excess alignment by layer", ("layer", *summary), rows, "Mean over the second half and seeds.")
    )
    return Outcome(blocks, claims, {"excess": summary})


def matrices(run: Run) -> list[str]:
    """Names of the hidden matrices: what is neither a bias nor the output."""
    return [name for name in run.layers if name.endswith("weight") and name not in OUTPUTS]


def _map(found: list[Run], arm: str) -> page.HeatMap:
    names = [*matrices(found[0]), OUTPUTS[0]]
    z = np.array([np.mean([run.layers[name]["excess"] for run in found], axis=0) for name in names])
    seen = np.isfinite(z).any(axis=0)
    caption = "cos(weights, update) less what momentum alone makes of it. Mean over seeds."
    return page.HeatMap(f"Excess alignment · {arm}", "step", "cos", found[0].steps[seen], names, z[:, seen], caption, 0.0,
                        -0.5, 0.5, toggle=arm)  # fmt: skip


ALIGNMENT = TrainedExperiment(
    "fig-alignment",
    "Excess alignment by layer",
    "ours; the paper argues that all layers but the output are independent of their updates.",
    VIT, _alignment_arms, _alignment, ("excess_alignment",), ("excess",), desk_budgets=LONG_BUDGET,
)  # fmt: skip
