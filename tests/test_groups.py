"""Claims about `param_groups`: who gets which rule, and that nobody is forgotten."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from torch import nn

import steadynorm as sn
from steadynorm.groups.builder import from_radius, param_groups
from steadynorm.groups.explanation import explain
from steadynorm.lmo import get
from steadynorm.polar import Polar

PLAIN = (float, int, str, bool, type(None))


class Block(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.proj = nn.Linear(width, width, bias=False)


class Transformer(nn.Module):
    """Tied when asked; the output layer is `lm_head`."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.wte = nn.Embedding(11, 8)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(8, 11, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


class VisionTransformer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patch = nn.Conv2d(3, 8, 4)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.pos_embed = nn.Parameter(torch.zeros(1, 5, 8))
        self.block = Block()
        self.gamma = nn.Parameter(torch.ones(8, 1, 1))
        self.head = nn.Linear(8, 10)

    def get_classifier(self) -> nn.Module:
        return self.head


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.gate_up_proj = nn.Parameter(torch.zeros(4, 32, 8))
        self.gate_up_proj_bias = nn.Parameter(torch.zeros(4, 32))
        self.down_proj = nn.Parameter(torch.zeros(4, 8, 16))


class Holding(nn.Module):
    """Holds the given parameters directly."""

    def __init__(self, **shapes: tuple[int, ...]) -> None:
        super().__init__()
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.zeros(shape)))


def mlp() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 8, bias=False), nn.ReLU(), nn.Linear(8, 2))


def by_group(groups: Any) -> dict[str, list[str]]:
    return {group["name"]: [name for name, _ in group["params"]] for group in groups}


def group_of(groups: Any, name: str) -> dict[str, Any]:
    (group,) = [group for group in groups if name in dict(group["params"])]
    return group


MODELS = {
    "mlp": (mlp, {"output": "4"}),
    "tied": (lambda: Transformer(tied=True), {}),
    "untied": (lambda: Transformer(tied=False), {"output": "lm_head"}),
    "vit": (VisionTransformer, {}),
    "attention": (lambda: nn.TransformerEncoderLayer(8, 2, 16), {"output": False}),
    "experts": (Experts, {"output": False}),
    "convnet": (lambda: nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(4, 2)), {"output": "2"}),
}


@pytest.mark.parametrize("kind", ["scion", "adam"])
@pytest.mark.parametrize("model", MODELS)
def test_every_trainable_parameter_is_in_exactly_one_group(model: str, kind: str) -> None:
    make, options = MODELS[model]
    network = make()
    groups = param_groups(network, kind=kind, **options)
    grouped = [id(parameter) for group in groups for _, parameter in group["params"]]
    assert sorted(grouped) == sorted(id(parameter) for parameter in network.parameters())


@pytest.mark.parametrize("kind", ["scion", "adam"])
@pytest.mark.parametrize("model", MODELS)
def test_groups_hold_plain_values_and_their_checkpoint_loads_with_weights_only(model: str, kind: str) -> None:
    make, options = MODELS[model]
    groups = param_groups(make(), kind=kind, **options)
    for group in groups:
        assert all(type(value) in PLAIN for key, value in group.items() if key != "params"), group
    optimizer = torch.optim.SGD([{**group, "weight_decay": 0.0} for group in groups])
    saved = io.BytesIO()
    torch.save(optimizer.state_dict(), saved)
    saved.seek(0)
    loaded = torch.load(saved, weights_only=True)
    assert [group["name"] for group in loaded["param_groups"]] == [group["name"] for group in groups]
    assert loaded["param_groups"][0]["param_names"] == [name for name, _ in groups[0]["params"]]


@pytest.mark.parametrize("model", MODELS)
def test_the_lmo_of_each_group_takes_each_of_its_parameters(model: str) -> None:
    make, options = MODELS[model]
    for group in param_groups(make(), **options):
        for _, parameter in group["params"]:
            get(group["lmo"]).check(parameter.shape, group["blocks"])


@pytest.mark.parametrize("model", MODELS)
def test_the_same_model_gives_the_same_groups_in_the_same_order(model: str) -> None:
    make, options = MODELS[model]
    assert list(by_group(param_groups(make(), **options)).items()) == list(
        by_group(param_groups(make(), **options)).items()
    )


