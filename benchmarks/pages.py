"""What benchmarks write into Markdown pages, between their markers."""

from pathlib import Path


def fill(path: Path, marker: str, body: str) -> None:
    """Replace what stands between <!-- marker --> and <!-- /marker -->."""
    page, start, end = path.read_text(encoding="utf-8"), f"<!-- {marker} -->", f"<!-- /{marker} -->"
    path.write_text(page[: page.index(start) + len(start)] + f"\n{body}\n" + page[page.index(end) :], encoding="utf-8")
