"""Claims about schedules: what each step gets, that matching matches, and that resuming resumes."""

import copy
import io
import math
import pickle
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch.optim import lr_scheduler

from steadynorm import schedule, theory
from steadynorm.schedule import MatchedMomentum, between, constant, constant_then_decay, cosine, linear
from steadynorm.scheduler import Scheduler

T = 40


def make(lr: Any = 0.5, **head: Any) -> torch.optim.SGD:
    """Return SGD with the group keys our optimizers have; it ignores those it does not know."""
    body = {"params": [torch.nn.Parameter(torch.ones(2))], "name": "body", "alpha": 0.1, "steady_norm_sq": 2.0}
    rest = {"params": [torch.nn.Parameter(torch.ones(3))], "name": "head", "alpha": 0.1, "steady_norm_sq": None}
    return torch.optim.SGD([body, rest | head], lr=lr)


def run(optimizer: torch.optim.Optimizer, *schedulers: Any, steps: int = 1, key: str = "lr") -> list[list[float]]:
    """Return what each update saw under `key`, per group."""
    seen = []
    for _ in range(steps):
        seen.append([group.get(key) for group in optimizer.param_groups])
        optimizer.step()
        for scheduler in schedulers:
            scheduler.step()
    return seen


def through_disk(*objects: Any) -> list[Any]:
    buffer = io.BytesIO()
    torch.save([each.state_dict() for each in objects], buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


# ---------------------------------------------------------------- ratios


def test_the_cosine_is_the_papers_at_every_update() -> None:
    for t in range(1, T + 1):
        assert cosine(T)(t - 1) == pytest.approx((1 + math.cos(math.pi * (t - 1) / T)) / 2, abs=1e-15)


@pytest.mark.parametrize("ratio", [cosine, linear, lambda *a, **k: constant_then_decay(*a, decay=9, **k)])
def test_ratios_start_at_one_and_hold_final_past_the_end(ratio: Any) -> None:
    assert ratio(T)(0) == 1.0
    assert ratio(T)(T - 1) > 0.0
    assert ratio(T)(T) == ratio(T)(10 * T) == 0.0
    assert ratio(T, final=0.1)(T) == ratio(T, final=0.1)(10 * T) == 0.1


@pytest.mark.parametrize("ratio", [cosine(T, warmup=10), linear(T, warmup=10), constant(warmup=10)])
def test_warmup_is_t_over_w_and_the_full_decay_follows(ratio: schedule.Ratio) -> None:
    assert [ratio(step) for step in range(10)] == [(step + 1) / 10 for step in range(10)]
    assert ratio(10) == 1.0


def test_the_decay_after_warmup_ends_at_total_and_not_later() -> None:
    late, early = cosine(T, warmup=10), cosine(T - 10)
    assert [late(step + 10) for step in range(T)] == [early(step) for step in range(T)]


@pytest.mark.parametrize("shape", ["linear", "cosine"])
def test_constant_then_decay_holds_one_until_the_last_decay_steps(shape: Any) -> None:
    ratio = constant_then_decay(T, decay=10, warmup=5, final=0.2, shape=shape)
    assert [ratio(step) for step in range(5, 31)] == [1.0] * 26
    assert ratio(35) == pytest.approx(0.6)  # half way, where both shapes agree
    left = {"linear": 0.8, "cosine": (1 + math.cos(math.pi / 5)) / 2}[shape]
    assert ratio(32) == pytest.approx(0.2 + 0.8 * left)
    assert ratio(T) == 0.2


def test_step_functions_compare_and_pickle_as_values() -> None:
    def build(total: int) -> list[Any]:
        matched = MatchedMomentum(0.1, 0.5, cosine(total), nesterov=True)
        return [cosine(total), between(3, 1, linear(total)), matched.alpha, matched.lr]

    assert build(T) == build(T) == pickle.loads(pickle.dumps(build(T)))
    assert all(a != b for a, b in zip(build(T), build(T + 1), strict=True))


def test_linear_alpha_and_cosine_norm_are_the_papers() -> None:
    for step in range(T + 1):
        r = (1 + math.cos(math.pi * step / T)) / 2
        assert schedule.linear_alpha(0.01, 1.0, T)(step) == pytest.approx(0.01 + 0.99 * step / T, rel=1e-12)
        assert schedule.cosine_norm(1.1875, 0.3, T)(step) == pytest.approx(r * 1.1875 + (1 - r) * 0.3, rel=1e-12)
    assert schedule.linear_alpha(0.3, 1.0, T)(0) == 0.3  # the ends exactly
    assert schedule.cosine_norm(1.1875, 0.3, T)(T) == 0.3


# ---------------------------------------------------------------- matched momentum


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("alpha_max", [0.1, 0.2, 0.5, 1.0])
@pytest.mark.parametrize("ratio", [cosine(1000), linear(1000, final=0.01), constant_then_decay(1000, decay=300)])
def test_matched_effective_lr_follows_the_ratio_at_every_step(nesterov: bool, alpha_max: float, ratio: Any) -> None:
    matched = MatchedMomentum(0.1, alpha_max, ratio, nesterov=nesterov)
    whole = theory.effective_lr(0.01, 0.1, nesterov=nesterov)
    for step in range(1001):
        reached = theory.effective_lr(0.01 * matched.lr(step), matched.alpha(step), nesterov=nesterov)
        assert reached == pytest.approx(ratio(step) * whole, rel=1e-12, abs=1e-300)


@pytest.mark.parametrize("nesterov", [False, True])
def test_alpha_does_the_work_until_alpha_max_and_lr_only_after(nesterov: bool) -> None:
    matched = MatchedMomentum(0.1, 0.5, cosine(1000), nesterov=nesterov)
    alphas, lrs = ([f(step) for step in range(1000)] for f in (matched.alpha, matched.lr))
    turn = alphas.index(0.5)
    assert 100 < turn < 900
    assert alphas[0] == pytest.approx(0.1, rel=1e-12)
    assert alphas == sorted(alphas) and len(set(alphas[:turn])) == turn  # rises at every step
    assert alphas[turn:] == [0.5] * (1000 - turn)
    assert lrs[:turn] == [1.0] * turn
    assert all(a > b for a, b in pairwise(lrs[turn - 1 :]))


def test_matched_alpha_is_the_recipes_closed_form() -> None:
    matched = MatchedMomentum(0.1, 1.0, cosine(T))
    for step in range(T // 2):
        s = math.sqrt(1.9 / 0.1) * cosine(T)(step)
        assert matched.alpha(step) == pytest.approx(2 / (1 + s * s), rel=1e-12)


def test_nesterov_gain_falls_all_the_way_so_its_inverse_is_unique() -> None:
    gains = [theory.momentum_gain(n / 2000, nesterov=True) for n in range(1, 2001)]
    assert all(a > b for a, b in pairwise(gains))
    for alpha in (0.011, 0.3, 0.9):
        gain = theory.momentum_gain(alpha, nesterov=True)
        assert schedule.alpha_for_gain(gain, 0.01, 1.0, nesterov=True) == pytest.approx(alpha, rel=1e-12)


@pytest.mark.parametrize("alpha_0", [0.1, 0.02])
def test_gamma_prime_matches_gamma_times_gain_and_so_misses_gamma_eff(alpha_0: float) -> None:
    matched = MatchedMomentum(alpha_0, 0.5, cosine(T), match="gamma-prime")
    start = (2 - alpha_0) / alpha_0
    for step in range(T):
        r, alpha, lr = cosine(T)(step), matched.alpha(step), matched.lr(step)
        assert alpha == pytest.approx(min(2 / (1 + r * start), 0.5), rel=1e-12)
        assert lr * (2 - alpha) / alpha == pytest.approx(r * start, rel=1e-12)
    middle = theory.effective_lr(matched.lr(T // 2), matched.alpha(T // 2))
    assert middle == pytest.approx(math.sqrt(0.5 * start), rel=1e-12)  # sqrt(r), not r: "delayed decay"


def test_matched_warmup_ramps_lr_with_alpha_at_its_start() -> None:
    plain, warmed = MatchedMomentum(0.1, 0.5, cosine(T)), MatchedMomentum(0.1, 0.5, cosine(T), warmup=4)
    assert [warmed.at(step) for step in range(4)] == [(0.1, 0.25), (0.1, 0.5), (0.1, 0.75), (0.1, 1.0)]
    assert [warmed.at(step + 4) for step in range(T)] == [plain.at(step) for step in range(T)]


# ---------------------------------------------------------------- the scheduler


def test_scale_multiplies_each_groups_own_base_and_value_replaces_it() -> None:
    optimizer = make(lr=0.5)
    optimizer.param_groups[1]["lr"] = 2.0
    scheduler = Scheduler(optimizer, scale={"lr": linear(4)}, value={"alpha": between(0.2, 1.0, linear(4))})
    assert isinstance(scheduler, lr_scheduler.LRScheduler)  # what trainers ask for
    assert scheduler.get_last_lr() == [0.5, 2.0]
    assert run(optimizer, scheduler, steps=5) == [[0.5, 2.0], [0.375, 1.5], [0.25, 1.0], [0.125, 0.5], [0.0, 0.0]]
    assert [group["alpha"] for group in optimizer.param_groups] == [1.0, 1.0]
    assert [group["initial_lr"] for group in optimizer.param_groups] == [0.5, 2.0]


def test_the_first_value_is_written_at_construction() -> None:
    optimizer = make()
    Scheduler(optimizer, scale={"lr": constant(warmup=10)}, value={"steady_norm_sq": schedule.cosine_norm(5, 1, T)})
    assert [group["lr"] for group in optimizer.param_groups] == [0.05, 0.05]
    assert [group["steady_norm_sq"] for group in optimizer.param_groups] == [5.0, None]  # None: not its business


@pytest.mark.parametrize("form", ["list", "names", "star"])
def test_groups_follow_their_own_schedules(form: str) -> None:
    """As in the paper's momentum figures, the sign layer keeps cosine lr and alpha, and the others follow matched
    momentum.
    """
    matched = MatchedMomentum(0.1, 0.5, cosine(T))
    lr, alpha = {
        "list": ([matched.lr, cosine(T)], [matched.alpha, None]),
        "names": ({"body": matched.lr, "head": cosine(T)}, {"body": matched.alpha}),
        "star": ({"*": matched.lr, "head": cosine(T)}, {"*": matched.alpha, "head": None}),
    }[form]
    optimizer = make(lr=1.0)
    scheduler = Scheduler(optimizer, scale={"lr": lr}, value={"alpha": alpha})
    run(optimizer, scheduler, steps=T - 1)
    body, head = optimizer.param_groups
    assert (body["lr"], body["alpha"]) == (matched.lr(T - 1), 0.5)
    assert (head["lr"], head["alpha"]) == (cosine(T)(T - 1), 0.1)


def test_a_tensor_lr_is_filled_in_place_and_groups_stop_sharing_it() -> None:
    lr = torch.tensor(0.5)
    optimizer = make(lr=lr)
    scheduler = Scheduler(optimizer, scale={"lr": [linear(4), None]})
    run(optimizer, scheduler, steps=2)
    body, head = (group["lr"] for group in optimizer.param_groups)
    assert body is lr and body.item() == 0.25
    assert head.item() == 0.5  # SGD gave both groups the same tensor
    body.fill_(9.0)
    assert [float(each) for each in scheduler.get_last_lr()] == [0.25, 0.5]
    run(optimizer, scheduler)
    assert lr.item() == 0.125  # from the base, not from what was there


def test_the_base_of_a_tensor_valued_key_is_a_copy() -> None:
    optimizer = make(alpha=torch.tensor(0.8))
    scheduler = Scheduler(optimizer, scale={"alpha": {"head": linear(4)}})
    assert run(optimizer, scheduler, steps=3, key="alpha")[0][0] == 0.1
    assert optimizer.param_groups[1]["alpha"].item() == pytest.approx(0.2)
    assert optimizer.param_groups[1]["initial_alpha"].item() == pytest.approx(0.8)


def test_groups_hold_python_floats_whatever_the_function_returns() -> None:
    optimizer = make()
    Scheduler(optimizer, scale={"lr": lambda step: torch.tensor(0.5)}, value={"alpha": lambda step: 1})
    assert [type(optimizer.param_groups[0][key]) for key in ("lr", "initial_lr", "alpha")] == [float, float, float]


MATCHED = MatchedMomentum(0.1, 0.5, cosine(T, final=0.05), warmup=3)
KEYS: dict[str, Any] = {
    "scale": {"lr": MATCHED.lr, "steady_norm_sq": linear(T, final=0.5)},
    "value": {"alpha": [MATCHED.alpha, None]},
}


@pytest.mark.parametrize("scheduler_first", [True, False])
@pytest.mark.parametrize("lr", [0.5, torch.tensor(0.5)])
def test_a_resumed_schedule_equals_an_unbroken_one(scheduler_first: bool, lr: Any) -> None:
    def values(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
        return [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]

    unbroken = make(copy.copy(lr))
    scheduler = Scheduler(unbroken, **KEYS)
    run(unbroken, scheduler, steps=T // 2)
    saved_optimizer, saved_scheduler = through_disk(unbroken, scheduler)

    resumed = make(copy.copy(lr) * 7)  # another lr: the checkpoint's counts
    again = Scheduler(resumed, **KEYS)
    if scheduler_first:
        again.load_state_dict(saved_scheduler)
        resumed.load_state_dict(saved_optimizer)
    else:
        resumed.load_state_dict(saved_optimizer)
        again.load_state_dict(saved_scheduler)
        assert again.get_last_lr() == scheduler.get_last_lr()
    assert values(resumed) == values(unbroken)
    for _ in range(T):
        run(unbroken, scheduler)
        run(resumed, again)
        assert values(resumed) == values(unbroken)


def test_rebuilding_on_a_resumed_optimizer_keeps_the_base() -> None:
    optimizer = make()
    run(optimizer, Scheduler(optimizer, **KEYS), steps=T // 2)
    resumed = make()
    resumed.load_state_dict(through_disk(optimizer)[0])
    Scheduler(resumed, **KEYS, last_epoch=T // 2 - 1)  # as torch: construction makes the next step
    for mine, theirs in zip(resumed.param_groups, optimizer.param_groups, strict=True):
        assert {k: v for k, v in mine.items() if k != "params"} == {k: v for k, v in theirs.items() if k != "params"}
    Scheduler(resumed, **KEYS)  # from the start again
    assert resumed.param_groups[0]["initial_lr"] == 0.5 and resumed.param_groups[0]["steady_norm_sq"] == 2.0


def test_loading_writes_the_groups_at_once() -> None:
    optimizer, other = make(), make()
    scheduler, fresh = (Scheduler(each, scale={"lr": linear(4)}) for each in (optimizer, other))
    run(optimizer, scheduler, steps=2)
    fresh.load_state_dict(scheduler.state_dict())
    assert other.param_groups[0]["lr"] == 0.25 and fresh.get_last_lr() == [0.25, 0.25]


def test_resumed_schedules_do_not_warn_about_step_order() -> None:
    optimizer = make()
    scheduler = Scheduler(optimizer, scale={"lr": linear(4)})
    run(optimizer, scheduler)
    fresh = Scheduler(make(), scale={"lr": linear(4)})
    fresh.load_state_dict(scheduler.state_dict())
    fresh.step()  # torch would warn here in a new run, and warnings are errors
    with pytest.warns(UserWarning, match="before `optimizer.step"):
        Scheduler(make(), scale={"lr": linear(4)}).step()


def test_our_scheduler_on_alpha_leaves_the_lr_to_torchs_two() -> None:
    def torchs(optimizer: torch.optim.Optimizer) -> list[lr_scheduler.LRScheduler]:
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=5)
        return [warm, lr_scheduler.CosineAnnealingLR(optimizer, T)]

    alone, shared = make(), make()
    expected = run(alone, *torchs(alone), steps=T)
    ours = Scheduler(shared, value={"alpha": linear(T, final=0.5)})
    assert run(shared, *torchs(shared), ours, steps=T) == expected
    assert shared.param_groups[0]["alpha"] == 0.5


def test_torchs_sequential_and_chained_schedulers_write_all_our_keys() -> None:
    optimizer = make(lr=1.0)
    ours = Scheduler(optimizer, scale={"lr": linear(4)}, value={"alpha": linear(4, final=0.5)})
    warm = lr_scheduler.LinearLR(optimizer, 0.5, total_iters=2)
    run(optimizer, lr_scheduler.SequentialLR(optimizer, [warm, ours], milestones=[2]), steps=4)
    assert [optimizer.param_groups[0][key] for key in ("lr", "alpha")] == [0.5, 0.75]  # our step 2

    optimizer = make(lr=1.0)
    ours = Scheduler(optimizer, value={"alpha": linear(4, final=0.5)})
    run(optimizer, lr_scheduler.ChainedScheduler([ours, lr_scheduler.ExponentialLR(optimizer, 0.5)]), steps=2)
    assert [optimizer.param_groups[0][key] for key in ("lr", "alpha")] == [0.25, 0.75]


def test_a_group_added_later_follows_from_its_own_base() -> None:
    optimizer = make(lr=1.0)
    scheduler = Scheduler(optimizer, scale={"lr": linear(4)})
    run(optimizer, scheduler)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(1))], "lr": 8.0})
    run(optimizer, scheduler)
    assert scheduler.get_last_lr() == [0.5, 0.5, 4.0]


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    ("build", "text"),
    [
        (lambda: cosine(0), "total=0"),
        (lambda: linear(10.0), r"total=10\.0 .* pass an int"),  # type: ignore[arg-type]
        (lambda: cosine(10, warmup=11), "warmup=11 exceeds total=10"),
        (lambda: constant(warmup=-1), "warmup=-1"),
        (lambda: linear(10, final=1.5), r"final=1\.5 .* \[0, 1\]"),
        (lambda: constant_then_decay(10, decay=8, warmup=3), "decay=8 and warmup=3 exceed total=10"),
        (lambda: constant_then_decay(10, 5, shape="sine"), "shape='sine' .*'cosine', 'linear'"),  # type: ignore[arg-type]
        (lambda: schedule.linear_alpha(0.0, 1.0, 10), r"start=0\.0 .* \(0, 1\]"),
        (lambda: schedule.linear_alpha(0.1, 1.1, 10), r"end=1\.1 .* \(0, 1\]"),
        (lambda: schedule.cosine_norm(1.0, 0.0, 10), r"end=0\.0 .* above 0"),
        (lambda: MatchedMomentum(math.nan, 0.5, cosine(10)), "alpha_0=nan"),
        (lambda: MatchedMomentum(0.5, 0.1, cosine(10)), r"alpha_max=0\.1 is below alpha_0=0\.5"),
        (lambda: MatchedMomentum(0.1, 0.5, cosine(10), match="beta"), "match='beta'"),  # type: ignore[arg-type]
        (lambda: MatchedMomentum(0.1, 0.5, lambda step: 1.2).alpha(3), r"1\.2 at step 3, outside \[0, 1\]"),
        (lambda: MatchedMomentum(0.1, 0.5, lambda step: math.nan).lr(0), "nan at step 0"),
    ],
)
def test_the_errors_for_bad_schedules_name_the_remedy(build: Any, text: str) -> None:
    with pytest.raises(ValueError, match=text):
        build()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({}, "nothing to write"),
        ({"scale": {"lr": cosine(9)}, "value": {"lr": cosine(9)}}, r"\['lr'\] in scale= and in value="),
        ({"scale": {"lr": cosine(9)}, "value": {"beta": cosine(9)}}, "no group has a number under 'beta'.*'alpha'"),
        ({"scale": {"lr": [cosine(9)]}}, "lr has 1 functions for 2 groups"),
        ({"scale": {"lr": {"tail": cosine(9)}}}, r"lr for \['tail'\].*\['body', 'head'\]"),
        ({"value": {"steady_norm_sq": {"head": cosine(9)}}}, r'group 1 \("head"\): steady_norm_sq=None'),
        ({"value": {"nesterov": constant()}}, r'group 0 \("body"\): nesterov=False is not a number'),
        ({"scale": {"lr": 0.5}}, r'group 0 \("body"\): lr is given 0.5; pass a function'),
        ({"value": {"alpha": constant()}, "scale": {"lr": [constant(), lambda step: -1.0]}}, r'"head"\): lr .* -1\.0'),
        ({"value": {"alpha": constant()}, "scale": {"lr": lambda step: math.nan}}, "nan at step 0; return a finite"),
        ({"scale": {"alpha": cosine(9)}, "last_epoch": 4}, 'no "initial_alpha"; load the optimizer first'),
    ],
)
def test_bad_scheduler_arguments_name_the_group_and_change_nothing(arguments: Any, text: str) -> None:
    optimizer = make()
    with pytest.raises((ValueError, TypeError), match=text):
        Scheduler(optimizer, **arguments)
    assert [(group["lr"], group["alpha"]) for group in optimizer.param_groups] == [(0.5, 0.1)] * 2


def test_loading_another_schedulers_state_is_refused_before_anything_moves() -> None:
    optimizer = make()
    scheduler = Scheduler(optimizer, scale={"lr": linear(4)})
    state = Scheduler(make(), value={"alpha": linear(4)}).state_dict()
    with pytest.raises(ValueError, match=r"saved with .*'alpha'.* loaded into .*'lr'"):
        scheduler.load_state_dict(state | {"last_epoch": 3})
    assert scheduler.last_epoch == 0 and optimizer.param_groups[0]["lr"] == 0.5
