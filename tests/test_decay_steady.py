"""Claims about `correct(optimizer)` on random gradients: the weights settle where predicted, and stay there.

Independent Gaussian gradients, so that the theory's assumption holds and only the correction is on trial. Each claim
comes with its opposite: the same run uncorrected visibly leaves.
"""

import copy
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decay_cases import Lion
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from steadynorm import correct, theory

ELEMENTS = 20_000  # the mean square has a relative standard deviation of sqrt(2 / ELEMENTS) = 1 %


def simulate(
    optimizer: Optimizer, steps: int, *, after: Callable[[int], Any] = lambda t: None, seed: int = 0
) -> dict[str, np.ndarray]:
    """Train on random gradients; return each update's settings and the mean square of the weights after it, per group."""
    generator = torch.Generator().manual_seed(seed)
    seen: list[list[dict[str, Any]]] = []
    for t in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()
        seen.append([dict(group, mean_square=mean_square(group)) for group in optimizer.param_groups])
        after(t)
    keys = [key for key in ("lr", "weight_decay", "betas", "momentum", "mean_square") if key in seen[0][0]]
    return {key: np.array([[group[key] for group in groups] for groups in seen]) for key in keys}


def mean_square(group: dict[str, Any]) -> float:
    return float(torch.stack([p.detach().square().mean() for p in group["params"]]).mean())


def cosine(steps: int, final: float = 0.1) -> Callable[[int], float]:
    """Return the ratio for the update after t, t = 0 .. steps - 1."""
    return lambda t: final + (1 - final) * (1 + math.cos(math.pi * (t + 1) / steps)) / 2


# ---------------------------------------------------------------- Adam


PEAK, DECAY, STEPS = 1e-2, 0.7, 2500  # half-life of 99 updates at the peak


def onecycle(*, corrected: bool) -> dict[str, np.ndarray]:
    optimizer = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(ELEMENTS))], lr=PEAK, weight_decay=DECAY)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=PEAK, total_steps=STEPS + 1)  # cycles beta1 by default
    if corrected:
        correct(optimizer)
    return {key: values[:, 0] for key, values in simulate(optimizer, STEPS, after=lambda t: scheduler.step()).items()}


