"""fig-nanogpt: Scion against ScionC on text. fig-muon: torch's Muon, as it is and corrected, beside ScionC."""

from typing import Any

from steadynorm.lab.paper.baselines import GPT, Baseline
from steadynorm.lab.paper.claims import All, Claim, difference, value
from steadynorm.lab.paper.experiment import TrainedExperiment
from steadynorm.lab.paper.experiments.norm_figures import (
    COLUMNS,
    NORMS,
    HalvesDrift,
    expected_drifts,
    norm_metrics,
)
from steadynorm.lab.paper.metrics import END, LOSS, LOSS_TOLERANCE, NEGLIGIBLE_PERCENT, drift, growth, mean_over
from steadynorm.lab.paper.plots import curves, numbers, table_of_metrics
from steadynorm.lab.paper.runs import RunPlan, Runs
from steadynorm.lab.train.config import Config
from steadynorm.report import page

ARMS = ("Scion", "ScionC")
PAPER = (2.846, 2.838)  # validation loss of 124M parameters on 100B tokens of FineWeb-Edu
NORM_NAMES = {"weight": "weight_norm", "hidden": "hidden_norm", "gradient": "grad_norm", "spectral": "spectral_norm"}


def _arms(baseline: Baseline) -> dict[str, Config]:
    return {"Scion": baseline.scion(), "ScionC": baseline.scionc()}


def _claims(_: RunPlan) -> list[Claim]:
    sign, loss = growth("sign_norm"), difference(LOSS, "ScionC", "Scion")
    return [
        *(
            Claim(
                f"ScionC keeps the {name} norm stable where Scion does not (drift at most half)",
                HalvesDrift(key, "ScionC", "Scion"),
            )
            for name, key in NORM_NAMES.items()
        ),
        Claim(
            f"The final loss of ScionC is no worse than Scion's (by more than {LOSS_TOLERANCE:g} nats)",
            loss.at_most(LOSS_TOLERANCE, "loss, ScionC - Scion,", " nats"),
        ),
        Claim("The final loss of ScionC is lower than Scion's", loss.at_most(0.0, "loss, ScionC - Scion,", " nats")),
        Claim(
            f"The sign norm is stable in both (within {2 * NEGLIGIBLE_PERCENT:g} % from the middle to the end)",
            All(value(sign, arm).within(2 * NEGLIGIBLE_PERCENT, f"100 ln(end / middle), {arm},", " %") for arm in ARMS),
        ),
    ]


def _curves(runs: Runs) -> list[page.Block]:
    return [
        curves(runs, "val_loss"),
        curves(runs, "weight_norm"),
        curves(runs, "hidden_norm", dashed="hidden_forecast", zero=True, caption="Dashed: forecast."),
        curves(runs, "grad_norm", log_y=True),
    ]


def _show(runs: Runs) -> tuple[list[page.Block], dict[str, Any]]:
    metrics = {"validation loss": LOSS, **norm_metrics([*NORMS, "spectral_norm", "sign_norm"])}
    blocks = [
        *_curves(runs),
        curves(runs, "spectral_norm"),
        curves(runs, "sign_norm"),
        table_of_metrics(runs, metrics, {"validation loss": PAPER}),
        *expected_drifts(runs),
    ]
    return blocks, numbers(runs, metrics)


NANOGPT = TrainedExperiment(
    "fig-nanogpt",
    "NanoGPT: Scion against ScionC",
    "ScionC gives lower validation loss (2.838 against 2.846) and more stable weight, gradient and spectral norms.",
    GPT, _arms, _claims, _show, (*COLUMNS, "spectral_norm", "sign_norm"), budgets=(100,),
)  # fmt: skip


MUON, CORRECTED, SCIONC = "Muon", "Muon, corrected", "ScionC, Nesterov"


def _muon_arms(baseline: Baseline) -> dict[str, Config]:
    return {MUON: baseline.muon(), CORRECTED: baseline.muon("muon-corrected"), SCIONC: baseline.nesterov()}


def _muon_claims(_: RunPlan) -> list[Claim]:
    return [
        *(
            Claim(
                f"`correct` keeps the {name} norm of Muon stable where Muon does not (drift at most half)",
                HalvesDrift(NORM_NAMES[name], CORRECTED, MUON),
            )
            for name in ("weight", "hidden", "gradient")
        ),
        *(
            Claim(
                f"The final loss, {words}, is no worse than Muon's (by more than {LOSS_TOLERANCE:g} nats)",
                difference(LOSS, arm, MUON).at_most(LOSS_TOLERANCE, f"loss, {arm} - {MUON},", " nats"),
            )
            for arm, words in ((CORRECTED, "Muon's with `correct`"), (SCIONC, "ScionC's with Nesterov's momentum"))
        ),
    ]


def _show_muon(runs: Runs) -> tuple[list[page.Block], dict[str, Any]]:
    metrics = {
        "validation loss": LOSS,
        **{f"drift of {key}, %": drift(key) for key in NORMS},
        "hidden_norm at the end": mean_over("hidden_norm", END),
        "forecast of hidden_norm at the end": mean_over("hidden_forecast", END),
    }
    return [*_curves(runs), table_of_metrics(runs, metrics)], numbers(runs, metrics)


MUON_CORRECTED = TrainedExperiment(
    "fig-muon",
    "torch's Muon, as it is and corrected, beside ScionC",
    "ours: the paper has no Muon. The same momentum (alpha 0.1, Nesterov) and half-life for all; the table and output layer are "
    "AdamW's beside Muon, and the learning rates of both were swept for Muon.",
    GPT, _muon_arms, _muon_claims, _show_muon, COLUMNS, budgets=(100,),
)  # fmt: skip
