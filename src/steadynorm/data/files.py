"""File helpers: what is written appears whole or not at all; one process at a time in a folder; resumable
downloads; archives that cannot write where they like."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
import shutil
import socket
import tarfile
import time
import urllib.error
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from lzma import LZMAError
from pathlib import Path, PurePosixPath
from typing import IO, Any, BinaryIO

PathLike = str | os.PathLike[str]

_FULL = (errno.ENOSPC, errno.EDQUOT)
_BLOCK = 1 << 20  # bytes
_LARGEST = 1 << 26  # bytes of a file taken out of an archive: none of ours is larger
_PAUSE = 1.0  # seconds before a connection is tried again, doubled each time


class DataError(ValueError):
    """Data, on disk or on the way, that cannot be used; the text says where, what, and the remedy."""


@contextlib.contextmanager
def atomic_write(path: PathLike) -> Iterator[BinaryIO]:
    """A file opened for writing that takes its name only when it is whole and on the disk.

    Stopped at any moment, even by kill -9, `path` holds what it held before; at worst a hidden `.tmp` file stays.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a") as file:
    ...     _ = file.write(b"all"), (folder / "a").exists()
    >>> (folder / "a").read_bytes(), len(list(folder.iterdir()))
    (b'all', 1)
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        with temporary.open("xb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if is_full(error):
            raise full_disk(error, target) from error
        raise
    sync_folder(target.parent)


def write_json(path: PathLike, value: Any) -> None:
    """`value` as JSON, whole or not at all."""
    with atomic_write(path) as file:
        file.write((json.dumps(value, indent=1) + "\n").encode())


def publish(made: Path, target: Path) -> None:
    """Move a finished file of the same disk to its name, once its bytes are on the disk."""
    with made.open("rb+") as file:
        os.fsync(file.fileno())
    made.replace(target)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder last through a power cut, where the system can."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_full(error: BaseException) -> bool:
    """Whether this is the disk (or the quota) being full."""
    return isinstance(error, OSError) and error.errno in _FULL


def full_disk(error: BaseException, path: Path) -> OSError:
    """The same error saying which file, and that nothing was lost."""
    number = error.errno if isinstance(error, OSError) else errno.ENOSPC
    return OSError(
        number, f"{path}: the disk is full; files already there are untouched. Free some space or choose another folder"
    )


def sha256(path: PathLike) -> str:
    """Checksum of a file, in hex.

    >>> sha256(os.devnull)[:8]
    'e3b0c442'
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextlib.contextmanager
def lock(folder: Path, *, busy: str | None = None) -> Iterator[None]:
    """One process at a time works in this folder; the others wait, or fail with `busy` if there is such a message.

    The lock ends with the process, however that ends.

    Where the file system has no locks all go on at once: files still appear whole, and the last writer wins.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder / ".lock").open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise DataError(busy) from None
        except OSError:
            pass
        yield


