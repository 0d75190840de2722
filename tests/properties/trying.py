"""Choose how many examples each property is tried on, and count them.

Two profiles. "fast", the default: the same examples every time, for every commit. "slow" (HYPOTHESIS_PROFILE=slow, `make
test-all`), where an example's time says how many there are:

| time of an example | examples | which |
|---|---|---|
| below 3 ms | 20,000 | theory, schedules; lmos: unit ball, scale; over all their cases: rotation, permutation, transpose |
| 3 to 5 ms | 10,000 | bounded iterates of Scion, Lion, Adam and SGD; steepness of an lmo |
| 5 to 12 ms | 5,000 | scale of the gradient; rotated runs; length and direction of a step; bounded iterates of Muon |
| 9 ms | 20,000 over all optimizers | finite in, finite out |
| 30 ms and more | 1,500 | twins; order, grouping and pieces |
| large matrices, 50 to 150 ms | 150 to 600 | |
| a life, 100 ms | 100 of each optimizer | |
| other | 2,000 (FEWER) in each case | |

Times of a busy core; together about half an hour of it. The summary line of a run prints how many there really were.
"""

import functools
from collections.abc import Callable
from typing import Any

from counts import EXAMPLES, PROFILE
from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine

SLOW = 20_000
FEWER = 2_000  # of a property that takes milliseconds, or has several cases: in each of them

_COMMON: dict[str, Any] = {
    "deadline": None,  # a busy machine is no failure
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("fast", max_examples=100, derandomize=True, **_COMMON)
settings.register_profile("slow", max_examples=SLOW, **_COMMON)  # --hypothesis-seed says which


def budget(fast: int, slow: int) -> settings:
    """Return the settings of one property in the chosen profile."""
    return settings(settings.get_profile(PROFILE), max_examples=slow if PROFILE == "slow" else fast)


def prop(fast: int = 60, slow: int = SLOW, **strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Apply @given(**strategies), with a budget for either profile, and count examples."""

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def counted(*args: Any, **kwargs: Any) -> None:
            EXAMPLES[test.__name__] += 1
            test(*args, **kwargs)

        return budget(fast, slow)(given(**strategies)(counted))

    return wrap


class CountedMachine(RuleBasedStateMachine):
    """A state machine whose runs are counted."""

    def __init__(self) -> None:
        super().__init__()
        EXAMPLES[type(self).__name__] += 1
