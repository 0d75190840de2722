"""A server that stalls and cuts, a client that is killed: what arrives in the end is the file, byte for byte."""

import contextlib
import hashlib
import http.server
import os
import random
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from injecting import (
    FULL,
    child,
    damages,
    ended,
    files_in,
    fill,
    injected,
    killed_after,
    killed_at_line,
    lines_of,
    outcome,
    with_small_files,
)
from tiny_set import TINY, A, B, answer_range, archive, tiny_set

from steadynorm.lab.data import download as files
from steadynorm.lab.data.datasets import DATA_SETS, Address, DataSet, get
from steadynorm.lab.data.download import DataError, download_file

BIG = np.random.default_rng(0).bytes(1_000_000)
SHA256 = hashlib.sha256(BIG).hexdigest()


class Unreliable(http.server.BaseHTTPRequestHandler):
    """Serve /stall: a little, then an endless wait; /cut: up to a third; /slow: everything, bit by bit; and /archive."""

    archive = b""
    early = Path()  # a byte is written there for every connection that ends before the file does
    generator = random.Random(0)

    def do_GET(self) -> None:
        content = self.archive if self.path == "/archive" else BIG
        start = answer_range(self, content, self.headers.get("Range"))
        end = (
            start + self.generator.randrange(1, len(content) // 3) if self.path in ("/cut", "/stall") else len(content)
        )
        for at in range(start, min(end, len(content)), 20_000):
            self.wfile.write(content[at : min(at + 20_000, end)])
            if self.path in ("/slow", "/cut"):
                time.sleep(0.002)
        if end < len(content):
            with self.early.open("ab") as log:
                log.write(b"x")
        if self.path == "/stall" and end < len(content):
            time.sleep(1.0)

    def handle(self) -> None:
        with contextlib.suppress(OSError):  # the client is gone
            super().handle()

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start the server and return its address.

    It runs in its own process, so that this one has no threads and can fork clients.
    """
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(files, "_PAUSE", 0.0)
    monkeypatch.setattr(files, "_TIMEOUT", 60.0)
    monkeypatch.setattr(files, "_BLOCK", 10_000)
    Unreliable.early = tmp_path_factory.mktemp("server") / "early"
    Unreliable.archive = archive(tmp_path / "set.tar.gz").read_bytes()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Unreliable) as running:
        pid = child(running.serve_forever)
        yield f"http://127.0.0.1:{running.server_port}"
        os.kill(pid, signal.SIGKILL)
        assert ended(pid) == -signal.SIGKILL


def fetch(url: str, part: Path) -> Path:
    return download_file(url, part, size=len(BIG), sha256_hex=SHA256)


@pytest.mark.parametrize("path", ["/cut", "/stall"])
def test_a_server_that_cuts_or_stalls_delivers_the_file_in_the_end(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
):
    if path == "/stall":
        monkeypatch.setattr(files, "_TIMEOUT", 0.2)
        monkeypatch.setattr(files, "_RETRIES", 10_000)  # a busy machine also stalls at times
    assert fetch(server + path, tmp_path / "big.part").read_bytes() == BIG
    early = Unreliable.early.stat().st_size
    assert early >= 3  # a connection gives a third at most
    injected(early)


@pytest.mark.parametrize("times", [8, pytest.param(100, marks=pytest.mark.slow)])
def test_a_client_killed_while_downloading_resumes(server: str, tmp_path: Path, times: int):
    generator, part = random.Random(1), tmp_path / "big.part"
    start = time.perf_counter()
    fetch(server + "/slow", tmp_path / "timed.part").unlink()
    length = time.perf_counter() - start
    hits = 0
    while hits < times:
        left = length * (1 - (part.stat().st_size if part.exists() else 0) / len(BIG))
        if killed_after(generator.uniform(0, left), partial(fetch, server + ("/slow", "/cut")[hits % 2], part)):
            hits += 1
            have = part.read_bytes() if part.exists() else b""
            assert have == BIG[: len(have)]  # what is there is the beginning of the file
        else:
            assert part.read_bytes() == BIG
            part.unlink()
            length *= 0.7  # the machine was busier when it was measured
    assert fetch(server + "/slow", part).read_bytes() == BIG
    assert [path.name for path in tmp_path.iterdir() if path.suffix != ".gz"] == ["big.part"]


@pytest.mark.parametrize("flips", [5, pytest.param(60, marks=pytest.mark.slow)])
def test_a_damaged_part_is_never_taken_for_the_file(server: str, tmp_path: Path, flips: int):
    part = tmp_path / "big.part"
    for label, content in damages(BIG[:700_000], seed=2, flips=flips):
        part.write_bytes(content)
        assert fetch(server + "/slow", part).read_bytes() == BIG, label
    for label, content in damages(BIG, seed=3, flips=flips, cuts=0):
        part.write_bytes(content)
        assert fetch(server + "/slow", part).read_bytes() == BIG, label


@pytest.mark.parametrize("times", [10, pytest.param(120, marks=pytest.mark.slow)])
def test_a_data_set_is_downloaded_from_its_address(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, times: int
):
    content = Unreliable.archive
    monkeypatch.setitem(DATA_SETS, "tiny", from_server(server, content))
    expected = files_in(get("tiny", tmp_path / "unbroken"))
    last = lines_of(partial(get, "tiny", tmp_path / "counted"))
    generator = random.Random(4)
    for k in range(times):
        out = tmp_path / f"out{k}"
        killed_at_line(generator.randrange(1, last), partial(get, "tiny", out))
        assert files_in(get("tiny", out)).keys() == expected.keys()
        assert all((out / name).read_bytes() == expected[name] for name in TINY)


def from_server(server: str, content: bytes) -> DataSet:
    """Return a data set at this address."""
    origin = Address({"set.tar.gz": (f"{server}/archive", len(content), hashlib.sha256(content).hexdigest())})
    return tiny_set(origin)


def test_a_disk_that_fills_while_downloading_is_reported(server: str, small_disk: Path):
    """In the middle of the file: nothing of it is left, and what was there before remains."""
    (small_disk / "mine").write_bytes(b"mine" * 100)
    filler = fill(small_disk, 60_000)
    well, said = outcome(partial(fetch, server + "/slow", small_disk / "big.part"))
    assert not well
    assert f"{small_disk / 'big.part'}: the disk is full; files already there are untouched" in said
    filler.unlink()
    assert files_in(small_disk) == {"mine": b"mine" * 100}


@pytest.mark.parametrize("size", [10, 100, 6000])
def test_a_data_set_that_does_not_fit_on_the_disk_is_refused(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int
):
    """Either the download or its unpacked files do not fit; with room, the same address works."""
    content = Unreliable.archive
    assert 100 < len(content) < 6000 < len(A)
    monkeypatch.setitem(DATA_SETS, "tiny", from_server(server, content))
    well, said = with_small_files(size, partial(get, "tiny", tmp_path / "out"))
    assert not well
    assert any(each in said for each in FULL), said
    assert "files already there are untouched" in said
    assert str(tmp_path / "out") in said
    assert files_in(tmp_path / "out") == {}
    found = files_in(get("tiny", tmp_path / "out"))
    assert (found["a.bin"], found["b.bin"]) == (A, B)


def test_a_server_with_another_file_is_refused_and_nothing_is_left(
    server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    content = Unreliable.archive
    origin = Address({"set.tar.gz": (f"{server}/archive", len(content), "0" * 64)})
    monkeypatch.setitem(DATA_SETS, "tiny", tiny_set(origin))
    injected()
    with pytest.raises(DataError, match=r"/archive: sha256 .*damaged or another one[\s\S]*Bring a\.bin"):
        get("tiny", tmp_path / "out")
    assert files_in(tmp_path / "out") == {}
