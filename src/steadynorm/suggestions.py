"""What to say to a name that is not known."""

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str], least: float = 0.0) -> str:
    """Ask whether one of the nearest known names was meant; return "" if none is at least this similar (0 to 1).

    >>> suggest("lm_haed", ["wte", "lm_head"])
    "did you mean 'lm_head' or 'wte'?"
    >>> suggest("lm_haed", ["wte", "lm_head"], least=0.6)
    "did you mean 'lm_head'?"
    """
    near = difflib.get_close_matches(name, sorted({*known} - {""}), 3, least)
    return f"did you mean {_either(near)}?" if near else ""


def _either(names: Iterable[str]) -> str:
    """Join quoted names by commas and a last "or".

    >>> _either(["a"]), _either(["a", "b", "c"])
    ("'a'", "'a', 'b' or 'c'")
    """
    *first, last = map(repr, names)
    return f"{', '.join(first)} or {last}" if first else last
