"""Measured updates: their length, how far they move and turn the weights, and the forecast that knows their length."""

import math

import numpy as np
import pytest
import torch
from monitor_cases import noise, parameters, set_noise, train
from torch import nn

import steadynorm as sn
from steadynorm import theory
from steadynorm.theory.updates import newton_schulz_share

SHAPES = [(12, 12), (8, 20), (10,), (9, 4)]
LR = [0.05 * (1 - t / 20) for t in range(12)]


def adam_length_sq(beta: float, t: int) -> float:
    """E u_i^2 after t + 1 steps on noise: s^2 V with V = b1^2 v + (1-b1)^2."""
    var = sum(((1 - beta) * beta**age) ** 2 for age in range(t + 1))
    return var / (1 - beta ** (t + 1)) ** 2


MADE = {
    "ScionC": (
        lambda p: sn.ScionC(p, lr=0.05, lmo="by-shape"),
        lambda shape, t: math.prod(shape) if len(shape) == 1 else shape[0] / shape[1] * min(shape),
    ),
    "LionC": (lambda p: sn.LionC(p, lr=0.05), lambda shape, t: math.prod(shape)),
    "SGDC": (lambda p: sn.SGDC(p, lr=0.05), lambda shape, t: None),
    "AdamW": (
        lambda p: torch.optim.AdamW(p, lr=0.05, betas=(0.8, 0.9), weight_decay=0.3),
        lambda shape, t: math.prod(shape) * adam_length_sq(0.8, t),
    ),
    "NAdam": (
        lambda p: torch.optim.NAdam(p, lr=0.05, decoupled_weight_decay=True, weight_decay=0.3),
        lambda shape, t: None,  # no theory of its updates
    ),
}


def decay_of(optimizer, p) -> float:
    return (
        optimizer.weight_decay_of(p) if isinstance(optimizer, sn.ScionC) else optimizer.param_groups[0]["weight_decay"]
    )


@pytest.mark.parametrize("name", MADE)
def test_length_size_and_angle_of_updates_equal_copies_of_the_weights(name):
    make, nominal_sq = MADE[name]
    params = parameters(*SHAPES, dtype=torch.float64)
    optimizer = make(params)
    monitor = sn.Monitor(optimizer, alignment=True)
    expected = []
    for t, lr in enumerate(LR):
        set_noise(params, t)
        optimizer.param_groups[0]["lr"] = lr
        before = [p.detach().clone() for p in params]
        optimizer.step()
        for p, theta in zip(params, before, strict=True):
            after = p.detach()
            u = ((1 - lr * decay_of(optimizer, p)) * theta - after) / lr
            cosine = (theta * after).sum() / (theta.norm() * after.norm())
            unit = nominal_sq(tuple(p.shape), t)
            expected.append(
                (
                    None if unit is None else pytest.approx(u.norm().item() / math.sqrt(unit), rel=1e-5),
                    pytest.approx(lr * (u.norm() / theta.norm()).item(), rel=1e-5),
                    pytest.approx(math.acos(cosine.item()), rel=1e-5),
                )
            )
    records = monitor.measure()
    keys = ("update_norm", "relative_update", "angle")
    layers = [layer for record in records for layer in record["layers"].values()]
    assert [tuple(layer[key] for key in keys) for layer in layers] == expected
    spectral = [layer for layer in records[-1]["layers"].values() if layer["spectral"] is not None]
    assert len(spectral) == 3
    for key in keys[1:]:
        assert records[-1][key] == pytest.approx(sum(layer[key] for layer in spectral) / 3)


def test_angle_beyond_a_right_one_is_seen():
    """The weights are shorter than the step against them."""
    p = nn.Parameter(0.01 * torch.eye(4))
    optimizer = sn.Scion([p], lr=0.5, lmo="spectral", polar="svd")
    monitor = sn.Monitor(optimizer)
    p.grad = torch.eye(4) + 0.3 * noise((4, 4), 1)
    before = p.detach().double()
    optimizer.step()
    cosine = (before * p.detach()).sum() / (before.norm() * p.detach().double().norm())
    [layer] = monitor.measure()[0]["layers"].values()
    assert cosine < -0.5
    assert layer["angle"] == pytest.approx(math.acos(cosine), rel=1e-4)
    assert layer["relative_update"] == pytest.approx(0.5 * 2 / 0.02, rel=1e-4)


