"""Advice: each reason is named where its figure shows it, and nothing is said that no figure backs."""

import math

import numpy as np
import pytest
import torch
from monitor_cases import noise, parameters, train

import steadynorm as sn
from steadynorm import records
from steadynorm.monitor import history
from steadynorm.records import Run
from steadynorm.records.advice import read_figures

COUNT = 90
WOBBLE = 0.002 * np.random.default_rng(0).standard_normal(COUNT)


def run_of(role="hidden", config=None, steps=COUNT, **columns):
    """A run of 90 records whose columns are constant but for a little noise; None is a column of nan."""
    values = {
        key if key in ("lr", "weight_decay") or not role else f"{key}/{role}": np.full(COUNT, np.nan)
        if value is None
        else value * (1 + WOBBLE)
        if np.ndim(value) == 0
        else value
        for key, value in columns.items()
    }
    return Run("run", config or {}, "", None, np.linspace(1, steps, COUNT).astype(int), values, {})


def advice_of(role="hidden", holds=None, config=None, steps=COUNT, **columns):
    sentences = records.advise(run_of(role, config, steps, **columns), holds)
    assert len(sentences) <= 1
    return sentences[0] if sentences else ""


GOOD = {
    "weight_norm": 10.0,
    "target_norm": 10.0,
    "forecast_norm": 10.0,
    "forecast_norm_measured": 10.0,
    "update_norm": 1.0,
    "excess_alignment": 0.0,
    "lr": 0.1,
    "weight_decay": 1.0,
}


def test_run_that_meets_its_target_gets_no_advice():
    for norm in (9.8, 10.0, 10.2):
        text = advice_of(**GOOD | {"weight_norm": norm})
        assert text.startswith("hidden: the norm is within 3 % of its target (")
        assert text.endswith("nothing to change.")
        assert "hold" not in text and "because" not in text


def test_short_and_undone_updates_are_named_with_their_figures():
    text = advice_of(
        **GOOD | {"weight_norm": 9.1, "forecast_norm_measured": 9.5, "update_norm": 0.95, "excess_alignment": 0.03}
    )
    assert text == (
        "hidden: the norm is 9.0 ± 0.0 % below its target, because updates are 5.0 ± 0.0 % shorter than nominal (raise "
        'polar_steps) and partly undone (excess +0.030 ± 0.000); hold="balance" would hold it.'
    )
    text = advice_of(**GOOD | {"weight_norm": 9.1, "excess_alignment": 0.03})
    assert "because updates are partly undone (excess +0.030" in text and "nominal" not in text
    text = advice_of("embedding", **GOOD | {"weight_norm": 9.1, "forecast_norm_measured": 9.1, "update_norm": 0.91})
    assert "because updates are 9.0 ± 0.0 % shorter than nominal;" in text  # no polar factors there


@pytest.mark.parametrize("excess", [-0.2, 0.2])
def test_sign_of_the_excess_decides_between_outward_and_undone(excess):
    """theta moves by -u: a negative cosine is a push outward. It explains a norm above, and never one below."""
    above = advice_of(**GOOD | {"weight_norm": 13.0, "excess_alignment": excess})
    below = advice_of(**GOOD | {"weight_norm": 7.0, "excess_alignment": excess})
    assert ("gradients push the weights outward (excess -0.200" in above) == (excess < 0)
    assert ("updates are partly undone (excess +0.200" in below) == (excess > 0)
    assert "outward (" not in below and "undone" not in above
    assert ("do not explain" in above) == (excess > 0) and ("do not explain" in below) == (excess < 0)


def test_outward_push_without_a_target_asks_for_constant_decay():
    columns = GOOD | {"target_norm": None, "weight_norm": 14.0, "excess_alignment": -0.43}
    assert advice_of("output", **columns) == (
        "output: gradients push the weights outward (excess -0.430 ± 0.000); keep the decay constant, or give it a target "
        'and hold="balance".'
    )


def test_without_a_target_the_norm_is_compared_with_its_forecast():
    """So are records of before, which have no target column at all: nothing is said of their decay."""
    columns = {key: value for key, value in GOOD.items() if key != "target_norm"}
    for extra in ({}, {"target_norm": None}):
        assert "within 3 % of its forecast" in advice_of(**columns | extra)
        text = advice_of(**columns | extra | {"weight_norm": 9.0, "excess_alignment": 0.05})
        assert "below its forecast, because updates are partly undone" in text and "hold" not in text


def test_training_too_short_is_told_from_an_aim_elsewhere():
    off = {"weight_norm": 13.0, "forecast_norm": 13.0, "forecast_norm_measured": 13.0, "lr": 0.01}
    short = advice_of(**GOOD | off | {"weight_decay": 0.5}, steps=100)
    assert "because training was too short to reach it (the half-life is 139 steps on average, of 100 steps" in short
    assert "the forecast itself is 30.0 ± 0.0 % above" in short and "overlap" not in short
    long = advice_of(**GOOD | off | {"weight_decay": 0.5}, steps=10_000)
    assert "too short" not in long and 'overlap="exact" aims at the target' in long
    unknown = advice_of(**{key: value for key, value in (GOOD | off).items() if key != "lr"})
    assert "because its forecast itself is 30.0 ± 0.0 % above" in unknown


