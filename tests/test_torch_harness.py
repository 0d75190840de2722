"""torch's own test matrix for optimizers, run on ours: docs/torch-harness.md says which test stands for which of torch's.

The tests have torch's names and check what torch's check, mostly more closely. Not taken over: what needs a GPU, and what
our optimizers refuse (sparse gradients, complex parameters), where the refusal is tested instead.
"""

import copy
import io
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_optims
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.testing._internal.common_optimizers import (
    OptimizerErrorEnum,
    OptimizerInfo,
    _get_optim_inputs_including_global_cliquey_kwargs,
)
from torch_optims import LR, NEEDS, OPTIM_DB, SCHEDULERS

FP64 = torch.float64


def optims(test: Callable[[OptimizerInfo], bool] = lambda info: True) -> Any:
    chosen = [info for info in OPTIM_DB if test(info)]
    return pytest.mark.parametrize("info", chosen, ids=[info.name for info in chosen])


every = optims()
with_impls = optims(lambda info: bool(info.supported_impls))


def all_inputs(info: OptimizerInfo) -> Iterator[dict[str, Any]]:
    """Keyword arguments of every setting, with and without foreach and fused where there are such."""
    for each in _get_optim_inputs_including_global_cliquey_kwargs("cpu", torch.float32, info):
        if not (each.kwargs.get("foreach") and isinstance(each.kwargs.get("lr"), Tensor)):  # torch refuses that
            yield each.kwargs


def problem(
    dtype: torch.dtype = torch.float32, *, contiguous: bool = True
) -> tuple[list[nn.Parameter], Callable[[], Tensor]]:
    """Weight and bias, and a function that computes the loss and its gradients."""
    torch.manual_seed(0)
    if contiguous:
        params = [nn.Parameter(torch.randn(10, 5, dtype=dtype)), nn.Parameter(torch.randn(10, dtype=dtype))]
    else:
        params = [
            nn.Parameter(torch.randn(10, 5, 2, dtype=dtype)[..., 0]),
            nn.Parameter(torch.randn(10, 2, dtype=dtype)[..., 0]),
        ]
    x = torch.randn(5, dtype=dtype)

    def closure() -> Tensor:
        for p in params:
            p.grad = None
        loss = (params[0].mv(x) + params[1]).pow(2).sum()
        loss.backward()
        return loss

    return params, closure


def train(optimizer: Any, closure: Callable[[], Tensor], steps: int = 3) -> None:
    for _ in range(steps):
        optimizer.step(closure)


def assert_same_state(a: dict[str, Any], b: dict[str, Any], *, names: bool = True) -> None:
    """State dicts are equal, to the bit and dtype; names=False: param_names may differ."""
    assert a["state"].keys() == b["state"].keys()
    for key, values in a["state"].items():
        assert values.keys() == b["state"][key].keys()
        for name, value in values.items():
            other = b["state"][key][name]
            assert torch.equal(value, other), (key, name)
            assert value.dtype == other.dtype, (key, name)
    drop = set() if names else {"param_names"}
    groups = [[{k: v for k, v in group.items() if k not in drop} for group in each["param_groups"]] for each in (a, b)]
    assert groups[0] == groups[1]


# --- the description itself


@every
def test_optim_infos_do_not_specify_global_cliquey_kwargs(info: OptimizerInfo):
    for each in info.optim_inputs_func(device="cpu"):
        assert not {"foreach", "fused", "differentiable"} & each.kwargs.keys()


def test_every_own_optimizer_is_described():
    from steadynorm import optim

    assert {info.name for info in OPTIM_DB} == set(optim.__all__)


@every
def test_errors(info: OptimizerInfo):
    """torch's error inputs for all optimizers, in torch's words, and ours."""
    for each in info.optim_error_inputs_func(device="cpu", dtype=torch.float32):
        given = each.optimizer_error_input
        params = [nn.Parameter(torch.ones(3, 2))] if given.params is None else given.params
        if each.error_on == OptimizerErrorEnum.CONSTRUCTION_ERROR:
            expected = pytest.warns if issubclass(each.error_type, Warning) else pytest.raises
            with expected(each.error_type, match=each.error_regex):
                info.optim_cls(params, **given.kwargs)
        else:
            optimizer = info.optim_cls(params, **given.kwargs)
            before = params[0].detach().clone()
            with pytest.raises(each.error_type, match=each.error_regex):
                optimizer.step()
            assert torch.equal(params[0], before)


# --- it trains


