"""Command line: parse, call, print."""

import io
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from steadynorm.extras import describe_missing
from steadynorm.signals import Terminated, exit_code


def main(argv: Sequence[str] | None = None) -> int:
    """Run `steadynorm`; errors that the user can fix print one line, without a traceback, and exit with code 2."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the command
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # without UTF-8, characters such as ² become question marks
    argv = sys.argv[1:] if argv is None else list(argv)
    try:
        status = _run(argv)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # `steadynorm ... | head` closed the pipe; flushing the rest at exit must not fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except KeyboardInterrupt as stop:  # also while packages are imported
        print(f"steadynorm: {str(stop) or 'interrupted'}", file=sys.stderr)
        return exit_code(signal.SIGTERM if isinstance(stop, Terminated) else signal.SIGINT)
    except (ValueError, OSError, ImportError, RuntimeError) as error:
        if os.environ.get("STEADYNORM_TRACEBACK"):
            raise
        message = describe_missing(error) if isinstance(error, ImportError) else error
        print(f"steadynorm: error: {message}", file=sys.stderr)
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
