"""fig-scionc, fig-scionc-constant, fig-output-layer: norms over a run, Scion against ScionC."""

from functools import partial

from steadynorm.lab.paper.baselines import VIT, Baseline
from steadynorm.lab.paper.claims import All, Claim, difference, value
from steadynorm.lab.paper.experiment import TrainedExperiment
from steadynorm.lab.paper.experiments.norm_figures import (
    AGAINST_FORECAST,
    COLUMNS,
    LONG_BUDGET,
    show_norms,
    stability_claims,
    why_it_moves,
)
from steadynorm.lab.paper.metrics import ACCURACY, ACCURACY_TOLERANCE, NEGLIGIBLE_PERCENT, growth
from steadynorm.lab.paper.runs import RunPlan
from steadynorm.lab.train.config import Config


def _cosine_arms(baseline: Baseline) -> dict[str, Config]:
    decay = baseline.norm_decay
    return {"Scion": baseline.scion(decay=decay), "ScionC (cosine)": baseline.scionc(decay=decay, end=0.25)}


def _constant_arms(baseline: Baseline) -> dict[str, Config]:
    decay = baseline.norm_decay
    return {"Scion": baseline.scion(decay=0.5 * decay), "ScionC (constant)": baseline.scionc(decay=decay)}


SCIONC = TrainedExperiment(
    "fig-scionc",
    "Scion against ScionC with a target on a cosine",
    "ScionC (cosine) results in more stable weight and gradient norms.",
    VIT,
    _cosine_arms,
    lambda _: stability_claims("ScionC (cosine)", "Scion", "ScionC (cosine) against Scion"),
    partial(show_norms, more=AGAINST_FORECAST),
    COLUMNS,
    desk_budgets=LONG_BUDGET,
)
SCIONC_CONSTANT = TrainedExperiment(
    "fig-scionc-constant",
    "Scion against ScionC with a constant target",
    "ScionC (constant C² = 1.1875) results in more stable weight and gradient norms than Scion (eta = 0.0004).",
    VIT,
    _constant_arms,
    lambda _: [
        *stability_claims("ScionC (constant)", "Scion", "ScionC (constant) against Scion"),
        why_it_moves("ScionC (constant)", "Scion"),
    ],
    partial(show_norms, more=AGAINST_FORECAST),
    COLUMNS,
    desk_budgets=LONG_BUDGET,
)


# The output layer

OUTPUT_CORRECTED, BIAS_CONSTANT = "ScionC, output corrected too", "ScionC, output bias constant"
SIGN = growth("sign_norm")


def _output_arms(baseline: Baseline) -> dict[str, Config]:
    decay = baseline.norm_decay
    return {
        "Scion": baseline.scion(decay=decay),
        "ScionC": baseline.scionc(decay=decay),
        OUTPUT_CORRECTED: baseline.scionc(decay=decay, correct_output=True),
        BIAS_CONSTANT: baseline.scionc(decay=decay, output_bias="constant"),
    }


def _output_claims(_: RunPlan) -> list[Claim]:
    return [
        Claim(
            "Correcting the output layer makes its sign norm grow towards the end",
            value(SIGN, OUTPUT_CORRECTED).at_least(NEGLIGIBLE_PERCENT, "100 ln(end / middle) of the sign norm", " %"),
        ),
        Claim(
            "It grows more than with constant decay there",
            difference(SIGN, OUTPUT_CORRECTED, "ScionC").at_least(
                NEGLIGIBLE_PERCENT, "growth, output corrected - constant,", " %"
            ),
        ),
        Claim(
            f"With constant decay the sign norm is stable (within {2 * NEGLIGIBLE_PERCENT:g} %)",
            All(
                value(SIGN, arm).within(2 * NEGLIGIBLE_PERCENT, f"growth, {arm},", " %") for arm in ("Scion", "ScionC")
            ),
        ),
        Claim(
            "The decay of the output's bias, corrected or constant, makes no significant difference "
            f"(within {ACCURACY_TOLERANCE:g} point)",
            difference(ACCURACY, BIAS_CONSTANT, "ScionC").within(
                ACCURACY_TOLERANCE, "accuracy, bias constant - corrected,", " points"
            ),
        ),
    ]


OUTPUT_LAYER = TrainedExperiment(
    "fig-output-layer",
    "Correcting the output layer too",
    "the sign norm of the output continues to increase if its decay is corrected, and remains stable if not.",
    VIT,
    _output_arms,
    _output_claims,
    partial(
        show_norms,
        more={"growth of the sign norm, %": SIGN},
        keys=("weight_norm", "hidden_norm", "spectral_norm", "bias_norm", "sign_norm", "grad_norm"),
    ),
    (*COLUMNS, "spectral_norm", "bias_norm", "sign_norm"),
    desk_budgets=LONG_BUDGET,
)
