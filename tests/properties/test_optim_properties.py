"""Every own optimizer on random models: finite, bounded, and the same whatever order, grouping, layout or scale."""

import math

import pytest
import torch
from contract import Entry, assert_same, snapshot
from hypothesis import strategies as st
from models import OWN, Layer, Model, layers, normalised, own
from strategies import LAYOUTS, Drawn, dtypes, log_floats, orthogonal, powers, seeds, shapes_for, side, tensors
from torch import nn
from trying import FEWER, SLOW, prop

import steadynorm as sn
from steadynorm.lmo import LMOS

FP64 = torch.float64
lrs = log_floats(1e-6, 0.05)
alphas = log_floats(0.01, 1.0)
usual = st.integers(-3, 3)


def settings_of(entry: Entry, alpha: float) -> dict:
    return {"alpha": alpha} if "alpha" in entry(entry.params()).defaults else {}


def refused(entry: Entry, model: Model) -> bool:
    """A view with gaps, which torch's fused kernel cannot step: an error that says so, and the memory as it was."""
    gaps = [name for name, p in model.params.items() if 1 < p.numel() < model.memory[name].numel()]
    if entry.name != "AdamC fused" or not gaps:
        return False
    with pytest.raises(ValueError, match="view with gaps"):
        entry(model.params)
    return model.gaps_untouched()


