"""What an experiment is: a name, what the paper reports, and how to get from a context to plots and judged claims."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

from steadynorm.lab.paper.baselines import Baseline
from steadynorm.lab.paper.claims import Test, judge
from steadynorm.lab.paper.runs import RunPlan, Runs
from steadynorm.lab.paper.statistics import Finding
from steadynorm.lab.train.config import Config
from steadynorm.report import page


@dataclass(frozen=True)
class Outcome:
    """What an experiment shows: blocks of a page, what was found about each claim, and the numbers behind it."""

    blocks: Sequence[page.Block]
    claims: Mapping[str, Finding]
    numbers: Mapping[str, Any]

    def plain(self) -> dict[str, Any]:
        """Return what a summary holds of it."""
        claims = [{"text": text, **finding.plain()} for text, finding in self.claims.items()]
        return {"claims": claims, "numbers": self.numbers}


@dataclass(frozen=True)
class Context:
    """Where an experiment writes and how much it may do."""

    folder: Path
    quick: bool = False  # one seed and the shortest budget
    seeds: int | None = None  # how many; None for the experiment's own choice
    seed: int = 0  # the first one
    only: tuple[str, ...] = ()  # arms or panels by the beginning of their names; none for all
    scale: str = "desk"  # or "paper"
    kept_only: bool = False  # use the records in the folder and run nothing

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
    """A figure that needs no training."""

    name: str  # on the command line
    title: str
    paper_finding: str  # what the paper reports
    run: Callable[[Context], Outcome]  # simulates what the context lacks, and judges it
    seconds: Mapping[str, float]  # about how long that takes on one core, by scale
    parts: Mapping[str, Sequence[str]] = field(default_factory=dict)  # panels that --only can choose from, by scale


@dataclass(frozen=True)
class TrainedExperiment:
    """A figure or table whose runs are trained: arms times budgets times seeds, and claims about them."""

    name: str  # on the command line
    title: str
    paper_finding: str  # what the paper reports
    _: KW_ONLY
    baselines: Mapping[str, Baseline]  # by scale
    arms: Callable[[Baseline], Mapping[str, Config]]  # by name
    # The claims, and the test that each must pass; a function if they depend on the plan.
    claims: Mapping[str, Test] | Callable[[RunPlan], Mapping[str, Test]]
    show: Callable[[Runs], tuple[Sequence[page.Block], Mapping[str, Any]]]  # blocks of the page, numbers of the summary
    columns: Sequence[str] = ()  # to keep of every run, besides its validation
    layers: Sequence[str] = ()  # quantities to keep of every layer
    budgets: Sequence[int] = (90,)
    desk_budgets: Sequence[int] = ()  # other budgets at desk scale, where half-lives are scarce
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
        findings = {text: judge(test, runs) for text, test in self.claims_about(runs.plan).items()}
        return Outcome(blocks, findings, numbers)

    def claims_about(self, plan: RunPlan) -> Mapping[str, Test]:
        """Return the claims about the runs of a plan."""
        return self.claims(plan) if callable(self.claims) else self.claims
