"""Read and write the shapes, numbers and tables of the command line."""

from collections.abc import Collection, Sequence

from rich.console import Console
from rich.table import Table


class Output(Console):
    """A console on stdout that leaves a closed pipe to `cli.main`; rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        raise  # the BrokenPipeError that rich is handling


def refuse_options(command: object, names: Sequence[str], why: str) -> None:
    """Raise ValueError if one of these options was passed to a command that would not read it."""
    passed = [name for name in names if getattr(command, name) != getattr(type(command), name)]
    if passed:
        raise ValueError(f"{', '.join('--' + name.replace('_', '-') for name in passed)}: {why}")


def parse_shape(text: str) -> tuple[int, ...]:
    """Return the sides of a shape.

    >>> parse_shape("384x1536")
    (384, 1536)
    """
    try:
        return tuple(int(side) for side in text.lower().split("x"))
    except ValueError:
        raise ValueError(f"shape {text!r}: write the sides with an x between them, such as 384x1536 or 768") from None


def format_value(value: object) -> str:
    """Write a float with five significant digits, the items of a tuple with "and", and None as nothing.

    >>> format_value(0.080000000001), format_value((0.9, 0.99)), format_value(None), format_value(True)
    ('0.08', '0.9 and 0.99', '', 'True')
    """
    if value is None:
        return ""
    if isinstance(value, tuple):
        return " and ".join(map(format_value, value))
    return f"{value:.5g}" if isinstance(value, float) else str(value)


def new_table(title: str, columns: Sequence[str], right: Collection[str] = ()) -> Table:
    """Return an empty table with these columns, of which those in `right` are flush right."""
    table = Table(title=title or None, title_justify="left")
    for column in columns:
        table.add_column(column, justify="right" if column in right else "left")
    return table
