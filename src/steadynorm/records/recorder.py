"""Write records; a kill leaves at most one torn last line."""

import json
import math
import os
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path, PurePath
from typing import Any, Self

import numpy as np

from steadynorm.files import atomic_write, explain_os_error, make_folder
from steadynorm.records.lines import LAYERED, end_of_lines, read_header, seal, steps
from steadynorm.records.schema import SCHEMA, VERSION, RecordError, flatten

LAYERS = 100  # how closely a long run keeps the values of single layers, see Recorder


class Recorder:
    """Writes a run's records; each line reaches the file in one write, so a kill leaves at most one torn last line.

    Args:
        path: The file.
        name: The run's name.
        config: The run's configuration: plain values, lists and mappings.
        resume_at: If the file exists, keep its steps before this one and continue. Without it an existing file is an error.
        created: ISO time for the header, by default now.
        origin: What made the run, such as the commit and the kind of machine: plain values for the header.
        layers: How densely the values of single layers, which make up most of a record, are kept: gaps between steps that
            have them stay below 1/layers of the step number. The file determines these steps, so a resumed run keeps the
            same ones. None keeps them in every record. All other values are always kept.

    Examples:
        >>> import tempfile
        >>> from steadynorm.records import read
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     with Recorder(Path(folder) / "records.jsonl", name="demo", config={"lr": 0.1}) as recorder:
        ...         recorder.write({"step": 0, "loss": 2.5})
        ...         recorder.write({"step": 1, "loss": float("nan")})
        ...     read(folder).columns["loss"].tolist()
        [2.5, nan]
    """

    def __init__(
        self,
        path: str | Path,
        *,
        name: str,
        config: Mapping[str, Any],
        resume_at: int | None = None,
        created: str | None = None,
        origin: Mapping[str, Any] | None = None,
        layers: int | None = None,
    ):
        if layers is not None and layers < 1:
            raise RecordError(f"layers={layers} must be a whole number of at least 1, or None for every record")
        self.path = Path(path)
        self._layers = layers
        self._last, self._last_layered = -1, 0
        self._left: tuple[int, int, int] | None = None  # identifies the file as it was closed
        plain = _plain(config, "config")
        make_folder(self.path.parent)
        if self.path.exists() and self.path.stat().st_size and resume_at is not None:
            _check_config(self.path, plain)
            with atomic_write(self.path) as file:
                file.writelines(self._kept(resume_at))
        elif self.path.exists() and resume_at is None:
            raise RecordError(
                f"{self.path}: the file exists and would be overwritten; choose another path, remove it, or pass "
                "resume_at=<first step to write again>"
            )
        else:
            created = created or datetime.now(UTC).isoformat(timespec="seconds")
            header = {"schema": SCHEMA, "version": VERSION, "name": str(name), "created": created, "config": plain}
            header |= {"origin": _plain(origin, "origin")} if origin else {}
            with atomic_write(self.path) as file:
                file.write(_line(header))
        self._file: int | None = os.open(self.path, os.O_WRONLY | os.O_APPEND)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one step: `step` (rising), any keys with a number or None, and optionally `layers`."""
        if self._file is None:
            raise RecordError(f"{self.path}: the recorder is closed; make a new one with resume_at=<step>")
        step = record.get("step")
        if isinstance(step, bool) or not isinstance(step, int | np.integer) or not self._last < step < 10**18:
            raise RecordError(
                f"{self.path}: step={step!r} after step {self._last}; every record needs a whole 'step' that rises"
            )
        line: dict[str, Any] = {"step": int(step)}
        for key, value in record.items():
            if key == "layers":
                if self._keeps_layers(int(step)):
                    line[key] = {
                        str(layer): {
                            str(q): _number(v, f"step {step}: layers[{layer!r}][{q!r}]") for q, v in values.items()
                        }
                        for layer, values in value.items()
                    }
            elif key == "crc":
                raise RecordError(f"{self.path}: step {step}: crc is the checksum of a line; give it another name")
            elif key != "step":
                line[str(key)] = _number(value, f"step {step}: {key}")
        _append(self._file, _line(line), self.path)
        self._last = int(step)
        self._last_layered = self._last if "layers" in line else self._last_layered

    def _keeps_layers(self, step: int) -> bool:
        return self._layers is None or step - self._last_layered >= max(1, step // self._layers)

    def sync(self) -> None:
        """Wait until everything written is on disk; call it before saving a checkpoint that resumes from here."""
        if self._file is not None:
            os.fsync(self._file)

    @property
    def last(self) -> int:
        """The last step in the file; -1 if there is none."""
        return self._last

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            self._left = _which(os.fstat(self._file))
            os.close(self._file)
            self._file = None

    def reopen(self) -> bool:
        """Continue after `close` without the copy that `resume_at` makes; return False if the file has changed."""
        if self._file is None and self.path.exists() and _which(self.path.stat()) == self._left:
            self._file = os.open(self.path, os.O_WRONLY | os.O_APPEND)
            return True
        return False

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept(self, resume_at: int) -> Iterator[bytes]:
        """Yield the lines to keep; those of earlier versions get checksums."""
        with self.path.open("rb") as file:
            header = read_header(file, self.path)
            end_line = (lambda line: line.rstrip() + b"\n") if "crc" in header else seal
            file.seek(0)
            yield end_line(file.readline())
            for _, step, line in steps(file, self.path, end_of_lines(file)[0], header):
                if step >= resume_at:
                    return
                self._last = step
                self._last_layered = step if LAYERED in line else self._last_layered
                yield end_line(line)
                if step == resume_at - 1:  # the rest is written again, whatever it is
                    return


def _which(file: os.stat_result) -> tuple[int, int, int]:
    """Return what changes if someone else replaces, cuts or extends a file."""
    return file.st_dev, file.st_ino, file.st_size


def _line(values: Mapping[str, Any]) -> bytes:
    return seal(json.dumps(values, allow_nan=False).encode())


def _append(file: int, line: bytes, path: Path) -> None:
    start, left = os.fstat(file).st_size, memoryview(line)
    try:
        while left:  # one write, unless the disk is nearly full
            left = left[os.write(file, left) :]
    except OSError as error:
        os.ftruncate(file, start)  # leave no torn line if the caller continues
        if (better := explain_os_error(error, path)) is not error:
            raise better from error
        raise


def _number(value: Any, where: str) -> float | int | None:
    if value is None or isinstance(value, int | float | np.number | np.bool_):
        try:
            if value is None or not math.isfinite(value):
                return None
        except OverflowError:  # an int beyond every float
            return None
        return int(value) if isinstance(value, int | np.integer | np.bool_) else float(value)
    raise RecordError(f"{where} is a {type(value).__name__}; pass a number or None (of a tensor, its .item())")


def _plain(value: Any, where: str) -> Any:
    """Return configuration values in JSON's types."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}.{key}") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str | bool):
        return value
    if value is None or isinstance(value, int | float | np.number):
        return _number(value, where)
    raise RecordError(f"{where} is a {type(value).__name__}; pass plain values: numbers, strings, lists, mappings")


def _check_config(path: Path, config: dict[str, Any]) -> None:
    """Raise RecordError if the file was recorded with another configuration."""
    with path.open("rb") as file:
        held = flatten(read_header(file, path)["config"])
    wanted, missing = flatten(config), object()
    differing = [key for key in held | wanted if held.get(key, missing) != wanted.get(key, missing)]
    if differing:
        shown = ", ".join(f"{key} ({held.get(key, 'none')!r} -> {wanted.get(key, 'none')!r})" for key in differing)
        raise RecordError(
            f"{path}: the configuration differs from the one recorded: {shown}; resume with the same, or record elsewhere"
        )
