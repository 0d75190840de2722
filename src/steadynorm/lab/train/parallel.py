"""Work with the other processes of a run: torchrun's environment, DDP or FSDP2, sums over processes."""

import inspect
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from steadynorm.machine import find_device

_TIMEOUT = timedelta(minutes=10)
# The models' buffers are constant tables, so there is nothing to send. Newer torch renames the option.
_NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW else "broadcast_buffers": False}


@dataclass(frozen=True)
class Team:
    """This process and what it does with the others; a single process communicates nothing."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        """Whether this process writes records, shows progress and reports what happens."""
        return self.rank == 0

    def wrap(self, model: nn.Module, mode: str) -> nn.Module:
        """Return the model itself, DDP around it, or the model with its blocks sharded in place."""
        if self.mesh is None:
            return model
        if mode == "ddp":
            return DistributedDataParallel(model, **_KEEP_BUFFERS)
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return model

    def accumulating(self, wrapped: nn.Module, last: bool) -> Any:
        """Return a context that exchanges gradients only in the last micro-batch; `wrapped` must not be compiled."""
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and not last else nullcontext()

    def reshard(self, model: nn.Module) -> None:
        """Restore the sharded weights that the optimizer holds: FSDP2 leaves whole ones after an evaluation."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def average(self, value: Tensor) -> Tensor:
        """Average over the processes, in place."""
        if self.mesh is not None:
            dist.all_reduce(value)
            value /= self.world
        return value

    def totals(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Sum over the processes and return the sums on the host."""
        together = torch.stack(list(sums.values()))
        if self.mesh is not None:
            dist.all_reduce(together)
        return dict(zip(sums, together.tolist(), strict=True))

    def max_over_processes(self, number: int) -> int:
        """Return the largest of all processes' numbers, on every process."""
        if self.mesh is None:
            return number
        largest = torch.tensor(number, device=self.device)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        return int(largest.item())

    def barrier(self) -> None:
        """Wait until all processes arrive."""
        if self.mesh is not None:
            dist.barrier()


@contextmanager
def team(device: str) -> Iterator[Team]:
    """Join the processes that torchrun started, or work alone without torchrun."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    own_device = find_device(device)
    kind = own_device.type
    if world == 1:
        yield Team(0, 1, own_device)
        return
    if kind == "cuda":
        own_device = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(own_device)
    # torchrun's store outlives a restart. Without a prefix, new processes would find stale addresses and hang.
    store, _, _ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    attempt = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world, timeout=_TIMEOUT)
    try:
        yield Team(rank, world, own_device, init_device_mesh(kind, (world,)))
    finally:
        dist.destroy_process_group()
