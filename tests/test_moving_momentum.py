"""`convert` where the momentum has moved since the decay was set: the steady norm stays, whatever the new optimizer."""

from typing import Any

import pytest
import torch
from test_moving import Net, train, values_of
from torch import nn

import steadynorm as sn
from steadynorm import theory

LR, DECAY, NOW, LATER = 0.02, 0.1, 0.85, 0.95  # the decay belongs to the momentum that is reached later
WARM = theory.momentum_gain(1 - NOW, nesterov=True) / theory.momentum_gain(1 - LATER, nesterov=True)  # F: 0.25
TARGET = theory.steady_norm_sq(LR, DECAY, 1 - LATER, nesterov=True, limit=True)
HIDDEN = ("qkv.weight", "wide.weight", "tall.weight")


def start(kind: str) -> tuple[Net, Any]:
    """Return a model and a Muon whose momentum is warming up, after two steps."""
    model = Net()
    del model.conv  # torch's Muon takes matrices only
    if kind == "MuonC":
        optimizer: Any = sn.MuonC(sn.param_groups(model, kind="muon"), lr=LR, weight_decay=DECAY, momentum=LATER)
    else:
        hidden = [p for name, p in model.named_parameters() if name in HIDDEN]
        optimizer = torch.optim.Muon(hidden, lr=LR, weight_decay=DECAY, momentum=LATER)
        sn.correct(optimizer)
    for group in optimizer.param_groups:
        group["momentum"] = NOW
    train(model, optimizer, 0, 2)
    return model, optimizer


def hidden_of(optimizer: Any, model: nn.Module) -> list[dict[str, Any]]:
    """Return the groups of the hidden matrices."""
    named = dict(model.named_parameters())
    hidden = {id(named[name]) for name in HIDDEN}
    return [group for group in optimizer.param_groups if hidden & {id(p) for p in group["params"]}]


def target_of(group: dict[str, Any]) -> float:
    """Return C^2 of ScionC's group in units of Muon's update, which differs from ScionC's by the ratio of the lrs."""
    return group["steady_norm_sq"] * (LR / group["lr"]) ** 2


@pytest.mark.parametrize("kind", ["MuonC", "corrected"])
@pytest.mark.parametrize("exact", [False, True])
def test_scionc_keeps_the_decay_of_the_moment_and_the_norm_it_aims_at(kind: str, exact: bool):
    model, old = start(kind)
    before = hidden_of(old, model)[0]["weight_decay"]
    assert before == pytest.approx(WARM * DECAY)
    new, _ = sn.convert(old, model, blocks={"qkv.weight": 1}, **({"overlap": "exact"} if exact else {}))
    for name in HIDDEN:
        group = values_of(new)[name]
        assert group["lr"] * new.weight_decay_of(dict(model.named_parameters())[name]) == pytest.approx(LR * before)
        if not exact:
            assert target_of(group) == pytest.approx(TARGET)


@pytest.mark.parametrize("lr", [LR, LR / 4])
def test_scion_gets_the_decay_of_the_peak_lr_at_the_momentum_of_now(lr: float):
    model, old = start("MuonC")
    for group in hidden_of(old, model):
        group["lr"] = lr
    new, _ = sn.convert(old, model, to=sn.Scion, blocks={"qkv.weight": 1})
    for group in hidden_of(new, model):
        assert LR / lr * group["lr"] * group["weight_decay"] == pytest.approx(LR * WARM * DECAY)


@pytest.mark.parametrize("kind", ["MuonC", "corrected"])
def test_muonc_keeps_the_base_decay_and_the_momentum_it_belongs_to(kind: str):
    model, old = start(kind)
    new, table = sn.convert(old, model, to=sn.MuonC)
    train(model, new, 2, 3)
    for group in hidden_of(new, model):
        assert group["base_weight_decay"] == DECAY
        assert group["weight_decay"] == pytest.approx(WARM * DECAY)
        group["momentum"] = LATER
    train(model, new, 3, 4)
    assert all(group["weight_decay"] == pytest.approx(DECAY) for group in hidden_of(new, model))
    rms = (TARGET * 8 / (16 * 8)) ** 0.5 * 2**0.5  # of the tall matrix: 8 polar directions, sqrt(d_out/d_in) = sqrt(2)
    [line] = [line for line in table.splitlines() if line.startswith("tall.weight")]
    assert f"{WARM * DECAY:.4g} -> {WARM * DECAY:.4g}, corrected" in line and f"{rms:.3g} -> {rms:.3g}" in line


