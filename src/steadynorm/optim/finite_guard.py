"""Skip non-finite gradients in an optimizer whose step is torch's own."""

from typing import NamedTuple

import torch
from torch import Tensor
from torch._utils import _flatten_dense_tensors

from steadynorm.decay.rule import Group
from steadynorm.dtensor import is_dtensor, local
from steadynorm.machine import exact_dtype
from steadynorm.optim.placement import DerivedCache
from steadynorm.optim.state import StateKeeper
from steadynorm.optim.validation import NonFiniteGradientError, check_dense_gradients, check_unchanged

_SMALL = 1 << 12  # gradients of fewer elements are checked together: one call each would cost more than the copy


class _SameKind(NamedTuple):
    """Parameters of a group that have a gradient, of one device and dtype, DTensors or not."""

    group: int
    device: torch.device
    dtype: torch.dtype
    is_sharded: bool
    params: list[Tensor]

    def grads(self) -> list[Tensor]:
        grads = [p.grad for p in self.params if p.grad is not None]
        return [local(grad) for grad in grads] if self.is_sharded else grads


class NonFiniteSkipper(StateKeeper):
    """Mixin: hides non-finite gradients from torch's step, so that it leaves those parameters alone.

    A subclass calls `withhold_non_finite` before torch's step and `give_back` after it. Its state has a `skipped`
    counter per parameter, and its groups have `fused` and `check_finite`.
    """

    def moment_keys(self, group: Group) -> tuple[str, ...]:
        """Return the state keys whose shape and dtype torch's step relies on."""
        raise NotImplementedError

    @torch._disable_dynamo
    def withhold_non_finite(self) -> list[tuple[Tensor, Tensor]]:
        """Take away gradients that are not finite, and those whose strides a fused step cannot read; return them."""
        kinds = self._cache.get(self, ("amsgrad",), self._find_kinds)
        if not all("skipped" in self.state[p] for kind in kinds for p in kind.params):  # it was cleared
            self._ensure_state()
        withheld, counted, together = [], [], []
        for kind, finite in self._agree(kinds):
            group = self.param_groups[kind.group]
            if group["fused"] and kind.device.type != "cpu" and not group["check_finite"]:
                together.append((kind.params, finite))
                continue
            bad = [p for p, is_finite in zip(kind.params, finite.tolist(), strict=True) if not is_finite]
            if bad and group["check_finite"]:
                raise NonFiniteGradientError(self, kind.group, bad[0])
            counted.append((bad, 1))
            withheld += [(p, p.grad) for p in bad]
        counted += self._skip_together(together)
        for params, counts in counted:
            if params:
                torch._foreach_add_([self.state[p]["skipped"] for p in params], counts)
        for p, _ in withheld:
            p.grad = None
        for kind in kinds:
            if (group := self.param_groups[kind.group])["fused"]:
                withheld += self._lay_out(kind.params, self.moment_keys(group))
        return withheld

    def _lay_out(self, params: list[Tensor], moments: tuple[str, ...]) -> list[tuple[Tensor, Tensor]]:
        """Give gradients and moments the strides of their parameters; return the gradients that this replaces.

        torch's fused kernel goes by memory, not by strides. Those of moments differ after a conversion to channels_last.
        """
        replaced = []
        for p in params:
            strides, state = local(p).stride(), self.state[p]
            if (grad := p.grad) is not None and local(grad).stride() != strides:
                replaced.append((p, grad))
                p.grad = torch.empty_like(p).copy_(grad)
            for key in moments:
                if local(state[key]).stride() != strides:
                    state[key] = torch.empty_like(p, dtype=state[key].dtype).copy_(state[key])
        return replaced

    def give_back(self, withheld: list[tuple[Tensor, Tensor]]) -> None:
        """Restore the gradients that `withhold_non_finite` took away."""
        for p, grad in withheld:
            p.grad = grad
        if hasattr(self, "_own_found_inf"):
            del self.found_inf, self._own_found_inf

    @property
    def _cache(self) -> DerivedCache[list[_SameKind]]:
        return self.__dict__.setdefault("_derived", DerivedCache())

    def _forget(self) -> None:
        self.__dict__.pop("_derived", None)

    def _find_kinds(self) -> list[_SameKind]:
        """Return the parameters that have a gradient by group, device and dtype: checked, and with their state."""
        check_dense_gradients(self)
        self._ensure_state()
        kinds: dict[tuple[int, torch.device, torch.dtype, bool], list[Tensor]] = {}
        for index, group in enumerate(self.param_groups):
            for k, p in enumerate(group["params"]):
                if p.grad is not None:
                    check_unchanged(self, index, k, p, self.moment_keys(group), dtype=True)  # torch would fail half-way
                    if p.numel():
                        kinds.setdefault((index, p.device, p.dtype, is_dtensor(p)), []).append(p)
        return [_SameKind(*key, params) for key, params in kinds.items()]

    def _agree(self, kinds: list[_SameKind]) -> list[tuple[_SameKind, Tensor]]:
        """Return which parameters have finite gradients, in all of their shards; kinds left out are known to."""
        placement, judged = self._cache.placement(self), []
        for kind in kinds:
            grads, exact = kind.grads(), exact_dtype(kind.params[0])
            if placement.is_collective or kind.device.type != "cpu" or not _all_finite(grads, exact):
                judged.append((kind, _finite(grads, exact)))
        if not placement.is_collective:
            return judged
        flags = {id(p): flag for kind, finite in judged for p, flag in zip(kind.params, finite.split(1), strict=True)}
        agreed = placement.agree_on_finite(self, flags)
        return [(kind, torch.cat([agreed[id(p)] for p in kind.params])) for kind, _ in judged]

    def _skip_together(self, judged: list[tuple[list[Tensor], Tensor]]) -> list[tuple[list[Tensor], list[Tensor]]]:
        """Have torch's fused kernels skip all of these if one is not finite; return what to count for each."""
        if not judged:
            return []
        first = judged[0][1].device
        bad = torch.stack([finite.all().to(first) for _, finite in judged]).all().logical_not()
        found_inf = bad.float()  # torch's fused kernel reads it on the device; GradScaler's own counts as well
        if getattr(self, "found_inf", None) is not None:
            found_inf = torch.maximum(found_inf, self.found_inf.to(found_inf.device))
        if not hasattr(self, "found_inf"):
            self._own_found_inf = True
        self.found_inf = found_inf
        return [(params, [bad.long().to(finite.device)] * len(params)) for params, finite in judged]


def _finite(grads: list[Tensor], exact: torch.dtype) -> Tensor:
    """Return whether each gradient is finite, (gradients,).

    The 2-norm is the fast one, and where the sum of squares overflows, Adam's second moment would as well. It is squared,
    because the norm of a single element takes no square.
    """
    return torch.stack(torch._foreach_norm(grads, 2.0, dtype=exact)).square().isfinite()


def _all_finite(grads: list[Tensor], exact: torch.dtype) -> bool:
    """Return whether the sum of all squares is finite: if so, all gradients are. Forces a device sync."""
    small = [grad for grad in grads if grad.numel() <= _SMALL]
    large = [grad for grad in grads if grad.numel() > _SMALL]
    together = [_flatten_dense_tensors(small)] if small else []
    norms = torch._foreach_norm(together + large, 2.0, dtype=exact)
    return bool(torch.stack(norms).square().sum().isfinite())
