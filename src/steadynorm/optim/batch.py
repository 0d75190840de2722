"""The arithmetic of a step on one stack of parameters, and the one function that writes weights.

A `Rule` is an optimizer's arithmetic: weights, gradient and state, stacked (batch, *shape), updated in place. It ends in
`Batch.descend`, which knows how the norm is held.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from steadynorm import machine
from steadynorm.decay.hold import Hold, StepSums
from steadynorm.lengths import inner_product
from steadynorm.optim import halves

State: TypeAlias = dict[str, Tensor]
# 0-d, on the CPU or, in a capturable step, on the device. A new value recompiles nothing.
Scalars: TypeAlias = dict[str, Tensor]
# A launch takes some 4 microseconds, in which an accelerator moves 8 MB: copying a tensor of this size to a stack and back.
LARGE_ELEMENTS = 1 << 19


class Shard(Protocol):
    """What a step must know about a parameter of which this process has a part."""

    @property
    def is_empty(self) -> bool: ...

    def window(self, dim: int) -> tuple[int, int]:
        """Return this part's first position along a dimension, and the length of the whole."""
        ...

    def sum_over_shards(self, x: Tensor) -> Tensor: ...

    def max_over_shards(self, x: Tensor) -> Tensor: ...


class Descent(NamedTuple):
    """What happens to the weights of some parameters in a step beside open-loop decay and the update.

    Attributes:
        hold: What holds the norm in place of open-loop decay; None for that.
        is_cautious: Whether decay acts only on weights that agree with their update in sign.
        residuals: The bits that bf16 parameters lack (see `halves`); None if they are not kept.
        products: (3, parameters), to which `Batch.descend` adds <theta, u>, |u|^2 and |theta|^2, where a monitor wants them.
    """

    hold: Hold | None = None
    is_cautious: bool = False
    residuals: Sequence[Tensor] | None = None
    products: Tensor | None = None

    @property
    def is_plain(self) -> bool:
        """Whether nothing else happens."""
        return self.hold is None and not self.is_cautious and self.residuals is None and self.products is None

    def part(self, which: slice, rows: slice | None = None) -> "Descent":
        """Return what happens to some of the parameters, or to these rows of them."""
        return Descent(
            hold=None if self.hold is None else self.hold.part(which),
            is_cautious=self.is_cautious,
            residuals=None if self.residuals is None else cut(self.residuals[which], rows),
            products=None if self.products is None else self.products.narrow(1, which.start, which.stop - which.start),
        )


