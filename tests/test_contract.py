"""The contract of tests/contract.py: calling conventions, schedulers, bad input, compilation."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from contract import (
    LR,
    REGISTRY,
    Entry,
    assert_same,
    entries,
    every,
    noise,
    own,
    ratio,
    set_gradients,
    snapshot,
    train,
    vary,
)
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim.lr_scheduler import (
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    LRScheduler,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
)

# --- torch's calling conventions


@every
def test_a_closure_is_called_once_with_grad_enabled_and_its_loss_returned(entry: Entry):
    params = entry.params()
    optimizer = entry(params)
    losses = []

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = sum((p.square().sum() for p in params.values()), torch.zeros(()))
        loss.backward()  # raises where grad is disabled
        losses.append(loss)
        return loss

    before = params["wide"].detach().clone()
    with torch.no_grad():
        assert optimizer.step(closure) is losses[0]
    assert len(losses) == 1
    assert not torch.equal(params["wide"], before)


@every
def test_step_hooks_run_once_each_around_the_write(entry: Entry):
    """This also holds after torch's own AdamW, whose step AdamC builds on, has been used in the process."""
    torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    params = entry.params()
    optimizer = entry(params)
    before = params["wide"].detach().clone()
    seen = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("pre", torch.equal(params["wide"], before))))
    optimizer.register_step_post_hook(lambda *_: seen.append(("post", torch.equal(params["wide"], before))))
    set_gradients(params, 0)
    optimizer.step()
    assert seen == [("pre", True), ("post", False)]


@every
def test_a_pre_hook_may_change_gradients(entry: Entry):
    """Clipping is often a hook."""
    params, by_hand = entry.params(), entry.params()
    optimizer, plain = entry(params), entry(by_hand)
    optimizer.register_step_pre_hook(lambda *_: nn.utils.clip_grad_value_(params.values(), 0.5))
    set_gradients(params, 0)
    optimizer.step()
    set_gradients(by_hand, 0)
    nn.utils.clip_grad_value_(by_hand.values(), 0.5)
    plain.step()
    assert_same(snapshot(optimizer, params), snapshot(plain, by_hand))


@every
def test_zero_grad_clears_the_gradients(entry: Entry):
    params = entry.params()
    optimizer = entry(params)
    set_gradients(params, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in params.values())
    optimizer.zero_grad()
    assert all(p.grad is None for p in params.values())


@every
def test_a_zero_gradient_without_decay_moves_nothing(entry: Entry):
    """Zero input gives a zero update, never NaN."""
    params = entry.params()
    optimizer = entry(params, weight_decay=0.0, **{"hold": "decay"} if entry.held else {})
    before = snapshot(optimizer, params)
    for _ in range(3):
        for p in params.values():
            p.grad = torch.zeros_like(p)
        optimizer.step()
    after = snapshot(optimizer, params)
    for name in params:
        torch.testing.assert_close(after[name]["weight"], before[name]["weight"], rtol=1e-7, atol=1e-7)
        assert all(value.isfinite().all() for value in after[name].values())


@every
def test_a_missing_gradient_leaves_weights_and_state_alone(entry: Entry):
    params, full = entry.params(torch.float64), entry.params(torch.float64)
    optimizer, reference = entry(params), entry(full)
    train(optimizer, params, range(3))
    train(reference, full, range(3))
    before = snapshot(optimizer, params)
    for p, t in ((params, 3), (full, 3)):
        set_gradients(p, t)
    params["wide"].grad = None
    optimizer.step()
    reference.step()
    after = snapshot(optimizer, params)
    assert_same(after, before, names=["wide"])
    others = [name for name in params if name != "wide"]
    assert_same(after, snapshot(reference, full), names=others, rtol=1e-10)


@every
def test_a_step_without_any_gradient_is_allowed(entry: Entry):
    params = entry.params()
    optimizer = entry(params)
    before = snapshot(optimizer, params)
    optimizer.step()
    assert_same(snapshot(optimizer, params), before)


