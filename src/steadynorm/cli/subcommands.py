"""A choice of commands, in the form that tyro parses."""

import functools
import operator
from collections.abc import Mapping
from typing import Annotated, Any

from tyro.conf import subcommand


def one_of(
    commands: Mapping[str, Any], about: Mapping[str, str] | None = None, default: Mapping[str, Any] | None = None
) -> Any:
    """The union of these commands; `about` where their docstring does not say it, `default` where there is one."""
    about, default = about or {}, default or {}
    parts = []
    for name, command in commands.items():
        how = {"default": default[name]} if name in default else {}
        parts.append(Annotated[command, subcommand(name, description=about.get(name), **how)])
    return functools.reduce(operator.or_, parts)
