"""What all our optimizers but AdamC share: checks, state at construction, buckets, the step, checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from steadynorm import machine
from steadynorm.decay.families import OTHER, Family
from steadynorm.decay.hold import (
    HOLD_STATE,
    Hold,
    check_balance,
    check_hold,
    fresh_hold_state,
    held_target,
    hold_state_keys,
    refuse_idle_balance,
)
from steadynorm.decay.rule import Group, group_label, name_of
from steadynorm.dtensor import is_dtensor
from steadynorm.optim.arithmetic import Arithmetic
from steadynorm.optim.batch import Descent, Scalars
from steadynorm.optim.buckets import Bucket, BucketStep, check_finite, unmeasured_products
from steadynorm.optim.idle import WHOLE, Slices, magnitudes
from steadynorm.optim.placement import DerivedCache, Placement, checked_mesh
from steadynorm.optim.residual import RESIDUAL, check_residual, fresh_residual, is_kept, low_halves
from steadynorm.optim.state import StateKeeper, no_skips, no_updates
from steadynorm.optim.validation import (
    check_capturable,
    check_dense_gradients,
    check_lr_type,
    check_unchanged,
    take_params,
)
from steadynorm.theory.equilibrium import check_lr


class SteadyOptimizer(StateKeeper, ABC):
    """Base class: a subclass says what state it keeps, what its scalars are this step, and its Rule.

    Everything that a resumed run needs is in the groups and the state; buckets are a cache, rebuilt when missing.

    Attributes:
        arithmetic: What the steps of its groups are made of, unless `arithmetic_of` says otherwise.
        mesh: What the state of plain parameters is sharded over.
        setting_keys: Group keys that `settings` reads.
        family: What the theory must know about it.
        corrects_itself: Whether `correct` must refuse it, because it knows its own decay.
        observing: Set by a monitor before a step, to have products in `observed` after it.
        observed: Parameters, and <theta, u>, |u|^2, |theta|^2 of each, (3, parameters).
    """

    arithmetic: Arithmetic
    mesh: Any = None
    setting_keys: tuple[str, ...] = ()
    family: Family = OTHER
    corrects_itself = True
    observing = False
    observed: Sequence[tuple[list[Tensor], Tensor]] = ()

    def __init__(self, params: ParamsT, defaults: Group, mesh: Any = None):
        self.mesh, params = checked_mesh(mesh), take_params(params, defaults, type(self), self.group_kind)
        self._cache: DerivedCache[list[Bucket]] = DerivedCache(_is_captured)
        super().__init__(params, defaults)
        refuse_idle_balance(type(self).__name__, self.param_groups)

    # --- what a subclass fills in

    def arithmetic_of(self, group: Group) -> Arithmetic:
        """Return what the step of a group is made of; by default the same for all groups."""
        return self.arithmetic

    @abstractmethod
    def fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        """Return zero state of one parameter, made at construction so that every rank and checkpoint has the same keys."""

    @abstractmethod
    def settings(self, group: Group, p: Tensor) -> tuple[Any, bool]:
        """Return what the Rule needs of group and shape, hashable; and whether p may be cut by rows."""

    def slices(self, group: Group, p: Tensor) -> Slices:
        """Return which parts of p wait or fade while their gradient is zero; by default all of it fades."""
        return WHOLE

    def any_waiting(self, group: Group, p: Tensor, grad: Tensor) -> Tensor:
        """Return, as a 0-d tensor, whether a slice of p has a zero gradient; `grad` may be this process's part of it."""
        return (magnitudes(grad.unsqueeze(0), self.slices(group, p)) == 0).any()

    @abstractmethod
    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        """Return this step's numbers; raise ValueError if one is out of range."""

    @abstractmethod
    def check_group(self, group: Group) -> None:
        """Raise ValueError if a setting makes no sense; called when a group is added or would be loaded."""

    def before_step(self) -> None:
        """Run on the host before a step's scalars are read; by default do nothing."""

    # --- torch's interface

    def _check_settings(self, group: Group) -> None:
        check_lr_type(group["lr"])
        check_lr(float(group["lr"]))
        check_hold(group)
        check_capturable(group)
        check_residual(group)
        self.check_group(group)
        check_balance(group, self.family)
        for p in group["params"]:
            self.settings(group, p)

    def _forget(self) -> None:
        self._cache = DerivedCache(_is_captured)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        placement, steps = self._prepare()  # pyright: ignore[reportAttributeAccessIssue]
        placement.run(steps)
        return loss

    @torch._disable_dynamo
    def _prepare(self) -> tuple[Placement, list[BucketStep]]:
        """Do the host's part: checks and numbers first, so that an error leaves weights and state as they were."""
        if not machine.is_capturing():
            self.before_step()
        observing, self.observing, self.observed = self.observing, False, ()
        buckets = self._cache.get(self, (*self.setting_keys, RESIDUAL), self._make_buckets)
        placement = self._cache.placement(self)
        steps = [self._bucket_step(bucket, placement, observing) for bucket in buckets]
        steps = placement.agree(self, steps)
        check_finite(self, steps)
        self.observed = [
            (step.bucket.params, step.descent.products) for step in steps if step.descent.products is not None
        ]
        return placement, placement.localize(steps)

    def _bucket_step(self, bucket: Bucket, placement: Placement, observing: bool) -> BucketStep:
        group = self.param_groups[bucket.group]
        label = f"{type(self).__name__}, {group_label(bucket.group, group)}"
        scalars = self._scalars(group, bucket, label)
        try:
            grads = placement.gradients(bucket)
        except ValueError as error:
            raise ValueError(f"{label}: a parameter {error}") from None
        state = self._states(bucket)
        descent = Descent(
            hold=Hold.of(group, state, scalars.get("norm_sq")) if bucket.is_held else None,
            is_cautious=bool(group.get("cautious")),
            residuals=low_halves(state[RESIDUAL]) if RESIDUAL in state else None,
            products=unmeasured_products(bucket) if observing else None,
        )
        return BucketStep(
            bucket=bucket,
            grads=grads,
            state={key: state[key] for key in bucket.arithmetic.state_keys},
            skipped=state["skipped"],
            scalars=scalars,
            maximize=bool(group["maximize"]),
            descent=descent,
            momentum_left=state.get("momentum_left"),
            counts=state.get("step"),
        )

    def _scalars(self, group: Group, bucket: Bucket, label: str) -> Scalars:
        """Return this step's numbers, 0-d: on the CPU, where kernels take them by value, or live on the device."""
        is_capturable = group.get("capturable")
        if machine.is_capturing():
            if not is_capturable:
                raise RuntimeError(f"{label}: a captured step would keep this step's numbers; pass capturable=True")
            if not bucket.live:
                raise RuntimeError(f"{label}: take one step with the same gradients before you capture one")
            return bucket.live
        numbers = self._numbers(group, bucket, label)
        if is_capturable:
            return bucket.fill(numbers)
        return {key: torch.tensor(value, dtype=torch.float64, device="cpu") for key, value in numbers.items()}

    def _numbers(self, group: Group, bucket: Bucket, label: str) -> dict[str, float]:
        """Return `scalars`, and the target at which a norm is held; errors name the group."""
        try:
            numbers = self.scalars(group, bucket)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
        if not bucket.is_held or (target := held_target(group, self.family, bucket.shape)) is None:
            return numbers
        return {**numbers, "norm_sq": target}

    def fill_scalars(self) -> None:
        """Write this step's lr, decay, momentum and target to the device, where a captured step reads them.

        Call it before every replay of a CUDA graph in which a step was captured, after the scheduler.
        """
        self.before_step()
        for bucket in (bucket for buckets in self._cache.values() for bucket in buckets if bucket.live):
            group = self.param_groups[bucket.group]
            bucket.fill(self._numbers(group, bucket, f"{type(self).__name__}, {group_label(bucket.group, group)}"))

    def _states(self, bucket: Bucket) -> dict[str, list[Tensor]]:
        """Return the state of a bucket's parameters, ours only: others may keep theirs beside it."""
        try:
            return {key: [self.state[p][key] for p in bucket.params] for key in bucket.state_keys}
        except KeyError:  # it was cleared
            self._ensure_state()
        return {key: [self.state[p][key] for p in bucket.params] for key in bucket.state_keys}

    def _make_buckets(self) -> list[Bucket]:
        """Return buckets of the parameters that have a gradient now."""
        check_dense_gradients(self)
        self._check_holds()
        self._ensure_state()
        buckets: dict[Any, Bucket] = {}
        placement = self._cache.placement(self)
        for index, group in enumerate(self.param_groups):
            arithmetic = self.arithmetic_of(group)
            for k, p in enumerate(group["params"]):
                if p.grad is None or p.numel() == 0:
                    continue
                check_unchanged(self, index, k, p, arithmetic.state_keys)
                shape, state = tuple(p.shape), {name: self.state[p][name] for name in arithmetic.state_keys}
                try:
                    (settings, row_separable), shard = self.settings(group, p), placement.shard_of(p, state)
                except ValueError as error:
                    label = f"{type(self).__name__}, {group_label(index, group)}: {name_of(group, k)}"
                    raise ValueError(f"{label}: {error}") from None
                key = (index, shape, p.dtype, p.device, settings, shard)
                bucket = Bucket(
                    index,
                    shape,
                    arithmetic,
                    row_separable and p.ndim > 0,
                    settings,
                    [],
                    self.slices(group, p),
                    shard,
                    group.get("hold") in HOLD_STATE,
                    self._own_keys(group, p),
                    arithmetic.chunk_elements(group, row_separable),
                )
                buckets.setdefault(key, bucket).params.append(p)
        return placement.plan(list(buckets.values()))

    def _check_holds(self) -> None:
        """Raise ValueError if a group now asks for a way to hold its norm that makes no sense."""
        for index, group in enumerate(self.param_groups):
            try:
                check_hold(group)
                check_balance(group, self.family)
            except ValueError as error:
                raise ValueError(f"{type(self).__name__}, {group_label(index, group)}: {error}") from None

    def _own_keys(self, group: Group, p: Tensor) -> tuple[str, ...]:
        own = self.arithmetic_of(group)
        left = ("momentum_left",) if own.normalizes else ()
        counts = ("step",) if own.counts_updates else ()
        low = (RESIDUAL,) if is_kept(group, p) else ()
        return *own.state_keys, "skipped", *left, *counts, *low, *hold_state_keys(group)

    def _all_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        state = {
            **self.fresh_state(group, p),
            **fresh_hold_state(group, p),
            **fresh_residual(group, p),
            "skipped": no_skips(p),
        }
        own = self.arithmetic_of(group)
        if own.counts_updates:
            state["step"] = no_updates(p)
        if own.normalizes:
            blocks = self.slices(group, p).blocks
            state["momentum_left"] = torch.ones(blocks, dtype=machine.exact_dtype(p), device=p.device)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for group in self.param_groups:  # torch keeps only state and groups: the mesh is in the state
            for p in (p for p in group["params"] if not is_dtensor(p)):
                for key in self.arithmetic_of(group).state_keys:
                    self.mesh = getattr(self.state.get(p, {}).get(key), "device_mesh", self.mesh)


def _is_captured(buckets: Sequence[Bucket]) -> bool:
    """Return whether a captured step may read the scalars of these buckets."""
    return any(bucket.live for bucket in buckets)
