"""Figures of norms over a run: constant against corrected decay, for Scion and AdamW; Renormalized AdamW; betas; output."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from steadynorm import theory
from steadynorm.lab.paper.baselines import VIT, Baseline
from steadynorm.lab.paper.experiment import Claim, MissingRunsError, Outcome, claim
from steadynorm.lab.paper.metrics import (
    ACCURACY,
    END,
    LOSS,
    MIDDLE,
    Measure,
    drift,
    growth,
    log_of,
    log_ratio,
    mean_over,
)
from steadynorm.lab.paper.plots import curves, measured, numbers
from steadynorm.lab.paper.statistics import (
    Finding,
    at_least,
    at_most,
    combined,
    difference,
    estimate,
    every,
    noted,
    within,
)
from steadynorm.lab.paper.trained import Runs, TrainedExperiment
from steadynorm.lab.train.config import Config
from steadynorm.lab.train.optimizers import lr_ratio
from steadynorm.report import page

STABLE = 0.5  # corrected decay must at least halve the drift that constant decay leaves
NEGLIGIBLE_PERCENT = 5.0  # percent: a change smaller than this is none
ACCURACY_TOLERANCE = 1.0  # percentage points of accuracy within which results are called equal
LONG_BUDGET = (300,)  # at the desk norms are watched over the longest budget: its half-lives are what counts
COLUMNS = ("weight_norm", "hidden_norm", "hidden_forecast", "grad_norm", "effective_lr", "weight_decay")


RISE = "rise of measured / forecast norm, %"
AGAINST_FORECAST: Mapping[str, Measure] = {
    "100 ln(measured / forecast norm), middle": log_ratio("hidden_norm", "hidden_forecast", MIDDLE),
    "100 ln(measured / forecast norm), end": log_ratio("hidden_norm", "hidden_forecast", END),
    RISE: lambda run: growth("hidden_norm")(run) - growth("hidden_forecast")(run),
}


def steadier(runs: Runs, key: str, corrected: str, constant: str) -> Finding:
    """Whether a norm drifts at most half as far under corrected decay as under constant decay: 100 |ln(end / middle)|.

    Open where neither is shown to move: half of nothing is nothing.
    """
    ours, theirs = runs.values(drift(key), corrected), runs.values(drift(key), constant)
    figure = f"{key}: {corrected} drifts by {estimate(ours).value:.1f} %, {constant} by {estimate(theirs).value:.1f} %"
    half = estimate(combined((STABLE, theirs), (-1.0, ours)))
    less = noted(at_least(half, 0.0, "half of the latter - the former", " %"), figure)
    if any(at_least(estimate(each), NEGLIGIBLE_PERCENT, "").holds for each in (theirs, ours)):
        return less
    return replace(less, open_because=f"neither is shown to move by {NEGLIGIBLE_PERCENT:g} %, a longer run is needed")


def no_worse(
    runs: Runs, one: str, other: str, tolerance: float = ACCURACY_TOLERANCE, measure: Measure = ACCURACY
) -> Finding:
    """Whether the accuracy of `one` is at least that of `other` less the tolerance."""
    found = difference(runs.values(measure, one), runs.values(measure, other))
    return at_least(found, -tolerance, f"accuracy, {one} - {other}", " points")


def comparison(runs: Runs, arms: Sequence[str], claims: Sequence[Claim], more: Mapping[str, Measure] | None = None,
               keys: Sequence[str] = ("weight_norm", "hidden_norm", "grad_norm")) -> Outcome:  # fmt: skip
    """Norms, accuracy and schedules of some arms, side by side."""
    plots = [curves(runs, key, arms, log_y=key == "grad_norm") for key in keys]
    plots.append(curves(runs, "hidden_norm", arms, dashed="hidden_forecast", label="Against the forecast", zero=True,
                        caption="Dashed: the norm that updates independent of the weights would give."))  # fmt: skip
    plots += [curves(runs, key, arms) for key in ("val_accuracy", "effective_lr", "weight_decay")]
    measures: dict[str, Measure] = {
        "accuracy": ACCURACY,
        "val_loss": LOSS,
        **{f"drift of {key}, %": drift(key) for key in keys},
        **{f"{key} at the end": mean_over(key, END) for key in keys},
        **(more or {}),
    }
    tables = [measured(runs, measures, arms), *expected(runs, arms)]
    return Outcome([*plots, *tables], claims, numbers(runs, measures, arms))


@functools.cache
def forecast_drift(config: Config) -> float | None:
    """drift of the norm that the schedule alone leads to, for Scion and ScionC: percent, negative if the norm falls."""
    optim, schedule = config.optim, config.schedule
    if optim.name not in ("scion", "scionc") or schedule.momentum != "constant":
        return None
    ratio = np.array([lr_ratio(schedule, config.steps)(step) for step in range(config.steps)])
    lr, end = optim.lr * ratio, schedule.steady_norm_sq_end
    target = optim.steady_norm_sq if end is None else ratio * optim.steady_norm_sq + (1 - ratio) * end
    gain = theory.momentum_gain(optim.alpha, nesterov=optim.nesterov)
    corrected = gain / (2 * target) * lr
    decay = optim.weight_decay if optim.name == "scion" and optim.weight_decay is not None else corrected
    norm = np.sqrt(theory.forecast(lr, decay, optim.alpha, nesterov=optim.nesterov, start=optim.steady_norm_sq))
    middle, last = (norm[round(a * config.steps) : round(b * config.steps)].mean() for a, b in (MIDDLE, END))
    return 100 * math.log(last / middle)


def expected(runs: Runs, arms: Sequence[str]) -> list[page.Table]:
    """What the schedules alone lead one to expect, here and at the paper's scale: where the two differ, so may verdicts."""
    here = {arm: config for (arm, _, _), config in runs.plan.configs.items()}
    there = runs.plan.at_paper_scale()
    rows: list[tuple[page.Cell, ...]] = []
    for arm in arms:
        try:
            runs.of(arm)
        except MissingRunsError:
            continue
        drifts = [forecast_drift(each[arm]) for each in (here, there) if arm in each]
        if None not in drifts:
            rows.append((arm, *drifts))
    header = ("", "here", "at the paper's scale")
    caption = (
        "By the linear kernel, started at the first target. The paper's runs have some 130 half-lives, ours a few."
    )
    return [page.Table("Forecast of 100 ln(norm at the end / in the middle), %", header, rows, caption)] if rows else []


