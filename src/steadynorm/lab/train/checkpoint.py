"""Save and load checkpoints that are either whole or absent, keeping the last few.

    checkpoints/step-000250/   manifest.json with checksums
        model.safetensors, state.pt    from one process: weights; optimizer, schedules, data position, RNG
        shards/, state.pt              from several: weights and optimizer by DCP; the rest

A folder gets its name once everything in it is on disk. Loading a checkpoint cannot run code: state.pt is loaded with
weights_only=True, shards by `safe_dcp`.
"""

import contextlib
import io
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from steadynorm.files import explain_os_error, is_disk_full, make_folder, read_json, sha256, sync_folder, write_json

SHARDS = "shards"
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # as safetensors reports it
_UNFINISHED = re.compile(r"\.step-\d{6,}\.tmp")
_NAME = re.compile(r"step-\d{6,}")
_MODEL, _STATE, _MANIFEST = "model.safetensors", "state.pt", "manifest.json"

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError)

Saved = tuple[Path, dict[str, Tensor] | None, dict[str, Any]]


class CheckpointError(ValueError):
    """A checkpoint cannot be used."""


def begin(folder: Path, step: int, *, fresh: bool) -> Path:
    """Return the folder for the files of a new checkpoint until it is whole; `fresh` creates it."""
    unfinished = folder / f".step-{step:06d}.tmp"
    if fresh:
        tidy(make_folder(folder))
        make_folder(unfinished)
    return unfinished


def tidy(folder: Path) -> None:
    """Remove checkpoints that a killed process left half written or half removed."""
    for path in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(path.name):
            shutil.rmtree(path, ignore_errors=True)


def save(folder: Path, step: int, state: Mapping[str, Any], model: Mapping[str, Tensor] | None, *, keep: int) -> Path:
    """Write a checkpoint to `folder`, remove all but the newest `keep` there, and return the new one's path.

    `state` is everything but the weights; `model` is None if their shards are already in the folder that `begin`
    returned. Checkpoints of later steps are removed as well: the run resumed from before them because they are damaged.
    """
    unfinished, target = begin(folder, step, fresh=model is not None), folder / f"step-{step:06d}"
    try:
        if model is not None:
            save_file(dict(model), unfinished / _MODEL)
        with (unfinished / _STATE).open("wb") as file:  # given a path, torch would not report a full disk
            torch.save(dict(state), file)
        files = sorted(path for path in unfinished.rglob("*") if path.is_file())
        manifest = {"step": step, "sha256": {path.relative_to(unfinished).as_posix(): sha256(path) for path in files}}
        for path in files:
            with path.open("rb") as file:
                os.fsync(file.fileno())
        write_json(unfinished / _MANIFEST, manifest)
        shutil.rmtree(target, ignore_errors=True)  # it was damaged, or the run would not be at this step again
        unfinished.replace(target)
        sync_folder(folder)
    except BaseException as error:
        shutil.rmtree(unfinished, ignore_errors=True)
        if full := _of_full_disk(error):
            raise explain_os_error(full, target) from error
        raise
    past = [path for path in list_checkpoints(folder) if step_of(path) <= step]
    for dropped in {*list_checkpoints(folder)} - {*past[-keep:]}:
        hidden = dropped.with_name(f".{dropped.name}.tmp")  # so that an interruption leaves nothing that looks whole
        with contextlib.suppress(OSError):
            dropped.replace(hidden)
        shutil.rmtree(hidden, ignore_errors=True)
    return target


def _of_full_disk(error: BaseException | None) -> OSError | None:
    """Return the full-disk error behind an error of torch or safetensors, if that is the cause."""
    while error is not None:
        match = _OS_ERROR.search(str(error))
        cause = OSError(int(match[1]), "") if match else error
        if isinstance(cause, OSError) and is_disk_full(cause):
            return cause
        error = error.__cause__ or error.__context__
    return None


def list_checkpoints(folder: Path) -> list[Path]:
    """Return the checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name.

    >>> step_of(Path("checkpoints/step-000250"))
    250
    """
    return int(path.name.removeprefix("step-"))


def load(path: Path) -> Saved:
    """Return (path, model, state) of a verified checkpoint; model is None if its weights are in shards."""
    try:
        expected: dict[str, str] = read_json(path / _MANIFEST)["sha256"]
        for name, digest in expected.items():
            if Path(name).is_absolute() or ".." in Path(name).parts or sha256(path / name) != digest:
                raise CheckpointError(f"{path / name}: damaged (checksum differs)")
        if _STATE not in expected or not (_MODEL in expected or any(name.startswith(SHARDS) for name in expected)):
            raise CheckpointError(f"{path / _MANIFEST}: names no weights or no state")
        state = torch.load(io.BytesIO((path / _STATE).read_bytes()), weights_only=True)  # noqa: TID251
        return path, load_file(path / _MODEL) if _MODEL in expected else None, state
    except CheckpointError:
        raise
    except (*_UNREADABLE, SafetensorError, UnpicklingError) as error:
        raise CheckpointError(f"{path}: cannot be read ({str(error).partition(chr(10))[0]})") from error


def latest(folder: Path) -> Saved | None:
    """Return the newest whole checkpoint, warning of damaged ones, or None if there are none at all."""
    candidates = list_checkpoints(folder)
    for path in reversed(candidates):
        try:
            return load(path)
        except CheckpointError as error:
            warnings.warn(f"{error}; resuming from the one before", stacklevel=2)
    if candidates:
        raise CheckpointError(f"{folder}: no checkpoint is whole; remove the folder to start the run again")
    return None
