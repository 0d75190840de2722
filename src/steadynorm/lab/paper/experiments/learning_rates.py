"""fig-lr-eff: does the best lr, or the best effective lr, stay the same across alpha?

Accuracy is fitted by least squares as c + slope u + bend u² in u = ln(effective lr), with one bend for all alphas. The points
are symmetric in u and the same for every alpha, so every coefficient is a weighted sum of accuracies whose weights sum to zero:
noise makes no coefficient likelier to be positive than negative. If the best lr goes as (the lr of equal effective lr)^b, then

    slope = const + 2 bend (1 - b) ln(lr of equal effective lr),

and the tilt of the slopes by that logarithm is 2 bend (1 - b): with b = 0 the best lr stays, with b = 1 the best effective lr.
"""

import math
from dataclasses import replace
from itertools import permutations
from statistics import fmean

from steadynorm import theory
from steadynorm.lab.paper.baselines import ALPHA, VIT, Baseline, short
from steadynorm.lab.paper.claims import Outcomes, Test, all_of, coefficient, mean, value
from steadynorm.lab.paper.experiment import TrainedExperiment
from steadynorm.lab.paper.metrics import ACCURACY, at_end
from steadynorm.lab.paper.plots import Shown, numbers, points_with_errors, round_to
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.paper.statistics import Finding, parabola_peak, sample_sd
from steadynorm.lab.train.config import Config
from steadynorm.report import page

ALPHAS = (0.01, 0.03, 0.1, 0.5)
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # effective lr in units of the baseline's


def lr_arm(alpha: float, ratio: float) -> str:
    """Return the name of the arm with this alpha and this multiple of the baseline's effective lr."""
    return f"alpha {alpha:g}, effective lr x {ratio:g}"


def _lr_for(baseline: Baseline, alpha: float, ratio: float) -> float:
    return short(ratio * baseline.lr * theory.effective_lr(1.0, ALPHA) / theory.effective_lr(1.0, alpha))


def _arms(baseline: Baseline) -> dict[str, Config]:
    """Keep lr, alpha and decay of the sign layer. At the desk eta is not small against alpha: use the exact decay."""
    overlap = "exact" if baseline.scale == "desk" else "linear"
    return {
        lr_arm(alpha, ratio): baseline.scionc(
            lr=_lr_for(baseline, alpha, ratio), alpha=alpha, output_alpha=ALPHA, overlap=overlap
        )
        for alpha in ALPHAS
        for ratio in RATIOS
    }


# The fit


_U = [math.log(ratio) for ratio in RATIOS]
_ACCURACIES = {alpha: [value(ACCURACY, lr_arm(alpha, ratio)) for ratio in RATIOS] for alpha in ALPHAS}
SLOPES = {alpha: coefficient(_U, accuracies) for alpha, accuracies in _ACCURACIES.items()}
BEND = mean(coefficient([u**2 for u in _U], accuracies) for accuracies in _ACCURACIES.values())
TILT = coefficient([-math.log(theory.effective_lr(1.0, alpha)) for alpha in ALPHAS], list(SLOPES.values()))


def exponent(outcomes: Outcomes) -> float:
    """Return b of: the best lr goes as (the lr of equal effective lr)^b."""
    return 1 - fmean(TILT.by_seed(outcomes)) / (2 * fmean(BEND.by_seed(outcomes)))


def exponent_above(least: float) -> Test:
    """Return the test that b > least, that is tilt - 2 (1 - least) bend > 0, given a best lr at all (bend < 0)."""
    excess = TILT - 2 * (1 - least) * BEND
    bounds = all_of([BEND.at_most(0.0, "bend"), excess.at_least(0.0, f"tilt - {2 * (1 - least):g} bend")])

    def test(outcomes: Outcomes) -> Finding:
        note = f"the best lr goes as (lr of equal effective lr)^{exponent(outcomes):.2f}"
        return replace(bounds(outcomes), note=note)

    return test


def within_factor_two() -> Test:
    """Return the test that no two best effective lrs, at u = -slope / (2 bend), are further apart than ln 2."""
    return all_of(
        (SLOPES[one] - SLOPES[other] + 2 * math.log(2) * BEND).at_most(
            0.0, f"slope at alpha {one:g} - at {other:g} + 2 ln 2 bend"
        )
        for one, other in permutations(ALPHAS, 2)
    )


# What is shown


