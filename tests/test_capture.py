"""A captured step is replayed with this step's numbers: shown by recording operations and running them again."""

import copy
import importlib

import pytest
import torch
from test_accelerator import OPTIMIZERS as OWN
from test_accelerator import parameters
from test_no_sync import NoCrossing
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

import steadynorm as sn
from steadynorm import machine

LR = 0.02


class Recorder(TorchDispatchMode):
    """Record operations as a CUDA graph does: with their tensors and plain numbers, and results that keep their place."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        results = func(*args, **(kwargs or {}))
        self.calls.append((func, tree_flatten((args, kwargs or {})), results))
        return results

    def replay(self) -> None:
        """Run every operation again on the same memory; no Python of the step runs."""
        for func, (leaves, spec), results in self.calls:
            args, kwargs = tree_unflatten(leaves, spec)
            again = func(*args, **kwargs)
            for old, new in zip(tree_flatten(results)[0], tree_flatten(again)[0], strict=True):
                if isinstance(old, Tensor) and old.untyped_storage()._cdata != new.untyped_storage()._cdata:
                    old.copy_(new)


def torch_optimizer(cls, **settings):
    return lambda params: sn.correct(cls(params, lr=torch.tensor(LR), **settings), peak_lr=LR)


OPTIMIZERS = {
    **{name: make for name, make in OWN.items() if name not in ("Scion newton-schulz", "Scion blocks")},
    "correct(AdamW)": torch_optimizer(torch.optim.AdamW, weight_decay=0.5, capturable=True),
    "correct(AdamW), skip": lambda params: sn.correct(
        torch.optim.AdamW(params, lr=torch.tensor(LR), weight_decay=0.5, capturable=True), skip=params[0], peak_lr=LR
    ),
}


def make_capturable(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    for group in optimizer.param_groups:
        group["capturable"] = True
    return optimizer


def set_gradients(params: list[nn.Parameter], t: int) -> None:
    g = torch.Generator().manual_seed(t)
    for p in params:
        grad = torch.randn(p.shape, generator=g, dtype=torch.float64).to(p.dtype)
        p.grad = grad if p.grad is None else p.grad.copy_(grad)


def set_lr(optimizer: torch.optim.Optimizer, t: int) -> None:
    for group in optimizer.param_groups:
        value = LR * (1 - t / 10)
        group["lr"] = group["lr"].fill_(value) if isinstance(group["lr"], Tensor) else value
        if "alpha" in group:
            group["alpha"] = 0.1 + 0.05 * t


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_replayed_step_uses_the_numbers_of_its_own_step(name, monkeypatch):
    params = parameters()
    twins = copy.deepcopy(params)
    # torch allows capturable=True only on accelerators, but its arithmetic is the same
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    optimizer, twin = make_capturable(OPTIMIZERS[name](params)), make_capturable(OPTIMIZERS[name](twins))
    for t in range(2):
        for each, its in ((optimizer, params), (twin, twins)):
            set_lr(each, t)
            set_gradients(its, t)
            each.step()
    set_lr(optimizer, 2)
    set_gradients(params, 2)
    before = copy.deepcopy([*params, optimizer.state_dict()["state"]])
    sn.fill_scalars(optimizer)
    recorder = Recorder()
    with monkeypatch.context() as capture:
        capture.setattr(machine, "is_capturing", lambda: True)
        with recorder:
            optimizer.step()
    restore(params, optimizer, before)  # capturing runs nothing
    for t in range(2, 6):
        set_lr(optimizer, t)
        set_gradients(params, t)
        sn.fill_scalars(optimizer)
        with torch.no_grad():
            recorder.replay()
        set_lr(twin, t)
        set_gradients(twins, t)
        twin.step()
    for ours, theirs in zip(params, twins, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)


def restore(params: list[nn.Parameter], optimizer: torch.optim.Optimizer, before: list) -> None:
    *weights, state = before
    with torch.no_grad():
        for p, q in zip(params, weights, strict=True):
            p.copy_(q)
        indices = iter(range(len(params)))
        for group in optimizer.param_groups:
            for p in group["params"]:
                for key, value in state[next(indices)].items():
                    optimizer.state[p][key].copy_(value)


@pytest.mark.parametrize("name", ["ScionC", "ScionC balance", "ScionC fixed", "LionC", "SGDC"])
def test_a_captured_step_on_fake_cuda_tensors_reads_nothing_on_the_host(name, monkeypatch):
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = [nn.Parameter(torch.empty(p.shape, device="cuda")) for p in parameters()]
        optimizer = make_capturable(OPTIMIZERS[name](params))
        for p in params:
            p.grad = torch.empty_like(p)
        optimizer.step()
        monkeypatch.setattr(machine, "is_capturing", lambda: True)
        monkeypatch.setattr(type(optimizer), "scalars", None)  # nobody asks for this step's numbers
        with NoCrossing(), OnlyOnDevice():
            optimizer.step()


class OnlyOnDevice(TorchDispatchMode):
    """Fail on an operation that takes a number from a CPU tensor, which a graph would keep."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        tensors = [x for x in tree_flatten((args, kwargs or {}))[0] if isinstance(x, Tensor)]
        assert all(x.device.type != "cpu" for x in tensors), func
        return func(*args, **(kwargs or {}))


