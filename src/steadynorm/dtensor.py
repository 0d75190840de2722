"""Tell DTensors from plain tensors and take this rank's part, without importing torch's distributed code."""

from typing import Any

from torch import Tensor


def is_dtensor(x: Any) -> bool:
    """Return whether x is a DTensor."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def local(x: Any) -> Tensor:
    """Return this rank's part of a tensor: the shard of a DTensor, all of a plain tensor."""
    if not is_dtensor(x):
        return x
    part = x._local_tensor  # what to_local() returns without autograd
    return part.wait() if hasattr(part, "wait") and hasattr(part, "completed") else part
