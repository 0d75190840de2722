"""Convert a setting to the conventions of published Scion, torch's Muon, AdamW, fixed norms and cautious decay, and back."""

import contextlib
import math
from collections.abc import Sequence

from steadynorm import theory
from steadynorm.prediction import ParamSetting, predict
from steadynorm.theory.updates import MUON_ADJUST, muon_factor
from steadynorm.views import BlockLayout, Blocks


def find_equivalents(setting: ParamSetting) -> dict[str, dict[str, float | str | bool]]:
    """Return settings of other optimizers that train the parameter in the same way, by optimizer.

    - Published Scion takes theta <- (1 - gamma) theta + gamma rho lmo(m), so gamma = eta and rho = 1 / decay
      (`steadynorm.from_radius` converts back).
    - torch.optim.Muon, for matrices and each of its lr adjustments: its update is adjust * polar where ours is
      sqrt(d_out/d_in) polar, and its decay is scaled by the unadjusted lr.
    - AdamW gets the same half-life and the same total RMS contribution of a gradient, hence the same steady RMS.
    - A fixed norm (Hyperball, MuonH, AdamH) is the steady norm by the exact kernel, given per element, and its relative lr
      turns the weights by the same angle per step (`from_fixed_norm` converts back).
    - Cautious decay is the one that reaches this norm, for ScionC with `cautious=True`. The line is left out if there is
      none.

    >>> s = ParamSetting(lr=0.01, alpha=0.1, shape=(384, 384), lmo="spectral", weight_decay=0.08)
    >>> round(find_equivalents(s)["Scion"]["rho"], 6), round(find_equivalents(s)["torch Muon, original"]["lr"], 6)
    (12.5, 0.01)
    """
    decay = setting.decay("linear")
    eta = setting.lr * decay
    out: dict[str, dict[str, float | str | bool]] = {
        "Scion": {"gamma": eta, "rho": 1 / decay, "momentum": setting.alpha, "nesterov": setting.nesterov}
    }
    if setting.entry.name == "spectral" and len(setting.shape) == 2 and BlockLayout.of(setting.blocks).count == 1:
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
    level, momentum = predict(setting).exact, {"alpha": setting.alpha, "nesterov": setting.nesterov}
    out["fixed norm"] = {"relative_lr": theory.fixed_norm_lr(setting.lr, level.steady_norm_sq), "rms": level.rms}
    with contextlib.suppress(ValueError):  # this norm may be out of reach
        cautious = theory.cautious_weight_decay_for(
            level.steady_norm_sq, setting.lr, overlap=setting.kernel, **momentum
        )
        out["cautious decay"] = {"lr": setting.lr, "weight_decay": cautious}
    return out


def from_fixed_norm(
    relative_lr: float,
    rms: float,
    shape: Sequence[int],
    lmo: str = "by-shape",
    *,
    alpha: float = 0.1,
    nesterov: bool = False,
    blocks: Blocks = 1,
) -> ParamSetting:
    """Return ScionC's lr and C^2 for a parameter that a fixed norm trained (Hyperball, MuonH, AdamH).

        theta <- R normalise(theta - lr_rel R normalise(u)),    C^2 = R^2 / U^2,    lr = lr_rel sqrt(C^2)

    With `hold="fixed"` ScionC takes the same steps, if u has the same direction. With decay or balance it turns the
    weights by the same angle per step, and the norm is R on average.

    Args:
        relative_lr: Length of a step over the norm.
        rms: RMS per element of the weights: R over the root of their number. A fixed norm keeps that of the first step.
        shape: Shape of the parameter.
        lmo: ScionC's lmo for it.
        alpha: Weight of the new gradient in the momentum.
        nesterov: Whether the momentum is Nesterov's.
        blocks: Blocks that are treated as separate matrices, as in ScionC.

    Raises:
        ValueError: If a value is out of range.

    >>> setting = from_fixed_norm(0.01, 0.05, (384, 384))  # R^2 = 384^2 / 400, U^2 = 384
    >>> round(setting.steady_norm_sq, 6), round(setting.lr, 6)
    (0.96, 0.009798)
    """
    if not (rms > 0 and math.isfinite(rms)):
        raise ValueError(f"rms {rms}: pass the RMS per element at which the weights are fixed, above 0")
    momentum = {"alpha": alpha, "nesterov": nesterov}
    unit_setting = ParamSetting(1.0, shape=tuple(shape), lmo=lmo, weight_decay=1.0, blocks=blocks, **momentum)
    norm_sq = rms**2 * math.prod(shape) / unit_setting.update_norm_sq
    lr = theory.lr_of_fixed_norm(relative_lr, norm_sq)
    return ParamSetting(lr, shape=tuple(shape), lmo=lmo, steady_norm_sq=norm_sq, blocks=blocks, **momentum)


def from_muon(lr: float, setting: ParamSetting, adjust: str = "original") -> float:
    """Return the lr whose steps are as long as torch.optim.Muon's, |lr u|; `adjust` is its adjust_lr_fn.

    Under the spectral lmo they are the same steps if alpha is 1 - momentum; not with row blocks, or stored transposed.

    >>> s = ParamSetting(lr=1.0, alpha=0.1, shape=(1536, 384), lmo="spectral", weight_decay=0.08)
    >>> from_muon(0.01, s)
    0.01
    """
    return lr * muon_factor(adjust, setting.shape) * math.sqrt(min(setting.shape) / setting.update_norm_sq)


def from_adamw(lr: float, setting: ParamSetting) -> float:
    """Return the lr with AdamW's total RMS contribution of a gradient at this setting's shape, lmo and alpha.

    >>> s = ParamSetting(lr=0.01, alpha=0.1, shape=(384, 384), lmo="spectral", weight_decay=0.08)
    >>> round(from_adamw(find_equivalents(s)["AdamW"]["lr"], s), 9)
    0.01
    """
    per_lr = theory.effective_lr(1.0, setting.alpha, nesterov=setting.nesterov)
    return lr / (per_lr * math.sqrt(setting.update_norm_sq / math.prod(setting.shape)))
