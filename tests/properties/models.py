"""Random models for the optimizers: named parameters of any shape, dtype, scale and layout, and their gradients."""

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import strategies as st
from recipes import Recipe
from strategies import DTYPES, LAYOUTS, WIDE, Drawn, exponents, laid_out, shapes, tensors
from torch import Tensor, nn


@dataclass(frozen=True)
class Layer:
    """One parameter to make, and its gradients."""

    weight: Drawn
    grad_kind: str
    grad_exponent: int
    layout: str = "contiguous"

    def gradient(self, t: int, dtype: torch.dtype) -> Tensor:
        return Drawn(self.weight.shape, self.grad_kind, self.weight.seed + 7, self.grad_exponent).make(dtype, also=t)


def layers(
    *,
    least: int = 1,
    most: int = 4,
    exponent: st.SearchStrategy[int] = exponents,
    layout: tuple[str, ...] = LAYOUTS[:-1],  # those without gaps
) -> st.SearchStrategy[list[Layer]]:
    kinds = st.sampled_from(["normal", "zeros", "equal", "sparse", "low rank", "mixed", "one"])
    one = st.builds(Layer, tensors(shapes, exponent=exponent), kinds, exponent, st.sampled_from(layout))
    return st.lists(one, min_size=least, max_size=most)


class Model:
    """Parameters in the memory of their layouts; `gaps_untouched` looks at what lies between their elements."""

    def __init__(self, drawn: list[Layer], dtype: torch.dtype, *, contiguous: bool = False):
        self.layers, self.dtype, self.params, self.memory = drawn, dtype, {}, {}
        for k, layer in enumerate(drawn):
            value, memory = laid_out(layer.weight.make(dtype), "contiguous" if contiguous else layer.layout)
            self.params[f"p{k}"], self.memory[f"p{k}"] = nn.Parameter(value), memory

    def set_gradients(self, t: int, factor: float = 1.0) -> None:
        for layer, p in zip(self.layers, self.params.values(), strict=True):
            p.grad = (factor * layer.gradient(t, self.dtype).double()).to(self.dtype)

    def step(self, optimizer: Any, t: int, factor: float = 1.0) -> None:
        self.set_gradients(t, factor)
        optimizer.step()

    def gaps_untouched(self) -> bool:
        gaps = []
        for name, p in self.params.items():
            memory = self.memory[name]
            if memory.numel() > p.numel() and p.numel():
                kept = memory.clone()
                kept[tuple(slice(1, 2 * side + 1, 2) for side in p.shape)] = 7.0
                gaps.append(kept)
        return all(torch.equal(kept, torch.full_like(kept, 7.0)) for kept in gaps)


def with_dtype(of: st.SearchStrategy[Recipe]) -> st.SearchStrategy[tuple[Recipe, torch.dtype]]:
    """Draw an optimizer and the dtype of its parameters. AdamC, whose moments have that dtype, does not get float16."""
    return of.flatmap(
        lambda recipe: st.tuples(st.just(recipe), st.sampled_from(WIDE if recipe.name.startswith("AdamC") else DTYPES))
    )
