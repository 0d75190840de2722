"""Claims about `correct(optimizer)`: the decay each update sees, which peak it is measured by, what it refuses.

With a zero gradient AdamW, NAdam, RAdam, Muon and Lion do nothing but decay, so the weights themselves tell which
coefficient was applied: theta_T = theta_0 prod_t (1 - gamma_t lambda_t).
"""

import copy
import io
import math
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import Optimizer

import steadynorm as sn
from steadynorm import correct, theory

LR, DECAY = 0.1, 0.2


class Lion(Optimizer):
    """x = b1 m + (1-b1) g; theta <- (1 - gamma lambda) theta - gamma sign(x); m <- b2 m + (1-b2) g."""

    def __init__(self, params: Any, lr: float = 1e-3, betas: Any = (0.9, 0.99), weight_decay: float = 0.0):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(b1 * m + (1 - b1) * p.grad))
                m.mul_(b2).add_(p.grad, alpha=1 - b2)


class Stranger(Optimizer):
    """A class that nobody knows: theta <- (1 - gamma lambda) theta - gamma g."""

    def __init__(self, params: Any, lr: float = 1e-3, weight_decay: float = 0.0, **more: Any):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, **more})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad, alpha=group["lr"])


class SomebodysScion(Stranger):
    pass


class FusedAdam(Stranger):
    pass


def torch_with(cls: Any, **settings: Any) -> Callable[..., Optimizer]:
    return lambda params, **more: cls(params, **settings, **more)


DECOUPLED: dict[str, Any] = {
    "AdamW": torch.optim.AdamW,
    "Adam": torch_with(torch.optim.Adam, decoupled_weight_decay=True),
    "NAdam": torch_with(torch.optim.NAdam, decoupled_weight_decay=True),
    "RAdam": torch_with(torch.optim.RAdam, decoupled_weight_decay=True),
    "Muon": torch_with(torch.optim.Muon, nesterov=False, ns_steps=1),
    "Muon-Nesterov": torch_with(torch.optim.Muon, nesterov=True, ns_steps=1),
    "Lion": Lion,
    "Stranger": Stranger,
}
ADAMS = ("AdamW", "Adam", "NAdam", "RAdam")

