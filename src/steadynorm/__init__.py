"""steadynorm: corrected decoupled weight decay for PyTorch.

The decay that keeps the weight norm where you put it while learning rate and momentum change:
`correct(optimizer)` for the optimizer you have, `ScionC(param_groups(model))` for ours, `theory` to know before
training what the weights will do.
"""

from steadynorm import schedule, theory
from steadynorm.external import correct, uncorrect
from steadynorm.groups import explain, from_radius, param_groups
from steadynorm.monitor import Monitor
from steadynorm.moving import Converted, convert
from steadynorm.optim import SGDC, AdamC, LionC, RenormalizedAdamW, Scion, ScionC
from steadynorm.scheduler import Scheduler

__version__ = "0.1.0.dev0"

__all__ = [
    "SGDC",
    "AdamC",
    "Converted",
    "LionC",
    "Monitor",
    "RenormalizedAdamW",
    "Scheduler",
    "Scion",
    "ScionC",
    "convert",
    "correct",
    "explain",
    "from_radius",
    "param_groups",
    "schedule",
    "theory",
    "uncorrect",
]
