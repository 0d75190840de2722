"""Each optimizer is its slow twin; the correction does what the paper says; bad input is refused with a reason."""

import copy
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import twins_optim as twin
import twins_theory
from contract import assert_same, noise, parameters, set_gradients, snapshot, train
from torch import Tensor, nn

import steadynorm as sn
from steadynorm import theory
from steadynorm.decay.correction import KEYS
from steadynorm.optim import buckets

FP64 = torch.float64
T = 50
PEAK = 0.03


# --- twins: 50 steps of warmup and cosine, alpha and C^2 changing

RATIO = [(t + 1) / 10 if t < 10 else 0.55 + 0.45 * math.cos(math.pi * (t - 9) / 40) for t in range(T)]
ALPHA = [0.1 + 0.4 * t / T for t in range(T)]
C2 = [1.0 + 0.5 * math.sin(t / 10) ** 2 for t in range(T)]
GAMMA = [PEAK * ratio for ratio in RATIO]
BETAS = [(0.95 - 0.2 * t / T, 0.99 - 0.04 * t / T) for t in range(T)]

# name -> (group settings, shapes)
LAYERS: dict[str, tuple[dict[str, Any], list[tuple[int, ...]]]] = {
    "matrix": ({"lmo": "spectral"}, [(6, 4), (4, 6), (5, 5), (4, 6), (1, 7), (7, 1)]),
    "qkv": ({"lmo": "spectral", "blocks": 3}, [(12, 4), (6, 5)]),
    "experts": ({"lmo": "spectral"}, [(3, 4, 5)]),
    "experts by block": ({"lmo": "spectral", "blocks": 2}, [(3, 4, 5)]),
    "stored transposed": ({"lmo": "spectral-transposed"}, [(4, 6), (6, 4), (3, 4, 5), (1, 7)]),
    "transposed qkv": ({"lmo": "spectral-transposed", "blocks": 3}, [(4, 12), (2, 5, 6)]),
    "conv": ({"lmo": "conv"}, [(4, 2, 3, 3), (4, 3, 5)]),
    "conv by block": ({"lmo": "conv", "blocks": 2}, [(4, 2, 2, 2)]),
    "conv by tap": ({"lmo": "conv-tap"}, [(4, 3, 2, 3)]),
    "vector": ({"lmo": "bias"}, [(7,), (2, 3)]),
    "vector by block": ({"lmo": "bias", "blocks": 3}, [(12,)]),
    "sign": ({"lmo": "sign"}, [(4, 6), (6, 4)]),
    "embedding": ({"lmo": "embedding"}, [(9, 4)]),
    "row": ({"lmo": "row"}, [(4, 6)]),
    "row by block": ({"lmo": "row", "blocks": 2}, [(4, 6)]),
    "column": ({"lmo": "column"}, [(5, 4)]),
    "column by block": ({"lmo": "column", "blocks": 2}, [(6, 4)]),
    "output": ({"lmo": "sign", "weight_decay": 0.7, "lr": 4 * PEAK}, [(8, 5)]),
}


def layer_params(layers: dict[str, Any]) -> dict[str, nn.Parameter]:
    named = {f"{layer} {k}": shape for layer, (_, shapes) in layers.items() for k, shape in enumerate(shapes)}
    return parameters(named, FP64)


def layer_groups(layers: dict[str, Any], params: dict[str, nn.Parameter]) -> list[dict[str, Any]]:
    return [
        {"params": [params[f"{layer} {k}"] for k in range(len(shapes))], "name": layer, **settings}
        for layer, (settings, shapes) in layers.items()
    ]


def gradient(name: str) -> Callable[[int, Tensor], Tensor]:
    """The minibatch gradient of one layer: that of contract.set_gradients."""
    return lambda t, theta: noise(name, t, theta.shape) + 0.3 * theta


def trajectories(optimizer: Any, params: dict[str, nn.Parameter], *, momentum: str = "") -> dict[str, list[Tensor]]:
    """Weights after every step, lr, momentum and C^2 written into the groups as schedulers do."""
    out: dict[str, list[Tensor]] = {name: [] for name in params}
    peaks = [group["lr"] for group in optimizer.param_groups]
    for t in range(T):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * RATIO[t]
            if momentum:
                group[momentum] = {"alpha": ALPHA, "betas": BETAS}[momentum][t]
            if group.get("steady_norm_sq") is not None:
                group["steady_norm_sq"] = C2[t]
        set_gradients(params, t)
        optimizer.step()
        for name, p in params.items():
            out[name].append(p.detach().clone())
    return out


def assert_twins(fast: dict[str, list[Tensor]], slow: Callable[[str], list[Tensor]]) -> None:
    for name, steps in fast.items():
        for t, (a, b) in enumerate(zip(steps, slow(name), strict=True)):
            torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-10, msg=lambda m, at=f"{name}, step {t}": f"{at}: {m}")


@pytest.mark.parametrize("nesterov", [False, True], ids=["plain", "nesterov"])
@pytest.mark.parametrize("overlap", [None, "linear", "exact"])
def test_scion_equals_its_twin(nesterov: bool, overlap: str | None):
    """Algorithm 2 for every lmo, with blocks, stacks and an output layer of constant decay; None: plain Scion."""
    params = layer_params(LAYERS)
    start = {name: p.detach().clone() for name, p in params.items()}
    groups = layer_groups(LAYERS, params)
    if overlap is None:
        optimizer = sn.Scion(groups, lr=PEAK, nesterov=nesterov, polar="svd", weight_decay=0.3)
    else:
        optimizer = sn.ScionC(groups, lr=PEAK, nesterov=nesterov, polar="svd", overlap=overlap)
    fast = trajectories(optimizer, params, momentum="alpha")
    for layer, (settings, shapes) in LAYERS.items():
        decay = settings.get("weight_decay", 0.3 if overlap is None else None)
        peak = settings.get("lr", PEAK)
        for k in range(len(shapes)):
            name = f"{layer} {k}"
            assert_twins(
                {name: fast[name]},
                lambda name, settings=settings, decay=decay, peak=peak: twin.scion(
                    start[name],
                    gradient(name),
                    [peak * ratio for ratio in RATIO],
                    ALPHA,
                    lmo=settings["lmo"],
                    blocks=settings.get("blocks", 1),
                    decay=decay,
                    C2=C2,
                    nesterov=nesterov,
                    exact=overlap == "exact",
                ),
            )


SHAPES = {"matrix": (6, 4), "mate": (6, 4), "vector": (7,), "conv": (4, 2, 3, 3), "stack": (3, 4, 5), "scalar": ()}


