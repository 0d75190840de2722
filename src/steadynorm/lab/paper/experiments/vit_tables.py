"""table-vit and the three sweeps: accuracy of the ViT over budgets, the paper's numbers beside ours."""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from steadynorm.lab.paper.baselines import VIT, Baseline
from steadynorm.lab.paper.experiment import Claim, MissingRunsError, Outcome, claim
from steadynorm.lab.paper.experiments.norm_stability import ACCURACY_TOLERANCE
from steadynorm.lab.paper.metrics import ACCURACY, LOSS
from steadynorm.lab.paper.plots import Paper, curves, numbers, results
from steadynorm.lab.paper.statistics import (
    Estimate,
    Finding,
    at_least,
    combined,
    estimate,
    every,
    within,
)
from steadynorm.lab.paper.trained import Runs, TrainedExperiment
from steadynorm.lab.train.config import Config
from steadynorm.report import page

BUDGETS = (30, 60, 90, 150, 300)
SWEPT = (30, 90, 300)  # at the desk
ARMS = ("AdamW", "AdamC", "Scion", "ScionC (constant)", "ScionC (cosine)")
CONSTANT, COSINE = 1.5, 0.25  # lambda_0 of ScionC (constant) against Scion's; C_T² / C_0² of ScionC (cosine)


def _paper(arms: Sequence[str], rows: Mapping[int, Sequence[tuple[float, float]]]) -> Paper:
    return {(arm, budget): found for budget, row in rows.items() for arm, found in zip(arms, row, strict=True)}


# table:vit_results of the paper: mean, sample standard deviation
PAPER = _paper(ARMS, {
    30: [(67.35, 0.33), (67.53, 0.27), (73.31, 0.09), (73.10, 0.18), (73.10, 0.15)],
    60: [(74.77, 0.08), (74.59, 0.18), (77.44, 0.09), (77.20, 0.08), (77.43, 0.11)],
    90: [(76.92, 0.13), (76.98, 0.10), (78.68, 0.09), (78.53, 0.10), (78.74, 0.09)],
    150: [(78.64, 0.18), (78.69, 0.03), (79.65, 0.07), (79.58, 0.04), (79.62, 0.12)],
    300: [(79.73, 0.12), (79.70, 0.08), (80.10, 0.14), (79.94, 0.08), (80.06, 0.03)],
})  # fmt: skip


def _arms(baseline: Baseline) -> dict[str, Config]:
    return {
        "AdamW": baseline.adam("adamw"),
        "AdamC": baseline.adamc(),
        "Scion": baseline.scion(),
        "ScionC (constant)": baseline.scionc(decay=CONSTANT),
        "ScionC (cosine)": baseline.scionc(end=COSINE),
    }


def over_budgets(runs: Runs, one: str, other: str) -> Estimate:
    """Difference of accuracies, mean over the budgets of each seed."""
    return estimate(combined((1.0, mean_accuracy(runs, one)), (-1.0, mean_accuracy(runs, other))))


def mean_accuracy(runs: Runs, arm: str) -> list[float]:
    """Mean over the budgets, by seed."""
    return combined(*((1 / len(runs.budgets), runs.values(ACCURACY, arm, budget)) for budget in runs.budgets))


def _judge(runs: Runs) -> Outcome:
    def over(one: str, other: str) -> Estimate:
        return over_budgets(runs, one, other)

    claims = [
        claim(
            f"ScionC (cosine) matches Scion (within {ACCURACY_TOLERANCE:g} point, mean over budgets)",
            lambda: within(over("ScionC (cosine)", "Scion"), ACCURACY_TOLERANCE, "ScionC (cosine) - Scion", " points"),
        ),
        claim(
            f"ScionC (constant) is no worse than Scion by more than {ACCURACY_TOLERANCE:g} point, mean over budgets",
            lambda: at_least(
                over("ScionC (constant)", "Scion"), -ACCURACY_TOLERANCE, "ScionC (constant) - Scion", " points"
            ),
        ),
        claim(
            f"AdamC performs as AdamW does (within {ACCURACY_TOLERANCE:g} point, mean over budgets)",
            lambda: within(over("AdamC", "AdamW"), ACCURACY_TOLERANCE, "AdamC - AdamW", " points"),
        ),
        claim(
            "Scion is ahead of AdamW, mean over budgets",
            lambda: at_least(over("Scion", "AdamW"), 0.0, "Scion - AdamW", " points"),
        ),
    ]
    blocks: list[page.Block] = [
        over_arms(runs, ARMS, PAPER),
        results(runs, ACCURACY, ARMS, "Validation accuracy, %", PAPER),
        results(runs, LOSS, ARMS, "Validation loss", digits=4),
        curves(runs, "val_accuracy", ARMS, label="Validation accuracy, longest budget"),
    ]
    return Outcome(blocks, claims, numbers(runs, {"accuracy": ACCURACY, "val_loss": LOSS}, ARMS))