class Batch(NamedTuple):
    """One chunk, stacked. A Rule updates the state in place, and the weights by `descend`.

    Attributes:
        params: The parameters, or the parts of them that this chunk writes.
        gradient: The gradient as it came, (batch, *shape), in a list from which `take_grad` takes it.
        owns_gradient: Whether the gradient is a copy from `stack_finite`, which may be overwritten.
        state: The optimizer state, in the dtype it is kept in.
        active: 1 where the step is taken, 0 where weights and state must stay as they are, because the gradient was not
            finite or a slice had none: (batch, 1, ...), or finer where slices wait (see `idle`). Its dtype is the one
            that is computed in, at least fp32.
        maximize: Whether to ascend.
        scratch: Memory of the gradient's shape, of no value, for `take_grad` and what follows; None on an accelerator.
        fade: The factor of the update, (batch, ...); None stands for 1.
        shard: How the parameters are sharded; None if they are whole.
        counts: How many updates each parameter has had, this one included, (batch,); None where nobody counts.
        descent: What else happens to the weights.
    """

    params: Sequence[Tensor]
    gradient: list[Tensor]
    owns_gradient: bool
    state: State
    active: Tensor
    maximize: bool = False
    scratch: Tensor | None = None
    fade: Tensor | None = None
    shard: Shard | None = None
    counts: Tensor | None = None
    descent: Descent = Descent()

    def take_grad(self) -> Tensor:
        """Take the gradient to descend along, finite throughout. It can be taken once: its memory is the caller's."""
        raw = self.gradient.pop()
        if self.scratch is not None:
            grad = torch.nan_to_num(raw.to(self.active.dtype), 0.0, 0.0, 0.0, out=self.scratch)
        elif self.owns_gradient:
            grad = raw
        elif raw.dtype != self.active.dtype:
            grad = raw.to(self.active.dtype).nan_to_num_(0.0, 0.0, 0.0)
        else:
            grad = raw.nan_to_num(0.0, 0.0, 0.0)
        return grad.neg_() if self.maximize else grad

    def widen_state(self) -> State:
        """Widen the state to the dtype that is computed in, and return it; writing it back rounds it again."""
        self.state.update({key: value.to(self.active.dtype) for key, value in self.state.items()})
        return self.state

    def weights(self) -> Tensor:
        """Return the weights, (batch, *shape), in the dtype that is computed in: a view of them if possible."""
        if (residuals := self.descent.residuals) is not None:
            return halves.merge(stack(self.params), stack(residuals)).to(self.active.dtype)
        return stack(self.params).to(self.active.dtype)

    def write(self, theta: Tensor) -> None:
        """Write back what became of `weights`, which may be overwritten."""
        if (residuals := self.descent.residuals) is None:
            write_back(self.params, theta)
            return
        rounded, low = halves.split(theta.float())
        torch._foreach_copy_([*self.params, *residuals], [*rounded.unbind(0), *low.unbind(0)])

    def descend(self, u: Tensor, scalars: Scalars) -> None:
        """Write the weights: decay and step with this update."""
        update_share = self.active if self.fade is None else self.active * self.fade
        eta, gamma = scalars["eta"], scalars["gamma"]
        if self._needs_no_stack():
            decay_and_step_(self.params, u, kept_share(eta, self.active), gamma, update_share)
            return
        theta, hold, products = self.weights(), self.descent.hold, self.descent.products
        if products is not None or hold is not None:
            sums = inner_products(theta, u, update_share)
            if products is not None:
                products.add_(sums)
            if hold is not None:
                eta, gamma = self._held_rates(hold, theta, u, sums, eta, gamma)
        if self.descent.is_cautious:
            for weights, update, active, share in pieces(theta, u, self.active, update_share):
                keep = kept_share(eta, same_sign_mask(weights, update).mul_(active))
                decay_and_step_(weights, update, keep, gamma, share)
        else:
            decay_and_step_(theta, u, kept_share(eta, self.active), gamma, update_share)
        self.write(theta)

    def _needs_no_stack(self) -> bool:
        """Return whether weights can be written where they are: copies to and from a stack cost an accelerator the most."""
        first, is_alone = self.params[0], len(self.params) == 1
        is_plain = self.descent.is_plain and first.dtype == self.active.dtype
        return is_plain and not is_alone and is_large(first) and machine.is_accelerator(first.device)

    def _held_rates(
        self, hold: Hold, theta: Tensor, u: Tensor, sums: Tensor, eta: Tensor, gamma: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return eta and gamma as `hold` wants them, (batch, 1, ...), given `inner_products`."""
        sums = torch.stack([*sums.unbind(0), self._decayed_sq(theta, u, sums.select(0, 2))])
        sums = sums if self.shard is None else self.shard.sum_over_shards(sums)
        rates = hold.rates(StepSums(*sums.unbind(0)), eta.to(sums.dtype), gamma.to(sums.dtype))
        eta, gamma = (rate.view(-1, *[1] * (theta.ndim - 1)) for rate in rates)
        return eta, gamma

    def _decayed_sq(self, theta: Tensor, u: Tensor, norm_sq: Tensor) -> Tensor:
        """Return the part of |theta|^2 on which decay acts, (batch,): slices may wait, and weights be left out."""
        if self.active.numel() == len(theta) and not self.descent.is_cautious:
            return norm_sq * self.active.flatten()
        total = torch.zeros_like(norm_sq)
        for weights, update, active in pieces(theta, u, self.active):
            decayed = same_sign_mask(weights, update).mul_(active) if self.descent.is_cautious else active
            total += inner_product(weights * decayed, weights)
        return total


Rule: TypeAlias = Callable[[Batch, Scalars, Any], None]


class Encoding(NamedTuple):
    """How momentum x and updates u are transferred between ranks: u / scale is exact in `u_dtype`."""

    x_dtype: torch.dtype
    u_dtype: torch.dtype
    scale: float = 1.0


class SplitRule(NamedTuple):
    """A Rule in three parts, the last being `Batch.descend`, so that data can move between ranks in between.

    Attributes:
        accumulate: Updates the state element by element and returns the momentum x, maybe in scratch.
        normalize: Returns the update u of x, given settings; may write it to the third argument or to x.
        cost: How many operations `normalize` takes for one parameter of a shape, given settings.
        encode: Of shape, settings, dtype and device: how x and u are transferred so that nothing is lost that
            `normalize` would not lose itself.
        kinds: Of shape and settings: the kinds of matrices in a parameter. On an accelerator, stacks that have a kind in
            common go through one `normalize_all`. None: nothing is shared.
        normalize_all: Returns the updates of several stacks, given the settings of each.
    """

    accumulate: Callable[[Batch, Scalars, Any], Tensor]
    normalize: Callable[[Tensor, Any, Tensor | None], Tensor]
    cost: Callable[[tuple[int, ...], Any], float]
    encode: Callable[[tuple[int, ...], Any, torch.dtype, torch.device], Encoding]
    kinds: Callable[[tuple[int, ...], Any], frozenset[Any]] | None = None
    normalize_all: Callable[[Sequence[Tensor], Sequence[Any]], list[Tensor]] | None = None

    def rule(self, batch: Batch, scalars: Scalars, settings: Any) -> None:
        """Apply all three parts: the Rule of a chunk that is whole on this process."""
        x = self.accumulate(batch, scalars, settings)
        batch.descend(self.normalize(x, settings, batch.scratch), scalars)


def kept_share(eta: Tensor, decayed: Tensor) -> Tensor:
    """Return what decay leaves of the weights: 1 - eta where it acts and 1 elsewhere, given where it acts (1 or 0)."""
    return 1 - eta * decayed


def same_sign_mask(theta: Tensor, u: Tensor) -> Tensor:
    """Return 1 where weight and update agree in sign, so that a step makes the weight smaller, and 0 elsewhere."""
    return (u * theta).gt_(0)


def pieces(*stacks: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Yield the same rows of several stacks, as many at a time as a core's cache holds; all rows on an accelerator.

    The first is (batch, rows, ...). Others may have one row that stands for all.

    >>> [tuple(x.shape) for x in next(pieces(torch.zeros(2, 3, 4), torch.zeros(2, 1, 1)))]
    [(2, 3, 4), (2, 1, 1)]
    """
    first, along = stacks[0], min(1, stacks[0].ndim - 1)  # a stack of 0-d parameters has no rows
    count = first.shape[along]
    rows = max(1, machine.CACHED_ELEMENTS * count // max(1, first.numel()))
    if rows >= count or machine.is_accelerator(first.device) or torch.compiler.is_compiling():
        yield stacks
        return
    whole = [x.expand(*x.shape[:along], count, *x.shape[along + 1 :]) for x in stacks]
    yield from zip(*(x.split(rows, along) for x in whole), strict=True)


def decay_and_step_(
    theta: Tensor | Sequence[Tensor], u: Tensor, keep: Tensor, gamma: Tensor, update_share: Tensor
) -> None:
    """theta <- keep theta - gamma update_share u, in place: decay and step of all our optimizers but AdamC.

    Args:
        theta: The weights, stacked, or as a list of parameters.
        u: The update, (batch, *shape).
        keep: What decay leaves of the weights (see `kept_share`).
        gamma: The lr.
        update_share: How much of the update is taken, 0 to 1.
    """
    move = -gamma * update_share
    if isinstance(theta, Tensor):
        theta.mul_(keep).addcmul_(u, move)
        return
    for p, moved, kept in zip(theta, (u * move).unbind(0), keep.unbind(0), strict=True):
        torch.addcmul(moved, p, kept, out=p)  # one kernel


def inner_products(theta: Tensor, u: Tensor, update_share: Tensor) -> Tensor:
    """Return <theta, v>, |v|^2 and |theta|^2, v = update_share u, of every parameter of a stack, (3, batch).

    Only at the moment of the step are both factors at hand.
    """
    if update_share.numel() != len(update_share):  # it differs within a parameter, or a shard has no rows
        u, update_share = u * update_share, update_share.new_ones(len(update_share))
    sums = theta.new_zeros(3, len(theta))
    for weights, update in pieces(theta, u.to(theta.dtype)):
        pairs = (weights, update), (update, update), (weights, weights)
        sums += torch.stack([inner_product(x, y) for x, y in pairs])
    share = update_share.flatten()
    return sums * torch.stack([share, share * share, torch.ones_like(share)])


def cut(tensors: Sequence[Tensor], rows: slice | None) -> list[Tensor]:
    """Return these rows of each tensor, as views; all of it for None."""
    return [t if rows is None else t.narrow(0, rows.start, rows.stop - rows.start) for t in tensors]


def stack(tensors: Sequence[Tensor]) -> Tensor:
    """Return (batch, *shape): a view of one tensor, or of several that lie side by side in one memory, else a copy."""
    first = tensors[0]
    if len(tensors) == 1:
        return first.unsqueeze(0)
    if lie_side_by_side(tensors):
        return first.as_strided((len(tensors), *first.shape), (first.numel(), *first.stride()))
    return torch.stack(list(tensors))


def stack_finite(tensors: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    """Return a copy of gradients as a stack in this dtype, finite throughout, on which `idle.is_finite` still gives the right answer.

    A number that it rejects takes the place of NaN and infinities, so that one kernel copies a large gradient and makes it
    finite.
    """
    first, rejected = tensors[0], 0.75 * torch.finfo(dtype).max
    out = torch.empty(len(tensors), *first.shape, dtype=dtype, device=first.device)
    if not is_large(first) or first.dtype != dtype:
        torch._foreach_copy_(list(out.unbind(0)), list(tensors))
        return out.nan_to_num_(rejected, rejected, rejected)
    for grad, part in zip(tensors, out.unbind(0), strict=True):
        torch.nan_to_num(grad, rejected, rejected, rejected, out=part)
    return out


def is_large(x: Tensor) -> bool:
    """Return whether an accelerator launches a kernel for this tensor in less time than it copies it to a stack and back."""
    return x.numel() >= LARGE_ELEMENTS


def lie_side_by_side(tensors: Sequence[Tensor]) -> bool:
    """Return whether contiguous tensors of one shape follow one another in one memory, as `state.pack` lays them out."""
    first, *others = tensors
    if torch.compiler.is_compiling() or not first.is_contiguous() or not others[0].is_contiguous():
        return False
    size, start, memory = first.numel(), first.storage_offset(), first.untyped_storage()._cdata
    return all(
        x.storage_offset() == start + k * size and x.untyped_storage()._cdata == memory and x.is_contiguous()
        for k, x in enumerate(others, start=1)
    )


def write_back(tensors: Sequence[Tensor], stacked: Tensor) -> None:
    """Copy a stack into its tensors, unless it is a view of them."""
    is_view = stacked.dtype == tensors[0].dtype and (len(tensors) == 1 or lie_side_by_side(tensors))
    if not is_view:
        torch._foreach_copy_(list(tensors), list(stacked.unbind(0)))
