"""fig-nanogpt: Scion against ScionC on text. fig-muon: torch's Muon, as it is and corrected, beside MuonC and ScionC."""

from functools import partial

from steadynorm.lab.paper.baselines import GPT
from steadynorm.lab.paper.claims import all_of, difference, value
from steadynorm.lab.paper.experiment import TrainedExperiment
from steadynorm.lab.paper.experiments.norm_figures import COLUMNS, NORMS, expected_drifts, halves_drift, norm_metrics
from steadynorm.lab.paper.metrics import END, LOSS, LOSS_TOLERANCE, SMALL_PERCENT, drift, growth, mean_over
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
SCIONC_LOSS = difference(LOSS, "ScionC", "Scion")


def _show(runs: Runs) -> Shown:
    curves = [*CURVES, Curve("spectral_norm"), Curve("sign_norm")]
    metrics = {"validation loss": LOSS, **norm_metrics([*NORMS, "spectral_norm", "sign_norm"])}
    blocks, summary = show(runs, curves, metrics, {"validation loss": PAPER})
    return [*blocks, *expected_drifts(runs)], summary


NANOGPT = TrainedExperiment(
    "fig-nanogpt",
    "NanoGPT: Scion against ScionC",
    "ScionC gives lower validation loss (2.838 against 2.846) and more stable weight, gradient and spectral norms.",
    baselines=GPT,
    arms=lambda baseline: {"Scion": baseline.scion(), "ScionC": baseline.scionc()},
    claims={
        **{
            f"ScionC keeps the {name} norm stable where Scion does not (drift at most half)": halves_drift(
                key, "ScionC", "Scion"
            )
            for name, key in NORM_NAMES.items()
        },
        f"The final loss of ScionC is no worse than Scion's (by more than {LOSS_TOLERANCE:g} nats)": SCIONC_LOSS.at_most(
            LOSS_TOLERANCE, "loss, ScionC - Scion,", " nats"
        ),
        "The final loss of ScionC is lower than Scion's": SCIONC_LOSS.at_most(0.0, "loss, ScionC - Scion,", " nats"),
        f"The sign norm is stable in both (within {SMALL_PERCENT:g} % from the middle to the end)": all_of(
            value(growth("sign_norm"), arm).within(SMALL_PERCENT, f"100 ln(end / middle), {arm},", " %")
            for arm in ("Scion", "ScionC")
        ),
    },
    show=_show,
    columns=(*COLUMNS, "spectral_norm", "sign_norm"),
    budgets=(100,),
)

MUON, CORRECTED, MUONC, SCIONC = "Muon", "Muon, corrected", "MuonC", "ScionC, Nesterov"
MUON_METRICS = {
    "validation loss": LOSS,
    **{f"drift of {key}, %": drift(key) for key in NORMS},
    "hidden_norm at the end": mean_over("hidden_norm", END),
    "forecast of hidden_norm at the end": mean_over("hidden_forecast", END),
}
MUON_CORRECTED = TrainedExperiment(
    "fig-muon",
    "torch's Muon, as it is and corrected, beside MuonC and ScionC",
    "ours: the paper has no Muon. The same momentum (alpha 0.1, Nesterov) and half-life for all; the table and output layer are "
    "AdamW's beside Muon and within MuonC, and the learning rates of both were swept for Muon.",
    baselines=GPT,
    arms=lambda baseline: {
        MUON: baseline.muon(),
        CORRECTED: baseline.muon("muon-corrected"),
        MUONC: baseline.muonc(),
        SCIONC: baseline.nesterov(),
    },
    claims={
        f"`correct` keeps the {name} norm of Muon stable where Muon does not (drift at most half)": halves_drift(
            NORM_NAMES[name], CORRECTED, MUON
        )
        for name in ("weight", "hidden", "gradient")
    }
    | {
        "MuonC keeps the hidden norm stable where Muon does not (drift at most half)": halves_drift(
            NORM_NAMES["hidden"], MUONC, MUON
        ),
        f"The final loss of MuonC is no worse than that of Muon with `correct` (by more than {LOSS_TOLERANCE:g} nats)": (
            difference(LOSS, MUONC, CORRECTED).at_most(LOSS_TOLERANCE, f"loss, {MUONC} - {CORRECTED},", " nats")
        ),
    }
    | {
        f"The final loss, {words}, is no worse than Muon's (by more than {LOSS_TOLERANCE:g} nats)": difference(
            LOSS, arm, MUON
        ).at_most(LOSS_TOLERANCE, f"loss, {arm} - {MUON},", " nats")
        for arm, words in ((CORRECTED, "Muon's with `correct`"), (SCIONC, "ScionC's with Nesterov's momentum"))
    },
    show=partial(show, curves=CURVES, metrics=MUON_METRICS),
    columns=COLUMNS,
    budgets=(100,),
)