def over_arms(runs: Runs, arms: Sequence[str], paper: Paper) -> page.Plot:
    """Accuracy against the budget, ours and the paper's."""
    series = []
    for arm in arms:
        found = []
        for budget in runs.budgets:
            try:
                found.append((budget, estimate(runs.values(ACCURACY, arm, budget))))
            except MissingRunsError:
                continue
        budgets, means = [b for b, _ in found], [e.value for _, e in found]
        errors = [e.error for _, e in found]
        error = None if any(map(math.isnan, errors)) else errors
        series.append(page.Series("ours", budgets, means, error=error, toggle=arm))
        theirs = [(budget, paper[arm, budget][0]) for budget in BUDGETS if (arm, budget) in paper]
        if theirs:
            series.append(page.Series("the paper", *zip(*theirs, strict=True), style="dash", toggle=arm))
    caption = "Mean over seeds with its standard error; dashed: the paper's ViT-S/16 on ImageNet-1k."
    return page.Plot("Validation accuracy", f"budget, {runs.baseline.unit}", "%", series, caption, log_x=True)


TABLE = TrainedExperiment(
    "table-vit",
    "Accuracy of the ViT under five optimizers and five budgets",
    "ScionC models perform as well as the Scion counterparts, with more stable weight and gradient norms.",
    VIT, _arms, _judge, (), budgets=BUDGETS,
)  # fmt: skip


# Sweeps

SCION_DECAYS = {0.04: 0.5, 0.08: 1.0, 0.12: 1.5, 0.16: 2.0}  # the paper's lambda_l: ratio to the baseline's
CONSTANT_DECAYS = {1.1875: 1.0, 0.79167: 1.5, 0.59375: 2.0, 0.475: 2.5}  # its C²: ratio of lambda_0
COSINE_ENDS = {0.59375: 1 / 2, 0.296875: 1 / 4, 0.1484375: 1 / 8}  # its C_T²: ratio to C_0²


def scion_name(ratio: float) -> str:
    return f"Scion, decay x {ratio:g}"


def constant_name(ratio: float) -> str:
    return f"ScionC (constant), first decay x {ratio:g}"


def cosine_name(ratio: float) -> str:
    return f"ScionC (cosine), C² to 1/{1 / ratio:g}"


SCION_PAPER = _paper([scion_name(r) for r in SCION_DECAYS.values()], {
    30: [(72.08, 0.19), (73.31, 0.09), (73.24, 0.21), (72.50, 0.22)],
    60: [(76.98, 0.09), (77.44, 0.09), (76.88, 0.14), (76.07, 0.16)],
    90: [(78.42, 0.19), (78.68, 0.09), (78.32, 0.04), (77.31, 0.12)],
    150: [(79.27, 0.08), (79.65, 0.07), (79.05, 0.15), (78.31, 0.07)],
    300: [(79.67, 0.06), (80.10, 0.14), (79.98, 0.10), (78.64, 0.32)],
})  # fmt: skip
CONSTANT_PAPER = _paper([constant_name(r) for r in CONSTANT_DECAYS.values()], {
    30: [(72.87, 0.09), (73.10, 0.18), (73.03, 0.29), (72.54, 0.41)],
    60: [(77.19, 0.08), (77.20, 0.08), (76.76, 0.27), (76.47, 0.03)],
    90: [(78.42, 0.19), (78.53, 0.10), (78.33, 0.13), (77.87, 0.13)],
    150: [(79.39, 0.15), (79.58, 0.04), (79.31, 0.17), (78.41, 0.08)],
    300: [(79.78, 0.12), (79.94, 0.08), (79.52, 0.38), (78.35, 0.20)],
})  # fmt: skip
COSINE_PAPER = _paper([cosine_name(r) for r in COSINE_ENDS.values()], {
    30: [(72.98, 0.11), (73.10, 0.15), (73.37, 0.29)],
    60: [(77.44, 0.05), (77.43, 0.11), (77.41, 0.04)],
    90: [(78.65, 0.17), (78.74, 0.09), (78.64, 0.05)],
    150: [(79.47, 0.19), (79.62, 0.12), (79.62, 0.03)],
    300: [(79.99, 0.11), (80.06, 0.03), (80.08, 0.10)],
})  # fmt: skip


def _scion_arms(baseline: Baseline) -> dict[str, Config]:
    return {scion_name(ratio): baseline.scion(decay=ratio) for ratio in SCION_DECAYS.values()}


