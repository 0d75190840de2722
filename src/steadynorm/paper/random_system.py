"""fig-random-system: the norm under constant lr and under warmup and cosine, at scales four orders apart."""

import math

import numpy as np

from steadynorm import page, progress, records, schedule, simulate, theory
from steadynorm.paper.experiment import Context, Experiment, MissingRunsError, Outcome, judged
from steadynorm.paper.simulated import RECORDS, record, recorded

SIZE, RATIO, HALF_LIVES, WARMUP = 1000, 1000.0, 10.0, 0.5  # elements; decay / lr; of them warmup
ETAS = {"desk": (1e-1, 1e-2, 1e-3, 1e-4, 1e-5), "paper": (1e-2, 1e-3, 1e-4, 1e-5, 1e-6)}


def run(context: Context) -> Outcome:
    """Simulate both schedules at every scale, with the forecast beside them."""
    declared, seeds = ETAS["desk" if context.quick else context.scale], context.seeds or 8
    etas = tuple(eta for eta in declared if context.wants(_label(eta)))
    if not etas:
        raise ValueError(f"--only {' '.join(context.only)}: the parts are {', '.join(map(_label, declared))}")
    total = sum(2 * simulate.half_life_steps(HALF_LIVES, *_lr_and_decay(eta)) for eta in etas)
    found: dict[tuple[str, float], tuple[simulate.Trajectory, np.ndarray]] = {}
    with progress.bar(total, "random systems") as tell:
        for eta in etas:
            for shape in ("constant", "cosine"):
                found[shape, eta] = _one(context, shape, eta, seeds)
                tell(found[shape, eta][0].steps[-1].item())
    worst = max(_distance(*each) for each in found.values())
    constant = found["constant", etas[-1]][0].settled(0.3, norm=True)
    falls = [_fall(found["cosine", eta][0]) for eta in etas]
    claims = [
        judged(
            "At constant lr the norm settles at 0.71",
            abs(constant.mean - math.sqrt(0.5)) < 0.01 + 3 * constant.error,
            f"{constant.mean:.4f} ± {constant.error:.4f} at eta = {etas[-1]:g}",
        ),
        judged(
            "Under cosine decay of lr the norm falls towards the end",
            max(falls) < 0.8,
            "end / largest: " + ", ".join(f"{fall:.2f}" for fall in falls),
        ),
        judged(
            "The forecast is within 2 % plus three standard errors at every step, at every scale",
            worst <= 1.0,
            f"worst distance: {worst:.2f} of that margin",
        ),
    ]
    blocks = [_plot(shape, etas, found) for shape in ("constant", "cosine")]
    summary = {
        "etas": list(etas),
        "seeds": seeds,
        "constant_norm": constant.mean,
        "end_over_largest": falls,
        "worst_margin": worst,
    }
    return Outcome(blocks, claims, summary)


def _label(eta: float) -> str:
    return f"eta {eta:g}"


def _lr_and_decay(eta: float) -> tuple[float, float]:
    """lr / decay is the same at every scale, so that the norm is."""
    return math.sqrt(eta / RATIO), math.sqrt(eta * RATIO)


def _one(context: Context, shape: str, eta: float, seeds: int) -> tuple[simulate.Trajectory, np.ndarray]:
    """Return |theta|^2 and its forecast at the recorded steps; both come from the records, which a first call writes."""
    lr, decay = _lr_and_decay(eta)
    steps = simulate.half_life_steps(HALF_LIVES, lr, decay)
    name = f"{shape}-{eta:g}"
    config = {
        "schedule": shape,
        "lr": lr,
        "weight_decay": decay,
        "steps": steps,
        "seeds": seeds,
        "size": SIZE,
        "seed": context.seed,
    }
    folder = context.records / name
    seen = recorded(folder, config)
    if seen is None and context.kept_only:
        raise MissingRunsError(f"{context.records}: no finished records of {name}")
    if seen is None:
        warmup = round(steps * WARMUP / HALF_LIVES)
        ratio = schedule.constant() if shape == "constant" else schedule.cosine(steps, warmup=warmup)
        rates = lr * np.array([ratio(step) for step in range(steps)])
        seen = simulate.random_system(rates, decay, steps, size=SIZE, seeds=seeds, seed=context.seed, records=RECORDS)
        seen = record(folder, name, config, seen, SIZE * theory.forecast(rates, decay, 1.0))
    return seen, np.square(records.read(folder).columns["forecast_norm"])


def _distance(seen: simulate.Trajectory, forecast: np.ndarray) -> float:
    """The largest |mean norm - forecast| in units of 2 % plus three standard errors."""
    norm, expected = np.sqrt(seen.mean()), np.sqrt(forecast)
    margin = 0.02 * expected + 3 * seen.error() / (2 * norm)
    return float(np.max(np.abs(norm - expected) / margin))


def _fall(seen: simulate.Trajectory) -> float:
    norms = np.sqrt(seen.mean())
    return float(norms[-1] / norms.max())


def _plot(
    shape: str, etas: tuple[float, ...], found: dict[tuple[str, float], tuple[simulate.Trajectory, np.ndarray]]
) -> page.Plot:
    series = []
    for eta in etas:
        seen, forecast = found[shape, eta]
        x = HALF_LIVES * seen.steps / seen.steps[-1]
        label = _label(eta)
        series.append(page.Series("simulated", x, np.sqrt(seen.mean()), toggle=label))
        series.append(page.Series("forecast", x, np.sqrt(forecast), style="dash", toggle=label))
    title = "Constant lr" if shape == "constant" else "Linear warmup, cosine decay"
    return page.Plot(
        title,
        "half-lives",
        "|theta|",
        series,
        "Mean over seeds; dashed: forecast. The scales fall on one line.",
        zero=True,
    )


RANDOM_SYSTEM = Experiment(
    "fig-random-system",
    "Weight norm of a random system, with and without a schedule",
    "at constant lr the norm settles where expected (0.71); under cosine decay it falls at the end, at every scale alike.",
    run,
    {"desk": 230, "paper": 2500},
    {scale: tuple(map(_label, etas)) for scale, etas in ETAS.items()},
)
