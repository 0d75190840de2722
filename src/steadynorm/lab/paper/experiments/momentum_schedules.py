"""fig-momentum-*: the effective learning rate can be decayed by alpha instead of lr."""

from collections.abc import Mapping
from functools import partial
from typing import Any

from steadynorm import theory
from steadynorm.lab.paper.baselines import ALPHA, VIT, Baseline, short
from steadynorm.lab.paper.claims import All, Claim, difference, value
from steadynorm.lab.paper.experiment import TrainedExperiment
from steadynorm.lab.paper.experiments.norm_figures import COLUMNS, LONG_BUDGET, no_worse
from steadynorm.lab.paper.metrics import (
    ACCURACY,
    ACCURACY_TOLERANCE,
    END,
    LOSS,
    NEGLIGIBLE_PERCENT,
    Metric,
    log_of,
    mean_over,
    swing,
)
from steadynorm.lab.paper.plots import curves, numbers, table_of_metrics
from steadynorm.lab.paper.runs import RunPlan, Runs
from steadynorm.lab.train.config import Config
from steadynorm.report import page

LIMITS = (0.2, 0.5, 1.0)
COSINE = "cosine lr"
SHOWN = ("val_accuracy", "weight_norm", "hidden_norm", "grad_norm", "effective_lr", "alpha", "lr", "weight_decay")
SCHEDULED = (*COLUMNS, "alpha", "lr")


def _show(runs: Runs, more: Mapping[str, Metric] | None = None) -> tuple[list[page.Block], dict[str, Any]]:
    metrics = {
        "accuracy": ACCURACY,
        "val_loss": LOSS,
        "weight norm at the end": mean_over("weight_norm", END),
        "hidden norm at the end": mean_over("hidden_norm", END),
        **(more or {}),
    }
    plots = [curves(runs, key, log_y=key == "grad_norm") for key in SHOWN]
    return [*plots, table_of_metrics(runs, metrics)], numbers(runs, metrics)


# Matched by the effective lr


def matched_arm(limit: float) -> str:
    """Return the name of the arm whose alpha ends at `limit`."""
    return f"alpha 0.1 to {limit:g}"


def _matched_arms(baseline: Baseline) -> dict[str, Config]:
    arms = {COSINE: baseline.scionc()}
    return arms | {matched_arm(limit): baseline.scionc(momentum="matched", alpha_end=limit) for limit in LIMITS}


def _matched_claims(_: RunPlan) -> list[Claim]:
    norm = log_of(mean_over("weight_norm", END))
    return [
        Claim(
            "Matched momentum reaches the accuracy of the cosine up to alpha_max = 0.5 "
            f"(to {ACCURACY_TOLERANCE:g} point)",
            All(no_worse(matched_arm(limit), COSINE) for limit in (0.2, 0.5)),
        ),
        Claim(
            f"Matched momentum also reaches it with alpha_max = 1 (to {ACCURACY_TOLERANCE:g} point)",
            no_worse(matched_arm(1.0), COSINE),
        ),
        Claim(
            f"The weight norm is that of the cosine up to alpha_max = 0.5 (within {2 * NEGLIGIBLE_PERCENT:g} %)",
            All(
                difference(norm, matched_arm(limit), COSINE).within(
                    2 * NEGLIGIBLE_PERCENT, f"norm, alpha to {limit:g} / cosine - 1,", " %"
                )
                for limit in (0.2, 0.5)
            ),
        ),
    ]


MOMENTUM_SCHEDULE = TrainedExperiment(
    "fig-momentum-schedule",
    "Momentum scheduled so that the effective lr follows a cosine",
    "the models converge to the same accuracy up to alpha_max = 0.5.",
    VIT, _matched_arms, _matched_claims, _show, SCHEDULED, desk_budgets=LONG_BUDGET,
)  # fmt: skip


# Matched by gamma'

SLOW_ALPHA = 0.02


def prime_arm(start: float, limit: float) -> str:
    """Return the name of the arm whose gamma' is matched by alpha between these values."""
    return f"gamma' matched, alpha {start:g} to {limit:g}"


ERRONEOUS, SLOW, SLOW_ERRONEOUS = prime_arm(ALPHA, 1.0), "alpha 0.02, cosine lr", prime_arm(SLOW_ALPHA, 1.0)


def _prime_matched(baseline: Baseline, start: float, **more: float) -> dict[str, Config]:
    """gamma' = gamma (2 - alpha)/alpha follows the cosine, by alpha up to each limit and by lr from there."""
    return {
        prime_arm(start, limit): baseline.scionc(momentum="matched-gamma-prime", alpha_end=limit, **more)
        for limit in LIMITS
    }


def _prime_arms(baseline: Baseline) -> dict[str, Config]:
    return {COSINE: baseline.scionc(), **_prime_matched(baseline, ALPHA)}


def _slow_prime_arms(baseline: Baseline) -> dict[str, Config]:
    """Match gamma' between the two alphas as well: the effective lr of 0.02 is too low."""
    lr = short(baseline.lr * theory.momentum_gain(ALPHA) / theory.momentum_gain(SLOW_ALPHA))
    slow = {"lr": lr, "alpha": SLOW_ALPHA, "output_alpha": ALPHA}
    return {
        COSINE: baseline.scionc(),
        SLOW: baseline.scionc(**slow),
        **_prime_matched(baseline, SLOW_ALPHA, **slow),
    }


