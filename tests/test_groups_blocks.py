"""Claims about `param_groups`: which weights are several matrices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from group_models import Experts, Holding, Transformer, by_group, group_of, mlp
from torch import nn

from steadynorm.groups.builder import param_groups
from steadynorm.lmo import get
from steadynorm.polar import Polar

# blocks


@pytest.mark.parametrize("name", ["qkv", "c_attn", "in_proj", "Wqkv", "qkv_proj", "to_qkv"])
def test_fused_projection_is_three_blocks_and_its_bias_stays_a_vector(name: str) -> None:
    groups = param_groups(nn.ModuleDict({name: nn.Linear(8, 24), "other": nn.Linear(8, 24)}), output=False)
    assert by_group(groups)["hidden-blocks3"] == [f"{name}.weight"]
    assert group_of(groups, f"{name}.weight")["blocks"] == 3
    assert group_of(groups, f"{name}.bias")["blocks"] == group_of(groups, "other.weight")["blocks"] == 1


def test_multihead_attention_is_three_blocks() -> None:
    groups = param_groups(nn.MultiheadAttention(8, 2, add_bias_kv=True), output=False)
    assert by_group(groups)["hidden-blocks3"] == ["in_proj_weight"]
    assert group_of(groups, "bias_k")["lmo"] == "bias"


def test_unequal_or_interleaved_fusion_stays_one_matrix() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(8, 12), "query_key_value": nn.Linear(8, 24)})
    groups = param_groups(model, output=False)
    assert group_of(groups, "qkv.weight")["blocks"] == group_of(groups, "query_key_value.weight")["blocks"] == 1
    assert "12 rows are not 3 x 8" in groups.why["qkv.weight"]
    assert "head by head" in groups.why["query_key_value.weight"]


class Conv1D(nn.Module):
    """Hugging Face's: a Linear that stores its weight d_in x d_out."""

    def __init__(self, d_out: int, d_in: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(d_in, d_out))


@pytest.mark.parametrize(
    ("d_out", "blocks", "note"),
    [
        (24, 3, "stored d_in x d_out; fused q, k, v: 3 column blocks"),
        (16, 2, "fused k, v: 2 column blocks"),
        (2, 1, "2 columns are not 3 x 8: one matrix"),
    ],
)
def test_hugging_face_conv1d_is_a_matrix_stored_the_other_way(d_out: int, blocks: int, note: str) -> None:
    groups = param_groups(nn.ModuleDict({"c_attn": Conv1D(d_out, 8)}), output=False)
    assert (groups[0]["lmo"], groups[0]["blocks"]) == ("spectral-transposed", blocks)
    assert groups[0]["name"] == ("hidden-transposed" if blocks == 1 else f"hidden-transposed-blocks{blocks}")
    assert note in groups.why["c_attn.weight"]


def test_blocks_of_a_conv1d_divide_its_columns() -> None:
    model = nn.ModuleDict({"mix": Conv1D(10, 8)})
    assert param_groups(model, output=False, blocks={"mix.weight": 5})[0]["blocks"] == 5
    with pytest.raises(ValueError, match=r"blocks\['mix.weight'\]=4 does not divide the 10 columns of mix.weight"):
        param_groups(model, output=False, blocks={"mix.weight": 4})


def test_output_layer_stored_transposed_is_refused() -> None:
    """sign divides by d_in, taken to be the last side."""
    with pytest.raises(ValueError, match=r"head.weight \(8, 5\) in Conv1D is stored d_in x d_out.*nn\.Linear"):
        param_groups(nn.ModuleDict({"head": Conv1D(5, 8)}), output="head")


def test_blocks_override_by_glob_and_group_by_number() -> None:
    groups = param_groups(Transformer(tied=True), blocks={"blocks.0.qkv.*": 1, "*.proj.weight": 2})
    assert by_group(groups)["hidden"] == ["blocks.0.qkv.weight"]
    assert by_group(groups)["hidden-blocks2"] == ["blocks.0.proj.weight", "blocks.1.proj.weight"]
    assert by_group(groups)["hidden-blocks3"] == ["blocks.1.qkv.weight"]


