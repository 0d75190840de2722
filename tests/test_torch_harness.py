"""torch's own test matrix for optimizers, run on ours: docs/torch-harness.md says which test stands for which of
torch's.

The tests have torch's names and check what torch's check, mostly more closely. Left out are tests that need a GPU and those
whose claim is in the contract table (test_contract*.py). State dicts, groups and hooks are in test_torch_harness_state.py.
"""

import copy
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch_optims
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.testing._internal.common_optimizers import OptimizerErrorEnum, OptimizerInfo, optim_db
from torch_matrix import (
    FP64,
    all_inputs,
    assert_same_state,
    every,
    every_and_corrected,
    model_of,
    problem,
    train,
    with_impls,
)
from torch_optims import LR, NEEDS, OPTIM_DB, SCHEDULERS

# --- the description itself


@every_and_corrected
def test_optim_infos_do_not_specify_global_cliquey_kwargs(info: OptimizerInfo):
    for each in info.optim_inputs_func(device="cpu"):
        assert not {"foreach", "fused", "differentiable"} & each.kwargs.keys()


def test_every_own_optimizer_is_described():
    from steadynorm import optim

    assert {info.name for info in OPTIM_DB} == set(optim.__all__)


@every
def test_errors(info: OptimizerInfo):
    """torch's error inputs for all optimizers raise torch's messages, and ours raise our own."""
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


@every_and_corrected
@pytest.mark.parametrize("with_lrsched", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("contiguous", [True, False])
def test_forloop_goes_right_direction(info: OptimizerInfo, contiguous: bool, with_lrsched: bool):
    for constructors in info.scheduler_inputs if with_lrsched else [[]]:
        for kwargs in all_inputs(info):
            if kwargs.get("fused") and not contiguous:
                continue  # refused: test_optim_refusals.py
            params, closure = problem(contiguous=contiguous)
            optimizer = info.optim_cls(params, **kwargs)
            schedulers = [make(optimizer) for make in constructors]
            first = closure().item()
            for _ in range(10):
                loss = optimizer.step(closure)
                for scheduler in schedulers:
                    scheduler.step(*([loss.detach()] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
            last = closure().item()
            assert last > first if kwargs.get("maximize") else last < first, kwargs


@every_and_corrected
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


@every_and_corrected
def test_tensor_lr(info: OptimizerInfo):
    """The tensor is 0-d or of one element; it trains as a float does."""
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


@pytest.mark.slow  # test_contract.py has the decay under every scheduler
@every_and_corrected
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


def compare(make: tuple[Callable[..., Any], Callable[..., Any]], dtype: torch.dtype, tolerance: float) -> None:
    """Take seven steps of two optimizers: gradients missing at one, a layer frozen for two, an empty parameter last."""
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


@every_and_corrected
def test_foreach_matches_forloop(info: OptimizerInfo):
    """Stacked parameters (AdamC: foreach) equal one parameter at a time."""
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
    """fp16 is left out: AdamC refuses it, since 1e-8 is not an fp16 number."""
    tolerance = {FP64: 1e-7, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for each in info.optim_inputs_func(device="cpu"):
        compare(
            tuple(lambda params, f=f, k=each.kwargs: info.optim_cls(params, fused=f, **k) for f in (True, False)),
            dtype,
            tolerance,
        )


@every_and_corrected
def test_mixed_device_dtype(info: OptimizerInfo):
    """One device can show this part: dtypes mixed in a group train as they would in separate groups."""
    half = () if info.supported_impls else (torch.float16,)  # which AdamC refuses
    dtypes = (FP64, torch.float32, *half, torch.bfloat16)

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
    """torch's default dtype does not matter: state and results are the same."""
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
    """Return the settings without decay, and without a target, which would be refused."""
    return {key: value for key, value in kwargs.items() if key != "steady_norm_sq"} | {"weight_decay": 0.0}


@every_and_corrected
def test_param_groups_weight_decay(info: OptimizerInfo):
    """Only one group decays, and the other trains as without decay."""
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
def test_optimizer_can_be_printed(info: OptimizerInfo):
    for kwargs in all_inputs(info):
        text = repr(info.optim_cls([nn.Parameter(torch.randn(2, 3))], **kwargs))
        assert text.startswith(f"{info.name} (\nParameter Group 0\n")
        assert "    lr: " in text


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


# --- the table in docs/torch-harness.md

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def rows() -> list[list[str]]:
    page = HERE.parent.joinpath("docs/torch-harness.md").read_text(encoding="utf-8")
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in page.splitlines() if line.startswith("| `")
    ]


def test_the_table_names_our_tests_and_all_of_them(rows: list[list[str]]):
    named = {name for _, here, _ in rows for name in re.findall(r"`(test_\w+)`", here)}
    mine, contract = (
        {
            name
            for path in HERE.glob(files)
            for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.M)
        }
        for files in ("test_torch_harness*.py", "test_contract*.py")
    )
    named -= contract
    ours_alone = {"test_every_own_optimizer_is_described"}
    assert named == mine - ours_alone - {name for name in mine if name.startswith("test_the_table_")}
    for theirs, here, why in rows:
        assert here or why, f"{theirs}: neither covered nor explained"


def test_the_table_has_every_test_that_the_installed_torch_speaks_of(rows: list[list[str]]):
    """torch's test_optim.py is not installed, but its descriptions name the tests that an optimizer is to be left out of."""
    named = {name for theirs, _, _ in rows for name in re.findall(r"\btest_\w+", theirs)}
    spoken = {
        each.test_name
        for info in optim_db
        for each in info.decorators
        if getattr(each, "cls_name", None) == "TestOptimRenewed" and each.test_name
    }
    assert len(spoken) > 12
    assert spoken <= named
