"""Claims about `correct(optimizer)`: copies and groups added later are corrected."""

import copy
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from decay_cases import (
    COPIES,
    DECAY,
    LR,
    Lion,
    Stranger,
    adamw,
    decays,
    parameters,
    refused,
    step,
    through_disk,
    weight,
)
from torch.optim.optimizer import Optimizer

from steadynorm import correct

# ---------------------------------------------------------------- copies and added groups


COPIED: dict[str, tuple[Callable[[], Optimizer], dict[str, Any], dict[str, Any]]] = {
    "guessed peak": (lambda: adamw(), {}, {}),
    "peak given": (lambda: adamw(), {"peak_lr": LR / 2}, {}),
    "skip": (lambda: adamw({"params": [weight()]}, {"params": [weight()]}), {"skip": [1]}, {}),
    "target": (lambda: adamw(), {"steady_norm_sq": 0.3}, {}),
    "Muon": (lambda: torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY), {}, {"momentum": 0.8}),
    "Muon, exact": (
        lambda: torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY),
        {"steady_norm_sq": 1.5, "overlap": "exact"},
        {"momentum": 0.8},
    ),
    "Lion": (lambda: Lion([weight()], lr=LR, weight_decay=DECAY), {}, {"betas": (0.8, 0.95)}),
    "Stranger": (lambda: Stranger([weight()], lr=LR, weight_decay=DECAY), {"decoupled": True}, {}),
}


@pytest.mark.parametrize("way", COPIES)
@pytest.mark.parametrize("name", COPIED)
def test_copies_of_copies_are_corrected(name: str, way: str) -> None:
    """torch drops hooks, and such copies once trained uncorrected without a warning."""
    make, arguments, moved = COPIED[name]
    optimizer = correct(make(), **arguments)
    decays(optimizer, LR / 2, **moved)
    copied = COPIES[way](COPIES[way](optimizer))
    assert type(copied) is type(optimizer)
    for t, lr in enumerate((LR / 2, LR / 4, LR)):
        assert decays(copied, lr, **moved) == decays(optimizer, lr, **moved)
        step(copied, seed=t)
        step(optimizer, seed=t)
    assert all(torch.equal(a, b) for a, b in zip(parameters(copied), parameters(optimizer), strict=True))
    with pytest.raises(ValueError, match="corrected already"):
        correct(copied)


@pytest.mark.parametrize("way", COPIES)
def test_a_copy_of_an_uncorrected_optimizer_is_uncorrected(way: str) -> None:
    correct(adamw())  # another one of its class is
    copied = COPIES[way](adamw())
    assert decays(copied, LR / 2) == [DECAY]
    assert decays(correct(copied, peak_lr=LR), LR / 2) == [DECAY / 2]


@pytest.mark.parametrize("way", COPIES)
def test_correct_without_arguments_restores_a_lost_correction(way: str) -> None:
    """A pickle from before copies kept the correction is such a case."""
    optimizer = correct(adamw())
    decays(optimizer, LR / 2)
    lost = COPIES[way](optimizer)
    lost._optimizer_step_pre_hooks.clear()
    assert decays(lost, LR / 4) == [DECAY / 2]
    assert decays(correct(lost), LR / 4) == [DECAY / 4]


def test_a_pickle_is_corrected_in_another_process(tmp_path: Path) -> None:
    (tmp_path / "optimizer.pickle").write_bytes(pickle.dumps(correct(adamw())))
    program = (
        "import pickle, sys\n"
        "optimizer = pickle.load(open(sys.argv[1], 'rb'))\n"
        "group = optimizer.param_groups[0]\n"
        "group['lr'] /= 2\n"
        "optimizer.step()\n"
        "print(group['weight_decay'])"
    )
    said = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "optimizer.pickle")],
        capture_output=True,
        encoding="utf-8",
        check=True,
    )
    assert float(said.stdout) == DECAY / 2


def test_a_copy_loads_checkpoints_like_the_original() -> None:
    copied = copy.deepcopy(correct(adamw()))
    copied.load_state_dict(adamw(lr=LR / 2).state_dict())  # from before the correction
    assert decays(copied, LR / 4) == [DECAY / 4]


