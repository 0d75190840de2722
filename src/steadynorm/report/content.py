"""Runs side by side on one HTML page: losses, norms against their forecast, alignment, schedules, layers, differences.

`report` reads records and says what goes on the page; `page` knows how it looks.
"""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from steadynorm import records
from steadynorm.progress import bar
from steadynorm.records import QUANTITIES, Quantity, Run
from steadynorm.report import page

_RUN_POINTS = 60_000  # records drawn, all runs together
_VALUES = 500_000  # numbers drawn in plots, all together
_LAYER_VALUES = 200_000  # numbers drawn in heat maps, all together
_LAYER_STEPS = 240  # columns of a heat map
_DIGITS = 6  # of a number in the files to save, as on the page
_FEW_RUNS = 6  # up to here a table has one column a run


@dataclass(frozen=True)
class _Panel:
    """One plot: `key` drawn solid and `dashed` (a key or "") beside it, with the names of the two."""

    key: str
    dashed: str = ""
    names: tuple[str, str] = ("measured", "")
    zero: bool = False
    log: bool = False  # to begin with


@dataclass(frozen=True)
class _Section:
    title: str
    text: str
    panels: tuple[_Panel, ...]


SECTIONS = (
    _Section("Loss", "", (_Panel("loss"), _Panel("val_loss"), _Panel("val_accuracy"))),
    _Section(
        "Norms",
        "Corrected decay holds the weight norm; constant decay lets it follow the learning rate. The forecast is the norm "
        "that updates independent of the weights would give: compare it with the hidden matrices. The gradient of an "
        "output layer pushes its weights outward, so that its norm lies above.",
        (
            _Panel("weight_norm", "forecast_norm", ("measured", "forecast")),
            _Panel("grad_norm", log=True),  # the first steps would hide the rest
            _Panel("spectral_norm"),
            _Panel("sign_norm"),
            _Panel("bias_norm"),
            _Panel("embedding_norm"),
        ),
    ),
    _Section(
        "Alignment",
        "The cosine between weights and update. Momentum alone makes it negative, as expected below; what exceeds that says "
        "whether a layer's gradient pushes its weights outward.",
        (_Panel("alignment", "expected_alignment", ("measured", "expected")), _Panel("excess_alignment")),
    ),
    _Section(
        "Schedules",
        "",
        tuple(_Panel(key, zero=True) for key in ("lr", "alpha", "effective_lr", "weight_decay", "steady_norm_sq")),
    ),
)


