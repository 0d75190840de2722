"""Claims about the choices around `correct`: what a group's flags rule out, which momentum and peak the decay refers
to,
what a checkpoint replaces, and the way back."""

import copy
from typing import Any

import pytest
import torch
from decay_cases import (
    COPIES,
    DECAY,
    DECOUPLED,
    LR,
    Lion,
    Stranger,
    adamw,
    decays,
    drive,
    parameters,
    refused,
    snapshot,
    step,
    through_disk,
    weight,
)
from torch.optim import Optimizer, lr_scheduler

import steadynorm as sn
from steadynorm import correct, theory, uncorrect
from steadynorm.decay import peak
from steadynorm.decay.recognition import is_decoupled


class Muon(Stranger):
    """A Muon named and flagged as in pytorch_optimizer."""


class FlaggedLion(Lion):
    """A Lion named and flagged as in pytorch_optimizer and timm."""

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
def test_a_flag_that_contradicts_decoupled_decay_is_refused(case: str, decoupled: bool | None) -> None:
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
def test_a_foreign_alpha_in_a_muon_group_is_not_read(foreign: float) -> None:
    plain, other = (torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.9) for _ in range(2))
    other.param_groups[0]["alpha"] = foreign
    assert decays(correct(other), LR / 2, momentum=0.95) == decays(correct(plain), LR / 2, momentum=0.95)


# ---------------------------------------------------------------- the reference momentum


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_decays_by_its_weight_decay_at_the_reference_momentum(nesterov: bool) -> None:
    """A momentum warmup from 0.85 to 0.95 once ended at four times the decay that was set."""
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


def test_the_reference_momentum_leaves_a_muons_adam_groups_alone() -> None:
    groups = [{"params": [weight()], "momentum": 0.85, "nesterov": True}, {"params": [weight()], "betas": (0.9, 0.95)}]
    optimizer = correct(Muon(groups, lr=LR, weight_decay=DECAY), reference_momentum=0.95)
    optimizer.param_groups[0]["momentum"] = 0.95
    assert decays(optimizer, LR / 2) == [DECAY / 2] * 2


def test_the_reference_momentum_survives_copies_and_checkpoints() -> None:
    def muon() -> Optimizer:
        return torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.85)

    optimizer, loaded = correct(muon(), reference_momentum=0.95), correct(muon())
    loaded.load_state_dict(through_disk(optimizer)[0])
    for each in (optimizer, loaded, copy.deepcopy(optimizer)):
        assert decays(each, LR / 2, momentum=0.95) == [DECAY / 2]


BAD_REFERENCES: list[tuple[Any, dict[str, Any], str]] = [
    (lambda: adamw(), {}, r"group 0: reference_momentum: the decay of adam does not follow momentum; leave it out"),
    (lambda: torch.optim.Muon([weight()]), {"steady_norm_sq": 1.0}, r"no meaning beside steady_norm_sq; leave it out"),
    (lambda: Lion([weight()], weight_decay=DECAY), {}, r"reference_momentum=0\.9 is not a value for group\['betas'\]"),
    (lambda: Muon([weight()], weight_decay=DECAY, momentum=0.9), {}, r"set group\['nesterov'\]"),
]


@pytest.mark.parametrize(("make", "more", "reason"), BAD_REFERENCES)
def test_a_reference_momentum_without_meaning_is_refused(make: Any, more: dict[str, Any], reason: str) -> None:
    optimizer = make()
    with refused(optimizer, reason):
        correct(optimizer, reference_momentum=0.9, **more)


@pytest.mark.parametrize("momentum", [1.0, -0.1])
def test_a_reference_momentum_outside_its_range_is_refused(momentum: float) -> None:
    optimizer = torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY)
    with refused(optimizer, "correct: group 0: alpha"):
        correct(optimizer, reference_momentum=momentum)


# ---------------------------------------------------------------- what a checkpoint replaces


def corrected(lr: float = LR, **arguments: Any) -> Optimizer:
    return correct(adamw(lr=lr), **arguments)


