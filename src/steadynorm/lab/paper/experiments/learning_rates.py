"""fig-lr-eff: does the best lr, or the best effective lr, stay the same across alpha?"""

import math
from itertools import permutations
from statistics import fmean
from typing import NamedTuple

from steadynorm import theory
from steadynorm.lab.paper.baselines import ALPHA, VIT, Baseline, short
from steadynorm.lab.paper.experiment import MissingRunsError, Outcome, claim
from steadynorm.lab.paper.metrics import ACCURACY, END, mean_over
from steadynorm.lab.paper.plots import numbers, round_to
from steadynorm.lab.paper.statistics import (
    Finding,
    at_least,
    at_most,
    combined,
    estimate,
    every,
    parabola_peak,
    sample_sd,
)
from steadynorm.lab.paper.trained import Runs, TrainedExperiment
from steadynorm.lab.train.config import Config
from steadynorm.report import page

ALPHAS = (0.01, 0.03, 0.1, 0.5)
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # effective lr in units of the baseline's


def lr_arm(alpha: float, ratio: float) -> str:
    return f"alpha {alpha:g}, effective lr x {ratio:g}"


def _lr_for(baseline: Baseline, alpha: float, ratio: float) -> float:
    """The lr with so many times the baseline's effective lr at this alpha."""
    return short(ratio * baseline.lr * theory.effective_lr(1.0, ALPHA) / theory.effective_lr(1.0, alpha))


def _lr_arms(baseline: Baseline) -> dict[str, Config]:
    """The sign layer keeps lr, alpha and decay. At the desk eta is not small against alpha: the exact decay is used."""
    overlap = "exact" if baseline.scale == "desk" else "linear"
    return {
        lr_arm(alpha, ratio): baseline.scionc(
            lr=_lr_for(baseline, alpha, ratio), alpha=alpha, output_alpha=ALPHA, overlap=overlap
        )
        for alpha in ALPHAS
        for ratio in RATIOS
    }


def best_lrs(runs: Runs, alpha: float) -> list[tuple[float, float, bool]]:
    """ln of the best lr and of the best effective lr, by seed; and whether the sweep brackets it."""
    lrs = [_lr_for(runs.baseline, alpha, ratio) for ratio in RATIOS]
    by_ratio = [runs.values(ACCURACY, lr_arm(alpha, ratio)) for ratio in RATIOS]
    found = []
    for accuracy in zip(*by_ratio, strict=True):
        best, inside = parabola_peak([math.log(lr) for lr in lrs], accuracy)
        found.append((best, best + math.log(theory.effective_lr(1.0, alpha)), inside))
    return found


class Fit(NamedTuple):
    """Least squares of accuracy = c + slope u + bend u^2 in u = ln(effective lr), one bend for all alphas; by seed.

    Points are symmetric in u and the same for every alpha, so that each coefficient is a weighted sum of accuracies, and
    the weights of each sum to zero: noise makes no coefficient likelier to be positive than negative.
    """

    slopes: dict[float, list[float]]  # by alpha
    bend: list[float]
    tilt: list[float]  # of the slopes, by ln of the lr that has the same effective lr

    def exponent(self) -> float:
        """b of: the best lr goes as (the lr of equal effective lr)^b. 0: the best lr stays; 1: the best effective lr does."""
        return 1 - fmean(self.tilt) / (2 * fmean(self.bend))


def fit(runs: Runs) -> Fit:
    """The fit, by seed. If the best lr goes with exponent b, slope = const + 2 bend (1 - b) ln(lr of equal effective lr)."""
    u = [math.log(ratio) for ratio in RATIOS]
    square = [each**2 - fmean(x**2 for x in u) for each in u]
    equal = [-math.log(theory.effective_lr(1.0, alpha)) for alpha in ALPHAS]
    centred = [each - fmean(equal) for each in equal]
    slopes, bends = {}, []
    for alpha in ALPHAS:
        accuracy = [runs.values(ACCURACY, lr_arm(alpha, ratio)) for ratio in RATIOS]
        slopes[alpha] = _coefficient(u, accuracy)
        bends.append(_coefficient(square, accuracy))
    bend = combined(*((1 / len(bends), each) for each in bends))
    return Fit(slopes, bend, _coefficient(centred, list(slopes.values())))


def _coefficient(direction: list[float], values: list[list[float]]) -> list[float]:
    """Of least squares along a direction that is orthogonal to the others, by seed."""
    length = sum(each**2 for each in direction)
    return combined(*((each / length, value) for each, value in zip(direction, values, strict=True)))


