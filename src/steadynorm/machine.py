"""Find out what the hardware computes well.

A CPU either has instructions for bf16 products (AVX512-BF16, AMX) or emulates them, some sixty times slower than fp32.
Everything that picks a dtype or a block size by hardware asks here, so that each path can run on any machine:

    STEADYNORM_NATIVE_BF16=0    treat the CPU as one without bf16 instructions (the fp32 path)
    STEADYNORM_NATIVE_BF16=1    treat it as one with them (the bf16 path, slow if they are emulated)

The variable selects the path, never what a path computes. It is read at every call.

On an accelerator a step takes whole buckets at a time, and state is packed. That path can run on a CPU as well, to test it:

    STEADYNORM_ACCELERATOR=1    treat the CPU as an accelerator; read when this module is imported
"""

import functools
import os
import platform
import re
from pathlib import Path

import torch

VARIABLE = "STEADYNORM_NATIVE_BF16"
CACHED_ELEMENTS = 1 << 18  # fp32 numbers of one tensor that stay in a core's cache while they are worked on: 1 MiB
_BF16_INSTRUCTIONS = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
_CPU_IS_ACCELERATOR = os.environ.get("STEADYNORM_ACCELERATOR") == "1"


def find_device(name: str) -> torch.device:
    """Return the device of this name; raise ValueError if torch knows no such device or sees no such GPU."""
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ValueError(
            f"device {name!r} is unknown; choose cpu, cuda, or a GPU by its number such as cuda:1"
        ) from None
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(
                f"device {name!r} is not available: torch {torch.__version__} sees no GPU; install torch with CUDA on a machine "
                "that has one, or use --device cpu"
            )
        if (device.index or 0) >= (count := torch.cuda.device_count()):
            raise ValueError(f"device {name!r} is not available: torch sees {count}; choose cuda:0 to cuda:{count - 1}")
    elif device.type == "meta":
        raise ValueError("device 'meta' holds no values; choose another, such as cpu")
    elif device.type != "cpu":
        try:
            torch.empty(0, device=device)
        except (AssertionError, ImportError, RuntimeError):
            raise ValueError(
                f"device {name!r} is not available: torch {torch.__version__} was built without it, or finds none; choose "
                "another, such as cpu"
            ) from None
    return device


def is_accelerator(device: torch.device) -> bool:
    """Return whether launches and memory traffic are what a step on this device costs, not cache misses."""
    return device.type != "cpu" or _CPU_IS_ACCELERATOR


def is_capturing() -> bool:
    """Return whether a CUDA graph is being captured, so that the host must read nothing and write no numbers."""
    return torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()


def native_bf16() -> bool:
    """Return whether bf16 products are fast on this CPU, unless STEADYNORM_NATIVE_BF16 says otherwise.

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


def exact_dtype(x: torch.Tensor) -> torch.dtype:
    """Return the dtype in which sums over x, and state that must not be rounded, are computed and kept: at least fp32."""
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return the widest dtype that a device computes in: fp64, or fp32 on MPS, which refuses fp64 tensors.

    >>> widest_dtype(torch.device("cpu")), widest_dtype(torch.device("mps"))
    (torch.float64, torch.float32)
    """
    return torch.float32 if device.type == "mps" else torch.float64


def matmul_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of fast matrix products on this device: bf16, or fp32 on a CPU without bf16."""
    return torch.bfloat16 if device.type != "cpu" or native_bf16() else torch.float32


def autocast_bf16(device: torch.device) -> bool:
    """Return whether bf16 autocast pays off on this device, for `--bf16 auto`."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    return matmul_dtype(device) == torch.bfloat16


def kind() -> str:
    """Return the kind of CPU under which results are kept: "native-bf16" or "fp32"."""
    return "native-bf16" if native_bf16() else "fp32"


def describe() -> str:
    """Return one line for tables and logs: processor, threads, instructions and path.

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
