"""A run's records: JSONL, the first line the configuration, then one line a step. Written safely, read thinned.

    {"schema": "steadynorm-run", "version": 1, "name": ..., "created": ISO time, "config": {...}}
    {"step": 0, "loss": 10.8, "weight_norm": 1.2, "layers": {"blocks.0.qkv": {"norm": 1.1, "forecast": 1.1}}}

A value is a number or null; what is not finite is written as null, so that every line is valid JSON.
"""

import json
import math
import os
import re
import secrets
import sys
from array import array
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import compress
from pathlib import Path, PurePath
from types import MappingProxyType
from typing import IO, Any, Self

import numpy as np

SCHEMA = "steadynorm-run"
VERSION = 1
FILE = "records.jsonl"

_STEP = re.compile(rb'\{"step": ?(\d{1,18})[,}]')  # what Recorder writes: the step comes first
_HEADER_LIMIT = 1 << 24  # bytes; a foreign file may have no newline at all
_LARGEST = sys.float_info.max
_NOT_JSON = (ValueError, RecursionError)  # what json.loads raises


class RecordError(ValueError):
    """A record file, or what should be written into one, is not what it must be."""


@dataclass(frozen=True)
class Quantity:
    """How a well-known key is shown: label, unit ("" for a pure number), what it means."""

    label: str
    unit: str
    description: str


QUANTITIES: Mapping[str, Quantity] = MappingProxyType(
    {
        "loss": Quantity("Training loss", "nats", "Loss of the step's batch, before the update."),
        "val_loss": Quantity("Validation loss", "nats", "Loss on held-out data."),
        "val_accuracy": Quantity("Validation accuracy", "", "Share of held-out examples classified correctly."),
        "weight_norm": Quantity("Weight norm", "l2", "Norm of all weights."),
        "forecast_norm": Quantity(
            "Forecast weight norm", "l2", "Expected norm if updates were independent of weights."
        ),
        "grad_norm": Quantity("Gradient norm", "l2", "Norm of all gradients, before clipping."),
        "spectral_norm": Quantity("Spectral norm", "", "Largest singular value / sqrt(d_out/d_in), geometric mean."),
        "sign_norm": Quantity("Sign norm", "", "d_in * max|W| of the sign layers, mean."),
        "embedding_norm": Quantity("Embedding norm", "", "max|W| of the embeddings, mean."),
        "bias_norm": Quantity("Bias norm", "rms", "Root mean square of the vectors' elements."),
        "alignment": Quantity("Alignment", "cos", "cos(weights, update), mean over hidden matrices."),
        "expected_alignment": Quantity("Expected alignment", "cos", "The part of it that momentum alone makes."),
        "excess_alignment": Quantity("Excess alignment", "cos", "Measured - expected. Near 0: correct the decay."),
        "lr": Quantity("Learning rate", "", "gamma of the step."),
        "alpha": Quantity("Alpha", "", "Weight of the new gradient in the momentum."),
        "effective_lr": Quantity("Effective learning rate", "", "gamma * sqrt(G): total contribution of one gradient."),
        "weight_decay": Quantity("Weight decay", "", "lambda of the step."),
        "steady_norm_sq": Quantity("Target norm squared", "", "C^2: the |weights|^2 / |update|^2 steered to."),
        "seconds": Quantity("Time", "s", "Seconds since the start of the run."),
        "tokens": Quantity("Tokens", "", "Tokens seen so far."),
    }
)


@dataclass(frozen=True, eq=False)
class Run:
    """One run as read: arrays aligned with `steps`, nan where a value is null or missing.

    `total` counts the records in the file, of which len(steps) were kept; `dropped` the torn lines at its end.
    """

    name: str
    config: Mapping[str, Any]
    created: str
    path: Path | None
    steps: np.ndarray  # int64
    columns: Mapping[str, np.ndarray]  # key -> float64
    layers: Mapping[str, Mapping[str, np.ndarray]]  # layer -> quantity -> float64
    dropped: int = 0
    total: int = 0


