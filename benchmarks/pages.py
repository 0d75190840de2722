"""Generated parts of Markdown pages, between their markers."""

from pathlib import Path


def fill(path: Path, marker: str, body: str) -> None:
    """Replace what a page has between <!-- marker --> and <!-- /marker -->."""
    path.write_text(filled(path.read_text(encoding="utf-8"), marker, body), encoding="utf-8")


def filled(page: str, marker: str, body: str) -> str:
    """Return the text of a page with `body` between <!-- marker --> and <!-- /marker -->.

    >>> filled("a <!-- x --> old <!-- /x --> b", "x", "new")
    'a <!-- x -->\\nnew\\n<!-- /x --> b'
    """
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    return page[: page.index(start) + len(start)] + f"\n{body}\n" + page[page.index(end) :]