@pytest.mark.parametrize("kind", ["MuonC", "corrected"])
def test_torchs_muon_gets_the_decay_of_now_from_which_correct_continues(kind: str):
    model, old = start(kind)
    muon = sn.convert(old, model, to=torch.optim.Muon).optimizer[0]
    assert all(group["weight_decay"] == pytest.approx(WARM * DECAY) for group in muon.param_groups)
    sn.correct(muon)
    train(model, muon, 2, 3)
    assert all(group["weight_decay"] == pytest.approx(WARM * DECAY) for group in muon.param_groups)
    for group in muon.param_groups:
        group["momentum"] = LATER
    train(model, muon, 3, 4)
    assert all(group["weight_decay"] == pytest.approx(DECAY) for group in muon.param_groups)
    again, _ = sn.convert(muon, model)
    assert all(target_of(group) == pytest.approx(TARGET) for group in hidden_of(again, model))


def test_reference_momentum_of_correct_says_to_which_momentum_the_decay_belongs():
    """Without it the decay belongs to the momentum of now, as it does for `correct`."""
    model = nn.Linear(16, 16, bias=False)
    muon = torch.optim.Muon(model.parameters(), lr=LR, weight_decay=DECAY, momentum=NOW)
    plain, _ = sn.convert(muon, model, output=False)
    assert plain.param_groups[0]["steady_norm_sq"] == pytest.approx(WARM * TARGET)
    told, _ = sn.convert(sn.correct(muon, reference_momentum=LATER), model, output=False)
    assert told.param_groups[0]["steady_norm_sq"] == pytest.approx(TARGET)


def test_groups_that_ask_for_correction_but_were_never_corrected_have_their_own_momentum():
    model = Net()
    groups = [group for group in sn.param_groups(model, kind="muon", weight_decay=DECAY) if group["use_muon"]]
    groups = [{**group, "params": [p for _, p in group["params"] if p.ndim == 2]} for group in groups]
    muon = torch.optim.Muon(groups, lr=LR, momentum=LATER)
    assert muon.param_groups[0]["corrected"] and "initial_momentum" not in muon.param_groups[0]
    new, _ = sn.convert(muon, model)
    assert all(target_of(group) == pytest.approx(TARGET) for group in hidden_of(new, model))


def test_constant_decay_of_the_output_layer_is_the_one_that_was_set():
    """It does not follow the momentum, so it is that of the momentum to which it belongs; the table says what changes."""
    model = nn.Sequential(nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False))
    muon = sn.correct(torch.optim.Muon(model.parameters(), lr=LR, weight_decay=DECAY, momentum=LATER))
    muon.param_groups[0]["momentum"] = NOW
    new, table = sn.convert(muon, model, to=sn.MuonC, output="1")
    assert values_of(new)["1.weight"]["weight_decay"] == DECAY
    assert not values_of(new)["1.weight"]["corrected"]
    before, after = f"{WARM * DECAY:.4g}", f"{WARM * DECAY:.4g}, corrected"
    assert f"{before} -> {after}" in table.splitlines()[1] and f"{before} -> {DECAY}  " in table.splitlines()[2]


@pytest.mark.parametrize("target", [None, 2 * TARGET])
def test_skipped_layer_keeps_its_own_decay_in_torchs_muon(target: float | None):
    """Its group is two there, because the rest of it has the decay of the momentum of now."""
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    muon = torch.optim.Muon(model.parameters(), lr=LR, weight_decay=DECAY, momentum=LATER)
    sn.correct(muon, skip=model[1], steady_norm_sq=target)
    muon.param_groups[0]["momentum"] = NOW
    [back] = sn.convert(muon, model, to=torch.optim.Muon).optimizer
    assert [values_of(back)[name]["weight_decay"] for name in ("0.weight", "1.weight")] == pytest.approx(
        [WARM * DECAY / (1 if target is None else 2), DECAY]
    )
