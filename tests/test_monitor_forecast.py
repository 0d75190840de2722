"""Forecast and expected alignment are the theory's, step by step, whatever happens to the run."""

import io
import math
import statistics

import numpy as np
import pytest
import torch
from monitor_cases import LAYERS, assert_alike, noise, parameters, set_noise, train
from torch import nn

import steadynorm as sn
from steadynorm import theory
from steadynorm.decay.families import ADAM, MUON
from steadynorm.monitor.track import ForecastTrack, Start, StepParams
from steadynorm.theory.updates import NEWTON_SCHULZ, newton_schulz_share

T = 60
RATIO = [(t + 1) / 10 if t < 10 else 0.55 + 0.45 * math.cos(math.pi * (t - 9) / 50) for t in range(T)]
ALPHA = [0.05 + 0.9 * t / T for t in range(T)]
LR = [0.03 * ratio for ratio in RATIO]


def watch(optimizer, params, steps=T, **options):
    """Train through warmup and cosine while alpha (or betas) change; return the records."""
    peaks = [group["lr"] for group in optimizer.param_groups]
    monitor = sn.Monitor(optimizer, **options)
    for t in range(steps):
        set_noise(params, t)
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * RATIO[t]
            if "alpha" in group:
                group["alpha"] = ALPHA[t]
            if "betas" in group:
                group["betas"] = (0.95 - 0.3 * t / T, group["betas"][1])
        optimizer.step()
    return monitor.measure()


def column(records, layer, key):
    return [each["layers"][layer][key] for each in records]


@pytest.mark.parametrize(("overlap", "nesterov"), [(None, False), ("linear", True), ("exact", True)])
def test_the_forecast_and_the_expected_alignment_are_the_theorys(overlap, nesterov):
    """There are two starts of each kind, and one computation serves both. overlap None means Scion with constant decay."""
    kinds = {
        "square": ({"lmo": "spectral"}, (8, 8)),
        "qkv": ({"lmo": "spectral", "blocks": 3}, (12, 8)),
        "grouped queries": ({"lmo": "spectral", "blocks": (8, 4, 4)}, (16, 8)),
        "heads": ({"lmo": "spectral", "blocks": ("inputs", 4)}, (8, 16)),
        "conv": ({"lmo": "conv"}, (4, 3, 2, 2)),
        "vector": ({"lmo": "bias"}, (10,)),
        "sign": ({"lmo": "sign"}, (6, 9)),
    }
    params = {name: parameters(shape, shape, seed=k) for k, (name, (_, shape)) in enumerate(kinds.items())}
    params["square"][1].data.zero_()
    starts = {name: [p.norm().item() ** 2 for p in pair] for name, pair in params.items()}
    groups = [{"params": params[name], "name": name, **settings} for name, (settings, _) in kinds.items()]
    if overlap is None:
        optimizer = sn.Scion(groups, lr=0.03, weight_decay=0.4, nesterov=nesterov)
    else:
        optimizer = sn.ScionC(groups, lr=0.03, nesterov=nesterov, overlap=overlap)
    records = watch(optimizer, [p for pair in params.values() for p in pair])
    effective = [theory.effective_lr(lr, a, nesterov=nesterov) for lr, a in zip(LR, ALPHA, strict=True)]
    assert [each["effective_lr"] for each in records] == pytest.approx(effective)
    for index, (name, (settings, shape)) in enumerate(kinds.items()):
        lmo, blocks = sn.lmo.get(settings["lmo"]), settings.get("blocks", 1)
        kernel, unit = lmo.overlap(shape, blocks=blocks), lmo.update_norm_sq(shape, blocks=blocks)
        decay = 0.4
        if overlap is not None:
            of = kernel if overlap == "exact" else "linear"
            decay = [theory.weight_decay_for(1.1875, lr, a, nesterov=nesterov, overlap=of) for lr, a in zip(LR, ALPHA, strict=True)]  # fmt: skip
        for k, start in enumerate(starts[name]):
            asked = {"nesterov": nesterov, "overlap": kernel, "start": start / unit}
            norm = np.sqrt(unit * theory.forecast(LR, decay, ALPHA, **asked))
            cosine = theory.expected_alignment(LR, decay, ALPHA, **asked)
            assert column(records, f"{index}.{k}", "forecast") == pytest.approx(norm.tolist(), rel=1e-6)
            assert column(records, f"{index}.{k}", "expected") == pytest.approx(cosine.tolist(), rel=1e-5, abs=1e-9)
    last = records[-1]
    assert last["forecast_norm"] == pytest.approx(math.hypot(*(x["forecast"] for x in last["layers"].values())))
    spectral = [last["layers"][f"{k}.{j}"] for k in (0, 1, 2, 3, 4) for j in (0, 1)]
    assert last["expected_alignment"] == pytest.approx(statistics.fmean(x["expected"] for x in spectral))
    assert last["excess_alignment/sign"] == pytest.approx(
        statistics.fmean(last["layers"][f"6.{k}"]["alignment"] - last["layers"][f"6.{k}"]["expected"] for k in (0, 1))
    )