SCHEDULES: dict[str, Callable[[Optimizer], Any]] = {  # all with their maximum at the lr given to the optimizer
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda t: min(1.0, (t + 1) / 5) * 0.9 ** max(0, t - 4)),
    "multiplicative": lambda o: lr_scheduler.MultiplicativeLR(o, lambda t: 0.9),
    "step": lambda o: lr_scheduler.StepLR(o, 4, 0.3),
    "multistep": lambda o: lr_scheduler.MultiStepLR(o, [3, 9], 0.2),
    "constant": lambda o: lr_scheduler.ConstantLR(o, 0.25, total_iters=6),
    "linear": lambda o: lr_scheduler.LinearLR(o, 0.1, total_iters=8),
    "exponential": lambda o: lr_scheduler.ExponentialLR(o, 0.8),
    "polynomial": lambda o: lr_scheduler.PolynomialLR(o, 15, 2.0),
    "cosine": lambda o: lr_scheduler.CosineAnnealingLR(o, 8),
    "restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 5),
    "sequential": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.2, total_iters=4), lr_scheduler.CosineAnnealingLR(o, 12)], [4]
    ),
    "chained": lambda o: lr_scheduler.ChainedScheduler(
        [lr_scheduler.ConstantLR(o, 0.5, total_iters=5), lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "plateau": lambda o: lr_scheduler.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "swa": lambda o: swa_utils.SWALR(o, 0.02, anneal_epochs=6),
}


def weight(*shape: int, dtype: torch.dtype = torch.float64) -> torch.nn.Parameter:
    return torch.nn.Parameter(torch.ones(shape or (2, 2), dtype=dtype))


def adamw(*groups: Any, lr: Any = LR, **more: Any) -> torch.optim.AdamW:
    """AdamW with decay DECAY on one weight, or on the groups given."""
    return torch.optim.AdamW(list(groups) or [weight()], lr=lr, **{"weight_decay": DECAY} | more)


def parameters(optimizer: Optimizer) -> list[torch.Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def step(optimizer: Optimizer, *, seed: int | None = None) -> None:
    """One update on a zero gradient, or on a seeded random one."""
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    for p in parameters(optimizer):
        p.grad = torch.zeros_like(p) if seed is None else torch.randn(p.shape, generator=generator, dtype=p.dtype)
    optimizer.step()


def decays(optimizer: Optimizer, lr: float | None = None, **settings: Any) -> list[float]:
    """What each group's decay is in an update at this lr (and momentum, betas, ...)."""
    for group in optimizer.param_groups:
        group.update(settings if lr is None else settings | {"lr": lr})
    step(optimizer)
    return [group["weight_decay"] for group in optimizer.param_groups]


def drive(optimizer: Optimizer, scheduler: Any, steps: int = 14, *, seed: int | None = None) -> list[dict[str, Any]]:
    """Train; returns what each update saw in the first group."""
    seen = []
    for t in range(steps):
        step(optimizer, seed=None if seed is None else seed + t)
        seen.append({k: copy.deepcopy(v) for k, v in optimizer.param_groups[0].items() if k != "params"})
        scheduler.step(*([1.0] if isinstance(scheduler, lr_scheduler.ReduceLROnPlateau) else []))
    return seen


def snapshot(optimizer: Optimizer) -> Any:
    """All that a refused call must leave alone: groups, their parameters and keys, weights, state, hooks."""
    groups = [
        {key: [id(p) for p in value] if key == "params" else copy.deepcopy(value) for key, value in group.items()}
        for group in optimizer.param_groups
    ]
    hooks = {key: list(value) for key, value in vars(optimizer).items() if key.endswith("_hooks")}
    state = {id(p): {key: torch.as_tensor(v).tolist() for key, v in s.items()} for p, s in optimizer.state.items()}
    return groups, hooks, [p.tolist() for p in parameters(optimizer)], state


@contextmanager
def refused(optimizer: Optimizer, match: str, error: type[Exception] = ValueError) -> Iterator[None]:
    before = snapshot(optimizer)
    with pytest.raises(error, match=match):
        yield
    assert snapshot(optimizer) == before


def through_disk(*objects: Any) -> list[Any]:
    buffer = io.BytesIO()
    torch.save([each.state_dict() for each in objects], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


COPIES: dict[str, Callable[[Optimizer], Optimizer]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda o: pickle.loads(pickle.dumps(o)),
}

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
def test_onecycle_peak_is_its_max_lr_and_its_momentum_cycle_changes_nothing_for_adam(name: str) -> None:
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


def test_a_tensor_lr_stays_the_users_tensor_and_the_decay_becomes_a_float() -> None:
    lr = torch.tensor(LR, dtype=torch.float64)
    optimizer = adamw(lr=lr)
    scheduler = SCHEDULES["cosine"](correct(optimizer))
    seen = drive(optimizer, scheduler, 5)
    assert optimizer.param_groups[0]["lr"] is lr
    assert float(lr) < LR
    assert [type(group["weight_decay"]) for group in seen] == [float] * 5
    assert [g["weight_decay"] for g in seen] == pytest.approx([DECAY * float(g["lr"]) / LR for g in seen], rel=1e-12)


def test_closure_is_called_once_and_its_loss_returned() -> None:
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


def test_correct_returns_the_optimizer_it_was_given() -> None:
    optimizer = adamw()
    assert correct(optimizer) is optimizer


# ---------------------------------------------------------------- the momentum factor


@pytest.mark.parametrize("nesterov", [False, True])
def test_muon_decay_follows_the_gain_of_its_momentum(nesterov: bool) -> None:
    optimizer = correct(torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.95, nesterov=nesterov))

    def gain(momentum: float) -> float:
        return theory.momentum_gain(1 - momentum, nesterov=nesterov)

    for lr, momentum in ((LR, 0.95), (LR, 0.8), (LR / 3, 0.5), (LR / 3, 0.0), (LR / 2, 0.99), (LR, 0.95)):
        expected = DECAY * lr / LR * gain(momentum) / gain(0.95)
        assert decays(optimizer, lr, momentum=momentum) == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("when", ["before the scheduler", "after the scheduler"])
@pytest.mark.parametrize("cycle", ["onecycle", "cyclic"])
def test_muon_under_a_scheduler_that_cycles_momentum(cycle: str, when: str, nesterov: bool) -> None:
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
def test_lion_decay_follows_the_gain_of_its_betas(betas: Any) -> None:
    optimizer = correct(Lion([weight()], lr=LR, weight_decay=DECAY, betas=betas))
    for lr, now in ((LR, betas), (LR, (0.8, 0.99)), (LR / 3, (0.9, 0.999)), (LR / 3, (0.0, 0.0)), (LR / 2, betas)):
        expected = DECAY * lr / LR * theory.lion_gain(*now) / theory.lion_gain(*betas)
        assert decays(optimizer, lr, betas=now) == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize("when", ["before the scheduler", "after the scheduler"])
def test_lion_under_onecycle(when: str) -> None:
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


def test_a_class_named_scion_has_muons_factor_by_its_alpha() -> None:
    optimizer = correct(SomebodysScion([weight()], lr=LR, weight_decay=DECAY, alpha=0.1))
    expected = DECAY * theory.momentum_gain(0.4) / theory.momentum_gain(0.1)
    assert decays(optimizer, alpha=0.4) == pytest.approx([expected], rel=1e-12)


@pytest.mark.parametrize(("trace", "factor"), [(False, 1.0), (True, (0.1 / 0.25) ** 2)])
def test_sgd_factor_is_one_for_ema_and_alpha_ratio_squared_for_trace(trace: bool, factor: float) -> None:
    optimizer = sn.SGDC([weight()], lr=LR, weight_decay=DECAY, alpha=0.1, trace=trace)
    assert decays(optimizer, LR / 2, alpha=0.25) == pytest.approx([DECAY / 2 * factor], rel=1e-12)


# ---------------------------------------------------------------- which optimizers


COUPLED = [
    (torch.optim.SGD, {"momentum": 0.9}),
    (torch.optim.Adam, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Adagrad, {}),
    (torch.optim.Adadelta, {}),
    (torch.optim.RMSprop, {}),
]


@pytest.mark.parametrize(("cls", "settings"), COUPLED)
@pytest.mark.parametrize("decoupled", [None, True])
def test_coupled_decay_is_refused_with_the_reason(cls: Any, settings: dict[str, Any], decoupled: Any) -> None:
    optimizer = cls([weight()], lr=LR, weight_decay=DECAY, **settings)
    with refused(optimizer, rf"(?s){cls.__name__}.*decay is added to the gradient \(coupled L2\).*use .*AdamW"):
        correct(optimizer, decoupled=decoupled)


@pytest.mark.parametrize("cls", [torch.optim.Rprop, torch.optim.LBFGS, torch.optim.SparseAdam])
def test_torch_optimizers_without_decay_are_refused(cls: Any) -> None:
    optimizer = cls([weight()], lr=LR)
    with refused(optimizer, cls.__name__):
        correct(optimizer)


def test_adafactor_is_refused_because_its_lr_follows_the_weights() -> None:
    optimizer = torch.optim.Adafactor([weight()], lr=LR, weight_decay=DECAY)
    for decoupled in (None, True):
        with refused(optimizer, "Adafactor: it scales its lr by the weights' RMS"):
            correct(optimizer, decoupled=decoupled)


def test_one_coupled_group_is_enough_to_refuse_adam() -> None:
    groups = [{"params": [weight()], "decoupled_weight_decay": flag} for flag in (True, False)]
    optimizer = torch.optim.Adam(groups, lr=LR, weight_decay=DECAY)
    with refused(optimizer, "coupled L2"):
        correct(optimizer)


def test_an_unknown_class_needs_decoupled_true() -> None:
    optimizer = Stranger([weight()], lr=LR, weight_decay=DECAY)
    with refused(optimizer, r"Stranger is unknown; pass decoupled=True"):
        correct(optimizer)
    with refused(optimizer, "decoupled=False"):
        correct(optimizer, decoupled=False)
    assert decays(correct(optimizer, decoupled=True), LR / 2) == [DECAY / 2]


def test_an_unknown_class_named_adam_is_of_the_adam_family() -> None:
    optimizer = FusedAdam([weight()], lr=LR, weight_decay=DECAY)
    with refused(optimizer, "decoupled=True"):
        correct(optimizer)
    assert decays(correct(optimizer, decoupled=True, steady_norm_sq=0.5)) == [LR / (2 * 0.5)]


def test_anybodys_adamw_and_its_subclasses_are_adamw() -> None:
    class AdamW(Stranger):  # as in older transformers, timm, ...
        pass

    for base in (torch.optim.AdamW, AdamW):
        mine = type("Mine", (base,), {})
        assert decays(correct(mine([weight()], lr=LR, weight_decay=DECAY)), LR / 2) == [DECAY / 2]


def test_muon_with_an_impossible_momentum_is_refused() -> None:
    optimizer = torch.optim.Muon([weight()], lr=LR, momentum=1.0)
    with refused(optimizer, r"group 0.*momentum 1, outside"):
        correct(optimizer)
    optimizer = SomebodysScion([weight()], lr=LR, alpha=0.0)
    with refused(optimizer, r"group 0.*alpha 0, outside"):
        correct(optimizer)


class KellersMuon(Stranger):
    """Nesterov at all times, which its groups do not say."""


def test_a_muon_that_does_not_say_nesterov_is_asked_once_it_matters() -> None:
    optimizer = correct(KellersMuon([weight()], lr=LR, weight_decay=DECAY, momentum=0.85))
    assert decays(optimizer, LR / 2) == [DECAY / 2]  # the momentum has not moved
    optimizer.param_groups[0]["momentum"] = 0.95
    with refused(optimizer, r"group 0: .*Nesterov.*set group\['nesterov'\] = True \(Keller Jordan's"):
        optimizer.step()
    gains = [theory.momentum_gain(1 - momentum, nesterov=True) for momentum in (0.95, 0.85)]
    expected = DECAY / 2 * gains[0] / gains[1]
    assert decays(optimizer, nesterov=True) == pytest.approx([expected], rel=1e-12)

    optimizer = KellersMuon([weight()], lr=LR, weight_decay=DECAY, momentum=0.95)
    with refused(optimizer, r"correct: group 0: .*set group\['nesterov'\]"):
        correct(optimizer, steady_norm_sq=1.5)
    optimizer.param_groups[0]["nesterov"] = True
    expected = theory.weight_decay_for(1.5, LR, 1 - 0.95, nesterov=True)
    assert decays(correct(optimizer, steady_norm_sq=1.5)) == pytest.approx([expected], rel=1e-12)


def test_a_class_named_lion_without_betas_is_refused() -> None:
    class LionLike(Stranger):
        pass

    for more in ({}, {"alpha": 0.1}):
        optimizer = LionLike([weight()], lr=LR, weight_decay=DECAY, **more)
        with refused(optimizer, "betas"):
            correct(optimizer)


def test_a_capturable_step_is_refused_because_its_decay_would_be_captured() -> None:
    optimizer = adamw(capturable=True)
    with refused(optimizer, r"correct: group 0: capturable=True: .*replayed with the decay.*leave it out"):
        correct(optimizer)
    with pytest.raises(ValueError, match=r"AdamC, group 0: capturable=True: .*leave it out"):
        sn.AdamC([weight()], capturable=True)


def test_correcting_twice_is_an_error() -> None:
    optimizer = correct(adamw())
    with refused(optimizer, "corrected already"):
        correct(optimizer)
    own = sn.AdamC([weight()])
    with refused(own, "AdamC"):
        correct(own)


# ---------------------------------------------------------------- bad arguments leave the optimizer as it was


BAD_ARGUMENTS: list[tuple[dict[str, Any], str]] = [
    ({"overlap": "cubic"}, "overlap='cubic'"),
    *(({"steady_norm_sq": value}, "steady_norm_sq=") for value in (0.0, -1.0, math.nan, math.inf)),
    *(({"peak_lr": value}, "peak_lr=") for value in (0.0, -1.0, math.nan, math.inf)),
    ({"peak_lr": [LR, -1.0]}, "peak_lr=-1"),
    ({"peak_lr": [LR]}, "peak_lr has 1 values for 2 groups"),
    ({"skip": [2]}, "group 2.*2 groups"),
    ({"skip": [-3]}, "group -3.*2 groups"),
    ({"skip": ["nobody"]}, "'nobody'"),
    ({"skip": [torch.nn.Parameter(torch.ones(1))]}, "does not have"),
    ({"skip": ["a"], "peak_lr": [LR, LR, LR]}, "peak_lr"),
    ({"skip": ["a"], "peak_lr": -1.0}, "peak_lr=-1"),
    ({"skip": ["a", "nobody"]}, "'nobody'"),
    ({"skip": [1, 2]}, "group 2"),
]


@pytest.mark.parametrize(("arguments", "match"), BAD_ARGUMENTS, ids=lambda value: str(value)[:40])
def test_a_bad_argument_leaves_the_optimizer_as_it_was(arguments: dict[str, Any], match: str) -> None:
    optimizer = adamw({"params": [("a", weight()), ("b", weight())]}, {"params": [("c", weight())], "name": "head"})
    with refused(optimizer, match):
        correct(optimizer, **arguments)
    assert decays(correct(optimizer), LR / 2) == [DECAY / 2] * 2  # and a good call still works


@pytest.mark.parametrize("by", ["parameter", "name", "index"])
def test_skip_may_be_one_thing(by: str) -> None:
    head = weight()
    optimizer = adamw({"params": [("2.weight", weight())]}, {"params": [("4.weight", head)]})
    correct(optimizer, skip={"parameter": head, "name": "4.weight", "index": 1}[by])
    assert decays(optimizer, LR / 2) == [DECAY / 2, DECAY]


@pytest.mark.parametrize("function", [correct, sn.Monitor])
def test_a_model_in_place_of_an_optimizer_is_told(function: Any) -> None:
    with pytest.raises(TypeError, match=rf"{function.__name__} takes an optimizer, not Linear; make one first"):
        function(torch.nn.Linear(2, 2))


def test_skip_of_something_else_is_a_type_error() -> None:
    optimizer = adamw()
    with refused(optimizer, "skip takes parameters, modules, names, globs and group indices", TypeError):
        correct(optimizer, skip=[1.5])


def test_an_error_in_the_second_group_leaves_the_first_alone() -> None:
    optimizer = Lion([{"params": [weight()]}, {"params": [weight()]}], lr=LR, weight_decay=DECAY)
    del optimizer.param_groups[1]["betas"]
    with refused(optimizer, "betas"):
        correct(optimizer)


# ---------------------------------------------------------------- the peak


def test_the_peak_is_given_else_max_lr_else_initial_lr_else_lr() -> None:
    keys: dict[str, float] = {}
    for key, value in (("lr", 0.1), ("initial_lr", 0.2), ("max_lr", 0.4)):
        keys[key] = value
        optimizer = correct(adamw({"params": [weight()], **keys}))
        assert decays(optimizer, 0.05) == pytest.approx([DECAY * 0.05 / value], rel=1e-12)
    optimizer = correct(adamw({"params": [weight()], **keys}), peak_lr=0.8)
    assert decays(optimizer, 0.05) == pytest.approx([DECAY * 0.05 / 0.8], rel=1e-12)


def test_above_an_explicit_peak_the_decay_goes_above_the_base() -> None:
    assert decays(correct(adamw(), peak_lr=LR / 2), LR) == [2 * DECAY]


def test_above_a_guessed_peak_nothing_is_written_and_the_error_names_group_and_remedy() -> None:
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
def test_an_impossible_lr_is_an_error_that_names_the_group(lr: float) -> None:
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


def test_onecycle_with_a_max_lr_per_group() -> None:
    optimizer = adamw({"params": [weight()]}, {"params": [weight()]})
    scheduler = lr_scheduler.OneCycleLR(optimizer, max_lr=[0.7, 0.07], total_steps=12)
    correct(optimizer)
    for _ in range(11):
        step(optimizer)
        for group, peak in zip(optimizer.param_groups, (0.7, 0.07), strict=True):
            assert group["weight_decay"] == pytest.approx(DECAY * group["lr"] / peak, rel=1e-12)
        scheduler.step()


def test_peak_lr_is_one_number_for_all_groups_or_one_each() -> None:
    for peak, peaks in ((0.4, (0.4, 0.4)), ([0.4, 0.2], (0.4, 0.2)), ((0.4, 0.2), (0.4, 0.2))):
        optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()]}), peak_lr=peak)
        assert decays(optimizer, LR) == pytest.approx([DECAY * LR / each for each in peaks], rel=1e-12)


