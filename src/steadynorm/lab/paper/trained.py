"""Experiments that train: what is declared, which runs that asks for, and the finished runs as one value to judge."""

import hashlib
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steadynorm.lab.paper.baselines import Baseline
from steadynorm.lab.paper.experiment import Context, MissingRunsError, Outcome
from steadynorm.lab.train.config import Config, Gpt, plain, training_part
from steadynorm.records import Run

Key = tuple[str, int, int]  # arm, budget, seed
NOT_RUN = "not run yet"  # why a run is missing, and what stands in its place in a table


@dataclass(frozen=True)
class TrainedExperiment:
    """A figure or table whose runs are trained: arms times budgets times seeds, and what is concluded from them."""

    name: str
    title: str
    found: str  # by the paper
    baselines: Mapping[str, Baseline]  # by scale
    arms: Callable[[Baseline], Mapping[str, Config]]
    judge: Callable[["Runs"], Outcome]
    columns: Sequence[str]  # kept of every run, besides the final validation
    layers: Sequence[str] = ()  # quantities kept of every layer
    budgets: Sequence[int] = (90,)
    desk_budgets: Sequence[int] = ()  # where they are others: half-lives are what counts
    seeds: int = 3

    def plan(self, context: Context) -> "RunPlan":
        """The runs this asks for."""
        baseline = self.baselines[context.scale]
        budgets = (self.desk_budgets or self.budgets) if context.scale == "desk" else self.budgets
        arms = self.arms(baseline)
        chosen = {name: config for name, config in arms.items() if context.wants(name)}
        if not chosen:
            raise ValueError(f"--only {' '.join(context.only)}: the arms of {self.name} are {', '.join(arms)}")
        seeds = 1 if context.quick else context.seeds or self.seeds
        return RunPlan(
            self,
            baseline,
            tuple(arms),
            tuple(budgets)[:1] if context.quick else tuple(budgets),
            tuple(range(context.seed, context.seed + seeds)),
            {
                (arm, budget, seed): baseline.configure(config, budget, seed)
                for arm, config in chosen.items()
                for budget in (tuple(budgets)[:1] if context.quick else budgets)
                for seed in range(context.seed, context.seed + seeds)
            },
        )


@dataclass(frozen=True)
class RunPlan:
    """The runs of an experiment; configurations without a folder."""

    experiment: TrainedExperiment
    baseline: Baseline
    arms: Sequence[str]  # all of them, also those left out by --only
    budgets: Sequence[int]
    seeds: Sequence[int]
    configs: Mapping[Key, Config]

    def at_paper_scale(self) -> dict[str, Config]:
        """Every arm as the paper has it, of its longest budget."""
        baseline = self.experiment.baselines["paper"]
        budget = self.experiment.budgets[-1]
        return {arm: baseline.configure(config, budget, 0) for arm, config in self.experiment.arms(baseline).items()}

    def in_pool(self, pool: Path, data: Path | None = None) -> dict[Key, Config]:
        """The same with the folder each run has in the pool."""
        out = {}
        for key, config in self.configs.items():
            task = config.task if data is None else replace(config.task, data=data)
            out[key] = replace(config, task=task, out=pool / address(config), tensorboard=False, keep=1)
        return out


def address(config: Config) -> str:
    """A folder's name from what is trained: readable, then a hash of everything that decides the weights."""
    kind = "gpt" if isinstance(config.task, Gpt) else "vit"
    return f"{kind}-{config.optim.name}-{config.steps}-s{config.seed}-{digest(training_part(plain(config)))}"


def digest(values: Mapping[str, Any]) -> str:
    """Eight hexadecimal digits of plain values, whatever their order.

    >>> digest({"lr": 0.1, "steps": 3}), digest({"steps": 3, "lr": 0.1})
    ('6739273b', '6739273b')
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def slug(key: Key) -> str:
    """A run's name inside its experiment.

    >>> slug(("ScionC (cosine)", 90, 0))
    'scionc-cosine-90-s0'
    """
    arm, budget, seed = key
    return f"{re.sub(r'[^a-z0-9.]+', '-', arm.lower()).strip('-')}-{budget}-s{seed}"


@dataclass(frozen=True)
class Runs:
    """The finished runs of an experiment, by arm, budget and seed; and why others are missing."""

    plan: RunPlan
    found: Mapping[Key, Run]
    missing: Mapping[Key, str]

    @property
    def baseline(self) -> Baseline:
        return self.plan.baseline

    @property
    def budgets(self) -> Sequence[int]:
        return self.plan.budgets

    def of(self, arm: str, budget: int | None = None) -> list[Run]:
        """An arm's runs at a budget (default: the largest), one a seed; MissingRunsError if one is missing."""
        budget = self.budgets[-1] if budget is None else budget
        keys = [(arm, budget, seed) for seed in self.plan.seeds]
        lacking = [key for key in keys if key not in self.found]
        if lacking:
            why = self.missing.get(lacking[0], "left out by --only")
            raise MissingRunsError(f"{len(lacking)} of {len(keys)} runs of {arm} at {budget} are missing: {why}")
        return [self.found[key] for key in keys]

    def instead(self, arm: str, budget: int | None = None) -> str:
        """Return what a table shows where an arm's numbers are missing."""
        budget = self.budgets[-1] if budget is None else budget
        reasons = {self.missing.get((arm, budget, seed), NOT_RUN) for seed in self.plan.seeds}
        return NOT_RUN if reasons == {NOT_RUN} else "missing"

    def values(self, measure: Callable[[Run], float], arm: str, budget: int | None = None) -> list[float]:
        """A number of each of those runs."""
        return [measure(run) for run in self.of(arm, budget)]
