"""Claims about `correct(optimizer)`: a decay written by somebody else is overwritten, with a warning."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decay_cases import DECAY, LR, adamw, decays, refused, through_disk, weight
from torch.optim.optimizer import Optimizer

import steadynorm as sn
from steadynorm import correct

# ---------------------------------------------------------------- a decay written by somebody else


ALL_CORRECTED: dict[str, Callable[[], Optimizer]] = {
    "correct(AdamW)": lambda: correct(adamw()),
    "AdamC": lambda: sn.AdamC([weight()], lr=LR, weight_decay=DECAY),
    "LionC": lambda: sn.LionC([weight()], lr=LR, weight_decay=DECAY),
    "SGDC": lambda: sn.SGDC([weight()], lr=LR, weight_decay=DECAY),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ALL_CORRECTED)
def test_an_unused_weight_decay_warns_once(name: str, steps: int) -> None:
    optimizer = ALL_CORRECTED[name]()
    for _ in range(steps):
        decays(optimizer, LR / 2)
    with pytest.warns(
        UserWarning, match=r"group 0: weight_decay=0\.7 is not used.*schedule base_weight_decay, or.*False"
    ):
        assert decays(optimizer, LR / 2, weight_decay=0.7) == [DECAY / 2]
    assert decays(optimizer, LR / 2, weight_decay=0.8) == [DECAY / 2]  # warnings are errors here
    assert decays(optimizer, LR / 2, base_weight_decay=0.8) == [0.4]


@pytest.mark.parametrize("name", ALL_CORRECTED)
def test_a_base_loaded_or_constant_decay_does_not_warn(name: str) -> None:
    optimizer = ALL_CORRECTED[name]()
    decays(optimizer, LR / 2)
    saved = through_disk(optimizer)[0]
    for _ in range(2):
        assert decays(optimizer, LR / 4, weight_decay=DECAY) == [DECAY / 4]  # a trainer that writes it at every step
    optimizer.load_state_dict(saved)
    assert decays(optimizer, LR / 4) == [DECAY / 4]
    plain = copy.deepcopy(saved)
    for key in ("base_weight_decay", "peak_lr", "peak_lr_given", "corrected"):
        plain["param_groups"][0].pop(key)
    plain["param_groups"][0]["weight_decay"] = 0.6
    optimizer.load_state_dict(plain)
    assert decays(optimizer, LR / 4) == pytest.approx([0.15])
    assert decays(optimizer, LR / 4, weight_decay=0.7, corrected=False) == [0.7]


def test_a_scheduler_refuses_a_computed_decay() -> None:
    for make in ALL_CORRECTED.values():
        optimizer = make()
        with refused(optimizer, r"group 0: weight_decay is computed.*schedule base_weight_decay"):
            sn.Scheduler(optimizer, scale={"weight_decay": sn.schedule.linear(10)})
        sn.Scheduler(optimizer, scale={"base_weight_decay": sn.schedule.constant_then_decay(10, 10)})
        optimizer.param_groups[0]["corrected"] = False
        sn.Scheduler(optimizer, scale={"weight_decay": sn.schedule.linear(10)})


@pytest.mark.parametrize("name", ALL_CORRECTED)
def test_a_zero_base_means_no_decay(name: str) -> None:
    """Scheduled from zero or to it, the decay written last would have stayed for good."""
    optimizer = ALL_CORRECTED[name]()
    assert decays(optimizer, LR, base_weight_decay=0) == [0.0]  # also before the first step
    assert decays(optimizer, LR / 2, base_weight_decay=0.6) == pytest.approx([0.3])
    assert decays(optimizer, LR / 2, base_weight_decay=0.0) == [0.0]
    with pytest.warns(UserWarning, match=r"group 0: weight_decay=0\.7 is not used"):
        assert decays(optimizer, LR / 2, weight_decay=0.7) == [0.0]


def test_a_tensor_weight_decay_does_not_warn() -> None:
    optimizer = correct(torch.optim.AdamW([weight()], lr=LR, weight_decay=torch.tensor(0.5)))
    assert decays(optimizer, LR / 2) == [0.25]  # warnings are errors here


def test_a_param_groups_checkpoint_does_not_undo_a_skip() -> None:
    first, second = weight(), weight()
    plain = torch.optim.AdamW([{"params": [first], "corrected": True}, {"params": [second], "corrected": True}], lr=LR)
    optimizer = correct(torch.optim.AdamW([{"params": [weight()]}, {"params": [weight()]}], lr=LR), skip=[0])
    optimizer.load_state_dict(plain.state_dict())
    assert [group["corrected"] for group in optimizer.param_groups] == [False, True]


@pytest.mark.parametrize("make", [lambda p: correct(torch.optim.AdamW(p, lr=LR)), lambda p: sn.AdamC(p, lr=LR)])
def test_capturable_is_not_loaded_from_a_checkpoint(make: Callable[[list[Any]], Optimizer]) -> None:
    old = torch.optim.AdamW([weight()], lr=LR)
    saved = old.state_dict()
    saved["param_groups"][0]["capturable"] = True
    optimizer = make([weight()])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["capturable"] is False
    decays(optimizer, LR / 2)
