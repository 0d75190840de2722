"""fig-nanogpt: Scion against ScionC on text."""

from steadynorm import page
from steadynorm.paper.drawing import curves, measured, numbers
from steadynorm.paper.experiment import Outcome, claim
from steadynorm.paper.measures import END, LOSS, Measure, drift, growth, mean_over
from steadynorm.paper.norms import COLUMNS, NOTHING, expected, steadier
from steadynorm.paper.settings import GPT, Setting
from steadynorm.paper.statistics import at_most, difference, estimate, every, within
from steadynorm.paper.training import Runs, Training
from steadynorm.train.config import Config

NATS = 0.02  # of validation loss within which results are called equal
ARMS = ("Scion", "ScionC")
PAPER = (2.846, 2.838)  # validation loss of 124M parameters on 100B tokens of FineWeb-Edu


def _arms(setting: Setting) -> dict[str, Config]:
    return {"Scion": setting.scion(), "ScionC": setting.scionc()}


def _judge(runs: Runs) -> Outcome:
    norms = {"weight": "hidden_norm", "gradient": "grad_norm", "spectral": "spectral_norm"}
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
            f"The sign norm is stable in both (within {2 * NOTHING:g} % from the middle to the end)",
            lambda: every([
                within(estimate(runs.values(sign, arm)), 2 * NOTHING, f"100 ln(end / middle), {arm},", " %") for arm in ARMS
            ]),
        ),
    ]  # fmt: skip
    keys = ("hidden_norm", "grad_norm", "spectral_norm", "sign_norm")
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


NANOGPT = Training(
    "fig-nanogpt",
    "NanoGPT: Scion against ScionC",
    "ScionC gives lower validation loss (2.838 against 2.846) and more stable weight, gradient and spectral norms.",
    GPT, _arms, _judge, (*COLUMNS, "spectral_norm", "sign_norm"), budgets=(100,),
)  # fmt: skip
