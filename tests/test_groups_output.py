"""Claims about `param_groups`: which layer is the output, and how it decays."""

from __future__ import annotations

from typing import Any

import pytest
from group_models import Transformer, VisionTransformer, by_group, group_of, mlp
from torch import nn

from steadynorm.groups.builder import param_groups
from steadynorm.groups.explanation import explain

# the output layer


def test_the_output_decay_has_the_papers_numbers() -> None:
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


def test_a_constant_output_bias_keeps_the_eta_it_starts_with() -> None:
    groups = param_groups(mlp(), output="4", output_bias="constant")
    bias = group_of(groups, "4.bias")
    assert bias["lr"] * bias["weight_decay"] == pytest.approx(0.01 * 0.08)
    assert "steady_norm_sq" not in bias
    assert group_of(groups, "0.bias")["weight_decay"] is None
    assert group_of(param_groups(mlp(), output="4"), "4.bias")["weight_decay"] is None


def test_a_zero_output_lr_gives_zero_decay_not_a_division_error() -> None:
    assert group_of(param_groups(mlp(), output="4", output_lr=0.0), "4.weight")["weight_decay"] == 0.0


def test_a_tied_weight_is_the_output_and_listed_once() -> None:
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


def test_a_model_without_a_known_output_raises() -> None:
    class Backbone(VisionTransformer):
        def get_output_embeddings(self) -> None:
            return None

        def get_classifier(self) -> nn.Module:
            return nn.Identity()

    with pytest.raises(ValueError, match=r"Backbone: .*pass output=.*False.*head, block\.proj, block\.qkv"):
        param_groups(Backbone())


@pytest.mark.parametrize("how", ["name", "parameter name", "module", "parameter", "list"])
def test_the_output_may_be_a_module_a_parameter_or_a_name(how: str) -> None:
    model = mlp()
    given = {"name": "4", "parameter name": "4.weight", "module": model[4], "parameter": model[4].weight, "list": ["4"]}
    assert by_group(param_groups(model, output=given[how]))["output"] == ["4.weight"]


def test_a_tied_weight_can_be_named_by_its_alias() -> None:
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
def test_the_error_for_a_wrong_output_says_what_to_pass(output: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        param_groups(mlp(), output=output)


def test_an_output_convolution_is_refused_with_a_remedy_that_works() -> None:
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.Conv2d(4, 2, 1))
    with pytest.raises(ValueError, match=r'1\.weight \(2, 4, 1, 1\).*roles=\{"1\.weight": <role>\}'):
        param_groups(model, output="1")
    assert by_group(param_groups(model, output="1", roles={"1.weight": "conv"}))["conv"] == ["0.weight", "1.weight"]


class Classifier(nn.Module):
    """A classifier like Hugging Face's: no output embeddings, and a head under one of its usual names."""

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


def test_a_head_of_several_layers_needs_output() -> None:
    with pytest.raises(ValueError, match=r"Classifier: cannot tell.*last first: classifier\.1, classifier\.0, body"):
        param_groups(Classifier("classifier", nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 3))))
