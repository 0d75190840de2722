"""What the callbacks of all trainers share: a monitor made when training begins, its records and its state."""

from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer

from steadynorm.monitor import Monitor, Record
from steadynorm.records.sinks import Sink


class Watch:
    """A `Monitor` whose optimizer is known later than its settings.

    Args:
        sinks: Functions of a list of records, such as `sinks.to_tensorboard(writer)`.
        settings: Settings of the `Monitor`: every, flush, alignment, forecast.
    """

    def __init__(self, sinks: tuple[Sink, ...], settings: Mapping[str, Any]):
        if bad := [sink for sink in sinks if not callable(sink)]:
            raise TypeError(
                f"MonitorCallback: {bad[0]!r} is not a function of a list of records; use steadynorm.records.sinks"
            )
        self.sinks, self.settings = sinks, dict(settings)
        self.monitor: Monitor | None = None
        self._saved: dict[str, Any] | None = None  # from a checkpoint, until the monitor exists

    def begin(self, optimizer: Optimizer, model: nn.Module | None, *, steps: int) -> None:
        """Attach to the optimizer of a run that has taken `steps` steps, and detach from one attached before."""
        self.end()
        self.monitor = Monitor(optimizer, model, **self.settings)
        self.monitor.steps = steps
        if self._saved is not None:
            self.monitor.load_state_dict(self._saved)
            self._saved = None

    def hand_over(self, **last: float) -> None:
        """Pass the new records to the sinks, with `last` added to the latest of them."""
        records: list[Record] = self.monitor.measure() if self.monitor is not None else []
        if records:
            records[-1] |= last
            for sink in self.sinks:
                sink(records)

    def end(self) -> None:
        """Pass on the remaining records and detach."""
        self.hand_over()
        if self.monitor is not None:
            self.monitor.close()
        self.monitor = None

    def state_dict(self) -> dict[str, Any]:
        """Pass on the remaining records, and return the monitor's state."""
        self.hand_over()
        return self.monitor.state_dict() if self.monitor is not None else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Keep a saved state for `begin`."""
        self._saved = state or None
