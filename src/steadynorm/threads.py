"""Run small products on worker threads that share the cores, without changing torch's own number of threads.

Small products are faster on one core each than one after another on all cores.
"""

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from threading import Barrier, Lock
from typing import TypeVar

import torch

Item = TypeVar("Item")

_pools: dict[tuple[int, int], ThreadPoolExecutor] = {}  # by torch's number of threads and threads per worker
_lock = Lock()


def for_each(action: Callable[[Item], object], items: Sequence[Item]) -> None:
    """Call `action` with every item on all cores, wait for all calls, then raise the first error."""
    workers = pool(len(items))
    futures = [workers.submit(action, item) for item in items]
    wait(futures)
    for future in futures:
        future.result()


def pool(items: int) -> ThreadPoolExecutor:
    """Return the pool for this many items, with one worker per core, or per several cores if there are fewer items.

    A pool is created at its first use and kept. torch has a number of threads per computing thread, and a default for
    new threads. A worker sets its own when it starts; the default is then restored.

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
    """Return a pool whose workers are all running and have set their number of threads."""
    barrier = Barrier(workers)

    def start() -> None:
        torch.get_num_threads()  # a thread adopts the default at its first query, losing a number set before
        torch.set_num_threads(threads_each)
        barrier.wait()

    executor = ThreadPoolExecutor(workers, thread_name_prefix="steadynorm")
    wait([executor.submit(start) for _ in range(workers)])
    return executor


def _forget() -> None:
    """Drop the pools in a forked child, which has none of its parent's threads."""
    global _lock
    _pools.clear()
    _lock = Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget)
