"""Who won: arms of one experiment compared seed by seed on their final accuracy or loss, and the verdict as a sentence.

This works on what summary.json holds, so that pages can be written without the runs.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from steadynorm.lab.paper.metrics import BY_ACCURACY, BY_LOSS, Score
from steadynorm.lab.paper.statistics import CONFIDENCE, Estimate, at_least, difference, sample_sd

DRIFT = "drift of hidden_norm, %"
CORRECTED, CONSTANT, FIXED, CAUTIOUS = "corrected decay", "constant decay", "fixed norm", "cautious decay"
BALANCED = {steps: f"balanced decay, T = {steps}" for steps in (20, 200)}
WAYS = (CORRECTED, *BALANCED.values(), CONSTANT, FIXED, CAUTIOUS)  # to hold a norm
SCORES = (BY_ACCURACY, BY_LOSS)


@dataclass(frozen=True)
class Comparison:
    """Pairs of arms that answer a question: each arm, and the arm that it is compared with."""

    folder: str  # in results/
    question: str
    against: Mapping[str, str]
    note: str = ""


COMPARISONS = (
    Comparison(
        "fig-adamc",
        "Does correcting AdamW's decay change the accuracy?",
        {
            "AdamC": "AdamW",
            "AdamC, AdamW's decay": "AdamW",
            "AdamW, AdamC's decay": "AdamC",
            "AdamC, decay x 5": "AdamW, decay x 5",
        },
        "AdamC begins with 1.5 times AdamW's decay, because the correction lowers it later; the second and third pair begin with "
        "equal decays. Five times the decay is too much for either: it shows the norms, not the best accuracy.",
    ),
    Comparison(
        "fig-muon",
        "Does correcting Muon's decay change the loss, and is ScionC as good as Muon?",
        {"Muon, corrected": "Muon", "ScionC, Nesterov": "Muon", "MuonC": "ScionC, Nesterov"},
        "The page also sweeps the learning rates.",
    ),
    Comparison("fig-nanogpt", "Is ScionC better than Scion on text?", {"ScionC": "Scion"}),
    Comparison("fig-nanogpt-wide", "And in a GPT of 6 layers x 256?", {"ScionC": "Scion", "MuonC": "ScionC"}),
    *(
        Comparison(
            folder,
            f"Which way to hold the norm trains the {model} best?",
            {arm: CONSTANT if arm == CORRECTED else CORRECTED for arm in WAYS if arm != CONSTANT},
            "All arms use the baseline's lr; the page has the sweep.",
        )
        for folder, model in (("fig-hold", "GPT"), ("fig-hold-vit", "ViT"))
    ),
    Comparison(
        "fig-polar-steps",
        "How exact must polar factors be?",
        dict.fromkeys(("svd", "4 steps", "3 steps", "Newton-Schulz, 5 steps"), "5 steps"),
    ),
    Comparison("fig-embedding", "Should embedding rows wait for their gradients?", {"rows in their own time": "dense"}),
    Comparison(
        "table-vit",
        "Which optimizer is best for the ViT?",
        {"AdamC": "AdamW", "Scion": "AdamW", "ScionC (constant)": "Scion", "ScionC (cosine)": "Scion"},
        "These runs have the longest of five budgets. ScionC (constant) begins with 1.5 times Scion's decay, ScionC (cosine) with the same.",
    ),
    Comparison(
        "fig-scionc",
        "And with two and a half times the decay?",
        {"ScionC (cosine)": "Scion"},
        "The figures of norms raise the decay beyond what is good for the accuracy, in both arms alike.",
    ),
    Comparison(
        "fig-scionc-constant",
        "And with a constant target, which means twice Scion's decay at first?",
        {"ScionC (constant)": "Scion"},
    ),
    Comparison(
        "fig-output-layer",
        "Should the output layer be corrected as well?",
        {"ScionC, output corrected too": "ScionC", "ScionC, output bias constant": "ScionC", "ScionC": "Scion"},
        "All arms have two and a half times the decay.",
    ),
    Comparison(
        "fig-renormalized",
        "Does it matter that updates are not perpendicular to the weights?",
        {"Renormalized AdamW": "AdamW", "Renormalized AdamW, no momentum": "AdamW, no momentum"},
    ),
    Comparison(
        "fig-adamc-betas",
        "Are other betas as good for AdamC?",
        {"AdamC, betas 0.99, 0.99": "AdamC, betas 0.9, 0.999"},
    ),
    Comparison(
        "fig-momentum-schedule",
        "Can momentum be scheduled in place of the lr?",
        {f"alpha 0.1 to {end}": "cosine lr" for end in ("0.2", "0.5", "1")},
    ),
    Comparison(
        "fig-momentum-gamma-prime",
        "What does matching the momentum wrongly cost, from alpha 0.1?",
        {"gamma' matched, alpha 0.1 to 1": "cosine lr"},
    ),
    Comparison(
        "fig-momentum-gamma-prime-slow",
        "And from alpha 0.02?",
        {"alpha 0.02, cosine lr": "cosine lr", "gamma' matched, alpha 0.02 to 1": "alpha 0.02, cosine lr"},
    ),
    Comparison(
        "fig-momentum-linear",
        "Does the momentum factor in the decay help, with alpha from 0.01 to 1?",
        {
            "alpha 0.01 to 1, ScionC": "alpha 0.01 to 1, λ by lr alone",
            "alpha 0.01 to 1, exact decay (ours)": "alpha 0.01 to 1, ScionC",
        },
    ),
    Comparison(
        "fig-exact-target",
        "Is the exact decay better for the accuracy than the paper's formula?",
        {"exact, alpha 0.1": "linear, alpha 0.1", "exact, alpha 0.02": "linear, alpha 0.02"},
    ),
)


@dataclass(frozen=True)
class Pair:
    """Two arms of one experiment with the numbers of every seed."""

    arm: str
    base: str
    score: Score
    values: tuple[float, ...]
    base_values: tuple[float, ...]
    drifts: tuple[float, float] | None  # of the hidden norm, mean over seeds, in percent: base, arm
    steps: int

    @property
    def gap(self) -> Estimate:
        """The difference arm - base, estimated seed by seed."""
        return difference(self.values, self.base_values)

    @property
    def reach(self) -> float:
        """Half the width of the confidence interval; nan for one seed."""
        return self.gap.reach

    @property
    def p(self) -> float:
        """The chance of a gap as clear as this, either way, if there were none; 1 for one seed."""
        return at_least(self.gap, 0.0, "").chance

    @property
    def winner(self) -> str | None:
        """The better arm, if the whole interval is on one side of zero."""
        if not abs(self.gap.value) > self.reach:  # also nan
            return None
        return self.arm if self.score.sign * self.gap.value > 0 else self.base

    @property
    def interval(self) -> str:
        """The gap with its confidence interval."""
        gap, score = self.gap.value, self.score
        if math.isnan(self.reach):
            return score.shown(gap, signed=True)
        ends = " to ".join(score.shown(gap + side * self.reach, signed=True) for side in (-1, 1))
        return f"{score.shown(gap, signed=True)} ({100 * CONFIDENCE:g} %: {ends})"

    @property
    def verdict(self) -> str:
        """The outcome in a sentence."""
        score, gap = self.score, abs(self.gap.value)
        margin = score.margin_words
        if math.isnan(self.reach):
            return "One seed: no verdict."
        equal = gap + self.reach <= score.margin
        if self.winner is not None:
            size = f"by {score.shown(gap)} {score.unit}"
            if equal:
                return f"{self.winner} is ahead {size}, within the {margin} that we call equal."
            return f"{self.winner} wins {size}."
        if equal:
            return f"A draw: they differ by less than {margin}."
        better = score.sign * self.gap.value
        worst, best = (score.shown(abs(better + side * self.reach)) for side in (-1, 1))
        return f"No winner: {self.arm} is between {worst} {score.unit} worse and {best} better."

    @staticmethod
    def spread(score: Score, values: tuple[float, ...]) -> str:
        """Format the mean and sample standard deviation."""
        mean = score.shown(math.fsum(values) / len(values))
        return mean if len(values) < 2 else f"{mean} ± {score.shown(sample_sd(values))}"


def pairs(comparison: Comparison, summary: Mapping[str, Any]) -> list[Pair]:
    """Return the pairs of a comparison that were run, at the longest budget."""
    numbers = summary["numbers"]
    score = next(score for score in SCORES if score.name in numbers)
    arms: Mapping[str, Any] = numbers[score.name]
    budget = max(summary["budgets"], key=int)
    out = []
    for arm, base in comparison.against.items():
        if not all(name in arms and budget in arms[name] for name in (arm, base)):
            continue
        values, base_values = (tuple(arms[name][budget]["values"]) for name in (arm, base))
        drifts = numbers.get(DRIFT)
        moved = None if drifts is None else (drifts[base][budget]["mean"], drifts[arm][budget]["mean"])
        out.append(Pair(arm, base, score, values, base_values, moved, int(summary["budgets"][budget])))
    return out
