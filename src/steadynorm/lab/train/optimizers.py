"""Build optimizers and their schedules from a configuration."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from steadynorm import schedule as schedules
from steadynorm import theory
from steadynorm.decay.foreign import correct
from steadynorm.decay.hold import refuse_hold
from steadynorm.groups.builder import param_groups
from steadynorm.lab.train.config import Optim, Schedule
from steadynorm.optim import SGDC, AdamC, LionC, MuonC, RenormalizedAdamW, Scion, ScionC
from steadynorm.prediction import LrPlan
from steadynorm.schedule import StepFunction
from steadynorm.scheduler import Scheduler

_SCION = ("scion", "scionc")
_NOT_HELD = ("adamw", "renormalized-adamw", "muon")  # optimizers without hold and cautious


def build(
    model: nn.Module, optim: Optim, schedule: Schedule, steps: int, *, mesh: Any = None
) -> list[tuple[Optimizer, Scheduler]]:
    """Return the optimizers, each with its scheduler; muon has a second one for what is not a hidden matrix.

    With DDP, `mesh` holds the processes over which Scion, ScionC, MuonC and LionC shard their state and work.
    """
    if optim.name in _NOT_HELD:
        refuse_hold(optim.name, {"hold": optim.hold, "cautious": optim.cautious})
    if optim.name in ("muon", "muon-corrected"):
        optimizers = _muon(model, optim)
    else:
        make = _scion if optim.name in _SCION else _muonc if optim.name == "muonc" else _adam_family
        optimizers = [make(model, optim, mesh)]
    return [(optimizer, _scheduler(optimizer, optim, schedule, steps)) for optimizer in optimizers]


def _scion(model: nn.Module, optim: Optim, mesh: Any) -> Optimizer:
    corrected = optim.name == "scionc"
    decay = None if corrected else _constant_decay(optim)
    groups = param_groups(
        model,
        lr=optim.lr,
        output_lr=optim.output_lr,
        output_weight_decay=optim.output_weight_decay,
        output_bias=optim.output_bias,
        alpha=optim.alpha,
        steady_norm_sq=optim.steady_norm_sq if corrected else None,
        weight_decay=decay,
        nesterov=optim.nesterov,
    )
    output = next(group for group in groups if group["name"] == "output")
    if optim.output_alpha is not None:
        output["alpha"] = optim.output_alpha
    common: dict[str, Any] = {
        "lr": optim.lr, "alpha": optim.alpha, "nesterov": optim.nesterov, "own_time": optim.own_time, "mesh": mesh,
        **_polar(optim),
    }  # fmt: skip
    for group in groups:  # the output layer has a target at which to hold its norm only if it is corrected
        if group is not output or (corrected and optim.correct_output):
            group |= _hold(optim)
    if decay is not None:
        return Scion(groups, weight_decay=decay, **common)
    if optim.correct_output:  # the target is the norm that the constant decay leads to at the peak
        decay, output["weight_decay"] = output["weight_decay"], None
        output["steady_norm_sq"] = theory.steady_norm_sq(
            output["lr"], decay, output["alpha"], nesterov=optim.nesterov, limit=True
        )
    return ScionC(groups, steady_norm_sq=optim.steady_norm_sq, overlap=optim.overlap, **common)


def _constant_decay(optim: Optim) -> float:
    decay, target = optim.weight_decay, optim.steady_norm_sq  # recipes have the target, whoever sets the decay
    return theory.weight_decay_for(target, optim.lr, optim.alpha, nesterov=optim.nesterov) if decay is None else decay


def _adam_family(model: nn.Module, optim: Optim, mesh: Any) -> Optimizer:
    decay = 0.1 if optim.weight_decay is None else optim.weight_decay
    groups = param_groups(
        model, kind="adam", lr=optim.lr, output_lr=optim.output_lr, weight_decay=decay,
        output_weight_decay=optim.output_weight_decay,
    )  # fmt: skip
    common: dict[str, Any] = {"lr": optim.lr, "weight_decay": decay}
    if optim.name == "sgdc":
        return SGDC(groups, alpha=optim.alpha, hold=optim.hold, cautious=optim.cautious, **common)
    if optim.name == "lionc":
        return LionC(groups, betas=(1 - optim.alpha, optim.betas[1]), mesh=mesh, **_hold(optim), **common)
    common |= {"betas": optim.betas, "eps": optim.eps}
    if optim.name == "adamw":
        for group in groups:
            group.pop("corrected", None)
        return torch.optim.AdamW(groups, fused=True, **common)
    if optim.name == "adamc":
        return AdamC(groups, **_hold(optim), **common)
    return RenormalizedAdamW(groups, **common)


def _hold(optim: Optim) -> dict[str, Any]:
    steps = {"balance_steps": optim.balance_steps} if optim.hold == "balance" else {}
    return {"hold": optim.hold, "cautious": optim.cautious, **steps}


def _polar(optim: Optim) -> dict[str, Any]:
    return {"polar": optim.polar} | ({} if optim.polar == "svd" else {"polar_steps": optim.polar_steps})


def _muonc(model: nn.Module, optim: Optim, mesh: Any) -> Optimizer:
    decay = 0.1 if optim.weight_decay is None else optim.weight_decay
    groups = param_groups(
        model, kind="muon", lr=optim.lr, adam_lr=optim.output_lr, weight_decay=decay,
        output_weight_decay=optim.output_weight_decay,
    )  # fmt: skip
    return MuonC(
        groups, lr=optim.lr, momentum=1 - optim.alpha, nesterov=optim.nesterov, weight_decay=decay, betas=optim.betas,
        eps=optim.eps, mesh=mesh, **_polar(optim), **_hold(optim),
    )  # fmt: skip


def _muon(model: nn.Module, optim: Optim) -> list[Optimizer]:
    """Return torch's Muon for the hidden matrices, and AdamW with the output's lr for the rest."""
    decay = 0.1 if optim.weight_decay is None else optim.weight_decay
    output_lr = optim.lr if optim.output_lr is None else optim.output_lr
    groups = param_groups(model, lr=optim.lr)
    hidden = [pair for group in groups if group["lmo"] == "spectral" for pair in group["params"]]
    rest = [pair for group in groups if group["lmo"] != "spectral" for pair in group["params"]]
    muon = torch.optim.Muon(
        hidden, lr=optim.lr, weight_decay=decay, momentum=1 - optim.alpha, nesterov=optim.nesterov,
    )  # fmt: skip
    others = torch.optim.AdamW(rest, lr=output_lr, betas=optim.betas, eps=optim.eps, weight_decay=0.0, fused=True)
    return [correct(muon, **_hold(optim)) if optim.name == "muon-corrected" else muon, others]


def _scheduler(optimizer: Optimizer, optim: Optim, schedule: Schedule, steps: int) -> Scheduler:
    """Schedule lr in every group, alpha and the target in all but the output's."""
    ratio, values = schedule.plan(steps).ratio, {}
    if schedule.steady_norm_sq_end is not None:
        if optim.name != "scionc":
            raise ValueError(f"schedule.steady_norm_sq_end needs scionc, not {optim.name}")
        moved = schedules.between(optim.steady_norm_sq, schedule.steady_norm_sq_end, ratio)
        values["steady_norm_sq"] = _hidden(optimizer, moved)
    if schedule.momentum == "constant":
        return Scheduler(optimizer, scale={"lr": ratio}, value=values)
    if optim.name not in _SCION:
        raise ValueError(f"schedule.momentum={schedule.momentum!r} needs scion or scionc, not {optim.name}")
    if schedule.momentum == "linear":
        alpha: StepFunction = schedules.linear_alpha(optim.alpha, schedule.alpha_end, steps)
        lr: StepFunction = ratio
    else:
        after = LrPlan(steps - schedule.warmup, 0, schedule.lr, schedule.final).ratio
        matched = schedules.MatchedMomentum(
            optim.alpha, schedule.alpha_end, after, warmup=schedule.warmup, nesterov=optim.nesterov,
            match="gamma-prime" if schedule.momentum == "matched-gamma-prime" else "gamma-eff",
        )  # fmt: skip
        alpha, lr = matched.alpha, matched.lr
    if schedule.decay_by_lr_alone:
        if optim.name != "scionc" or values:
            raise ValueError(
                f"schedule.decay_by_lr_alone needs scionc without steady_norm_sq_end, not {optim.name} with "
                f"steady_norm_sq_end={schedule.steady_norm_sq_end}: both set the target"
            )
        values["steady_norm_sq"] = _hidden(optimizer, _scaled_by_gain(optim, alpha))
    return Scheduler(
        optimizer,
        scale={"lr": _hidden(optimizer, lr, output=ratio)},
        value={"alpha": _hidden(optimizer, alpha), **values},
    )


def _scaled_by_gain(optim: Optim, alpha: StepFunction) -> StepFunction:
    """Return C^2 G(alpha_t) / G(alpha_0), which cancels the momentum factor in lambda_t = G / (2 C^2) gamma_t."""
    start = theory.momentum_gain(optim.alpha, nesterov=optim.nesterov)

    def target(step: int) -> float:
        return optim.steady_norm_sq * theory.momentum_gain(alpha(step), nesterov=optim.nesterov) / start

    return target


def _hidden(optimizer: Optimizer, function: StepFunction, output: StepFunction | None = None) -> Mapping[str, Any]:
    """Return the function for every group but the output's, which gets `output`."""
    return {group["name"]: output if group["name"] == "output" else function for group in optimizer.param_groups}
