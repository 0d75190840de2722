"""Keep the outcome of runs that belong to no experiment: slim records, and a summary with the command and their origin.

.venv/bin/python results/keep.py NAME "COMMAND" RUN [RUN ...]
"""

import sys
from pathlib import Path

from steadynorm import records
from steadynorm.files import write_json
from steadynorm.lab.paper import slim_records
from steadynorm.lab.paper.metrics import END, MIDDLE, final, mean_over
from steadynorm.lab.paper.plots import round_to

HERE = Path(__file__).parent
NORMS = (
    "weight_norm",
    "weight_norm/hidden",
    "grad_norm",
    "forecast_norm",
    "forecast_norm/hidden",
    "spectral_norm",
    "excess_alignment/hidden",
    "excess_alignment/output",
    "loss",
)
FINAL = ("val_loss", "val_accuracy", "seconds")


def figures(run: records.Run) -> dict[str, float | None]:
    """Return final values, and means in the middle of the run and at its end."""
    metrics = {
        f"{key}, {name}": mean_over(key, part) for key in NORMS for name, part in (("middle", MIDDLE), ("end", END))
    }
    metrics |= {key: final(key) for key in FINAL}
    present = {name: metric for name, metric in metrics.items() if name.split(",")[0] in run.columns}
    return {"steps": int(run.steps[-1]), **{name: round_to(metric(run)) for name, metric in present.items()}}


if __name__ == "__main__":
    name, command, *folders = sys.argv[1:]
    summary = {"command": command, "runs": {}}
    for folder in map(Path, folders):
        run = records.read(folder)
        if any(summary.get(key, value) != value for key, value in run.origin.items()):
            raise SystemExit(f"{folder} comes from another commit or machine than the folders before it")
        summary |= run.origin
        summary["runs"][folder.name] = figures(run)
        slim_records.keep(run, HERE / name / folder.name / records.FILE, run.name, tuple(run.columns))
    write_json(HERE / name / "summary.json", summary)
