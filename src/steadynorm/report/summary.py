"""The tables of a report: a summary with one row per run, and the configurations."""

import json
from collections.abc import Sequence

from steadynorm import records
from steadynorm.records import Run
from steadynorm.report import page

_FEW_RUNS = 6  # up to here a table has one column per run


def summary_blocks(runs: Sequence[Run], drawn: Sequence[Run]) -> list[page.Block]:
    """Return the summary of runs as read, of which `drawn` are the plotted records."""
    rows = [_summary(run) for run in runs]
    widest = max(rows, key=len)
    keys = dict.fromkeys([*widest, *(key for row in rows for key in row)])
    header = [key for key in keys if any(row.get(key) is not None for row in rows)]
    read, shown = (sum(len(run.steps) for run in some) for some in (runs, drawn))
    total = sum(run.total or len(run.steps) for run in runs)
    notes = ["Training loss and norms, end: mean over the last 5 % of steps; middle: over 5 % around the middle."]
    if shown < total:
        notes.append(f"Summarised from {read:,} of {total:,} records, drawn from {shown:,} evenly chosen ones.")
    torn = [run.name for run in runs if run.dropped]
    if torn:
        notes.append(f"The last line was torn, as by a kill, and is left out: {', '.join(torn)}.")
    cells = [[row.get(key) for key in header] for row in rows]
    return [page.Text("Summary"), page.Table("", header, cells, " ".join(notes))]


def _summary(run: Run) -> dict[str, page.Cell]:
    """Return one row; None where the run has no such value."""
    validation = run.finite("val_loss")[1]
    norm = "weight_norm/hidden" if "weight_norm/hidden" in run.columns else "weight_norm"
    which = "hidden norm" if norm != "weight_norm" else "weight norm"
    steps, seconds = run.finite("seconds")
    elapsed = float(seconds[-1] - seconds[0]) if len(seconds) > 1 else 0.0
    return {
        "run": run.name,
        "last step": int(run.steps[-1]) if len(run.steps) else None,
        "training loss": _at(run, "loss", 1.0),
        "best validation loss": float(validation.min()) if len(validation) else None,
        "final validation loss": float(validation[-1]) if len(validation) else None,
        f"{which}, end": _at(run, norm, 1.0),
        f"{which}, end / middle": _ratio(_at(run, norm, 1.0), _at(run, norm, 0.5)),
        **_over_forecast(run),
        "gradient norm, end": _at(run, "grad_norm", 1.0),
        "gradient end / middle": _ratio(_at(run, "grad_norm", 1.0), _at(run, "grad_norm", 0.5)),
        "steps / s": float(steps[-1] - steps[0]) / elapsed if elapsed > 0 else None,
    }


def _over_forecast(run: Run) -> dict[str, page.Cell]:
    """Return measured / forecast norm of each role that was recorded, or of all weights if none was."""
    roles = [role for role in records.ROLE_LABELS if f"weight_norm/{role}" in run.columns]
    names = {f"measured / forecast, {role}": f"/{role}" for role in roles} or {"measured / forecast": ""}
    keys = ("weight_norm", "forecast_norm")
    return {name: _ratio(*(_at(run, key + suffix, 1.0) for key in keys)) for name, suffix in names.items()}


def _at(run: Run, key: str, part: float) -> float | None:
    """Return the mean of a column over the last twentieth of the steps (1.0), or over the one in the middle (0.5)."""
    steps, values = run.finite(key)
    if not len(values):
        return None
    first, last = int(run.steps[0]), int(run.steps[-1])
    width = 0.05 * (last - first)
    start = last - width if part == 1.0 else first + part * (last - first) - width / 2
    inside = (steps >= start) & ((steps <= start + width) | (part == 1.0))
    return float(values[inside].mean()) if inside.any() else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def configuration_blocks(runs: Sequence[Run]) -> list[page.Block]:
    """Return a table of the settings that differ, and a folded one of those that do not."""
    flat = [
        {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in records.flatten(run.config).items()
        }
        for run in runs
    ]
    keys = list(dict.fromkeys(key for settings in flat for key in settings))
    differing = [key for key in keys if len({settings.get(key) for settings in flat}) > 1]
    equal = [[key, flat[0][key]] for key in keys if key not in set(differing)]
    names = [run.name for run in runs]
    blocks: list[page.Block] = []
    if differing and len(runs) <= _FEW_RUNS:
        rows: list[list[page.Cell]] = [[key, *(settings.get(key) for settings in flat)] for key in differing]
        blocks.append(page.Table("What differs", ["setting", *names], rows))
    elif differing:
        rows = [[name, *(settings.get(key) for key in differing)] for name, settings in zip(names, flat, strict=True)]
        blocks.append(page.Table("What differs", ["run", *differing], rows))
    if equal:
        count = f"{len(equal)} setting{'s' if len(equal) > 1 else ''}"
        label = count if len(runs) == 1 else f"{count} the same in all runs"
        blocks.append(page.Table(label, ["setting", "value"], equal, folded=True))
    return [page.Text("Configuration"), *blocks] if blocks else []
