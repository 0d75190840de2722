"""`steadynorm paper`: the figures and tables of the paper, as named experiments."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.table import Table
from tyro.conf import Positional

from steadynorm import progress
from steadynorm.cli.subcommands import one_of
from steadynorm.lab import paper
from steadynorm.lab.paper import null, pool, runner
from steadynorm.lab.paper.experiment import Context, Experiment
from steadynorm.lab.paper.trained import TrainedExperiment

Scale = Literal["desk", "paper"]


def command(_: str, argv: Sequence[str]) -> Any:
    """`paper` as the parser takes it."""
    return one_of({"list": PaperList, "run": PaperRun, "null": PaperNull})


@dataclass(frozen=True)
class PaperList:
    """The experiments: what each shows, its arms or panels, how many runs it asks for, and about how long they take at desk scale."""

    def __call__(self) -> None:
        """Print them, and all of them together: runs that several ask for are trained once."""
        table = Table(show_lines=False)
        for name, how in (("name", "left"), ("runs", "right"), ("core min", "right"), ("the paper found", "left")):
            table.add_column(name, justify=how, no_wrap=name == "name")  # pyright: ignore[reportArgumentType]
        plans, simulated = [], 0.0
        for each in paper.EXPERIMENTS.values():
            if isinstance(each, TrainedExperiment):
                plans.append(each.plan(Context(Path())))
                runs, seconds = runner.estimate(plans[-1:])
                parts = f"\n{len(plans[-1].seeds)} seeds of: {_joined(plans[-1].arms)}"
            else:
                runs, seconds = 0, each.seconds["desk"]
                simulated += seconds
                parts = "".join(f"\n{scale} scale: {_joined(names)}" for scale, names in each.parts.items())
            table.add_row(each.name, str(runs or ""), f"{seconds / 60:.0f}", f"{each.title}: {each.found}{parts}")
        Console().print(table)
        runs, seconds = runner.estimate(plans)
        total = (seconds + simulated) / 60
        print(
            f"all: {runs} different runs, about {total:.0f} minutes of one core, {total / 2:.0f} on two (paper run all)"
        )


def _joined(names: Sequence[str], most: int = 8) -> str:
    """Join names; of many, the first and the last.

    >>> _joined(["a", "b"]), _joined("abcdefghi")
    ('a; b', '9 arms, from a to i')
    """
    return "; ".join(names) if len(names) <= most else f"{len(names)} arms, from {names[0]} to {names[-1]}"


@dataclass(frozen=True)
class PaperNull:
    """Feed every claim noise instead of outcomes and count how often it holds: at most 5 % of draws, or it leans."""

    folder: Positional[Path] = Path("results")
    """The folder of finished experiments' folders; their records tell how large the noise is."""
    draws: int = 20_000
    """Draws of noise for each claim."""

    def __call__(self) -> int:
        """Print a table; 1 if a claim holds of noise too often."""
        folders = sorted(filter(runner.is_kept, self.folder.glob("*")))
        if not folders:
            raise ValueError(f"{self.folder} holds no finished experiments; make one with: steadynorm paper run NAME")
        table = Table(title=f"Share of {self.draws:,} draws of noise in which a claim holds", title_justify="left")
        for name in ("experiment", "claim", "holds, %"):
            table.add_column(name, justify="right" if "%" in name else "left")
        leaning = 0
        with progress.bar(len(folders), "judging noise") as tell:
            for folder in folders:
                name, context = runner.context_of(folder)
                for each in null.shares(paper.get(name), context, self.draws):
                    leaning += each.share > null.MOST
                    mark = " !" * (each.share > null.MOST)
                    table.add_row(each.experiment, each.claim, f"{100 * each.share:.1f}{mark}")
                tell(1)
        Console().print(table)
        print(f"{leaning} of {table.row_count} claims hold in more than {100 * null.MOST:g} % of draws")
        return 1 if leaning else 0


