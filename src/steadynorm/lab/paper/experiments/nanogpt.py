"""fig-nanogpt: Scion against ScionC on text. fig-muon: torch's Muon, as it is and corrected, beside ScionC."""

from steadynorm.lab.paper.baselines import GPT, Baseline
from steadynorm.lab.paper.experiment import Outcome, claim
from steadynorm.lab.paper.experiments.norm_stability import COLUMNS, NEGLIGIBLE_PERCENT, expected, steadier
from steadynorm.lab.paper.metrics import END, LOSS, Measure, drift, growth, mean_over
from steadynorm.lab.paper.plots import curves, measured, numbers
from steadynorm.lab.paper.statistics import at_most, difference, estimate, every, within
from steadynorm.lab.paper.trained import Runs, TrainedExperiment
from steadynorm.lab.train.config import Config
from steadynorm.report import page

NATS = 0.02  # of validation loss within which results are called equal
ARMS = ("Scion", "ScionC")
PAPER = (2.846, 2.838)  # validation loss of 124M parameters on 100B tokens of FineWeb-Edu


def _arms(baseline: Baseline) -> dict[str, Config]:
    return {"Scion": baseline.scion(), "ScionC": baseline.scionc()}


def _judge(runs: Runs) -> Outcome:
    norms = {"weight": "weight_norm", "hidden": "hidden_norm", "gradient": "grad_norm", "spectral": "spectral_norm"}
    claims = [
        claim(
            f"ScionC keeps the {name} norm stable where Scion does not (drift at most half)",
            lambda key=key: steadier(runs, key, "ScionC", "Scion"),
        )
        for name, key in norms.items()
    ]
    sign = growth("sign_norm")
    claims += [
        claim(
            f"The final loss of ScionC is no worse than Scion's (by more than {NATS:g} nats)",
            lambda: at_most(
                difference(runs.values(LOSS, "ScionC"), runs.values(LOSS, "Scion")), NATS, "loss, ScionC - Scion,", " nats"
            ),
        ),
        claim(
            "The final loss of ScionC is lower than Scion's",
            lambda: at_most(
                difference(runs.values(LOSS, "ScionC"), runs.values(LOSS, "Scion")), 0.0, "loss, ScionC - Scion,", " nats"
            ),
        ),
        claim(
            f"The sign norm is stable in both (within {2 * NEGLIGIBLE_PERCENT:g} % from the middle to the end)",
            lambda: every([
                within(estimate(runs.values(sign, arm)), 2 * NEGLIGIBLE_PERCENT, f"100 ln(end / middle), {arm},", " %") for arm in ARMS
            ]),
        ),
    ]  # fmt: skip
    keys = ("weight_norm", "hidden_norm", "grad_norm", "spectral_norm", "sign_norm")
    measures: dict[str, Measure] = {
        "validation loss": LOSS,
        **{f"drift of {key}, %": drift(key) for key in keys},
        **{f"{key} at the end": mean_over(key, END) for key in keys},
    }
    blocks: list[page.Block] = [
        curves(runs, "val_loss", ARMS),
        curves(runs, "weight_norm", ARMS),
        curves(runs, "hidden_norm", ARMS, dashed="hidden_forecast", zero=True, caption="Dashed: forecast."),
        curves(runs, "grad_norm", ARMS, log_y=True),
        curves(runs, "spectral_norm", ARMS),
        curves(runs, "sign_norm", ARMS),
        measured(runs, measures, ARMS, {"validation loss": PAPER}),
        *expected(runs, ARMS),
    ]
    return Outcome(blocks, claims, numbers(runs, measures, ARMS))


NANOGPT = TrainedExperiment(
    "fig-nanogpt",
    "NanoGPT: Scion against ScionC",
    "ScionC gives lower validation loss (2.838 against 2.846) and more stable weight, gradient and spectral norms.",
    GPT, _arms, _judge, (*COLUMNS, "spectral_norm", "sign_norm"), budgets=(100,),
)  # fmt: skip


MUON, CORRECTED, SCIONC = MUONS = ("Muon", "Muon, corrected", "ScionC, Nesterov")


def _muon_arms(baseline: Baseline) -> dict[str, Config]:
    return {MUON: baseline.muon(), CORRECTED: baseline.muon("muon-corrected"), SCIONC: baseline.nesterov()}


def _judge_muon(runs: Runs) -> Outcome:
    norms = {"weight": "weight_norm", "hidden": "hidden_norm", "gradient": "grad_norm"}
    claims = [
        claim(
            f"`correct` keeps the {name} norm of Muon stable where Muon does not (drift at most half)",
            lambda key=key: steadier(runs, key, CORRECTED, MUON),
        )
        for name, key in norms.items()
    ]
    for arm, words in ((CORRECTED, "Muon's with `correct`"), (SCIONC, "ScionC's with Nesterov's momentum")):
        claims.append(claim(
            f"The final loss, {words}, is no worse than Muon's (by more than {NATS:g} nats)",
            lambda arm=arm: at_most(
                difference(runs.values(LOSS, arm), runs.values(LOSS, MUON)), NATS, f"loss, {arm} - {MUON},", " nats"
            ),
        ))  # fmt: skip
    measures: dict[str, Measure] = {
        "validation loss": LOSS,
        **{f"drift of {key}, %": drift(key) for key in norms.values()},
        "hidden_norm at the end": mean_over("hidden_norm", END),
        "forecast of hidden_norm at the end": mean_over("hidden_forecast", END),
    }
    blocks: list[page.Block] = [
        curves(runs, "val_loss", MUONS),
        curves(runs, "weight_norm", MUONS),
        curves(runs, "hidden_norm", MUONS, dashed="hidden_forecast", zero=True, caption="Dashed: forecast."),
        curves(runs, "grad_norm", MUONS, log_y=True),
        measured(runs, measures, MUONS),
    ]
    return Outcome(blocks, claims, numbers(runs, measures, MUONS))


MUON_CORRECTED = TrainedExperiment(
    "fig-muon",
    "torch's Muon, as it is and corrected, beside ScionC",
    "ours: the paper has no Muon. The same momentum (alpha 0.1, Nesterov) and half-life for all; the table and output layer are "
    "AdamW's beside Muon, and the learning rates of both were swept for Muon.",
    GPT, _muon_arms, _judge_muon, COLUMNS, budgets=(100,),
)  # fmt: skip
