"""Every figure and table of the paper as a named experiment: what is run, how it is drawn, what came out."""

from steadynorm.paper.experiment import Claim, Context, Experiment, Outcome, carry_out
from steadynorm.paper.overlap import OVERLAP
from steadynorm.paper.random_system import RANDOM_SYSTEM
from steadynorm.paper.steady_state import STEADY_STATE

EXPERIMENTS: dict[str, Experiment] = {each.name: each for each in (RANDOM_SYSTEM, STEADY_STATE, OVERLAP)}

__all__ = ["EXPERIMENTS", "Claim", "Context", "Experiment", "Outcome", "carry_out", "get"]


def get(name: str) -> Experiment:
    """The experiment of this name, or an error that lists them.

    >>> get("fig-overlap").name
    'fig-overlap'
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"no experiment is called {name!r}; there are: {', '.join(EXPERIMENTS)}")
    return EXPERIMENTS[name]
