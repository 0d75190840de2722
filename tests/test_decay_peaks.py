"""Claims about `correct(optimizer)`: which lr is the peak."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decay_cases import DECAY, LR, adamw, decays, parameters, refused, step, weight
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler

import steadynorm as sn
from steadynorm import correct

# ---------------------------------------------------------------- the peak


def test_the_peak_falls_back_to_max_lr_then_initial_lr_then_lr() -> None:
    keys: dict[str, float] = {}
    for key, value in (("lr", 0.1), ("initial_lr", 0.2), ("max_lr", 0.4)):
        keys[key] = value
        optimizer = correct(adamw({"params": [weight()], **keys}))
        assert decays(optimizer, 0.05) == pytest.approx([DECAY * 0.05 / value], rel=1e-12)
    optimizer = correct(adamw({"params": [weight()], **keys}), peak_lr=0.8)
    assert decays(optimizer, 0.05) == pytest.approx([DECAY * 0.05 / 0.8], rel=1e-12)


def test_an_lr_above_an_explicit_peak_raises_the_decay() -> None:
    assert decays(correct(adamw(), peak_lr=LR / 2), LR) == [2 * DECAY]


def test_an_lr_above_a_guessed_peak_raises_before_any_write() -> None:
    groups = [{"params": [weight()]}, {"params": [weight()], "name": "head"}]
    optimizer = correct(adamw(*groups))
    decays(optimizer, LR / 2)
    optimizer.param_groups[0]["lr"] = LR / 4
    optimizer.param_groups[1]["lr"] = LR * (1 + 5e-7)  # rounding of a schedule is forgiven
    step(optimizer)
    assert optimizer.param_groups[1]["weight_decay"] == pytest.approx(DECAY, rel=1e-6)
    optimizer.param_groups[0]["lr"] = LR / 8
    optimizer.param_groups[1]["lr"] = LR * (1 + 2e-6)
    with refused(optimizer, r'group 1 \("head"\): lr=0.1\S* exceeds .*peak_lr=0.1; pass peak_lr='):
        optimizer.step()


@pytest.mark.parametrize("lr", [-0.1, math.nan, math.inf])
def test_the_error_for_an_invalid_lr_names_the_group(lr: float) -> None:
    optimizer = correct(adamw(), peak_lr=LR)
    step(optimizer)
    optimizer.param_groups[0]["lr"] = lr
    before = parameters(optimizer)[0].clone()
    with pytest.raises(ValueError, match=r"group 0: lr="):
        optimizer.step()
    assert torch.equal(parameters(optimizer)[0], before)
    assert optimizer.param_groups[0]["weight_decay"] == DECAY


def test_each_group_has_its_own_peak() -> None:
    lrs = [0.1, 0.05, 0.001]  # layer-wise lr
    optimizer = adamw(*({"params": [weight()], "lr": lr, "weight_decay": lr * 7} for lr in lrs))
    scheduler = lr_scheduler.LambdaLR(correct(optimizer), lambda t: 0.5**t)
    for t in range(4):
        step(optimizer)
        expected = [lr * 7 * 0.5**t for lr in lrs]
        assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx(expected, rel=1e-12)
        scheduler.step()


def test_onecycle_may_have_a_max_lr_per_group() -> None:
    optimizer = adamw({"params": [weight()]}, {"params": [weight()]})
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.7, 0.07], total_steps=12)
    correct(optimizer)
    for _ in range(11):
        step(optimizer)
        for group, peak in zip(optimizer.param_groups, (0.7, 0.07), strict=True):
            assert group["weight_decay"] == pytest.approx(DECAY * group["lr"] / peak, rel=1e-12)
        scheduler.step()


def test_peak_lr_is_one_number_or_one_per_group() -> None:
    for peak, peaks in ((0.4, (0.4, 0.4)), ([0.4, 0.2], (0.4, 0.2)), ((0.4, 0.2), (0.4, 0.2))):
        optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()]}), peak_lr=peak)
        assert decays(optimizer, LR) == pytest.approx([DECAY * LR / each for each in peaks], rel=1e-12)


def test_a_step_at_lr_zero_keeps_peak_and_base() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = correct(torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY))
    saved = get_optimizer_state_dict(model, optimizer)  # torch's DCP: lr = 0, step(), lr restored
    assert optimizer.state
    assert saved["param_groups"]
    assert optimizer.param_groups[0]["lr"] == LR
    assert decays(optimizer, LR) == [DECAY]
    assert decays(optimizer, LR / 2) == [DECAY / 2]


# ---------------------------------------------------------------- a peak that is written into a group, or comes with a checkpoint


@pytest.mark.parametrize("make", [lambda p: correct(adamw({"params": [p]})), lambda p: sn.AdamC([p], lr=LR)])
def test_a_peak_written_into_a_group_is_no_guess(make: Callable[..., Any]) -> None:
    """So a larger lr raises the decay, and a OneCycle schedule does not replace it."""
    optimizer = make(weight())
    group = optimizer.param_groups[0]
    base = group["base_weight_decay"]
    group.update(peak_lr=2 * LR, max_lr=5 * LR)
    assert decays(optimizer, 3 * LR) == pytest.approx([1.5 * base])
    assert (group["peak_lr"], group["peak_lr_given"]) == (2 * LR, True)


def test_a_peak_written_after_loading_is_used_as_the_warning_says() -> None:
    saved = correct(adamw())
    lr_scheduler.OneCycleLR(saved, max_lr=LR, total_steps=10)
    step(saved)
    optimizer = correct(adamw(), peak_lr=2 * LR)
    with pytest.warns(UserWarning, match=r"set group\['peak_lr'\] = 0.2 after"):
        optimizer.load_state_dict(saved.state_dict())
    optimizer.param_groups[0]["peak_lr"] = 2 * LR
    assert decays(optimizer, LR) == pytest.approx([DECAY / 2])


@pytest.mark.parametrize("peak", [0.0, -1.0, math.nan])
def test_a_peak_written_into_a_group_must_make_sense(peak: float) -> None:
    optimizer = correct(adamw())
    optimizer.param_groups[0]["peak_lr"] = peak
    with refused(optimizer, "group 0: peak_lr=.* must be positive and finite"):
        optimizer.step()


@pytest.mark.parametrize("order", ["correct, load", "load, correct", "AdamC"])
def test_the_guess_follows_the_schedule_of_an_uncorrected_checkpoint(order: str) -> None:
    plain = adamw({"params": [weight()], "lr": 0.3 * LR})
    scheduler = lr_scheduler.CosineAnnealingLR(plain, 10)
    for _ in range(5):
        step(plain)
        scheduler.step()
    optimizer = sn.AdamC([weight()], lr=LR) if order == "AdamC" else adamw()
    if order == "correct, load":
        correct(optimizer)
    optimizer.load_state_dict(plain.state_dict())
    if order == "load, correct":
        correct(optimizer)
    assert decays(optimizer, 0.15 * LR) == pytest.approx([DECAY / 2])
