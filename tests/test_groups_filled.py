"""Settings left unset in `param_groups` come from the optimizer, in whatever list its groups are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import steadynorm as sn

SETTINGS: dict[str, tuple[Any, dict[str, Any]]] = {
    "scion": (sn.ScionC, {"lr": 0.05, "alpha": 0.3, "steady_norm_sq": 5.0}),
    "muon": (sn.MuonC, {"lr": 0.05, "weight_decay": 0.3}),
    "adam": (sn.AdamC, {"lr": 3e-4, "weight_decay": 0.3}),
}
LISTS: dict[str, Callable[[Any], Any]] = {
    "as they are": lambda groups: groups,
    "added": lambda groups: groups[:1] + groups[1:],
    "filtered": lambda groups: filter(lambda group: group["params"], groups),
    "in a tuple": tuple,
    "copied one by one": lambda groups: [{**group} for group in groups],
    "deep copies": copy.deepcopy,
}


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


def values(optimizer: Any, *keys: str) -> list[tuple[Any, ...]]:
    return [tuple(group.get(key) for key in keys) for group in optimizer.param_groups]


@pytest.mark.parametrize("how", LISTS)
@pytest.mark.parametrize("kind", SETTINGS)
def test_any_list_of_groups_takes_the_settings_of_the_optimizer(kind: str, how: str) -> None:
    cls, settings = SETTINGS[kind]
    groups = sn.param_groups(model(), kind=kind, output="2")
    told = cls(sn.param_groups(model(), kind=kind, output="2", **settings))
    keys = ("name", "lr", "weight_decay", "steady_norm_sq", "alpha")
    assert values(cls(LISTS[how](groups), **settings), *keys) == values(told, *keys)


@pytest.mark.parametrize("kind", SETTINGS)
def test_an_lr_that_is_a_tensor_stays_one(kind: str) -> None:
    """As in torch, where a group without an lr has the very tensor; a ratio of it is a tensor of its own."""
    cls, lr = SETTINGS[kind][0], torch.tensor(0.01)
    optimizer = cls(sn.param_groups(model(), kind=kind, output="2"), lr=lr)
    told = cls(sn.param_groups(model(), kind=kind, output="2", lr=0.01))
    for group, other in zip(optimizer.param_groups, told.param_groups, strict=True):
        assert isinstance(group["lr"], torch.Tensor)
        assert float(group["lr"]) == pytest.approx(other["lr"])
        assert (group["lr"] is lr) == (other["lr"] == 0.01)


def test_a_tensor_written_into_a_group_is_not_filled() -> None:
    groups = sn.param_groups(model(), output="2")
    own = groups[0]["lr"] = torch.tensor(groups[0]["lr"])
    assert sn.ScionC(groups, lr=0.05).param_groups[0]["lr"] is own


def test_the_groups_of_two_models_are_filled_each_from_what_it_leaves_unset() -> None:
    encoder, decoder = model(), model()
    groups = sn.param_groups(encoder, kind="muon", output=False, lr=0.01)
    groups += sn.param_groups(decoder, kind="muon", output="2")
    optimizer = sn.MuonC(groups, lr=0.05, weight_decay=0.3)
    assert values(optimizer, "name", "lr", "weight_decay") == [
        ("hidden", 0.01, 0.3),
        ("vector", 0.0005, 0.0),
        ("hidden", 0.05, 0.3),
        ("vector", 0.0025, 0.0),
        ("output", 0.0025, 0.3),
    ]


def test_reasons_stay_with_the_groups_of_two_models() -> None:
    groups = sn.param_groups(model(), output=False) + sn.param_groups(model(), output="2")
    lines = sn.explain([*groups, {"params": [nn.Parameter(torch.ones(2))], "lmo": "bias"}]).splitlines()
    assert lines[2].startswith("2.weight") and lines[2].endswith("weight of Linear")
    assert sum(line.startswith("2.weight") and line.endswith("output layer, by output=") for line in lines) == 1
    assert lines[-1].endswith("given by hand")


def test_a_setting_that_no_group_would_use_is_refused_in_any_list() -> None:
    groups = list(sn.param_groups(model(), output="2", lr=0.03))
    with pytest.raises(ValueError, match=r"ScionC: lr=0\.05 would not be used, the groups have their own"):
        sn.ScionC(groups, lr=0.05)
    by_hand = {"params": [("late", nn.Parameter(torch.ones(2)))], "lmo": "bias"}
    assert [lr for (lr,) in values(sn.ScionC([*groups, by_hand], lr=0.05), "lr")] == [0.03, 0.03, 0.6, 0.03, 0.05]
    constant = sn.param_groups(model(), output="2", weight_decay=0.1)
    for as_list in (list, iter):
        with pytest.raises(ValueError, match="every group has a constant weight_decay"):
            sn.ScionC(as_list(constant))


@pytest.mark.parametrize("kind", SETTINGS)
def test_groups_can_be_used_again_with_other_settings(kind: str) -> None:
    """An optimizer takes copies: what it fills in is no setting of the user's."""
    cls, settings = SETTINGS[kind]
    groups = sn.param_groups(model(), kind=kind, output="2")
    before = copy.deepcopy(groups)
    first = values(cls(groups, **settings), "lr", "alpha", "weight_decay")
    assert [list(group) for group in groups] == [list(group) for group in before]
    usual = values(cls(before), "lr", "alpha", "weight_decay")
    assert values(cls(groups), "lr", "alpha", "weight_decay") == usual != first
    assert cls(groups, lr=0.04).param_groups[0]["lr"] == 0.04


def test_a_group_added_later_is_filled_as_well() -> None:
    optimizer = sn.ScionC(sn.param_groups(model(), output="2"), lr=0.05, alpha=0.3)
    [late, _] = sn.param_groups(model(), output=False)
    optimizer.add_param_group(late)
    assert values(optimizer, "lr", "alpha")[-1] == (0.05, 0.3)
    assert late["lr"] == 0.01 and isinstance(late["params"][0], tuple)


def test_what_was_changed_in_a_group_stays() -> None:
    groups = sn.param_groups(model(), output="2")
    groups[0]["lr"] = 0.005
    assert [lr for (lr,) in values(sn.ScionC(groups[:2], lr=0.02), "lr")] == [0.005, 0.02]


def test_groups_whose_parameters_were_replaced_are_refused() -> None:
    """torch puts its own settings into the dicts that it takes, so what was left unset is no longer known."""
    groups = sn.param_groups(model(), kind="adam", output="2")
    torch.optim.AdamW(groups, betas=(0.8, 0.9))
    with pytest.raises(
        ValueError, match=r'AdamC, group 0 \("matrix"\): its parameters were replaced.*make the groups again'
    ):
        sn.AdamC(groups, lr=3e-4)
    assert sn.AdamC(list(groups), lr=3e-4).param_groups[0]["betas"] == (0.8, 0.9)
    groups = sn.param_groups(model(), kind="adam", output="2")
    groups[1]["params"][:] = groups[1]["params"][:1]
    groups.append({"params": [("late", nn.Parameter(torch.ones(2)))]})
    assert [lr for (lr,) in values(sn.AdamC(groups, lr=3e-4), "lr")] == [3e-4] * 4
