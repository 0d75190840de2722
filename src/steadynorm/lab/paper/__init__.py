"""The figures and tables of the paper as named experiments: what is run, how it is drawn, what came out."""

from steadynorm.lab.paper.experiment import Claim, Context, Experiment, Outcome
from steadynorm.lab.paper.experiments import extensions as ours
from steadynorm.lab.paper.experiments import learning_rates, vit_tables
from steadynorm.lab.paper.experiments import momentum_schedules as momentum
from steadynorm.lab.paper.experiments import nanogpt as gpt
from steadynorm.lab.paper.experiments import norm_stability as norms
from steadynorm.lab.paper.experiments.overlap_kernel import OVERLAP
from steadynorm.lab.paper.experiments.random_system import RANDOM_SYSTEM
from steadynorm.lab.paper.experiments.steady_state import STEADY_STATE
from steadynorm.lab.paper.runner import Finished, Resources, run_experiment
from steadynorm.lab.paper.trained import TrainedExperiment
from steadynorm.suggestions import suggest

# In the order of `paper run all`: what costs little and is asked for by others comes first.
EXPERIMENTS: dict[str, Experiment | TrainedExperiment] = {
    each.name: each
    for each in (
        RANDOM_SYSTEM,
        STEADY_STATE,
        OVERLAP,
        gpt.NANOGPT,
        gpt.MUON_CORRECTED,
        norms.SCIONC,
        norms.SCIONC_CONSTANT,
        norms.OUTPUT_LAYER,
        norms.ADAMC,
        norms.ADAMC_BETAS,
        norms.RENORMALIZED,
        momentum.MOMENTUM_SCHEDULE,
        momentum.GAMMA_PRIME,
        momentum.GAMMA_PRIME_SLOW,
        momentum.MOMENTUM_LINEAR,
        ours.EXACT_TARGET,
        ours.FORECASTS,
        ours.ALIGNMENT,
        vit_tables.TABLE,
        vit_tables.SWEEP_SCION,
        vit_tables.SWEEP_CONSTANT,
        vit_tables.SWEEP_COSINE,
        learning_rates.LR_EFF,
    )
}

__all__ = [
    "EXPERIMENTS",
    "Claim",
    "Context",
    "Experiment",
    "Finished",
    "Outcome",
    "Resources",
    "TrainedExperiment",
    "get",
    "run_experiment",
]


def get(name: str) -> Experiment | TrainedExperiment:
    """Return the experiment of this name; raise ValueError with the nearest names if there is none.

    >>> get("fig-overlap").name
    'fig-overlap'
    >>> get("fig-scion")
    Traceback (most recent call last):
    ValueError: no experiment is called 'fig-scion'; did you mean 'fig-scionc', 'fig-muon' or 'fig-scionc-constant'? All: steadynorm paper list
    """
    if name not in EXPERIMENTS:
        raise ValueError(f"no experiment is called {name!r}; {suggest(name, EXPERIMENTS)} All: steadynorm paper list")
    return EXPERIMENTS[name]
