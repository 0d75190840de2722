"""Find the options of a run that would change nothing, because its optimizer or schedule never reads them.

A tuple counts as read as a whole: LionC takes the second of its betas, and the first passes.
"""

from dataclasses import fields
from types import MethodType
from typing import Any

from steadynorm.lab.models import GPT, GPTConfig
from steadynorm.lab.train.config import Config
from steadynorm.lab.train.optimizers import build

_TINY = GPTConfig(layers=1, width=8, heads=1, vocab=8, context=8)


class _Reads:
    """A dataclass whose attributes are noted when they are read, also by its own methods."""

    def __init__(self, values: Any):
        self.values, self.names = values, set[str]()

    def __getattr__(self, name: str) -> Any:
        self.names.add(name)
        value = getattr(self.values, name)
        return MethodType(value.__func__, self) if isinstance(value, MethodType) else value

    def unread(self) -> dict[str, Any]:
        """Return the fields that were not read and are not at their defaults."""
        unread = (field for field in fields(self.values) if field.name not in self.names)
        values = {field.name: (getattr(self.values, field.name), field.default) for field in unread}
        return {name: value for name, (value, usual) in values.items() if value != usual}


def refuse_unused(config: Config) -> None:
    """Raise ValueError if a setting of the optimizer or the schedule is not its default and would not be used."""
    optim, schedule = _Reads(config.optim), _Reads(config.schedule)
    build(GPT(_TINY), optim, schedule, config.steps)  # pyright: ignore[reportArgumentType]
    unread = {f"optim.{name}": value for name, value in optim.unread().items()}
    unread |= {f"schedule.{name}": value for name, value in schedule.unread().items()}
    if unread:
        what = ", ".join(f"{name}={value}" for name, value in unread.items())
        raise ValueError(
            f"{what}: not used by {config.optim.name} with optim.hold={config.optim.hold}, optim.polar={config.optim.polar}, "
            f"schedule.lr={config.schedule.lr} and schedule.momentum={config.schedule.momentum}; leave it out"
        )
