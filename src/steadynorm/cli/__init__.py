"""The command line: parse, call, print."""

import io
import os
import sys
from collections.abc import Sequence

from steadynorm.extras import describe_missing


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point of `steadynorm`. What the user can mend gives one line and exit code 2, no traceback."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a locale without UTF-8 has no ²: it becomes a question mark
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `steadynorm ... | head` has seen enough; what is left must not fail at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt as stop:  # also while packages are imported
        print(f"steadynorm: {str(stop) or 'interrupted'}", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("STEADYNORM_TRACEBACK"):
            raise
        said = describe_missing(error) if isinstance(error, ImportError) else error
        print(f"steadynorm: error: {said}", file=sys.stderr)
        return 2


def _run(argv: Sequence[str]) -> int:
    if argv == ["--version"]:
        from steadynorm import __version__

        print(f"steadynorm {__version__}")
        return 0
    import tyro

    from steadynorm.cli.commands import command_of, execute
    from steadynorm.cli.subcommands import spelled_out

    argv = spelled_out(argv)
    command = tyro.cli(
        command_of(argv),
        prog="steadynorm",
        description="Corrected decoupled weight decay: the norm stays where you put it.",
        args=argv or ["--help"],
    )
    return execute(command) or 0
