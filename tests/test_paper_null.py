"""The null test: no claim may hold of noise in more than 5 % of draws, and a biased design is caught."""

import math
from pathlib import Path
from typing import Any

import pytest

from steadynorm.cli import main
from steadynorm.lab import paper
from steadynorm.lab.paper import null, runner, statistics
from steadynorm.lab.paper.claims import Outcomes, Test, judge, value
from steadynorm.lab.paper.experiment import Context, TrainedExperiment
from steadynorm.lab.paper.experiments import learning_rates, vit_tables
from steadynorm.lab.paper.metrics import ACCURACY
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.paper.statistics import Finding, at_least, at_most, estimate, parabola_peak

FOLDERS = sorted(filter(runner.is_kept, (Path(__file__).parent.parent / "results").glob("*")))
NOT_RUN = {name for name, each in paper.EXPERIMENTS.items() if isinstance(each, TrainedExperiment)} - {
    folder.name for folder in FOLDERS
}
FAST, FULL = 500, 20_000  # of 500 draws, a claim that holds in 10 % has more than 25 (5 %) with a chance of 99.99 %


def noise_of(name: str, kind: type[null.Noise] = null.Noise) -> null.Noise:
    """Return noise of unit spread in place of the runs of an experiment."""
    experiment = paper.get(name)
    assert isinstance(experiment, TrainedExperiment)
    return kind(Runs(experiment.plan(Context(Path())), {}, {}))


def show(folder: Path, draws: int) -> dict[str, float]:
    name, context = runner.context_of(folder)
    shares = dict(null.shares(paper.get(name), context, draws))
    for claim, share in shares.items():
        print(f"{100 * share:5.1f} %  {folder.name}: {claim}")
    return shares


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda each: each.name)
def test_noise_supports_no_claim(folder: Path):
    assert all(share <= null.MOST for share in show(folder, FAST).values())


