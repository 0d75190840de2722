"""What a run's figures say, in words: for each role one sentence with the figures behind it, and what would help.

A figure is a mean over the last third of a run's records, with its standard error. The weight norm misses its target
for four reasons, each of which the records measure by itself:

    too short     the forecast itself has not reached the target: decay has had too few half-lives
    other aim     the forecast has arrived, elsewhere: the paper's formula is not exact
    length        updates are shorter or longer than nominal (update_norm)
    alignment     excess > 0: updates undo a part of each other. excess < 0: gradients push the weights outward,
                  because theta moves by -u

Roles with a missing figure are left out.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from steadynorm.records.role_norms import ROLE_LABELS
from steadynorm.records.schema import Run, flatten

COLUMNS = (
    *("weight_norm", "target_norm", "forecast_norm", "forecast_norm_measured"),
    *("update_norm", "excess_alignment", "lr", "weight_decay"),
)  # what it reads, of all weights and by role
CLOSE = 0.03  # relative: a norm this near to its target is there
NOTABLE = 0.01  # a reason or an excess below it is not worth naming
OUTWARD = -0.05  # an excess beyond which the independence of updates fails clearly
LEAST_RECORDS = 9  # of which the last third is averaged
HALF_LIVES = 3  # after three of them an eighth of the start is left
_BLOCKS = 8  # at most; consecutive records are not independent, means of blocks nearly are


class Figure(NamedTuple):
    """A mean and its standard error."""

    mean: float
    margin: float

    @property
    def is_clear(self) -> bool:
        """Whether the mean is notable, and more than two standard errors from zero."""
        return abs(self.mean) >= NOTABLE and abs(self.mean) > 2 * self.margin

    def percent(self) -> str:
        """Return the size of a relative difference.

        >>> Figure(-0.0912, 0.004).percent()
        '9.1 ± 0.4 %'
        """
        return f"{abs(100 * self.mean):.1f} ± {100 * self.margin:.1f} %"

    def signed(self) -> str:
        """Return the figure with its sign.

        >>> Figure(0.0312, 0.01).signed()
        '+0.031 ± 0.010'
        """
        return f"{self.mean:+.3f} ± {self.margin:.3f}"


class RoleFigures(NamedTuple):
    """The figures of one role; None where records do not have them. Ratios are less 1."""

    off_target: Figure | None  # measured norm / its target
    off_forecast: Figure | None  # measured norm / the forecast made before training
    off_measured: Figure | None  # measured norm / the forecast that knows the lengths of updates
    forecast_off_target: Figure | None  # forecast norm / the target
    length: Figure | None  # |update| / its nominal length
    excess: Figure | None  # excess alignment, not a ratio
    drift: Figure | None  # norm / that of the first record
    half_lives: float | None  # how often decay has halved the weights since the start
    steps: int  # so far


def advise(run: Run, holds: Mapping[str, str] | None = None) -> list[str]:
    """Return what the figures of a run say: a sentence for each role that has the figures for one.

    Args:
        run: The run, or what a monitor has seen of it; only its columns are read.
        holds: `hold` of the groups of each role; by default what the run's configuration says for all.

    Examples:
        >>> steps = np.arange(1, 31)
        >>> columns = {"weight_norm": np.full(30, 5.1), "target_norm": np.full(30, 5.0)}
        >>> advise(Run("a", {}, "", None, steps, columns, {}))
        ['all weights: the norm is within 3 % of its target (2.0 ± 0.0 % above); nothing to change.']
    """
    roles = [role for role in ROLE_LABELS if f"weight_norm/{role}" in run.columns] or [""]
    sentences = []
    for role in roles:
        figures = read_figures(run, role)
        hold = holds.get(role, "decay") if holds is not None else _configured_hold(run.config)
        is_held = hold == "fixed" or (hold == "balance" and figures.off_target is not None)
        if text := _held(hold, figures) if is_held else _decayed(figures, role):
            sentences.append(f"{role or 'all weights'}: {text}.")
    return sentences


def read_figures(run: Run, role: str) -> RoleFigures:
    """Return the figures of a role, or of all weights if it is ""."""
    suffix = f"/{role}" if role else ""

    def column(key: str) -> np.ndarray:
        values = run.columns.get(key + suffix)
        return np.full(len(run.steps), np.nan) if values is None else values

    norm, target, forecast = column("weight_norm"), column("target_norm"), column("forecast_norm")
    with np.errstate(divide="ignore", invalid="ignore"):
        return RoleFigures(
            off_target=_figure(norm / target - 1),
            off_forecast=_figure(norm / forecast - 1),
            off_measured=_figure(norm / column("forecast_norm_measured") - 1),
            forecast_off_target=_figure(forecast / target - 1),
            length=_figure(column("update_norm") - 1),
            excess=_figure(column("excess_alignment")),
            drift=_figure(norm / norm[:1] - 1) if len(norm) else None,
            half_lives=_half_lives(run, role),
            steps=int(run.steps[-1]) if len(run.steps) else 0,
        )


def _figure(values: np.ndarray) -> Figure | None:
    """Return the mean over the last third of the records, and the standard error of the means of its blocks.

    >>> figure = _figure(np.arange(27.0)); figure.mean, round(figure.margin, 3)
    (22.0, 0.904)
    """
    last = values[len(values) - len(values) // 3 :]
    last = last[np.isfinite(last)]
    if 3 * len(last) < LEAST_RECORDS:
        return None
    blocks = [block.mean() for block in np.array_split(last, min(_BLOCKS, len(last)))]
    return Figure(float(last.mean()), float(np.std(blocks, ddof=1) / math.sqrt(len(blocks))))


def _half_lives(run: Run, role: str) -> float | None:
    """Return the sum of lr * decay over all steps, in units of ln 2.

    They are those of the role's group, which is named after it, and of the main group where that one is the same.
    """
    groups = {key.partition("/")[2] for key in run.columns if key.startswith(("lr/", "weight_decay/"))}
    group = next((name for name in (role, role.removesuffix("s")) if name in groups), "")
    if role not in ("", "hidden") and groups and not group:
        return None
    lr, decay = (run.columns.get(f"{key}/{group}", run.columns.get(key)) for key in ("lr", "weight_decay"))
    if lr is None or decay is None or not len(run.steps):
        return None
    eta = (lr * decay)[np.isfinite(lr * decay)]
    return float(eta.mean() * run.steps[-1] / math.log(2)) if len(eta) else None


def _configured_hold(config: Mapping[str, Any]) -> str:
    holds = [value for key, value in flatten(config).items() if key.rpartition(".")[2] == "hold"]
    return str(holds[0]) if len(holds) == 1 else "decay"


def _held(hold: str, figures: RoleFigures) -> str | None:
    """Return whether a norm that is not left to decay stayed where it should."""
    off, place = (figures.off_target, "target") if figures.off_target else (figures.drift, "norm at the first record")
    if off is None:
        return None
    if abs(off.mean) <= CLOSE:
        return f'hold="{hold}" keeps the norm within {100 * CLOSE:.0f} % of its {place} ({_side(off)})'
    remedy = "; a smaller balance_steps returns it faster" if hold == "balance" else ""
    return f'hold="{hold}" has not kept the norm: it is {_side(off)} its {place}{remedy}'


def _decayed(figures: RoleFigures, role: str) -> str | None:
    """Return how far a norm that decay controls is from its target, or else from its forecast, and why."""
    off, place = (figures.off_target, "target") if figures.off_target else (figures.off_forecast, "forecast")
    excess, is_target = figures.excess, place == "target"
    outward = excess is not None and excess.is_clear and excess.mean < OUTWARD
    if outward and excess is not None and not is_target:
        return (
            f"gradients push the weights outward (excess {excess.signed()}); keep the decay constant, or give it a target "
            'and hold="balance"'
        )
    if off is None:
        return None
    if abs(off.mean) <= CLOSE:
        return f"the norm is within {100 * CLOSE:.0f} % of its {place} ({_side(off)}); nothing to change"
    reasons = _reasons(figures, role, above=off.mean > 0, is_target=is_target)
    why = f", because {' and '.join(reasons)}" if reasons else ""
    if not reasons and figures.length is not None and excess is not None:
        why = ", which the length of updates and their alignment do not explain"
    if not is_target:
        return f"the norm is {_side(off)} its forecast{why}"
    remedy = '; hold="balance" would hold it'
    if outward:
        remedy += ", or keep its decay constant"
    return f"the norm is {_side(off)} its target{why}{remedy}"


def _reasons(figures: RoleFigures, role: str, *, above: bool, is_target: bool) -> list[str]:
    """Return the reasons that act in the direction in which the norm is off."""

    def acts(figure: Figure | None) -> bool:
        return figure is not None and figure.is_clear and (figure.mean > 0) == above

    reasons, aim, length, excess = [], figures.forecast_off_target, figures.length, figures.excess
    if is_target and aim is not None and acts(aim) and abs(aim.mean) > CLOSE:
        if figures.half_lives is None:
            reasons.append(f"its forecast itself is {_side(aim)}")
        elif figures.half_lives < HALF_LIVES:
            half_life = figures.steps / figures.half_lives if figures.half_lives > 0 else math.inf
            reasons.append(
                f"training was too short to reach it (the half-life is {half_life:,.0f} steps on average, of "
                f"{figures.steps:,} steps in all; the forecast itself is {_side(aim)})"
            )
        elif length is None or not acts(length):
            reasons.append(
                f'the decay aims elsewhere (its forecast is {_side(aim)}; ScionC\'s overlap="exact" aims at the target)'
            )
    if length is not None and acts(length):
        polar = " (raise polar_steps)" if role == "hidden" and not above else ""
        reasons.append(f"updates are {length.percent()} {'longer' if above else 'shorter'} than nominal{polar}")
    rest = figures.off_measured or figures.off_forecast
    if excess is not None and excess.is_clear and acts(rest) and (excess.mean < 0) == above:
        undone = "partly undone" if acts(length) else "updates are partly undone"
        what = "gradients push the weights outward" if above else undone
        reasons.append(f"{what} (excess {excess.signed()})")
    return reasons


def _side(off: Figure) -> str:
    return f"{off.percent()} {'above' if off.mean > 0 else 'below'}"
