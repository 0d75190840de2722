"""Claims about `param_groups`: which parameter gets which rule, and that none is forgotten."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from group_models import MODELS, PLAIN, Holding, Transformer, VisionTransformer, by_group, group_of, mlp
from torch import nn
from torch.nn.utils import prune
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import steadynorm as sn
from steadynorm.groups.builder import param_groups
from steadynorm.groups.roles import plain_name
from steadynorm.lmo import get


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


def test_the_roles_of_an_mlp_follow_from_its_layers() -> None:
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
def test_depthwise_convolutions_are_convolutions(layer: Any) -> None:
    groups = param_groups(nn.Sequential(layer(4, 4, 3, groups=4), nn.Linear(4, 2)), output="1")
    assert group_of(groups, "0.weight")["lmo"] == "conv"


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
def test_a_bare_parameter_has_the_role_of_its_shape(name: str, shape: tuple[int, ...], role: str) -> None:
    assert list(by_group(param_groups(Holding(**{name: shape}), output=False))) == [role]


def test_entries_of_a_parameter_list_go_by_the_lists_name() -> None:
    model = nn.ModuleDict(
        {"pos_embed": nn.ParameterList([torch.zeros(5, 8)]), "mix": nn.ParameterList([torch.ones(5, 8)])}
    )
    assert by_group(param_groups(model, output=False)) == {"embedding": ["pos_embed.0"], "hidden": ["mix.0"]}


def test_a_layer_norm_over_several_dimensions_is_a_vector() -> None:
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


def test_the_role_output_answers_the_question_for_the_output_layer() -> None:
    groups = by_group(param_groups(mlp(), roles={"4.*": "output"}))
    assert (groups["output"], groups["output-bias"]) == (["4.weight"], ["4.bias"])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"roles": {"nothing.*": "hidden"}}, r"roles\['nothing\.\*'\] matches no trainable parameter"),
        ({"roles": {"0.wieght": "hidden"}}, r"matches no trainable parameter; did you mean '0\.weight'"),
        ({"output": "4.wieght"}, r"output='4\.wieght' is not in Sequential; did you mean '4\.weight'"),
        ({"blocks": {"0.wieght": 2}}, r"did you mean '0\.weight'"),
        (
            {"blocks": {"0.weight": [4, 2]}},
            r"blocks\['0\.weight'\]=\(4, 2\) sums to 6, not to the 8 rows of 0\.weight; pass the sizes of all blocks",
        ),
        ({"blocks": {"0.weight": [4, 4.0]}}, r"blocks\['0\.weight'\]=\[4, 4\.0\]: pass the number of equal blocks"),
        (
            {"blocks": {"0.weight": ("inputs", 3)}},
            r"blocks\['0\.weight'\]=\('inputs', 3\) does not divide the 4 columns of 0\.weight",
        ),
        ({"heads": True}, r"heads=True: no attention of Sequential says how many heads it has; pass blocks= instead"),
        ({"roles": {"0.weight": "matrix"}}, r"roles\['0.weight'\]='matrix' is unknown; choose from hidden"),
        ({"roles": {"0.bias": "hidden"}}, r"0\.bias \(8,\) in Linear: 'hidden' .* takes 2 to 2 dimensions"),
        ({"blocks": {"nothing": 3}}, r"blocks\['nothing'\] matches no matrix"),
        ({"blocks": {"0.bias": 2}}, r"blocks\['0.bias'\] matches no matrix"),
        ({"blocks": {"0.weight": 2}, "kind": "adam"}, r"blocks\['0.weight'\] matches no matrix"),
        ({"kind": "sgd"}, r"kind='sgd' is unknown; choose from scion, adam, muon"),
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


def test_the_error_for_blocks_as_a_number_asks_for_a_dict() -> None:
    with pytest.raises(TypeError, match=r"blocks=3: pass a dict from parameter names or globs to numbers of equal"):
        param_groups(mlp(), output="4", blocks=3)  # pyright: ignore[reportArgumentType]


def test_unsupported_parameters_are_named_with_a_remedy() -> None:
    complex_model = nn.Sequential(nn.Linear(2, 2, dtype=torch.complex64))
    with pytest.raises(ValueError, match=r"0\.weight is complex; make its real"):
        param_groups(complex_model, output=False)
    with pytest.raises(ValueError, match=r"0\.weight or its gradient is sparse; .*sparse=False"):
        param_groups(nn.Sequential(nn.Embedding(3, 2, sparse=True)), output=False)
    flattened = mlp()
    flattened[0].weight = nn.Parameter(torch.zeros(32))
    with pytest.raises(ValueError, match=r"0\.weight is a flattened matrix; .*fully_shard"):
        param_groups(flattened, output="4")


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_the_error_for_a_lazy_parameter_names_it() -> None:
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


def test_unset_group_settings_come_from_the_optimizer():
    """The lr passed to the optimizer counts; it would be lost if every group had its own."""
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


def test_constant_decay_comes_from_scion():
    groups = sn.Scion(param_groups(mlp(), output="4"), weight_decay=0.1).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.005, 0.1]
    with pytest.raises(ValueError, match="weight_decay=None means corrected"):
        sn.Scion(param_groups(mlp(), output="4"))


# which optimizer takes which kind


ADAM_KIND = [sn.AdamC, sn.LionC, sn.SGDC, sn.RenormalizedAdamW]


@pytest.mark.parametrize("cls", ADAM_KIND)
def test_groups_made_for_scion_are_refused_by_all_others(cls: Any) -> None:
    """They would train, but AdamC would take C^2 for the mean square of an element, and the output's lr is 20 times
    theirs.
    """
    with pytest.raises(ValueError, match=rf"{cls.__name__}: .*for Scion; use param_groups\(model, kind='adam'\)"):
        cls(param_groups(mlp(), output="4"), lr=1e-3)
    by_hand = [{**group, "params": list(group["params"])} for group in param_groups(mlp(), output="4")]
    with pytest.raises(ValueError, match=rf"{cls.__name__}, group 0 \(\"hidden\"\): .*lmo='spectral'.*kind='adam'"):
        cls(by_hand)
    optimizer = cls(param_groups(mlp(), output="4", kind="adam"))
    with pytest.raises(ValueError, match=r"group 3 .*lmo='spectral'"):
        optimizer.add_param_group(by_hand[0])
    with pytest.raises(ValueError, match=r"for Scion; use param_groups\(model, kind='adam'\)"):
        optimizer.add_param_group(param_groups(mlp(), output="4")[0])
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
    with pytest.raises(ValueError, match="correct: group 0: weight_decay=None is not a number"):
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


def test_passing_parameters_instead_of_a_model_raises() -> None:
    with pytest.raises(TypeError, match=r"param_groups takes the model, whose modules.*not generator"):
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


@pytest.mark.parametrize("parametrize", [weight_norm, spectral_norm])
def test_a_parametrized_weight_has_the_role_of_its_layer(parametrize: Any) -> None:
    layers: dict[str, nn.Module] = {"conv": nn.Conv1d(4, 8, 3, groups=2), "wte": nn.Embedding(9, 8)}
    layers |= {"qkv": nn.Linear(8, 24), "head": nn.Linear(8, 9)}
    plain = nn.ModuleDict(layers)
    expected = {name: group for group in param_groups(plain, output="head") for name, _ in group["params"]}
    wrapped = nn.ModuleDict({name: parametrize(layer) for name, layer in layers.items()})
    groups = param_groups(wrapped, output="head.weight", blocks={"qkv.weight": 3})
    for group in groups:
        for name, _ in group["params"]:
            if name.endswith("original0"):  # weight_norm keeps lengths there
                assert group["lmo"] == "bias", name
            else:
                same = expected[plain_name(name)]
                assert (group["name"], group["lmo"], group["lr"]) == (same["name"], same["lmo"], same["lr"]), name


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["scion", "muon", "adam"])
def test_lengths_of_the_old_weight_norm_are_vectors(kind: str) -> None:
    layers: list[nn.Module] = [nn.Conv1d(4, 8, 3), nn.ConvTranspose1d(4, 8, 3), nn.Linear(8, 6), nn.Embedding(9, 8)]
    model = nn.Sequential(*map(nn.utils.weight_norm, layers), nn.utils.weight_norm(nn.LSTM(4, 4), "weight_hh_l0"))
    groups = param_groups(model, kind=kind, output=False)
    vectors = by_group(groups)["vector"]
    lengths = [f"{k}.weight_g" for k in range(4)] + ["4.weight_hh_l0_g"]
    assert set(vectors) == {*lengths, *(name for name, _ in model.named_parameters() if "bias" in name)}
    [left] = [group for group in groups if group["name"] == "vector"]
    assert left.get("use_muon") is (False if kind == "muon" else None)
    assert left["weight_decay"] == (None if kind == "scion" else 0.0)
    layer = nn.Linear(4, 6)
    layer.weight_g = nn.Parameter(torch.ones(6, 1))  # no direction beside it: the name says nothing
    assert group_of(param_groups(layer, kind=kind, output=False), "weight_g")["name"] in ("hidden", "matrix")


@pytest.mark.filterwarnings("ignore:`torch.nn.utils.weight_norm` is deprecated:FutureWarning")
@pytest.mark.parametrize("hook", [nn.utils.weight_norm, nn.utils.spectral_norm, prune.identity])
def test_a_weight_made_by_the_hooks_of_older_torch_is_found_by_its_name(hook: Any) -> None:
    layers = {
        "qkv": nn.Linear(8, 24),
        "gate_up_proj": nn.Linear(8, 24),
        "mlp": nn.Linear(8, 4),
        "head": nn.Linear(4, 9),
    }
    rnn = nn.LSTM(4, 4)
    plain = nn.ModuleDict({**layers, "rnn": rnn})
    names = {name for name, p in plain.named_parameters() if p.ndim > 1 and name != "rnn.weight_ih_l0"}
    expected = {name: group for group in param_groups(plain, output="head") for name, _ in group["params"]}
    hooked = {name: hook(layer, "weight") for name, layer in layers.items()}
    model = nn.ModuleDict({**hooked, "rnn": hook(rnn, "weight_hh_l0")})
    groups = param_groups(model, output="head.weight", blocks={"mlp.weight": 2})
    found = {name.removesuffix("_v").removesuffix("_orig"): g for g in groups for name, p in g["params"] if p.ndim > 1}
    assert {name: found[name]["name"] for name in names - {"mlp.weight"}} == {
        name: expected[name]["name"] for name in names - {"mlp.weight"}
    }
    assert found["mlp.weight"]["blocks"] == 2
    assert found["qkv.weight"]["blocks"] == 3
    optimizer = sn.correct(torch.optim.AdamW(model.parameters()), model, skip="mlp.weight")
    positions = [k for k, (name, _) in enumerate(model.named_parameters()) if name.startswith("mlp.weight")]
    assert optimizer.param_groups[0]["uncorrected"] == positions


def test_a_part_of_no_weight_keeps_its_own_name() -> None:
    """`gate.w_g` and `gate.w_v` look like the parts of a weight `gate.w`, which is not there."""
    gate = nn.Module()
    gate.w_g, gate.w_v = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"roles\['gate\.w'\] matches no"):
        param_groups(nn.ModuleDict({"gate": gate}), output=False, roles={"gate.w": "hidden"})


def test_a_constant_decay_beside_a_target_or_in_every_group_of_scionc_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(ValueError, match=r"param_groups: weight_decay=0\.1 makes the decay constant.*pass only one"):
        sn.param_groups(model, output="1", weight_decay=0.1, steady_norm_sq=2.0)
    groups = sn.param_groups(model, output="1", weight_decay=0.1)
    with pytest.raises(ValueError, match=r"ScionC: every group has a constant weight_decay.*or use Scion"):
        sn.ScionC(groups)
    sn.Scion(groups)
