"""Build optimizers and their schedules from a configuration."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from steadynorm import schedule as schedules
from steadynorm import theory
from steadynorm.decay.foreign import correct
from steadynorm.groups.builder import param_groups
from steadynorm.lab.train.config import Optim, Schedule
from steadynorm.optim import SGDC, AdamC, LionC, RenormalizedAdamW, Scion, ScionC
from steadynorm.schedule import StepFunction
from steadynorm.scheduler import Scheduler

_ADAM_FAMILY = ("adamw", "adamc", "renormalized-adamw", "lionc", "sgdc")


def build(
    model: nn.Module, optim: Optim, schedule: Schedule, steps: int, *, mesh: Any = None
) -> list[tuple[Optimizer, Scheduler]]:
    """Return the optimizers, each with its scheduler; muon has a second one for what is not a hidden matrix.

    Args:
        model: Model to train.
        optim: Optimizer and its settings.
        schedule: Schedules of lr, alpha and the target.
        steps: Length of the run.
        mesh: With DDP, the processes over which Scion, ScionC and LionC shard their state and work.
    """
    if optim.name in ("scion", "scionc"):
        optimizers: list[Optimizer] = [_scion(model, optim, mesh)]
    elif optim.name in _ADAM_FAMILY:
        optimizers = [_adam_family(model, optim, mesh)]
    else:
        optimizers = _muon(model, optim)
    return [(optimizer, _scheduler(optimizer, optim, schedule, steps)) for optimizer in optimizers]


def _scion(model: nn.Module, optim: Optim, mesh: Any) -> Optimizer:
    corrected, target, decay = optim.name == "scionc", optim.steady_norm_sq, optim.weight_decay
    if decay is None:
        decay = theory.weight_decay_for(target, optim.lr, optim.alpha, nesterov=optim.nesterov)
    groups = param_groups(
        model,
        lr=optim.lr,
        output_lr=optim.output_lr,
        output_weight_decay=optim.output_weight_decay,
        output_bias=optim.output_bias,
        alpha=optim.alpha,
        steady_norm_sq=target if corrected else None,
        weight_decay=None if corrected else decay,
        nesterov=optim.nesterov,
    )
    if optim.output_alpha is not None:
        next(group for group in groups if group["name"] == "output")["alpha"] = optim.output_alpha
    common: dict[str, Any] = {
        "lr": optim.lr, "alpha": optim.alpha, "nesterov": optim.nesterov, "polar_steps": optim.polar_steps, "mesh": mesh,
    }  # fmt: skip
    if not corrected:
        return Scion(groups, weight_decay=decay, **common)
    if optim.correct_output:
        _correct_output(groups, optim)
    return ScionC(groups, steady_norm_sq=target, overlap=optim.overlap, **common)


def _correct_output(groups: list[dict[str, Any]], optim: Optim) -> None:
    """Replace the output layer's constant decay by a target: the norm this decay leads to at the peak."""
    for group in groups:
        if group["name"] == "output":
            decay, group["weight_decay"] = group["weight_decay"], None
            group["steady_norm_sq"] = theory.steady_norm_sq(
                group["lr"], decay, group["alpha"], nesterov=optim.nesterov, limit=True
            )


def _adam_family(model: nn.Module, optim: Optim, mesh: Any) -> Optimizer:
    decay = 0.1 if optim.weight_decay is None else optim.weight_decay
    groups = param_groups(
        model, kind="adam", lr=optim.lr, output_lr=optim.output_lr, weight_decay=decay,
        output_weight_decay=optim.output_weight_decay,
    )  # fmt: skip
    adam: dict[str, Any] = {"lr": optim.lr, "betas": optim.betas, "eps": optim.eps, "weight_decay": decay}
    if optim.name == "adamw":
        for group in groups:
            group.pop("corrected", None)
        return torch.optim.AdamW(groups, fused=True, **adam)
    if optim.name == "adamc":
        return AdamC(groups, **adam)
    if optim.name == "renormalized-adamw":
        return RenormalizedAdamW(groups, **adam)
    if optim.name == "lionc":
        betas = (1 - optim.alpha, optim.betas[1])
        return LionC(groups, lr=optim.lr, betas=betas, weight_decay=decay, mesh=mesh)
    return SGDC(groups, lr=optim.lr, alpha=optim.alpha, weight_decay=decay)


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
    return [correct(muon) if optim.name == "muon-corrected" else muon, others]


def _scheduler(optimizer: Optimizer, optim: Optim, schedule: Schedule, steps: int) -> Scheduler:
    """Schedule lr in every group, alpha and the target in all but the output's."""
    ratio = lr_ratio(schedule, steps)
    if schedule.momentum == "constant":
        return Scheduler(optimizer, scale={"lr": ratio}, value=_targets(optimizer, optim, schedule, ratio))
    if optim.name not in ("scion", "scionc"):
        raise ValueError(f"schedule.momentum={schedule.momentum!r} needs scion or scionc, not {optim.name}")
    if schedule.momentum == "linear":
        alpha: StepFunction = schedules.linear_alpha(optim.alpha, schedule.alpha_end, steps)
        lr: StepFunction = ratio
    else:
        after = lr_ratio(Schedule(schedule.lr, 0, schedule.final), steps - schedule.warmup)
        matched = schedules.MatchedMomentum(
            optim.alpha, schedule.alpha_end, after, warmup=schedule.warmup, nesterov=optim.nesterov,
            match="gamma-prime" if schedule.momentum == "matched-gamma-prime" else "gamma-eff",
        )  # fmt: skip
        alpha, lr = matched.alpha, matched.lr
    values = _targets(optimizer, optim, schedule, ratio)
    if schedule.decay_by_lr_alone:
        values["steady_norm_sq"] = _hidden(optimizer, _scaled_by_gain(optim, alpha))
    return Scheduler(
        optimizer,
        scale={"lr": _hidden(optimizer, lr, output=ratio)},
        value={"alpha": _hidden(optimizer, alpha), **values},
    )


def lr_ratio(schedule: Schedule, steps: int) -> StepFunction:
    """Return lr / peak as a function of the step."""
    if schedule.lr == "constant":
        return schedules.constant(warmup=schedule.warmup)
    kind = schedules.cosine if schedule.lr == "cosine" else schedules.linear
    return kind(steps, warmup=schedule.warmup, final=schedule.final)


def _targets(optimizer: Optimizer, optim: Optim, schedule: Schedule, ratio: StepFunction) -> dict[str, Any]:
    if schedule.steady_norm_sq_end is None:
        return {}
    if optim.name != "scionc":
        raise ValueError(f"schedule.steady_norm_sq_end needs scionc, not {optim.name}")
    moved = schedules.between(optim.steady_norm_sq, schedule.steady_norm_sq_end, ratio)
    return {"steady_norm_sq": _hidden(optimizer, moved)}


def _scaled_by_gain(optim: Optim, alpha: StepFunction) -> StepFunction:
    """Return C^2 G(alpha_t) / G(alpha_0), which cancels the momentum factor in lambda_t = G / (2 C^2) gamma_t."""
    start = theory.momentum_gain(optim.alpha, nesterov=optim.nesterov)

    def target(step: int) -> float:
        return optim.steady_norm_sq * theory.momentum_gain(alpha(step), nesterov=optim.nesterov) / start

    return target


def _hidden(optimizer: Optimizer, function: StepFunction, output: StepFunction | None = None) -> Mapping[str, Any]:
    """Return the function for every group but the output's, which gets `output`."""
    return {group["name"]: output if group["name"] == "output" else function for group in optimizer.param_groups}