def test_the_original_of_a_copy_keeps_its_own_correction() -> None:
    optimizer = correct(adamw())
    copied = copy.deepcopy(optimizer)
    assert decays(copied, LR / 2) == [DECAY / 2]
    assert optimizer.param_groups[0]["weight_decay"] == DECAY
    assert decays(optimizer, LR / 4) == [DECAY / 4]


@pytest.mark.parametrize("key", ["peak_lr", "max_lr", "initial_lr"])
def test_a_group_added_later_is_corrected_by_its_own_peak_and_decay(key: str) -> None:
    optimizer = correct(adamw())
    decays(optimizer, LR / 2)
    optimizer.add_param_group({"params": [weight()], "lr": 0.01, key: 0.01, "weight_decay": 0.9})
    step(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY / 2, 0.9]
    for group in optimizer.param_groups:
        group["lr"] /= 2
    step(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY / 4, 0.45]


@pytest.mark.parametrize("lr", [0.01, 0.0])
def test_a_group_added_later_needs_a_peak(lr: float) -> None:
    """Its lr in a step is not a peak: it may be in its warmup, or DCP may have set it to 0 to build state."""
    optimizer = correct(adamw(), peak_lr=LR)
    step(optimizer)
    optimizer.add_param_group({"params": [weight()], "name": "late", "lr": lr, "weight_decay": 0.9})
    for p in parameters(optimizer):
        p.grad = torch.zeros_like(p)
    with refused(optimizer, r'group 1 \("late"\): it was added after correct\(\).*put peak_lr='):
        optimizer.step()
    optimizer.param_groups[1]["peak_lr"] = 0.02  # what the error says
    optimizer.param_groups[1]["lr"] = 0.01
    step(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([DECAY, 0.45])
    for more in ({"weight_decay": 0.0}, {"weight_decay": 0.3, "corrected": False}):  # need no peak
        optimizer.add_param_group({"params": [weight()], "lr": 0.01, **more})
    step(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups[2:]] == [0.0, 0.3]


def test_a_plain_checkpoint_loads_beside_an_added_group() -> None:
    optimizer = correct(adamw())
    optimizer.add_param_group({"params": [weight()], "lr": LR, "weight_decay": 0.0})
    optimizer.load_state_dict(adamw({"params": [weight()]}, {"params": [weight()], "weight_decay": 0.0}).state_dict())
    assert decays(optimizer, LR / 2) == [DECAY / 2, 0.0]


def test_a_peak_lr_in_the_group_resolves_a_guessed_peak_error() -> None:
    optimizer = correct(adamw())
    with pytest.raises(ValueError, match="or put it in the group"):
        decays(optimizer, 2 * LR)
    optimizer.param_groups[0]["peak_lr"] = 2 * LR
    assert decays(optimizer, LR) == [DECAY / 2]


@pytest.mark.parametrize("lr", [LR, 0.0])
def test_an_added_group_survives_a_checkpoint_before_its_first_step(lr: float) -> None:
    """Its own peak, or not being corrected at all, differs from the optimizer that loads it."""
    groups = {"peak": {"peak_lr": 4 * LR}, "output": {"corrected": False}}
    first = correct(adamw())
    for own in groups.values():
        first.add_param_group({"params": [weight()], "lr": lr, "weight_decay": DECAY, **own})
    second = correct(adamw({"params": [weight()]}, *({"params": [weight()]} for _ in groups), lr=0.3 * LR))
    second.load_state_dict(first.state_dict())
    for optimizer in (first, second):
        for group in optimizer.param_groups:
            group["lr"] = LR
            for p in group["params"]:
                p.grad = torch.zeros_like(p)
        optimizer.step()
        assert [group["weight_decay"] for group in optimizer.param_groups[1:]] == [DECAY / 4, DECAY]


def test_an_added_group_survives_a_checkpoint() -> None:
    def made() -> Optimizer:
        optimizer = correct(adamw())
        optimizer.add_param_group({"params": [weight()], "lr": 0.01, "peak_lr": 0.01, "weight_decay": 0.9})
        return optimizer

    saved, resumed = made(), made()
    step(saved)
    for group in saved.param_groups:
        group["lr"] /= 2
    step(saved)
    resumed.load_state_dict(through_disk(saved)[0])
    for optimizer in (saved, resumed):
        for group in optimizer.param_groups:
            group["lr"] /= 2
        step(optimizer)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY / 4, 0.9 / 4]