def test_roles_of_an_mlp() -> None:
    assert by_group(param_groups(mlp(), output="4")) == {
        "hidden": ["0.weight", "2.weight"],
        "vector": ["0.bias"],
        "output": ["4.weight"],
        "output-bias": ["4.bias"],
    }


def test_each_role_has_its_lmo() -> None:
    vision = param_groups(VisionTransformer())
    assert {group["name"]: group["lmo"] for group in vision} == {
        "vector": "bias",
        "embedding": "embedding",
        "conv": "conv",
        "hidden-blocks3": "spectral",
        "hidden": "spectral",
        "output": "sign",
        "output-bias": "bias",
    }
    assert group_of(vision, "cls_token")["name"] == group_of(vision, "gamma")["name"] == "vector"
    assert group_of(vision, "pos_embed")["lmo"] == "embedding"
    assert group_of(param_groups(Transformer(tied=False), output="lm_head"), "wte.weight")["lmo"] == "embedding"


@pytest.mark.parametrize("layer", [nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d])
def test_every_convolution_is_a_convolution_depthwise_too(layer: Any) -> None:
    groups = param_groups(nn.Sequential(layer(4, 4, 3, groups=4), nn.Linear(4, 2)), output="1")
    assert group_of(groups, "0.weight")["lmo"] == "conv"


# the output layer


def test_paper_numbers_for_the_output_decay() -> None:
    vision = group_of(param_groups(mlp(), output="4", lr=0.01, alpha=0.1, steady_norm_sq=1.1875), "4.weight")
    assert (vision["lr"], vision["weight_decay"]) == (0.2, pytest.approx(0.004, rel=1e-12))
    lr = 2**-12 * 50
    text = param_groups(Transformer(tied=True), lr=lr, output_lr=60 * lr, steady_norm_sq=5.79833984375)
    assert group_of(text, "wte.weight")["weight_decay"] == pytest.approx(1 / 3000, rel=1e-12)


def test_the_output_decays_constantly_and_the_rest_is_corrected() -> None:
    groups = param_groups(mlp(), output="4", steady_norm_sq=2.0, output_weight_decay=0.3, alpha=0.2)
    for group in groups:
        constant = group["name"] == "output"
        assert group["weight_decay"] == (0.3 if constant else None)
        assert group.get("steady_norm_sq") == (None if constant else 2.0)
        assert group["alpha"] == 0.2


def test_eta_is_the_same_in_every_group_at_the_start_with_constant_decay() -> None:
    groups = param_groups(mlp(), output="4", lr=0.02, output_lr=0.7, weight_decay=0.05)
    assert {round(group["lr"] * group["weight_decay"], 15) for group in groups} == {0.001}
    assert not any("steady_norm_sq" in group for group in groups)


def test_constant_output_bias_keeps_the_eta_it_starts_with() -> None:
    groups = param_groups(mlp(), output="4", output_bias="constant")
    bias = group_of(groups, "4.bias")
    assert bias["lr"] * bias["weight_decay"] == pytest.approx(0.01 * 0.08)
    assert "steady_norm_sq" not in bias
    assert group_of(groups, "0.bias")["weight_decay"] is None
    assert group_of(param_groups(mlp(), output="4"), "4.bias")["weight_decay"] is None


def test_zero_output_lr_gives_zero_decay_not_a_division_error() -> None:
    assert group_of(param_groups(mlp(), output="4", output_lr=0.0), "4.weight")["weight_decay"] == 0.0


def test_tied_weight_is_the_output_and_listed_once() -> None:
    groups = param_groups(Transformer(tied=True))
    assert by_group(groups)["output"] == ["wte.weight"]
    assert "embedding" not in by_group(groups)
    assert "wte.weight (also lm_head.weight)" in explain(groups)


def test_get_output_embeddings_finds_the_untied_head() -> None:
    class HuggingFaceLike(Transformer):
        def get_output_embeddings(self) -> nn.Module:
            return self.lm_head

    groups = param_groups(HuggingFaceLike(tied=False))
    assert by_group(groups)["output"] == ["lm_head.weight"]
    assert by_group(groups)["embedding"] == ["wte.weight"]
    assert "get_output_embeddings()" in groups.why["lm_head.weight"]