def stability(corrected: str, constant: str, name: str) -> list[Callable[[Runs], Claim]]:
    """The claims of every norm figure, as functions of the runs."""
    return [
        lambda runs: claim(f"{name}: the weight norm is more stable (drift at most half)",
                           lambda: steadier(runs, "weight_norm", corrected, constant)),
        lambda runs: claim(f"{name}: the hidden norm, of all layers but the output, is more stable (drift at most half)",
                           lambda: steadier(runs, "hidden_norm", corrected, constant)),
        lambda runs: claim(f"{name}: the gradient norm is more stable (drift at most half)",
                           lambda: steadier(runs, "grad_norm", corrected, constant)),
        lambda runs: claim(f"{name}: accuracy is no worse (by more than {ACCURACY_TOLERANCE:g} point)",
                           lambda: no_worse(runs, corrected, constant)),
    ]  # fmt: skip


def _pair(corrected: str, constant: str, *more: Callable[[Runs, str, str], Claim]) -> Callable[[Runs], Outcome]:
    def judge(runs: Runs) -> Outcome:
        claims = [each(runs) for each in stability(corrected, constant, f"{corrected} against {constant}")]
        claims += [each(runs, corrected, constant) for each in more]
        return comparison(runs, (constant, corrected), claims, AGAINST_FORECAST)

    return judge


