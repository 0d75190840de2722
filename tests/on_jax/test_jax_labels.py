"""Paths and shapes decide roles; what they leave open is asked for."""

import needs_jax  # noqa: F401  # isort: skip

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import steadynorm.jax as sj
from steadynorm.jax.labels import path_leaves


def shaped(**shapes) -> dict:
    """Return a tree of arrays: a__b=(2, 3) is {"a": {"b": ...}}."""
    tree: dict = {}
    for path, shape in shapes.items():
        *parents, name = path.split("__")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = jax.ShapeDtypeStruct(shape, jnp.float32)
    return tree


def labels_of(output=False, **shapes) -> dict[str, tuple[str, str]]:
    return {path: (label.role, label.lmo) for path, label in sj.label_params(shaped(**shapes), output=output).items()}


VIT = {
    "embedding__kernel": (4, 4, 3, 8),
    "embedding__bias": (8,),
    "pos_embedding": (1, 16, 8),
    "cls": (1, 1, 8),
    "Block_0__LayerNorm_0__scale": (8,),
    "Block_0__attention__query__kernel": (8, 2, 4),
    "Block_0__attention__query__bias": (2, 4),
    "Block_0__attention__out__kernel": (2, 4, 8),
    "Block_0__mlp__Dense_0__kernel": (8, 32),
    "Block_1__mlp__Dense_0__kernel": (8, 32),
    "head__kernel": (8, 5),
    "head__bias": (5,),
}


def test_the_arrays_of_a_flax_vit_get_the_roles_of_torchs():
    assert labels_of(None, **VIT) == {
        "Block_0/LayerNorm_0/scale": ("vector", "bias"),
        "Block_0/attention/out/kernel": ("hidden-transposed", "spectral"),
        "Block_0/attention/query/bias": ("vector", "bias"),
        "Block_0/attention/query/kernel": ("hidden-transposed", "spectral"),
        "Block_0/mlp/Dense_0/kernel": ("hidden-transposed", "spectral"),
        "Block_1/mlp/Dense_0/kernel": ("hidden-transposed", "spectral"),
        "cls": ("vector", "bias"),
        "embedding/bias": ("vector", "bias"),
        "embedding/kernel": ("conv-transposed", "spectral"),
        "head/bias": ("output-bias", "bias"),
        "head/kernel": ("output-transposed", "sign"),
        "pos_embedding": ("embedding", "embedding"),
    }


def test_the_lmo_sees_outputs_by_inputs():
    labels = sj.label_params(shaped(**VIT))
    seen = {path: label.seen_shape for path, label in labels.items() if label.inputs}
    assert seen == {
        "Block_0/attention/out/kernel": (8, 8),
        "Block_0/attention/query/kernel": (8, 8),
        "Block_0/mlp/Dense_0/kernel": (32, 8),
        "Block_1/mlp/Dense_0/kernel": (32, 8),
        "embedding/kernel": (8, 48),
        "head/kernel": (5, 8),
    }


@pytest.mark.parametrize(
    ("shape", "label"),
    [
        ((3, 5), sj.Label("hidden-transposed", "spectral", (3, 5), inputs=1)),
        ((2, 3, 5), sj.Label("hidden-transposed", "spectral", (2, 3, 5), inputs=2)),
        ((2, 3, 5), sj.Label("stacked-transposed", "spectral", (2, 3, 5), inputs=1, stack=1)),
        ((3, 5), sj.Label("hidden", "spectral", (3, 5))),
    ],
)
def test_an_array_returns_from_what_the_lmo_sees(shape, label):
    x = np.arange(np.prod(shape)).reshape(shape)
    assert label.to_seen(x).shape == label.seen_shape
    assert (label.from_seen(label.to_seen(x)) == x).all()
    if label.role == "hidden-transposed":
        assert (label.to_seen(x) == x.reshape(-1, 5).T).all()
    if label.role == "stacked-transposed":
        assert (label.to_seen(x)[1] == x[1].T).all()


