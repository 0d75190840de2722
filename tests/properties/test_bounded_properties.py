"""Bounded iterates: |theta_t| <= (1 - eta_t) |theta_{t-1}| + gamma_t U, and a step is no shorter than it should be.

Weights are drawn small enough for the update to matter, their scale apart from the gradient's.
"""

import math

import pytest
import torch
from bounds import LEAST, POLAR_BOUND, ROUNDED, SHARE, conditioned
from hypothesis import strategies as st
from models import Model, layers
from recipes import OWN, Recipe, recipes, set_lr
from strategies import Drawn, dtypes, exponents, log_floats, matrices, seeds, shapes_for, tensors, wide
from torch import nn
from trying import FEWER, SLOW, prop

import steadynorm as sn
from steadynorm.lmo import LMOS

FP64 = torch.float64
small = st.integers(-4, 0)
ratios = st.lists(st.floats(0.02, 1), min_size=1, max_size=5)
kinds = st.sampled_from(["normal", "low rank", "mixed", "zeros"])
lrs = log_floats(1e-4, 0.2)

pytestmark = pytest.mark.filterwarnings("ignore:.*far below the guessed peak_lr:UserWarning")  # schedules are random


def slack(dtype: torch.dtype) -> float:
    """Return the relative slack of the arithmetic; the weights' own rounding comes on top."""
    return 1e-9 if dtype == FP64 else 1e-4


def rounding(name: str, p: torch.Tensor) -> float:
    """Return the lmo's norm of the largest possible rounding error of all weights."""
    kept = torch.finfo(p.dtype)
    return kept.eps * LMOS[name].norm(p.detach().abs().double() + kept.tiny).item()


@prop(
    fast=150,
    slow=SLOW // 2,
    name=st.sampled_from(sorted(LMOS)),
    data=st.data(),
    dtype=dtypes,
    corrected=st.booleans(),
    polar=st.sampled_from(["svd", "express", "newton-schulz"]),
    peak=lrs,
    schedule=ratios,
    kind=kinds,
    decay=st.floats(0, 5),
    alpha=log_floats(0.05, 1.0),
)
def test_the_iterates_of_scion_are_bounded(name, data, dtype, corrected, polar, peak, schedule, kind, decay, alpha):
    """In the norm of their lmo U is 1, or the largest singular value of the polar factor, whatever the gradient.

    And gamma_t u has that norm from below, too, wherever there is momentum: the update is made, and with its own lr.
    """
    given, exponent = data.draw(tensors(shapes_for(name), exponent=small)), data.draw(exponents)
    p, lmo = nn.Parameter(given.make(dtype)), LMOS[name]
    how = {"lr": peak, "lmo": name, "alpha": alpha, "polar": polar, "own_time": False}  # slices that wait do not decay
    optimizer = sn.ScionC([p], steady_norm_sq=1.0, **how) if corrected else sn.Scion([p], weight_decay=decay, **how)
    spectral = name.startswith(("spectral", "conv"))
    most = POLAR_BOUND[polar] + ROUNDED[dtype] if spectral and polar != "svd" else 1.0
    least = LEAST[polar] if spectral else 1.0
    for t, ratio in enumerate(schedule):
        optimizer.param_groups[0]["lr"] = lr = peak * ratio
        eta = lr * (optimizer.weight_decay_of(p) if corrected else decay)
        before = p.detach().double().clone()
        p.grad = Drawn(given.shape, kind, given.seed, exponent).make(dtype, also=t + 1)
        optimizer.step()
        off = rounding(name, p) + rounding(name, before.to(dtype))
        near = 0.03 if dtype in (torch.bfloat16, torch.float16) and p.numel() > 1 else slack(dtype)
        assert lmo.norm(p.detach().double()) <= ((1 - eta) * lmo.norm(before) + lr * most) * (1 + slack(dtype)) + off
        moved = lmo.norm(p.detach().double() - (1 - eta) * before).item()
        if optimizer.state[p]["momentum_buffer"].any():
            assert lr * (least - near) - off <= moved <= lr * (most + near) + off
        else:
            assert moved <= off


