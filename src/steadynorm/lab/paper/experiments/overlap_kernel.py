"""fig-overlap, ours: the overlap kernel measured against its closed form, and what it changes over alpha."""

import re
from typing import NamedTuple

import numpy as np

from steadynorm import progress, theory
from steadynorm.lab import simulate
from steadynorm.lab.paper import slim_records
from steadynorm.lab.paper.experiment import Context, Experiment, Outcome
from steadynorm.lab.paper.experiments.steady_norms import paper_over_exact
from steadynorm.lab.paper.slim_records import rounded
from steadynorm.lab.paper.statistics import Estimate, Finding, combine_findings, within
from steadynorm.report import page

CLOSE = 0.02  # measured and computed overlaps within which we call them equal
CORRELATIONS = (0.1, 0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.99)


class Kind(NamedTuple):
    """An lmo and a shape to measure."""

    label: str
    lmo: str
    shape: tuple[int, ...]
    quick: tuple[int, ...]


KINDS = (
    Kind("vector of 4", "bias", (4,), (4,)),
    Kind("sign", "sign", (256, 256), (64, 64)),
    Kind("spectral, square", "spectral", (256, 256), (64, 64)),
    Kind("spectral, 1:2", "spectral", (192, 384), (48, 96)),
    Kind("spectral, 1:4", "spectral", (128, 512), (32, 128)),
)


def run(context: Context) -> Outcome:
    """Measure f(r) on random pairs and draw it beside the formula."""
    seeds = context.seeds or (64 if context.quick else 16)
    grid, alphas = np.linspace(0, 1, 101).tolist(), np.geomspace(0.01, 1.0, 41).tolist()
    series: list[page.Series] = []
    ratios: list[page.Series] = []
    findings: list[Finding] = []
    rows: list[tuple[str, float, float, float, float]] = []
    with progress.bar(len(KINDS), "kernels") as tell:
        for kind in KINDS:
            shape = kind.quick if context.quick else kind.shape
            pairs = seeds * (512 if kind.lmo == "bias" else 1)
            measured, kernel = _measure(context, kind, shape, pairs), theory.overlap(kind.lmo, shape)
            series += [
                page.Series("formula", grid, [kernel(r) for r in grid], toggle=kind.label),
                page.Series(
                    "measured", CORRELATIONS, [m.mean for m in measured], error=[m.error for m in measured],
                    style="points", toggle=kind.label,
                ),
            ]  # fmt: skip
            for r, m in zip(CORRELATIONS, measured, strict=True):
                off = Estimate(m.mean - kernel(r), m.error, pairs)
                findings.append(within(off, CLOSE, f"measured - formula, {kind.label}, r {r:g}"))
                rows.append((kind.label, r, m.mean, m.error, rounded(kernel(r))))
            ratio = [paper_over_exact(alpha, kernel) for alpha in alphas]
            ratios.append(page.Series("paper / exact", alphas, ratio, toggle=kind.label))
            tell(1)
    series.append(page.Series("the paper assumes", [0.0, 1.0], [0.0, 1.0], style="dash", toggle="paper"))
    text = f"Measured overlaps agree with the closed forms (within {CLOSE:g}, every lmo and correlation)"
    blocks = [
        page.Plot("Overlap kernel f(r)", "correlation r of the inputs", "overlap of the updates", series,
                  "How much two unit updates overlap when their inputs correlate by r."),
        page.Plot("Steady norm: paper / exact", "alpha", "plain, eta = 1e-6", ratios,
                  "What the bend of the kernel does to the steady-state norm.", log_x=True),
        page.Table("Measured overlaps", ("lmo", "r", "measured", "± SE", "formula"), rows),
    ]  # fmt: skip
    numbers = {"pairs": seeds, "points": [list(row) for row in rows]}
    return Outcome(blocks, {text: combine_findings(findings)}, numbers)


def _measure(context: Context, kind: Kind, shape: tuple[int, ...], pairs: int) -> list[simulate.MeanWithError]:
    """Return f(r) at every correlation, from the records if they are there."""
    config = {"lmo": kind.lmo, "shape": list(shape), "pairs": pairs, "seed": context.seed, "r": list(CORRELATIONS)}
    name = re.sub(r"[^a-z0-9]+", "-", kind.label)

    def measure(r: float) -> dict[str, float]:
        measured = simulate.overlap(kind.lmo, shape, r, pairs=pairs, seed=context.seed)
        return {"r": r, "overlap": measured.mean, "error": measured.error}

    run = slim_records.read_simulated(context, name, config, len(CORRELATIONS) - 1)
    run = run or slim_records.keep_simulated(context, name, config, enumerate(map(measure, CORRELATIONS)))
    columns = (run.columns[key].tolist() for key in ("overlap", "error"))
    return list(map(simulate.MeanWithError, *columns))


OVERLAP = Experiment(
    "fig-overlap",
    "The overlap kernel: why square matrices settle lower than the paper predicts",
    "ours: the paper reports the deviation of square matrices and has no explanation.",
    run,
    {"desk": 22, "paper": 22},
)
