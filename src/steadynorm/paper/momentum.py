"""Momentum: the effective learning rate transfers across alpha, and may be decayed by alpha instead of lr."""

import math
from collections.abc import Sequence

from steadynorm import page, theory
from steadynorm.paper.drawing import curves, measured, numbers, round_to
from steadynorm.paper.experiment import Claim, MissingRunsError, Outcome, claim
from steadynorm.paper.measures import ACCURACY, END, LOSS, Measure, mean_over, swing
from steadynorm.paper.norms import COLUMNS, LONG, NOTHING, POINTS, no_worse
from steadynorm.paper.settings import ALPHA, VIT, Setting, short
from steadynorm.paper.statistics import (
    Finding,
    at_least,
    at_most,
    difference,
    estimate,
    every,
    parabola_peak,
    sample_sd,
    within,
)
from steadynorm.paper.training import Runs, Training
from steadynorm.train.config import Config

# lr against effective lr

ALPHAS = (0.01, 0.03, 0.1, 0.5)
RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)  # effective lr in units of the baseline's


def lr_arm(alpha: float, ratio: float) -> str:
    return f"alpha {alpha:g}, effective lr x {ratio:g}"


def _lr_for(setting: Setting, alpha: float, ratio: float) -> float:
    """The lr with so many times the baseline's effective lr at this alpha."""
    return short(ratio * setting.lr * theory.effective_lr(1.0, ALPHA) / theory.effective_lr(1.0, alpha))


def _lr_arms(setting: Setting) -> dict[str, Config]:
    """The sign layer keeps lr, alpha and decay. At the desk eta is not small against alpha: the exact decay is used."""
    overlap = "exact" if setting.scale == "desk" else "linear"
    return {
        lr_arm(alpha, ratio): setting.scionc(
            lr=_lr_for(setting, alpha, ratio), alpha=alpha, output_alpha=ALPHA, overlap=overlap
        )
        for alpha in ALPHAS
        for ratio in RATIOS
    }


def best_lrs(runs: Runs, alpha: float) -> list[tuple[float, float, bool]]:
    """ln of the best lr and of the best effective lr, by seed; and whether the sweep brackets it."""
    lrs = [_lr_for(runs.setting, alpha, ratio) for ratio in RATIOS]
    by_ratio = [runs.values(ACCURACY, lr_arm(alpha, ratio)) for ratio in RATIOS]
    found = []
    for accuracy in zip(*by_ratio, strict=True):
        best, inside = parabola_peak([math.log(lr) for lr in lrs], accuracy)
        found.append((best, best + math.log(theory.effective_lr(1.0, alpha)), inside))
    return found


def _span(values: Sequence[float]) -> float:
    return max(values) - min(values)


def _lr_judge(runs: Runs) -> Outcome:
    def best() -> dict[float, list[tuple[float, float, bool]]]:
        return {alpha: best_lrs(runs, alpha) for alpha in ALPHAS}

    def moves_less() -> Finding:
        by_seed = list(zip(*best().values(), strict=True))
        lr = [_span([each[0] for each in seed]) for seed in by_seed]
        effective = [_span([each[1] for each in seed]) for seed in by_seed]
        factor = math.exp(estimate(lr).value), math.exp(estimate(effective).value)
        less = at_least(difference(lr, effective), 0.0, "span of ln best lr - span of ln best effective lr")
        return less._replace(
            figure=f"over alpha the best lr spans a factor of {factor[0]:.2f}, the best effective lr {factor[1]:.2f}; {less.figure}"
        )

    def factor_two() -> Finding:
        spans = [_span([each[1] for each in seed]) for seed in zip(*best().values(), strict=True)]
        return at_most(estimate(spans), math.log(2), "ln of the span of the best effective lr")

    def rises() -> Finding:
        seeds = list(zip(*best().values(), strict=True))
        return at_least(estimate([seed[-1][0] - seed[0][0] for seed in seeds]), 0.0, "ln(best lr at 0.5 / at 0.01)")

    claims = [
        claim("The best effective lr moves less across alpha than the best lr", moves_less),
        claim("The best lr increases with alpha", rises),
        claim("The best effective lr stays within a factor of 2", factor_two),
    ]
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
    caption = "By a parabola in ln lr through the best three, for each seed; geometric mean over seeds."
    blocks.append(page.Table("Best learning rates", header, rows, caption))
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
            lr = _lr_for(runs.setting, alpha, ratio)
            points.append((theory.effective_lr(lr, alpha) if effective else lr, found.value, found.error))
        if points:
            x, y, error = zip(*points, strict=True)
            bars = None if any(map(math.isnan, error)) else error
            series.append(page.Series("accuracy", x, y, error=bars, toggle=f"alpha {alpha:g}"))
    label = "largest effective lr" if effective else "largest lr"
    return page.Plot(
        f"Accuracy against the {label}", label, "%", series, "Mean over seeds, standard error.", log_x=True
    )


