"""Two processes in one folder: the second learns which process is first, or waits for it; a dead process blocks nobody."""

import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from brittle import config, texts, tokens
from injecting import answer, child, ended, files_in, injected
from tiny_set import archive, tiny_set

from steadynorm.files import BusyError, atomic_write, lock
from steadynorm.lab.data.datasets import DATA_SETS, get
from steadynorm.lab.paper import pool, runner
from steadynorm.lab.paper.experiment import Context, Experiment, Outcome
from steadynorm.lab.train import loop
from steadynorm.report.page import rendering


@contextmanager
def holder(folder: Path, name: str = ".lock") -> Iterator[int]:
    """Start another process that works in this folder until it is killed; return its id."""
    folder.mkdir(parents=True, exist_ok=True)
    ready, begun = os.pipe()

    def work() -> None:
        with lock(folder, name=name):
            os.write(begun, b"x")
            signal.pause()

    pid = child(work)
    assert os.read(ready, 1) == b"x"
    os.close(ready)
    os.close(begun)
    injected()
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL


def carry(folder: Path) -> None:
    tiny = Experiment("tiny", "Tiny", "nothing", lambda _: Outcome([], {}, {}), {"desk": 1.0, "paper": 1.0})
    runner.run_experiment(tiny, Context(folder))


@pytest.mark.parametrize("command", ["train", "paper run"])
def test_a_second_process_is_refused_and_told_which_process_is_first(
    tmp_path: Path, data: Path, monkeypatch: pytest.MonkeyPatch, command: str
):
    monkeypatch.setattr(rendering, "_plotly", lambda: "")
    folder = tmp_path / "run"
    actions: dict[str, Callable[[], object]] = {
        "train": lambda: loop.train(config(data, folder, steps=2), quiet=True),
        "paper run": partial(carry, folder),
    }
    with holder(folder) as pid:
        before = files_in(folder)
        with pytest.raises(BusyError, match=rf"{re.escape(str(folder))}.*choose another --out \(it is process {pid}\)"):
            actions[command]()
        assert files_in(folder) == before
    actions[command]()  # the lock ended with the process, though its id is still in the file
    assert (folder / ".lock").read_text(encoding="utf-8").split()[0] == str(os.getpid())


def test_a_run_of_the_pool_is_left_to_the_command_that_trains_it(tmp_path: Path):
    with holder(tmp_path / "run"):
        assert pool._claim(tmp_path / "run") is None
    with holder(tmp_path / "run", ".claim"):
        assert pool._claim(tmp_path / "run") is None
    claim = pool._claim(tmp_path / "run")
    assert claim is not None
    claim.close()


@pytest.mark.parametrize("command", ["tokenise", "data get"])
def test_a_process_that_can_use_the_firsts_result_waits_and_says_for_whom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
):
    """The holder is killed while another waits: that one takes over."""
    monkeypatch.setitem(DATA_SETS, "tiny", tiny_set())
    source, folder = texts(tmp_path), tmp_path / "out"
    archive(tmp_path / "set.zip")
    actions: dict[str, Callable[[], object]] = {
        "tokenise": partial(tokens, source, folder),
        "data get": partial(get, "tiny", folder, source=tmp_path / "set.zip"),
    }
    heard = tmp_path / "heard"

    def wait() -> None:
        os.dup2(os.open(heard, os.O_WRONLY | os.O_CREAT), 2)
        import sys

        sys.stderr = os.fdopen(2, "w", encoding="utf-8")
        actions[command]()

    with holder(folder) as pid:
        other = child(wait)
        expected = f"waiting for process {pid}, which works in {folder}\n"
        deadline = time.monotonic() + 600
        while not heard.exists() or heard.read_text(encoding="utf-8") != expected:
            assert time.monotonic() < deadline, heard.read_text(encoding="utf-8") if heard.exists() else "nothing"
            time.sleep(0.01)
        assert files_in(folder) == {}
    assert ended(other) == 0
    assert files_in(folder)


def test_a_lock_names_its_host_where_that_is_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    with holder(tmp_path) as pid:
        monkeypatch.setattr("socket.gethostname", lambda: "elsewhere")
        with pytest.raises(BusyError, match=rf"taken \(it is process {pid} on .+\)"), lock(tmp_path, busy="taken"):
            pytest.fail("two in one folder")


@pytest.mark.parametrize("content", [b"", b"garbage", b"\xff\xfe", b"999999999 host\n", b"1" * 10_000])
def test_the_content_of_a_lock_file_decides_nothing(tmp_path: Path, content: bytes):
    """Only the kernel's lock counts: a stale or damaged file does not block, and an empty one does not admit."""
    (tmp_path / ".lock").write_bytes(content)
    injected()
    with lock(tmp_path, busy="taken"):
        assert (tmp_path / ".lock").read_text(encoding="utf-8").split()[0] == str(os.getpid())
        (tmp_path / ".lock").write_bytes(content)
        assert answer(partial(enter, tmp_path)).startswith("BusyError: taken (it is ")


def enter(folder: Path) -> None:
    with lock(folder, busy="taken"):
        pass


def test_a_lock_that_is_a_link_is_not_followed(tmp_path: Path):
    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    (tmp_path / ".lock").symlink_to(tmp_path / "precious")
    injected()
    with pytest.raises(OSError), lock(tmp_path):
        pytest.fail("followed")
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "mine"


def test_leftovers_of_dead_processes_are_removed_and_files_of_live_ones_are_kept(tmp_path: Path):
    target, (ready, begun) = tmp_path / "a.json", os.pipe()

    def write(content: bytes) -> None:
        with atomic_write(target) as file:
            file.write(content)
            os.write(begun, b"x")
            signal.pause()

    dead, living = child(partial(write, b"dead")), child(partial(write, b"living"))
    assert os.read(ready, 1) + os.read(ready, 1) == b"xx"
    os.kill(dead, signal.SIGKILL)
    injected()
    ended(dead)
    assert len(list(tmp_path.glob(".a.json.*.tmp"))) == 2
    with atomic_write(target) as file:
        file.write(b"new")
    [left] = tmp_path.glob(".a.json.*.tmp")
    assert f".{living}-" in left.name
    os.kill(living, signal.SIGKILL)
    ended(living)
    with atomic_write(target) as file:
        file.write(b"newer")
    assert files_in(tmp_path) == {"a.json": b"newer"}
