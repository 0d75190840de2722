"""Define `steadynorm demo` and `report`."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tyro.conf import Positional

from steadynorm.cli.text import Output, new_table

if TYPE_CHECKING:
    from steadynorm.lab.demo import Summary


@dataclass(frozen=True)
class Demo:
    """Predict and simulate; then train a small GPT with Scion and with ScionC, and compare them on a page."""

    out: Path = Path("runs/demo")
    """Folder for the runs and the page."""
    steps: int = 1150
    """Updates per run; 1150 are ten half-lives."""

    def __call__(self) -> None:
        """Print predictions, then train and print the comparison."""
        from steadynorm import machine
        from steadynorm.lab import demo

        console = Output()
        predicted = ["paper", "exact", "simulated"]
        table = new_table("Random gradients: where does |θ|²/|u|² settle?", ["parameter", *predicted], right=predicted)
        for system in demo.compare_systems():
            simulated = f"{system.simulated.mean:.3f} ± {system.simulated.error:.3f}"
            table.add_row(system.label, f"{system.paper:.3f}", f"{system.exact:.3f}", simulated)
        console.print(table)
        console.print("Now training a GPT (4 layers, width 128) on the State of the Union addresses, up to 6 minutes.")
        console.print(f"This machine: {machine.describe()}.")
        rows, page = demo.run(self.out, self.steps)
        trained = [{"scion": "Scion", "scionc": "ScionC"}[row.name] for row in rows]
        table = new_table("lr on a cosine to zero", ["", *trained], right=trained)
        for label, show in _DEMO_ROWS.items():
            table.add_row(label, *(show(row) for row in rows))
        console.print(table)
        print(f"page: {page}")


_DEMO_ROWS: dict[str, Callable[["Summary"], str]] = {
    "validation loss": lambda row: f"{row.val_loss:.4f}",
    "weight norm, middle → end": lambda row: "{:.1f} → {:.1f}".format(*row.norm),
    "  of hidden layers": lambda row: "{:.1f} → {:.1f}".format(*row.hidden),
    "  largest / smallest, last two thirds": lambda row: f"{row.spread:.3f}",
    "  of hidden layers, measured / forecast": lambda row: f"{row.over_forecast:.3f}",
    "gradient norm, middle → end": lambda row: "{:.3f} → {:.3f}".format(*row.grad),
    "excess alignment, hidden layers": lambda row: f"{row.excess_hidden:+.3f}",
    "excess alignment, output layer": lambda row: f"{row.excess_output:+.3f}",
}


@dataclass(frozen=True)
class Report:
    """Compare runs on one self-contained HTML page."""

    runs: Positional[tuple[Path, ...]]
    """Folders of runs, or their records.jsonl."""
    out: Path = Path("report.html")
    """Page to write."""
    title: str | None = None
    """Title of the page."""

    def __call__(self) -> None:
        """Write the page and print its path."""
        from steadynorm.report import content as report

        print(f"page: {report.report(self.runs, self.out, title=self.title, progress=True)}")
