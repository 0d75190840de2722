"""Claims about `explain` and `from_radius`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group_models import Transformer, group_of, mlp
from torch import nn

import steadynorm as sn
from steadynorm.groups.builder import from_radius, param_groups
from steadynorm.groups.explanation import explain

# explain and from_radius


def test_explain_shows_every_parameter_with_rule_and_reason() -> None:
    lines = explain(param_groups(Transformer(tied=True), weight_decay=None), full=True).splitlines()
    assert lines[0].split() == ["parameter", "shape", "role", "lmo", "lr", "decay", "reason"]
    assert len(lines) == 1 + len(list(Transformer(tied=True).parameters()))
    (fused,) = [line for line in lines if line.startswith("blocks.0.qkv.weight")]
    for part in (
        "24x8",
        "hidden-blocks3",
        "spectral",
        "0.01",
        "corrected, C^2 = 1.1875",
        "weight of Linear; fused q, k, v",
    ):
        assert part in fused
    (output,) = [line for line in lines if line.startswith("wte.weight")]
    assert "constant 0.004" in output
    assert "tied to an embedding" in output


class Tower(nn.Module):
    """Layers of experts, one of which is different, and a fused SwiGLU."""

    def __init__(self) -> None:
        super().__init__()
        self.h = nn.ModuleList(nn.ModuleDict({"w1": nn.Linear(8, 8), "w3": nn.Linear(8, 8)}) for _ in range(12))
        self.h[5]["w1"] = nn.Linear(8, 8, bias=False)
        self.moe = nn.ModuleList(nn.ModuleList(nn.Linear(8, 4, bias=False) for _ in range(4)) for _ in range(2))
        self.mlp = nn.ModuleDict({"w12": nn.Linear(8, 12, bias=False)})


def test_explain_folds_equal_layers_into_one_line() -> None:
    groups = param_groups(Tower(), output=False)
    lines = [line.split()[0] for line in explain(groups).splitlines()[1:]]
    assert lines == [
        "h.{0..11}.w1.weight", "h.{0..11}.w3.weight", "moe.{0..1}.{0..3}.weight", "mlp.w12.weight",
        "h.{0..4,6..11}.w1.bias", "h.{0..11}.w3.bias",
    ]  # fmt: skip
    assert len(explain(groups, full=True).splitlines()) == 1 + len(list(Tower().parameters()))
    groups = param_groups(Tower(), output="h.3.w3")  # what has another rule stands alone
    assert "h.3.w3.weight" in explain(groups) and "h.{0..2,4..11}.w3.weight" in explain(groups)


def test_a_fused_swiglu_that_stays_one_matrix_has_its_note() -> None:
    groups = param_groups(Tower(), output=False)
    assert group_of(groups, "mlp.w12.weight")["blocks"] == 1
    assert "gate and up fused: one matrix unless blocks= says more" in groups.why["mlp.w12.weight"]
    assert "fused" not in groups.why["h.0.w1.weight"]
    halves = param_groups(Tower(), output=False, blocks={"*.w12.weight": 2})
    assert group_of(halves, "mlp.w12.weight")["blocks"] == 2


def test_explain_accepts_an_optimizer_and_refuses_the_rest() -> None:
    optimizer = sn.ScionC(param_groups(mlp(), output="4"))
    assert explain(optimizer) == explain(optimizer.param_groups)
    wrong = (mlp(), nn.Linear(2, 2), mlp().parameters(), 3)
    for each in wrong:
        with pytest.raises(
            TypeError, match=r"explain takes groups or an optimizer, not .*; pass param_groups\(model\)"
        ):
            explain(each)  # pyright: ignore[reportArgumentType]


def test_explain_takes_an_optimizers_groups_and_shows_all_but_the_reason() -> None:
    groups = param_groups(mlp(), kind="adam", output="4")
    before = explain(groups).splitlines()
    optimizer = torch.optim.AdamW(groups)
    after = explain(optimizer.param_groups).splitlines()
    assert "reason" not in after[0]
    assert all(full.startswith(short) for full, short in zip(before, after, strict=True))
    assert "corrected, 0.1 at peak lr" in after[1]
    assert explain(groups).splitlines() == before  # torch rewrote the dicts; the reasons are still found


def test_explain_takes_groups_given_by_hand() -> None:
    parameter = nn.Parameter(torch.tensor(1.0))
    plain = explain([{"params": [parameter]}, {"params": nn.Parameter(torch.ones(2)), "weight_decay": 0.0}])
    assert [line.split("  ")[0] for line in plain.splitlines()[1:]] == ["group 0, parameter 0", "group 1, parameter 0"]
    assert "scalar" in plain
    assert plain.endswith("none")
    groups = param_groups(mlp(), output="4")
    groups.append({"params": [("extra", parameter)], "lr": 0.1, "weight_decay": 0.5})
    assert explain(groups).endswith("constant 0.5             given by hand")


def test_the_radius_moves_the_weights_as_the_original_scion_does() -> None:
    gamma, radius, weight, update = 2**-12, 50.0, 3.0, -0.7
    values = from_radius(gamma, radius)
    ours = (1 - values["lr"] * values["weight_decay"]) * weight - values["lr"] * update
    assert ours == pytest.approx((1 - gamma) * weight - gamma * radius * update, rel=1e-14)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="radius"):
            from_radius(0.1, bad)


def test_explain_shows_the_decay_at_the_peak_and_the_target_also_in_mid_schedule() -> None:
    def shown(optimizer: Any) -> str:
        for group in optimizer.param_groups:
            group["lr"] = 1e-4
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        optimizer.step()
        return explain(optimizer.param_groups)

    matrix = nn.Parameter(torch.ones(4, 4))
    assert "corrected, 0.1 at peak lr" in shown(sn.AdamC([matrix], lr=1e-3, weight_decay=0.1))
    assert "corrected, steady_norm_sq = 0.001" in shown(sn.AdamC([matrix], lr=1e-3, steady_norm_sq=1e-3))
    adamw = torch.optim.AdamW([matrix], lr=1e-3, weight_decay=0.1)
    assert "constant 0.1" in shown(sn.correct(adamw, skip=[0]))
    at_zero = sn.AdamC([matrix], lr=1e-3, weight_decay=0.1)
    at_zero.param_groups[0]["weight_decay"] = 0.0  # as after a step with lr 0
    assert "corrected, 0.1 at peak lr" in explain(at_zero.param_groups)
    assert "none" in explain(sn.AdamC([matrix], weight_decay=0.0).param_groups)