def test_get_classifier_finds_all_heads_also_inside_a_wrapper() -> None:
    class TwoHeads(VisionTransformer):
        def __init__(self) -> None:
            super().__init__()
            self.second = nn.Linear(8, 10)

        def get_classifier(self) -> Any:
            return self.head, self.second

    class Wrapper(nn.Module):  # as DistributedDataParallel does
        def __init__(self) -> None:
            super().__init__()
            self.module = TwoHeads()

    groups = by_group(param_groups(Wrapper()))
    assert groups["output"] == ["module.head.weight", "module.second.weight"]
    assert groups["output-bias"] == ["module.head.bias", "module.second.bias"]


def test_a_model_that_knows_no_output_falls_through_to_the_error() -> None:
    class Backbone(VisionTransformer):
        def get_output_embeddings(self) -> None:
            return None

        def get_classifier(self) -> nn.Module:
            return nn.Identity()

    with pytest.raises(ValueError, match=r"Backbone: .*pass output=.*False.*head, block\.proj, block\.qkv"):
        param_groups(Backbone())


@pytest.mark.parametrize("how", ["name", "parameter name", "module", "parameter", "list"])
def test_output_may_be_a_module_a_parameter_or_a_name(how: str) -> None:
    model = mlp()
    given = {"name": "4", "parameter name": "4.weight", "module": model[4], "parameter": model[4].weight, "list": ["4"]}
    assert by_group(param_groups(model, output=given[how]))["output"] == ["4.weight"]


def test_the_alias_of_a_tied_weight_names_it_too() -> None:
    assert by_group(param_groups(Transformer(tied=True), output="lm_head.weight"))["output"] == ["wte.weight"]


def test_no_output_makes_the_last_layer_hidden() -> None:
    groups = by_group(param_groups(mlp(), output=False))
    assert groups == {"hidden": ["0.weight", "2.weight", "4.weight"], "vector": ["0.bias", "4.bias"]}


@pytest.mark.parametrize(
    ("output", "message"),
    [
        ("head", r"output='head' is not in Sequential"),
        (nn.Linear(2, 2), r"output=<Linear> is not in Sequential"),
        (True, r"output=<bool> is not in Sequential"),
        ("", r"one matrix, not 3; name one of 0\.weight, 2\.weight, 4\.weight"),
        ("4.bias", r"'4.bias' is a vector; name the output layer's weight"),
    ],
)
def test_a_wrong_output_says_what_to_pass(output: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        param_groups(mlp(), output=output)


def test_an_output_convolution_is_refused_with_a_remedy_that_works() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    with pytest.raises(ValueError, match=r'1\.weight \(2, 4, 1, 1\).*roles=\{"1\.weight": <role>\}'):
        param_groups(model, output="1")
    assert by_group(param_groups(model, output="1", roles={"1.weight": "conv"}))["conv"] == ["0.weight", "1.weight"]


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


def test_unequal_or_interleaved_fusion_stays_one_matrix_and_says_so() -> None:
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


def test_an_output_layer_stored_transposed_is_refused() -> None:
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
def test_experts_stored_transposed_are_told_by_a_flag_or_by_their_shapes(flagged: bool) -> None:
    model = Holding(gate_up_proj=(4, 8, 32), down_proj=(4, 16, 8))  # (experts, d_in, d_out)
    if flagged:  # by shapes that say nothing
        model = Holding(gate_up_proj=(4, 8, 8), down_proj=(4, 8, 8))
        model.is_transposed = True
    groups = param_groups(model, output=False)
    assert by_group(groups) == {"stacked-transposed-blocks2": ["gate_up_proj"], "stacked-transposed": ["down_proj"]}
    assert {group["lmo"] for group in groups} == {"spectral-transposed"}


def test_interleaved_gate_and_up_stay_one_matrix_and_say_so() -> None:
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
    ("count", "why"), [(5, "8 rows of 0.weight"), *((bad, "one whole number") for bad in (0, 2.0, True))]
)
def test_blocks_must_divide_the_rows(count: Any, why: str) -> None:
    with pytest.raises(ValueError, match=rf"blocks\['0.weight'\]=.* {why}"):
        param_groups(mlp(), output="4", blocks={"0.weight": count})


