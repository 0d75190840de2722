"""Norms on the device, of weights that this process has whole or in part.

Of sharded weights each process measures its part, and small sums over the processes make them whole: all processes
must measure together.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadynorm import lmo as lmos
from steadynorm.monitor.layers import Layer
from steadynorm.optim.buckets import MAX_ELEMENTS, stack
from steadynorm.optim.distributed import local_gradient
from steadynorm.optim.layout import Layout
from steadynorm.theory import matrix_sides

_GOLDEN_ANGLE = 2.399963
_SQUARABLE = 1e-14  # norms above it are of elements whose squares are fp32 numbers, or do not matter


def norms(parts: Sequence[Tensor], layouts: Sequence[Layout | None]) -> Tensor:
    """(parts,) l2 norms in fp32, of tensors on one device; each the part that this process has under its layout.

    On a CPU, where looking costs nothing, a norm whose squares do not fit fp32 is taken again in fp64.

    >>> norms([torch.tensor([3.0, 4.0]), torch.zeros(0)], [None, None])
    tensor([5., 0.])
    """
    dense = [t if t.layout is torch.strided else t.coalesce().values() for t in parts]
    wide = torch.float64 if any(t.dtype == torch.float64 for t in dense) else torch.float32
    found = torch.stack(torch._foreach_norm(dense, 2.0, dtype=wide))
    if found.device.type == "cpu" and wide is torch.float32:
        for k, value in enumerate(found.tolist()):
            if not _SQUARABLE < value < math.inf and dense[k].any().tolist():
                found[k] = torch.linalg.vector_norm(dense[k], dtype=torch.float64)
    if any(_is_cut(layout) for layout in layouts):
        found = totals(found.double().square(), layouts).sqrt()
    return found.float()


def totals(values: Tensor, layouts: Sequence[Layout | None]) -> Tensor:
    """(..., parts): each summed over the processes that have a part of it; one sum for each process group."""
    columns = list(values.unbind(-1))
    together: dict[Any, list[int]] = {}
    for k, layout in enumerate(layouts):
        if layout is not None and _is_cut(layout):
            together.setdefault(layout.group, []).append(k)
    for which in together.values():
        layout = layouts[which[0]]
        assert layout is not None
        summed = layout.total(torch.stack([columns[k] for k in which]))
        for k, column in zip(which, summed.unbind(0), strict=True):
            columns[k] = column
    return torch.stack(columns, dim=-1) if together else values


def _is_cut(layout: Layout | None) -> bool:
    return layout is not None and layout.group is not None


def gradient(layer: Layer) -> Tensor:
    """This process's part of the gradient, which there must be."""
    grad = layer.parameter.grad
    assert grad is not None
    return grad if layer.layout is None else local_gradient(layer.parameter, layer.layout)


def peak(layer: Layer) -> Tensor:
    """The sign norm d_in max|A|, or max|A| of an embedding, 0-d."""
    part = layer.part
    low, high = torch.aminmax(part) if part.numel() else (part.new_zeros(()), part.new_zeros(()))
    largest = torch.maximum(-low, high).float()
    if layer.layout is not None:
        largest = layer.layout.largest(largest)
    return largest * layer.shape[-1] if layer.lmo.name == "sign" else largest