def why_it_moves(runs: Runs, corrected: str, constant: str) -> Claim:
    """Where the corrected norm is not as stable as it should be: is it the schedule, or are the updates not independent?"""
    rise = AGAINST_FORECAST[RISE]
    return claim(
        f"Ours, why: updates independent of each other would leave the hidden norm of {corrected} where it is (within {NEGLIGIBLE_PERCENT:g} %). "
        "Real ones are not: with both optimizers measured / forecast rises towards the end, as the lr falls; of the fall "
        "that constant decay brings, this hides a part",
        lambda: every([
            within(estimate(runs.values(growth("hidden_forecast"), corrected)), NEGLIGIBLE_PERCENT, "drift of the forecast", " %"),
            *(at_least(estimate(runs.values(rise, arm)), 0.0, f"rise of measured / forecast, {arm},", " %")
              for arm in (corrected, constant)),
        ]),
    )  # fmt: skip


def _scionc_arms(baseline: Baseline) -> dict[str, Config]:
    decay = baseline.norm_decay
    return {"Scion": baseline.scion(decay=decay), "ScionC (cosine)": baseline.scionc(decay=decay, end=0.25)}


def _constant_arms(baseline: Baseline) -> dict[str, Config]:
    decay = baseline.norm_decay
    return {"Scion": baseline.scion(decay=0.5 * decay), "ScionC (constant)": baseline.scionc(decay=decay)}


SWAPPED = ("AdamC, AdamW's decay", "AdamW, AdamC's decay")
FIVEFOLD = ("AdamC, decay x 5", "AdamW, decay x 5")


def _adamc_arms(baseline: Baseline) -> dict[str, Config]:
    """Both optimizers at both decays (the paper's 0.1 and 0.2).

    Ours: the first two with five times the decay, where the desk's runs have ten half-lives instead of two.
    """
    arms = {
        "AdamW": baseline.adam("adamw"),
        "AdamC": baseline.adamc(),
        SWAPPED[1]: baseline.adam("adamw", decay=baseline.adamc_decay),
        SWAPPED[0]: baseline.adam("adamc"),
    }
    if baseline.scale == "desk":
        arms[FIVEFOLD[1]] = baseline.adam("adamw", decay=5.0)
        arms[FIVEFOLD[0]] = baseline.adam("adamc", decay=5.0 * baseline.adamc_decay)
    return arms


def _larger_decay(runs: Runs) -> Claim:
    """By seed: what the larger of the two decays adds to AdamC's accuracy, less what it adds to AdamW's."""

    def gain(larger: str, smaller: str) -> list[float]:
        return [a - b for a, b in zip(runs.values(ACCURACY, larger), runs.values(ACCURACY, smaller), strict=True)]

    return claim(
        "AdamC gains more accuracy than AdamW from the larger of the two decays",
        lambda: at_least(
            difference(gain("AdamC", SWAPPED[0]), gain(SWAPPED[1], "AdamW")), 0.0, "gain, AdamC - AdamW,", " points"
        ),
    )


def _adamc(runs: Runs) -> Outcome:
    claims = [each(runs) for each in stability("AdamC", "AdamW", "AdamC against AdamW")]
    claims.append(_larger_decay(runs))
    if FIVEFOLD[0] in runs.plan.arms:
        claims += [
            *(each(runs) for each in stability(*FIVEFOLD, "Ours, five times the decay")[:2]),
            why_it_moves(runs, *FIVEFOLD),
        ]
    return comparison(runs, runs.plan.arms, claims, AGAINST_FORECAST)


SCIONC = TrainedExperiment(
    "fig-scionc",
    "Scion against ScionC with a target on a cosine",
    "ScionC (cosine) results in more stable weight and gradient norms.",
    VIT, _scionc_arms, _pair("ScionC (cosine)", "Scion"), COLUMNS, desk_budgets=LONG_BUDGET,
)  # fmt: skip
SCIONC_CONSTANT = TrainedExperiment(
    "fig-scionc-constant",
    "Scion against ScionC with a constant target",
    "ScionC (constant C² = 1.1875) results in more stable weight and gradient norms than Scion (eta = 0.0004).",
    VIT, _constant_arms, _pair("ScionC (constant)", "Scion", why_it_moves), COLUMNS, desk_budgets=LONG_BUDGET,
)  # fmt: skip
ADAMC = TrainedExperiment(
    "fig-adamc",
    "AdamW against AdamC",
    "AdamC results in more stable weight and gradient norms; not in steady state even after 300 epochs.",
    VIT, _adamc_arms, _adamc, COLUMNS, budgets=(300,),
)  # fmt: skip


