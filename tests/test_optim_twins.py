"""Optimizers equal their slow twins and, while there is nothing to correct, the optimizers they correct."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import twins_optim as twin
import twins_theory
from contract import assert_same, noise, parameters, set_gradients, snapshot, train
from optim_shapes import FP64, SHAPES
from torch import Tensor, nn

import steadynorm as sn
from steadynorm import machine
from steadynorm.optim import buckets

T, WARMUP = 20, 4
PEAK = 0.03


# --- twins: 20 steps of warmup and cosine, alpha and C^2 changing

RATIO = [(t + 1) / WARMUP for t in range(WARMUP)]
RATIO += [0.55 + 0.45 * math.cos(math.pi * (t + 1) / (T - WARMUP)) for t in range(T - WARMUP)]
ALPHA = [0.1 + 0.4 * t / T for t in range(T)]
C2 = [1.0 + 0.5 * math.sin(t / 4) ** 2 for t in range(T)]
GAMMA = [PEAK * ratio for ratio in RATIO]
BETAS = [(0.95 - 0.2 * t / T, 0.99 - 0.04 * t / T) for t in range(T)]

# name -> (group settings, shapes)
LAYERS: dict[str, tuple[dict[str, Any], list[tuple[int, ...]]]] = {
    "matrix": ({"lmo": "spectral"}, [(6, 4), (4, 6), (5, 5), (4, 6), (1, 7), (7, 1)]),
    "qkv": ({"lmo": "spectral", "blocks": 3}, [(12, 4), (6, 5)]),
    "grouped queries": ({"lmo": "spectral", "blocks": [6, 3, 3]}, [(12, 4), (12, 7), (2, 12, 4)]),
    "gate, up": ({"lmo": "spectral", "blocks": (2, 5)}, [(7, 4), (7, 4)]),
    "heads": ({"lmo": "spectral", "blocks": ("inputs", 3)}, [(4, 12), (7, 6), (2, 5, 6)]),
    "heads of two sizes": ({"lmo": "spectral", "blocks": ("inputs", (2, 3, 3))}, [(4, 8)]),
    "experts": ({"lmo": "spectral"}, [(3, 4, 5)]),
    "experts by block": ({"lmo": "spectral", "blocks": 2}, [(3, 4, 5)]),
    "stored transposed": ({"lmo": "spectral-transposed"}, [(4, 6), (6, 4), (3, 4, 5), (1, 7)]),
    "transposed qkv": ({"lmo": "spectral-transposed", "blocks": 3}, [(4, 12), (2, 5, 6)]),
    "transposed grouped queries": ({"lmo": "spectral-transposed", "blocks": (6, 3, 3)}, [(4, 12), (2, 5, 12)]),
    "transposed heads": ({"lmo": "spectral-transposed", "blocks": ("inputs", 3)}, [(12, 4), (2, 6, 5)]),
    "conv": ({"lmo": "conv"}, [(4, 2, 3, 3), (4, 3, 5)]),
    "conv by block": ({"lmo": "conv", "blocks": 2}, [(4, 2, 2, 2)]),
    "conv by unequal block": ({"lmo": "conv", "blocks": (3, 1)}, [(4, 2, 2, 2)]),
    "conv by tap": ({"lmo": "conv-tap"}, [(4, 3, 2, 3)]),
    "conv by tap and block": ({"lmo": "conv-tap", "blocks": (3, 1, 1)}, [(5, 3, 2, 3)]),
    "vector": ({"lmo": "bias"}, [(7,), (2, 3)]),
    "vector by block": ({"lmo": "bias", "blocks": 3}, [(12,)]),
    "vector by unequal block": ({"lmo": "bias", "blocks": (2, 5)}, [(7,), (7, 2)]),
    "sign": ({"lmo": "sign"}, [(4, 6), (6, 4)]),
    "embedding": ({"lmo": "embedding"}, [(9, 4)]),
    "row": ({"lmo": "row"}, [(4, 6)]),
    "row by block": ({"lmo": "row", "blocks": 2}, [(4, 6)]),
    "column": ({"lmo": "column"}, [(5, 4)]),
    "column by block": ({"lmo": "column", "blocks": 2}, [(6, 4)]),
    "column by unequal block": ({"lmo": "column", "blocks": (2, 4)}, [(6, 4)]),
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
    """Return the minibatch gradient of one layer, as in contract.set_gradients."""
    return lambda t, theta: noise(name, t, theta.shape) + 0.3 * theta


def trajectories(optimizer: Any, params: dict[str, nn.Parameter], *, momentum: str = "") -> dict[str, list[Tensor]]:
    """Return the weights after every step, with lr, momentum and C^2 written into the groups as schedulers do."""
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
    """Compare weights after every step; the first index of what differs is the step."""
    for name, steps in fast.items():
        ours, theirs = torch.stack(steps), torch.stack(slow(name))
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10, msg=lambda m, at=name: f"{at}: {m}")


@pytest.mark.parametrize(("overlap", "nesterov"), [(None, False), ("linear", False), ("linear", True), ("exact", True)])
def test_scion_equals_its_twin(overlap: str | None, nesterov: bool):
    """Check Algorithm 2 for every lmo, with blocks, stacks and an output layer of constant decay; None means plain Scion."""
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


@pytest.mark.parametrize("implementation", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
def test_adamc_equals_its_twin(implementation: dict[str, bool]):
    """Check at lr != peak, with a decay large enough to see."""
    params = parameters(SHAPES, FP64)
    start = {name: p.detach().clone() for name, p in params.items()}
    optimizer = sn.AdamC(params.values(), lr=PEAK, betas=(0.9, 0.99), eps=1e-8, weight_decay=2.0, **implementation)
    fast = trajectories(optimizer, params)
    assert_twins(fast, lambda name: twin.adamc(start[name], gradient(name), GAMMA, PEAK, 2.0, (0.9, 0.99), 1e-8))


def test_renormalized_adamw_equals_its_twin():
    """Check Algorithm 1; the large epsilon makes its branches and both its places visible."""
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
    """Betas change at every step, which no scheduler of torch does."""
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
def test_the_exact_decay_solves_for_the_kernel_of_the_layer(lmo: str, shape: tuple[int, ...], kernel):
    """By brute force: gamma^2 (1 + 2 sum_k (1-eta)^k f((1-alpha)^k)) = C^2 (2 eta - eta^2)."""
    import numpy as np

    f = kernel or twins_theory.f_vector(8)
    p = nn.Parameter(torch.ones(shape))
    optimizer = sn.ScionC([p], lr=0.05, alpha=0.1, lmo=lmo, overlap="exact", steady_norm_sq=1.3)
    eta = 0.05 * optimizer.weight_decay_of(p)
    k = np.arange(1, 3000)
    gain = 1 + 2 * float(((1 - eta) ** k * f(0.9**k)).sum())
    assert 0.05**2 * gain == pytest.approx(1.3 * (2 * eta - eta**2), rel=1e-5)


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
    """An update along theta that is longer than theta is all parallel, so there is nothing to renormalise."""
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
def test_a_large_parameter_cut_in_pieces_equals_an_uncut_one(monkeypatch, make, cuttable: bool, most: int):
    """Rows that do not see each other are cut to the limit; others never are, whatever the limit."""
    shapes = {"a": (7, 6), "b": (7, 6), "c": (5, 3), "d": (1, 9)}
    whole, cut = parameters(shapes, FP64), parameters(shapes, FP64)
    optimizer, pieced = make(whole.values(), lr=0.02), make(cut.values(), lr=0.02)
    train(optimizer, whole, range(5))
    monkeypatch.setattr(machine, "CACHED_ELEMENTS", most)
    sizes = []
    stack = buckets.stack
    monkeypatch.setattr(buckets, "stack", lambda tensors: (sizes.append(stack(tensors).numel()), stack(tensors))[1])
    train(pieced, cut, range(5))
    sizes = {size for size in sizes if size > 1}  # without Adam's step count
    assert sizes <= set(range(2, max(most, 9) + 1)) if cuttable else sizes == {42, 15, 9}
    assert_same(snapshot(pieced, cut), snapshot(optimizer, whole), rtol=1e-12)


def test_a_non_finite_row_skips_the_whole_of_a_cut_parameter(monkeypatch):
    monkeypatch.setattr(machine, "CACHED_ELEMENTS", 6)
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
    """The lmo runs once for all of them, which is the point of buckets."""
    params = parameters({f"w{k}": (4, 6) for k in range(5)} | {"v": (7,)})
    optimizer = sn.ScionC(params.values(), lr=0.02, lmo="by-shape")
    batches = []
    stack = buckets.stack
    monkeypatch.setattr(buckets, "stack", lambda tensors: (batches.append(len(tensors)), stack(tensors))[1])
    set_gradients(params, 0)
    optimizer.step()
    assert sorted(set(batches)) == [1, 5]
    assert batches.count(5) == 4  # gradients, momentum, what is left of it, skipped steps


def test_group_settings_are_read_at_every_step():
    """As with torch's optimizers, a group changed mid-run changes the next step."""
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
