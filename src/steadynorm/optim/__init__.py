"""The optimizers. Each is a torch.optim.Optimizer; all but AdamC share one step loop."""

from steadynorm.optim.adam import AdamC
from steadynorm.optim.lion import LionC
from steadynorm.optim.muon import MuonC
from steadynorm.optim.renormalized import RenormalizedAdamW
from steadynorm.optim.scion import Scion, ScionC
from steadynorm.optim.sgd import SGDC

__all__ = ["SGDC", "AdamC", "LionC", "MuonC", "RenormalizedAdamW", "Scion", "ScionC"]