def flatten(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, keys joined by dots.

    >>> flatten({"lr": 0.1, "model": {"width": 64, "heads": [4, 4]}})
    {'lr': 0.1, 'model.width': 64, 'model.heads': [4, 4]}
    """
    flat: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


class Recorder:
    """Writes a run's records; each line reaches the file in one write, so a kill leaves at most one torn last line.

    `resume_at=k` keeps what an existing file holds of steps < k and goes on from there; without it an existing file
    is an error.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Recorder(Path(folder) / "records.jsonl", name="demo", config={"lr": 0.1}) as recorder:
    ...         recorder.write({"step": 0, "loss": 2.5})
    ...         recorder.write({"step": 1, "loss": float("nan")})
    ...     read(folder).columns["loss"].tolist()
    [2.5, nan]
    """

    def __init__(self, path: str | Path, *, name: str, config: Mapping[str, Any], resume_at: int | None = None):
        self.path = Path(path)
        self._last = -1
        plain = _plain(config, "config")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.exists() and self.path.stat().st_size and resume_at is not None:
            _same_config(self.path, plain)
            replace_file(self.path, self._kept(resume_at))
        elif self.path.exists() and resume_at is None:
            raise RecordError(
                f"{self.path}: the file exists and would be overwritten; choose another path, remove it, or pass "
                "resume_at=<first step to write again>"
            )
        else:
            created = datetime.now(UTC).isoformat(timespec="seconds")
            header = {"schema": SCHEMA, "version": VERSION, "name": str(name), "created": created, "config": plain}
            replace_file(self.path, [_line(header)])
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
                line[key] = {
                    str(layer): {
                        str(q): _number(v, f"step {step}: layers[{layer!r}][{q!r}]") for q, v in values.items()
                    }
                    for layer, values in value.items()
                }
            elif key != "step":
                line[str(key)] = _number(value, f"step {step}: {key}")
        _append(self._file, _line(line))
        self._last = int(step)

    def close(self) -> None:
        """Close the file; a second call does nothing."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _kept(self, resume_at: int) -> Iterator[bytes]:
        with self.path.open("rb") as file:
            yield file.readline(_HEADER_LIMIT).rstrip() + b"\n"
            for _, step, line in _steps(file, self.path, _end(file)[0]):
                if step >= resume_at:
                    return
                self._last = step
                yield line.rstrip() + b"\n"


def read(path: str | Path, *, max_points: int | None = None) -> Run:
    """A record file, or the folder that holds `records.jsonl`, as arrays.

    With `max_points` only that many lines are parsed, first and last among them, evenly spaced within each kind of
    line (by how many values it gives): the rare lines that hold a validation loss or layers are not lost among the many.
    A torn last line is dropped and counted; whatever else is wrong raises `RecordError`.
    """
    where = Path(path)
    where = where / FILE if where.is_dir() else where
    try:
        with where.open("rb") as file:
            return _read(file, where, max_points)
    except FileNotFoundError:
        raise RecordError(f"{where}: no such record file; pass a run's folder or its {FILE}") from None
    except OSError as error:
        raise RecordError(f"{where}: cannot be read ({error.strerror}); check the path and its permissions") from None


def thin(run: Run, max_points: int) -> Run:
    """The run with at most `max_points` records, chosen as `read` chooses them."""
    if len(run.steps) <= max_points:
        return run
    arrays = [*run.columns.values(), *(values for layer in run.layers.values() for values in layer.values())]
    keep = _choose(sum((np.isfinite(each) for each in arrays), np.zeros(len(run.steps), np.int64)), max_points)
    columns = {key: values[keep] for key, values in run.columns.items()}
    layers = {name: {key: values[keep] for key, values in each.items()} for name, each in run.layers.items()}
    return replace(run, steps=run.steps[keep], columns=columns, layers=layers)


def replace_file(path: Path, chunks: Iterable[bytes]) -> None:
    """Write a file whole or not at all: a temporary one beside it, synced, then renamed over it."""
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        with temporary.open("xb") as file:
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def _line(values: Mapping[str, Any]) -> bytes:
    return json.dumps(values, allow_nan=False).encode() + b"\n"


def _append(file: int, line: bytes) -> None:
    start, left = os.fstat(file).st_size, memoryview(line)
    try:
        while left:  # one write, unless the disk is nearly full
            left = left[os.write(file, left) :]
    except OSError:
        os.ftruncate(file, start)  # no torn line in the middle if the caller goes on
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
    """Configuration values as JSON has them: mappings with string keys, lists, strings, numbers, booleans, null."""
    if isinstance(value, Mapping):
        return {str(key): _plain(each, f"{where}.{key}") for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each, f"{where}[{index}]") for index, each in enumerate(value)]
    if isinstance(value, PurePath):
        return str(value)
    if isinstance(value, str | bool):
        return value
    if value is None or isinstance(value, int | float | np.number):
        return _number(value, where)
    raise RecordError(f"{where} is a {type(value).__name__}; pass plain values: numbers, strings, lists, mappings")


