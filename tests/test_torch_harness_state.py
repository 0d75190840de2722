"""The second part of torch's test matrix: state dicts, groups, hooks; docs/torch-harness.md says which test is which."""

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import OptimizerInfo
from torch_matrix import all_inputs, assert_same_state, every, every_and_corrected, model_of, problem, train
from torch_optims import LR, NEEDS

pytestmark = pytest.mark.slow  # every setting of every optimizer

# --- saving and loading


@every
def test_can_load_older_state_dict(info: OptimizerInfo):
    """Before a flag existed, it keeps the value it was made with; AdamC, as torch's AdamW, takes False."""
    for kwargs in all_inputs(info):
        params, closure = problem()
        optimizer = info.optim_cls(params, **kwargs)
        train(optimizer, closure)
        old = copy.deepcopy(optimizer.state_dict())
        for group in old["param_groups"]:
            for flag in info.not_og_supported_flags:
                del group[flag]
        for state in old["state"].values():
            del state["skipped"]  # torch's AdamW has none, nor had our first version
        optimizer.load_state_dict(old)
        train(optimizer, closure)
        assert optimizer.param_groups[0]["maximize"] == (info.name != "AdamC" and kwargs.get("maximize", False))
        assert optimizer.skipped_steps() == 0


@every_and_corrected
@pytest.mark.parametrize("named", [(False, False), (True, False), (False, True), (True, True)])
def test_can_load_from_to_named_state_dict(info: OptimizerInfo, named: tuple[bool, bool]):
    for kwargs in all_inputs(info):
        model, x = model_of(torch.float32)
        made = [info.optim_cls(model.named_parameters() if names else model.parameters(), **kwargs) for names in named]
        model(x).sum().backward()
        made[0].step()
        made[1].load_state_dict(copy.deepcopy(made[0].state_dict()))
        made[1].step()
        if any(named):
            groups = made[1].state_dict()["param_groups"]
            names = [name for group in groups for name in group["param_names"]]
            assert sorted(names) == ["0.bias", "0.weight", "2.bias", "2.weight"]


@every_and_corrected
def test_load_nontensor_step(info: OptimizerInfo):
    """torch once saved Adam's step as a number: it is the same step."""
    for kwargs in all_inputs(info):
        (params, closure), (plain, closure_too) = problem(), problem()
        optimizer, reference = info.optim_cls(params, **kwargs), info.optim_cls(plain, **kwargs)
        train(optimizer, closure)
        train(reference, closure_too)
        old = copy.deepcopy(optimizer.state_dict())
        for state in old["state"].values():
            state |= {key: value.item() for key, value in state.items() if value.ndim == 0}
        optimizer.load_state_dict(old)
        train(optimizer, closure)
        train(reference, closure_too)
        assert all(torch.equal(p, q) for p, q in zip(params, plain, strict=True))
        assert_same_state(optimizer.state_dict(), reference.state_dict())


@every
def test_load_of_other_groups_is_refused(info: OptimizerInfo):
    """More or fewer groups, other sizes or an invalid state are refused, and nothing changes."""
    need = NEEDS.get(info.name, {})
    params, closure = problem()
    optimizer = info.optim_cls(params, **need)
    train(optimizer, closure)
    before = copy.deepcopy(optimizer.state_dict())
    two, more = problem()[0], nn.Parameter(torch.ones(2))
    others = {
        "number of parameter groups": info.optim_cls([{"params": [p]} for p in [*two, more]], **need).state_dict(),
        "size": info.optim_cls([*two, more], **need).state_dict(),
        "another model": copy.deepcopy(before),
    }
    others["another model"]["state"][0] |= dict.fromkeys(others["another model"]["state"][0], 3.0)
    for text, saved in others.items():
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(saved)
        assert_same_state(optimizer.state_dict(), before)


# --- the order of groups


def two_groups(info: OptimizerInfo, kwargs: dict[str, Any], *, backwards: bool = False, names: bool = True) -> Any:
    """Return two groups of one shape, with different lr and decay, named or not, in this order or the other."""
    torch.manual_seed(3)
    params = {name: nn.Parameter(torch.randn(4, 3)) for name in ("body", "head")}
    own = {"body": {"lr": LR}, "head": {"lr": LR / 2, "weight_decay": 0.05}}
    order = ["head", "body"] if backwards else ["body", "head"]
    groups = [{"params": [(name, params[name])] if names else [params[name]], **own[name]} for name in order]
    if names:
        groups = [{"name": name, **group} for name, group in zip(order, groups, strict=True)]
    rest = {key: value for key, value in kwargs.items() if key not in ("lr", "weight_decay")}
    return info.optim_cls(groups, **rest), params


