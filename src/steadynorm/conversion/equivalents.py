"""Convert a setting to the conventions of published Scion, torch's Muon and AdamW, and back."""

import math
from collections.abc import Sequence

from steadynorm import theory
from steadynorm.prediction import ParamSetting
from steadynorm.theory.updates import MUON_ADJUST, UPDATES, muon_factor


def find_equivalents(setting: ParamSetting) -> dict[str, dict[str, float | str | bool]]:
    """Return settings of other optimizers that train the parameter in the same way, by optimizer.

    - Published Scion takes theta <- (1 - gamma) theta + gamma rho lmo(m), so gamma = eta and rho = 1 / decay
      (`steadynorm.from_radius` converts back).
    - torch.optim.Muon, for matrices and each of its lr adjustments: its update is adjust * polar where ours is
      sqrt(d_out/d_in) polar, and its decay is scaled by the unadjusted lr.
    - AdamW gets the same half-life and the same total RMS contribution of a gradient, hence the same steady RMS.

    >>> s = ParamSetting(lr=0.01, alpha=0.1, shape=(384, 384), lmo="spectral", weight_decay=0.08)
    >>> round(find_equivalents(s)["Scion"]["rho"], 6), round(find_equivalents(s)["torch Muon, original"]["lr"], 6)
    (12.5, 0.01)
    """
    decay = setting.decay("linear")
    eta = setting.lr * decay
    out: dict[str, dict[str, float | str | bool]] = {
        "Scion": {"gamma": eta, "rho": 1 / decay, "momentum": setting.alpha, "nesterov": setting.nesterov}
    }
    if setting.entry.name == "spectral" and len(setting.shape) == 2 and setting.blocks == 1:
        for adjust in MUON_ADJUST:
            lr = setting.lr * math.sqrt(setting.shape[0] / setting.shape[1]) / muon_factor(adjust, setting.shape)
            out[f"torch Muon, {adjust}"] = {
                "lr": lr,
                "weight_decay": eta / lr,
                "momentum": 1 - setting.alpha,
                "nesterov": setting.nesterov,
            }
    step = theory.effective_lr(setting.lr, setting.alpha, nesterov=setting.nesterov)
    lr = step * math.sqrt(setting.update_norm_sq / math.prod(setting.shape))
    out["AdamW"] = {"lr": lr, "weight_decay": eta / lr}
    return out


def from_muon(
    lr: float,
    weight_decay: float,
    shape: Sequence[int],
    adjust: str = "original",
    update_norm_sq: float | None = None,
) -> tuple[float, float]:
    """Convert torch.optim.Muon's lr and decay for a matrix of this shape; alpha is 1 - momentum.

    Args:
        lr: Muon's lr.
        weight_decay: Muon's decay.
        shape: Shape of the matrix.
        adjust: Muon's adjust_lr_fn.
        update_norm_sq: U^2 of our lmo, by default spectral's. Under another lmo (row blocks, stored transposed) a step
            is as long as Muon's, |lr u|, though not the same.

    Returns:
        Our (lr, weight_decay).

    >>> from_muon(0.01, 0.08, (1536, 384))
    (0.01, 0.08)
    """
    unit = UPDATES["spectral"].update_norm_sq(shape) if update_norm_sq is None else update_norm_sq
    ours = lr * muon_factor(adjust, shape) * math.sqrt(min(shape) / unit)
    return ours, lr * weight_decay / ours


def from_adamw(lr: float, weight_decay: float, setting: ParamSetting) -> tuple[float, float]:
    """Return (lr, weight_decay) with AdamW's half-life and steady RMS at this setting's shape, lmo and alpha.

    >>> s = ParamSetting(lr=0.01, alpha=0.1, shape=(384, 384), lmo="spectral", weight_decay=0.08)
    >>> adam = find_equivalents(s)["AdamW"]
    >>> [round(value, 9) for value in from_adamw(adam["lr"], adam["weight_decay"], s)]
    [0.01, 0.08]
    """
    per_lr = theory.effective_lr(1.0, setting.alpha, nesterov=setting.nesterov)
    ours = lr / (per_lr * math.sqrt(setting.update_norm_sq / math.prod(setting.shape)))
    return ours, lr * weight_decay / ours
