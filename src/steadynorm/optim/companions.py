"""Chunks that run together on an accelerator, because their matrices can share a polar iteration.

A bucket has parameters of one shape. Matrices of one size occur in several: the three blocks of a fused 2304 x 768 matrix
are 768 x 768, as is the output projection beside it. One iteration for all of them launches no more kernels than for one
bucket, and works on larger batches. A CPU, which takes a few matrices at a time anyway, shares nothing.
"""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from steadynorm import machine

if TYPE_CHECKING:
    from steadynorm.optim.buckets import Chunk


def find_companions(chunks: Sequence["Chunk"]) -> list[list["Chunk"]]:
    """Return which chunks run together: those that have a kind of matrices in common, as far as they fit the budget."""
    groups: list[tuple[frozenset[Any], list[Chunk]]] = []
    for chunk in chunks:
        kinds = _kinds(chunk)
        for common, group in groups if kinds else ():
            if common & kinds and sum(map(_budget_share, (*group, chunk))) <= 1:
                group.append(chunk)
                break
        else:
            groups.append((kinds, [chunk]))
    return [group for _, group in groups]


def _kinds(chunk: "Chunk") -> frozenset[Any]:
    """Return the kinds of matrices for which a chunk can share an iteration; none on a CPU, or where ranks take part."""
    bucket, grad = chunk.step.bucket, chunk.step.grads[0]
    rule, is_whole = bucket.arithmetic.split_rule, bucket.shard is None and chunk.cuts == [None]
    if rule is None or rule.kinds is None or not is_whole or torch.compiler.is_compiling():
        return frozenset()
    if not machine.is_accelerator(grad.device):
        return frozenset()
    return frozenset((grad.device, grad.dtype, kind) for kind in rule.kinds(bucket.shape, bucket.settings))


def _budget_share(chunk: "Chunk") -> float:
    """Return how much of the budget a chunk takes."""
    count = chunk.which.stop - chunk.which.start
    return count * math.prod(chunk.step.bucket.shape) / chunk.step.bucket.chunk_elements