def test_a_checkpoint_that_replaces_an_explicit_peak_warns_and_names_both_ways() -> None:
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


def test_a_checkpoint_without_the_target_given_to_correct_warns() -> None:
    optimizer = corrected(steady_norm_sq=0.3)
    with pytest.warns(UserWarning, match=r"checkpoint's steady_norm_sq=None replaces the 0\.3 given"):
        optimizer.load_state_dict(through_disk(corrected())[0])
    assert decays(optimizer, LR / 2) == [DECAY / 2]


def test_a_checkpoint_with_another_reference_momentum_warns() -> None:
    def muon(**arguments: Any) -> Optimizer:
        return correct(torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.75), **arguments)

    optimizer = muon(reference_momentum=0.5)
    with pytest.warns(UserWarning, match=r"checkpoint's initial_momentum=0\.25 replaces the 0\.5 given"):
        optimizer.load_state_dict(through_disk(muon())[0])


def test_a_checkpoint_with_the_same_or_without_a_peak_does_not_warn() -> None:
    for saved in (corrected(peak_lr=0.4), adamw()):
        optimizer = corrected(peak_lr=0.4)
        optimizer.load_state_dict(through_disk(saved)[0])  # warnings are errors here
        assert decays(optimizer, 0.2) == [DECAY / 2]


def test_a_checkpoint_does_not_warn_about_groups_that_are_not_corrected() -> None:
    def two(peak: float) -> Optimizer:
        groups = [{"params": [weight()]}, {"params": [weight()], "weight_decay": 0.0}]
        return correct(adamw(*groups), skip=[0], peak_lr=peak)

    two(0.4).load_state_dict(through_disk(two(0.8))[0])  # warnings are errors here


# ---------------------------------------------------------------- a guessed peak that is never approached


def noam(t: int, warmup: int = 5, width: int = 64) -> float:
    return width**-0.5 * min((t + 1) ** -0.5, (t + 1) * warmup**-1.5)


def test_a_noam_schedule_far_below_its_guessed_peak_warns_once_after_the_warmup() -> None:
    optimizer = correct(adamw(lr=1.0))
    scheduler = lr_scheduler.LambdaLR(optimizer, noam)
    drive(optimizer, scheduler, 5)  # rises: nothing can be said yet
    message = (
        r"group 0: the largest lr so far is 0\.0559017, far below the guessed peak_lr=1, so .*0\.056.*pass peak_lr="
    )
    with pytest.warns(UserWarning, match=message):
        step(optimizer)
    scheduler.step()
    drive(optimizer, scheduler, 20)  # warnings are errors here


def test_a_schedule_that_falls_from_far_below_its_guessed_peak_warns_at_the_second_step() -> None:
    optimizer = correct(adamw(lr=1.0))
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: 1e-3 * (1 - t / 30))
    drive(optimizer, scheduler, 1)
    with pytest.warns(UserWarning, match=r"largest lr so far is 0\.001, far below the guessed peak_lr=1,"):
        step(optimizer)
    scheduler.step()
    drive(optimizer, scheduler, 20)  # warnings are errors here


def test_a_noam_schedule_with_its_peak_given_or_in_the_group_does_not_warn() -> None:
    for optimizer in (correct(adamw(lr=1.0), peak_lr=noam(4)), correct(adamw(lr=1.0))):
        optimizer.param_groups[0].update(peak_lr=noam(4), peak_lr_given=True)
        seen = drive(optimizer, lr_scheduler.LambdaLR(optimizer, noam), 20)
        assert max(group["weight_decay"] for group in seen) == pytest.approx(DECAY)


