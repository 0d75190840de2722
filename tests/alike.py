"""Compare what was computed here with what another machine wrote down: the last digits of floats may differ."""

import math
import re
import xml.etree.ElementTree as ElementTree
from typing import Any

NUMBER = re.compile(r"(?<![\w#.])[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
RELATIVE = 1e-6
TINY = 1e-9  # differences of nearly equal numbers have no relative accuracy


def difference(found: Any, expected: Any, where: str = "") -> str:
    """Return where two JSON values differ beyond rounding, or "" if they do not."""
    if isinstance(found, dict) and isinstance(expected, dict):
        if found.keys() != expected.keys():
            return f"{where}: {sorted(found)} instead of {sorted(expected)}"
        return _first(difference(found[key], expected[key], f"{where}.{key}") for key in found)
    if isinstance(found, list | tuple) and isinstance(expected, list | tuple):
        if len(found) != len(expected):
            return f"{where}: {len(found)} entries instead of {len(expected)}"
        pairs = enumerate(zip(found, expected, strict=True))
        return _first(difference(*pair, f"{where}[{index}]") for index, pair in pairs)
    if isinstance(found, str) and isinstance(expected, str):
        return text_difference(found, expected, where)
    if isinstance(found, float) and isinstance(expected, float):
        same = math.isclose(found, expected, rel_tol=RELATIVE, abs_tol=TINY) or (
            found != found and expected != expected
        )
    else:
        same = type(found) is type(expected) and found == expected
    return "" if same else f"{where}: {found} instead of {expected}"


def text_difference(found: str, expected: str, where: str = "", slack: float = 0.0) -> str:
    """Return how two texts differ, or "" if only by the last digit of numbers with a decimal point, or by `slack`."""
    if NUMBER.sub("#", found) != NUMBER.sub("#", expected):
        return f"{where}: {found[:200]!r} instead of {expected[:200]!r}"
    for one, two in zip(NUMBER.findall(found), NUMBER.findall(expected), strict=True):
        if one == two:
            continue
        allowed = max(slack, RELATIVE * abs(float(two)), 1.01 * max(_last_place(one), _last_place(two)))
        if abs(float(one) - float(two)) > allowed:
            return f"{where}: {one} instead of {two}"
    return ""


def svg_difference(found: str, expected: str, slack: float = 0.05) -> str:
    """Return how two pictures differ, or "" if they have the same elements in places `slack` points apart at most."""
    one, two = _elements(found), _elements(expected)
    if len(one) != len(two):
        return f"{len(one)} elements instead of {len(two)}"
    pairs = enumerate(zip(one, two, strict=True))
    return _first(text_difference(*pair, f"element {index}", slack) for index, pair in pairs)


def _last_place(number: str) -> float:
    """Return what one unit of the last digit is worth; 0 for an integer, which has no rounding."""
    mantissa, _, exponent = number.lower().partition("e")
    if "." not in mantissa and not exponent:
        return 0.0
    return 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))


def _elements(svg: str) -> list[str]:
    """Return each element as text, without bitmaps, and with ids, which are hashes of coordinates, replaced by their
    order.
    """
    names: dict[str, str] = {}

    def renamed(match: re.Match[str]) -> str:
        return names.setdefault(match[0], f"id-{chr(97 + len(names) // 26)}{chr(97 + len(names) % 26)}")

    found = []
    for element in ElementTree.fromstring(svg).iter():
        given = {key: value for key, value in element.items() if not value.startswith("data:")}
        attributes = {key: re.sub(r"\b[a-zA-Z][0-9a-f]{10}\b", renamed, value) for key, value in given.items()}
        found.append(f"{element.tag} {attributes} {(element.text or '').strip()}")
    return found


def _first(differences: Any) -> str:
    return next((each for each in differences if each), "")
