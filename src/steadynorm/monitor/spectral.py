"""Spectral norms on the device, each from the vector that the last record left, without waiting for a result.

Rayleigh-Ritz on the Krylov space of A^T A. With V an orthonormal basis of span{v, (A^T A) v, ..., (A^T A)^(k-1) v}
and x the leading eigenvector of the k x k matrix T = V^T A^T A V:

    |A|_2 ~ |A^T A V x| / sqrt(x^T T x),      v <- A^T A V x / |A^T A V x|

With k = 1 this is one power iteration. The same k products with A leave a power iteration several percent low where the
singular values crowd at the top; the Krylov space stayed within 1 % wherever it was measured (`products_per_record`).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from steadynorm import views
from steadynorm.machine import exact_dtype, widest_dtype
from steadynorm.monitor.layers import Layer

_GOLDEN_ANGLE = 2.399963
_STACK_ELEMENTS = 1 << 22  # of a stack of layers: 16 MiB in fp32
_SQUARINGS = 10  # T^1024 is, to 0.1 % of the norm, the projector onto its leading eigenvectors

# v (n, d_in) -> A^T w / |w| (n, d_in) and |w| (n, 1), where w = A v
Product = Callable[[Tensor], tuple[Tensor, Tensor]]


def products_per_record(every: int) -> int:
    """Return k, the products with A^T A that keep a record within 1 % if the last one was `every` steps ago.

    Chosen by measuring: random gradients on three shapes at lr 0.01 to 0.1, and a small network at lr 0.02 and 0.05. The
    worst record of all was 0.95 % low, at lr 0.1, where half of the weights is new after 9 steps.

    >>> [products_per_record(every) for every in (1, 2, 10, 100)]
    [8, 16, 16, 16]
    """
    return min(16, 8 * every)


def estimate_spectral_norm(product: Product, v: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return |A|_2, (n,), and the vectors to continue from, (n, d_in), after `count` products with A^T A.

    >>> a = torch.diag(torch.tensor([3.0, 2.0, 1.0]))
    >>> def product(v):
    ...     w = v @ a.T
    ...     return w @ a / _length(w), _length(w)
    >>> norm, _ = estimate_spectral_norm(product, torch.ones(1, 3) / 3**0.5, 3)
    >>> round(norm.item(), 4)
    3.0
    """
    count = min(count, v.shape[-1])
    basis, images = v.unsqueeze(1), []  # V and A^T A V / scale^2, (n, k, d_in)
    scale, q = v.new_ones(len(v), 1), v
    for k in range(count):
        z, size = product(q)
        scale = size.clamp(min=torch.finfo(size.dtype).tiny) if k == 0 else scale  # no square of it is taken
        images.append((z / scale) * (size / scale))
        if k + 1 < count:
            q = _orthonormal(images[k], basis)
            basis = torch.cat([basis, q.unsqueeze(1)], dim=1)
    images = torch.stack(images, dim=1)
    t = torch.bmm(basis, images.mT).to(widest_dtype(v.device))
    t = (t + t.mT) / 2
    x = _leading_eigenvector(t)
    y = torch.bmm(images.mT, x.to(v.dtype)).squeeze(-1)
    rayleigh = torch.bmm(x.mT, torch.bmm(t, x)).squeeze(-1).to(v.dtype)
    norm = _length(y)
    vectors = torch.where(norm.isfinite() & (norm > 0), y / norm, v)  # a zero or non-finite matrix keeps its vector
    spectral_norm = scale * norm / rayleigh.clamp(min=torch.finfo(v.dtype).tiny).sqrt()
    return spectral_norm.squeeze(-1), vectors


def _orthonormal(z: Tensor, basis: Tensor) -> Tensor:
    """Return the part of z, (n, d), outside span(basis), (n, k, d), at length 1; 0 where there is none.

    Gram-Schmidt, twice. If the second pass still removes most of it, z was in the span, and what is left is rounding.
    """
    r = z
    for _ in range(2):
        r = _unit(r)
        r = r - torch.bmm(torch.bmm(r.unsqueeze(1), basis.mT), basis).squeeze(1)
    size = _length(r)
    return torch.where(size > 0.5, r / size, torch.where(size.isnan(), size, 0.0))


