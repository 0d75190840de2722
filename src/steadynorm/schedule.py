"""Step -> value: ratios, matched momentum, and a scheduler that writes any key of the parameter groups.

A step function takes the number of completed steps, so update t = 1..T uses f(t-1); past the end it holds its last
value. The ones made here are frozen dataclasses: they compare, print and pickle as what they are.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from steadynorm import theory

StepFunction = Callable[[int], float]
PerGroup = StepFunction | Sequence[StepFunction | None] | Mapping[str, StepFunction | None]
Group = dict[str, Any]

# part of the decay done -> part of the ratio left
_SHAPES: dict[str, Callable[[float], float]] = {
    "linear": lambda done: 1 - done,
    "cosine": lambda done: (1 + math.cos(math.pi * done)) / 2,
}
_GAIN_POWER = {"gamma-eff": 0.5, "gamma-prime": 1.0}  # gamma G^power is what follows the ratio


@dataclass(frozen=True)
class Ratio:
    """(step+1)/warmup for `warmup` steps, 1 for `hold` steps, then `decay` steps down to `final` (0: no decay)."""

    warmup: int = 0
    hold: int = 0
    decay: int = 0
    final: float = 0.0
    shape: str = "linear"

    def __call__(self, step: int) -> float:
        if step < self.warmup:
            return (step + 1) / self.warmup
        since = step - self.warmup - self.hold
        left = _SHAPES[self.shape](min(since / self.decay, 1.0)) if since > 0 and self.decay else 1.0
        return left + (1 - left) * self.final


@dataclass(frozen=True)
class Between:
    """ratio(step) * start + (1 - ratio(step)) * end."""

    start: float
    end: float
    ratio: StepFunction

    def __call__(self, step: int) -> float:
        ratio = self.ratio(step)
        return ratio * self.start + (1 - ratio) * self.end


def constant(warmup: int = 0) -> Ratio:
    """Ratio 1, after a linear warmup: t/warmup at update t.

    >>> [constant(warmup=4)(step) for step in range(5)]
    [0.25, 0.5, 0.75, 1.0, 1.0]
    """
    _check_count("warmup", warmup)
    return Ratio(warmup)


def cosine(total: int, warmup: int = 0, final: float = 0.0) -> Ratio:
    """Half a cosine from 1 to `final`: (1 + cos(pi (t-1)/T))/2 at update t; after a warmup, over what is left of T.

    >>> [round(cosine(4)(step), 3) for step in range(6)]
    [1.0, 0.854, 0.5, 0.146, 0.0, 0.0]
    """
    return constant_then_decay(total, _after_warmup(total, warmup), warmup, final, "cosine")


def linear(total: int, warmup: int = 0, final: float = 0.0) -> Ratio:
    """A straight line from 1 to `final`: 1 - (t-1)/T at update t; after a warmup, over what is left of T.

    >>> [linear(6, warmup=2)(step) for step in range(7)]
    [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    return constant_then_decay(total, _after_warmup(total, warmup), warmup, final, "linear")


def constant_then_decay(
    total: int, decay: int, warmup: int = 0, final: float = 0.0, shape: Literal["linear", "cosine"] = "linear"
) -> Ratio:
    """Ratio 1 until the last `decay` steps, then a line or half a cosine to `final` (trapezoid, WSD).

    >>> [constant_then_decay(8, decay=4, warmup=2)(step) for step in range(9)]
    [0.5, 1.0, 1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
    """
    hold = _after_warmup(total, warmup) - decay
    _check_count("decay", decay)
    _check_choice("shape", shape, _SHAPES)
    if hold < 0:
        raise ValueError(f"decay={decay} and warmup={warmup} exceed total={total}; shorten one or raise total")
    if not 0 <= final <= 1:
        raise ValueError(f"final={final} is outside [0, 1]; it is the ratio left at the end")
    return Ratio(warmup, hold, decay, final, shape)


def between(start: float, end: float, ratio: StepFunction) -> Between:
    """From `start` (ratio 1) to `end` (ratio 0): r start + (1 - r) end.

    >>> [between(3.0, 1.0, linear(4))(step) for step in range(5)]
    [3.0, 2.5, 2.0, 1.5, 1.0]
    """
    return Between(start, end, ratio)


def linear_alpha(start: float, end: float, total: int) -> Between:
    """alpha in a straight line from `start` to `end` (the paper's stress test: 0.01 to 1).

    >>> [linear_alpha(0.5, 1.0, 4)(step) for step in range(5)]
    [0.5, 0.625, 0.75, 0.875, 1.0]
    """
    _check_alpha("start", start)
    _check_alpha("end", end)
    return between(start, end, linear(total))


def cosine_norm(start: float, end: float, total: int) -> Between:
    """A norm target that moves as a cosine lr does: C_t^2 = r C_0^2 + (1 - r) C_T^2, r = (1 + cos(pi (t-1)/T))/2.

    >>> [round(cosine_norm(4.0, 1.0, 2)(step), 6) for step in range(3)]
    [4.0, 2.5, 1.0]
    """
    for name, norm in (("start", start), ("end", end)):
        if not 0 < norm < math.inf:
            raise ValueError(f"{name}={norm} is no steady_norm_sq; pass a finite number above 0")
    return between(start, end, cosine(total))


@dataclass(frozen=True)
class MatchedMomentum:
    """Decay the effective learning rate by raising alpha: gamma_eff(t) = ratio(t) gamma_eff(0) at every step.

        G(alpha_t) = r_t^2 G(alpha_0);   plain momentum: s = sqrt((2 - alpha_0)/alpha_0) r_t,  alpha_t = 2/(1 + s^2)

    gamma stays until alpha has reached alpha_max; from there alpha stays and gamma takes over. A warmup inside
    `ratio` is followed like anything else, down from alpha_max, so `warmup` ramps lr instead, alpha at its start.

    Args:
        alpha_0, alpha_max: where alpha starts and stops, 0 < alpha_0 <= alpha_max <= 1.
        ratio: step -> [0, 1], what gamma_eff follows, counted from the end of warmup.
        warmup: steps of linear lr warmup before that.
        nesterov: as the optimizer has it: it changes G.
        match: "gamma-prime" has gamma' = gamma G follow the ratio, the paper's erroneous match, for comparison only.

    Step functions: `.alpha` gives values, `.lr` gives ratios to the group's own lr.

    >>> matched = MatchedMomentum(0.1, 0.5, cosine(1000))
    >>> round(matched.alpha(0), 6), round(matched.alpha(500), 6), matched.alpha(900)
    (0.1, 0.347826, 0.5)
    >>> matched.lr(500), round(matched.lr(900), 6)
    (1.0, 0.061586)
    """

    alpha_0: float
    alpha_max: float
    ratio: StepFunction
    warmup: int = 0
    nesterov: bool = False
    match: Literal["gamma-eff", "gamma-prime"] = "gamma-eff"

    def __post_init__(self) -> None:
        _check_alpha("alpha_0", self.alpha_0)
        _check_alpha("alpha_max", self.alpha_max)
        _check_count("warmup", self.warmup)
        _check_choice("match", self.match, _GAIN_POWER)
        if self.alpha_max < self.alpha_0:
            raise ValueError(f"alpha_max={self.alpha_max} is below alpha_0={self.alpha_0}; alpha only rises, swap them")

    @property
    def alpha(self) -> "MatchedPart":
        return MatchedPart(self, 0)

    @property
    def lr(self) -> "MatchedPart":
        return MatchedPart(self, 1)

    def at(self, step: int) -> tuple[float, float]:
        """alpha and the lr ratio at this step."""
        if step < self.warmup:
            return self.alpha_0, (step + 1) / self.warmup
        ratio = float(self.ratio(step - self.warmup))
        if not 0 <= ratio <= 1 + 1e-9:  # NaN too
            raise ValueError(f"MatchedMomentum: ratio is {ratio} at step {step}, outside [0, 1]; let 1 be its maximum")
        ratio = min(ratio, 1.0)
        power, start = _GAIN_POWER[self.match], theory.momentum_gain(self.alpha_0, nesterov=self.nesterov)
        least = theory.momentum_gain(self.alpha_max, nesterov=self.nesterov)
        gain = start * ratio ** (1 / power)
        if gain <= least:
            return self.alpha_max, ratio * (start / least) ** power
        return alpha_for_gain(gain, self.alpha_0, self.alpha_max, nesterov=self.nesterov), 1.0


@dataclass(frozen=True)
class MatchedPart:
    """One of the two step functions of a MatchedMomentum."""

    matched: MatchedMomentum
    index: int

    def __call__(self, step: int) -> float:
        return self.matched.at(step)[self.index]


def alpha_for_gain(gain: float, low: float, high: float, *, nesterov: bool = False) -> float:
    """The alpha in [low, high] with momentum_gain(alpha) = gain: 2/(1 + gain), Nesterov by bisection.

    Both gains fall strictly from alpha = 0 to 1 (Nesterov's with slope 0 at 1), so there is one such alpha.

    >>> round(alpha_for_gain(19.0, 0.01, 1.0), 12)
    0.1
    """
    if not nesterov:
        return min(max(2 / (1 + gain), low), high)
    while low < (middle := (low + high) / 2) < high:
        if theory.momentum_gain(middle, nesterov=True) > gain:
            low = middle
        else:
            high = middle
    return low


class Scheduler(LRScheduler):
    """Write any key of the parameter groups at every step; a torch LRScheduler, so trainers know how to drive it.

        scale:  group[key] = f(step) * group["initial_" + key]        value:  group[key] = f(step)

    The base of a scaled key is captured once, in the group: `optimizer.state_dict()` carries it, and a resumed group
    is not based on its decayed value. Written at construction (step 0), by `step()` and by `load_state_dict()`.
    The functions are not saved: build the Scheduler with them again, then load.

    Args:
        optimizer: whose groups are written.
        scale, value: key -> a step function for all groups that have the key (not None); or a list, one per group;
            or a dict by the groups' "name", "*" for all not named. In both, None leaves a group alone.
        last_epoch: as in torch: the last step already done, -1 for a new run.

    >>> import torch
    >>> weight = torch.nn.Parameter(torch.zeros(2))
    >>> optimizer = torch.optim.SGD([{"params": [weight], "alpha": 0.1}], lr=0.02)
    >>> matched = MatchedMomentum(0.1, 1.0, linear(4))
    >>> scheduler = Scheduler(optimizer, scale={"lr": matched.lr}, value={"alpha": matched.alpha})
    >>> optimizer.step(); scheduler.step()
    >>> optimizer.param_groups[0]["lr"], round(optimizer.param_groups[0]["alpha"], 4)
    (0.02, 0.1711)
    """

    def __init__(
        self,
        optimizer: Optimizer,
        *,
        scale: Mapping[str, PerGroup] | None = None,
        value: Mapping[str, PerGroup] | None = None,
        last_epoch: int = -1,
    ) -> None:
        self.scale, self.value = dict(scale or {}), dict(value or {})
        if both := self.scale.keys() & self.value.keys():
            raise ValueError(f"Scheduler: {sorted(both)} in scale= and in value=; keep one of the two")
        if not self.scale and not self.value:
            raise ValueError('Scheduler: nothing to write; pass e.g. scale={"lr": cosine(1000)}')
        self.optimizer = optimizer
        for where, group, key, _ in self._assignments():
            if last_epoch != -1 and key in self.scale and f"initial_{key}" not in group:
                raise ValueError(f'{where}: last_epoch={last_epoch} but no "initial_{key}"; load the optimizer first')
        super().__init__(optimizer, last_epoch)

    def get_lr(self) -> list[float | Tensor]:
        """Write this step's values, all computed before the first is written; every torch stepping path calls this."""
        values = [(group, key, self._value(where, group, key, f)) for where, group, key, f in self._assignments()]
        _own_tensors(self.optimizer.param_groups, {key for _, key, _ in values})
        for group, key, value in values:
            if isinstance(group[key], Tensor):
                group[key].fill_(value)
            else:
                group[key] = value
        return [_copy(group["lr"]) for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        """The step count, and which keys of how many groups are written: numbers and strings only."""
        return {"last_epoch": self.last_epoch, "_step_count": self._step_count, **self._identity()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go to the saved step and write its values."""
        mine, saved = self._identity(), {key: state_dict.get(key) for key in self._identity()}
        if saved != mine:
            raise ValueError(f"Scheduler: saved with {saved}, loaded into {mine}; build it as it was, then load")
        self.last_epoch, self._step_count = state_dict["last_epoch"], state_dict["_step_count"]
        self._last_lr = self.get_lr()

    def _identity(self) -> dict[str, Any]:
        return {"scale": sorted(self.scale), "value": sorted(self.value), "groups": len(self.optimizer.param_groups)}

    def _value(self, where: str, group: Group, key: str, function: StepFunction) -> float:
        value = float(function(self.last_epoch))
        if not 0 <= value < math.inf:
            raise ValueError(f"{where} is given {value} at step {self.last_epoch}; return a finite number, 0 or more")
        if key in self.scale:
            value *= float(group.setdefault(f"initial_{key}", _copy(group[key])))
        return value

    def _assignments(self) -> Iterator[tuple[str, Group, str, StepFunction]]:
        """(where, group, key, function) for all that is written."""
        groups: list[Group] = self.optimizer.param_groups
        for key, spec in (self.scale | self.value).items():
            functions, written = _per_group(key, spec, groups), 0
            for index, (group, function) in enumerate(zip(groups, functions, strict=True)):
                meant = isinstance(spec, Sequence) or (isinstance(spec, Mapping) and group.get("name") in spec)
                if function is None or (group.get(key) is None and not meant):
                    continue
                where = f'group {index} ("{group["name"]}")' if "name" in group else f"group {index}"
                if isinstance(group.get(key), bool) or not isinstance(group.get(key), float | int | Tensor):
                    raise ValueError(f"{where}: {key}={group.get(key)!r} is no number to schedule; pass None for it")
                if not callable(function):
                    raise TypeError(f"{where}: {key} is given {function!r}; pass a function of the step")
                written += 1
                yield f"{where}: {key}", group, key, function
            if not written:
                known = sorted({name for group in groups for name in group} - {"params"})
                raise ValueError(f"Scheduler: no group has a number under {key!r}; the groups' keys are {known}")


def _per_group(key: str, spec: PerGroup, groups: list[Group]) -> Sequence[StepFunction | None]:
    if isinstance(spec, Mapping):
        names = [group.get("name", "*") for group in groups]
        if unknown := set(spec) - {*names, "*"}:
            raise ValueError(f'Scheduler: {key} for {sorted(unknown)}, but the groups\' "name" are {names}')
        return [spec.get(name, spec.get("*")) for name in names]
    if isinstance(spec, Sequence):
        if len(spec) != len(groups):
            raise ValueError(f"Scheduler: {key} has {len(spec)} functions for {len(groups)} groups; pass one for each")
        return spec
    return [spec] * len(groups)


def _own_tensors(groups: list[Group], keys: set[str]) -> None:
    """Groups that took a tensor lr from the optimizer's default share one object: writing one would write all."""
    seen: set[int] = set()
    for group in groups:
        for key in keys & group.keys():
            if isinstance(group[key], Tensor):
                group[key] = group[key].clone() if id(group[key]) in seen else group[key]
                seen.add(id(group[key]))


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else float(value)


def _after_warmup(total: int, warmup: int) -> int:
    _check_count("total", total, least=1)
    _check_count("warmup", warmup)
    if warmup > total:
        raise ValueError(f"warmup={warmup} exceeds total={total}; total counts the warmup, so raise it")
    return total - warmup


def _check_count(name: str, count: int, least: int = 0) -> None:
    if not isinstance(count, int) or count < least:
        raise ValueError(f"{name}={count!r} is no number of steps; pass an int, at least {least}")


def _check_alpha(name: str, alpha: float) -> None:
    if not 0 < alpha <= 1:
        raise ValueError(f"{name}={alpha} is outside (0, 1]; alpha is the weight of the new gradient, 1 - momentum")


def _check_choice(name: str, choice: str, known: Collection[str]) -> None:
    if choice not in known:
        raise ValueError(f"{name}={choice!r} is unknown; choose from {sorted(known)}")
