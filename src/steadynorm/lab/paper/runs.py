"""The runs of an experiment: which are planned, how their folders are named, and the finished ones as one value."""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from steadynorm.lab import origin
from steadynorm.lab.paper.baselines import Baseline
from steadynorm.lab.paper.claims import MissingRunsError
from steadynorm.lab.paper.metrics import Metric
from steadynorm.lab.train.config import Config, Gpt, plain, training_part
from steadynorm.records import Run

Key = tuple[str, int, int]  # arm, budget, seed
NOT_RUN = "not run yet"  # why a run is missing, and what a table shows in its place


@dataclass(frozen=True)
class RunPlan:
    """The runs of an experiment; their configurations name no folder."""

    baseline: Baseline  # at this scale
    arms: Sequence[str]  # all of them, also those that --only leaves out
    budgets: Sequence[int]  # ascending
    seeds: Sequence[int]
    configs: Mapping[Key, Config]
    paper_configs: Mapping[str, Config]  # every arm at the paper's scale and longest budget

    def in_pool(self, pool: Path, data: Path | None = None) -> dict[Key, Config]:
        """Return the configurations with the folder that each run has in the pool, apart for every kind of machine."""
        out = {}
        for key, config in self.configs.items():
            task = config.task if data is None else replace(config.task, data=data)
            out[key] = replace(config, task=task, out=pool / origin.kind() / address(config), tensorboard=False, keep=1)
        return out


def address(config: Config) -> str:
    """Return a run's folder name: readable words, then a hash of everything that decides the weights."""
    kind = "gpt" if isinstance(config.task, Gpt) else "vit"
    values = json.dumps(recorded_part(config), sort_keys=True)
    digest = hashlib.sha256(values.encode()).hexdigest()[:8]
    return f"{kind}-{config.optim.name}-{config.steps}-s{config.seed}-{digest}"


def recorded_part(config: Config) -> dict[str, Any]:
    """Return what decides the weights of a run, as its records hold it."""
    return json.loads(json.dumps(training_part(plain(config))))


def slug(key: Key) -> str:
    """Return a run's name inside its experiment.

    >>> slug(("ScionC (cosine)", 90, 0))
    'scionc-cosine-90-s0'
    """
    arm, budget, seed = key
    return f"{re.sub(r'[^a-z0-9.]+', '-', arm.lower()).strip('-')}-{budget}-s{seed}"


@dataclass(frozen=True)
class Runs:
    """The finished runs of an experiment, and why the others are missing."""

    plan: RunPlan
    finished: Mapping[Key, Run]
    missing: Mapping[Key, str]

    def complete_arms(self, budget: int | None = None) -> list[str]:
        """Return the arms of which every seed is finished at a budget (default: the longest)."""
        return [arm for arm in self.plan.arms if all(key in self.finished for key in self._keys(arm, budget))]

    def of(self, arm: str, budget: int | None = None) -> list[Run]:
        """Return an arm's runs at a budget (default: the longest), one per seed.

        Raises:
            MissingRunsError: One of them is missing.
        """
        keys = self._keys(arm, budget)
        lacking = [key for key in keys if key not in self.finished]
        if lacking:
            why = self.missing.get(lacking[0], "left out by --only")
            raise MissingRunsError(f"{len(lacking)} of {len(keys)} runs of {arm} at {keys[0][1]} are missing: {why}")
        return [self.finished[key] for key in keys]

    def values(self, metric: Metric, arm: str, budget: int | None = None) -> list[float]:
        """Return a metric of each of those runs."""
        return [metric(run) for run in self.of(arm, budget)]

    def placeholder(self, arm: str, budget: int | None = None) -> str:
        """Return what a table shows where an arm's numbers are missing."""
        reasons = {self.missing.get(key, NOT_RUN) for key in self._keys(arm, budget)}
        return NOT_RUN if reasons == {NOT_RUN} else "missing"

    def _keys(self, arm: str, budget: int | None) -> list[Key]:
        budget = self.plan.budgets[-1] if budget is None else budget
        return [(arm, budget, seed) for seed in self.plan.seeds]
