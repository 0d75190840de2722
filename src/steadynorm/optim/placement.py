"""Placement: where an optimizer's parameters and state are, and so how its step runs. Chosen when buckets are made."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from steadynorm.optim.buckets import Bucket, BucketStep, Shard, run


class Local:
    """Every process has its own whole tensors, so a step involves nobody else."""

    def shard_of(self, p: Tensor, state: Mapping[str, Tensor]) -> Shard | None:
        """Return how a parameter is sharded; None for a plain tensor with plain state."""
        return None

    def plan(self, buckets: list[Bucket]) -> list[Bucket]:
        """Return the buckets with all that is decided once about who computes what."""
        return buckets

    def gradients(self, bucket: Bucket) -> list[Tensor]:
        """Return this process's part of the gradients of a bucket."""
        return [p.grad for p in bucket.params if p.grad is not None]

    def agree(self, optimizer: Optimizer, steps: list[BucketStep]) -> list[BucketStep]:
        """Return the steps with what all ranks must agree on before anything is written."""
        return steps

    def localize(self, steps: list[BucketStep]) -> list[BucketStep]:
        """Return the steps on this rank's tensors. From here on nothing can be refused."""
        return steps

    def run(self, steps: Sequence[BucketStep]) -> None:
        """Run a step."""
        run(steps)

    def agree_on_finite(self, optimizer: Optimizer, flags: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Return which parameters, by id, have a finite gradient on all ranks, given which have one on this rank."""
        return flags

    @property
    def is_collective(self) -> bool:
        """Whether all ranks must take the same steps."""
        return False


def choose_placement(optimizer: Optimizer) -> Local:
    """Return `Local`, or `Sharded` if a parameter or its state is a DTensor."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(is_dtensor(x) for p in params for x in (p, *optimizer.state.get(p, {}).values())):
        return Local()
    from steadynorm.optim.sharding.strategy import Sharded

    return Sharded()


def checked_mesh(mesh: Any) -> Any:
    """Return what plain parameters are sharded over, as a DeviceMesh; raise if it cannot be one. None stays None."""
    if mesh is None:
        return None
    from steadynorm.optim.sharding.mesh import check_mesh

    return check_mesh(mesh)


def is_dtensor(x: Any) -> bool:
    """Return whether x is a DTensor, without importing torch's distributed code."""
    return hasattr(x, "device_mesh") and hasattr(x, "placements")


def local(x: Any) -> Tensor:
    """Return this rank's part of a tensor: the shard of a DTensor, all of a plain tensor."""
    if not is_dtensor(x):
        return x
    part = x._local_tensor  # what to_local() returns without autograd
    return part.wait() if hasattr(part, "wait") and hasattr(part, "completed") else part
