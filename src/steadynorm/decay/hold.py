"""How a group holds its weight norm: by open-loop decay, by balanced decay, or fixed; and the decay that does it.

    decay      eta_t = lr lambda_t, from lr and momentum only (the paper's correction)
    balance    eta_t = [gamma^2 A - 2 gamma B] / (2 N*) + (|theta|^2/N* - 1) / (2 T)
    fixed      theta - gamma u, scaled to the norm R

A and B are means of |u|^2 and <theta, u> over T/10 steps, and N* is the target of |theta|^2. The first term cancels
what updates do to the norm, whether gradients are independent of the weights or not; the second returns a norm that is
off over about T steps. (Means over T steps would trail a falling lr, and the norm would be off by 2 T times that lag.)
With T = 1 the norm is pinned to first order, which is where "balance" and "fixed" meet; with T without bound and
expectations in place of the means it is the corrected decay.

Everything is per parameter and stays on the device. The functions take stacks of parameters, (batch,) for each number.
"""

import inspect
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer

from steadynorm.decay.rule import Constant, Group, Target, decay_rule, name_of, relative_target
from steadynorm.machine import exact_dtype

if TYPE_CHECKING:
    from steadynorm.decay.families import Family

HOLDS = ("decay", "balance", "fixed")
HOLD_KEYS = ("hold", "balance_steps", "cautious")
HOLD_STATE = {"balance": "balance_means", "fixed": "held_norm_sq"}  # the key of a parameter's state, by group["hold"]
BALANCE_STEPS = 20
_MOST_GROWTH, _MOST_DECAY = -0.1, 0.5  # bounds of a balanced eta


def keys_of_correct(optimizer: Optimizer) -> list[str]:
    """Return the hold keys that `correct` writes for this optimizer; its step reads the ones that it takes itself."""
    arguments = inspect.signature(type(optimizer)).parameters
    return [key for key in HOLD_KEYS if key not in arguments]


def check_hold(group: Group) -> None:
    """Raise ValueError if a group asks for a way to hold the norm that does not exist or makes no sense."""
    hold, steps = group.get("hold", "decay"), group.get("balance_steps", BALANCE_STEPS)
    if hold not in HOLDS:
        raise ValueError(f"hold={hold!r} is unknown; choose one of {', '.join(map(repr, HOLDS))}")
    if not (isinstance(steps, int | float) and steps >= 1):
        raise ValueError(f"balance_steps={steps!r} must be a number of steps, 1 or more")
    if hold == "fixed" and group.get("cautious"):
        raise ValueError("cautious=True would do nothing, because hold='fixed' replaces decay; leave one of them out")


def refuse_hold(optimizer: str, group: Group) -> None:
    """Raise ValueError if a group asks an optimizer that sets the norm by its own rule to hold it in another way."""
    if group.get("hold", "decay") != "decay" or group.get("cautious"):
        raise ValueError(
            f"hold={group.get('hold', 'decay')!r}, cautious={bool(group.get('cautious'))}: {optimizer} has neither; leave "
            "them out, or use AdamC"
        )


def check_balance(group: Group, family: "Family") -> None:
    """Raise ValueError if a group asks for a balance whose target is unknown."""
    if hold_of(group) != "balance":
        return
    if (k := next((k for k, p in enumerate(group["params"]) if is_lazy(p)), None)) is not None:
        raise ValueError(
            f"hold='balance' needs the shape of every parameter, and {name_of(group, k)} has none yet (a lazy module); run the "
            "model once first"
        )
    if any(target_norm_sq(group, family, p.shape) is None for p in group["params"]):
        raise ValueError(
            f"hold='balance' needs a norm to aim at, and the size of {family.name} updates does not follow from lr and decay; "
            "use hold='fixed', which keeps the norm of the first step"
        )


def check_cautious(group: Group, family: "Family") -> None:
    """Raise ValueError if a hook is to decay cautiously around a step that does not show the signs of its updates."""
    if group.get("cautious") and not family.keeps_sign:
        raise ValueError(
            "cautious=True needs the sign of each update, and only Adam, AdamW and RAdam keep it in their state, not "
            f"{family.name}; leave it out, or use AdamC, ScionC or LionC"
        )


