"""Draw the plots of an experiment, for docs/experiments.py.

Each plot is a picture of its own, as wide as a phone, so that a page puts as many beside each other as fit.
"""

import re
from collections.abc import Callable, Sequence
from functools import partial
from io import BytesIO
from itertools import cycle
from textwrap import wrap
from typing import NamedTuple

import matplotlib as mpl
import numpy as np

mpl.use("svg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from steadynorm.report import page

COLOURS = ("#1d4ed8", "#c2410c", "#15803d", "#7e22ce", "#0e7490", "#b91c1c", "#a16207", "#475569")
STYLE = {"svg.hashsalt": "steadynorm", "svg.fonttype": "none", "font.size": 8, "axes.spines.top": False,
         "axes.spines.right": False, "figure.facecolor": "white", "lines.linewidth": 1.2}  # fmt: skip


WIDTH = 3.75  # inches: 360 pixels, two of which fit beside each other on a laptop


class Picture(NamedTuple):
    """A picture, drawn when its SVG is asked for."""

    alt: str
    figure: Callable[[], Figure]

    def svg(self) -> str:
        with mpl.rc_context(STYLE):
            return _svg(self.figure())


def pictures_of(plots: Sequence[page.Plot | page.HeatMap]) -> list[Picture]:
    """Return a picture of every plot; if their lines have names, a legend of all comes first."""
    names = dict.fromkeys(series.toggle for plot in plots if isinstance(plot, page.Plot) for series in plot.series)
    colours = dict(zip(names, cycle(COLOURS), strict=False))
    pictures = [Picture(plot.title, partial(_plot, plot, colours)) for plot in plots]
    if named := {name: colour for name, colour in colours.items() if name}:
        pictures.insert(0, Picture("Legend: " + ", ".join(named), partial(_legend, named)))
    return pictures


def _plot(plot: page.Plot | page.HeatMap, colours: dict[str, str]) -> Figure:
    height = 2.7 if isinstance(plot, page.Plot) else max(2.7, 0.7 + 0.13 * len(plot.y))
    figure, axis = plt.subplots(figsize=(WIDTH, height), layout="constrained")
    _lines(axis, plot, colours) if isinstance(plot, page.Plot) else _map(axis, plot)
    axis.set_title("\n".join(wrap(plot.title, 48)), fontsize=9, loc="left")
    axis.set_xlabel(plot.x_label)
    return figure


def _legend(colours: dict[str, str]) -> Figure:
    """Draw a legend in as many columns as the longest name leaves room for."""
    columns = max(1, min(len(colours), 60 // (8 + max(map(len, colours)))))
    figure = plt.figure(figsize=(WIDTH, 0.12 + 0.16 * -(-len(colours) // columns)))
    handles = [plt.Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    figure.legend(handles=handles, loc="center", ncols=columns, frameon=False)
    return figure


def _svg(figure: Figure) -> str:
    text = BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None, "Creator": None})
    plt.close(figure)
    return _shorter(text.getvalue().decode())


def _lines(axis: Axes, plot: page.Plot, colours: dict[str, str]) -> None:
    for series in plot.series:
        x, y, colour = np.asarray(series.x, float), np.asarray(series.y, float), colours[series.toggle]
        form = {"line": "-", "dash": "--", "points": "o"}[series.style]
        axis.plot(x, y, form, color=colour, ms=3, alpha=0.7 if series.style == "dash" else 1.0)
        if series.error is not None and series.style == "points":
            axis.errorbar(x, y, np.asarray(series.error, float), fmt="none", ecolor=colour, lw=0.8)
        elif series.error is not None:
            error = np.asarray(series.error, float)
            axis.fill_between(x, y - error, y + error, color=colour, alpha=0.15, lw=0)
    axis.set_ylabel(plot.y_label)
    if plot.log_x:
        axis.set_xscale("log")
        at = sorted({float(x) for series in plot.series for x in series.x})
        if len(at) <= 6:  # a sweep: its own values, not powers of ten
            axis.set_xticks(at, [f"{x:g}" for x in at])
            axis.xaxis.set_minor_locator(NullLocator())
    if plot.log_y:
        axis.set_yscale("log")
        if _decades(plot) < 1:  # powers of ten would leave it without numbers
            axis.yaxis.set_major_locator(MaxNLocator(5))
            axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.yaxis.set_minor_locator(NullLocator())
    elif plot.zero:
        axis.set_ylim(bottom=0)


def _decades(plot: page.Plot) -> float:
    y = np.concatenate([np.asarray(series.y, float) for series in plot.series] or [np.ones(1)])
    y = y[y > 0]
    return float(np.log10(y.max() / y.min())) if len(y) else 0.0


def _map(axis: Axes, plot: page.HeatMap) -> None:
    z = np.asarray(plot.z, float)
    reach = max(abs((plot.high if plot.high is not None else np.nanmax(z)) - plot.middle), 1e-9)
    shown = axis.pcolormesh(
        np.asarray(plot.x, float), range(len(plot.y)), z, cmap="RdBu_r", vmin=plot.middle - reach, vmax=plot.middle + reach,
        shading="nearest", rasterized=True,
    )  # fmt: skip
    axis.set_yticks(range(len(plot.y)), plot.y, fontsize=7)
    axis.invert_yaxis()
    axis.figure.colorbar(shown, ax=axis)


def _shorter(svg: str) -> str:
    """Round paths to one digit after the point, which is enough."""

    def path(match: re.Match[str]) -> str:
        return re.sub(r"-?\d+\.\d+", lambda number: f"{float(number[0]):.1f}", match[0])

    return re.sub(r' d="[^"]*"', path, svg)
