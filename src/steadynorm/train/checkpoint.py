"""Checkpoints that are whole or not there: a folder each, checksummed, the last few kept.

    checkpoints/step-000250/   model.safetensors   state.pt (optimizer, schedules, data position, RNG)   manifest.json

A folder gets its name when everything in it is on the disk. state.pt loads with weights_only=True.
"""

import io
import json
import os
import re
import shutil
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from steadynorm.data.files import full_disk, is_full, sha256, sync_folder

_NAME = re.compile(r"step-(\d{6,})")
_FILES = ("model.safetensors", "state.pt")


class CheckpointError(ValueError):
    """A checkpoint cannot be used."""


def save(folder: Path, step: int, model: Mapping[str, Tensor], state: Mapping[str, Any], *, keep: int) -> Path:
    """Write a checkpoint beside the older ones, then drop all but the newest `keep`."""
    folder.mkdir(parents=True, exist_ok=True)
    target, made = folder / f"step-{step:06d}", folder / f".step-{step:06d}.tmp"
    shutil.rmtree(made, ignore_errors=True)
    try:
        made.mkdir()
        save_file({name: tensor.detach().cpu().contiguous() for name, tensor in model.items()}, made / _FILES[0])
        torch.save(dict(state), made / _FILES[1])
        manifest = {"step": step, "sha256": {name: sha256(made / name) for name in _FILES}}
        (made / "manifest.json").write_text(json.dumps(manifest))
        for name in (*_FILES, "manifest.json"):
            _sync(made / name)
        sync_folder(made)
        shutil.rmtree(target, ignore_errors=True)
        made.replace(target)
        sync_folder(folder)
    except (OSError, RuntimeError) as error:  # torch.save and safetensors raise RuntimeError for a full disk
        shutil.rmtree(made, ignore_errors=True)
        cause = error if isinstance(error, OSError) else error.__cause__ or error
        if is_full(cause) or "No space left" in str(error):
            raise full_disk(error, target) from error
        raise
    for old in found(folder)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


def found(folder: Path) -> list[Path]:
    """The checkpoints of a run, oldest first."""
    if not folder.is_dir():
        return []
    return sorted((p for p in folder.iterdir() if _NAME.fullmatch(p.name)), key=lambda p: step_of(p))


def step_of(path: Path) -> int:
    """The step in a checkpoint's name.

    >>> step_of(Path("checkpoints/step-000250"))
    250
    """
    match = _NAME.fullmatch(path.name)
    if match is None:
        raise CheckpointError(f"{path}: not a checkpoint's name, such as step-000250")
    return int(match[1])


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """(model, state) of one checkpoint, once every checksum agrees."""
    try:
        manifest = json.loads((path / "manifest.json").read_text())
        for name, expected in manifest["sha256"].items():
            if name not in _FILES or sha256(path / name) != expected:
                raise CheckpointError(f"{path / name}: damaged (checksum differs)")
        content = (path / _FILES[1]).read_bytes()
        return load_file(path / _FILES[0]), torch.load(io.BytesIO(content), weights_only=True)
    except CheckpointError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def latest(folder: Path) -> tuple[Path, dict[str, Tensor], dict[str, Any]] | None:
    """The newest checkpoint that is whole; damaged ones are told and passed over. None if there is none at all."""
    candidates = found(folder)
    for path in reversed(candidates):
        try:
            return path, *load(path)
        except CheckpointError as error:
            warnings.warn(f"{error}; going on from the one before", stacklevel=2)
    if candidates:
        raise CheckpointError(f"{folder}: no checkpoint is whole; remove the folder to start the run again")
    return None
