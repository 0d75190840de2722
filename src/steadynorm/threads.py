"""Worker threads that split the cores among them, and leave the process's own number of threads as it is.

Small products gain more from one core each than from sharing all cores, one product after another.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, Lock
from typing import TypeVar

import torch

Item = TypeVar("Item")

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}  # by torch's threads in all, and how many each worker has
_lock = Lock()


def for_each(action: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Call `action` with every item on all cores; return when all calls have ended, then raise the first error."""
    futures = [pool(len(items)).submit(action, item) for item in items]
    wait(futures)
    for future in futures:
        future.result()


def pool(items: int) -> ThreadPoolExecutor:
    """Return the pool for this many items: a worker for each core or, where items are fewer, for several cores.

    A pool is made at its first use and kept. torch holds a number of threads for each thread that computes, and a
    default for threads to come. A worker sets its own when it starts; the default is put back at once.

    >>> before = torch.get_num_threads()
    >>> pool(1000).submit(torch.get_num_threads).result(), torch.get_num_threads() == before
    (1, True)
    """
    threads = torch.get_num_threads()
    threads_each = threads // max(1, min(threads, items))
    with _lock:
        if (threads, threads_each) not in _pools:
            _pools[threads, threads_each] = _started(threads // threads_each, threads_each)
            torch.set_num_threads(threads)
        return _pools[threads, threads_each]


def _started(workers: int, threads_each: int) -> ThreadPoolExecutor:
    """Return a pool whose threads are all running and have set their number."""
    barrier = Barrier(workers)

    def start() -> None:
        torch.get_num_threads()  # a thread takes up the default at its first question; a number set before is lost
        torch.set_num_threads(threads_each)
        barrier.wait()

    executor = ThreadPoolExecutor(workers, thread_name_prefix="steadynorm")
    wait([executor.submit(start) for _ in range(workers)])
    return executor


def _forget() -> None:
    """Start again in a forked child, which has none of its parent's threads."""
    global _lock
    _pools.clear()
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
