"""Any sequence of what users do to an optimizer leaves every parameter where it would be by itself.

Beside the optimizer with all parameters runs a shadow: an optimizer for each parameter alone, in contiguous memory, which
is never saved, loaded, copied or grouped. After every rule both must agree, and everything be finite. The dtype, the
layouts and the settings of every group are drawn for each life.
"""

import copy
import io
import math
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from contract import LR, REGISTRY, Entry
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from strategies import Drawn, laid_out, log_floats, seeds
from torch import Tensor, nn
from trying import CountedMachine, budget

# correct(AdamW) and correct(Muon) too; MuonC's hidden matrices, which take no vectors, have their own tests in test_muon.py
ENTRIES = {entry.name: entry for entry in REGISTRY if entry.name not in ("MuonC", "MuonC balance")}
few_shapes = st.sampled_from([(3, 4), (4, 3), (5,), (), (0, 2), (2, 3, 2), (1, 6), (2, 2, 2, 2)])
some_shapes = st.lists(few_shapes, min_size=1, max_size=3)
NEAR = {torch.float64: 1e-7, torch.float32: 3e-4, torch.bfloat16: 0.06, torch.float16: 0.01}  # of the largest entry
SCALES = {torch.float64: (0, 0, -20, 20), torch.float16: (0, 0, -3, 2)}  # of gradients, of ten
PEAK = 2.0  # times the first lr, where the peak is given


def dtypes_of(entry: Entry) -> list[torch.dtype]:
    """Return the dtypes of an entry.

    AdamW keeps its moments in the weights' dtype, where copies of one run drift apart; AdamC does not take float16.
    """
    if entry.name == "correct(AdamW)":
        return [torch.float32, torch.float64]
    if entry.name.startswith("AdamC") or not entry.own:
        return [torch.float32, torch.bfloat16, torch.float64]
    return list(NEAR)


def same(a: Any, b: Any) -> bool:
    """Return whether state dicts or lists of tensors are equal bit for bit."""
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def assert_near(a: Tensor, b: Tensor, what: str) -> None:
    """Assert closeness relative to the largest entry, whatever the scale; counts must be equal."""
    if not a.is_floating_point() or not a.numel():
        assert torch.equal(a, b), what
        return
    size = max(b.abs().max().item(), 1e-300)
    off = ((a.double() - b.double()).abs().max() / size).item()
    assert off <= NEAR[a.dtype], f"{what}: off by {off:.3g} of its largest"