def test_a_step_with_lr_zero_changes_neither_peak_nor_base() -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = correct(torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=DECAY))
    saved = get_optimizer_state_dict(model, optimizer)  # torch's DCP: lr = 0, step(), lr restored
    assert optimizer.state
    assert saved["param_groups"]
    assert optimizer.param_groups[0]["lr"] == LR
    assert decays(optimizer, LR) == [DECAY]
    assert decays(optimizer, LR / 2) == [DECAY / 2]


# ---------------------------------------------------------------- skip, by whole groups; parts of them: test_decay_skip.py


@pytest.mark.parametrize("index", [1, -1])
def test_skip_by_group_index(index: int) -> None:
    optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()]}), skip=[index])
    assert len(optimizer.param_groups) == 2
    assert decays(optimizer, LR / 2) == [DECAY / 2, DECAY]
    assert decays(optimizer, LR * 3 / 4) == pytest.approx([DECAY * 3 / 4, DECAY])


def test_skipping_all_of_a_group_does_not_split_it_and_may_come_late() -> None:
    head = weight()
    optimizer = adamw({"params": [weight()]}, {"params": [head]})
    SCHEDULES["cosine"](optimizer)
    step(optimizer)
    correct(optimizer, skip=[head])
    assert len(optimizer.param_groups) == 2
    assert decays(optimizer, LR / 2) == [DECAY / 2, DECAY]


