"""The imperative shell that all own optimizers share: checks, state at construction, buckets, the step, checkpoints."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steadynorm.decay.rule import Group, group_label
from steadynorm.optim.buckets import Bucket, BucketStep, Rule, SplitRule, finite_gradients, unmeasured_products
from steadynorm.optim.idle import WHOLE, Slices, extremes
from steadynorm.optim.placement import Local, is_dtensor
from steadynorm.optim.state import DerivedCache, checked_state, ensure_state, load_exactly, no_skips
from steadynorm.optim.validation import (
    NonFiniteGradientError,
    check_dense_gradients,
    check_lr,
    check_one,
    check_parameter,
    check_unchanged,
    explain_group_errors,
    name_of,
    take_params,
)


class SteadyOptimizer(Optimizer, ABC):
    """Base class: a subclass says what state it keeps, what its scalars are this step, and its Rule.

    Everything that a resumed run needs is in the groups and the state; buckets are a cache, rebuilt when missing.

    Attributes:
        rule: The arithmetic of a step.
        split_rule: The Rule in parts, where it needs whole parameters or takes a mesh.
        is_elementwise: Whether elements do not see each other, so that any shard can be updated by itself.
        normalizes: Whether an update has full size however small the momentum, and so must fade without gradients.
        mesh: What the state of plain parameters is sharded over.
        state_keys: The keys of `fresh_state`.
        signature_keys: Group keys without which a checkpoint belongs to another optimizer.
        setting_keys: Group keys that `settings` reads.
        group_kind: The kind of `param_groups` that it takes.
        corrects_itself: Whether `correct` must refuse it, because it knows its own decay.
        observing: Set by a monitor before a step, to have products in `observed` after it.
        observed: Parameters, and <theta, u>, |u|^2, |theta|^2 of each, (3, parameters).
    """

    rule: Rule
    split_rule: SplitRule | None = None
    is_elementwise = False
    normalizes = False
    mesh: Any = None
    state_keys: tuple[str, ...]
    signature_keys: tuple[str, ...]
    setting_keys: tuple[str, ...] = ()
    group_kind = "adam"
    corrects_itself = True
    observing = False
    observed: Sequence[tuple[list[Tensor], Tensor]] = ()

    def __init__(self, params: ParamsT, defaults: Group, mesh: Any = None):
        self.mesh, params = _check_mesh(mesh), take_params(params, defaults, type(self), self.group_kind)
        self._cache: DerivedCache[list[Bucket]] = DerivedCache()
        super().__init__(params, defaults)

    # --- what a subclass fills in

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
        return extremes(grad.unsqueeze(0), self.slices(group, p)).nonzero().logical_not().any()

    @abstractmethod
    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        """Return this step's numbers; raise ValueError if one is out of range."""

    @abstractmethod
    def check_group(self, group: Group) -> None:
        """Raise ValueError if a setting makes no sense; called when a group is added or would be loaded."""

    def merge_saved_group(self, saved: Group, group: Group) -> Group:
        """Return what of a saved group is loaded in place of `group`; by default all of it."""
        return saved

    def before_step(self) -> None:
        """Run on the host before a step's scalars are read; by default do nothing."""

    # --- torch's interface

    def add_param_group(self, param_group: Group) -> None:
        """Add a group as torch does, with its settings checked and its state made; on an error nothing changes."""
        with explain_group_errors(self, param_group):
            super().add_param_group(param_group)
        index, group = len(self.param_groups) - 1, self.param_groups[-1]
        try:
            for k, p in enumerate(group["params"]):
                check_parameter(p, name_of(group, k))
            self._check_whole_group(group)
            states = [checked_state(group, k, self._all_state) for k in range(len(group["params"]))]
        except (ValueError, TypeError) as error:
            self.param_groups.pop()
            raise type(error)(f"{type(self).__name__}, {group_label(index, group)}: {error}") from None
        for p, state in zip(group["params"], states, strict=True):
            self.state[p].update(state)
        self._forget()

    def _check_whole_group(self, group: Group) -> None:
        check_one(group["lr"])
        check_lr(float(group["lr"]))
        self.check_group(group)
        for p in group["params"]:
            self.settings(group, p)

    def _forget(self) -> None:
        """Drop what is derived from groups and state."""
        self._cache = DerivedCache()

    def _ensure_state(self) -> None:
        ensure_state(self, lambda group: self._own_keys, self._all_state)

    @property
    def _own_keys(self) -> tuple[str, ...]:
        return *self.state_keys, "skipped", *(("momentum_left",) if self.normalizes else ())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Update every parameter that has a gradient; return the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        placement, steps = self._prepare()  # pyright: ignore[reportAttributeAccessIssue]
        placement.run(steps, type(self).split_rule)
        return loss

    @torch._disable_dynamo
    def _prepare(self) -> tuple[Local, list[BucketStep]]:
        """Do the host's part: checks and numbers first, so that an error leaves weights and state as they were."""
        self.before_step()
        observing, self.observing, self.observed = self.observing, False, ()
        buckets = self._cache.get(self, self.setting_keys, self._make_buckets)
        placement = self._cache.placement(self)
        steps = [self._bucket_step(bucket, placement, observing) for bucket in buckets]
        steps = placement.agree(self, steps)
        self._check_finite(steps)
        self.observed = [(step.bucket.params, step.products) for step in steps if step.products is not None]
        return placement, placement.localize(steps)

    def _bucket_step(self, bucket: Bucket, placement: Local, observing: bool) -> BucketStep:
        group = self.param_groups[bucket.group]
        label = f"{type(self).__name__}, {group_label(bucket.group, group)}"
        try:
            numbers = self.scalars(group, bucket)
        except ValueError as error:
            raise ValueError(f"{label}: {error}") from None
        try:
            grads = placement.gradients(bucket)
        except ValueError as error:
            raise ValueError(f"{label}: a parameter {error}") from None
        state = self._states(bucket)
        return BucketStep(
            type(self).rule,
            bucket,
            grads,
            {key: state[key] for key in self.state_keys},
            state["skipped"],
            {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()},
            bool(group["maximize"]),
            state.get("momentum_left"),
            unmeasured_products(bucket) if observing else None,
        )

    def _states(self, bucket: Bucket) -> dict[str, list[Tensor]]:
        """Return the state of a bucket's parameters, ours only: others may keep theirs beside it."""
        try:
            return {key: [self.state[p][key] for p in bucket.params] for key in self._own_keys}
        except KeyError:  # it was cleared
            self._ensure_state()
        return {key: [self.state[p][key] for p in bucket.params] for key in self._own_keys}

    def _make_buckets(self) -> list[Bucket]:
        """Return buckets of the parameters that have a gradient now."""
        check_dense_gradients(self)
        self._ensure_state()
        buckets: dict[Any, Bucket] = {}
        placement = self._cache.placement(self)
        for index, group in enumerate(self.param_groups):
            for k, p in enumerate(group["params"]):
                if p.grad is None or p.numel() == 0:
                    continue
                check_unchanged(self, index, k, p, self.state_keys)
                shape, state = tuple(p.shape), {name: self.state[p][name] for name in self.state_keys}
                try:
                    (settings, row_separable), shard = self.settings(group, p), placement.shard_of(p, state)
                except ValueError as error:
                    label = f"{type(self).__name__}, {group_label(index, group)}: {name_of(group, k)}"
                    raise ValueError(f"{label}: {error}") from None
                key = (index, shape, p.dtype, p.device, settings, shard)
                slices = self.slices(group, p)
                bucket = Bucket(index, shape, row_separable and p.ndim > 0, settings, [], slices, shard)
                buckets.setdefault(key, bucket).params.append(p)
        return placement.plan(list(buckets.values()), type(self).split_rule, self.is_elementwise)

    def _check_finite(self, steps: list[BucketStep]) -> None:
        """Raise for a non-finite gradient if check_finite=True, before anything is written. Forces a device sync."""
        for step in steps:
            group = self.param_groups[step.bucket.group]
            if not group["check_finite"]:
                continue
            for p, is_finite in zip(step.bucket.params, finite_gradients(step).tolist(), strict=True):
                if not is_finite:
                    k = next(k for k, q in enumerate(group["params"]) if q is p)
                    raise NonFiniteGradientError(type(self).__name__, step.bucket.group, group, k)

    def skipped_steps(self) -> Tensor:
        """Return how many parameter updates a non-finite gradient has skipped: a 0-d tensor, on the device."""
        self._ensure_state()
        counts = [self.state[p]["skipped"] for group in self.param_groups for p in group["params"]]
        return torch.stack(counts).sum()

    def state_dict(self) -> dict[str, Any]:
        """Return torch's state_dict, with state of every parameter that the groups have now."""
        self._ensure_state()
        return super().state_dict()

    @torch._disable_dynamo
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load as torch does, with state in its own dtype (torch casts it to the parameter's) and missing keys kept.

        A checkpoint that does not fit raises ValueError before anything changes.
        """
        load_exactly(
            self,
            super().load_state_dict,
            state_dict,
            self._all_state,
            self.signature_keys,
            self.merge_saved_group,
            self._check_whole_group,
        )
        self._forget()

    def _all_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        state = {**self.fresh_state(group, p), "skipped": no_skips(p)}
        if self.normalizes:
            exact = torch.float64 if p.dtype == torch.float64 else torch.float32
            state["momentum_left"] = torch.ones(self.slices(group, p).blocks, dtype=exact, device=p.device)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._forget()
        for p, values in self.state.items():  # torch keeps only state and groups: the mesh is in the state
            for key in self.state_keys if isinstance(p, Tensor) and not is_dtensor(p) else ():
                self.mesh = getattr(values.get(key), "device_mesh", self.mesh)


def _check_mesh(mesh: Any) -> Any:
    if mesh is None:
        return None
    from steadynorm.optim.sharding.mesh import check_mesh

    return check_mesh(mesh)