def _constant_arms(baseline: Baseline) -> dict[str, Config]:
    ours = {constant_name(ratio): baseline.scionc(decay=ratio) for ratio in CONSTANT_DECAYS.values()}
    return ours | _scion_arms(baseline)


def _cosine_arms(baseline: Baseline) -> dict[str, Config]:
    return {cosine_name(ratio): baseline.scionc(end=ratio) for ratio in COSINE_ENDS.values()}


_SCION = {ratio: scion_name(ratio) for ratio in SCION_DECAYS.values()}
_CONSTANT = {ratio: constant_name(ratio) for ratio in CONSTANT_DECAYS.values()}


def _sweep(runs: Runs, arms: Sequence[str], paper: Paper, claims: list[Claim]) -> Outcome:
    blocks = [
        over_arms(runs, arms, paper),
        results(runs, ACCURACY, arms, "Validation accuracy, %", paper),
        results(runs, LOSS, arms, "Validation loss", digits=4),
    ]
    return Outcome(blocks, claims, numbers(runs, {"accuracy": ACCURACY, "val_loss": LOSS}, arms))


def _scion_sweep(runs: Runs) -> Outcome:
    ends, middle = (min(_SCION), max(_SCION)), sorted(_SCION)[1:-1]

    def interior() -> Finding:
        return every([
            at_least(
                estimate(combined(
                    *((1 / len(middle), runs.values(ACCURACY, _SCION[ratio], budget)) for ratio in middle),
                    (-1.0, runs.values(ACCURACY, _SCION[end], budget)),
                )), 0.0, f"middle - x {end:g} at {budget}", " points",
            ) for budget in runs.budgets for end in ends
        ])  # fmt: skip

    text = (
        f"The best λ is inside the sweep at every budget: both ends, x {ends[0]:g} and x {ends[1]:g}, are worse than its middle "
        "(the paper: the best is the same at each)"
    )
    return _sweep(runs, list(_SCION.values()), SCION_PAPER, [claim(text, interior)])


def _constant_sweep(runs: Runs) -> Outcome:
    common = sorted(_CONSTANT.keys() & _SCION.keys())
    logs = [math.log(ratio) for ratio in common]
    centred = [each - fmean(logs) for each in logs]
    weights = [each / sum(x**2 for x in centred) for each in centred]  # of the slope by least squares

    def higher() -> Finding:
        slopes = [
            combined(*((w, mean_accuracy(runs, names[ratio])) for w, ratio in zip(weights, common, strict=True)))
            for names in (_CONSTANT, _SCION)
        ]
        more = estimate(combined((1.0, slopes[0]), (-1.0, slopes[1])))
        return at_least(more, 0.0, "slope of accuracy by ln(largest decay), ScionC - Scion,", " points")

    text = (
        "Corrected decay wants a higher largest decay than constant decay: over what both sweeps share, "
        f"x {common[0]:g} to x {common[-1]:g}, raising it helps ScionC more than Scion (mean over budgets)"
    )
    return _sweep(
        runs, [*_CONSTANT.values(), *_SCION.values()], {**CONSTANT_PAPER, **SCION_PAPER}, [claim(text, higher)]
    )


def _cosine_sweep(runs: Runs) -> Outcome:
    names = [cosine_name(ratio) for ratio in COSINE_ENDS.values()]

    def indifferent() -> Finding:
        return within(over_budgets(runs, names[2], names[0]), ACCURACY_TOLERANCE, f"{names[2]} - {names[0]}", " points")

    text = f"The model is indifferent to where the target ends (within {ACCURACY_TOLERANCE:g} point, mean over budgets)"
    return _sweep(runs, names, COSINE_PAPER, [claim(text, indifferent)])


SWEEP_SCION = TrainedExperiment(
    "table-sweep-scion",
    "Decay of Scion swept",
    "the best of λ = 0.04, 0.08, 0.12, 0.16 is 0.08 at every budget.",
    VIT, _scion_arms, _scion_sweep, (), budgets=BUDGETS, desk_budgets=SWEPT,
)  # fmt: skip
SWEEP_CONSTANT = TrainedExperiment(
    "table-sweep-constant",
    "Target of ScionC (constant) swept",
    "the best C² is 0.7917, that is λ₀ = 0.12: corrected decay requires a higher largest decay.",
    VIT, _constant_arms, _constant_sweep, (), budgets=BUDGETS, desk_budgets=SWEPT,
)  # fmt: skip
SWEEP_COSINE = TrainedExperiment(
    "table-sweep-cosine",
    "Final target of ScionC (cosine) swept",
    "C_T² = C_0²/2, /4, /8 differ little: the model is indifferent to the schedule of weight norm decrease.",
    VIT, _cosine_arms, _cosine_sweep, (), budgets=BUDGETS, desk_budgets=SWEPT,
)  # fmt: skip