@dataclass(frozen=True)
class PaperRun:
    """Run an experiment: slim records, a JSON summary and a page. Finished runs are used again, interrupted ones go on."""

    name: Positional[str]
    """Which one (see `steadynorm paper list`), or all."""
    scale: Scale = "desk"
    """At the size of a desk, or the paper's own."""
    seeds: int | None = None
    """Runs of each kind; default: the experiment's own choice."""
    jobs: int | None = None
    """Runs at once; default: the number of cores (paper scale: 1)."""
    quick: bool = False
    """One seed and the shortest budget: does it work? In minutes."""
    dry_run: bool = False
    """Print one complete command a run, for any scheduler, and do nothing."""
    only: tuple[str, ...] = ()
    """Arms alone, by the beginning of their names."""
    seed: int = 0
    """The first seed."""
    out: Path | None = None
    """Folder; default: runs/paper/NAME (or NAME-quick, NAME-paper). With `all`: the folder of these folders."""
    pool: Path = Path("runs/paper/pool")
    """Where runs are trained; experiments share them."""
    data: Path | None = None
    """Paper scale: ImageNet's folder, or the folder of token shards."""
    processes: int = 8
    """Paper scale: processes (GPUs) of each run."""

    def __call__(self) -> int:
        """Carry out and print the verdicts; 1 if a run failed."""
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds {self.seeds}: at least 1 is needed")
        chosen = list(paper.EXPERIMENTS.values()) if self.name == "all" else [paper.get(self.name)]
        if self.dry_run:
            return self._print_commands(chosen)
        failed: dict[Path, str] = {}
        for each in chosen:
            failed |= self._run(each)
        if failed:
            print(f"{len(failed)} runs failed; the claims that need them are not testable\n{pool.failures(failed)}")
        return 1 if failed else 0

    def _context(self, experiment: Experiment | TrainedExperiment) -> Context:
        parts = [experiment.name, *(["paper"] if self.scale == "paper" else []), *(["quick"] if self.quick else [])]
        folder = Path("runs/paper") / "-".join(parts)
        if self.out is not None:
            folder = self.out / experiment.name if self.name == "all" else self.out
        return Context(folder, self.quick, self.seeds, self.seed, self.only, self.scale)

    def _resources(self) -> paper.Resources:
        jobs = self.jobs if self.jobs is not None else (os.cpu_count() or 1) if self.scale == "desk" else 1
        if jobs < 1:
            raise ValueError(f"--jobs {jobs}: at least 1 is needed")
        return paper.Resources(self.pool, jobs, self.data, self.processes)

    def _run(self, experiment: Experiment | TrainedExperiment) -> dict[Path, str]:
        context = self._context(experiment)
        finished = paper.run_experiment(experiment, context, self._resources(), self._command(experiment))
        table = Table(title=f"{experiment.name}: {experiment.title}", title_justify="left")
        for name in ("claim", "verdict", "figure"):
            table.add_column(name)
        for claim in finished.outcome.claims:
            table.add_row(claim.text, claim.verdict, claim.figure)
        Console().print(table)
        print(f"page: {finished.page}\nsummary: {context.folder / runner.SUMMARY}", flush=True)
        return dict(finished.failed)

    def _command(self, experiment: Experiment | TrainedExperiment) -> str:
        """What makes this folder again; where it is and how it was shared out does not matter."""
        words = ["steadynorm", "paper", "run", experiment.name, "--scale", self.scale]
        words += ["--quick"] * self.quick
        words += [] if self.seeds is None else ["--seeds", str(self.seeds)]
        words += [] if self.seed == 0 else ["--seed", str(self.seed)]
        return shlex.join([*words, *(["--only", *self.only] if self.only else [])])

    def _print_commands(self, chosen: list[Experiment | TrainedExperiment]) -> int:
        seen: dict[str, None] = {}
        for each in chosen:
            if isinstance(each, TrainedExperiment):
                seen |= dict.fromkeys(runner.dry_run(each.plan(self._context(each)), self._resources()))
            elif self.name != "all":
                raise ValueError(f"{each.name} trains nothing: it has no commands to print; run it without --dry-run")
        print("\n".join(seen))
        return 0
