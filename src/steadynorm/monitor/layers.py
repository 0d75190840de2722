"""The parameters that a monitor measures: name, group, lmo and role of each.

lmo and role come from the groups (Scion family), from the modules of the model if there is one, else from the shape.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadynorm import lmo as lmos
from steadynorm.dtensor import local
from steadynorm.groups.fusion import find_blocks
from steadynorm.groups.role_table import BLOCKED, ROLES
from steadynorm.groups.roles import find_outputs, param_sites, role_of
from steadynorm.optim.base import SteadyOptimizer
from steadynorm.optim.sharding.layout import Layout, layout_of
from steadynorm.views import BlockLayout

MAX_ENTRY_LMOS = ("sign", "embedding")  # their norm is a multiple of the largest entry
# What records call the roles of `role_table.ROLES`, and those of an lmo where neither group nor model says more.
_MATRIX_ROLES = ("hidden", "hidden-transposed", "stacked", "stacked-transposed", "conv")
_RECORD_ROLES: dict[str, str] = dict.fromkeys(_MATRIX_ROLES, "hidden")
_RECORD_ROLES |= {"embedding": "embedding", "output": "output", "vector": "vectors", "output-bias": "vectors"}
_ROLES_BY_LMO = {"sign": "output", "embedding": "embedding", "bias": "vectors"}


@dataclass(frozen=True, eq=False)
class Layer:
    """One parameter of the optimizer."""

    name: str  # what records call it
    parameter: Tensor
    group: int  # the index of its group
    lmo: lmos.Lmo  # whose norm is measured
    blocks: BlockLayout  # which blocks of it are matrices of their own
    layout: Layout | None = None  # how the weights are sharded, if they are a DTensor
    role: str = "hidden"  # in the model: hidden, output, embedding or vectors

    @property
    def local_weights(self) -> Tensor:
        """This process's part of the weights."""
        return local(self.parameter).detach()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def is_spectral(self) -> bool:
        return self.lmo.numbers.is_polar and self.parameter.numel() > 0


class _InModel(NamedTuple):
    """What the model says of a parameter, by the rules of `param_groups`."""

    name: str
    role: str
    lmo: lmos.Lmo
    blocks: BlockLayout


def find_layers(optimizer: Optimizer, model: nn.Module | None) -> list[Layer]:
    """Return every parameter of the optimizer, in the order of the model if there is one, else of the groups.

    Raises:
        ValueError: If a parameter cannot be measured, or the optimizer trains another model.
    """
    in_model = _find_in_model(model) if model is not None else {}
    by_name = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
    layers: list[Layer] = []
    names: set[str] = set()
    for index, group in enumerate(optimizer.param_groups):
        group_names = group.get("param_names") or [None] * len(group["params"])
        for k, (group_name, p) in enumerate(zip(group_names, group["params"], strict=True)):
            entry = in_model.get(id(p))
            name = str(group_name or (entry.name if entry else f"{index}.{k}"))
            name = name if name not in names else f"{name} ({index}.{k})"
            names.add(name)
            layout = _layout(name, p)
            if by_name.get(str(group_name), p) is not p:
                raise ValueError(
                    f"Monitor: {name} of the optimizer is not the model's: it was replaced after the optimizer was made, "
                    "so training does not reach it; make the optimizer last"
                )
            lmo, blocks = (entry.lmo, entry.blocks) if entry else (lmos.get("by-shape", p.shape), BlockLayout())
            settings: Any = optimizer.settings(group, p)[0] if isinstance(optimizer, SteadyOptimizer) else None
            if hasattr(settings, "lmo"):
                lmo, blocks = settings.lmo, settings.blocks
            role = _role(p, str(group.get("name", "")), entry.role if entry else "", lmo)
            layers.append(Layer(name, p, index, lmo, blocks, layout, role))
    if model is not None:
        _check_model(optimizer, model, layers)
        order = {id(p): place for place, p in enumerate(model.parameters())}
        layers.sort(key=lambda layer: order.get(id(layer.parameter), len(order)))
    return layers


def _check_model(optimizer: Optimizer, model: nn.Module, layers: list[Layer]) -> None:
    """Raise ValueError if both optimizer and model have parameters that the other does not have."""
    own = {id(p) for p in model.parameters()}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    foreign = next((layer.name for layer in layers if id(layer.parameter) not in own), None)
    untrained = next((name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained), None)
    if foreign is not None and untrained is not None:
        raise ValueError(
            f"Monitor: the optimizer trains {foreign}, which is not in the model, and not the model's {untrained}: this is "
            "another model, or a layer was replaced after the optimizer was made; make the optimizer last, or pass "
            "the model that it trains"
        )


def _role(p: Tensor, group: str, in_model: str, lmo: lmos.Lmo) -> str:
    """Return what records call the role of a parameter, by its group's name, the model's modules, or its lmo."""
    if p.ndim <= 1:
        return "vectors"
    roles = (_RECORD_ROLES[role] for role in (group.split("-blocks")[0], in_model) if role in _RECORD_ROLES)
    return next(roles, _ROLES_BY_LMO.get(lmo.name, "hidden"))


def _layout(name: str, p: Tensor) -> Layout | None:
    """Return how a parameter is sharded; raise ValueError if it cannot be measured."""
    if is_lazy(p):
        raise ValueError(f"Monitor: {name} has no shape yet; run the model once before attaching")
    if p.is_complex():
        raise ValueError(f"Monitor: {name} is complex; make its real and imaginary parts two parameters")
    if not p.is_floating_point() or p.layout is not torch.strided:
        raise ValueError(f"Monitor: {name} is {p.dtype}, {p.layout}; only dense floating-point parameters are measured")
    try:
        return layout_of(p, {})
    except ValueError as error:
        raise ValueError(f"Monitor: {name}: {error}") from None


def _find_in_model(model: nn.Module) -> dict[int, _InModel]:
    """Return what the model says of each parameter, by id; an output layer that cannot be found is not an error."""
    sites = param_sites(model)
    try:
        outputs = find_outputs(model, sites, None, {})
    except ValueError:
        outputs = {}
    in_model = {}
    for site in (site for site in sites if not is_lazy(site.parameter)):
        role, _ = role_of(site, {}, outputs, strict=False)
        name, least, most = ROLES[role]
        shape = site.parameter.shape
        lmo = lmos.get(name if least <= len(shape) <= most else "by-shape", shape)
        blocks = find_blocks(site, role, {})[0] if lmo.name in BLOCKED else BlockLayout()
        in_model[id(site.parameter)] = _InModel(site.name, role, lmo, blocks)
    return in_model