def test_experts_are_stacked_matrices_gate_and_up_one_block_each() -> None:
    groups = param_groups(Experts(), output=False)
    assert by_group(groups)["stacked"] == ["down_proj"]
    assert group_of(groups, "down_proj")["lmo"] == "spectral"
    assert group_of(groups, "gate_up_proj")["name"] == "stacked-blocks2"
    assert group_of(param_groups(Experts(), output=False, blocks={"gate_up*": 1}), "gate_up_proj")["name"] == "stacked"
    assert group_of(groups, "gate_up_proj_bias")["lmo"] == "bias"
    assert group_of(groups, "router.weight")["name"] == "hidden"


@pytest.mark.parametrize("flagged", [True, False])
def test_transposed_experts_are_recognised_by_flag_or_shape(flagged: bool) -> None:
    model = Holding(gate_up_proj=(4, 8, 32), down_proj=(4, 16, 8))  # (experts, d_in, d_out)
    if flagged:  # by shapes that say nothing
        model = Holding(gate_up_proj=(4, 8, 8), down_proj=(4, 8, 8))
        model.is_transposed = True
    groups = param_groups(model, output=False)
    assert by_group(groups) == {"stacked-transposed-blocks2": ["gate_up_proj"], "stacked-transposed": ["down_proj"]}
    assert {group["lmo"] for group in groups} == {"spectral-transposed"}


def test_interleaved_gate_and_up_stay_one_matrix() -> None:
    model = Holding(gate_up_proj=(4, 32, 8), down_proj=(4, 8, 16))
    model.is_concatenated = False
    groups = param_groups(model, output=False)
    assert by_group(groups) == {"stacked": ["gate_up_proj", "down_proj"]}
    assert "not two halves of the rows" in groups.why["gate_up_proj"]


def test_weight_of_three_dimensions_in_a_class_of_experts_is_one_matrix_each() -> None:
    class ParallelExperts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(4, 6, 8))

    assert by_group(param_groups(nn.ModuleDict({"mlp": ParallelExperts()}), output=False)) == {
        "stacked": ["mlp.weight"]
    }


@pytest.mark.parametrize(
    ("count", "why"), [(5, "8 rows of 0.weight"), *((bad, "pass the number of equal blocks") for bad in (0, 2.0, True))]
)
def test_blocks_must_divide_the_rows(count: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"blocks\['0.weight'\]=.* {why}"):
        param_groups(mlp(), output="4", blocks={"0.weight": count})


# convolutions in groups, heads of Hugging Face models


@pytest.mark.parametrize("kind", [nn.Conv2d, nn.ConvTranspose2d])
def test_grouped_convolution_is_one_matrix_for_each_group(kind: Any) -> None:
    model = nn.ModuleDict(
        {"depthwise": kind(8, 8, 3, groups=8), "grouped": kind(8, 8, 3, groups=2), "full": kind(8, 8, 3)}
    )
    groups = param_groups(model, output=False)
    assert {name: members for name, members in by_group(groups).items() if name != "vector"} == {
        "conv-blocks8": ["depthwise.weight"],
        "conv-blocks2": ["grouped.weight"],
        "conv": ["full.weight"],
    }
    assert "8 groups of channels, one matrix each" in groups.why["depthwise.weight"]
    assert group_of(param_groups(model, output=False, blocks={"depth*": 1}), "depthwise.weight")["name"] == "conv"


def test_depthwise_convolution_moves_channel_by_channel() -> None:
    """The filter of one channel does not turn with its neighbour's: each has the size it would have alone."""
    x = torch.randn(8, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = get("conv").update(x, blocks=8, polar=Polar("svd"))
    alone = torch.stack([filter_ / (filter_.norm() * 3) for filter_ in x])  # sqrt(1/9) polar of a 1 x 9 matrix
    assert torch.allclose(u, alone)
