"""The contents of a run's records: file names and versions, the known quantities, and a run as read."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

SCHEMA = "steadynorm-run"
VERSION = 1
FILE = "records.jsonl"


Record = dict[str, Any]  # one step


class Records(list[Record]):
    """Records as `Monitor.measure` returns them."""

    resumed: bool = False  # whether the monitor continues a run that another one began
    source: object = None  # the same object for all records of one monitor


class RecordError(ValueError):
    """Raised when a record file, or what should be written into one, is malformed."""


@dataclass(frozen=True)
class Quantity:
    """The meaning of a known key of a record."""

    label: str  # how it is shown
    unit: str  # "" for a pure number
    description: str


QUANTITIES: Mapping[str, Quantity] = {
    "loss": Quantity("Training loss", "nats", "Loss of the step's batch, before the update."),
    "val_loss": Quantity("Validation loss", "nats", "Loss on held-out data."),
    "val_accuracy": Quantity("Validation accuracy", "", "Share of held-out examples classified correctly."),
    "weight_norm": Quantity("Weight norm", "l2", "Norm of all weights."),
    "target_norm": Quantity(
        "Target weight norm",
        "l2",
        "The weight norm that corrected decay aims at, or at which the norm is held. Unknown, as is the total, if a group has "
        "constant decay, or a fixed norm without a target.",
    ),
    "forecast_norm": Quantity(
        "Forecast weight norm",
        "l2",
        "The weight norm expected if updates were independent of the weights. Unknown, as is the total, once a step leaves "
        "some rows of an embedding table unused.",
    ),
    "forecast_norm_measured": Quantity(
        "Forecast weight norm, updates measured",
        "l2",
        "The same forecast with measured update lengths; between two records the last measured length is used.",
    ),
    "grad_norm": Quantity(
        "Gradient norm",
        "l2",
        "The norm of all gradients as the optimizer sees them, or the norm before clipping if you log it, as "
        "`steadynorm train` does.",
    ),
    "spectral_norm": Quantity(
        "Spectral norm",
        "",
        "Largest singular value / sqrt(d_out/d_in), geometric mean over the matrices that are not zero; within 1 % of "
        "an SVD's.",
    ),
    "sign_norm": Quantity("Sign norm", "", "d_in * max|W| of the sign layers, mean."),
    "embedding_norm": Quantity("Embedding norm", "", "max|W| of the embeddings, mean."),
    "bias_norm": Quantity("Bias norm", "rms", "Root mean square of a vector's elements, mean."),
    "update_norm": Quantity(
        "Update norm",
        "",
        "|update| over its nominal length, that of an exact lmo (for Adam, the length expected of pure noise; SGD has "
        "none), mean over the spectral layers, or over all if there are none.",
    ),
    "relative_update": Quantity(
        "Relative update", "", "lr * |update| / |weights before the step|, mean over the same layers."
    ),
    "angle": Quantity(
        "Angle per step", "rad", "Angle between the weights before and after the step, mean over the same layers."
    ),
    "alignment": Quantity(
        "Alignment",
        "cos",
        "cos(weights before the step, update), mean over the spectral layers, or over all if there are none.",
    ),
    "expected_alignment": Quantity(
        "Expected alignment", "cos", "The part of the alignment that momentum alone causes."
    ),
    "excess_alignment": Quantity("Excess alignment", "cos", "Measured - expected. Near 0: correct the decay."),
    "lr": Quantity("Learning rate", "", "gamma of the step."),
    "alpha": Quantity("Alpha", "", "Weight of the new gradient in the momentum."),
    "effective_lr": Quantity("Effective learning rate", "", "gamma * sqrt(G): total contribution of one gradient."),
    "weight_decay": Quantity(
        "Weight decay",
        "",
        "lambda of the step; 0 where a fixed norm replaces decay. Under balance it is that of corrected decay, without "
        "what is measured.",
    ),
    "steady_norm_sq": Quantity(
        "Target norm squared", "", "C^2, the target of |weights|^2 / |update|^2; for Adam, of the mean square."
    ),
    "seconds": Quantity("Time", "s", "Seconds since the start of the run."),
    "tokens": Quantity("Tokens", "", "Tokens seen so far."),
}


# What a record says of each layer -> the quantity of all layers that it corresponds to.
LAYER_QUANTITIES: Mapping[str, str] = {
    "norm": "weight_norm",
    "target": "target_norm",
    "forecast": "forecast_norm",
    "forecast_measured": "forecast_norm_measured",
    "update_norm": "update_norm",
    "relative_update": "relative_update",
    "angle": "angle",
    "grad": "grad_norm",
    "alignment": "alignment",
    "expected": "expected_alignment",
    "excess": "excess_alignment",
    "spectral": "spectral_norm",
}


def finite(value: float | None) -> float | None:
    """Return the value, or None if it is not finite.

    >>> finite(2.0), finite(float("nan"))
    (2.0, None)
    """
    return None if value is None or not math.isfinite(value) else value


@dataclass(frozen=True, eq=False)
class Run:
    """One run as read: arrays aligned with `steps`, nan where a value is null or missing.

    Attributes:
        name: The run's name.
        config: Its configuration.
        created: ISO time of its start.
        path: The file it was read from.
        steps: The steps read, int64.
        columns: Key -> float64 values.
        layers: Layer -> quantity -> float64 values.
        dropped: Number of torn lines at the end of the file.
        total: Number of records in the file, of which len(steps) were kept.
        origin: What made it, such as the commit and the kind of machine; empty if the file does not say.
    """

    name: str
    config: Mapping[str, Any]
    created: str
    path: Path | None
    steps: np.ndarray
    columns: Mapping[str, np.ndarray]
    layers: Mapping[str, Mapping[str, np.ndarray]]
    dropped: int = 0
    total: int = 0
    origin: Mapping[str, Any] = field(default_factory=dict)

    def at(self, keep: np.ndarray) -> "Run":
        """Return the run with only some records, chosen by index or by a mask."""
        columns = {key: values[keep] for key, values in self.columns.items()}
        layers = {name: {key: values[keep] for key, values in own.items()} for name, own in self.layers.items()}
        return replace(self, steps=self.steps[keep], columns=columns, layers=layers)

    def finite(self, key: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the steps and values of a column where it is finite; both are empty if there is no such column."""
        if key not in self.columns:
            return np.zeros(0, np.int64), np.zeros(0)
        keep = np.isfinite(self.columns[key])
        return self.steps[keep], self.columns[key][keep]


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one, with keys joined by dots.

    >>> flatten({"lr": 0.1, "model": {"width": 64, "heads": [4, 4]}})
    {'lr': 0.1, 'model.width': 64, 'model.heads': [4, 4]}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
