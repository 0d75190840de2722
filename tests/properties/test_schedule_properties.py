"""Schedules stay between their ends, are continuous at the joins and monotone where they should be; the scheduler
writes them.
"""

import pickle

import pytest
import torch
from hypothesis import assume
from hypothesis import strategies as st
from strategies import log_floats
from torch import nn
from trying import FEWER, prop

import steadynorm as sn
from steadynorm import theory
from steadynorm.schedule import (
    MatchedMomentum,
    between,
    constant,
    constant_then_decay,
    cosine,
    cosine_norm,
    linear,
    linear_alpha,
)
from steadynorm.scheduler import Scheduler

totals = st.integers(1, 3000)
steps = st.integers(0, 4000)
finals = st.one_of(st.just(0.0), st.floats(0, 1))
alphas = log_floats(1e-3, 1.0)
kinds = st.sampled_from(["linear", "cosine"])


@st.composite
def trapezoids(draw: st.DrawFn):
    """Draw (schedule, total, warmup, decay, final) of any part lengths that fit."""
    total = draw(totals)
    warmup = draw(st.integers(0, total))
    decay = draw(st.integers(0, total - warmup))
    final = draw(finals)
    return constant_then_decay(total, decay, warmup, final, draw(kinds)), total, warmup, decay, final


@prop(fast=200, drawn=trapezoids(), step=steps)
def test_the_ratio_is_between_its_ends_and_reaches_them(drawn, step):
    ratio, total, warmup, decay, final = drawn
    assert 0 <= ratio(step) <= 1 + 1e-12
    assert ratio(step) >= (final if step >= warmup else 1 / max(warmup, 1)) * (1 - 1e-12)
    assert ratio(max(warmup - 1, 0)) == 1
    assert ratio(total) == pytest.approx(final if decay else 1.0, abs=1e-12)
    assert ratio(total + step) == ratio(total)  # holds its last value


@prop(fast=200, drawn=trapezoids(), step=steps)
def test_the_ratio_rises_in_warmup_falls_in_decay_and_never_jumps(drawn, step):
    """One step changes it by at most a warmup's step or the steepest of its decay, pi/2 of the mean slope."""
    ratio, _, warmup, decay, final = drawn
    now, after = ratio(step), ratio(step + 1)
    if step + 1 < warmup:
        assert after - now == pytest.approx(1 / warmup)
    else:
        assert after <= now + 1e-12
        assert now - after <= (1 - final) * 1.5708 / max(decay, 1) + 1e-12


@prop(fast=100, total=totals, final=finals, step=steps, warmup=st.integers(0, 3000))
def test_named_schedules_are_special_cases(total, final, step, warmup):
    warmup = min(warmup, total)
    assert cosine(total, warmup, final)(step) == constant_then_decay(total, total - warmup, warmup, final, "cosine")(
        step
    )
    assert linear(total, warmup, final)(step) == constant_then_decay(total, total - warmup, warmup, final)(step)
    assert constant(warmup)(step) == constant_then_decay(total, 0, warmup)(step)


@prop(fast=100, start=st.floats(-1e6, 1e6), end=st.floats(-1e6, 1e6), total=totals, step=steps)
def test_between_stays_between_and_is_linear(start, end, total, step):
    ratio = linear(total)
    value, size = between(start, end, ratio)(step), abs(start) + abs(end)
    assert min(start, end) - 1e-12 * size <= value <= max(start, end) + 1e-12 * size
    assert between(end, start, ratio)(step) + value == pytest.approx(start + end, abs=1e-9 * size)


@prop(fast=100, start=alphas, end=alphas, total=totals, step=steps)
def test_alpha_and_norm_schedules_move_one_way_from_start_to_end(start, end, total, step):
    for f in (linear_alpha(start, end, total), cosine_norm(start, end, total)):
        assert f(0) == pytest.approx(start)
        assert f(total) == pytest.approx(end)
        assert (f(step + 1) - f(step)) * (end - start) >= -1e-12
        assert pickle.loads(pickle.dumps(f)) == f


# --- matched momentum


@st.composite
def matched(draw: st.DrawFn) -> MatchedMomentum:
    low, high = sorted((draw(alphas), draw(alphas)))
    total = draw(totals)
    ratio = draw(st.sampled_from([cosine, linear]))(total, final=draw(finals))
    match = draw(st.sampled_from(["gamma-eff", "gamma-prime"]))
    return MatchedMomentum(low, high, ratio, draw(st.integers(0, 50)), draw(st.booleans()), match)