LR_EFF = Training(
    "fig-lr-eff",
    "Learning rate and effective learning rate across alpha",
    "the best lr increases with alpha from 0.01 to 0.5; the best effective lr is within a factor of 2.",
    VIT, _lr_arms, _lr_judge, ("hidden_norm",),
)  # fmt: skip


# Momentum schedules

LIMITS = (0.2, 0.5, 1.0)
COSINE = "cosine lr"


def matched_arm(limit: float) -> str:
    return f"alpha 0.1 to {limit:g}"


def _matched_arms(setting: Setting) -> dict[str, Config]:
    arms = {COSINE: setting.scionc()}
    return arms | {matched_arm(x): setting.scionc(momentum="matched", alpha_end=x) for x in LIMITS}


def _schedules(runs: Runs, claims: list[Claim], more: dict[str, Measure] | None = None) -> Outcome:
    arms = runs.plan.arms
    plots = [curves(runs, key, arms, log_y=key == "grad_norm") for key in
             ("val_accuracy", "hidden_norm", "grad_norm", "effective_lr", "alpha", "lr", "weight_decay")]  # fmt: skip
    measures: dict[str, Measure] = {
        "accuracy": ACCURACY, "val_loss": LOSS, "hidden norm at the end": mean_over("hidden_norm", END), **(more or {})
    }  # fmt: skip
    return Outcome([*plots, measured(runs, measures, arms)], claims, numbers(runs, measures, arms))


def _gap(runs: Runs, one: str, other: str) -> Finding:
    found = difference(runs.values(ACCURACY, one), runs.values(ACCURACY, other))
    return within(found, POINTS, f"accuracy, {one} - {other},", " points")


def _matched(runs: Runs) -> Outcome:
    norm = mean_over("hidden_norm", END)
    claims = [
        claim(
            f"Matched momentum reaches the accuracy of the cosine up to alpha_max = 0.5 (to {POINTS:g} point)",
            lambda: every([no_worse(runs, matched_arm(limit), COSINE) for limit in (0.2, 0.5)]),
        ),
        claim(f"Matched momentum reaches it with alpha_max = 1, too (to {POINTS:g} point)",
              lambda: no_worse(runs, matched_arm(1.0), COSINE)),
        claim(
            f"The weight norm is that of the cosine up to alpha_max = 0.5 (within {2 * NOTHING:g} %)",
            lambda: every([
                within(
                    estimate([100 * math.log(a / b) for a, b in
                              zip(runs.values(norm, matched_arm(x)), runs.values(norm, COSINE), strict=True)]),
                    2 * NOTHING, f"norm, alpha to {x:g} / cosine - 1,", " %",
                ) for x in (0.2, 0.5)
            ]),
        ),
    ]  # fmt: skip
    return _schedules(runs, claims)


MOMENTUM_SCHEDULE = Training(
    "fig-momentum-schedule",
    "Momentum scheduled so that the effective lr follows a cosine",
    "the models converge to the same accuracy up to alpha_max = 0.5.",
    VIT, _matched_arms, _matched, (*COLUMNS, "alpha", "lr"), desk_budgets=LONG,
)  # fmt: skip

SLOW_ALPHA = 0.02


def prime_arm(start: float, limit: float) -> str:
    return f"gamma' matched, alpha {start:g} to {limit:g}"


ERRONEOUS, SLOW, SLOW_ERRONEOUS = prime_arm(ALPHA, 1.0), "alpha 0.02, cosine lr", prime_arm(SLOW_ALPHA, 1.0)


def _prime_matched(setting: Setting, start: float, **more: float) -> dict[str, Config]:
    """gamma' = gamma (2 - alpha)/alpha follows the cosine, by alpha up to each limit and by lr from there."""
    return {
        prime_arm(start, limit): setting.scionc(momentum="matched-gamma-prime", alpha_end=limit, **more)
        for limit in LIMITS
    }


def _prime_arms(setting: Setting) -> dict[str, Config]:
    return {COSINE: setting.scionc(), **_prime_matched(setting, ALPHA)}


def _slow_prime_arms(setting: Setting) -> dict[str, Config]:
    """gamma' is matched between the two alphas as well: the effective lr of 0.02 is too low."""
    lr = short(setting.lr * theory.momentum_gain(ALPHA) / theory.momentum_gain(SLOW_ALPHA))
    slow = {"lr": lr, "alpha": SLOW_ALPHA, "output_alpha": ALPHA}
    return {
        COSINE: setting.scionc(),
        SLOW: setting.scionc(**slow),
        **_prime_matched(setting, SLOW_ALPHA, **slow),
    }