# bare parameters and roles


@pytest.mark.parametrize(
    ("name", "shape", "role"),
    [
        ("scale", (), "vector"),
        ("pos_embed", (1, 5, 8), "embedding"),
        ("position_embeddings", (5, 8), "embedding"),
        ("mask_token", (1, 1, 8), "vector"),
        ("post_mix", (5, 8), "hidden"),
        ("text_projection", (5, 8), "hidden"),
        ("w1", (4, 5, 8), "stacked"),
        ("attention_biases", (4, 25), "vector"),
    ],
)
def test_role_of_a_bare_parameter(name: str, shape: tuple[int, ...], role: str) -> None:
    assert list(by_group(param_groups(Holding(**{name: shape}), output=False))) == [role]


def test_entries_of_a_parameter_list_go_by_the_lists_name() -> None:
    model = nn.ModuleDict(
        {"pos_embed": nn.ParameterList([torch.zeros(5, 8)]), "mix": nn.ParameterList([torch.ones(5, 8)])}
    )
    assert by_group(param_groups(model, output=False)) == {"embedding": ["pos_embed.0"], "hidden": ["mix.0"]}


def test_layer_norm_over_several_dimensions_is_a_vector() -> None:
    assert by_group(param_groups(nn.LayerNorm([3, 4, 4]), output=False)) == {"vector": ["weight", "bias"]}


@pytest.mark.parametrize("shape", [(3, 4, 5), (1, 4, 4, 5), (2,) * 6])
def test_an_ambiguous_parameter_is_an_error_that_names_the_remedy(shape: tuple[int, ...]) -> None:
    model = Holding(mixing=shape)
    with pytest.raises(ValueError, match=r'mixing \(.*\) in Holding.*ambiguous.*roles=\{"mixing": <role>\}.*stacked'):
        param_groups(model, output=False)
    assert by_group(param_groups(model, output=False, roles={"mix*": "vector"})) == {"vector": ["mixing"]}
    assert by_group(param_groups(model, kind="adam", output=False)) == {"matrix": ["mixing"]}


def test_roles_win_over_everything() -> None:
    model = Transformer(tied=True)
    groups = by_group(param_groups(model, roles={"lm_head.weight": "hidden", "blocks.0.proj.weight": "output"}))
    assert groups["output"] == ["blocks.0.proj.weight"]
    assert "wte.weight" in groups["hidden"]


