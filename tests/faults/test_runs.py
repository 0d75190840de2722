"""Training where the disk is full, may not be written, or is somebody else's too: told, and the run goes on later."""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
import torch
from brittle import assert_same_run, config
from injecting import (
    FULL,
    child,
    ended,
    files_in,
    fill,
    injected,
    killed,
    outcome,
    with_small_files,
    without_rights,
)

from steadynorm.files import make_folder
from steadynorm.lab.train import checkpoint, loop
from steadynorm.lab.train.config import Config


def die_at(step: int, made: Config) -> None:
    """A run that is killed before this update."""
    original = loop.Trainer._update

    def dies(self: loop.Trainer, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        return original(self, batch)

    def train() -> None:
        loop.Trainer._update = dies
        loop.train(made, quiet=True)

    assert killed(child(train))


# A full disk


@pytest.mark.parametrize("room", [2000, 20_000])
def test_files_that_may_not_grow(tmp_path: Path, data: Path, unbroken: Config, room: int):
    """Whatever it was writing: with room again the run ends as if nothing had been."""
    run = config(data, tmp_path / "run")
    well, said = with_small_files(room, lambda: loop.train(run, quiet=True))
    assert not well
    assert any(each in said for each in FULL), said
    assert not list(run.out.rglob("*.tmp"))
    assert loop.train(run, quiet=True).finished
    assert_same_run(run.out, unbroken.out)


@pytest.mark.parametrize(("room", "whole"), [(4096, 0), (60_000, 0), (140_000, 1), (240_000, 2)])
def test_disk_that_is_full(disk: Path, data: Path, unbroken: Config, room: int, whole: int):
    """A real one: before anything is saved, at the first checkpoint, at the next, at one after; those before stay whole."""
    run = config(data, disk / "run")
    filler = fill(disk, room)
    well, said = outcome(lambda: loop.train(run, quiet=True))
    assert not well
    assert said.startswith("OSError: "), said
    assert "the disk is full; files already there are untouched" in said
    assert str(run.out) in said
    assert not list(run.out.rglob("*.tmp"))
    kept = checkpoint.list_checkpoints(run.out / "checkpoints")
    assert len(kept) == whole
    for path in kept:
        checkpoint.load(path)
    filler.unlink()
    assert loop.train(run, quiet=True).finished
    assert_same_run(run.out, unbroken.out)


# A folder that may not be written


def test_where_nothing_may_be_written_or_a_file_is_in_the_way(tmp_path: Path, data: Path):
    folder = tmp_path / "runs"
    folder.mkdir()
    said = without_rights(folder, lambda: loop.train(config(data, Path("run")), quiet=True))
    assert "run: cannot be written (Permission denied); choose another folder" in said
    (folder / "run").write_text("mine", encoding="utf-8")
    injected()
    with pytest.raises(OSError, match=r"run: cannot be a folder, a file is in its place; remove it or choose another"):
        loop.train(config(data, folder / "run"), quiet=True)
    injected()
    with pytest.raises(OSError, match="cannot be a folder, a file is in its place"):
        make_folder(folder / "run" / "below")
    assert (folder / "run").read_text(encoding="utf-8") == "mine"


def test_run_whose_folder_may_not_be_written_any_more(tmp_path: Path, data: Path, unbroken: Config):
    run = config(data, tmp_path / "runs" / "run")
    run.out.parent.mkdir()
    die_at(8, run)
    before = files_in(run.out)
    said = without_rights(run.out.parent, lambda: loop.train(config(data, Path("run")), quiet=True))
    assert "run/.lock: cannot be written (Permission denied); choose another folder, or make it writable" in said
    assert files_in(run.out) == before
    assert loop.train(run, quiet=True).finished
    assert_same_run(run.out, unbroken.out)


def test_run_on_a_disk_that_became_read_only(disk: Path, data: Path, unbroken: Config):
    """As the system makes it after an error, also for root."""
    run = config(data, disk / "run")
    die_at(5, run)
    before = files_in(run.out)
    subprocess.run(["mount", "-o", "remount,ro", str(disk)], check=True)
    injected()
    try:
        with pytest.raises(
            OSError, match=r"\.lock: cannot be written \(Read-only file system\); choose another folder"
        ):
            loop.train(run, quiet=True)
    finally:
        subprocess.run(["mount", "-o", "remount,rw", str(disk)], check=True)
    assert files_in(run.out) == before
    assert loop.train(run, quiet=True).finished
    assert_same_run(run.out, unbroken.out)


# Two at once


def test_second_one_while_the_first_trains(tmp_path: Path, data: Path, unbroken: Config):
    """It is refused at any time of the first, which does not notice."""
    run = config(data, tmp_path / "run")
    original, (reached, tell), (hear, go) = loop.Trainer._update, os.pipe(), os.pipe()

    def waits(self: loop.Trainer, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.step in (0, 7):
            os.write(tell, b"x")
            os.read(hear, 1)
        return original(self, batch)

    def first() -> None:
        loop.Trainer._update = waits
        loop.train(run, quiet=True)

    pid = child(first)
    for _ in range(2):
        assert os.read(reached, 1) == b"x"
        before = files_in(run.out)
        injected()
        well, said = outcome(lambda: loop.train(run, quiet=True))
        assert not well
        assert said.startswith(f"BusyError: another process is training in {run.out}; wait for it"), said
        assert said.endswith(f"(it is process {pid})")
        assert files_in(run.out) == before
        os.write(go, b"x")
    assert ended(pid) == 0
    assert_same_run(run.out, unbroken.out)
    for handle in (reached, tell, hear, go):
        os.close(handle)


def test_many_started_at_the_same_time(tmp_path: Path, data: Path, unbroken: Config):
    run = config(data, tmp_path / "run")
    injected()
    codes = [ended(pid) for pid in [child(partial(loop.train, run, quiet=True)) for _ in range(3)]]
    assert codes.count(0) >= 1  # the others were refused, or came when it was done
    assert set(codes) <= {0, 1}
    assert_same_run(run.out, unbroken.out)
