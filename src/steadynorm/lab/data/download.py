"""Download files and unpack archives safely.

Downloads resume by byte range and are checked by checksum. We do not use pooch because it starts a broken download
again from the first byte.
"""

import bz2
import gzip
import io
import ipaddress
import lzma
import os
import shutil
import socket
import struct
import tarfile
import time
import urllib.error
import urllib.parse
import urllib.request
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from typing import IO

from steadynorm import progress
from steadynorm.files import explain_os_error, is_disk_full, sha256

_BLOCK = 1 << 20  # bytes
_LARGEST = 1 << 26  # bytes of one unpacked file; none of ours is larger
_BROKEN = (
    tarfile.TarError, zipfile.BadZipFile, zlib.error, lzma.LZMAError, struct.error, EOFError, UnicodeError,
    RuntimeError,  # zipfile's for encryption and unknown methods
)  # fmt: skip
_MOST = 1 << 29  # bytes of an unpacked archive
_PAUSE = 1.0  # seconds before the first retry of a connection, doubled each time
_RETRIES = 3  # attempts in a row that may pass without a new byte
_TIMEOUT = 10.0  # seconds to wait for a connection or for data


class DataError(ValueError):
    """Data on disk or in transit cannot be used; the message says where, what and the remedy."""


def cache_dir() -> Path:
    """Return the default folder for data: $STEADYNORM_CACHE, else steadynorm in the user's cache folder."""
    if own := os.environ.get("STEADYNORM_CACHE"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "steadynorm"


def download_file(url: str, part: Path, *, size: int, sha256_hex: str) -> Path:
    """Download `url` into `part`, resuming what is already there by HTTP Range, verify it, and return `part`.

    The address is https, or http on this machine. A broken connection is retried; an unknown host or a refused
    connection fails at once. A complete file with a wrong checksum is removed; if it had been resumed, it is downloaded
    once more from the start. Raises DataError if the address is refused or unreachable, or serves another file.
    """
    where = urllib.parse.urlsplit(url)
    if where.scheme != "https" and not (where.scheme == "http" and _is_local(where.hostname or "")):
        raise DataError(f"{url}: data is only fetched over https; bring the file here and pass it as source")
    continued, idle = _size(part) > 0, 0
    with progress.bar(size, url.rsplit("/", 1)[-1], size=True) as advance:
        advance(_size(part))
        while (have := _size(part)) != size:
            try:
                _fetch(url, part, have, size, advance)
            except (urllib.error.URLError, HTTPException, TimeoutError, ConnectionError) as error:
                idle = 0 if _size(part) > have else idle + 1
                if idle > _RETRIES or _is_final(error):
                    raise DataError(f"{url}: {error}") from error
                time.sleep(_PAUSE * 2**idle)
            except OSError as error:
                if is_disk_full(error):
                    part.unlink(missing_ok=True)
                    raise explain_os_error(error, part) from error
                raise
    digest = sha256(part)
    if digest == sha256_hex:
        return part
    part.unlink()
    if not continued:
        raise DataError(f"{url}: sha256 {digest}, expected {sha256_hex}; the file there is damaged or another one")
    return download_file(url, part, size=size, sha256_hex=sha256_hex)


def _is_local(host: str) -> bool:
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_final(error: Exception) -> bool:
    if isinstance(error, urllib.error.HTTPError):
        error.close()
        return error.code < 500 and error.code not in (408, 429)
    return isinstance(getattr(error, "reason", error), socket.gaierror | ConnectionRefusedError)


def _fetch(url: str, part: Path, have: int, size: int, advance: Callable[[int], object]) -> None:
    request = urllib.request.Request(url, headers={"User-Agent": "steadynorm", "Accept-Encoding": "identity"})  # noqa: S310
    if 0 < have < size:
        request.add_header("Range", f"bytes={have}-")
    with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:  # noqa: S310
        kept = have if response.headers.get("Content-Range", "").startswith(f"bytes {have}-") else 0
        advance(kept - have)  # back to 0 if the server sends the whole file again
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
    """Copy the files with these names out of a tar or zip archive, flat into the new `folder`, and return it.

    Nothing else is written, and names in the archive are only compared, so nothing can leave the folder. An archive
    that tries (`..`, an absolute path, a link, a device), or that unpacks to more than any of ours, raises DataError.
    """
    total = 0
    folder.mkdir()
    try:
        for path, size, opened in _members(archive):
            name = PurePosixPath(path).name
            if (total := total + size) > _MOST:
                raise _too_much()
            if name not in wanted:
                continue
            if size > _LARGEST:
                raise DataError(f"{path}: {size} bytes; no file of this data set is that large")
            with opened() as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target)
    except (*_BROKEN, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:  # not from gzip or bz2
            raise
        reason = str(error).partition("\n")[0]
        raise DataError(f"not a whole tar or zip archive ({reason})") from error
    return folder


def _members(archive: Path) -> Iterator[tuple[str, int, Callable[[], IO[bytes]]]]:
    """Yield the plain files of an archive: path, size, and a function that opens it."""
    if zipfile.is_zipfile(archive):
        with zipfile.ZipFile(archive) as book:
            for member in book.infolist():
                _check_path(member.filename)
                if not member.is_dir():
                    yield member.filename, member.file_size, partial(book.open, member)
        return
    with _decompressed(archive) as plain, tarfile.open(fileobj=_Bounded(plain), mode="r:") as tape:
        for member in tape:
            _check_path(member.name)
            if not (member.isfile() or member.isdir()):
                raise DataError(f"member {member.name!r} is a link or a device; the archive is refused")
            if member.isfile():
                yield member.name, member.size, partial(tape.extractfile, member)  # pyright: ignore[reportReturnType]


def _too_much() -> DataError:
    return DataError(f"more than {_MOST} bytes when unpacked; no archive of this data set is that large")


def _decompressed(archive: Path) -> gzip.GzipFile | IO[bytes]:
    with archive.open("rb") as file:
        start = file.read(6)
    openers = {b"\x1f\x8b": gzip.open, b"BZh": bz2.open, b"\xfd7zXZ\0": lzma.open}
    return next((opener for magic, opener in openers.items() if start.startswith(magic)), open)(archive, "rb")


class _Bounded(io.RawIOBase):
    """Limit a tar stream to `_MOST` bytes, at most `_BLOCK` at once: tarfile trusts any size in a header."""

    def __init__(self, plain: gzip.GzipFile | IO[bytes]) -> None:
        self.plain = plain

    def read(self, size: int = -1, /) -> bytes:
        if not 0 <= size <= _BLOCK or self.plain.tell() + size > _MOST + tarfile.RECORDSIZE:
            raise _too_much()
        return self.plain.read(size)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        if whence != 0 or offset > _MOST + tarfile.RECORDSIZE:
            raise _too_much()
        return self.plain.seek(offset)

    def tell(self) -> int:
        return self.plain.tell()

    def seekable(self) -> bool:
        return True


def _check_path(path: str) -> None:
    parts = PurePosixPath(path.replace("\\", "/"))
    if parts.is_absolute() or ".." in parts.parts or ":" in path:
        raise DataError(f"member {path!r} leads out of the folder; the archive is refused")
