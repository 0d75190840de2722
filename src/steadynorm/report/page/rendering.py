"""Blocks to HTML: data as escaped JSON, and scripts allowed only by their hash."""

import base64
import hashlib
import json
import math
import re
import zlib
from collections import Counter
from collections.abc import Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from steadynorm.extras import remedy
from steadynorm.files import atomic_write, make_folder
from steadynorm.report.page.blocks import STYLES, Block, Cell, HeatMap, Page, Plot, Series, Table, Text
from steadynorm.report.page.coincidence import count_coincident

_COLOURS = 8  # --c0 to --c7 in page.css
_DASHES = ("", "2 3", "7 3 2 3", "10 4", "10 3 2 3")  # after each round of colours; page.js draws the same
_NO_NUMBER = "—"
_DOCTYPE = "<!doctype html>"
_EARLY = """{
  const given = new URLSearchParams(location.hash.slice(1)).get("theme");
  const dark = given === "dark" || (given !== "light" && matchMedia("(prefers-color-scheme: dark)").matches);
  document.documentElement.dataset.theme = dark ? "dark" : "light";
}"""  # before anything is painted


def write(page: Page, path: str | Path) -> Path:
    """Write the page as one HTML file, entirely or not at all, and return its path; in a folder, it is `report.html`.

    Raises:
        ValueError: If the file there is not a page but, for example, the records of a run.
    """
    path = Path(path)
    path = path / "report.html" if path.is_dir() else path
    if path.is_file() and not _is_replaceable(path):
        raise ValueError(f"{path}: not a page, and would be overwritten; choose another name for the page")
    text = render(page)
    make_folder(path.parent)
    with atomic_write(path) as file:
        file.write(text.encode("utf-8", "replace"))
    return path


