"""The soak: its line through the points, a short run of each part, and verdicts that can fail."""

import json
import math
import mmap

import numpy as np
import pytest

from benchmarks import soak, trust
from steadynorm.optim import batch


def test_the_slope_finds_a_small_leak_in_noise_and_none_where_there_is_none():
    generator, at = np.random.default_rng(0), 1000 * np.arange(1, 1001)
    likeness = np.exp(-np.arange(60) / 10)  # of neighbours in time: memory comes in steps
    noise = 300e6 + 4096 * np.convolve(generator.normal(size=1059), likeness, "valid")
    flat, leaking = soak.slope(at, noise), soak.slope(at, noise + 10 * at)
    assert abs(flat.value) < flat.error
    assert leaking.value == pytest.approx(10 + flat.value, rel=1e-6) and leaking.value > 5 * leaking.error


def test_the_slope_leaves_the_warm_up_out():
    at = np.arange(1000)
    assert soak.slope(at, np.minimum(at, 150)) == soak.Slope(0.0, 0.0)


def test_the_slope_of_too_few_points_is_an_error():
    with pytest.raises(ValueError, match="2 points are too few"):
        soak.slope([1, 2], [1, 2])


def test_the_learning_rate_goes_up_and_down():
    assert soak.cycle(0) == 1.0 == soak.cycle(soak.CYCLE)
    assert soak.cycle(soak.CYCLE // 2) == pytest.approx(0.3)


@pytest.mark.slow
def test_a_soak_ended_early_keeps_to_its_forecast_and_is_written_down(tmp_path):
    def ended(step: int) -> None:
        if step == 1210:
            raise KeyboardInterrupt

    found = soak.soak_steps(1600, report=lambda text: None, after=ended)
    assert found["steps"] == 1200 and found["asked"] == 1600 and not found["checks"]["all steps"]
    assert found["checks"]["norm"], found  # too short to judge memory, and drift of the power iteration
    assert found["measurements"] == 1200 // soak.EVERY - 400 // soak.EVERY
    assert 0 < found["norm_worst"] < soak.NORM_LIMIT and 0.9 < found["power_least"] <= found["power_most"] < 1.0001
    soak.keep(tmp_path / "soak.json", "steps", found)
    soak.keep(tmp_path / "soak.json", "training", {"minutes": 1})
    held = json.loads((tmp_path / "soak.json").read_text(encoding="utf-8"))
    assert held["steps"]["norm_worst"] == found["norm_worst"] and held["training"]["minutes"] == 1
    shown = trust.soak({"steps": held["steps"]})
    assert f"{found['norm_worst']:.2%}" in shown and "ended early" in shown and "Not run yet" in shown


def test_weights_that_do_not_decay_and_leaked_memory_are_noticed(monkeypatch, tmp_path):
    def without_decay(theta, u, keep, gamma, update_share):
        theta.addcmul_(u, -gamma * update_share)

    kept = []

    def leak(step: int) -> None:
        page = mmap.mmap(-1, 160_000)  # new pages, where an array might be put where another was before
        page.write(b"x" * 160_000)
        kept.append(page)

    monkeypatch.setattr(batch, "decay_and_step_", without_decay)
    found = soak.soak_steps(600, report=lambda text: None, after=leak)
    assert not found["checks"]["norm"] and not found["checks"]["memory"], found
    assert found["memory_bytes_per_1000_steps"] > 1000 * 160_000 / 2
    monkeypatch.setattr(soak, "soak_steps", lambda steps: found)
    assert soak.main(["steps", "--out", str(tmp_path / "soak.json")]) == 1
    monkeypatch.setattr(soak, "soak_steps", lambda steps: {**found, "checks": {"norm": True}})
    assert soak.main(["steps", "--out", str(tmp_path / "soak.json")]) == 0


@pytest.mark.parametrize(
    ("verdict", "wrong"),
    [
        ("norm", {"norm": 1.021}),
        ("power iteration", {"power": 0.97}),  # all of them
        ("power iteration", {"least": 0.94}),
        ("power iteration", {"most": 1.001}),
        ("power iteration", {"late": 0.985}),
        ("memory", {"leak": 5.0}),
        (None, {"norm": 1.019, "power": 0.995, "least": 0.96, "late": 0.992, "leak": 1.0}),
    ],
)
def test_every_verdict_can_fail(verdict, wrong):
    at, power = 1000.0 * np.arange(1, 1001), np.full(1000, wrong.get("power", 0.999))
    power[-333:] = wrong.get("late", power[-1])
    power[500], power[501] = wrong.get("least", power[500]), wrong.get("most", power[501])
    ratios = {name: np.ones(50_000) for name in (*soak.COUNTED, "fast")}
    ratios["sign"][40_000], ratios["fast"][10] = wrong.get("norm", 1.0), 1.3
    memory = 300e6 + wrong.get("leak", 0.0) * at
    checks = soak._judged(1_000_000, 1.0, {}, at, memory, power, ratios)["checks"]
    assert [name for name, held in checks.items() if not held] == ([] if verdict is None else [verdict])


@pytest.mark.slow
def test_ten_thousand_steps_keep_every_limit():
    found = soak.soak_steps(10_000, report=lambda text: None)
    assert found["checks"]["norm"] and found["checks"]["power iteration"], found


@pytest.mark.slow
def test_a_short_soak_of_the_training_command_keeps_every_limit():
    """It is too short to judge its memory, but it trains, evaluates, saves and ends by a signal."""
    found = soak.soak_training(1.0, report=lambda text: None)
    assert found["steps"] > found["evaluations"] > found["checkpoints"] > 0
    assert found["checks"]["evaluations and checkpoints"]
    assert found["resident_mib"] > 50 and math.isfinite(found["memory_error"])
