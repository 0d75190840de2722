"""fig-random-system: the norm under constant lr and under warmup and cosine, at scales four orders apart."""

import math

import numpy as np

from steadynorm import progress, schedule, theory
from steadynorm.lab import simulate
from steadynorm.lab.paper import slim_records
from steadynorm.lab.paper.experiment import Context, Experiment, Outcome
from steadynorm.lab.paper.metrics import MIDDLE
from steadynorm.lab.paper.statistics import Finding, at_most, combine_findings, estimate, within
from steadynorm.report import page

SIZE, RATIO, HALF_LIVES, WARMUP = 1000, 1000.0, 10.0, 0.5  # elements; decay / lr; of them warmup
CLOSE, NEAR, FALL = 0.015, 0.05, 0.2  # of the settled norm; of the forecast at any step; what the norm loses at the end
Recorded = tuple[simulate.Trajectory, np.ndarray]  # |theta|^2, and its forecast at the recorded steps
ETAS = {"desk": (1e-1, 1e-2, 1e-3, 1e-4, 1e-5), "paper": (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)}


def run(context: Context) -> Outcome:
    """Simulate both schedules at every scale and compare them with the forecast."""
    declared, seeds = ETAS["desk" if context.quick else context.scale], context.seeds or 8
    chosen = context.choose([_label(eta) for eta in declared], "parts")
    etas = [eta for eta in declared if _label(eta) in chosen]
    total = sum(2 * simulate.half_life_steps(HALF_LIVES, *_lr_and_decay(eta)) for eta in etas)
    systems: dict[tuple[str, float], Recorded] = {}
    with progress.bar(total, "random systems") as tell:
        for eta in etas:
            for shape in ("constant", "cosine"):
                systems[shape, eta] = _simulate(context, shape, eta, seeds)
                tell(systems[shape, eta][0].steps[-1].item())
    slowest = systems["constant", etas[-1]][0]
    claims = {
        f"At constant lr the norm settles at 0.71 (within {100 * CLOSE:g} %)": within(
            estimate(_off_settled(slowest)), 100 * CLOSE, f"norm / 0.71 - 1 at eta {etas[-1]:g}", " %"
        ),
        f"Under cosine decay of lr the norm ends at least {100 * FALL:g} % below the middle of the run, at every scale":
            combine_findings([
                at_most(estimate(_end_over_middle(systems["cosine", eta][0])), -100 * FALL,
                        f"end / middle - 1 at eta {eta:g}", " %")
                for eta in etas
            ]),
        f"The forecast is within {100 * NEAR:g} % at every recorded step, at every scale": combine_findings([
            forecast_meets(*system, f"{shape}, eta {eta:g}") for (shape, eta), system in systems.items()
        ]),
    }  # fmt: skip
    blocks = [_plot(shape, etas, systems) for shape in ("constant", "cosine")]
    falling = [np.sqrt(systems["cosine", eta][0].mean()) for eta in etas]
    numbers = {
        "etas": etas,
        "seeds": seeds,
        "constant_norm": slowest.late_mean(0.3, norm=True).mean,
        "end_over_largest": [float(norms[-1] / norms.max()) for norms in falling],
    }
    return Outcome(blocks, claims, numbers)


def _label(eta: float) -> str:
    return f"eta {eta:g}"


def _lr_and_decay(eta: float) -> tuple[float, float]:
    """Keep lr / decay the same at every scale, and with it the norm."""
    return math.sqrt(eta / RATIO), math.sqrt(eta * RATIO)


def _simulate(context: Context, shape: str, eta: float, seeds: int) -> Recorded:
    """Return what the records hold; the first call writes them."""
    lr, decay = _lr_and_decay(eta)
    steps = simulate.half_life_steps(HALF_LIVES, lr, decay)
    config = {"schedule": shape, "lr": lr, "weight_decay": decay, "steps": steps, "seeds": seeds, "size": SIZE,
              "seed": context.seed}  # fmt: skip
    name = f"{shape}-{eta:g}"
    run = slim_records.read_simulated(context, name, config, steps)
    if run is None:
        warmup = round(steps * WARMUP / HALF_LIVES)
        ratio = schedule.constant() if shape == "constant" else schedule.cosine(steps, warmup=warmup)
        rates = lr * np.array([ratio(step) for step in range(steps)])
        norms = simulate.random_system(
            rates, decay, steps, size=SIZE, seeds=seeds, seed=context.seed, records=slim_records.SIMULATED_RECORDS
        )
        rows = slim_records.trajectory_rows(norms, SIZE * theory.forecast(rates, decay, 1.0))
        run = slim_records.keep_simulated(context, name, config, rows)
    return slim_records.trajectory(run), np.square(run.columns["forecast_norm"])


def forecast_meets(norms: simulate.Trajectory, forecast: np.ndarray, where: str) -> Finding:
    """Test whether the norm is within NEAR of the forecast at every recorded step."""
    off = 100 * (np.sqrt(norms.norm_sq / forecast) - 1)
    return combine_findings([
        within(estimate(seeds), 100 * NEAR, f"norm / forecast - 1, {where}, step {step}", " %")
        for step, seeds in zip(norms.steps.tolist(), off.T.tolist(), strict=True)
    ])  # fmt: skip


def _off_settled(norms: simulate.Trajectory) -> list[float]:
    """100 (norm / sqrt(1/2) - 1) over the last 0.3 of the run, by seed."""
    late = norms.norm_sq[:, -round(0.3 * len(norms.steps)) :].mean(1)
    return (100 * (np.sqrt(2 * late) - 1)).tolist()


def _end_over_middle(norms: simulate.Trajectory) -> list[float]:
    """100 (norm at the end / in the middle of the run - 1), by seed."""
    at = norms.steps / norms.steps[-1]
    middle = norms.norm_sq[:, (at >= MIDDLE[0]) & (at <= MIDDLE[1])].mean(1)
    return (100 * (np.sqrt(norms.norm_sq[:, -1] / middle) - 1)).tolist()


def _plot(shape: str, etas: list[float], systems: dict[tuple[str, float], Recorded]) -> page.Plot:
    series = []
    for eta in etas:
        norms, forecast = systems[shape, eta]
        x = HALF_LIVES * norms.steps / norms.steps[-1]
        series.append(page.Series("simulated", x, np.sqrt(norms.mean()), toggle=_label(eta)))
        series.append(page.Series("forecast", x, np.sqrt(forecast), style="dash", toggle=_label(eta)))
    title = "Constant lr" if shape == "constant" else "Linear warmup, cosine decay"
    caption = "Mean over seeds; dashed: forecast. The scales fall on one line."
    return page.Plot(title, "half-lives", "|theta|", series, caption, zero=True)


RANDOM_SYSTEM = Experiment(
    "fig-random-system",
    "Weight norm of a random system, with and without a schedule",
    "at constant lr the norm settles where expected (0.71); under cosine decay it falls at the end, at every scale alike.",
    run,
    {"desk": 230, "paper": 2500},
    {scale: tuple(map(_label, etas)) for scale, etas in ETAS.items()},
)
