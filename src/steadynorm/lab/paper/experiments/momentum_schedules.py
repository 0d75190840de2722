"""Momentum: the effective learning rate may be decayed by alpha instead of lr."""

from steadynorm import theory
from steadynorm.lab.paper.baselines import ALPHA, VIT, Baseline, short
from steadynorm.lab.paper.experiment import Claim, Outcome, claim
from steadynorm.lab.paper.experiments.norm_stability import (
    ACCURACY_TOLERANCE,
    COLUMNS,
    LONG_BUDGET,
    NEGLIGIBLE_PERCENT,
    no_worse,
)
from steadynorm.lab.paper.metrics import ACCURACY, END, LOSS, Measure, log_of, mean_over, swing
from steadynorm.lab.paper.plots import curves, measured, numbers
from steadynorm.lab.paper.statistics import (
    Finding,
    at_least,
    at_most,
    combined,
    difference,
    estimate,
    every,
    within,
)
from steadynorm.lab.paper.trained import Runs, TrainedExperiment
from steadynorm.lab.train.config import Config

LIMITS = (0.2, 0.5, 1.0)
COSINE = "cosine lr"


def matched_arm(limit: float) -> str:
    return f"alpha 0.1 to {limit:g}"


def _matched_arms(baseline: Baseline) -> dict[str, Config]:
    arms = {COSINE: baseline.scionc()}
    return arms | {matched_arm(x): baseline.scionc(momentum="matched", alpha_end=x) for x in LIMITS}


def _schedules(runs: Runs, claims: list[Claim], more: dict[str, Measure] | None = None) -> Outcome:
    arms = runs.plan.arms
    plots = [curves(runs, key, arms, log_y=key == "grad_norm") for key in
             ("val_accuracy", "weight_norm", "hidden_norm", "grad_norm", "effective_lr", "alpha", "lr", "weight_decay")]  # fmt: skip
    measures: dict[str, Measure] = {
        "accuracy": ACCURACY, "val_loss": LOSS, "weight norm at the end": mean_over("weight_norm", END),
        "hidden norm at the end": mean_over("hidden_norm", END), **(more or {})
    }  # fmt: skip
    return Outcome([*plots, measured(runs, measures, arms)], claims, numbers(runs, measures, arms))


def _gap(runs: Runs, one: str, other: str) -> Finding:
    found = difference(runs.values(ACCURACY, one), runs.values(ACCURACY, other))
    return within(found, ACCURACY_TOLERANCE, f"accuracy, {one} - {other},", " points")


def _matched(runs: Runs) -> Outcome:
    norm = log_of(mean_over("weight_norm", END))
    claims = [
        claim(
            f"Matched momentum reaches the accuracy of the cosine up to alpha_max = 0.5 (to {ACCURACY_TOLERANCE:g} point)",
            lambda: every([no_worse(runs, matched_arm(limit), COSINE) for limit in (0.2, 0.5)]),
        ),
        claim(f"Matched momentum also reaches it with alpha_max = 1 (to {ACCURACY_TOLERANCE:g} point)",
              lambda: no_worse(runs, matched_arm(1.0), COSINE)),
        claim(
            f"The weight norm is that of the cosine up to alpha_max = 0.5 (within {2 * NEGLIGIBLE_PERCENT:g} %)",
            lambda: every([
                within(
                    difference(runs.values(norm, matched_arm(x)), runs.values(norm, COSINE)),
                    2 * NEGLIGIBLE_PERCENT, f"norm, alpha to {x:g} / cosine - 1,", " %",
                ) for x in (0.2, 0.5)
            ]),
        ),
    ]  # fmt: skip
    return _schedules(runs, claims)


MOMENTUM_SCHEDULE = TrainedExperiment(
    "fig-momentum-schedule",
    "Momentum scheduled so that the effective lr follows a cosine",
    "the models converge to the same accuracy up to alpha_max = 0.5.",
    VIT, _matched_arms, _matched, (*COLUMNS, "alpha", "lr"), desk_budgets=LONG_BUDGET,
)  # fmt: skip

SLOW_ALPHA = 0.02


def prime_arm(start: float, limit: float) -> str:
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
    """gamma' is matched between the two alphas as well: the effective lr of 0.02 is too low."""
    lr = short(baseline.lr * theory.momentum_gain(ALPHA) / theory.momentum_gain(SLOW_ALPHA))
    slow = {"lr": lr, "alpha": SLOW_ALPHA, "output_alpha": ALPHA}
    return {
        COSINE: baseline.scionc(),
        SLOW: baseline.scionc(**slow),
        **_prime_matched(baseline, SLOW_ALPHA, **slow),
    }


def _prime(runs: Runs) -> Outcome:
    halfway = mean_over("val_accuracy", (0.45, 0.7))
    claims = [
        claim(
            "The erroneous match delays the decay of the effective lr: accuracy is lower halfway",
            lambda: at_least(
                difference([100 * each for each in runs.values(halfway, COSINE)],
                           [100 * each for each in runs.values(halfway, ERRONEOUS)]),
                0.0, "accuracy halfway, cosine - erroneous,", " points",
            ),
        ),
        claim(f"At the very end its accuracy is about the same (within {ACCURACY_TOLERANCE:g} point)", lambda: _gap(runs, ERRONEOUS, COSINE)),
    ]  # fmt: skip
    return _schedules(runs, claims)