def test_adamw_under_onecycle_settles_on_the_prediction_and_stays() -> None:
    run, plain = onecycle(corrected=True), onecycle(corrected=False)
    beta1 = run["betas"][:, 0]
    assert beta1.max() - beta1.min() > 0.09  # the default cycle, 0.85 to 0.95
    expected = theory.forecast_adam(run["lr"], DECAY * run["lr"] / PEAK, beta1)
    assert run["mean_square"][100:] == pytest.approx(expected[100:], rel=0.03)
    steady = theory.adam_mean_square(PEAK, DECAY, limit=True)
    assert run["mean_square"][STEPS // 2 :] == pytest.approx(steady, rel=0.05)
    assert run["mean_square"][-1] == pytest.approx(steady, rel=0.03)

    expected = theory.forecast_adam(plain["lr"], DECAY, beta1)
    assert plain["mean_square"][100:] == pytest.approx(expected[100:], rel=0.03)
    assert plain["mean_square"][-1] < 0.4 * steady


def test_a_momentum_factor_would_be_wrong_for_adam() -> None:
    """The claim above excludes this: Muon's factor, applied to Adam, misses by more than a factor of two."""
    factor = theory.momentum_gain(0.15) / theory.momentum_gain(0.05)
    wrong = theory.forecast_adam(np.full(3000, PEAK), DECAY * factor, 0.85)[-1]
    assert wrong > 2 * theory.adam_mean_square(PEAK, DECAY)


def test_adamw_reaches_an_absolute_target_whatever_its_lr() -> None:
    target, lrs, steps = 4e-3, (1e-2, 5e-3), 1600
    groups = [{"params": [torch.nn.Parameter(torch.zeros(ELEMENTS))], "lr": lr} for lr in lrs]
    optimizer = correct(torch.optim.AdamW(groups, weight_decay=DECAY), steady_norm_sq=target)
    ratio = cosine(steps)

    def lower(t: int) -> None:
        for group, lr in zip(optimizer.param_groups, lrs, strict=True):
            group["lr"] = lr * ratio(t)

    run = simulate(optimizer, steps, after=lower)
    for k in range(2):
        expected = theory.forecast_adam(run["lr"][:, k], run["lr"][:, k] / (2 * target), 0.9)
        assert run["mean_square"][100:, k] == pytest.approx(expected[100:], rel=0.04)
        assert run["mean_square"][-1, k] == pytest.approx(target, rel=0.04)


# ---------------------------------------------------------------- Lion


@pytest.mark.parametrize("how", ["relative", "absolute", "uncorrected"])
def test_lion_keeps_its_norm_while_lr_and_betas_move(how: str) -> None:
    lr, decay, settling, steps = 2e-3, 1.5, 800, 2400  # eta = 0.003 at the peak
    optimizer = Lion([torch.nn.Parameter(torch.zeros(ELEMENTS))], lr=lr, weight_decay=decay, betas=(0.9, 0.95))
    target = theory.lion_steady_norm_sq(lr, decay, 0.9, 0.95)
    if how != "uncorrected":
        correct(optimizer, steady_norm_sq=target if how == "absolute" else None)
    ratio = cosine(steps - settling)

    def move(t: int) -> None:
        since = max(t - settling, -1)
        done = (since + 1) / (steps - settling)
        optimizer.param_groups[0].update(lr=lr * ratio(since), betas=(0.9 - 0.3 * done, 0.95 - 0.1 * done))

    run = {key: values[:, 0] for key, values in simulate(optimizer, steps, after=move).items()}
    forecast = theory.forecast_lion(run["lr"], run["weight_decay"], run["betas"][:, 0], run["betas"][:, 1])
    assert run["mean_square"][100:] == pytest.approx(forecast[100:], rel=0.04)
    assert run["mean_square"][settling - 1] == pytest.approx(target, rel=0.03)
    if how == "uncorrected":
        assert run["mean_square"][-1] < 0.3 * target
    else:  # relative: eta-size terms go as eta falls; absolute: they are solved for
        assert run["mean_square"][-1] == pytest.approx(target, rel=0.03 if how == "absolute" else 0.08)


# ---------------------------------------------------------------- Muon


@pytest.fixture(scope="module")
def muon_at_peak() -> tuple[Optimizer, float, np.ndarray]:
    """Return torch's Muon after its norm settled at the peak lr, its norm there, and what it saw so far.

    Newton-Schulz is no exact polar factor, so claims are about the ratio to this norm.
    """
    params = [torch.nn.Parameter(torch.zeros(32, 32)) for _ in range(2)]
    optimizer = torch.optim.Muon(params, lr=0.02, weight_decay=0.25, momentum=0.95, nesterov=True)
    run = simulate(optimizer, 500, seed=1)
    return optimizer, run["mean_square"][250:].mean(), run


@pytest.mark.parametrize("what", ["lr", "momentum"])
def test_corrected_muon_keeps_the_norm_of_its_peak(muon_at_peak: Any, what: str) -> None:
    at_peak, settled, past = muon_at_peak
    steps, ratio = 600, cosine(600)

    def ended(*, corrected: bool) -> tuple[float, float]:
        """Return the mean square at the end and what the overlap kernel expects, both relative to the peak's."""
        optimizer = copy.deepcopy(at_peak)
        if corrected:
            correct(optimizer)

        def move(t: int) -> None:
            if what == "lr":
                optimizer.param_groups[0]["lr"] = 0.02 * ratio(t)
            else:
                optimizer.param_groups[0]["momentum"] = max(0.8, 0.95 - 0.15 * t / 300)

        run = simulate(optimizer, steps, after=move, seed=2)
        series = [np.concatenate([past[key], run[key]])[:, 0] for key in ("lr", "weight_decay", "momentum")]
        kernel = theory.overlap("spectral", (32, 32))
        expected = theory.forecast(series[0], series[1], 1 - series[2], nesterov=True, overlap=kernel)
        return run["mean_square"][-100:].mean() / settled, expected[-100:].mean() / expected[250:500].mean()

    corrected, expected = ended(corrected=True)
    assert corrected == pytest.approx(expected, rel=0.08)
    assert 0.9 < corrected < 1.25  # a little up: at the peak eta/alpha = 0.1 makes the norm smaller than its limit
    uncorrected, expected = ended(corrected=False)
    assert uncorrected == pytest.approx(expected, rel=0.12)
    assert uncorrected < (0.7 if what == "lr" else 0.3)