def _same_config(path: Path, given: dict[str, Any]) -> None:
    with path.open("rb") as file:
        held = flatten(_header(file, path)["config"])
    wanted, missing = flatten(given), object()
    differing = [key for key in held | wanted if held.get(key, missing) != wanted.get(key, missing)]
    if differing:
        shown = ", ".join(f"{key} ({held.get(key, 'none')!r} -> {wanted.get(key, 'none')!r})" for key in differing)
        raise RecordError(
            f"{path}: the configuration differs from the one recorded: {shown}; resume with the same, or record elsewhere"
        )


def _header(file: IO[bytes], where: Path) -> dict[str, Any]:
    line = file.readline(_HEADER_LIMIT)
    if not line.strip():
        raise RecordError(f"{where}: the file is empty; the run wrote no record, start it again")
    try:
        header = json.loads(line)
    except _NOT_JSON:
        header = None
    if not isinstance(header, dict) or header.get("schema") != SCHEMA:
        raise RecordError(
            f'{where}: not a run record: the first line is no {{"schema": "{SCHEMA}", ...}}; pass a {FILE} that '
            "steadynorm wrote"
        )
    version = header.get("version")
    if isinstance(version, int) and version > VERSION:
        raise RecordError(
            f"{where}: version {version} is newer than {VERSION}, the newest known here; update steadynorm"
        )
    if version != VERSION or not isinstance(header.get("config"), dict) or not isinstance(header.get("name"), str):
        raise RecordError(f"{where}: line 1 is damaged (version, name or config is missing); restore it from a copy")
    return header


def _end(file: IO[bytes]) -> tuple[int, int]:
    """Offset of the end of the last whole line, and how many torn lines (0 or 1) follow; starts after the header."""
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
    try:
        whole = not body or isinstance(json.loads(body[begin:]), dict)
    except _NOT_JSON:
        whole = False
    return (size, 0) if whole else (at + begin, 1)


def _steps(file: IO[bytes], where: Path, end: int) -> Iterator[tuple[int, int, bytes]]:
    """(line number, step, line) of every record up to `end`; steps rise. Only lines of unusual form are parsed."""
    at, previous = file.tell(), -1
    for number, line in enumerate(file, 2):
        if at >= end:
            return
        at += len(line)
        usual = _STEP.match(line)
        if usual and line.endswith(b"}\n"):
            step = int(usual[1])
        elif line.isspace():
            continue
        else:
            step = _parse(line, where, number)["step"]
        if step <= previous:
            raise RecordError(
                f"{where}: line {number}: step {step} after step {previous}, steps must rise; two runs wrote into one "
                "file: cut it before this line"
            )
        previous = step
        yield number, step, line


