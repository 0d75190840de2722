"""Read and write files that are either whole or absent, and keep a folder to one process at a time."""

import contextlib
import errno
import hashlib
import json
import os
import re
import secrets
import socket
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

PathLike = str | os.PathLike[str]

_CHECKSUM = "checksum"  # last key of a JSON file that carries one
_DISK_FULL_ERRNOS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED_ERRNOS = (errno.EACCES, errno.EPERM, errno.EROFS)
_UNSUPPORTED_LOCK_ERRNOS = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


@contextlib.contextmanager
def atomic_write(path: PathLike) -> Iterator[BinaryIO]:
    """Open a temporary file for writing and rename it to `path` once it is complete and on disk.

    If the process stops at any moment, even by kill -9, `path` keeps its previous content. At worst a hidden `.tmp`
    file remains until the same file is written again.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> with atomic_write(folder / "a") as file:
    ...     _ = file.write(b"all"), (folder / "a").exists()
    >>> (folder / "a").read_bytes(), len(list(folder.iterdir()))
    (b'all', 1)
    """
    target = Path(path)
    temporary: Path | None = None
    try:
        _remove_leftovers(target)
        temporary, opened = _open_temporary(target)
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows cannot rename an open file
            temporary.replace(target)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        if (explained := explain_os_error(error, target)) is not error:
            raise explained from error
        raise
    sync_folder(target.parent)


def _open_temporary(target: Path) -> tuple[Path, BinaryIO]:
    """Open a new file beside `target` and lock it, so that an unlocked one is known to be a dead process's leftover."""
    while True:
        path = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        file = path.open("xb")
        if fcntl is not None:
            with contextlib.suppress(OSError):  # the file system does not support locks
                fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # otherwise another process removed it as a leftover before it was locked
            return path, file
        file.close()


def _remove_leftovers(target: Path) -> None:
    if fcntl is None:
        return
    temporary_name = re.compile(rf"\.{re.escape(target.name)}\.\d+-[0-9a-f]{{8}}\.tmp")
    for path in [path for path in target.parent.iterdir() if temporary_name.fullmatch(path.name)]:
        with contextlib.suppress(OSError), path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def write_json(path: PathLike, value: Any) -> None:
    """Write `value` as JSON atomically; a mapping also gets the checksum of its content as its last key."""
    with atomic_write(path) as file:
        content = with_checksum(value) if isinstance(value, Mapping) else value
        file.write((json.dumps(content, indent=1) + "\n").encode())


def with_checksum(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of the mapping with its checksum as the last key.

    >>> with_checksum({"a": 1})["checksum"][:8]
    'f9d86028'
    """
    content = {key: value for key, value in mapping.items() if key != _CHECKSUM}
    return {**content, _CHECKSUM: hashlib.sha256(json.dumps(content).encode()).hexdigest()}


def read_json(path: PathLike) -> dict[str, Any]:
    """Return what `write_json` wrote, without its checksum; a file that has none is returned as it is.

    Raises:
        ValueError: If the file is incomplete or its checksum differs.
    """
    try:
        content = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not whole ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: not whole (a {type(content).__name__}, not an object)")
    last_key = next(reversed(content), "")
    rest = {key: value for key, value in content.items() if key not in (_CHECKSUM, last_key)}
    agrees = bool(content) and content[last_key] == with_checksum(rest)[_CHECKSUM]
    # The key itself may be damaged, so the last value is compared whatever its key.
    if agrees != (last_key == _CHECKSUM) or (_CHECKSUM in content and last_key != _CHECKSUM):
        raise ValueError(f"{path}: damaged (its checksum differs)")
    return rest if agrees else content


def make_folder(path: PathLike) -> Path:
    """Create the folder and its parents if they are missing, and return its path."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise OSError(
            errno.ENOTDIR, f"{path}: cannot be a folder, a file is in its place; remove it or choose another folder"
        ) from error
    except OSError as error:
        raise explain_os_error(error, Path(path)) from error
    return Path(path)


def sync_folder(folder: Path) -> None:
    """Make renames in a folder survive a power cut, where the system supports that."""
    with contextlib.suppress(OSError):
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def is_disk_full(error: BaseException) -> bool:
    """Return whether the error says that the disk or the quota is full."""
    return isinstance(error, OSError) and error.errno in _DISK_FULL_ERRNOS


def explain_os_error(error: BaseException, path: Path) -> BaseException:
    """Return an error that names the file and the remedy if the disk is full or not writable, else `error` itself."""
    if not isinstance(error, OSError):
        return error
    if is_disk_full(error):
        is_too_large = error.errno == errno.EFBIG
        problem = "the file is larger than the disk or ulimit -f allows" if is_too_large else "the disk is full"
        remedy = "files already there are untouched. Free some space or choose another folder"
    elif error.errno in _DENIED_ERRNOS:
        problem, remedy = f"cannot be written ({error.strerror})", "choose another folder, or make it writable"
    else:
        return error
    return OSError(error.errno, f"{path}: {problem}; {remedy}")


def sha256(path: PathLike) -> str:
    """Return the SHA-256 checksum of a file in hexadecimal.

    >>> sha256(os.devnull)[:8]
    'e3b0c442'
    """
    with Path(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


class BusyError(ValueError):
    """Another process is working in the folder."""


@contextlib.contextmanager
def lock(folder: Path, *, busy: str | None = None, name: str = ".lock") -> Iterator[None]:
    """Let one process at a time work in this folder.

    The operating system releases the lock when the process ends, however it ends. On a file system without locks,
    processes run side by side: files are still written atomically, and the last writer wins.

    Args:
        folder: An existing folder.
        busy: Message of the error raised if another process holds the lock. By default, wait for that process and
            say which one it is.
        name: Name of the lock file. Locks with different names are independent.

    Raises:
        BusyError: If another process holds the lock and `busy` is given; the message names that process.
    """
    from filelock import FileLock, Timeout

    path = folder / name
    file_lock = FileLock(path, thread_local=False, fallback_to_soft=False)
    try:
        try:
            file_lock.acquire(blocking=False)
        except Timeout:
            holder = _read_holder(path)
            if busy is not None:
                raise BusyError(f"{busy} (it is {holder})") from None
            print(f"waiting for {holder}, which works in {folder}", file=sys.stderr, flush=True)
            file_lock.acquire()
    except OSError as error:
        if error.errno not in _UNSUPPORTED_LOCK_ERRNOS:
            raise explain_os_error(error, path) from error
    try:
        with contextlib.suppress(OSError):  # on a full disk the holder stays anonymous
            path.write_text(f"{os.getpid()} {socket.gethostname()}\n", encoding="utf-8")
        yield
    finally:
        file_lock.release()


def _read_holder(path: Path) -> str:
    with path.open("rb") as file:
        process, _, host = file.read(300).decode(errors="replace").strip().partition(" ")
    if not process.isdecimal():
        return "a process that has just begun"
    return f"process {process}" + (f" on {host}" if host != socket.gethostname() else "")