def test_a_long_warmup_does_not_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_PATIENCE", 8)
    optimizer = correct(adamw())
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: min(1.0, (1 + t // 5) / 20))  # rises by epochs of five steps
    drive(optimizer, scheduler, 120)  # warnings are errors here


def test_a_constant_lr_far_below_the_guess_warns_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peak, "_PATIENCE", 8)
    optimizer = correct(adamw())
    scheduler = lr_scheduler.LambdaLR(optimizer, lambda t: 0.1)
    drive(optimizer, scheduler, 8)
    with pytest.warns(UserWarning, match=r"largest lr so far is 0\.01, far below the guessed peak_lr=0\.1"):
        step(optimizer)


@pytest.mark.parametrize("order", ["corrected, then loaded", "loaded, then corrected"])
def test_a_run_joined_late_does_not_warn(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its largest lr was before the correction."""
    monkeypatch.setattr(peak, "_PATIENCE", 3)
    old, joined = adamw(), adamw()
    drive(old, lr_scheduler.ExponentialLR(old, 0.5), 6)
    if order == "corrected, then loaded":
        correct(joined)
        joined.load_state_dict(through_disk(old)[0])
    else:
        joined.load_state_dict(through_disk(old)[0])
        correct(joined)
    for _ in range(10):
        step(joined)  # warnings are errors here


def test_the_largest_lr_survives_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a run resumed at the end of its schedule would seem never to have approached its peak."""
    monkeypatch.setattr(peak, "_PATIENCE", 4)
    optimizer = correct(adamw())
    scheduler = lr_scheduler.ExponentialLR(optimizer, 0.5)
    drive(optimizer, scheduler, 3)
    resumed = correct(adamw())
    resumed.load_state_dict(through_disk(optimizer)[0])
    for _ in range(10):
        decays(resumed, LR / 16)  # warnings are errors here


def test_a_step_with_lr_zero_is_not_the_end_of_a_warmup() -> None:
    optimizer = correct(adamw())
    for lr in (LR / 10, LR / 5, 0.0, LR / 3, LR, LR / 2):
        decays(optimizer, lr)  # warnings are errors here


@pytest.mark.parametrize("order", ["corrected, then loaded", "loaded, then corrected"])
def test_a_joined_run_with_an_lr_written_by_hand_does_not_take_it_for_the_peak(order: str) -> None:
    """At the end of a schedule it would decay a hundred times too much."""
    old, joined = adamw(), adamw()
    old.param_groups[0]["lr"] = LR / 100
    step(old)
    if order == "corrected, then loaded":
        correct(joined)
        joined.load_state_dict(through_disk(old)[0])
    else:
        joined.load_state_dict(through_disk(old)[0])
        with refused(joined, r"correct: group 0: the run is under way and its lr=0\.001 is below lr=0\.1.*peak_lr="):
            correct(joined)
        correct(joined, peak_lr=LR)
    assert decays(joined, LR / 100) == pytest.approx([DECAY / 100])


def test_a_checkpoint_that_replaces_skipped_parameters_warns() -> None:
    def skipping(position: int) -> Optimizer:
        params = [weight(), weight()]
        return correct(adamw({"params": params}), skip=params[position])

    optimizer = skipping(1)
    with pytest.warns(UserWarning, match=r"the checkpoint's uncorrected=\[0\] replaces the \[1\] given to correct"):
        optimizer.load_state_dict(through_disk(skipping(0))[0])
    skipping(1).load_state_dict(through_disk(skipping(1))[0])  # warnings are errors here


# ---------------------------------------------------------------- the same in our own optimizers

OWN = (sn.AdamC, sn.LionC, sn.SGDC)


@pytest.mark.parametrize("cls", OWN)
def test_our_own_optimizer_warns_if_a_checkpoint_replaces_its_peak(cls: Any) -> None:
    saved, optimizer = (cls([weight()], lr=LR, weight_decay=DECAY, peak_lr=value) for value in (LR, 2 * LR))
    message = rf"group 0: the checkpoint's peak_lr=0\.1 replaces the 0\.2 given to {cls.__name__}\. To use yours, set"
    with pytest.warns(UserWarning, match=message):
        optimizer.load_state_dict(through_disk(saved)[0])
    assert decays(optimizer, LR / 2) == [DECAY / 2]
    by_default = cls([weight()], lr=2 * LR, weight_decay=DECAY)
    by_default.load_state_dict(through_disk(saved)[0])  # warnings are errors here
    assert decays(by_default, LR / 2) == [DECAY / 2]


@pytest.mark.parametrize("cls", OWN)
def test_our_own_optimizer_warns_of_a_guessed_peak_that_is_never_approached(cls: Any) -> None:
    optimizer = cls([weight()], lr=1.0, weight_decay=DECAY)
    scheduler = lr_scheduler.LambdaLR(optimizer, noam)
    drive(optimizer, scheduler, 5)
    with pytest.warns(UserWarning, match=r"the largest lr so far is 0\.0559017, far below the guessed peak_lr=1"):
        step(optimizer)


@pytest.mark.parametrize("cls", OWN)
@pytest.mark.parametrize("old", [{"peak_lr": LR}, {}])
def test_our_own_optimizer_resumed_late_does_not_warn(cls: Any, old: dict[str, float], monkeypatch: Any) -> None:
    """Its largest lr was before the checkpoint, or is saved in it."""
    monkeypatch.setattr(peak, "_PATIENCE", 3)
    saved, resumed = cls([weight()], lr=LR, weight_decay=DECAY, **old), cls([weight()], lr=LR, weight_decay=DECAY)
    drive(saved, lr_scheduler.ExponentialLR(saved, 0.5), 3)
    resumed.load_state_dict(through_disk(saved)[0])
    resumed.param_groups[0]["peak_lr_given"] = False
    for _ in range(10):
        decays(resumed, LR / 16)  # warnings are errors here


# ---------------------------------------------------------------- the way back


@pytest.mark.parametrize("name", DECOUPLED)
def test_an_uncorrected_optimizer_is_as_before_correct(name: str) -> None:
    plain, optimizer = (DECOUPLED[name]([weight(), weight()], lr=LR, weight_decay=DECAY) for _ in range(2))
    correct(optimizer, skip=parameters(optimizer)[0], decoupled=True)
    assert uncorrect(optimizer) is optimizer
    for old, new in zip(plain.param_groups, optimizer.param_groups, strict=True):
        assert {key: value for key, value in new.items() if key != "params"} == {
            key: value for key, value in old.items() if key != "params"
        }
    assert snapshot(optimizer)[1] == snapshot(plain)[1]  # hooks


@pytest.mark.parametrize("way", COPIES)
def test_uncorrect_restores_the_base_decay_as_a_constant(way: str) -> None:
    optimizer = correct(adamw())
    decays(optimizer, LR / 4)
    for each in (COPIES[way](optimizer), optimizer):
        assert decays(uncorrect(each), LR / 2) == [DECAY]
        assert decays(COPIES[way](each), LR / 4) == [DECAY]
        assert decays(correct(each, peak_lr=LR), LR / 4) == [DECAY / 4]  # and again


def test_uncorrect_repairs_a_plain_optimizer_that_loaded_a_corrected_checkpoint() -> None:
    saved = correct(adamw())
    decays(saved, LR / 100)
    plain = adamw()
    plain.load_state_dict(through_disk(saved)[0])
    assert decays(plain, LR) == pytest.approx([DECAY / 100])  # the momentary decay, as a constant
    assert decays(uncorrect(plain), LR) == [DECAY]


def test_uncorrect_leaves_constant_groups_alone() -> None:
    optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()]}), skip=1)
    decays(optimizer, LR / 2)
    optimizer.param_groups[1]["weight_decay"] = 0.7  # one's own business in a group that is not corrected
    assert decays(uncorrect(optimizer), LR / 2) == [DECAY, 0.7]
    assert optimizer.param_groups[1]["corrected"] is False


def test_uncorrect_refuses_what_is_not_corrected() -> None:
    for optimizer, reason in (
        (adamw(), "this AdamW is not corrected"),
        (sn.AdamC([weight()]), "corrects its own decay"),
    ):
        with refused(optimizer, rf"uncorrect: .*{reason}|uncorrect: {reason}"):
            uncorrect(optimizer)
