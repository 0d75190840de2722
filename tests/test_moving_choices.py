"""`convert` keeps what no number of its table says: targets, ways to hold a norm, and the direction."""

from typing import Any

import pytest
import torch
from test_moving import Net, assert_close, set_gradients, train, values_of, weights

import steadynorm as sn
from steadynorm import theory
from steadynorm.theory.updates import update_of

HOLDS = [{"hold": "fixed"}, {"hold": "balance", "balance_steps": 50}, {"cautious": True}]


def start(cls: type[torch.optim.Optimizer], **settings: Any) -> tuple[Net, Any]:
    """Return a model without a convolution, which torch's Muon does not take, and its optimizer."""
    model = Net()
    del model.conv
    if cls is sn.AdamC:
        return model, sn.AdamC(model.parameters(), lr=1e-3, weight_decay=0.1, **settings)
    return model, sn.MuonC(sn.param_groups(model, kind="muon"), lr=0.02, weight_decay=0.1, **settings)


@pytest.mark.parametrize("to", [sn.AdamC, sn.MuonC, sn.ScionC])
@pytest.mark.parametrize("settings", [*HOLDS, {"maximize": True}], ids=str)
def test_the_way_to_hold_a_norm_and_the_direction_stay(to: Any, settings: dict[str, Any]):
    model, old = start(sn.AdamC if to is sn.AdamC else sn.MuonC, **settings)
    new, _ = sn.convert(old, model, to=to)
    assert all(group[key] == value for group in new.param_groups for key, value in settings.items())
    defaults = {"hold": "decay", "cautious": False, "maximize": False}
    other, _ = sn.convert(old, model, to=to, **defaults)
    assert all(group[key] == value for group in other.param_groups for key, value in defaults.items())


@pytest.mark.parametrize("to", [sn.AdamC, sn.ScionC])
def test_a_norm_that_was_fixed_where_it_was_stays_there_and_the_table_says_so(to: Any):
    model, old = start(sn.AdamC, hold="fixed")
    train(model, old, 0, 2)
    before = {name: p.norm() for name, p in weights(model).items()}
    new, table = sn.convert(old, model, to=to)
    for line in table.splitlines()[1:]:
        assert "fixed norm" in line and "stays" in line
    train(model, new, 2, 5)
    for name, p in weights(model).items():
        if before[name] > 0:
            torch.testing.assert_close(p.norm(), before[name], rtol=1e-6, atol=0.0)


def test_ascending_equals_descending_along_gradients_of_the_other_sign():
    ends = []
    for maximize in (False, True):
        model, optimizer = start(sn.AdamC, maximize=maximize)
        for t in range(4):
            if t == 2:
                optimizer, _ = sn.convert(optimizer, model, to=sn.ScionC)
            set_gradients(model, t)
            for p in model.parameters():
                p.grad = p.grad if maximize else -p.grad  # pyright: ignore[reportOptionalOperand]
            optimizer.step()
        ends.append(model)
    assert_close(*ends, rtol=0.0, atol=0.0)


def test_target_is_what_convert_keeps_and_not_the_decay_that_it_replaces():
    model, old = start(sn.AdamC, steady_norm_sq=0.01)
    new, table = sn.convert(old, model, to=sn.ScionC)
    settings = values_of(new)
    for name, p in model.named_parameters():
        if name != "lm_head.weight":
            own, shape = settings[name], tuple(p.shape) or (1,)
            update_sq = update_of(own["lmo"], shape).update_norm_sq(shape, blocks=own["blocks"])
            assert own["steady_norm_sq"] * update_sq / p.numel() == pytest.approx(0.01, rel=1e-6)
    assert all("0.05 -> " in line and "0.1 -> 0.1" in line for line in table.splitlines()[1:])  # decay, steady RMS


@pytest.mark.parametrize("setting", [*HOLDS, {"maximize": True}], ids=str)
def test_what_torch_has_not_is_not_lost_on_the_way_back(setting: dict[str, Any]):
    model, old = start(sn.MuonC, **setting)
    (key, value), *_ = setting.items()
    with pytest.raises(ValueError, match=f"has no {key}={value!r}, which the group of .* has; set {key}="):
        sn.convert(old, model, to=torch.optim.Muon)


