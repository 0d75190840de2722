"""fig-momentum-*: the effective learning rate can be decayed by alpha instead of lr."""

from functools import partial

from steadynorm import theory
from steadynorm.lab.paper.baselines import ALPHA, Baseline, short
from steadynorm.lab.paper.claims import all_of, difference, no_worse, value
from steadynorm.lab.paper.experiments.norm_figures import COLUMNS, vit_figure
from steadynorm.lab.paper.metrics import ACCURACY, BY_ACCURACY, LOSS, SMALL_PERCENT, at_end, log_of, mean_over, swing
from steadynorm.lab.paper.plots import Curve, show
from steadynorm.lab.train.config import Config

LIMITS = (0.2, 0.5, 1.0)
COSINE = "cosine lr"
SHOWN = ("val_accuracy", "weight_norm", "hidden_norm", "grad_norm", "effective_lr", "alpha", "lr", "weight_decay")
WEIGHT_NORM = at_end("weight_norm")
METRICS = {
    "accuracy": ACCURACY,
    "val_loss": LOSS,
    "weight norm at the end": WEIGHT_NORM,
    "hidden norm at the end": at_end("hidden_norm"),
}
_show = partial(show, curves=[Curve(key, log_y=key == "grad_norm") for key in SHOWN], metrics=METRICS)
_figure = partial(vit_figure, show=_show, columns=(*COLUMNS, "alpha", "lr"))


# Matched by the effective lr

MATCHED = {limit: f"alpha 0.1 to {limit:g}" for limit in LIMITS}
MOMENTUM_SCHEDULE = _figure(
    "fig-momentum-schedule",
    "Momentum scheduled so that the effective lr follows a cosine",
    "the models converge to the same accuracy up to alpha_max = 0.5.",
    arms=lambda baseline: {
        COSINE: baseline.scionc(),
        **{arm: baseline.scionc(momentum="matched", alpha_end=limit) for limit, arm in MATCHED.items()},
    },
    claims={
        f"Matched momentum reaches the accuracy of the cosine up to alpha_max = 0.5 (to {BY_ACCURACY.margin_words})": all_of(
            no_worse(BY_ACCURACY, MATCHED[limit], COSINE) for limit in (0.2, 0.5)
        ),
        f"Matched momentum also reaches it with alpha_max = 1 (to {BY_ACCURACY.margin_words})": no_worse(
            BY_ACCURACY, MATCHED[1.0], COSINE
        ),
        f"The weight norm is that of the cosine up to alpha_max = 0.5 (within {SMALL_PERCENT:g} %)": all_of(
            difference(log_of(WEIGHT_NORM), MATCHED[limit], COSINE).within(
                SMALL_PERCENT, f"norm, alpha to {limit:g} / cosine - 1,", " %"
            )
            for limit in (0.2, 0.5)
        ),
    },
)


# Matched by gamma'

SLOW_ALPHA = 0.02


def prime_arm(start: float, limit: float) -> str:
    """Return the name of the arm whose gamma' is matched by alpha between these values."""
    return f"gamma' matched, alpha {start:g} to {limit:g}"


ERRONEOUS, SLOW, SLOW_ERRONEOUS = prime_arm(ALPHA, 1.0), "alpha 0.02, cosine lr", prime_arm(SLOW_ALPHA, 1.0)


def _prime_matched(baseline: Baseline, start: float, **more: float) -> dict[str, Config]:
    """gamma' = gamma (2 - alpha)/alpha follows the cosine, by alpha up to each limit and by lr from there."""
    return {
        prime_arm(start, limit): baseline.scionc(momentum="matched-gamma-prime", alpha_end=limit, **more)
        for limit in LIMITS
    }


def _slow_prime_arms(baseline: Baseline) -> dict[str, Config]:
    """Match gamma' between the two alphas as well: the effective lr of 0.02 is too low."""
    lr = short(baseline.lr * theory.momentum_gain(ALPHA) / theory.momentum_gain(SLOW_ALPHA))
    slow = {"lr": lr, "alpha": SLOW_ALPHA, "output_alpha": ALPHA}
    matched = _prime_matched(baseline, SLOW_ALPHA, **slow)
    return {COSINE: baseline.scionc(), SLOW: baseline.scionc(**slow), **matched}


