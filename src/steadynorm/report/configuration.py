"""The configuration section of a report: what differs between runs, and what does not."""

import json
from collections.abc import Sequence

from steadynorm import records
from steadynorm.records import Run
from steadynorm.report import page

_FEW_RUNS = 6  # up to here a table has one column per run


def configuration_blocks(runs: Sequence[Run]) -> list[page.Block]:
    """Return a table of the settings that differ, and a folded one of those that do not."""
    flat = [
        {
            key: value if isinstance(value, str) else json.dumps(value)
            for key, value in records.flatten(run.config).items()
        }
        for run in runs
    ]
    keys = list(dict.fromkeys(key for each in flat for key in each))
    differing = [key for key in keys if len({each.get(key) for each in flat}) > 1]
    equal = [[key, flat[0][key]] for key in keys if key not in set(differing)]
    names = [run.name for run in runs]
    blocks: list[page.Block] = []
    if differing and len(runs) <= _FEW_RUNS:
        rows: list[list[page.Cell]] = [[key, *(each.get(key) for each in flat)] for key in differing]
        blocks.append(page.Table("What differs", ["setting", *names], rows))
    elif differing:
        rows = [[name, *(each.get(key) for key in differing)] for name, each in zip(names, flat, strict=True)]
        blocks.append(page.Table("What differs", ["run", *differing], rows))
    if equal:
        count = f"{len(equal)} setting{'s' if len(equal) > 1 else ''}"
        label = count if len(runs) == 1 else f"{count} the same in all runs"
        blocks.append(page.Table(label, ["setting", "value"], equal, folded=True))
    return [page.Text("Configuration"), *blocks] if blocks else []
