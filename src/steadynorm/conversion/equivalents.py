"""The same training in other optimizers' words: published Scion, torch's Muon, AdamW; and back."""

import math
from collections.abc import Sequence

from steadynorm import theory
from steadynorm.prediction import ParamSetting
from steadynorm.theory.updates import NEWTON_SCHULZ, UPDATES, newton_schulz_share

MUON_ADJUST = ("original", "match_rms_adamw")
MUON_ITERATION = (NEWTON_SCHULZ, 5)  # torch.optim.Muon's default ns_coefficients and ns_steps


def equivalents(setting: ParamSetting) -> dict[str, dict[str, float | str | bool]]:
    """The same training in other optimizers' words.

    - Scion as published: theta <- (1 - gamma) theta + gamma rho lmo(m), so gamma = eta, rho = 1 / decay
      (back: steadynorm.from_radius).
    - torch.optim.Muon, both of its lr adjustments (matrices only): its update is adjust * polar where ours is
      sqrt(d_out/d_in) polar, while its decay goes by the bare lr.
    - AdamW with the same half-life, the same RMS step a gradient makes in the end, and so the same steady RMS.

    >>> s = ParamSetting(lr=0.01, alpha=0.1, shape=(384, 384), lmo="spectral", weight_decay=0.08)
    >>> round(equivalents(s)["Scion"]["rho"], 6), round(equivalents(s)["torch Muon, original"]["lr"], 6)
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


def muon_factor(adjust: str, shape: Sequence[int]) -> float:
    """What torch.optim.Muon multiplies lr by: sqrt(max(1, d_out/d_in)), or 0.2 sqrt(max(d_out, d_in)).

    >>> muon_factor("original", (1536, 384)), muon_factor("match_rms_adamw", (100, 25))
    (2.0, 2.0)
    """
    if adjust not in MUON_ADJUST:
        raise ValueError(f"adjust={adjust!r} is unknown; choose one of {', '.join(MUON_ADJUST)}")
    rows, columns = shape[0], shape[1]
    return math.sqrt(max(1, rows / columns)) if adjust == "original" else 0.2 * math.sqrt(max(rows, columns))


def muon_update_norm_sq(
    shape: Sequence[int], adjust: str = "original", iteration: tuple[tuple[float, float, float], int] = MUON_ITERATION
) -> float:
    """Return |u|^2 of torch.optim.Muon, its lr adjustment included, for Gaussian momentum.

        muon_factor^2 min(d_out, d_in) * the share that Newton-Schulz reaches of an exact polar factor

    >>> round(muon_update_norm_sq((384, 384)) / 384, 2)
    0.86
    """
    return muon_factor(adjust, shape) ** 2 * min(shape) * newton_schulz_share(shape[0], shape[1], *iteration)


def from_muon(
    lr: float,
    weight_decay: float,
    shape: Sequence[int],
    adjust: str = "original",
    update_norm_sq: float | None = None,
) -> tuple[float, float]:
    """(lr, weight_decay) of torch.optim.Muon's for a matrix of this shape; alpha is 1 - momentum.

    update_norm_sq: U^2 of our lmo, by default that of spectral; of another (blocks, stored transposed) a step is then
    as large as Muon's, |lr u|, if not the same.

    >>> from_muon(0.01, 0.08, (1536, 384))
    (0.01, 0.08)
    """
    unit = UPDATES["spectral"].update_norm_sq(shape) if update_norm_sq is None else update_norm_sq
    ours = lr * muon_factor(adjust, shape) * math.sqrt(min(shape) / unit)
    return ours, lr * weight_decay / ours


def from_adamw(lr: float, weight_decay: float, setting: ParamSetting) -> tuple[float, float]:
    """(lr, weight_decay) with AdamW's half-life and steady RMS, at this setting's shape, lmo, alpha.

    >>> s = ParamSetting(lr=0.01, alpha=0.1, shape=(384, 384), lmo="spectral", weight_decay=0.08)
    >>> adam = equivalents(s)["AdamW"]
    >>> [round(value, 9) for value in from_adamw(adam["lr"], adam["weight_decay"], s)]
    [0.01, 0.08]
    """
    per_lr = theory.effective_lr(1.0, setting.alpha, nesterov=setting.nesterov)
    ours = lr / (per_lr * math.sqrt(setting.update_norm_sq / math.prod(setting.shape)))
    return ours, lr * weight_decay / ours