def _leading_eigenvector(t: Tensor) -> Tensor:
    """Return (n, k, 1) of symmetric positive (n, k, k), by repeated squaring: eigh would wait for the device."""
    tiny = torch.finfo(t.dtype).tiny
    for _ in range(_SQUARINGS):
        t = t / t.diagonal(dim1=-2, dim2=-1).sum(-1).view(-1, 1, 1).clamp(min=tiny)
        t = torch.bmm(t, t)
    largest = t.diagonal(dim1=-2, dim2=-1).argmax(-1)
    return _unit(t.gather(2, largest.view(-1, 1, 1).expand(-1, t.shape[1], 1)).squeeze(-1)).unsqueeze(-1)


class SpectralNorms:
    """Spectral norms of same-shape layers over sqrt(d_out/d_in), the norm of Table 1; of one run of equal blocks of them.

    >>> from steadynorm.lmo import LMOS
    >>> p = torch.diag(torch.tensor([3.0, 1.0]))
    >>> norms = SpectralNorms([Layer("p", p, 0, LMOS["spectral"], views.BlockLayout())])
    >>> _ = norms(norms.WARM_UP); round(norms(1).item(), 3)
    3.0
    """

    WARM_UP = 20  # products for a new vector, so that the first records are right

    def __init__(self, layers: Sequence[Layer], index: int = 0):
        """Make vectors to start from, for the run of equal blocks with this index of layers that are alike."""
        first, view = layers[0], layers[0].lmo.view
        self.layers = list(layers)
        runs = view.runs(first.shape, first.blocks)
        self.run, self.index, self.is_only = runs[index], index, len(runs) == 1
        self.first_matrix = sum(run.matrices for run in runs[:index])
        self.rows, self.columns, self.matrices = self.run.d_out, self.run.d_in, self.run.matrices  # of one layer
        self.scale = math.sqrt(self.columns / self.rows) * self.run.divisor
        # Else sharded weights are gathered, a layer at a time.
        row = first.shape[-1] if self.is_only and view.is_stack(first.shape) else math.prod(first.shape[1:])
        has_rows = view in (views.MATRIX, views.FLATTENED) and self.columns == row
        self.by_rows = first.layout is not None and first.layout.keeps_rows_whole and has_rows
        p = first.parameter
        self.dtype = exact_dtype(p)
        # Equidistributed phases: not the global random state, not orthogonal to anything in particular.
        v = torch.arange(1, self.columns + 1, dtype=self.dtype, device=p.device).mul_(_GOLDEN_ANGLE).sin_()
        v = v / torch.linalg.vector_norm(v)
        self.vectors = v.repeat(len(layers) * self.matrices, 1)  # (layers * matrices, d_in)

    @property
    def keys(self) -> list[tuple[Layer, int]]:
        """The layer, and the index of the matrix in it, for each value returned."""
        return [(layer, self.first_matrix + k) for layer in self.layers for k in range(self.matrices)]

    def by_layer(self) -> dict[str, Tensor]:
        """Return the vectors, (matrices, d_in), by layer name; by that and a number where blocks differ in size."""
        parts = self.vectors.view(len(self.layers), self.matrices, self.columns).unbind(0)
        names = [layer.name if self.is_only else f"{layer.name}, blocks {self.index}" for layer in self.layers]
        return {name: part.clone() for name, part in zip(names, parts, strict=True)}

    def load(self, vectors: Mapping[str, Tensor]) -> None:
        """Restore the vectors of the layers named."""
        self.vectors = torch.cat([vectors.get(name, part).to(part) for name, part in self.by_layer().items()])

    @torch.no_grad()
    def __call__(self, count: int) -> Tensor:
        """Return the norms, (layers * matrices,), after `count` products with each A^T A."""
        if self.by_rows:
            norms, self.vectors = estimate_spectral_norm(self._rows_product, self.vectors, count)
            return norms * self.scale
        norms, vectors = [], []
        together = max(1, _STACK_ELEMENTS // self.layers[0].parameter.numel())  # layers, so that stacks are bounded
        for low in range(0, len(self.layers), together):
            layers = self.layers[low : low + together]
            before = self.vectors.narrow(0, low * self.matrices, len(layers) * self.matrices)
            norm, after = estimate_spectral_norm(self._product(layers), before, count)
            norms.append(norm)
            vectors.append(after)
        self.vectors = torch.cat(vectors)
        return torch.cat(norms) * self.scale

    def _product(self, layers: Sequence[Layer]) -> Product:
        """Return the product for matrices that this process holds entirely; on a CPU one by one, three times faster."""
        if self.vectors.device.type == "cpu":
            parts = [a for layer in layers for a in self._matrices([_whole(layer)]).unbind(0)]

            def one_by_one(v: Tensor) -> tuple[Tensor, Tensor]:
                w = torch.stack([torch.mv(a, x) for a, x in zip(parts, v.unbind(0), strict=True)])
                z = [torch.mv(a.t(), x) for a, x in zip(parts, _unit(w).unbind(0), strict=True)]
                return torch.stack(z), _length(w)

            return one_by_one
        a = self._matrices([_whole(layer) for layer in layers])

        def batched(v: Tensor) -> tuple[Tensor, Tensor]:
            w = torch.bmm(a, v.unsqueeze(-1)).squeeze(-1)
            return torch.bmm(a.mT, _unit(w).unsqueeze(-1)).squeeze(-1), _length(w)

        return batched

    def _rows_product(self, v: Tensor) -> tuple[Tensor, Tensor]:
        """Multiply where this process holds some rows of each matrix: |w|^2 and A^T w are sums over rows, in fp64."""
        layout = self.layers[0].layout
        assert layout is not None
        sums = v.new_zeros(len(self.layers), self.matrices, self.columns + 1, dtype=widest_dtype(v.device))
        vectors = v.view(len(self.layers), self.matrices, self.columns)
        first = layout.mine.start[0] * (math.prod(layout.whole.size[1:]) // self.columns) - self.run.start
        for layer, layer_vectors, into in zip(self.layers, vectors.unbind(0), sums.unbind(0), strict=True):
            rows, at = layer.local_weights.to(self.dtype).reshape(-1, self.columns), max(0, -first)
            last = min(len(rows), self.matrices * self.rows - first)
            while at < last:
                k = (first + at) // self.rows  # the matrix that these rows belong to
                end = min(last, (k + 1) * self.rows - first)
                w = torch.mv(rows[at:end], layer_vectors[k])
                size = _length(w).to(sums.dtype)
                into[k, :-1], into[k, -1] = torch.mv(rows[at:end].t(), _unit(w)) * size, size.square().squeeze(-1)
                at = end
        summed = layout.sum_over_shards(sums).flatten(0, 1)
        size = summed[:, -1:].sqrt()
        return torch.where(size == 0, 0.0, summed[:, :-1] / size).to(self.dtype), size.to(self.dtype)

    def _matrices(self, parameters: list[Tensor]) -> Tensor:
        """Return parameters of this shape as (matrices, d_out, d_in)."""
        first, alone = self.layers[0], len(parameters) == 1  # a single parameter is viewed, not copied
        x = (parameters[0].unsqueeze(0) if alone else torch.stack(parameters)).to(self.dtype)
        if not self.is_only:
            dim = first.lmo.view.block_dims[first.blocks.side] % len(first.shape) + 1
            x = x.narrow(dim, self.run.start, self.run.length)
        x = first.lmo.view.to_matrices(x, self.run.blocks, first.blocks.side, 1)
        return (x.mT if first.lmo.view.is_transposed else x).reshape(-1, self.rows, self.columns)


def _length(x: Tensor) -> Tensor:
    """Return the l2 norm of vectors, (..., 1), summed in fp64 if available, so that no square over- or underflows."""
    return torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=widest_dtype(x.device)).to(x.dtype)


def _unit(x: Tensor) -> Tensor:
    """Scale vectors to length 1; zero stays zero."""
    return x / _length(x).clamp(min=torch.finfo(x.dtype).tiny)


def spectral_norms(layers: Sequence[Layer]) -> list[SpectralNorms]:
    """Return one `SpectralNorms` per kind of spectral layer, and per run of blocks in it."""
    alike: dict[tuple[object, ...], list[Layer]] = {}
    for layer in layers:
        if layer.is_spectral:
            p = layer.parameter
            key = (layer.lmo.name, layer.blocks, layer.shape, layer.layout, p.dtype, p.device)
            alike.setdefault(key, []).append(layer)
    norms = []
    for members in alike.values():
        runs = members[0].lmo.view.runs(members[0].shape, members[0].blocks)
        norms += [SpectralNorms(members, index) for index in range(len(runs))]
    return norms


def _whole(layer: Layer) -> Tensor:
    p: Any = layer.parameter.detach()
    return p if layer.layout is None else p.full_tensor()
