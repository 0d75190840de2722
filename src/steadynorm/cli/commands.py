"""All commands as one type for the parser; only the module of the requested command is imported."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import import_module  # noqa: TID251
from typing import Any, cast

from steadynorm.cli.subcommands import one_of

ABOUT = {
    "demo": "Predict and simulate; then train a small GPT with Scion and with ScionC, and compare them on a page.",
    "predict": "Norms, half-life, effective lr and matching decay of a setting; with --steps the norm over a whole run.",
    "simulate": "A parameter under random gradients (the paper's appendix B) against prediction.",
    "train": "One training run; resumes automatically.",
    "paper": "Figures and tables of the paper, as named experiments.",
    "report": "Compare runs on one self-contained HTML page.",
    "data": "Get data sets; turn text into token shards.",
    "bench": "Step time of these optimizers and torch's, side by side.",
}
_PLACES = {  # module and name of each command
    "demo": ("report", "Demo"),
    "predict": ("predict", "Predict"),
    "simulate": ("simulation", "Simulate"),
    "train": ("train", "recipes_for"),
    "paper": ("paper", "COMMANDS"),
    "report": ("report", "Report"),
    "data": ("data", "COMMANDS"),
    "bench": ("benchmark", "Bench"),
}


@dataclass(frozen=True)
class _NotRequested:
    """Placeholder for a command that is not requested."""


def command_of(argv: Sequence[str]) -> Any:
    """Return all commands; `train` gets the defaults of the optimizer that argv names."""
    requested = next((word for word in argv if not word.startswith("-")), None)
    return one_of({name: _load(name, argv) if name == requested else _NotRequested for name in ABOUT}, ABOUT)


def _load(name: str, argv: Sequence[str]) -> Any:
    module, command = _PLACES[name]
    loaded = getattr(import_module(f"steadynorm.cli.{module}"), command)
    return loaded(argv) if name == "train" else loaded


def execute(command: Any) -> int | None:
    """Run a parsed command and return its exit code."""
    if callable(command):
        return cast(Callable[[], int | None], command)()
    from steadynorm.cli.train import run_training

    return run_training(command)