# Renormalized AdamW

_WITHOUT = (0.0, 0.999)


def _renormalized_arms(baseline: Baseline) -> dict[str, Config]:
    """Ours: the same two without momentum, where the perpendicular part should matter. The paper's crops start at 0.2."""
    arms = {
        "AdamW": baseline.adam("adamw"),
        "Renormalized AdamW": baseline.adam("renormalized-adamw"),
        "AdamW, no momentum": baseline.adam("adamw", betas=_WITHOUT),
        "Renormalized AdamW, no momentum": baseline.adam("renormalized-adamw", betas=_WITHOUT),
    }
    if baseline.scale == "desk":
        return arms
    return {name: replace(each, task=replace(each.task, crop_scale=(0.2, 1.0))) for name, each in arms.items()}


def _norm_change(runs: Runs, one: str, other: str, key: str) -> list[float]:
    """100 ln(one / other) at the end, by seed: both had the same data and the same start."""
    measure = log_of(mean_over(key, END))
    return combined((1.0, runs.values(measure, one)), (-1.0, runs.values(measure, other)))


def _renormalized(runs: Runs) -> Outcome:
    pair, alone = ("Renormalized AdamW", "AdamW"), ("Renormalized AdamW, no momentum", "AdamW, no momentum")
    claims = [
        claim(
            f"Renormalized AdamW changes accuracy little (within {ACCURACY_TOLERANCE:g} point)",
            lambda: within(
                difference(*(runs.values(ACCURACY, arm) for arm in pair)), ACCURACY_TOLERANCE, "accuracy, renormalized - AdamW", " points"
            ),
        ),
        claim(
            f"Renormalized AdamW changes the weight norm little (within {NEGLIGIBLE_PERCENT:g} %)",
            lambda: within(
                estimate(_norm_change(runs, *pair, "weight_norm")), NEGLIGIBLE_PERCENT, "norm at the end, renormalized / AdamW - 1,", " %"
            ),
        ),
        claim(
            f"Renormalized AdamW changes the gradient norm little (within {2 * NEGLIGIBLE_PERCENT:g} %)",
            lambda: within(
                estimate(_norm_change(runs, *pair, "grad_norm")), 2 * NEGLIGIBLE_PERCENT, "gradient norm, renormalized / AdamW - 1,", " %"
            ),
        ),
        claim(
            "Ours, why: the perpendicular part gives (1 - beta1)/(1 + beta1) of the growth of |theta|², 5 % with momentum 0.9 "
            "and all of it without; there renormalizing takes more from the hidden norm than with momentum",
            lambda: at_most(
                difference(_norm_change(runs, *alone, "hidden_norm"), _norm_change(runs, *pair, "hidden_norm")), 0.0,
                "change of the hidden norm without momentum - with,", " %",
            ),
        ),
    ]  # fmt: skip
    return comparison(runs, runs.plan.arms, claims)


RENORMALIZED = TrainedExperiment(
    "fig-renormalized",
    "Renormalized AdamW against AdamW",
    "negligible differences in accuracy (77.15 against 77.45), weight norm and gradient norm.",
    VIT, _renormalized_arms, _renormalized, COLUMNS, desk_budgets=LONG_BUDGET,
)  # fmt: skip


# Betas of AdamC

BETAS = ("AdamC, betas 0.9, 0.999", "AdamC, betas 0.99, 0.99")


def _betas_arms(baseline: Baseline) -> dict[str, Config]:
    return {BETAS[0]: baseline.adamc(), BETAS[1]: baseline.adamc(betas=(0.99, 0.99))}