def test_a_target_of_muonc_becomes_its_decay_at_the_peak_in_torch():
    model, old = start(sn.MuonC, steady_norm_sq=0.5)
    muon, _ = sn.convert(old, model, to=torch.optim.Muon).optimizer
    assert muon.param_groups[0]["weight_decay"] == pytest.approx(
        theory.weight_decay_for(0.5, 0.02, 0.05, nesterov=True)
    )


@pytest.mark.parametrize(
    "setting",
    [{"keep_lr": False}, {"keep_norm": False}, {"alpha": 0.5}, {"nesterov": False}, {"roles": {"*": "hidden"}}, {"blocks": {"*": 2}}],
    ids=str,
)  # fmt: skip
def test_settings_for_scion_are_refused_where_the_steps_stay_the_same(setting: dict[str, Any]):
    """They would have no effect: AdamC, which is the default from AdamW, takes over everything as it is."""
    for kind, to in ((sn.AdamC, None), (sn.MuonC, sn.MuonC), (sn.MuonC, torch.optim.Muon)):
        model, old = start(kind)
        with pytest.raises(ValueError, match=f"continues with the same steps and takes no {next(iter(setting))}"):
            sn.convert(old, model, to=to, **setting)


def test_torchs_muon_takes_no_settings_of_ours():
    model, old = start(sn.MuonC)
    with pytest.raises(ValueError, match="Muon continues with the same steps and takes no polar"):
        sn.convert(old, model, to=torch.optim.Muon, polar="svd")


def test_arguments_that_are_no_optimizer_model_or_class_are_named():
    model, old = start(sn.AdamC)
    with pytest.raises(TypeError, match="convert takes an optimizer, not Net"):
        sn.convert(model, model)  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match="convert takes the model second, not AdamC"):
        sn.convert(old, old)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="to='ScionC' is none of AdamC"):
        sn.convert(old, model, to="ScionC")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="AdamW loads the state_dict of AdamC, then call uncorrect"):
        sn.convert(old, model, to=torch.optim.AdamW)


def test_the_bits_that_bf16_weights_lack_come_along():
    model = Net(torch.bfloat16)
    old = sn.MuonC(sn.param_groups(model, kind="muon"), lr=0.02)
    train(model, old, 0, 2)
    new, _ = sn.convert(old, model, to=sn.ScionC)
    for p in model.parameters():
        assert torch.equal(new.state[p]["weight_residual"], old.state[p]["weight_residual"])
    assert any(old.state[p]["weight_residual"].any() for p in model.parameters())


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("to", [sn.AdamC, sn.MuonC])
def test_the_output_layer_gets_the_decay_of_the_peak_not_of_the_moment(to: Any, skip: bool):
    model, _ = start(sn.AdamC)
    old = sn.correct(
        torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1), skip=model.lm_head if skip else ()
    )
    old.param_groups[0]["lr"] = 1e-4
    train(model, old, 0, 1)
    values = values_of(sn.convert(old, model, to=to)[0])
    assert values["lm_head.weight"]["weight_decay"] == 0.1
    assert values["lm_head.weight"]["corrected"] is False


def test_a_balanced_norm_stays_balanced_by_what_its_updates_were():
    ends = []
    for convert in (False, True):
        torch.manual_seed(0)
        model = Net()
        old = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
        optimizer: Any = sn.correct(old, hold="balance", balance_steps=200)
        train(model, optimizer, 0, 4)
        if convert:
            means = {p: optimizer.state[p]["balance_means"] for p in model.parameters()}
            optimizer, _ = sn.convert(optimizer, model, to=sn.AdamC, output=False)
            assert all(torch.equal(optimizer.state[p]["balance_means"], means[p]) for p in means)
            other, _ = sn.convert(optimizer, model, to=sn.ScionC)  # whose updates are others
            assert not any(other.state[p]["balance_means"].any() for p in means)
        train(model, optimizer, 4, 8)
        ends.append(model)
    assert_close(*ends, rtol=1e-5, atol=1e-7)
