"""fig-random-system: the norm under constant lr and under warmup and cosine, at scales four orders apart."""

import math

import numpy as np

from steadynorm import progress, records, schedule, theory
from steadynorm.lab import simulate
from steadynorm.lab.paper.experiment import Context, Experiment, MissingRunsError, Outcome, claim
from steadynorm.lab.paper.metrics import MIDDLE
from steadynorm.lab.paper.simulated import RECORDS, record, recorded
from steadynorm.lab.paper.statistics import Finding, at_most, estimate, every, within
from steadynorm.report import page

SIZE, RATIO, HALF_LIVES, WARMUP = 1000, 1000.0, 10.0, 0.5  # elements; decay / lr; of them warmup
CLOSE, NEAR, FALL = 0.015, 0.05, 0.2  # of the settled norm; of the forecast at any step; what the norm loses at the end
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
    slowest = found["constant", etas[-1]][0]
    constant = slowest.settled(0.3, norm=True)
    falls = [_fall(found["cosine", eta][0]) for eta in etas]
    claims = [
        claim(
            f"At constant lr the norm settles at 0.71 (within {100 * CLOSE:g} %)",
            lambda: within(estimate(_off_settled(slowest)), 100 * CLOSE, f"norm / 0.71 - 1 at eta {etas[-1]:g}", " %"),
        ),
        claim(
            f"Under cosine decay of lr the norm ends at least {100 * FALL:g} % below the middle of the run, at every scale",
            lambda: every([
                at_most(estimate(_end_over_middle(found["cosine", eta][0])), -100 * FALL, f"end / middle - 1 at eta {eta:g}", " %")
                for eta in etas
            ]),
        ),
        claim(
            f"The forecast is within {100 * NEAR:g} % at every recorded step, at every scale",
            lambda: every([
                forecast_meets(*each, f"{shape}, eta {eta:g}") for (shape, eta), each in found.items()
            ]),
        ),
    ]  # fmt: skip
    blocks = [_plot(shape, etas, found) for shape in ("constant", "cosine")]
    summary = {
        "etas": list(etas),
        "seeds": seeds,
        "constant_norm": constant.mean,
        "end_over_largest": falls,
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


def forecast_meets(seen: simulate.Trajectory, forecast: np.ndarray, where: str) -> Finding:
    """Whether the norm is within NEAR of the forecast, at every recorded step."""
    off = 100 * (np.sqrt(seen.norm_sq / forecast) - 1)
    return every([
        within(estimate(seeds), 100 * NEAR, f"norm / forecast - 1, {where}, step {step}", " %")
        for step, seeds in zip(seen.steps.tolist(), off.T.tolist(), strict=True)
    ])  # fmt: skip


def _off_settled(seen: simulate.Trajectory) -> list[float]:
    """100 (norm / sqrt(1/2) - 1) over the last 0.3 of the run, by seed."""
    late = seen.norm_sq[:, -round(0.3 * len(seen.steps)) :].mean(1)
    return (100 * (np.sqrt(2 * late) - 1)).tolist()


def _end_over_middle(seen: simulate.Trajectory) -> list[float]:
    """100 (norm at the end / in the middle of the run - 1), by seed."""
    at = seen.steps / seen.steps[-1]
    middle = seen.norm_sq[:, (at >= MIDDLE[0]) & (at <= MIDDLE[1])].mean(1)
    return (100 * (np.sqrt(seen.norm_sq[:, -1] / middle) - 1)).tolist()


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
