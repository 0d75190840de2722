"""The lines of a record file: header, steps and torn end; errors name the line."""

import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from steadynorm.records.schema import FILE, SCHEMA, VERSION, RecordError

HEADER_LIMIT = 1 << 24  # bytes; a foreign file may have no newline at all
STEP = re.compile(rb'\{"step": ?(\d{1,18})[,}]')  # Recorder writes the step first
LAYERED = b', "layers": {'  # in a line with values of single layers; a quote inside a name would be escaped
_CRC = re.compile(rb', "crc": (\d{1,10})\}\s*')  # the end of a line that Recorder wrote


def seal(line: bytes) -> bytes:
    """Return a line, a JSON object, with its checksum at the end.

    >>> seal(b'{"step": 1}')
    b'{"step": 1, "crc": 1034584890}\\n'
    """
    body = line.rstrip()[:-1]
    return body + b', "crc": %d}\n' % zlib.crc32(body)


def is_intact(line: bytes, *, required: bool = False) -> bool:
    """Return whether a line matches its checksum; a line without one is intact unless it is required."""
    at = line.rfind(b', "crc": ')
    match = _CRC.fullmatch(line, at) if at >= 0 else None
    return not required if match is None else zlib.crc32(line[:at]) == int(match[1])


def _json_object(line: bytes) -> dict[str, Any] | None:
    """Return the JSON object in a line, or None if there is none."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def read_header(file: IO[bytes], where: Path) -> dict[str, Any]:
    line = file.readline(HEADER_LIMIT)
    if not line.strip():
        raise RecordError(f"{where}: the file is empty; the run wrote no record, start it again")
    header = _json_object(line)
    if header is None or header.get("schema") != SCHEMA:
        raise RecordError(
            f'{where}: not a run record: the first line is not {{"schema": "{SCHEMA}", ...}}; pass a {FILE} that '
            "steadynorm wrote"
        )
    version = header.get("version")
    if isinstance(version, int) and version > VERSION:
        raise RecordError(
            f"{where}: version {version} is newer than {VERSION}, the newest that this steadynorm reads; update it"
        )
    if version != VERSION or not isinstance(header.get("config"), dict) or not isinstance(header.get("name"), str):
        raise RecordError(f"{where}: line 1 is damaged (version, name or config is missing); restore it from a copy")
    if not is_intact(line, required="crc" in header):
        raise RecordError(f"{where}: line 1 is damaged (its checksum differs); restore it from a copy")
    return header


def end_of_lines(file: IO[bytes]) -> tuple[int, int]:
    """Return the offset after the last whole line, and how many torn lines (0 or 1) follow; start after the header."""
    start, at, tail = file.tell(), file.seek(0, os.SEEK_END), b""
    size = at
    while at > start and b"\n" not in tail.rstrip():
        block = min(at - start, max(1 << 16, len(tail)))
        at -= block
        file.seek(at)
        tail = file.read(block) + tail
    file.seek(start)
    body = tail.rstrip()
    begin = body.rfind(b"\n") + 1
    is_whole = not body or _json_object(body[begin:]) is not None
    return (size, 0) if is_whole else (at + begin, 1)


def steps(file: IO[bytes], where: Path, end: int, header: Mapping[str, Any]) -> Iterator[tuple[int, int, bytes]]:
    """Yield (line number, step, line) of every record up to `end`, with rising steps; parse only unusual lines."""
    required = "crc" in header
    at, previous = file.tell(), -1
    for number, line in enumerate(file, 2):
        if at >= end:
            return
        at += len(line)
        usual = STEP.match(line)
        if usual and line.endswith(b"}\n"):
            step = int(usual[1])
        elif line.isspace():
            continue
        else:
            step = parse(line, where, number)["step"]
        if required and not is_intact(line, required=True):
            raise RecordError(
                f"{where}: line {number} is damaged (its checksum differs); cut the file before it "
                f"(head -n {number - 1}) or restore it from a copy"
            )
        if step <= previous:
            raise RecordError(
                f"{where}: line {number}: step {step} after step {previous}, steps must rise; two runs wrote into one "
                "file: cut it before this line"
            )
        previous = step
        yield number, step, line


def parse(line: bytes, where: Path, number: int) -> dict[str, Any]:
    record = _json_object(line)
    step = record.get("step") if record is not None else None
    if record is None or type(step) is not int or not 0 <= step < 10**18:
        raise RecordError(
            f'{where}: line {number} is damaged: it is not a {{"step": ...}} object; cut the file before it (head -n {number - 1}) '
            "or restore it from a copy"
        )
    record.pop("crc", None)
    return record
