"""table-vit and the three sweeps: accuracy of the ViT over budgets, beside the paper's numbers."""

import math
from collections.abc import Mapping, Sequence
from functools import partial

from steadynorm.lab.paper.baselines import VIT
from steadynorm.lab.paper.claims import Contrast, Test, all_of, coefficient, difference, mean, value
from steadynorm.lab.paper.experiment import TrainedExperiment
from steadynorm.lab.paper.metrics import ACCURACY, AFTERWARDS, BY_ACCURACY, LOSS
from steadynorm.lab.paper.plots import Curve, PaperValues, Shown, numbers, points_with_errors, table_by_budget
from steadynorm.lab.paper.runs import RunPlan, Runs
from steadynorm.report import page

BUDGETS = (30, 60, 90, 150, 300)
SWEPT = (30, 90, 300)  # at the desk
ARMS = ("AdamW", "AdamC", "Scion", "ScionC (constant)", "ScionC (cosine)")
CONSTANT, COSINE = 1.5, 0.25  # lambda_0 of ScionC (constant) against Scion's; C_T² / C_0² of ScionC (cosine)


def _paper(arms: Sequence[str], rows: Mapping[int, Sequence[tuple[float, float]]]) -> PaperValues:
    return {(arm, budget): theirs for budget, row in rows.items() for arm, theirs in zip(arms, row, strict=True)}


# table:vit_results of the paper: mean, sample standard deviation
PAPER = _paper(ARMS, {
    30: [(67.35, 0.33), (67.53, 0.27), (73.31, 0.09), (73.10, 0.18), (73.10, 0.15)],
    60: [(74.77, 0.08), (74.59, 0.18), (77.44, 0.09), (77.20, 0.08), (77.43, 0.11)],
    90: [(76.92, 0.13), (76.98, 0.10), (78.68, 0.09), (78.53, 0.10), (78.74, 0.09)],
    150: [(78.64, 0.18), (78.69, 0.03), (79.65, 0.07), (79.58, 0.04), (79.62, 0.12)],
    300: [(79.73, 0.12), (79.70, 0.08), (80.10, 0.14), (79.94, 0.08), (80.06, 0.03)],
})  # fmt: skip


def over_budgets(plan: RunPlan, one: str, other: str) -> Contrast:
    """Return the difference of accuracies, mean over the budgets of each seed."""
    return mean(difference(ACCURACY, one, other, budget) for budget in plan.budgets)


def _claims(plan: RunPlan) -> dict[str, Test]:
    cosine, constant = (over_budgets(plan, f"ScionC ({target})", "Scion") for target in ("cosine", "constant"))
    adamc, scion = over_budgets(plan, "AdamC", "AdamW"), over_budgets(plan, "Scion", "AdamW")
    point = BY_ACCURACY.margin
    return {
        f"ScionC (cosine) matches Scion (within {point:g} point, mean over budgets)": cosine.within(
            point, "ScionC (cosine) - Scion", " points"
        ),
        f"ScionC (constant) is no worse than Scion by more than {point:g} point, mean over budgets": constant.at_least(
            -point, "ScionC (constant) - Scion", " points"
        ),
        f"AdamC performs as AdamW does (within {point:g} point, mean over budgets)": adamc.within(
            point, "AdamC - AdamW", " points"
        ),
        "Scion is ahead of AdamW, mean over budgets": scion.at_least(0.0, "Scion - AdamW", " points"),
        f"AdamC is behind AdamW, mean over budgets; {AFTERWARDS}": adamc.at_most(0.0, "AdamC - AdamW", " points"),
    }


def _show(runs: Runs, paper: PaperValues) -> Shown:
    blocks: list[page.Block] = [
        _plot(runs, paper),
        table_by_budget(runs, ACCURACY, "Validation accuracy, %", paper),
        table_by_budget(runs, LOSS, "Validation loss", digits=4),
    ]
    return blocks, numbers(runs, {"accuracy": ACCURACY, "val_loss": LOSS})