def refuse_idle_balance(where: str, groups: Sequence[Group]) -> None:
    """Raise ValueError if groups ask for balance and every one of them has constant decay, so that none has a target."""
    asking = [group for group in groups if group.get("hold") == "balance"]
    if asking and all(hold_of(group) == "decay" for group in asking):
        raise ValueError(
            f"{where}: hold='balance' would do nothing, because decay is constant in every group that asks for it; "
            "use corrected decay (ScionC, or a weight_decay above 0), or hold='fixed'"
        )


def hold_of(group: Mapping[str, Any]) -> str:
    """Return how a group's norm is held. Balance has no target where decay is constant, so decay stays what it is.

    >>> hold_of({"hold": "balance", "weight_decay": 0.1}), hold_of({"hold": "fixed", "weight_decay": 0.1})
    ('decay', 'fixed')
    """
    hold = group.get("hold", "decay")
    return "decay" if hold == "balance" and isinstance(decay_rule(group), Constant) else hold


def is_rescaled(group: Mapping[str, Any]) -> bool:
    """Return whether `Rescaler` takes the place of the decay in the step of torch's or somebody else's optimizer."""
    return hold_of(group) != "decay" or bool(group.get("cautious"))


def target_norm_sq(group: Group, family: "Family", shape: Sequence[int]) -> float | None:
    """Return N*, the |theta|^2 that a group's decay aims at for a parameter of this shape; None if it has no target.

    An absolute target is C^2 U^2. Decay relative to the peak keeps the norm that the peak lr and the base decay give.

    >>> from steadynorm.decay.families import ADAM
    >>> keys = {"corrected": True, "weight_decay": 0.1, "base_weight_decay": 0.1, "peak_lr": 1e-3}
    >>> round(target_norm_sq(keys, ADAM, (10, 10)), 9)  # 100 elements of mean square lr / (2 lambda)
    0.5
    """
    rule, family = decay_rule(group), family.of(group)
    update_sq = family.nominal_norm_sq(shape, group)
    if isinstance(rule, Constant) or update_sq is None:
        return None
    if isinstance(rule, Target):
        return rule.steady_norm_sq * update_sq
    return relative_target(rule, group, family) * update_sq


def held_target(group: Group, family: "Family", shape: Sequence[int]) -> float | None:
    """Return the |theta|^2 at which a parameter is held; None for that of its first step.

    A fixed norm is a target's only where the target is absolute.
    """
    if hold_of(group) == "fixed" and not isinstance(decay_rule(group), Target):
        return None
    return target_norm_sq(group, family, shape)


