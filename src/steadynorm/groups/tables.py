"""Rows of text cells as a table for people, with rows that differ by a number joined. No torch in here."""

import re
from collections.abc import Sequence
from typing import Any

BETWEEN_DOTS = re.compile(r"(?<![^.])(\d+)(?![^.])")


def fold_rows(rows: Sequence[tuple[str, ...]], number: re.Pattern[str] = BETWEEN_DOTS) -> list[tuple[str, ...]]:
    """Join rows that differ only by numbers in the names in their first cells, at the place of the first of them.

    >>> fold_rows([("h.0.fc", "4x4"), ("h.0.out", "4x8"), ("h.1.fc", "4x4"), ("h.1.out", "4x8"), ("h.2.fc", "4x9")])
    [('h.{0..1}.fc', '4x4'), ('h.{0..1}.out', '4x8'), ('h.2.fc', '4x9')]
    """
    split = [(_split(name, number), rest) for name, *rest in rows]
    for place in range(max((len(parts) for parts, _ in split), default=0) - 2, 0, -2):  # the last number first
        joined: dict[Any, tuple[list[Any], list[str]]] = {}
        for parts, rest in split:
            key = (*parts[:place], None, *parts[place + 1 :], *rest) if place < len(parts) else (*parts, *rest)
            held = joined.setdefault(key, (parts, rest))
            if held[0] is not parts:
                held[0][place] += parts[place]
        split = list(joined.values())
    return [("".join(map(_text, parts)), *rest) for parts, rest in split]


def _split(name: str, number: re.Pattern[str] = BETWEEN_DOTS) -> list[Any]:
    """Split a name into alternating text and 1-tuples of numbers. Numbers stand between dots: w1 is text.

    >>> _split("h.10.w1.weight")
    ['h.', (10,), '.w1.weight']
    """
    return [(int(part),) if k % 2 else part for k, part in enumerate(number.split(name))]


def _text(part: str | tuple[int, ...]) -> str:
    """Return text unchanged and numbers as ranges.

    >>> _text((3,)), _text((0, 1, 2)), _text((0, 2, 3, 4, 7))
    ('3', '{0..2}', '{0,2..4,7}')
    """
    if isinstance(part, str):
        return part
    ranges: list[list[int]] = []
    for number in sorted(part):
        if ranges and number == ranges[-1][-1] + 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    text = ",".join("..".join(map(str, ends)) for ends in ranges)
    return text if len(part) == 1 else f"{{{text}}}"


def format_table(rows: Sequence[Sequence[str]]) -> str:
    """Return rows of cells as text with aligned columns.

    >>> print(format_table([["a", "shape"], ["longer", "2x4"]]))
    a       shape
    longer  2x4
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
