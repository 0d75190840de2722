"""Say where a run comes from: the commit of the source, and the kind of machine.

Machines with and without bf16 products end at different weights, so their runs are not compared with each other.
"""

import functools
import subprocess
from pathlib import Path
from typing import Any

import torch

from steadynorm import machine


def describe(device: torch.device | None = None) -> dict[str, Any]:
    """Return the commit and the kind of machine, for the header of a run's records and for summaries."""
    return {"commit": commit(), "machine": kind(device)}


def kind(device: torch.device | None = None) -> str:
    """Return "native-bf16" or "fp32" for a CPU, and otherwise the type of the device that a run would choose.

    >>> kind(torch.device("cpu")) in ("native-bf16", "fp32")
    True
    """
    name = device.type if device is not None else "cuda" if torch.cuda.is_available() else "cpu"
    return machine.kind() if name == "cpu" else name


@functools.cache
def commit() -> str | None:
    """Return the last commit that changed the package, with "+" if it has changed since; None outside a checkout.

    Commits of results and pages leave it the same, so that experiments of one version of the code are known as such.
    """
    package = Path(__file__).parent.parent
    try:
        last, changed = (
            subprocess.run(
                ["git", "-C", str(package), *words], capture_output=True, encoding="utf-8", check=True
            ).stdout
            for words in (["log", "-1", "--format=%H", "--", "."], ["status", "--porcelain", "."])
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return last.strip() + ("+" if changed.strip() else "") if last.strip() else None
