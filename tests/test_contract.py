"""The contract that every optimizer of tests/contract.py keeps."""

import copy
import itertools
import math
import pickle
from collections.abc import Callable, Collection
from typing import Any

import pytest
import torch
from contract import (
    LR,
    REGISTRY,
    Entry,
    Params,
    assert_same,
    noise,
    parameters,
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


def entries(test: Callable[[Entry], bool] = lambda entry: True, slow: Collection[str] = ()) -> Any:
    """Parametrise over the registry, or those of it that `test` holds for; some of them are slow."""
    marks = {name: [pytest.mark.slow] for name in slow}
    chosen = [pytest.param(entry, id=entry.name, marks=marks.get(entry.name, ())) for entry in REGISTRY if test(entry)]
    return pytest.mark.parametrize("entry", chosen)


every = entries()
own = entries(lambda entry: entry.own)
engine = entries(lambda entry: entry.engine)


# --- stop, save, resume


@every
def test_resumed_run_equals_unbroken_run(entry: Entry, tmp_path):
    """Mid-schedule, through a file, into an instance built with another lr: the checkpoint alone decides."""

    def scheduled(params: Params, **settings: Any) -> tuple[Any, LambdaLR]:
        optimizer = entry(params, **settings)
        return optimizer, LambdaLR(optimizer, ratio)

    def go(optimizer: Any, scheduler: LambdaLR, params: Params, steps: range) -> None:
        for t in steps:
            vary(optimizer, t)
            set_gradients(params, t)
            optimizer.step()
            scheduler.step()

    params = entry.params()
    optimizer, scheduler = scheduled(params)
    go(optimizer, scheduler, params, range(7))
    saved = {"model": dict(params), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(saved, tmp_path / "checkpoint.pt")
    go(optimizer, scheduler, params, range(7, 14))

    loaded = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    resumed = {name: nn.Parameter(p.detach()) for name, p in loaded["model"].items()}
    new, new_scheduler = scheduled(resumed, lr=0.3 * LR)
    new.load_state_dict(state_dict=loaded["optimizer"])
    new_scheduler.load_state_dict(loaded["scheduler"])
    go(new, new_scheduler, resumed, range(7, 14))
    assert_same(snapshot(new, resumed), snapshot(optimizer, params))


@own
def test_checkpoint_before_the_first_step_has_state_for_every_parameter(entry: Entry):
    """Made at construction, so that every rank and every checkpoint has the same keys."""
    params = entry.params()
    optimizer = entry(params)
    before = optimizer.state_dict()["state"]
    assert sorted(before) == list(range(len(params)))
    train(optimizer, params, range(2))
    after = optimizer.state_dict()["state"]
    assert {k: set(v) for k, v in before.items()} == {k: set(v) for k, v in after.items()}


@every
def test_group_values_are_plain(entry: Entry):
    """They load with weights_only=True, and mean the same in any version."""
    params = entry.params()
    optimizer = entry(params)
    train(optimizer, params, range(2))
    for group in optimizer.state_dict()["param_groups"]:
        for key, value in group.items():
            for item in value if isinstance(value, list | tuple) else [value]:
                assert item is None or type(item) in (float, int, str, bool), (key, value)


@engine
def test_state_of_a_bf16_model_is_loaded_in_fp32(entry: Entry):
    """torch would cast it to the parameter's dtype."""
    params = entry.params(torch.bfloat16)
    optimizer = entry(params)
    train(optimizer, params, range(3))
    assert any(
        not torch.equal(value, value.bfloat16().to(value.dtype)) for value in optimizer.state[params["wide"]].values()
    )
    new = entry(other := entry.params(torch.bfloat16))
    new.load_state_dict(optimizer.state_dict())
    for name, p in params.items():
        for key, value in optimizer.state[p].items():
            loaded = new.state[other[name]][key]
            assert loaded.dtype == value.dtype
            assert torch.equal(loaded, value), (name, key)


@own
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_skip_counter_survives_a_checkpoint_exactly(entry: Entry, dtype):
    if dtype == torch.float16 and not entry.engine:
        return  # AdamC refuses it
    params = entry.params(dtype)
    optimizer = entry(params)
    optimizer.state[params["wide"]]["skipped"].fill_(100_001)  # no bf16 or fp16 number
    new = entry(entry.params(dtype))
    new.load_state_dict(optimizer.state_dict())
    assert new.skipped_steps().item() == 100_001


@own
def test_checkpoint_of_another_model_is_refused_by_name(entry: Entry):
    other = parameters({"a": (4, 6), "b": (3, 2)})
    saved = entry(other).state_dict()
    params = parameters({"a": (4, 6), "b": (2, 3)})
    optimizer = entry(params.items())
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    with pytest.raises(ValueError, match=r"'b'.*another model"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer, params), before)


@every
@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"])
def test_copy_of_model_and_optimizer_continues_as_the_original(entry: Entry, how):
    params = entry.params()
    optimizer = entry(params)
    train(optimizer, params, range(6))
    params_too, optimizer_too = how((params, optimizer))
    train(optimizer, params, range(6, 12))
    train(optimizer_too, params_too, range(6, 12))
    assert_same(snapshot(optimizer_too, params_too), snapshot(optimizer, params))


# --- torch's calling conventions


@every
def test_closure_is_called_once_with_grad_enabled_and_its_loss_returned(entry: Entry):
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
    """Also after torch's own AdamW has been used in the process, whose step AdamC builds on."""
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
def test_pre_hook_may_change_gradients(entry: Entry):
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
def test_zero_grad_clears(entry: Entry):
    params = entry.params()
    optimizer = entry(params)
    set_gradients(params, 0)
    optimizer.zero_grad(set_to_none=False)
    assert all(not p.grad.any() for p in params.values())
    optimizer.zero_grad()
    assert all(p.grad is None for p in params.values())


@every
def test_zero_gradient_without_decay_moves_nothing(entry: Entry):
    """Zero input gives a zero update, never NaN."""
    params = entry.params()
    optimizer = entry(params, weight_decay=0.0)
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
def test_missing_gradient_leaves_weights_and_state_alone(entry: Entry):
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
def test_step_without_any_gradient_is_allowed(entry: Entry):
    params = entry.params()
    optimizer = entry(params)
    before = snapshot(optimizer, params)
    optimizer.step()
    assert_same(snapshot(optimizer, params), before)


@every
def test_frozen_parameter_stays_and_others_do_not_notice(entry: Entry):
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
def test_added_group_trains_as_an_optimizer_of_its_own(entry: Entry):
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
def test_tensor_lr_equals_float_lr(entry: Entry):
    params, plain = entry.params(), entry.params()
    optimizer = entry(params, lr=torch.tensor(LR, dtype=torch.float64))
    reference = entry(plain)
    train(optimizer, params, range(6))
    train(reference, plain, range(6))
    assert_same(snapshot(optimizer, params), snapshot(reference, plain), rtol=1e-6)
    assert isinstance(optimizer.param_groups[0]["lr"], Tensor)


@every
def test_lr_zero_leaves_weights_alone_and_is_not_taken_for_the_peak(entry: Entry):
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
    """lambda of the latest step (own scalars for ScionC, whose decay depends on the parameter)."""
    if hasattr(optimizer, "weight_decay_of"):
        return optimizer.weight_decay_of(p)
    return next(group for group in optimizer.param_groups if any(p is q for q in group["params"]))["weight_decay"]


# --- schedulers


def warmup(optimizer: Any) -> LRScheduler:
    return LambdaLR(optimizer, ratio)


def sequential(optimizer: Any) -> LRScheduler:
    parts = [LinearLR(optimizer, 0.1, 1.0, 4), CosineAnnealingLR(optimizer, 6), ConstantLR(optimizer, 0.1, 100)]
    return SequentialLR(optimizer, parts, milestones=[4, 9])


SCHEDULERS: dict[str, Callable[[Any], Any]] = {
    "LambdaLR": warmup,
    "CosineAnnealingLR": lambda optimizer: CosineAnnealingLR(optimizer, 12),
    "SequentialLR": sequential,
    "OneCycleLR": lambda optimizer: OneCycleLR(optimizer, max_lr=LR, total_steps=16, cycle_momentum=False),
    "ReduceLROnPlateau": lambda optimizer: ReduceLROnPlateau(optimizer, patience=1, factor=0.5),
}


@every
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_decay_follows_every_scheduler(entry: Entry, scheduler: str):
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
def test_decay_follows_one_cycle_with_its_momentum_cycling(entry: Entry):
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


# --- numbers


@engine
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_state_of_half_precision_parameters_is_that_of_fp32_ones(entry: Entry, dtype):
    """Momentum is not rounded to the parameter's precision: fed the same gradients, it is the same bit for bit."""
    half, single = entry.params(dtype), entry.params()
    optimizer, reference = entry(half), entry(single)
    for t in range(5):
        set_gradients(half, t, pull=0.0)
        for name, p in single.items():
            p.grad = half[name].grad.float()
        optimizer.step()
        reference.step()
    for name, p in half.items():
        assert p.dtype == dtype
        assert p.isfinite().all()
        for key, value in optimizer.state[p].items():
            assert torch.equal(value, reference.state[single[name]][key]), (name, key)
        torch.testing.assert_close(p.float(), single[name], rtol=0.05, atol=0.05)


@engine
def test_state_of_fp64_parameters_is_fp64(entry: Entry):
    params = entry.params(torch.float64)
    optimizer = entry(params)
    train(optimizer, params, range(2))
    for p in params.values():
        for key, value in optimizer.state[p].items():
            assert value.shape == () or value.dtype == torch.float64, key
            assert p.dtype == torch.float64


@entries(lambda entry: entry.own and not entry.engine)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_torch_built_state_has_the_dtypes_torch_gives_it(entry: Entry, dtype):
    params, plain = entry.params(dtype), entry.params(dtype)
    optimizer, reference = entry(params), torch.optim.AdamW(plain.values(), lr=LR)
    train(optimizer, params, range(2))
    train(reference, plain, range(2))
    for name, p in params.items():
        assert p.isfinite().all()
        for key, value in reference.state[plain[name]].items():
            assert optimizer.state[p][key].dtype == value.dtype, key


@own
def test_half_precision_with_small_gradients_trains_or_is_refused(entry: Entry):
    """torch's AdamW would divide by a second moment of 0 and an eps of 0."""
    params = entry.params(torch.float16)
    if not entry.engine:
        with pytest.raises(
            ValueError, match=r"AdamC, group 0: parameter 0 .*torch\.float16.*fp32 \(with autocast\) or bf16"
        ):
            entry(params)
        return
    optimizer = entry(params)
    for _ in range(5):
        for p in params.values():
            p.grad = torch.full_like(p, 1e-4)
        optimizer.step()
    assert all(p.isfinite().all() for p in params.values())
    assert optimizer.skipped_steps().item() == 0


@every
def test_non_contiguous_parameters_equal_contiguous_ones(entry: Entry):
    plain = entry.params(torch.float64)
    params = {}
    for name, p in plain.items():
        value = p.detach()
        strided = value.mT.contiguous().mT if value.ndim >= 2 else value
        params[name] = nn.Parameter(strided)
    assert not params["wide"].is_contiguous()
    optimizer, reference = entry(params), entry(plain)
    train(optimizer, params, range(4))
    train(reference, plain, range(4))
    for name, p in params.items():
        torch.testing.assert_close(p, plain[name], rtol=1e-10, atol=1e-10)


@engine
def test_gradients_may_have_other_strides_than_their_parameters(entry: Entry):
    params, plain = entry.params(torch.float64), entry.params(torch.float64)
    optimizer, reference = entry(params), entry(plain)
    set_gradients(params, 0)
    set_gradients(plain, 0)
    params["wide"].grad = params["wide"].grad.mT.contiguous().mT
    optimizer.step()
    reference.step()
    torch.testing.assert_close(params["wide"], plain["wide"], rtol=1e-10, atol=1e-10)


@entries(lambda entry: "scalar" in entry.shapes)
def test_scalar_and_empty_parameters_train(entry: Entry):
    params = entry.params()
    optimizer = entry(params)
    start = params["scalar"].item()
    train(optimizer, params, range(3))
    assert params["scalar"].shape == ()
    assert math.isfinite(params["scalar"].item())
    assert params["scalar"].item() != start
    assert params["empty"].shape == (0, 3)


@entries(lambda entry: entry.own and entry.normalised)
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_gradient_scale_does_not_matter_to_normalised_rules(entry: Entry, scale):
    params, plain = entry.params(), entry.params()
    optimizer, reference = entry(params), entry(plain)
    train(optimizer, params, range(5), scale=scale)
    train(reference, plain, range(5))
    for name in params:
        assert torch.equal(params[name], plain[name]), name


@every
def test_order_and_grouping_of_parameters_change_nothing(entry: Entry):
    """Permuted, and one group each, so that nothing is batched."""
    params, turned, apart = (entry.params(torch.float64) for _ in range(3))
    optimizer = entry(params)
    backwards = entry(list(turned.values())[::-1])
    single = entry([{"params": [p]} for p in apart.values()])
    for each, values in ((optimizer, params), (backwards, turned), (single, apart)):
        train(each, values, range(5))
    assert_same(snapshot(backwards, turned), snapshot(optimizer, params), rtol=1e-10)
    assert_same(snapshot(single, apart), snapshot(optimizer, params), rtol=1e-10)


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
def test_non_finite_gradient_skips_that_parameter_only(entry: Entry, value: float):
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
def test_bad_lr_is_refused_at_construction_and_at_step_time(entry: Entry, lr: float, settings):
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
def test_unknown_keywords_are_refused_and_momentum_explained(entry: Entry):
    with pytest.raises(TypeError, match="alpha"):
        entry(entry.params(), momentum=0.9)
    with pytest.raises(TypeError, match="weight_decy"):
        entry(entry.params(), weight_decy=0.1)


# --- mixed precision, compilation, devices


@every
def test_grad_scaler_skips_on_inf_and_else_changes_nothing(entry: Entry):
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


@entries(
    slow=(
        "Scion",
        "ScionC nesterov",
        "ScionC exact",
        "AdamC foreach",
        "SGDC nesterov",
        "SGDC trace",
        "RenormalizedAdamW",
    )
)  # seconds each
def test_compiled_step_equals_eager_and_stops_compiling(entry: Entry):
    """While lr, alpha and C^2 change: one compilation (torch's AdamW: two, Muon: three), none after the third step."""
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


@entries(lambda entry: entry.own and not entry.engine and entry.tensor_lr)
def test_compiled_step_with_tensor_lr_stops_compiling(entry: Entry):
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


@engine
def test_step_never_waits_for_the_device(entry: Entry):
    """Fake tensors have no values: .item(), bool() and nonzero() raise on them."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        params = {name: nn.Parameter(torch.empty(p.shape)) for name, p in entry.params().items() if p.numel()}
        optimizer = entry(params)
        for _ in range(2):
            for p in params.values():
                p.grad = torch.empty_like(p)
            optimizer.step()


def test_every_own_optimizer_is_registered():
    """A new class in steadynorm.optim comes under the contract."""
    from steadynorm import optim

    known = {type(entry(entry.params())).__name__ for entry in REGISTRY}
    assert set(optim.__all__) <= known
    assert len({entry.name for entry in REGISTRY}) == len(REGISTRY)


def test_gradients_of_the_contract_are_reproducible():
    """Names, not order, decide them: else the tests above would prove nothing."""
    pairs = itertools.product(("wide", "tall"), (0, 1))
    values = [noise(name, t, (3,)) for name, t in pairs]
    assert all(not torch.equal(a, b) for a, b in itertools.combinations(values, 2))
    assert torch.equal(values[0], noise("wide", 0, (3,)))
