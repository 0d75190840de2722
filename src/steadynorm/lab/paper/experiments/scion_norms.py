"""fig-scionc, fig-scionc-constant, fig-output-layer: norms over a run, Scion against ScionC."""

from functools import partial

from steadynorm.lab.paper.claims import all_of, difference, value
from steadynorm.lab.paper.experiments.norm_figures import (
    AGAINST_FORECAST,
    COLUMNS,
    show_norms,
    stability_claims,
    vit_figure,
    why_it_moves,
)
from steadynorm.lab.paper.metrics import ACCURACY, BY_ACCURACY, NEGLIGIBLE_PERCENT, SMALL_PERCENT, growth

SCIONC = vit_figure(
    "fig-scionc",
    "Scion against ScionC with a target on a cosine",
    "ScionC (cosine) results in more stable weight and gradient norms.",
    arms=lambda baseline: {
        "Scion": baseline.scion(decay=baseline.norm_decay),
        "ScionC (cosine)": baseline.scionc(decay=baseline.norm_decay, end=0.25),
    },
    claims=stability_claims("ScionC (cosine)", "Scion", "ScionC (cosine) against Scion"),
    show=partial(show_norms, more=AGAINST_FORECAST),
)
SCIONC_CONSTANT = vit_figure(
    "fig-scionc-constant",
    "Scion against ScionC with a constant target",
    "ScionC (constant C² = 1.1875) results in more stable weight and gradient norms than Scion (eta = 0.0004).",
    arms=lambda baseline: {
        "Scion": baseline.scion(decay=0.5 * baseline.norm_decay),
        "ScionC (constant)": baseline.scionc(decay=baseline.norm_decay),
    },
    claims=stability_claims("ScionC (constant)", "Scion", "ScionC (constant) against Scion")
    | why_it_moves("ScionC (constant)", "Scion"),
    show=partial(show_norms, more=AGAINST_FORECAST),
)

OUTPUT_CORRECTED, BIAS_CONSTANT = "ScionC, output corrected too", "ScionC, output bias constant"
SIGN = growth("sign_norm")
OUTPUT_LAYER = vit_figure(
    "fig-output-layer",
    "Correcting the output layer too",
    "the sign norm of the output continues to increase if its decay is corrected, and remains stable if not.",
    arms=lambda baseline: {
        "Scion": baseline.scion(decay=baseline.norm_decay),
        "ScionC": baseline.scionc(decay=baseline.norm_decay),
        OUTPUT_CORRECTED: baseline.scionc(decay=baseline.norm_decay, correct_output=True),
        BIAS_CONSTANT: baseline.scionc(decay=baseline.norm_decay, output_bias="constant"),
    },
    claims={
        "Correcting the output layer makes its sign norm grow towards the end": value(SIGN, OUTPUT_CORRECTED).at_least(
            NEGLIGIBLE_PERCENT, "100 ln(end / middle) of the sign norm", " %"
        ),
        "It grows more than with constant decay there": difference(SIGN, OUTPUT_CORRECTED, "ScionC").at_least(
            NEGLIGIBLE_PERCENT, "growth, output corrected - constant,", " %"
        ),
        f"With constant decay the sign norm is stable (within {SMALL_PERCENT:g} %)": all_of(
            value(SIGN, arm).within(SMALL_PERCENT, f"growth, {arm},", " %") for arm in ("Scion", "ScionC")
        ),
        "The decay of the output's bias, corrected or constant, makes no significant difference "
        f"(within {BY_ACCURACY.margin_words})": difference(ACCURACY, BIAS_CONSTANT, "ScionC").within(
            BY_ACCURACY.margin, "accuracy, bias constant - corrected,", " points"
        ),
    },
    show=partial(
        show_norms,
        more={"growth of the sign norm, %": SIGN},
        keys=("weight_norm", "hidden_norm", "spectral_norm", "bias_norm", "sign_norm", "grad_norm"),
    ),
    columns=(*COLUMNS, "spectral_norm", "bias_norm", "sign_norm"),
)
