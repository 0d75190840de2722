"""Families: all that the theory must know about a kind of optimizer, so that gain, decay and forecast follow."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any, TypeAlias

from steadynorm import theory
from steadynorm.decay.rule import Group
from steadynorm.theory import Filter, Overlap
from steadynorm.theory.kernels import LINEAR
from steadynorm.theory.momentum import check_alpha
from steadynorm.theory.updates import Update, muon_factor, muon_row, muon_update_norm_sq, update_of
from steadynorm.views import Blocks

Momentum: TypeAlias = float | list[float]


class Family:
    """One kind of optimizer: how it reads momentum from a group, its momentum filter, and the size of its updates.

    What the weight norm does follows from these by `theory`. The base class is the family of optimizers about which
    nothing is known but that their decay is decoupled.
    """

    name = "other"  # in errors and checkpoints
    momentum_key: str | None = None  # the group key of the momentum; None if the decay does not depend on it
    exact_lmo: str | None = None  # whose overlap kernel `overlap="exact"` takes
    has_target = False  # whether an absolute `steady_norm_sq` determines the decay
    has_forecast = False  # whether the theory can forecast the norm
    is_linear = False  # whether updates are linear in the momentum, so that forecasts are per element
    keeps_sign = False  # whether the first moment in the state has the signs of the update

    def of(self, group: Group) -> "Family":
        """Return the family of a group: the optimizer's, unless its groups differ in kind."""
        return self

    def momentum(self, group: Group) -> Momentum | None:
        """Return the group's momentum, which is saved as the initial one; None if it does not matter to the norm."""
        return None

    def gain(self, momentum: Any, group: Group) -> float:
        """Return G at this momentum."""
        return 1.0

    def factor(self, group: Group) -> float:
        """Return F_t = G(momentum now) / G(initial momentum); exactly 1 while the momentum has not moved.

        Raises:
            ValueError: If the initial momentum is that of another family, of which a checkpoint was loaded.
        """
        now = self.momentum(group)
        if now is None or now == group["initial_momentum"]:
            return 1.0
        if isinstance(now, Sequence) != isinstance(group["initial_momentum"], Sequence):
            raise ValueError(
                f"initial_momentum={group['initial_momentum']!r} is not a momentum of {self.name}: it belongs to another optimizer"
            )
        return self.gain(now, group) / self.gain(group["initial_momentum"], group)

    def reference(self, group: Group, value: float | Sequence[float]) -> Momentum:
        """Return the momentum at which F = 1, given in the group's own words; raise ValueError if `value` is not one."""
        if self.momentum_key is None:
            raise ValueError(f"reference_momentum: the decay of {self.name} does not follow momentum; leave it out")
        try:
            momentum = self.momentum({**group, self.momentum_key: value})
            self.gain(momentum, group)
        except TypeError:
            raise ValueError(f"reference_momentum={value!r} is not a value for group[{self.momentum_key!r}]") from None
        assert momentum is not None
        return momentum

    def require_target(self) -> None:
        """Raise ValueError if no absolute target determines the decay of this family."""
        if not self.has_target:
            raise ValueError(
                f"steady_norm_sq: the size of {self.name} updates does not follow from lr and decay; leave it out "
                "(the correction is then relative to peak_lr)"
            )

    def target_decay(self, target: float, lr: float, group: Group, kernel: Overlap | None = None) -> float:
        """Return the decay whose steady state is `target`; `kernel` None stands for the paper's linear one.

        In a cautious group it acts only where update and weight agree in sign.
        """
        if not group.get("cautious"):
            self.require_target()
        raise ValueError(f"cautious=True: how {self.name} updates move the weights is unknown; leave it out")

    def alpha(self, group: Group) -> float:
        """Return the weight of the new gradient."""
        raise NotImplementedError(self.name)

    def filter(self, group: Group) -> Filter:
        """Return the momentum as a filter of past gradients."""
        raise NotImplementedError(self.name)

    def effective_lr(self, group: Group) -> float:
        """Return the size of what one gradient does in the end, in units of its update: lr sqrt(G)."""
        return float(group["lr"]) * math.sqrt(self.gain(self.momentum(group), group))

    def kernel(self, shape: Sequence[int], group: Group) -> Overlap:
        """Return the overlap kernel of the updates of a parameter of this shape."""
        return LINEAR

    def update_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        """Return U^2 of a parameter of this shape, None if unknown; of linear updates the number of elements."""
        return float(math.prod(shape))

    def nominal_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        """Return U^2 in the unit of targets: of an exact update for Scion, of the actual one elsewhere; None if unknown."""
        return self.update_norm_sq(shape, group) if self.has_target else None


