"""Claims about `correct(optimizer)`: checkpoints resume the corrected decay."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from decay_cases import (
    ADAMS,
    DECAY,
    DECOUPLED,
    LR,
    SCHEDULES,
    Lion,
    adamw,
    decays,
    drive,
    parameters,
    through_disk,
    weight,
)
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

from steadynorm import correct, theory

# ---------------------------------------------------------------- checkpoints


RESUMED: dict[str, tuple[Callable[[], Optimizer], Callable[[Optimizer], Any], dict[str, Any]]] = {
    "AdamW, OneCycle": (
        lambda: torch.optim.AdamW([{"params": [weight(5)]}, {"params": [weight(3)]}], lr=LR, weight_decay=DECAY),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=[0.3, 0.2], total_steps=20),
        {"skip": [1]},
    ),
    "AdamW, peak given": (lambda: adamw(), SCHEDULES["sequential"], {"peak_lr": 0.3}),
    "AdamW, absolute": (lambda: adamw(), SCHEDULES["cosine"], {"steady_norm_sq": 0.5}),
    "Muon, OneCycle": (
        lambda: torch.optim.Muon([weight(4, 4)], lr=LR, weight_decay=DECAY),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
        {},
    ),
    "Muon, exact": (
        lambda: torch.optim.Muon([weight(4, 4)], lr=LR, weight_decay=DECAY),
        SCHEDULES["cosine"],
        {"steady_norm_sq": 2.0, "overlap": "exact"},
    ),
    "Lion, OneCycle": (
        lambda: Lion([weight(5)], lr=LR, weight_decay=DECAY),
        lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
        {},
    ),
}


def plain(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in groups]


@pytest.mark.parametrize("order", ["corrected, then loaded", "loaded, then corrected"])
@pytest.mark.parametrize("name", RESUMED)
def test_resuming_mid_schedule_equals_the_unbroken_run(name: str, order: str) -> None:
    make, schedule, arguments = RESUMED[name]
    unbroken = make()
    scheduler = schedule(unbroken)
    correct(unbroken, **arguments)
    drive(unbroken, scheduler, 7, seed=0)
    weights = [p.detach().clone() for p in parameters(unbroken)]
    saved = through_disk(unbroken, scheduler)
    drive(unbroken, scheduler, 9, seed=7)

    resumed = make()
    for p, value in zip(parameters(resumed), weights, strict=True):
        p.data.copy_(value)
    again = schedule(resumed)
    if order == "corrected, then loaded":
        correct(resumed, **arguments)
    resumed.load_state_dict(saved[0])
    again.load_state_dict(saved[1])
    if order == "loaded, then corrected":
        correct(resumed)
    drive(resumed, again, 9, seed=7)
    assert plain(resumed.param_groups) == plain(unbroken.param_groups)
    assert all(torch.equal(a, b) for a, b in zip(parameters(resumed), parameters(unbroken), strict=True))


def test_an_uncorrected_checkpoint_sets_the_base_but_not_the_peak() -> None:
    old = adamw({"params": [weight()], "weight_decay": 0.6}, {"params": [weight()], "weight_decay": 0.4}, lr=LR / 4)
    optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()]}), skip=[1])
    decays(optimizer, LR / 2)
    optimizer.load_state_dict(through_disk(old)[0])
    assert [group["lr"] for group in optimizer.param_groups] == [LR / 4] * 2
    assert decays(optimizer) == pytest.approx([0.6 / 4, 0.4], rel=1e-12)
    assert decays(optimizer, LR) == pytest.approx([0.6, 0.4], rel=1e-12)
    with pytest.raises(ValueError, match="guessed"):
        decays(optimizer, LR * 1.01)


def test_an_uncorrected_checkpoint_keeps_an_explicit_peak() -> None:
    optimizer = correct(adamw(), peak_lr=0.4)
    optimizer.load_state_dict(through_disk(adamw(weight_decay=0.6))[0])
    assert decays(optimizer, 0.8) == pytest.approx([1.2], rel=1e-12)


def test_an_uncorrected_checkpoint_keeps_the_absolute_target() -> None:
    optimizer = correct(adamw(), steady_norm_sq=0.3)
    optimizer.load_state_dict(through_disk(adamw(weight_decay=0.6))[0])
    assert decays(optimizer, LR / 2) == pytest.approx([LR / 2 / (2 * 0.3)], rel=1e-12)

    def muon() -> Optimizer:
        return torch.optim.Muon([weight(4, 4)], lr=LR, weight_decay=DECAY, momentum=0.9, nesterov=False)

    optimizer = correct(muon(), steady_norm_sq=1.5, overlap="exact")
    optimizer.load_state_dict(through_disk(muon())[0])
    expected = theory.weight_decay_for(1.5, LR / 2, 1 - 0.9, overlap=theory.overlap("spectral", (4, 4)))
    assert decays(optimizer, LR / 2) == pytest.approx([expected], rel=1e-12)


def test_an_uncorrected_checkpoint_keeps_scheduler_keys() -> None:
    old = torch.optim.Muon([weight()], lr=LR, weight_decay=0.6, momentum=0.9)
    lr_scheduler.OneCycleLR(old, max_lr=0.7, total_steps=20)
    optimizer = correct(torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.9), peak_lr=0.7)
    optimizer.load_state_dict(through_disk(old)[0])
    loaded = optimizer.param_groups[0]
    assert {key: loaded[key] for key in old.param_groups[0] if key != "params"} == plain(old.param_groups)[0]


def test_the_checkpoints_peak_and_base_override_the_constructor() -> None:
    saved = correct(adamw())
    decays(saved, LR / 4)
    other = correct(adamw(lr=5 * LR, weight_decay=0.9))
    other.load_state_dict(through_disk(saved)[0])
    assert decays(other) == [DECAY / 4]
    assert decays(other, LR) == [DECAY]


def test_a_corrected_checkpoint_resumes_only_under_correct() -> None:
    saved = correct(adamw())
    decays(saved, LR / 4)
    other = adamw()
    other.load_state_dict(through_disk(saved)[0])
    assert decays(other, LR / 2) == [DECAY / 4]  # torch alone: what was in force
    assert decays(correct(other), LR / 2) == [DECAY / 2]


@pytest.mark.parametrize("name", DECOUPLED)
def test_numpy_arguments_are_saved_as_plain_python(name: str) -> None:
    optimizer = DECOUPLED[name]([weight()], lr=np.float64(LR), weight_decay=np.float64(DECAY))
    before = set(optimizer.param_groups[0])
    correct(optimizer, decoupled=True, peak_lr=np.float64(0.3))
    decays(optimizer, np.float64(LR / 2))
    group = optimizer.param_groups[0]
    added = set(group) - before
    assert added
    for key in (*added, "weight_decay"):
        values = group[key] if isinstance(group[key], list) else [group[key]]
        assert {type(value) for value in values} <= {float, int, bool, str}, key


@pytest.mark.parametrize("name", [*ADAMS, "Muon", "Lion"])
def test_a_numpy_target_is_saved_as_a_float(name: str) -> None:
    optimizer = DECOUPLED[name]([weight()], lr=LR, weight_decay=DECAY)
    correct(optimizer, steady_norm_sq=np.float64(1.5))
    decays(optimizer)
    group = optimizer.param_groups[0]
    assert type(group["weight_decay"]) is type(group["steady_norm_sq"]) is float
