"""Training where the disk is full, read-only or shared with another process: the error says so, and the run can
resume later.
"""

import os
import signal
import subprocess
from functools import partial
from pathlib import Path

import pytest
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
from tiny_run import before_update

from steadynorm.files import make_folder
from steadynorm.lab.train import checkpoint, loop
from steadynorm.lab.train.config import Config


def die_at(step: int, made: Config) -> None:
    """A run that is killed before this update."""
    with before_update(lambda _: os.kill(os.getpid(), signal.SIGKILL), step):
        assert killed(child(partial(loop.train, made, quiet=True)))


# A full disk


@pytest.mark.parametrize("room", [2000, 20_000])
def test_a_run_whose_files_may_not_grow_says_so(tmp_path: Path, data: Path, unbroken: Config, room: int):
    """Whatever was being written, with room again the run ends as if nothing had happened."""
    run = config(data, tmp_path / "run")
    well, said = with_small_files(room, lambda: loop.train(run, quiet=True))
    assert not well
    assert any(each in said for each in FULL), said
    assert not list(run.out.rglob("*.tmp"))
    assert loop.train(run, quiet=True).finished
    assert_same_run(run.out, unbroken.out)


@pytest.mark.parametrize(("room", "whole"), [(4096, 0), (60_000, 0), (140_000, 1), (240_000, 2)])
def test_a_full_disk_is_reported(disk: Path, data: Path, unbroken: Config, room: int, whole: int):
    """A real disk fills before anything is saved, at the first checkpoint, at the next, and at a later one; earlier
    checkpoints stay whole.
    """
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


def test_a_run_says_so_where_it_may_not_write_or_a_file_is_in_the_way(tmp_path: Path, data: Path):
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


def test_a_run_whose_folder_may_not_be_written_any_more(tmp_path: Path, data: Path, unbroken: Config):
    run = config(data, tmp_path / "runs" / "run")
    run.out.parent.mkdir()
    die_at(8, run)
    before = files_in(run.out)
    said = without_rights(run.out.parent, lambda: loop.train(config(data, Path("run")), quiet=True))
    assert "run/.lock: cannot be written (Permission denied); choose another folder, or make it writable" in said
    assert files_in(run.out) == before
    assert loop.train(run, quiet=True).finished
    assert_same_run(run.out, unbroken.out)


def test_a_run_on_a_disk_that_became_read_only(disk: Path, data: Path, unbroken: Config):
    """The system remounts a disk read-only after an error, and then root cannot write either."""
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


def test_a_second_process_is_refused_while_the_first_trains(tmp_path: Path, data: Path, unbroken: Config):
    """It is refused at any time, and the first does not notice."""
    run = config(data, tmp_path / "run")
    (reached, tell), (hear, go) = os.pipe(), os.pipe()

    def wait(_: loop.Trainer) -> None:
        os.write(tell, b"x")
        os.read(hear, 1)

    with before_update(wait, 0, 7):
        pid = child(partial(loop.train, run, quiet=True))
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


def test_at_least_one_of_many_runs_started_at_once_trains(tmp_path: Path, data: Path, unbroken: Config):
    run = config(data, tmp_path / "run")
    injected()
    codes = [ended(pid) for pid in [child(partial(loop.train, run, quiet=True)) for _ in range(3)]]
    assert codes.count(0) >= 1  # the others were refused, or came when it was done
    assert set(codes) <= {0, 1}
    assert_same_run(run.out, unbroken.out)
