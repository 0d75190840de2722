"""What the processes of tests/test_distributed.py run, and how they are started and, whatever happens, ended.

As a program: `python distributed_worker.py RANK WORLD FOLDER JOB [ARGUMENT]` runs a function of distributed_jobs.py, or
of another module as module:function, and writes what it returns as JSON.
"""

import importlib
import json
import os
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

SECONDS = 900  # of a whole job on a busy machine; then its processes are killed
HERE = Path(__file__).parent


def run(world: int, job: str, folder: Path, argument: str = "", *, seconds: float = SECONDS) -> list[Any]:
    """Start `world` processes, wait, and return what each reports; on an error or time-out all are killed."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{job}{argument}.{world}.port").unlink(missing_ok=True)
    source = HERE.parent / "src"
    first = [given] if (given := os.environ.get("PYTHONPATH")) else []  # a mutant's source, say
    path = os.pathsep.join(map(str, (*first, source, HERE, HERE / "integrations")))
    environment = os.environ | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    logs = [(folder / f"{job}{argument}.{rank}.log").open("w+", encoding="utf-8") for rank in range(world)]
    processes = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(world), str(folder), job, argument],
            env=environment,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        for rank, log in enumerate(logs)
    ]
    ended, deadline = "failed", time.monotonic() + seconds
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() not in (None, 0) for process in processes):
                time.sleep(1.0)  # let the others report, too
                break
            if time.monotonic() > deadline:
                ended = f"took more than {seconds} s"
                break
            time.sleep(0.05)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()
        texts = _texts(logs)
    if any(process.returncode for process in processes):
        raise RuntimeError(f"{job} on {world} processes {ended}\n{texts}")
    return [json.loads((folder / f"{job}{argument}.{rank}.json").read_text(encoding="utf-8")) for rank in range(world)]


def meet(rank: int, world: int, port: Path) -> Any:
    """A store on a port that the first rank finds free and tells the others by file.

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


def _texts(logs: list[Any]) -> str:
    texts = []
    for rank, log in enumerate(logs):
        log.seek(0)
        texts.append(f"--- rank {rank}\n{log.read()[-4000:]}")
        log.close()
    return "\n".join(texts)


def main(rank: int, world: int, folder: Path, job: str, argument: str) -> None:
    import torch
    import torch.distributed as dist

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


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), Path(sys.argv[3]), sys.argv[4], sys.argv[5])
