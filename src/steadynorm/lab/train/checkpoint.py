"""Checkpoints on disk, whole or not there: a folder each, checksummed, the last few kept.

    checkpoints/step-000250/   manifest.json
        model.safetensors, state.pt    of one process: weights; optimizer, schedules, data position, RNG
        shards/, state.pt              of many: weights and optimizer by DCP; the rest

A folder gets its name when everything in it is on the disk. Nothing that is loaded from one can run code: state.pt loads
with weights_only=True, shards by `sharded`.
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
_OS_ERROR = re.compile(r"\(os error (\d+)\)")  # how safetensors tells of the disk
_UNFINISHED = re.compile(r"\.step-\d{6,}\.tmp")
_NAME = re.compile(r"step-(\d{6,})")
_MODEL, _STATE, _MANIFEST = "model.safetensors", "state.pt", "manifest.json"

_UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError, EOFError)

Saved = tuple[Path, dict[str, Tensor] | None, dict[str, Any]]


class CheckpointError(ValueError):
    """A checkpoint cannot be used."""


def begin(folder: Path, step: int, *, fresh: bool) -> Path:
    """Where the files of a new checkpoint go until it is whole; `fresh`: cleared first."""
    made = folder / f".step-{step:06d}.tmp"
    if fresh:
        tidy(make_folder(folder))
        make_folder(made)
    return made


def tidy(folder: Path) -> None:
    """Remove what a process that was killed has left: checkpoints half written or half removed."""
    for left in folder.iterdir() if folder.is_dir() else ():
        if _UNFINISHED.fullmatch(left.name):
            shutil.rmtree(left, ignore_errors=True)


def _drop(path: Path) -> None:
    """Remove a checkpoint; stopped on the way, none is left that looks whole."""
    hidden = path.with_name(f".{path.name}.tmp")
    with contextlib.suppress(OSError):
        path.replace(hidden)
    shutil.rmtree(hidden, ignore_errors=True)


def save(folder: Path, step: int, state: Mapping[str, Any], model: Mapping[str, Tensor] | None, *, keep: int) -> Path:
    """Write a checkpoint beside the older ones, then drop all but the newest `keep`.

    Those of later steps go too: the run came back from before them because they are damaged.

    Without `model` its shards have been written into the folder that `begin` gave.
    """
    made, target = begin(folder, step, fresh=model is not None), folder / f"step-{step:06d}"
    try:
        if model is not None:
            save_file(dict(model), made / _MODEL)
        with (made / _STATE).open("wb") as file:  # not the path: torch would not tell that the disk is full
            torch.save(dict(state), file)
        files = sorted(path for path in made.rglob("*") if path.is_file())
        manifest = {"step": step, "sha256": {path.relative_to(made).as_posix(): sha256(path) for path in files}}
        for path in files:
            _sync(path)
        write_json(made / _MANIFEST, manifest)
        shutil.rmtree(target, ignore_errors=True)  # damaged, or the run would not be here again
        made.replace(target)
        sync_folder(folder)
    except BaseException as error:
        shutil.rmtree(made, ignore_errors=True)
        if full := _of_full_disk(error):
            raise explain_os_error(full, target) from error
        raise
    past = [path for path in found(folder) if step_of(path) <= step]
    for dropped in {*found(folder)} - {*past[-keep:]}:
        _drop(dropped)
    return target


def _of_full_disk(error: BaseException | None) -> OSError | None:
    """The full disk behind an error: torch and safetensors raise others for it."""
    while error is not None:
        told = _OS_ERROR.search(str(error))
        cause = OSError(int(told[1]), "") if told else error
        if isinstance(cause, OSError) and is_disk_full(cause):
            return cause
        error = error.__cause__ or error.__context__
    return None


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def found(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=step_of)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name.

    >>> step_of(Path("checkpoints/step-000250"))
    250
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path}: not a checkpoint's name, such as step-000250")
    return int(match[1])


def load(path: Path) -> Saved:
    """(path, model, state) of one checkpoint, once every checksum agrees; model is None where it is in shards."""
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
    """The newest checkpoint that is whole; damaged ones are told and passed over. None if there is none at all."""
    candidates = found(folder)
    for path in reversed(candidates):
        try:
            return load(path)
        except CheckpointError as error:
            warnings.warn(f"{error}; going on from the one before", stacklevel=2)
    if candidates:
        raise CheckpointError(f"{folder}: no checkpoint is whole; remove the folder to start the run again")
    return None
