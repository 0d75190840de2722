"""Our docstrings as Markdown, for the API pages: a Griffe extension that mkdocs.yml names.

An indented block after an empty line is an equation, which Markdown shows as it is. Left to do: a line with indented
"name: text" right below it becomes the title of a list, an example (`>>>`) a code block, and signs that Markdown would
take for its own are kept.
"""

import re
from typing import Any

import griffe

_ENTRY = re.compile(r"    (\*{0,2}[\w\"/<>]+(?:, [\w\"/<>]+)*): (.*)")


class Docstrings(griffe.Extension):
    """What mkdocstrings calls for every object it has read."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = as_markdown(obj.docstring.value)


def as_markdown(text: str) -> str:
    """Lists and examples made explicit.

    >>> as_markdown("Claim of a_n.\\n\\nArgs:\\n    lr: gamma,\\n        or more.").splitlines()
    ['Claim of a\\\\_n.', '', '**Args**', '', '- `lr`: gamma,', '  or more.']
    """
    return "\n\n".join(_block(block.split("\n")) for block in re.split(r"\n\n+", text.strip("\n")))


def _block(lines: list[str]) -> str:
    if lines[0].startswith(">>> "):
        return "\n".join(["```pycon", *lines, "```"])
    if lines[0].startswith("    "):
        return "\n".join(lines)
    below = next((k for k, line in enumerate(lines) if line.startswith("    ")), len(lines))
    if below == len(lines):
        return "\n".join(map(_kept, lines))
    before, title = map(_kept, lines[: below - 1]), _kept(lines[below - 1])
    title = f"**{title[:-1]}**" if title.endswith(":") else title
    return "\n".join([*before, title, "", *_items(lines[below:])])


def _items(lines: list[str]) -> list[str]:
    """Entries at one indent are items, what is deeper goes on; what comes back to the margin is text again."""
    shown = []
    for line in lines:
        if (entry := _ENTRY.fullmatch(line)) is not None:
            shown.append(f"- `{entry[1]}`: {_kept(entry[2])}")
        elif line.startswith("        "):
            shown.append(f"  {_kept(line.strip())}")
        elif line.startswith("    "):
            shown.append(f"- {_kept(line.strip())}")
        else:
            shown.append(f"\n{_kept(line)}")
    return shown


def _kept(text: str) -> str:
    """Markdown's own signs escaped, outside of `code`."""
    parts = text.split("`")
    parts[::2] = [re.sub(r"([_*|])", r"\\\1", each).replace("<", "&lt;") for each in parts[::2]]
    return "`".join(parts)