def cache_dir() -> Path:
    """Where data lies by default: $STEADYNORM_CACHE, else steadynorm in the user's cache folder."""
    if own := os.environ.get("STEADYNORM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steadynorm"


@contextlib.contextmanager
def progress_bar(label: str, total: int, *, shown: bool = True) -> Iterator[Callable[[int], None]]:
    """A bar of bytes on a terminal, nothing elsewhere; yields the function that moves it on."""
    if shown:
        from rich import progress
        from rich.console import Console

        console = Console(stderr=True)
        if console.is_terminal:
            columns = (
                progress.TextColumn("{task.description}"),
                progress.BarColumn(),
                progress.DownloadColumn(),
                progress.TransferSpeedColumn(),
                progress.TimeRemainingColumn(),
            )
            with progress.Progress(*columns, console=console) as bar:
                task = bar.add_task(label, total=total)
                yield lambda count: bar.advance(task, count)
            return
    yield lambda count: None


def download(
    url: str, part: Path, *, size: int, sha256_hex: str, timeout: float = 10.0, retries: int = 3, progress: bool = True
) -> Path:
    """Fetch `url` into `part` and check it; a part that is there already is continued (HTTP Range).

    A connection that breaks is taken up again, up to `retries` times in a row without a new byte; a host that cannot
    be found or refuses fails at once. A whole file with a wrong checksum is removed; if it had been continued, the
    download begins anew once.
    """
    continued = _size(part) > 0
    with progress_bar(url.rsplit("/", 1)[-1], size, shown=progress) as advance:
        advance(_size(part))
        idle = 0
        while (have := _size(part)) != size:
            try:
                _fetch(url, part, have, size, timeout, advance)
            except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
                idle = 0 if _size(part) > have else idle + 1
                if idle > retries or _hopeless(error):
                    raise DataError(f"{url}: {error}") from error
                time.sleep(_PAUSE * 2**idle)
            except OSError as error:
                if is_full(error):
                    part.unlink(missing_ok=True)
                    raise full_disk(error, part) from error
                raise
    found = sha256(part)
    if found == sha256_hex:
        return part
    part.unlink()
    if not continued:
        raise DataError(f"{url}: sha256 {found}, expected {sha256_hex}; the file there is damaged or another one")
    return download(url, part, size=size, sha256_hex=sha256_hex, timeout=timeout, retries=retries, progress=progress)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _hopeless(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return error.code < 500 and error.code not in (408, 429)
    return isinstance(getattr(error, "reason", error), socket.gaierror | ConnectionRefusedError)


def _fetch(url: str, part: Path, have: int, size: int, timeout: float, advance: Callable[[int], None]) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "steadynorm", "Accept-Encoding": "identity"})
    if 0 < have < size:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=timeout) as response:
        kept = have if response.headers.get("Content-Range", "").startswith(f"bytes {have}-") else 0
        advance(kept - have)  # back to 0 where the server sends the whole file again
        with part.open("ab" if kept else "wb") as file:
            while block := response.read(_BLOCK):
                kept += len(block)
                if kept > size:
                    part.unlink()
                    raise DataError(f"{url}: more than the {size} bytes expected; the file there is another one")
                file.write(block)
                advance(len(block))
    if kept < size:
        raise ConnectionError(f"ended after {kept} of {size} bytes")


def unpack(archive: Path, folder: Path, wanted: set[str]) -> Path:
    """Copy the files with these names out of a tar or zip archive, flat into `folder`.

    Nothing else is written, and names in the archive are only compared, so nothing can leave the folder; an archive
    that tries (`..`, an absolute path, a link, a device) is refused whole.
    """
    folder.mkdir()
    try:
        for path, size, opened in _members(archive):
            name = PurePosixPath(path).name
            if name not in wanted:
                continue
            if size > _LARGEST:
                raise DataError(f"{path}: {size} bytes; no file of this data set is that large")
            with opened() as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target)
    except (tarfile.TarError, zipfile.BadZipFile, zlib.error, EOFError, LZMAError, UnicodeError) as error:
        said = str(error).partition("\n")[0]
        raise DataError(f"not a whole tar or zip archive ({said})") from error
    return folder


def _members(archive: Path) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """The plain files of an archive: path, bytes, and a function that opens it."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as book:
            for each in book.infolist():
                _check_path(each.filename)
                if not each.is_dir():
                    yield each.filename, each.file_size, partial(book.open, each)
        return
    with tarfile.open(archive) as tape:
        for each in tape:
            _check_path(each.name)
            if not (each.isfile() or each.isdir()):
                raise DataError(f"member {each.name!r} is a link or a device; the archive is refused")
            if each.isfile():
                yield each.name, each.size, partial(_required, tape.extractfile, each)


def _required(extract: Callable[[tarfile.TarInfo], IO[bytes] | None], member: tarfile.TarInfo) -> IO[bytes]:
    stream = extract(member)
    assert stream is not None  # a plain file has one
    return stream


def _check_path(path: str) -> None:
    parts = PurePosixPath(path.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in path:
        raise DataError(f"member {path!r} leads out of the folder; the archive is refused")