def _is_replaceable(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(len(_DOCTYPE)) in (b"", _DOCTYPE.encode())


def render(page: Page) -> str:
    """Return the page as HTML text."""
    body = _Body(_toggles(page.blocks))
    main = body.blocks(page.blocks)
    asset = files("steadynorm.report.page").joinpath
    scripts = [_EARLY, _script(asset("page.js").read_text("utf-8")), plotly := _plotly()]
    hashes = " ".join(f"'sha256-{base64.b64encode(hashlib.sha256(s.encode()).digest()).decode()}'" for s in scripts)
    policy = (
        f"default-src 'none'; script-src {hashes}; style-src 'unsafe-inline'; img-src data: blob:; font-src data:; "
        "connect-src 'none'; base-uri 'none'; form-action 'none'"
    )
    title, subtitle = escape(page.title), escape(page.subtitle)
    saved = "".join(
        f'<button type="button" class="save" data-save="{escape(name)}">↓ {escape(name)}</button>'
        for name in page.downloads
    )
    stored = "".join(
        f'<script type="text/plain" data-file="{escape(name)}">{_packed(content)}</script>'
        for name, content in page.downloads.items()
    )
    return f"""{_DOCTYPE}
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="referrer" content="no-referrer">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="steadynorm">
<link rel="icon" href="data:,">
<title>{title}</title>
<script>{scripts[0]}</script>
<style>{asset("page.css").read_text("utf-8")}</style>
</head>
<body>
<header><div><h1>{title}</h1><p>{subtitle}</p></div><div class="saves">{saved}</div></header>
<noscript><p>The plots need JavaScript; everything they need is inside this file.</p></noscript>
{_toolbar(body.toggles, page.blocks)}
<main>
{main}
</main>
<footer>Made by steadynorm. Drag across a plot to zoom all plots, double-click to see everything again.</footer>
<script type="application/json" id="data">{_json({"toggles": body.toggles, "x": body.shared, "plots": body.plots})}</script>
{stored}
<script type="text/plain" id="plotly">{_packed(plotly)}</script>
<script>{scripts[1]}</script>
</body>
</html>
"""


class _Body:
    """Renders blocks as HTML, and collects the data that page.js draws."""

    def __init__(self, toggles: list[str]):
        self.toggles = toggles
        self.shared: list[list[Any]] = []  # x values; most series share theirs
        self.plots: list[dict[str, Any]] = []
        self._seen: dict[tuple[Any, ...], int] = {}

    def blocks(self, blocks: Sequence[Block]) -> str:
        """Return blocks as HTML; consecutive figures share a grid."""
        out, figures = [], []
        for block in [*blocks, None]:
            if isinstance(block, Plot | HeatMap):
                figures.append(self._plot(block) if isinstance(block, Plot) else self._heat_map(block))
                continue
            if figures:
                out.append(f'<div class="grid">{"".join(figures)}</div>')
                figures = []
            if isinstance(block, Text):
                paragraphs = "".join(f"<p>{escape(paragraph)}</p>" for paragraph in block.paragraphs)
                out.append(f'<section class="text"><h2>{escape(block.title)}</h2>{paragraphs}</section>')
            elif block is not None:
                out.append(self._table(block))
        return "\n".join(out)

    def _plot(self, plot: Plot) -> str:
        series, keys, own = [], {}, len(self.toggles)
        bearers = Counter(name for name, _ in {(line.name, line.toggle) for line in plot.series})
        for line in plot.series:
            where = f"plot {plot.title!r}, series {line.name!r}"
            x, y, error = _columns(line, where)
            if line.style not in STYLES:
                raise ValueError(f"{where}: style={line.style!r} is unknown; choose one of {', '.join(STYLES)}")
            colour = self.toggles.index(line.toggle) if line.toggle else own
            own += not line.toggle
            if line.name != line.toggle:  # a name that several runs share is neutral; a run by itself has its chip
                keys.setdefault((line.name, line.style, -1 if bearers[line.name] > 1 else colour), None)
            entry = {"name": line.name, "x": self._share(x), "y": rounded(y), "style": line.style, "colour": colour}
            entry |= {"error": rounded(error)} if error is not None else {}
            entry |= {"run": colour} if line.toggle else {}
            series.append(entry)
        for entry, under in zip(series, count_coincident(plot.series, log=plot.log_y), strict=True):
            entry |= {"under": under} if under else {}
        values = np.concatenate([np.asarray(line.y, float).ravel() for line in plot.series] or [np.zeros(0)])
        positive = bool((values > 0).any() and not (values < 0).any())
        axes = {"logX": plot.log_x, "logY": plot.log_y and positive, "positive": positive, "zero": plot.zero}
        several = len(keys) > 1 and len(keys) <= 16
        key = "".join(f"<span>{_swatch(colour, style)}{escape(name)}</span>" for name, style, colour in keys)
        log = '<button type="button" class="log" aria-pressed="false">log y</button>' if positive else ""
        legend = f'<div class="keys">{key}</div>' if several else ""
        return self._card(plot, {"series": series, **axes}, legend, log)

    def _heat_map(self, plot: HeatMap) -> str:
        z = np.asarray(plot.z, float)
        if z.shape != (len(plot.y), len(plot.x)):
            raise ValueError(
                f"heat map {plot.title!r}: z has shape {z.shape}, but y and x have {len(plot.y)} and {len(plot.x)} entries"
            )
        reach = float(np.abs(z[np.isfinite(z)] - plot.middle).max(initial=0)) or 1.0
        low = plot.middle - reach if plot.low is None else plot.low
        high = plot.middle + reach if plot.high is None else plot.high
        grid = {"x": self._share(np.asarray(plot.x)), "y": list(plot.y), "z": [rounded(row) for row in z]}
        run = {"run": self.toggles.index(plot.toggle)} if plot.toggle else {}
        return self._card(plot, {**grid, "middle": plot.middle, "low": low, "high": high, **run})

    def _card(self, plot: Plot | HeatMap, data: dict[str, Any], keys: str = "", log: str = "") -> str:
        """Keep the data that page.js draws, and return the HTML around the drawing."""
        taken = {drawn["id"] for drawn in self.plots}
        name = re.sub(r"[^a-z0-9]+", "-", plot.title.lower()).strip("-")[:40] or "plot"
        choices = [name, *(f"{name}-{count}" for count in range(2, len(taken) + 2))]
        identity = next(choice for choice in choices if choice not in taken)
        labels = {"id": identity, "title": plot.title, "xLabel": plot.x_label, "yLabel": plot.y_label}
        self.plots.append(labels | {"kind": "heat" if isinstance(plot, HeatMap) else "plot"} | data)
        caption = f'<p class="caption">{escape(plot.caption)}</p>' if plot.caption else ""
        rows = len(plot.y) if isinstance(plot, HeatMap) else 0
        height = f' style="--rows: {rows}"' if rows else ""
        unit = f'<span class="unit">{escape(plot.y_label)}</span>' if plot.y_label and not rows else ""
        return (
            f'<figure class="card{" heat" if rows else ""}" data-plot="{len(self.plots) - 1}"><div class="head">'
            f"<h3>{escape(plot.title)}</h3>{unit}<span class='space'></span>{log}"
            f'<button type="button" class="wide" aria-pressed="false" aria-label="wide" title="wide">⤢</button></div>{keys}'
            f'<div class="plot" role="img" aria-label="{escape(plot.title)}"{height}></div>{caption}</figure>'
        )

    def _table(self, table: Table) -> str:
        for row in table.rows:
            if len(row) != len(table.header):
                raise ValueError(
                    f"table {table.title!r}: a row has {len(row)} cells under {len(table.header)} headings"
                )
        head = "".join(
            f'<th scope="col"><button type="button">{self._name(title)}</button></th>' for title in table.header
        )
        rows = "".join(f"<tr{self._of(row)}>{''.join(map(self._cell, row))}</tr>" for row in table.rows)
        caption = f'<p class="caption">{escape(table.caption)}</p>' if table.caption else ""
        inner = (
            f'<div class="scroll" tabindex="0" role="region" aria-label="{escape(table.title)}"><table>'
            f"<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>{caption}"
        )
        if table.folded:
            return f'<details class="card table"><summary>{escape(table.title)}</summary>{inner}</details>'
        title = f"<h3>{escape(table.title)}</h3>" if table.title else ""
        return f'<section class="card table">{title}{inner}</section>'

    def _cell(self, cell: Cell) -> str:
        if isinstance(cell, str):
            return f"<td>{self._name(cell)}</td>"
        value = "" if cell is None or not math.isfinite(cell) else f' data-value="{float(cell)!r}"'
        return f'<td class="number"{value}>{shown(cell)}</td>'

    def _name(self, text: str) -> str:
        colour = self.toggles.index(text) if text in self.toggles else None
        return escape(text) if colour is None else f'<span class="run">{_swatch(colour, "line")}{escape(text)}</span>'

    def _of(self, row: Sequence[Cell]) -> str:
        return f' data-run="{self.toggles.index(row[0])}"' if row and row[0] in self.toggles else ""

    def _share(self, x: np.ndarray) -> int:
        key = (x.dtype.str, x.tobytes())
        if key not in self._seen:
            self._seen[key] = len(self.shared)
            self.shared.append(x.tolist() if x.dtype.kind in "iu" else rounded(x, 12))
        return self._seen[key]


def shown(value: float | int | None) -> str:
    """Return a number as a table shows it.

    >>> [shown(value) for value in (None, float("nan"), 12345, 0.0123456, 98765.4, 2.9)]
    ['—', '—', '12,345', '0.01235', '98,765', '2.900']
    """
    if value is None or not math.isfinite(value):
        return _NO_NUMBER
    if isinstance(value, int | np.integer) and abs(value) < 10**15:
        return f"{value:,}"
    return f"{value:,.0f}" if 1e4 <= abs(value) < 1e12 else f"{value:#.4g}".removesuffix(".")


def _columns(series: Series, where: str) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return x, y and error as arrays of equal length, where x is finite."""
    x, y = np.asarray(series.x), np.asarray(series.y, float)
    error = None if series.error is None else np.asarray(series.error, float)
    if x.ndim != 1 or x.shape != y.shape or (error is not None and error.shape != x.shape):
        sizes = f"x {x.shape}, y {y.shape}" + ("" if error is None else f", error {error.shape}")
        raise ValueError(f"{where}: {sizes} differ; pass flat sequences of one length")
    if x.dtype.kind not in "iuf":
        raise ValueError(f"{where}: x holds {x.dtype}; pass numbers")
    keep = np.isfinite(x)
    return (x, y, error) if keep.all() else (x[keep], y[keep], None if error is None else error[keep])


def rounded(values: np.ndarray, digits: int = 6) -> list[float | None]:
    """Return numbers as a page stores them: rounded to `digits` digits, None where not finite."""
    return [float(f"{v:.{digits}g}") if math.isfinite(v) else None for v in values.tolist()]


def _toggles(blocks: Sequence[Block]) -> list[str]:
    """Return the names of runs in order of appearance."""
    figures = [block for block in blocks if isinstance(block, Plot | HeatMap)]
    names = (part.toggle for block in figures for part in (block.series if isinstance(block, Plot) else [block]))
    return [name for name in dict.fromkeys(names) if name]


def _swatch(colour: int, style: str) -> str:
    """Return a short piece of a series' line; colour -1 is neutral."""
    stroke = "currentColor" if colour < 0 else f"var(--c{colour % _COLOURS})"
    dash = "5 3" if style == "dash" else _DASHES[max(colour, 0) // _COLOURS % len(_DASHES)]
    mark = (
        f'<circle cx="9" cy="5" r="3.5" fill="{stroke}"/>'
        if style == "points"
        else f'<path d="M0 5h18" stroke="{stroke}" stroke-width="3" stroke-dasharray="{dash}"/>'
    )
    return f'<svg class="swatch" viewBox="0 0 18 10" width="18" height="10" aria-hidden="true">{mark}</svg>'


def _toolbar(toggles: Sequence[str], blocks: Sequence[Block]) -> str:
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-run="{index}" title="{escape(name)}">'
        f"{_swatch(index, 'line')}<span>{escape(name)}</span></button>"
        for index, name in enumerate(toggles)
    )
    many = '<input type="search" class="filter" placeholder="filter runs" aria-label="filter runs">'
    every = '<button type="button" data-every="1">all</button><button type="button" data-every="">none</button>'
    log = '<button type="button" id="log" aria-pressed="false">log y</button>'
    sections = "".join(
        f'<button type="button" data-section="{index}">{escape(block.title)}</button>'
        for index, block in enumerate(block for block in blocks if isinstance(block, Text))
    )
    return (
        f'<nav class="sections" aria-label="sections">{sections}</nav>'
        f'<div class="toolbar" role="toolbar" aria-label="runs and scales">{many if len(toggles) > 12 else ""}'
        f'<div class="chips">{chips}</div><div class="tools">{every if len(toggles) > 2 else ""}'
        f"{log if any(isinstance(block, Plot) for block in blocks) else ''}"
        '<button type="button" id="theme" aria-pressed="false">dark</button></div></div>'
    )


def _json(value: Any) -> str:
    """Return JSON that is safe inside a script element.

    >>> _json(["</script>", "a & b"])
    '["\\\\u003c/script\\\\u003e","a \\\\u0026 b"]'
    """
    text = json.dumps(value, allow_nan=False, separators=(",", ":"))  # ASCII: U+2028 and its kin are escaped already
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _packed(content: str) -> str:
    """Compress to base64, which page.js unpacks; plotly.js takes 2 MB instead of 5 this way."""
    return base64.b64encode(zlib.compress(content.encode("utf-8", "replace"), 9)).decode()


def _script(code: str) -> str:
    """Return code that is safe inside a script element, with the line ends that an HTML parser turns it into."""
    code = code.replace("\r\n", "\n").replace("\r", "\n").replace("<!--", "<\\!--")
    return re.sub(r"</(?=script)", r"<\\/", code, flags=re.IGNORECASE)


def _plotly() -> str:
    try:
        from plotly.offline import get_plotlyjs
    except ImportError:
        raise ImportError(f"a page embeds plotly, which is not installed; {remedy('plotly')}") from None
    return get_plotlyjs()
