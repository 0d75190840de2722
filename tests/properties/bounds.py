"""Tolerances of updates against their formulas, by polar method and by dtype."""

import torch
from strategies import Drawn
from torch import Tensor

EPS = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 4e-3}
POLAR_BOUND = {"svd": 1.0, "express": 1.11, "newton-schulz": 1.21}  # largest singular value of what comes out
ROUNDED = {torch.float64: 1e-9, torch.float32: 0.06, torch.bfloat16: 0.06, torch.float16: 0.06}  # and bf16 adds
SHARE = {"svd": 1.0, "express": 0.85, "newton-schulz": 0.65}  # of the dual norm that <x, u> reaches
SHARE_OF_ONE = (
    0.5  # of one large direction alone in the Gram form, where bf16 rounds all of the diagonal alike: 0.56 seen
)
LEAST = {
    "svd": 1.0,
    "express": 0.78,
    "newton-schulz": 0.65,
}  # singular value, where x has none below 1/50 of its largest


def full_rank(shape: tuple[int, ...], seed: int) -> Tensor:
    return Drawn(shape, "normal", seed).make()


def conditioned(shape: tuple[int, ...], seed: int) -> Tensor:
    """Return whether no singular value is below 1/50 of the largest."""
    u, s, vh = torch.linalg.svd(full_rank(shape, seed), full_matrices=False)
    return (u * s.clamp(min=0.02 * s.max().item()).unsqueeze(-2)) @ vh