@prop(
    fast=120,
    slow=SLOW // 2,
    given=tensors(st.one_of(shapes_for("bias")), exponent=small),
    exponent=exponents,
    dtype=wide,
    decay=st.floats(0, 5),
    lr=lrs,
    schedule=ratios,
    betas=st.tuples(st.floats(0, 0.99), st.floats(0.5, 0.999)),
    name=st.sampled_from(["LionC", "AdamC", "correct(AdamW)"]),
)
def test_the_elements_of_lion_and_adam_are_bounded(given, exponent, dtype, decay, lr, schedule, betas, name):
    """Lion has U = 1.

    Adam has, by Cauchy and Schwarz, U^2 = (1 - b2^t)/(1 - b2) ((1-b1)/(1-b1^t))^2 sum_k (b1^2/b2)^k.
    """
    if name != "LionC" and dtype == torch.bfloat16:
        dtype = torch.float32  # torch keeps Adam's moments in bf16 then: no bound to speak of
    p = nn.Parameter(given.make(dtype))
    settings = {"lr": lr, "betas": betas, "weight_decay": decay}
    optimizer = (
        sn.correct(torch.optim.AdamW([p], **settings)) if name.startswith("correct") else OWN[name]([p], **settings)
    )
    (b1, b2), most = betas, 1.0
    exponent = min(exponent, 16) if dtype == torch.float32 else exponent  # above that AdamC skips
    for t, ratio in enumerate(schedule, start=1):
        if name != "LionC":
            mass = sum((b1 * b1 / b2) ** k for k in range(t))
            most = math.sqrt((1 - b2**t) / (1 - b2) * mass) * (1 - b1) / (1 - b1**t)
        optimizer.param_groups[0]["lr"] = now = lr * ratio
        before = p.detach().double().clone()
        p.grad = Drawn(given.shape, "mixed", given.seed, exponent).make(dtype, also=t)
        optimizer.step()
        eta = now * decay * ratio
        bound = (1 - eta) * before.abs() + now * most
        assert (p.detach().double().abs() <= bound * (1 + 1e-5) + 4 * torch.finfo(dtype).eps * bound).all()
        moved = (p.detach().double() - (1 - eta) * before).abs()
        if name == "LionC" or (t == 1 and exponent > 0):  # Adam's first update is a sign, too, up to its eps
            assert (moved >= 0.98 * now - 4 * torch.finfo(dtype).eps * bound)[p.grad.abs() > 1e-6].all()


@prop(
    fast=80,
    slow=SLOW // 2,
    recipe=recipes(["SGDC", "SGDC nesterov", "SGDC trace"]),
    given=tensors(shapes_for("bias"), exponent=small),
    exponent=st.integers(-4, 4),
    dtype=dtypes,
    schedule=ratios,
)
def test_the_elements_of_sgd_are_bounded_by_their_gradients(recipe, given, exponent, dtype, schedule):
    """An average has U = max |g|; the trace sums up to 1/alpha of them."""
    p, s = nn.Parameter(given.make(dtype)), recipe.settings
    optimizer, most = recipe([p]), 0.0
    for t, ratio in enumerate(schedule):
        lr = s["lr"] * ratio
        set_lr(optimizer.param_groups[0], lr)
        before = p.detach().double().clone()
        p.grad = Drawn(given.shape, "mixed", given.seed, exponent).make(dtype, also=t + 1)
        most = max(most, p.grad.abs().max().item())
        optimizer.step()
        eta = lr * s["weight_decay"] * (ratio if s["corrected"] else 1.0)
        bound = (1 - eta) * before.abs() + lr * most / (s["alpha"] if recipe.name == "SGDC trace" else 1.0)
        off = torch.finfo(dtype).eps * (bound + torch.finfo(dtype).tiny)
        assert (p.detach().double().abs() <= bound * (1 + 1e-5) + off).all()
        down = (before * (1 - eta) - p.detach().double()) * p.grad.sign() * (-1 if s["maximize"] else 1)
        assert t or (down >= -2 * off).all()  # the first step goes against its gradient


MUON = {"most": 1.27, "least": 0.6}  # singular values of torch's Newton-Schulz in bf16


@prop(
    fast=50,
    slow=SLOW // 4,
    shape=matrices,
    seed=seeds,
    weight=small,
    exponent=st.integers(-10, 10),
    decay=st.floats(0, 2),
    peak=lrs,
    schedule=ratios,
    momentum=st.floats(0.5, 0.99),
)
def test_the_iterates_of_corrected_muon_are_bounded(shape, seed, weight, exponent, decay, peak, schedule, momentum):
    """The bound holds in the spectral norm, with the decay that correct() writes: lambda_t = lambda gamma_t / gamma_peak."""
    p = nn.Parameter(Drawn(shape, "normal", seed, weight).make(torch.float32))
    optimizer = sn.correct(torch.optim.Muon([p], lr=peak, weight_decay=decay, momentum=momentum, eps=1e-30))
    g = (conditioned(shape, seed + 1) * 10.0**exponent).float()
    norm = lambda x: torch.linalg.matrix_norm(x, 2).item()  # noqa: E731
    for ratio in schedule:
        optimizer.param_groups[0]["lr"] = lr = peak * ratio
        eta, before = lr * decay * ratio, p.detach().double().clone()
        p.grad = g.clone()
        optimizer.step()
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(decay * ratio, rel=1e-9)
        length, off = (
            lr * math.sqrt(max(1.0, shape[0] / shape[1])),
            1e-6 * (norm(before.abs()) + norm(p.detach().abs())),
        )
        assert norm(p.detach().double()) <= (1 - eta) * norm(before) + MUON["most"] * length + off
        assert norm(p.detach().double() - (1 - eta) * before) >= MUON["least"] * length - off


