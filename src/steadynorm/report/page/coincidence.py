"""Find lines of a plot that lie under others, so that they can be drawn wider and remain visible."""

from collections.abc import Sequence

import numpy as np

from steadynorm.report.page.blocks import Series

_MOST = 12  # lines of a plot that are compared; with more, the reader hides runs
_CLOSE = 0.005  # of the plot's height
_SHARE = 0.9  # of the points


def count_coincident(series: Sequence[Series], *, log: bool = False) -> list[int]:
    """Return for each series how many later ones of its style coincide with it nearly everywhere.

    With `log`, they are compared on a logarithmic axis.

    >>> x = [1, 2, 3, 4]
    >>> count_coincident([Series("a", x, [1, 2, 3, 4]), Series("b", x, [1, 2, 3, 4]), Series("c", x, [4, 3, 2, 1])])
    [1, 0, 0]
    """
    curves = [_finite(line, log) for line in series]
    values = np.concatenate([y for _, y in curves] or [np.zeros(0)])
    if len(series) > _MOST or not len(values):
        return [0] * len(series)
    close = _CLOSE * float(np.ptp(values))
    return [
        sum(
            later.style == line.style != "points" and _coincide(curves[k], curves[k + 1 + j], close)
            for j, later in enumerate(series[k + 1 :])
        )
        for k, line in enumerate(series)
    ]


def _finite(series: Series, log: bool) -> tuple[np.ndarray, np.ndarray]:
    x, y = np.asarray(series.x, float), np.asarray(series.y, float)
    y = np.log(np.where(y > 0, y, np.nan)) if log else y
    keep = np.isfinite(x) & np.isfinite(y)
    return x[keep], y[keep]


def _coincide(one: tuple[np.ndarray, np.ndarray], two: tuple[np.ndarray, np.ndarray], close: float) -> bool:
    if not len(one[0]) or not len(two[0]):
        return False
    order = np.argsort(two[0], kind="stable")
    other = np.interp(one[0], two[0][order], two[1][order], left=np.nan, right=np.nan)
    return bool((np.abs(other - one[1]) <= close).mean() >= _SHARE)
