"""The jobs of tests/test_distributed.py. Each runs on every process and returns what the test then judges."""

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import steadynorm as sn
from steadynorm.lab.bench import VIT_S16

# name: shape, lmo, blocks. Sizes that do not divide by 2 or 4, fewer rows than ranks, several of one shape.
SHAPES: dict[str, tuple[tuple[int, ...], str, Any]] = {
    "a": ((12, 12), "spectral", 1),
    "b": ((12, 12), "spectral", 1),
    "c": ((12, 12), "spectral", 1),
    "square": ((10, 10), "spectral", 1),
    "tall": ((13, 6), "spectral", 1),
    "wide": ((6, 13), "spectral", 1),
    "one row": ((1, 7), "spectral", 1),
    "few rows": ((3, 8), "spectral", 1),
    "qkv": ((27, 9), "spectral", 3),
    "experts": ((6, 4, 12), "spectral", 1),  # flat: polar factors in bf16 hardly depend on how many go together
    "qkv by columns": ((9, 27), "spectral-transposed", 3),
    "grouped queries": ((22, 9), "spectral", (12, 5, 5)),
    "heads": ((7, 12), "spectral", ("inputs", 3)),
    "heads by rows": ((12, 7), "spectral-transposed", ("inputs", (2, 5, 5))),
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


SAVED, END = 3, 4  # steps before a checkpoint is saved, and in all


class Model(nn.Module):
    """Hold only the parameters; if tied, one of them is in two places."""

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
    """Return one group for each lmo and number of blocks, names included."""
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


def muonc(dtype: torch.dtype, **settings: Any) -> Callable[..., Any]:
    """Return a maker of MuonC: Muon where Scion's lmo is a polar factor, except for the taps, and Adam elsewhere."""

    def make(named: dict[str, Tensor], **more: Any) -> sn.MuonC:
        own = groups(named, lmos=True)
        for group in own:
            group["use_muon"] = group["lmo"] in ("spectral", "spectral-transposed", "conv")
            group["lmo"] = group["lmo"] if group["use_muon"] else None
        polar = "svd" if dtype == torch.float64 else "express"
        return sn.MuonC(own, lr=0.02, adam_lr=0.02, polar=polar, **settings, **more)

    return make


def makers(dtype: torch.dtype) -> dict[str, Callable[..., Any]]:
    """Return {name: (named parameters, **mesh) -> optimizer}."""
    plain = {
        "LionC": (sn.LionC, {"lr": 0.02, "weight_decay": 0.5}),
        "AdamC": (sn.AdamC, {"lr": 0.02}),
        "RenormalizedAdamW": (sn.RenormalizedAdamW, {"lr": 0.02}),
        "SGDC": (sn.SGDC, {"lr": 0.02, "nesterov": True}),
        "LionC balance": (sn.LionC, {"lr": 0.02, "weight_decay": 0.5, "hold": "balance", "balance_steps": 5}),
        "SGDC fixed": (sn.SGDC, {"lr": 0.02, "hold": "fixed"}),
        "correct(AdamW)": (lambda *a, **k: sn.correct(torch.optim.AdamW(*a, **k)), {"lr": 0.02, "weight_decay": 0.1}),
        "correct(AdamW) fixed": (
            lambda *a, **k: sn.correct(torch.optim.AdamW(*a, **k), hold="fixed"),
            {"lr": 0.02, "weight_decay": 0.1},
        ),
        "AdamC balance": (sn.AdamC, {"lr": 0.02, "hold": "balance"}),
        "AdamC fixed": (sn.AdamC, {"lr": 0.02, "hold": "fixed"}),
        "AdamC cautious": (sn.AdamC, {"lr": 0.02, "hold": "balance", "cautious": True}),
    }
    return {
        "ScionC": scion(sn.ScionC, dtype),
        "ScionC nesterov exact": scion(sn.ScionC, dtype, nesterov=True, overlap="exact", alpha=0.5),
        "Scion": scion(sn.Scion, dtype, weight_decay=0.1),
        "ScionC balance": scion(sn.ScionC, dtype, hold="balance", balance_steps=5),
        "ScionC cautious": scion(sn.ScionC, dtype, hold="balance", balance_steps=5, cautious=True),
        "ScionC fixed": scion(sn.ScionC, dtype, hold="fixed"),
        "MuonC": muonc(dtype),
        "MuonC balance": muonc(dtype, hold="balance", weight_decay=0.5, adjust_lr_fn="match_rms_adamw"),
        **{
            name: lambda named, cls=cls, settings=settings, **more: cls(groups(named, lmos=False), **settings, **more)
            for name, (cls, settings) in plain.items()
        },
    }


def noise(name: str, t: int, shape: Iterable[int]) -> Tensor:
    seed = 1000 * t + sum(map(ord, name))
    return torch.randn(tuple(shape), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def gradient(name: str, t: int, weight: Tensor, *, trouble: bool = True) -> Tensor | None:
    """Return noise with a pull to zero. With `trouble`, a gradient sometimes has a single infinity or is missing."""
    value = noise(name, t, weight.shape) + 0.3 * weight.double()
    if trouble and t == 2 and name in ("a", "tied", "vector", "conv"):
        value.view(-1)[-1] = torch.inf
    if trouble and t == 3 and name in ("b", "row", "pair"):
        return None
    if trouble:
        _leave_out(value, name, t)
    return value.to(weight.dtype)


def _leave_out(value: Tensor, name: str, t: int) -> None:
    """Zero parts of the gradient: rows and experts that come and go, a block and a whole parameter that stop for good."""
    if name == "embedding":
        value[t % 3 :: 3] = 0
    if name == "experts":
        value[t % 6] = 0
    if t >= 1 and name in ("c", "vector too"):
        value.zero_()
    if t >= 1 and name == "qkv":
        value[9:18] = 0
    if t >= 1 and name == "qkv by columns":
        value[:, 18:] = 0
    if t >= 1 and name == "grouped queries":
        value[12:17] = 0
    if t >= 1 and name == "heads":
        value[:, 4:8] = 0
    if t >= 1 and name == "heads by rows":
        value[2:7] = 0


def like(full: Tensor, p: Any) -> Tensor:
    """Place a full tensor as p is placed, without communication."""
    if not isinstance(p, DTensor):
        return full.clone()
    return distribute_tensor(full, p.device_mesh, p.placements, src_data_rank=None)


def full(p: Any) -> Tensor:
    return (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()


def local(p: Any) -> Tensor:
    return (p.to_local() if isinstance(p, DTensor) else p).detach()


@functools.cache
def mesh_of(*sizes: int) -> Any:
    return init_device_mesh("cpu", sizes, mesh_dim_names=("outer", "inner")[-len(sizes) :])


def model_of(kind: str, dtype: torch.dtype, *, scalar: bool = True) -> tuple[Model, dict[str, Any]]:
    """Return the model placed in this way, and the arguments that its optimizer needs."""
    world = dist.get_world_size() if dist.is_initialized() else 1
    if kind == "single":
        return Model(dtype, scalar=scalar), {}
    if kind in ("ddp", "ddp group"):
        return Model(dtype, scalar=scalar), {"mesh": mesh_of(world) if kind == "ddp" else dist.group.WORLD}
    if kind in ("fsdp", "hsdp", "fsdp over tp"):  # which know no scalars
        model, mesh = Model(dtype, scalar=False), mesh_of(world) if kind == "fsdp" else mesh_of(2, world // 2)
        if kind == "fsdp over tp":
            place(model, lambda p: (mesh["inner"], [Shard(0)]))
            mesh = mesh["outer"]
        fully_shard(model, mesh=mesh)
        return model, {}
    model = Model(dtype, scalar=scalar)
    row, square = mesh_of(world), mesh_of(2, world // 2)
    place(
        model,
        {
            "tp rows": lambda p: (row, [cut(p, 0)]),
            "tp columns": lambda p: (row, [cut(p, 1)]),
            "replicated": lambda p: (row, [Replicate()]),
            "2-d": lambda p: (square, [cut(p, 0), cut(p, 1)]),
            "2-d rows": lambda p: (square, [cut(p, 0), cut(p, 0)]),
        }[kind],
    )
    return model, {}


def cut(p: Tensor, dim: int) -> Any:
    return Shard(min(dim, p.ndim - 1)) if p.ndim else Replicate()


def place(model: Model, where: Callable[[Tensor], tuple[Any, list[Any]]]) -> None:
    for name, p in list(model.named_parameters()):
        sharded = distribute_tensor(p.detach(), *where(p), src_data_rank=None)
        setattr(model, name, nn.Parameter(sharded))
    model.tied_to.weight = model.tied


def has_trouble(maker: str) -> bool:
    """Tell whether some of an optimizer's gradients are missing or infinite; torch's own do not skip those."""
    return "correct" not in maker


@functools.cache
def alone(maker: str, dtype: torch.dtype, steps: int) -> tuple[list[dict[str, Tensor]], dict[str, Any]]:
    """Return the weights of a single process before each step and after the last, and its state, by name."""
    named = dict(Model(dtype).named_parameters())
    optimizer = makers(dtype)[maker](named)
    history = [{name: full(p) for name, p in named.items()}]
    for t in range(steps):
        step(optimizer, named, t, history[-1], trouble=has_trouble(maker))
        history.append({name: full(p) for name, p in named.items()})
    return history, {name: optimizer.state[p] for name, p in named.items()}


@functools.cache
def watched(kind: str, maker: str) -> dict[str, Any]:
    """Return what a monitor measures of these steps, flat: {"9 layers tall norm": ...}."""
    history, _ = alone(maker, torch.float64, END)
    model, told = model_of(kind, torch.float64, scalar=False)
    named = dict(model.named_parameters())
    optimizer = makers(torch.float64)[maker](named, **told)
    with sn.Monitor(optimizer, model, alignment=True, flush=3) as monitor:
        for t in range(END):
            step(optimizer, named, t, history[t])
        return dict(entry for record in monitor.measure() for entry in flat(record, str(record["step"])))


def flat(value: Any, name: str) -> Iterator[tuple[str, float | None]]:
    if not isinstance(value, dict):
        yield name, value
        return
    for key, each in value.items():
        yield from flat(each, f"{name} {key}")


def monitored(cases: list[tuple[str, str]]) -> dict[str, str]:
    """Return where a monitor over shards differs from one in a single process: one example per case."""
    found = {}
    for kind, maker in cases:
        mine, right = watched(kind, maker), watched("single", maker)
        wrong = [key for key in right if not _alike(mine.get(key, "missing"), right[key])]
        wrong += [key for key in mine if key not in right]
        found[f"{maker}, {kind}"] = f"{wrong[0]}: {mine.get(wrong[0])}, not {right.get(wrong[0])}" if wrong else ""
    return found


def _alike(one: Any, two: Any) -> bool:
    if isinstance(one, str) or one is None or two is None:
        return one is two
    return abs(one - two) <= 2e-6 + 1e-5 * abs(two)


def step(optimizer: Any, named: dict[str, Any], t: int, weights: dict[str, Tensor], **how: Any) -> None:
    """Take one step on a gradient made from a single process's weights, so that all layouts get the same."""
    for name, p in named.items():
        value = gradient(name, t, weights[name], **how)
        p.grad = None if value is None else like(value, p)
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * (1 - t / 60)
    optimizer.step()


def difference(optimizer: Any, named: dict[str, Any], weights: dict[str, Tensor], state: dict[str, Any]) -> float:
    """Return the largest relative difference of weights and state, in the 2-norm of each tensor over all ranks."""
    squares = []
    for name, p in named.items():
        pairs = [(p, weights[name])]
        pairs += [(value, state[name][key]) for key, value in optimizer.state[p].items()]
        for mine, right in pairs:
            expected = local(like(right, mine)).double()
            squares.append(torch.stack([(local(mine).double() - expected).square().sum(), expected.square().sum()]))
    sums = torch.stack(squares)
    if dist.is_initialized():
        dist.all_reduce(sums)
    error, scale = sums.sqrt().unbind(1)
    return float((error / scale.clamp(min=1e-12)).max())


def follow(kind: str, maker: str, dtype: torch.dtype, steps: int) -> float:
    """Return the difference to a single process after this many steps on the same full gradients."""
    history, state = alone(maker, dtype, steps)
    model, told = model_of(kind, dtype)
    named = dict(model.named_parameters())
    optimizer = makers(dtype)[maker](named, **told)
    for t in range(steps):
        step(optimizer, named, t, history[t], trouble=has_trouble(maker))
    return difference(optimizer, named, history[-1], state)


def layouts(cases: list[tuple[str, str]], single: list[str], steps: int = END) -> dict[str, float]:
    """Compare fp64 with exact polar factors for `cases`, and fp32 with fast ones for ScionC in the layouts of `single`."""
    found = {f"fp64 {maker}, {kind}": follow(kind, maker, torch.float64, steps) for kind, maker in cases}
    return found | {f"fp32 ScionC, {kind}": follow(kind, "ScionC", torch.float32, steps) for kind in single}


MOVING = ("ScionC", "ScionC nesterov exact", "Scion", "LionC", "MuonC")
HELD = ("ScionC balance", "ScionC cautious", "ScionC fixed", "LionC balance", "MuonC balance")
RESCALED = ("AdamC balance", "AdamC fixed", "AdamC cautious", "correct(AdamW) fixed")
ALL = (*MOVING, "AdamC", "RenormalizedAdamW", "SGDC", "correct(AdamW)", *RESCALED)
SHARDED = (
    *("ScionC", "ScionC nesterov exact", "ScionC cautious", "LionC", "LionC balance", "MuonC", "MuonC balance"),
    *("AdamC", "AdamC cautious", "RenormalizedAdamW", "SGDC", "SGDC fixed", "correct(AdamW)", "correct(AdamW) fixed"),
)


def take_steps_alone() -> None:
    """Take the steps of a single process, so that processes forked after this need not take them again."""
    for maker in (*ALL, *HELD, "SGDC fixed"):
        alone(maker, torch.float64, END)
    alone("ScionC", torch.float32, END)
    for maker in ("ScionC", "AdamC", "MuonC"):
        watched("single", maker)


def two(folder: Path) -> dict[str, Any]:
    """Run what two processes can show in one start: every way to step once, of which `every_layout` has all combinations."""
    cases = [("ddp", maker) for maker in ("ScionC", "LionC", "MuonC")] + [("fsdp", maker) for maker in SHARDED]
    cases += [("tp columns", maker) for maker in ("ScionC balance", "LionC", "ScionC fixed", "MuonC")]
    cases += [("ddp group", "ScionC"), ("replicated", "ScionC")]
    return {
        "layouts": layouts(cases, ["ddp", "fsdp"]),
        "bytes": momentum_bytes(),
        "errors": errors(),
        "monitored": monitored([("ddp", "ScionC"), ("tp columns", "ScionC"), ("fsdp", "AdamC"), ("fsdp", "MuonC")]),
        "losses": end_to_end(),
        "moved": moved(),
        "saved": save(folder, ("ddp", "fsdp")),
        "loaded": load(folder, ("4 ddp", "4 fsdp", "1 single", "2 ddp", "2 fsdp"), ("ddp", "fsdp")),
        "loaded muonc": load(folder, ("4 ddp", "4 fsdp"), ("ddp", "fsdp"), "MuonC"),
    }


def four(folder: Path) -> dict[str, Any]:
    """Run what only four processes can show: meshes of two dimensions, and ranks that have no part of a parameter."""
    cases = [(kind, "ScionC") for kind in ("fsdp", "hsdp", "2-d", "fsdp over tp")]
    cases += [("2-d", "ScionC fixed"), ("2-d", "ScionC cautious"), ("2-d", "MuonC")]
    cases += [("hsdp", "LionC"), ("fsdp over tp", "AdamC balance")]
    return {
        "layouts": layouts(cases, ["hsdp"]),
        "monitored": monitored([("2-d", "ScionC"), ("fsdp", "ScionC")]),  # one rank has no expert
        "bytes": momentum_bytes(),
        "saved": save(folder, ("ddp", "fsdp")) + save(folder, ("ddp", "fsdp"), "MuonC"),
    }


def four_again(folder: Path) -> dict[str, Any]:
    return {"loaded": load(folder, ("2 ddp", "2 fsdp", "1 single"), ("ddp", "fsdp"))}


def every_layout(folder: Path) -> dict[str, Any]:
    kinds = [
        "ddp",
        "fsdp",
        "tp rows",
        "tp columns",
        "2-d rows",
        *(["hsdp", "2-d"] if dist.get_world_size() == 4 else []),
    ]
    cases = [(kind, maker) for kind in kinds for maker in (*MOVING, *HELD)] + [
        (kind, maker) for kind in kinds[1:] for maker in ALL[len(MOVING) :]
    ]
    return {"layouts": layouts(cases, kinds, steps=30)}


# --- memory


def momentum_bytes() -> float:
    """Return this rank's share of the momentum bytes, with mesh=, for ViT-S/16 and its vectors."""
    shapes = [*VIT_S16, (1000, 384), *[(384,)] * 100, ()]
    params = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    optimizer = sn.ScionC(params, lmo="by-shape", mesh=dist.group.WORLD)
    mine = sum(optimizer.state[p]["momentum_buffer"].to_local().nbytes for p in params)
    return mine / sum(p.nbytes for p in params)


# --- checkpoints: 3 steps with one skipped, saved, and 2 more with one missing gradient


def path(folder: Path, kind: str, maker: str) -> Path:
    return folder / maker / f"{dist.get_world_size() if dist.is_initialized() else 1} {kind}"


def checkpointed(kind: str, maker: str = "ScionC") -> tuple[Model, dict[str, Any], Any]:
    model, told = model_of(kind, torch.float64, scalar=False)
    named = dict(model.named_parameters())
    return model, named, makers(torch.float64)[maker](named, **told)


def save(folder: Path, kinds: Iterable[str], maker: str = "ScionC") -> list[str]:
    history, _ = alone(maker, torch.float64, END)
    for kind in kinds:
        model, named, optimizer = checkpointed(kind, maker)
        for t in range(SAVED):
            step(optimizer, named, t, history[t])
        states = get_state_dict(model, optimizer)
        dcp.save(
            {"model": states[0], "optimizer": states[1]},
            checkpoint_id=path(folder, kind, maker),
            no_dist=kind == "single",
        )
    return list(kinds)


def load(folder: Path, saved: Iterable[str], kinds: Iterable[str], maker: str = "ScionC") -> dict[str, float]:
    """Return the difference to the unbroken single process, for each checkpoint and each layout it is loaded into."""
    history, state = alone(maker, torch.float64, END)
    found = {}
    for source in saved:
        for kind in kinds:
            model, named, optimizer = checkpointed(kind, maker)
            for p in named.values():
                p.data.zero_()
            keys = ("model", "optimizer")
            states = dict(zip(keys, get_state_dict(model, optimizer), strict=True))
            dcp.load(states, checkpoint_id=folder / maker / source, no_dist=kind == "single")
            set_state_dict(model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
            for t in range(SAVED, END):
                step(optimizer, named, t, history[t])
            found[f"{source} -> {kind}"] = difference(optimizer, named, history[-1], state)
    return found


def moved() -> dict[str, float]:
    """Hand state dicts unchanged from one layout to another; return the difference to the unbroken single process."""
    pairs = [("fsdp", "single"), ("ddp", "single"), ("single", "fsdp"), ("single", "ddp"), ("ddp", "fsdp")]
    cases = [("ScionC", *pair) for pair in pairs] + [("AdamC", "fsdp", "single"), ("AdamC", "single", "fsdp")]
    cases += [("MuonC", "ddp", "fsdp"), ("MuonC", "fsdp", "single"), ("MuonC", "single", "ddp")]
    found = {}
    for maker, source, kind in cases:
        history, state = alone(maker, torch.float64, END)
        _, old, first = checkpointed(source, maker)
        for t in range(SAVED):
            step(first, old, t, history[t])
        _, new, second = checkpointed(kind, maker)
        for name, p in new.items():
            p.data.copy_(like(full(old[name]), p))
        second.load_state_dict(first.state_dict())
        for t in range(SAVED, END):
            step(second, new, t, history[t])
        found[f"{maker}, {source} -> {kind}"] = difference(second, new, history[-1], state)
    return found


# --- what goes wrong must go wrong on every rank


def message(action: Callable[[], Any]) -> str:
    try:
        action()
    except (ValueError, TypeError) as error:
        return str(error)
    return "no error"


def errors() -> dict[str, str]:
    rank, found = dist.get_rank(), {}
    weights = alone("ScionC", torch.float64, END)[0][0]
    for kind in ("ddp", "fsdp"):
        for maker in ("ScionC", "LionC"):
            model, told = model_of(kind, torch.float64)
            named = dict(model.named_parameters())
            optimizer = makers(torch.float64)[maker](named, **told)
            step(optimizer, named, 0, weights)
            before = {name: full(p) for name, p in named.items()}
            if rank == 1:
                named["tall"].grad = None
            found[f"missing gradient, {maker}, {kind}"] = message(optimizer.step)
            same = all(torch.equal(before[name], full(p)) for name, p in named.items())
            found[f"missing gradient, {maker}, {kind}: untouched"] = str(same)
            step(optimizer, named, 1, weights)  # goes on

            for group in optimizer.param_groups:
                group["check_finite"] = True
            if rank == 1:
                grad: Any = named["tall"].grad
                grad = grad.to_local() if isinstance(grad, DTensor) else grad
                grad[-1, -1] = torch.nan
            found[f"not finite, {maker}, {kind}"] = message(optimizer.step)

            turned = dict(reversed(named.items())) if rank == 1 else named
            optimizer = makers(torch.float64)[maker](turned, **told)
            found[f"order, {maker}, {kind}"] = message(optimizer.step)
    _, named, optimizer = checkpointed("fsdp")
    if rank == 0:
        optimizer.state_dict()  # alone: must not wait for others
    other = optimizer.state_dict()
    first = other["param_groups"][0]["params"][0]
    other["state"][first]["momentum_buffer"] = torch.zeros(3, 5)
    found["another model"] = message(lambda: optimizer.load_state_dict(other))
    found["mesh with DTensors"] = message(
        lambda: checkpointed("fsdp") and makers(torch.float64)["ScionC"](named, mesh=mesh_of(2))
    )
    plain = dict(Model(torch.float64).named_parameters())
    found["mesh of two dimensions"] = message(lambda: makers(torch.float64)["LionC"](plain, mesh=mesh_of(2, 1)))
    found["no mesh"] = message(lambda: makers(torch.float64)["LionC"](plain, mesh=2))
    meta = {"a": nn.Parameter(torch.zeros(12, 12, device="meta"))}
    found["mesh of another device"] = message(lambda: makers(torch.float64)["ScionC"](meta, mesh=mesh_of(2)))
    return found


# --- end to end


def end_to_end() -> dict[str, float]:
    """Return the last loss of a small network on its own gradients: one process on the whole batch, DDP and FSDP2 on
    slices of it.
    """
    return {kind: _trained(kind) for kind in ("single", "ddp", "fsdp")}


def _trained(kind: str) -> float:
    torch.manual_seed(0)
    layers = [nn.Linear(12, 30), nn.ReLU(), nn.Linear(30, 30), nn.ReLU(), nn.Linear(30, 5)]
    net: Any = nn.Sequential(*layers)
    x, world, rank = torch.randn(64, 12), dist.get_world_size(), dist.get_rank()
    y = (x[:, :5] + x[:, 5:10]).argmax(1)
    if kind == "fsdp":
        fully_shard(net, mesh=mesh_of(world))
    settings = {"mesh": mesh_of(world)} if kind == "ddp" else {}
    optimizer = sn.ScionC(sn.param_groups(net, output="4", lr=0.02), lr=0.02, **settings)
    run = nn.parallel.DistributedDataParallel(net) if kind == "ddp" else net
    mine = slice(None) if kind == "single" else slice(rank * 64 // world, (rank + 1) * 64 // world)
    loss = torch.zeros(())
    for _ in range(30):
        loss = nn.functional.cross_entropy(run(x[mine]), y[mine])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    loss = loss.detach().clone()
    if kind != "single":
        dist.all_reduce(loss)
        loss /= world
    return loss.item()


def sleeper(folder: Path) -> None:
    time.sleep(600)
