"""Full disks and missing rights: the error names the file and the remedy, existing files stay, and work resumes once
there is room.
"""

import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch
from brittle import recorded, texts, tokens
from injecting import FULL, Action, files_in, fill, injected, outcome, with_small_files, without_rights
from tiny_set import A, B, archive, tiny_set

from steadynorm.cli import main
from steadynorm.files import atomic_write, write_json
from steadynorm.lab.data.datasets import DATA_SETS, get
from steadynorm.lab.data.shards import write_shard
from steadynorm.lab.train import checkpoint
from steadynorm.records import Recorder
from steadynorm.report import content as report
from steadynorm.report.page import rendering


@dataclass(frozen=True)
class Job:
    """An action that writes into a folder. `before` puts there what must survive; `needs` is more bytes than there are."""

    action: Action
    before: Action
    needs: int = 3000


def record(path: Path) -> None:
    with Recorder(path, name="run", config={}, resume_at=1) as out:
        for step in range(1, 200):
            out.write({"step": step, "loss": 1 / step})


def jobs(folder: Path, other: Path) -> dict[str, Job]:
    """Return every job that writes."""
    model = {"w": torch.arange(3000.0)}

    def save(step: int, model: dict[str, torch.Tensor] = model) -> None:
        checkpoint.save(folder / "checkpoints", step, {"step": step, "m": torch.arange(3000.0)}, model, keep=3)

    small = {"w": torch.ones(3)}

    def whole(path: Path, content: bytes) -> None:
        with atomic_write(path) as file:
            file.write(content)

    return {
        "checkpoint": Job(partial(save, 2), partial(save, 1)),
        "state": Job(partial(save, 2, small), partial(save, 1, small)),
        "records": Job(partial(record, folder / "records.jsonl"), lambda: None),
        "shard": Job(partial(write_shard, folder / "a.bin", range(9000)), partial(write_shard, folder / "a.bin", [1])),
        "json": Job(
            partial(write_json, folder / "a.json", {"a": list(range(9000))}),
            partial(write_json, folder / "a.json", {"a": 1}),
        ),
        "tokens": Job(partial(tokens, other / "text.jsonl", folder / "tokens"), lambda: None),
        "data": Job(partial(get, "tiny", folder / "data", source=other / "set.zip"), lambda: None),
        "page": Job(
            partial(report.report, other / "run", folder / "page.html", title="new"),
            partial(report.report, other / "run", folder / "page.html", title="old"),
        ),
        "whole file": Job(partial(whole, folder / "b", b"x" * 9000), partial(whole, folder / "b", b"old")),
    }


NAMES = ("checkpoint", "state", "records", "shard", "json", "tokens", "data", "page", "whole file")


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Inputs, where there is room."""
    monkeypatch.setitem(DATA_SETS, "tiny", tiny_set())
    monkeypatch.setattr(rendering, "_plotly", lambda: "")
    other = tmp_path / "other"
    other.mkdir()
    texts(other)
    archive(other / "set.zip")
    recorded(other / "run")
    return other


def settled(folder: Path) -> dict[str, bytes]:
    """Return the complete files, which a later call will find."""
    return {name: content for name, content in files_in(folder).items() if ".partial" not in name}


def check(said: str, job: Job, folder: Path, before: dict[str, bytes]) -> None:
    assert any(each in said for each in FULL), said
    assert "files already there are untouched" in said
    assert str(folder) in said
    now = settled(folder)
    assert {name: now[name] for name in before} == before
    assert not [name for name in now if name.endswith(".tmp") or "/.step" in f"/{name}"]
    job.action()  # there is room again


@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_may_not_grow_is_reported(tmp_path: Path, registered: Path, name: str):
    """Under RLIMIT_FSIZE the kernel refuses in the middle of a write, as a full disk does; no root is needed."""
    expected, folder = tmp_path / "expected", tmp_path / "folder"
    for each in (expected, folder):
        each.mkdir()
        jobs(each, registered)[name].before()
    jobs(expected, registered)[name].action()
    before, job = files_in(folder), jobs(folder, registered)[name]
    well, said = with_small_files(job.needs, job.action)
    assert not well
    check(said, job, folder, before)
    assert_same(name, folder, expected)


def assert_same(name: str, folder: Path, expected: Path) -> None:
    ours, theirs = files_in(folder), files_in(expected)
    assert ours.keys() == theirs.keys()
    if name not in ("checkpoint", "state", "records", "data"):  # those hold times and paths
        assert ours == theirs


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("room", [0, 9000])
def test_a_full_disk_is_reported(tmp_path: Path, small_disk: Path, registered: Path, name: str, room: int):
    """With a little room, the disk fills in the middle of the work."""
    job = jobs(small_disk, registered)[name]
    job.before()
    before = files_in(small_disk)
    filler = fill(small_disk, room)
    well, said = outcome(job.action)
    filler.unlink()
    assert not well
    assert said.startswith("OSError: "), said
    check(said, job, small_disk, before)
    expected = tmp_path / "expected"
    expected.mkdir()
    jobs(expected, registered)[name].before()
    jobs(expected, registered)[name].action()
    assert_same(name, small_disk, expected)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_that_may_not_be_written_is_reported(tmp_path: Path, registered: Path, name: str):
    folder = tmp_path / "folder"
    folder.mkdir()
    job = jobs(folder, registered)[name]
    job.before()
    shutil.copytree(registered, folder / "other")
    before = files_in(folder)
    here = jobs(Path(), Path("other"))  # by relative paths: the folders above are closed to others
    said = without_rights(folder, here[name].action)
    assert "cannot be written (Permission denied); choose another folder, or make it writable" in said
    assert files_in(folder) == before
    job.action()


def test_data_in_a_read_only_folder_is_used_as_it_is(tmp_path: Path, registered: Path):
    """Others fill this shared cache."""
    folder = tmp_path / "cache"
    folder.mkdir()
    (folder / "a.bin").write_bytes(A)
    (folder / "b.bin").write_bytes(B)
    assert without_rights(folder, lambda: get("tiny", Path())) == "."


def test_the_command_line_reports_it_in_one_line(
    tmp_path: Path, registered: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.delenv("STEADYNORM_TRACEBACK", raising=False)
    (tmp_path / "out").write_text("mine", encoding="utf-8")
    injected()
    assert main(["report", str(registered / "run"), "--out", str(tmp_path / "out" / "page.html")]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "cannot be a folder, a file is in its place" in said
    assert (tmp_path / "out").read_text(encoding="utf-8") == "mine"