def test_the_forecast_holds_for_lion_and_adam_with_changing_betas():
    params = parameters((6, 5), (7,))
    starts = [p.square().sum().item() for p in params]
    beta1 = [0.95 - 0.3 * t / T for t in range(T)]
    corrected = [0.1 * ratio for ratio in RATIO]
    lr = [0.003 * ratio for ratio in RATIO]
    for make in (sn.AdamC, lambda p, **kw: sn.correct(torch.optim.AdamW(p, **kw))):
        params = parameters((6, 5), (7,))
        records = watch(make(params, lr=0.003, weight_decay=0.1), params)
        for k, (p, start) in enumerate(zip(params, starts, strict=True)):
            norm = theory.forecast_adam(lr, corrected, beta1, start=start / p.numel()) * p.numel()
            assert column(records, f"0.{k}", "forecast") == pytest.approx(np.sqrt(norm).tolist(), rel=1e-6)
    params = parameters((6, 5), (7,))
    optimizer = sn.LionC(params, lr=0.003, weight_decay=1.0)
    records = watch(optimizer, params)
    decay = [each["weight_decay"] for each in records]
    for k, (p, start) in enumerate(zip(params, starts, strict=True)):
        norm = theory.forecast_lion(lr, decay, beta1, 0.99, start=start / p.numel()) * p.numel()
        assert column(records, f"0.{k}", "forecast") == pytest.approx(np.sqrt(norm).tolist(), rel=1e-6)
    assert records[0]["effective_lr"] == pytest.approx(lr[0] * math.sqrt(theory.lion_gain(0.95, 0.99)))


@pytest.mark.parametrize("trace", [False, True])
def test_the_effective_lr_of_sgd_is_right_with_and_without_a_trace(trace):
    """A trace adds up 1/alpha gradients where the average has one."""
    params = parameters((6, 5))
    records = watch(sn.SGDC(params, lr=0.03, trace=trace, weight_decay=0.0), params, steps=5)
    expected = [lr / alpha if trace else lr for lr, alpha in zip(LR[:5], ALPHA[:5], strict=True)]
    assert [each["effective_lr"] for each in records] == pytest.approx(expected)


def test_the_momentum_of_a_young_adam_holds_as_many_gradients_as_it_has_seen():
    kernel = theory.overlap("linear", None)
    track = ForecastTrack(ADAM, kernel, (), theory.initial_state(kernel))
    track._begin([Start(1.0, warm=True, updates=3)], StepParams(0.01, 0.0, theory.ema(0.1)))
    assert track.state.var == pytest.approx(sum((0.1 * 0.9**age) ** 2 for age in range(3)))


@pytest.mark.parametrize("shape", [(64, 64), (48, 192), (192, 48)])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_the_size_of_muons_update_is_known(shape, adjust):
    """At these shapes Newton-Schulz leaves out a quarter to a third of |u|^2, and the forecast knows."""
    params = parameters(*[shape] * 4)
    optimizer = torch.optim.Muon(params, lr=0.1, weight_decay=0.0, adjust_lr_fn=adjust)
    before = [p.detach().clone() for p in params]
    train(optimizer, params, 1)
    size = statistics.fmean(((p - b) / 0.1).square().sum().item() for p, b in zip(params, before, strict=True))
    assert MUON.update_norm_sq(shape, optimizer.param_groups[0]) == pytest.approx(size, rel=0.03)
    assert MUON.update_norm_sq(shape, {"momentum": 0.9}) is None  # somebody else's


