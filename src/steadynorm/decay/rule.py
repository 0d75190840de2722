"""What a parameter group asks of its weight decay, and lambda_t that follows. This module owns the group keys.

    Constant    lambda_t = lambda
    Relative    lambda_t = lambda (gamma_t / gamma_peak) F_t    keeps the norm that the peak lr and lambda give
    Target      lambda_t = the decay whose steady state is C^2

F_t is what a changing momentum does to the norm: G(alpha_t)/G(alpha_0) for normalised updates (Muon, Lion), 1 where the
total contribution of a gradient does not depend on it (Adam family, EMA SGD), (alpha_0/alpha_t)^2 for trace SGD.

Groups of Scion say it by `weight_decay`: a number is constant, None asks for the target `steady_norm_sq`. All other
groups say it by `corrected`, with `base_weight_decay`, `peak_lr` and the rest of `KEYS` beside it. Everything that a
resumed run needs is in the group.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

from steadynorm.theory.equilibrium import UnreachableError, check_reachable, eta_of, relative_decay

if TYPE_CHECKING:
    from steadynorm.decay.families import Family
    from steadynorm.theory import Overlap

Group: TypeAlias = dict[str, Any]

UNCORRECTED = "uncorrected"  # positions in the group of parameters that `correct` skips
KEYS = (
    "base_weight_decay",
    "peak_lr",
    "peak_lr_given",
    "initial_momentum",
    "corrected",
    "steady_norm_sq",
    "overlap",
    UNCORRECTED,
)
OVERLAPS = ("linear", "exact")
_SCHEDULED = ("max_lr", "initial_lr")  # a group's largest lr in the words of OneCycle and of torch's other schedulers


@dataclass(frozen=True)
class Constant:
    """The decay stays what it is."""

    weight_decay: float

    @property
    def label(self) -> str:
        return f"constant {self.weight_decay:g}" if self.weight_decay else "none"


@dataclass(frozen=True)
class Relative:
    """The decay is `weight_decay` at the peak lr and follows the lr from there; the peak is 0 until it is known."""

    weight_decay: float
    peak_lr: float
    peak_is_guessed: bool

    @property
    def label(self) -> str:
        return f"corrected, {self.weight_decay:g} at peak lr"


@dataclass(frozen=True)
class Target:
    """The decay is the one whose steady state is `steady_norm_sq`, in the units that `symbol` names."""

    steady_norm_sq: float
    overlap: str = "linear"
    symbol: str = "steady_norm_sq"

    @property
    def label(self) -> str:
        return f"corrected, {self.symbol} = {self.steady_norm_sq:g}"


DecayRule: TypeAlias = Constant | Relative | Target


def decay_rule(group: Mapping[str, Any], p: Any = None) -> DecayRule:
    """Return what a group asks of its decay, or, for one of its parameters `p`, what that parameter gets.

    >>> decay_rule({"weight_decay": None, "steady_norm_sq": 1.1875})
    Target(steady_norm_sq=1.1875, overlap='linear', symbol='C^2')
    >>> decay_rule({"weight_decay": 0.05, "corrected": True, "base_weight_decay": 0.1, "peak_lr": 1e-3}).label
    'corrected, 0.1 at peak lr'
    """
    target, overlap = group.get("steady_norm_sq"), group.get("overlap") or "linear"
    if group.get("weight_decay", 0.0) is None:
        if target is None:
            raise ValueError("weight_decay=None asks for a target; set steady_norm_sq")
        return Target(float(target), overlap, "C^2")
    if not group.get("corrected"):
        return Constant(float(group.get("weight_decay", 0.0)))
    base = float(group.get("base_weight_decay", group["weight_decay"]))
    if base == 0 or (p is not None and is_uncorrected(group, p)):
        return Constant(base)
    if target is not None:
        return Target(float(target), overlap)
    return Relative(base, float(group.get("peak_lr") or 0.0), not group.get("peak_lr_given", True))


def weight_decay_now(
    group: Group, family: "Family", kernel: "Overlap | None" = None, length_share: float = 1.0
) -> float:
    """Return lambda_t of one group, which depends only on its keys: this step's lr and momentum among them.

    For a target, `kernel` is the overlap kernel (None: the paper's linear one), and `length_share` is |u|^2 over that of an
    exact update.

    Raises:
        ValueError: If lr lambda_t exceeds 1, or the lr exceeds a guessed peak.

    >>> from steadynorm.decay.families import ADAM
    >>> group = {"lr": 5e-4, "peak_lr": 1e-3, "corrected": True, "weight_decay": 0.1, "base_weight_decay": 0.1}
    >>> weight_decay_now(group, ADAM)
    0.05
    """
    lr, rule, family = float(group["lr"]), decay_rule(group), family.of(group)
    if isinstance(rule, Constant):
        return rule.weight_decay
    if isinstance(rule, Target):
        decay = family.target_decay(rule.steady_norm_sq / length_share, lr, group, kernel)
        return check_reachable(rule.steady_norm_sq, lr, decay)
    peak = rule.peak_lr
    if rule.peak_is_guessed and lr > peak * (1 + 1e-6):
        raise ValueError(
            f"lr={lr} exceeds the guessed peak_lr={peak}; pass peak_lr=<the schedule's maximum>, or put it in the group"
        )
    if group.get("cautious") and peak > 0:
        decay = _cautious_decay(rule, group, family)
    else:
        decay = relative_decay(rule.weight_decay, lr, peak, family.factor(group)) if peak > 0 else 0.0
    eta_of(lr, decay)
    return decay


def _cautious_decay(rule: Relative, group: Group, family: "Family") -> float:
    """Return the cautious decay that keeps the norm which the peak lr and the base decay give."""
    lr = float(group["lr"])
    try:
        return family.target_decay(relative_target(rule, group, family), lr, group)
    except UnreachableError:
        raise ValueError(
            f"weight_decay={rule.weight_decay:g} is too strong for cautious=True: at lr={lr:g} no cautious decay keeps the norm that "
            f"it gives at peak_lr={rule.peak_lr:g}, because it leaves out about half of the weights; lower weight_decay or the lr"
        ) from None


def relative_target(rule: Relative, group: Group, family: "Family") -> float:
    """Return the C^2 that the peak lr and the base decay give, as eta -> 0."""
    momentum = group.get("initial_momentum")
    gain = 1.0 if momentum is None else family.gain(momentum, group)
    return rule.peak_lr * gain / (2 * rule.weight_decay)


def is_live(group: Mapping[str, Any]) -> bool:
    """Return whether the corrected decay of torch's or somebody else's step is applied from a tensor (see `live`)."""
    return bool(group.get("capturable") and group.get("corrected") and group.get("base_weight_decay"))


def applied_weight_decay(optimizer: Any, group: Mapping[str, Any], p: Any) -> float:
    """Return the decay that an optimizer's last step applied to a parameter of one of its groups."""
    if (own := getattr(optimizer, "weight_decay_of", None)) is not None:
        return own(p)
    uncorrected = group.get("corrected") and is_uncorrected(group, p)
    return float(group.get("base_weight_decay" if uncorrected else "weight_decay") or 0.0)


def is_uncorrected(group: Mapping[str, Any], p: Any) -> bool:
    """Return whether `correct` skips a parameter of a group that it corrects otherwise."""
    return any(group["params"][k] is p for k in group.get(UNCORRECTED) or ())


def correction_keys(group: Group, family: "Family", *, peak_lr: float | None = None) -> Group:
    """Return the correction's keys for a group, keeping those it already has. Nothing is written."""
    if family.name not in ("scion", "other"):
        refuse_scion_groups(group)
    if group.get("weight_decay", 0.0) is None:
        raise ValueError("weight_decay=None is not a number to correct; set one")
    keys = {key: group[key] for key in KEYS if group.get(key) is not None}
    keys.setdefault("base_weight_decay", float(group.get("weight_decay", 0.0)))
    keys.setdefault("corrected", True)
    if (momentum := family.of(group).momentum(group)) is not None:
        keys.setdefault("initial_momentum", momentum)
    if peak_lr is not None:
        keys.update(peak_lr=float(peak_lr), peak_lr_given=True)
    elif "peak_lr" not in keys:
        guess = group.get("lr") if (peak := scheduled_peak(group)) is None else peak
        if guess is None:
            raise ValueError("it has no lr that its decay could follow; set one")
        keys.update(peak_lr=float(guess), peak_lr_given=False)
    if keys.setdefault("peak_lr_given", True):
        check_peak(keys["peak_lr"])
    return keys


def check_peak(peak_lr: float) -> None:
    """Raise ValueError for a peak that somebody gave and that decay cannot be relative to."""
    if not (peak_lr > 0 and math.isfinite(peak_lr)):
        raise ValueError(f"peak_lr={peak_lr} must be positive and finite")


def names_peak(group: Group) -> bool:
    """Return whether a group or its scheduler names its peak; else its lr is all there is to guess from."""
    return group.get("peak_lr") is not None or scheduled_peak(group) is not None


def scheduled_peak(group: Group) -> Any:
    """Return the peak by what a scheduler wrote into the group, or None if it wrote nothing."""
    return next((group[key] for key in _SCHEDULED if group.get(key) is not None), None)


def guess_again(group: Group) -> None:
    """Take a guessed peak from the schedule of a group that was loaded: the guess was about another run."""
    if not group.get("peak_lr_given", True) and (peak := scheduled_peak(group)) is not None:
        group["peak_lr"] = float(peak)


def guesses_peak(group: Group) -> bool:
    """Return whether a group's decay follows a peak that was guessed from the lr that it has now."""
    rule = decay_rule(group)
    if not isinstance(rule, Relative) or scheduled_peak(group) is not None:
        return False
    return rule.peak_is_guessed and rule.peak_lr == float(group["lr"])


def group_label(index: int, group: Mapping[str, Any]) -> str:
    """Return how errors name a group.

    >>> group_label(2, {"name": "head"}), group_label(0, {})
    ('group 2 ("head")', 'group 0')
    """
    return f'group {index} ("{group["name"]}")' if "name" in group else f"group {index}"


def name_of(group: Group, k: int) -> str:
    """Return how errors name a group's k-th parameter."""
    from torch.nn.parameter import is_lazy

    names, p = group.get("param_names"), group["params"][k]
    return repr(names[k]) if names else f"parameter {k}" + ("" if is_lazy(p) else f" (shape {tuple(p.shape)})")


def refuse_scion_groups(group: Mapping[str, Any]) -> None:
    """Raise ValueError for a group made for Scion: its lr and target mean something else elsewhere.

    A group for MuonC may have an lmo as well; it says which kind it is by `use_muon`.
    """
    if group.get("lmo") is not None and group.get("use_muon") is None:
        raise ValueError(
            f"it has lmo={group['lmo']!r}, so it is for Scion and ScionC; use param_groups(model, kind='adam')"
        )


def refuse_idle_target(where: str, groups: Iterable[Mapping[str, Any]]) -> None:
    """Raise ValueError if every group that has a target is without decay, because it would stay without."""
    aimed = [group for group in groups if group.get("steady_norm_sq") is not None]
    if aimed and not any(group["base_weight_decay"] for group in aimed):
        raise ValueError(
            f"{where}: steady_norm_sq={aimed[0]['steady_norm_sq']} would do nothing, because groups with weight_decay=0 "
            "stay without decay; give them a weight_decay (any above 0: the target takes its place)"
        )