def test_a_skipped_group_may_go_above_the_guessed_peak() -> None:
    optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()]}), skip=[1])
    optimizer.param_groups[1]["lr"] = 5 * LR
    step(optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [DECAY, DECAY]


@pytest.mark.parametrize("target", [{}, {"steady_norm_sq": 0.3}], ids=["relative", "absolute"])
def test_a_group_without_decay_stays_without(target: dict[str, float]) -> None:
    optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()], "weight_decay": 0.0}), **target)
    for lr in (LR, LR / 2):
        corrected, without = decays(optimizer, lr)
        assert corrected > 0
        assert without == 0.0


# ---------------------------------------------------------------- an absolute target


def test_adamw_reaches_a_mean_square_by_gamma_over_twice_the_target() -> None:
    optimizer = correct(adamw(), steady_norm_sq=0.3)
    for lr in (LR, LR / 3, 4 * LR, 0.0):  # there is no peak to exceed
        assert decays(optimizer, lr, betas=(1 - LR, 0.9)) == pytest.approx([lr / (2 * 0.3)], rel=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("overlap", ["linear", "exact"])
def test_muon_target_is_solved_by_theory(overlap: str, nesterov: bool) -> None:
    muon = torch.optim.Muon([weight(4, 8), weight(4, 8)], lr=LR, momentum=0.95, nesterov=nesterov)
    optimizer = correct(muon, steady_norm_sq=1.5, overlap=overlap)
    kernel = theory.overlap("spectral", (4, 8)) if overlap == "exact" else "linear"
    for lr, momentum in ((LR, 0.95), (LR / 7, 0.95), (LR / 7, 0.6), (3 * LR, 0.6)):
        expected = theory.weight_decay_for(1.5, lr, 1 - momentum, nesterov=nesterov, overlap=kernel)
        assert decays(optimizer, lr, momentum=momentum) == pytest.approx([expected], rel=1e-12)
    linear = theory.weight_decay_for(1.5, LR, 0.05, nesterov=nesterov)
    exact = theory.weight_decay_for(1.5, LR, 0.05, nesterov=nesterov, overlap=theory.overlap("spectral", (4, 8)))
    assert abs(linear - exact) > 0.02 * exact  # so the two cannot be mistaken for each other


def test_exact_overlap_needs_one_kernel_a_group() -> None:
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


def test_a_matrix_and_its_transpose_have_one_kernel() -> None:
    muon = torch.optim.Muon([weight(4, 8), weight(8, 4)], lr=LR, weight_decay=DECAY, momentum=0.9, nesterov=False)
    expected = theory.weight_decay_for(1.5, LR, 1 - 0.9, overlap=theory.overlap("spectral", (4, 8)))
    assert decays(correct(muon, steady_norm_sq=1.5, overlap="exact")) == pytest.approx([expected], rel=1e-12)


def test_lion_target_is_solved_by_theory() -> None:
    optimizer = correct(Lion([weight()], lr=LR, weight_decay=DECAY), steady_norm_sq=1.5)
    for lr, betas in ((LR, (0.9, 0.99)), (LR / 7, (0.9, 0.99)), (LR / 7, (0.5, 0.9)), (3 * LR, (0.5, 0.9))):
        expected = theory.lion_weight_decay_for(1.5, lr, *betas)
        assert decays(optimizer, lr, betas=betas) == pytest.approx([expected], rel=1e-12)


def test_an_unreachable_target_is_an_error_before_anything_is_written() -> None:
    optimizer = correct(Lion([weight()], lr=LR, weight_decay=DECAY), steady_norm_sq=LR**2 / 2)
    parameters(optimizer)[0].grad = torch.zeros_like(parameters(optimizer)[0])
    with refused(optimizer, r"group 0: steady_norm_sq=0.005 is unreachable at lr=0.1.*lower lr"):
        optimizer.step()


FLIPS: dict[str, tuple[Callable[[], Optimizer], str]] = {
    "AdamW, target": (
        lambda: correct(adamw(lr=1e-3), steady_norm_sq=1e-7),
        r"group 0: steady_norm_sq=1e-07 is unreachable at lr=0\.001: .*decay of 5 a step; raise steady_norm_sq or lower",
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
def test_a_decay_that_would_flip_the_weights_is_an_error_before_anything_is_written(case: str) -> None:
    make, message = FLIPS[case]
    optimizer = make()
    parameters(optimizer)[0].grad = torch.ones_like(parameters(optimizer)[0])
    with refused(optimizer, message):
        optimizer.step()


def test_a_decay_of_all_the_weights_and_one_that_is_not_corrected_are_the_users() -> None:
    assert decays(correct(adamw(lr=1.0, weight_decay=1.0))) == [1.0]
    assert decays(correct(adamw(lr=1.0, weight_decay=1.5), skip=[0])) == [1.5]
    assert decays(correct(adamw(lr=10.0, weight_decay=0.0))) == [0.0]


def test_an_absolute_target_needs_an_update_of_known_size() -> None:
    optimizer = Stranger([weight()], lr=LR, weight_decay=DECAY)
    with refused(optimizer, "steady_norm_sq.*leave it out"):
        correct(optimizer, decoupled=True, steady_norm_sq=1.0)


@pytest.mark.parametrize("make", [lambda **k: correct(adamw(weight_decay=k.pop("weight_decay")), **k),
                                  lambda **k: sn.AdamC([weight()], **k), lambda **k: sn.LionC([weight()], **k)])  # fmt: skip
def test_a_target_that_no_group_can_use_is_refused(make: Callable[..., Optimizer]) -> None:
    with pytest.raises(ValueError, match=r"steady_norm_sq=0\.3 would do nothing.*give them a weight_decay"):
        make(weight_decay=0.0, steady_norm_sq=0.3)
    assert make(weight_decay=1e-9, steady_norm_sq=0.3)
    with refused(plain := adamw(weight_decay=0.0), "would do nothing"):
        correct(plain, steady_norm_sq=0.3)


def test_sgd_refuses_a_target_in_a_group_when_it_is_made() -> None:
    with pytest.raises(ValueError, match=r"SGDC, group 0: steady_norm_sq: the size of sgd updates.*leave it out"):
        sn.SGDC([{"params": [weight()], "steady_norm_sq": 1.0}])


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
def test_stopping_and_resuming_in_mid_schedule_equals_going_on(name: str, order: str) -> None:
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


def test_a_checkpoint_from_before_the_correction_gives_the_base_and_not_the_peak() -> None:
    old = adamw({"params": [weight()], "weight_decay": 0.6}, {"params": [weight()], "weight_decay": 0.4}, lr=LR / 4)
    optimizer = correct(adamw({"params": [weight()]}, {"params": [weight()]}), skip=[1])
    decays(optimizer, LR / 2)
    optimizer.load_state_dict(through_disk(old)[0])
    assert [group["lr"] for group in optimizer.param_groups] == [LR / 4] * 2
    assert decays(optimizer) == pytest.approx([0.6 / 4, 0.4], rel=1e-12)
    assert decays(optimizer, LR) == pytest.approx([0.6, 0.4], rel=1e-12)
    with pytest.raises(ValueError, match="guessed"):
        decays(optimizer, LR * 1.01)


def test_a_checkpoint_from_before_the_correction_keeps_an_explicit_peak_explicit() -> None:
    optimizer = correct(adamw(), peak_lr=0.4)
    optimizer.load_state_dict(through_disk(adamw(weight_decay=0.6))[0])
    assert decays(optimizer, 0.8) == pytest.approx([1.2], rel=1e-12)


def test_a_checkpoint_from_before_the_correction_keeps_the_absolute_target() -> None:
    optimizer = correct(adamw(), steady_norm_sq=0.3)
    optimizer.load_state_dict(through_disk(adamw(weight_decay=0.6))[0])
    assert decays(optimizer, LR / 2) == pytest.approx([LR / 2 / (2 * 0.3)], rel=1e-12)

    def muon() -> Optimizer:
        return torch.optim.Muon([weight(4, 4)], lr=LR, weight_decay=DECAY, momentum=0.9, nesterov=False)

    optimizer = correct(muon(), steady_norm_sq=1.5, overlap="exact")
    optimizer.load_state_dict(through_disk(muon())[0])
    expected = theory.weight_decay_for(1.5, LR / 2, 1 - 0.9, overlap=theory.overlap("spectral", (4, 4)))
    assert decays(optimizer, LR / 2) == pytest.approx([expected], rel=1e-12)


def test_a_checkpoint_from_before_the_correction_leaves_the_schedulers_keys_alone() -> None:
    old = torch.optim.Muon([weight()], lr=LR, weight_decay=0.6, momentum=0.9)
    lr_scheduler.OneCycleLR(old, max_lr=0.7, total_steps=20)
    optimizer = correct(torch.optim.Muon([weight()], lr=LR, weight_decay=DECAY, momentum=0.9), peak_lr=0.7)
    optimizer.load_state_dict(through_disk(old)[0])
    loaded = optimizer.param_groups[0]
    assert {key: loaded[key] for key in old.param_groups[0] if key != "params"} == plain(old.param_groups)[0]


def test_a_checkpoints_peak_and_base_win_over_the_constructors() -> None:
    saved = correct(adamw())
    decays(saved, LR / 4)
    other = correct(adamw(lr=5 * LR, weight_decay=0.9))
    other.load_state_dict(through_disk(saved)[0])
    assert decays(other) == [DECAY / 4]
    assert decays(other, LR) == [DECAY]


def test_a_corrected_checkpoint_goes_on_under_correct_only() -> None:
    saved = correct(adamw())
    decays(saved, LR / 4)
    other = adamw()
    other.load_state_dict(through_disk(saved)[0])
    assert decays(other, LR / 2) == [DECAY / 4]  # torch alone: what was in force
    assert decays(correct(other), LR / 2) == [DECAY / 2]


@pytest.mark.parametrize("name", DECOUPLED)
def test_what_is_saved_is_plain_python_even_if_numpy_was_given(name: str) -> None:
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
def test_a_copy_is_corrected_and_a_copy_of_it(name: str, way: str) -> None:
    """torch drops hooks: it trained uncorrected, without a word."""
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
def test_a_copy_of_one_that_is_not_corrected_is_not(way: str) -> None:
    correct(adamw())  # another one of its class is
    copied = COPIES[way](adamw())
    assert decays(copied, LR / 2) == [DECAY]
    assert decays(correct(copied, peak_lr=LR), LR / 2) == [DECAY / 2]


@pytest.mark.parametrize("way", COPIES)
def test_correct_without_arguments_restores_a_correction_that_was_lost(way: str) -> None:
    """As in a pickle from before copies kept it."""
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


def test_a_copy_loads_a_checkpoint_as_a_corrected_one_does() -> None:
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
def test_a_group_added_later_must_bring_its_peak(lr: float) -> None:
    """Its lr in a step is no peak: it may be in its warmup, or DCP may have set it to 0 to build state."""
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


def test_a_plain_checkpoint_into_groups_of_which_one_was_added() -> None:
    optimizer = correct(adamw())
    optimizer.add_param_group({"params": [weight()], "lr": LR, "weight_decay": 0.0})
    optimizer.load_state_dict(adamw({"params": [weight()]}, {"params": [weight()], "weight_decay": 0.0}).state_dict())
    assert decays(optimizer, LR / 2) == [DECAY / 2, 0.0]


def test_the_remedy_for_a_guessed_peak_can_be_followed_in_the_group() -> None:
    optimizer = correct(adamw())
    with pytest.raises(ValueError, match="or put it in the group"):
        decays(optimizer, 2 * LR)
    optimizer.param_groups[0]["peak_lr"] = 2 * LR
    assert decays(optimizer, LR) == [DECAY / 2]


@pytest.mark.parametrize("lr", [LR, 0.0])
def test_an_added_group_survives_a_checkpoint_before_its_first_step(lr: float) -> None:
    """Its own peak, and that it is not corrected at all, are not those of the optimizer that loads it."""
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


# ---------------------------------------------------------------- a decay written by somebody else


ALL_CORRECTED: dict[str, Callable[[], Optimizer]] = {
    "correct(AdamW)": lambda: correct(adamw()),
    "AdamC": lambda: sn.AdamC([weight()], lr=LR, weight_decay=DECAY),
    "LionC": lambda: sn.LionC([weight()], lr=LR, weight_decay=DECAY),
    "SGDC": lambda: sn.SGDC([weight()], lr=LR, weight_decay=DECAY),
}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("name", ALL_CORRECTED)
def test_a_decay_that_is_written_and_not_used_is_said_once(name: str, steps: int) -> None:
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
def test_no_word_about_a_decay_that_is_the_base_or_was_loaded_or_is_constant(name: str) -> None:
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


def test_a_scheduler_refuses_a_decay_that_is_computed() -> None:
    for make in ALL_CORRECTED.values():
        optimizer = make()
        with refused(optimizer, r"group 0: weight_decay is computed.*schedule base_weight_decay"):
            sn.Scheduler(optimizer, scale={"weight_decay": sn.schedule.linear(10)})
        sn.Scheduler(optimizer, scale={"base_weight_decay": sn.schedule.constant_then_decay(10, 10)})
        optimizer.param_groups[0]["corrected"] = False
        sn.Scheduler(optimizer, scale={"weight_decay": sn.schedule.linear(10)})


@pytest.mark.parametrize("name", ALL_CORRECTED)
def test_a_base_of_zero_is_no_decay_and_not_the_last_one(name: str) -> None:
    """Scheduled from zero or to it, the decay written last would have gone on for good."""
    optimizer = ALL_CORRECTED[name]()
    assert decays(optimizer, LR, base_weight_decay=0) == [0.0]  # before the first step, too
    assert decays(optimizer, LR / 2, base_weight_decay=0.6) == pytest.approx([0.3])
    assert decays(optimizer, LR / 2, base_weight_decay=0.0) == [0.0]
    with pytest.warns(UserWarning, match=r"group 0: weight_decay=0\.7 is not used"):
        assert decays(optimizer, LR / 2, weight_decay=0.7) == [0.0]


def test_a_decay_given_as_a_tensor_is_nobodys_mistake() -> None:
    optimizer = correct(torch.optim.AdamW([weight()], lr=LR, weight_decay=torch.tensor(0.5)))
    assert decays(optimizer, LR / 2) == [0.25]  # warnings are errors here


def test_a_checkpoint_with_groups_of_param_groups_does_not_undo_a_skip() -> None:
    first, second = weight(), weight()
    plain = torch.optim.AdamW([{"params": [first], "corrected": True}, {"params": [second], "corrected": True}], lr=LR)
    optimizer = correct(torch.optim.AdamW([{"params": [weight()]}, {"params": [weight()]}], lr=LR), skip=[0])
    optimizer.load_state_dict(plain.state_dict())
    assert [group["corrected"] for group in optimizer.param_groups] == [False, True]


@pytest.mark.parametrize("make", [lambda p: correct(torch.optim.AdamW(p, lr=LR)), lambda p: sn.AdamC(p, lr=LR)])
def test_capturable_in_a_checkpoint_is_not_taken_over(make: Callable[[list[Any]], Optimizer]) -> None:
    old = torch.optim.AdamW([weight()], lr=LR)
    saved = old.state_dict()
    saved["param_groups"][0]["capturable"] = True
    optimizer = make([weight()])
    optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["capturable"] is False
    decays(optimizer, LR / 2)
