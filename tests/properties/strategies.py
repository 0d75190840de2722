"""Random shapes, values, scales and layouts of tensors, for all properties.

Tensors come from a seed and a few choices: as quick to make as torch.randn, and still with the cases that numbers drawn one
by one would have (zeros, equal entries, missing rank, one entry, mixed magnitudes).
"""

import math
from dataclasses import dataclass

import torch
from hypothesis import strategies as st
from torch import Tensor

from steadynorm.theory.updates import UPDATES

DTYPES = (torch.float32, torch.bfloat16, torch.float64, torch.float16)
WIDE = DTYPES[:3]  # those with exponents to spare
FP16_EXPONENTS = (-6, 3)  # what float16 has room for, of ten
KINDS = ("normal", "normal", "normal", "zeros", "equal", "sparse", "low rank", "mixed", "one")
LAYOUTS = ("contiguous", "transposed", "channels last", "strided")

side = st.sampled_from([1, 2, 3, 4, 5, 7, 8, 13, 16])
odd = st.integers(1, 9).map(lambda k: 2 * k + 1)
vectors = st.one_of(st.just(()), st.tuples(st.one_of(side, st.just(130))))
matrices = st.one_of(st.tuples(side, side), st.tuples(st.just(1), odd), st.tuples(odd, st.just(1)), st.just((40, 72)))
stacks = st.tuples(st.integers(1, 4), side, side)
kernels = st.tuples(st.integers(1, 6), st.integers(1, 4), st.integers(1, 3), st.integers(1, 3))
# Sizes at which the code changes its way: the Gram form (192 rows, sides 1:1.5), symmetric products by blocks (320 rows).
large = st.sampled_from([(192, 288), (288, 192), (384, 192), (320, 320), (640, 128), (321, 483), (2, 192, 288)])
empties = st.sampled_from([(0,), (0, 3), (3, 0), (2, 0, 3)])
shapes = st.one_of(vectors, matrices, stacks, kernels, empties)
seeds = st.integers(0, 2**31)
exponents = st.one_of(st.just(0), st.integers(-30, 30))  # of ten
powers = st.integers(-80, 80)  # of two: exact
dtypes = st.sampled_from(DTYPES)
wide = st.sampled_from(WIDE)


def values(shape: tuple[int, ...], kind: str, seed: int) -> Tensor:
    """Return fp64 entries of size about 1 or less."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    if kind == "zeros":
        return torch.zeros_like(x)
    if kind == "equal":
        return torch.full_like(x, -0.5)
    if kind == "sparse":
        return x * (torch.rand(shape, generator=generator) < 0.3)
    if kind == "mixed":
        return x * 10.0 ** -torch.randint(0, 7, shape, generator=generator)
    if kind == "low rank" and x.ndim >= 2 and x.numel():
        return x[..., :1] @ x[..., :1, :] if x.ndim == 2 else x[:1].expand(shape).clone()
    if kind == "one" and x.numel():
        single = torch.zeros_like(x)
        single.view(-1)[seed % x.numel()] = 1.0
        return single
    return x


@dataclass(frozen=True)
class Drawn:
    """A tensor to make; it prints as what it is, so that a failing example can be read."""

    shape: tuple[int, ...]
    kind: str
    seed: int
    exponent: int = 0

    def make(self, dtype: torch.dtype = torch.float64, *, also: int = 0) -> Tensor:
        """Make the tensor, or with `also` another one of the same kind for every number."""
        low, high = FP16_EXPONENTS if dtype == torch.float16 else (-300, 300)
        exponent = min(max(self.exponent, low), high)
        return (values(self.shape, self.kind, self.seed + also) * 10.0**exponent).to(dtype)


def tensors(
    of: st.SearchStrategy[tuple[int, ...]], *, exponent: st.SearchStrategy[int] = exponents
) -> st.SearchStrategy:
    return st.builds(Drawn, of, st.sampled_from(KINDS), seeds, exponent)


def laid_out(x: Tensor, layout: str) -> tuple[Tensor, Tensor]:
    """Return x's values in another memory layout, and all the memory it lies in (a strided view leaves gaps)."""
    if layout == "transposed" and x.ndim >= 2:
        base = x.mT.contiguous()
        return base.mT, base
    if layout == "strided" and x.ndim >= 1:
        base = torch.full([2 * side + 1 for side in x.shape], 7.0, dtype=x.dtype)
        view = base[tuple(slice(1, 2 * side + 1, 2) for side in x.shape)]
        view.copy_(x)
        return view, base
    if layout == "channels last" and x.ndim == 4:
        x = x.contiguous(memory_format=torch.channels_last)
    return x, x


def shapes_for(lmo: str) -> st.SearchStrategy[tuple[int, ...]]:
    """Draw shapes that an lmo takes."""
    if lmo == "bias":
        return st.one_of(vectors, matrices)
    return kernels if UPDATES[lmo].view.least_ndim > 2 else st.one_of(matrices, stacks)


def orthogonal(n: int, seed: int) -> Tensor:
    """Return a random rotation or reflection in fp64."""
    generator = torch.Generator().manual_seed(seed)
    return torch.linalg.qr(torch.randn(n, n, generator=generator, dtype=torch.float64)).Q


def log_floats(low: float, high: float) -> st.SearchStrategy[float]:
    """Draw floats spread over orders of magnitude."""
    return st.floats(math.log(low), math.log(high)).map(lambda x: min(max(math.exp(x), low), high))
