"""kill -9 while data is made: a process, one of its workers, or all of them; the next start makes the same files."""

import multiprocessing
import os
import random
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
from brittle import texts, tokens
from injecting import child, ended, files_in, injected, instants, killed, killed_at_line, lines_of, often, outcome
from tiny_set import archive, tiny_set

from steadynorm.lab.data import documents, shard_writer
from steadynorm.lab.data.datasets import DATA_SETS, get
from steadynorm.lab.data.shards import Tokens


@often
def test_a_killed_tokenising_run_resumes(tmp_path: Path, times: int):
    """The run is killed, and killed again while it resumes."""
    source, generator = texts(tmp_path), random.Random(5)
    expected = files_in(tokens(source, tmp_path / "unbroken").folder)
    last = lines_of(partial(tokens, source, tmp_path / "counted"))
    for number in instants(times // 2, last, seed=5):
        out = tmp_path / f"out{number}"
        killed_at_line(number, partial(tokens, source, out))
        if number < last - 5:
            rest = shutil.copytree(out, tmp_path / f"copy{number}") if out.exists() else tmp_path / f"copy{number}"
            left = lines_of(partial(tokens, source, rest))
            killed_at_line(generator.randrange(1, left), partial(tokens, source, out))
        assert files_in(tokens(source, out).folder) == expected


def victims(monkeypatch: pytest.MonkeyPatch, note: Path, unit: int, whole: bool) -> None:
    """Before this unit's tokens are taken, kill one of the tokenising processes, or the one that leads them."""
    add, seen = shard_writer.ShardWriter.add, []

    def fatal(self: shard_writer.ShardWriter, found: Tokens, count: int) -> None:
        seen.append(count)
        if len(seen) == unit:
            workers = multiprocessing.active_children()
            note.write_text(" ".join(str(each.pid) for each in workers), encoding="utf-8")
            if whole:
                os.kill(os.getpid(), signal.SIGKILL)
            workers[0].kill()
            workers[0].join()
        add(self, found, count)

    monkeypatch.setattr(shard_writer.ShardWriter, "add", fatal)


@pytest.fixture
def in_units(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(documents, "_UNIT_BYTES", 400)  # some twenty units of work
    return texts(tmp_path)


@pytest.mark.slow  # processes are spawned: seconds
def test_the_death_of_one_tokenising_process_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_units: Path
):
    expected = files_in(tokens(in_units, tmp_path / "unbroken").folder)
    out, note = tmp_path / "out", tmp_path / "note"
    with monkeypatch.context() as patch:
        victims(patch, note, unit=4, whole=False)
        well, said = outcome(partial(tokens, in_units, out, workers=2))
    assert len(note.read_text(encoding="utf-8").split()) == 2
    injected()
    assert not well
    assert (
        said == "DataError: a tokenising process was killed, perhaps for lack of memory; run again with fewer workers"
    )
    assert not (out / "meta.json").exists()
    assert (out / ".partial" / "progress.json").exists()
    assert files_in(tokens(in_units, out, workers=1).folder) == expected


@pytest.mark.slow
@pytest.mark.parametrize("unit", [1, 3, 9])
def test_a_killed_tokenising_run_of_many_processes_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, in_units: Path, unit: int
):
    """No worker outlives its leader, and a different number of workers can resume."""
    expected = files_in(tokens(in_units, tmp_path / "unbroken").folder)
    out, note = tmp_path / "out", tmp_path / "note"
    with monkeypatch.context() as patch:
        victims(patch, note, unit, whole=True)
        assert killed(child(partial(tokens, in_units, out, workers=2)))
    workers = [Path("/proc") / number for number in note.read_text(encoding="utf-8").split()]
    assert len(workers) == 2
    deadline = time.monotonic() + 600
    while any(running(each) for each in workers):
        assert time.monotonic() < deadline, "a worker goes on without its parent"
        time.sleep(0.02)
    assert ended(child(partial(tokens, in_units, out, workers=3 if unit == 9 else 1))) == 0
    assert files_in(out) == expected


def running(process: Path) -> bool:
    try:
        return (process / "stat").read_text(encoding="utf-8").rpartition(") ")[2][0] != "Z"
    except OSError:
        return False


@often
def test_getting_data_from_an_archive_survives_a_kill(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int):
    monkeypatch.setitem(DATA_SETS, "tiny", tiny_set())
    source = archive(tmp_path / "set.tar.gz")
    expected = files_in(get("tiny", tmp_path / "unbroken", source=source))
    last = lines_of(partial(get, "tiny", tmp_path / "counted", source=source))
    for number in instants(times, last, seed=6):
        out = tmp_path / f"out{number}"
        killed_at_line(number, partial(get, "tiny", out, source=source))
        whole = {name: content for name, content in files_in(out).items() if name in expected} if out.exists() else {}
        assert whole.items() <= expected.items()
        found = files_in(get("tiny", out, source=source))
        assert {**found, "complete.json": b""} == {**expected, "complete.json": b""}
