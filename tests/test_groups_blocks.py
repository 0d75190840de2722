"""Claims about `param_groups`: which weights are several matrices."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from group_models import Experts, Holding, Transformer, by_group, group_of, mlp
from torch import nn

import steadynorm as sn
from steadynorm.groups.builder import param_groups
from steadynorm.lmo import get
from steadynorm.monitor.layers import find_layers
from steadynorm.polar import Polar

# blocks


@pytest.mark.parametrize("name", ["qkv", "c_attn", "in_proj", "Wqkv", "qkv_proj", "to_qkv"])
def test_a_fused_projection_is_three_blocks_and_its_bias_stays_a_vector(name: str) -> None:
    groups = param_groups(nn.ModuleDict({name: nn.Linear(8, 24), "other": nn.Linear(8, 24)}), output=False)
    assert by_group(groups)["hidden-blocks3"] == [f"{name}.weight"]
    assert group_of(groups, f"{name}.weight")["blocks"] == 3
    assert group_of(groups, f"{name}.bias")["blocks"] == group_of(groups, "other.weight")["blocks"] == 1


def test_multihead_attention_has_three_blocks() -> None:
    groups = param_groups(nn.MultiheadAttention(8, 2, add_bias_kv=True), output=False)
    assert by_group(groups)["hidden-blocks3"] == ["in_proj_weight"]
    assert group_of(groups, "bias_k")["lmo"] == "bias"


@pytest.mark.parametrize(
    ("make", "gates"),
    [(nn.LSTM, 4), (nn.LSTMCell, 4), (nn.GRU, 3), (nn.GRUCell, 3), (nn.RNN, 1), (nn.RNNCell, 1)],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_each_gate_of_a_recurrent_layer_is_a_matrix(make: Any, gates: int) -> None:
    model = make(6, 4)
    groups = param_groups(model, output=False)
    for name, p in model.named_parameters():
        group = group_of(groups, name)
        assert (group["lmo"], group["blocks"]) == (("spectral", gates) if p.ndim == 2 else ("bias", 1))
        assert make.__name__ in groups.why[name]


def test_projected_and_reverse_weights_of_an_lstm() -> None:
    groups = param_groups(nn.LSTM(6, 4, 2, bidirectional=True, proj_size=2), output=False)
    assert all(group_of(groups, f"weight_{kind}_l1_reverse")["blocks"] == 4 for kind in ("ih", "hh"))
    assert group_of(groups, "weight_hr_l0_reverse")["blocks"] == 1


def test_an_unequal_or_interleaved_fusion_stays_one_matrix() -> None:
    model = nn.ModuleDict({"qkv": nn.Linear(8, 12), "query_key_value": nn.Linear(8, 24)})
    groups = param_groups(model, output=False)
    assert group_of(groups, "qkv.weight")["blocks"] == group_of(groups, "query_key_value.weight")["blocks"] == 1
    assert "12 rows are not 3 x 8" in groups.why["qkv.weight"]
    assert "head by head" in groups.why["query_key_value.weight"]


class Conv1D(nn.Module):
    """Hugging Face's Conv1D: a Linear that stores its weight d_in x d_out."""

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
def test_a_hugging_face_conv1d_is_a_matrix_stored_the_other_way(d_out: int, blocks: int, note: str) -> None:
    groups = param_groups(nn.ModuleDict({"c_attn": Conv1D(d_out, 8)}), output=False)
    assert (groups[0]["lmo"], groups[0]["blocks"]) == ("spectral-transposed", blocks)
    assert groups[0]["name"] == ("hidden-transposed" if blocks == 1 else f"hidden-transposed-blocks{blocks}")
    assert note in groups.why["c_attn.weight"]


def test_the_blocks_of_a_conv1d_divide_its_columns() -> None:
    model = nn.ModuleDict({"mix": Conv1D(10, 8)})
    assert param_groups(model, output=False, blocks={"mix.weight": 5})[0]["blocks"] == 5
    with pytest.raises(ValueError, match=r"blocks\['mix.weight'\]=4 does not divide the 10 columns of mix.weight"):
        param_groups(model, output=False, blocks={"mix.weight": 4})


