"""What experiments with a swept lr share: arms at half and twice the lr, their table, and how much the score suffers there."""

from collections.abc import Sequence
from dataclasses import replace

from steadynorm.lab.paper.baselines import short
from steadynorm.lab.paper.claims import Contrast, mean, value
from steadynorm.lab.paper.metrics import Score
from steadynorm.lab.paper.plots import cell, points_with_errors
from steadynorm.lab.paper.runs import Runs
from steadynorm.lab.train.config import Config
from steadynorm.report import page

ENDS = (0.5, 2.0)
LRS = {"lr": "lr", "output_lr": "output lr"}  # field of Optim -> its name


def swept_arm(arm: str, ratio: float, field: str = "lr") -> str:
    """Return the name of an arm with this multiple of one of its lrs.

    >>> swept_arm("MuonC", 2.0, "output_lr"), swept_arm("MuonC", 1.0)
    ('MuonC, output lr x 2', 'MuonC')
    """
    return arm if ratio == 1 else f"{arm}, {LRS[field]} x {ratio:g}"


def settings(arm: str, fields: Sequence[str] = ("lr",)) -> dict[str, tuple[float, str]]:
    """Return the ratio and the lr of every setting of a swept arm, by name: the arm itself, and half and twice each lr."""
    places = [(1.0, fields[0]), *((ratio, field) for field in fields for ratio in ENDS)]
    return {swept_arm(arm, *place): place for place in places}


def sweep(arm: str, config: Config, fields: Sequence[str] = ("lr",)) -> dict[str, Config]:
    """Return the configurations of all settings of an arm."""
    return {
        name: replace(config, optim=replace(config.optim, **{field: short(ratio * getattr(config.optim, field))}))
        for name, (ratio, field) in settings(arm, fields).items()
    }


def loss_at_ends(score: Score, arm: str, field: str = "lr") -> Contrast:
    """Return how much worse an arm scores at half and twice an lr, mean of both, than at the lr itself."""
    ends = mean(value(score.metric, swept_arm(arm, ratio, field)) for ratio in ENDS)
    return -score.sign * (ends - value(score.metric, arm))


def table_by_lr(runs: Runs, score: Score, arms: Sequence[str], fields: Sequence[str] = ("lr",)) -> page.Table:
    """Tabulate a score, arms down and lrs across."""
    rows = [
        [arm, *(cell(runs, score.metric, name, None, f".{score.digits}f", ".2g") for name in settings(arm, fields))]
        for arm in arms
    ]
    header = ("", "as it is", *(f"{LRS[field]} x {ratio:g}" for field in fields for ratio in ENDS))
    return page.Table(f"The sweep: {score.name}", header, rows, "Mean ± sample standard deviation over seeds.")


def plot_by_lr(runs: Runs, score: Score, arms: Sequence[str], field: str = "lr") -> page.Plot:
    """Plot a score against an lr in units of the baseline's."""
    ratios = (ENDS[0], 1.0, ENDS[1])
    series = []
    for arm in arms:
        line = points_with_errors(
            runs, score.metric, {ratio: (swept_arm(arm, ratio, field), None) for ratio in ratios}, score.name, arm
        )
        series += [line] if len(line.x) else []
    label = f"{LRS[field]} / the baseline's"
    return page.Plot(
        f"{score.name.capitalize()} by {LRS[field]}", label, score.unit, series, "Mean over seeds, standard error.",
        log_x=True,
    )  # fmt: skip