@pytest.mark.parametrize("implementation", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_adamc_equals_its_twin(implementation: dict[str, bool]):
    """At lr != peak, with decay large enough to see."""
    params = parameters(SHAPES, FP64)
    start = {name: p.detach().clone() for name, p in params.items()}
    optimizer = sn.AdamC(params.values(), lr=PEAK, betas=(0.9, 0.99), eps=1e-8, weight_decay=2.0, **implementation)
    fast = trajectories(optimizer, params)
    assert_twins(fast, lambda name: twin.adamc(start[name], gradient(name), GAMMA, PEAK, 2.0, (0.9, 0.99), 1e-8))


def test_renormalized_adamw_equals_its_twin():
    """Algorithm 1; the large epsilon makes its branches and both its places visible."""
    for eps in (1e-8, 0.3):
        params = parameters({**SHAPES, "zero": (3, 3)}, FP64)
        with torch.no_grad():
            params["zero"].zero_()  # its norm stays below epsilon at first: no renormalisation
        start = {name: p.detach().clone() for name, p in params.items()}
        optimizer = sn.RenormalizedAdamW(params.values(), lr=PEAK, betas=(0.9, 0.99), eps=eps, weight_decay=0.5)
        fast = trajectories(optimizer, params)
        assert_twins(
            fast,
            lambda name, start=start, eps=eps: twin.renormalized_adamw(
                start[name], gradient(name), GAMMA, 0.5, (0.9, 0.99), eps
            ),
        )


def test_lionc_equals_its_twin():
    """With betas changing at every step, as no scheduler of torch does."""
    params = parameters(SHAPES, FP64)
    start = {name: p.detach().clone() for name, p in params.items()}
    optimizer = sn.LionC(params.values(), lr=PEAK, betas=(0.9, 0.99), weight_decay=2.0)
    fast = trajectories(optimizer, params, momentum="betas")
    assert_twins(fast, lambda name: twin.lionc(start[name], gradient(name), GAMMA, BETAS, PEAK, 2.0, (0.9, 0.99)))


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("trace", [False, True])
def test_sgdc_equals_its_twin(nesterov: bool, trace: bool):
    params = parameters(SHAPES, FP64)
    start = {name: p.detach().clone() for name, p in params.items()}
    optimizer = sn.SGDC(params.values(), lr=PEAK, alpha=0.2, weight_decay=2.0, nesterov=nesterov, trace=trace)
    fast = trajectories(optimizer, params, momentum="alpha")
    assert_twins(
        fast,
        lambda name: twin.sgdc(
            start[name], gradient(name), GAMMA, ALPHA, PEAK, 2.0, start=0.2, nesterov=nesterov, trace=trace
        ),
    )


@pytest.mark.parametrize("lmo, shape, kernel", [("spectral", (6, 6), twins_theory.f_square), ("bias", (8,), None)])
def test_exact_decay_solves_for_the_kernel_of_the_layer(lmo: str, shape: tuple[int, ...], kernel):
    """Brute force: gamma^2 (1 + 2 sum_k (1-eta)^k f((1-alpha)^k)) = C^2 (2 eta - eta^2)."""
    import numpy as np

    f = kernel or twins_theory.f_vector(8)
    p = nn.Parameter(torch.ones(shape))
    optimizer = sn.ScionC([p], lr=0.05, alpha=0.1, lmo=lmo, overlap="exact", steady_norm_sq=1.3)
    eta = 0.05 * optimizer.weight_decay_of(p)
    k = np.arange(1, 3000)
    gain = 1 + 2 * float(((1 - eta) ** k * f(0.9**k)).sum())
    assert 0.05**2 * gain == pytest.approx(1.3 * (2 * eta - eta**2), rel=1e-5)


# --- what the correction is


def shrink(optimizer: Any, p: nn.Parameter, gamma: float, **settings: Any) -> float:
    """The share of a weight that one step removes: its gradient is zero, so nothing else acts. Starts from 1."""
    with torch.no_grad():
        p.fill_(1.0)
    optimizer.param_groups[0].update(settings, lr=gamma)
    p.grad = torch.zeros_like(p)
    optimizer.step()
    return 1 - p.flatten()[0].item()


CORRECTED: dict[str, Callable[..., Any]] = {
    "ScionC": partial(sn.ScionC, lmo="spectral"),
    "AdamC": sn.AdamC,
    "LionC": sn.LionC,
    "SGDC": sn.SGDC,
    "correct(AdamW)": lambda *args, **settings: sn.correct(torch.optim.AdamW(*args, **settings)),
}


@pytest.mark.parametrize("name", CORRECTED)
def test_halving_lr_quarters_corrected_shrink(name: str):
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = CORRECTED[name]([p], lr=0.1)
    full = shrink(optimizer, p, 0.1)
    assert full > 1e-4
    assert shrink(optimizer, p, 0.05) == pytest.approx(full / 4)
    assert shrink(optimizer, p, 0.1) == pytest.approx(full)


@pytest.mark.parametrize(
    "make",
    [
        partial(sn.Scion, lmo="spectral", weight_decay=0.5),
        lambda params, **how: sn.ScionC([{"params": params, "weight_decay": 0.5}], lmo="spectral", **how),
        partial(sn.RenormalizedAdamW, weight_decay=0.5),
    ],
)
def test_halving_lr_halves_constant_shrink(make):
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = make([p], lr=0.1)
    assert shrink(optimizer, p, 0.1) == pytest.approx(0.05)
    assert shrink(optimizer, p, 0.05) == pytest.approx(0.025)


@pytest.mark.parametrize("make", [sn.AdamC, sn.LionC, sn.SGDC])
def test_group_with_corrected_false_keeps_constant_decay(make):
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = make([{"params": [p], "corrected": False}], lr=0.1, weight_decay=0.5)
    assert shrink(optimizer, p, 0.1) == pytest.approx(0.05)
    assert shrink(optimizer, p, 0.05) == pytest.approx(0.025)


def test_halving_steady_norm_doubles_decay():
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = sn.ScionC([p], lr=0.05, lmo="spectral", steady_norm_sq=2.0)
    assert shrink(optimizer, p, 0.05, steady_norm_sq=1.0) == pytest.approx(
        2 * shrink(optimizer, p, 0.05, steady_norm_sq=2.0)
    )


def test_decay_reacts_to_momentum():
    """(2 - alpha) / alpha: from alpha = 0.1 to 0.5 the decay falls from 19 to 3."""
    p = nn.Parameter(torch.ones(3, 3, dtype=FP64))
    optimizer = sn.ScionC([p], lr=0.05, lmo="spectral", steady_norm_sq=2.0)
    slow, fast = shrink(optimizer, p, 0.05, alpha=0.1), shrink(optimizer, p, 0.05, alpha=0.5)
    assert slow / fast == pytest.approx(19 / 3)
    assert slow == pytest.approx(19 / 4 * 0.05**2)


@pytest.mark.parametrize("alpha", [0.05, 0.1, 0.5, 1.0])
def test_nesterov_divides_decay_by_its_factor(alpha: float):
    p = nn.Parameter(torch.ones(4, 4))
    plain, nesterov = (
        sn.ScionC([p], lr=0.01, alpha=alpha, lmo="spectral", nesterov=on).weight_decay_of(p) for on in (False, True)
    )
    factor = 1 + 4 * alpha - 6 * alpha**2 + 2 * alpha**3
    assert plain / nesterov == pytest.approx(factor)


def test_exact_decay_of_a_square_matrix_is_clearly_below_the_linear_one():
    """Updates of a square matrix overlap less than their inputs, so less decay holds the same norm."""
    p, v = nn.Parameter(torch.ones(32, 32)), nn.Parameter(torch.ones(512))
    for q, lmo, least, most in ((p, "spectral", 0.7, 0.85), (v, "bias", 0.97, 1.0)):
        linear, exact = (
            sn.ScionC([q], lr=1e-3, lmo=lmo, overlap=overlap).weight_decay_of(q) for overlap in ("linear", "exact")
        )
        assert least < exact / linear < most


def test_trace_decay_goes_with_the_square_of_alpha():
    """A trace buffer is 1/alpha as large, its step too; with an EMA buffer the decay follows lr alone."""
    for trace, factor in ((True, 4.0), (False, 1.0)):
        p = nn.Parameter(torch.ones(3, dtype=FP64))
        optimizer = sn.SGDC([p], lr=0.1, alpha=0.2, weight_decay=0.1, trace=trace)
        start = shrink(optimizer, p, 0.1)
        assert start == pytest.approx(0.01)
        assert shrink(optimizer, p, 0.1, alpha=0.1) == pytest.approx(factor * start)


def test_trace_is_torchs_momentum():
    """SGDC(trace=True) without decay is torch's SGD with momentum 1 - alpha."""
    params, plain = parameters(SHAPES), parameters(SHAPES)
    optimizer = sn.SGDC(params.values(), lr=0.1, alpha=0.1, weight_decay=0.0, trace=True, nesterov=True)
    reference = torch.optim.SGD(plain.values(), lr=0.1, momentum=0.9, nesterov=True)
    for t in range(5):
        for each, values in ((optimizer, params), (reference, plain)):
            set_gradients(values, t)
            each.step()
    for name in params:
        torch.testing.assert_close(params[name], plain[name], rtol=1e-5, atol=1e-6)


def test_absolute_targets_take_the_theorys_decay():
    """LionC and AdamC with steady_norm_sq: no base decay, no peak in it."""
    p = nn.Parameter(torch.ones(3, dtype=FP64))
    lion = sn.LionC([p], lr=1e-3, betas=(0.9, 0.99), steady_norm_sq=0.01, weight_decay=123.0)
    decay = theory.lion_weight_decay_for(0.01, 5e-4, 0.9, 0.99)
    assert shrink(lion, p, 5e-4) == pytest.approx(5e-4 * decay, rel=1e-9)
    adam = sn.AdamC([p], lr=1e-3, steady_norm_sq=0.01, weight_decay=123.0)
    assert shrink(adam, p, 5e-4) == pytest.approx(5e-4 * 5e-4 / 0.02)


def test_lr_above_the_peak_is_allowed_only_if_the_peak_was_given():
    for make in (sn.AdamC, sn.LionC, sn.SGDC):
        p = nn.Parameter(torch.ones(3, dtype=FP64))
        optimizer = make([p], lr=0.1, weight_decay=0.1, peak_lr=0.05)
        assert shrink(optimizer, p, 0.1) == pytest.approx(0.1 * 0.1 * 2)
        guessed = make([p], lr=0.1, weight_decay=0.1)
        with pytest.raises(ValueError, match=r"group 0.*peak_lr"):
            shrink(guessed, p, 0.2)


def test_peak_of_a_group_is_its_own():
    """Layer-wise lr: each group's decay is full at its own peak, whatever the constructor's lr."""
    for make in (sn.AdamC, sn.LionC, sn.SGDC):
        params = parameters({"a": (3,), "b": (3,)})
        groups = [{"params": [params["a"]], "lr": 0.01}, {"params": [params["b"]], "lr": 0.1, "peak_lr": 0.2}]
        optimizer = make(groups, lr=1.0, weight_decay=0.4)
        set_gradients(params, 0)
        optimizer.step()
        assert [group["weight_decay"] for group in optimizer.param_groups] == pytest.approx([0.4, 0.2])


# --- equal to what it corrects, while nothing has to be corrected


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, FP64], ids=str)
@pytest.mark.parametrize("implementation", [{"foreach": False}, {"foreach": True}, {"fused": True}, {}], ids=str)
def test_adamc_at_constant_lr_is_adamw_bit_for_bit(implementation: dict[str, bool], dtype):
    params, plain = parameters(SHAPES, dtype), parameters(SHAPES, dtype)
    settings = {"lr": 0.01, "weight_decay": 0.3, "betas": (0.8, 0.95), "amsgrad": True, **implementation}
    optimizer, reference = sn.AdamC(params.values(), **settings), torch.optim.AdamW(plain.values(), **settings)
    for t in range(10):
        for each, values in ((optimizer, params), (reference, plain)):
            set_gradients(values, t)
            each.step()
    for name in params:
        assert torch.equal(params[name], plain[name])
        for key, value in reference.state[plain[name]].items():
            assert torch.equal(optimizer.state[params[name]][key], value), key


