"""The jobs of tests/test_distributed.py: each runs on every process and returns what the test then judges."""

import functools
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import steadynorm as sn

# name: shape, lmo, blocks. Sizes that do not divide by 2 or 4, fewer rows than ranks, several of one shape.
SHAPES: dict[str, tuple[tuple[int, ...], str, int]] = {
    "a": ((12, 12), "spectral", 1),
    "b": ((12, 12), "spectral", 1),
    "c": ((12, 12), "spectral", 1),
    "square": ((10, 10), "spectral", 1),
    "tall": ((13, 6), "spectral", 1),
    "wide": ((6, 13), "spectral", 1),
    "one row": ((1, 7), "spectral", 1),
    "few rows": ((3, 8), "spectral", 1),
    "qkv": ((27, 9), "spectral", 3),
    "conv": ((5, 2, 3, 3), "conv", 1),
    "taps": ((6, 4, 3, 3), "conv-tap", 2),
    "tied": ((17, 8), "sign", 1),
    "embedding": ((11, 6), "embedding", 1),
    "row": ((7, 5), "row", 1),
    "column": ((7, 5), "column", 1),
    "vector": ((9,), "bias", 1),
    "vector too": ((9,), "bias", 1),
    "pair": ((2,), "bias", 1),
    "scalar": ((), "bias", 1),
}


class Model(nn.Module):
    """Nothing but the parameters; tied: one of them is in two places."""

    def __init__(self, dtype: torch.dtype, *, scalar: bool = True):
        super().__init__()
        g = torch.Generator().manual_seed(0)
        for name, (shape, _, _) in SHAPES.items():
            value = torch.randn(shape, generator=g, dtype=torch.float64)
            if shape or scalar:
                self.register_parameter(name, nn.Parameter(value.to(dtype)))
        self.tied_to = nn.Module()
        self.tied_to.weight = self.tied


def groups(named: dict[str, Tensor], *, lmos: bool) -> list[dict[str, Any]]:
    """One group for each lmo and number of blocks, names included."""
    found: dict[Any, dict[str, Any]] = {}
    for name, p in named.items():
        _, lmo, blocks = SHAPES[name]
        key = (lmo, blocks) if lmos else ()
        found.setdefault(key, {"params": [], **({"lmo": lmo, "blocks": blocks} if lmos else {})})["params"].append(
            (name, p)
        )
    return list(found.values())


def scion(cls: Any, dtype: torch.dtype, **settings: Any) -> Callable[..., Any]:
    polar = "svd" if dtype == torch.float64 else "express"
    return lambda named, **more: cls(groups(named, lmos=True), lr=0.02, polar=polar, **settings, **more)


def makers(dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    """Name -> (named parameters, **mesh) -> optimizer."""
    plain = {
        "LionC": (sn.LionC, {"lr": 0.02, "weight_decay": 0.5}),
        "AdamC": (sn.AdamC, {"lr": 0.02}),
        "RenormalizedAdamW": (sn.RenormalizedAdamW, {"lr": 0.02}),
        "SGDC": (sn.SGDC, {"lr": 0.02, "nesterov": True}),
    }
    return {
        "ScionC": scion(sn.ScionC, dtype),
        "ScionC nesterov exact": scion(sn.ScionC, dtype, nesterov=True, overlap="exact"),
        "Scion": scion(sn.Scion, dtype, weight_decay=0.1),
        **{
            name: lambda named, cls=cls, settings=settings, **more: cls(groups(named, lmos=False), **settings, **more)
            for name, (cls, settings) in plain.items()
        },
    }


def noise(name: str, t: int, shape: Iterable[int]) -> Tensor:
    seed = 1000 * t + sum(map(ord, name))
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(name: str, t: int, weight: Tensor, *, trouble: bool = True) -> Tensor | None:
    """Noise and a pull to zero. trouble: at times a single infinity, or no gradient at all."""
    value = noise(name, t, weight.shape) + 0.3 * weight.double()
    if trouble and t == 7 and name in ("a", "tied", "vector", "conv"):
        value.view(-1)[-1] = torch.inf
    if trouble and t == 11 and name in ("b", "row", "pair"):
        return None
    return value.to(weight.dtype)


def like(full: Tensor, p: Any) -> Tensor:
    """A full tensor placed as p is; no communication."""
    if not isinstance(p, DTensor):
        return full.clone()
    return distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)