GAMMA_PRIME = _figure(
    "fig-momentum-gamma-prime",
    "The erroneous match of momentum, from alpha 0.1",
    "delayed decay of the effective lr lowers accuracy until the very end.",
    arms=lambda baseline: {COSINE: baseline.scionc(), **_prime_matched(baseline, ALPHA)},
    claims={
        "The erroneous match delays the decay of the effective lr: accuracy is lower halfway": difference(
            mean_over("val_accuracy", (0.45, 0.7), 100.0), COSINE, ERRONEOUS
        ).at_least(0.0, "accuracy halfway, cosine - erroneous,", " points"),
        f"At the very end its accuracy is about the same (within {BY_ACCURACY.margin_words})": difference(
            ACCURACY, ERRONEOUS, COSINE
        ).within(BY_ACCURACY.margin, f"accuracy, {ERRONEOUS} - {COSINE},", " points"),
    },
)
GAMMA_PRIME_SLOW = _figure(
    "fig-momentum-gamma-prime-slow",
    "The erroneous match of momentum, from alpha 0.02",
    "the effective lr is too low, the models underperform, and delayed decay ends up beneficial.",
    arms=_slow_prime_arms,
    claims={
        "From alpha 0.02, matched to 0.1 by gamma', the effective lr is too low and the model underperforms": difference(
            ACCURACY, COSINE, SLOW
        ).at_least(0.0, "accuracy, alpha 0.1 - alpha 0.02,", " points"),
        "From alpha 0.02 the delayed decay is beneficial": difference(ACCURACY, SLOW_ERRONEOUS, SLOW).at_least(
            0.0, "accuracy, delayed - cosine,", " points"
        ),
    },
)


# Alpha from 0.01 to 1

BASE, BOTH, LR_ALONE, EXACT = (
    "alpha 0.1", "alpha 0.01 to 1, ScionC", "alpha 0.01 to 1, λ by lr alone", "alpha 0.01 to 1, exact decay (ours)"
)  # fmt: skip
FIRST_ALPHA = 0.01
SWINGS = {"weight": swing("weight_norm"), "hidden": swing("hidden_norm"), "gradient": swing("grad_norm")}


def _linear_arms(baseline: Baseline) -> dict[str, Config]:
    """Take half of the baseline's decay, as in the paper. By lr alone: lambda_t = lambda gamma_t / gamma, of alpha = 0.1."""
    ramp = {"alpha": FIRST_ALPHA, "output_alpha": ALPHA, "momentum": "linear", "alpha_end": 1.0}
    without = short(theory.steady_norm_sq(baseline.lr, 0.5 * baseline.decay, FIRST_ALPHA, limit=True))
    return {
        BASE: baseline.scionc(decay=0.5),
        BOTH: baseline.scionc(decay=0.5, **ramp),
        LR_ALONE: baseline.scionc(decay=0.5, steady_norm_sq=without, decay_by_lr_alone=True, **ramp),
        EXACT: baseline.scionc(decay=0.5, overlap="exact", **ramp),
    }


MOMENTUM_LINEAR = _figure(
    "fig-momentum-linear",
    "Stress test: alpha from 0.01 to 1, with and without the momentum factor in the decay",
    "weight and gradient norms are stable with ScionC; with λ by lr alone they swing, and accuracy ends higher.",
    arms=_linear_arms,
    claims={
        **{
            f"With the momentum factor the {name} norm swings at most half as far as with λ by lr alone": (
                value(SWINGS[name], BOTH) - 0.5 * value(SWINGS[name], LR_ALONE)
            ).at_most(0.0, "100 ln(largest / smallest), with the factor - half of without,", " %")
            for name in ("weight", "hidden")
        },
        "With the momentum factor the gradient norm swings less than with λ by lr alone": difference(
            SWINGS["gradient"], BOTH, LR_ALONE
        ).at_most(0.0, "swing, with - without,", " %"),
        "λ by lr alone ends with the higher accuracy": difference(ACCURACY, LR_ALONE, BOTH).at_least(
            0.0, "accuracy, lr alone - ScionC,", " points"
        ),
        "Ours: eta is not small against alpha at first; the exact decay keeps the hidden norm steadier than the linear formula": (
            difference(SWINGS["hidden"], EXACT, BOTH).at_most(0.0, "swing, exact - linear,", " %")
        ),
    },
    show=partial(_show, metrics=METRICS | {f"swing of the {name} norm, %": metric for name, metric in SWINGS.items()}),
)
