"""Means, margins and verdicts agree with slow twins, and flip when the effect is removed."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadynorm.lab.paper import metrics
from steadynorm.lab.paper import statistics as stats
from steadynorm.lab.paper.claims import MissingRunsError, all_of, difference, judge, mean, value
from steadynorm.lab.paper.statistics import Estimate
from steadynorm.records import Run

PAIRS = st.lists(st.tuples(st.floats(-100, 100), st.floats(-100, 100)), min_size=2, max_size=6)
TABLE = {  # Student's t: degrees of freedom -> t with 5 % and 2.5 % above it (any textbook)
    1: (6.3138, 12.7062), 2: (2.9200, 4.3027), 3: (2.3534, 3.1824), 4: (2.1318, 2.7764), 5: (2.0150, 2.5706),
    7: (1.8946, 2.3646), 10: (1.8125, 2.2281), 15: (1.7531, 2.1314), 30: (1.6973, 2.0423), 120: (1.6577, 1.9799),
}  # fmt: skip


@pytest.mark.parametrize("freedom", TABLE)
def test_students_t_agrees_with_the_table(freedom: int):
    for t, tail in zip(TABLE[freedom], (0.05, 0.025), strict=True):
        assert stats.student_tail(t, freedom) == pytest.approx(tail, abs=1e-5)
        assert stats.student_tail(-t, freedom) == pytest.approx(1 - tail, abs=1e-5)
        assert stats.student_quantile(freedom, 1 - 2 * tail) == pytest.approx(t, abs=6e-5)


def test_students_t_holds_far_out_and_with_many_degrees_of_freedom():
    assert stats.student_tail(math.inf, 2) == 0
    assert stats.student_tail(100.0, 2) == pytest.approx(
        0.5 * (1 - 100 / math.sqrt(2 + 100**2)), rel=1e-6
    )  # closed form
    assert stats.student_quantile(8191) == pytest.approx(1.960, abs=1e-3)  # the normal distribution's


@given(PAIRS)
def test_a_difference_is_paired(pairs: list[tuple[float, float]]):
    ones, others = zip(*pairs, strict=True)
    found = stats.difference(ones, others)
    by_seed = np.subtract(ones, others)
    assert found.value == pytest.approx(by_seed.mean(), abs=1e-9)
    assert found.error == pytest.approx(by_seed.std(ddof=1) / math.sqrt(len(pairs)), rel=1e-6, abs=1e-9)


def test_variation_shared_by_seeds_does_not_blur_a_difference():
    """Seeds move both arms alike, by far more than the arms differ."""
    shared = [0.0, 50.0, -30.0]
    ones, others = [s + 1.0 + e for s, e in zip(shared, (0.0, 0.1, -0.1), strict=True)], shared
    assert stats.at_least(stats.difference(ones, others), 0.0, "x").holds


def test_a_verdict_flips_when_the_effect_is_removed():
    effect, none, unclear = Estimate(1.0, 0.1, 3), Estimate(-1.0, 0.1, 3), Estimate(0.05, 0.1, 3)
    assert [stats.at_least(each, 0.0, "x").holds for each in (effect, none, unclear)] == [True, False, None]
    assert [stats.at_most(each, 0.0, "x").holds for each in (effect, none, unclear)] == [False, True, None]
    assert [stats.within(each, 0.5, "x").holds for each in (effect, none, unclear)] == [False, False, True]
    wide = Estimate(0.05, 0.4, 3)
    assert stats.within(wide, 0.5, "x").holds is None


def test_three_seeds_need_more_than_two_standard_errors():
    """They need 4.3 of them; with 30 seeds, two are enough."""
    assert stats.at_least(Estimate(4.2, 1.0, 3), 0.0, "x").holds is None
    assert stats.at_least(Estimate(4.4, 1.0, 3), 0.0, "x").holds
    assert stats.at_least(Estimate(2.1, 1.0, 30), 0.0, "x").holds


def test_at_the_edge_of_the_interval_the_chance_is_5_percent():
    found = Estimate(4.3027, 1.0, 3)
    assert (
        stats.at_least(found, 0.0, "x").chance == stats.at_most(found, 0.0, "x").chance == pytest.approx(0.05, abs=1e-5)
    )
    assert stats.within(found._replace(value=0.6973), 5.0, "x").chance == pytest.approx(0.05, abs=1e-5)


def test_the_interval_covers_the_truth_in_95_percent_of_samples():
    draw = random.Random(0)
    found = [stats.estimate([draw.gauss(3.0, 1.0) for _ in range(3)]) for _ in range(4000)]
    covered = sum(abs(each.value - 3.0) <= stats.student_quantile(2) * each.error for each in found)
    assert covered / 4000 == pytest.approx(0.95, abs=0.012)


def test_noise_at_a_bound_supports_a_claim_in_at_most_5_percent_of_two_looks():
    """Three seeds, and eight where the claim is open then: what docs/experiments.md says of the plan. A third look errs more."""
    draw, supported = random.Random(0), [0, 0, 0]
    for _ in range(4000):
        seeds = [draw.gauss(0.0, 1.0) for _ in range(16)]
        looks = (stats.at_least(stats.estimate(seeds[:count]), 0.0, "x").holds for count in (3, 8, 16))
        for which, holds in enumerate(looks):
            supported[which] += holds is True
            if holds is not None:
                break
    assert sum(supported[:2]) / 4000 < 0.05 < sum(supported) / 4000


def test_an_open_verdict_says_how_many_seeds_would_settle_it():
    finding = stats.at_least(Estimate(0.1, 0.1, 3), 0.0, "x")
    assert "15 seeds would settle it" in finding.figure
    assert finding.plain()["seeds_needed"] == 15
    for seeds, settled in ((14, None), (15, True)):  # the same spread, so many seeds
        assert stats.at_least(Estimate(0.1, 0.1 * math.sqrt(3 / seeds), seeds), 0.0, "x").holds is settled


def test_one_seed_gets_no_verdict():
    one = stats.at_least(stats.estimate([5.0]), 0.0, "x")
    assert (one.holds, one.chance) == (None, 1.0)
    assert "one seed" in one.figure
    several = stats.at_least(Estimate(5.0, 0.1, 3), 0.0, "y")
    assert stats.combine_findings([one, several]).holds is None


def test_numbers_without_spread_are_judged_directly():
    """A forecast from the schedule is the same for every seed."""
    assert stats.at_least(Estimate(1.0, 0.0, 3), 0.0, "x").holds
    assert stats.at_least(Estimate(-1.0, 0.0, 3), 0.0, "x").holds is False
    assert stats.at_least(Estimate(0.0, 0.0, 3), 0.0, "x").holds is None


def test_a_joint_claim_is_false_before_it_is_open():
    held, open_, refuted = (stats.at_least(Estimate(value, 0.1, 3), 0.0, "x") for value in (2.0, 0.1, -2.0))
    assert stats.combine_findings([held, held]).holds is True
    assert stats.combine_findings([held, open_]).holds is None
    assert stats.combine_findings([open_, refuted]).holds is False


def test_one_of_many_bounds_refutes_by_its_share_of_the_chance():
    """A bound missed by 4.4 standard errors refutes by itself, but not as the worst of twenty."""
    missed, held = stats.at_least(Estimate(-4.4, 1.0, 3), 0.0, "x"), stats.at_least(Estimate(90.0, 1.0, 3), 0.0, "y")
    assert missed.holds is False
    assert stats.combine_findings([missed, *[held] * 19]).holds is None


def test_of_many_bounds_the_least_certain_is_shown():
    bounds = [stats.at_least(Estimate(value, 0.1, 3), 0.0, f"number {value:g}") for value in (9.0, 1.0, 8.0, 7.0, 6.0)]
    assert stats.combine_findings(bounds).figure.startswith("the least certain of 5: number 1 +1 (95 %")


def test_a_reason_keeps_a_claim_open():
    certain = stats.at_least(Estimate(1.0, 0.01, 3), 0.0, "x")
    held_back = replace(certain, open_because="too short")
    assert (held_back.holds, held_back.chance, held_back.figure[-9:]) == (None, 1.0, "too short")


def test_a_claim_falls_with_its_premise():
    """Half of nothing is nothing: a bound that is kept does not save a claim whose premise is refuted."""
    kept, shown, refuted, unclear = (
        stats.at_least(Estimate(value, 0.1, 3), 0.0, "x").bounds[0] for value in (2.0, 2.0, -2.0, 0.1)
    )
    assert [stats.Finding((kept,), premise=premise).holds for premise in (None, shown, refuted, unclear)] == [
        True, True, False, None,
    ]  # fmt: skip
    assert stats.combine_findings([stats.Finding((kept,), premise=refuted), stats.Finding((kept,))]).holds is False
    assert stats.Finding((kept,), premise=refuted).figure.count("x -2") == 1


def test_one_bound_that_fails_settles_a_claim_of_several():
    """The seeds that it takes are those of the bound that fails first, at its share of the error rate."""
    inside = stats.at_least(Estimate(0.1, 0.1, 3), 0.0, "x")  # 15 seeds would show it
    outside = stats.at_least(Estimate(-0.3, 0.1, 3), 0.0, "y")
    assert (inside.seeds_needed, outside.seeds_needed) == (15, 4)
    both = stats.combine_findings([inside, outside])
    assert both.seeds_needed == 5
    assert "5 seeds would settle it" in both.figure
    for seeds, settled in ((4, None), (5, False)):
        spread = 0.1 * math.sqrt(3 / seeds)
        several = [stats.at_least(Estimate(value, spread, seeds), 0.0, "x") for value in (0.1, -0.3)]
        assert stats.combine_findings(several).holds is settled


def test_holms_correction_agrees_with_its_definition():
    """In the twin, the smallest p is multiplied by n, the next by n - 1, and so on, never below the one before."""
    draw = random.Random(0)
    for _ in range(200):
        chances = [draw.random() ** 4 for _ in range(draw.randint(1, 12))]
        adjusted, largest = {}, 0.0
        for rank, which in enumerate(sorted(range(len(chances)), key=chances.__getitem__)):
            largest = max(largest, (len(chances) - rank) * chances[which])
            adjusted[which] = largest
        assert stats.holm(chances) == [adjusted[k] <= 0.05 for k in range(len(chances))]


def test_holms_correction_errs_in_one_family_of_twenty():
    """In families of 30 claims whose truth is at the bound, most would have a wrong verdict without a correction."""
    draw, wrong, uncorrected = random.Random(0), 0, 0
    for _ in range(1000):
        chances = [draw.random() for _ in range(30)]
        wrong += any(stats.holm(chances))
        uncorrected += any(p <= 0.05 for p in chances)
    assert wrong / 1000 == pytest.approx(0.05, abs=0.02)
    assert uncorrected > 700


@given(st.floats(-3, 3), st.floats(0.1, 5), st.floats(-2, 2))
def test_a_parabola_gives_its_own_top(top: float, bend: float, height: float):
    x = [-4.0, -2.5, -1.0, 0.0, 0.7, 2.0, 4.0]
    found, inside = stats.parabola_peak(x, [height - bend * (each - top) ** 2 for each in x])
    assert inside
    assert found == pytest.approx(top, abs=1e-6)


def test_a_best_point_at_the_end_is_reported():
    assert stats.parabola_peak([0.0, 1.0, 2.0], [0.0, 1.0, 2.0]) == (2.0, False)


def test_a_claim_without_its_runs_is_not_testable():
    class NoRuns:
        def values(self, metric: metrics.Metric, arm: str, budget: int | None = None) -> list[float]:
            raise MissingRunsError(f"2 of 3 runs of {arm} at 90 are missing: not trained")

    made = judge(value(metrics.LOSS, "Scion").at_least(0.0, "x"), NoRuns())
    assert (made.verdict, made.figure[:8]) == ("open", "2 of 3 r")


class Table:
    """Outcomes of two seeds, by arm."""

    def __init__(self, **arms: list[float]):
        self.arms = arms

    def values(self, metric: metrics.Metric, arm: str, budget: int | None = None) -> list[float]:
        return [(budget or 1) * number for number in self.arms[arm]]


def test_contrasts_add_up_seed_by_seed():
    outcomes = Table(a=[3.0, 5.0], b=[1.0, 2.0])
    a, b = value(metrics.LOSS, "a"), value(metrics.LOSS, "b")
    assert (a - 0.5 * b).by_seed(outcomes) == [2.5, 4.0]
    assert (a + a - a).by_seed(outcomes) == [3.0, 5.0]
    assert mean(difference(metrics.LOSS, "a", "b", budget) for budget in (1, 3)).by_seed(outcomes) == [4.0, 6.0]


def test_claims_bound_the_mean_of_a_contrast():
    outcomes = Table(a=[1.0, 1.001], b=[0.0, 0.0])
    gap = difference(metrics.LOSS, "a", "b")
    tests = (gap.at_least(0.5, "x"), gap.at_most(0.5, "x"), gap.within(0.5, "x"), gap.within(1.5, "x"))
    assert [test(outcomes).holds for test in tests] == [True, False, False, True]
    assert [all_of(pair)(outcomes).holds for pair in (tests[:2], tests[::3])] == [False, True]
    assert tests[0](outcomes).figure.startswith("x +1 (95 %")


def test_the_metrics_of_a_run_equal_those_worked_out_by_hand():
    """The norm is 8 at first, 2 in the middle, then 4, and 3 at the end; its forecast is 1 throughout."""
    steps = np.arange(1, 101)
    norm = np.select([steps < 40, steps <= 60, steps < 95], [8.0, 2.0, 4.0], 3.0)
    norm[49] = np.nan  # not measured there
    run = Run("by hand", {"steps": 100}, "", None, steps, {"norm": norm, "forecast": np.ones(100)}, {})
    assert metrics.final("norm", 10.0)(run) == 30
    assert metrics.mean_over("norm", (0.9, 1.0))(run) == pytest.approx((5 * 4 + 6 * 3) / 11)
    assert metrics.growth("norm")(run) == metrics.drift("norm")(run) == pytest.approx(100 * math.log(3 / 2))
    assert metrics.swing("norm", 0.4)(run) == pytest.approx(100 * math.log(4 / 2))
    assert metrics.log_ratio("norm", "forecast")(run) == pytest.approx(100 * math.log(3))
    run.columns["norm"][:] = np.where(steps < 50, 2.0, 1.0)
    assert metrics.growth("norm")(run) < 0 < metrics.drift("norm")(run)
