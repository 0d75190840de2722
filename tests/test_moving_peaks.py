"""`convert` and the peak lr: it refuses to guess one from a decayed lr, takes the one passed, and marks a guess as one."""

from typing import Any

import pytest
import torch
import twins_moving as twin
from test_moving import Net, train, values_of
from torch.optim import lr_scheduler

import steadynorm as sn

LR, DECAY = 1e-2, 0.1


def adamw(model: Net, lr: float = LR) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=DECAY)


def under_way(kind: str, lr: float) -> tuple[Net, Any]:
    """Return a model and an optimizer, made with LR, that has taken two steps at an lr written by hand."""
    model = Net()
    optimizer: Any = adamw(model)
    if kind == "Muon":
        optimizer = torch.optim.Muon([model.wide.weight, model.tall.weight], lr=LR, weight_decay=DECAY)
    if kind == "Scion":
        optimizer = twin.Scion([model.wide.weight, model.tall.weight], lr=LR, momentum=0.1)
    optimizer.param_groups[0]["lr"] = lr
    train(model, optimizer, 0, 2)
    return model, optimizer


@pytest.mark.parametrize("lr", [3e-3, 1e-5, 0.0], ids=["warmup", "decayed", "over"])
@pytest.mark.parametrize(
    ("kind", "to"),
    [("AdamW", sn.AdamC), ("AdamW", sn.MuonC), ("AdamW", sn.ScionC), ("Muon", sn.MuonC), ("Muon", sn.Scion),
     ("Muon", torch.optim.Muon), ("Scion", sn.ScionC)],
)  # fmt: skip
def test_no_peak_is_guessed_from_the_lr_of_a_run_under_way(kind: str, to: Any, lr: float):
    model, old = under_way(kind, lr)
    with pytest.raises(ValueError, match=rf"convert: {kind}, group 0: .* lr={lr:g} is below lr=0.01, .*pass peak_lr="):
        sn.convert(old, model, to=to)


def test_convert_and_correct_refuse_a_plateau_in_the_same_words():
    model = Net()
    old = adamw(model)
    scheduler = lr_scheduler.ReduceLROnPlateau(old, patience=0)
    for t in range(4):
        train(model, old, t, t + 1)
        scheduler.step(1.0)
    with pytest.raises(ValueError, match="the peak cannot be guessed") as refused:
        sn.correct(old)
    with pytest.raises(ValueError, match="the peak cannot be guessed") as converted:
        sn.convert(old, model)
    assert str(converted.value).partition("group 0: ")[2] == str(refused.value).partition("group 0: ")[2]


@pytest.mark.parametrize("lr", [3e-3, 1e-5])
def test_a_peak_that_is_passed_keeps_the_norm_that_it_gives(lr: float):
    model, old = under_way("AdamW", lr)
    new, _ = sn.convert(old, model, to=sn.ScionC, peak_lr=LR)
    tuned, _ = sn.convert(adamw(model), model, to=sn.ScionC)  # never trained: its lr is the peak
    for name, group in values_of(new).items():
        at_peak = values_of(tuned)[name]
        assert group["lr"] == pytest.approx(at_peak["lr"] * lr / LR)
        assert group.get("steady_norm_sq") == pytest.approx(at_peak.get("steady_norm_sq"))
        assert group["weight_decay"] == pytest.approx(at_peak["weight_decay"])
    same, _ = sn.convert(old, model, to=sn.AdamC, peak_lr=LR)
    train(model, same, 2, 3)
    group = values_of(same)["tall.weight"]
    assert (group["peak_lr"], group["peak_lr_given"]) == (LR, True)
    assert group["weight_decay"] == pytest.approx(DECAY * lr / LR)


def test_every_group_of_several_optimizers_takes_its_own_peak():
    model, muon = under_way("Muon", 1e-3)
    adamw = torch.optim.AdamW([model.embed.weight], lr=3e-3, weight_decay=DECAY)
    with pytest.raises(ValueError, match=r"convert: peak_lr=0\.02 is one number for 2 optimizers; pass a list of 2"):
        sn.convert([muon, adamw], model, peak_lr=0.02)
    with pytest.raises(ValueError, match="convert: peak_lr has 3 values for 2 groups"):
        sn.convert([muon, adamw], model, peak_lr=[0.02, 4e-3, 1.0])
    with pytest.raises(ValueError, match=r"convert: AdamW, group 0: peak_lr=0\.0 must be positive"):
        sn.convert([muon, adamw], model, peak_lr=[0.02, 0.0])
    new, _ = sn.convert([muon, adamw], model, to=sn.MuonC, peak_lr=[0.02, 4e-3])
    values = values_of(new)
    assert (values["wide.weight"]["peak_lr"], values["embed.weight"]["peak_lr"]) == (0.02, 4e-3)


@pytest.mark.parametrize("scheduled", [False, True])
@pytest.mark.parametrize("to", [sn.AdamC, sn.MuonC])
def test_an_lr_above_a_guess_is_an_error_after_converting_as_well(to: Any, scheduled: bool):
    model = Net()
    old = adamw(model)
    if scheduled:
        lr_scheduler.LambdaLR(old, lambda t: 0.5)  # initial_lr: LR
    new, _ = sn.convert(old, model, to=to)
    for group in new.param_groups:
        assert (group["peak_lr"], group["peak_lr_given"]) == (LR, False)
        group["lr"] = 2 * LR
    with pytest.raises(ValueError, match=r"exceeds the guessed peak_lr=0\.01; pass peak_lr="):
        train(model, new, 0, 1)


