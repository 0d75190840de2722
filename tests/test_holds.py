"""Four ways to hold a norm, simulated: independent gradients, and gradients with a pull along the weights."""

import json
import math

import numpy as np
import pytest

from steadynorm import theory
from steadynorm.cli import main
from steadynorm.lab import agreement, holds
from steadynorm.lab.holds import HeldSystem, run_held
from steadynorm.prediction import LrPlan, ParamSetting

SETTING = ParamSetting(0.02, 0.1, (1000,), weight_decay=0.1)
PLAN = LrPlan(2500)  # cosine


def mean_ratios(pull: float, *names: str) -> list[float]:
    """Return mean |theta|^2 over target, at T = 200."""
    norms = agreement.compare_holds(SETTING, names, PLAN, balance_steps=200, pull=pull, seeds=2)
    return [norm.mean_ratio**2 for norm in norms]


def test_balance_agrees_with_open_loop_where_gradients_are_independent():
    """The open loop's own noise is larger than a percent, and its target is what it aims at."""
    decay, balance = mean_ratios(0.0, "decay", "balance")
    assert balance == pytest.approx(1.0, abs=0.01)
    assert decay == pytest.approx(1.0, abs=0.05)


@pytest.mark.parametrize("pull", [0.1, -0.05])
def test_balance_holds_the_target_against_a_pull_that_defeats_the_open_loop(pull: float):
    decay, balance = mean_ratios(pull, "decay", "balance")
    assert balance == pytest.approx(1.0, abs=0.02)
    assert abs(decay - 1) > 0.3
    assert (decay > 1) == (pull > 0)


def test_fixed_norm_is_exact_under_any_pull():
    for pull in (0.0, 0.1, -0.05):
        system = HeldSystem("fixed", "sign", (40, 5), np.linspace(0.3, 0, 50), 0.1, 0.2, 2.5, pull=pull)
        [held] = run_held([system], 50, seeds=2)
        np.testing.assert_allclose(held.norm_sq, 2.5, rtol=1e-12)


def test_short_balance_is_nearly_a_fixed_norm():
    spread = {}
    for balance_steps in (1, 20, 200):
        system = HeldSystem("balance", "bias", (500,), 0.05, 0.0, 0.1, 1.5, balance_steps=balance_steps)
        spread[balance_steps] = np.abs(run_held([system], 600)[0].norm_sq / 1.5 - 1).max()
    assert spread[1] < 0.01 < spread[20] < spread[200]


def test_cautious_decay_keeps_the_target():
    [cautious] = mean_ratios(0.0, "cautious")
    assert cautious == pytest.approx(1.0, abs=0.06)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize(("lmo", "shape"), [("spectral", (6, 4)), ("sign", (5, 3)), ("bias", (7,))])
def test_open_loop_follows_the_forecast(lmo: str, shape: tuple[int, ...], nesterov: bool):
    """The same recursion as in lab/simulate.py, so the steady norm is the predicted one, as far as small shapes allow."""
    lr, decay, alpha = 0.1, 0.3, 0.3
    kernel = theory.overlap(lmo, shape)
    target = theory.steady_norm_sq(lr, decay, alpha, nesterov=nesterov, overlap=kernel)
    system = HeldSystem("decay", lmo, shape, lr, lr * decay, alpha, target, nesterov)
    [trajectory] = run_held([system], 400, seeds=24)
    assert trajectory.late_mean().mean == pytest.approx(target, rel=0.12)


def test_command_shows_target_mean_and_end_of_each_way(capsys: pytest.CaptureFixture[str]):
    options = "--shape 64 --alpha 0.5 --half-lives 1 --seeds 2 --pull 0.1 --schedule cosine"
    arguments = ["simulate", *options.split(), "--hold", *holds.HOLDS]
    assert main([*arguments, "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["hold"] for row in rows] == list(holds.HOLDS)
    fixed = rows[2]
    assert fixed["mean"] == pytest.approx(fixed["target"]) and fixed["end"] == pytest.approx(fixed["target"])
    target = theory.steady_norm_sq(0.05, 0.1, 0.5, overlap=theory.overlap("bias", (64,)))
    assert fixed["target"] == pytest.approx(math.sqrt(target))
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert all(name in printed for name in ("T 20", *holds.HOLDS))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("--hold glue", "decay, balance, fixed, cautious"),
        ("--hold fixed --momentum trace", "plain or nesterov"),
        ("--hold fixed --lmo row --shape 4x4", "spectral, sign"),
        ("--hold balance --balance-steps 0", "balance_steps 0.0: must be above 0"),
        ("--hold decay --pull nan", "pull nan: must be finite"),
        ("--pull 0.1 --schedule cosine", "--pull, --schedule: only with --hold"),
        ("--alpha", "--alpha: pass at least one"),
        ("--lr 1 --weight-decay 1", "lr * weight_decay = 1 leaves nothing of the weights"),
    ],
)
def test_impossible_holds_are_refused(extra: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["simulate", "--shape", "8", "--half-lives", "0.1", *extra.split()]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
