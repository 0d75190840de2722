"""Placement: where an optimizer's parameters and state are, and so how its step runs. Chosen and cached with the buckets."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, TypeVar

from torch import Tensor
from torch.optim import Optimizer

from steadynorm.dtensor import is_dtensor
from steadynorm.optim.batch import Shard
from steadynorm.optim.buckets import Bucket, BucketStep, run

Derived = TypeVar("Derived")


class Placement(ABC):
    """Where parameters and state are, and so how a step runs.

    Attributes:
        is_collective: Whether all ranks must take the same steps.
    """

    is_collective: bool

    @abstractmethod
    def shard_of(self, p: Tensor, state: Mapping[str, Tensor]) -> Shard | None:
        """Return how a parameter is sharded; None for a plain tensor with plain state."""

    @abstractmethod
    def plan(self, buckets: list[Bucket]) -> list[Bucket]:
        """Return the buckets with all that is decided once about who computes what."""

    def gradients(self, bucket: Bucket) -> list[Tensor]:
        """Return this process's part of the gradients of a bucket."""
        return [p.grad for p in bucket.params if p.grad is not None]

    @abstractmethod
    def agree(self, optimizer: Optimizer, steps: list[BucketStep]) -> list[BucketStep]:
        """Return the steps with what all ranks must agree on before anything is written."""

    @abstractmethod
    def localize(self, steps: list[BucketStep]) -> list[BucketStep]:
        """Return the steps on this rank's tensors. From here on nothing can be refused."""

    @abstractmethod
    def run(self, steps: Sequence[BucketStep]) -> None:
        """Run a step."""

    @abstractmethod
    def agree_on_finite(self, optimizer: Optimizer, flags: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        """Return which parameters, by id, have a finite gradient on all ranks, given which have one on this rank."""


class Local(Placement):
    """Every process has its own whole tensors, so a step involves nobody else."""

    is_collective = False

    def shard_of(self, p: Tensor, state: Mapping[str, Tensor]) -> None:
        return None

    def plan(self, buckets: list[Bucket]) -> list[Bucket]:
        return buckets

    def agree(self, optimizer: Optimizer, steps: list[BucketStep]) -> list[BucketStep]:
        return steps

    def localize(self, steps: list[BucketStep]) -> list[BucketStep]:
        return steps

    def run(self, steps: Sequence[BucketStep]) -> None:
        run(steps)

    def agree_on_finite(self, optimizer: Optimizer, flags: Mapping[int, Tensor]) -> Mapping[int, Tensor]:
        return flags


def choose_placement(optimizer: Optimizer) -> Placement:
    """Return `Local`, or `Sharded` if a parameter or its state is a DTensor."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    if not any(is_dtensor(x) for p in params for x in (p, *optimizer.state.get(p, {}).values())):
        return Local()
    from steadynorm.optim.sharding.strategy import Sharded

    return Sharded()


class DerivedCache(Generic[Derived]):
    """What an optimizer derives from its groups, parameters and their state. Neither saved nor copied."""

    def __init__(self, is_pinned: Callable[[Derived], bool] = lambda value: False) -> None:
        self._is_pinned = is_pinned  # whether a value must outlive others, because somebody else uses it
        self._placement: Placement | None = None
        self._values: dict[Any, Derived] = {}
        self._params: list[Tensor] = []  # all of them, kept alive, so that an id in a key belongs to nobody else

    def placement(self, optimizer: Optimizer) -> Placement:
        """Return where the optimizer's parameters and state are, which must exist."""
        if self._placement is None:
            self._placement = choose_placement(optimizer)
        return self._placement

    def values(self) -> list[Derived]:
        """Return all that is cached."""
        return list(self._values.values())

    def get(self, optimizer: Optimizer, setting_keys: Sequence[str], derive: Callable[[], Derived]) -> Derived:
        """Return what `derive` gives for these parameters, their gradients and settings, computed once."""
        key = tuple(
            (
                *(_hashable(group[name]) for name in setting_keys),
                *[
                    (id(p), None if (grad := p.grad) is None else grad.layout, p.shape, p.dtype, p.device)
                    for p in group["params"]
                ],
            )
            for group in optimizer.param_groups
        )
        if key not in self._values:
            params = [p for group in optimizer.param_groups for p in group["params"]]
            if list(map(id, params)) != list(map(id, self._params)):
                self._placement, self._values, self._params = None, {}, params
            if len(self._values) > 16:  # gradients come and go at random: do not hoard
                self._values = {known: value for known, value in self._values.items() if self._is_pinned(value)}
            self._values[key] = derive()
        return self._values[key]


def _hashable(value: Any) -> Any:
    """Return a setting as a key: a list, as of the sizes of blocks, as a tuple."""
    return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def checked_mesh(mesh: Any) -> Any:
    """Return what plain parameters are sharded over, as a DeviceMesh; raise if it cannot be one. None stays None."""
    if mesh is None:
        return None
    from steadynorm.optim.sharding.mesh import check_mesh

    return check_mesh(mesh)
