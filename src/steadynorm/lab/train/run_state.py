"""Save a run to a checkpoint and restore it: whole tensors from one process, DCP shards from several.

Any number of processes can resume from either kind, with DDP or FSDP2.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from steadynorm.lab.train import checkpoint
from steadynorm.lab.train.checkpoint import CheckpointError
from steadynorm.lab.train.parallel import Team
from steadynorm.lab.train.safe_dcp import Planner, Reader
from steadynorm.lab.train.tasks import Task
from steadynorm.monitor import Monitor
from steadynorm.scheduler import Scheduler

Progress = tuple[int, float, dict[str, float]]  # steps and seconds trained, result of the last evaluation


@dataclass(frozen=True)
class RunParts:
    """Objects whose state changes during training."""

    model: nn.Module
    optimizers: Sequence[tuple[Optimizer, Scheduler]]
    monitors: Sequence[Monitor]
    task: Task


def store(folder: Path, parts: RunParts, progress: Progress, team: Team, *, keep: int) -> None:
    """Save a checkpoint; all processes must call this together."""
    step, seconds, final = progress
    rest = {
        "step": step,
        "seconds": seconds,
        "final": final,
        "schedulers": [scheduler.state_dict() for _, scheduler in parts.optimizers],
        "monitors": [monitor.state_dict() for monitor in parts.monitors],
        "data": parts.task.loader.state_dict(),
        "rng": torch.get_rng_state(),
    }
    if team.mesh is None:
        optimizers = [optimizer.state_dict() for optimizer, _ in parts.optimizers]
        whole = {name: tensor.detach().cpu().contiguous() for name, tensor in parts.model.state_dict().items()}
        checkpoint.save(folder, step, rest | {"optimizers": optimizers}, whole, keep=keep)
        return
    unfinished = checkpoint.begin(folder, step, fresh=team.is_main)
    team.barrier()
    try:
        dcp.save(_sharded(parts), checkpoint_id=unfinished / checkpoint.SHARDS)
    except dcp.CheckpointException as error:  # a BaseException, which would pass every handler
        raise CheckpointError(
            f"{unfinished}: cannot be written ({error}); the checkpoints before it are whole"
        ) from error
    if team.is_main:
        checkpoint.save(folder, step, rest, None, keep=keep)
    team.barrier()


def restore(folder: Path, parts: RunParts, team: Team) -> Progress | None:
    """Resume from the newest whole checkpoint and return its progress, or None if there is no checkpoint."""
    saved = checkpoint.latest(folder)
    if saved is None:
        return None
    path, whole, rest = saved
    try:
        if whole is None:
            sharded = _sharded(parts)
            reader = Reader(path / checkpoint.SHARDS)
            dcp.load(sharded, storage_reader=reader, planner=Planner(), no_dist=team.mesh is None)  # noqa: TID251
            _set(parts, sharded["model"], [sharded[f"optimizer{k}"] for k in range(len(parts.optimizers))])
        elif team.mesh is None:
            parts.model.load_state_dict(whole)
            for (optimizer, _), state in zip(parts.optimizers, rest["optimizers"], strict=True):
                optimizer.load_state_dict(state)
        else:
            named = [
                _by_name(parts.model, optimizer, state)
                for (optimizer, _), state in zip(parts.optimizers, rest["optimizers"], strict=True)
            ]
            _set(parts, whole, named, StateDictOptions(full_state_dict=True))
    except (RuntimeError, dcp.CheckpointException, KeyError, UnpicklingError) as error:
        raise CheckpointError(f"{path}: does not fit this model ({error})") from error
    for (_, scheduler), state in zip(parts.optimizers, rest["schedulers"], strict=True):
        scheduler.load_state_dict(state)
    for monitor, state in zip(parts.monitors, rest["monitors"], strict=True):
        monitor.load_state_dict(state)
    parts.task.loader.load_state_dict(rest["data"])
    torch.set_rng_state(rest["rng"])
    return rest["step"], rest["seconds"], rest["final"]


def _sharded(parts: RunParts) -> dict[str, Any]:
    optimizers = {
        f"optimizer{k}": get_optimizer_state_dict(parts.model, optimizer)
        for k, (optimizer, _) in enumerate(parts.optimizers)
    }
    return {"model": get_model_state_dict(parts.model), **optimizers}


def _set(
    parts: RunParts,
    model: dict[str, Any],
    optimizers: Sequence[dict[str, Any]],
    options: StateDictOptions | None = None,
) -> None:
    set_model_state_dict(parts.model, model, options=options)
    for (optimizer, _), state in zip(parts.optimizers, optimizers, strict=True):
        set_optimizer_state_dict(parts.model, optimizer, state, options=options)


def _by_name(model: nn.Module, optimizer: Optimizer, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return a single process's optimizer state with parameter names, as DCP expects, in place of numbers."""
    names = {id(p): name for name, p in model.named_parameters()}
    order = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    tensors: dict[str, dict[str, Tensor]] = {order[index]: values for index, values in state["state"].items()}
    groups = [{**group, "params": [order[index] for index in group["params"]]} for group in state["param_groups"]]
    return {"state": tensors, "param_groups": groups}