@every
def test_a_frozen_parameter_stays_and_does_not_affect_the_others(entry: Entry):
    params, without = entry.params(), entry.params()
    params["tall"].requires_grad_(False)
    frozen = params["tall"].clone()
    optimizer, reference = entry(params), entry([p for name, p in without.items() if name != "tall"])
    train(optimizer, params, range(4))
    del without["tall"]
    train(reference, without, range(4))
    assert torch.equal(params["tall"], frozen)
    assert_same(snapshot(optimizer, params), snapshot(reference, without), names=list(without))


@every
def test_an_added_group_trains_as_an_optimizer_of_its_own(entry: Entry):
    first, late = ("wide", "tall"), ("wide too", "row")
    params, alone, fresh = entry.params(), entry.params(), entry.params()
    optimizer = entry([params[name] for name in first])
    reference = entry([alone[name] for name in first])
    train(optimizer, {name: params[name] for name in first}, range(4))
    train(reference, {name: alone[name] for name in first}, range(8))
    vary(optimizer, 4)
    keys = [key for key in ("alpha", "betas", "momentum") if key in optimizer.param_groups[0]]
    momentum = {key: optimizer.param_groups[0][key] for key in keys}
    optimizer.add_param_group({"params": [params[name] for name in late], "initial_lr": LR, **momentum})
    train(optimizer, {name: params[name] for name in first + late}, range(4, 8))
    late_reference = entry([{"params": [fresh[name] for name in late], **momentum}])
    train(late_reference, {name: fresh[name] for name in late}, range(4, 8))
    assert_same(snapshot(optimizer, params), snapshot(reference, alone), names=first)
    assert_same(snapshot(optimizer, params), snapshot(late_reference, fresh), names=late)


@every
def test_named_parameters_change_nothing_but_the_names(entry: Entry):
    params, unnamed = entry.params(), entry.params()
    optimizer, reference = entry(params.items()), entry(unnamed)
    train(optimizer, params, range(3))
    train(reference, unnamed, range(3))
    assert_same(snapshot(optimizer, params), snapshot(reference, unnamed))
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == list(params)


@every
def test_group_overrides_equal_separate_optimizers(entry: Entry):
    params, apart = entry.params(), entry.params()
    optimizer = entry([{"params": [params["wide"]], "lr": 0.5 * LR}, {"params": [params["tall"]]}])
    small, large = entry([apart["wide"]], lr=0.5 * LR), entry([apart["tall"]])
    for t in range(4):
        for names, chosen in (
            (("wide", "tall"), (optimizer,)),
            (("wide", "tall"), (small, large)),
        ):
            source = params if chosen == (optimizer,) else apart
            set_gradients({name: source[name] for name in names}, t)
            for each in chosen:
                each.step()
    assert_same(snapshot(optimizer, params), snapshot(small, apart), names=["wide"])
    assert_same(snapshot(optimizer, params), snapshot(large, apart), names=["tall"])


@entries(lambda entry: entry.own)
def test_maximize_equals_minimising_the_negated_gradient(entry: Entry):
    up, down = entry.params(), entry.params()
    optimizer, reference = entry(up, maximize=True), entry(down)
    train(optimizer, up, range(4))
    train(reference, down, range(4), scale=-1.0)
    assert_same(snapshot(optimizer, up), snapshot(reference, down))


@entries(lambda entry: entry.tensor_lr)
def test_a_tensor_lr_equals_a_float_lr(entry: Entry):
    params, plain = entry.params(), entry.params()
    optimizer = entry(params, lr=torch.tensor(LR, dtype=torch.float64))
    reference = entry(plain)
    train(optimizer, params, range(6))
    train(reference, plain, range(6))
    assert_same(snapshot(optimizer, params), snapshot(reference, plain), rtol=1e-6)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)


@every
def test_a_zero_lr_leaves_weights_alone_and_is_not_taken_for_the_peak(entry: Entry):
    """Distributed checkpoints call step() with lr = 0 to build state."""
    params = entry.params()
    optimizer = entry(params)
    before = snapshot(optimizer, params)
    set_gradients(params, 0)
    for group in optimizer.param_groups:
        group["lr"] = 0.0
    optimizer.step()
    for name in params:
        assert torch.equal(params[name], before[name]["weight"]), name
    for group in optimizer.param_groups:
        group["lr"] = LR
    optimizer.step()
    assert decay_of(optimizer, params["wide"]) == pytest.approx(decay_of(entry(fresh := entry.params()), fresh["wide"]))