@pytest.mark.parametrize("nesterov", [False, True])
def test_scionc_at_constant_lr_and_alpha_is_scion_with_its_decay(nesterov: bool):
    layers = {name: value for name, value in LAYERS.items() if name != "output"}
    params, plain = layer_params(layers), layer_params(layers)
    decay = twin.corrected_decay(PEAK, 0.2, 1.1875, nesterov=nesterov)
    optimizer = sn.ScionC(layer_groups(layers, params), lr=PEAK, alpha=0.2, nesterov=nesterov)
    reference = sn.Scion(layer_groups(layers, plain), lr=PEAK, alpha=0.2, weight_decay=decay, nesterov=nesterov)
    for t in range(10):
        for each, values in ((optimizer, params), (reference, plain)):
            set_gradients(values, t)
            each.step()
    for name in params:
        torch.testing.assert_close(params[name], plain[name], rtol=1e-13, atol=1e-14)


def test_renormalized_adamw_keeps_only_the_parallel_component():
    """|theta_t| = | |theta'| - gamma u_par |, where AdamW's own step would also grow by the perpendicular part."""
    p, plain = parameters({"w": (20, 20)}, FP64), parameters({"w": (20, 20)}, FP64)
    optimizer = sn.RenormalizedAdamW(p.values(), lr=0.5, weight_decay=0.0)
    reference = torch.optim.AdamW(plain.values(), lr=0.5, weight_decay=0.0)
    theta = p["w"].detach().clone()
    for each, values in ((optimizer, p), (reference, plain)):
        set_gradients(values, 0, pull=0.0)
        each.step()
    u = p["w"].grad / (p["w"].grad.abs() + 1e-8)  # Adam's first step
    parallel = (theta * u).sum() / theta.norm()
    assert p["w"].norm().item() == pytest.approx(abs(theta.norm() - 0.5 * parallel).item(), rel=1e-8)
    assert plain["w"].norm() > 1.05 * p["w"].norm()
    direction = (p["w"] / p["w"].norm() - plain["w"] / plain["w"].norm()).norm()
    assert direction < 1e-12


