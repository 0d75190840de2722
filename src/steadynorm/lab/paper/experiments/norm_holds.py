"""fig-hold, fig-hold-vit, ours: ways to hold the norm, each with its lr swept: how well they train and how far the norm strays."""

from collections.abc import Mapping
from functools import partial

from steadynorm import theory
from steadynorm.lab.paper.baselines import GPT, VIT, Baseline, short
from steadynorm.lab.paper.claims import Test, all_of, no_worse, same, value
from steadynorm.lab.paper.experiment import TrainedExperiment
from steadynorm.lab.paper.experiments.norm_figures import halves_drift, off_target, plot_over_asked
from steadynorm.lab.paper.experiments.swept_lr import loss_at_ends, plot_by_lr, sweep, table_by_lr
from steadynorm.lab.paper.metrics import BY_ACCURACY, BY_LOSS, NEGLIGIBLE_PERCENT, SMALL_PERCENT, Score, at_end, drift
from steadynorm.lab.paper.plots import Curve, Shown, numbers, table_of_metrics
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.paper.winners import BALANCED, CAUTIOUS, CONSTANT, CORRECTED, DRIFT, FIXED, WAYS
from steadynorm.lab.train.config import Config

OFF = off_target()
METRICS = {
    "100 ln(norm / target) at the end": OFF,
    DRIFT: drift("hidden_norm"),
    "norm of the matrices at the end": at_end("matrix_norm"),
}


def _ways(baseline: Baseline) -> dict[str, Config]:
    """Return every way to hold the norm of the hidden layers; the output layer has constant decay in all of them.

    With a fixed norm the lr is the one that turns the weights by the same angle per step as at the steady norm. ScionC's
    lrs are absolute, not relative to the norm, so with the same target this is the same number.
    """
    relative = theory.fixed_norm_lr(baseline.lr, baseline.target())
    lr = short(theory.lr_of_fixed_norm(relative, baseline.target()))
    return {
        CORRECTED: baseline.scionc(),
        **{arm: baseline.scionc(hold="balance", balance_steps=float(steps)) for steps, arm in BALANCED.items()},
        CONSTANT: baseline.scion(),
        FIXED: baseline.scionc(hold="fixed", lr=lr),
        CAUTIOUS: baseline.scionc(cautious=True),
    }


def _arms(baseline: Baseline) -> dict[str, Config]:
    """Sweep the lr of the hidden layers, with target (or constant decay) and the output layer's lr as they are."""
    return {name: arm for way, config in _ways(baseline).items() for name, arm in sweep(way, config).items()}


def _claims(score: Score) -> dict[str, Test]:
    near, margin = "100 ln(norm / target)", score.margin_words

    def on_target(way: str, percent: float) -> Test:
        return value(OFF, way).within(percent, f"{near}, {way},", " %")

    def more_sensitive(one: str, other: str) -> Test:
        what = f"what half and twice the lr cost, {one} - {other},"
        return (loss_at_ends(score, one) - loss_at_ends(score, other)).at_most(score.margin, what, f" {score.unit}")

    return {
        f"Corrected decay is no worse than constant decay (by more than {margin})": no_worse(
            score, CORRECTED, CONSTANT
        ),
        f"Balanced decay, T = 20 and 200, is no worse than corrected decay (by more than {margin})": all_of(
            no_worse(score, arm, CORRECTED) for arm in BALANCED.values()
        ),
        f"A fixed norm at the lr of the same angle per step ends where corrected decay does (within {margin})": same(
            score, FIXED, CORRECTED
        ),
        f"Cautious decay is no worse than corrected decay (by more than {margin})": no_worse(
            score, CAUTIOUS, CORRECTED
        ),
        f"Corrected decay ends at its target (within {SMALL_PERCENT:g} %)": on_target(CORRECTED, SMALL_PERCENT),
        f"Balanced decay, T = 20 and 200, ends at its target (within {NEGLIGIBLE_PERCENT:g} %)": all_of(
            on_target(arm, NEGLIGIBLE_PERCENT) for arm in BALANCED.values()
        ),
        f"Cautious decay ends at its target (within {SMALL_PERCENT:g} %)": on_target(CAUTIOUS, SMALL_PERCENT),
        "Corrected decay keeps the hidden norm stable where constant decay does not (drift at most half)": halves_drift(
            "hidden_norm", CORRECTED, CONSTANT
        ),
        f"Half and twice the lr cost corrected decay no more than constant decay (by more than {margin})": more_sensitive(
            CORRECTED, CONSTANT
        ),
        f"Half and twice the lr cost no other way to hold the norm more than corrected decay (by more than {margin})": all_of(
            more_sensitive(way, CORRECTED) for way in (*BALANCED.values(), FIXED, CAUTIOUS)
        ),
    }


def _show(runs: Runs, score: Score) -> Shown:
    metrics = {score.name: score.metric, **METRICS}
    blocks = [
        plot_by_lr(runs, score, WAYS),
        plot_over_asked(runs, WAYS),
        Curve("val_accuracy" if score is BY_ACCURACY else "val_loss", WAYS).plot(runs),
        table_by_lr(runs, score, WAYS),
        table_of_metrics(runs, metrics, arms=WAYS),
    ]
    return blocks, numbers(runs, metrics)


def _experiment(
    name: str, task: str, baselines: Mapping[str, Baseline], score: Score, desk_budget: int
) -> TrainedExperiment:
    return TrainedExperiment(
        name,
        f"Six ways to hold the norm of a {task}, each with its lr swept",
        "ours: the paper corrects decay and compares it with constant decay alone. Each way is run at half, once and twice the "
        "lr of the hidden layers; targets, the constant decay and the lr of the output layer stay.",
        baselines=baselines,
        arms=_arms,
        claims=_claims(score),
        show=partial(_show, score=score),
        columns=("hidden_norm", "matrix_norm", "weight_decay"),
        desk_budgets=(desk_budget,),
    )


HOLD = _experiment("fig-hold", "GPT", GPT, BY_LOSS, 100)
HOLD_VIT = _experiment("fig-hold-vit", "ViT", VIT, BY_ACCURACY, 300)
