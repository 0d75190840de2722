"""ScionC's step over 2 and 4 processes against one, on ViT-S/16 shapes: `python -m benchmarks.distributed`.

All are timed in one run, by turns: DDP with mesh=, FSDP2's placement, then rank 0 alone while the others sleep in a
blocking read. One thread each. Bytes are counted as they are sent, and set beside the cost model's. Writes
benchmarks/distributed.json and docs/many-gpus.md, between its markers.
"""

import json
import os
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import multiprocessing, nn

import steadynorm as sn
from benchmarks import cost_model
from benchmarks.pages import fill
from steadynorm import lmo
from steadynorm.lab.bench import VIT_S16, markdown_table, parameters
from steadynorm.optim.scion_rule import ScionSettings, encode
from steadynorm.polar import Polar
from steadynorm.views import BlockLayout

HERE = Path(__file__).parent
ROOT = HERE.parent
MODEL = cost_model.Model("ViT-S/16", VIT_S16, (), 0)


def measure(world: int, rounds: int) -> dict[str, Any]:
    """Medians of rank 0, and the bytes of the one that sends most."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.spawn(_work, (Path(folder), rounds, world), nprocs=world)
        ranks = [json.loads((Path(folder) / f"{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]
    kinds = ("ddp", "fsdp")
    return ranks[0] | {f"{kind}_sent": max(rank[f"{kind}_sent"] for rank in ranks) for kind in kinds}


def _work(rank: int, folder: Path, rounds: int, world: int) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    store = f"file://{folder / 'store'}"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=300))
    optimizers = {"ddp": _scionc(parameters(VIT_S16), mesh=dist.group.WORLD), "fsdp": _scionc(_sharded(world))}
    alone = _scionc(parameters(VIT_S16)) if rank == 0 else None
    found: dict[str, Any] = {}
    for kind, optimizer in optimizers.items():
        with _counting() as counted:
            optimizer.step()
        found[f"{kind}_sent"] = counted[0]
        found[f"{kind}_momentum"] = _momentum_bytes(optimizer)
    seen: dict[str, list[float]] = {}
    for _ in range(rounds + 1):
        dist.barrier()  # gloo waits on a socket: it sleeps
        if alone is not None:
            _time(alone, "alone", seen)
        for kind, optimizer in optimizers.items():
            dist.barrier()
            _time(optimizer, kind, seen)
    found |= {name: statistics.median(values[1:]) for name, values in seen.items()}
    (folder / f"{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


def _scionc(params: list[nn.Parameter], **how: Any) -> sn.ScionC:
    return sn.ScionC(params, lr=1e-3, lmo="spectral", polar_steps=5, **how)


def _sharded(world: int) -> list[nn.Parameter]:
    """As fully_shard places them."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh, params = init_device_mesh("cpu", (world,)), []
    for p in parameters(VIT_S16):
        assert p.grad is not None
        params.append(nn.Parameter(distribute_tensor(p.detach(), mesh, [Shard(0)], src_data_rank=None)))
        params[-1].grad = distribute_tensor(p.grad, mesh, [Shard(0)], src_data_rank=None)  # pyright: ignore
    return params


def _momentum_bytes(optimizer: sn.ScionC) -> int:
    return sum(state["momentum_buffer"].to_local().nbytes for state in optimizer.state.values())


@contextmanager
def _counting() -> Iterator[list[int]]:
    """Bytes that leave this process in all-to-all exchanges."""
    plain, total, rank = dist.all_to_all_single, [0], dist.get_rank()

    def counted(output: Any, given: Any, output_sizes: Any, sizes: Any, **how: Any) -> Any:
        total[0] += (sum(sizes) - sizes[rank]) * given.element_size()
        return plain(output, given, output_sizes, sizes, **how)

    dist.all_to_all_single = counted
    try:
        yield total
    finally:
        dist.all_to_all_single = plain


def _time(optimizer: Any, name: str, seen: dict[str, list[float]]) -> None:
    """Wall time and this process's processor time: where cores are shared with other jobs only the latter tells."""
    wall, busy = time.perf_counter(), time.process_time()
    optimizer.step()
    seen.setdefault(name, []).append(time.perf_counter() - wall)
    seen.setdefault(f"{name}_cpu", []).append(time.process_time() - busy)


def table(found: dict[int, dict[str, Any]]) -> str:
    """Markdown: measured, with the cost model's bytes beside."""
    everything = sum(4 * torch.Size(shape).numel() for shape in VIT_S16)
    columns = ["processes", "placement", "ms per step", "of one process", "processor time of one", "sent, measured"]
    columns += ["sent, model", "momentum"]
    rows = [(1, "whole", f"{1e3 * found[2]['alone']:.0f}", "1.00", "1.00", 0, 0, "1.000")]
    for world, each in found.items():
        for kind, label in (("ddp", "DDP, `mesh=`"), ("fsdp", "FSDP2")):
            model = cost_model.cost(MODEL, world, replicated=kind == "ddp", wire=_wire())
            times = f"{1e3 * each[kind]:.0f}", f"{each[kind] / each['alone']:.2f}"
            busy, momentum = each[f"{kind}_cpu"] / each["alone_cpu"], each[f"{kind}_momentum"] / everything
            sent = map(cost_model.in_bytes, (each[f"{kind}_sent"], model.sent))
            rows.append((world, label, *times, f"{busy:.2f}", *sent, f"{momentum:.3f}"))
    return markdown_table(columns, rows, left=[1])


def _wire() -> int:
    """Bytes of an element between processes here: bf16 only where the CPU computes in it."""
    settings = ScionSettings(lmo.get("spectral"), BlockLayout(), False, Polar())
    encoding = encode((4, 4), settings, torch.float32, torch.device("cpu"))
    return encoding.x_dtype.itemsize


def main() -> None:
    found = {world: measure(world, rounds) for world, rounds in ((2, 12), (4, 6))}
    (HERE / "distributed.json").write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    measured = table(found)
    print(measured)
    page = ROOT / "docs" / "many-gpus.md"
    fill(page, "measured", measured)
    fill(page, "model", cost_model.table())


if __name__ == "__main__":
    main()
