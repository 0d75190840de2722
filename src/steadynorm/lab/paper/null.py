"""The null test: which claims would noise support? Each must hold in at most 5 % of draws.

Every run's outcome (an accuracy, a drift, 100 ln of a norm: whatever the claim measures) is replaced by draws around one
mean, zero, with the spread that its arm has over seeds, and the claim is judged again. What that means for each kind:

- "A is larger than B", "the best lr rises with alpha": all arms have the same mean, so the truth is at the bound, zero.
- "the drift of A is at most half of B's", "no worse by more than 1 point", "within 5 %": with equal means such a claim is
  false by far, or simply true. It is judged where it is hardest to tell, the truth exactly at its bound: what the draws
  give is moved there.
- several bounds at once: one of them at its bound and the others certain, which is the worst case; the worst is counted.
- simulations: the number of each seed is replaced by draws around the bound, with the spread it has.

Moving the truth to a bound is sound for numbers that are odd and linear in the outcomes, sums and differences; any other
(a maximum, the best of a grid) may lean one way by itself and is refused.
"""

import functools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from steadynorm.lab.paper import runner
from steadynorm.lab.paper.experiment import Claim, Context, Experiment, MissingRunsError
from steadynorm.lab.paper.statistics import Bound, Estimate, sample_sd
from steadynorm.lab.paper.trained import Runs, TrainedExperiment
from steadynorm.records import Run

MOST = 0.05  # of the draws
SEEDS = 3  # of noise, where the records have one seed or none


class Share(NamedTuple):
    """How often a claim holds of noise."""

    experiment: str
    claim: str
    share: float


class Source:
    """Where noise comes from. Spreads are remembered by the order in which a claim asks for them: measuring is slow."""

    def __init__(self) -> None:
        self.restart(0)
        self.forget()

    def forget(self) -> None:
        """Another claim follows."""
        self.spreads: list[float] = []

    def restart(self, seed: int, scale: float = 1.0) -> None:
        """The same seed gives the same draws, times `scale`."""
        self.random, self.scale, self.asked = random.Random(seed), scale, 0

    def draw(self, count: int, spread: Callable[[], float]) -> list[float]:
        """So many, with this spread."""
        if self.asked == len(self.spreads):
            self.spreads.append(spread())
        sd = self.scale * self.spreads[self.asked]
        self.asked += 1
        return [sd * self.random.gauss(0.0, 1.0) for _ in range(count)]


@dataclass(frozen=True)
class Noise(Runs):
    """Runs whose outcomes are noise: what a measure gives is drawn, with the spread it has over the seeds of an arm."""

    source: Source = field(default_factory=Source)

    def of(self, arm: str, budget: int | None = None) -> list[Run]:
        """There are none: a claim that looks at runs instead of `values` cannot be fed noise."""
        raise MissingRunsError("noise has outcomes (Runs.values) but no runs")

    def values(self, measure: Callable[[Run], float], arm: str, budget: int | None = None) -> list[float]:
        """Draws, one for each seed, at least SEEDS."""

        def spread() -> float:
            try:
                sd = sample_sd(Runs(self.plan, self.found, self.missing).values(measure, arm, budget))
            except MissingRunsError:
                return 1.0
            return 1.0 if math.isnan(sd) else sd

        return self.source.draw(max(SEEDS, len(self.plan.seeds)), spread)


def shares(experiment: Experiment | TrainedExperiment, context: Context, draws: int) -> Iterator[Share]:
    """How often each claim of a finished experiment holds of noise; trains nothing."""
    if isinstance(experiment, TrainedExperiment):
        runs = runner.read(experiment, context)
        noise = Noise(runs.plan, runs.found, runs.missing)
        for claim in experiment.judge(noise).claims:
            yield Share(context.folder.name, claim.text, share_of_trained(claim, noise.source, draws))
    else:
        for claim in experiment.run(context).claims:
            yield Share(context.folder.name, claim.text, share_of_simulated(claim, draws))


def share_of_trained(claim: Claim, source: Source, draws: int) -> float:
    """The share of draws in which a claim about `Noise` of this source holds; of its bounds the worst."""
    source.forget()
    _check_linear(claim, source)
    held: list[int] = []
    for seed in range(draws):
        source.restart(seed)
        kept = [at_its_bound(bound, bound.found).kept for bound in _bounds(claim)]
        held = [before + now for before, now in zip(held or [0] * len(kept), kept, strict=True)]
    return max(held) / draws


def share_of_simulated(claim: Claim, draws: int) -> float:
    """The same for a claim about simulated numbers: draws around the bound. One seed gets no verdict: there it never holds."""
    worst = 0
    for bound in _bounds(claim):
        error, seeds = bound.found.error, bound.found.seeds
        if seeds > 1:
            found = (
                Estimate(error * mean, error * spread, seeds) for mean, spread in _normal_samples(seeds - 1, draws)
            )
            worst = max(worst, sum(at_its_bound(bound, each).kept for each in found))
    return worst / draws


@functools.cache
def _normal_samples(freedom: int, draws: int) -> list[tuple[float, float]]:
    """Mean and spread of samples from a normal distribution, in units of the true standard error."""
    dice = random.Random(0)
    return [(dice.gauss(0, 1), math.sqrt(dice.gammavariate(freedom / 2, 2) / freedom)) for _ in range(draws)]


def at_its_bound(bound: Bound, noise: Estimate) -> Bound:
    """The bound on this noise, if the truth is not zero but exactly at the bound."""
    moved = Estimate(noise.value + bound.bound, noise.error, noise.seeds)
    return Bound(bound.what, moved, bound.side, bound.bound, bound.unit)


def _bounds(claim: Claim) -> tuple[Bound, ...]:
    assert claim.find is not None, f"{claim.text}: make it by claim(text, find)"
    try:
        return claim.find().bounds
    except MissingRunsError as error:
        raise ValueError(f"{claim.text}: {error}; let it rest on Runs.values alone") from None


def _check_linear(claim: Claim, source: Source) -> None:
    """Outcomes times -2 must give numbers times -2."""
    source.restart(0)
    once = [bound.found.value for bound in _bounds(claim)]
    source.restart(0, -2.0)
    turned = [bound.found.value for bound in _bounds(claim)]
    if not all(math.isclose(-2 * a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(once, turned, strict=True)):
        raise ValueError(
            f"{claim.text}: what it judges is not a weighted sum of outcomes, so noise may lean to one side of its bound; judge "
            "sums and differences (statistics.combined), or a coefficient of a least-squares fit"
        )