def test_role_output_answers_the_question_for_the_output_layer() -> None:
    groups = by_group(param_groups(mlp(), roles={"4.*": "output"}))
    assert (groups["output"], groups["output-bias"]) == (["4.weight"], ["4.bias"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": {"nothing.*": "hidden"}}, r"roles\['nothing\.\*'\] matches no trainable parameter"),
        ({"roles": {"0.wieght": "hidden"}}, r"matches no trainable parameter; did you mean '0\.weight'"),
        ({"output": "4.wieght"}, r"output='4\.wieght' is not in Sequential; did you mean '4\.weight'"),
        ({"blocks": {"0.wieght": 2}}, r"did you mean '0\.weight'"),
        ({"blocks": {"0.weight": [4, 4]}}, r"blocks\['0\.weight'\]=\[4, 4\]: pass one whole number.*different sizes"),
        ({"roles": {"0.weight": "matrix"}}, r"roles\['0.weight'\]='matrix' is unknown; choose from hidden"),
        ({"roles": {"0.bias": "hidden"}}, r"0\.bias \(8,\) in Linear: 'hidden' .* takes 2 to 2 dimensions"),
        ({"blocks": {"nothing": 3}}, r"blocks\['nothing'\] matches no matrix"),
        ({"blocks": {"0.bias": 2}}, r"blocks\['0.bias'\] matches no matrix"),
        ({"blocks": {"0.weight": 2}, "kind": "adam"}, r"blocks\['0.weight'\] matches no matrix"),
        ({"kind": "muon"}, r"kind='muon' is unknown; choose from scion, adam"),
        ({"output_bias": "none"}, r"output_bias='none' is unknown; choose from corrected, constant"),
        ({"lr": -1.0}, r"lr=-1.0 must be finite"),
        ({"lr": float("nan")}, r"lr=nan must be finite"),
        ({"output_lr": float("inf")}, r"output_lr=inf must be finite"),
        ({"weight_decay": -0.1}, r"weight_decay=-0.1 must be finite"),
        ({"alpha": 0.0}, r"alpha"),
        ({"steady_norm_sq": 0.0}, r"steady_norm_sq"),
        ({"steady_norm_sq": -1.0, "weight_decay": 0.1}, r"steady_norm_sq"),
    ],
)
def test_bad_input_is_named(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        param_groups(mlp(), **{"output": "4", **options})


def test_blocks_as_a_number_says_a_dict_is_wanted() -> None:
    with pytest.raises(TypeError, match=r"blocks=3: pass a dict from parameter names or globs to numbers of equal"):
        param_groups(mlp(), output="4", blocks=3)  # pyright: ignore[reportArgumentType]


def test_unsupported_parameters_are_named_with_a_remedy() -> None:
    complex_model = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"0\.weight is complex; hold real"):
        param_groups(complex_model, output=False)
    with pytest.raises(ValueError, match=r"0\.weight or its gradient is sparse; .*sparse=False"):
        param_groups(nn.Sequential(nn.Embedding(3, 2, sparse=True)), output=False)
    flattened = mlp()
    flattened[0].weight = nn.Parameter(torch.zeros(32))
    with pytest.raises(ValueError, match=r"0\.weight is a flattened matrix; .*fully_shard"):
        param_groups(flattened, output="4")


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_lazy_parameter_is_named_before_its_shape_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet; run the model once"):
        param_groups(nn.Sequential(nn.LazyLinear(2)), output="0")


def test_frozen_parameters_are_left_out_and_a_frozen_model_is_an_error() -> None:
    model = mlp()
    model[4].requires_grad_(False)
    assert by_group(param_groups(model, output="4")) == {"hidden": ["0.weight", "2.weight"], "vector": ["0.bias"]}
    with pytest.raises(ValueError, match="Sequential has no trainable parameter"):
        param_groups(model.requires_grad_(False), output="4")
    with pytest.raises(ValueError, match="ReLU has no trainable parameter"):
        param_groups(nn.ReLU())


def test_a_table_over_a_grid_is_ambiguous() -> None:
    model = Holding(pos_embed=(1, 7, 7, 8))
    with pytest.raises(ValueError, match=r"pos_embed \(1, 7, 7, 8\).*ambiguous"):
        param_groups(model, output=False)
    assert by_group(param_groups(model, output=False, roles={"pos_embed": "embedding"})) == {"embedding": ["pos_embed"]}


# Adam


def test_adam_decays_matrices_only_and_corrects_all_but_the_output() -> None:
    groups = {group["name"]: group for group in param_groups(mlp(), kind="adam", output="4")}
    assert {name: (g["lr"], g["weight_decay"], g["corrected"]) for name, g in groups.items()} == {
        "matrix": (1e-3, 0.1, True),
        "vector": (1e-3, 0.0, True),
        "output": (1e-3, 0.1, False),
    }
    assert [name for name, _ in groups["vector"]["params"]] == ["0.bias", "4.bias"]
    assert not any("lmo" in group for group in groups.values())
    given = param_groups(mlp(), kind="adam", output="4", weight_decay=0.2, output_weight_decay=0.3, output_lr=0.5)
    assert [(g["lr"], g["weight_decay"]) for g in given] == [(1e-3, 0.2), (1e-3, 0.0), (0.5, 0.3)]


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


def test_explain_takes_an_optimizer_and_says_what_it_does_not_take() -> None:
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