def test_renormalized_adamw_steps_past_zero_as_adamw_does():
    """An update along theta, longer than theta: all of it is parallel, so nothing is to be renormalised."""
    p = nn.Parameter(torch.full((3, 4), 0.01, dtype=FP64))
    p.grad = torch.ones_like(p)
    sn.RenormalizedAdamW([p], lr=0.1, weight_decay=0.0).step()
    torch.testing.assert_close(p.detach(), torch.full_like(p, 0.01 - 0.1), rtol=1e-7, atol=0)


def test_renormalized_adamw_in_fp32_is_accurate_from_its_first_step():
    """1 - beta2^t is small at first: it must not be rounded to fp32 before the subtraction."""
    params = parameters(SHAPES)
    exact = {name: nn.Parameter(p.detach().double()) for name, p in params.items()}
    make = partial(sn.RenormalizedAdamW, lr=1.0, weight_decay=0.0)
    optimizer, reference = make(params.values()), make(exact.values())
    set_gradients(params, 0, pull=0.0)
    for name, p in exact.items():
        p.grad = params[name].grad.double()
    start = {name: p.detach().clone() for name, p in exact.items()}
    optimizer.step()
    reference.step()
    for name, p in exact.items():
        moved = (p - start[name]).abs().max()
        assert (params[name].double() - p).abs().max() <= 2e-6 * moved, name


# --- buckets


@pytest.mark.parametrize("most", [1, 8, 13])
@pytest.mark.parametrize(
    "make, cuttable",
    [
        *((partial(sn.ScionC, lmo=lmo, polar="svd"), True) for lmo in ("sign", "embedding", "row")),
        *((partial(sn.ScionC, lmo=lmo, polar="svd"), False) for lmo in ("column", "spectral", "bias")),
        (sn.LionC, True),
        (partial(sn.SGDC, nesterov=True), True),
        (sn.RenormalizedAdamW, False),
    ],
)
def test_large_parameter_cut_in_pieces_equals_uncut(monkeypatch, make, cuttable: bool, most: int):
    """Rows that do not see each other are cut to the limit; others never are, whatever the limit."""
    shapes = {"a": (7, 6), "b": (7, 6), "c": (5, 3), "d": (1, 9)}
    whole, cut = parameters(shapes, FP64), parameters(shapes, FP64)
    optimizer, pieced = make(whole.values(), lr=0.02), make(cut.values(), lr=0.02)
    train(optimizer, whole, range(5))
    monkeypatch.setattr(buckets, "MAX_ELEMENTS_CPU", most)
    sizes = []
    stack = buckets.stack
    monkeypatch.setattr(buckets, "stack", lambda tensors: (sizes.append(stack(tensors).numel()), stack(tensors))[1])
    train(pieced, cut, range(5))
    sizes = {size for size in sizes if size > 1}  # without Adam's step count
    assert sizes <= set(range(2, max(most, 9) + 1)) if cuttable else sizes == {42, 15, 9}
    assert_same(snapshot(pieced, cut), snapshot(optimizer, whole), rtol=1e-12)


def test_non_finite_row_skips_the_whole_of_a_cut_parameter(monkeypatch):
    monkeypatch.setattr(buckets, "MAX_ELEMENTS_CPU", 6)
    params = parameters({"a": (4, 6), "b": (4, 6)})
    optimizer = sn.LionC(params.values(), lr=0.02)
    before = params["a"].detach().clone()
    set_gradients(params, 0)
    params["a"].grad[3, 5] = math.nan
    optimizer.step()
    assert torch.equal(params["a"], before)
    assert optimizer.state[params["a"]]["skipped"] == 1
    assert optimizer.skipped_steps() == 1


def test_parameters_of_one_shape_are_one_batch(monkeypatch):
    """The lmo runs once for all of them: the point of the buckets."""
    params = parameters({f"w{k}": (4, 6) for k in range(5)} | {"v": (7,)})
    optimizer = sn.ScionC(params.values(), lr=0.02, lmo="by-shape")
    batches = []
    stack = buckets.stack
    monkeypatch.setattr(buckets, "stack", lambda tensors: (batches.append(len(tensors)), stack(tensors))[1])
    set_gradients(params, 0)
    optimizer.step()
    assert sorted(set(batches)) == [1, 5]
    assert batches.count(5) == 3  # weights, gradients, momentum


def test_group_settings_are_read_at_every_step():
    """As torch's optimizers do: a group changed mid-run changes the next step."""
    for key, before, after in (("nesterov", False, True), ("polar", "svd", "newton-schulz"), ("lmo", "sign", "row")):
        params, plain = parameters({"w": (4, 6)}), parameters({"w": (4, 6)})
        base = {"lmo": "spectral", "alpha": 0.5}
        changed = sn.ScionC(params.values(), **base | {key: before})
        reference = sn.ScionC(plain.values(), **base | {key: before})
        for each, values in ((changed, params), (reference, plain)):
            set_gradients(values, 0)
            each.step()
        changed.param_groups[0][key] = after
        fresh = sn.ScionC(plain.values(), **base | {key: after})
        fresh.state[plain["w"]] = reference.state[plain["w"]]
        for each, values in ((changed, params), (fresh, plain)):
            set_gradients(values, 1)
            each.step()
        assert torch.equal(params["w"], plain["w"]), key


# --- checkpoints from and to others


