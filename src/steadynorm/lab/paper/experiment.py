"""What an experiment is: a name, what the paper reports, and how to get from a context to plots and judged claims."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import starmap
from pathlib import Path
from typing import Any

from steadynorm.lab.paper.baselines import Baseline
from steadynorm.lab.paper.claims import Claim, JudgedClaim, Test
from steadynorm.lab.paper.runs import RunPlan, Runs
from steadynorm.lab.train.config import Config
from steadynorm.report import page


@dataclass(frozen=True)
class Outcome:
    """What an experiment shows: blocks of a page, judged claims, and the numbers behind them."""

    blocks: Sequence[page.Block]
    claims: Sequence[JudgedClaim]
    numbers: Mapping[str, Any]


@dataclass(frozen=True)
class Context:
    """Where an experiment writes and how much it may do.

    Attributes:
        folder: The experiment's folder.
        quick: One seed and the shortest budget.
        seeds: How many seeds; None for the experiment's own choice.
        seed: The first seed.
        only: Arms or panels by the beginning of their names; none for all.
        scale: "desk" or "paper".
        kept_only: Use the records in the folder and run nothing.
    """

    folder: Path
    quick: bool = False
    seeds: int | None = None
    seed: int = 0
    only: tuple[str, ...] = ()
    scale: str = "desk"
    kept_only: bool = False

    @property
    def records(self) -> Path:
        """Where records are kept, one folder per run."""
        return self.folder / "records"

    def wants(self, name: str) -> bool:
        """Return whether an arm or panel of this name is asked for."""
        return not self.only or name.lower().startswith(tuple(start.lower() for start in self.only))

    def choose(self, names: Sequence[str], what: str) -> list[str]:
        """Return the names that are asked for; raise ValueError if there is none."""
        if chosen := list(filter(self.wants, names)):
            return chosen
        raise ValueError(f"--only {' '.join(self.only)}: the {what} are {', '.join(names)}")


@dataclass(frozen=True)
class Experiment:
    """A figure that needs no training.

    Attributes:
        name: Its name on the command line.
        title: Its title.
        paper_finding: What the paper reports.
        run: Simulates what the context lacks, and judges it.
        seconds: About how long that takes on one core, by scale.
        parts: Panels that --only can choose from, by scale.
    """

    name: str
    title: str
    paper_finding: str
    run: Callable[[Context], Outcome]
    seconds: Mapping[str, float]
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)


@dataclass(frozen=True)
class TrainedExperiment:
    """A figure or table whose runs are trained: arms times budgets times seeds, and claims about them.

    Attributes:
        name: Its name on the command line.
        title: Its title.
        paper_finding: What the paper reports.
        baselines: The baseline of each scale.
        arms: The arms at a baseline, by name.
        claims: The claims, and the test that each must pass; a function if they depend on the plan.
        show: Returns the blocks of the page and the numbers of the summary.
        columns: Columns to keep of every run, besides its validation.
        layers: Quantities to keep of every layer.
        budgets: The budgets.
        desk_budgets: Other budgets at desk scale, where half-lives are scarce.
        seeds: How many seeds.
    """

    name: str
    title: str
    paper_finding: str
    _: KW_ONLY
    baselines: Mapping[str, Baseline]
    arms: Callable[[Baseline], Mapping[str, Config]]
    claims: Mapping[str, Test] | Callable[[RunPlan], Mapping[str, Test]]
    show: Callable[[Runs], tuple[Sequence[page.Block], Mapping[str, Any]]]
    columns: Sequence[str] = ()
    layers: Sequence[str] = ()
    budgets: Sequence[int] = (90,)
    desk_budgets: Sequence[int] = ()
    seeds: int = 3

    def plan(self, context: Context) -> RunPlan:
        """Return the runs that this experiment asks for in a context."""
        baseline, reference = self.baselines[context.scale], self.baselines["paper"]
        arms = self.arms(baseline)
        budgets = tuple(self.desk_budgets or self.budgets if context.scale == "desk" else self.budgets)
        budgets = budgets[:1] if context.quick else budgets
        seeds = range(context.seed, context.seed + (1 if context.quick else context.seeds or self.seeds))
        configs = {
            (arm, budget, seed): baseline.configure(arms[arm], budget, seed)
            for arm in context.choose(list(arms), f"arms of {self.name}")
            for budget in budgets
            for seed in seeds
        }
        paper_configs = {
            arm: reference.configure(config, self.budgets[-1], 0) for arm, config in self.arms(reference).items()
        }
        return RunPlan(baseline, tuple(arms), budgets, tuple(seeds), configs, paper_configs)

    def judge(self, runs: Runs) -> Outcome:
        """Judge every claim on these runs and show them."""
        blocks, numbers = self.show(runs)
        return Outcome(blocks, [claim.judge(runs) for claim in self.claims_about(runs.plan)], numbers)

    def claims_about(self, plan: RunPlan) -> list[Claim]:
        """Return the claims about the runs of a plan."""
        claims = self.claims(plan) if callable(self.claims) else self.claims
        return list(starmap(Claim, claims.items()))
