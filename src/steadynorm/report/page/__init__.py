"""Plots, heat maps, tables and text as one self-contained HTML file that opens offline and makes no request.

What is shown is a value: blocks in reading order, which are frozen dataclasses. `page.css` and `page.js` draw it with
plotly.js, which is embedded. Names are data, never markup: JSON with `<`, `>` and `&` escaped, or `html.escape`. The
content security policy lets only our own scripts run, by their hash.
"""

from steadynorm.report.page.blocks import Block, Cell, HeatMap, Page, Plot, Series, Table, Text
from steadynorm.report.page.rendering import render, rounded, shown, write

__all__ = ["Block", "Cell", "HeatMap", "Page", "Plot", "Series", "Table", "Text", "render", "rounded", "shown", "write"]
