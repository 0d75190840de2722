"""The norms of the published Scion code in our terms: which lmo, and the size of its update relative to ours.

| theirs | ours | size |
|---|---|---|
| Spectral | spectral | 1; not normalized sqrt(d_in); `max`: at least 1 / sqrt(d_out/d_in) |
| SpectralConv | conv | sqrt(taps) / taps |
| Sign | sign; not normalized embedding | 1 |
| BiasRMS | bias | 1 |
| ColNorm | column; `transpose` row | 1, normalized 1 / d_in; `transpose` d, normalized d / n |
| RowNorm | row; `transpose` column | 1, not normalized sqrt(d_in); `transpose` 1 / n, not normalized 1 / sqrt(n) |
| Auto | by shape | as the three it chooses from |

d and n: columns and rows of the stored matrix.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class LmoScale(NamedTuple):
    """Their update is `size` times that of our `lmo`."""

    lmo: str
    size: float


def lmo_scale_of(norm: str, options: Mapping[str, Any], shape: Sequence[int]) -> LmoScale:
    """Return our lmo and its scale for a group's `norm` and `norm_kwargs` at a parameter's shape.

    >>> lmo_scale_of("Spectral", {}, (8, 2)), lmo_scale_of("Spectral", {"max": True}, (2, 8))
    (LmoScale(lmo='spectral', size=1.0), LmoScale(lmo='spectral', size=2.0))
    """
    if norm == "Auto":
        norm, options = ("BiasRMS", "BiasRMS", "Spectral", "SpectralConv", "SpectralConv")[min(len(shape), 4)], {}
    if norm not in _LMO_SCALES:
        raise ValueError(f"norm {norm!r} is unknown; choose one of {', '.join(_LMO_SCALES)} or Auto")
    low, high, scale_of = _LMO_SCALES[norm]
    if not low <= len(shape) <= high:
        raise ValueError(f"norm {norm!r} is for {low} to {high} dimensions, not for shape {tuple(shape)}")
    return scale_of(shape, options)


def _spectral(shape: Sequence[int], options: Mapping[str, Any]) -> LmoScale:
    ours = math.sqrt(shape[0] / shape[1])
    theirs = ours if options.get("normalized", True) else math.sqrt(shape[0])
    return LmoScale("spectral", (max(1.0, theirs) if options.get("max", False) else theirs) / ours)


def _spectral_conv(shape: Sequence[int], options: Mapping[str, Any]) -> LmoScale:
    taps = shape[2] ** (len(shape) - 2)  # theirs takes the first side for all sides
    return LmoScale("conv", math.sqrt(math.prod(shape[2:])) / taps)


def _sign(shape: Sequence[int], options: Mapping[str, Any]) -> LmoScale:
    return LmoScale("sign" if options.get("normalized", True) else "embedding", 1.0)


def _column(shape: Sequence[int], options: Mapping[str, Any]) -> LmoScale:
    rows, columns = shape
    if options.get("transpose", False):
        return LmoScale("row", columns / rows if options.get("normalized", False) else float(columns))
    return LmoScale("column", 1 / columns if options.get("normalized", False) else 1.0)


def _row(shape: Sequence[int], options: Mapping[str, Any]) -> LmoScale:
    rows, columns = shape
    if options.get("transpose", False):
        return LmoScale("column", 1 / rows if options.get("normalized", True) else 1 / math.sqrt(rows))
    return LmoScale("row", 1.0 if options.get("normalized", True) else math.sqrt(columns))


_LMO_SCALES: dict[str, tuple[int, int, Callable[[Sequence[int], Mapping[str, Any]], LmoScale]]] = {
    "Spectral": (2, 2, _spectral),
    "SpectralConv": (3, 4, _spectral_conv),
    "Sign": (2, 2, _sign),
    "BiasRMS": (0, 1, lambda shape, options: LmoScale("bias", 1.0)),
    "ColNorm": (2, 2, _column),
    "RowNorm": (2, 2, _row),
}