def decay_of(optimizer: Any, p: Tensor) -> float:
    """Return lambda of the latest step (ScionC has its own scalars, since its decay depends on the parameter)."""
    if hasattr(optimizer, "weight_decay_of"):
        return optimizer.weight_decay_of(p)
    return next(group for group in optimizer.param_groups if any(p is q for q in group["params"]))["weight_decay"]


# --- schedulers


def warmup(optimizer: Any) -> LRScheduler:
    return LambdaLR(optimizer, ratio)


def sequential(optimizer: Any) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, 1.0, 4), CosineAnnealingLR(optimizer, 6), ConstantLR(optimizer, 0.1, 100)]
    return SequentialLR(optimizer, parts, milestones=[4, 9])


# The others are of the same kinds, and OneCycleLR with its momentum has a test of its own.
SLOW_SCHEDULERS = ("SequentialLR", "OneCycleLR")
SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": warmup,
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 12),
    "SequentialLR": sequential,
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=LR, total_steps=16, cycle_momentum=False),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
}


@every
@pytest.mark.parametrize(
    "scheduler",
    [pytest.param(name, marks=pytest.mark.slow if name in SLOW_SCHEDULERS else ()) for name in SCHEDULERS],
)
def test_the_decay_follows_every_scheduler(entry: Entry, scheduler: str):
    """lambda_t / gamma_t stays what it was at the peak (or lambda_t, where decay is constant) while lr moves."""
    params = entry.params()
    optimizer = entry(params)
    peak = decay_of(optimizer, params["wide"]) / LR
    schedule = SCHEDULERS[scheduler](optimizer)
    lrs = set()
    for t in range(12):
        set_gradients(params, t)
        optimizer.step()
        lr = optimizer.param_groups[0]["lr"]
        lrs.add(lr)
        if entry.follows is None:
            assert decay_of(optimizer, params["wide"]) == pytest.approx(peak * LR)
        else:
            assert decay_of(optimizer, params["wide"]) == pytest.approx(peak * lr, rel=entry.follows)
        schedule.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
    assert min(lrs) < 0.6 * max(lrs) <= 0.6 * LR * (1 + 1e-9)
    assert all(p.isfinite().all() for p in params.values())


@entries(lambda entry: entry.gain is not None)
def test_the_decay_follows_one_cycle_with_its_momentum_cycling(entry: Entry):
    """OneCycleLR's default: lambda_t = lambda (gamma_t / gamma_peak) G_t / G_0, and G is 1 for the Adam family."""
    params = entry.params()
    optimizer = entry(params)
    group = optimizer.param_groups[0]
    decay, gain = group["weight_decay"], entry.gain(group)
    schedule = OneCycleLR(optimizer, max_lr=LR, total_steps=12)
    momenta = set()
    for t in range(11):
        set_gradients(params, t)
        optimizer.step()
        momenta.add(group.get("betas", group.get("momentum")))
        assert group["weight_decay"] == pytest.approx(decay * group["lr"] / LR * entry.gain(group) / gain)
        schedule.step()
    assert len(momenta) > 5
    assert params["wide"].isfinite().all()


# --- bad input


@own
@pytest.mark.parametrize("bad", ["complex", "sparse"])
def test_complex_and_sparse_parameters_are_refused(entry: Entry, bad: str):
    dense = torch.eye(4)
    p = nn.Parameter(dense.to(torch.complex64) if bad == "complex" else dense.to_sparse(), requires_grad=False)
    with pytest.raises(ValueError, match=rf"group 0.*{bad}"):
        entry([("bad", p)])
    good = entry.params()
    optimizer = entry(good)
    with pytest.raises(ValueError, match=rf"group 1.*{bad}"):
        optimizer.add_param_group({"params": [p]})
    assert len(optimizer.param_groups) == 1
    train(optimizer, good, range(1))