def step_all(optimizer: Any, params: dict[str, nn.Parameter], steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for p in params.values():
            p.grad = torch.randn(p.shape, generator=generator)
        optimizer.step()


@every_and_corrected
def test_groups_in_another_order(info: OptimizerInfo):
    """Whether the state dict or the optimizer is reordered, the run resumes to the bit, each group with its own settings."""
    for kwargs in all_inputs(info):
        (first, params), (second, others) = two_groups(info, kwargs), two_groups(info, kwargs, backwards=True)
        step_all(first, params, 3, seed=0)
        saved = copy.deepcopy(first.state_dict())
        saved["param_groups"].reverse()
        second.load_state_dict(saved)
        assert [group["name"] for group in second.param_groups] == ["head", "body"]
        for name, p in others.items():
            p.data.copy_(params[name].data)
        step_all(first, params, 3, seed=1)
        step_all(second, others, 3, seed=1)
        assert all(torch.equal(params[name], others[name]) for name in params), kwargs
        for name, k in (("body", 1), ("head", 0)):
            mine, theirs = second.param_groups[k], first.param_groups[1 - k]
            assert {key: value for key, value in mine.items() if key != "params"} == {
                key: value for key, value in theirs.items() if key != "params"
            }
            for key, value in first.state[params[name]].items():
                assert torch.equal(value, second.state[others[name]][key]), key


@every_and_corrected
@pytest.mark.parametrize("names", [False, True])
def test_loading_goes_by_position(info: OptimizerInfo, names: bool):
    """As in torch, names play no part: state and settings of the k-th saved group go to the k-th group."""
    kwargs = NEEDS.get(info.name, {})
    (first, params), (second, others) = (
        two_groups(info, kwargs, backwards=backwards, names=names) for backwards in (False, True)
    )
    step_all(first, params, 3, seed=0)
    saved = first.state_dict()
    second.load_state_dict(copy.deepcopy(saved))
    assert_same_state(second.state_dict(), saved)
    assert second.param_groups[0]["params"][0] is others["head"]  # which trains as "body" from now on
    plain = [torch.optim.SGD([{"params": [(n, p)], "lr": lr} for n, p, lr in each]) for each in (
        [("body", params["body"], 1.0), ("head", params["head"], 2.0)],
        [("head", others["head"], 2.0), ("body", others["body"], 1.0)],
    )]  # fmt: skip
    plain[1].load_state_dict(plain[0].state_dict())
    assert [group["lr"] for group in plain[1].param_groups] == [1.0, 2.0]
    assert [group["param_names"] for group in plain[1].param_groups] == [["body"], ["head"]]


# --- hooks


def one(info: OptimizerInfo, kwargs: dict[str, Any]) -> Any:
    return info.optim_cls([nn.Parameter(torch.rand(2, 3))], **kwargs)


@every_and_corrected
def test_state_dict_hooks(info: OptimizerInfo):
    """What a hook puts into the state is saved, loaded and copied along; a later hook may remove it from what is saved."""

    def put(optimizer: Any) -> None:
        optimizer.state["test"] = 1

    def take(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return state_dict | {"taken": state_dict["state"].pop("test", None)}

    for kwargs in all_inputs(info):
        optimizer, other = one(info, kwargs), one(info, kwargs)
        optimizer.register_state_dict_pre_hook(put)
        saved = optimizer.state_dict()
        assert saved["state"]["test"] == 1
        other.load_state_dict(saved)
        assert other.state["test"] == copy.deepcopy(other).state["test"] == 1
        optimizer.register_state_dict_post_hook(take)
        saved = optimizer.state_dict()
        assert saved["taken"] == 1 and "test" not in saved["state"]


@every_and_corrected
def test_load_state_dict_hooks(info: OptimizerInfo):
    """Hooks before loading may change or replace what is loaded, in order; one after it sees the result."""

    def set_lr(optimizer: Any, state_dict: dict[str, Any]) -> None:
        state_dict["param_groups"][0]["lr"] = 0.002

    def replace_lr(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        changed = copy.deepcopy(state_dict)
        changed["param_groups"][0]["lr"] = 0.003
        return changed

    for kwargs in all_inputs(info):
        optimizer, lrs = one(info, kwargs), []
        saved = optimizer.state_dict()
        optimizer.register_load_state_dict_post_hook(lambda opt, lrs=lrs: lrs.append(opt.param_groups[0]["lr"]))
        optimizer.register_load_state_dict_pre_hook(replace_lr)
        optimizer.load_state_dict(saved)
        optimizer.register_load_state_dict_pre_hook(set_lr)
        optimizer.load_state_dict(saved)
        optimizer.register_load_state_dict_pre_hook(replace_lr, prepend=True)
        optimizer.load_state_dict(saved)
        assert lrs == [0.003, 0.002, 0.002]


@every_and_corrected
def test_step_all_hooks(info: OptimizerInfo):
    """Global hooks run before local ones before the step, and back; the hooks of another optimizer are its own."""
    for kwargs in all_inputs(info):
        seen: list[int] = []
        note = lambda k: lambda opt, args, kw: seen.append(k)  # noqa: E731, B023
        optimizer, other = one(info, kwargs), torch.optim.SGD([nn.Parameter(torch.ones(2))])
        handles = [register_optimizer_step_pre_hook(note(0)), register_optimizer_step_post_hook(note(5))]
        try:
            for each in (optimizer, other):
                handles += [each.register_step_pre_hook(note(1)), each.register_step_post_hook(note(2))]
            for each in (optimizer, other, optimizer):
                each.step()
            assert seen == [0, 1, 2, 5] * 3
        finally:
            for handle in handles:
                handle.remove()
        optimizer.step()
        assert len(seen) == 12


# --- the object


@every
def test_profiler_names_the_step(info: OptimizerInfo):
    """torch's profiler, and every tool that reads it, looks for Optimizer.step#<class>.step."""
    optimizer = one(info, NEEDS.get(info.name, {}))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [event.name for event in profile.events()]
    assert names.count(f"Optimizer.step#{info.name}.step") == 1