@pytest.mark.parametrize(
    ("shape", "error"), [((1, 1), 1e-6), ((1, 8), 1e-6), ((8, 1), 1e-6), ((2, 2), 0.12), ((2, 3), 0.08)]
)
def test_newton_schulz_of_matrices_of_one_or_two_rows_has_a_share(shape, error):
    values = np.linalg.svd(np.random.default_rng(0).standard_normal((4000, *shape)), compute_uv=False)
    s, (a, b, c) = values / np.linalg.norm(values, axis=1, keepdims=True), NEWTON_SCHULZ
    for _ in range(5):
        s = a * s + b * s**3 + c * s**5
    assert newton_schulz_share(*shape, NEWTON_SCHULZ, 5) == pytest.approx(np.mean(s**2), rel=error)


def test_there_is_no_forecast_where_there_is_no_theory():
    for make in (
        sn.RenormalizedAdamW,
        lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.1),
        lambda p: torch.optim.NAdam(p, decoupled_weight_decay=True, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, weight_decay=0.1),
        torch.optim.Adafactor,
        torch.optim.Rprop,
    ):
        params = parameters((4, 4), (3,))
        records = watch(make(params), params, steps=2, alignment=True)
        assert records[-1]["forecast_norm"] is None
        assert records[-1]["expected_alignment"] is None
        assert records[-1]["alignment"] is not None
    params = parameters((4, 4))
    assert watch(torch.optim.Adam(params), params, steps=2)[-1]["forecast_norm"] is not None  # nothing to couple
    assert watch(sn.ScionC(params, lmo="spectral"), params, steps=2, forecast=False)[-1]["forecast_norm"] is None


# --- measured against expected


def excess_of(make, shapes, steps=200, skip=50, **options):
    """Return the mean excess over steps of each layer under random gradients, and measured / forecast norm at the end."""
    g = torch.Generator().manual_seed(5)
    params = [nn.Parameter(0.1 * torch.randn(shape, generator=g)) for shape in shapes]
    optimizer = make(params)
    monitor = sn.Monitor(optimizer, **options)
    for _ in range(steps):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g)
        optimizer.step()
    records = monitor.measure()
    excess = [statistics.fmean(column(records[skip:], name, "excess")) for name in records[0]["layers"]]
    last = records[-1]["layers"].values()
    ratios = [layer["norm"] / layer["forecast"] for layer in last if layer["forecast"] is not None]
    expected = statistics.fmean(column(records[skip:], "0.0", "expected"))
    return excess, ratios, expected


RANDOM = {
    "ScionC": (lambda p: sn.ScionC(p, lr=0.03, lmo="spectral"), {}),
    "Scion, blocks": (lambda p: sn.Scion(p, lr=0.03, lmo="spectral", blocks=2, weight_decay=0.5, alpha=0.3), {}),
    "Scion, sign": (lambda p: sn.Scion(p, lr=0.3, lmo="sign", weight_decay=0.05, nesterov=True), {}),
    "LionC": (lambda p: sn.LionC(p, lr=0.01, weight_decay=2.0), {}),
    "SGDC": (lambda p: sn.SGDC(p, lr=0.1, weight_decay=0.2), {}),
    "SGDC trace": (lambda p: sn.SGDC(p, lr=0.01, weight_decay=2.0, trace=True, nesterov=True), {}),
    "AdamW": (lambda p: torch.optim.AdamW(p, lr=0.01, betas=(0.9, 0.99), weight_decay=2.0), {"alignment": True}),
    "Muon": (lambda p: torch.optim.Muon(p, lr=0.02, weight_decay=1.0), {"alignment": True}),
}


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("ScionC", "AdamW") else [pytest.mark.slow]) for name in RANDOM],
)
def test_random_gradients_have_no_excess_alignment(name):
    """With 24 independent layers, the mean is within three standard errors of zero and the expected alignment far
    outside.
    """
    make, options = RANDOM[name]
    excess, ratios, expected = excess_of(make, [(32, 32)] * 24, **options)
    error = statistics.stdev(excess) / math.sqrt(len(excess))
    slack = (
        0.03 * abs(expected) if name == "Muon" else 0.0
    )  # five steps of Newton-Schulz are not quite the polar factor
    assert abs(statistics.fmean(excess)) < 3 * error + slack
    assert expected < -0.05
    assert abs(expected) > 10 * error
    if ratios:
        assert statistics.fmean(ratios) == pytest.approx(1, abs=0.025)


