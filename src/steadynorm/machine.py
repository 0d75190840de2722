"""What this machine computes well: the one place that asks the hardware.

A CPU either has instructions for bf16 products (AVX512-BF16, AMX) or emulates them, some sixty times slower than
fp32. Everything that picks a dtype or a block size by hardware asks here, so each path can be run on any machine:

    STEADYNORM_NATIVE_BF16=0    treat the CPU as one without bf16 instructions (the fp32 path)
    STEADYNORM_NATIVE_BF16=1    treat it as one that has them (the bf16 path; slow where it is not true)

The variable changes which path is taken, never what a path computes. It is read whenever the question is asked.
"""

import functools
import os
import platform
import re
from pathlib import Path

import torch

VARIABLE = "STEADYNORM_NATIVE_BF16"
_BF16_INSTRUCTIONS = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()


def native_bf16() -> bool:
    """Return whether products of bf16 matrices are fast on this CPU, or what STEADYNORM_NATIVE_BF16 says instead.

    >>> isinstance(native_bf16(), bool)
    True
    """
    match os.environ.get(VARIABLE, ""):
        case "":
            return _BF16_INSTRUCTIONS
        case "0":
            return False
        case "1":
            return True
        case other:
            raise ValueError(f"{VARIABLE}={other!r} is not understood; set it to 0 or 1, or leave it unset")


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype in which this device multiplies matrices fast: bf16, or fp32 on a CPU without bf16."""
    return torch.bfloat16 if device.type != "cpu" or native_bf16() else torch.float32


def autocast_bf16(device: torch.device) -> bool:
    """Return whether bf16 autocast pays on this device: what `--bf16 auto` means."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return matmul_dtype(device) == torch.bfloat16


def kind() -> str:
    """Return the kind of CPU that figures are kept under: "native-bf16" or "fp32"."""
    return "native-bf16" if native_bf16() else "fp32"


def describe() -> str:
    """Return one line for tables and logs: processor, threads, instructions, and the path taken.

    >>> "threads" in describe()
    True
    """
    path = "native bf16" if native_bf16() else "no native bf16, so fp32"
    forced = f" ({VARIABLE}={os.environ[VARIABLE]})" if os.environ.get(VARIABLE) else ""
    return (
        f"{_cpu_name()}, {torch.get_num_threads()} threads, {torch.backends.cpu.get_cpu_capability()}, {path}{forced}"
    )


@functools.cache
def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    named = re.search(r"model name\s*: (.*)", info.read_text(encoding="utf-8")) if info.exists() else None
    return named[1] if named else platform.processor() or platform.machine()
