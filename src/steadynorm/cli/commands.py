"""All commands, as one type for the parser."""

from collections.abc import Sequence
from typing import Any

from steadynorm.cli import training
from steadynorm.cli.papers import PaperList, PaperNull, PaperRun
from steadynorm.cli.predicting import Predict, Simulate
from steadynorm.cli.showing import Bench, Demo, Report
from steadynorm.cli.subcommands import one_of
from steadynorm.cli.training import spelled_out as spelled_out
from steadynorm.train.config import Config

_PAPER = one_of({"list": PaperList, "run": PaperRun, "null": PaperNull})
_DATA = one_of({"get": training.DataGet, "tokenize": training.DataTokenize})


def command_of(argv: Sequence[str]) -> Any:
    """All commands; `train` has the defaults of the optimizer that argv names."""
    return one_of(
        {
            "demo": Demo,
            "predict": Predict,
            "simulate": Simulate,
            "train": training.commands(argv),
            "paper": _PAPER,
            "report": Report,
            "data": _DATA,
            "bench": Bench,
        },
        {
            "train": "One training run; goes on where it was interrupted.",
            "paper": "Figures and tables of the paper, as named experiments.",
            "data": "Get data sets; turn text into token shards.",
        },
    )


def execute(command: Any) -> int | None:
    """Carry out what was parsed."""
    return training.train(command) if isinstance(command, Config) else command()