class _Adam(Family):
    name, has_target, has_forecast, is_linear = "adam", True, True, True
    keeps_sign = True

    def target_decay(self, target: float, lr: float, group: Group, kernel: Overlap | None = None) -> float:
        if group.get("cautious"):
            return theory.cautious_adam_weight_decay_for(target, lr, _betas(group)[0])
        return theory.adam_weight_decay_for(target, lr)

    def alpha(self, group: Group) -> float:
        return 1 - _betas(group)[0]

    def filter(self, group: Group) -> Filter:
        return theory.ema(self.alpha(group))


class _Nadam(_Adam):
    """Adam's, but an update adds the gradient to the first moment, whose signs are then not those of the update."""

    name, has_forecast, keeps_sign = "nadam", False, False


class _Scion(Family):
    """Normalised updates of an exponential moving average."""

    name, momentum_key, has_target, has_forecast = "scion", "alpha", True, True

    def alpha(self, group: Group) -> float:
        return float(group["alpha"])

    def is_nesterov(self, group: Group) -> bool:
        """Return whether the momentum is Nesterov's, where the decay depends on it."""
        return _nesterov(group)

    def momentum(self, group: Group) -> float:
        return self.alpha(group)

    def gain(self, momentum: float, group: Group) -> float:
        return theory.momentum_gain(momentum, nesterov=self.is_nesterov(group))

    def target_decay(self, target: float, lr: float, group: Group, kernel: Overlap | None = None) -> float:
        decay_for = theory.cautious_weight_decay_for if group.get("cautious") else theory.weight_decay_for
        nesterov = self.is_nesterov(group)
        return decay_for(target, lr, self.alpha(group), nesterov=nesterov, overlap=kernel or "linear")

    def filter(self, group: Group) -> Filter:
        return theory.ema(self.alpha(group), nesterov=_nesterov(group))

    def kernel(self, shape: Sequence[int], group: Group) -> Overlap:
        update, blocks = _scion_update(shape, group)
        return update.overlap(shape, blocks=blocks)

    def update_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        update, blocks = _scion_update(shape, group)
        return update.update_norm_sq(shape, blocks=blocks) * self.length_share(shape, group)

    def length_share(self, shape: Sequence[int], group: Group) -> float:
        """Return |u|^2 over that of an exact update, which Newton-Schulz falls short of; for Gaussian momentum."""
        update, blocks = _scion_update(shape, group)
        return update.length_share(shape, blocks, group["polar"], group["polar_steps"])

    def nominal_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        update, blocks = _scion_update(shape, group)
        return update.update_norm_sq(shape, blocks=blocks)


class _Muon(_Scion):
    name, momentum_key, exact_lmo = "muon", "momentum", "spectral"

    def alpha(self, group: Group) -> float:
        """Return 1 - momentum; 1 in a group without momentum (a Muon's auxiliary Adam groups).

        Somebody else's `alpha` in the group means something else and is not read.
        """
        return 1 - float(group.get("momentum", 0.0))

    def is_nesterov(self, group: Group) -> bool:
        if "nesterov" not in group and "momentum" in group:
            raise ValueError(
                "the decay depends on whether its momentum is Nesterov's, which the group does not say; "
                "set group['nesterov'] = True (Keller Jordan's Muon) or False"
            )
        return _nesterov(group)

    def kernel(self, shape: Sequence[int], group: Group) -> Overlap:
        return theory.overlap("spectral", shape)

    def update_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        """Return |u|^2 of torch's Muon with its lr adjustment; None for another Muon, whose scale is unknown."""
        if not {"ns_coefficients", "ns_steps", "adjust_lr_fn"} <= group.keys():
            return None
        iteration = tuple(group["ns_coefficients"]), group["ns_steps"]
        return muon_update_norm_sq(shape, group["adjust_lr_fn"] or "original", iteration)

    def nominal_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        return self.update_norm_sq(shape, group)


