"""`param_groups(kind="muon")`: which parameter Muon trains, which Adam, with which lr and decay."""

import pytest
import torch
from test_moving import Net
from torch import nn

import steadynorm as sn


def by_name(groups):
    return {name: group for group in groups for name, _ in group["params"]}


def test_matrices_and_convolutions_are_muons_and_the_rest_is_adams():
    found = by_name(sn.param_groups(Net(), kind="muon"))
    assert {name for name, group in found.items() if group["use_muon"]} == {
        "qkv.weight",
        "wide.weight",
        "tall.weight",
        "conv.weight",
    }
    assert found["qkv.weight"]["blocks"] == 3 and found["conv.weight"]["lmo"] == "conv"
    assert {name: group["lr"] for name, group in found.items()} == {
        name: 0.02 if group["use_muon"] else 1e-3 for name, group in found.items()
    }
    decays = {name: (group["weight_decay"], group["corrected"]) for name, group in found.items()}
    assert decays["wide.weight"] == decays["embed.weight"] == (0.1, True)
    assert decays["wide.bias"] == decays["scale"] == (0.0, True)
    assert decays["lm_head.weight"] == (0.1, False)


def test_settings_left_unset_come_from_the_optimizer():
    def lrs(**settings):
        optimizer = sn.MuonC(sn.param_groups(Net(), kind="muon"), **settings)
        return {group["name"]: group["lr"] for group in optimizer.param_groups}

    usual = lrs(lr=0.04)
    assert usual["hidden"] == 0.04 and usual["vector"] == usual["output"] == 0.002
    same = lrs(lr=1e-3, adjust_lr_fn="match_rms_adamw")
    assert set(same.values()) == {1e-3}
    assert lrs(adam_lr=0.005)["embedding"] == 0.005
    groups = sn.param_groups(Net(), kind="muon", lr=0.04, output_lr=0.01, adjust_lr_fn="match_rms_adamw")
    found = {group["name"]: group for group in sn.MuonC(groups, weight_decay=0.3).param_groups}
    assert found["hidden"]["lr"] == found["vector"]["lr"] == 0.04 and found["output"]["lr"] == 0.01
    assert found["hidden"]["weight_decay"] == 0.3 and found["hidden"]["adjust_lr_fn"] == "match_rms_adamw"
    target = sn.MuonC(sn.param_groups(Net(), kind="muon", steady_norm_sq=2.0))
    assert {group["steady_norm_sq"] for group in target.param_groups if group["use_muon"]} == {2.0}


def test_groups_of_another_kind_are_refused_by_name():
    model = Net()
    with pytest.raises(ValueError, match=r"MuonC: these groups are for Scion; use param_groups\(model, kind='muon'\)"):
        sn.MuonC(sn.param_groups(model))
    with pytest.raises(ValueError, match="ScionC: these groups are for Muon"):
        sn.ScionC(sn.param_groups(model, kind="muon"))
    with pytest.raises(ValueError, match="AdamC: these groups are for Muon"):
        sn.AdamC(sn.param_groups(model, kind="muon"))
    with pytest.raises(ValueError, match="adjust_lr_fn='none' is unknown"):
        sn.param_groups(model, kind="muon", adjust_lr_fn="none")


def test_the_table_says_which_kind_each_parameter_is():
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
    optimizer = sn.MuonC(sn.param_groups(model, kind="muon", output="2"))
    rows = [line.split("  ") for line in sn.explain(optimizer).splitlines()]
    kinds = {cells[0].strip(): [cell.strip() for cell in cells if cell.strip()][3] for cells in rows[1:]}
    assert kinds == {"0.weight": "muon, spectral", "0.bias": "adam", "2.weight": "adam", "2.bias": "adam"}


def test_it_trains_a_model_with_a_scheduler_and_the_monitor_knows_both_kinds():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 16), nn.Linear(16, 16, bias=False), nn.Linear(16, 3, bias=False))
    optimizer = sn.MuonC(sn.param_groups(model, kind="muon", output="2", lr=0.02, adam_lr=0.01))
    scheduler = sn.Scheduler(optimizer, scale={"lr": sn.schedule.cosine(40)})
    monitor = sn.Monitor(optimizer, model)
    x = torch.arange(64) % 7
    y = x % 3
    losses = []
    for _ in range(40):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    assert losses[-1] < 0.9 * losses[0]
    first, *_, last = monitor.measure()
    assert last["alpha"] == pytest.approx(0.05) and last["alpha/embedding"] == pytest.approx(0.1)
    assert last["weight_decay"] < 0.1 * first["weight_decay"] and last["weight_decay/output"] == 0.1
    assert last["effective_lr"] / last["lr"] == pytest.approx(
        sn.theory.effective_lr(1.0, 0.05, nesterov=True), rel=1e-9
    )