def test_names_of_other_libraries_say_how_they_store():
    assert labels_of(conv__weight=(8, 3, 3, 3), mlp__weight=(8, 4), embed__weight=(9, 4), linear__w=(4, 8)) == {
        "conv/weight": ("conv", "conv"),
        "embed/weight": ("embedding", "embedding"),
        "linear/w": ("hidden-transposed", "spectral"),
        "mlp/weight": ("hidden", "spectral"),
    }
    assert labels_of(conv_1__w=(3, 2, 8), experts__up_proj__kernel=(4, 8, 16), moe__w1__weight=(4, 8, 16)) == {
        "conv_1/w": ("conv-transposed", "spectral"),
        "experts/up_proj/kernel": ("stacked-transposed", "spectral"),
        "moe/w1/weight": ("stacked", "spectral"),
    }


@pytest.mark.parametrize("name", ["embed", "token_embedding", "word_embeddings", "pos_embed", "wte", "wpe", "tok_emb"])
def test_tables_are_known_by_the_usual_names_of_their_fields(name):
    assert labels_of(**{f"{name}__weight": (9, 4)}) == {f"{name}/weight": ("embedding", "embedding")}


@pytest.mark.parametrize(
    "name", ["patch_embed", "patch_emb", "time_embed", "time_emb", "timestep_embedding", "rotary_emb"]
)
def test_layers_that_are_only_named_like_tables_are_hidden(name):
    assert labels_of(**{f"{name}__weight": (9, 4)}) == {f"{name}/weight": ("hidden", "spectral")}


def test_fused_weights_are_split_into_blocks_of_their_outputs():
    labels = sj.label_params(
        shaped(attn__qkv__kernel=(8, 24), mlp__gate_up_proj__kernel=(8, 32), qkv__weight=(24, 8)), output=False
    )
    assert {path: label.blocks for path, label in labels.items()} == {
        "attn/qkv/kernel": 3, "mlp/gate_up_proj/kernel": 2, "qkv/weight": 3,
    }  # fmt: skip
    assert "fused q, k, v: 3 column blocks" in labels["attn/qkv/kernel"].reason
    assert sj.label_params(shaped(qkv__kernel=(8, 24)), output=False, blocks={"*": 1})["qkv/kernel"].blocks == 1


def test_the_callers_choices_come_first():
    params = shaped(a__kernel=(8, 8), b__kernel=(8, 2, 4), table=(9, 8), c__kernel=(3, 8, 8))
    labels = sj.label_params(
        params, output="table", roles={"c/*": "stacked-transposed", "b/*": "hidden-transposed"}, lmos={"a/*": "column"},
        inputs={"b/kernel": 2}, inputs_first=True,
    )  # fmt: skip
    assert labels["a/kernel"].lmo == "column" and labels["b/kernel"].seen_shape == (4, 16)
    assert labels["c/kernel"].seen_shape == (3, 8, 8) and labels["c/kernel"].stack == 1
    assert labels["table"].role == "output-transposed" and labels["table"].is_output


def test_a_tied_embedding_is_an_output_that_is_stored_outputs_first():
    label = sj.label_params(shaped(wte__embedding=(9, 4), up__kernel=(4, 4)), output="wte")["wte/embedding"]
    assert (label.role, label.inputs, label.lmo) == ("output", 0, "sign")


def test_items_of_lists_and_flaxs_variables_have_paths():
    tree = {"layers": [jnp.ones((2, 2)), {"weight": {"value": jnp.ones((3, 2))}}]}
    assert [path for path, _ in path_leaves(tree)] == ["layers/0", "layers/1/weight/value"]
    label = sj.label_params(tree, output=False, roles={"layers/0": "hidden"})["layers/1/weight/value"]
    assert label.role == "hidden"


@jax.tree_util.register_dataclass
@dataclass
class Variable:
    """As in flax's nnx: a node whose array is its `value`."""

    value: jax.Array


