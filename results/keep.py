"""Keep the outcome of runs: thinned records without layers, and a summary with the command and the commit.

.venv/bin/python results/keep.py NAME "COMMAND" RUN [RUN ...]
"""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np

from steadynorm import records

HERE = Path(__file__).parent
POINTS = 120  # records kept of each run


def keep(name: str, command: str, folders: list[Path]) -> None:
    summary = {"command": command, "commit": commit(), "runs": {}}
    for folder in folders:
        run = records.read(folder)
        summary["runs"][folder.name] = figures(run)
        slim = records.thin(run, POINTS)
        path = HERE / name / folder.name / records.FILE
        path.unlink(missing_ok=True)
        with records.Recorder(path, name=run.name, config=run.config) as recorder:
            for i, step in enumerate(slim.steps.tolist()):
                values = {key: float(column[i]) for key, column in slim.columns.items() if np.isfinite(column[i])}
                recorder.write({"step": step} | values)
    (HERE / name / "summary.json").write_text(json.dumps(summary, indent=1) + "\n", encoding="utf-8")


def figures(run: records.Run) -> dict[str, float | None]:
    """Final values, and norms in the middle and at the end (means over 5 % of the steps)."""
    count = len(run.steps)
    span = max(1, count // 20)
    found: dict[str, float | None] = {"steps": int(run.steps[-1])}
    for key in (
        "weight_norm",
        "weight_norm/hidden",
        "grad_norm",
        "forecast_norm",
        "forecast_norm/hidden",
        "spectral_norm",
        "loss",
    ):
        if key in run.columns:
            values = run.columns[key]
            found[f"{key}, middle"] = number(np.nanmean(values[(count - span) // 2 : (count + span) // 2]))
            found[f"{key}, end"] = number(np.nanmean(values[-span:]))
    for key in ("val_loss", "val_accuracy", "seconds"):
        if key in run.columns:
            found[key] = number(run.columns[key][np.isfinite(run.columns[key])][-1])
    return found


def number(value: float) -> float | None:
    return round(float(value), 6) if np.isfinite(value) else None


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, encoding="utf-8", check=True
    ).stdout.strip()


if __name__ == "__main__":
    keep(sys.argv[1], sys.argv[2], [Path(each) for each in sys.argv[3:]])
