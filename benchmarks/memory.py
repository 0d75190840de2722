"""What a step takes at its peak, measured as the resident set of this process."""

import re
from pathlib import Path

from steadynorm import ScionC
from steadynorm.lab import bench


def memory_of_a_step(dtype: str) -> dict[str, float]:
    small = bench.parameters([(64, 64), (64, 256)])
    ScionC(small, lr=1e-3, lmo="spectral", polar_steps=5).step()  # load libraries, start threads
    hidden, table = bench.parameters(bench.GPT_124M_LAYER * 12), bench.parameters([(50304, 768)])
    groups = [{"params": hidden, "lmo": "spectral"}, {"params": table, "lmo": "sign", "weight_decay": 1e-4}]
    optimizer = ScionC(groups, lr=1e-3, polar_steps=5, momentum_dtype=dtype)
    for state in optimizer.state.values():
        state["momentum_buffer"].zero_()  # zeros are not resident until written
    count = sum(p.numel() for p in hidden + table)
    state = sum(s["momentum_buffer"].nbytes for s in optimizer.state.values())
    Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # starts a new peak
    before = resident()
    optimizer.step()
    return {"state_bytes_per_parameter": state / count, "peak_step_mib": (resident(field="VmHWM") - before) / 2**20}


def resident(pid: int | str = "self", *, field: str = "VmRSS") -> int:
    """Return the bytes of memory that a process has, or with VmHWM those it had at its peak."""
    line = re.search(rf"{field}:\s+(\d+)", Path(f"/proc/{pid}/status").read_text(encoding="utf-8"))
    if line is None:
        raise ProcessLookupError(f"process {pid} has ended")
    return 1024 * int(line[1])
