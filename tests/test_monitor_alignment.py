"""The monitor's alignment equals what copies of the weights give."""

import math

import pytest
import torch
from monitor_cases import FOREIGN, LAYERS, OWN, parameters, set_noise, train
from torch import nn

import steadynorm as sn
from steadynorm import machine

# --- alignment


def slow_alignment(optimizer, params, steps, decay_of, each=lambda t: None) -> list[list[float]]:
    """Compute the alignment from copies of the weights in fp64: u = ((1 - eta) theta - theta_next) / gamma."""
    out = []
    for t in range(steps):
        set_noise(params, t)
        each(t)
        before = [p.detach().double().clone() for p in params]
        optimizer.step()
        row = []
        for k, (p, b) in enumerate(zip(params, before, strict=True)):
            group = next(g for g in optimizer.param_groups if any(p is q for q in g["params"]))
            eta = group["lr"] * decay_of(group, params[k])
            u = (1 - eta) * b - p.detach().double()
            row.append((b.flatten() @ u.flatten() / (b.norm() * u.norm())).item())
        out.append(row)
    return out


@pytest.mark.parametrize("name", [*OWN, *FOREIGN])
@pytest.mark.parametrize("pieces", ["batched", "cut by rows"])
def test_the_alignment_equals_that_of_copies_of_the_weights(name, pieces, monkeypatch):
    if pieces == "cut by rows":
        monkeypatch.setattr(machine, "CACHED_ELEMENTS", 40)
    made = {**OWN, **FOREIGN}[name]
    params, twin = (parameters(*LAYERS, dtype=torch.float64) for _ in range(2))
    optimizer, slow = made(params), made(twin)
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    monitor = sn.Monitor(optimizer, alignment=name in FOREIGN or None)

    def schedule(of):
        def each(t):
            for group in of.param_groups:
                group["lr"] = 0.02 * (1 - t / 20)

        return each

    def decay(group, p):
        return slow.weight_decay_of(p) if isinstance(slow, sn.ScionC) else group["weight_decay"]

    train(optimizer, params[:count], 8, each=schedule(optimizer))
    expected = slow_alignment(slow, twin[:count], 8, decay, schedule(slow))
    for each, row in zip(monitor.measure(), expected, strict=True):
        assert [layer["alignment"] for layer in each["layers"].values()] == pytest.approx(row, abs=1e-6)


def test_the_alignment_on_two_cores_equals_that_on_one():
    def run(threads):
        torch.set_num_threads(threads)
        try:
            params = parameters(*[(24, 24)] * 5, (48, 16), (7,))
            optimizer = sn.ScionC(params, lr=0.05, lmo="by-shape")
            monitor = sn.Monitor(optimizer)
            train(optimizer, params, 4)
            return monitor.measure()
        finally:
            torch.set_num_threads(1)

    assert run(2) == run(1)


def test_the_alignment_is_optional_where_it_costs_memory():
    params = parameters((6, 6))
    optimizer = torch.optim.AdamW(params)
    monitor = sn.Monitor(optimizer)
    train(optimizer, params, 2)
    assert monitor.measure()[-1]["alignment"] is None
    own = sn.ScionC(params, lmo="spectral")
    with sn.Monitor(own, alignment=False) as quiet:
        train(own, params, 2)
        assert quiet.measure()[-1]["alignment"] is None
        assert not own.observed


def test_a_skipped_update_and_zero_weights_have_no_alignment():
    zero, skipped = nn.Parameter(torch.zeros(4, 4)), nn.Parameter(torch.ones(4, 4))
    optimizer = sn.ScionC([zero, skipped], lmo="spectral")
    monitor = sn.Monitor(optimizer)
    set_noise([zero, skipped], 0)
    optimizer.step()
    skipped.grad[1, 1] = math.nan  # there is momentum by now, so there is an update that is not made
    optimizer.step()
    first, second = monitor.measure()
    assert first["layers"]["0.0"] | {"alignment": None, "expected": 0.0} == first["layers"]["0.0"]
    assert [layer["alignment"] is None for layer in first["layers"].values()] == [True, False]
    assert [layer["alignment"] is None for layer in second["layers"].values()] == [False, True]
    assert second["grad_norm"] is None


@pytest.mark.parametrize("gradient", [math.nan, 1e30])
def test_a_step_that_adamc_skipped_has_no_alignment(gradient):
    """The weights are unchanged, so the decay that they did not get is not an update either."""
    [p] = parameters((6, 6))
    optimizer = sn.AdamC([p])
    monitor = sn.Monitor(optimizer, alignment=True)
    p.grad = torch.full_like(p, gradient)
    optimizer.step()
    assert optimizer.skipped_steps().item() == 1
    assert monitor.measure()[0]["layers"]["0.0"]["alignment"] is None


@pytest.mark.parametrize("make", [lambda p: sn.ScionC(p, lmo="spectral"), sn.SGDC, torch.optim.AdamW])
@pytest.mark.parametrize("size", [1e20, math.inf, math.nan])
def test_an_uncomputable_alignment_is_none(make, size):
    [p] = parameters((6, 6))
    p.data *= size
    optimizer = make([p])
    monitor = sn.Monitor(optimizer, alignment=True)
    set_noise([p], 0)
    optimizer.step()
    optimizer.step()
    [layer] = monitor.measure()[-1]["layers"].values()
    assert layer["alignment"] is None and layer["excess"] is None
    if math.isfinite(size):
        assert layer["norm"] == pytest.approx(p.detach().double().norm().item(), rel=1e-5)
    else:
        assert layer["norm"] is None and layer["forecast"] is None and layer["expected"] is None


@pytest.mark.parametrize("settings", [{"hold": "fixed"}, {"hold": "balance"}, {"cautious": True}])
def test_copies_of_weights_that_a_hook_has_scaled_give_no_alignment(settings):
    """Of what a step and the hook after it did together, the update is not known."""
    p = torch.nn.Parameter(torch.randn(6, 4))
    optimizer = sn.AdamC([p], lr=0.01, **settings)
    monitor = sn.Monitor(optimizer, alignment=True)
    p.grad = torch.randn(6, 4)
    optimizer.step()
    (record,) = monitor.measure()
    assert record.get("alignment") is None
    assert record["weight_norm"] == pytest.approx(float(p.detach().norm()))
