"""Shard the state of replicated parameters over a mesh, and load state of any placement into any other."""

import functools
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from steadynorm.dtensor import is_dtensor, local
from steadynorm.optim.sharding.layout import layout_of, process_group


def sharded_zeros(p: Tensor, dtype: torch.dtype, mesh: Any) -> Tensor:
    """Return zeros like a plain p: a DTensor cut by rows over a mesh from `check_mesh`. A scalar is whole everywhere."""
    from torch.distributed.tensor import Replicate, Shard, zeros

    mesh, device = _as_mesh(mesh, p.device.type), p.device
    if is_dtensor(p):
        raise ValueError("is a DTensor already: its state is sharded as it is; leave mesh= out")
    if mesh.device_type != device.type:
        raise ValueError(f"is on {device.type}, but mesh= is on {mesh.device_type}; move one of them")
    return zeros(p.shape, dtype=dtype, device_mesh=mesh, placements=[Shard(0) if p.ndim else Replicate()])


def zero_bytes_like(p: Any, size: int) -> Tensor:
    """Return zeros of shape (*p.shape, size) in bytes, sharded as a DTensor p is."""
    from torch.distributed.tensor import DTensor

    mine = torch.zeros(*local(p).shape, size, dtype=torch.uint8, device=p.device)
    whole = torch.empty(*p.shape, size, dtype=torch.uint8, device="meta")
    return DTensor.from_local(
        mine, p.device_mesh, p.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def _as_mesh(mesh: Any, device_type: str) -> Any:
    return _mesh_of_group(*mesh, device_type) if isinstance(mesh, NamedGroup) else mesh


@functools.lru_cache(maxsize=64)
def _mesh_of_group(name: str, size: int, device_type: str) -> Any:
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh.from_group(process_group(name), device_type)


class NamedGroup(NamedTuple):
    """A process group by name: the group itself, kept alive, would end its threads too late."""

    name: str
    size: int


def check_mesh(mesh: Any) -> Any:
    """Return the mesh as an optimizer keeps it.

    Raises:
        TypeError: If it is neither a ProcessGroup nor a DeviceMesh.
        ValueError: If it has several dimensions, or this rank is not in it.
    """
    if dist.is_available() and isinstance(mesh, dist.ProcessGroup):
        return NamedGroup(mesh.group_name, mesh.size())
    if not hasattr(mesh, "get_coordinate"):
        raise TypeError(f"mesh={mesh!r} must be a DeviceMesh or a ProcessGroup")
    if mesh.ndim != 1:
        raise ValueError(
            f"mesh= has {mesh.ndim} dimensions; pass the data-parallel one, mesh['name'], or a ProcessGroup"
        )
    if mesh.get_coordinate() is None:
        raise ValueError("mesh= does not contain this rank; pass the mesh over which the gradients are averaged")
    return mesh


def place_like(value: Tensor, fresh: Tensor) -> Tensor:
    """Return a copy of `value` with the dtype, device and placement of `fresh`, which it may overwrite.

    Loading one DTensor into another placement takes collectives; then all ranks must load.
    """
    source: Any = value
    sharded: Any = fresh
    if not is_dtensor(fresh):
        return (source.full_tensor() if is_dtensor(value) else value).to(fresh, copy=True)
    if is_dtensor(value):
        if source.device_mesh == sharded.device_mesh and source.placements == sharded.placements:
            local(fresh).copy_(local(value))
            return fresh
        value = source.full_tensor()
    layout = layout_of(fresh, {})
    assert layout is not None
    local(fresh).copy_(layout.mine.slice(value))
    return fresh
