"""fig-polar-steps, ours: how exact the polar factor has to be, which decides the default number of steps."""

from statistics import fmean

import numpy as np

from steadynorm.lab.paper.baselines import Baseline
from steadynorm.lab.paper.claims import Test, all_of, difference, no_worse, value
from steadynorm.lab.paper.experiments.norm_figures import gpt_figure
from steadynorm.lab.paper.metrics import BY_LOSS, LOSS, NEGLIGIBLE_PERCENT, SMALL_PERCENT, Metric, at_end, log_ratio
from steadynorm.lab.paper.plots import Curve, Shown, layer_maps, show
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.train.config import Config
from steadynorm.records import Run

SVD, NEWTON_SCHULZ = "svd", "Newton-Schulz, 5 steps"
STEPS = {steps: f"{steps} steps" for steps in (5, 4, 3)}
NORM, FORECAST, LENGTH = "weight_norm/hidden", "forecast_norm/hidden", "update_norm/hidden"
OFF = log_ratio(NORM, FORECAST)


def length_sq(run: Run) -> float:
    """Return |u|^2 over that of an exact polar factor, mean over hidden matrices and the run."""
    return fmean(float(np.nanmean(np.square(run.layers[name]["update_norm"]))) for name in hidden(run))


def hidden(run: Run) -> list[str]:
    """Return the names of the hidden matrices."""
    return [name for name in run.layers if name.startswith("blocks.")]


METRICS: dict[str, Metric] = {
    "validation loss": LOSS,
    "|u|² / that of an exact polar factor": length_sq,
    "100 ln(measured / forecast norm)": OFF,
    "hidden norm at the end": at_end(NORM),
}


def _arms(baseline: Baseline) -> dict[str, Config]:
    return {
        SVD: baseline.scionc(polar="svd"),
        **{arm: baseline.scionc(polar_steps=steps) for steps, arm in STEPS.items()},
        NEWTON_SCHULZ: baseline.scionc(polar="newton-schulz"),
    }


def _may_replace(fewer: str, more: str) -> Test:
    """Return the test by which the default is chosen: the loss is no worse, and the norm is as near to its forecast."""
    what = f"100 ln(measured / forecast), {fewer} - {more},"
    return all_of([
        no_worse(BY_LOSS, fewer, more), difference(OFF, fewer, more).within(NEGLIGIBLE_PERCENT, what, " %")
    ])  # fmt: skip


def _show(runs: Runs) -> Shown:
    caption = "Mean over the hidden matrices; 1: an exact polar factor."
    curves = [
        Curve("val_loss"),
        Curve(LENGTH, label="|u| / that of an exact polar factor", caption=caption),
        Curve(NORM, dashed=FORECAST, label="Norm of the hidden matrices", zero=True, caption="Dashed: forecast."),
    ]
    blocks, summary = show(runs, curves, METRICS)
    caption = "By layer and step, mean over seeds."
    blocks[-1:-1] = layer_maps(runs, hidden, "update_norm", "|u| / exact", "", caption, 1.0)
    return blocks, summary


_ALLOWED = (
    f"loss no worse by more than {BY_LOSS.margin_words}, measured / forecast norm within {NEGLIGIBLE_PERCENT:g} %"
)
POLAR_STEPS = gpt_figure(
    "fig-polar-steps",
    "How many polar steps are enough?",
    "ours: the paper does not vary how polar factors are computed. This decides the default of `polar_steps`.",
    arms=_arms,
    claims={
        f"4 steps may replace 5: {_ALLOWED}": _may_replace(STEPS[4], STEPS[5]),
        f"3 steps may replace 5: {_ALLOWED}": _may_replace(STEPS[3], STEPS[5]),
        f"5 steps may replace an exact polar factor: {_ALLOWED}": _may_replace(STEPS[5], SVD),
        f"Muon's Newton-Schulz may replace 5 steps of PolarExpress: {_ALLOWED}": _may_replace(NEWTON_SCHULZ, STEPS[5]),
        f"With 5 steps |u|² is that of an exact polar factor (within {SMALL_PERCENT:g} %)": (
            100.0 * difference(length_sq, STEPS[5], SVD)
        ).within(SMALL_PERCENT, "100 (|u|² of 5 steps - of svd)", " %"),
        f"With an exact polar factor the norm meets its forecast (within {SMALL_PERCENT:g} %)": value(OFF, SVD).within(
            SMALL_PERCENT, "100 ln(measured / forecast)", " %"
        ),
    },
    show=_show,
    columns=(NORM, FORECAST, LENGTH),
    layers=("update_norm",),
    seeds=5,
)
