"""The figures and tables of the paper as named experiments: what is run, how it is drawn, and what came out."""

from steadynorm.lab.paper.experiment import Context, Experiment, TrainedExperiment
from steadynorm.lab.paper.experiments import (
    adam_norms,
    embedding_rows,
    extensions,
    learning_rates,
    momentum_schedules,
    muon_sweep,
    nanogpt,
    norm_holds,
    overlap_kernel,
    polar_steps,
    random_system,
    scion_norms,
    steady_norms,
    vit_tables,
)
from steadynorm.lab.paper.runner import Resources, run_experiment
from steadynorm.suggestions import suggest

# In the order of `paper run all`: what costs little and shares its runs with others comes first.
EXPERIMENTS: dict[str, Experiment | TrainedExperiment] = {
    experiment.name: experiment
    for experiment in (
        random_system.RANDOM_SYSTEM,
        steady_norms.STEADY_STATE,
        overlap_kernel.OVERLAP,
        nanogpt.NANOGPT,
        muon_sweep.MUON_CORRECTED,
        norm_holds.HOLD,
        polar_steps.POLAR_STEPS,
        embedding_rows.EMBEDDING,
        scion_norms.SCIONC,
        scion_norms.SCIONC_CONSTANT,
        scion_norms.OUTPUT_LAYER,
        adam_norms.ADAMC,
        adam_norms.ADAMC_BETAS,
        adam_norms.RENORMALIZED,
        momentum_schedules.MOMENTUM_SCHEDULE,
        momentum_schedules.GAMMA_PRIME,
        momentum_schedules.GAMMA_PRIME_SLOW,
        momentum_schedules.MOMENTUM_LINEAR,
        extensions.EXACT_TARGET,
        extensions.FORECASTS,
        extensions.ALIGNMENT,
        vit_tables.TABLE,
        vit_tables.SWEEP_SCION,
        vit_tables.SWEEP_CONSTANT,
        vit_tables.SWEEP_COSINE,
        learning_rates.LR_EFF,
        norm_holds.HOLD_VIT,
        nanogpt.NANOGPT_WIDE,
    )
}

__all__ = [
    "EXPERIMENTS",
    "Context",
    "Experiment",
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
