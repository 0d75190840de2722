"""Claims about what `correct` refuses by a group's flags, which momentum it refers to, and what a checkpoint replaces."""

import copy
from typing import Any

import pytest
import torch
from test_decay import DECAY, LR, Lion, Stranger, adamw, decays, refused, through_disk, weight
from torch.optim import Optimizer

from steadynorm import correct, theory
from steadynorm.monitor.motion import is_decoupled


class Muon(Stranger):
    """Named and flagged as in pytorch_optimizer."""


class FlaggedLion(Lion):
    """Named and flagged as in pytorch_optimizer and timm."""

    def __init__(self, params: Any, lr: float, weight_decay: float, **flags: Any):
        super().__init__(params, lr=lr, weight_decay=weight_decay)
        for group in self.param_groups:
            group.update(flags)


FLAGGED: dict[str, tuple[type[Optimizer], dict[str, Any], str]] = {
    "coupled Lion": (FlaggedLion, {"weight_decouple": False}, r"weight_decouple=False: .*coupled L2.*=True or AdamW"),
    "coupled Muon": (Muon, {"weight_decouple": False, "momentum": 0.9}, r"weight_decouple=False: .*coupled L2"),
    "coupled stranger": (Stranger, {"decoupled_decay": False}, r"decoupled_decay=False: .*coupled L2"),
    "fixed": (FlaggedLion, {"fixed_decay": True}, r"fixed_decay=True: .*not scale with the lr; use fixed_decay=False"),
    "corrected twice": (FlaggedLion, {"corrected_weight_decay": True}, r"it corrects its decay itself; turn that off"),
}


@pytest.mark.parametrize("decoupled", [None, True])
@pytest.mark.parametrize("case", FLAGGED)
def test_flag_that_contradicts_decoupled_decay_is_refused(case: str, decoupled: bool | None) -> None:
    cls, flags, reason = FLAGGED[case]
    optimizer: Any = cls([weight()], lr=LR, weight_decay=DECAY, **flags)  # pyright: ignore[reportCallIssue]
    with refused(optimizer, reason):
        correct(optimizer, decoupled=decoupled)
    assert not is_decoupled(optimizer)  # the monitor reads the same flags


@pytest.mark.parametrize("case", FLAGGED)
def test_flags_of_ordinary_decay_are_accepted(case: str) -> None:
    cls, flags, _ = FLAGGED[case]
    ordinary = {key: not value if isinstance(value, bool) else value for key, value in flags.items()}
    optimizer: Any = cls([weight()], lr=LR, weight_decay=DECAY, **ordinary)  # pyright: ignore[reportCallIssue]
    assert decays(correct(optimizer, decoupled=True), LR / 2) == [DECAY / 2]


def test_one_flagged_group_is_enough_to_refuse() -> None:
    optimizer = Lion([{"params": [weight()]}, {"params": [weight()], "fixed_decay": True}], lr=LR, weight_decay=DECAY)
    with refused(optimizer, "fixed_decay=True"):
        correct(optimizer)


@pytest.mark.parametrize("foreign", [9.0, 0.5])
def test_foreign_alpha_in_a_muon_group_is_not_read(foreign: float) -> None:
    plain, other = (torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.9) for _ in range(2))
    other.param_groups[0]["alpha"] = foreign
    assert decays(correct(other), LR / 2, momentum=0.95) == decays(correct(plain), LR / 2, momentum=0.95)


# ---------------------------------------------------------------- the reference momentum


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_decays_by_its_weight_decay_at_the_reference_momentum(nesterov: bool) -> None:
    """A momentum warmup from 0.85 to 0.95 ended at four times the decay that was set."""
    optimizer = torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.85, nesterov=nesterov)
    correct(optimizer, reference_momentum=0.95)
    assert optimizer.param_groups[0]["initial_momentum"] == pytest.approx(0.05)  # as alpha
    gains = [theory.momentum_gain(1 - momentum, nesterov=nesterov) for momentum in (0.85, 0.95)]
    assert decays(optimizer) == pytest.approx([DECAY * gains[0] / gains[1]], rel=1e-12)
    assert decays(optimizer, momentum=0.95) == [DECAY]


def test_lion_decays_by_its_weight_decay_at_the_reference_betas() -> None:
    optimizer = correct(Lion([weight()], lr=LR, weight_decay=DECAY, betas=(0.5, 0.9)), reference_momentum=(0.9, 0.99))
    expected = DECAY * theory.lion_gain(0.5, 0.9) / theory.lion_gain(0.9, 0.99)
    assert decays(optimizer) == pytest.approx([expected], rel=1e-12)
    assert decays(optimizer, betas=[0.9, 0.99]) == [DECAY]


