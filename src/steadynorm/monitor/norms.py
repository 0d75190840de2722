"""Norms on the device, of weights that this process holds entirely or in part.

Each process measures its part of sharded weights, and small sums over the processes complete the result, so all
processes must measure together.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from steadynorm.lengths import l2_lengths
from steadynorm.machine import widest_dtype
from steadynorm.monitor.layers import Layer
from steadynorm.optim.sharding.layout import Layout, local_gradient

_SQUARABLE = 1e-14  # above it, the squares of all elements that matter are fp32 numbers


def l2_norms(parts: Sequence[Tensor], layouts: Sequence[Layout | None]) -> Tensor:
    """Return the l2 norms (parts,) in fp32 of tensors on one device, each this process's part under its layout.

    On a CPU, where reading a value does not synchronise, a norm whose squares do not fit fp32 is computed in fp64.

    >>> l2_norms([torch.tensor([3.0, 4.0]), torch.zeros(0)], [None, None])
    tensor([5., 0.])
    """
    dense = [t if t.layout is torch.strided else t.coalesce().values() for t in parts]
    wide = torch.float64 if any(t.dtype == torch.float64 for t in dense) else torch.float32
    lengths = torch.stack(l2_lengths(dense, wide))
    if lengths.device.type == "cpu" and wide is torch.float32:
        for k, value in enumerate(lengths.tolist()):
            if not _SQUARABLE < value < math.inf and dense[k].any().tolist():
                lengths[k] = torch.linalg.vector_norm(dense[k], dtype=torch.float64)
    if any(_is_cut(layout) for layout in layouts):
        lengths = totals(lengths.to(widest_dtype(lengths.device)).square(), layouts).sqrt()
    return lengths.float()


def totals(values: Tensor, layouts: Sequence[Layout | None]) -> Tensor:
    """Return values (..., parts), each summed over the processes that hold a part of it, with one sum per group."""
    columns = list(values.unbind(-1))
    together: dict[Any, list[int]] = {}
    for k, layout in enumerate(layouts):
        if layout is not None and _is_cut(layout):
            together.setdefault(layout.group, []).append(k)
    for which in together.values():
        layout = layouts[which[0]]
        assert layout is not None
        summed = layout.sum_over_shards(torch.stack([columns[k] for k in which]))
        for k, column in zip(which, summed.unbind(0), strict=True):
            columns[k] = column
    return torch.stack(columns, dim=-1) if together else values


def _is_cut(layout: Layout | None) -> bool:
    return layout is not None and layout.group is not None


def gradient(layer: Layer) -> Tensor:
    """Return this process's part of the gradient, which must exist."""
    grad = layer.parameter.grad
    assert grad is not None
    return grad if layer.layout is None else local_gradient(layer.parameter, layer.layout)


def max_entry_norm(layer: Layer) -> Tensor:
    """Return the sign norm d_in max|A|, or max|A| of an embedding, as a 0-d tensor."""
    part = layer.local_weights
    low, high = torch.aminmax(part) if part.numel() else (part.new_zeros(()), part.new_zeros(()))
    largest = torch.maximum(-low, high).float()
    if layer.layout is not None:
        largest = layer.layout.max_over_shards(largest)
    return largest * layer.shape[-1] if layer.lmo.name == "sign" else largest
