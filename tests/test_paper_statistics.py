"""Means, margins and verdicts: against slow twins, and flipping when the effect is taken away."""

import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from steadynorm.paper import measures
from steadynorm.paper import statistics as stats
from steadynorm.paper.experiment import MissingRunsError, claim
from steadynorm.paper.statistics import Estimate, Finding
from steadynorm.records import Run

VALUES = st.lists(st.floats(-100, 100), min_size=2, max_size=6)


@given(VALUES, VALUES)
def test_difference_against_numpy(ones: list[float], others: list[float]):
    found = stats.difference(ones, others)
    error = math.sqrt(np.var(ones, ddof=1) / len(ones) + np.var(others, ddof=1) / len(others))
    assert found.value == pytest.approx(np.mean(ones) - np.mean(others), abs=1e-9)
    assert found.error == pytest.approx(error, rel=1e-6, abs=1e-9)


def test_the_error_of_a_mean_over_budgets_is_what_repeating_it_shows():
    """Twin: draw the whole experiment many times and look at the spread of its result."""
    draw = random.Random(0)
    sds, repeats = (0.5, 1.0, 2.0), []
    for _ in range(4000):
        parts = [
            stats.difference([draw.gauss(0, sd) for _ in range(3)], [draw.gauss(0, sd) for _ in range(3)]) for sd in sds
        ]
        repeats.append(stats.mean_of(parts).value)
    exact = stats.mean_of([Estimate(0.0, math.sqrt(2 * sd * sd / 3), 3) for sd in sds]).error
    assert np.std(repeats) == pytest.approx(exact, rel=0.05)


def test_a_verdict_flips_when_the_effect_is_removed():
    effect, none, unclear = Estimate(1.0, 0.1, 3), Estimate(-1.0, 0.1, 3), Estimate(0.05, 0.1, 3)
    assert [stats.at_least(each, 0.0, "x").holds for each in (effect, none, unclear)] == [True, False, None]
    assert [stats.at_most(each, 0.0, "x").holds for each in (effect, none, unclear)] == [False, True, None]
    assert [stats.within(each, 0.5, "x").holds for each in (effect, none, unclear)] == [False, False, True]
    wide = Estimate(0.05, 0.4, 3)
    assert stats.within(wide, 0.5, "x").holds is None


def test_an_open_verdict_says_how_many_seeds_would_settle_it():
    finding = stats.at_least(Estimate(0.1, 0.1, 3), 0.0, "x")
    assert "12 seeds would settle it" in finding.figure
    settled = Estimate(0.1, 0.1 * math.sqrt(3 / 12), 12)  # the same spread, so many seeds
    assert stats.at_least(settled, 0.0, "x").holds


def test_one_seed_settles_nothing():
    finding = stats.at_least(stats.estimate([5.0]), 0.0, "x")
    assert finding.holds is None
    assert "one seed" in finding.figure


def test_every_is_false_before_it_is_open():
    held, open_, refuted = Finding(True, "a"), Finding(None, "b"), Finding(False, "c")
    assert stats.every([held, held]).holds is True
    assert stats.every([held, open_]).holds is None
    assert stats.every([open_, refuted]).holds is False


@given(st.floats(-3, 3), st.floats(0.1, 5), st.floats(-2, 2))
def test_a_parabola_gives_its_own_top(top: float, bend: float, height: float):
    x = [-4.0, -2.5, -1.0, 0.0, 0.7, 2.0, 4.0]
    found, inside = stats.parabola_peak(x, [height - bend * (each - top) ** 2 for each in x])
    assert inside
    assert found == pytest.approx(top, abs=1e-6)


def test_a_best_point_at_the_end_is_told():
    assert stats.parabola_peak([0.0, 1.0, 2.0], [0.0, 1.0, 2.0]) == (2.0, False)


def test_a_claim_without_its_runs_is_not_testable():
    def missing() -> Finding:
        raise MissingRunsError("2 of 3 runs of Scion at 90 are missing: not trained")

    made = claim("x", missing)
    assert (made.verdict, made.figure[:8]) == ("not testable at this scale", "2 of 3 r")


def test_measures_of_a_run_worked_out_by_hand():
    """Norm 8 at first, 2 in the middle, then 4, and 3 at the end; its forecast is 1 all along."""
    steps = np.arange(1, 101)
    norm = np.select([steps < 40, steps <= 60, steps < 95], [8.0, 2.0, 4.0], 3.0)
    norm[49] = np.nan  # not measured there
    run = Run("by hand", {"steps": 100}, "", None, steps, {"norm": norm, "forecast": np.ones(100)}, {})
    assert measures.final("norm", 10.0)(run) == 30
    assert measures.mean_over("norm", (0.9, 1.0))(run) == pytest.approx((5 * 4 + 6 * 3) / 11)
    assert measures.growth("norm")(run) == measures.drift("norm")(run) == pytest.approx(100 * math.log(3 / 2))
    assert measures.swing("norm", 0.4)(run) == pytest.approx(100 * math.log(4 / 2))
    assert measures.log_ratio("norm", "forecast")(run) == pytest.approx(100 * math.log(3))
    run.columns["norm"][:] = np.where(steps < 50, 2.0, 1.0)
    assert measures.growth("norm")(run) < 0 < measures.drift("norm")(run)
