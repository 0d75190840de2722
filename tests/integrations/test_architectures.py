"""`param_groups` on real architectures, against tables in tests/golden that a person has read through.

To make them anew after a change that is meant: STEADYNORM_WRITE_GOLDEN=1 pytest tests/integrations/test_architectures.py
"""

import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from needs import library
from torch import nn

import steadynorm as sn

library("transformers")
library("timm")

GOLDEN = Path(__file__).parents[1] / "golden"
_models: dict[str, nn.Module] = {}


def model_of(name: str) -> nn.Module:
    if name not in _models:
        torch.manual_seed(0)
        _models[name] = ARCHITECTURES[name].make()
    return _models[name]


def groups_of(name: str, **options: Any) -> Any:
    return sn.param_groups(model_of(name), **ARCHITECTURES[name].options, **options)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_table_of_a_real_architecture_is_the_golden_one(name: str):
    table = sn.explain(groups_of(name), full=True) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("STEADYNORM_WRITE_GOLDEN"):
        path.write_text(table, encoding="utf-8")
    assert table == path.read_text(encoding="utf-8"), (
        f"{path.name} differs; if that is meant, write it again (see the top of this file)"
    )


def test_every_golden_table_belongs_to_an_architecture():
    assert {path.stem for path in GOLDEN.glob("*.txt")} == set(ARCHITECTURES)


@pytest.mark.parametrize("kind", ["scion", "adam"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_every_parameter_is_in_exactly_one_group(name: str, kind: str):
    """model.parameters() lists a tied weight once, so this covers ties."""
    grouped = [id(p) for group in groups_of(name, kind=kind) for _, p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model_of(name).parameters())


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_the_output_layer_is_found_and_nothing_else_has_constant_decay(name: str):
    constant = [each for group in groups_of(name) if group["weight_decay"] is not None for each, _ in group["params"]]
    assert tuple(constant) == ARCHITECTURES[name].output


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_of_scionc_changes_every_parameter_and_no_shape(name: str):
    model = ARCHITECTURES[name].make()
    optimizer = sn.ScionC(sn.param_groups(model, **ARCHITECTURES[name].options))
    before = {each: p.detach().clone() for each, p in model.named_parameters()}
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.grad = torch.randn(p.shape, generator=generator)
    optimizer.step()
    assert not [each for each, p in model.named_parameters() if torch.equal(p, before[each])]


# --- the same layer stored in another way moves the same way


def step_of(weights: dict[str, torch.Tensor], grads: dict[str, torch.Tensor], groups: Any) -> None:
    for each, p in weights.items():
        p.grad = grads[each].clone().contiguous()
    sn.ScionC(groups, lr=0.1, polar="svd").step()


def test_gpt2_moves_as_if_its_layers_were_linear():
    """Conv1D stores d_in x d_out, with q, k, v as columns.

    Split and turned into Linears, the same gradients do the same.
    """
    model = ARCHITECTURES["gpt2"].make()
    named = dict(model.named_parameters())
    grads = {each: torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for each, p in named.items()}
    fused = re.compile(r"c_attn\.weight$")
    twins: dict[str, nn.Parameter] = {}  # by name and part, stored d_out x d_in
    twin_grads: dict[str, torch.Tensor] = {}
    for each, p in named.items():
        if p.ndim == 2 and ".h." in each:
            parts = p.shape[1] // p.shape[0] if fused.search(each) else 1
            for k, (w, g) in enumerate(zip(p.chunk(parts, 1), grads[each].chunk(parts, 1), strict=True)):
                twins[f"{each}.{k}"] = nn.Parameter(w.detach().T.contiguous())
                twin_grads[f"{each}.{k}"] = g.T
    step_of(named, grads, sn.param_groups(model, lr=0.1))
    step_of(twins, twin_grads, [{"params": list(twins.values()), "lmo": "spectral"}])
    for each, p in named.items():
        if parts := [twins[key] for key in twins if key.rsplit(".", 1)[0] == each]:
            torch.testing.assert_close(p.detach(), torch.cat(parts).detach().T)


@pytest.mark.parametrize(("name", "transposed"), [("mixtral", False), ("llama4", True)])
def test_every_expert_moves_as_if_it_were_a_linear_of_its_own(name: str, transposed: bool):
    model = ARCHITECTURES[name].make()
    experts = {each: p for each, p in model.named_parameters() if p.ndim == 3}
    assert len(experts) == 2
    grads = {each: torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for each, p in experts.items()}
    before = {each: p.detach().clone() for each, p in experts.items()}
    step_of(experts, grads, sn.param_groups(model, lr=0.1))
    for each, p in experts.items():
        for k in range(4):
            w, g, after = (x[k].T if transposed else x[k] for x in (before[each], grads[each], p.detach()))
            parts = 2 if "gate_up" in each else 1
            twins = {str(i): nn.Parameter(part.clone()) for i, part in enumerate(w.chunk(parts))}
            twin_grads = {str(i): part for i, part in enumerate(g.chunk(parts))}
            step_of(twins, twin_grads, [{"params": list(twins.values()), "lmo": "spectral"}])
            torch.testing.assert_close(after, torch.cat([t.detach() for t in twins.values()]))