@pytest.mark.parametrize("hold", ["decay", "balance", "fixed"])
def test_angle_does_not_depend_on_how_the_norm_is_held(hold):
    """A balanced decay is known only on the device: the norm after the step says what it was."""
    params = parameters((12, 12))
    optimizer = sn.ScionC(params, lr=0.3, lmo="spectral", hold=hold)
    monitor = sn.Monitor(optimizer)
    for t in range(3):
        set_noise(params, t)
        before = params[0].detach().double().clone()
        optimizer.step()
    after = params[0].detach().double()
    cosine = ((before * after).sum() / before.norm() / after.norm()).item()
    assert monitor.measure()[-1]["angle"] == pytest.approx(math.acos(cosine), rel=1e-4)


def test_updates_that_were_not_taken_have_no_length():
    params = parameters((6, 6), (6, 6))
    optimizer = sn.ScionC(params, lmo="spectral")
    monitor = sn.Monitor(optimizer)
    set_noise(params, 0)
    params[0].grad[0, 0], params[1].grad = math.nan, None
    optimizer.step()
    [record] = monitor.measure()
    for layer in record["layers"].values():
        assert layer["update_norm"] is layer["relative_update"] is layer["angle"] is None
        assert layer["forecast_measured"] is None
    assert record["update_norm"] is record["forecast_norm_measured"] is None


def test_a_table_whose_rows_wait_has_no_length_but_a_relative_update():
    """Rows without a gradient neither move nor decay, so a shorter update does not make the norm smaller."""
    table = nn.Parameter(noise((6, 4), 1))
    optimizer = sn.ScionC([table], lmo="embedding")
    monitor = sn.Monitor(optimizer)
    table.grad = noise((6, 4), 2)
    optimizer.step()
    table.grad = noise((6, 4), 3)
    table.grad[2:] = 0
    optimizer.step()
    whole, waited = (next(iter(record["layers"].values())) for record in monitor.measure())
    assert whole["update_norm"] == pytest.approx(1, rel=1e-5)
    assert waited["update_norm"] is None and waited["forecast"] is None
    assert waited["relative_update"] == pytest.approx(0.01 * math.sqrt(8) / whole["norm"], rel=1e-5)


# --- the forecast that knows how long updates were


def column(records, layer, key):
    return [record["layers"][layer][key] for record in records]


def forecast_by_hand(lengths, kernel, start, unit, decay, alpha=0.1):
    """theory.forecast with gamma |u|/U in place of gamma, and eta as it was."""
    lr, f = np.array(LR[: len(lengths)]), np.array(lengths)
    return np.sqrt(unit * theory.forecast(lr * f, np.array(decay) / f, alpha, overlap=kernel, start=start / unit))


def watched(make, shapes, every=1, without=lambda t, k: False, **options):
    """Train on noise; return the records, and the squared norms at the start."""
    params = parameters(*shapes)
    for p in params:
        p.data *= 0.1  # so that the updates matter
    starts = [p.square().sum().item() for p in params]
    optimizer = make(params)
    monitor = sn.Monitor(optimizer, every=every, **options)
    decays = []
    for t, lr in enumerate(LR):
        set_noise(params, t)
        for k, p in enumerate(params):
            p.grad = None if without(t, k) else p.grad
        optimizer.param_groups[0]["lr"] = lr
        optimizer.step()
        decays.append(decay_of(optimizer, params[0]))
    return monitor.measure(), starts, decays


@pytest.mark.parametrize("make", [lambda p: sn.ScionC(p, lmo="by-shape", polar="svd"), lambda p: sn.LionC(p, lr=0.05)])
def test_forecast_with_updates_of_nominal_length_is_the_forecast(make):
    records, _, _ = watched(make, SHAPES)
    for record in records:
        for layer in record["layers"].values():
            assert layer["update_norm"] == pytest.approx(1, rel=1e-5)
            assert layer["forecast_measured"] == pytest.approx(layer["forecast"], rel=1e-5)
        assert record["forecast_norm_measured"] == pytest.approx(record["forecast_norm"], rel=1e-5)


@pytest.mark.parametrize("polar", ["express", "newton-schulz"])
def test_forecast_with_measured_updates_is_the_theorys_with_their_length(polar):
    """Two layers of one kind: each by its own lengths, though one forecast made before serves both."""
    shape, steps = (10, 10), 3
    records, starts, decays = watched(
        lambda p: sn.ScionC(p, lmo="spectral", polar=polar, polar_steps=steps), [shape, shape]
    )
    kernel, share = theory.overlap("spectral", shape), 1.0
    if polar == "newton-schulz":
        share = newton_schulz_share(*shape, (3.4445, -4.7750, 2.0315), steps)
    for k, start in enumerate(starts):
        lengths = column(records, f"0.{k}", "update_norm")
        by_hand = forecast_by_hand(lengths, kernel, start, 10.0, decays)
        assert column(records, f"0.{k}", "forecast_measured") == pytest.approx(by_hand.tolist(), rel=1e-6)
        before = forecast_by_hand([math.sqrt(share)] * len(LR), kernel, start, 10.0, decays)
        assert column(records, f"0.{k}", "forecast") == pytest.approx(before.tolist(), rel=1e-6)
    assert max(abs(length - 1) for length in lengths) > 0.01
    norms = records[-1]["forecast_norm_measured"], records[-1]["forecast_norm"]
    assert abs(norms[0] / norms[1] - 1) > 1e-4


