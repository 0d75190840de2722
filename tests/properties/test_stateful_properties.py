"""Any sequence of what users do to an optimizer: one step at a time, it stays what a parameter by itself would be.

Beside the optimizer with all parameters runs a shadow: an optimizer for each parameter alone, which is never saved, loaded,
copied or grouped. After every rule both must agree, and everything be finite.
"""

import copy
import io
import math
import pickle

import pytest
import torch
from contract import LR, Entry
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule, run_state_machine_as_test
from models import OWN
from strategies import Drawn, seeds
from torch import nn
from trying import CountedMachine, budget

FP64 = torch.float64
few_shapes = st.sampled_from([(3, 4), (4, 3), (5,), (), (0, 2), (2, 3, 2), (1, 6), (2, 2, 2, 2)])
some_shapes = st.lists(few_shapes, min_size=1, max_size=3)


class Life(CountedMachine):
    """The life of an optimizer; a subclass says which."""

    entry: Entry

    def __init__(self) -> None:
        super().__init__()
        self.params: list[nn.Parameter] = []
        self.alone: list[nn.Parameter] = []
        self.shadows: list = []
        self.t = self.skips = 0
        self.checkpoint = None

    def _new(self, shapes: list, seed: int) -> list[nn.Parameter]:
        new = [nn.Parameter(Drawn(tuple(shape), "normal", seed).make(also=k)) for k, shape in enumerate(shapes)]
        for p in new:
            twin = nn.Parameter(p.detach().clone())
            self.params.append(p)
            self.alone.append(twin)
            self.shadows.append(self.entry([twin]))
        return new

    @initialize(shapes=some_shapes, seed=seeds)
    def start(self, shapes, seed):
        self.optimizer = self.entry(self._new(shapes, seed))

    # --- what users do

    def _gradients(self, seed: int, *, exponent: int = 0) -> None:
        for k, (p, twin) in enumerate(zip(self.params, self.alone, strict=True)):
            p.grad = twin.grad = None
            if p.requires_grad:
                value = Drawn(tuple(p.shape), "normal", seed, exponent).make(also=k)
                p.grad, twin.grad = value, value.clone()

    def _step(self) -> None:
        self.optimizer.step()
        for shadow in self.shadows:
            shadow.step()
        self.t += 1

    @rule(seed=seeds, exponent=st.sampled_from([0, 0, -20, 20]))
    def step(self, seed, exponent):
        self._gradients(seed, exponent=exponent)
        self._step()

    @rule()
    def step_without_gradients(self):
        before = [p.detach().clone() for p in self.params]
        self.optimizer.zero_grad()
        self.optimizer.step()
        assert all(torch.equal(p, old) for p, old in zip(self.params, before, strict=True))

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
    @rule(shapes=some_shapes, seed=seeds)
    def add_group(self, shapes, seed):
        """It takes today's lr, as its shadows do, so that the guessed peak is today's too."""
        first = self.optimizer.param_groups[0]
        today = {key: first[key] for key in ("lr", "alpha") if key in first}
        known = len(self.params)
        self.optimizer.add_param_group({"params": self._new(shapes, seed), **today})
        self.shadows[known:] = [self.entry([{"params": [p], **today}]) for p in self.alone[known:]]

    @rule(which=st.integers(0, 9))
    def freeze_or_unfreeze(self, which):
        k = which % len(self.params)
        for p in (self.params[k], self.alone[k]):
            p.requires_grad_(not p.requires_grad)

    def _groups(self) -> list:
        return [group for each in (self.optimizer, *self.shadows) for group in each.param_groups]

    @rule(ratio=st.floats(0.01, 1))
    def change_lr(self, ratio):
        for group in self._groups():
            group["lr"] = ratio * min(LR, group.get("peak_lr") or LR)

    @rule(seed=seeds)
    def step_at_lr_zero(self, seed):
        """As distributed checkpoints do, to build state: the weights stay."""
        before, lrs = [p.detach().clone() for p in self.params], [group["lr"] for group in self._groups()]
        for group in self._groups():
            group["lr"] = 0.0
        self._gradients(seed)
        self._step()
        for group, lr in zip(self._groups(), lrs, strict=True):
            group["lr"] = lr
        assert all(torch.equal(p, old) for p, old in zip(self.params, before, strict=True))

    @precondition(lambda self: "alpha" in self.optimizer.param_groups[0])
    @rule(alpha=st.floats(0.05, 1))
    def change_alpha(self, alpha):
        for group in self._groups():
            group["alpha"] = alpha

    # --- saving, loading, copying

    @rule()
    def save(self):
        buffer = io.BytesIO()
        torch.save({"optimizer": self.optimizer.state_dict(), "params": [p.detach() for p in self.params]}, buffer)
        frozen = [p.requires_grad for p in self.params]
        self.checkpoint = buffer, copy.deepcopy((self.alone, self.shadows)), frozen, (self.t, self.skips)

    @precondition(lambda self: self.checkpoint is not None)
    @rule()
    def load(self):
        """Into a fresh optimizer of another lr, with the groups of the checkpoint."""
        buffer, shadow, grads, (self.t, self.skips) = self.checkpoint
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=True)
        self.params = [
            nn.Parameter(value, requires_grad=grad) for value, grad in zip(saved["params"], grads, strict=True)
        ]
        sizes = [len(group["params"]) for group in saved["optimizer"]["param_groups"]]
        rest = iter(self.params)
        self.optimizer = self.entry([{"params": [next(rest) for _ in range(size)]} for size in sizes], lr=0.4 * LR)
        self.optimizer.load_state_dict(saved["optimizer"])
        self.alone, self.shadows = copy.deepcopy(shadow)

    @rule(how=st.sampled_from([copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))]))
    def go_on_with_a_copy(self, how):
        self.params, self.optimizer = how((self.params, self.optimizer))

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
            torch.testing.assert_close(p.detach(), twin.detach(), rtol=1e-7, atol=1e-7)
            mine, its = self.optimizer.state[p], shadow.state[twin]
            assert mine.keys() == its.keys()
            for key, value in mine.items():
                torch.testing.assert_close(value, its[key], rtol=1e-7, atol=1e-12, msg=lambda m, key=key: f"{key}: {m}")

    @invariant()
    def skips_are_counted(self):
        assert self.optimizer.skipped_steps().item() == self.skips


@pytest.mark.parametrize("name", sorted(OWN))
def test_any_life_of_an_optimizer(name):
    """150 lives of up to 50 rules each in the slow profile: one takes about a tenth of a second."""
    machine = type(f"Life of {name}", (Life,), {"entry": OWN[name]})
    run_state_machine_as_test(machine, settings=budget(6, 150), _min_steps=1)
