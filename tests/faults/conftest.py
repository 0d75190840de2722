"""Data and an unbroken run for all faults. After each test, check that its kills hit."""

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import injecting
import pytest
from brittle import config, texts, tokens

from steadynorm.lab.train import loop
from steadynorm.lab.train.config import Config


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("shards")
    return tokens(texts(folder), folder / "made").folder


@pytest.fixture(scope="session")
def unbroken(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Config:
    """Train a run that nothing interrupts."""
    made = config(data, tmp_path_factory.mktemp("unbroken") / "run")
    assert loop.train(made, quiet=True).finished
    return made


@pytest.fixture(autouse=True)
def some_kills_hit() -> Iterator[None]:
    """Check that kills hit.

    One that comes after the work is done tests nothing and is not counted; on a busy machine many do, but not all.
    """
    injecting.KILLS.update({True: 0, False: 0})
    yield
    hit, missed = injecting.KILLS[True], injecting.KILLS[False]
    assert hit or not missed, f"all {missed} kills came when the work was done"


@contextlib.contextmanager
def mounted(folder: Path, size: str) -> Iterator[Path]:
    """Mount a real disk, where this user may."""
    folder.mkdir()
    program = shutil.which("mount")
    command = [program or "", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    if program is None or os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("no disk can be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 100 KiB."""
    with mounted(tmp_path / "disk", "100k") as folder:
        yield folder


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """Mount a disk of 1 MiB, which has room for a run."""
    with mounted(tmp_path / "disk", "1m") as folder:
        yield folder
