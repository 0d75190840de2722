"""steadynorm: corrected decoupled weight decay for PyTorch.

The decay that keeps the weight norm where you put it while learning rate and momentum change:
`correct(optimizer)` for the optimizer you have, `ScionC(param_groups(model))` for ours, `theory` to know before
training what the weights will do.

Names are imported when they are first used: `import steadynorm`, `theory` and `schedule` need no torch.
"""

from importlib import import_module  # noqa: TID251
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from steadynorm import schedule, theory
    from steadynorm.conversion.converter import Converted, convert
    from steadynorm.decay.foreign import correct, fill_scalars, uncorrect
    from steadynorm.groups.builder import from_radius, param_groups
    from steadynorm.groups.explanation import explain
    from steadynorm.monitor import Monitor
    from steadynorm.optim import SGDC, AdamC, LionC, MuonC, RenormalizedAdamW, Scion, ScionC
    from steadynorm.scheduler import Scheduler

__version__ = "0.1.0.dev0"

__all__ = [
    "SGDC",
    "AdamC",
    "Converted",
    "LionC",
    "Monitor",
    "MuonC",
    "RenormalizedAdamW",
    "Scheduler",
    "Scion",
    "ScionC",
    "convert",
    "correct",
    "explain",
    "fill_scalars",
    "from_radius",
    "param_groups",
    "schedule",
    "theory",
    "uncorrect",
]

_MODULES = {
    "groups.explanation": ("explain",),
    "decay.foreign": ("correct", "fill_scalars", "uncorrect"),
    "groups.builder": ("from_radius", "param_groups"),
    "monitor": ("Monitor",),
    "conversion.converter": ("Converted", "convert"),
    "optim": ("SGDC", "AdamC", "LionC", "MuonC", "RenormalizedAdamW", "Scion", "ScionC"),
    "scheduler": ("Scheduler",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}


def __getattr__(name: str) -> object:
    if name in ("schedule", "theory"):
        return import_module(f"steadynorm.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'steadynorm' has no attribute {name!r}")
    value = getattr(import_module(f"steadynorm.{_HOMES[name]}"), name)
    globals()[name] = value  # the next look-up does not come here
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