def test_labels_of_nnxs_variables_fit_the_arrays_that_its_optimizer_passes_on():
    arrays = {"up": {"kernel": jnp.ones((4, 4))}, "head": {"kernel": jnp.ones((4, 2)), "bias": jnp.ones(2)}}
    labels = sj.label_params(jax.tree.map(Variable, arrays))
    assert labels == sj.label_params(arrays) and labels["head/bias"].role == "output-bias"
    sj.scionc(0.01, labels).init(arrays)


@jax.tree_util.register_dataclass
@dataclass
class Attention:
    """An attention whose fields are bare arrays."""

    query: jax.Array
    value: jax.Array


def test_a_field_called_value_beside_others_keeps_its_name():
    tree = {"attn": Attention(jnp.ones((4, 4)), jnp.ones((4, 4)))}
    assert list(sj.label_params(tree, output=False, roles={"attn/*": "hidden"})) == ["attn/query", "attn/value"]


def test_the_table_folds_arrays_that_differ_by_a_number():
    text = sj.explain(sj.label_params(shaped(**VIT)))
    assert "Block_{0..1}/mlp/Dense_0/kernel  8x32" in text
    items = [{"weight": jnp.ones((2, 2))} for _ in range(3)]  # equinox keeps layers in lists
    assert "layers/{0..2}/weight  2x2    hidden  spectral  weight of layers" in sj.explain(
        sj.label_params({"layers": items}, output=False)
    )
    assert "heads apart, 1 of 3 axes are inputs" in text and "output layer, by the name head" in text
    assert len(sj.explain(sj.label_params(shaped(**VIT)), full=True).splitlines()) == 1 + len(VIT)


REFUSED = {
    "no output": (
        {"up__kernel": (2, 2)},
        {},
        "cannot tell which layer is the output .* Matrices, last first: up/kernel",
    ),
    "two outputs": ({"a__head__kernel": (2, 2), "b__head__kernel": (2, 2)}, {}, "several layers .* a/head, b/head"),
    "output unknown": ({"up__kernel": (2, 2)}, {"output": "upp/kernel"}, "is not there; did you mean 'up/kernel'"),
    "output a vector": ({"up__bias": (2,)}, {"output": "up"}, "is a vector; name the layer or its weight"),
    "order unknown": ({"up": (2, 2)}, {"output": False}, "pass inputs_first=True"),
    "ambiguous": ({"up__kernel": (2, 2, 2)}, {"output": False}, 'ambiguous; pass roles=\\{"up/kernel": <role>\\}'),
    "wrong role": ({"up__kernel": (2, 2)}, {"output": False, "roles": {"up/*": "hiden"}}, "choose from hidden"),
    "role and shape": ({"b": (2,)}, {"output": False, "roles": {"b": "hidden"}}, "takes 2 to 2 dimensions"),
    "no match": ({"up__kernel": (2, 2)}, {"output": False, "blocks": {"down/*": 2}}, "matches no array"),
    "no dict": ({"up__kernel": (2, 2)}, {"output": False, "lmos": "sign"}, "pass a dict"),
    "odd blocks": (
        {"up__kernel": (2, 3)},
        {"output": False, "blocks": {"*": 2}},
        "blocks=2 does not divide the 3 rows",
    ),
    "blocks no int": ({"up__kernel": (2, 3)}, {"output": False, "blocks": {"*": 1.5}}, "number of equal blocks"),
    "wrong inputs": ({"up__weight": (2, 3)}, {"output": False, "inputs": {"*": 1}}, "cannot have 1 input axes"),
    "wrong lmo": ({"up__weight": (2, 3)}, {"output": False, "lmos": {"*": "round"}}, "unknown lmo 'round'"),
    "nothing": ({}, {}, "holds no array"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_unclear_is_refused_with_a_remedy(case):
    shapes, options, message = REFUSED[case]
    with pytest.raises((ValueError, TypeError), match=message):
        sj.label_params(shaped(**shapes), **options)