def report(
    paths_or_runs: Iterable[str | Path | Run] | str | Path | Run,
    out: str | Path,
    *,
    title: str | None = None,
    max_points: int = 2000,
    progress: bool = False,
) -> Path:
    """Write the page that compares these runs; returns its path.

    A run is a record file, the folder that holds it, or a `Run`. `max_points` bounds the records drawn of each; with many
    runs or columns fewer are drawn, so that the page stays light. If `out` is a folder, the page is its `report.html`. `progress`: show how far reading is.
    """
    given = [paths_or_runs] if isinstance(paths_or_runs, str | Path | Run) else list(paths_or_runs)
    if not given:
        raise ValueError("report: no runs given; pass the folder of a run, or several")
    points = min(max_points, max(100, _RUN_POINTS // len(given)))
    with bar(len(given), "reading runs", shown=progress) as tell:
        read = [_read(run, points, tell) for run in given]
    read = [records.split_norms(run) for run in unique_names(read)]
    columns = sum(len(run.columns) for run in read)
    runs = [records.thin(run, max(50, _VALUES // max(columns, 1))) for run in read]
    order = records.layer_order(runs)
    runs = [replace(run, layers={name: run.layers[name] for name in order if name in run.layers}) for run in runs]
    layered = [_layered(run, runs) for run in runs]
    blocks = [*_overview(read, runs), *_sections(runs), *_layers(layered), *_configurations(runs), *_more(runs)]
    made = page.Page(title or _title(runs), _subtitle(runs), blocks, _downloads(runs, layered))
    out = Path(out)
    return page.write(made, out / "report.html" if out.is_dir() else out)


def _read(run: str | Path | Run, points: int, tell: Callable[[int], object]) -> Run:
    found = records.thin(run, points) if isinstance(run, Run) else records.read(run, max_points=points)
    tell(1)
    return found


def unique_names(runs: Sequence[Run]) -> list[Run]:
    """The runs under names that tell them apart: equal ones get their folder's name, or else a number."""
    names = [run.name.strip() or "run" for run in runs]
    folders = [f"{name} ({_folder(run)})" if _folder(run) else name for name, run in zip(names, runs, strict=True)]
    names = [folder if names.count(name) > 1 else name for name, folder in zip(names, folders, strict=True)]
    taken: set[str] = set()
    for index, name in enumerate(names):
        count = 2
        while names[index] in taken:
            names[index] = f"{name} #{count}"
            count += 1
        taken.add(names[index])
    return [replace(run, name=name) for run, name in zip(runs, names, strict=True)]


def _folder(run: Run) -> str:
    if run.path is None:
        return ""
    return run.path.resolve().parent.name if run.path.name == records.FILE else run.path.stem


def _title(runs: Sequence[Run]) -> str:
    return " · ".join(run.name for run in runs) if len(runs) <= 3 else f"{len(runs)} runs"


def _subtitle(runs: Sequence[Run]) -> str:
    steps = [int(run.steps[-1]) for run in runs if len(run.steps)]
    days = sorted({run.created[:10] for run in runs if run.created})
    count = "1 run" if len(runs) == 1 else f"{len(runs)} runs"
    parts = [count, f"up to step {max(steps):,}" if steps else "no steps yet"]
    if days:
        parts.append(f"recorded {days[0]}" + (f" to {days[-1]}" if len(days) > 1 else ""))
    return " · ".join(parts)


# Summary


def _overview(runs: Sequence[Run], drawn: Sequence[Run]) -> list[page.Block]:
    rows = [_summary(run) for run in runs]
    widest = max(rows, key=len)
    keys = dict.fromkeys([*widest, *(key for row in rows for key in row)])
    header = [key for key in keys if any(row.get(key) is not None for row in rows)]
    read, shown = (sum(len(run.steps) for run in each) for each in (runs, drawn))
    total = sum(run.total or len(run.steps) for run in runs)
    notes = ["Training loss and norms, end: mean over the last 5 % of steps; middle: over 5 % around the middle."]
    if shown < total:
        notes.append(f"Summarised from {read:,} of {total:,} records, drawn from {shown:,} evenly chosen ones.")
    torn = [run.name for run in runs if run.dropped]
    if torn:
        notes.append(f"The last line was torn, as a kill leaves it, and is left out: {', '.join(torn)}.")
    cells = [[row.get(key) for key in header] for row in rows]
    return [page.Text("Summary"), page.Table("", header, cells, " ".join(notes))]


def _summary(run: Run) -> dict[str, page.Cell]:
    """One row of the summary; None where the run does not say."""
    validation = _finite(run, "val_loss")[1]
    norm = "weight_norm/hidden" if "weight_norm/hidden" in run.columns else "weight_norm"
    which = "hidden norm" if norm != "weight_norm" else "weight norm"
    steps, seconds = _finite(run, "seconds")
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
    """Measured / forecast norm of each role that was recorded; of all weights where none was."""
    roles = [role for role in records.ROLE_LABELS if f"weight_norm/{role}" in run.columns]
    names = {f"measured / forecast, {role}": f"/{role}" for role in roles} or {"measured / forecast": ""}
    return {name: _ratio(*(_at(run, key + suffix, 1.0) for key in records.SPLIT)) for name, suffix in names.items()}


def _at(run: Run, key: str, part: float) -> float | None:
    """Mean of a column over the twentieth of the run's steps that ends at the end (1.0) or lies around the middle (0.5)."""
    steps, values = _finite(run, key)
    if not len(values):
        return None
    first, last = int(run.steps[0]), int(run.steps[-1])
    width = 0.05 * (last - first)
    start = last - width if part == 1.0 else first + part * (last - first) - width / 2
    inside = (steps >= start) & ((steps <= start + width) | (part == 1.0))
    return float(values[inside].mean()) if inside.any() else None


def _ratio(a: float | None, b: float | None) -> float | None:
    return a / b if a is not None and b else None


def _finite(run: Run, key: str) -> tuple[np.ndarray, np.ndarray]:
    values = run.columns.get(key)
    if values is None:
        return np.zeros(0, np.int64), np.zeros(0)
    keep = np.isfinite(values)
    return run.steps[keep], values[keep]


# Plots


def _sections(runs: Sequence[Run]) -> list[page.Block]:
    blocks: list[page.Block] = []
    for section in SECTIONS:
        plots = [plot for panel in section.panels for plot in _plots(runs, panel)]
        if plots:
            blocks += [page.Text(section.title, [section.text] if section.text else []), *plots]
    return blocks


def _plots(runs: Sequence[Run], panel: _Panel) -> list[page.Plot]:
    """The panel's plot, and one more for every group it was recorded for ("lr/head")."""
    groups = dict.fromkeys(
        key.removeprefix(panel.key)
        for run in runs
        for key in run.columns
        if key == panel.key or _base(key) == panel.key
    )
    order = [f"/{role}" for role in records.ROLE_LABELS] if panel.key in records.SPLIT else []
    ordered = sorted(groups, key=lambda group: (order.index(group) if group in order else len(order), group))
    keys = [(panel.key + group, panel.dashed + group if panel.dashed else "") for group in ordered]
    made = [_plot(runs, replace(panel, key=key, dashed=dashed)) for key, dashed in keys]
    return [plot for plot in made if plot.series]


def _plot(runs: Sequence[Run], panel: _Panel) -> page.Plot:
    quantity, series = _quantity(panel.key), []
    for run in runs:
        for key, name, style in zip((panel.key, panel.dashed), panel.names, ("line", "dash"), strict=True):
            steps, values = _finite(run, key)
            if len(values):
                series.append(page.Series(name, steps, values, style=style, toggle=run.name))
    return page.Plot(
        quantity.label, "step", quantity.unit, series, quantity.description, log_y=panel.log, zero=panel.zero
    )


def _more(runs: Sequence[Run]) -> list[page.Block]:
    drawn = {key for section in SECTIONS for panel in section.panels for key in (panel.key, panel.dashed)}
    left = dict.fromkeys(key for run in runs for key in run.columns if key not in drawn and _base(key) not in drawn)
    plots = [plot for plot in (_plot(runs, _Panel(key)) for key in left) if plot.series]
    return [page.Text("More"), *plots] if plots else []


def _base(key: str) -> str:
    """The well-known quantity that a group's key belongs to: "lr" of "lr/head"."""
    base = key.partition("/")[0]
    return base if base in QUANTITIES else key


def _quantity(key: str) -> Quantity:
    known, group = QUANTITIES.get(_base(key)), key.partition("/")[2]
    if known is None:
        return Quantity(key, "", "")
    if group and _base(key) in records.SPLIT:
        name = records.ROLE_LABELS.get(group, group)
        return replace(known, label=f"{known.label} · {name}", description=f"Norm of the {name}.")
    return replace(known, label=f"{known.label} · {group}") if group else known


# Layers


def _layered(run: Run, runs: Sequence[Run]) -> Run:
    """The steps at which layers were recorded, few enough for a heat map."""
    count = sum(len(values) for each in runs for values in each.layers.values())
    held = [values for layer in run.layers.values() for values in layer.values()]
    keep = np.any([np.isfinite(values) for values in held], axis=0) if held else np.zeros(len(run.steps), bool)
    layers = {name: {key: values[keep] for key, values in each.items()} for name, each in run.layers.items()}
    only = replace(run, steps=run.steps[keep], columns={}, layers=layers)
    return records.thin(only, min(_LAYER_STEPS, max(20, _LAYER_VALUES // max(count, 1))))


def _layers(runs: Sequence[Run]) -> list[page.Block]:
    ratios = [(run, _grid(run, lambda each: each["norm"] / each["forecast"], "norm", "forecast")) for run in runs]
    excess = [(run, _grid(run, lambda each: each["excess"], "excess")) for run in runs]
    norms = _heat_maps(ratios, "Measured / forecast norm", "measured / forecast", 1.0, 0.02)
    pushes = _heat_maps(excess, "Excess alignment", "excess", 0.0, 0.02)
    scale = "All runs share a scale, which leaves out the outermost 1 %."
    blocks: list[page.Block] = []
    if norms:
        text = f"Measured / forecast norm of each layer: 1 is where independent updates would put it. {scale}"
        blocks += [page.Text("Layer norms", [text]), *norms]
    if pushes:
        text = (
            "Near 0: correct the layer's decay. Clearly negative: its gradient pushes the weights outward, keep its decay "
            f"constant. {scale}"
        )
        blocks += [page.Text("Layer alignment", [text]), *pushes]
    return blocks


def _grid(run: Run, value: Any, *needed: str) -> tuple[list[str], np.ndarray]:
    """Names of the layers that have what is needed, and the value of each at every step."""
    names = [name for name, each in run.layers.items() if all(key in each for key in needed)]
    with np.errstate(divide="ignore", invalid="ignore"):
        z = np.array([value(run.layers[name]) for name in names]).reshape(len(names), len(run.steps))
    z[~np.isfinite(z)] = np.nan
    seen = np.flatnonzero(np.isfinite(z).any(axis=1))
    return [names[index] for index in seen], z[seen]


def _heat_maps(
    grids: Sequence[tuple[Run, tuple[list[str], np.ndarray]]], title: str, label: str, middle: float, least: float
) -> list[page.HeatMap]:
    distances = np.concatenate([np.abs(z[np.isfinite(z)] - middle) for _, (_, z) in grids])
    if not len(distances):
        return []
    reach = max(float(np.quantile(distances, 0.99)), least)
    return [
        page.HeatMap(
            f"{title} · {run.name}" if len(grids) > 1 else title,
            "step",
            label,
            run.steps,
            names,
            z,
            middle=middle,
            low=middle - reach,
            high=middle + reach,
            toggle=run.name,
        )
        for run, (names, z) in grids
        if names
    ]


# Configuration


def _configurations(runs: Sequence[Run]) -> list[page.Block]:
    flat = [{key: _text(value) for key, value in records.flatten(run.config).items()} for run in runs]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    differing = [key for key in keys if len({each.get(key) for each in flat}) > 1]
    equal = [[key, flat[0][key]] for key in keys if key not in set(differing)]
    names = [run.name for run in runs]
    blocks: list[page.Block] = []
    if differing and len(runs) <= _FEW_RUNS:
        rows: list[list[page.Cell]] = [[key, *(each.get(key) for each in flat)] for key in differing]
        blocks.append(page.Table("What differs", ["setting", *names], rows))
    elif differing:
        rows = [[name, *(each.get(key) for key in differing)] for name, each in zip(names, flat, strict=True)]
        blocks.append(page.Table("What differs", ["run", *differing], rows))
    if equal:
        count = f"{len(equal)} setting{'s' if len(equal) > 1 else ''}"
        label = count if len(runs) == 1 else f"{count} the same in all runs"
        blocks.append(page.Table(label, ["setting", "value"], equal, folded=True))
    return [page.Text("Configuration"), *blocks] if blocks else []


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


# Downloads


def _downloads(runs: Sequence[Run], layered: Sequence[Run]) -> dict[str, str]:
    """What is drawn, as JSON and as CSV (one row a step; one row a layer and step)."""
    entries = []
    for run, layers in zip(runs, layered, strict=True):
        by_layer = {name: _numbers(each) for name, each in layers.layers.items()}
        entry = {"name": run.name, "created": run.created, "config": run.config, "steps": run.steps.tolist()}
        entry |= {"columns": _numbers(run.columns), "layer_steps": layers.steps.tolist(), "layers": by_layer}
        entries.append(entry)
    made = {"runs.json": json.dumps({"schema": "steadynorm-report", "version": 1, "runs": entries}, allow_nan=False)}
    made["runs.csv"] = _csv(("run", "step"), [((run.name,), run.steps, run.columns) for run in runs])
    if any(run.layers for run in layered):
        tables = [((run.name, name), run.steps, each) for run in layered for name, each in run.layers.items()]
        made["layers.csv"] = _csv(("run", "layer", "step"), tables)
    return made


def _numbers(columns: Mapping[str, np.ndarray]) -> dict[str, list[float | None]]:
    return {key: page.rounded(values, _DIGITS) for key, values in columns.items()}


def _cell(name: str) -> str:
    """A name that a spreadsheet takes for text, not for a formula to carry out.

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
        lists = [page.rounded(columns[key], _DIGITS) if key in columns else missing for key in keys]
        cells = [_cell(name) for name in names]
        rows.writerows([*cells, step, *values] for step, *values in zip(steps.tolist(), *lists, strict=True))
    return text.getvalue()