def test_radius_moves_the_weights_as_the_original_scion_does() -> None:
    gamma, radius, weight, update = 2**-12, 50.0, 3.0, -0.7
    values = from_radius(gamma, radius)
    ours = (1 - values["lr"] * values["weight_decay"]) * weight - values["lr"] * update
    assert ours == pytest.approx((1 - gamma) * weight - gamma * radius * update, rel=1e-14)
    for bad in (0.0, -1.0, float("nan")):
        with pytest.raises(ValueError, match="radius"):
            from_radius(0.1, bad)


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
    """The filter of one channel does not turn with its neighbour's: each has the size it would have alone."""
    x = torch.randn(8, 1, 3, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    u = get("conv").update(x, blocks=8, polar=Polar("svd"))
    alone = torch.stack([filter_ / (filter_.norm() * 3) for filter_ in x])  # sqrt(1/9) polar of a 1 x 9 matrix
    assert torch.allclose(u, alone)


class Classifier(nn.Module):
    """As Hugging Face's: no output embeddings, a head by one of its names."""

    def __init__(self, name: str, head: nn.Module) -> None:
        super().__init__()
        self.body = nn.Linear(8, 8)
        setattr(self, name, head)

    def get_output_embeddings(self) -> None:
        return None


@pytest.mark.parametrize("name", ["classifier", "score", "qa_outputs", "lm_head"])
def test_the_head_of_a_hugging_face_model_is_found_by_its_name(name: str) -> None:
    groups = param_groups(Classifier(name, nn.Sequential(nn.Flatten(), nn.Linear(8, 3))))
    assert by_group(groups)["output"] == [f"{name}.1.weight"]
    assert groups.why[f"{name}.1.weight"] == f"output layer, by the name {name}"


def test_a_head_of_several_layers_is_asked_for() -> None:
    with pytest.raises(ValueError, match=r"Classifier: cannot tell.*last first: classifier\.1, classifier\.0, body"):
        param_groups(Classifier("classifier", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))))


def test_what_groups_were_not_told_the_optimizer_decides():
    """The lr given to the optimizer counts; it would be lost where every group has one of its own."""
    [hidden, _, output, _] = sn.ScionC(param_groups(mlp(), output="4"), lr=0.02, alpha=0.2).param_groups
    right = {group["name"]: group for group in param_groups(mlp(), output="4", lr=0.02, alpha=0.2)}
    for group in (hidden, output):
        for key in ("lr", "alpha", "weight_decay"):
            assert group[key] == right[group["name"]][key]
    told = sn.ScionC(param_groups(mlp(), output="4", lr=0.03)).param_groups[0]
    assert told["lr"] == 0.03
    adam = sn.AdamC(param_groups(mlp(), output="4", kind="adam"), lr=3e-4, weight_decay=0.0).param_groups[0]
    assert (adam["lr"], adam["weight_decay"]) == (3e-4, 0.0)
    changed = param_groups(mlp(), output="4")
    changed[0]["lr"] = 0.005
    assert [group["lr"] for group in sn.ScionC(changed, lr=0.02).param_groups] == [0.005, 0.02, 0.4, 0.02]


def test_constant_decay_comes_from_scion_too():
    groups = sn.Scion(param_groups(mlp(), output="4"), weight_decay=0.1).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.005, 0.1]
    with pytest.raises(ValueError, match="weight_decay=None means corrected"):
        sn.Scion(param_groups(mlp(), output="4"))


# which optimizer takes which kind


ADAM_KIND = [sn.AdamC, sn.LionC, sn.SGDC, sn.RenormalizedAdamW]


@pytest.mark.parametrize("cls", ADAM_KIND)
def test_groups_made_for_scion_are_refused_by_all_others(cls: Any) -> None:
    """They would train: AdamC would take C^2 for the mean square of an element, and the output's lr is 20 times theirs."""
    with pytest.raises(ValueError, match=rf"{cls.__name__}: .*for Scion; use param_groups\(model, kind='adam'\)"):
        cls(param_groups(mlp(), output="4"), lr=1e-3)
    as_a_list = list(param_groups(mlp(), output="4"))
    with pytest.raises(ValueError, match=rf"{cls.__name__}, group 0 \(\"hidden\"\): .*lmo='spectral'.*kind='adam'"):
        cls(as_a_list)
    optimizer = cls(param_groups(mlp(), output="4", kind="adam"))
    with pytest.raises(ValueError, match=r"group 3 .*lmo='spectral'"):
        optimizer.add_param_group(as_a_list[0])
    assert len(optimizer.param_groups) == 3


