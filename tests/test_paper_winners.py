"""Who won: sentences by intervals, and the declared comparisons against what was run."""

import json
from pathlib import Path

import pytest

from steadynorm.lab import paper
from steadynorm.lab.paper import runner
from steadynorm.lab.paper.baselines import VIT
from steadynorm.lab.paper.experiment import Context, TrainedExperiment
from steadynorm.lab.paper.experiments.vit_tables import CONSTANT
from steadynorm.lab.paper.winners import COMPARISONS, SCORES, Comparison, Pair, pairs

ROOT = Path(__file__).parent.parent
ACCURACY, LOSS = SCORES


def pair(measure, *gaps: float) -> Pair:
    """Return two arms whose seeds differ by these gaps, however far apart the seeds are."""
    base = tuple(10.0 * (seed + 1) for seed in range(len(gaps)))
    values = tuple(one + gap for one, gap in zip(base, gaps, strict=True))
    return Pair("new", "old", measure, values, base, None, 100)


@pytest.mark.parametrize(
    ("measure", "gaps", "winner", "verdict"),
    [
        (ACCURACY, (3.0, 3.1, 2.9), "new", "new wins by 3.00 points."),
        (ACCURACY, (-3.0, -3.1, -2.9), "old", "old wins by 3.00 points."),
        (ACCURACY, (0.5, 0.51, 0.49), "new", "new is ahead by 0.50 points, within the 1 point that we call equal."),
        (LOSS, (-0.3, -0.31, -0.29), "new", "new wins by 0.3000 nats."),
        (LOSS, (0.3, 0.31, 0.29), "old", "old wins by 0.3000 nats."),
        (ACCURACY, (0.1, -0.1, 0.0), None, "A draw: they differ by less than 1 point."),
        (ACCURACY, (0.9, 0.0, 0.6), None, "No winner: new is between 0.64 points worse and 1.64 better."),
        (ACCURACY, (-0.9, 0.0, -0.6), None, "No winner: new is between 1.64 points worse and 0.64 better."),
        (LOSS, (-0.018, 0.0, -0.012), None, "No winner: new is between 0.0128 nats worse and 0.0328 better."),
        (ACCURACY, (3.0, -3.0, 0.0), None, "No winner: new is between 7.45 points worse and 7.45 better."),
        (ACCURACY, (3.0,), None, "One seed: no verdict."),
    ],
)
def test_the_verdict_follows_the_interval(measure, gaps, winner, verdict):
    found = pair(measure, *gaps)
    assert (found.winner, found.verdict) == (winner, verdict)
    assert (found.p <= 0.05) == (winner is not None)


def test_comparisons_are_of_declared_arms_and_all_that_were_run_are_shown():
    """A misspelled arm would vanish from the page silently."""
    for comparison in COMPARISONS:
        experiment = paper.get(comparison.folder)
        assert isinstance(experiment, TrainedExperiment)
        arms = {*comparison.against, *comparison.against.values()}
        assert arms <= set(experiment.plan(Context(Path())).arms)
        folder = ROOT / "results" / comparison.folder
        if runner.is_kept(folder):
            summary = json.loads((folder / runner.SUMMARY).read_text(encoding="utf-8"))
            _, context = runner.context_of(folder)
            complete = runner.read(experiment, context).complete_arms()
            expected = [pair for pair in comparison.against.items() if set(pair) <= set(complete)]
            assert [(pair.arm, pair.base) for pair in pairs(comparison, summary)] == expected


def test_an_arm_that_was_not_run_is_left_out():
    summary = {
        "budgets": {"9": 90, "10": 100},
        "numbers": {"accuracy": {"a": {"10": {"values": [1.0]}, "9": {"values": [5.0]}}}},
    }
    summary["numbers"]["accuracy"]["b"] = summary["numbers"]["accuracy"]["a"]
    [found] = pairs(Comparison("x", "?", {"a": "b", "c": "b"}), summary)
    assert (found.values, found.steps) == ((1.0,), 100)  # the longest, by number and not by letters


def test_notes_name_the_decays_of_the_settings():
    desk, notes = VIT["desk"], {comparison.folder: comparison.question + comparison.note for comparison in COMPARISONS}
    assert (desk.adamc_decay, CONSTANT, desk.norm_decay) == (1.5, 1.5, 2.5)
    assert f"{desk.adamc_decay:g} times AdamW's decay" in notes["fig-adamc"]
    assert f"{CONSTANT:g} times Scion's decay" in notes["table-vit"]
    assert "two and a half times the decay" in notes["fig-scionc"]
