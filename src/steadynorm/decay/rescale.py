"""Hold the norm of weights that the step of torch's or somebody else's optimizer moves: measure before, scale after.

The step runs without decay and takes |theta|^2 from n to n_v. Afterwards

    fixed       theta <- theta R / |theta|
    balance     theta <- (1 - eta) theta,   eta = gamma D / (2 N*) + (n/N* - 1) / (2 T)
    cautious    theta_i <- (1 - eta) theta_i where m_i theta_i > 0, m being Adam's first moment

D is the mean of (n_v - n) / gamma over T/10 steps: what `hold` has as gamma A - 2 B, measured by norms alone. B is made of
past steps: over gamma^2 it would be huge as long as the lr is small, and decay all of the weights once the lr rises.
Each step reads the weights twice more and writes them once more. No copy of them is kept, and nothing waits for the device.
"""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import Optimizer

from steadynorm.decay.families import Family
from steadynorm.decay.hold import (
    BALANCE_STEPS,
    HOLD_STATE,
    bounded_eta,
    check_balance,
    check_cautious,
    check_hold,
    fresh_hold_state,
    held_norms,
    held_target,
    hold_of,
    is_rescaled,
)
from steadynorm.decay.rule import Group, group_label
from steadynorm.decay.skip import uncorrected_positions
from steadynorm.dtensor import is_dtensor, local
from steadynorm.lengths import l2_lengths
from steadynorm.machine import exact_dtype

MOMENT = "exp_avg"  # where the Adam family keeps the sign of its updates
_MEASURED = 2.0  # beside a mean; 1 in checkpoints whose means are over gamma^2, which are measured again


class _HeldParams(NamedTuple):
    """Parameters of one group with the same shape, dtype, device and placement, during one step."""

    label: str  # how errors name the group
    group: Group  # whose `weight_decay` is lambda_t
    params: list[Tensor]
    lengths: list[Tensor]  # |theta| of each before the step, 0-d
    gamma: float  # the lr
    norm_sq: float | None  # N*; None for the norm of the first step

    def with_gradient(self) -> "_HeldParams":
        """Return the parameters that have a gradient now, and so were moved by the step."""
        moved = [k for k, p in enumerate(self.params) if p.grad is not None]
        return self._replace(params=[self.params[k] for k in moved], lengths=[self.lengths[k] for k in moved])


class Rescaler:
    """Measures the weights before a step and scales them after it, in every group that `is_rescaled`."""

    def __init__(self) -> None:
        self.pending: list[_HeldParams] = []  # what the step under way moves; empty between steps

    @torch._disable_dynamo
    @torch.no_grad()
    def measure(self, optimizer: Optimizer, family: Family) -> None:
        """Measure norms before a step, of every parameter that may get a gradient: a closure may be yet to run."""
        self.pending = []
        for index, group in enumerate(optimizer.param_groups):
            if not is_rescaled(group):
                continue
            label = f"{type(optimizer).__name__}, {group_label(index, group)}"
            try:
                check_hold(group)
                check_cautious(group, family)
                alike = [(params, held_target(group, family, params[0].shape)) for params in _alike(group)]
                if any(target is None for _, target in alike):
                    check_balance(group, family)
            except ValueError as error:
                raise ValueError(f"{label}: {error}") from None
            for params, target in alike:
                self.pending.append(_HeldParams(label, group, params, lengths_of(params), float(group["lr"]), target))

    @torch._disable_dynamo
    @torch.no_grad()
    def apply(self, optimizer: Optimizer) -> None:
        """Scale what the step has moved. With lr = 0, and where a loss scaler skipped the step, no bit changes."""
        pending, self.pending = self.pending, []
        for held in pending:
            held = held.with_gradient()
            if held.params:
                factors = _factors(optimizer, held)
                if held.gamma > 0:
                    scale_(held.params, factors, _moments(optimizer, held))


def scale_(params: Sequence[Tensor], factors: Tensor, moments: Sequence[Tensor] | None = None) -> None:
    """theta <- factor theta, in place: the only function in this module that changes weights.

    Given moments, only elements that agree with these in sign are scaled. The factors, (params,), are in at least fp32
    and not rounded to the dtype of the weights.
    """
    parts = [local(p) for p in params]
    wide = [factor.view([1] * part.ndim) for factor, part in zip(factors.unbind(0), parts, strict=True)]
    if moments is not None:
        for part, factor, moment in zip(parts, wide, moments, strict=True):
            part.mul_(torch.where(_same_sign_mask(part, moment), factor, 1.0))
    else:
        torch._foreach_mul_(parts, wide)


def lengths_of(params: Sequence[Tensor]) -> list[Tensor]:
    """Return |theta| of whole parameters of one kind, 0-d each, in at least fp32: all shards included."""
    parts = [local(p) for p in params]
    return _over_shards(l2_lengths(parts, exact_dtype(params[0])), params[0])