def test_plain_adamw_checkpoint_continues_in_adamc():
    """Its weight_decay is the base; moments and step counts are kept."""
    params, plain = parameters(SHAPES), parameters(SHAPES)
    old = torch.optim.AdamW(params.values(), lr=0.01, weight_decay=0.3)
    reference = torch.optim.AdamW(plain.values(), lr=0.01, weight_decay=0.3)
    for each, values in ((old, params), (reference, plain)):
        for t in range(4):
            set_gradients(values, t)
            each.step()
    new = sn.AdamC(params.values(), lr=0.01, weight_decay=0.7)
    new.load_state_dict(old.state_dict())
    assert new.param_groups[0]["base_weight_decay"] == 0.3
    for t, ratio in ((4, 1.0), (5, 0.5)):
        new.param_groups[0]["lr"] = reference.param_groups[0]["lr"] = 0.01 * ratio
        reference.param_groups[0]["weight_decay"] = 0.3 * ratio
        for each, values in ((new, params), (reference, plain)):
            set_gradients(values, t)
            each.step()
    for name in params:
        assert torch.equal(params[name], plain[name]), name
    assert new.skipped_steps() == 0


def test_adamc_checkpoint_continues_in_plain_adamw_and_in_corrected_adamw():
    params, plain, again = (parameters(SHAPES) for _ in range(3))
    optimizer = sn.AdamC(params.values(), lr=0.01, weight_decay=0.3)
    train(optimizer, params, range(6), lr=0.01)
    saved = copy.deepcopy(optimizer.state_dict())
    for values in (plain, again):
        for name, p in values.items():
            p.data.copy_(params[name].data)
    constant = torch.optim.AdamW(plain.values(), lr=0.5)
    constant.load_state_dict(copy.deepcopy(saved))
    corrected = sn.correct(torch.optim.AdamW(again.values(), lr=0.5, weight_decay=0.9))
    corrected.load_state_dict(saved)
    assert constant.param_groups[0]["weight_decay"] == optimizer.param_groups[0]["weight_decay"] < 0.3
    train(optimizer, params, range(6, 9), lr=0.01)
    train(corrected, again, range(6, 9), lr=0.01)
    for name in params:
        assert torch.equal(params[name], again[name]), name
    set_gradients(plain, 6)
    constant.step()
    assert constant.state[plain["matrix"]]["step"] == 7


@pytest.mark.parametrize("make", [sn.AdamC, sn.LionC, sn.SGDC])
def test_checkpoint_without_the_corrections_keys_has_its_decay_as_base(make):
    params = parameters(SHAPES)
    saved = make(params.values(), lr=0.01, weight_decay=0.3).state_dict()
    for key in KEYS:
        saved["param_groups"][0].pop(key, None)
    optimizer = make(params.values(), lr=0.01, weight_decay=0.7)
    optimizer.load_state_dict(saved)
    optimizer.param_groups[0]["lr"] = 0.005
    set_gradients(params, 0)
    optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.15)


# --- bad input: where, what, remedy; nothing changed

MATRIX = (4, 3)


def adam_group(params: list[Tensor], **settings: Any) -> sn.AdamC:
    """What the constructor would have seen in the constructor's arguments it has to see in a group, too."""
    return sn.AdamC([{"params": params, **settings}])


BAD: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "negative lr": (sn.ScionC, {"lmo": "spectral", "lr": -1.0}, r"group 0.*lr=-1.*not negative"),
    "nan lr": (sn.Scion, {"lmo": "spectral", "lr": math.nan}, r"group 0.*lr=nan"),
    "nan tensor lr": (sn.Scion, {"lmo": "spectral", "lr": torch.tensor(math.nan)}, r"group 0.*lr=nan"),
    "alpha 0": (sn.ScionC, {"lmo": "spectral", "alpha": 0.0}, r"group 0.*alpha=0.*\(0, 1\]"),
    "alpha above 1": (sn.SGDC, {"alpha": 1.5}, r"group 0.*alpha=1.5.*\(0, 1\]"),
    "alpha nan": (sn.Scion, {"lmo": "spectral", "alpha": math.nan}, r"group 0.*alpha=nan"),
    "alpha None": (sn.ScionC, {"lmo": "spectral", "alpha": None}, r"group 0.*alpha=None must be a number"),
    "alpha in words": (sn.SGDC, {"alpha": "0.1"}, r"group 0.*alpha='0\.1' must be a number"),
    "C^2 None": (sn.ScionC, {"lmo": "spectral", "steady_norm_sq": None}, r"group 0.*steady_norm_sq=None must be a n"),
    "C^2 zero": (sn.ScionC, {"lmo": "spectral", "steady_norm_sq": 0.0}, r"group 0.*steady_norm_sq=0"),
    "C^2 negative": (sn.LionC, {"steady_norm_sq": -1.0}, r"group 0.*steady_norm_sq=-1"),
    "C^2 negative, Adam": (sn.AdamC, {"steady_norm_sq": -1.0}, r"group 0.*steady_norm_sq=-1"),
    "unreachable": (
        sn.ScionC,
        {"lmo": "spectral", "lr": 0.5, "steady_norm_sq": 0.1},
        r"group 0.*unreachable.*raise steady_norm_sq or lower lr",
    ),
    "unreachable, exact": (
        sn.ScionC,
        {"lmo": "spectral", "lr": 0.5, "steady_norm_sq": 0.1, "overlap": "exact"},
        r"group 0.*unreachable.*lower lr or raise steady_norm_sq",
    ),
    "unknown lmo": (sn.ScionC, {"lmo": "spectrum"}, r"group 0.*unknown lmo 'spectrum'.*spectral"),
    "no lmo": (sn.ScionC, {}, r"group 0.*param_groups\(model\)"),
    "no lmo, Scion": (sn.Scion, {}, r"group 0.*param_groups\(model\)"),
    "unknown overlap": (sn.ScionC, {"lmo": "spectral", "overlap": "cubic"}, r"group 0.*overlap='cubic'.*'exact'"),
    "unknown polar": (sn.ScionC, {"lmo": "spectral", "polar": "qr"}, r"group 0.*polar='qr'.*svd"),
    "polar steps": (sn.ScionC, {"lmo": "spectral", "polar_steps": 0}, r"group 0.*polar_steps=0"),
    "half a block": (sn.ScionC, {"lmo": "spectral", "blocks": 1.5}, r"group 0.*blocks=1\.5: pass one whole number"),
    "blocks in words": (sn.Scion, {"lmo": "sign", "blocks": "2"}, r"group 0.*blocks='2': pass one whole number"),
    "blocks": (sn.ScionC, {"lmo": "spectral", "blocks": 3}, r"group 0.*blocks=3 does not divide"),
    "negative decay": (sn.Scion, {"lmo": "spectral", "weight_decay": -0.1}, r"group 0.*weight_decay=-0.1"),
    "no decay number": (sn.Scion, {"lmo": "spectral", "weight_decay": None}, r"group 0.*weight_decay"),
    "nan decay": (sn.AdamC, {"weight_decay": math.nan}, r"weight_decay.*nan"),
    "negative peak": (sn.LionC, {"peak_lr": -1.0}, r"group 0.*peak_lr=-1"),
    "zero peak": (sn.AdamC, {"peak_lr": 0.0}, r"group 0.*peak_lr=0"),
    "one beta": (sn.LionC, {"betas": 0.9}, r"group 0.*betas=0\.9 must be two numbers"),
    "no betas": (sn.RenormalizedAdamW, {"betas": None}, r"group 0.*betas=None must be two numbers"),
    "beta 1": (sn.LionC, {"betas": (0.9, 1.0)}, r"group 0.*betas\[1\]=1"),
    "beta nan": (sn.RenormalizedAdamW, {"betas": (math.nan, 0.9)}, r"group 0.*betas\[0\]=nan"),
    "eps": (sn.RenormalizedAdamW, {"eps": -1.0}, r"group 0.*eps=-1"),
    "beta of a group, Adam": (adam_group, {"betas": (1.5, 0.9)}, r"AdamC, group 0.*betas\[0\]=1.5"),
    "one beta of a group, Adam": (adam_group, {"betas": (0.9,)}, r"AdamC, group 0.*two numbers"),
    "eps of a group, Adam": (adam_group, {"eps": -1.0}, r"AdamC, group 0.*eps=-1"),
}