@pytest.mark.parametrize("name", sorted(NOT_RUN))
def test_noise_supports_no_claim_of_an_experiment_before_it_is_run(name: str):
    """Noise of unit spread stands for the runs, so that a design that leans is caught before it is paid for."""
    noise = noise_of(name)
    experiment = paper.get(name)
    assert isinstance(experiment, TrainedExperiment)
    for text, test in experiment.claims_about(noise.runs.plan).items():
        assert null.share_of_trained(text, test, noise, FAST // 5) <= 2 * null.MOST, text  # fewer draws


@pytest.mark.slow
@pytest.mark.parametrize("folder", FOLDERS, ids=lambda each: each.name)
def test_noise_supports_no_claim_in_many_draws(folder: Path):
    """At a bound a claim holds in at most 2.5 % of draws: one side of a 95 % interval."""
    assert all(share <= 0.03 for share in show(folder, FULL).values())


def test_a_bound_of_two_standard_errors_would_be_caught(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(statistics, "student_quantile", lambda freedom: 2.0)
    noise = noise_of("table-vit")
    ahead = vit_tables.over_budgets(noise.runs.plan, "Scion", "AdamW").at_least(0.0, "x")
    assert null.share_of_trained("Scion is ahead", ahead, noise, FAST) > null.MOST


# Designs that lean


def assert_leans_and_is_refused(text: str, test: Test, noise: null.Noise, share: float) -> None:
    """The claim holds in more than this share of noise, so null.share_of_trained must ask whether its number is linear."""
    held = 0
    for seed in range(FAST):
        noise.restart(seed)
        held += test(noise).holds is True
    assert held / FAST > share
    with pytest.raises(ValueError, match="not a weighted sum of outcomes"):
        null.share_of_trained(text, test, noise, FAST)


def test_the_winner_of_a_centred_grid_leans_and_is_refused():
    """Every alpha's grid is centred on one effective lr, so that the winning lr rises with alpha even in noise."""
    noise = noise_of("fig-lr-eff")

    def rises(outcomes: Outcomes) -> Finding:
        first, last = (
            [seed[0] for seed in learning_rates.best_lrs(outcomes, noise.runs.plan.baseline, alpha)]
            for alpha in (learning_rates.ALPHAS[0], learning_rates.ALPHAS[-1])
        )
        return at_least(statistics.difference(last, first), 0.0, "ln(best lr at 0.5 / at 0.01)")

    assert_leans_and_is_refused("The best lr increases with alpha", rises, noise, 0.2)


def test_the_winners_of_two_grids_lean_and_are_refused():
    """One grid reaches higher than the other, and so does its winner."""
    noise = noise_of("table-sweep-constant")

    def best(outcomes: Outcomes, names: dict[float, str], budget: int) -> list[float]:
        ratios = sorted(names)
        accuracy = zip(*(outcomes.values(ACCURACY, names[ratio], budget) for ratio in ratios), strict=True)
        return [parabola_peak([math.log(ratio) for ratio in ratios], seed)[0] for seed in accuracy]

    def higher(outcomes: Outcomes) -> Finding:
        grids = (vit_tables.CONSTANT_TARGETS, vit_tables.SCION)
        ours, theirs = (
            [value for budget in noise.runs.plan.budgets for value in best(outcomes, names, budget)] for names in grids
        )
        return at_least(statistics.difference(ours, theirs), 0.0, "ln(best of ScionC / best of Scion)")

    assert_leans_and_is_refused("Corrected decay wants a higher decay", higher, noise, 0.1)


def test_a_largest_value_is_refused():
    """Odd powers pass for linear in sign and spans in scale, but neither in both."""
    noise = noise_of("table-vit")

    def span(outcomes: Outcomes) -> Finding:
        return at_most(estimate([max(v, -v) for v in outcomes.values(ACCURACY, "Scion")]), 1.0, "x")

    with pytest.raises(ValueError, match="not a weighted sum"):
        null.share_of_trained("x", span, noise, 10)


def test_a_claim_that_looks_at_runs_is_refused():
    def look(runs: Any) -> Finding:
        return at_least(estimate([ACCURACY(run) for run in runs.of("Scion")]), 0.0, "x")

    with pytest.raises(ValueError, match=r"let it rest on Outcomes\.values only"):
        null.share_of_trained("x", look, noise_of("table-vit"), 10)


def test_an_outcome_that_a_claim_asks_for_twice_is_drawn_once():
    noise = noise_of("table-vit")
    accuracy = value(ACCURACY, "Scion")
    assert (accuracy - accuracy).by_seed(noise) == [0.0] * 3
    assert noise.values(ACCURACY, "Scion") == noise.values(ACCURACY, "Scion")
    once = accuracy.by_seed(noise)
    noise.restart(1)
    assert accuracy.by_seed(noise) != once


# The redesigned claims see what they are about


class Parabola(null.Noise):
    """fig-lr-eff where accuracy is a parabola in ln lr, best at the lr of equal effective lr to the power of `exponent`."""

    exponent = 0.0

    def values(self, measure, arm, budget=None):
        alpha, ratio = (float(word.strip("x ")) for word in arm.removeprefix("alpha ").split(", effective lr"))
        u = math.log(ratio)
        equal = -math.log(learning_rates.theory.effective_lr(1.0, alpha) / learning_rates.theory.effective_lr(1.0, 0.1))
        best = (self.exponent - 1) * equal
        return [60 - 2 * (u - best) ** 2 + 0.05 * each for each in super().values(measure, arm, budget)]


@pytest.mark.parametrize(
    ("exponent", "verdicts"),
    [
        (1.0, ["holds", "holds", "holds"]),
        (0.0, ["does not hold", "open", "does not hold"]),
        (-0.5, ["does not hold", "does not hold", "does not hold"]),
    ],
)
def test_best_lrs_are_distinguished_from_best_effective_lrs(exponent: float, verdicts: list[str]):
    experiment, made = paper.get("fig-lr-eff"), noise_of("fig-lr-eff", Parabola)
    assert isinstance(experiment, TrainedExperiment) and isinstance(made, Parabola)
    made.exponent = exponent
    assert learning_rates.exponent(made) == pytest.approx(exponent, abs=0.05)
    made.restart(1)
    tests = experiment.claims_about(made.runs.plan).values()
    assert [judge(test, made).verdict for test in tests] == verdicts


def test_the_table_is_printed(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "fig-alignment").symlink_to(next(each for each in FOLDERS if each.name == "fig-alignment"))
    assert main(["paper", "null", str(tmp_path), "--draws", "200"]) == 0
    assert "0 of 3 claims hold in more than 5 % of draws" in capsys.readouterr().out
    assert main(["paper", "null", str(tmp_path), "--draws", "0"]) == 2
    assert main(["paper", "null", str(tmp_path / "nothing")]) == 2
    assert "holds no finished experiments" in capsys.readouterr().err
