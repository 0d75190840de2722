"""The null test: which claims would noise support? Each may hold in at most 5 % of draws.

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
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from steadynorm.lab.paper import runner
from steadynorm.lab.paper.claims import MissingRunsError, Test
from steadynorm.lab.paper.experiment import Context, Experiment, TrainedExperiment
from steadynorm.lab.paper.metrics import Metric
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.paper.statistics import Bound, Estimate, Finding, sample_sd

MOST = 0.05  # of the draws
SEEDS = 3  # of noise, where the records have one seed or none


class Noise:
    """Outcomes that are noise: a metric's values are drawn with the spread that it has over the seeds of an arm."""

    def __init__(self, runs: Runs):
        self.runs = runs
        self._spreads: dict[tuple[Metric, str, int | None], float] = {}  # measuring them is slow
        self.restart(0)

    def restart(self, seed: int, scale: float = 1.0) -> None:
        """Draw again: the same seed gives the same draws, times `scale`."""
        self._random, self._scale = random.Random(seed), scale
        self._drawn: dict[tuple[Metric, str, int | None], list[float]] = {}

    def values(self, metric: Metric, arm: str, budget: int | None = None) -> list[float]:
        """Return draws, one per seed and at least SEEDS."""
        key = metric, arm, budget
        if key not in self._spreads:
            try:
                sd = sample_sd(self.runs.values(*key))
            except MissingRunsError:
                sd = math.nan
            self._spreads[key] = 1.0 if math.isnan(sd) else sd
        if key not in self._drawn:
            sd, seeds = self._scale * self._spreads[key], max(SEEDS, len(self.runs.plan.seeds))
            self._drawn[key] = [sd * self._random.gauss(0.0, 1.0) for _ in range(seeds)]
        return self._drawn[key]


def shares(experiment: Experiment | TrainedExperiment, context: Context, draws: int) -> Iterator[tuple[str, float]]:
    """Yield every claim of a finished experiment and the share of draws in which noise supports it; train nothing."""
    if isinstance(experiment, TrainedExperiment):
        noise = Noise(runner.read(experiment, context))
        for text, test in experiment.claims_about(noise.runs.plan).items():
            yield text, share_of_trained(text, test, noise, draws)
    else:
        for text, finding in experiment.run(context).claims.items():
            yield text, share_of_simulated(finding, draws)


def share_of_trained(text: str, test: Test, noise: Noise, draws: int) -> float:
    """Return the share of draws in which a claim about runs holds; of several bounds, the worst."""
    _check_linear(text, test, noise)
    held = Counter[int]()
    for seed in range(draws):
        noise.restart(seed)
        held.update(k for k, bound in enumerate(test(noise).bounds) if at_its_bound(bound, bound.estimate).kept)
    return max(held.values(), default=0) / draws


def share_of_simulated(finding: Finding, draws: int) -> float:
    """Return the same for simulated numbers, drawn around the bound. One seed gets no verdict, so never holds."""
    worst = 0
    for bound in finding.bounds:
        error, seeds = bound.estimate.error, bound.estimate.seeds
        if seeds > 1:
            samples = (
                Estimate(error * mean, error * spread, seeds) for mean, spread in _normal_samples(seeds - 1, draws)
            )
            worst = max(worst, sum(at_its_bound(bound, sample).kept for sample in samples))
    return worst / draws


@functools.cache
def _normal_samples(freedom: int, draws: int) -> list[tuple[float, float]]:
    """Return mean and spread of samples from a normal distribution, in units of the true standard error."""
    dice = random.Random(0)
    return [(dice.gauss(0, 1), math.sqrt(dice.gammavariate(freedom / 2, 2) / freedom)) for _ in range(draws)]


def at_its_bound(bound: Bound, noise: Estimate) -> Bound:
    """Return the bound on this noise if the truth is not zero but exactly at the bound."""
    return replace(bound, estimate=noise._replace(value=noise.value + bound.bound))


def _check_linear(text: str, test: Test, noise: Noise) -> None:
    """Raise ValueError unless outcomes times -2 give numbers times -2."""
    values = []
    for scale in (1.0, -2.0):
        noise.restart(0, scale)
        try:
            values.append([bound.estimate.value for bound in test(noise).bounds])
        except AttributeError as error:  # it asks for something else than values
            raise ValueError(f"{text}: {error}; let it rest on Outcomes.values only") from None
    if not all(math.isclose(-2 * a, b, rel_tol=1e-6, abs_tol=1e-9) for a, b in zip(*values, strict=True)):
        raise ValueError(
            f"{text}: what it judges is not a weighted sum of outcomes, so noise may lean to one side of its bound; judge "
            "a claims.Contrast: sums and differences, or a coefficient of a least-squares fit"
        )