def test_an_output_layer_stored_transposed_is_refused() -> None:
    """sign divides by d_in, which it takes to be the last side."""
    with pytest.raises(ValueError, match=r"head.weight \(8, 5\) in Conv1D is stored d_in x d_out.*nn\.Linear"):
        param_groups(nn.ModuleDict({"head": Conv1D(5, 8)}), output="head")


# heads


class Phi3Attention(nn.Module):
    """Hugging Face's: heads are in the configuration, and one projection computes queries, keys and values in order."""

    def __init__(
        self, fused: str = "qkv_proj", heads: int = 4, key_heads: int = 2, size: int = 3, width: int = 8
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_attention_heads=heads, num_key_value_heads=key_heads, head_dim=size)
        setattr(self, fused, nn.Linear(width, (heads + 2 * key_heads) * size))
        self.o_proj = nn.Linear(heads * size, width)


class LlamaAttention(nn.Module):
    def __init__(self, heads: int = 4, key_heads: int = 2, size: int = 3, width: int = 8) -> None:
        super().__init__()
        self.num_heads, self.num_key_value_heads, self.head_dim = heads, key_heads, size
        self.q_proj = nn.Linear(width, heads * size)
        self.k_proj, self.v_proj = (nn.Linear(width, key_heads * size) for _ in range(2))
        self.o_proj = nn.Linear(heads * size, width)


def matrices_of(groups: Any) -> dict[str, list[str]]:
    return {name: members for name, members in by_group(groups).items() if name != "vector"}


def test_a_fused_projection_of_grouped_queries_is_cut_as_the_configuration_says() -> None:
    """Its 24 rows are 3 x 8 as well, but the attention knows better."""
    groups = param_groups(nn.ModuleDict({"attn": Phi3Attention()}), output=False)
    assert matrices_of(groups) == {
        "hidden": ["attn.o_proj.weight"],
        "hidden-blocks12+6+6": ["attn.qkv_proj.weight"],
    }
    assert group_of(groups, "attn.qkv_proj.weight")["blocks"] == (12, 6, 6)
    assert "fused q, k, v, 4 and 2 heads: row blocks 12+6+6" in groups.why["attn.qkv_proj.weight"]


def test_equal_heads_of_any_width_are_three_equal_blocks() -> None:
    """4 heads of 3 from a width of 8: 36 rows are not 3 x 8."""
    groups = param_groups(nn.ModuleDict({"attn": Phi3Attention(key_heads=4)}), output=False)
    assert group_of(groups, "attn.qkv_proj.weight")["blocks"] == 3


@pytest.mark.parametrize("fused", ["wqkv", "query_key_value"])
def test_a_name_that_may_mean_another_order_stays_one_matrix(fused: str) -> None:
    """InternLM's wqkv has the queries of a key next to it; per head the order does not matter."""
    model = nn.ModuleDict({"attn": Phi3Attention(fused)})
    assert "whose order is unknown" in param_groups(model, output=False).why[f"attn.{fused}.weight"]
    assert group_of(param_groups(model, output=False), f"attn.{fused}.weight")["blocks"] == 1
    assert group_of(param_groups(model, output=False, heads=True), f"attn.{fused}.weight")["blocks"] == 8


def test_a_configuration_that_does_not_fit_the_shape_is_not_believed() -> None:
    model = Phi3Attention(width=7)
    model.config.head_dim = 4
    groups = param_groups(nn.ModuleDict({"attn": model}), output=False)
    assert group_of(groups, "attn.qkv_proj.weight")["blocks"] == 1
    with pytest.raises(ValueError, match="heads=True: no attention of ModuleDict says how many heads"):
        param_groups(nn.ModuleDict({"attn": model}), output=False, heads=True)


def test_every_head_is_a_matrix_of_outputs_or_inputs() -> None:
    model = nn.ModuleDict({"attn": LlamaAttention(), "mlp": nn.Linear(8, 8)})
    assert matrices_of(param_groups(model, output=False))["hidden"] == [
        *(f"attn.{name}_proj.weight" for name in "qkvo"),
        "mlp.weight",
    ]
    groups = param_groups(model, output=False, heads=True)
    assert matrices_of(groups) == {
        "hidden-blocks4": ["attn.q_proj.weight"],
        "hidden-blocks2": ["attn.k_proj.weight", "attn.v_proj.weight"],
        "hidden-blocks4-inputs": ["attn.o_proj.weight"],
        "hidden": ["mlp.weight"],
    }
    assert group_of(groups, "attn.o_proj.weight")["blocks"] == ("inputs", 4)
    assert "4 heads, a block of columns each" in groups.why["attn.o_proj.weight"]