def test_a_gradient_that_pushes_outward_has_negative_excess():
    """The output layer does this under cross-entropy: the gradient keeps a part along -theta."""
    p, free = parameters((24, 24), (24, 24))
    optimizer = sn.ScionC([p, free], lr=0.02, lmo="spectral")
    outward = p.detach().clone()
    monitor = sn.Monitor(optimizer)
    for t in range(150):
        p.grad, free.grad = noise(p.shape, t, 1) - 2 * outward, noise(p.shape, t, 2)
        optimizer.step()
    records = monitor.measure()[50:]
    assert statistics.fmean(column(records, "0.0", "excess")) < -0.3
    assert abs(statistics.fmean(column(records, "0.1", "excess"))) < 0.05


# --- whatever happens


@pytest.mark.parametrize(
    "make",
    [
        lambda p: sn.ScionC(p, lr=0.05, lmo="by-shape"),
        lambda p: sn.correct(torch.optim.AdamW(p, lr=0.01, weight_decay=1.0)),
        lambda p: sn.LionC(p, lr=0.01),
        lambda p: sn.LionC(p, lr=0.01, hold="fixed"),  # reading records also advances the forecast
    ],
    ids=["ScionC", "AdamW", "LionC", "LionC fixed"],
)
def test_a_resumed_monitor_continues_as_the_unbroken_one_does(make):
    """The run stops between two measurements, with records unread and one parameter sometimes without gradients."""

    def go(optimizer, params, steps):
        for t in steps:
            set_noise(params, t)
            if t % 5 == 2:
                params[1].grad = None
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * RATIO[t]
            optimizer.step()

    params = parameters(*LAYERS)
    whole, broken = make(params), make(twins := parameters(*LAYERS))
    one, two = (sn.Monitor(optimizer, every=2, alignment=True) for optimizer in (whole, broken))
    go(whole, params, range(33))
    go(broken, twins, range(17))
    file = io.BytesIO()
    torch.save({"optimizer": broken.state_dict(), "monitor": two.state_dict(), "weights": twins}, file)
    two.close()
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    fresh = [nn.Parameter(p.detach().clone()) for p in saved["weights"]]
    resumed = make(fresh)
    monitor = sn.Monitor(resumed, every=2, alignment=True)
    resumed.load_state_dict(saved["optimizer"])
    monitor.load_state_dict(saved["monitor"])
    go(resumed, fresh, range(17, 33))
    records = monitor.measure()
    assert [each["step"] for each in records] == list(range(2, 33, 2))
    assert_alike(records, one.measure())
    assert_alike(monitor.state_dict()["starts"], one.state_dict()["starts"])
    for name, vectors in one.state_dict()["power"].items():
        assert torch.equal(vectors, monitor.state_dict()["power"][name])


def test_the_state_of_another_model_is_refused():
    def monitor_of(*shapes):
        params = parameters(*shapes)
        optimizer = sn.ScionC(params, lmo="by-shape")
        monitor = sn.Monitor(optimizer)
        train(optimizer, params, 1)
        return monitor

    state = monitor_of((4, 4), (4,)).state_dict()
    with pytest.raises(ValueError, match=r"has '0\.1', which the optimizer does not"):
        monitor_of((4, 4)).load_state_dict(state)
    with pytest.raises(ValueError, match=r"power vectors of 0\.0 are \(1, 4\), not \(1, 5\)"):
        monitor_of((4, 5), (4,)).load_state_dict(state)