@own
@pytest.mark.parametrize("steps_before", [0, 1])
def test_sparse_gradients_are_refused_before_anything_is_written(entry: Entry, steps_before: int):
    params = entry.params()
    embedding = nn.Embedding(5, 4, sparse=True)
    params["embedding"] = embedding.weight
    optimizer = entry([{"params": [p]} for p in params.values()])  # its group is the last
    train(optimizer, params, range(steps_before))
    before = snapshot(optimizer, params)
    set_gradients({name: p for name, p in params.items() if name != "embedding"}, 1)
    params["embedding"].grad = None
    embedding(torch.tensor([1, 2])).sum().backward()
    with pytest.raises((ValueError, RuntimeError), match=r"sparse"):
        optimizer.step()
    assert_same(snapshot(optimizer, params), before)


@own
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_non_finite_gradient_skips_that_parameter_only(entry: Entry, value: float):
    params, alone = entry.params(), entry.params()
    optimizer, reference = entry(params), entry(alone)
    for each, values in ((optimizer, params), (reference, alone)):
        train(each, values, range(3))
    before = snapshot(optimizer, params)
    set_gradients(params, 3)
    set_gradients(alone, 3)
    params["wide"].grad[1, 2] = value
    optimizer.step()
    reference.step()
    after = snapshot(optimizer, params)
    assert after["wide"].pop("skipped") == before["wide"].pop("skipped") + 1 == 1
    assert_same(after, before, names=["wide"])
    assert_same(after, snapshot(reference, alone), names=[name for name in params if name != "wide"])
    assert params["wide"].grad[1, 2].isfinite().logical_not()  # the user's gradient is left to look at

    assert optimizer.skipped_steps().item() == 1
    new = entry(entry.params())
    new.load_state_dict(optimizer.state_dict())
    assert new.skipped_steps().item() == 1

    train(optimizer, params, range(4, 6))  # recovers
    assert params["wide"].isfinite().all()
    assert not torch.equal(params["wide"], before["wide"]["weight"])
    assert optimizer.skipped_steps().item() == 1


@own
def test_check_finite_raises_by_name_before_anything_is_written(entry: Entry):
    params = entry.params()
    optimizer = entry(params.items(), check_finite=True)
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    set_gradients(params, 2)
    params["row"].grad[0, 3] = math.nan
    with pytest.raises(ValueError, match=r"group 0.*'row'.*not finite"):
        optimizer.step()
    assert_same(snapshot(optimizer, params), before)
    train(optimizer, params, range(2, 3))
    assert not torch.equal(params["row"], before["row"]["weight"])


@own
def test_check_finite_of_one_group_raises_before_another_counts(entry: Entry):
    params = entry.params()
    groups = [{"params": [params["wide"]]}, {"params": [params["tall"]], "check_finite": True}]
    optimizer = entry(groups)
    named = {name: params[name] for name in ("wide", "tall")}
    before = snapshot(optimizer, named)
    for p in named.values():
        p.grad = torch.full_like(p, math.nan)
    with pytest.raises(ValueError, match=r"group 1.*not finite"):
        optimizer.step()
    assert_same(snapshot(optimizer, named), before)


@own
@pytest.mark.parametrize("lr", [math.nan, math.inf, -0.1])
@pytest.mark.parametrize("settings", [{}, {"weight_decay": 0.0}], ids=["decay", "no decay"])
def test_a_bad_lr_is_refused_at_construction_and_at_step_time(entry: Entry, lr: float, settings):
    settings = settings | {"hold": "decay"} if entry.held and settings else settings
    with pytest.raises(ValueError, match=r"(?i)lr|learning rate"):
        entry(entry.params(), lr=lr, **settings)
    params = entry.params()
    optimizer = entry([{"params": list(params.values()), "name": "all"}], **settings)
    before = snapshot(optimizer, params)
    optimizer.param_groups[0]["lr"] = lr
    set_gradients(params, 0)
    with pytest.raises(ValueError, match=r'group 0 \("all"\).*lr='):
        optimizer.step()
    assert_same(snapshot(optimizer, params), before)


@own
def test_unknown_keywords_are_refused(entry: Entry):
    with pytest.raises(TypeError, match="weight_decy"):
        entry(entry.params(), weight_decy=0.1)


@entries(lambda entry: entry.own and "MuonC" not in entry.name)
def test_momentum_is_refused_where_it_could_mean_two_things(entry: Entry):
    with pytest.raises(TypeError, match="alpha"):
        entry(entry.params(), momentum=0.9)