def test_decay_of_a_parameter_that_no_group_has_is_refused():
    optimizer = sn.ScionC([nn.Parameter(torch.ones(MATRIX))], lmo="spectral")
    with pytest.raises(ValueError, match=r"ScionC.weight_decay_of: no group has this parameter of shape \(2,\)"):
        optimizer.weight_decay_of(torch.zeros(2))


@pytest.mark.parametrize("case", BAD)
def test_bad_setting_is_refused_with_where_what_and_remedy(case: str):
    make, settings, message = BAD[case]
    p = nn.Parameter(torch.ones(MATRIX))
    with pytest.raises(ValueError, match=message):
        make([p], **settings)


@pytest.mark.parametrize("case", [case for case in BAD if BAD[case][0] is sn.ScionC])
def test_bad_group_added_later_leaves_the_optimizer_as_it_was(case: str):
    _, settings, message = BAD[case]
    params = parameters({"w": MATRIX})
    optimizer = sn.ScionC([{"params": list(params.values()), "lmo": "spectral"}])
    late = nn.Parameter(torch.ones(MATRIX))
    with pytest.raises(ValueError, match=message.replace("group 0", r"group 1 \(\"late\"\)")):
        optimizer.add_param_group({"params": [late], "name": "late", **settings})
    assert len(optimizer.param_groups) == 1
    assert late not in optimizer.state
    set_gradients(params, 0)
    optimizer.step()


@pytest.mark.parametrize(
    "lmo", ["spectral", "spectral-transposed", "sign", "embedding", "row", "column", "conv", "conv-tap"]
)
@pytest.mark.parametrize("cls", [sn.Scion, sn.ScionC])
def test_matrix_lmo_on_a_vector_is_refused(cls, lmo: str):
    with pytest.raises(ValueError, match=rf"group 0.*lmo '{lmo}'.*\(5,\).*bias"):
        cls([nn.Parameter(torch.ones(5))], lmo=lmo)


@pytest.mark.parametrize("cls", [sn.Scion, sn.ScionC, sn.SGDC])
def test_momentum_is_refused_with_the_reason_in_a_group_too(cls):
    lmo = {} if cls is sn.SGDC else {"lmo": "spectral"}
    with pytest.raises(TypeError, match=r"momentum.*opposite.*alpha"):
        cls([nn.Parameter(torch.ones(MATRIX))], momentum=0.9, **lmo)
    with pytest.raises(TypeError, match=r"group 0.*momentum.*alpha"):
        cls([{"params": [nn.Parameter(torch.ones(MATRIX))], "momentum": 0.9}], **lmo)


STEP_TIME: dict[str, tuple[Callable[..., Any], dict[str, Any], str]] = {
    "alpha": (partial(sn.ScionC, lmo="by-shape"), {"alpha": 1.1}, r"alpha=1.1"),
    "alpha nan": (sn.SGDC, {"alpha": math.nan}, r"alpha=nan"),
    "C^2": (partial(sn.ScionC, lmo="by-shape"), {"steady_norm_sq": -1.0}, r"steady_norm_sq=-1"),
    "C^2 nan": (partial(sn.ScionC, lmo="by-shape"), {"steady_norm_sq": math.nan}, r"steady_norm_sq=nan"),
    "unreachable": (partial(sn.ScionC, lmo="by-shape"), {"steady_norm_sq": 1e-9}, r"unreachable"),
    "unreachable, Lion": (partial(sn.LionC, steady_norm_sq=1.0), {"steady_norm_sq": 1e-9}, r"unreachable"),
    "decay": (partial(sn.Scion, lmo="by-shape"), {"weight_decay": math.nan}, r"weight_decay=nan"),
    "flip": (partial(sn.Scion, lmo="by-shape"), {"weight_decay": 1e6}, r"exceeds 1"),
    "betas": (sn.LionC, {"betas": (0.9, math.nan)}, r"beta"),
    "betas, no decay": (partial(sn.LionC, weight_decay=0.0), {"betas": (0.9, math.nan)}, r"beta"),
    "betas, Renormalized": (sn.RenormalizedAdamW, {"betas": (1.5, 0.9)}, r"beta"),
    "eps, Renormalized": (sn.RenormalizedAdamW, {"eps": math.nan}, r"eps=nan"),
    "flip, Adam": (sn.AdamC, {"corrected": False, "weight_decay": 1e6}, r"exceeds 1"),
    "flip, fused Adam": (partial(sn.AdamC, fused=True), {"base_weight_decay": 1e6}, r"exceeds 1"),
    **{
        f"{settings}, {how}": (partial(sn.AdamC, **{how: True}), settings, message)
        for how in ("foreach", "fused")
        for settings, message in (
            ({"betas": (1.0, 0.9)}, r"betas\[0\]=1"),
            ({"betas": (math.nan, 0.9)}, r"betas\[0\]=nan"),
            ({"betas": (0.9, 1.5)}, r"betas\[1\]=1.5"),
            ({"eps": math.nan}, r"eps=nan"),
        )
    },
}


@pytest.mark.parametrize("case", STEP_TIME)
def test_setting_scheduled_out_of_range_raises_before_anything_is_written(case: str):
    """In the second group, so that the first would have been written by then."""
    make, settings, message = STEP_TIME[case]
    params = parameters({"first": MATRIX, "second": (5,)})
    optimizer = make([{"params": [params["first"]]}, {"params": [params["second"]], "name": "late"}])
    train(optimizer, params, range(2), lr=optimizer.param_groups[0]["lr"])
    before = snapshot(optimizer, params)
    optimizer.param_groups[1].update(settings)
    set_gradients(params, 2)
    with pytest.raises(ValueError, match=rf'group 1 \("late"\).*{message}'):
        optimizer.step()
    assert_same(snapshot(optimizer, params), before)


