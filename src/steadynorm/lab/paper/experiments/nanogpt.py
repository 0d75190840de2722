"""fig-nanogpt: Scion against ScionC on text. fig-nanogpt-wide: the same one size up, beside MuonC."""

from collections.abc import Sequence
from functools import partial

from steadynorm.lab.paper.baselines import GPT_WIDE
from steadynorm.lab.paper.claims import Test, all_of, no_worse, value
from steadynorm.lab.paper.experiments.norm_figures import (
    COLUMNS,
    NORMS,
    expected_drifts,
    gpt_figure,
    halves_drift,
    norm_metrics,
)
from steadynorm.lab.paper.metrics import BY_LOSS, LOSS, SMALL_PERCENT, at_end, drift, growth
from steadynorm.lab.paper.plots import Curve, Shown, show
from steadynorm.lab.paper.runs import Runs

PAPER = (2.846, 2.838)  # validation loss of 124M parameters on 100B tokens of FineWeb-Edu: Scion, ScionC
NORM_NAMES = {"weight": "weight_norm", "hidden": "hidden_norm", "gradient": "grad_norm", "spectral": "spectral_norm"}
CURVES = [
    Curve("val_loss"),
    Curve("weight_norm"),
    Curve("hidden_norm", dashed="hidden_forecast", zero=True, caption="Dashed: forecast."),
    Curve("grad_norm", log_y=True),
]
MUON_METRICS = {
    "validation loss": LOSS,
    **{f"drift of {key}, %": drift(key) for key in NORMS},
    "hidden_norm at the end": at_end("hidden_norm"),
    "forecast of hidden_norm at the end": at_end("hidden_forecast"),
}


def _show(runs: Runs) -> Shown:
    curves = [*CURVES, Curve("spectral_norm"), Curve("sign_norm")]
    metrics = {"validation loss": LOSS, **norm_metrics([*NORMS, "spectral_norm", "sign_norm"])}
    blocks, summary = show(runs, curves, metrics, {"validation loss": PAPER})
    return [*blocks, *expected_drifts(runs)], summary


def stable_norms(
    corrected: str, constant: str, names: Sequence[str], who: str = "", whose: str = ""
) -> dict[str, Test]:
    """Return the claims that corrected decay keeps these norms more stable, with its name and, if needed, whose norm it is."""
    return {
        f"{who or corrected} keeps the {name} norm{whose} stable where {constant} does not (drift at most half)": halves_drift(
            NORM_NAMES[name], corrected, constant
        )
        for name in names
    }


def loss_is_no_worse(one: str, other: str) -> dict[str, Test]:
    """Return the claim that one arm ends at a loss no worse than another's."""
    text = f"The final loss of {one} is no worse than {other}'s (by more than {BY_LOSS.margin_words})"
    return {text: no_worse(BY_LOSS, one, other)}


LOWER = {"The final loss of ScionC is lower than Scion's": no_worse(BY_LOSS, "ScionC", "Scion", margin=0.0)}
NANOGPT = gpt_figure(
    "fig-nanogpt",
    "NanoGPT: Scion against ScionC",
    "ScionC gives lower validation loss (2.838 against 2.846) and more stable weight, gradient and spectral norms.",
    arms=lambda baseline: {"Scion": baseline.scion(), "ScionC": baseline.scionc()},
    claims={
        **stable_norms("ScionC", "Scion", list(NORM_NAMES)),
        **loss_is_no_worse("ScionC", "Scion"),
        **LOWER,
        f"The sign norm is stable in both (within {SMALL_PERCENT:g} % from the middle to the end)": all_of(
            value(growth("sign_norm"), arm).within(SMALL_PERCENT, f"100 ln(end / middle), {arm},", " %")
            for arm in ("Scion", "ScionC")
        ),
    },
    show=_show,
    columns=(*COLUMNS, "spectral_norm", "sign_norm"),
)
NANOGPT_WIDE = gpt_figure(
    "fig-nanogpt-wide",
    "NanoGPT, 6 layers x 256 with GPT-2's tokens: Scion, ScionC and MuonC",
    "at 124M parameters ScionC gives lower validation loss (2.838 against 2.846) and more stable norms. Here the learning rates are "
    "those of the small GPT, swept there; MuonC's AdamW has a quarter of its lr, because the model is four times as wide.",
    baselines=GPT_WIDE,
    arms=lambda baseline: {"Scion": baseline.scion(), "ScionC": baseline.scionc(), "MuonC": baseline.muonc()},
    claims={
        **stable_norms("ScionC", "Scion", ("hidden", "gradient")),
        **stable_norms("MuonC", "Scion", ("hidden",)),
        **loss_is_no_worse("ScionC", "Scion"),
        **LOWER,
        **loss_is_no_worse("MuonC", "ScionC"),
    },
    show=partial(show, curves=CURVES, metrics=MUON_METRICS),
)