class PowerIteration:
    """Spectral norms of same-shape layers by one power iteration a call, from the vectors the last call left.

        w = A v,   z = A^T w / |w|,   |A|_2 ~ |z|,   v <- z / |z|

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
        # Else sharded weights are gathered, a layer at a time.
        self.by_rows = (
            first.layout is not None and first.layout.keeps_rows_whole and first.lmo.name in ("spectral", "conv")
        )
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
        if self.by_rows:
            z = self._by_rows()
        else:
            z = self._one_by_one() if self.vectors.device.type == "cpu" else self._batched()
        z_norm = _length(z)
        self.vectors = torch.where(z_norm.isfinite() & (z_norm > 0), z / z_norm, self.vectors)
        return z_norm.squeeze(-1) * self.scale

    def _batched(self) -> Tensor:
        """z, (layers * matrices, d_in), in stacks of bounded size."""
        z = []
        together = max(1, MAX_ELEMENTS // self.layers[0].parameter.numel())
        for low in range(0, len(self.layers), together):
            a = self._matrices([_whole(layer) for layer in self.layers[low : low + together]])
            w = torch.bmm(a, self.vectors.narrow(0, low * self.matrices, len(a)).unsqueeze(-1))
            z.append(torch.bmm(a.mT, _unit(w.squeeze(-1)).unsqueeze(-1)).squeeze(-1))
        return torch.cat(z)

    def _one_by_one(self) -> Tensor:
        """The same on a CPU, where a batched product with one column is three times slower."""
        z = []
        matrices = (a for layer in self.layers for a in self._matrices([_whole(layer)]).unbind(0))
        for a, v in zip(matrices, self.vectors.unbind(0), strict=True):
            z.append(torch.mv(a.t(), _unit(torch.mv(a, v))))
        return torch.stack(z)

    def _by_rows(self) -> Tensor:
        """The same where this process has some rows of each: |w|^2 and A^T w are sums over rows, in fp64."""
        layout = self.layers[0].layout
        assert layout is not None
        sums = self.vectors.new_zeros(len(self.layers), self.matrices, self.columns + 1, dtype=torch.float64)
        vectors = self.vectors.view(len(self.layers), self.matrices, self.columns)
        first = layout.mine.start[0] * (math.prod(layout.whole.size[1:]) // self.columns)
        for layer, own, into in zip(self.layers, vectors.unbind(0), sums.unbind(0), strict=True):
            rows, at = layer.part.to(self.dtype).reshape(-1, self.columns), 0
            while at < len(rows):
                k = (first + at) // self.rows  # the matrix these rows are of
                end = min(len(rows), (k + 1) * self.rows - first)
                w = torch.mv(rows[at:end], own[k])
                size = _length(w).double()
                into[k, :-1], into[k, -1] = torch.mv(rows[at:end].t(), _unit(w)) * size, size.square().squeeze(-1)
                at = end
        summed = layout.total(sums).flatten(0, 1)
        size = summed[:, -1:].sqrt()
        return torch.where(size == 0, 0.0, summed[:, :-1] / size).to(self.dtype)

    def _matrices(self, parameters: list[Tensor]) -> Tensor:
        """(matrices, d_out, d_in) of parameters of this shape."""
        first, x = self.layers[0], stack(parameters).to(self.dtype)
        if first.lmo.name in ("conv-tap", lmos.TRANSPOSED):
            x = lmos._matrices(x, first.lmo.name, first.blocks, 1)
            x = x.mT if first.lmo.name == lmos.TRANSPOSED else x
        return x.reshape(-1, self.rows, self.columns)  # rows of a block, or of a matrix in a stack, follow each other


def _length(x: Tensor) -> Tensor:
    """(..., 1): l2 norm of vectors, summed in fp64 where there is one, so that no square overflows or is lost."""
    wide = x.dtype if x.device.type == "mps" else torch.float64
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=wide).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """Vectors of length 1; zero stays zero."""
    return x / _length(x).clamp(min=torch.finfo(x.dtype).tiny)


def power_iterations(layers: Sequence[Layer]) -> list[PowerIteration]:
    """One for each kind of spectral layer."""
    alike: dict[tuple[object, ...], list[Layer]] = {}
    for layer in layers:
        if layer.is_spectral:
            p = layer.parameter
            key = (layer.lmo.name, layer.blocks, layer.shape, layer.layout, p.dtype, p.device)
            alike.setdefault(key, []).append(layer)
    return [PowerIteration(some) for some in alike.values()]


def _whole(layer: Layer) -> Tensor:
    p: Any = layer.parameter.detach()
    return p if layer.layout is None else p.full_tensor()
