"""fig-adamc, fig-renormalized, fig-adamc-betas: norms over a run, AdamW and its relatives."""

from dataclasses import replace
from functools import partial

from steadynorm.lab.paper.baselines import Baseline
from steadynorm.lab.paper.claims import Contrast, Test, difference, no_worse
from steadynorm.lab.paper.experiments.norm_figures import (
    AGAINST_FORECAST,
    drift_claims,
    show_norms,
    stability_claims,
    vit_figure,
    why_it_moves,
)
from steadynorm.lab.paper.metrics import (
    ACCURACY,
    AFTERWARDS,
    BY_ACCURACY,
    END,
    NEGLIGIBLE_PERCENT,
    SMALL_PERCENT,
    WHOLE_RUN,
    log_of,
    log_ratio,
    mean_over,
)
from steadynorm.lab.paper.runs import RunPlan
from steadynorm.lab.train.config import Config

SWAPPED = ("AdamC, AdamW's decay", "AdamW, AdamC's decay")
FIVEFOLD = ("AdamC, decay x 5", "AdamW, decay x 5")


def _adamc_arms(baseline: Baseline) -> dict[str, Config]:
    """Return both optimizers at both decays (the paper's 0.1 and 0.2).

    At the desk also the first two at five times the decay (ours), where runs have ten half-lives instead of two.
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


def _adamc_claims(plan: RunPlan) -> dict[str, Test]:
    gain_of_adamc, gain_of_adamw = difference(ACCURACY, "AdamC", SWAPPED[0]), difference(ACCURACY, SWAPPED[1], "AdamW")
    gain = (gain_of_adamc - gain_of_adamw).at_least(0.0, "gain, AdamC - AdamW,", " points")
    claims = stability_claims("AdamC", "AdamW", "AdamC against AdamW")
    claims["AdamC gains more accuracy than AdamW from the larger of the two decays"] = gain
    if FIVEFOLD[0] in plan.arms:
        name = "Ours, five times the decay"
        claims |= drift_claims(*FIVEFOLD, name) | why_it_moves(*FIVEFOLD)
        accuracy = f"{name}: accuracy is no worse (by more than {BY_ACCURACY.margin_words}); {AFTERWARDS}"
        claims[accuracy] = no_worse(BY_ACCURACY, *FIVEFOLD)
    return claims


ADAMC = vit_figure(
    "fig-adamc",
    "AdamW against AdamC",
    "AdamC results in more stable weight and gradient norms; not in steady state even after 300 epochs.",
    arms=_adamc_arms,
    claims=_adamc_claims,
    show=partial(show_norms, more=AGAINST_FORECAST),
    budgets=(300,),
)


# Renormalized AdamW

RENORMALIZED_PAIR = ("Renormalized AdamW", "AdamW")
WITHOUT_MOMENTUM = ("Renormalized AdamW, no momentum", "AdamW, no momentum")


def _renormalized_arms(baseline: Baseline) -> dict[str, Config]:
    """Return both also without momentum (ours), where the perpendicular part should matter. The paper's crops start at 0.2."""
    betas = (0.0, 0.999)
    arms = {
        RENORMALIZED_PAIR[1]: baseline.adam("adamw"),
        RENORMALIZED_PAIR[0]: baseline.adam("renormalized-adamw"),
        WITHOUT_MOMENTUM[1]: baseline.adam("adamw", betas=betas),
        WITHOUT_MOMENTUM[0]: baseline.adam("renormalized-adamw", betas=betas),
    }
    if baseline.scale == "desk":
        return arms
    return {name: replace(arm, task=replace(arm.task, crop_scale=(0.2, 1.0))) for name, arm in arms.items()}


def _norm_change(one: str, other: str, key: str, part: tuple[float, float] = END) -> Contrast:
    """100 ln(one / other) over part of the run: both had the same data and the same start."""
    return difference(log_of(mean_over(key, part)), one, other)


RENORMALIZED = vit_figure(
    "fig-renormalized",
    "Renormalized AdamW against AdamW",
    "negligible differences in accuracy (77.15 against 77.45), weight norm and gradient norm throughout training.",
    arms=_renormalized_arms,
    claims={
        f"Renormalized AdamW changes accuracy little (within {BY_ACCURACY.margin_words})": difference(
            ACCURACY, *RENORMALIZED_PAIR
        ).within(BY_ACCURACY.margin, "accuracy, renormalized - AdamW", " points"),
        f"Renormalized AdamW changes the weight norm little, over the whole run (within {NEGLIGIBLE_PERCENT:g} %)": _norm_change(
            *RENORMALIZED_PAIR, "weight_norm", WHOLE_RUN
        ).within(NEGLIGIBLE_PERCENT, "weight norm, renormalized / AdamW - 1,", " %"),
        f"Renormalized AdamW changes the gradient norm little, over the whole run (within {SMALL_PERCENT:g} %)": _norm_change(
            *RENORMALIZED_PAIR, "grad_norm", WHOLE_RUN
        ).within(SMALL_PERCENT, "gradient norm, renormalized / AdamW - 1,", " %"),
        "Ours, why: the perpendicular part gives (1 - beta1)/(1 + beta1) of the growth of |theta|², 5 % with momentum 0.9 "
        "and all of it without; there renormalizing takes more from the hidden norm than with momentum": (
            _norm_change(*WITHOUT_MOMENTUM, "hidden_norm") - _norm_change(*RENORMALIZED_PAIR, "hidden_norm")
        ).at_most(0.0, "change of the hidden norm without momentum - with,", " %"),
    },
    show=show_norms,
)

# Betas of AdamC

BETAS = ("AdamC, betas 0.99, 0.99", "AdamC, betas 0.9, 0.999")
ADAMC_BETAS = vit_figure(
    "fig-adamc-betas",
    "AdamC with other betas",
    "changing the betas from (0.9, 0.999) to (0.99, 0.99) has almost no effect on the weight norm.",
    arms=lambda baseline: {BETAS[1]: baseline.adamc(), BETAS[0]: baseline.adamc(betas=(0.99, 0.99))},
    claims={
        f"Betas do not move AdamC's weight norm (within {NEGLIGIBLE_PERCENT:g} %)": _norm_change(
            *BETAS, "weight_norm"
        ).within(NEGLIGIBLE_PERCENT, "norm, 0.99 / 0.9 - 1,", " %"),
        "Ours: they move the hidden norm as the forecast says for this lr and decay "
        f"(within {NEGLIGIBLE_PERCENT:g} %)": (
            _norm_change(*BETAS, "hidden_norm") - _norm_change(*BETAS, "hidden_forecast")
        ).within(NEGLIGIBLE_PERCENT, "change measured - change forecast,", " %"),
    },
    show=partial(show_norms, more={"100 ln(measured / forecast norm)": log_ratio("hidden_norm", "hidden_forecast")}),
)
