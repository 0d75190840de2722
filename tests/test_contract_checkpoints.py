"""The contract of tests/contract.py: stop, save, resume."""

import copy
import pickle
from typing import Any

import pytest
import torch
from contract import (
    LR,
    MATRICES,
    REGISTRY,
    Entry,
    Params,
    assert_same,
    engine,
    every,
    own,
    parameters,
    ratio,
    set_gradients,
    snapshot,
    train,
    vary,
)
from torch import nn
from torch.optim.lr_scheduler import (
    LambdaLR,
)

# --- stop, save, resume


@every
def test_a_resumed_run_equals_an_unbroken_one(entry: Entry, tmp_path):
    """The run stops mid-schedule, goes through a file, and resumes in an instance built with another lr: only the
    checkpoint counts.
    """

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
def test_a_checkpoint_before_the_first_step_has_state_for_every_parameter(entry: Entry):
    """State is made at construction, so that every rank and every checkpoint has the same keys."""
    params = entry.params()
    optimizer = entry(params)
    before = optimizer.state_dict()["state"]
    assert sorted(before) == list(range(len(params)))
    train(optimizer, params, range(2))
    after = optimizer.state_dict()["state"]
    assert {k: set(v) for k, v in before.items()} == {k: set(v) for k, v in after.items()}


@every
def test_group_values_are_plain_python(entry: Entry):
    """They load with weights_only=True and mean the same in any version."""
    params = entry.params()
    optimizer = entry(params)
    train(optimizer, params, range(2))
    for group in optimizer.state_dict()["param_groups"]:
        for key, value in group.items():
            for item in value if isinstance(value, list | tuple) else [value]:
                assert item is None or type(item) in (float, int, str, bool), (key, value)


@engine
def test_the_state_of_a_bf16_model_is_loaded_in_fp32(entry: Entry):
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
def test_the_skip_counter_survives_a_checkpoint_exactly(entry: Entry, dtype):
    if dtype == torch.float16 and not entry.engine:
        return  # AdamC refuses it
    params = entry.params(dtype)
    optimizer = entry(params)
    optimizer.state[params["wide"]]["skipped"].fill_(100_001)  # no bf16 or fp16 number
    new = entry(entry.params(dtype))
    new.load_state_dict(optimizer.state_dict())
    assert new.skipped_steps().item() == 100_001


@own
def test_a_checkpoint_of_another_model_is_refused_by_name(entry: Entry):
    other = parameters({"a": (4, 6), "b": (3, 2)})
    saved = entry(other).state_dict()
    params = parameters({"a": (4, 6), "b": (2, 3)})
    optimizer = entry(params.items())
    train(optimizer, params, range(2))
    before = snapshot(optimizer, params)
    with pytest.raises(ValueError, match=r"'b'.*another model"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer, params), before)


@own
def test_a_checkpoint_of_any_optimizer_is_refused_at_once_or_steps(entry: Entry):
    """What cannot be stepped with is refused before anything changes, and not by the next step."""
    for other in REGISTRY:
        saving = parameters(MATRICES)
        saved = other(saving)
        train(saved, saving, range(2))
        params = parameters(MATRICES)
        optimizer = entry(params)
        before = copy.deepcopy(optimizer.state_dict())
        try:
            optimizer.load_state_dict(copy.deepcopy(saved.state_dict()))
        except (ValueError, TypeError):
            assert optimizer.state_dict()["param_groups"] == before["param_groups"], other.name
            torch.testing.assert_close(optimizer.state_dict()["state"], before["state"], rtol=0, atol=0)
        else:
            train(optimizer, params, range(2, 4))
            assert all(p.isfinite().all() for p in params.values()), other.name


@every
@pytest.mark.parametrize("how", [copy.deepcopy, lambda both: pickle.loads(pickle.dumps(both))], ids=["copy", "pickle"])
def test_a_copy_of_model_and_optimizer_continues_as_the_original(entry: Entry, how):
    params = entry.params()
    optimizer = entry(params)
    train(optimizer, params, range(6))
    params_too, optimizer_too = how((params, optimizer))
    train(optimizer, params, range(6, 12))
    train(optimizer_too, params_too, range(6, 12))
    assert_same(snapshot(optimizer_too, params_too), snapshot(optimizer, params))