def test_half_lives_are_those_of_the_roles_own_group():
    run = run_of("vectors", **GOOD)
    assert read_figures(run, "vectors").half_lives == pytest.approx(COUNT * 0.1 / math.log(2), rel=0.01)
    run.columns["lr/vector"] = np.full(COUNT, 0.2)  # pyright: ignore[reportIndexIssue]
    assert read_figures(run, "vectors").half_lives == pytest.approx(COUNT * 0.2 / math.log(2), rel=0.01)
    assert read_figures(run, "output").half_lives is None  # the groups are known by other names


@pytest.mark.parametrize("hold", ["balance", "fixed"])
def test_held_norms_are_judged_by_their_target(hold):
    text = advice_of(holds={"hidden": hold}, **GOOD | {"forecast_norm": 7.0, "weight_norm": 10.1})
    assert text == f'hidden: hold="{hold}" keeps the norm within 3 % of its target (1.0 ± 0.0 % above).'
    text = advice_of(config={"optim": {"hold": hold}}, **GOOD | {"weight_norm": 9.0})
    assert f'hold="{hold}" has not kept the norm: it is 10.0 ± 0.0 % below its target' in text
    assert ("balance_steps" in text) == (hold == "balance")


def test_fixed_norm_without_a_target_is_judged_by_its_start_and_balance_by_decay():
    columns = GOOD | {"target_norm": None}
    assert "within 3 % of its norm at the first record" in advice_of(holds={"hidden": "fixed"}, **columns)
    assert "within 3 % of its forecast" in advice_of(holds={"hidden": "balance"}, **columns)  # constant decay


def test_nothing_is_said_without_figures():
    assert advice_of() == ""
    assert advice_of(weight_norm=None, target_norm=10.0) == ""
    assert advice_of(weight_norm=10.0) == ""
    few = run_of(**GOOD).at(np.arange(8))
    assert records.advise(few) == []
    text = advice_of(weight_norm=9.0, target_norm=10.0)
    assert text.startswith("hidden: the norm is 10.0 ± 0.0 % below its target; hold=")  # and no reason


def test_noise_is_no_reason():
    """An excess that scatters around zero is not named, however large single records are."""
    scatter = 0.5 * np.random.default_rng(1).standard_normal(COUNT)
    text = advice_of(**GOOD | {"weight_norm": 9.0, "excess_alignment": scatter - scatter[-30:].mean() + 0.02})
    assert "excess" not in text


# --- from a monitor


def test_monitor_gives_no_advice_on_random_gradients_that_meet_their_target():
    params = parameters((32, 32), (32, 32))
    optimizer = sn.ScionC(params, lr=0.1, lmo="spectral", polar="svd", overlap="exact")
    monitor = sn.Monitor(optimizer)
    assert monitor.advice() == []
    train(optimizer, params, 150)
    [text] = monitor.advice()
    assert text.startswith("all weights: the norm is within 3 % of its target (")
    assert len(monitor.measure()) == 150  # advice takes no record away
    target = math.sqrt(2 * 1.1875 * 32)
    assert sn.Monitor(optimizer).advice() == []
    with sn.Monitor(optimizer) as again:
        train(optimizer, params, 1, start=150)
        assert again.measure()[0]["target_norm"] == pytest.approx(target)


def test_monitor_tells_an_outward_push_and_remembers_it_when_resumed():
    p, head = parameters((24, 24), (24, 24))
    groups = [
        {"params": [p], "lmo": "spectral", "name": "hidden"},
        {"params": [head], "lmo": "sign", "name": "output", "weight_decay": 0.004, "lr": 0.1},
    ]
    optimizer = sn.ScionC(groups, lr=0.1)
    monitor = sn.Monitor(optimizer)
    outward = head.detach().clone()
    for t in range(60):
        p.grad, head.grad = noise(p.shape, t, 1), noise(p.shape, t, 2) - 2 * outward
        optimizer.step()
    hidden, output = monitor.advice()
    assert hidden.startswith("hidden: ")
    assert output.startswith("output: gradients push the weights outward (excess -0.")
    state = monitor.state_dict()
    monitor.close()
    resumed = sn.Monitor(optimizer)
    resumed.load_state_dict(state)
    assert resumed.advice() == [hidden, output]


def test_history_of_a_long_run_stays_small_and_even():
    kept = history.History()
    for step in range(1, 5001):
        kept.add({"step": step, "weight_norm": float(step), "loss": 1.0, "forecast_norm": None, "layers": {}})
    run = kept.as_run()
    assert 250 <= len(run.steps) <= 512
    assert len(set(np.diff(run.steps).tolist())) == 1
    assert list(run.columns) == ["weight_norm", "forecast_norm"] and np.isnan(run.columns["forecast_norm"]).all()
    again = history.History()
    again.load_state_dict(kept.state_dict())
    assert again.as_run().steps.tolist() == run.steps.tolist()


def test_targets_are_those_of_the_decay():
    """C^2 U^2 of ScionC, lr/(2 lambda) per element of AdamC at its peak; none where decay is constant or not corrected."""
    made = {
        math.sqrt(2.0 * 6): lambda p: sn.ScionC(p, lmo="spectral", steady_norm_sq=2.0),
        math.sqrt(36 * 0.01 / 0.2): lambda p: sn.AdamC(p, lr=0.01, weight_decay=0.1),
        None: lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.1),
    }
    for target, make in made.items():
        params = parameters((6, 6))
        optimizer = make(params)
        monitor = sn.Monitor(optimizer)
        train(optimizer, params, 1)
        [layer] = monitor.measure()[0]["layers"].values()
        assert layer["target"] == (None if target is None else pytest.approx(target))
