"""The weight norm by role of the parameters: what records call the roles, and how records without them are split."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType

import numpy as np

from steadynorm.records.schema import Run

# In the order in which they are shown; the theory's assumption is about the first.
ROLE_LABELS: Mapping[str, str] = MappingProxyType(
    {
        "hidden": "hidden matrices",
        "output": "output layer",
        "embedding": "embeddings",
        "vectors": "vectors",
        "other": "other parameters",  # of records that do not say
    }
)
SPLIT = ("weight_norm", "forecast_norm")


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in names as numbers.

    >>> sorted(["h.10.fc", "h.2.fc", "embed"], key=natural)
    ['embed', 'h.2.fc', 'h.10.fc']
    """
    return [(int(part or -1), "") if k % 2 else (-1, part) for k, part in enumerate(re.split(r"(\d+)", name))]


def layer_order(runs: Sequence[Run]) -> list[str]:
    """Return the layers of all runs in one order, so that their rows line up: the records', which is the model's.

    Where runs disagree, as those of earlier versions did (in the order of the optimizer's groups), by name.
    """
    order: list[str] = list(dict.fromkeys(name for run in runs for name in run.layers))
    place = {name: k for k, name in enumerate(order)}
    agree = all([place[name] for name in run.layers] == sorted(place[name] for name in run.layers) for run in runs)
    return order if agree else sorted(order, key=natural)


def split_norms(run: Run) -> Run:
    """Return the run with "weight_norm/hidden" and so on, worked out from its layers where the records have none.

    Earlier versions recorded the norm of all parameters and each layer's. There, hidden matrices are the layers that
    have a spectral norm.

    >>> layers = {"fc": {"norm": np.array([3.0]), "spectral": np.array([1.0])}, "bias": {"norm": np.array([4.0])}}
    >>> run = Run("old", {}, "", None, np.array([1]), {"weight_norm": np.array([5.0])}, layers)
    >>> {key: values.tolist() for key, values in split_norms(run).columns.items()}
    {'weight_norm': [5.0], 'weight_norm/hidden': [3.0], 'weight_norm/other': [4.0]}
    """
    if not run.layers or any(key.startswith("weight_norm/") for key in run.columns):
        return run
    hidden = [each for each in run.layers.values() if np.isfinite(each.get("spectral", np.nan)).any()]
    other = [each for each in run.layers.values() if not np.isfinite(each.get("spectral", np.nan)).any()]
    columns = dict(run.columns)
    for role, layers in (("hidden", hidden), ("other", other)) if hidden and other else ():
        for key, quantity in zip(SPLIT, ("norm", "forecast"), strict=True):
            if all(quantity in each for each in layers):
                columns[f"{key}/{role}"] = np.sqrt(sum(each[quantity] ** 2 for each in layers))
    return replace(run, columns=columns)
