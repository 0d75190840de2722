"""How many examples each property is tried on, and how many were.

Two profiles. "fast", the default: the same examples every time, for every commit. "slow" (HYPOTHESIS_PROFILE=slow, `make
test-all`): 20,000 examples for a property of floats or few small tensors; what takes longer says its own number.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, given, settings
from hypothesis.stateful import RuleBasedStateMachine

SLOW = 20_000
FEWER = 2_000  # of a property that takes milliseconds, or has several cases: in each of them
PROFILE = os.environ.get("HYPOTHESIS_PROFILE", "fast")
TRIED: Counter[str] = Counter()  # property -> examples that were really run

_COMMON: dict[str, Any] = {
    "deadline": None,  # a busy machine is no failure
    "database": None,
    "suppress_health_check": [HealthCheck.too_slow, HealthCheck.data_too_large],
}
settings.register_profile("fast", max_examples=100, derandomize=True, **_COMMON)
settings.register_profile("slow", max_examples=SLOW, **_COMMON)  # --hypothesis-seed says which


def budget(fast: int, slow: int) -> settings:
    """The settings of one property in the profile that was chosen."""
    return settings(settings.get_profile(PROFILE), max_examples=slow if PROFILE == "slow" else fast)


def prop(fast: int = 60, slow: int = SLOW, **strategies: Any) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """@given(**strategies), with a budget for either profile, counted."""

    def wrap(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def counted(*args: Any, **kwargs: Any) -> None:
            TRIED[test.__name__] += 1
            test(*args, **kwargs)

        return budget(fast, slow)(given(**strategies)(counted))

    return wrap


class CountedMachine(RuleBasedStateMachine):
    """A state machine whose runs are counted."""

    def __init__(self) -> None:
        super().__init__()
        TRIED[type(self).__name__] += 1
