"""The jobs of tests/test_residual_sharded.py: bf16 weights beside fp32 ones in the same layout, on every process."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import distributed_jobs as jobs
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from steadynorm.optim import halves
from steadynorm.optim.residual import RESIDUAL

BF16, FP32 = torch.bfloat16, torch.float32
MAKERS = ("ScionC", "ScionC nesterov exact", "ScionC balance", "ScionC cautious", "ScionC fixed", "LionC")
MAKERS += ("LionC balance", "RenormalizedAdamW", "SGDC", "SGDC fixed")
REPLICATED = ("ScionC", "ScionC balance", "LionC")  # of those that take mesh=
SAVED, END = 3, 4


def made(kind: str, maker: str, dtype: torch.dtype) -> tuple[Any, dict[str, Any], Any]:
    """Return a model in this layout whose weights are bf16 numbers in either dtype, its parameters, and an optimizer."""
    model, mesh = jobs.model_of(kind, dtype, scalar=False)
    named = dict(model.named_parameters())
    for p in named.values():
        p.data.copy_(p.data.to(BF16))
    return model, named, jobs.makers(FP32)[maker](named, **mesh)


def step(optimizer: Any, named: dict[str, Any], t: int) -> None:
    """Take a step on bf16 gradients that depend on name and step only; some are missing, infinite or zero."""
    for name, p in named.items():
        value = jobs.gradient(name, t, torch.zeros(p.shape, dtype=BF16))
        p.grad = None if value is None else jobs.like(value.to(p.dtype), p)
    for group in optimizer.param_groups:
        group["lr"] = 0.02 * (1 - t / 60)
    optimizer.step()


def masters(optimizer: Any, named: dict[str, Any], part: Callable[[Any], Tensor] = jobs.full) -> dict[str, Tensor]:
    """Return the fp32 weights that bf16 parameters and their state stand for, by name: whole, or this rank's part."""
    return {
        name: halves.merge(part(p), part(optimizer.state[p][RESIDUAL]).view(torch.int16).squeeze(-1))
        for name, p in named.items()
    }


def unlike(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> list[str]:
    """Return the names of weights whose bits differ."""
    pairs = {name: (x.view(torch.int32), theirs[name].view(torch.int32)) for name, x in ours.items()}
    return [name for name, (x, y) in pairs.items() if not torch.equal(x, y)]


def followed(kind: str, maker: str) -> list[str]:
    """Return of which weights this rank's part differs from fp32 training in the same layout, after any of the steps."""
    _, half, optimizer = made(kind, maker, BF16)
    _, single, reference = made(kind, maker, FP32)
    wrong = set()
    for t in range(END):
        step(optimizer, half, t)
        step(reference, single, t)
        expected = {name: jobs.local(p) for name, p in single.items()}
        wrong |= set(unlike(masters(optimizer, half, jobs.local), expected))
    return sorted(wrong)


def state_share(kind: str) -> float:
    """Return this rank's bytes of residuals over those of all weights."""
    _, named, optimizer = made(kind, "LionC", BF16)
    mine = [optimizer.state[p][RESIDUAL] for p in named.values()]
    return sum((x.to_local() if kind == "fsdp" else x).nbytes for x in mine) / sum(
        2 * p.numel() for p in named.values()
    )


def resumed(folder: Path, kind: str) -> list[str]:
    """Save with DCP, load into new bf16 weights, and go on; return what differs from the unbroken run."""
    model, named, optimizer = made(kind, "ScionC", BF16)
    for t in range(SAVED):
        step(optimizer, named, t)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(states, checkpoint_id=folder / f"residual {kind}")
    again, other, second = made(kind, "ScionC", BF16)
    for p in other.values():
        p.data.zero_()
    states = dict(zip(("model", "optimizer"), get_state_dict(again, second), strict=True))
    dcp.load(states, checkpoint_id=folder / f"residual {kind}")
    set_state_dict(again, second, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    wrong = unlike(masters(second, other), masters(optimizer, named))
    for t in range(SAVED, END):
        step(optimizer, named, t)
        step(second, other, t)
    return wrong + unlike(masters(second, other), masters(optimizer, named))


def resharded(folder: Path, source: str, kind: str) -> list[str]:
    """Load what `resumed` saved into another layout; return what differs from the run that saved it."""
    _, named, optimizer = made(source, "ScionC", BF16)
    for t in range(SAVED):
        step(optimizer, named, t)
    model, other, second = made(kind, "ScionC", BF16)
    states = dict(zip(("model", "optimizer"), get_state_dict(model, second), strict=True))
    dcp.load(states, checkpoint_id=folder / f"residual {source}")
    set_state_dict(model, second, model_state_dict=states["model"], optim_state_dict=states["optimizer"])
    return unlike(masters(second, other), masters(optimizer, named))


def handed_over(source: str, kind: str) -> list[str]:
    """Hand a state dict unchanged to another layout; return what differs."""
    _, named, optimizer = made(source, "ScionC", BF16)
    for t in range(SAVED):
        step(optimizer, named, t)
    _, other, second = made(kind, "ScionC", BF16)
    for name, p in other.items():
        p.data.copy_(jobs.like(jobs.full(named[name]), p))
    second.load_state_dict(optimizer.state_dict())
    return unlike(masters(second, other), masters(optimizer, named))


def gathered() -> list[str]:
    """Gather whole state on rank 0 and broadcast it from there, as trainers do; return what differs."""
    model, named, optimizer = made("fsdp", "ScionC", BF16)
    for t in range(SAVED):
        step(optimizer, named, t)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = get_optimizer_state_dict(model, optimizer, options=options)
    again, other, second = made("fsdp", "ScionC", BF16)
    for name, p in other.items():
        p.data.copy_(named[name].data)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(again, second, whole if dist.get_rank() == 0 else {}, options=options)
    return unlike(masters(second, other), masters(optimizer, named))


def two(folder: Path) -> dict[str, Any]:
    """Run everything that two processes can show in one start."""
    cases = [("fsdp", maker) for maker in MAKERS] + [("ddp", maker) for maker in REPLICATED]
    cases += [("tp columns", "ScionC"), ("tp columns", "SGDC"), ("replicated", "ScionC")]
    return {
        "followed": {f"{maker}, {kind}": followed(kind, maker) for kind, maker in cases},
        "shares": {kind: state_share(kind) for kind in ("fsdp", "ddp")},
        "resumed": {kind: resumed(folder, kind) for kind in ("fsdp", "ddp")},
        "resharded": {
            f"{source} -> {kind}": resharded(folder, source, kind)
            for source, kind in (("fsdp", "ddp"), ("ddp", "fsdp"))
        },
        "handed over": {
            f"{source} -> {kind}": handed_over(source, kind)
            for source, kind in (("fsdp", "single"), ("single", "fsdp"), ("ddp", "fsdp"), ("fsdp", "ddp"))
        },
        "gathered": {"fsdp": gathered()},
    }