class _OwnMuon(_Muon):
    """Our Muon, which knows blocks, stacks and convolutions, and in whose groups the polar iteration is named."""

    def _row(self, shape: Sequence[int], group: Group) -> Update:
        adjust = group.get("adjust_lr_fn") or "original"
        row = muon_row(group["lmo"], shape)
        return dataclasses.replace(row, matrix_norm_sq=lambda m, n: muon_factor(adjust, (m, n)) ** 2 * min(m, n))

    def kernel(self, shape: Sequence[int], group: Group) -> Overlap:
        return self._row(shape, group).overlap(shape, blocks=group["blocks"])

    def update_norm_sq(self, shape: Sequence[int], group: Group) -> float | None:
        row, blocks = self._row(shape, group), group["blocks"]
        share = row.length_share(shape, blocks, group["polar"], group["polar_steps"])
        return row.update_norm_sq(shape, blocks=blocks) * share


class _MuonAndAdam(Family):
    """Groups of two kinds, each of which is described by `of`: Muon's where `use_muon` is true, Adam's elsewhere."""

    name, has_target, has_forecast = "muon and adam", True, True

    def of(self, group: Group) -> Family:
        return OWN_MUON if group["use_muon"] else ADAM


class _Lion(Family):
    name, momentum_key, has_target, has_forecast = "lion", "betas", True, True

    def momentum(self, group: Group) -> list[float]:
        return _betas(group)

    def gain(self, momentum: list[float], group: Group) -> float:
        return theory.lion_gain(*momentum)

    def target_decay(self, target: float, lr: float, group: Group, kernel: Overlap | None = None) -> float:
        decay_for = theory.cautious_lion_weight_decay_for if group.get("cautious") else theory.lion_weight_decay_for
        return decay_for(target, lr, *_betas(group))

    def alpha(self, group: Group) -> float:
        return 1 - _betas(group)[1]

    def filter(self, group: Group) -> Filter:
        return theory.lion(*_betas(group))

    def kernel(self, shape: Sequence[int], group: Group) -> Overlap:
        return theory.overlap("lion", None)


class _SGD(Family):
    name, has_forecast, is_linear = "sgd", True, True

    def momentum(self, group: Group) -> float:
        return self.alpha(group)

    def gain(self, momentum: float, group: Group) -> float:
        return check_alpha(momentum) ** -2 if group.get("trace") else 1.0

    def target_decay(self, target: float, lr: float, group: Group, kernel: Overlap | None = None) -> float:
        """Return Adam's cautious decay: SGD's update is a moving average as well, and the variance of gradients the unit."""
        if not group.get("cautious"):
            self.require_target()
        scale = 1 / self.alpha(group) if group["trace"] else 1.0
        return scale * theory.cautious_adam_weight_decay_for(target, scale * lr, 1 - self.alpha(group))

    def alpha(self, group: Group) -> float:
        return float(group["alpha"])

    def filter(self, group: Group) -> Filter:
        nesterov, alpha = _nesterov(group), self.alpha(group)
        return theory.trace(1 - alpha, nesterov=nesterov) if group["trace"] else theory.ema(alpha, nesterov=nesterov)

    def effective_lr(self, group: Group) -> float:
        return float(group["lr"]) / (self.alpha(group) if group["trace"] else 1.0)


ADAM, NADAM, OTHER, SGD, MUON, SCION, LION = _Adam(), _Nadam(), Family(), _SGD(), _Muon(), _Scion(), _Lion()
OWN_MUON, MUON_AND_ADAM = _OwnMuon(), _MuonAndAdam()
FAMILIES: dict[str, Family] = {family.name: family for family in (ADAM, NADAM, OTHER, SGD, MUON, SCION, LION)}


def _betas(group: Group) -> list[float]:
    return [float(beta) for beta in group["betas"]]


def _nesterov(group: Group) -> bool:
    return bool(group.get("nesterov", False))


def _scion_update(shape: Sequence[int], group: Group) -> tuple[Update, Blocks]:
    """Return the row of the lmo table that a Scion group uses for this shape, and the blocks it sees."""
    update = update_of(group["lmo"], shape)
    return update, 1 if update.row_separable else group["blocks"]