@prop(
    fast=120,
    slow=SLOW // 4,
    recipe=recipes(["Scion", "ScionC", "ScionC nesterov", "LionC"]),
    shape=matrices,
    seed=seeds,
    dtype=dtypes,
    weight=small,
    exponent=st.integers(-10, 10),
    schedule=ratios,
)
def test_a_step_has_the_length_and_the_direction_of_its_formula(recipe, shape, seed, dtype, weight, exponent, schedule):
    """|theta_t - (1 - eta_t) theta_{t-1}| = gamma_t U, down a constant gradient without a weak direction."""
    recipe = Recipe(recipe.name, {k: 1 if k == "blocks" else v for k, v in recipe.settings.items()})
    p, s = nn.Parameter(Drawn(shape, "normal", seed, weight).make(dtype)), recipe.settings
    optimizer = recipe([p])
    g = (conditioned(shape, seed + 1) * 10.0 ** (0 if dtype == torch.float16 else exponent)).to(dtype)
    name = "embedding" if recipe.name == "LionC" else optimizer.param_groups[0]["lmo"]
    lmo = LMOS[name]
    iterates = name.startswith("spectral") and (min(shape) > 1 or s["polar"] == "newton-schulz")
    polar = s["polar"] if iterates else "svd"
    most = POLAR_BOUND[polar] + (ROUNDED[dtype] if polar != "svd" else 0)
    down = g.double() / g.double().abs().max() * (-1 if s["maximize"] else 1)
    dual = (down * lmo.update(down, polar=sn.polar.Polar("svd"))).sum().item()
    for ratio in schedule:
        set_lr(optimizer.param_groups[0], lr := s["lr"] * ratio)
        before = p.detach().double().clone()
        p.grad = g.clone()
        optimizer.step()
        decay = (
            optimizer.weight_decay_of(p)
            if recipe.name.startswith("ScionC")
            else optimizer.param_groups[0]["weight_decay"]
        )
        moved = (1 - lr * decay) * before - p.detach().double()
        kept = torch.finfo(dtype)
        off = kept.eps * (
            before.norm().item() + p.detach().double().norm().item() + 2 * math.sqrt(p.numel()) * kept.tiny
        )
        length, near = lr * math.sqrt(lmo.update_norm_sq(shape)), 0.01 if s.get("momentum_dtype") else slack(dtype)
        assert (LEAST[polar] - near) * length - off <= moved.norm().item() <= (most + near) * length + off
        assert (moved * down).sum().item() >= (SHARE[polar] - near) * lr * dual - off * down.norm().item()


@prop(
    fast=60,
    slow=FEWER,
    drawn=layers(exponent=st.integers(-3, 25)),
    dtype=st.sampled_from([torch.float32, FP64]),
    lr=log_floats(1e-6, 0.05),
    decay=st.floats(0, 5),
)
def test_only_the_part_along_the_weights_changes_a_renormalized_norm(drawn, dtype, lr, decay):
    """| |theta_t| - (1 - eta) |theta_{t-1}| | = gamma |u_par| <= gamma |u|, up to eps and rounding."""
    model = Model(drawn, dtype)
    optimizer = sn.RenormalizedAdamW(model.params.values(), lr=lr, weight_decay=decay, betas=(0.9, 0.99))
    before = {name: p.detach().double().norm().item() for name, p in model.params.items()}
    model.step(optimizer, 0)  # the first step: |u| <= 1 an element
    rounded = 1e-5 if dtype == torch.float32 else 1e-9
    for name, p in model.params.items():
        decayed = (1 - lr * decay) * before[name]
        change = abs(p.detach().double().norm().item() - decayed)
        assert change <= lr * math.sqrt(p.numel()) * (1 + rounded) + 1e-7 + rounded * decayed
