"""What mkdocs runs while it builds: formulas become MathML, which browsers draw by themselves, offline."""

import html
import re
from typing import Any

from latex2mathml.converter import convert

_FORMULA = re.compile(r'<(span|div) class="arithmatex">\\([(\[])(.*?)\\[)\]]</\1>', re.S)


def on_page_content(content: str, **_: Any) -> str:
    """pymdownx.arithmatex has marked the formulas; here each is drawn."""
    return _FORMULA.sub(_drawn, content)


def _drawn(match: re.Match[str]) -> str:
    block = match[2] == "["
    math = convert(html.unescape(match[3]).strip(), display="block" if block else "inline")
    return f'<div class="formula">{math}</div>' if block else math