def _slow_prime(runs: Runs) -> Outcome:
    claims = [
        claim(
            "From alpha 0.02, matched to 0.1 by gamma', the effective lr is too low and the model underperforms",
            lambda: at_least(
                difference(runs.values(ACCURACY, COSINE), runs.values(ACCURACY, SLOW)), 0.0,
                "accuracy, alpha 0.1 - alpha 0.02,", " points",
            ),
        ),
        claim(
            "From alpha 0.02 the delayed decay is beneficial",
            lambda: at_least(
                difference(runs.values(ACCURACY, SLOW_ERRONEOUS), runs.values(ACCURACY, SLOW)), 0.0,
                "accuracy, delayed - cosine,", " points",
            ),
        ),
    ]  # fmt: skip
    return _schedules(runs, claims)


GAMMA_PRIME = TrainedExperiment(
    "fig-momentum-gamma-prime",
    "The erroneous match of momentum, from alpha 0.1",
    "delayed decay of the effective lr lowers accuracy until the very end.",
    VIT, _prime_arms, _prime, (*COLUMNS, "alpha", "lr"), desk_budgets=LONG_BUDGET,
)  # fmt: skip
GAMMA_PRIME_SLOW = TrainedExperiment(
    "fig-momentum-gamma-prime-slow",
    "The erroneous match of momentum, from alpha 0.02",
    "the effective lr is too low, the models underperform, and delayed decay ends up beneficial.",
    VIT, _slow_prime_arms, _slow_prime, (*COLUMNS, "alpha", "lr"), desk_budgets=LONG_BUDGET,
)  # fmt: skip

BASE, BOTH, LR_ALONE, EXACT = (
    "alpha 0.1", "alpha 0.01 to 1, ScionC", "alpha 0.01 to 1, λ by lr alone", "alpha 0.01 to 1, exact decay (ours)"
)  # fmt: skip
_FIRST = 0.01


def _linear_arms(baseline: Baseline) -> dict[str, Config]:
    """Half of the baseline's decay, as in the paper. By lr alone: lambda_t = lambda gamma_t / gamma, of alpha = 0.1."""
    ramp = {"alpha": _FIRST, "output_alpha": ALPHA, "momentum": "linear", "alpha_end": 1.0}
    without = short(theory.steady_norm_sq(baseline.lr, 0.5 * baseline.decay, _FIRST, limit=True))
    return {
        BASE: baseline.scionc(decay=0.5),
        BOTH: baseline.scionc(decay=0.5, **ramp),
        LR_ALONE: baseline.scionc(decay=0.5, steady_norm_sq=without, decay_by_lr_alone=True, **ramp),
        EXACT: baseline.scionc(decay=0.5, overlap="exact", **ramp),
    }


def _linear(runs: Runs) -> Outcome:
    weight, hidden, grad = swing("weight_norm"), swing("hidden_norm"), swing("grad_norm")
    claims = [
        *(
            claim(
                f"With the momentum factor the {name} norm swings at most half as far as with λ by lr alone",
                lambda norm=norm: at_most(
                    estimate(combined((1.0, runs.values(norm, BOTH)), (-0.5, runs.values(norm, LR_ALONE)))), 0.0,
                    "100 ln(largest / smallest), with the factor - half of without,", " %",
                ),
            )
            for name, norm in (("weight", weight), ("hidden", hidden))
        ),
        claim(
            "With the momentum factor the gradient norm swings less than with λ by lr alone",
            lambda: at_most(
                difference(runs.values(grad, BOTH), runs.values(grad, LR_ALONE)), 0.0, "swing, with - without,", " %"
            ),
        ),
        claim(
            "λ by lr alone ends with the higher accuracy",
            lambda: at_least(
                difference(runs.values(ACCURACY, LR_ALONE), runs.values(ACCURACY, BOTH)), 0.0,
                "accuracy, lr alone - ScionC,", " points",
            ),
        ),
        claim(
            "Ours: eta is not small against alpha at first; the exact decay keeps the hidden norm steadier than the linear formula",
            lambda: at_most(
                difference(runs.values(hidden, EXACT), runs.values(hidden, BOTH)), 0.0, "swing, exact - linear,", " %"
            ),
        ),
    ]  # fmt: skip
    swings = {"weight": weight, "hidden": hidden, "gradient": grad}
    return _schedules(runs, claims, {f"swing of the {name} norm, %": each for name, each in swings.items()})


MOMENTUM_LINEAR = TrainedExperiment(
    "fig-momentum-linear",
    "Stress test: alpha from 0.01 to 1, with and without the momentum factor in the decay",
    "weight and gradient norms are stable with ScionC; with λ by lr alone they swing, and accuracy ends higher.",
    VIT, _linear_arms, _linear, (*COLUMNS, "alpha", "lr"), desk_budgets=LONG_BUDGET,
)  # fmt: skip
