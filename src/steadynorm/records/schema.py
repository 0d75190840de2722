"""What a run's records hold: names, versions, the well-known quantities, and a run as read."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

SCHEMA = "steadynorm-run"
VERSION = 1
FILE = "records.jsonl"


class RecordError(ValueError):
    """A record file, or what should be written into one, is not what it must be."""


@dataclass(frozen=True)
class Quantity:
    """How a well-known key is shown: label, unit ("" for a pure number), what it means."""

    label: str
    unit: str
    description: str


QUANTITIES: Mapping[str, Quantity] = MappingProxyType(
    {
        "loss": Quantity("Training loss", "nats", "Loss of the step's batch, before the update."),
        "val_loss": Quantity("Validation loss", "nats", "Loss on held-out data."),
        "val_accuracy": Quantity("Validation accuracy", "", "Share of held-out examples classified correctly."),
        "weight_norm": Quantity("Weight norm", "l2", "Norm of all weights."),
        "forecast_norm": Quantity(
            "Forecast weight norm", "l2", "Expected norm if updates were independent of weights."
        ),
        "grad_norm": Quantity(
            "Gradient norm",
            "l2",
            "Norm of all gradients; before clipping where that norm is logged, as `steadynorm train` does.",
        ),
        "spectral_norm": Quantity("Spectral norm", "", "Largest singular value / sqrt(d_out/d_in), geometric mean."),
        "sign_norm": Quantity("Sign norm", "", "d_in * max|W| of the sign layers, mean."),
        "embedding_norm": Quantity("Embedding norm", "", "max|W| of the embeddings, mean."),
        "bias_norm": Quantity("Bias norm", "rms", "Root mean square of the vectors' elements."),
        "alignment": Quantity("Alignment", "cos", "cos(weights, update), mean over hidden matrices."),
        "expected_alignment": Quantity("Expected alignment", "cos", "The part of it that momentum alone makes."),
        "excess_alignment": Quantity("Excess alignment", "cos", "Measured - expected. Near 0: correct the decay."),
        "lr": Quantity("Learning rate", "", "gamma of the step."),
        "alpha": Quantity("Alpha", "", "Weight of the new gradient in the momentum."),
        "effective_lr": Quantity("Effective learning rate", "", "gamma * sqrt(G): total contribution of one gradient."),
        "weight_decay": Quantity("Weight decay", "", "lambda of the step."),
        "steady_norm_sq": Quantity(
            "Target norm squared", "", "C^2: the |weights|^2 / |update|^2 steered to; Adam: the mean square."
        ),
        "seconds": Quantity("Time", "s", "Seconds since the start of the run."),
        "tokens": Quantity("Tokens", "", "Tokens seen so far."),
    }
)


@dataclass(frozen=True, eq=False)
class Run:
    """One run as read: arrays aligned with `steps`, nan where a value is null or missing.

    `total` counts the records in the file, of which len(steps) were kept; `dropped` the torn lines at its end.
    """

    name: str
    config: Mapping[str, Any]
    created: str
    path: Path | None
    steps: np.ndarray  # int64
    columns: Mapping[str, np.ndarray]  # key -> float64
    layers: Mapping[str, Mapping[str, np.ndarray]]  # layer -> quantity -> float64
    dropped: int = 0
    total: int = 0


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots.

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
