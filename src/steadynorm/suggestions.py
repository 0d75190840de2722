"""Suggest known names for an unknown one."""

import difflib
from collections.abc import Iterable


def suggest(name: str, known: Iterable[str], least: float = 0.0) -> str:
    """Return a question that suggests the nearest known names, or "" if none is at least this similar (0 to 1).

    >>> suggest("lm_haed", ["wte", "lm_head"])
    "did you mean 'lm_head' or 'wte'?"
    >>> suggest("lm_haed", ["wte", "lm_head"], least=0.6)
    "did you mean 'lm_head'?"
    """
    near = [repr(match) for match in difflib.get_close_matches(name, sorted({*known} - {""}), 3, least)]
    if not near:
        return ""
    *first, last = near
    return f"did you mean {', '.join(first)} or {last}?" if first else f"did you mean {last}?"
