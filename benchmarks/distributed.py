"""Step time over two processes against one, on ViT-S/16 shapes: `python -m benchmarks.distributed`.

Both are timed in one run, by turns: two processes with mesh=, then rank 0 alone while rank 1 sleeps in a blocking read.
One thread each.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

SECONDS = 600


def step_ratio(rounds: int = 12) -> dict[str, float]:
    """Median seconds of a step for W = 1 and W = 2, their ratio, and rank 0's share of the momentum's bytes."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "found.json"
        path = os.pathsep.join([str(Path(__file__).parents[1] / "src"), os.environ.get("PYTHONPATH", "")])
        environment = os.environ | {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": path}
        command = [sys.executable, __file__, folder, str(rounds)]
        processes = [subprocess.Popen([*command, str(rank)], env=environment) for rank in range(2)]
        try:
            for process in processes:
                if process.wait(timeout=SECONDS):
                    raise RuntimeError("a process of the benchmark failed; its error is above")
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                process.wait()
        return json.loads(out.read_text())


def _work(folder: Path, rounds: int, rank: int) -> None:
    import torch
    import torch.distributed as dist

    import steadynorm as sn
    from steadynorm.bench import VIT_S16, parameters

    torch.set_num_threads(1)
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2, timeout=timedelta(seconds=120))
    alone, shared = parameters(VIT_S16), parameters(VIT_S16)
    one = sn.ScionC(alone, lr=1e-3, lmo="spectral") if rank == 0 else None
    two = sn.ScionC(shared, lr=1e-3, lmo="spectral", mesh=dist.group.WORLD)
    seen: dict[str, list[float]] = {"one": [], "two": [], "one_cpu": [], "two_cpu": []}
    for _ in range(rounds + 2):
        dist.barrier()  # gloo waits on a socket: it sleeps
        if one is not None:
            _time(one, "one", seen)
        dist.barrier()
        _time(two, "two", seen)
    if rank == 0:
        medians = {name: statistics.median(values[2:]) for name, values in seen.items()}
        mine = sum(two.state[p]["momentum_buffer"].to_local().nbytes for p in shared)
        found = {
            **medians,
            "ratio": medians["two"] / medians["one"],
            "cpu_ratio": medians["two_cpu"] / medians["one_cpu"],
            "momentum": mine / sum(p.nbytes for p in shared),
        }
        (folder / "found.json").write_text(json.dumps(found))
    dist.barrier()
    dist.destroy_process_group()


def _time(optimizer: Any, name: str, seen: dict[str, list[float]]) -> None:
    """Wall time and this process's processor time: where cores are shared with other jobs only the latter tells."""
    wall, busy = time.perf_counter(), time.process_time()
    optimizer.step()
    seen[name].append(time.perf_counter() - wall)
    seen[f"{name}_cpu"].append(time.process_time() - busy)


if __name__ == "__main__":
    if len(sys.argv) == 4:
        _work(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
    else:
        measured = step_ratio()
        print(f"one process    {1e3 * measured['one']:.0f} ms a step")
        print(f"two processes  {1e3 * measured['two']:.0f} ms a step, ratio {measured['ratio']:.2f}")
        print(
            f"processor time of rank 0, ratio {measured['cpu_ratio']:.2f}: the step ratio on cores of its own, at best"
        )
        print(f"momentum       {measured['momentum']:.3f} of the whole on rank 0")