def test_reference_momentum_leaves_a_muons_adam_groups_alone() -> None:
    groups = [{"params": [weight()], "momentum": 0.85, "nesterov": True}, {"params": [weight()], "betas": (0.9, 0.95)}]
    optimizer = correct(Muon(groups, lr=LR, weight_decay=DECAY), reference_momentum=0.95)
    optimizer.param_groups[0]["momentum"] = 0.95
    assert decays(optimizer, LR / 2) == [DECAY / 2] * 2


def test_reference_momentum_survives_copies_and_checkpoints() -> None:
    def muon() -> Optimizer:
        return torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.85)

    optimizer, loaded = correct(muon(), reference_momentum=0.95), correct(muon())
    loaded.load_state_dict(through_disk(optimizer)[0])
    for each in (optimizer, loaded, copy.deepcopy(optimizer)):
        assert decays(each, LR / 2, momentum=0.95) == [DECAY / 2]


BAD_REFERENCES: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: adamw(), {}, r"group 0: reference_momentum: the decay of adam does not follow momentum; leave it out"),
    (lambda: torch.optim.Muon([weight()]), {"steady_norm_sq": 1.0}, r"no meaning beside steady_norm_sq; leave it out"),
    (lambda: Lion([weight()], weight_decay=DECAY), {}, r"reference_momentum=0\.9 is no value for group\['betas'\]"),
    (lambda: Muon([weight()], weight_decay=DECAY, momentum=0.9), {}, r"set group\['nesterov'\]"),
]


@pytest.mark.parametrize(("make", "more", "reason"), BAD_REFERENCES)
def test_reference_momentum_without_meaning_is_refused(make: Any, more: dict[str, Any], reason: str) -> None:
    optimizer = make()
    with refused(optimizer, reason):
        correct(optimizer, reference_momentum=0.9, **more)


@pytest.mark.parametrize("momentum", [1.0, -0.1])
def test_reference_momentum_outside_its_range_is_refused(momentum: float) -> None:
    optimizer = torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY)
    with refused(optimizer, "correct: group 0: alpha"):
        correct(optimizer, reference_momentum=momentum)


# ---------------------------------------------------------------- what a checkpoint replaces


def corrected(lr: float = LR, **arguments: Any) -> Optimizer:
    return correct(adamw(lr=lr), **arguments)


def test_checkpoint_that_replaces_an_explicit_peak_warns_and_names_both_ways() -> None:
    saved, optimizer = corrected(peak_lr=LR), corrected(2 * LR, peak_lr=2 * LR)
    message = (
        r"group 0: the checkpoint's peak_lr=0\.1 replaces the 0\.2 given to correct\(\)\. To use yours, set "
        r"group\['peak_lr'\] = 0\.2 after loading; to keep the checkpoint's, leave it out of correct\(\)"
    )
    with pytest.warns(UserWarning, match=message):
        optimizer.load_state_dict(through_disk(saved)[0])
    assert decays(optimizer, LR / 2) == [DECAY / 2]  # the saved one wins
    optimizer.param_groups[0]["peak_lr"] = 2 * LR  # the first way
    assert decays(optimizer, LR / 2) == [DECAY / 4]
    by_default = corrected(2 * LR)  # the second way; warnings are errors here
    by_default.load_state_dict(through_disk(saved)[0])
    assert decays(by_default, LR / 2) == [DECAY / 2]


def test_checkpoint_without_the_target_given_to_correct_warns() -> None:
    optimizer = corrected(steady_norm_sq=0.3)
    with pytest.warns(UserWarning, match=r"checkpoint's steady_norm_sq=None replaces the 0\.3 given"):
        optimizer.load_state_dict(through_disk(corrected())[0])
    assert decays(optimizer, LR / 2) == [DECAY / 2]


def test_checkpoint_with_another_reference_momentum_warns() -> None:
    def muon(**arguments: Any) -> Optimizer:
        return correct(torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.75), **arguments)

    optimizer = muon(reference_momentum=0.5)
    with pytest.warns(UserWarning, match=r"checkpoint's initial_momentum=0\.25 replaces the 0\.5 given"):
        optimizer.load_state_dict(through_disk(muon())[0])


def test_checkpoint_with_the_same_or_without_a_peak_does_not_warn() -> None:
    for saved in (corrected(peak_lr=0.4), adamw()):
        optimizer = corrected(peak_lr=0.4)
        optimizer.load_state_dict(through_disk(saved)[0])  # warnings are errors here
        assert decays(optimizer, 0.2) == [DECAY / 2]


def test_checkpoint_does_not_warn_about_groups_that_are_not_corrected() -> None:
    def two(peak: float) -> Optimizer:
        groups = [{"params": [weight()]}, {"params": [weight()], "weight_decay": 0.0}]
        return correct(adamw(*groups), skip=[0], peak_lr=peak)

    two(0.4).load_state_dict(through_disk(two(0.8))[0])  # warnings are errors here