def _prime_claims(_: RunPlan) -> list[Claim]:
    halfway = mean_over("val_accuracy", (0.45, 0.7), 100.0)
    return [
        Claim(
            "The erroneous match delays the decay of the effective lr: accuracy is lower halfway",
            difference(halfway, COSINE, ERRONEOUS).at_least(0.0, "accuracy halfway, cosine - erroneous,", " points"),
        ),
        Claim(
            f"At the very end its accuracy is about the same (within {ACCURACY_TOLERANCE:g} point)",
            difference(ACCURACY, ERRONEOUS, COSINE).within(
                ACCURACY_TOLERANCE, f"accuracy, {ERRONEOUS} - {COSINE},", " points"
            ),
        ),
    ]


def _slow_prime_claims(_: RunPlan) -> list[Claim]:
    return [
        Claim(
            "From alpha 0.02, matched to 0.1 by gamma', the effective lr is too low and the model underperforms",
            difference(ACCURACY, COSINE, SLOW).at_least(0.0, "accuracy, alpha 0.1 - alpha 0.02,", " points"),
        ),
        Claim(
            "From alpha 0.02 the delayed decay is beneficial",
            difference(ACCURACY, SLOW_ERRONEOUS, SLOW).at_least(0.0, "accuracy, delayed - cosine,", " points"),
        ),
    ]


GAMMA_PRIME = TrainedExperiment(
    "fig-momentum-gamma-prime",
    "The erroneous match of momentum, from alpha 0.1",
    "delayed decay of the effective lr lowers accuracy until the very end.",
    VIT, _prime_arms, _prime_claims, _show, SCHEDULED, desk_budgets=LONG_BUDGET,
)  # fmt: skip
GAMMA_PRIME_SLOW = TrainedExperiment(
    "fig-momentum-gamma-prime-slow",
    "The erroneous match of momentum, from alpha 0.02",
    "the effective lr is too low, the models underperform, and delayed decay ends up beneficial.",
    VIT, _slow_prime_arms, _slow_prime_claims, _show, SCHEDULED, desk_budgets=LONG_BUDGET,
)  # fmt: skip


# Alpha from 0.01 to 1

BASE, BOTH, LR_ALONE, EXACT = (
    "alpha 0.1", "alpha 0.01 to 1, ScionC", "alpha 0.01 to 1, λ by lr alone", "alpha 0.01 to 1, exact decay (ours)"
)  # fmt: skip
FIRST_ALPHA = 0.01
SWINGS = {"weight": swing("weight_norm"), "hidden": swing("hidden_norm"), "gradient": swing("grad_norm")}


def _linear_arms(baseline: Baseline) -> dict[str, Config]:
    """Take half of the baseline's decay, as in the paper. By lr alone: lambda_t = lambda gamma_t / gamma, of alpha = 0.1."""
    ramp = {"alpha": FIRST_ALPHA, "output_alpha": ALPHA, "momentum": "linear", "alpha_end": 1.0}
    without = short(theory.steady_norm_sq(baseline.lr, 0.5 * baseline.decay, FIRST_ALPHA, limit=True))
    return {
        BASE: baseline.scionc(decay=0.5),
        BOTH: baseline.scionc(decay=0.5, **ramp),
        LR_ALONE: baseline.scionc(decay=0.5, steady_norm_sq=without, decay_by_lr_alone=True, **ramp),
        EXACT: baseline.scionc(decay=0.5, overlap="exact", **ramp),
    }


def _linear_claims(_: RunPlan) -> list[Claim]:
    return [
        *(
            Claim(
                f"With the momentum factor the {name} norm swings at most half as far as with λ by lr alone",
                (value(SWINGS[name], BOTH) - 0.5 * value(SWINGS[name], LR_ALONE)).at_most(
                    0.0, "100 ln(largest / smallest), with the factor - half of without,", " %"
                ),
            )
            for name in ("weight", "hidden")
        ),
        Claim(
            "With the momentum factor the gradient norm swings less than with λ by lr alone",
            difference(SWINGS["gradient"], BOTH, LR_ALONE).at_most(0.0, "swing, with - without,", " %"),
        ),
        Claim(
            "λ by lr alone ends with the higher accuracy",
            difference(ACCURACY, LR_ALONE, BOTH).at_least(0.0, "accuracy, lr alone - ScionC,", " points"),
        ),
        Claim(
            "Ours: eta is not small against alpha at first; the exact decay keeps the hidden norm steadier than the linear formula",
            difference(SWINGS["hidden"], EXACT, BOTH).at_most(0.0, "swing, exact - linear,", " %"),
        ),
    ]


MOMENTUM_LINEAR = TrainedExperiment(
    "fig-momentum-linear",
    "Stress test: alpha from 0.01 to 1, with and without the momentum factor in the decay",
    "weight and gradient norms are stable with ScionC; with λ by lr alone they swing, and accuracy ends higher.",
    VIT,
    _linear_arms,
    _linear_claims,
    partial(_show, more={f"swing of the {name} norm, %": metric for name, metric in SWINGS.items()}),
    SCHEDULED,
    desk_budgets=LONG_BUDGET,
)
