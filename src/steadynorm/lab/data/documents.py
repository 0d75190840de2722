"""Read documents from text, JSON lines and parquet files, in units that depend only on the files."""

import contextlib
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from steadynorm.files import PathLike
from steadynorm.lab.data.download import DataError

_SUFFIXES = (".txt", ".jsonl", ".parquet")
_UNIT_BYTES = 1 << 23


@dataclass(frozen=True)
class Unit:
    """Piece of input: bytes `start` to `stop` of a file, or row group `start` of a parquet file."""

    path: Path
    start: int
    stop: int
    size: int  # bytes, for the progress bar


def input_files(inputs: Iterable[PathLike]) -> list[Path]:
    """Return the input files, with folders replaced by their files in order of name."""
    files: list[Path] = []
    for path in map(Path, [inputs] if isinstance(inputs, str | Path) else inputs):
        if not path.exists():
            raise DataError(f"{path}: no such file")
        candidates = sorted(path.rglob("*")) if path.is_dir() else [path]
        matching = [file for file in candidates if file.suffix in _SUFFIXES and not file.is_dir()]
        if not matching:
            raise DataError(f"{path}: expected {', '.join(_SUFFIXES)} files, or a folder of them")
        files += matching
    if not files:
        raise DataError("tokenize_files: no inputs; pass files or folders")
    return files


def split_units(path: Path, text_key: str) -> Iterator[Unit]:
    """Yield the units of a file."""
    size = path.stat().st_size
    if path.suffix == ".parquet":
        with _parquet(path, text_key) as file:
            for group in range(file.num_row_groups):
                yield Unit(path, group, group + 1, size // file.num_row_groups)
    elif path.suffix == ".txt":
        yield Unit(path, 0, size, size)
    else:
        cuts = [*range(0, size, _UNIT_BYTES), size]
        yield from (Unit(path, start, stop, stop - start) for start, stop in pairwise(cuts))


def read_documents(unit: Unit, text_key: str) -> Iterator[str]:
    """Yield the texts of a unit that are not empty; an error names the file and the line."""
    read = {".txt": _text, ".jsonl": _json_lines, ".parquet": _rows}[unit.path.suffix]
    return filter(None, read(unit, text_key))


def _text(unit: Unit, text_key: str) -> Iterator[str]:
    content = unit.path.read_bytes()
    try:
        yield content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise DataError(f"{unit.path}, line {line}: not UTF-8 ({error.reason}); convert the file to UTF-8") from error


def _json_lines(unit: Unit, text_key: str) -> Iterator[str]:
    """Yield the texts of lines that begin in this unit."""
    with unit.path.open("rb") as file:
        if unit.start:
            file.seek(unit.start - 1)
            file.readline()
        while (begin := file.tell()) < unit.stop:
            if not (line := file.readline()).strip():
                continue
            try:
                text = json.loads(line)[text_key]
                if not isinstance(text, str):
                    raise TypeError(f"{text_key!r} holds {type(text).__name__}, not text")
                text.encode()  # raises for half of a surrogate pair
            except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
                file.seek(0)
                blocks = (file.read(min(_UNIT_BYTES, begin - at)) for at in range(0, begin, _UNIT_BYTES))
                number = 1 + sum(block.count(b"\n") for block in blocks)
                where = f"{unit.path}, line {number}"
                if isinstance(error, json.JSONDecodeError):
                    raise DataError(f"{where}: not JSON ({error}); fix the line") from error
                raise DataError(
                    f"{where}: no text under {text_key!r} ({type(error).__name__}: {error}); fix the line or pass text_key="
                ) from error
            yield text


@contextlib.contextmanager
def _parquet(path: Path, text_key: str) -> Iterator[Any]:
    import pyarrow
    from pyarrow import parquet

    try:
        with parquet.ParquetFile(path) as file:
            if text_key not in (columns := file.schema_arrow.names):
                raise DataError(f"{path}: no column {text_key!r} but {', '.join(columns)}; pass text_key=")
            if (kind := str(file.schema_arrow.field(text_key).type)) not in ("string", "large_string", "string_view"):
                raise DataError(f"{path}: column {text_key!r} holds {kind}, not text; pass text_key=")
            yield file
    except (pyarrow.ArrowException, OSError) as error:
        raise DataError(f"{path}: not a whole parquet file ({error}); download or write it again") from error


def _rows(unit: Unit, text_key: str) -> Iterator[str]:
    with _parquet(unit.path, text_key) as file:
        before = sum(file.metadata.row_group(group).num_rows for group in range(unit.start))
        for row, text in enumerate(file.read_row_group(unit.start, columns=[text_key]).column(0).to_pylist()):
            if text is None:
                raise DataError(f"{unit.path}, row {before + row + 1}: no text in column {text_key!r}; remove the row")
            yield text
