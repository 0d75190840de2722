"""torch's test matrix, its second part: state dicts, groups, hooks, copies; docs/torch-harness.md says which test is which."""

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import OptimizerInfo
from torch_matrix import all_inputs, assert_same_state, every, every_and_corrected, model_of, problem, train
from torch_optims import CORRECTED, LR, NEEDS

pytestmark = pytest.mark.slow  # the contract table has the same themes; this is torch's own matrix of them

# --- saving and loading


@every_and_corrected
@pytest.mark.parametrize("named", [(False, False), (True, False), (False, True), (True, True)])
def test_state_dict_deterministic(info: OptimizerInfo, named: tuple[bool, bool]):
    """A loaded optimizer goes on as the one that was saved, and its own state dict is the same."""

    def give(params: list[nn.Parameter], names: bool) -> list[Any]:
        return [(f"name{k}", p) for k, p in enumerate(params)] if names else params

    for kwargs in all_inputs(info):
        (params, closure), (clones, closure_too) = problem(), problem()
        optimizer = info.optim_cls(give(params, named[0]), **kwargs)
        train(optimizer, closure, 10)
        for p, q in zip(clones, params, strict=True):
            p.data.copy_(q.data)
        other = info.optim_cls(give(clones, named[1]), **kwargs)
        saved = optimizer.state_dict()
        kept = copy.deepcopy(saved)
        other.load_state_dict(copy.deepcopy(saved) if info is CORRECTED else saved)  # torch's would share the tensors
        assert_same_state(saved, kept)  # loading changes nothing in what was loaded
        for _ in range(5):
            optimizer.step(closure)
            other.step(closure_too)
            assert all(torch.equal(p, q) for p, q in zip(params, clones, strict=True)), kwargs
        assert_same_state(optimizer.state_dict(), other.state_dict(), names=False)
        other.param_groups.extend(other.param_groups)
        assert other.state_dict()["param_groups"][0]["params"] == other.state_dict()["param_groups"][-1]["params"]


@every
def test_can_load_older_state_dict(info: OptimizerInfo):
    """From before a flag existed: it keeps the value it was made with; AdamC as torch's AdamW: it was False then."""
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
            assert made[1].state_dict()["param_groups"][0]["param_names"] == [
                "0.weight",
                "0.bias",
                "2.weight",
                "2.bias",
            ]


@every_and_corrected
@pytest.mark.parametrize("named", [False, True])
def test_save_load_equality_with_weights_only(info: OptimizerInfo, named: bool):
    for kwargs in all_inputs(info):
        params, closure = problem()
        optimizer = info.optim_cls([(f"p{k}", p) for k, p in enumerate(params)] if named else params, **kwargs)
        train(optimizer, closure)
        buffer = io.BytesIO()
        torch.save(optimizer.state_dict(), buffer)
        for weights_only in (False, True):
            buffer.seek(0)
            assert_same_state(torch.load(buffer, weights_only=weights_only), optimizer.state_dict())


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
    """More or fewer groups, other sizes, a state that is no state: nothing changes."""
    need = NEEDS.get(info.name, {})
    params, closure = problem()
    optimizer = info.optim_cls(params, **need)
    train(optimizer, closure)
    before = copy.deepcopy(optimizer.state_dict())
    two, _ = problem()
    others = {
        "number of parameter groups": info.optim_cls([{"params": [p]} for p in two], **need).state_dict(),
        "size": info.optim_cls(two[:1], **need).state_dict(),
        "another model": copy.deepcopy(before),
    }
    others["another model"]["state"][0] |= dict.fromkeys(others["another model"]["state"][0], 3.0)
    for text, saved in others.items():
        with pytest.raises(ValueError, match=text):
            optimizer.load_state_dict(saved)
        assert_same_state(optimizer.state_dict(), before)


# --- the order of groups


def two_groups(info: OptimizerInfo, kwargs: dict[str, Any], *, backwards: bool = False, names: bool = True) -> Any:
    """Two groups of one shape, of other lr and decay, named or not, in this order or the other."""
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
    """In the state dict and in the optimizer that loads it: the run goes on to the bit, each group with its own settings."""
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
    """As torch's does, whatever the names: state and settings of the k-th saved group go to the k-th group."""
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


@every
def test_groups_of_other_shapes_in_another_order_are_refused(info: OptimizerInfo):
    """torch would load a state of the wrong shape; nothing changes here."""
    params, closure = problem()
    need = NEEDS.get(info.name, {})
    optimizer = info.optim_cls([{"params": [p]} for p in params], **need)
    train(optimizer, closure)
    before = copy.deepcopy(optimizer.state_dict())
    saved = copy.deepcopy(before)
    saved["param_groups"].reverse()
    with pytest.raises(ValueError, match=r"group 0: the checkpoint has \w+ of shape \(10,\) for .* of another model"):
        optimizer.load_state_dict(saved)
    assert_same_state(optimizer.state_dict(), before)


@every
def test_errors_name_the_group(info: OptimizerInfo):
    for k, name in enumerate(("body", "head")):
        optimizer, params = two_groups(info, NEEDS.get(info.name, {}))
        before = [p.detach().clone() for p in params.values()]
        optimizer.param_groups[k]["lr"] = -1.0
        with pytest.raises(ValueError, match=rf'group {k} \("{name}"\).*lr=-1'):
            step_all(optimizer, params, 1, seed=0)
        assert all(torch.equal(p, old) for p, old in zip(params.values(), before, strict=True))