def _lr_judge(runs: Runs) -> Outcome:
    def best() -> dict[float, list[tuple[float, float, bool]]]:
        return {alpha: best_lrs(runs, alpha) for alpha in ALPHAS}

    def exponent_above(least: float) -> Finding:
        """b > least, given a best lr at all (bend < 0): tilt = 2 bend (1 - b), so tilt - 2 (1 - least) bend > 0."""
        found = fit(runs)
        more = combined((1.0, found.tilt), (-2 * (1 - least), found.bend))
        bounds = [
            at_most(estimate(found.bend), 0.0, "bend"),
            at_least(estimate(more), 0.0, f"tilt - {2 * (1 - least):g} bend"),
        ]
        return every(bounds, f"the best lr goes as (lr of equal effective lr)^{found.exponent():.2f}")

    def factor_two() -> Finding:
        """The best effective lr of alpha is at u = -slope / (2 bend): no two are further apart than ln 2."""
        found = fit(runs)
        return every([
            at_most(
                estimate(combined((1.0, found.slopes[one]), (-1.0, found.slopes[other]), (2 * math.log(2), found.bend))),
                0.0, f"slope at alpha {one:g} - at {other:g} + 2 ln 2 bend",
            ) for one, other in permutations(ALPHAS, 2)
        ])  # fmt: skip

    claims = [
        claim("The best effective lr moves less across alpha than the best lr (exponent above 1/2)",
              lambda: exponent_above(0.5)),
        claim("The best lr increases with alpha (exponent above 0)", lambda: exponent_above(0.0)),
        claim("The best effective lr stays within a factor of 2", factor_two),
    ]  # fmt: skip
    blocks: list[page.Block] = [_lr_plot(runs, False), _lr_plot(runs, True)]
    measures = {"accuracy": ACCURACY, "hidden norm at the end": mean_over("hidden_norm", END)}
    summary = numbers(runs, measures, runs.plan.arms)
    try:
        found = best()
    except MissingRunsError:
        return Outcome(blocks, claims, summary)
    best_of = {
        alpha: [math.exp(estimate([each[k] for each in seeds]).value) for k in (0, 1)] for alpha, seeds in found.items()
    }
    rows = [
        (alpha, *best_of[alpha], sample_sd([each[0] for each in seeds]), "yes" if all(s[2] for s in seeds) else "no")
        for alpha, seeds in found.items()
    ]
    header = ("alpha", "best lr", "best effective lr", "sd of its ln over seeds", "inside the sweep")
    caption = (
        "By a parabola in ln lr through the best three, for each seed; geometric mean over seeds. To look at: every alpha's "
        "lrs are centred on one effective lr, so that noise too would put the best ones there. The claims rest on the fit below."
    )
    blocks.append(page.Table("Best learning rates", header, rows, caption))
    fitted = fit(runs)
    blocks.append(page.Table(
        "Accuracy as one parabola in ln lr",
        ("seed", "bend", "tilt", *(f"slope, alpha {alpha:g}" for alpha in ALPHAS)),
        [(f"{seed}", *each) for seed, each in zip(
            runs.plan.seeds, zip(fitted.bend, fitted.tilt, *fitted.slopes.values(), strict=True), strict=True)],
        "Points of accuracy = c + slope u + bend u² in u = ln(effective lr / the baseline's), one bend for all alphas. Tilt: of the "
        "slopes, by ln of the lr that has the same effective lr: 0 if the best effective lr is the same at every alpha, twice the "
        "bend if the best lr is.",
    ))  # fmt: skip
    summary["fit"] = {"exponent": round_to(fitted.exponent()), "bend": [round_to(each) for each in fitted.bend],
                      "tilt": [round_to(each) for each in fitted.tilt]}  # fmt: skip
    summary["best"] = {
        f"{a:g}": dict(zip(("lr", "effective_lr"), map(round_to, b), strict=True)) for a, b in best_of.items()
    }
    return Outcome(blocks, claims, summary)


def _lr_plot(runs: Runs, effective: bool) -> page.Plot:
    series = []
    for alpha in ALPHAS:
        points = []
        for ratio in RATIOS:
            try:
                found = estimate(runs.values(ACCURACY, lr_arm(alpha, ratio)))
            except MissingRunsError:
                continue
            lr = _lr_for(runs.baseline, alpha, ratio)
            points.append((theory.effective_lr(lr, alpha) if effective else lr, found.value, found.error))
        if points:
            x, y, error = zip(*points, strict=True)
            bars = None if any(map(math.isnan, error)) else error
            series.append(page.Series("accuracy", x, y, error=bars, toggle=f"alpha {alpha:g}"))
    label = "largest effective lr" if effective else "largest lr"
    return page.Plot(
        f"Accuracy against the {label}", label, "%", series, "Mean over seeds, standard error.", log_x=True
    )


LR_EFF = TrainedExperiment(
    "fig-lr-eff",
    "Learning rate and effective learning rate across alpha",
    "the best lr increases with alpha from 0.01 to 0.5; the best effective lr is within a factor of 2.",
    VIT, _lr_arms, _lr_judge, ("hidden_norm",),
)  # fmt: skip