def _show_table(runs: Runs) -> Shown:
    blocks, summary = _show(runs, PAPER)
    return [*blocks, Curve("val_accuracy", label="Validation accuracy, longest budget").plot(runs)], summary


def _plot(runs: Runs, paper: PaperValues) -> page.Plot:
    """Plot accuracy against the budget, ours and the paper's."""
    series = []
    for arm in runs.plan.arms:
        places = {budget: (arm, budget) for budget in runs.plan.budgets}
        series.append(points_with_errors(runs, ACCURACY, places, "ours", arm))
        theirs = [(budget, paper[arm, budget][0]) for budget in BUDGETS if (arm, budget) in paper]
        if theirs:
            series.append(page.Series("the paper", *zip(*theirs, strict=True), style="dash", toggle=arm))
    caption = "Mean over seeds with its standard error; dashed: the paper's ViT-S/16 on ImageNet-1k."
    return page.Plot("Validation accuracy", f"budget, {runs.plan.baseline.unit}", "%", series, caption, log_x=True)


TABLE = TrainedExperiment(
    "table-vit",
    "Accuracy of the ViT under five optimizers and five budgets",
    "ScionC models perform as well as the Scion counterparts, with more stable weight and gradient norms.",
    baselines=VIT,
    arms=lambda baseline: {
        "AdamW": baseline.adam("adamw"),
        "AdamC": baseline.adamc(),
        "Scion": baseline.scion(),
        "ScionC (constant)": baseline.scionc(decay=CONSTANT),
        "ScionC (cosine)": baseline.scionc(end=COSINE),
    },
    claims=_claims,
    show=_show_table,
    budgets=BUDGETS,
)


# Sweeps: the paper's values, as ratios to the baseline

SCION = {ratio: f"Scion, decay x {ratio:g}" for ratio in (0.5, 1.0, 1.5, 2.0)}  # lambda_l = 0.04, 0.08, 0.12, 0.16
CONSTANT_TARGETS = {  # first decay; C² = 1.1875, 0.79167, 0.59375, 0.475
    ratio: f"ScionC (constant), first decay x {ratio:g}" for ratio in (1.0, 1.5, 2.0, 2.5)
}
COSINE_ENDS = {  # C_T² / C_0²; C_T² = 0.59375, 0.296875, 0.1484375
    ratio: f"ScionC (cosine), C² to 1/{1 / ratio:g}" for ratio in (1 / 2, 1 / 4, 1 / 8)
}

SCION_PAPER = _paper(list(SCION.values()), {
    30: [(72.08, 0.19), (73.31, 0.09), (73.24, 0.21), (72.50, 0.22)],
    60: [(76.98, 0.09), (77.44, 0.09), (76.88, 0.14), (76.07, 0.16)],
    90: [(78.42, 0.19), (78.68, 0.09), (78.32, 0.04), (77.31, 0.12)],
    150: [(79.27, 0.08), (79.65, 0.07), (79.05, 0.15), (78.31, 0.07)],
    300: [(79.67, 0.06), (80.10, 0.14), (79.98, 0.10), (78.64, 0.32)],
})  # fmt: skip
CONSTANT_PAPER = _paper(list(CONSTANT_TARGETS.values()), {
    30: [(72.87, 0.09), (73.10, 0.18), (73.03, 0.29), (72.54, 0.41)],
    60: [(77.19, 0.08), (77.20, 0.08), (76.76, 0.27), (76.47, 0.03)],
    90: [(78.42, 0.19), (78.53, 0.10), (78.33, 0.13), (77.87, 0.13)],
    150: [(79.39, 0.15), (79.58, 0.04), (79.31, 0.17), (78.41, 0.08)],
    300: [(79.78, 0.12), (79.94, 0.08), (79.52, 0.38), (78.35, 0.20)],
})  # fmt: skip
COSINE_PAPER = _paper(list(COSINE_ENDS.values()), {
    30: [(72.98, 0.11), (73.10, 0.15), (73.37, 0.29)],
    60: [(77.44, 0.05), (77.43, 0.11), (77.41, 0.04)],
    90: [(78.65, 0.17), (78.74, 0.09), (78.64, 0.05)],
    150: [(79.47, 0.19), (79.62, 0.12), (79.62, 0.03)],
    300: [(79.99, 0.11), (80.06, 0.03), (80.08, 0.10)],
})  # fmt: skip


