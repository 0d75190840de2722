"""`convert` between torch's Muon with AdamW and MuonC: both ways, in the middle of a run, with their state."""

import copy
from typing import Any

import pytest
import torch
from test_moving import Net, assert_close, train, values_of, weights
from torch import nn

import steadynorm as sn

FP64 = torch.float64
HIDDEN = ("qkv.weight", "wide.weight", "tall.weight")


def pair(model: nn.Module, **settings: Any) -> list[Any]:
    """Return torch's Muon for the hidden matrices and AdamW for the rest."""
    named = dict(model.named_parameters())
    rest = [p for name, p in named.items() if name not in HIDDEN]
    muon = torch.optim.Muon([named[name] for name in HIDDEN], lr=0.02, weight_decay=0.1, momentum=0.9, **settings)
    return [muon, torch.optim.AdamW(rest, lr=1e-3, betas=(0.8, 0.95), weight_decay=0.2)]


@pytest.fixture(autouse=True)
def exact_newton_schulz(monkeypatch):
    """torch's Muon asks for bf16 inside Newton-Schulz: leave it in fp64, so that steps can be compared."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())


@pytest.mark.parametrize("adjust", [None, "match_rms_adamw"])
def test_muonc_continues_muon_and_adamw_and_they_continue_it(adjust: str | None):
    """Three runs of nine steps: torch's all along, MuonC from the fourth step on, and torch's again from the seventh."""
    unbroken, model = Net(), Net()
    old = pair(unbroken, adjust_lr_fn=adjust)
    train(unbroken, old, 0, 9)
    two = pair(model, adjust_lr_fn=adjust)
    train(model, two, 0, 3)
    one, table = sn.convert(two, model, to=sn.MuonC, polar="newton-schulz")
    assert (
        "Muon -> MuonC" in table and "AdamW -> MuonC" in table and table.count("  all") == len(list(model.parameters()))
    )
    train(model, one, 3, 6)
    back, table = sn.convert(one, model, to=torch.optim.Muon)
    assert [type(optimizer) for optimizer in back] == [torch.optim.Muon, torch.optim.AdamW]
    assert "Muon -> Muon" in table and "AdamW -> AdamW" in table
    train(model, back, 6, 9)
    assert_close(model, unbroken, rtol=1e-6, atol=1e-8)
    for optimizer, same in zip(back, old, strict=True):
        for p, q in zip(model.parameters(), unbroken.parameters(), strict=True):
            assert optimizer.state.get(p, {}).keys() == same.state.get(q, {}).keys()
            for key, value in optimizer.state.get(p, {}).items():
                torch.testing.assert_close(value, same.state[q][key], rtol=1e-6, atol=1e-9)


def test_settings_go_there_and_back():
    model = Net()
    two = pair(model, nesterov=False, adjust_lr_fn="match_rms_adamw")
    two[0].param_groups[0]["lr"], two[0].param_groups[0]["initial_lr"] = 0.01, 0.02  # a scheduler's doing
    one, _ = sn.convert(two, model, to=sn.MuonC)
    ours = values_of(one)
    hidden, table, output = ours["wide.weight"], ours["embed.weight"], ours["lm_head.weight"]
    assert hidden["use_muon"] and not table["use_muon"] and not output["use_muon"]
    assert (hidden["lr"], hidden["peak_lr"], hidden["momentum"], hidden["nesterov"]) == (0.01, 0.02, 0.9, False)
    assert hidden["corrected"] and hidden["base_weight_decay"] == 0.1 and hidden["adjust_lr_fn"] == "match_rms_adamw"
    assert table["betas"] == (0.8, 0.95) and table["base_weight_decay"] == 0.2
    assert table["corrected"] and not output["corrected"]
    train(model, one, 0, 1)
    assert one.param_groups[0]["weight_decay"] == pytest.approx(0.05)  # half the peak's
    muon, adamw = sn.convert(one, model, to=torch.optim.Muon).optimizer
    for key, value in (("lr", 0.01), ("weight_decay", 0.1), ("momentum", 0.9), ("nesterov", False)):
        assert muon.param_groups[0][key] == pytest.approx(value), key
    assert [group["weight_decay"] for group in adamw.param_groups] == pytest.approx([0.2] * len(adamw.param_groups))
    sn.correct(muon)
    assert muon.param_groups[0]["peak_lr"] == 0.02


def test_muonc_moves_on_to_scionc_as_muon_does():
    model = Net()
    two = pair(model)
    train(model, two, 0, 2)
    one, _ = sn.convert(two, model, to=sn.MuonC)
    straight, over = (values_of(sn.convert(optimizer, model).optimizer) for optimizer in (two, one))
    for name, values in straight.items():
        for key in ("lr", "steady_norm_sq", "alpha", "lmo"):
            assert over[name].get(key) == pytest.approx(values.get(key)), (name, key)


def test_a_step_after_converting_leaves_the_old_optimizer_as_it_was():
    model = Net()
    two = pair(model)
    train(model, two, 0, 2)
    before = copy.deepcopy([optimizer.state_dict()["state"] for optimizer in two])
    one, _ = sn.convert(two, model, to=sn.MuonC)
    train(model, one, 2, 3)
    start = weights(model)
    sn.convert(one, model, to=torch.optim.Muon)
    assert all(torch.equal(value, start[name]) for name, value in model.state_dict().items())
    for saved, optimizer in zip(before, two, strict=True):
        for index, values in optimizer.state_dict()["state"].items():
            assert all(torch.equal(value, saved[index][key]) for key, value in values.items())


def test_what_does_not_map_is_refused():
    model = Net()
    with pytest.raises(ValueError, match="MuonC has no amsgrad"):
        sn.convert(torch.optim.AdamW(model.parameters(), amsgrad=True), model, to=sn.MuonC)
    convolved = sn.MuonC(sn.param_groups(model, kind="muon"))
    with pytest.raises(ValueError, match=r"torch's Muon takes matrices only, and conv\.weight"):
        sn.convert(convolved, model, to=torch.optim.Muon)
    with pytest.raises(ValueError, match="to=SGD is none of AdamC, MuonC, ScionC, Scion"):
        sn.convert(convolved, model, to=torch.optim.SGD)


@pytest.mark.parametrize("to", [sn.MuonC, sn.ScionC])
def test_bf16_weights_keep_the_bits_that_bf16_lacks(to: Any):
    model = nn.Linear(4, 4, bias=False, dtype=torch.float32).to(torch.bfloat16)
    old = sn.MuonC([{"params": [model.weight], "use_muon": True}])
    model.weight.grad = torch.eye(4, dtype=torch.bfloat16)
    old.step()
    new, _ = sn.convert(old, model, to=to, output=False)
    assert old.state[model.weight]["weight_residual"].any()
    assert torch.equal(new.state[model.weight]["weight_residual"], old.state[model.weight]["weight_residual"])