def _factors(optimizer: Optimizer, held: _HeldParams) -> Tensor:
    """Return what to multiply each parameter by, (params,); its state is updated."""
    group, gamma, kind = held.group, held.gamma, hold_of(held.group)
    before = torch.stack(held.lengths)
    stepped = took_step(optimizer, before)
    decayed = torch.full_like(before, 1 - gamma * float(group["weight_decay"]))
    if kind == "decay":
        return torch.where(stepped, decayed, 1.0)
    states = [_state(optimizer, group, p) for p in held.params]
    state, after = torch.stack(states), torch.stack(lengths_of(held.params))
    if kind == "balance":
        assert held.norm_sq is not None
        means = _drift_means(state, before, after, held)
        share = _decayed_share(optimizer, held, after)
        drift = gamma * means.select(1, 0) / (2 * held.norm_sq * share)
        lr = torch.full_like(before, gamma)
        factors = 1 - bounded_eta(drift, before.square(), lr, held.norm_sq, _balance_steps(group))
    else:
        means = held_norms(state, before.square())
        goal = means.clamp(min=0.0) if held.norm_sq is None else torch.full_like(means, held.norm_sq)
        scaled = torch.where(after > 0, goal.sqrt() / torch.where(after > 0, after, 1.0), 1.0)
        factors = torch.where((means < 0) & (held.norm_sq is None), decayed, scaled)
    torch._foreach_copy_(states, list(torch.where(stepped, means, state).unbind(0)))
    return torch.where(stepped & factors.isfinite(), factors, 1.0)


def _drift_means(state: Tensor, before: Tensor, after: Tensor, held: _HeldParams) -> Tensor:
    """Return the mean of (n_v - n) / gamma, and _MEASURED once there is one, (params, 2); the first step sets them."""
    if held.gamma == 0:
        return state
    now = (after - before) * ((after + before) / held.gamma)
    (mean, measured), steps = state.unbind(1), max(1.0, _balance_steps(held.group) / 10)
    mean = torch.where(measured == _MEASURED, mean + (now - mean) / steps, now)
    return torch.stack([mean, torch.full_like(mean, _MEASURED)], 1)


def _decayed_share(optimizer: Optimizer, held: _HeldParams, after: Tensor) -> Tensor | float:
    """Return which share of |theta|^2 decay acts on, (params,); 1 where it acts on all or on nothing."""
    moments = _moments(optimizer, held)
    if moments is None:
        return 1.0
    pairs = zip(map(local, held.params), moments, strict=True)
    lengths = [l2_lengths([part * _same_sign_mask(part, moment)], after.dtype)[0] for part, moment in pairs]
    share = (torch.stack(_over_shards(lengths, held.params[0])) / after).square()
    return torch.where(share > 0, share, 1.0)


def _moments(optimizer: Optimizer, held: _HeldParams) -> list[Tensor] | None:
    """Return Adam's first moments where decay is cautious, else None."""
    if not held.group.get("cautious"):
        return None
    if not all(MOMENT in optimizer.state[p] for p in held.params):
        raise ValueError(
            f"{held.label}: cautious=True reads the sign of updates from state[{MOMENT!r}], which this class does not "
            "keep; set group['cautious'] = False, or use AdamC"
        )
    return [local(optimizer.state[p][MOMENT]) for p in held.params]


def _same_sign_mask(theta: Tensor, moment: Tensor) -> Tensor:
    """Return where weights and updates agree in sign; by signs, because the product of small numbers would be 0."""
    return theta * moment.sign() > 0


def _state(optimizer: Optimizer, group: Group, p: Tensor) -> Tensor:
    """Return the state that holds p, made now if there is none: torch takes one made before its first step for its own."""
    key = HOLD_STATE[hold_of(group)]
    if key not in optimizer.state[p]:
        optimizer.state[p].update(fresh_hold_state(group, p))
    return optimizer.state[p][key]


def took_step(optimizer: Optimizer, like: Tensor) -> Tensor:
    """Return, as a 0-d tensor, whether the step was taken; a loss scaler makes fused kernels skip it on the device."""
    found_inf = getattr(optimizer, "found_inf", None)
    if found_inf is None:
        return torch.ones((), dtype=torch.bool, device=like.device)
    return found_inf.to(like.device).reshape(()) == 0


def _balance_steps(group: Group) -> float:
    return float(group.get("balance_steps") or BALANCE_STEPS)


def _alike(group: Group) -> Iterator[list[Tensor]]:
    """Yield the parameters of a group that it holds, those of one shape, dtype, device and placement together."""
    uncorrected, alike = uncorrected_positions(group), {}
    for k, p in enumerate(group["params"]):
        if (p.requires_grad or p.grad is not None) and p.numel() and k not in uncorrected:
            placed = getattr(p, "device_mesh", None), getattr(p, "placements", None)
            alike.setdefault((p.shape, p.dtype, p.device, placed), []).append(p)
    yield from alike.values()


def _over_shards(lengths: list[Tensor], p: Any) -> list[Tensor]:
    """Return the lengths of whole parameters, given those of this rank's parts; all are placed as p is."""
    if not is_dtensor(p):
        return lengths
    from torch.distributed.tensor import DTensor, Partial, Replicate

    # A strided shard (FSDP2 over tensor parallel) is none to `is_shard`.
    sums = [Replicate() if placement.is_replicate() else Partial() for placement in p.placements]
    squares = DTensor.from_local(torch.stack(lengths).square(), p.device_mesh, sums, run_check=False)
    return list(squares.full_tensor().sqrt().unbind(0))
