"""Runs side by side on one HTML page: losses, norms against their forecast, alignment, schedules, layers, differences.

`report` reads records and decides what the page shows; `page` knows how it looks.
"""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path

from steadynorm import records
from steadynorm.progress import bar
from steadynorm.records import Run
from steadynorm.report import page
from steadynorm.report.downloads import export_files
from steadynorm.report.heat_maps import layer_blocks, layer_records
from steadynorm.report.panels import other_plot_blocks, plot_blocks
from steadynorm.report.summary import configuration_blocks, summary_blocks

_MAX_RECORDS = 60_000  # records drawn, all runs together
_MAX_VALUES = 500_000  # numbers drawn in plots, all together


def report(
    paths_or_runs: Iterable[str | Path | Run] | str | Path | Run,
    out: str | Path,
    *,
    title: str | None = None,
    max_points: int = 2000,
    progress: bool = False,
) -> Path:
    """Write the page that compares these runs, and return its path.

    Args:
        paths_or_runs: One or several runs: a record file, the folder that holds it, or a `Run`.
        out: The page to write; in a folder, it is called `report.html`.
        title: The page's title.
        max_points: How many records of each run are drawn at most; fewer with many runs or columns, so that the page stays
            small.
        progress: Whether to show how far reading is.
    """
    sources = [paths_or_runs] if isinstance(paths_or_runs, str | Path | Run) else list(paths_or_runs)
    if not sources:
        raise ValueError("report: no runs given; pass the folder of a run, or several")
    points = min(max_points, max(100, _MAX_RECORDS // len(sources)))
    read: list[Run] = []
    with bar(len(sources), "reading runs", shown=progress) as advance:
        for source in sources:
            is_read = isinstance(source, Run)
            read.append(records.thin(source, points) if is_read else records.read(source, max_points=points))
            advance(1)
    read = [records.split_norms(run) for run in unique_names(read)]
    columns = sum(len(run.columns) for run in read)
    runs = [records.thin(run, max(50, _MAX_VALUES // max(columns, 1))) for run in read]
    order = records.layer_order(runs)
    runs = [replace(run, layers={name: run.layers[name] for name in order if name in run.layers}) for run in runs]
    layered = [layer_records(run, runs) for run in runs]
    blocks = [
        *advice_blocks(read),
        *summary_blocks(read, runs),
        *plot_blocks(runs),
        *layer_blocks(layered),
        *configuration_blocks(runs),
        *other_plot_blocks(runs),
    ]
    comparison = page.Page(title or _title(runs), _subtitle(runs), blocks, export_files(runs, layered))
    return page.write(comparison, out)


def advice_blocks(runs: Sequence[Run]) -> list[page.Block]:
    """Return what the figures of the runs say, in words; nothing if they say nothing."""
    sentences = [(run.name, sentence) for run in runs for sentence in records.advise(run)]
    lines = [sentence if len(runs) == 1 else f"{name} · {sentence}" for name, sentence in sentences]
    note = "Figures are means over the last third of the records, with their standard error."
    return [page.Text("What the figures say", [*lines, note])] if lines else []


def unique_names(runs: Sequence[Run]) -> list[Run]:
    """Return the runs under distinct names: equal ones get their folder's name, or else a number."""
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
