"""What a monitor knows of each parameter, its name and role, and how the norm of a role is measured on the device.

Roles come from the groups' lmo (Scion family), from the model's modules where it is given, else from the shape alone.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadynorm import lmo as lmos
from steadynorm.groups.roles import BLOCKED, ROLES, find_outputs, param_sites, role_of, row_blocks
from steadynorm.optim.scion import Scion
from steadynorm.optim.sharding.layout import Layout, layout_of, local

# What records call the roles of `roles.ROLES`; of an lmo where neither group nor model says more.
_PARTS = {
    "hidden": "hidden",
    "hidden-transposed": "hidden",
    "stacked": "hidden",
    "stacked-transposed": "hidden",
    "conv": "hidden",
    "embedding": "embedding",
    "output": "output",
    "vector": "vectors",
    "output-bias": "vectors",
}
_PARTS_BY_LMO = {"sign": "output", "embedding": "embedding", "bias": "vectors"}


@dataclass(frozen=True, eq=False)
class Layer:
    """One parameter of the optimizer: what it is called, its group, and the lmo (with blocks) that is its role."""

    name: str
    parameter: Tensor
    group: int
    lmo: lmos.Lmo
    blocks: int
    layout: Layout | None = None  # of the weights, where they are a DTensor
    part_of: str = "hidden"  # the part of the model it is in: hidden, output, embedding or vectors

    @property
    def part(self) -> Tensor:
        """This process's part of the weights."""
        return local(self.parameter).detach()

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def is_spectral(self) -> bool:
        return self.lmo.numbers.is_polar and self.parameter.numel() > 0


def find_layers(optimizer: Optimizer, model: nn.Module | None) -> list[Layer]:
    """Return every parameter of the optimizer, in the order of the model, else of the groups.

    Raise ValueError for one that cannot be measured.
    """
    known = _roles_in(model) if model is not None else {}
    held = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
    found: list[Layer] = []
    taken: set[str] = set()
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for k, (given, p) in enumerate(zip(names, group["params"], strict=True)):
            in_model, in_role, role, blocks = known.get(id(p), (None, "", lmos.get("by-shape", p.shape), 1))
            name = str(given or in_model or f"{index}.{k}")
            name = name if name not in taken else f"{name} ({index}.{k})"
            _check(name, p)
            if held.get(str(given), p) is not p:
                raise ValueError(
                    f"Monitor: {name} of the optimizer is not the model's: it was replaced after the optimizer was made, "
                    "so training does not reach it; make the optimizer last"
                )
            if isinstance(optimizer, Scion):
                settings, _ = optimizer.settings(group, p)
                role, blocks = settings.lmo, settings.blocks
            taken.add(name)
            part = _part_of(p, str(group.get("name", "")), in_role, role)
            found.append(Layer(name, p, index, role, blocks, _layout(name, p), part))
    if model is not None:
        _check_model(optimizer, model, found)
        order = {id(p): place for place, p in enumerate(model.parameters())}
        found.sort(key=lambda layer: order.get(id(layer.parameter), len(order)))
    return found


def _check_model(optimizer: Optimizer, model: nn.Module, layers: list[Layer]) -> None:
    """Raise ValueError if training does not reach the model: parameters of each that the other does not have."""
    own = {id(p) for p in model.parameters()}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    strange = next((layer.name for layer in layers if id(layer.parameter) not in own), None)
    left = next((name for name, p in model.named_parameters() if p.requires_grad and id(p) not in trained), None)
    if strange is not None and left is not None:
        raise ValueError(
            f"Monitor: the optimizer trains {strange}, which is not in the model, and not the model's {left}: this is "
            "another model, or a layer was replaced after the optimizer was made; make the optimizer last, or pass "
            "the model that it trains"
        )


def _part_of(p: Tensor, group: str, in_model: str, lmo: lmos.Lmo) -> str:
    """The part of the model that a parameter belongs to, by its group's name, the model's modules, or its lmo."""
    if p.ndim <= 1:
        return "vectors"
    known = (_PARTS[role] for role in (group.split("-blocks")[0], in_model) if role in _PARTS)
    return next(known, _PARTS_BY_LMO.get(lmo.name, "hidden"))


def _check(name: str, p: Tensor) -> None:
    if is_lazy(p):
        raise ValueError(f"Monitor: {name} has no shape yet; run the model once before attaching")
    if p.is_complex():
        raise ValueError(f"Monitor: {name} is complex; make its real and imaginary parts two parameters")
    if not p.is_floating_point() or p.layout is not torch.strided:
        raise ValueError(f"Monitor: {name} is {p.dtype}, {p.layout}; only dense floating-point parameters are measured")


def _layout(name: str, p: Tensor) -> Layout | None:
    try:
        return layout_of(p, {})
    except ValueError as error:
        raise ValueError(f"Monitor: {name}: {error}") from None


def _roles_in(model: nn.Module) -> dict[int, tuple[str, str, lmos.Lmo, int]]:
    """id of each parameter -> name, role, lmo, blocks, by the rules of param_groups; an unknown output layer is no error."""
    sites = param_sites(model)
    try:
        outputs = find_outputs(model, sites, None, {})
    except ValueError:
        outputs = {}
    found = {}
    for site in sites:
        if is_lazy(site.parameter):
            continue
        role, _ = role_of(site, {}, outputs, strict=False)
        lmo, least, most = ROLES[role]
        shape = site.parameter.shape
        entry = lmos.get(lmo if least <= len(shape) <= most else "by-shape", shape)
        blocks = row_blocks(site, role, {})[0] if entry.name in BLOCKED else 1
        found[id(site.parameter)] = site.name, role, entry, blocks
    return found
