"""The imperative shell all own optimizers share: checks, state at construction, buckets, the step, checkpoints."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.optimizer import ParamsT

from steadynorm.decay.rule import Group, group_label
from steadynorm.groups.builder import fill_unset
from steadynorm.optim.buckets import Bucket, Parts, Rule, Work, finite_gradients, no_products, run
from steadynorm.optim.idle import WHOLE, Slices, extremes
from steadynorm.optim.loading import load_exactly
from steadynorm.optim.parameters import check_parameter, check_unchanged, name_of
from steadynorm.optim.settling import Settled, checked_state, settle_state
from steadynorm.optim.sharding import exchange as distributed
from steadynorm.optim.sharding.consensus import Member
from steadynorm.optim.sharding.layout import is_dtensor, layout_of
from steadynorm.optim.sharding.placement import checked_mesh, sharded_zeros
from steadynorm.optim.validation import (
    NonFiniteGradientError,
    check_dense_gradients,
    check_lr,
    check_one,
    explain_group_errors,
    refuse_unused,
)


class SteadyOptimizer(Optimizer, ABC):
    """Base class: a subclass says what state it keeps, what its scalars are this step, and its Rule.

    All of it that a resumed run needs is in the groups and the state; buckets are a cache, rebuilt when missing.
    """

    rule: Rule  # set by each subclass
    parts: Parts | None = None  # the Rule in parts, where it needs whole parameters or takes a mesh
    elementwise = False  # elements do not see each other: any shard can be updated by itself
    normalizes = False  # an update has full size however small the momentum: without gradients it must fade
    mesh: Any = None  # over which the state of plain parameters is sharded
    state_keys: tuple[str, ...]  # of `fresh_state`; set by each subclass
    mark_keys: tuple[str, ...]  # group keys without which a checkpoint is another optimizer's; set by each subclass
    setting_keys: tuple[str, ...] = ()  # group keys that `settings` reads
    group_kind = "adam"  # which groups of `param_groups` it takes
    corrects_itself = True  # correct() refuses these: they know their own decay
    observing = False  # a monitor sets it before a step, to have products in `observed` after it
    observed: Sequence[tuple[list[Tensor], Tensor]] = ()  # parameters, (3, parameters): <theta, u>, |u|^2, |theta|^2

    def __init__(self, params: ParamsT, defaults: Group, mesh: Any = None):
        self.mesh, params = checked_mesh(mesh), fill_unset(params, defaults, type(self).__name__, self.group_kind)
        refuse_unused(type(self), params, defaults)
        self._settled: Settled[list[Bucket]] = Settled()
        super().__init__(params, defaults)

    # --- what a subclass fills in

    @abstractmethod
    def fresh_state(self, group: Group, p: Tensor) -> dict[str, Tensor]:
        """Zero state of one parameter, made at construction so that every rank and checkpoint has the same keys."""

    @abstractmethod
    def settings(self, group: Group, p: Tensor) -> tuple[Any, bool]:
        """What the Rule needs of group and shape, hashable; and whether p may be cut by rows."""

    def slices(self, group: Group, p: Tensor) -> Slices:
        """Which parts of p wait or fade while their gradient is zero; by default all of it fades."""
        return WHOLE

    def any_waiting(self, group: Group, p: Tensor, grad: Tensor) -> Tensor:
        """Return, as a 0-d tensor, whether a slice of p has a zero gradient; `grad` may be this process's part of it."""
        return extremes(grad.unsqueeze(0), self.slices(group, p)).nonzero().logical_not().any()

    @abstractmethod
    def scalars(self, group: Group, bucket: Bucket) -> dict[str, float]:
        """This step's numbers; raises ValueError where one is out of range."""

    @abstractmethod
    def check_group(self, group: Group) -> None:
        """Raise ValueError where a setting makes no sense; called when a group is added or would be loaded."""

    def adopted(self, saved: Group, group: Group) -> Group:
        """What of a saved group is loaded in place of `group`; by default all of it."""
        return saved

    def before_step(self) -> None:
        """Runs on the host before a step's scalars are read; by default nothing."""

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
        """Drop what is worked out from groups and state."""
        self._settled = Settled()

    def _settle_state(self) -> None:
        settle_state(self, lambda group: self._own_keys, self._all_state)

    @property
    def _own_keys(self) -> tuple[str, ...]:
        return *self.state_keys, "skipped", *(("momentum_left",) if self.normalizes else ())

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        """One update of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        here, exchanging = self._prepare()  # pyright: ignore[reportAttributeAccessIssue]
        run(here)
        if exchanging:
            distributed.run_exchanging(exchanging, type(self).parts)  # pyright: ignore[reportCallIssue, reportArgumentType]
        return loss

    @torch._disable_dynamo
    def _prepare(self) -> tuple[list[Work], list[Work]]:
        """The host's part: checks and numbers first, so that an error leaves weights and state as they were.

        Returned: what each process does by itself, and what they do together.
        """
        self.before_step()
        observing, self.observing, self.observed = self.observing, False, ()
        works = []
        for bucket in self._current_buckets():
            group = self.param_groups[bucket.group]
            try:
                numbers = self.scalars(group, bucket)
            except ValueError as error:
                raise ValueError(f"{type(self).__name__}, {group_label(bucket.group, group)}: {error}") from None
            grads = self._gradients(bucket)
            state = self._states(bucket)
            skipped, left = state.pop("skipped"), state.pop("momentum_left", None)
            scalars = {key: torch.tensor(value, dtype=torch.float64) for key, value in numbers.items()}
            products = no_products(bucket) if observing else None
            maximize = bool(group["maximize"])
            works.append(Work(type(self).rule, bucket, grads, state, skipped, scalars, maximize, products, left))
        works = self._agreed(works)
        self._check_finite(works)
        self.observed = [(work.bucket.params, work.products) for work in works if work.products is not None]
        for work in works:
            if work.finite is not None:
                torch._foreach_add_(work.skipped, list(work.finite.logical_not().long().unbind(0)))
        works = [distributed.localised(work) for work in works]
        here = [
            work for work in works if not work.bucket.plan and (math.prod(work.bucket.shape) or not work.bucket.by_rows)
        ]
        return here, [work for work in works if work.bucket.plan]

    def _states(self, bucket: Bucket) -> dict[str, list[Tensor]]:
        """The state of a bucket's parameters, ours alone: others may keep theirs beside it. Made anew where cleared."""
        try:
            return {key: [self.state[p][key] for p in bucket.params] for key in self._own_keys}
        except KeyError:
            self._settle_state()
        return {key: [self.state[p][key] for p in bucket.params] for key in self._own_keys}

    def _gradients(self, bucket: Bucket) -> list[Tensor]:
        if bucket.layout is None:
            return [p.grad for p in bucket.params if p.grad is not None]
        try:
            return [distributed.local_gradient(p, bucket.layout) for p in bucket.params]
        except ValueError as error:
            group = self.param_groups[bucket.group]
            raise ValueError(
                f"{type(self).__name__}, {group_label(bucket.group, group)}: a parameter {error}"
            ) from None

    def _agreed(self, works: list[Work]) -> list[Work]:
        """With all ranks: which parameters to skip. ValueError on all of them where they do not have the same ones."""
        agreement = self._settled.agreement
        if agreement.members is None:
            blocks = {id(p): self.slices(group, p).blocks for group in self.param_groups for p in group["params"]}
            agreement.set_members(list(members(self, self.state_keys, self.setting_keys)), blocks)
        if not agreement.members:
            return works
        flags: dict[int, Tensor] = {}
        for work in works:
            if work.bucket.layout is not None and work.bucket.layout.group is not None:
                found = distributed.shard_flags(work.grads, work.bucket)
                flags |= {id(p): flag for p, flag in zip(work.bucket.params, found, strict=True)}
        agreed = agreement.least(flags)
        done = []
        for work in works:
            known = [agreed[id(p)] for p in work.bucket.params if id(p) in agreed]
            done.append(distributed.with_flags(work, torch.stack(known)) if known else work)
        return done

    def _current_buckets(self) -> list[Bucket]:
        """Buckets of the parameters that have a gradient now; cached by which ones these are and the settings."""
        return self._settled.get(self, self.setting_keys, self._make_buckets)

    def _make_buckets(self) -> list[Bucket]:
        check_dense_gradients(self)
        self._settle_state()
        found: dict[Any, Bucket] = {}
        for index, group in enumerate(self.param_groups):
            for k, p in enumerate(group["params"]):
                if p.grad is None or p.numel() == 0:
                    continue
                check_unchanged(self, index, k, p, self.state_keys)
                shape, state = tuple(p.shape), {name: self.state[p][name] for name in self.state_keys}
                try:
                    (settings, by_rows), layout = self.settings(group, p), layout_of(p, state)
                except ValueError as error:
                    label = f"{type(self).__name__}, {group_label(index, group)}: {name_of(group, k)}"
                    raise ValueError(f"{label}: {error}") from None
                key = (index, shape, p.dtype, p.device, settings, layout)
                slices = self.slices(group, p)
                bucket = Bucket(index, shape, by_rows and p.ndim > 0, settings, [], layout, slices=slices)
                found.setdefault(key, bucket).params.append(p)
        return distributed.planned(list(found.values()), type(self).parts, self.elementwise)

    def _check_finite(self, works: list[Work]) -> None:
        """check_finite=True: raise before anything is written, naming the parameter. Waits for the device."""
        for work in works:
            group = self.param_groups[work.bucket.group]
            if not group["check_finite"]:
                continue
            flags = finite_gradients(work) if work.finite is None else work.finite
            for p, finite in zip(work.bucket.params, flags.tolist(), strict=True):
                if not finite:
                    k = next(k for k, q in enumerate(group["params"]) if q is p)
                    raise NonFiniteGradientError(type(self).__name__, work.bucket.group, group, k)

    def skipped_steps(self) -> Tensor:
        """How many parameter updates were left out because of a non-finite gradient: a 0-d tensor, on the device."""
        self._settle_state()
        counts = [self.state[p]["skipped"] for group in self.param_groups for p in group["params"]]
        return torch.stack(counts).sum()

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with state of every parameter that the groups have now."""
        self._settle_state()
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
            self.mark_keys,
            self.adopted,
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


def members(optimizer: Optimizer, state_keys: Sequence[str], setting_keys: Sequence[str] = ()) -> Iterator[Member]:
    """The parameters of an optimizer that are sharded, or whose state is."""
    for index, group in enumerate(optimizer.param_groups):
        settings = {key: group[key] for key in setting_keys}
        for k, p in enumerate(group["params"]):
            layout = layout_of(p, {key: optimizer.state[p][key] for key in state_keys})
            if layout is not None and layout.group is not None and p.numel():
                label = f"{type(optimizer).__name__}, {group_label(index, group)}: {name_of(group, k)}"
                yield Member(p, layout, label, f"of shape {tuple(p.shape)}, {p.dtype}, {settings}")


def no_skips(p: Tensor) -> Tensor:
    """A counter of skipped updates, at zero."""
    return torch.zeros((), dtype=torch.int64, device=p.device)


def full_precision(p: Tensor, mesh: Any = None) -> Tensor:
    """A zero buffer of p's shape in at least fp32; sharded as p is, or over the mesh."""
    dtype = torch.float64 if p.dtype == torch.float64 else torch.float32
    if mesh is not None:
        return sharded_zeros(p, dtype, mesh)
    return torch.zeros_like(p, dtype=dtype, memory_format=torch.preserve_format)
