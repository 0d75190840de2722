"""The weight norm by role: the roles' labels, and norms by role for records that have none."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from steadynorm.records.schema import LAYER_QUANTITIES, Run

# In the order in which they are shown; the theory's assumption concerns the first.
ROLE_LABELS: Mapping[str, str] = {
    "hidden": "hidden matrices",
    "output": "output layer",
    "embedding": "embeddings",
    "vectors": "vectors",
    "other": "other parameters",  # of records without roles
}
# The quantities that are also recorded by role -> what records call them in a layer.
SPLIT: Mapping[str, str] = {
    LAYER_QUANTITIES[quantity]: quantity for quantity in ("norm", "target", "forecast", "forecast_measured")
}


def natural(name: str) -> list[tuple[int, str]]:
    """Return a key that sorts numbers in names as numbers.

    >>> sorted(["h.10.fc", "h.2.fc", "embed"], key=natural)
    ['embed', 'h.2.fc', 'h.10.fc']
    """
    return [(int(part or -1), "") if k % 2 else (-1, part) for k, part in enumerate(re.split(r"(\d+)", name))]


def layer_order(runs: Sequence[Run]) -> list[str]:
    """Return the layers of all runs in one order, so that their rows line up.

    It is the order of the records, which is the model's. If runs disagree, as those of earlier versions may (they follow
    the optimizer's groups), layers are sorted by name.
    """
    order: list[str] = list(dict.fromkeys(name for run in runs for name in run.layers))
    place = {name: k for k, name in enumerate(order)}
    agree = all([place[name] for name in run.layers] == sorted(place[name] for name in run.layers) for run in runs)
    return order if agree else sorted(order, key=natural)


def split_norms(run: Run) -> Run:
    """Return the run with "weight_norm/hidden" and so on, computed from its layers if the records have none.

    Earlier versions recorded only the norm of all parameters and of each layer. Hidden matrices are then the layers that
    have a spectral norm.

    >>> layers = {"fc": {"norm": np.array([3.0]), "spectral": np.array([1.0])}, "bias": {"norm": np.array([4.0])}}
    >>> run = Run("old", {}, "", None, np.array([1]), {"weight_norm": np.array([5.0])}, layers)
    >>> {key: values.tolist() for key, values in split_norms(run).columns.items()}
    {'weight_norm': [5.0], 'weight_norm/hidden': [3.0], 'weight_norm/other': [4.0]}
    """
    if not run.layers or any(key.startswith("weight_norm/") for key in run.columns):
        return run
    by_role: dict[str, list[Mapping[str, np.ndarray]]] = {"hidden": [], "other": []}
    for layer in run.layers.values():
        by_role["hidden" if np.isfinite(layer.get("spectral", np.nan)).any() else "other"].append(layer)
    columns = dict(run.columns)
    for role, layers in by_role.items() if all(by_role.values()) else ():
        for key, quantity in SPLIT.items():
            if all(quantity in layer for layer in layers):
                columns[f"{key}/{role}"] = np.sqrt(sum(layer[quantity] ** 2 for layer in layers))
    return replace(run, columns=columns)
