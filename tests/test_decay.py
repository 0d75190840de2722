"""Claims about `correct(optimizer)`: the decay that each update sees, relative to a peak or for an absolute target."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from decay_cases import (
    ADAMS,
    DECAY,
    DECOUPLED,
    LR,
    SCHEDULES,
    Lion,
    SomebodysScion,
    Stranger,
    adamw,
    decays,
    drive,
    parameters,
    refused,
    step,
    weight,
)
from torch.optim import lr_scheduler
from torch.optim.optimizer import Optimizer

import steadynorm as sn
from steadynorm import correct, theory

# ---------------------------------------------------------------- lambda_t = lambda gamma_t / gamma_peak


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("when", ["before the scheduler", "after the scheduler"])
@pytest.mark.parametrize("name", DECOUPLED)
def test_each_update_decays_by_lambda_gamma_over_peak(name: str, when: str, schedule: str) -> None:
    optimizer = DECOUPLED[name]([weight()], lr=LR, weight_decay=DECAY)
    decoupled = True if name == "Stranger" else None
    if when == "before the scheduler":
        correct(optimizer, decoupled=decoupled)
    scheduler = SCHEDULES[schedule](optimizer)
    if when == "after the scheduler":
        correct(optimizer, decoupled=decoupled)
    seen = drive(optimizer, scheduler)
    lrs = [group["lr"] for group in seen]
    assert min(lrs) < 0.5 * max(lrs)  # otherwise it would show nothing
    assert [group["weight_decay"] for group in seen] == pytest.approx([DECAY * lr / LR for lr in lrs], rel=1e-12)
    left = math.prod(1 - lr * DECAY * lr / LR for lr in lrs)
    assert parameters(optimizer)[0].flatten().tolist() == pytest.approx([left] * 4, rel=1e-12)


@pytest.mark.parametrize("name", ADAMS)
def test_onecycles_peak_is_its_max_lr_and_its_momentum_cycle_changes_nothing_for_adam(name: str) -> None:
    optimizer = DECOUPLED[name]([weight()], lr=LR, weight_decay=DECAY)
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.7, total_steps=20)
    seen = drive(correct(optimizer), scheduler, 19)
    assert max(group["lr"] for group in seen) == pytest.approx(0.7)
    assert len({group["betas"][0] for group in seen}) > 10
    assert [g["weight_decay"] for g in seen] == pytest.approx([DECAY * g["lr"] / 0.7 for g in seen], rel=1e-12)


@pytest.mark.parametrize("max_lr", [0.7, LR / 2])
@pytest.mark.parametrize("given", [True, False])
def test_onecycle_after_correct_brings_its_own_peak(max_lr: float, given: bool) -> None:
    optimizer = correct(adamw(), peak_lr=max_lr if given else None)
    seen = drive(optimizer, lr_scheduler.OneCycleLR(optimizer, max_lr=max_lr, total_steps=20), 19)
    assert [g["weight_decay"] for g in seen] == pytest.approx([DECAY * g["lr"] / max_lr for g in seen], rel=1e-12)


def test_cyclic_lr_starts_at_its_base_so_it_needs_peak_lr() -> None:
    def made(**peak: Any) -> tuple[Optimizer, Any]:
        optimizer = adamw()
        scheduler = lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=LR, step_size_up=4)
        return correct(optimizer, **peak), scheduler

    with pytest.raises(ValueError, match=r"group 0.*lr=.*guessed.*peak_lr="):
        drive(*made())
    seen = drive(*made(peak_lr=LR))
    assert [g["weight_decay"] for g in seen] == pytest.approx([DECAY * g["lr"] / LR for g in seen], rel=1e-12)


def test_lambda_t_derives_from_the_base_not_from_what_was_written() -> None:
    optimizer = correct(adamw())
    for _ in range(3):
        assert decays(optimizer, LR / 2) == [DECAY / 2]
    assert decays(optimizer, LR) == [DECAY]
    assert decays(optimizer, 0.0) == [0.0]
    assert decays(optimizer, LR) == [DECAY]


@pytest.mark.parametrize(
    ("flags", "lr"),
    [
        ({"foreach": False}, LR),
        ({"foreach": True}, LR),
        ({"fused": True}, LR),
        ({"foreach": False}, torch.tensor(LR)),
        ({"fused": True}, torch.tensor(LR)),  # torch has no tensor lr with foreach, unless capturable
    ],
    ids=str,
)
def test_corrected_adamw_equals_adamw_with_the_decay_written_by_hand(flags: dict[str, bool], lr: Any) -> None:
    ours, hand = (adamw({"params": [weight(5), weight(3, 4)]}, lr=copy.deepcopy(lr), **flags) for _ in range(2))
    correct(ours)
    schedulers = [SCHEDULES["lambda"](each) for each in (ours, hand)]
    for t in range(12):
        hand.param_groups[0]["weight_decay"] = DECAY * (float(hand.param_groups[0]["lr"]) / float(lr))
        step(ours, seed=t)
        step(hand, seed=t)
        for scheduler in schedulers:
            scheduler.step()
    assert all(torch.equal(a, b) for a, b in zip(parameters(ours), parameters(hand), strict=True))


@pytest.mark.parametrize("name", DECOUPLED)
def test_at_the_peak_training_is_bit_identical_to_uncorrected(name: str) -> None:
    ours, plain = (DECOUPLED[name]([weight(6, 6, dtype=torch.float32)], lr=0.03, weight_decay=0.7) for _ in range(2))
    correct(ours, decoupled=True)
    for t in range(10):
        step(ours, seed=t)
        step(plain, seed=t)
    assert torch.equal(parameters(ours)[0], parameters(plain)[0])


def test_a_tensor_lr_is_kept_and_decay_is_a_float() -> None:
    lr = torch.tensor(LR, dtype=torch.float64)
    optimizer = adamw(lr=lr)
    scheduler = SCHEDULES["cosine"](correct(optimizer))
    seen = drive(optimizer, scheduler, 5)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) < LR
    assert [type(group["weight_decay"]) for group in seen] == [float] * 5
    assert [g["weight_decay"] for g in seen] == pytest.approx([DECAY * float(g["lr"]) / LR for g in seen], rel=1e-12)


def test_a_closure_is_called_once_and_its_loss_returned() -> None:
    optimizer = correct(adamw())
    calls = []

    def closure() -> torch.Tensor:
        calls.append(optimizer.param_groups[0]["weight_decay"])
        loss = parameters(optimizer)[0].sum() * 3
        loss.backward()
        return loss

    optimizer.param_groups[0]["lr"] = LR / 4
    assert optimizer.step(closure).item() == 12.0
    assert len(calls) == 1
    assert optimizer.param_groups[0]["weight_decay"] == DECAY / 4


def test_correct_returns_its_argument() -> None:
    optimizer = adamw()
    assert correct(optimizer) is optimizer


# ---------------------------------------------------------------- the momentum factor


@pytest.mark.parametrize("nesterov", [False, True])
def test_muons_decay_follows_the_gain_of_its_momentum(nesterov: bool) -> None:
    optimizer = correct(torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=nesterov))

    def gain(momentum: float) -> float:
        return theory.momentum_gain(1 - momentum, nesterov=nesterov)

    for lr, momentum in ((LR, 0.95), (LR, 0.8), (LR / 3, 0.5), (LR / 3, 0.0), (LR / 2, 0.99), (LR, 0.95)):
        expected = DECAY * lr / LR * gain(momentum) / gain(0.95)
        assert decays(optimizer, lr, momentum=momentum) == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("when", ["before the scheduler", "after the scheduler"])
@pytest.mark.parametrize("cycle", ["onecycle", "cyclic"])
def test_muons_decay_follows_a_scheduler_that_cycles_momentum(cycle: str, when: str, nesterov: bool) -> None:
    def run(correcting: bool) -> tuple[float, list[dict[str, Any]]]:
        name = "Muon-Nesterov" if nesterov else "Muon"
        optimizer = DECOUPLED[name]([weight()], lr=LR, weight_decay=DECAY, momentum=0.9)
        if correcting and when == "before the scheduler":
            correct(optimizer, peak_lr=0.7)
        start = optimizer.param_groups[0]["momentum"]
        if cycle == "onecycle":
            scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.7, total_steps=20)
        else:
            scheduler = lr_scheduler.CyclicLR(optimizer, base_lr=0.01, max_lr=0.7, step_size_up=6)
        if correcting and when == "after the scheduler":
            correct(optimizer, peak_lr=0.7)
            start = optimizer.param_groups[0]["momentum"]
        return start, drive(optimizer, scheduler, 19)

    start, seen = run(True)
    gains = [theory.momentum_gain(1 - m, nesterov=nesterov) for m in (start, *(group["momentum"] for group in seen))]
    assert max(gains) > 1.5 * min(gains)
    expected = [DECAY * group["lr"] / 0.7 * gain / gains[0] for group, gain in zip(seen, gains[1:], strict=True)]
    assert [group["weight_decay"] for group in seen] == pytest.approx(expected, rel=1e-12)
    for key in ("lr", "momentum", "base_momentum", "max_momentum"):  # the scheduler's own business
        assert [group[key] for group in seen] == [group[key] for group in run(False)[1]]


@pytest.mark.parametrize("betas", [(0.9, 0.99), [0.95, 0.98]], ids=["tuple", "list"])
def test_lions_decay_follows_the_gain_of_its_betas(betas: Any) -> None:
    optimizer = correct(Lion([weight()], lr=LR, weight_decay=DECAY, betas=betas))
    for lr, now in ((LR, betas), (LR, (0.8, 0.99)), (LR / 3, (0.9, 0.999)), (LR / 3, (0.0, 0.0)), (LR / 2, betas)):
        expected = DECAY * lr / LR * theory.lion_gain(*now) / theory.lion_gain(*betas)
        assert decays(optimizer, lr, betas=now) == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize("when", ["before the scheduler", "after the scheduler"])
def test_lions_decay_follows_onecycle(when: str) -> None:
    optimizer = Lion([weight()], lr=LR, weight_decay=DECAY)
    if when == "before the scheduler":
        correct(optimizer, peak_lr=0.7)
    start = optimizer.param_groups[0]["betas"]
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=0.7, total_steps=20)
    if when == "after the scheduler":
        correct(optimizer)
        start = optimizer.param_groups[0]["betas"]
    for group in drive(optimizer, scheduler, 19):
        expected = DECAY * group["lr"] / 0.7 * theory.lion_gain(*group["betas"]) / theory.lion_gain(*start)
        assert group["weight_decay"] == pytest.approx(expected, rel=1e-12)


def test_adam_and_unknown_classes_have_no_momentum_factor() -> None:
    assert decays(correct(adamw(betas=(0.9, 0.999))), LR / 2, betas=(0.5, 0.9)) == [DECAY / 2]
    stranger = Stranger([weight()], lr=LR, weight_decay=DECAY, momentum=0.9)
    assert decays(correct(stranger, decoupled=True), LR / 2, momentum=0.5) == [DECAY / 2]


def test_a_foreign_scion_uses_muons_factor_of_alpha() -> None:
    optimizer = correct(SomebodysScion([weight()], lr=LR, weight_decay=DECAY, alpha=0.1))
    expected = DECAY * theory.momentum_gain(0.4) / theory.momentum_gain(0.1)
    assert decays(optimizer, alpha=0.4) == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize(("trace", "factor"), [(False, 1.0), (True, (0.1 / 0.25) ** 2)])
def test_sgds_factor_is_one_for_ema_and_alpha_ratio_squared_for_trace(trace: bool, factor: float) -> None:
    optimizer = sn.SGDC([weight()], lr=LR, weight_decay=DECAY, alpha=0.1, trace=trace)
    assert decays(optimizer, LR / 2, alpha=0.25) == pytest.approx([DECAY / 2 * factor], rel=1e-12)


# ---------------------------------------------------------------- an absolute target


def test_adamw_reaches_a_mean_square_by_gamma_over_twice_the_target() -> None:
    optimizer = correct(adamw(), steady_norm_sq=0.3)
    for lr in (LR, LR / 3, 4 * LR, 0.0):  # there is no peak to exceed
        assert decays(optimizer, lr, betas=(1 - LR, 0.9)) == pytest.approx([lr / (2 * 0.3)], rel=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("overlap", ["linear", "exact"])
def test_muons_target_is_solved_by_theory(overlap: str, nesterov: bool) -> None:
    muon = torch.optim.Muon([weight(4, 8), weight(4, 8)], lr=LR, momentum=0.95, nesterov=nesterov)
    optimizer = correct(muon, steady_norm_sq=1.5, overlap=overlap)
    kernel = theory.overlap("spectral", (4, 8)) if overlap == "exact" else "linear"
    for lr, momentum in ((LR, 0.95), (LR / 7, 0.95), (LR / 7, 0.6), (3 * LR, 0.6)):
        expected = theory.weight_decay_for(1.5, lr, 1 - momentum, nesterov=nesterov, overlap=kernel)
        assert decays(optimizer, lr, momentum=momentum) == pytest.approx([expected], rel=1e-12)
    linear = theory.weight_decay_for(1.5, LR, 0.05, nesterov=nesterov)
    exact = theory.weight_decay_for(1.5, LR, 0.05, nesterov=nesterov, overlap=theory.overlap("spectral", (4, 8)))
    assert abs(linear - exact) > 0.02 * exact  # so the two cannot be mistaken for each other


def test_the_exact_overlap_needs_one_kernel_per_group() -> None:
    optimizer = torch.optim.Muon([weight(4, 4), weight(4, 16)], lr=LR, weight_decay=DECAY)
    with pytest.raises(ValueError, match=r"overlap='exact'.*split the group by shape"):
        step(correct(optimizer, steady_norm_sq=1.5, overlap="exact"))
    assert all((p == 1).all() for p in parameters(optimizer))
    groups = [{"params": [weight(4, 4)]}, {"params": [weight(4, 16)]}]
    optimizer = torch.optim.Muon(groups, lr=LR, weight_decay=DECAY, momentum=0.9, nesterov=False)
    expected = [
        theory.weight_decay_for(1.5, LR, 1 - 0.9, overlap=theory.overlap("spectral", s)) for s in ((4, 4), (4, 16))
    ]
    correct(optimizer, steady_norm_sq=1.5, overlap="exact")
    assert decays(optimizer, LR) == pytest.approx(expected, rel=1e-12)
    assert expected[0] != pytest.approx(expected[1], rel=1e-3)


def test_a_matrix_and_its_transpose_share_a_kernel() -> None:
    muon = torch.optim.Muon([weight(4, 8), weight(8, 4)], lr=LR, weight_decay=DECAY, momentum=0.9, nesterov=False)
    expected = theory.weight_decay_for(1.5, LR, 1 - 0.9, overlap=theory.overlap("spectral", (4, 8)))
    assert decays(correct(muon, steady_norm_sq=1.5, overlap="exact")) == pytest.approx([expected], rel=1e-12)


def test_lions_target_is_solved_by_theory() -> None:
    optimizer = correct(Lion([weight()], lr=LR, weight_decay=DECAY), steady_norm_sq=1.5)
    for lr, betas in ((LR, (0.9, 0.99)), (LR / 7, (0.9, 0.99)), (LR / 7, (0.5, 0.9)), (3 * LR, (0.5, 0.9))):
        expected = theory.lion_weight_decay_for(1.5, lr, *betas)
        assert decays(optimizer, lr, betas=betas) == pytest.approx([expected], rel=1e-12)


def test_an_unreachable_target_raises_before_any_write() -> None:
    optimizer = correct(Lion([weight()], lr=LR, weight_decay=DECAY), steady_norm_sq=LR**2 / 2)
    parameters(optimizer)[0].grad = torch.zeros_like(parameters(optimizer)[0])
    with refused(optimizer, r"group 0: steady_norm_sq=0.005 is unreachable at lr=0.1.*lower lr"):
        optimizer.step()


FLIPS: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "AdamW, target": (
        lambda: correct(adamw(lr=1e-3), steady_norm_sq=1e-7),
        r"group 0: steady_norm_sq=1e-07 is unreachable at lr=0\.001: .*decay of 5 per step; raise steady_norm_sq or lower",
    ),
    "Muon, target": (
        lambda: correct(torch.optim.Muon([weight(4, 4)], lr=0.1, weight_decay=DECAY), steady_norm_sq=1e-3),
        r"group 0: steady_norm_sq=0\.001 is unreachable at lr=0\.1: .*raise steady_norm_sq or lower lr",
    ),
    "AdamW": (lambda: correct(adamw(lr=1.0, weight_decay=5.0)), r"group 0: lr \* weight_decay = 5 exceeds 1: .*lower"),
    "AdamW, above its peak": (lambda: correct(adamw(lr=1.0), peak_lr=0.1), r"lr \* weight_decay = 2 exceeds 1"),
    "AdamC, target": (lambda: sn.AdamC([weight()], lr=1e-3, steady_norm_sq=1e-7), r"group 0: .*is unreachable"),
    "AdamC": (lambda: sn.AdamC([weight()], lr=1.0, weight_decay=5.0), r"group 0: lr \* weight_decay = 5 exceeds 1"),
}


@pytest.mark.parametrize("case", FLIPS)
def test_a_decay_that_flips_weights_raises_before_any_write(case: str) -> None:
    make, message = FLIPS[case]
    optimizer = make()
    parameters(optimizer)[0].grad = torch.ones_like(parameters(optimizer)[0])
    with refused(optimizer, message):
        optimizer.step()


def test_full_decay_and_uncorrected_decay_are_allowed() -> None:
    assert decays(correct(adamw(lr=1.0, weight_decay=1.0))) == [1.0]
    assert decays(correct(adamw(lr=1.0, weight_decay=1.5), skip=[0])) == [1.5]
    assert decays(correct(adamw(lr=10.0, weight_decay=0.0))) == [0.0]


def test_an_absolute_target_needs_a_known_update_norm() -> None:
    optimizer = Stranger([weight()], lr=LR, weight_decay=DECAY)
    with refused(optimizer, "steady_norm_sq.*leave it out"):
        correct(optimizer, decoupled=True, steady_norm_sq=1.0)


@pytest.mark.parametrize("make", [lambda **k: correct(adamw(weight_decay=k.pop("weight_decay")), **k),
                                  lambda **k: sn.AdamC([weight()], **k), lambda **k: sn.LionC([weight()], **k)])  # fmt: skip
def test_a_target_that_no_group_uses_is_refused(make: Callable[..., Optimizer]) -> None:
    with pytest.raises(ValueError, match=r"steady_norm_sq=0\.3 would do nothing.*give them a weight_decay"):
        make(weight_decay=0.0, steady_norm_sq=0.3)
    assert make(weight_decay=1e-9, steady_norm_sq=0.3)
    with refused(plain := adamw(weight_decay=0.0), "would do nothing"):
        correct(plain, steady_norm_sq=0.3)


def test_sgd_refuses_a_group_target_at_construction() -> None:
    with pytest.raises(ValueError, match=r"SGDC, group 0: steady_norm_sq: the size of sgd updates.*leave it out"):
        sn.SGDC([{"params": [weight()], "steady_norm_sq": 1.0}])