def test_a_layer_without_gradients_is_forecast_by_the_steps_it_took():
    params = parameters((8, 8), (8, 8))
    start = [p.square().sum().item() / 8 for p in params]
    optimizer = sn.Scion(params, lr=0.03, lmo="spectral", weight_decay=0.5)
    monitor = sn.Monitor(optimizer)
    taken = []
    for t in range(30):
        set_noise(params, t)
        optimizer.param_groups[0]["lr"] = LR[t]
        if 5 <= t < 12 or t == 20:
            params[1].grad = None
        else:
            taken.append(t)
        optimizer.step()
    records = monitor.measure()
    kernel = theory.overlap("spectral", (8, 8))
    for k, steps in ((0, range(30)), (1, taken)):
        lr = [LR[t] for t in steps]
        norm = np.sqrt(8 * theory.forecast(lr, 0.5, 0.1, overlap=kernel, start=start[k]))
        cosine = theory.expected_alignment(lr, 0.5, 0.1, overlap=kernel, start=start[k])
        for at, t in enumerate(steps):
            layer = records[t]["layers"][f"0.{k}"]
            assert layer["forecast"] == pytest.approx(norm[at], rel=1e-6)
            assert layer["expected"] == pytest.approx(cosine[at], rel=1e-6, abs=1e-9)
    assert [records[t]["layers"]["0.1"]["forecast"] for t in (5, 11)] == pytest.approx([math.sqrt(8 * theory.forecast(LR[:5], 0.5, 0.1, overlap=kernel, start=start[1])[-1])] * 2, rel=1e-6)  # fmt: skip


@pytest.mark.parametrize("name", ["ScionC", "AdamW", "LionC"])
def test_a_monitor_attached_to_a_running_optimizer_takes_its_momentum_as_settled(name):
    """A cold start would expect no alignment at first, unlike the run from its beginning."""
    make, _ = RANDOM[name]
    params = parameters(*[(16, 16)] * 4)
    optimizer = make(params)
    early = sn.Monitor(optimizer)
    train(optimizer, params, 300)
    early.measure()
    late = sn.Monitor(optimizer)
    train(optimizer, params, 40, start=300)
    for long, short in zip(early.measure(), late.measure(), strict=True):
        for one, two in zip(long["layers"].values(), short["layers"].values(), strict=True):
            # both expect the same product; each divides it by its own forecast of the norm
            assert two["expected"] * two["forecast"] == pytest.approx(one["expected"] * one["forecast"], rel=0.05)
            assert two["forecast"] == pytest.approx(two["norm"], rel=0.12)


def test_the_forecast_of_a_layer_that_leaves_stands_still_where_its_updates_were_skipped():
    """It leaves before its records are made, and its forecast is still that of an equal layer, 3 steps later."""
    params = parameters((8, 8), (8, 8))
    params[1].data.copy_(params[0].data)
    optimizer = sn.ScionC(params, lmo="spectral", lr=0.05, steady_norm_sq=4.0)
    monitor = sn.Monitor(optimizer, flush=100)
    for t in range(12):
        set_noise(params, t)
        if 4 <= t < 7:
            params[1].grad[0, 0] = math.nan
        if t == 10:
            optimizer.param_groups[0]["params"].pop()
        optimizer.step()
    records = monitor.measure()
    good, ill = column(records[:10], "0.0", "forecast"), column(records[:10], "0.1", "forecast")
    assert ill == pytest.approx([*good[:4], *[good[3]] * 3, *good[4:7]], rel=1e-6)


@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("make", [lambda ps: sn.ScionC(ps, lmo="spectral", lr=0.05, steady_norm_sq=4.0), lambda ps: sn.AdamC(ps, lr=0.02, weight_decay=1.0), lambda ps: sn.LionC(ps, lr=0.01)], ids=["ScionC", "AdamC", "LionC"])  # fmt: skip
def test_the_forecast_stands_still_where_updates_are_skipped(make, every):
    """One of two equal layers has 12 non-finite gradients: its forecast is that of the other 12 steps earlier."""
    params = parameters((8, 8), (8, 8))
    params[1].data.copy_(params[0].data)
    optimizer = make(params)
    monitor = sn.Monitor(optimizer, every=every, flush=5)
    records = []
    for t in range(60):
        set_noise(params, t)
        if 20 <= t < 32:
            params[1].grad[0, 0] = math.nan
        optimizer.step()
        if t == 29:
            records = monitor.measure()  # in the middle of them, and (every=4) between two records
            state = monitor.state_dict()
            monitor.close()
            monitor = sn.Monitor(optimizer, every=every, flush=5)
            monitor.load_state_dict(state)
    records += monitor.measure()
    good, ill = (dict(zip([each["step"] for each in records], column(records, name, "forecast"), strict=True)) for name in ("0.0", "0.1"))  # fmt: skip
    for step in range(every, 61, every):
        taken = step - min(max(step - 20, 0), 12)
        if taken in good:
            assert ill[step] == pytest.approx(good[taken], rel=1e-6), step
    expected = dict(zip([each["step"] for each in records], column(records, "0.1", "expected"), strict=True))
    assert expected[24] is None and (expected[40] is not None)
    assert records[-1]["weight_norm"] is not None


