"""Our own optimizers on random models: finite, bounded, and independent of order, grouping, layout and scale."""

import contextlib
import math

import pytest
import torch
import twins_optim as twins
from contract import assert_same, snapshot
from hypothesis import assume
from hypothesis import strategies as st
from models import Layer, Model, layers, with_dtype
from recipes import NORMALISED, OWN, Recipe, recipes, set_lr
from strategies import LAYOUTS, Drawn, log_floats, orthogonal, powers, seeds, side, wide
from torch import nn
from trying import FEWER, SLOW, prop

import steadynorm as sn
from steadynorm import machine

FP64 = torch.float64
lrs = log_floats(1e-6, 0.05)
usual = st.integers(-3, 3)
FAST_POLAR = ("express", "newton-schulz")  # the exact one has no unique answer to missing rank


def refused(recipe: Recipe, model: Model) -> bool:
    """Return whether a view with gaps, which torch's fused kernel cannot step, is refused and its memory untouched."""
    gaps = [name for name, p in model.params.items() if 1 < p.numel() < model.memory[name].numel()]
    if recipe.name != "AdamC fused" or not gaps:
        return False
    with pytest.raises(ValueError, match="view with gaps"):
        recipe(model.params)
    return model.gaps_untouched()


@pytest.mark.parametrize("name", OWN)
@prop(fast=20, slow=SLOW // len(OWN), data=st.data(), drawn=layers(layout=LAYOUTS), lr=lrs)
def test_finite_inputs_give_finite_weights(name, data, drawn, lr):
    """Weights and state are finite at any scale, shape and layout; nothing between the elements of a view is written.

    What AdamC documents: a gradient whose sum of squares overflows is skipped and counted, and nothing else is.
    """
    recipe, dtype = data.draw(with_dtype(recipes([name])))
    model = Model(drawn, dtype)
    if refused(recipe, model):
        return
    optimizer = recipe(model.params, lr=lr)
    least, most = dict.fromkeys(model.params, 0), dict.fromkeys(model.params, 0)
    for t in range(3):
        model.step(optimizer, t)
        for key, p in model.params.items() if name.startswith("AdamC") and dtype != FP64 else ():
            squares = p.grad.double().square().sum().item() / torch.finfo(torch.float32).max
            least[key] += squares > 1.001
            most[key] += squares > 0.999
    for key, p in model.params.items():
        assert p.isfinite().all(), key
        assert all(value.isfinite().all() for value in optimizer.state[p].values()), key
        assert least[key] <= optimizer.state[p]["skipped"].item() <= most[key], key
    assert model.gaps_untouched()


@prop(
    fast=60,
    slow=FEWER,
    of=with_dtype(recipes()),
    drawn=layers(),
    which=st.integers(0, 3),
    value=st.sampled_from([math.nan, math.inf]),
)
def test_a_gradient_that_is_not_finite_touches_its_own_parameter_only(of, drawn, which, value):
    (entry, dtype), hit = of, f"p{which % len(drawn)}"
    assume(math.prod(drawn[which % len(drawn)].weight.shape))
    model, alone = Model(drawn, dtype), Model(drawn, dtype)
    optimizer, reference = entry(model.params), entry(alone.params)
    model.step(optimizer, 0)
    alone.step(reference, 0)
    before, skipped = snapshot(optimizer, model.params), optimizer.skipped_steps().item()
    model.set_gradients(1)
    alone.set_gradients(1)
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


@prop(fast=80, slow=SLOW // 4, entry=recipes(NORMALISED), drawn=layers(exponent=usual), dtype=wide, power=powers)
def test_the_scale_of_the_gradient_changes_nothing_for_normalised_updates(entry, drawn, dtype, power):
    """A power of two changes no bit."""
    model, scaled = Model(drawn, dtype), Model(drawn, dtype)
    optimizer, other = entry(model.params), entry(scaled.params)
    for t in range(3):
        model.step(optimizer, t)
        scaled.step(other, t, 2.0**power)
    for name, p in model.params.items():
        assert torch.equal(p, scaled.params[name]), name


@contextlib.contextmanager
def running(elements: int, threads: int):
    """Run with pieces of this many elements on this many threads."""
    before = machine.CACHED_ELEMENTS, torch.get_num_threads()
    machine.CACHED_ELEMENTS = elements
    torch.set_num_threads(threads)
    try:
        yield
    finally:
        machine.CACHED_ELEMENTS = before[0]
        torch.set_num_threads(before[1])


@prop(
    fast=60,
    slow=1_500,
    entry=recipes(polar=FAST_POLAR),
    drawn=layers(least=2, most=5, exponent=usual),
    seed=seeds,
    elements=st.sampled_from([1, 7, 64, machine.CACHED_ELEMENTS]),
    threads=st.sampled_from([1, 2]),
)
def test_the_order_grouping_and_batching_of_parameters_change_nothing(entry, drawn, seed, elements, threads):
    """Compare one group of all, permuted, in pieces of any size and on any number of threads, with one group each."""
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
        one.step(optimizers[0], t)
        with running(elements, threads):
            turned.step(optimizers[1], t)
        apart.step(optimizers[2], t)
    expected = snapshot(optimizers[0], one.params)
    for other, model in ((optimizers[1], turned), (optimizers[2], apart)):
        found = snapshot(other, model.params)
        for name in names:
            assert_close_states(found[name], expected[name], 1e-7)


@pytest.mark.parametrize("name", OWN)
@prop(fast=10, slow=200, data=st.data(), drawn=layers(exponent=usual, layout=LAYOUTS))
def test_memory_layout_changes_nothing(name, data, drawn):
    recipe = data.draw(recipes([name], polar=FAST_POLAR))
    model, plain = Model(drawn, FP64), Model(drawn, FP64, contiguous=True)
    if refused(recipe, model):
        return
    optimizer, reference = recipe(model.params), recipe(plain.params)
    for t in range(3):
        model.step(optimizer, t)
        plain.step(reference, t)
    found, expected = snapshot(optimizer, model.params), snapshot(reference, plain.params)
    for key in found:
        assert_close_states(found[key], expected[key], 1e-7)
    assert model.gaps_untouched()


VECTORS = {
    "Scion": lambda params: sn.ScionC(params, lr=0.03, lmo="bias"),
    "SGDC": lambda params: sn.SGDC(params, lr=0.03),
}


@pytest.mark.parametrize("name", VECTORS)
@prop(fast=40, slow=SLOW // 4, n=st.integers(1, 30), seed=seeds, exponent=st.integers(-20, 20))
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


@prop(fast=40, slow=SLOW // 4, rows=side, columns=side, seed=seeds, nesterov=st.booleans())
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


# --- what is refused leaves everything as it was


BAD = {
    "lr": [math.nan, math.inf, -1e-9],
    "weight_decay": [-0.1, math.nan],
    "alpha": [0.0, 1.1, math.nan],
    "betas": [(1.0, 0.9), (0.9, -0.1), (math.nan, 0.9), (0.9, 1.5)],
    "eps": [-1e-8, math.nan],
    "steady_norm_sq": [0.0, -1.0, math.nan],
}


@prop(fast=80, slow=FEWER, entry=recipes(), drawn=layers(most=3, exponent=usual), data=st.data())
def test_an_invalid_group_setting_is_refused_before_anything_is_written(entry, drawn, data):
    assume(all(math.prod(layer.weight.shape) for layer in drawn))
    model = Model(drawn, torch.float32)
    optimizer = entry(model.params)
    model.step(optimizer, 0)
    group = optimizer.param_groups[0]
    corrected = "base_weight_decay" in group  # then lambda_t is written anew at every step
    idle = corrected and not (group["corrected"] and group["base_weight_decay"])  # and a target is not looked at
    keys = [key for key in BAD if key in group and not (key == "weight_decay" and corrected)]
    keys = [key for key in keys if not (key == "steady_norm_sq" and idle)]
    key = data.draw(st.sampled_from(keys))
    before, old = snapshot(optimizer, model.params), group[key]
    group[key] = data.draw(st.sampled_from(BAD[key]))
    model.set_gradients(1)
    with pytest.raises(ValueError, match=r"group 0.*=|must be"):
        optimizer.step()
    assert_same(snapshot(optimizer, model.params), before)
    group[key] = old
    model.step(optimizer, 1)


RELATIVE = [name for name, entry in OWN.items() if entry.follows == 1e-12 and not name.startswith("Scion")]


@prop(fast=80, slow=FEWER, recipe=recipes(RELATIVE), drawn=layers(most=2, exponent=usual), ratio=st.floats(0, 1))
def test_the_corrected_decay_is_proportional_to_the_lr(recipe, drawn, ratio):
    """lambda_t / gamma_t stays what it was at the peak; without the correction lambda stays what it was."""
    s = recipe.settings | {"steady_norm_sq": None} if "steady_norm_sq" in recipe.settings else recipe.settings
    model = Model(drawn, torch.float32)
    optimizer = Recipe(recipe.name, s)(model.params)
    group = optimizer.param_groups[0]
    set_lr(group, ratio * s["lr"])
    model.step(optimizer, 0)
    expected = s["weight_decay"] * (ratio if s["corrected"] else 1.0)
    assert group["weight_decay"] == pytest.approx(expected, rel=1e-12, abs=1e-300)


@prop(
    fast=60,
    slow=FEWER,
    recipe=recipes(["ScionC", "ScionC nesterov"]),
    drawn=layers(most=2, exponent=usual),
    ratio=st.floats(0, 1),
)
def test_scions_corrected_decay_is_the_papers(recipe, drawn, ratio):
    model = Model(drawn, torch.float32)
    optimizer, s = recipe(model.params), recipe.settings
    for group in optimizer.param_groups:
        set_lr(group, lr := ratio * s["lr"])
    expected = twins.corrected_decay(lr, s["alpha"], s["steady_norm_sq"], nesterov=s["nesterov"])
    for p in model.params.values():
        assert optimizer.weight_decay_of(p) == pytest.approx(expected, rel=1e-12, abs=1e-300)


def test_layers_print_as_what_they_are():
    """A failing example must say enough to reproduce it."""
    layer = Layer(Drawn((2, 3), "normal", 5, -1), "mixed", 3, "strided")
    assert eval(repr(layer)) == layer