@pytest.mark.parametrize("name", OWN)
@prop(fast=25, slow=SLOW // len(OWN), drawn=layers(layout=LAYOUTS), dtype=dtypes, lr=lrs, alpha=alphas)
def test_finite_in_finite_out(name, drawn, dtype, lr, alpha):
    """Weights and state, at any scale, shape and layout; nothing between the elements of a view is written.

    What AdamC documents: a gradient whose sum of squares overflows is skipped and counted, and nothing else is.
    """
    entry, model = OWN[name], Model(drawn, dtype)
    if refused(entry, model):
        return
    optimizer = entry(model.params, lr=lr, **settings_of(entry, alpha))
    for t in range(3):
        model.step(optimizer, t)
    for name, p in model.params.items():
        assert p.isfinite().all(), name
        assert all(value.isfinite().all() for value in optimizer.state[p].values()), name
    overflows = entry.name.startswith("AdamC") and dtype != FP64 and any(layer.grad_exponent > 17 for layer in drawn)
    assert optimizer.skipped_steps().item() == 0 or overflows
    assert model.gaps_untouched()


@prop(
    fast=60,
    slow=FEWER,
    entry=own,
    drawn=layers(),
    dtype=dtypes,
    which=st.integers(0, 3),
    value=st.sampled_from([math.nan, math.inf]),
)
def test_a_gradient_that_is_not_finite_touches_its_own_parameter_only(entry, drawn, dtype, which, value):
    model, alone = Model(drawn, dtype), Model(drawn, dtype)
    optimizer, reference = entry(model.params), entry(alone.params)
    model.step(optimizer, 0)
    alone.step(reference, 0)
    hit = f"p{which % len(drawn)}"
    before, skipped = snapshot(optimizer, model.params), optimizer.skipped_steps().item()
    model.set_gradients(1)
    alone.set_gradients(1)
    if model.params[hit].numel() == 0:
        return
    model.params[hit].grad.view(-1)[0] = value
    optimizer.step()
    reference.step()
    after, unharmed = snapshot(optimizer, model.params), snapshot(reference, alone.params)
    assert after[hit].pop("skipped") == before[hit].pop("skipped") + 1
    assert_same(after, before, names=[hit])
    assert optimizer.skipped_steps().item() > skipped
    for name in set(model.params) - {hit}:
        assert_close_states(after[name], unharmed[name], 1e-9 if dtype == FP64 else 0.02)


def assert_close_states(a: dict, b: dict, tolerance: float) -> None:
    for key, value in a.items():
        size = max(b[key].abs().max().item(), 1e-300) if value.numel() else 1.0
        torch.testing.assert_close(value.double() / size, b[key].double() / size, rtol=0, atol=tolerance)


# --- the same whatever


@prop(fast=80, slow=FEWER, entry=normalised, drawn=layers(exponent=usual), dtype=dtypes, power=powers)
def test_scale_of_the_gradient_changes_nothing_for_normalised_updates(entry, drawn, dtype, power):
    """By a power of two: not one bit."""
    model, scaled = Model(drawn, dtype), Model(drawn, dtype)
    optimizer, other = entry(model.params), entry(scaled.params)
    for t in range(3):
        model.step(optimizer, t)
        scaled.step(other, t, 2.0**power)
    for name, p in model.params.items():
        assert torch.equal(p, scaled.params[name]), name


@prop(fast=80, slow=FEWER, entry=own, drawn=layers(least=2, most=6, exponent=usual), seed=seeds)
def test_order_grouping_and_batching_change_nothing(entry, drawn, seed):
    """All in one group; permuted; each in a group of its own, so that nothing is stacked."""
    repeated = [*drawn, *drawn[:2]]  # equal shapes, so that there is something to stack
    one, turned, apart = (Model(repeated, FP64) for _ in range(3))
    order = torch.randperm(len(repeated), generator=torch.Generator().manual_seed(seed)).tolist()
    names = list(one.params)
    optimizers = (
        entry(one.params),
        entry({names[k]: turned.params[names[k]] for k in order}),
        entry([{"params": [p]} for p in apart.params.values()]),
    )
    for t in range(3):
        for model, optimizer in zip((one, turned, apart), optimizers, strict=True):
            model.step(optimizer, t)
    for name in names:
        expected = snapshot(optimizers[0], one.params)[name]
        assert_close_states(snapshot(optimizers[1], turned.params)[name], expected, 1e-7)
        assert_close_states(snapshot(optimizers[2], apart.params)[name], expected, 1e-7)


@pytest.mark.parametrize("name", OWN)
@prop(fast=10, slow=200, drawn=layers(exponent=usual, layout=LAYOUTS))
def test_memory_layout_changes_nothing(name, drawn):
    entry, model, plain = OWN[name], Model(drawn, FP64), Model(drawn, FP64, contiguous=True)
    if refused(entry, model):
        return
    optimizer, reference = entry(model.params), entry(plain.params)
    for t in range(3):
        model.step(optimizer, t)
        plain.step(reference, t)
    for name, p in model.params.items():
        torch.testing.assert_close(
            p, plain.params[name], rtol=1e-7, atol=1e-7 * (1e-30 + p.abs().max().item()) if p.numel() else 0
        )
    assert model.gaps_untouched()


VECTORS = {
    "Scion": lambda params: sn.ScionC(params, lr=0.03, lmo="bias"),
    "SGDC": lambda params: sn.SGDC(params, lr=0.03),
}


@pytest.mark.parametrize("name", VECTORS)
@prop(fast=40, slow=FEWER, n=st.integers(1, 30), seed=seeds, exponent=st.integers(-20, 20))
def test_rotating_a_vector_rotates_its_whole_run(name, n, seed, exponent):
    start, q = Drawn((n,), "normal", seed).make(), orthogonal(n, seed)
    p, turned = nn.Parameter(start.clone()), nn.Parameter(q @ start)
    optimizer, other = VECTORS[name]([p]), VECTORS[name]([turned])
    for t in range(4):
        p.grad = Drawn((n,), "normal", seed, exponent).make(also=t + 1)
        turned.grad = q @ p.grad
        optimizer.step()
        other.step()
    torch.testing.assert_close(turned.detach(), q @ p.detach(), rtol=1e-8, atol=1e-8 * p.abs().max().item())


@prop(fast=40, slow=FEWER, rows=side, columns=side, seed=seeds, nesterov=st.booleans())
def test_rotating_a_matrix_on_both_sides_rotates_its_whole_run(rows, columns, seed, nesterov):
    q, r = orthogonal(rows, seed), orthogonal(columns, seed + 1)
    start = Drawn((rows, columns), "normal", seed).make()
    p, turned = nn.Parameter(start.clone()), nn.Parameter(q @ start @ r)
    make = lambda params: sn.ScionC(params, lr=0.03, lmo="spectral", nesterov=nesterov)  # noqa: E731
    optimizer, other = make([p]), make([turned])
    for t in range(4):
        p.grad = Drawn((rows, columns), "normal", seed).make(also=t + 1)
        turned.grad = q @ p.grad @ r
        optimizer.step()
        other.step()
    torch.testing.assert_close(turned.detach(), q @ p.detach() @ r, rtol=0, atol=1e-6)


# --- bounded iterates: |theta_t| <= (1 - eta_t) |theta_{t-1}| + gamma_t U


@prop(
    fast=100,
    slow=FEWER,
    name=st.sampled_from(sorted(LMOS)),
    data=st.data(),
    decay=st.floats(0, 5),
    steps=st.lists(lrs, min_size=1, max_size=5),
)
def test_scion_iterates_are_bounded_in_the_norm_of_their_lmo(name, data, decay, steps):
    """There U = 1, whatever the gradient."""
    given, kind = (
        data.draw(tensors(shapes_for(name))),
        data.draw(st.sampled_from(["normal", "low rank", "mixed", "zeros"])),
    )
    p = nn.Parameter(given.make())
    optimizer = sn.Scion([p], lr=steps[0], lmo=name, weight_decay=decay, polar="svd")
    for t, lr in enumerate(steps):
        bound = (1 - lr * decay) * LMOS[name].norm(p.detach()) + lr
        optimizer.param_groups[0]["lr"] = lr
        p.grad = Drawn(given.shape, kind, given.seed, given.exponent).make(also=t + 1)
        optimizer.step()
        assert LMOS[name].norm(p.detach()) <= bound * (1 + 1e-9)


@prop(
    fast=80,
    slow=FEWER,
    given=tensors(st.one_of(shapes_for("bias"))),
    decay=st.floats(0, 5),
    lr=lrs,
    betas=st.tuples(st.floats(0, 0.99), st.floats(0.5, 0.999)),
    name=st.sampled_from(["LionC", "AdamC"]),
)
def test_elements_of_lion_and_adam_are_bounded(given, decay, lr, betas, name):
    """Lion: U = 1. Adam: by Cauchy and Schwarz, U^2 = (1 - b2^t)/(1 - b2) ((1-b1)/(1-b1^t))^2 sum_k (b1^2/b2)^k."""
    p = nn.Parameter(given.make())
    optimizer = OWN[name]([p], lr=lr, betas=betas, weight_decay=decay)
    (b1, b2), most = betas, 1.0
    for t in range(1, 6):
        if name == "AdamC":
            mass = sum((b1 * b1 / b2) ** k for k in range(t))
            most = math.sqrt((1 - b2**t) / (1 - b2) * mass) * (1 - b1) / (1 - b1**t)
        bound = (1 - lr * decay) * p.detach().abs().amax() + lr * most
        p.grad = Drawn(given.shape, "mixed", given.seed, -given.exponent).make(also=t)
        optimizer.step()
        assert p.detach().abs().amax() <= bound * (1 + 1e-6)


@prop(
    fast=60,
    slow=FEWER,
    drawn=layers(exponent=st.integers(-3, 25)),
    dtype=st.sampled_from([torch.float32, FP64]),
    lr=lrs,
    decay=st.floats(0, 5),
)
def test_only_the_part_along_the_weights_changes_a_renormalized_norm(drawn, dtype, lr, decay):
    """| |theta_t| - (1 - eta) |theta_{t-1}| | = gamma |u_par| <= gamma |u|, up to eps and rounding."""
    model = Model(drawn, dtype)
    optimizer = sn.RenormalizedAdamW(model.params.values(), lr=lr, weight_decay=decay, betas=(0.9, 0.99))
    before = {name: p.detach().double().norm().item() for name, p in model.params.items()}
    model.step(optimizer, 0)  # the first step: |u| <= 1 an element
    rounding = 1e-5 if dtype == torch.float32 else 1e-9
    for name, p in model.params.items():
        decayed = (1 - lr * decay) * before[name]
        change = abs(p.detach().double().norm().item() - decayed)
        assert change <= lr * math.sqrt(p.numel()) * (1 + rounding) + 1e-7 + rounding * decayed


# --- what is refused leaves everything as it was


BAD = {
    "lr": [math.nan, math.inf, -1e-9],
    "weight_decay": [-0.1, math.nan],
    "alpha": [0.0, 1.1, math.nan],
    "betas": [(1.0, 0.9), (0.9, -0.1), (math.nan, 0.9), (0.9, 1.5)],
    "eps": [-1e-8, math.nan],
    "steady_norm_sq": [0.0, -1.0, math.nan],
}


@prop(fast=80, slow=FEWER, entry=own, drawn=layers(most=3, exponent=usual), data=st.data())
def test_what_a_group_may_not_be_set_to_is_refused_before_anything_is_written(entry, drawn, data):
    model = Model(drawn, torch.float32)
    optimizer = entry(model.params)
    model.step(optimizer, 0)
    group = optimizer.param_groups[0]
    corrected = "base_weight_decay" in group  # then lambda_t is written anew at every step
    keys = [key for key in BAD if key in group and not (key == "weight_decay" and corrected)]
    key = data.draw(st.sampled_from(keys))
    before, old = snapshot(optimizer, model.params), group[key]
    group[key] = data.draw(st.sampled_from(BAD[key]))
    model.set_gradients(1)
    if not any(p.numel() for p in model.params.values()):
        return
    with pytest.raises(ValueError, match=r"group 0.*=|must be"):
        optimizer.step()
    assert_same(snapshot(optimizer, model.params), before)
    group[key] = old
    model.step(optimizer, 1)


@prop(
    fast=80, slow=FEWER, entry=own, drawn=layers(most=2, exponent=usual), ratio=st.floats(0, 1), base=st.floats(0.01, 2)
)
def test_corrected_decay_is_proportional_to_the_lr(entry, drawn, ratio, base):
    """lambda_t / gamma_t is what it was at the peak."""
    if entry.follows is None or entry.name.startswith("Scion"):
        return
    model = Model(drawn, torch.float32)
    optimizer = entry(model.params, weight_decay=base)
    group = optimizer.param_groups[0]
    peak = group["lr"]
    group["lr"] = ratio * peak
    model.step(optimizer, 0)
    assert group["weight_decay"] == pytest.approx(base * ratio, rel=1e-12, abs=1e-300)


def test_layers_print_as_what_they_are():
    """A failing example has to say enough to make it again."""
    layer = Layer(Drawn((2, 3), "normal", 5, -1), "mixed", 3, "strided")
    assert eval(repr(layer)) == layer
