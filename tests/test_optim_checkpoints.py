"""Checkpoints of our own optimizers, from and to others."""

import copy
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from contract import assert_same, parameters, set_gradients, snapshot, train
from optim_shapes import MATRIX, SHAPES

import steadynorm as sn
from steadynorm.decay.rule import KEYS

# --- checkpoints from and to others


def test_a_plain_adamw_checkpoint_continues_in_adamc():
    """Its weight_decay is the base; moments and step counts are kept."""
    params, plain = parameters(SHAPES), parameters(SHAPES)
    old = torch.optim.AdamW(params.values(), lr=0.01, weight_decay=0.3)
    reference = torch.optim.AdamW(plain.values(), lr=0.01, weight_decay=0.3)
    for each, values in ((old, params), (reference, plain)):
        for t in range(4):
            set_gradients(values, t)
            each.step()
    new = sn.AdamC(params.values(), lr=0.01, weight_decay=0.7)
    new.load_state_dict(old.state_dict())
    assert new.param_groups[0]["base_weight_decay"] == 0.3
    for t, ratio in ((4, 1.0), (5, 0.5)):
        new.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.01 * ratio
        reference.param_groups[0]["weight_decay"] = 0.3 * ratio
        for each, values in ((new, params), (reference, plain)):
            set_gradients(values, t)
            each.step()
    for name in params:
        assert torch.equal(params[name], plain[name]), name
    assert new.skipped_steps() == 0


def test_an_adamc_checkpoint_continues_in_plain_adamw_and_in_corrected_adamw():
    params, plain, again = (parameters(SHAPES) for _ in range(3))
    optimizer = sn.AdamC(params.values(), lr=0.01, weight_decay=0.3)
    train(optimizer, params, range(6), lr=0.01)
    saved = copy.deepcopy(optimizer.state_dict())
    for values in (plain, again):
        for name, p in values.items():
            p.data.copy_(params[name].data)
    constant = torch.optim.AdamW(plain.values(), lr=0.5)
    constant.load_state_dict(copy.deepcopy(saved))
    corrected = sn.correct(torch.optim.AdamW(again.values(), lr=0.5, weight_decay=0.9))
    corrected.load_state_dict(saved)
    assert constant.param_groups[0]["weight_decay"] == optimizer.param_groups[0]["weight_decay"] < 0.3
    train(optimizer, params, range(6, 9), lr=0.01)
    train(corrected, again, range(6, 9), lr=0.01)
    for name in params:
        assert torch.equal(params[name], again[name]), name
    set_gradients(plain, 6)
    constant.step()
    assert constant.state[plain["matrix"]]["step"] == 7


@pytest.mark.parametrize("make", [sn.AdamC, sn.LionC, sn.SGDC])
def test_a_checkpoint_without_the_corrections_keys_has_its_decay_as_base(make):
    params = parameters(SHAPES)
    saved = make(params.values(), lr=0.01, weight_decay=0.3).state_dict()
    for key in KEYS:
        saved["param_groups"][0].pop(key, None)
    optimizer = make(params.values(), lr=0.01, weight_decay=0.7)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.005
    set_gradients(params, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.15)


def test_a_checkpoint_of_another_optimizer_is_refused():
    params = parameters({"w": MATRIX})
    saved = torch.optim.AdamW(params.values())
    set_gradients(params, 0)
    saved.step()
    optimizer = sn.ScionC(params.items(), lmo="spectral")
    before = snapshot(optimizer, params)
    with pytest.raises(ValueError, match=r"group 0.*momentum_buffer.*'w'.*another model or optimizer"):
        optimizer.load_state_dict(saved.state_dict())
    assert_same(snapshot(optimizer, params), before)
    assert optimizer.param_groups[0]["lmo"] == "spectral"


def test_a_scion_checkpoint_leaves_scionc_corrected():
    """Momentum and lr are taken over; the constant decay only where the group's own is also constant."""
    params = parameters({"w": MATRIX, "head": MATRIX})

    def groups(**head: float) -> list[dict[str, Any]]:
        return [{"params": [params["w"]]}, {"params": [params["head"]], **head}]

    old = sn.Scion(groups(), lr=0.03, lmo="spectral", weight_decay=0.3)
    train(old, params, range(2), lr=0.03)
    new = sn.ScionC(groups(weight_decay=0.7), lmo="spectral", steady_norm_sq=2.0)
    new.load_state_dict(old.state_dict())
    assert [group["weight_decay"] for group in new.param_groups] == [None, 0.3]
    lr, alpha = new.param_groups[0]["lr"], new.param_groups[0]["alpha"]
    assert lr == old.param_groups[0]["lr"] != 0.01
    assert new.weight_decay_of(params["w"]) == pytest.approx((2 - alpha) / (2 * alpha * 2.0) * lr)
    assert torch.equal(new.state[params["w"]]["momentum_buffer"], old.state_dict()["state"][0]["momentum_buffer"])
    again = sn.ScionC(groups(weight_decay=0.7), lmo="spectral")
    again.load_state_dict(new.state_dict())
    assert [group["weight_decay"] for group in again.param_groups] == [None, 0.3]


OTHERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "ScionC in Scion": (
        partial(sn.ScionC, lmo="sign"),
        partial(sn.Scion, lmo="sign"),
        r"weight_decay=None.*use ScionC",
    ),
    "SGDC in LionC": (sn.SGDC, sn.LionC, r"no betas.*another optimizer"),
    "LionC in SGDC": (sn.LionC, sn.SGDC, r"no alpha.*another optimizer"),
    "SGDC in ScionC": (sn.SGDC, partial(sn.ScionC, lmo="sign"), r"no lmo.*another optimizer"),
    "Scion in SGDC": (partial(sn.Scion, lmo="sign"), sn.SGDC, r"no trace.*another optimizer"),
    "MuonC in LionC": (
        partial(sn.MuonC, use_muon=True),
        sn.LionC,
        r"initial_momentum=0\.05.* is not a momentum of lion.*another optimizer",
    ),
    "SGD in AdamC, before its first step": (torch.optim.SGD, sn.AdamC, r"no betas.*another optimizer"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_with_other_group_settings_is_refused_before_anything_changes(case: str):
    saves, loads, message = OTHERS[case]
    params = parameters({"w": MATRIX})
    saved = saves(params.values()).state_dict()
    optimizer = loads(params.values())
    train(optimizer, params, range(1), lr=optimizer.param_groups[0]["lr"])
    before, groups = snapshot(optimizer, params), copy.copy(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=rf"{type(optimizer).__name__}, group 0: .*{message}"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer, params), before)
    assert optimizer.param_groups[0] == groups


@pytest.mark.parametrize("blocks", [3, (2, 2, 4), [2, 2, 4], ("inputs", 2), ("inputs", [1, 3])], ids=str)
def test_blocks_survive_a_safe_checkpoint_and_training_resumes(blocks: Any, tmp_path: Path):
    """Sizes are plain ints in the group, so weights_only loads them; a checkpoint with a number loads as it did."""
    shape = (9, 4) if blocks == 3 else (8, 4)
    ends = []
    for stops in (False, True):
        params = parameters({"qkv": shape})
        optimizer = sn.ScionC([{"params": list(params.values()), "lmo": "spectral", "blocks": blocks}], overlap="exact")
        for t in range(6):
            if stops and t == 3:
                torch.save(optimizer.state_dict(), tmp_path / "saved.pt")
                optimizer = sn.ScionC([{"params": list(params.values()), "lmo": "spectral", "blocks": blocks}])
                optimizer.load_state_dict(torch.load(tmp_path / "saved.pt", weights_only=True))
                assert optimizer.param_groups[0]["blocks"] == blocks
            set_gradients(params, t)
            if t > 1:
                params["qkv"].grad[2:4] = 0
            optimizer.step()
        ends.append((params["qkv"].detach(), optimizer.state[params["qkv"]]["momentum_left"]))
    assert all(torch.equal(straight, resumed) for straight, resumed in zip(*ends, strict=True))


def test_a_checkpoint_with_other_blocks_is_refused():
    saved, other = (
        sn.ScionC(parameters({"qkv": (8, 4)}).values(), lmo="spectral", blocks=blocks) for blocks in ((4, 2, 2), 2)
    )
    with pytest.raises(ValueError, match=r"momentum_left of shape \(3,\)"):
        other.load_state_dict(saved.state_dict())


@pytest.mark.parametrize(
    ("make", "setting", "message"),
    [
        (partial(sn.ScionC, lmo="spectral"), {"alpha": 1.5}, r"alpha=1\.5"),
        (sn.AdamC, {"betas": (2.0, 0.9)}, r"betas\[0\]=2\.0"),
        (sn.AdamC, {"lr": math.nan}, "lr=nan"),
    ],
    ids=["ScionC alpha", "AdamC betas", "AdamC lr"],
)
def test_a_checkpoint_with_a_setting_out_of_range_is_refused_before_anything_changes(make, setting, message):
    optimizer = make(parameters({"w": MATRIX}).values())
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.copy(optimizer.param_groups[0])
    saved["param_groups"][0].update(setting)
    label = type(optimizer).__name__
    with pytest.raises(ValueError, match=rf"{label}, group 0: the checkpoint's group is refused: {message}"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0] == before
