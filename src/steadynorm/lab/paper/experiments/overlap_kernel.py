"""fig-overlap, ours: the overlap kernel measured against its closed form, and what it changes over alpha."""

import math
import re
from typing import NamedTuple

import numpy as np

from steadynorm import progress, records, theory
from steadynorm.lab import simulate
from steadynorm.lab.paper.experiment import Context, Experiment, MissingRunsError, Outcome, claim
from steadynorm.lab.paper.slim_records import rounded
from steadynorm.lab.paper.statistics import Estimate, Finding, every, within
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
    """Measure f(r) on random pairs; draw it beside the formula."""
    seeds, series, ratios = context.seeds or (64 if context.quick else 16), [], []
    findings: list[Finding] = []
    rows = []
    with progress.bar(len(KINDS), "kernels") as tell:
        for kind in KINDS:
            shape = kind.quick if context.quick else kind.shape
            pairs = seeds * (512 if kind.lmo == "bias" else 1)
            seen = _measured(context, kind, shape, pairs)
            kernel = theory.overlap(kind.lmo, shape)
            grid = np.linspace(0, 1, 101)
            series += [
                page.Series("formula", grid, [kernel(r) for r in grid.tolist()], toggle=kind.label),
                page.Series(
                    "measured", CORRELATIONS, [m.mean for m in seen], error=[m.error for m in seen],
                    style="points", toggle=kind.label,
                ),
            ]  # fmt: skip
            for r, m in zip(CORRELATIONS, seen, strict=True):
                off = Estimate(m.mean - kernel(r), m.error, pairs)
                findings.append(within(off, CLOSE, f"measured - formula, {kind.label}, r {r:g}"))
                rows.append((kind.label, r, m.mean, m.error, kernel(r)))
            ratios.append(_ratio(kind.label, kernel))
            tell(1)
    series.append(page.Series("the paper assumes", [0.0, 1.0], [0.0, 1.0], style="dash", toggle="paper"))
    claims = [
        claim(
            f"Measured overlaps agree with the closed forms (within {CLOSE:g}, every lmo and correlation)",
            lambda: every(findings),
        )
    ]
    blocks = [
        page.Plot("Overlap kernel f(r)", "correlation r of the inputs", "overlap of the updates", series,
                  "How much two unit updates overlap when their inputs correlate by r."),
        page.Plot("Steady norm: paper / exact", "alpha", "plain, eta = 1e-6", ratios,
                  "What the bend of the kernel does to the steady-state norm.", log_x=True),
        page.Table("Measured overlaps", ("lmo", "r", "measured", "± SE", "formula"), rows),
    ]  # fmt: skip
    return Outcome(blocks, claims, {"pairs": seeds, "points": [list(row) for row in rows]})


def _measured(context: Context, kind: Kind, shape: tuple[int, ...], pairs: int) -> list[simulate.Measured]:
    """f(r) at every correlation, from the records if they are there."""
    config = {"lmo": kind.lmo, "shape": list(shape), "pairs": pairs, "seed": context.seed, "r": list(CORRELATIONS)}
    name = re.sub(r"[^a-z0-9]+", "-", kind.label)
    path = context.records / name / records.FILE
    try:
        kept = records.read(path)
    except records.RecordError:
        kept = None
    if kept is None or dict(kept.config) != config or len(kept.steps) != len(CORRELATIONS):
        if context.kept_only:
            raise MissingRunsError(f"{path}: no finished records")
        path.unlink(missing_ok=True)
        with records.Recorder(path, name=name, config=config) as recorder:
            for index, r in enumerate(CORRELATIONS):
                seen = simulate.overlap(kind.lmo, shape, r, pairs=pairs, seed=context.seed)
                recorder.write({"step": index, "r": r, "overlap": rounded(seen.mean), "error": rounded(seen.error)})
        kept = records.read(path)
    pairs_of = zip(kept.columns["overlap"].tolist(), kept.columns["error"].tolist(), strict=True)
    return [simulate.Measured(mean, error) for mean, error in pairs_of]


def _ratio(label: str, kernel: theory.Overlap) -> page.Series:
    alphas = np.geomspace(0.01, 1.0, 41).tolist()
    lr, decay = 1e-5, 0.1
    paper = [theory.steady_norm_sq(lr, decay, alpha, limit=True) for alpha in alphas]
    exact = [theory.steady_norm_sq(lr, decay, alpha, overlap=kernel) for alpha in alphas]
    return page.Series(
        "paper / exact", alphas, [math.sqrt(p / e) for p, e in zip(paper, exact, strict=True)], toggle=label
    )


OVERLAP = Experiment(
    "fig-overlap",
    "The overlap kernel: why square matrices settle lower than the paper predicts",
    "ours: the paper reports the deviation of square matrices and has no explanation.",
    run,
    {"desk": 22, "paper": 22},
)
