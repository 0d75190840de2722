"""Values on their way from the device to the host: rows of tensors, and their transfer."""

from collections.abc import Iterable, Sequence
from typing import Any, Self

import torch
from torch import Tensor

Key = tuple[str, Any]  # what a value is, and of what
Values = dict[Key, float]

ALONG, UPDATE, BEFORE = "along", "update", "before"  # <theta, u>, |u|^2, |theta|^2, theta before the step
SKIPS = "skips"  # updates skipped so far
WAITED = "waited"  # steps in which slices of a layer had no gradient and did not move


class Row:
    """The values of one record on their way to the host: one tensor per device, and what each value means."""

    def __init__(self) -> None:
        self.parts: dict[torch.device, list[Tensor]] = {}
        self.keys: dict[torch.device, list[Key]] = {}

    def put(self, values: Tensor, keys: Iterable[Key]) -> None:
        """Add a tensor with one value per key."""
        self.parts.setdefault(values.device, []).append(values.detach().reshape(-1).float())
        self.keys.setdefault(values.device, []).extend(keys)

    def close(self) -> Self:
        """Copy the parts into one tensor per device."""
        self.parts = {device: [torch.cat(parts)] for device, parts in self.parts.items()}
        return self


def fetch(rows: Sequence[Row]) -> list[Values]:
    """Return the values of closed rows, with one transfer per device."""
    fetched: list[Values] = [{} for _ in rows]
    for device in {device: None for row in rows for device in row.parts}:
        on_device = [(values, row) for values, row in zip(fetched, rows, strict=True) if device in row.parts]
        numbers = iter(torch.cat([part for _, row in on_device for part in row.parts[device]]).cpu().tolist())
        for values, row in on_device:
            values.update(zip(row.keys[device], numbers, strict=False))
    return fetched
