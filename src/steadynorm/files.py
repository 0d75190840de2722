"""Files on disk: what is written appears whole or not at all; one process at a time in a folder."""

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

SEAL = "checksum"  # the last key of a sealed JSON file
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS)


@contextlib.contextmanager
def atomic_write(path: PathLike) -> Iterator[BinaryIO]:
    """A file opened for writing that takes its name only when it is whole and on the disk.

    Stopped at any moment, even by kill -9, `path` holds what it held before; at worst a hidden `.tmp` file stays until
    the same file is written again.

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
        _sweep(target)
        temporary, opened = _temporary(target)
        with opened as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
            if fcntl is None:
                file.close()  # Windows does not rename an open file
            temporary.replace(target)
    except BaseException as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                temporary.unlink()
        if (better := told(error, target)) is not error:
            raise better from error
        raise
    sync_folder(target.parent)


def _temporary(target: Path) -> tuple[Path, BinaryIO]:
    """A new file beside `target`, locked as long as it is written: one without a lock has been left by a dead process."""
    while True:
        path = target.with_name(f".{target.name}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
        file = path.open("xb")
        if fcntl is not None:
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(file, fcntl.LOCK_EX)
        if path.exists():  # else another process took it for a leftover before it was locked
            return path, file
        file.close()


def _sweep(target: Path) -> None:
    """Remove what writers of this file who were killed have left."""
    if fcntl is None:
        return
    ours = re.compile(rf"\.{re.escape(target.name)}\.\d+-[0-9a-f]{{8}}\.tmp")
    for path in [each for each in target.parent.iterdir() if ours.fullmatch(each.name)]:
        with contextlib.suppress(OSError), path.open("rb+") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()


def write_json(path: PathLike, value: Any) -> None:
    """`value` as JSON, whole or not at all; of a mapping, with the checksum of the rest as its last key."""
    with atomic_write(path) as file:
        file.write((json.dumps(sealed(value) if isinstance(value, Mapping) else value, indent=1) + "\n").encode())


def sealed(value: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping with its checksum.

    >>> sealed({"a": 1})["checksum"][:8]
    'f9d86028'
    """
    rest = {key: each for key, each in value.items() if key != SEAL}
    return {**rest, SEAL: hashlib.sha256(json.dumps(rest).encode()).hexdigest()}


def read_json(path: PathLike) -> dict[str, Any]:
    """What `write_json` wrote, without its checksum. ValueError: not whole; a file that has no checksum is read as it is."""
    try:
        held = json.loads(Path(path).read_bytes())
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: not whole ({error})") from None
    if not isinstance(held, dict):
        raise ValueError(f"{path}: not whole (a {type(held).__name__}, not an object)")
    name = next(reversed(held), "")
    rest = {key: each for key, each in held.items() if key not in (SEAL, name)}
    agrees = bool(held) and held[name] == sealed(rest)[SEAL]
    if agrees != (name == SEAL) or (SEAL in held and name != SEAL):  # the name itself may be what is damaged
        raise ValueError(f"{path}: damaged (its checksum differs)")
    return rest if agrees else held


def make_folder(path: PathLike) -> Path:
    """The folder, made where it is missing."""
    try:
        Path(path).mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise OSError(
            errno.ENOTDIR, f"{path}: cannot be a folder, a file is in its place; remove it or choose another folder"
        ) from error
    except OSError as error:
        raise told(error, Path(path)) from error
    return Path(path)


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
    what = "the file is larger than the disk or ulimit -f allows" if number == errno.EFBIG else "the disk is full"
    return OSError(
        number, f"{path}: {what}; files already there are untouched. Free some space or choose another folder"
    )


def told(error: BaseException, path: Path) -> BaseException:
    """The error itself, or where the disk is full or refuses: one that says which file, and the remedy."""
    if is_full(error):
        return full_disk(error, path)
    if isinstance(error, OSError) and error.errno in _REFUSED:
        return OSError(
            error.errno, f"{path}: cannot be written ({error.strerror}); choose another folder, or make it writable"
        )
    return error


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

    Either way it is told which process is working there. Locks of different names do not know of each other.

    The lock ends with the process, however that ends; what it has left in the file is overwritten by the next.

    Where the file system has no locks all go on at once: files still appear whole, and the last writer wins.
    """
    if fcntl is None:
        yield
        return
    try:
        handle = os.open(folder / name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
    except OSError as error:
        raise told(error, folder / name) from error
    with open(handle, "rb+", buffering=0) as file:  # noqa: PTH123
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = _holder(file)
            if busy is not None:
                raise BusyError(f"{busy} (it is {holder})") from None
            print(f"waiting for {holder}, which works in {folder}", file=sys.stderr, flush=True)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            pass
        with contextlib.suppress(OSError):  # a full disk: nobody will know who it is
            file.truncate(0)
            file.seek(0)
            file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
        yield


def _holder(file: Any) -> str:
    """Who wrote its name into a lock."""
    file.seek(0)
    number, _, host = file.read(300).decode(errors="replace").strip().partition(" ")
    if not number.isdecimal():
        return "a process that has just begun"
    return f"process {number}" + (f" on {host}" if host != socket.gethostname() else "")