# --- hooks


def put_test(optimizer: Any) -> None:
    optimizer.state["test"] = 1


def take_test(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["ran_state_dict_pre_hook"] = state_dict["state"].pop("test", None) is not None
    return state_dict


def one(info: OptimizerInfo, kwargs: dict[str, Any]) -> Any:
    return info.optim_cls([nn.Parameter(torch.rand(2, 3))], **kwargs)


@every_and_corrected
def test_state_dict_pre_hook(info: OptimizerInfo):
    """What a hook put into the state is saved, loaded and copied along."""
    for kwargs in all_inputs(info):
        optimizer = one(info, kwargs)
        optimizer.register_state_dict_pre_hook(put_test)
        saved = optimizer.state_dict()
        assert saved["state"]["test"] == 1
        other = one(info, kwargs)
        other.load_state_dict(saved)
        assert other.state["test"] == copy.deepcopy(other).state["test"] == 1


@every_and_corrected
def test_state_dict_post_hook(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        optimizer = one(info, kwargs)
        optimizer.register_state_dict_post_hook(take_test)
        assert not optimizer.state_dict()["ran_state_dict_pre_hook"]


@every_and_corrected
def test_state_dict_pre_post_hook(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        optimizer = one(info, kwargs)
        optimizer.register_state_dict_pre_hook(put_test)
        optimizer.register_state_dict_post_hook(take_test)
        saved = optimizer.state_dict()
        assert "test" not in saved["state"]
        assert saved["ran_state_dict_pre_hook"]


def set_lr(optimizer: Any, state_dict: dict[str, Any]) -> None:
    state_dict["param_groups"][0]["lr"] = 0.002


def replace_lr(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    changed = copy.deepcopy(state_dict)
    changed["param_groups"][0]["lr"] = 0.003
    return changed


def note_lr(optimizer: Any) -> None:
    optimizer.noted = optimizer.param_groups[0]["lr"]


@every_and_corrected
def test_load_state_dict_pre_hook_and_prepend(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        optimizer = one(info, kwargs)
        saved = optimizer.state_dict()
        optimizer.register_load_state_dict_pre_hook(set_lr)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.002
        optimizer.register_load_state_dict_pre_hook(replace_lr, prepend=True)
        optimizer.load_state_dict(saved)
        assert optimizer.param_groups[0]["lr"] == 0.002  # the other hook came later


@every_and_corrected
def test_load_state_dict_post_hook(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        optimizer = one(info, kwargs)
        optimizer.register_load_state_dict_post_hook(note_lr)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.noted == optimizer.param_groups[0]["lr"]


@every_and_corrected
def test_load_state_dict_pre_post_hook(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        optimizer = one(info, kwargs)
        optimizer.register_load_state_dict_pre_hook(replace_lr)
        optimizer.register_load_state_dict_post_hook(note_lr)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.noted == 0.003


@every_and_corrected
@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_step_hooks_until_removed(info: OptimizerInfo, register: str):
    for kwargs in all_inputs(info):
        seen: list[Any] = []
        optimizer = one(info, kwargs)
        handle = getattr(optimizer, register)(lambda opt, args, kw, seen=seen: seen.append(opt))
        optimizer.step()
        optimizer.step()
        handle.remove()
        optimizer.step()
        assert len(seen) == 2
        assert all(each is optimizer for each in seen)


@every_and_corrected
def test_step_all_hooks(info: OptimizerInfo):
    """Global before local before the step, and back; the hooks of another optimizer are its own."""
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


@every_and_corrected
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_deepcopy_copies_all_public_attrs(info: OptimizerInfo, how: Callable[[Any], Any]):
    """All of them, with their values, and the copy goes on as the original does, at another lr; neither moves the other."""
    for kwargs in all_inputs(info):
        params, closure = problem()
        optimizer = info.optim_cls(params, **kwargs)
        train(optimizer, closure)
        twin = how(optimizer)
        copies = [p for group in twin.param_groups for p in group["params"]]
        public = {key for each in (optimizer, twin) for key in vars(each) if not key.startswith("_")}
        assert public >= {"defaults", "state", "param_groups"}
        for key in public - {"defaults", "state", "param_groups"}:
            here, there = (getattr(each, key) for each in (optimizer, twin))
            assert here == there or not (here or there), key  # observed: () or []
        assert {"differentiable": False} | optimizer.defaults == twin.defaults  # torch puts it there
        assert_same_state(optimizer.state_dict(), twin.state_dict())
        before = [p.detach().clone() for p in params]
        for t in range(3):
            for each, own in ((optimizer, params), (twin, copies)):
                torch.manual_seed(t)
                for p in own:
                    p.grad = torch.randn_like(p)
                for group in each.param_groups:
                    group["lr"] = group["lr"] * 0.7
            twin.step()
            if t == 0:
                assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))
            optimizer.step()
            assert all(torch.equal(p, q) for p, q in zip(params, copies, strict=True)), kwargs
            assert_same_state(optimizer.state_dict(), twin.state_dict())


@every
def test_profiler_names_the_step(info: OptimizerInfo):
    """As Optimizer.step#<class>.step: what torch's profiler, and every tool that reads it, looks for."""
    optimizer = one(info, NEEDS.get(info.name, {}))
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2, 3)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        optimizer.step()
    names = [event.name for event in profile.events()]
    assert names.count(f"Optimizer.step#{info.name}.step") == 1
