"""The files that a reader can save from a report."""

import csv
import io
import json
from collections.abc import Mapping, Sequence

import numpy as np

from steadynorm.records import Run
from steadynorm.report import page


def export_files(runs: Sequence[Run], layered: Sequence[Run]) -> dict[str, str]:
    """Return what is drawn as JSON and as CSV, with one row per step, or per layer and step.

    `layered` are the same runs with their layers, as `layer_records` returns them.
    """
    entries = []
    for run, layers in zip(runs, layered, strict=True):
        by_layer = {name: _numbers(columns) for name, columns in layers.layers.items()}
        entry = {"name": run.name, "created": run.created, "config": run.config, "steps": run.steps.tolist()}
        entry |= {"columns": _numbers(run.columns), "layer_steps": layers.steps.tolist(), "layers": by_layer}
        entries.append(entry)
    contents = {
        "runs.json": json.dumps({"schema": "steadynorm-report", "version": 1, "runs": entries}, allow_nan=False)
    }
    contents["runs.csv"] = _csv(("run", "step"), [((run.name,), run.steps, run.columns) for run in runs])
    if any(run.layers for run in layered):
        tables = [((run.name, name), run.steps, columns) for run in layered for name, columns in run.layers.items()]
        contents["layers.csv"] = _csv(("run", "layer", "step"), tables)
    return contents


def _numbers(columns: Mapping[str, np.ndarray]) -> dict[str, list[float | None]]:
    return {key: page.rounded(values) for key, values in columns.items()}


def _cell(name: str) -> str:
    """Return a name that a spreadsheet reads as text, not as a formula.

    >>> _cell("=1+1"), _cell("run 1")
    ("'=1+1", 'run 1')
    """
    return f"'{name}" if name.startswith(("=", "+", "-", "@", "\t", "\r", "\n")) else name


def _csv(header: Sequence[str], tables: Sequence[tuple[tuple[str, ...], np.ndarray, Mapping[str, np.ndarray]]]) -> str:
    keys = list(dict.fromkeys(key for _, _, columns in tables for key in columns))
    text = io.StringIO()
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow([*header, *map(_cell, keys)])
    for names, steps, columns in tables:
        missing = [None] * len(steps)
        lists = [page.rounded(columns[key]) if key in columns else missing for key in keys]
        cells = [_cell(name) for name in names]
        rows.writerows([*cells, step, *values] for step, *values in zip(steps.tolist(), *lists, strict=True))
    return text.getvalue()