def test_checkpoint_of_another_optimizer_is_refused():
    params = parameters({"w": MATRIX})
    saved = torch.optim.AdamW(params.values())
    set_gradients(params, 0)
    saved.step()
    optimizer = sn.ScionC(params.items(), lmo="spectral")
    before = snapshot(optimizer, params)
    with pytest.raises(ValueError, match=r"group 0.*momentum_buffer.*'w'.*another model or optimizer"):
        optimizer.load_state_dict(saved.state_dict())
    assert_same(snapshot(optimizer, params), before)
    assert optimizer.param_groups[0]["lmo"] == "spectral"


def test_a_scion_checkpoint_leaves_scionc_corrected():
    """Momentum and lr are taken over; the constant decay only where the group's own is constant, too."""
    params = parameters({"w": MATRIX, "head": MATRIX})

    def groups(**head: float) -> list[dict[str, Any]]:
        return [{"params": [params["w"]]}, {"params": [params["head"]], **head}]

    old = sn.Scion(groups(), lr=0.03, lmo="spectral", weight_decay=0.3)
    train(old, params, range(2), lr=0.03)
    new = sn.ScionC(groups(weight_decay=0.7), lmo="spectral", steady_norm_sq=2.0)
    new.load_state_dict(old.state_dict())
    assert [group["weight_decay"] for group in new.param_groups] == [None, 0.3]
    lr, alpha = new.param_groups[0]["lr"], new.param_groups[0]["alpha"]
    assert lr == old.param_groups[0]["lr"] != 0.01
    assert new.weight_decay_of(params["w"]) == pytest.approx((2 - alpha) / (2 * alpha * 2.0) * lr)
    assert torch.equal(new.state[params["w"]]["momentum_buffer"], old.state_dict()["state"][0]["momentum_buffer"])
    again = sn.ScionC(groups(weight_decay=0.7), lmo="spectral")
    again.load_state_dict(new.state_dict())
    assert [group["weight_decay"] for group in again.param_groups] == [None, 0.3]


OTHERS: dict[str, tuple[Callable[..., Any], Callable[..., Any], str]] = {
    "ScionC in Scion": (
        partial(sn.ScionC, lmo="sign"),
        partial(sn.Scion, lmo="sign"),
        r"weight_decay=None.*use ScionC",
    ),
    "SGDC in LionC": (sn.SGDC, sn.LionC, r"no betas.*another optimizer"),
    "LionC in SGDC": (sn.LionC, sn.SGDC, r"no alpha.*another optimizer"),
    "SGDC in ScionC": (sn.SGDC, partial(sn.ScionC, lmo="sign"), r"no lmo.*another optimizer"),
    "Scion in SGDC": (partial(sn.Scion, lmo="sign"), sn.SGDC, r"no trace.*another optimizer"),
    "SGD in AdamC, before its first step": (torch.optim.SGD, sn.AdamC, r"no betas.*another optimizer"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_a_checkpoint_with_other_group_settings_is_refused_before_anything_changes(case: str):
    saves, loads, message = OTHERS[case]
    params = parameters({"w": MATRIX})
    saved = saves(params.values()).state_dict()
    optimizer = loads(params.values())
    train(optimizer, params, range(1), lr=optimizer.param_groups[0]["lr"])
    before, groups = snapshot(optimizer, params), copy.copy(optimizer.param_groups[0])
    with pytest.raises(ValueError, match=rf"{type(optimizer).__name__}, group 0: .*{message}"):
        optimizer.load_state_dict(saved)
    assert_same(snapshot(optimizer, params), before)
    assert optimizer.param_groups[0] == groups


def test_a_checkpoint_with_a_setting_out_of_range_is_refused_before_anything_changes():
    params = parameters({"w": MATRIX})
    optimizer = sn.ScionC(params.values(), lmo="spectral")
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["alpha"] = 1.5
    with pytest.raises(ValueError, match=r"ScionC, group 0: the checkpoint's group is refused: alpha=1\.5"):
        optimizer.load_state_dict(saved)
    assert optimizer.param_groups[0]["alpha"] == 0.1


# --- large numbers


@pytest.mark.parametrize("foreach", [False, True])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_adam_skips_a_gradient_whose_square_overflows(shape, foreach):
    """A single element too: its 2-norm takes no square, so that alone does not tell."""
    p = nn.Parameter(torch.ones(shape))
    optimizer = sn.AdamC([p], lr=0.1, foreach=foreach)
    p.grad = torch.full(shape, 1e30)
    optimizer.step()
    assert torch.equal(p, torch.ones(shape))
    assert optimizer.skipped_steps().item() == 1
    assert all(value.isfinite().all() for value in optimizer.state[p].values())


@pytest.mark.parametrize("shape", [(3,), (80, 80)])
def test_adam_skips_none_where_only_the_sum_over_all_gradients_overflows(shape):
    """They are looked at together first; then each by itself."""
    params = parameters(dict.fromkeys("abcd", shape))
    optimizer = sn.AdamC(params.values())
    most = (torch.finfo(torch.float32).max / 2 / math.prod(shape)) ** 0.5
    for p in params.values():
        p.grad = torch.full_like(p, most)
    params["c"].grad[0] = math.nan
    before = {name: p.detach().clone() for name, p in params.items()}
    optimizer.step()
    assert optimizer.skipped_steps() == optimizer.state[params["c"]]["skipped"] == 1
    assert [name for name, p in params.items() if torch.equal(p, before[name])] == ["c"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_renormalized_weights_and_gradients_may_be_too_large_to_square(dtype):
    """The norm obeys the algorithm where |theta|^2 is no fp32 number, and a huge gradient is a direction."""
    p = nn.Parameter(torch.tensor([3e30, 4e30], dtype=dtype))
    optimizer = sn.RenormalizedAdamW([p], lr=0.1, weight_decay=0.5)
    p.grad = torch.tensor([-4.0, 3.0], dtype=dtype)
    optimizer.step()
    assert p.double().norm().item() == pytest.approx(0.95 * 5e30, rel=0.01)
    p = nn.Parameter(torch.tensor([3.0, 4.0], dtype=dtype))
    optimizer = sn.RenormalizedAdamW([p], lr=0.1, weight_decay=0.0)
    p.grad = torch.tensor([-4e30, 3e30], dtype=dtype)  # u = (-1, 1), along the weights 0.2
    optimizer.step()
    assert p.double().norm().item() == pytest.approx(5 - 0.1 * 0.2, rel=0.01)
    assert all(value.isfinite().all() for value in optimizer.state[p].values())


def test_renormalized_step_at_lr_zero_changes_no_bit_in_fp64():
    """The algorithm divides by |theta| + eps, which in fp64 is not |theta|."""
    p = nn.Parameter(torch.tensor([3.0, 4.0], dtype=FP64))
    optimizer = sn.RenormalizedAdamW([p], lr=0.0)
    p.grad = torch.tensor([1.0, 2.0], dtype=FP64)
    optimizer.step()
    assert torch.equal(p, torch.tensor([3.0, 4.0], dtype=FP64))


# --- torch's fused kernel goes by memory, not by strides


def test_fused_adam_refuses_a_view_with_gaps_and_leaves_them_alone():
    """torch's own AdamW(fused=True) writes over what lies between the elements (2.13, CPU)."""
    base = torch.randn(4, 3, 2)
    before = base.clone()
    with pytest.raises(ValueError, match=r"group 0: 'view' is a view with gaps.*fused"):
        sn.AdamC([("view", nn.Parameter(base[..., 0]))], fused=True)
    p = nn.Parameter(base[..., 0])
    optimizer = sn.AdamC([p])
    p.grad = torch.ones_like(p)
    optimizer.step()
    assert torch.equal(base[..., 1], before[..., 1])
    assert not torch.equal(base[..., 0], before[..., 0])


def test_fused_adam_takes_gradients_of_other_strides():
    values = torch.randn(5, 4)
    turned, plain = nn.Parameter(values.mT.contiguous().mT), nn.Parameter(values.clone())
    for p, fused in ((turned, True), (plain, False)):
        optimizer = sn.AdamC([p], lr=0.1, fused=fused)
        for t in range(3):
            p.grad = noise("p", t, p.shape).float()
            given = p.grad
            optimizer.step()
            assert p.grad is given
    torch.testing.assert_close(turned, plain)


@pytest.mark.parametrize("alpha", [0.0, 1.5, math.nan])
def test_a_bad_alpha_at_step_time_is_refused_with_trace_too(alpha):
    p = nn.Parameter(torch.ones(2))
    optimizer = sn.SGDC([p], trace=True)
    optimizer.param_groups[0]["alpha"] = alpha
    p.grad = torch.ones(2)
    with pytest.raises(ValueError, match=r"group 0: alpha="):
        optimizer.step()
    assert torch.equal(p, torch.ones(2))


# --- AdamC: all or nothing


@pytest.mark.parametrize(
    ("settings", "error"),
    [({"lr": None}, TypeError), ({"lr": torch.ones(2)}, ValueError), ({"betas": ("a", "b")}, (TypeError, ValueError))],
    ids=str,
)
def test_a_group_that_adamc_refuses_is_not_left_in_it(settings, error):
    optimizer = sn.AdamC([nn.Parameter(torch.ones(2))])
    with pytest.raises(error, match="AdamC, group 1"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))], **settings})
    assert len(optimizer.param_groups) == len(optimizer.state) == 1
    optimizer.param_groups[0]["params"][0].grad = torch.ones(2)
    optimizer.step()


