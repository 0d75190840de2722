"""What a page shows, as values: series, plots, heat maps, tables, text."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

Numbers = Sequence[float] | np.ndarray
Cell = str | float | int | None

STYLES = ("line", "dash", "points")


@dataclass(frozen=True, eq=False)
class Series:
    """y over x."""

    name: str
    x: Numbers
    y: Numbers
    error: Numbers | None = None  # for example one standard error: a bar on points, a band around a line
    style: str = "line"  # one of STYLES
    toggle: str = ""  # the run it belongs to, whose chip hides it and whose colour it has


@dataclass(frozen=True, eq=False)
class Plot:
    """Series over a common axis; `zero` makes the y axis reach 0."""

    title: str
    x_label: str
    y_label: str
    series: Sequence[Series]
    caption: str = ""
    log_x: bool = False
    log_y: bool = False
    zero: bool = False


@dataclass(frozen=True, eq=False)
class HeatMap:
    """z[row, column] over names y and numbers x, in colours that diverge from `middle` and end at `low` and `high`."""

    title: str
    x_label: str
    y_label: str
    x: Numbers
    y: Sequence[str]
    z: Sequence[Numbers] | np.ndarray  # (len(y), len(x))
    caption: str = ""
    middle: float = 1.0
    low: float | None = None
    high: float | None = None
    toggle: str = ""


@dataclass(frozen=True)
class Table:
    """Rows under a header. A cell that is the name of a run shows its colour; `folded` hides the rows at first."""

    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    caption: str = ""
    folded: bool = False


@dataclass(frozen=True)
class Text:
    """A heading and paragraphs, which begin a section of the page."""

    title: str
    paragraphs: Sequence[str] = ()


Block = Plot | HeatMap | Table | Text


@dataclass(frozen=True, eq=False)
class Page:
    """Blocks in reading order, and the files that the reader can save, by name."""

    title: str
    subtitle: str
    blocks: Sequence[Block]
    downloads: Mapping[str, str] = field(default_factory=dict)
