"""Start the processes of tests/test_distributed.py, and end them whatever happens.

Each is a fork that runs a function of distributed_jobs.py, or of another module as module:function, and writes what it
returns as JSON.
"""

import functools
import importlib
import json
import os
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import forked

SECONDS = 900  # of a whole job on a busy machine; then its processes are killed


def run(world: int, job: str, folder: Path, argument: str = "", *, seconds: float = SECONDS) -> list[Any]:
    """Start `world` processes, wait, and return what each reports; on an error or a time-out all are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{job}{argument}.{world}.port").unlink(missing_ok=True)
    logs = [folder / f"{job}{argument}.{rank}.log" for rank in range(world)]
    processes = [
        forked.start(functools.partial(main, rank, world, folder, job, argument), log) for rank, log in enumerate(logs)
    ]
    ended, deadline = "failed", time.monotonic() + seconds
    try:
        while any(process.exitcode is None for process in processes):
            if any(process.exitcode for process in processes):
                time.sleep(1.0)  # let the others report
                break
            if time.monotonic() > deadline:
                ended = f"took more than {seconds} s"
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(process.exitcode for process in processes):
        texts = (f"--- rank {rank}\n{log.read_text(encoding='utf-8')[-4000:]}" for rank, log in enumerate(logs))
        raise RuntimeError("\n".join([f"{job} on {world} processes {ended}", *texts]))
    return [json.loads((folder / f"{job}{argument}.{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def meet(rank: int, world: int, port: Path) -> Any:
    """Return a store on a port that the first rank finds free and passes to the others in a file.

    torch's FileStore, once in some fifty starts, leaves ranks waiting for addresses that are in the file.
    """
    import torch.distributed as dist

    limit = timedelta(seconds=SECONDS)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, timeout=limit, wait_for_workers=False)
        written = port.with_suffix(".part")
        written.write_text(str(store.port), encoding="utf-8")
        written.rename(port)
        return store
    while not port.exists():
        time.sleep(0.02)
    return dist.TCPStore(
        "127.0.0.1", int(port.read_text(encoding="utf-8")), world, timeout=limit, wait_for_workers=False
    )


def main(rank: int, world: int, folder: Path, job: str, argument: str) -> None:
    import torch
    import torch.distributed as dist

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    store = meet(rank, world, folder / f"{job}{argument}.{world}.port")
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
    module, _, name = job.rpartition(":")
    function = getattr(importlib.import_module(module or "distributed_jobs"), name)
    found = function(folder, argument) if argument else function(folder)
    (folder / f"{job}{argument}.{rank}.json").write_text(json.dumps(found), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # once in some 25 exits of an FSDP2 job C++ threads outlive the interpreter, which then aborts