@prop(fast=200, plan=matched(), step=steps)
def test_matched_momentum_keeps_the_product_on_its_schedule(plan, step):
    """gamma G^power = ratio times its start, alpha stays between its ends, and only one of the two moves at a time."""
    alpha, lr = plan.at(step)
    assert plan.alpha_0 <= alpha <= plan.alpha_max
    assert 0 <= lr <= 1 + 1e-9
    assert (plan.alpha(step), plan.lr(step)) == (alpha, lr)
    if step < plan.warmup:
        assert alpha == plan.alpha_0
        return
    assert lr == 1 or alpha == plan.alpha_max
    power = 0.5 if plan.match == "gamma-eff" else 1.0
    gains = [theory.momentum_gain(a, nesterov=plan.nesterov) ** power for a in (alpha, plan.alpha_0)]
    assert lr * gains[0] == pytest.approx(plan.ratio(step - plan.warmup) * gains[1], rel=1e-6, abs=1e-12)


@prop(fast=150, plan=matched(), step=steps)
def test_matched_alpha_only_rises_and_lr_only_falls_after_warmup(plan, step):
    (alpha, lr), (next_alpha, next_lr) = plan.at(plan.warmup + step), plan.at(plan.warmup + step + 1)
    assert next_alpha >= alpha * (1 - 1e-9)
    assert next_lr <= lr + 1e-12


# --- what a Scheduler writes


def two_groups(lrs: tuple[float, float]) -> sn.ScionC:
    groups = [
        {"params": [nn.Parameter(torch.ones(2, 2))], "lr": lr, "name": name} for lr, name in zip(lrs, "ab", strict=True)
    ]
    return sn.ScionC(groups, lmo="spectral")


lr_pairs = st.tuples(log_floats(1e-4, 0.05), log_floats(1e-4, 0.05))


@prop(fast=40, slow=FEWER, lrs=lr_pairs, total=st.integers(1, 20), taken=st.integers(0, 25), start=alphas)
def test_the_scheduler_writes_its_functions_and_resumes_anywhere(lrs, total, taken, start):
    """After any number of steps the groups hold f(step); a new scheduler that loads the state writes the same."""
    plan = {"scale": {"lr": cosine(total)}, "value": {"alpha": linear_alpha(start, 1.0, total)}}
    optimizer = two_groups(lrs)
    scheduler = Scheduler(optimizer, **plan)
    for _ in range(taken):
        optimizer.step()
        scheduler.step()
    for group, lr in zip(optimizer.param_groups, lrs, strict=True):
        assert group["lr"] == pytest.approx(lr * cosine(total)(taken), abs=1e-15)
        assert group["alpha"] == plan["value"]["alpha"](taken)
    fresh = two_groups((lrs[1], lrs[0]))
    resumed = Scheduler(fresh, **plan)
    fresh.load_state_dict(optimizer.state_dict())
    resumed.load_state_dict(scheduler.state_dict())
    for group, same in zip(fresh.param_groups, optimizer.param_groups, strict=True):
        assert (group["lr"], group["alpha"]) == (same["lr"], same["alpha"])
    assert resumed.get_last_lr() == scheduler.get_last_lr()


@prop(
    fast=40, slow=FEWER, lrs=lr_pairs, bad=st.sampled_from([float("nan"), float("inf"), -1.0]), when=st.integers(1, 5)
)
def test_a_senseless_value_is_refused_and_nothing_is_written(lrs, bad, when):
    optimizer = two_groups(lrs)
    scheduler = Scheduler(
        optimizer, scale={"lr": cosine(10)}, value={"alpha": lambda step: bad if step == when else 0.5}
    )
    for _ in range(when - 1):
        optimizer.step()
        scheduler.step()
    before = [(group["lr"], group["alpha"]) for group in optimizer.param_groups]
    optimizer.step()
    with pytest.raises(ValueError, match="alpha"):
        scheduler.step()
    assert [(group["lr"], group["alpha"]) for group in optimizer.param_groups] == before


@prop(fast=60, total=st.integers(-3, 40), decay=st.integers(-3, 40), warmup=st.integers(-3, 40), final=st.floats(-1, 2))
def test_schedule_parts_that_do_not_fit_are_refused(total, decay, warmup, final):
    fits = total >= 1 and decay >= 0 and warmup >= 0 and decay + warmup <= total and 0 <= final <= 1
    assume(not fits)
    with pytest.raises(ValueError, match=r"total|decay|warmup|final"):
        constant_then_decay(total, decay, warmup, final)
