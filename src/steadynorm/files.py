"""Files on disk: what is written appears whole or not at all; one process at a time in a folder."""

import contextlib
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

PathLike = str | os.PathLike[str]

_FULL = (errno.ENOSPC, errno.EDQUOT)


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


class BusyError(ValueError):
    """Another process works in the folder."""


@contextlib.contextmanager
def lock(folder: Path, *, busy: str | None = None, name: str = ".lock") -> Iterator[None]:
    """One process at a time works in this folder; the others wait, or fail with `busy` if there is such a message.

    Locks of different names do not know of each other.

    The lock ends with the process, however that ends.

    Where the file system has no locks all go on at once: files still appear whole, and the last writer wins.
    """
    try:
        import fcntl
    except ImportError:  # Windows
        yield
        return
    with (folder / name).open("ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if busy is None else fcntl.LOCK_NB))
        except BlockingIOError:
            raise BusyError(busy) from None
        except OSError:
            pass
        yield