def test_replaced_parameters_are_refused_as_new_ones_are():
    optimizer = sn.AdamC([("w", nn.Parameter(torch.ones(2)))])
    optimizer.param_groups[0]["params"] = [nn.Parameter(torch.ones(2, dtype=torch.float16))]
    with pytest.raises(ValueError, match=r"AdamC, group 0: 'w' is of torch\.float16"):
        optimizer.state_dict()


def test_a_fused_step_that_skips_all_counts_all(monkeypatch):
    """As on an accelerator, where one flag on the device stops the kernels of all parameters."""
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(4))]
    groups = [{"params": params[:2]}, {"params": params[2:]}]
    optimizer = sn.AdamC(groups, lr=0.1, fused=True)
    monkeypatch.setattr(
        optimizer, "_agreed",
        lambda alike: [(each._replace(device=torch.device("cuda")), torch.stack([g.isfinite().all() for g in each.grads()])) for each in alike],
    )  # fmt: skip
    for bad, count in ((True, 3), (False, 3)):
        for p in params:
            p.grad = torch.ones_like(p)
        if bad:
            params[2].grad[1] = math.inf
        optimizer.step()
        assert optimizer.skipped_steps() == count
        assert all(torch.equal(p, torch.ones_like(p)) == bad for p in params)
        assert [int(optimizer.state[p]["step"]) for p in params] == [0 if bad else 1] * 3
    assert not hasattr(optimizer, "found_inf")


# --- a target or a constant decay


def test_constant_decay_for_all_groups_is_refused_with_the_target_it_means():
    p = torch.nn.Parameter(torch.ones(4, 4))
    with pytest.raises(ValueError, match=r"steady_norm_sq=0\.95: pass that.*use Scion") as error:
        sn.ScionC([p], lr=0.01, alpha=0.1, lmo="spectral", weight_decay=0.1)
    assert "switch the correction off" in str(error.value)
    optimizer = sn.ScionC([p], lr=0.01, alpha=0.1, lmo="spectral", steady_norm_sq=0.95)
    assert optimizer.weight_decay_of(p) == pytest.approx(0.1)


def test_a_group_has_a_target_or_a_constant_decay():
    p, q = (torch.nn.Parameter(torch.ones(4, 4)) for _ in range(2))
    with pytest.raises(ValueError, match=r"group 0.*weight_decay=0\.1.*steady_norm_sq=3\.0.*give one"):
        sn.ScionC([{"params": [p], "weight_decay": 0.1, "steady_norm_sq": 3.0}], lmo="spectral")
    constant = {"params": [p], "weight_decay": 0.1, "steady_norm_sq": None}
    optimizer = sn.ScionC([constant, {"params": [q]}], lmo="spectral")
    optimizer.param_groups[0]["lr"] = 1e-3
    assert optimizer.weight_decay_of(p) == 0.1
    assert optimizer.weight_decay_of(q) == pytest.approx(0.08)
    again = sn.ScionC(optimizer.param_groups)  # some trainers build an optimizer from another's groups
    again.load_state_dict(optimizer.state_dict())
    assert again.weight_decay_of(p) == 0.1


def test_checkpoints_with_a_target_beside_a_constant_decay_still_load():
    p = torch.nn.Parameter(torch.ones(4, 4))
    optimizer = sn.ScionC([{"params": [p], "weight_decay": 0.1}], lmo="spectral")
    saved = optimizer.state_dict()
    saved["param_groups"][0]["steady_norm_sq"] = 1.1875
    optimizer.load_state_dict(saved)
    assert optimizer.weight_decay_of(p) == 0.1
