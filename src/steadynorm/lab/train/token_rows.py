"""Measure embedding rows by how often their tokens occur, in models whose embedding is not the output layer as well.

A row gets a gradient only in steps whose batch holds its token. Rows are divided by the chance of that, which follows from
the training text: 1 - (1 - share of the token)^(tokens per step).
"""

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from steadynorm.lab.data.shards import open_shard

CLASSES = {"frequent": (0.9, 1.0), "occasional": (0.1, 0.9), "rare": (0.01, 0.1)}  # chances per step
COLUMN = "row_rms"  # in records, followed by / and the class


def visit_chances(shards: Iterable[Path], vocab: int, tokens_per_step: int) -> Tensor:
    """Return the chance that a step's batch holds each token, (vocab,)."""
    counts = sum((np.bincount(open_shard(path), minlength=vocab) for path in shards), np.zeros(vocab, np.int64))
    return torch.from_numpy(1 - (1 - counts / counts.sum()) ** tokens_per_step)


def row_norms(weight: Tensor, chances: Tensor) -> dict[str, float]:
    """Return the root mean square of the elements of every class of rows; nan for a class without rows.

    Args:
        weight: (vocab, width).
        chances: (vocab,), of a visit per step.

    >>> row_norms(torch.tensor([[3.0, 3.0], [1.0, 1.0]]), torch.tensor([1.0, 0.05]))
    {'row_rms/frequent': 3.0, 'row_rms/occasional': nan, 'row_rms/rare': 1.0}
    """
    mean_squares = weight.detach().double().square().mean(dim=1).cpu()
    return {
        f"{COLUMN}/{name}": float(mean_squares[(chances >= low) & (chances <= high)].mean().sqrt())
        for name, (low, high) in CLASSES.items()
    }