def test_a_guess_stays_a_guess_in_torchs_optimizers_and_a_peak_that_is_passed_stays_given():
    model = Net()
    del model.conv  # torch's Muon takes matrices only
    old = sn.MuonC(sn.param_groups(model, kind="muon"), lr=0.02)
    guessed = sn.convert(old, model, to=torch.optim.Muon).optimizer[0]
    given = sn.convert(old, model, to=torch.optim.Muon, peak_lr=0.04).optimizer[0]
    for muon, peak in ((guessed, (0.02, False)), (given, (0.04, True))):
        for group in sn.correct(muon).param_groups:
            assert (group["peak_lr"], group["peak_lr_given"]) == peak


def test_a_guess_is_judged_by_the_largest_lr_of_the_whole_run():
    """A run that is joined may have seen its largest lr, and an optimizer that watched it has noted it."""
    model = Net()
    assert {group["largest_lr"] for group in sn.convert(adamw(model), model)[0].param_groups} == {0.0}
    old = adamw(model)
    train(model, old, 0, 2)
    joined, _ = sn.convert(old, model)
    assert not any("largest_lr" in group for group in joined.param_groups)
    watched = sn.AdamC(model.parameters(), lr=LR)
    train(model, watched, 0, 2)
    watched.param_groups[0]["lr"] = LR / 2
    for to in (sn.AdamC, sn.MuonC):
        assert {group["largest_lr"] for group in sn.convert(watched, model, to=to)[0].param_groups} == {LR}
    assert not any("largest_lr" in group for group in sn.convert(watched, model, peak_lr=LR)[0].param_groups)


# ---------------------------------------------------------------- schedulers after converting

SCHEDULERS = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 3),
    "MultiStepLR": lambda optimizer: lr_scheduler.MultiStepLR(optimizer, [4, 6]),
    "ConstantLR": lambda optimizer: lr_scheduler.ConstantLR(optimizer, 0.5, 6),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10),
    "ExponentialLR": lambda optimizer: lr_scheduler.ExponentialLR(optimizer, 0.9),
    "PolynomialLR": lambda optimizer: lr_scheduler.PolynomialLR(optimizer, 20),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda t: 1 / (1 + t)),
    "CosineAnnealingLR": lambda optimizer: lr_scheduler.CosineAnnealingLR(optimizer, 20),
    "CosineAnnealingWarmRestarts": lambda optimizer: lr_scheduler.CosineAnnealingWarmRestarts(optimizer, 7),
    "SequentialLR": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer, [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), lr_scheduler.CosineAnnealingLR(optimizer, 15)], [5]
    ),
    "ChainedScheduler": lambda optimizer: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 5), lr_scheduler.ExponentialLR(optimizer, 0.9)]
    ),
    "OneCycleLR": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, LR, total_steps=20),
}


STEPS_TAKEN = 6


def scheduled(name: str) -> tuple[Net, torch.optim.AdamW, Any]:
    """Return a model, its optimizer and scheduler, some steps into a run."""
    model = Net()
    optimizer = adamw(model)
    scheduler = SCHEDULERS[name](optimizer)
    for t in range(STEPS_TAKEN):
        train(model, optimizer, t, t + 1)
        scheduler.step()
    return model, optimizer, scheduler


def replayed(name: str, optimizer: torch.optim.Optimizer) -> Any:
    """Return a scheduler that has taken the steps of the old one, as docs/moving.md does it."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"]
    scheduler = SCHEDULERS[name](optimizer)
    for _ in range(STEPS_TAKEN):
        scheduler.step()
    return scheduler


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "OneCycleLR"])  # its max_lr is an argument
def test_a_replayed_scheduler_has_the_course_of_the_old_one_where_the_lr_was_converted(name: str):
    model, old, _ = scheduled(name)
    new, _ = sn.convert(old, model, to=sn.ScionC, peak_lr=LR)
    first = [group["initial_lr"] for group in new.param_groups]
    assert LR not in first
    replayed(name, new)
    ratio = old.param_groups[0]["lr"] / LR
    assert [group["lr"] for group in new.param_groups] == pytest.approx([lr * ratio for lr in first])


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("name", SCHEDULERS)
def test_a_replayed_scheduler_continues_where_the_old_one_was(name: str):
    """With `last_epoch=` instead, four of them take another course without a word: docs/moving.md says to replay."""
    model, old, scheduler = scheduled(name)
    new, _ = sn.convert(old, model, to=sn.AdamC, output=False, peak_lr=LR)
    again = replayed(name, new)
    for _ in range(8):
        for group in new.param_groups:
            assert (group["lr"], group["betas"]) == (
                pytest.approx(old.param_groups[0]["lr"]),
                old.param_groups[0]["betas"],
            )
        old.step(), new.step()
        scheduler.step(), again.step()