def full(p: Any) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


@functools.cache
def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])


def layout(kind: str, dtype: torch.dtype) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters placed in this way, by name, and what the optimizer needs to be told."""
    world = dist.get_world_size()
    if kind == "single":
        return dict(Model(dtype).named_parameters()), {}
    if kind in ("ddp", "ddp group"):
        mesh = mesh_of(world) if kind == "ddp" else dist.group.WORLD
        return dict(Model(dtype).named_parameters()), {"mesh": mesh}
    if kind in ("fsdp", "hsdp"):
        mesh = mesh_of(world) if kind == "fsdp" else mesh_of(2, world // 2)
        model = Model(dtype, scalar=False)
        fully_shard(model, mesh=mesh)
        return dict(model.named_parameters()), {}
    named = {}
    square = (2, world // 2)
    for name, p in Model(dtype).named_parameters():
        last = Shard(min(1, p.ndim - 1)) if p.ndim else Replicate()
        first = Shard(0) if p.ndim else Replicate()
        mesh, placements = {
            "tp rows": ((world,), [first]),
            "tp columns": ((world,), [last]),
            "replicated": ((world,), [Replicate()]),
            "2-d": (square, [first, last]),
            "2-d rows": (square, [first, first]),
        }[kind]
        named[name] = nn.Parameter(
            distribute_tensor(p.detach(), mesh_of(*mesh), placements, src_data_rank=None)
        )
    return named, {}


def follow(kind: str, maker: str, dtype: torch.dtype, steps: int = 30) -> tuple[float, dict[str, Any], Any]:
    """Largest relative difference of weights and state to one process, after 30 steps on the same full gradients."""
    named, told = layout(kind, dtype)
    alone = {name: p for name, p in layout("single", dtype)[0].items() if name in named}
    make = makers(dtype)[maker]
    here, there = make(named, **told), make(alone)
    for t in range(steps):
        for name, q in alone.items():
            value = gradient(name, t, q.detach())
            q.grad = value
            named[name].grad = None if value is None else like(value, named[name])
        for optimizer in (here, there):
            for group in optimizer.param_groups:
                group["lr"] = 0.02 * (1 - t / 60)
            optimizer.step()
    worst = 0.0
    for name, q in alone.items():
        pairs = [(full(named[name]), q.detach())]
        pairs += [(full(value), there.state[q][key]) for key, value in here.state[named[name]].items()]
        for mine, right in pairs:
            scale = right.double().norm().clamp(min=1e-12)
            worst = max(worst, float((mine.double() - right.double()).norm() / scale))
    return worst, named, here


def layouts(folder: Path) -> dict[str, Any]:
    """Every optimizer in every layout against one process."""
    world, found = dist.get_world_size(), {}
    kinds = ["ddp", "fsdp", "tp rows", "tp columns", *(["hsdp", "2-d", "2-d rows"] if world == 4 else ["ddp group"])]
    cases = [(kind, maker) for kind in kinds for maker in ("ScionC", "LionC")]
    cases += [(kind, "ScionC nesterov exact") for kind in ("ddp", "fsdp")] + [("replicated", "ScionC")]
    cases += [(kind, "Scion") for kind in ("ddp", "fsdp", "tp columns")]
    cases += [("fsdp", maker) for maker in ("AdamC", "RenormalizedAdamW", "SGDC")]
    for kind, maker in cases:
        t=time.time()
        found[f"fp64 {maker} {kind}"] = follow(kind, maker, torch.float64)[0]
        print(kind, maker, time.time()-t)
    for kind in ("ddp", "fsdp", "tp columns"):
        found[f"fp32 ScionC {kind}"] = follow(kind, "ScionC", torch.float32)[0]
    return found