@every
@pytest.mark.parametrize("with_lrsched", [False, True])
@pytest.mark.parametrize("contiguous", [True, False])
def test_forloop_goes_right_direction(info: OptimizerInfo, contiguous: bool, with_lrsched: bool):
    for constructors in info.scheduler_inputs if with_lrsched else [[]]:
        for kwargs in all_inputs(info):
            if kwargs.get("fused") and not contiguous:
                continue  # refused: test_optim.py
            params, closure = problem(contiguous=contiguous)
            optimizer = info.optim_cls(params, **kwargs)
            schedulers = [make(optimizer) for make in constructors]
            first = closure().item()
            for _ in range(20):
                loss = optimizer.step(closure)
                for scheduler in schedulers:
                    scheduler.step(*([loss.detach()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            last = closure().item()
            assert last > first if kwargs.get("maximize") else last < first, kwargs


@every
def test_param_group_with_lrscheduler_goes_right_direction(info: OptimizerInfo):
    for constructors in info.scheduler_inputs:
        params, closure = problem()
        groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.02}]
        optimizer = info.optim_cls(groups, **NEEDS.get(info.name, {}))
        schedulers = [make(optimizer) for make in constructors]
        first = closure().item()
        for _ in range(20):
            loss = optimizer.step(closure)
            for scheduler in schedulers:
                scheduler.step(*([loss.detach()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
        assert closure().item() < first


@every
def test_tensor_lr(info: OptimizerInfo):
    """0-d and of one element; what it trains is what a float trains."""
    for kwargs in all_inputs(info):
        if kwargs.get("foreach"):
            continue  # torch refuses a tensor lr there: in test_errors
        for lr in (torch.tensor(1e-3), torch.tensor([1e-3])):
            if lr.ndim and info.name == "AdamC" and kwargs.get("fused"):
                continue  # torch's fused kernel takes a 0-d one only
            (params, closure), (plain, closure_too) = problem(), problem()
            optimizer = info.optim_cls(params, **kwargs | {"lr": lr})
            reference = info.optim_cls(plain, **kwargs | {"lr": lr.item()})
            train(optimizer, closure, 5)
            train(reference, closure_too, 5)
            for p, q in zip(params, plain, strict=True):
                torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


@every
@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_lr_follows_every_torch_scheduler(info: OptimizerInfo, scheduler: str):
    """The lr is what torch's SGD gets from the same scheduler, and a run resumed half-way is the unbroken one."""

    def run(optimizer: Any, schedule: Any, closure: Callable[[], Tensor], steps: int) -> list[float]:
        lrs = []
        for _ in range(steps):
            optimizer.step(closure)
            lrs.append(float(optimizer.param_groups[0]["lr"]))
            schedule.step(*([1.0] if scheduler == "ReduceLROnPlateau" else []))
        return lrs

    make, kwargs = SCHEDULERS[scheduler], NEEDS.get(info.name, {}) | {"lr": LR}
    params, closure = problem()
    optimizer = info.optim_cls(params, **kwargs)
    schedule = make(optimizer)
    lrs = run(optimizer, schedule, closure, 5)
    saved = copy.deepcopy((optimizer.state_dict(), schedule.state_dict(), [p.detach() for p in params]))
    lrs += run(optimizer, schedule, closure, 5)
    plain = torch.optim.SGD(problem()[0], lr=LR)
    assert lrs == run(plain, make(plain), lambda: torch.zeros(()), 10)
    assert len(set(lrs)) > 1

    resumed, closure = problem()
    for p, value in zip(resumed, saved[2], strict=True):
        p.data.copy_(value)
    again = info.optim_cls(resumed, **kwargs)
    schedule_again = make(again)
    again.load_state_dict(saved[0])
    schedule_again.load_state_dict(saved[1])
    run(again, schedule_again, closure, 5)
    assert all(torch.equal(p, q) for p, q in zip(params, resumed, strict=True))


# --- implementations agree


def model_of(dtype: torch.dtype) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(2, 3), nn.Sigmoid(), nn.Linear(3, 1), nn.Sigmoid()).to(dtype)
    return model, torch.arange(1, 7, dtype=torch.float64).div(10).reshape(3, 2).to(dtype)


def compare(make: tuple[Callable[..., Any], Callable[..., Any]], dtype: torch.dtype, tolerance: float) -> None:
    """Seven steps of two optimizers: gradients missing at one, a layer frozen for two, an empty parameter last."""
    optimizers, models = [], []
    for each in make:
        model, x = model_of(dtype)
        empty = nn.Parameter(torch.empty(0, 3, dtype=dtype))
        empty.grad = torch.empty_like(empty)
        optimizers.append(each([*model.parameters(), empty]))
        models.append(model)
    for t in range(7):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            model[2].requires_grad_(t not in (3, 4))
            if t != 2:
                model(x).sum().backward()
            optimizer.step()
        for p, q in zip(models[0].parameters(), models[1].parameters(), strict=True):
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)
            for key, value in optimizers[0].state[p].items():
                torch.testing.assert_close(value, optimizers[1].state[q][key], rtol=tolerance, atol=tolerance)


@every
def test_foreach_matches_forloop(info: OptimizerInfo):
    """Stacked (AdamC: foreach) against a parameter at a time."""
    for each in info.optim_inputs_func(device="cpu"):
        kwargs = each.kwargs
        if "foreach" in info.supported_impls:
            if not isinstance(kwargs.get("lr"), Tensor):
                compare(
                    tuple(lambda params, f=f, k=kwargs: info.optim_cls(params, foreach=f, **k) for f in (True, False)),
                    FP64,
                    1e-7,
                )
            continue
        apart = lambda params, k=kwargs: info.optim_cls([{"params": [p]} for p in params], **k)  # noqa: E731
        compare((lambda params, k=kwargs: info.optim_cls(params, **k), apart), FP64, 1e-7)


@with_impls
@pytest.mark.parametrize("dtype", [FP64, torch.float32, torch.bfloat16])
def test_fused_matches_forloop(info: OptimizerInfo, dtype: torch.dtype):
    """Not in fp16, where torch's AdamW itself, but for the fused one, ends in infinities: 1e-8 is no fp16 number."""
    tolerance = {FP64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for each in info.optim_inputs_func(device="cpu"):
        compare(
            tuple(lambda params, f=f, k=each.kwargs: info.optim_cls(params, fused=f, **k) for f in (True, False)),
            dtype,
            tolerance,
        )


@every
def test_mixed_device_dtype(info: OptimizerInfo):
    """The part that one device can show: dtypes mixed in a group train as each in a group of its own."""
    dtypes = (FP64, torch.float32, torch.float16, torch.bfloat16)

    def fresh() -> list[nn.Parameter]:
        torch.manual_seed(2)
        params = [nn.Parameter(torch.rand(2, 3, dtype=FP64).to(dtype)) for dtype in dtypes * 2]
        for p in params:
            p.grad = torch.rand_like(p)
        return params

    for each in info.optim_inputs_func(device="cpu"):
        together, apart = fresh(), fresh()
        optimizers = (
            info.optim_cls(together, **each.kwargs),
            info.optim_cls([{"params": [p]} for p in apart], **each.kwargs),
        )
        for _ in range(5):
            for optimizer in optimizers:
                optimizer.step()
        for p, q in zip(together, apart, strict=True):
            tolerance = 1e-7 if p.dtype == FP64 else 1e-2
            torch.testing.assert_close(p, q, rtol=tolerance, atol=tolerance)


@every
@pytest.mark.parametrize("default", [FP64, torch.float16])
def test_set_default_dtype_works_with_foreach(info: OptimizerInfo, default: torch.dtype):
    """torch's default dtype is nobody's business: state and results are the same."""
    for kwargs in all_inputs(info):
        (plain, closure), (params, closure_too) = problem(), problem()
        reference = info.optim_cls(plain, **kwargs)
        train(reference, closure)
        before = torch.get_default_dtype()
        try:
            torch.set_default_dtype(default)
            optimizer = info.optim_cls(params, **kwargs)
            train(optimizer, closure_too)
        finally:
            torch.set_default_dtype(before)
        assert all(torch.equal(p, q) for p, q in zip(params, plain, strict=True)), kwargs
        assert_same_state(optimizer.state_dict(), reference.state_dict())


@with_impls
def test_fused_does_not_step_if_foundinf(info: OptimizerInfo):
    for scale in (None, torch.ones(())):
        params = [nn.Parameter(torch.ones(1)) for _ in range(5)]
        for p in params:
            p.grad = torch.ones_like(p)
        optimizer = info.optim_cls(params, fused=True)
        optimizer.grad_scale, optimizer.found_inf = scale, torch.ones(())
        optimizer.step()
        assert all(torch.equal(p, torch.ones(1)) and optimizer.state[p]["step"] == 0 for p in params)


# --- groups and gradients


def without_decay(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Nor a target, which would be refused."""
    return {key: value for key, value in kwargs.items() if key != "steady_norm_sq"} | {"weight_decay": 0.0}


@every
def test_param_groups_weight_decay(info: OptimizerInfo):
    """Decay in one group alone: the other one trains as without."""
    for kwargs in all_inputs(info):
        (params, closure), (plain, closure_too) = problem(), problem()
        optimizer = info.optim_cls([{"params": params[:1]}, {"params": params[1:], "weight_decay": 0.0}], **kwargs)
        first = closure().item()
        reference = info.optim_cls(plain, **without_decay(kwargs))
        optimizer.step(closure)
        reference.step(closure_too)
        torch.testing.assert_close(params[1], plain[1], rtol=1e-6, atol=1e-7)
        train(optimizer, closure, 20)
        last = closure().item()
        assert last > first if kwargs.get("maximize") else last < first, kwargs


@every
def test_param_groups_lr(info: OptimizerInfo):
    """A group's lr wins over the default."""
    for kwargs in all_inputs(info):
        params, closure = problem()
        other = nn.Parameter(torch.randn(2))
        before, first = other.detach().clone(), closure().item()
        group = {"params": params, **kwargs, "lr": kwargs.get("lr", LR)}
        optimizer = info.optim_cls([group, {"params": [other]}], **kwargs | {"lr": 1e-28})
        for _ in range(20):
            closure()
            other.grad = torch.rand_like(other)
            optimizer.step()
        last = closure().item()
        assert last > first if kwargs.get("maximize") else last < first, kwargs
        rtol = 1e-4 if info.name == "RenormalizedAdamW" else 0.0  # the algorithm divides by |theta| + eps
        torch.testing.assert_close(other.detach(), before, rtol=rtol, atol=0)


@every
def test_step_is_noop_when_params_have_no_grad(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        params = [torch.randn(2, 3) for _ in range(2)]
        before = [p.clone() for p in params]
        loss = torch.ones(1)
        optimizer = info.optim_cls(params, **kwargs)
        assert optimizer.step(lambda loss=loss: loss) is loss
        assert all(torch.equal(p, old) for p, old in zip(params, before, strict=True))


@every
def test_step_is_noop_for_zero_grads(info: OptimizerInfo):
    """Without decay, that is; with it, the weights shrink by eta and no more."""
    for kwargs in all_inputs(info):
        p = nn.Parameter(torch.randn(5, 1))
        before = p.detach().clone()
        p.grad = torch.zeros_like(p)
        info.optim_cls([p], **without_decay(kwargs) | {"lr": 1e-3}).step()
        torch.testing.assert_close(p.detach(), before, rtol=1e-6, atol=0)


@every
def test_optimizer_can_be_printed(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        text = repr(info.optim_cls([nn.Parameter(torch.randn(2, 3))], **kwargs))
        assert text.startswith(f"{info.name} (\nParameter Group 0\n")
        assert "    lr: " in text


@every
def test_non_empty_state(info: OptimizerInfo):
    """From the start, so that every checkpoint and rank has the same keys."""
    for kwargs in all_inputs(info):
        optimizer = info.optim_cls(nn.Linear(5, 5).parameters(), **kwargs)
        assert len(optimizer.state) == 2
        assert all(state for state in optimizer.state.values())


@every
def test_add_param_group_errors(info: OptimizerInfo):
    """Refused groups leave the optimizer as it was; a good one trains."""
    params, closure = problem()
    optimizer = info.optim_cls(params[:1], **NEEDS.get(info.name, {}) | {"lr": LR})
    fresh = nn.Parameter(torch.ones(3))
    bad: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"params": params[:1]}, ValueError, "more than one parameter group"),
        ({"params": {fresh}}, TypeError, "ordered collections"),
        ({"params": [1.0]}, TypeError, "can only optimize Tensors"),
        ({"params": [fresh * 2]}, ValueError, "non-leaf"),
        ({"params": [fresh], "lr": -1.0}, ValueError, "group 1.*lr=-1"),
        ({"params": [fresh], "weight_decay": -1.0}, ValueError, "group 1.*weight_decay=-1"),
        ({"params": [("name", fresh)]}, ValueError, "with/without names"),
    ]
    for group, kind, text in bad:
        with pytest.raises(kind, match=text):
            optimizer.add_param_group(group)
        assert len(optimizer.param_groups) == len(optimizer.state) == 1, group
    optimizer.add_param_group({"params": params[1:]})
    before = params[1].detach().clone()
    optimizer.step(closure)
    assert not torch.equal(params[1], before)


@every
def test_complex_is_refused(info: OptimizerInfo):
    """torch takes a complex parameter as two real ones; an lmo or a norm of such a pair would mean something else."""
    for shape in ((10, 5), (10,), (2,)):
        with pytest.raises(ValueError, match=r"group 0.*complex"):
            info.optim_cls([nn.Parameter(torch.randn(shape, dtype=torch.complex64))], **NEEDS.get(info.name, {}))


@every
def test_sparse_is_refused(info: OptimizerInfo):
    """By name, and before any other parameter is written."""
    table, dense = nn.Embedding(5, 4, sparse=True), nn.Parameter(torch.ones(2, 2))
    optimizer = info.optim_cls([("dense", dense), ("table", table.weight)], **NEEDS.get(info.name, {}))
    dense.grad = torch.ones_like(dense)
    table(torch.tensor([1, 1])).sum().backward()
    with pytest.raises(ValueError, match=r"group 0.*'table' is sparse"):
        optimizer.step()
    assert torch.equal(dense, torch.ones(2, 2))


def test_adamw_is_differentiable():
    """torch's TestDifferentiableOptimizer, its test_adamw: gradients go through AdamC's step to the lr-scaled update."""

    def stepped(grad: Tensor) -> Tensor:
        p = torch.tensor([0.3, -0.2], dtype=FP64, requires_grad=True).clone()
        p.grad = grad
        optimizer = torch_optims.sn.AdamC([p], lr=0.9, differentiable=True, weight_decay=0.1)
        optimizer.step()
        return p

    grad = torch.tensor([0.5, -0.7], dtype=FP64, requires_grad=True)
    assert stepped(grad).requires_grad
    assert torch.autograd.gradcheck(stepped, (grad,))


# --- saving and loading


@every
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
        other.load_state_dict(saved)
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


@every
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


@every
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


@every
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


# --- hooks


def put_test(optimizer: Any) -> None:
    optimizer.state["test"] = 1


def take_test(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
    state_dict["ran_state_dict_pre_hook"] = state_dict["state"].pop("test", None) is not None
    return state_dict


def one(info: OptimizerInfo, kwargs: dict[str, Any]) -> Any:
    return info.optim_cls([nn.Parameter(torch.rand(2, 3))], **kwargs)


@every
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


@every
def test_state_dict_post_hook(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        optimizer = one(info, kwargs)
        optimizer.register_state_dict_post_hook(take_test)
        assert not optimizer.state_dict()["ran_state_dict_pre_hook"]


@every
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


@every
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


@every
def test_load_state_dict_post_hook(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        optimizer = one(info, kwargs)
        optimizer.register_load_state_dict_post_hook(note_lr)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.noted == optimizer.param_groups[0]["lr"]


@every
def test_load_state_dict_pre_post_hook(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        optimizer = one(info, kwargs)
        optimizer.register_load_state_dict_pre_hook(replace_lr)
        optimizer.register_load_state_dict_post_hook(note_lr)
        optimizer.load_state_dict(optimizer.state_dict())
        assert optimizer.noted == 0.003


@every
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


@every
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


@every
@pytest.mark.parametrize("how", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))], ids=["deepcopy", "pickle"])
def test_deepcopy_copies_all_public_attrs(info: OptimizerInfo, how: Callable[[Any], Any]):
    for kwargs in all_inputs(info):
        params, closure = problem()
        optimizer = info.optim_cls(params, **kwargs)
        train(optimizer, closure)
        twin = how(optimizer)
        public = [{key for key in vars(each) if not key.startswith("_")} for each in (optimizer, twin)]
        assert public[0] - {"mesh", "observing", "observed"} <= public[1]
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


# --- the table in docs/torch-harness.md


def test_the_table_names_the_tests_of_this_file_and_all_of_them():
    page = Path(__file__).parents[1].joinpath("docs/torch-harness.md").read_text()
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]
    named = {name for _, here, _ in rows for name in re.findall(r"`(test_\w+)`", here)}
    mine = {name for name, value in globals().items() if name.startswith("test_") and callable(value)}
    assert named == mine - {
        "test_the_table_names_the_tests_of_this_file_and_all_of_them",
        "test_every_own_optimizer_is_described",
    }
    for theirs, here, why in rows:
        assert here or why, f"{theirs}: neither covered nor explained"