def _scion_claims(plan: RunPlan) -> dict[str, Test]:
    low, *inner, high = sorted(SCION)

    def middle_minus(end: float, budget: int) -> Contrast:
        middle = mean(value(ACCURACY, SCION[ratio], budget) for ratio in inner)
        return middle - value(ACCURACY, SCION[end], budget)

    return {
        f"The best λ is inside the sweep at every budget: both ends, x {low:g} and x {high:g}, are worse than its middle "
        "(the paper: the best is the same at each)": all_of(
            middle_minus(end, budget).at_least(0.0, f"middle - x {end:g} at {budget}", " points")
            for budget in plan.budgets
            for end in (low, high)
        )
    }


def _constant_claims(plan: RunPlan) -> dict[str, Test]:
    common = sorted(CONSTANT_TARGETS.keys() & SCION.keys())
    differences = [over_budgets(plan, CONSTANT_TARGETS[ratio], SCION[ratio]) for ratio in common]
    slope = coefficient([math.log(ratio) for ratio in common], differences)
    return {
        "Corrected decay wants a higher largest decay than constant decay: over what both sweeps share, "
        f"x {common[0]:g} to x {common[-1]:g}, raising it helps ScionC more than Scion (mean over budgets)": slope.at_least(
            0.0, "slope of accuracy by ln(largest decay), ScionC - Scion,", " points"
        )
    }


def _cosine_claims(plan: RunPlan) -> dict[str, Test]:
    first, *_, last = COSINE_ENDS.values()
    point = BY_ACCURACY.margin
    return {
        f"The model is indifferent to where the target ends (within {point:g} point, mean over budgets)": over_budgets(
            plan, last, first
        ).within(point, f"{last} - {first}", " points")
    }


_sweep = partial(TrainedExperiment, baselines=VIT, budgets=BUDGETS, desk_budgets=SWEPT)
SWEEP_SCION = _sweep(
    "table-sweep-scion",
    "Decay of Scion swept",
    "the best of λ = 0.04, 0.08, 0.12, 0.16 is 0.08 at every budget.",
    arms=lambda baseline: {name: baseline.scion(decay=ratio) for ratio, name in SCION.items()},
    claims=_scion_claims,
    show=partial(_show, paper=SCION_PAPER),
)
SWEEP_CONSTANT = _sweep(
    "table-sweep-constant",
    "Target of ScionC (constant) swept",
    "the best C² is 0.7917, that is λ₀ = 0.12: corrected decay requires a higher largest decay.",
    arms=lambda baseline: {
        **{name: baseline.scionc(decay=ratio) for ratio, name in CONSTANT_TARGETS.items()},
        **SWEEP_SCION.arms(baseline),
    },
    claims=_constant_claims,
    show=partial(_show, paper={**CONSTANT_PAPER, **SCION_PAPER}),
)
SWEEP_COSINE = _sweep(
    "table-sweep-cosine",
    "Final target of ScionC (cosine) swept",
    "C_T² = C_0²/2, /4, /8 differ little: the model is indifferent to the schedule of weight norm decrease.",
    arms=lambda baseline: {name: baseline.scionc(end=ratio) for ratio, name in COSINE_ENDS.items()},
    claims=_cosine_claims,
    show=partial(_show, paper=COSINE_PAPER),
)
