"""What a monitor remembers of the records it has made, so that it can say what they mean."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from steadynorm.records.advice import COLUMNS
from steadynorm.records.schema import Record, Run

_MOST = 512  # rows; of a longer run every second is kept, then every fourth, and so on


class History:
    """The columns that `advise` reads, of evenly spaced records."""

    def __init__(self) -> None:
        self.rows: list[Record] = []
        self.count, self.stride = 0, 1

    def add(self, record: Record) -> None:
        """Remember a record, if it is the stride's turn."""
        if self.count % self.stride == 0:
            self.rows.append({key: record[key] for key in record if key == "step" or key.partition("/")[0] in COLUMNS})
        self.count += 1
        if len(self.rows) == _MOST:
            self.rows, self.stride = self.rows[::2], 2 * self.stride

    def as_run(self) -> Run:
        """Return what is remembered in the form of a run."""
        keys = dict.fromkeys(key for row in self.rows for key in row if key != "step")
        # None becomes nan
        columns = {key: np.array([row.get(key) for row in self.rows], dtype=np.float64) for key in keys}
        steps = np.array([row["step"] for row in self.rows], dtype=np.int64)
        return Run("", {}, "", None, steps, columns, {}, total=self.count)

    def state_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return {"rows": list(self.rows), "count": self.count, "stride": self.stride}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what was saved; a state saved before there was a history has none."""
        self.rows = list(state.get("rows", ()))
        self.count, self.stride = int(state.get("count", 0)), int(state.get("stride", 1))