@pytest.mark.parametrize("flush", [1, 50])
def test_between_records_updates_are_as_long_as_in_the_last(flush):
    """Every third step is measured, and one layer misses gradients: it is forecast by the steps that it took."""
    records, starts, _ = watched(
        lambda p: sn.Scion(p, lmo="spectral", polar_steps=3, weight_decay=0.3),
        [(10, 10), (10, 10)],
        every=3,
        without=lambda t, k: k == 1 and t in (3, 4, 8),
        flush=flush,
    )
    kernel = theory.overlap("spectral", (10, 10))
    taken = {0: list(range(12)), 1: [t for t in range(12) if t not in (3, 4, 8)]}
    for k, steps in taken.items():
        measured = dict(zip((2, 5, 8, 11), column(records, f"0.{k}", "update_norm"), strict=True))
        lengths, length = [], 1.0
        for t in steps:
            length = measured.get(t) or length
            lengths.append(length)
        lr, f = np.array(LR)[steps], np.array(lengths)
        norms = np.sqrt(10 * theory.forecast(lr * f, 0.3 / f, 0.1, overlap=kernel, start=starts[k] / 10))
        by_step = {t: norms[at] for at, t in enumerate(steps)}
        expected = [by_step[max(s for s in steps if s <= t)] for t in (2, 5, 8, 11)]
        assert column(records, f"0.{k}", "forecast_measured") == pytest.approx(expected, rel=1e-6)
    assert records[2]["layers"]["0.1"]["update_norm"] is None


def test_adam_is_forecast_with_the_length_that_its_updates_had():
    """Gradients that all point one way make updates longer than noise would; the second forecast knows."""
    p = nn.Parameter(noise((30, 30), 1))
    optimizer = torch.optim.AdamW([p], lr=0.01, weight_decay=1.0)
    monitor = sn.Monitor(optimizer, alignment=True)
    start, lengths = p.square().sum().item(), []
    for t in range(20):
        p.grad = 1 + noise(p.shape, t, 5)
        before = p.detach().clone()
        optimizer.step()
        lengths.append(((0.99 * before - p.detach()).norm() / 0.01 / 30).item())
    records = monitor.measure()
    expected = [math.sqrt(adam_length_sq(0.9, t)) for t in range(20)]
    ratios = [length / e for length, e in zip(lengths, expected, strict=True)]
    assert ratios[-1] > 1.5
    assert column(records, "0.0", "update_norm") == pytest.approx(ratios, rel=1e-3)
    # N and D per element as in theory.forecast_adam, with gamma s sqrt(V) scaled by the ratio of each step
    norm, overlap, var = start / 900, 0.0, 0.0
    for t, ratio in enumerate(ratios):
        before, var, scale = var, 0.81 * var + 0.01, ratio * 0.01 / (1 - 0.9 ** (t + 1))
        norm = 0.99**2 * norm + scale**2 * var + 2 * 0.99 * scale * 0.9 * overlap
        overlap = 0.99 * 0.9 * overlap + scale * var
        assert before < var
        assert records[t]["layers"]["0.0"]["forecast_measured"] == pytest.approx(math.sqrt(900 * norm), rel=1e-4)


def test_no_measured_forecast_without_measured_updates():
    params = parameters((6, 6))
    optimizer = sn.ScionC(params, lmo="spectral")
    with sn.Monitor(optimizer, alignment=False) as quiet, sn.Monitor(optimizer, forecast=False, alignment=True) as bare:
        train(optimizer, params, 2)
    assert quiet.measure()[-1]["forecast_norm_measured"] is None
    last = bare.measure()[-1]
    assert last["forecast_norm_measured"] is last["update_norm"] is None
    assert last["angle"] is not None


def test_state_saved_before_lengths_were_measured_still_loads():
    params = parameters((6, 6), (5,))
    optimizer = sn.ScionC(params, lmo="by-shape")
    monitor = sn.Monitor(optimizer)
    train(optimizer, params, 4)
    state = monitor.state_dict()
    for track in state["courses"]:
        del track["measured"]
    monitor.close()
    resumed = sn.Monitor(optimizer)
    resumed.load_state_dict(state)
    train(optimizer, params, 1, start=4)
    last = resumed.measure()[-1]
    assert last["forecast_norm_measured"] == pytest.approx(last["forecast_norm"], rel=0.01)
