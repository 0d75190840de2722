"""Corrected weight decay and ScionC for JAX, as optax transformations. Needs jax and optax, and no torch.

    import steadynorm.jax as sj

    tx = sj.adamc(schedule, weight_decay=0.1, peak_lr=1e-3)             # optax's Adam, Lion, Muon: adamc, lionc, muonc
    tx = sj.scionc(schedule, sj.label_params(params), peak_lr=0.01)     # one rule per kind of layer

The formulas, coefficients and roles are those of the rest of the package.
"""

from steadynorm.extras import describe_missing

try:
    import jax  # noqa: F401  # pyright: ignore[reportMissingImports]
    import optax  # noqa: F401  # pyright: ignore[reportMissingImports]
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(f"steadynorm.jax: {describe_missing(error)}", name=error.name) from None

from steadynorm.jax.chains import adamc, lionc, muonc
from steadynorm.jax.decay_schedule import add_corrected_decay, corrected_decay, tabulate
from steadynorm.jax.factors import polar_factor
from steadynorm.jax.labels import Label, explain, label_params
from steadynorm.jax.scion_transform import ScionState, scion, scionc

__all__ = [
    "Label",
    "ScionState",
    "adamc",
    "add_corrected_decay",
    "corrected_decay",
    "explain",
    "label_params",
    "lionc",
    "muonc",
    "polar_factor",
    "scion",
    "scionc",
    "tabulate",
]
