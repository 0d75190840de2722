"""What a monitor knows of each parameter, its name and role, and how the norm of a role is measured on the device.

Roles come from the groups' lmo (Scion family), from the model's modules where it is given, else from the shape alone.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadynorm import lmo as lmos
from steadynorm.optim.buckets import MAX_ELEMENTS, stack
from steadynorm.optim.scion import Scion
from steadynorm.roles import BLOCKED, ROLES, find_outputs, places, role_of, row_blocks
from steadynorm.theory import matrix_sides

SPECTRAL = ("spectral", lmos.TRANSPOSED, "conv", "conv-tap")
PEAK = ("sign", "embedding")  # their norm is a multiple of the largest entry
_GOLDEN_ANGLE = 2.399963


@dataclass(frozen=True, eq=False)
class Layer:
    """One parameter of the optimizer: what it is called, its group, and the lmo (with blocks) that is its role."""

    name: str
    parameter: Tensor
    group: int
    lmo: lmos.Lmo
    blocks: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.parameter.shape)

    @property
    def is_spectral(self) -> bool:
        return self.lmo.name in SPECTRAL and self.parameter.numel() > 0


def find_layers(optimizer: Optimizer, model: nn.Module | None) -> list[Layer]:
    """Every parameter of the optimizer, in the order of its groups; ValueError names one that cannot be measured."""
    known = _roles_in(model) if model is not None else {}
    held = {} if model is None else dict(model.named_parameters(remove_duplicate=False))
    found: list[Layer] = []
    taken: set[str] = set()
    for index, group in enumerate(optimizer.param_groups):
        names = group.get("param_names") or [None] * len(group["params"])
        for k, (given, p) in enumerate(zip(names, group["params"], strict=True)):
            in_model, role, blocks = known.get(id(p), (None, lmos.by_shape(p.shape), 1))
            name = str(given or in_model or f"{index}.{k}")
            name = name if name not in taken else f"{name} ({index}.{k})"
            _check(name, p)
            if held.get(str(given), p) is not p:
                raise ValueError(
                    f"Monitor: {name} of the optimizer is not the model's: it was replaced after the optimizer was made, "
                    "so training does not reach it; make the optimizer last"
                )
            if any(hasattr(value, "placements") for value in optimizer.state.get(p, {}).values()):
                raise ValueError(
                    f"Monitor: the state of {name} is sharded (mesh=), which is not measured yet; leave one out"
                )
            if isinstance(optimizer, Scion):
                settings, _ = optimizer.settings(group, p)
                role, blocks = settings.lmo, settings.blocks
            taken.add(name)
            found.append(Layer(name, p, index, role, blocks))
    return found


def _check(name: str, p: Tensor) -> None:
    if is_lazy(p):
        raise ValueError(f"Monitor: {name} has no shape yet; run the model once before attaching")
    if p.is_complex():
        raise ValueError(f"Monitor: {name} is complex; hold real and imaginary part as two parameters")
    if not p.is_floating_point() or p.layout is not torch.strided:
        raise ValueError(f"Monitor: {name} is {p.dtype}, {p.layout}; only dense floating-point parameters are measured")
    if hasattr(p, "placements"):  # a DTensor
        raise ValueError(f"Monitor: {name} is sharded (DTensor), which is not measured; attach to an unsharded model")


def _roles_in(model: nn.Module) -> dict[int, tuple[str, lmos.Lmo, int]]:
    """id of each parameter -> name, lmo, blocks, by the rules of param_groups; an unknown output layer is no error."""
    everything = places(model)
    try:
        outputs = find_outputs(model, everything, None, {})
    except ValueError:
        outputs = {}
    found = {}
    for placed in everything:
        if is_lazy(placed.parameter):
            continue
        role, _ = role_of(placed, {}, outputs, strict=False)
        lmo, least, most = ROLES[role]
        shape = placed.parameter.shape
        entry = lmos.get(lmo) if least <= len(shape) <= most else lmos.by_shape(shape)
        blocks = row_blocks(placed, role, {})[0] if entry.name in BLOCKED else 1
        found[id(placed.parameter)] = placed.name, entry, blocks
    return found


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """(tensors,) l2 norms in fp32, of tensors on one device."""
    dense = [t if t.layout is torch.strided else t.coalesce().values() for t in tensors]
    wide = torch.float64 if any(t.dtype == torch.float64 for t in dense) else torch.float32
    return torch.stack(torch._foreach_norm(dense, 2.0, dtype=wide)).float()


def peak(layer: Layer) -> Tensor:
    """The sign norm d_in max|A|, or max|A| of an embedding, 0-d."""
    low, high = torch.aminmax(layer.parameter.detach())
    largest = torch.maximum(-low, high).float()
    return largest * layer.shape[-1] if layer.lmo.name == "sign" else largest


class PowerIteration:
    """Spectral norms of same-shape layers by one power iteration a call, from the vectors the last call left.

        w = A v,   z = A^T w,   |A|_2 ~ |z| / |w|,   v <- z / |z|

    Reported over sqrt(d_out/d_in), the norm of Table 1. A zero or non-finite matrix keeps its vector.

    >>> p = torch.diag(torch.tensor([3.0, 1.0]))
    >>> power = PowerIteration([Layer("p", p, 0, lmos.get("spectral"), 1)])
    >>> power.warm_up(); round(power().item(), 3)
    3.0
    """

    WARM_UP = 20  # iterations for a new vector, so that the first records are not far too low

    def __init__(self, layers: Sequence[Layer]):
        first = layers[0]
        self.layers = list(layers)
        self.rows, self.columns = matrix_sides(first.lmo.name, first.shape, first.blocks)
        self.matrices = first.parameter.numel() // (self.rows * self.columns)  # of one layer
        self.scale = math.sqrt(self.columns / self.rows)
        if first.lmo.name == "conv-tap":
            self.scale *= math.prod(first.shape[2:])
        p = first.parameter
        self.dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
        # Equidistributed phases: not the global random state, not orthogonal to anything in particular.
        v = torch.arange(1, self.columns + 1, dtype=self.dtype, device=p.device).mul_(_GOLDEN_ANGLE).sin_()
        v = v / torch.linalg.vector_norm(v)
        self.vectors = v.repeat(len(layers) * self.matrices, 1)  # (layers * matrices, d_in)

    @property
    def keys(self) -> list[tuple[Layer, int]]:
        """Layer and number of the matrix in it, of each value returned."""
        return [(layer, k) for layer in self.layers for k in range(self.matrices)]

    def by_layer(self) -> dict[str, Tensor]:
        """The vectors, (matrices, d_in), by name of the layer."""
        parts = self.vectors.view(len(self.layers), self.matrices, self.columns).unbind(0)
        return {layer.name: part.clone() for layer, part in zip(self.layers, parts, strict=True)}

    def check(self, vectors: Mapping[str, Tensor]) -> None:
        """ValueError where the vectors of a layer do not fit."""
        for name, own in self.by_layer().items():
            if name in vectors and vectors[name].shape != own.shape:
                raise ValueError(
                    f"Monitor: the saved power vectors of {name} are {tuple(vectors[name].shape)}, not "
                    f"{tuple(own.shape)}: they are of another model"
                )

    def load(self, vectors: Mapping[str, Tensor]) -> None:
        """Take the vectors of those layers that are named."""
        self.vectors = torch.cat([vectors.get(name, own).to(own) for name, own in self.by_layer().items()])

    def warm_up(self) -> None:
        """Find the leading vectors of the weights as they are."""
        for _ in range(self.WARM_UP):
            self()

    @torch.no_grad()
    def __call__(self) -> Tensor:
        """One iteration; the norms, (layers * matrices,)."""
        on_cpu = self.vectors.device.type == "cpu"
        w, z = self._one_by_one() if on_cpu else self._batched()
        w_norm, z_norm = (torch.linalg.vector_norm(x, dim=-1, keepdim=True) for x in (w, z))
        self.vectors = torch.where(z_norm.isfinite() & (z_norm > 0), z / z_norm, self.vectors)
        return torch.where(w_norm > 0, z_norm / w_norm, z_norm).squeeze(-1) * self.scale

    def _batched(self) -> tuple[Tensor, Tensor]:
        """A v and A^T A v, (layers * matrices, d_out) and (..., d_in), in stacks of bounded size."""
        w, z = [], []
        together = max(1, MAX_ELEMENTS // self.layers[0].parameter.numel())
        for low in range(0, len(self.layers), together):
            a = self._matrices([layer.parameter.detach() for layer in self.layers[low : low + together]])
            w.append(torch.bmm(a, self.vectors.narrow(0, low * self.matrices, len(a)).unsqueeze(-1)))
            z.append(torch.bmm(a.mT, w[-1]))
        return torch.cat(w).squeeze(-1), torch.cat(z).squeeze(-1)

    def _one_by_one(self) -> tuple[Tensor, Tensor]:
        """The same on a CPU, where a batched product with one column is three times slower."""
        w, z = [], []
        matrices = (a for layer in self.layers for a in self._matrices([layer.parameter.detach()]).unbind(0))
        for a, v in zip(matrices, self.vectors.unbind(0), strict=True):
            w.append(torch.mv(a, v))
            z.append(torch.mv(a.t(), w[-1]))
        return torch.stack(w), torch.stack(z)

    def _matrices(self, parameters: list[Tensor]) -> Tensor:
        """(matrices, d_out, d_in) of parameters of this shape."""
        first, x = self.layers[0], stack(parameters).to(self.dtype)
        if first.lmo.name in ("conv-tap", lmos.TRANSPOSED):
            x = lmos._matrices(x, first.lmo.name, first.blocks, 1)
            x = x.mT if first.lmo.name == lmos.TRANSPOSED else x
        return x.reshape(-1, self.rows, self.columns)  # rows of a block, or of a matrix in a stack, follow each other


def power_iterations(layers: Sequence[Layer]) -> list[PowerIteration]:
    """One for each kind of spectral layer."""
    alike: dict[tuple[object, ...], list[Layer]] = {}
    for layer in layers:
        if layer.is_spectral:
            p = layer.parameter
            alike.setdefault((layer.lmo.name, layer.blocks, layer.shape, p.dtype, p.device), []).append(layer)
    return [PowerIteration(some) for some in alike.values()]