def test_capturing_before_the_first_step_is_refused(monkeypatch):
    params = parameters()
    optimizer = sn.ScionC(params, lmo="by-shape", capturable=True)
    set_gradients(params, 0)
    monkeypatch.setattr(machine, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="take one step"):
        optimizer.step()


def test_capturing_without_capturable_is_refused(monkeypatch):
    """The graph would keep this step's lr and decay."""
    params = parameters()
    optimizer = sn.ScionC(params, lmo="by-shape")
    set_gradients(params, 0)
    optimizer.step()
    monkeypatch.setattr(machine, "is_capturing", lambda: True)
    with pytest.raises(RuntimeError, match="pass capturable=True"):
        optimizer.step()


@pytest.mark.parametrize("capturable", [False, True])
@pytest.mark.parametrize("name", ["ScionC", "LionC", "RenormalizedAdamW"])
def test_capturable_is_that_of_the_run_not_of_the_checkpoint(name, capturable):
    optimizer, other = OPTIMIZERS[name](parameters()), OPTIMIZERS[name](parameters())
    make_capturable(optimizer if capturable else other)
    optimizer.load_state_dict(other.state_dict())
    assert all(group["capturable"] is capturable for group in optimizer.param_groups)


def test_a_capturable_adamc_stays_fused_whatever_the_checkpoint_was_trained_with():
    optimizer = sn.AdamC(parameters(), fused=True, capturable=True)
    optimizer.load_state_dict(sn.AdamC(parameters()).state_dict())
    assert optimizer.param_groups[0]["fused"] is True


def test_what_reads_on_the_host_is_refused_with_capturable():
    with pytest.raises(ValueError, match=r"check_finite=True.*leave one out"):
        sn.ScionC(parameters(), lmo="by-shape", capturable=True, check_finite=True)
    with pytest.raises(ValueError, match="pass fused=True"):
        sn.AdamC(parameters(), capturable=True)
    with pytest.raises(ValueError, match="leave hold and cautious out"):
        sn.correct(torch.optim.AdamW(parameters(), capturable=True), hold="fixed")
    with pytest.raises(ValueError, match=r"call correct\(optimizer\) first"):
        sn.fill_scalars(torch.optim.AdamW(parameters()))


def test_eager_steps_with_capturable_give_the_same_weights():
    params, twins = parameters(), parameters()
    optimizer, twin = sn.ScionC(params, lmo="by-shape"), sn.ScionC(twins, lmo="by-shape", capturable=True)
    for t in range(5):
        for each, its in ((optimizer, params), (twin, twins)):
            set_lr(each, t)
            set_gradients(its, t)
            each.step()
    assert all(torch.equal(p, q) for p, q in zip(params, twins, strict=True))


def test_corrected_adamw_decays_alike_with_and_without_capturable(monkeypatch):
    adam = importlib.import_module("torch.optim.adam")
    monkeypatch.setattr(adam, "_get_capturable_supported_devices", lambda *_, **__: ["cpu"])
    params, twins = parameters(), parameters()
    plain = sn.correct(torch.optim.AdamW(params, lr=LR, weight_decay=0.5), peak_lr=LR)
    live = OPTIMIZERS["correct(AdamW)"](twins)
    for t in range(5):
        for each, its in ((plain, params), (live, twins)):
            set_lr(each, t)
            set_gradients(its, t)
            each.step()
    for p, q in zip(params, twins, strict=True):
        torch.testing.assert_close(p, q, rtol=2e-3, atol=1e-5)  # torch computes with an fp32 lr; decay takes 4 %


def test_scalars_that_a_captured_step_reads_outlive_other_patterns_of_gradients():
    """Buckets of other patterns are dropped after some; those with scalars on the device stay, and are still filled."""
    params = [nn.Parameter(torch.ones(4)) for _ in range(6)]
    optimizer = sn.ScionC(params, lr=LR, lmo="bias", capturable=True)
    for p in params:
        p.grad = torch.ones(4)
    optimizer.step()
    scalars = {id(x) for buckets in optimizer._cache.values() for bucket in buckets for x in bucket.live.values()}
    for pattern in range(1, 40):
        for k, p in enumerate(params):
            p.grad = torch.ones(4) if pattern >> k & 1 else None
        optimizer.step()
    kept = {id(x): x for buckets in optimizer._cache.values() for bucket in buckets for x in bucket.live.values()}
    assert scalars <= kept.keys()


def test_fill_scalars_names_itself_in_errors():
    with pytest.raises(TypeError, match="fill_scalars takes an optimizer"):
        sn.fill_scalars(nn.Linear(2, 2))  # pyright: ignore[reportArgumentType]