# --- norms that are held


@pytest.mark.parametrize("scale", [0.5, 1.0, 1.5])
def test_forecast_of_a_balanced_norm_returns_to_its_target_as_the_norm_does(scale):
    """Start off the target: the forecast approaches it over T steps, and so does the measured norm."""
    p = nn.Parameter(noise((60, 20), 1))
    optimizer = sn.ScionC(
        [{"params": [p], "lmo": "sign", "name": "signs"}],
        lr=0.02,
        alpha=0.3,
        steady_norm_sq=1.0,
        hold="balance",
        balance_steps=30,
    )
    p.data *= math.sqrt(scale * 3.0) / p.data.norm()  # N* = 60 / 20
    monitor = sn.Monitor(optimizer)
    for t in range(150):
        set_noise([p], t)
        optimizer.step()
    records = monitor.measure()
    forecast, norm, again = (column(records, "0.0", key) for key in ("forecast", "norm", "forecast_measured"))
    eta = 0.02 * theory.weight_decay_for(1.0, 0.02, 0.3)
    expected = [math.sqrt(3 * (1 + (scale - 1) * theory.balance_keep(eta, 30) ** t)) for t in range(1, 151)]
    assert forecast == pytest.approx(expected, rel=1e-6)
    assert again[1:] == pytest.approx(expected[1:], rel=1e-6)
    assert norm == pytest.approx(forecast, rel=0.06)
    assert norm[-30:] == pytest.approx(forecast[-30:], rel=0.02)


@pytest.mark.parametrize("decay", [{"steady_norm_sq": 0.7}, {"weight_decay": 0.1}])
def test_forecast_of_a_fixed_norm_is_that_norm(decay):
    params = parameters((8, 4), (8, 4))
    optimizer = sn.ScionC([{"params": params, "lmo": "spectral", "name": "two", **decay}], lr=0.02, hold="fixed")
    starts = [p.norm().item() for p in params]
    records = watch(optimizer, params, steps=8)
    for k, start in enumerate(starts):
        expected = math.sqrt(0.7 * 8) if "steady_norm_sq" in decay else start
        assert column(records, f"0.{k}", "forecast") == pytest.approx([expected] * 8, rel=1e-6)
        assert column(records, f"0.{k}", "norm") == pytest.approx([expected] * 8, rel=1e-5)


def test_cautious_decay_has_no_forecast_that_does_not_know_its_mask():
    """Forecast as plain decay, its norm would be far too small: cautious decay is more than twice as strong."""
    records = {}
    for cautious in (False, True):
        p = torch.nn.Parameter(torch.randn(6, 4))
        optimizer = sn.ScionC([p], lr=0.01, lmo="spectral", cautious=cautious)
        monitor = sn.Monitor(optimizer)
        p.grad = torch.randn(6, 4)
        optimizer.step()
        (records[cautious],) = monitor.measure()
    assert records[False]["forecast_norm"] is not None
    assert records[True].get("forecast_norm") is None
    assert records[True]["target_norm"] == records[False]["target_norm"]


@pytest.mark.parametrize("absolute", [{}, {"steady_norm_sq": 0.01}], ids=["first norm", "target"])
@pytest.mark.parametrize("cls", [sn.AdamC, sn.LionC, torch.optim.AdamW])
def test_target_of_a_fixed_norm_is_where_it_is_held_and_not_where_decay_would_lead(cls, absolute):
    params = parameters((8, 4), (8, 4))
    if cls is torch.optim.AdamW:
        optimizer = sn.correct(cls(params, lr=1e-3, weight_decay=0.1), hold="fixed", **absolute)
    else:
        optimizer = cls(params, lr=1e-3, weight_decay=0.1, hold="fixed", **absolute)
    monitor = sn.Monitor(optimizer)
    for t in range(12):
        set_noise(params, t)
        optimizer.step()
    expected = math.sqrt(0.01 * 32) if absolute else None
    assert {own["target"] for own in monitor.measure()[-1]["layers"].values()} == {expected}
    place = "its target" if absolute else "its norm at the first record"
    (advice,) = monitor.advice()
    assert f'hold="fixed" keeps the norm within 3 % of {place}' in advice
