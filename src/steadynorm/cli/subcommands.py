"""Build a choice of commands in the form that tyro parses."""

import functools
import itertools
import operator
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from tyro.conf import subcommand


def one_of(
    commands: Mapping[str, Any], about: Mapping[str, str] | None = None, default: Mapping[str, Any] | None = None
) -> Any:
    """Return the union of commands, with descriptions that replace their docstrings and defaults where there are any."""
    about, default = about or {}, default or {}
    parts = []
    for name, command in commands.items():
        options = {"default": default[name]} if name in default else {}
        parts.append(Annotated[command, subcommand(name, description=about.get(name), **options)])
    return functools.reduce(operator.or_, parts)


def spelled_out(argv: Sequence[str]) -> list[str]:
    """Give a bare `--bf16` its value, so that both the flag and `--bf16 auto` parse.

    >>> spelled_out(["train", "gpt", "--no-bf16"]), spelled_out(["--bf16", "auto", "--bf16", "--steps", "3"])
    (['train', 'gpt', '--bf16', 'False'], ['--bf16', 'auto', '--bf16', 'True', '--steps', '3'])
    """
    words: list[str] = []
    for word, following in itertools.pairwise([*argv, ""]):
        if word == "--no-bf16":
            words += ["--bf16", "False"]
        elif word == "--bf16" and following not in ("auto", "True", "False"):
            words += ["--bf16", "True"]
        else:
            words.append(word)
    return words
