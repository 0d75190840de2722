"""A data set of two small files, archives of it, and the answer of a server that honours ranges."""

import hashlib
import io
import tarfile
import zipfile
from collections.abc import Iterable, Mapping
from http.server import BaseHTTPRequestHandler
from pathlib import Path

from steadynorm.lab.data.datasets import DataSet, Origin

A, B = b"first file" * 1000, b"second"
TINY = {"a.bin": hashlib.sha256(A).hexdigest(), "b.bin": hashlib.sha256(B).hexdigest()}
MEMBERS = {"set/a.bin": A, "set/b.bin": B}


def tiny_set(*origins: Origin) -> DataSet:
    """Return the data set with these origins."""
    return DataSet(lambda: TINY, origins, "Bring a.bin and b.bin")


def archive(path: Path, members: Mapping[str, bytes] = MEMBERS, extra: Iterable[tarfile.TarInfo] = ()) -> Path:
    """Write a tar.gz, tar.xz, tar.bz2 or zip, by the name; `extra` are members without content."""
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as book:
            for name, content in members.items():
                book.writestr(name, content)
        return path
    with tarfile.open(path, f"w:{path.suffix[1:]}") as tape:  # pyright: ignore
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tape.addfile(info, io.BytesIO(content))
        for info in extra:
            tape.addfile(info)
    return path


def answer_range(handler: BaseHTTPRequestHandler, content: bytes, asked: str | None) -> int:
    """Send the status and headers for the range asked for, and return where it starts."""
    start = int(asked.removeprefix("bytes=").rstrip("-")) if asked else 0
    handler.send_response(206 if start else 200)
    handler.send_header("Content-Length", str(len(content) - start))
    if start:
        handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
    handler.end_headers()
    return start