def test_torchs_attention_is_cut_by_head() -> None:
    groups = param_groups(nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2)}), output=False, heads=True)
    assert matrices_of(groups) == {
        "hidden-blocks6": ["attn.in_proj_weight"],
        "hidden-blocks2-inputs": ["attn.out_proj.weight"],
    }
    groups = param_groups(
        nn.ModuleDict({"attn": nn.MultiheadAttention(8, 2, kdim=6, vdim=6)}), output=False, heads=True
    )
    assert matrices_of(groups)["hidden-blocks2"] == [f"attn.{name}_proj_weight" for name in "qkv"]


def test_what_the_caller_says_comes_before_heads_and_configuration() -> None:
    model = nn.ModuleDict({"attn": Phi3Attention()})
    blocks = {"*.qkv_proj.weight": [12, 12], "*.o_proj.weight": ("inputs", [6, 6])}
    groups = param_groups(model, output=False, heads=True, blocks=blocks)
    assert group_of(groups, "attn.qkv_proj.weight")["blocks"] == (12, 12)
    assert group_of(groups, "attn.o_proj.weight")["blocks"] == ("inputs", (6, 6))
    assert by_group(groups)["hidden-blocks6+6-inputs"] == ["attn.o_proj.weight"]


def test_heads_move_by_themselves() -> None:
    """The update of one head does not depend on the gradients of the others, in any of the four projections."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"attn": LlamaAttention()})
    ends = []
    for other in (1.0, 100.0):
        twin = copy.deepcopy(model)
        optimizer = sn.ScionC(param_groups(twin, output=False, heads=True), polar="svd")
        for name, p in twin.named_parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(len(name)))
            if p.ndim == 2:
                rest = p.grad[:, 3:] if "o_proj" in name else p.grad[3:]
                rest.mul_(other).add_(other - 1)
        optimizer.step()
        ends.append(
            {
                name: p.detach()[:, :3] if "o_proj" in name else p.detach()[:3]
                for name, p in twin.named_parameters()
                if p.ndim == 2
            }
        )
    assert all(torch.allclose(ends[0][name], ends[1][name], atol=1e-6) for name in ends[0])


def test_a_monitor_measures_heads_of_another_optimizer_as_one_matrix() -> None:
    """Only groups say that heads are matrices of their own; the cut of a fused projection follows from the model."""
    model = nn.ModuleDict({"attn": Phi3Attention()})
    layers = {layer.name: layer for layer in find_layers(torch.optim.SGD(model.parameters(), lr=0.1), model)}
    assert layers["attn.qkv_proj.weight"].blocks.sizes == (12, 6, 6)
    assert layers["attn.o_proj.weight"].blocks.count == 1


# by the caller


def test_blocks_can_be_set_by_glob_and_are_grouped_by_number() -> None:
    groups = param_groups(Transformer(tied=True), blocks={"blocks.0.qkv.*": 1, "*.proj.weight": 2})
    assert by_group(groups)["hidden"] == ["blocks.0.qkv.weight"]
    assert by_group(groups)["hidden-blocks2"] == ["blocks.0.proj.weight", "blocks.1.proj.weight"]
    assert by_group(groups)["hidden-blocks3"] == ["blocks.1.qkv.weight"]


def test_experts_are_stacked_matrices_with_one_block_each_for_gate_and_up() -> None:
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


def test_a_weight_of_three_dimensions_in_a_class_of_experts_is_one_matrix_each() -> None:
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
def test_a_grouped_convolution_is_one_matrix_for_each_group(kind: Any) -> None:
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


def test_a_depthwise_convolution_moves_channel_by_channel() -> None:
    """The filter of one channel does not turn with its neighbour's: each has the size it would have by itself."""
    x = torch.randn(8, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = get("conv").update(x, blocks=8, polar=Polar("svd"))
    alone = torch.stack([filter_ / (filter_.norm() * 3) for filter_ in x])  # sqrt(1/9) polar of a 1 x 9 matrix
    assert torch.allclose(u, alone)
