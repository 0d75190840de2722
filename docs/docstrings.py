"""Our docstrings as Markdown, for the API pages: a Griffe extension that mkdocs.yml names.

An indented block after an empty line is an equation, which Markdown shows as it is. Left to do: a line that ends in ":"
with indented lines right below it becomes a list, and an example (`>>>`) becomes a code block.
"""

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"    (\*{0,2}[\w, \"/<>]+?): (.*)")


class Docstrings(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Lists and examples made explicit.

    >>> as_markdown("Claim.\\n\\nArgs:\\n    lr: gamma,\\n        or more.").splitlines()
    ['Claim.', '', '**Args**', '', '- `lr`: gamma,', '  or more.']
    """
    out: list[str] = []
    for block in re.split(r"\n\n+", text.strip("\n")):
        lines = block.split("\n")
        if lines[0].startswith(">>> "):
            out.append("\n".join(["```pycon", *lines, "```"]))
            continue
        for k, line in enumerate(lines):
            below = lines[k + 1 :]
            if line.endswith(":") and not line.startswith(" ") and below and below[0].startswith("    "):
                out += ["\n".join([*lines[:k], f"**{line[:-1]}**"]), _list(below)]
                break
        else:
            out.append(block)
    return "\n\n".join(out)


def _list(lines: list[str]) -> str:
    """Entries at one indent are items, what is deeper goes on; lines that come back to the margin end the list."""
    shown = []
    for line in lines:
        if (entry := _ENTRY.fullmatch(line)) is not None:
            shown.append(f"- `{entry[1]}`: {entry[2]}")
        elif line.startswith("        "):
            shown.append(f"  {line.strip()}")
        elif line.startswith("    "):
            shown.append(f"- {line.strip()}")
        else:
            shown.append(f"\n{line}")
    return "\n".join(shown)