# --- mixed precision, compilation, devices


@every
def test_a_grad_scaler_skips_on_inf_and_otherwise_changes_nothing(entry: Entry):
    params, plain = entry.params(), entry.params()
    optimizer, reference = entry(params), entry(plain)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for t in range(5):
        overflow = t == 2
        set_gradients(params, t, scale=scaler.get_scale(), pull=0.0)
        scaler.scale(torch.ones(()))  # as a loss would be: makes the scale tensor
        if overflow:
            params["wide"].grad[0, 0] = math.inf
        before = {name: p.detach().clone() for name, p in params.items()}
        scaler.step(optimizer)
        scaler.update()
        if overflow:
            assert all(torch.equal(p, before[name]) for name, p in params.items())
            assert scaler.get_scale() == 2.0**9
        else:
            set_gradients(plain, t, pull=0.0)
            reference.step()
    for name in params:
        torch.testing.assert_close(params[name], plain[name], rtol=1e-6, atol=1e-6)


@entries(slow=lambda entry: entry.name != "ScionC")  # seconds each
def test_a_compiled_step_equals_eager_and_stops_compiling(entry: Entry):
    """While lr, alpha and C^2 change there is one compilation (torch's AdamW: two, Muon: three), and none after the
    third step.
    """
    params, plain = entry.params(), entry.params()
    optimizer, reference = entry(params), entry(plain)
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(optimizer.step, backend=counter)
    counts = []
    for t in range(7):
        for each, values, step in ((optimizer, params, compiled), (reference, plain, reference.step)):
            for group in each.param_groups:
                group["lr"] = LR * ratio(t)
                if "alpha" in group:
                    group["alpha"] = 0.1 + 0.03 * t
                if group.get("steady_norm_sq") is not None:
                    group["steady_norm_sq"] = 1.2 + 0.1 * t
            set_gradients(values, t)
            step()
        counts.append(int(counter.frame_count))
    torch._dynamo.reset()
    assert 1 <= counts[-1] <= entry.compilations
    assert counts[2:] == [counts[-1]] * 5
    for name in params:
        torch.testing.assert_close(params[name], plain[name], rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@entries(lambda entry: entry.own and not entry.engine and entry.tensor_lr)
def test_a_compiled_step_with_a_tensor_lr_stops_compiling(entry: Entry):
    params = entry.params()
    optimizer = entry(params, lr=torch.tensor(LR))
    torch._dynamo.reset()
    counter = CompileCounter()
    compiled = torch.compile(optimizer.step, backend=counter)
    counts = []
    for t in range(6):
        optimizer.param_groups[0]["lr"].fill_(LR * ratio(t))
        set_gradients(params, t)
        compiled()
        counts.append(int(counter.frame_count))
    torch._dynamo.reset()
    assert counts[-1] <= 2
    assert counts[2:] == [counts[-1]] * 4


@entries(lambda entry: entry.engine, slow=lambda entry: entry.name not in ("ScionC", "MuonC"))  # see test_no_sync.py
def test_a_step_never_waits_for_the_device(entry: Entry):
    """Fake tensors have no values: .item(), bool() and nonzero() raise on them."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = {name: nn.Parameter(torch.empty(p.shape)) for name, p in entry.params().items() if p.numel()}
        optimizer = entry(params)
        for _ in range(2):
            for p in params.values():
                p.grad = torch.empty_like(p)
            optimizer.step()


def test_every_own_optimizer_is_registered():
    """A new class in steadynorm.optim comes under the contract automatically."""
    from steadynorm import optim

    known = {type(entry(entry.params())).__name__ for entry in REGISTRY}
    assert set(optim.__all__) <= known
    assert len({entry.name for entry in REGISTRY}) == len(REGISTRY)


def test_gradients_of_the_contract_are_reproducible():
    """They depend on names, not on order; otherwise the tests above would prove nothing."""
    pairs = itertools.product(("wide", "tall"), (0, 1))
    values = [noise(name, t, (3,)) for name, t in pairs]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(values, 2))
    assert torch.equal(values[0], noise("wide", 0, (3,)))
