"""fig-muon, ours: torch's Muon, as it is and corrected, beside MuonC and ScionC, each of these swept alike."""

from dataclasses import replace

from steadynorm.lab.paper.baselines import Baseline
from steadynorm.lab.paper.claims import Contrast, Test, all_of, mean, no_worse, value
from steadynorm.lab.paper.experiments.nanogpt import CURVES, MUON_METRICS, stable_norms
from steadynorm.lab.paper.experiments.norm_figures import gpt_figure
from steadynorm.lab.paper.experiments.swept_lr import LRS, plot_by_lr, settings, sweep, table_by_lr
from steadynorm.lab.paper.metrics import AFTERWARDS, BY_LOSS, LOSS
from steadynorm.lab.paper.plots import Shown, numbers, table_of_metrics
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.train.config import Config

MUON, CORRECTED, MUONC, SCIONC = "Muon", "Muon, corrected", "MuonC", "ScionC, Nesterov"
WHOLE, SWEPT = (MUON, CORRECTED, MUONC, SCIONC), (MUONC, SCIONC)


def _arms(baseline: Baseline) -> dict[str, Config]:
    """Return MuonC and ScionC at five settings each: as they are, and with half and twice the lr and the output lr."""
    return {
        MUON: baseline.muon(),
        CORRECTED: baseline.muon("muon-corrected"),
        **sweep(MUONC, baseline.muonc(), tuple(LRS)),
        **sweep(SCIONC, baseline.nesterov(), tuple(LRS)),
    }


def _mean_loss(arm: str) -> Contrast:
    return mean(value(LOSS, name) for name in settings(arm, tuple(LRS)))


def _is_near_its_best(arm: str) -> Test:
    """Return the test that no other setting of an arm's sweep is better than the arm as it is, by more than the margin."""
    others = (name for name in settings(arm, tuple(LRS)) if name != arm)
    return all_of(no_worse(BY_LOSS, arm, other) for other in others)


def _show(runs: Runs) -> Shown:
    curves = [replace(curve, arms=WHOLE).plot(runs) for curve in CURVES]
    sweeps = [plot_by_lr(runs, BY_LOSS, SWEPT, field) for field in LRS]
    sweeps = [plot for plot in sweeps if any(len(line.x) > 1 for line in plot.series)]  # others have not been run
    tables = [table_of_metrics(runs, MUON_METRICS, arms=WHOLE), table_by_lr(runs, BY_LOSS, SWEPT, tuple(LRS))]
    return [*curves, *sweeps, *tables], numbers(runs, MUON_METRICS)


_NO_WORSE = f"no worse than Muon's (by more than {BY_LOSS.margin_words})"
MUON_CORRECTED = gpt_figure(
    "fig-muon",
    "torch's Muon, as it is and corrected, beside MuonC and ScionC",
    "ours: the paper has no Muon. The same momentum (alpha 0.1, Nesterov) and half-life for all; the table and output layer are "
    "AdamW's beside Muon and within MuonC. MuonC and ScionC are run at five settings each: as they are, and with half and twice "
    "the lr and the output lr.",
    arms=_arms,
    claims={
        **stable_norms(CORRECTED, MUON, ("weight", "hidden", "gradient"), who="`correct`", whose=" of Muon"),
        **stable_norms(MUONC, MUON, ("hidden",)),
        f"The final loss of MuonC is no worse than that of Muon with `correct` (by more than {BY_LOSS.margin_words})": no_worse(
            BY_LOSS, MUONC, CORRECTED
        ),
        **{
            f"The final loss, {words}, is {_NO_WORSE}": no_worse(BY_LOSS, arm, MUON)
            for arm, words in ((CORRECTED, "Muon's with `correct`"), (SCIONC, "ScionC's with Nesterov's momentum"))
        },
        f"The final loss of MuonC is no worse than ScionC's, both as they are (by more than {BY_LOSS.margin_words})": no_worse(
            BY_LOSS, MUONC, SCIONC
        ),
        f"It is no worse either in the mean over the five settings of each (by more than {BY_LOSS.margin_words})": (
            _mean_loss(MUONC) - _mean_loss(SCIONC)
        ).at_most(BY_LOSS.margin, f"mean loss, {MUONC} - {SCIONC},", " nats"),
        **{
            f"{arm}: neither half nor twice the lr or the output lr is better (by more than {BY_LOSS.margin_words})": (
                _is_near_its_best(arm)
            )
            for arm in SWEPT
        },
        f"The final loss of MuonC is {_NO_WORSE}; {AFTERWARDS}": no_worse(BY_LOSS, MUONC, MUON),
    },
    show=_show,
    seeds=5,
)
