"""This process among the processes of a run: torchrun's environment, DDP or FSDP2 around the model, sums over all."""

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

_TIMEOUT = timedelta(minutes=10)
# The models' buffers are tables, the same everywhere: nothing to send. Newer torch has another name for it.
_NEW = "forward_sync_buffers" in inspect.signature(DistributedDataParallel).parameters
_KEEP_BUFFERS: dict[str, Any] = {"forward_sync_buffers" if _NEW else "broadcast_buffers": False}


@dataclass(frozen=True)
class Team:
    """Rank and number of processes, and what they do together. One process: nothing is communicated."""

    rank: int
    world: int
    device: torch.device
    mesh: DeviceMesh | None = None

    @property
    def is_main(self) -> bool:
        """The one that writes records, shows progress and says what happened."""
        return self.rank == 0

    def wrap(self, model: nn.Module, mode: str) -> nn.Module:
        """What the loop calls: the model itself, DDP around it, or the model with its blocks sharded in place."""
        if self.mesh is None:
            return model
        if mode == "ddp":
            return DistributedDataParallel(model, **_KEEP_BUFFERS)
        for block in getattr(model, "blocks", ()):
            fully_shard(block, mesh=self.mesh)
        fully_shard(model, mesh=self.mesh)
        return model

    def accumulating(self, wrapped: nn.Module, last: bool) -> Any:
        """Gradients are exchanged in the last micro-batch alone. `wrapped`: what `wrap` returned, not compiled."""
        if isinstance(wrapped, FSDPModule):
            wrapped.set_requires_gradient_sync(last)
        return wrapped.no_sync() if isinstance(wrapped, DistributedDataParallel) and not last else nullcontext()

    def reshard(self, model: nn.Module) -> None:
        """After an evaluation FSDP2 leaves whole weights in place of the sharded ones that the optimizer has."""
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def average(self, value: Tensor) -> Tensor:
        """Mean over the processes, in place."""
        if self.mesh is not None:
            dist.all_reduce(value)
            value /= self.world
        return value

    def totals(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Sums over the processes, on the host."""
        together = torch.stack(list(sums.values()))
        if self.mesh is not None:
            dist.all_reduce(together)
        return dict(zip(sums, together.tolist(), strict=True))

    def any(self, flag: bool) -> bool:
        """Whether it is so in any process: all of them get the same answer."""
        if self.mesh is None:
            return flag
        found = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(found, dist.ReduceOp.MAX)
        return bool(found.item())

    def barrier(self) -> None:
        """Until all are here."""
        if self.mesh is not None:
            dist.barrier()


@contextmanager
def team(device: str) -> Iterator[Team]:
    """The processes that torchrun started; one by itself without it."""
    world, rank = int(os.environ.get("WORLD_SIZE", "1")), int(os.environ.get("RANK", "0"))
    kind = "cuda" if device == "cuda" or (device == "auto" and torch.cuda.is_available()) else "cpu"
    if device not in ("auto", "cuda", "cpu"):
        kind = torch.device(device).type
    if world == 1:
        yield Team(0, 1, torch.device(kind if device in ("auto", kind) else device))
        return
    here = torch.device(kind, int(os.environ.get("LOCAL_RANK", "0"))) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(here)
    # torchrun's store outlives a restart: without a prefix the new processes would find the old ones' addresses and hang.
    store, _, _ = next(dist.rendezvous("env://", timeout=_TIMEOUT))
    attempt = dist.PrefixStore(f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}", store)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, store=attempt, rank=rank, world_size=world, timeout=_TIMEOUT)
    try:
        yield Team(rank, world, here, init_device_mesh(kind, (world,)))
    finally:
        dist.destroy_process_group()