class Life(CountedMachine):
    """The life of an optimizer; a subclass says which."""

    entry: Entry

    def __init__(self) -> None:
        super().__init__()
        self.params: list[nn.Parameter] = []
        self.alone: list[nn.Parameter] = []
        self.shadows: list = []
        self.group_of: list[int] = []  # of each parameter
        self.t = self.skips = 0
        self.checkpoint = None

    def _new(self, shapes: list, seed: int, settings: dict) -> dict:
        """Add a group of new parameters, and their shadows."""
        shapes = [(3, 4) if len(shape) != 2 or 0 in shape else shape for shape in shapes] if self.muon else shapes
        layouts = ("contiguous", "transposed", "contiguous" if self.entry.name == "AdamC fused" else "strided")
        group = max(self.group_of, default=-1) + 1
        new = []
        for k, shape in enumerate(shapes):
            value = Drawn(tuple(shape), "normal", seed).make(self.dtype, also=k)
            new.append(nn.Parameter(laid_out(value, layouts[(seed + k) % 3])[0]))
            self.alone.append(nn.Parameter(value.clone()))
            self.shadows.append(self.entry([{"params": [self.alone[-1]], **settings}], lr=settings["lr"], **self.fixed))
            self.group_of.append(group)
        self.params += new
        return {"params": new, **settings}

    def _settings(self, data: st.DataObject) -> dict:
        """Draw the settings that a group may override."""
        name, lr = self.entry.name, data.draw(log_floats(1e-3, 0.05))
        settings: dict[str, Any] = {"lr": lr}
        if name.startswith("Scion"):
            settings |= {"alpha": data.draw(self.alphas), "lmo": data.draw(st.sampled_from(["by-shape", "bias"]))}
            if name != "Scion":
                return settings | {"steady_norm_sq": data.draw(st.floats(0.8, 4))}
        # where the decay goes with the momentum by a large factor, so little that it stays below 1 a step
        least = 0.01 if name.endswith("balance") else 0.0  # a group without decay has nothing to balance
        settings["weight_decay"] = data.draw(
            st.floats(least, 0.02 if name == "SGDC trace" else 0.1 if self.muon else 2)
        )
        if name.startswith("SGDC"):
            settings["alpha"] = data.draw(self.alphas)
        elif self.muon:
            settings["momentum"] = data.draw(st.floats(0.5, 0.99))
            settings["initial_momentum"] = (
                1 - settings["momentum"]
            )  # as the peak: the group may change before its first step
        elif not name.startswith("Scion"):
            settings["betas"] = data.draw(self.betas)
        if self.entry.follows is not None and (not self.entry.own or data.draw(st.booleans())):
            settings["peak_lr"] = PEAK * lr  # correct() sees an added group at its next step, its shadow at once
        if name.startswith(("AdamC", "LionC")) and settings["weight_decay"]:
            settings["steady_norm_sq"] = data.draw(st.one_of(st.none(), st.floats(0.8, 4)))
        return settings

    alphas = log_floats(0.05, 1.0)
    betas = st.tuples(st.floats(0.05, 0.95), st.floats(0.5, 0.999))

    @initialize(shapes=some_shapes, seed=seeds, data=st.data())
    def start(self, shapes, seed, data):
        name = self.entry.name
        self.muon = name == "correct(Muon)"
        self.dtype = data.draw(st.sampled_from(dtypes_of(self.entry)))
        self.fixed = {"maximize": data.draw(st.booleans())} if not self.muon else {}
        if name.startswith("Scion"):
            # rounding that a fast polar factor lifts is not the same in a stack: in low precision the exact one
            self.fixed["polar"] = "express" if self.dtype == torch.float64 else "svd"
            self.fixed["momentum_dtype"] = data.draw(st.sampled_from([None, "bfloat16"]))
        if name.startswith("AdamC"):
            self.fixed["amsgrad"] = data.draw(st.booleans())
        group = self._new(shapes, seed, self._settings(data))
        self.optimizer = self.entry([group], lr=group["lr"], **self.fixed)

    # --- what users do

    def _gradients(self, seed: int, *, exponent: int = 0) -> None:
        for k, (p, twin) in enumerate(zip(self.params, self.alone, strict=True)):
            p.grad = twin.grad = None
            if p.requires_grad:
                value = Drawn(tuple(p.shape), "normal", seed, exponent).make(self.dtype, also=k)
                p.grad, twin.grad = value, value.clone()

    def _step(self) -> None:
        self.optimizer.step()
        for shadow in self.shadows:
            shadow.step()
        self.t += 1

    @rule(seed=seeds, which=st.integers(0, 3))
    def step(self, seed, which):
        self._gradients(seed, exponent=SCALES.get(self.dtype, (0, 0, -12, 12))[which])
        self._step()

    @rule()
    def step_without_gradients(self):
        before = [p.detach().clone() for p in self.params]
        self.optimizer.zero_grad()
        self.optimizer.step()
        assert all(torch.equal(p, old) for p, old in zip(self.params, before, strict=True))

    @precondition(lambda self: self.entry.own)
    @rule(seed=seeds, which=st.integers(0, 9), value=st.sampled_from([math.nan, math.inf, -math.inf]))
    def step_with_a_bad_gradient(self, seed, which, value):
        self._gradients(seed)
        k = which % len(self.params)
        p = self.params[k]
        if p.grad is None or p.numel() == 0:
            return
        for each in (p, self.alone[k]):
            each.grad.view(-1)[0] = value
        before = p.detach().clone()
        self._step()
        self.skips += 1
        assert torch.equal(p, before)

    @precondition(lambda self: len(self.optimizer.param_groups) < 4)
    @rule(shapes=some_shapes, seed=seeds, data=st.data())
    def add_group(self, shapes, seed, data):
        settings = self._settings(data)
        if (
            "peak_lr" in self.optimizer.param_groups[0]
        ):  # one that is guessed while others are below theirs draws a warning
            settings.setdefault("peak_lr", PEAK * settings["lr"])
        self.optimizer.add_param_group(self._new(shapes, seed, settings))

    @rule(which=st.integers(0, 9))
    def freeze_or_unfreeze(self, which):
        k = which % len(self.params)
        for p in (self.params[k], self.alone[k]):
            p.requires_grad_(not p.requires_grad)

    def _groups(self) -> list:
        return [group for each in (self.optimizer, *self.shadows) for group in each.param_groups]

    def _same_groups(self, which: int) -> Iterator[dict]:
        """Return one group of the optimizer, and those of its parameters' shadows."""
        index = which % len(self.optimizer.param_groups)
        yield self.optimizer.param_groups[index]
        yield from (s.param_groups[0] for s, at in zip(self.shadows, self.group_of, strict=True) if at == index)

    @rule(which=st.integers(0, 3), ratio=st.floats(0.01, 1))
    def change_lr(self, which, ratio):
        """Change lr up to the peak, which is above the group's first lr if it was passed."""
        first = next(self._same_groups(which))
        most = min(first.get("peak_lr") or LR, 0.1)
        for group in self._same_groups(which):
            group["lr"] = ratio * most

    @rule(which=st.integers(0, 3), data=st.data())
    def change_settings(self, which, data):
        """Change what momentum and norm schedules change, and AdamC's betas, which torch reads."""
        first = next(self._same_groups(which))
        new = {"alpha": self.alphas, "betas": self.betas, "momentum": st.floats(0.5, 0.99)}
        new = {key: data.draw(values) for key, values in new.items() if key in first}
        if first.get("steady_norm_sq") is not None:
            new["steady_norm_sq"] = data.draw(st.floats(0.8, 4))
        for group in self._same_groups(which):
            group.update(new)

    @rule(seed=seeds)
    def step_at_lr_zero(self, seed):
        """Step at lr = 0, as distributed checkpoints do to build state: the weights stay."""
        before, lrs = [p.detach().clone() for p in self.params], [group["lr"] for group in self._groups()]
        for group in self._groups():
            group["lr"] = 0.0
        self._gradients(seed)
        self._step()
        for group, lr in zip(self._groups(), lrs, strict=True):
            group["lr"] = lr
        assert all(torch.equal(p, old) for p, old in zip(self.params, before, strict=True))

    # --- saving, loading, copying

    def _dumped(self) -> io.BytesIO:
        buffer = io.BytesIO()
        torch.save({"optimizer": self.optimizer.state_dict(), "params": [p.detach() for p in self.params]}, buffer)
        buffer.seek(0)
        return buffer

    def _loaded(self, buffer: io.BytesIO, frozen: list[bool]) -> tuple[list[nn.Parameter], Any]:
        """Load into a fresh optimizer of another lr, with the groups of the checkpoint; compare bit for bit with
        what was saved.
        """
        saved = torch.load(buffer, weights_only=True)
        params = [nn.Parameter(value, requires_grad=grad) for value, grad in zip(saved["params"], frozen, strict=True)]
        sizes, rest = [len(group["params"]) for group in saved["optimizer"]["param_groups"]], iter(params)
        groups = [{"params": [next(rest) for _ in range(size)]} for size in sizes]
        optimizer = self.entry(groups, lr=0.4 * LR, **self.fixed)
        optimizer.load_state_dict(saved["optimizer"])
        assert self._same(optimizer, saved["optimizer"])
        return params, optimizer

    def _same(self, optimizer: Any, saved: dict) -> bool:
        """Assert equal state and groups, bit for bit; a copy of torch's has keys of correct() that a new group gets
        at its first step.
        """
        now = optimizer.state_dict()
        if not self.entry.own:
            for group, old in zip(now["param_groups"], saved["param_groups"], strict=True):
                for key in set(group) - set(old):
                    del group[key]
        return same(now, saved)

    @rule()
    def save(self):
        frozen = [p.requires_grad for p in self.params]
        shadows = copy.deepcopy((self.alone, self.shadows))
        self.checkpoint = self._dumped(), shadows, frozen, list(self.group_of), (self.t, self.skips)

    @precondition(lambda self: self.checkpoint is not None)
    @rule()
    def load(self):
        buffer, shadows, frozen, group_of, (self.t, self.skips) = self.checkpoint
        buffer.seek(0)
        self.params, self.optimizer = self._loaded(buffer, frozen)
        self.alone, self.shadows = copy.deepcopy(shadows)
        self.group_of = list(group_of)

    @rule(seed=seeds)
    def step_beside_a_resumed_run(self, seed):
        """Save, load and step: not one bit differs from the run that was not saved."""
        params, resumed = self._loaded(self._dumped(), [p.requires_grad for p in self.params])
        self._gradients(seed)
        for p, twin in zip(params, self.params, strict=True):
            p.grad = None if twin.grad is None else twin.grad.clone()
        self._step()
        resumed.step()
        assert same([p.detach() for p in params], [p.detach() for p in self.params])
        assert same(resumed.state_dict(), self.optimizer.state_dict())

    @rule(how=st.sampled_from([copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))]))
    def go_on_with_a_copy(self, how):
        before = self.optimizer.state_dict()
        self.params, self.optimizer = how((self.params, self.optimizer))
        assert self._same(self.optimizer, before)

    # --- what is refused

    @rule(lr=st.sampled_from([math.nan, math.inf, -1.0]), seed=seeds)
    def try_a_bad_lr(self, lr, seed):
        group = self.optimizer.param_groups[-1]
        self._gradients(seed)
        if not any(p.grad is not None and p.numel() for p in group["params"]):
            return
        old, group["lr"] = group["lr"], lr
        with pytest.raises(ValueError, match="lr="):
            self.optimizer.step()
        group["lr"] = old

    @precondition(lambda self: self.entry.own)
    @rule(which=st.sampled_from(["complex", "known", "decay", "lr"]))
    def try_a_bad_group(self, which):
        bad = {
            "complex": {"params": [nn.Parameter(torch.ones(2, dtype=torch.complex64))]},
            "known": {"params": [self.params[0]]},
            "decay": {"params": [nn.Parameter(torch.ones(2))], "weight_decay": -1.0},
            "lr": {"params": [nn.Parameter(torch.ones(2))], "lr": math.nan},
        }[which]
        groups = len(self.optimizer.param_groups)
        with pytest.raises(ValueError, match=r"complex|more than one|weight_decay|lr="):
            self.optimizer.add_param_group(bad)
        assert len(self.optimizer.param_groups) == groups

    @rule(which=st.integers(0, 3), seed=seeds)
    def try_an_lr_above_a_guessed_peak(self, which, seed):
        group = next(self._same_groups(which))
        guessed = group.get("peak_lr_given") is False and group.get("steady_norm_sq") is None
        if not guessed or not group["base_weight_decay"]:
            return
        self._gradients(seed)
        old, group["lr"] = group["lr"], 1.01 * group["peak_lr"]
        with pytest.raises(ValueError, match="exceeds the guessed peak_lr"):
            self.optimizer.step()
        group["lr"] = old

    @precondition(lambda self: self.entry.own)
    @rule(shape=st.sampled_from([(3, 4), (7,)]))
    def try_a_checkpoint_of_another_model(self, shape):
        other = self.entry([nn.Parameter(torch.ones(*shape, 2)) for _ in range(9)])
        with pytest.raises(ValueError, match=r"another model|size|number of parameter groups"):
            self.optimizer.load_state_dict(other.state_dict())

    # --- what must hold after every one of these

    @invariant()
    def everything_is_finite_and_as_if_alone(self):
        for p, twin, shadow in zip(self.params, self.alone, self.shadows, strict=True):
            assert p.isfinite().all()
            assert p.requires_grad == twin.requires_grad
            assert_near(p.detach(), twin.detach(), "weights")
            mine, its = self.optimizer.state[p], shadow.state[twin]
            assert mine.keys() == its.keys()
            for key, value in mine.items():
                assert_near(value, its[key], key)

    @precondition(lambda self: self.entry.own)
    @invariant()
    def skips_are_counted(self):
        assert self.optimizer.skipped_steps().item() == self.skips


@pytest.mark.parametrize("name", sorted(ENTRIES))
def test_an_optimizer_survives_any_sequence_of_events(name):
    """The slow profile runs 100 lives of up to 50 rules each; one takes about a tenth of a second."""
    machine = type(f"Life of {name}", (Life,), {"entry": ENTRIES[name]})
    run_state_machine_as_test(machine, settings=budget(3, 100), _min_steps=1)