def _prime(runs: Runs) -> Outcome:
    halfway = mean_over("val_accuracy", (0.45, 0.7))
    claims = [
        claim(
            "The erroneous match delays the decay of the effective lr: accuracy is lower halfway",
            lambda: at_least(
                difference([100 * each for each in runs.values(halfway, COSINE)],
                           [100 * each for each in runs.values(halfway, ERRONEOUS)]),
                0.0, "accuracy halfway, cosine - erroneous,", " points",
            ),
        ),
        claim(f"At the very end its accuracy is about the same (within {POINTS:g} point)", lambda: _gap(runs, ERRONEOUS, COSINE)),
    ]  # fmt: skip
    return _schedules(runs, claims)


def _slow_prime(runs: Runs) -> Outcome:
    claims = [
        claim(
            "From alpha 0.02, matched to 0.1 by gamma', the effective lr is too low and the model underperforms",
            lambda: at_least(
                difference(runs.values(ACCURACY, COSINE), runs.values(ACCURACY, SLOW)), 0.0,
                "accuracy, alpha 0.1 - alpha 0.02,", " points",
            ),
        ),
        claim(
            "From alpha 0.02 the delayed decay is beneficial",
            lambda: at_least(
                difference(runs.values(ACCURACY, SLOW_ERRONEOUS), runs.values(ACCURACY, SLOW)), 0.0,
                "accuracy, delayed - cosine,", " points",
            ),
        ),
    ]  # fmt: skip
    return _schedules(runs, claims)


GAMMA_PRIME = Training(
    "fig-momentum-gamma-prime",
    "The erroneous match of momentum, from alpha 0.1",
    "delayed decay of the effective lr lowers accuracy until the very end.",
    VIT, _prime_arms, _prime, (*COLUMNS, "alpha", "lr"), desk_budgets=LONG,
)  # fmt: skip
GAMMA_PRIME_SLOW = Training(
    "fig-momentum-gamma-prime-slow",
    "The erroneous match of momentum, from alpha 0.02",
    "the effective lr is too low, the models underperform, and delayed decay ends up beneficial.",
    VIT, _slow_prime_arms, _slow_prime, (*COLUMNS, "alpha", "lr"), desk_budgets=LONG,
)  # fmt: skip

BASE, BOTH, LR_ALONE, EXACT = (
    "alpha 0.1", "alpha 0.01 to 1, ScionC", "alpha 0.01 to 1, λ by lr alone", "alpha 0.01 to 1, exact decay (ours)"
)  # fmt: skip
_FIRST = 0.01


def _linear_arms(setting: Setting) -> dict[str, Config]:
    """Half of the baseline's decay, as in the paper. By lr alone: lambda_t = lambda gamma_t / gamma, of alpha = 0.1."""
    ramp = {"alpha": _FIRST, "output_alpha": ALPHA, "momentum": "linear", "alpha_end": 1.0}
    without = short(theory.steady_norm_sq(setting.lr, 0.5 * setting.decay, _FIRST, limit=True))
    return {
        BASE: setting.scionc(decay=0.5),
        BOTH: setting.scionc(decay=0.5, **ramp),
        LR_ALONE: setting.scionc(decay=0.5, steady_norm_sq=without, decay_by_lr_alone=True, **ramp),
        EXACT: setting.scionc(decay=0.5, overlap="exact", **ramp),
    }


def _linear(runs: Runs) -> Outcome:
    norm, grad = swing("hidden_norm"), swing("grad_norm")
    claims = [
        claim(
            "With the momentum factor the weight norm swings at most half as far as with λ by lr alone",
            lambda: at_most(
                difference(runs.values(norm, BOTH), [each / 2 for each in runs.values(norm, LR_ALONE)]), 0.0,
                "100 ln(largest / smallest), with the factor - half of without,", " %",
            ),
        ),
        claim(
            "With the momentum factor the gradient norm swings less than with λ by lr alone",
            lambda: at_most(
                difference(runs.values(grad, BOTH), runs.values(grad, LR_ALONE)), 0.0, "swing, with - without,", " %"
            ),
        ),
        claim(
            "λ by lr alone ends with the higher accuracy",
            lambda: at_least(
                difference(runs.values(ACCURACY, LR_ALONE), runs.values(ACCURACY, BOTH)), 0.0,
                "accuracy, lr alone - ScionC,", " points",
            ),
        ),
        claim(
            "Ours: eta is not small against alpha at first; the exact decay keeps the norm steadier than the linear formula",
            lambda: at_most(
                difference(runs.values(norm, EXACT), runs.values(norm, BOTH)), 0.0, "swing, exact - linear,", " %"
            ),
        ),
    ]  # fmt: skip
    return _schedules(runs, claims, {"swing of the hidden norm, %": norm, "swing of the gradient norm, %": grad})


MOMENTUM_LINEAR = Training(
    "fig-momentum-linear",
    "Stress test: alpha from 0.01 to 1, with and without the momentum factor in the decay",
    "weight and gradient norms are stable with ScionC; with λ by lr alone they swing, and accuracy ends higher.",
    VIT, _linear_arms, _linear, (*COLUMNS, "alpha", "lr"), desk_budgets=LONG,
)  # fmt: skip