def hold_state_keys(group: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the keys of `fresh_hold_state`."""
    return (HOLD_STATE[group["hold"]],) if group.get("hold") in HOLD_STATE else ()


def fresh_hold_state(group: Mapping[str, Any], p: Tensor) -> dict[str, Tensor]:
    """Return the state that a parameter needs to be held, at zero: two means for balance, one norm for fixed."""
    hold = group.get("hold", "decay")
    if hold not in HOLD_STATE:
        return {}
    return {HOLD_STATE[hold]: torch.zeros(2 if hold == "balance" else (), dtype=exact_dtype(p), device=p.device)}


class StepSums(NamedTuple):
    """What one step knows about its parameters, (batch,) each. Sums go over whole parameters, all shards included."""

    along: Tensor  # <theta, u>, of the update as it is taken
    update_sq: Tensor  # |u|^2 likewise
    norm_sq: Tensor  # |theta|^2 before the step
    decayed_sq: Tensor  # the part of it on which decay acts: slices may wait, and cautious decay leaves elements out


class Hold(NamedTuple):
    """How some parameters of one group are held."""

    kind: str  # "balance" or "fixed"
    state: list[Tensor]  # of each parameter, as `fresh_hold_state` makes it
    norm_sq: Tensor | None  # N*, 0-d; None for the norm of the first step
    steps: float  # T

    @classmethod
    def of(cls, group: Group, state: Mapping[str, list[Tensor]], norm_sq: Tensor | None) -> "Hold | None":
        """Return how parameters of a group are held, given their state; None if only decay holds them."""
        if (kind := hold_of(group)) == "decay":
            return None
        return cls(kind, state[HOLD_STATE[kind]], norm_sq, float(group["balance_steps"]))

    def part(self, which: slice) -> "Hold":
        """Return the hold of some of the parameters."""
        return self._replace(state=self.state[which])

    def rates(self, sums: StepSums, eta: Tensor, gamma: Tensor) -> tuple[Tensor, Tensor]:
        """Return eta and gamma, (batch,), of theta <- (1 - eta) theta - gamma u; the state is updated.

        `eta` is the open-loop decay, for parameters that cannot be held. With lr = 0 nothing changes.
        """
        state, ones = torch.stack(self.state), torch.ones_like(sums.norm_sq)
        eta, gamma = eta * ones, gamma * ones  # on the device: `where` would wait for the copy of a number on the CPU
        if self.kind == "balance":
            assert self.norm_sq is not None
            means = update_means(state, sums, gamma, self.steps)
            rate = balanced_eta(means, sums, gamma, self.norm_sq.to(means.dtype), self.steps)
            rates = rate, gamma
        else:
            means = held_norms(state, sums.norm_sq)
            scale = fixed_scale(sums, gamma, means if self.norm_sq is None else self.norm_sq.to(means.dtype))
            is_free = (means < 0) & (self.norm_sq is None)
            rates = torch.where(is_free, eta, 1 - scale), gamma * torch.where(is_free, 1.0, scale)
        torch._foreach_copy_(self.state, list(means.unbind(0)))
        return rates


def update_means(means: Tensor, sums: StepSums, gamma: Tensor, steps: float) -> Tensor:
    """Return the means of |u|^2 and <theta, u>, (batch, 2), after this step; the first step sets them.

    Where decay acts on a share of the weights, both count in full per unit of that share. A parameter that took no step
    keeps its means.
    """
    share = decayed_share(sums)
    now = torch.stack([sums.update_sq, sums.along], 1) / torch.where(share > 0, share, 1.0).unsqueeze(1)
    started = means.narrow(1, 0, 1) > 0
    took_step = ((sums.update_sq > 0) & (gamma > 0)).unsqueeze(1)
    return torch.where(took_step, torch.where(started, means + (now - means) / max(1.0, steps / 10), now), means)


def balanced_eta(means: Tensor, sums: StepSums, gamma: Tensor, norm_sq: Tensor, steps: float) -> Tensor:
    """Return the eta that keeps |theta|^2 at `norm_sq`, (batch,): below zero where a layer has to grow.

    >>> zero, one = torch.zeros(1), torch.ones(1)
    >>> balanced_eta(torch.tensor([[4.0, 0.0]]), StepSums(zero, 4 * one, one, one), torch.tensor(0.1), one[0], 100)
    tensor([0.0200])
    """
    update_sq, along = means.unbind(1)
    drift = (gamma * gamma * update_sq - 2 * gamma * along) / (2 * norm_sq)
    return bounded_eta(torch.where(sums.update_sq > 0, drift, 0.0), sums.norm_sq, gamma, norm_sq, steps)


def bounded_eta(drift: Tensor, now: Tensor, gamma: Tensor, norm_sq: Tensor | float, steps: float) -> Tensor:
    """Return a bounded eta: what cancels the drift, and what returns the norm from |theta|^2 now to N* in about T steps.

    `drift` is how much updates add to |theta|^2 per step, over 2 N*. With lr = 0, eta is 0.
    """
    error = (now / norm_sq - 1).clamp(-1.0, 1.0)
    eta = (drift + error / (2 * steps)).clamp(_MOST_GROWTH, _MOST_DECAY)
    return torch.where(gamma > 0, eta.nan_to_num(0.0), 0.0)


def held_norms(held: Tensor, norm_sq: Tensor) -> Tensor:
    """Return the |theta|^2 at which parameters are held, (batch,): that of their first step; -1 if it cannot be held."""
    first = torch.where((norm_sq > 0) & norm_sq.isfinite(), norm_sq, -1.0)
    return torch.where(held == 0, first, held)


def fixed_scale(sums: StepSums, gamma: Tensor, norm_sq: Tensor) -> Tensor:
    """Return the factor of theta - gamma u after which |theta|^2 is `norm_sq`, (batch,).

    Where slices wait, those that do not are scaled so that their share of the squared norm stays what it is.
    """
    share = decayed_share(sums)
    after = share * sums.norm_sq - 2 * gamma * sums.along + gamma * gamma * sums.update_sq
    scale = (norm_sq * share / torch.where(after > 0, after, 1.0)).clamp(min=0.0).sqrt()
    return torch.where((after > 0) & (share > 0) & (gamma > 0), scale, 1.0)


def decayed_share(sums: StepSums) -> Tensor:
    """Return which share of |theta|^2 decay acts on, (batch,); 1 for weights that are zero."""
    return torch.where(sums.norm_sq > 0, sums.decayed_sq / sums.norm_sq, 1.0)