@pytest.mark.parametrize("cls", [sn.Scion, sn.ScionC])
def test_groups_made_for_adam_are_refused_by_scion(cls: Any) -> None:
    with pytest.raises(ValueError, match=rf"{cls.__name__}: .*for Adam; use param_groups\(model, kind='scion'\)"):
        cls(param_groups(mlp(), output="4", kind="adam"), lmo="by-shape")


@pytest.mark.parametrize("decay", [None, 0.1])
def test_correct_refuses_groups_made_for_scion(decay: float | None) -> None:
    optimizer = torch.optim.AdamW(param_groups(mlp(), output="4", weight_decay=decay))
    with pytest.raises(ValueError, match=r"correct: group 0 \(\"hidden\"\): it has lmo=.*kind='adam'"):
        sn.correct(optimizer)
    assert sn.correct(sn.Scion(param_groups(mlp(), output="4", weight_decay=0.1)))
    optimizer = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], "weight_decay": None}])
    with pytest.raises(ValueError, match="correct: group 0: weight_decay=None is no number"):
        sn.correct(optimizer)


@pytest.mark.parametrize("told", ["groups", "optimizer"])
def test_with_nesterov_the_output_starts_with_the_half_life_of_the_hidden_layers(told: str) -> None:
    where = {"groups": {"nesterov": True}} if told == "groups" else {"optimizer": {"nesterov": True}}
    groups = param_groups(mlp(), output="4", output_bias="constant", **where.get("groups", {}))
    optimizer = sn.ScionC(groups, **where.get("optimizer", {}))
    assert all(group["nesterov"] for group in optimizer.param_groups)
    etas = [group["lr"] * optimizer.weight_decay_of(group["params"][0]) for group in optimizer.param_groups]
    assert etas == pytest.approx([0.01 * sn.theory.weight_decay_for(1.1875, 0.01, 0.1, nesterov=True)] * 4)
    constant = sn.Scion(param_groups(mlp(), output="4"), weight_decay=0.1, nesterov=True).param_groups
    assert [group["weight_decay"] for group in constant] == [0.1, 0.1, 0.005, 0.1]
    with pytest.raises(ValueError, match="nesterov=True would not be used"):
        sn.ScionC(param_groups(mlp(), output="4", nesterov=False), nesterov=True)
    assert not any("nesterov" in group for group in param_groups(mlp(), output="4"))


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


def test_parameters_in_place_of_the_model_are_told() -> None:
    with pytest.raises(TypeError, match=r"param_groups takes the model itself.*not generator"):
        param_groups(mlp().parameters())  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("output", ["4", "4.weight", "_orig_mod.4", "_orig_mod.4.weight"])
def test_names_in_a_compiled_model_may_be_those_of_the_model(output: str) -> None:
    compiled: Any = torch.compile(mlp(), backend="eager")
    assert by_group(param_groups(compiled, output=output))["output"] == ["_orig_mod.4.weight"]
    groups = param_groups(compiled, output=output, roles={"2.weight": "embedding"}, blocks={"0.*": 2})
    assert group_of(groups, "_orig_mod.2.weight")["lmo"] == "embedding"
    assert group_of(groups, "_orig_mod.0.weight")["blocks"] == 2
    inside = nn.Sequential(torch.compile(nn.Linear(4, 4)), nn.Linear(4, 2))  # pyright: ignore[reportArgumentType]
    assert by_group(param_groups(inside, output="0"))["output"] == ["0._orig_mod.weight"]


def test_constant_decay_beside_a_target_or_in_every_group_of_scionc_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"param_groups: weight_decay=0\.1 makes the decay constant.*give one"):
        sn.param_groups(model, output="1", weight_decay=0.1, steady_norm_sq=2.0)
    groups = sn.param_groups(model, output="1", weight_decay=0.1)
    with pytest.raises(ValueError, match=r"ScionC: every group has a constant weight_decay.*or use Scion"):
        sn.ScionC(groups)
    sn.Scion(groups)
