"""What an experiment is: a name, what the paper found, and a function from a context to plots and verdicts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from steadynorm.lab.paper.statistics import Finding
from steadynorm.report import page

VERDICTS = ("holds", "does not hold", "not testable at this scale")
LEAST = 1e-6  # chances below it are not told apart: their digits are rounding


class MissingRunsError(ValueError):
    """Runs that a claim needs are not there."""


@dataclass(frozen=True)
class Claim:
    """Something the paper or we say, what became of it here, and the figure that rests on.

    `p`: the chance of a verdict as clear as this, either way, if the truth were at the bound; 1 where nothing was tested.
    `find` judges it again: the null test feeds it noise.
    """

    text: str
    verdict: str
    figure: str
    p: float = 1.0
    find: Callable[[], Finding] | None = field(default=None, compare=False, repr=False)

    def __post_init__(self) -> None:
        if self.verdict not in VERDICTS:
            raise ValueError(f"verdict {self.verdict!r} is unknown; choose one of {', '.join(VERDICTS)}")

    def plain(self) -> dict[str, Any]:
        """What a summary holds of it."""
        return {"text": self.text, "verdict": self.verdict, "figure": self.figure, "p": float(f"{self.p:.2g}")}


def claim(text: str, find: Callable[[], Finding]) -> Claim:
    """A claim by what was found; where runs are missing it is not testable, and says which.

    >>> from steadynorm.lab.paper.statistics import at_least, estimate
    >>> claim("1 < 2", lambda: at_least(estimate([2.0, 2.1, 1.9]), 1.0, "2")).verdict
    'holds'
    """
    try:
        finding = find()
    except MissingRunsError as error:
        return Claim(text, VERDICTS[2], str(error), find=find)
    verdict = VERDICTS[2 if finding.holds is None else 0 if finding.holds else 1]
    return Claim(text, verdict, finding.figure, max(LEAST, finding.chance), find)


@dataclass(frozen=True)
class Outcome:
    """What an experiment shows: blocks of a page, verdicts, and the numbers behind them."""

    blocks: Sequence[page.Block]
    claims: Sequence[Claim]
    summary: Mapping[str, Any]


@dataclass(frozen=True)
class Context:
    """Where an experiment writes and how much it may do."""

    folder: Path
    quick: bool = False
    seeds: int | None = None  # None: the experiment's own choice
    seed: int = 0
    only: tuple[str, ...] = ()  # parts by the beginning of their names; none: all
    scale: str = "desk"
    kept_only: bool = False  # nothing may be run: what is in the folder is all there is

    @property
    def records(self) -> Path:
        """Where records are kept, a folder for each run."""
        return self.folder / "records"

    def wants(self, name: str) -> bool:
        """Whether a part of this name is asked for."""
        return not self.only or name.lower().startswith(tuple(each.lower() for each in self.only))


@dataclass(frozen=True)
class Experiment:
    """A figure that needs no training: its name, title, what the paper found, and how to get it."""

    name: str
    title: str
    found: str
    run: Callable[[Context], Outcome]
    seconds: Mapping[str, float]  # about how long it takes on one core, by scale
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # panels that --only can choose from, by scale