def _parse(line: bytes, where: Path, number: int) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except _NOT_JSON:
        record = None
    step = record.get("step") if isinstance(record, dict) else None
    if record is None or type(step) is not int or not 0 <= step < 10**18:
        raise RecordError(
            f'{where}: line {number} is damaged: no {{"step": ...}} object; cut the file before it (head -n {number - 1}) '
            "or restore it from a copy"
        )
    return record


def _choose(kinds: np.ndarray, max_points: int) -> np.ndarray:
    """Indices to keep: first, last, and of every kind an even choice; rare kinds are served first.

    >>> _choose(np.array([1, 1, 1, 1, 2, 1, 1, 1, 1, 1]), 5).tolist()
    [0, 2, 4, 7, 9]
    """
    if max_points < 2:
        raise ValueError(f"max_points={max_points}: at least 2 are needed, the first and the last")
    if len(kinds) <= max_points:
        return np.arange(len(kinds))
    _, kind, counts = np.unique(kinds, return_inverse=True, return_counts=True)
    order = np.argsort(-counts, kind="stable")
    rank = np.minimum(np.argsort(order), 15)[kind]  # 0: the most frequent; all beyond 15 together
    keep = np.zeros(len(kinds), bool)
    keep[[0, -1]] = True
    left = max_points - 2
    members = sorted((np.flatnonzero((rank == each) & ~keep) for each in range(rank.max() + 1)), key=len)
    for done, indices in enumerate(members):
        share = min(left // (len(members) - done), len(indices))
        keep[indices[((np.arange(share) + 0.5) * (len(indices) / max(share, 1))).astype(int)]] = True
        left -= share
    return np.flatnonzero(keep)


def _read(file: IO[bytes], where: Path, max_points: int | None) -> Run:
    header, start = _header(file, where), file.tell()
    end, dropped = _end(file)
    numbers, kinds = array("q"), array("q")
    for number, _, line in _steps(file, where, end):
        numbers.append(number)
        kinds.append(0 if max_points is None else line.count(b'":') - line.count(b"null"))
    kept = np.arange(len(numbers)) if max_points is None else _choose(np.array(kinds, np.int64), max_points)
    wanted = np.zeros(numbers[-1] + 1 if numbers else 0, bool)
    wanted[np.array(numbers, np.int64)[kept]] = True
    steps = np.zeros(len(kept), np.int64)
    columns: dict[str, np.ndarray] = {}
    layers: dict[str, dict[str, np.ndarray]] = {}
    file.seek(start)
    for index, (number, line) in enumerate(compress(enumerate(file, 2), wanted[2:])):
        record = _parse(line, where, number)
        steps[index] = record.pop("step")
        by_layer = record.pop("layers", None) or {}
        _fill(columns, record, index, len(kept), f"{where}: line {number}")
        for layer, values in by_layer.items() if isinstance(by_layer, dict) else [("layers", by_layer)]:
            _fill(layers.setdefault(layer, {}), values, index, len(kept), f"{where}: line {number}: {layer}")
    return Run(
        name=header["name"],
        config=header["config"],
        created=str(header.get("created", "")),
        path=where,
        steps=steps,
        columns=columns,
        layers=layers,
        dropped=dropped,
        total=len(numbers),
    )


def _fill(columns: dict[str, np.ndarray], values: Any, index: int, size: int, where: str) -> None:
    """Put one line's values in their columns; a key seen for the first time gets a column of nan."""
    if not isinstance(values, dict):
        raise RecordError(f"{where}: {values!r} is no mapping of names to numbers; restore the file from a copy")
    for key, value in values.items():
        if key not in columns:
            columns[key] = np.full(size, np.nan)
        if type(value) is float or type(value) is int:
            columns[key][index] = value if abs(value) <= _LARGEST else np.nan
        elif value is not None:
            raise RecordError(f"{where}: {key} is {value!r}, neither a number nor null; restore the file from a copy")