def _betas(runs: Runs) -> Outcome:
    claims = [
        claim(
            f"Betas do not move AdamC's weight norm (within {NEGLIGIBLE_PERCENT:g} %)",
            lambda: within(
                estimate(_norm_change(runs, BETAS[1], BETAS[0], "weight_norm")), NEGLIGIBLE_PERCENT, "norm, 0.99 / 0.9 - 1,", " %"
            ),
        ),
        claim(
            f"Ours: they move the hidden norm as the forecast says for this lr and decay (within {NEGLIGIBLE_PERCENT:g} %)",
            lambda: within(
                difference(*(_norm_change(runs, BETAS[1], BETAS[0], key) for key in ("hidden_norm", "hidden_forecast"))),
                NEGLIGIBLE_PERCENT, "change measured - change forecast,", " %",
            ),
        ),
    ]  # fmt: skip
    return comparison(
        runs, BETAS, claims, {"100 ln(measured / forecast norm)": log_ratio("hidden_norm", "hidden_forecast")}
    )


ADAMC_BETAS = TrainedExperiment(
    "fig-adamc-betas",
    "AdamC with other betas",
    "changing the betas from (0.9, 0.999) to (0.99, 0.99) has almost no effect on the weight norm.",
    VIT, _betas_arms, _betas, COLUMNS, desk_budgets=LONG_BUDGET,
)  # fmt: skip


# The output layer

OUTPUT_CORRECTED, BIAS_CONSTANT = "ScionC, output corrected too", "ScionC, output bias constant"


def _output_arms(baseline: Baseline) -> dict[str, Config]:
    decay = baseline.norm_decay
    return {
        "Scion": baseline.scion(decay=decay),
        "ScionC": baseline.scionc(decay=decay),
        OUTPUT_CORRECTED: baseline.scionc(decay=decay, correct_output=True),
        BIAS_CONSTANT: baseline.scionc(decay=decay, output_bias="constant"),
    }


def _output(runs: Runs) -> Outcome:
    sign = growth("sign_norm")
    claims = [
        claim(
            "Correcting the output layer makes its sign norm grow towards the end",
            lambda: at_least(
                estimate(runs.values(sign, OUTPUT_CORRECTED)), NEGLIGIBLE_PERCENT, "100 ln(end / middle) of the sign norm", " %"
            ),
        ),
        claim(
            "It grows more than with constant decay there",
            lambda: at_least(
                difference(runs.values(sign, OUTPUT_CORRECTED), runs.values(sign, "ScionC")), NEGLIGIBLE_PERCENT,
                "growth, output corrected - constant,", " %",
            ),
        ),
        claim(
            f"With constant decay the sign norm is stable (within {2 * NEGLIGIBLE_PERCENT:g} %)",
            lambda: every([
                within(estimate(runs.values(sign, arm)), 2 * NEGLIGIBLE_PERCENT, f"growth, {arm},", " %") for arm in ("Scion", "ScionC")
            ]),
        ),
        claim(
            f"The decay of the output's bias, corrected or constant, makes no significant difference (within {ACCURACY_TOLERANCE:g} point)",
            lambda: within(
                difference(runs.values(ACCURACY, BIAS_CONSTANT), runs.values(ACCURACY, "ScionC")), ACCURACY_TOLERANCE,
                "accuracy, bias constant - corrected,", " points",
            ),
        ),
    ]  # fmt: skip
    keys = ("weight_norm", "hidden_norm", "spectral_norm", "bias_norm", "sign_norm", "grad_norm")
    return comparison(runs, runs.plan.arms, claims, {"growth of the sign norm, %": sign}, keys)


OUTPUT_LAYER = TrainedExperiment(
    "fig-output-layer",
    "Correcting the output layer too",
    "the sign norm of the output continues to increase if its decay is corrected, and remains stable if not.",
    VIT, _output_arms, _output, (*COLUMNS, "spectral_norm", "bias_norm", "sign_norm"), desk_budgets=LONG_BUDGET,
)  # fmt: skip
