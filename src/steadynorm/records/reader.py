"""Read records as arrays, thinned while reading if there are many."""

import shlex
import sys
from array import array
from itertools import compress
from pathlib import Path
from typing import IO, Any

import numpy as np

from steadynorm.records.lines import STEP, end_of_lines, is_intact, parse, read_header, steps
from steadynorm.records.schema import FILE, RecordError, Run

_LARGEST = sys.float_info.max
_SHOWN = 8  # runs of a folder that an error names


def read(path: str | Path, *, max_points: int | None = None) -> Run:
    """Read a record file, or the folder that holds `records.jsonl`, as arrays.

    A torn last line is dropped and counted.

    Args:
        path: The file or folder.
        max_points: How many lines to parse: the first, the last, and others evenly spaced within each kind of line (by its
            number of values), so that rare lines with a validation loss or layers are not lost among the many.

    Raises:
        RecordError: If the file cannot be read or is damaged.
    """
    where = Path(path)
    where = where / FILE if where.is_dir() else where
    try:
        with where.open("rb") as file:
            return _read(file, where, max_points)
    except FileNotFoundError:
        if runs := [str(file.parent) for file in sorted(Path(path).glob(f"*/{FILE}"))]:
            more = f" and {len(runs) - _SHOWN} more" if len(runs) > _SHOWN else ""
            named = f"{shlex.join(runs[:_SHOWN])}{more}"
            raise RecordError(
                f"{path}: not a run but a folder of {len(runs)} runs; pass the runs in it: {named}"
            ) from None
        if any((Path(path) / "records").glob(f"*/{FILE}")):
            raise RecordError(f"{path}: not a run but an experiment; pass its runs: {path}/records/*") from None
        raise RecordError(f"{where}: no such record file; pass a run's folder or its {FILE}") from None
    except OSError as error:
        raise RecordError(f"{where}: cannot be read ({error.strerror}); check the path and its permissions") from None


def last_step(path: str | Path) -> int:
    """Return the step of the last whole line of a file that may still grow, read from its end; 0 if there is none."""
    where = Path(path)
    try:
        with where.open("rb") as file:
            for block in (1 << 16, 1 << 20, 1 << 24):
                file.seek(max(0, where.stat().st_size - block))
                for line in reversed(file.read().split(b"\n")[:-1]):
                    if (match := STEP.match(line)) is not None and is_intact(line):
                        return int(match[1])
    except OSError:
        pass
    return 0


def thin(run: Run, max_points: int) -> Run:
    """Return the run with at most `max_points` records, chosen as in `read`."""
    if len(run.steps) <= max_points:
        return run
    arrays = [*run.columns.values(), *(values for layer in run.layers.values() for values in layer.values())]
    kinds = sum((np.isfinite(values) for values in arrays), np.zeros(len(run.steps), np.int64))
    return run.at(_choose(kinds, max_points))


def _choose(kinds: np.ndarray, max_points: int) -> np.ndarray:
    """Return the indices to keep: the first, the last, and evenly spaced ones of every kind, rare kinds first.

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
    members = sorted((np.flatnonzero((rank == k) & ~keep) for k in range(rank.max() + 1)), key=len)
    for k, indices in enumerate(members):
        share = min(left // (len(members) - k), len(indices))
        keep[indices[((np.arange(share) + 0.5) * (len(indices) / max(share, 1))).astype(int)]] = True
        left -= share
    return np.flatnonzero(keep)


def _read(file: IO[bytes], where: Path, max_points: int | None) -> Run:
    header, start = read_header(file, where), file.tell()
    end, dropped = end_of_lines(file)
    numbers, kinds = array("q"), array("q")
    for number, _, line in steps(file, where, end, header):
        numbers.append(number)
        kinds.append(0 if max_points is None else line.count(b'":') - line.count(b"null"))
    kept = np.arange(len(numbers)) if max_points is None else _choose(np.array(kinds, np.int64), max_points)
    wanted = np.zeros(numbers[-1] + 1 if numbers else 0, bool)
    wanted[np.array(numbers, np.int64)[kept]] = True
    kept_steps = np.zeros(len(kept), np.int64)
    columns: dict[str, np.ndarray] = {}
    layers: dict[str, dict[str, np.ndarray]] = {}
    file.seek(start)
    for index, (number, line) in enumerate(compress(enumerate(file, 2), wanted[2:])):
        record = parse(line, where, number)
        kept_steps[index] = record.pop("step")
        by_layer = record.pop("layers", None) or {}
        _fill(columns, record, index, len(kept), f"{where}: line {number}")
        for layer, values in by_layer.items() if isinstance(by_layer, dict) else [("layers", by_layer)]:
            _fill(layers.setdefault(layer, {}), values, index, len(kept), f"{where}: line {number}: {layer}")
    return Run(
        name=header["name"],
        config=header["config"],
        created=str(header.get("created", "")),
        path=where,
        steps=kept_steps,
        columns=columns,
        layers=layers,
        dropped=dropped,
        total=len(numbers),
        origin=header.get("origin") or {},
    )


def _fill(columns: dict[str, np.ndarray], values: Any, index: int, size: int, where: str) -> None:
    """Put one line's values in their columns; a new key gets a column of nan."""
    if not isinstance(values, dict):
        raise RecordError(f"{where}: {values!r} is not a mapping of names to numbers; restore the file from a copy")
    for key, value in values.items():
        if key not in columns:
            columns[key] = np.full(size, np.nan)
        if type(value) is float or type(value) is int:
            columns[key][index] = value if abs(value) <= _LARGEST else np.nan
        elif value is not None:
            raise RecordError(f"{where}: {key} is {value!r}, neither a number nor null; restore the file from a copy")
