"""`steadynorm demo`, `report`, `paper` and `bench`."""

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from steadynorm import bench, demo, paper, report


@dataclass(frozen=True)
class Demo:
    """Simulate, predict, and write a page that shows both."""

    out: Path = Path("runs/demo")
    """Folder for the records and the page."""

    def __call__(self) -> None:
        """Run it, print a summary, say where the page is."""
        print("Random gradients, linear warmup, cosine decay of lr to zero. What does the weight norm do?")
        rows, where = demo.run(self.out)
        table = Table()
        for name in ("parameter", "decay", "|θ|/|u|, middle", "end", "end / middle", "forecast / measured, end"):
            table.add_column(name, justify="left" if name in ("parameter", "decay") else "right")
        for row in rows:
            cells = (row.middle, row.end, row.end / row.middle, row.forecast_end / row.end)
            table.add_row(row.parameter, row.decay, *(f"{value:.3f}" for value in cells))
        Console().print(table)
        print(f"page: {where}")


@dataclass(frozen=True)
class Report:
    """Compare runs on one self-contained HTML page."""

    runs: Positional[tuple[Path, ...]]
    """Folders of runs, or their records.jsonl."""
    out: Path = Path("report.html")
    """The page to write."""
    title: str | None = None
    """Its title."""

    def __call__(self) -> None:
        """Write the page and say where it is."""
        print(f"page: {report.report(self.runs, self.out, title=self.title)}")


@dataclass(frozen=True)
class PaperList:
    """Names of the experiments and what the paper found."""

    def __call__(self) -> None:
        """Print them."""
        table = Table(show_lines=False)
        for name in ("name", "shows", "the paper found"):
            table.add_column(name)
        for each in paper.EXPERIMENTS.values():
            table.add_row(each.name, each.title, each.found)
        Console().print(table)


@dataclass(frozen=True)
class PaperRun:
    """Run an experiment: records, a JSON summary and a page. Finished runs are used again."""

    name: Positional[str]
    """Which one: see `steadynorm paper list`."""
    quick: bool = False
    """Smaller, in minutes."""
    seeds: int | None = None
    """Independent copies; default: the experiment's own choice."""
    seed: int = 0
    """Where the random numbers start."""
    out: Path | None = None
    """Folder; default: runs/paper/NAME (or NAME-quick)."""

    def __call__(self) -> None:
        """Carry it out and print the verdicts."""
        experiment = paper.get(self.name)
        folder = self.out or Path("runs/paper") / (f"{self.name}-quick" if self.quick else self.name)
        outcome, where = paper.carry_out(experiment, paper.Context(folder, self.quick, self.seeds, self.seed))
        table = Table(title=f"{experiment.name}: {experiment.title}", title_justify="left")
        for name in ("claim", "verdict", "figure"):
            table.add_column(name)
        for claim in outcome.claims:
            table.add_row(claim.text, claim.verdict, claim.figure)
        Console().print(table)
        print(f"page: {where}\nsummary: {folder / 'summary.json'}")


@dataclass(frozen=True)
class Bench:
    """Step time of these optimizers and torch's, side by side."""

    model: str = "vit-s16"
    """vit-s16 or gpt-124m (3 layers)."""
    rounds: int = 10
    """Rounds of which the median is taken."""

    def __call__(self) -> None:
        """Time and print."""
        if self.model not in bench.MODELS:
            raise ValueError(f"model {self.model!r} is unknown; choose one of {', '.join(bench.MODELS)}")
        contenders, rounds = bench.own_and_torch(), max(1, self.rounds)
        times = bench.step_times(contenders, bench.MODELS[self.model], rounds)
        errors = {each.name: bench.polar_errors(each.polar) for each in contenders if each.polar is not None}
        print(f"{self.model}, hidden matrices, median of {rounds} interleaved rounds\n")
        print(bench.table(contenders, times, errors))
