"""Show the progress of a run: a live line in a terminal, a line now and then in a log."""

import time
from typing import Any

from steadynorm import progress

_EVERY = 15.0  # seconds between lines in a log


class Display:
    """Show loss, norms and time left."""

    def __init__(self, steps: int, name: str, quiet: bool):
        from rich.progress import TextColumn

        self._progress = progress.bars(TextColumn("{task.fields[note]}"), shown=not quiet)
        self._steps, self._quiet, self._live = steps, quiet, not self._progress.disable
        self._said, self._began, self._first = time.monotonic() - _EVERY, 0.0, None
        self._name = name
        self._progress.start()
        self._task = self._progress.add_task(name, total=steps, note="")

    def update(self, step: int, record: dict[str, Any], evaluated: dict[str, float]) -> None:
        """Show the state after a step: its record and the last evaluation."""
        now = time.monotonic()
        if self._first is None:  # earlier time says nothing about speed: a resumed run began long ago
            self._first, self._began = step, now
        shown = {
            "loss": record.get("loss"),
            "|w|": record.get("weight_norm"),
            "|g|": record.get("grad_norm"),
            **evaluated,
        }
        note = "  ".join(f"{key} {value:.4g}" for key, value in shown.items() if value is not None)
        self._progress.update(self._task, completed=step, note=note)
        if not self._live and not self._quiet and (now - self._said >= _EVERY or step == self._steps):
            steps, seconds = step - self._first, now - self._began
            has_pace = steps > 0 and seconds > 0
            self._said = now if has_pace else self._said  # otherwise print the time left soon
            left = f"  about {progress.duration((self._steps - step) * seconds / steps)} left" if has_pace else ""
            self.say(f"{self._name}: step {step}/{self._steps}  {note}{left}")

    def say(self, text: str) -> None:
        """Print a line."""
        if self._live:
            self._progress.console.print(text, highlight=False, markup=False)
        elif not self._quiet:
            progress.print_to_stderr(text)

    def close(self) -> None:
        """Restore the terminal."""
        self._progress.stop()
