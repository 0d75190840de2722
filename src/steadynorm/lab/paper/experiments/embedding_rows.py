"""fig-embedding, ours: rows of an untied embedding in their own time, and updated in every step."""

from dataclasses import replace
from functools import partial

from steadynorm.lab.paper.baselines import Baseline
from steadynorm.lab.paper.claims import Contrast, no_worse, value
from steadynorm.lab.paper.experiments.norm_figures import gpt_figure
from steadynorm.lab.paper.metrics import BY_LOSS, LOSS, SMALL_PERCENT, final, log_of
from steadynorm.lab.paper.plots import Curve, show
from steadynorm.lab.train.config import Config
from steadynorm.lab.train.token_rows import CLASSES, COLUMN

OWN_TIME, DENSE = "rows in their own time", "dense"
ROWS = {name: final(f"{COLUMN}/{name}") for name in CLASSES}
METRICS = {"validation loss": LOSS, **{f"RMS of {name} rows at the end": metric for name, metric in ROWS.items()}}


def _arms(baseline: Baseline) -> dict[str, Config]:
    task = replace(baseline.base.task, model=replace(baseline.base.task.model, tied=False))
    untied = replace(baseline, base=replace(baseline.base, task=task))
    return {OWN_TIME: untied.scionc(), DENSE: untied.scionc(own_time=False)}


def _rare_over_frequent(arm: str, rare: str = "rare") -> Contrast:
    """100 ln(RMS of rare rows / of frequent ones) at the end."""
    return value(log_of(ROWS[rare]), arm) - value(log_of(ROWS["frequent"]), arm)


_RANGES = ", ".join(f"{name} {low:g} to {high:g}" for name, (low, high) in CLASSES.items())
EMBEDDING = gpt_figure(
    "fig-embedding",
    "Embedding rows in their own time, and updated in every step",
    "ours: the paper's embedding is the output layer as well, so that every row gets a gradient in every step. Rows are divided "
    f"by the chance that a step's batch holds their token: {_RANGES}.",
    arms=_arms,
    claims={
        f"Updated in every step, rare rows grow larger than frequent ones (by more than {SMALL_PERCENT:g} %)": (
            _rare_over_frequent(DENSE).at_least(SMALL_PERCENT, f"100 ln(rare / frequent), {DENSE},", " %")
        ),
        f"In their own time, rare rows grow no larger than frequent ones (by more than {SMALL_PERCENT:g} %)": (
            _rare_over_frequent(OWN_TIME).at_most(SMALL_PERCENT, f"100 ln(rare / frequent), {OWN_TIME},", " %")
        ),
        "Beside frequent rows, occasional ones grow larger if updated in every step than in their own time": (
            _rare_over_frequent(DENSE, "occasional") - _rare_over_frequent(OWN_TIME, "occasional")
        ).at_least(0.0, "100 ln(occasional / frequent), dense - own time,", " %"),
        f"The final loss in their own time is no worse (by more than {BY_LOSS.margin_words})": no_worse(
            BY_LOSS, OWN_TIME, DENSE
        ),
    },
    show=partial(
        show,
        curves=[
            Curve("val_loss"),
            *(Curve(f"{COLUMN}/{name}", label=f"RMS of {name} rows", zero=True) for name in CLASSES),
        ],
        metrics=METRICS,
    ),
    columns=[f"{COLUMN}/{name}" for name in CLASSES],
    seeds=5,
)
