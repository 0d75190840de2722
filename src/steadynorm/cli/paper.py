"""`steadynorm paper`: the figures and tables of the paper as named experiments."""

import os
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tyro.conf import Positional

from steadynorm import progress
from steadynorm.cli.subcommands import one_of
from steadynorm.cli.text import Output, new_table, refuse_options
from steadynorm.lab import paper
from steadynorm.lab.paper import Context, Experiment, TrainedExperiment, null, runner

Scale = Literal["desk", "paper"]


@dataclass(frozen=True)
class PaperList:
    """The experiments: what each shows, its arms or panels, how many runs it asks for, and about how long they take at desk scale."""

    def __call__(self) -> None:
        """Print them, and their total: runs that several ask for are trained once."""
        table = new_table("", ["name", "runs", "core min", "the paper found"], right=("runs", "core min"))
        table.columns[0].no_wrap = True
        plans, simulated = [], 0.0
        for experiment in paper.EXPERIMENTS.values():
            if isinstance(experiment, TrainedExperiment):
                plan = experiment.plan(Context(Path()))
                plans.append(plan)
                runs, seconds = runner.estimate([plan])
                parts = f"\n{len(plan.seeds)} seeds of: {_joined(plan.arms)}"
            else:
                runs, seconds = 0, experiment.seconds["desk"]
                simulated += seconds
                parts = "".join(f"\n{scale} scale: {_joined(names)}" for scale, names in experiment.parts.items())
            text = f"{experiment.title}: {experiment.paper_finding}{parts}"
            table.add_row(experiment.name, str(runs or ""), f"{seconds / 60:.0f}", text)
        Output().print(table)
        runs, seconds = runner.estimate(plans)
        total = (seconds + simulated) / 60
        print(
            f"all: {runs} different runs, about {total:.0f} minutes of one core, {total / 2:.0f} on two (paper run all). Minutes are "
            "those of an idle Zen 5 core; older ones take two to three times as long."
        )


def _joined(names: Sequence[str]) -> str:
    """Join names; of many, show the first and the last.

    >>> _joined(["a", "b"]), _joined("abcdefghi")
    ('a; b', '9 arms, from a to i')
    """
    return "; ".join(names) if len(names) <= 8 else f"{len(names)} arms, from {names[0]} to {names[-1]}"


@dataclass(frozen=True)
class PaperNull:
    """Feed every claim noise instead of outcomes and count how often it holds: in at most 5 % of draws, or its design leans."""

    folder: Positional[Path] = Path("results")
    """The folder that holds finished experiments; their records say how large the noise is."""
    draws: int = 20_000
    """Draws of noise for each claim."""

    def __call__(self) -> int:
        """Print a table; return 1 if noise supports a claim too often."""
        if self.draws < 1:
            raise ValueError(f"--draws {self.draws}: at least 1 is needed")
        folders = sorted(filter(runner.is_kept, self.folder.glob("*")))
        if not folders:
            raise ValueError(f"{self.folder} holds no finished experiments; make one with: steadynorm paper run NAME")
        title = f"Share of {self.draws:,} draws of noise in which a claim holds"
        table = new_table(title, ["experiment", "claim", "holds, %"], right=("holds, %",))
        leaning = 0
        with progress.bar(len(folders), "judging noise") as tell:
            for folder in folders:
                name, context = runner.context_of(folder)
                for claim, share in null.shares(paper.get(name), context, self.draws):
                    leaning += share > null.MOST
                    table.add_row(folder.name, claim, f"{100 * share:.1f}" + " !" * (share > null.MOST))
                tell(1)
        Output().print(table)
        print(f"{leaning} of {table.row_count} claims hold in more than {100 * null.MOST:g} % of draws")
        return 1 if leaning else 0


@dataclass(frozen=True)
class PaperRun:
    """Run an experiment: slim records, a JSON summary and a page. Finished runs are used again, interrupted ones resume."""

    name: Positional[str]
    """The experiment (see `steadynorm paper list`), or all."""
    scale: Scale = "desk"
    """Desk size, or the paper's own."""
    seeds: int | None = None
    """Seeds per arm; default: the experiment's own choice."""
    jobs: int | None = None
    """Runs at a time; default: the number of cores (paper scale: 1)."""
    quick: bool = False
    """One seed and the shortest budget: does it work? In minutes."""
    dry_run: bool = False
    """Print one complete command per run, for any scheduler, and do nothing."""
    only: tuple[str, ...] = ()
    """Only these arms, by the beginning of their names."""
    seed: int = 0
    """The first seed."""
    out: Path | None = None
    """Folder; default: runs/paper/NAME (or NAME-quick, NAME-paper). With `all`: the folder that holds these folders."""
    pool: Path = Path("runs/paper/pool")
    """Where runs are trained; experiments share them."""
    data: Path | None = None
    """Paper scale: the folder of ImageNet or of token shards."""
    processes: int = 8
    """Paper scale: processes (GPUs) per run."""

    def __call__(self) -> int:
        """Run and print the verdicts; return 1 if a run failed."""
        if self.seeds is not None and self.seeds < 1:
            raise ValueError(f"--seeds {self.seeds}: at least 1 is needed")
        if self.scale == "desk":
            refuse_options(self, ("data", "processes"), "only at --scale paper")
        chosen = list(paper.EXPERIMENTS.values()) if self.name == "all" else [paper.get(self.name)]
        if self.dry_run:
            return self._print_commands(chosen)
        failed: dict[Path, str] = {}
        for experiment in chosen:
            failed |= self._run(experiment)
        if failed:
            print(f"{len(failed)} runs failed; the claims that need them stay open")
            print("\n".join(f"{folder.name}: {why}" for folder, why in failed.items()))
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
        table = new_table(f"{experiment.name}: {experiment.title}", ["claim", "verdict", "figure"])
        for text, finding in finished.outcome.claims.items():
            table.add_row(text, finding.verdict, finding.figure)
        Output().print(table)
        print(f"page: {finished.page}\nsummary: {context.folder / runner.SUMMARY}", flush=True)
        return dict(finished.failed)

    def _command(self, experiment: Experiment | TrainedExperiment) -> str:
        """Return the command that makes this folder again, wherever it is and however its runs were shared out."""
        words = ["steadynorm", "paper", "run", experiment.name, "--scale", self.scale]
        words += ["--quick"] * self.quick
        words += [] if self.seeds is None else ["--seeds", str(self.seeds)]
        words += [] if self.seed == 0 else ["--seed", str(self.seed)]
        return shlex.join([*words, *(["--only", *self.only] if self.only else [])])

    def _print_commands(self, chosen: list[Experiment | TrainedExperiment]) -> int:
        commands: dict[str, None] = {}
        for experiment in chosen:
            if isinstance(experiment, TrainedExperiment):
                plan = experiment.plan(self._context(experiment))
                commands |= dict.fromkeys(runner.dry_run(plan, self._resources()))
            elif self.name != "all":
                raise ValueError(
                    f"{experiment.name} trains nothing: it has no commands to print; run it without --dry-run"
                )
        print("\n".join(commands))
        return 0


COMMANDS = one_of({"list": PaperList, "run": PaperRun, "null": PaperNull})