def best_lrs(outcomes: Outcomes, baseline: Baseline, alpha: float) -> list[tuple[float, float, bool]]:
    """Return ln of the best lr and of the best effective lr, and whether the sweep brackets them, by seed."""
    lrs = [_lr_for(baseline, alpha, ratio) for ratio in RATIOS]
    by_ratio = [outcomes.values(ACCURACY, lr_arm(alpha, ratio)) for ratio in RATIOS]
    best = []
    for accuracies in zip(*by_ratio, strict=True):
        peak, inside = parabola_peak([math.log(lr) for lr in lrs], accuracies)
        best.append((peak, peak + math.log(theory.effective_lr(1.0, alpha)), inside))
    return best


def _show(runs: Runs) -> Shown:
    blocks: list[page.Block] = [_plot(runs, effective=False), _plot(runs, effective=True)]
    summary = numbers(runs, {"accuracy": ACCURACY, "hidden norm at the end": at_end("hidden_norm")})
    if len(runs.complete_arms()) < len(runs.plan.arms):
        return blocks, summary
    by_alpha = {alpha: best_lrs(runs, runs.plan.baseline, alpha) for alpha in ALPHAS}
    means = {alpha: [math.exp(fmean(seed[k] for seed in seeds)) for k in (0, 1)] for alpha, seeds in by_alpha.items()}
    best_rows = [
        (alpha, *means[alpha], sample_sd([seed[0] for seed in seeds]), "yes" if all(s[2] for s in seeds) else "no")
        for alpha, seeds in by_alpha.items()
    ]
    bend, tilt, *slopes = (contrast.by_seed(runs) for contrast in (BEND, TILT, *SLOPES.values()))
    fit_rows = [(str(seed), *row) for seed, *row in zip(runs.plan.seeds, bend, tilt, *slopes, strict=True)]
    blocks += [
        page.Table(
            "Best learning rates",
            ("alpha", "best lr", "best effective lr", "sd of its ln over seeds", "inside the sweep"),
            best_rows,
            "By a parabola in ln lr through the best three, for each seed; geometric mean over seeds. To look at: every alpha's "
            "lrs are centred on one effective lr, so that noise too would put the best ones there. The claims rest on the fit below.",
        ),
        page.Table(
            "Accuracy as one parabola in ln lr",
            ("seed", "bend", "tilt", *(f"slope, alpha {alpha:g}" for alpha in ALPHAS)),
            fit_rows,
            "Points of accuracy = c + slope u + bend u² in u = ln(effective lr / the baseline's), one bend for all alphas. Tilt: of the "
            "slopes, by ln of the lr that has the same effective lr: 0 if the best effective lr is the same at every alpha, twice the "
            "bend if the best lr is.",
        ),
    ]
    summary["fit"] = {
        "exponent": round_to(exponent(runs)),
        "bend": list(map(round_to, bend)),
        "tilt": list(map(round_to, tilt)),
    }
    summary["best"] = {
        f"{alpha:g}": dict(zip(("lr", "effective_lr"), map(round_to, best), strict=True))
        for alpha, best in means.items()
    }
    return blocks, summary


def _plot(runs: Runs, *, effective: bool) -> page.Plot:
    series = []
    for alpha in ALPHAS:
        lrs = {_lr_for(runs.plan.baseline, alpha, ratio): lr_arm(alpha, ratio) for ratio in RATIOS}
        places = {theory.effective_lr(lr, alpha) if effective else lr: (arm, None) for lr, arm in lrs.items()}
        line = points_with_errors(runs, ACCURACY, places, "accuracy", f"alpha {alpha:g}")
        series += [line] if len(line.x) else []
    label = "largest effective lr" if effective else "largest lr"
    return page.Plot(
        f"Accuracy against the {label}", label, "%", series, "Mean over seeds, standard error.", log_x=True
    )


LR_EFF = TrainedExperiment(
    "fig-lr-eff",
    "Learning rate and effective learning rate across alpha",
    "the best lr increases with alpha from 0.01 to 0.5; the best effective lr is within a factor of 2.",
    baselines=VIT,
    arms=_arms,
    claims={
        "The best effective lr moves less across alpha than the best lr (exponent above 1/2)": exponent_above(0.5),
        "The best lr increases with alpha (exponent above 0)": exponent_above(0.0),
        "The best effective lr stays within a factor of 2": within_factor_two(),
    },
    show=_show,
    columns=("hidden_norm",),
)
