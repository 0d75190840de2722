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
    before = _resident("VmRSS", reset=True)
    optimizer.step()
    return {"state_bytes_per_parameter": state / count, "peak_step_mib": (_resident("VmHWM") - before) / 2**20}


def _resident(field: str, *, reset: bool = False) -> int:
    """Bytes of VmRSS or VmHWM; reset starts a new peak."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    found = re.search(rf"{field}:\s+(\d+)", Path("/proc/self/status").read_text(encoding="utf-8"))
    assert found is not None
    return 1024 * int(found[1])
