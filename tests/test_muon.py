"""MuonC equals its slow twin and, with constant decay, torch's Muon and AdamW; it says what it refuses."""

import copy
from typing import Any

import pytest
import torch
import twins_optim as twin
from contract import noise, parameters, set_gradients
from test_optim_twins import C2, PEAK, RATIO, T, assert_twins, gradient
from torch import Tensor, nn

import steadynorm as sn
from steadynorm.decay.hold import target_norm_sq
from steadynorm.optim.scion_rule import SCION_RULE
from steadynorm.polar import Polar

FP64 = torch.float64
GAMMA = [PEAK * ratio for ratio in RATIO]
MU = [0.95 - 0.3 * t / T for t in range(T)]
ADAM = {"lr": 0.01, "betas": (0.9, 0.99), "eps": 1e-8}

# name -> (settings of the group, shapes)
HIDDEN: dict[str, tuple[dict[str, Any], list[tuple[int, ...]]]] = {
    "matrix": ({}, [(6, 4), (4, 6), (5, 5), (4, 6), (1, 7), (7, 1)]),
    "qkv": ({"blocks": 3}, [(12, 4), (6, 5)]),
    "transposed": ({"lmo": "spectral-transposed"}, [(4, 6), (6, 4), (3, 4, 5)]),
    "transposed qkv": ({"lmo": "spectral-transposed", "blocks": 3}, [(4, 12)]),
    "experts": ({"lmo": "spectral"}, [(3, 4, 5)]),
    "conv": ({}, [(4, 2, 3, 3)]),
}
REST = {"vector": (7,), "table": (9, 4), "scalar": ()}


def run(optimizer: Any, params: dict[str, nn.Parameter]) -> dict[str, list[Tensor]]:
    """Return the weights after every step while lr, momentum and targets change as schedulers change them."""
    out: dict[str, list[Tensor]] = {name: [] for name in params}
    peaks = [group["lr"] for group in optimizer.param_groups]
    for t in range(T):
        for group, peak in zip(optimizer.param_groups, peaks, strict=True):
            group["lr"] = peak * RATIO[t]
            group["momentum"] = MU[t]  # of all groups: Adam's decay does not follow it
            if group["steady_norm_sq"] is not None:
                group["steady_norm_sq"] = C2[t]
        set_gradients(params, t)
        optimizer.step()
        for name, p in params.items():
            out[name].append(p.detach().clone())
    return out


@pytest.mark.parametrize("nesterov", [True, False], ids=["nesterov", "plain"])
@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("target", [False, True], ids=["relative", "target"])
def test_muonc_equals_its_twin(nesterov: bool, adjust: str, target: bool):
    """Both kinds of groups in one optimizer: every view and blocks, constant decay of an output layer, and the rest."""
    shapes = {f"{layer} {k}": shape for layer, (_, own) in HIDDEN.items() for k, shape in enumerate(own)}
    params = parameters({**shapes, **REST, "output": (5, 4)}, FP64)
    start = {name: p.detach().clone() for name, p in params.items()}
    groups: list[dict[str, Any]] = [
        {"params": [params[f"{layer} {k}"] for k in range(len(own))], "use_muon": True, **settings}
        for layer, (settings, own) in HIDDEN.items()
    ]
    groups += [{"params": [params[name] for name in REST], "use_muon": False}]
    groups += [{"params": [params["output"]], "use_muon": False, "corrected": False, "weight_decay": 0.7}]
    optimizer = sn.MuonC(
        groups, lr=PEAK, adam_lr=ADAM["lr"], betas=ADAM["betas"], weight_decay=2.0, nesterov=nesterov,
        adjust_lr_fn=adjust, polar="svd", steady_norm_sq=1.0 if target else None,
    )  # fmt: skip
    fast = run(optimizer, params)
    adam_gamma = [ADAM["lr"] * ratio for ratio in RATIO]

    def slow(name: str) -> list[Tensor]:
        layer = name.rsplit(" ", 1)[0]
        if layer in HIDDEN:
            settings = {"lmo": "conv" if layer == "conv" else "spectral", **HIDDEN[layer][0]}
            return twin.muonc(
                start[name], gradient(name), GAMMA, MU, PEAK, 2.0, start=0.95, adjust=adjust, nesterov=nesterov,
                C2=C2 if target else (), **settings,
            )  # fmt: skip
        adam = (start[name], gradient(name), adam_gamma, ADAM["lr"], 2.0, ADAM["betas"], ADAM["eps"])
        return twin.adamc(*adam, decays=[0.7] * T if name == "output" else ())

    assert_twins(fast, slow)


# --- equal to torch's Muon and AdamW with constant decay

MATRICES = {"wide": (24, 60), "tall": (60, 24), "square": (40, 40), "wide too": (24, 60)}
OTHERS = {"vector": (17,), "table": (30, 8), "scalar": ()}
TORCH = {"lr": 0.02, "momentum": 0.95, "weight_decay": 0.1}
TORCH_ADAM = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def both(dtype: torch.dtype, adjust: str | None) -> tuple[dict[str, nn.Parameter], Any, dict[str, nn.Parameter], Any]:
    """Return parameters with torch's two optimizers, and the same parameters with MuonC at constant decay."""
    theirs, ours = (parameters({**MATRICES, **OTHERS}, dtype) for _ in range(2))
    muon = torch.optim.Muon([theirs[name] for name in MATRICES], **TORCH, adjust_lr_fn=adjust)
    adamw = torch.optim.AdamW([theirs[name] for name in OTHERS], **TORCH_ADAM)
    groups = [
        {"params": [ours[name] for name in MATRICES], "use_muon": True, "corrected": False},
        {"params": [ours[name] for name in OTHERS], "use_muon": False, "corrected": False},
    ]
    settings = {key: value for key, value in TORCH.items() if key != "lr"}
    optimizer = sn.MuonC(
        groups, lr=TORCH["lr"], adam_lr=TORCH_ADAM["lr"], polar="newton-schulz", adjust_lr_fn=adjust, **settings
    )
    return theirs, (muon, adamw), ours, optimizer


def fifty_steps(optimizers: Any, params: dict[str, nn.Parameter]) -> None:
    """Train with a falling lr; gradients do not depend on the weights, so errors add up and are not amplified."""
    first = [[group["lr"] for group in optimizer.param_groups] for optimizer in optimizers]
    for t in range(50):
        set_gradients(params, t, pull=0.0)
        for optimizer, peaks in zip(optimizers, first, strict=True):
            for group, peak in zip(optimizer.param_groups, peaks, strict=True):
                group["lr"] = peak * (1 - t / 60)
            optimizer.step()


def distance(a: Tensor, b: Tensor) -> float:
    return ((a.double() - b.double()).norm() / b.double().norm()).item()


@pytest.mark.parametrize("adjust", [None, "original", "match_rms_adamw"])
def test_with_constant_decay_it_takes_the_steps_of_torchs_muon_and_adamw(adjust: str | None, monkeypatch):
    """In fp64 throughout: torch's Muon asks for bf16 inside Newton-Schulz, which would hide a difference."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    theirs, two, ours, one = both(FP64, adjust)
    fifty_steps(two, theirs)
    fifty_steps((one,), ours)
    for name in theirs:
        assert distance(ours[name], theirs[name]) < 1e-6, name  # torch's eps beside the norm is 1e-7 of it
    for name in MATRICES:
        key = "momentum_buffer"
        assert distance(one.state[ours[name]][key], two[0].state[theirs[name]][key]) < 1e-12
    for name in OTHERS:
        for key in ("exp_avg", "exp_avg_sq", "step"):
            torch.testing.assert_close(
                one.state[ours[name]][key], two[1].state[theirs[name]][key], rtol=1e-12, atol=0, check_dtype=False
            )


@pytest.mark.parametrize("shape", [(1, 16), (12, 1), (1, 1)], ids=str)
def test_a_single_row_or_column_takes_torchs_steps_as_well(shape: tuple[int, int], monkeypatch):
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
    theirs, ours = (parameters({"p": shape}, FP64) for _ in range(2))
    group = {"params": [ours["p"]], "use_muon": True, "corrected": False}
    for optimizer, params in (
        (torch.optim.Muon([theirs["p"]], **TORCH), theirs),
        (sn.MuonC([group], **TORCH, polar="newton-schulz"), ours),
    ):
        fifty_steps((optimizer,), params)
    assert distance(ours["p"], theirs["p"]) < 1e-6


@pytest.mark.parametrize("native", ["0", "1"], ids=["fp32 products", "bf16 products"])
def test_in_fp32_it_is_as_close_to_torchs_steps_as_they_are_to_exact_ones(native: str, monkeypatch):
    """The bf16 products of torch's Muon are off by some distance; ours are no further away, in bf16 or fp32."""
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", native)
    theirs, two, ours, one = both(torch.float32, "original")
    fifty_steps(two, theirs)
    fifty_steps((one,), ours)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
        exact, exact_two, _, _ = both(FP64, "original")
        with torch.no_grad():
            for name, p in parameters({**MATRICES, **OTHERS}).items():  # what fp32 makes of the start
                exact[name].copy_(p)
        fifty_steps(exact_two, exact)
    for name in MATRICES:
        error, rounding = distance(ours[name], exact[name]), distance(theirs[name], exact[name])
        assert 1e-5 < rounding < 1e-2
        assert error < (1.5 * rounding if native == "1" else 1e-4), (name, error, rounding)
        assert distance(ours[name], theirs[name]) < 2 * rounding
    for name in OTHERS:
        assert distance(ours[name], theirs[name]) < 1e-6, name


def test_newton_schulz_in_bf16_is_as_accurate_as_torchs(monkeypatch):
    """Rounding A^2 before b A is added to it would double or triple the error."""
    from torch.optim._muon import _zeropower_via_newtonschulz

    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "1")
    coefficients = (3.4445, -4.7750, 2.0315)
    for shape in ((48, 48), (64, 32), (384, 384), (340, 700)):
        x = noise("x", 0, shape)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "bfloat16", lambda self: self.clone())
            exact = _zeropower_via_newtonschulz(x, coefficients, 5, 1e-7)
        torchs = distance(_zeropower_via_newtonschulz(x.float(), coefficients, 5, 1e-7), exact)
        assert distance(Polar("newton-schulz", 5)(x.float()), exact) < 1.3 * torchs, shape


# --- groups


def test_adam_groups_take_their_own_lr_and_no_target():
    p, q = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))

    def make(**settings: Any) -> sn.MuonC:
        return sn.MuonC([{"params": [p], "use_muon": True}, {"params": [q], "use_muon": False}], **settings)

    def lrs(**settings: Any) -> list[float]:
        return [group["lr"] for group in make(**settings).param_groups]

    assert lrs(lr=0.1) == [0.1, 0.005]
    assert lrs(lr=0.1, adjust_lr_fn="match_rms_adamw") == [0.1, 0.1]
    assert lrs(lr=0.1, adam_lr=0.3) == [0.1, 0.3]
    optimizer = make(steady_norm_sq=2.0)
    assert [group["steady_norm_sq"] for group in optimizer.param_groups] == [2.0, None]
    assert all("adam_lr" not in group for group in optimizer.param_groups)
    copied = copy.deepcopy(optimizer)
    copied.add_param_group({"params": [nn.Parameter(torch.ones(2))], "use_muon": False})
    assert copied.param_groups[-1]["lr"] == pytest.approx(1e-3)


def test_keller_jordans_groups_work_unchanged():
    """MuonWithAuxAdam takes such groups: `use_muon`, and settings of their own."""
    p, q = nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(4))
    groups = [
        {"params": [p], "use_muon": True, "lr": 0.05, "momentum": 0.9, "weight_decay": 0.01},
        {"params": [q], "use_muon": False, "lr": 3e-4, "betas": (0.8, 0.95), "eps": 1e-10, "weight_decay": 0.02},
    ]
    optimizer = sn.MuonC(groups)
    for group, given in zip(optimizer.param_groups, groups, strict=True):
        assert {key: group[key] for key in given} == given
    assert optimizer.state[p].keys() >= {"momentum_buffer"} and optimizer.state[q].keys() >= {"exp_avg", "exp_avg_sq"}


def refusal(groups: Any, **settings: Any) -> str:
    with pytest.raises(ValueError) as error:
        sn.MuonC(groups, **settings)
    return str(error.value)


def test_it_refuses_groups_that_do_not_say_their_kind_or_do_not_fit_it():
    p, q = nn.Parameter(torch.ones(6, 4)), nn.Parameter(torch.ones(4))
    assert "param_groups(model, kind='muon')" in refusal([p])
    assert "use_muon=False (Adam)" in refusal([p, q], use_muon=True)
    assert "lmo='sign' is not Muon's" in refusal([{"params": [p], "lmo": "sign", "use_muon": True}])
    assert "no use_muon" in refusal([{"params": [p], "lmo": "spectral"}])
    assert "momentum=1.0 is outside [0, 1)" in refusal([p], use_muon=True, momentum=1.0)
    assert "momentum=None is outside [0, 1)" in refusal([p], use_muon=True, momentum=None)
    assert "adjust_lr_fn='none' is unknown" in refusal([p], use_muon=True, adjust_lr_fn="none")
    assert "blocks=5" in refusal([p], use_muon=True, blocks=5)
    assert "betas[0]=1.0" in refusal([q], use_muon=False, betas=(1.0, 0.9))


def test_scion_refuses_muons_groups_only_where_they_name_an_lmo_and_no_kind():
    p = nn.Parameter(torch.ones(6, 4))
    with pytest.raises(ValueError, match="for Scion and ScionC"):
        sn.AdamC([{"params": [p], "lmo": "spectral"}])


# --- the size of updates, and what follows from it


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("polar", ["svd", "newton-schulz"])
@pytest.mark.parametrize("layer", [*HIDDEN])
def test_the_size_of_updates_is_known(layer: str, adjust: str, polar: str):
    settings, shapes = HIDDEN[layer]
    for shape in shapes:
        wide = tuple(side if side == 1 else 16 * side for side in shape[-2:])
        shape = (*shape[:-2], *wide) if layer != "conv" else (64, 32, 3, 3)
        p = nn.Parameter(torch.zeros(shape))
        optimizer = sn.MuonC(
            [{"params": [p], "use_muon": True, **settings}], lr=1.0, adjust_lr_fn=adjust, polar=polar, weight_decay=0.0
        )
        p.grad = noise("g", 0, shape).float()
        optimizer.step()
        group = optimizer.param_groups[0]
        expected = optimizer.family.of(group).update_norm_sq(shape, group)
        assert p.square().sum().item() == pytest.approx(expected, rel=0.05 if polar == "newton-schulz" else 1e-4)


def test_the_kernel_is_that_of_the_blocks():
    """Momentum of three square blocks overlaps as that of square matrices, not of one tall matrix."""
    group = {"use_muon": True, "lmo": "spectral", "blocks": 3}
    assert sn.MuonC.family.of(group).kernel((96, 32), group) == sn.theory.overlap("spectral", (32, 32))
    assert sn.MuonC.family.of(group).kernel((96, 32), group) != sn.theory.overlap("spectral", (96, 32))


def test_adam_lr_in_a_group_is_refused_because_the_group_has_an_lr():
    group = {"params": [*parameters({"vector": (7,)}).values()], "use_muon": False}
    with pytest.raises(ValueError, match=r"MuonC, group 0: adam_lr=0\.5 is an argument.*set the group's lr"):
        sn.MuonC([{**group, "adam_lr": 0.5}])
    assert sn.MuonC([{**group, "lr": 0.5}]).param_groups[0]["lr"] == 0.5


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("layer", [*HIDDEN])
def test_bf16_transfers_are_lossless(layer: str, adjust: str, monkeypatch):
    """What processes exchange is rounded to bf16 only where the update is so already, but for its scale."""
    monkeypatch.setenv("STEADYNORM_NATIVE_BF16", "1")
    settings, shapes = HIDDEN[layer]
    x = noise("x", 0, shapes[0]).float()
    optimizer = sn.MuonC([x], use_muon=True, adjust_lr_fn=adjust, polar_steps=5, **settings)
    own, _ = optimizer.settings(optimizer.param_groups[0], x)
    encoding = SCION_RULE.encode(shapes[0], own, x.dtype, x.device)
    assert encoding.u_dtype == torch.bfloat16
    scale = encoding.scale
    u = SCION_RULE.normalize(x.unsqueeze(0), own, None)
    torch.testing.assert_close((u / scale).bfloat16().float() * scale, u, rtol=2e-7, atol=0)


def test_balance_holds_both_kinds_at_the_norms_that_decay_would_lead_to():
    shapes = {"hidden": (32, 32), "rest": (40, 8)}
    params = parameters(shapes)
    groups = [
        {"params": [params["hidden"]], "use_muon": True, "lr": 0.02},
        {"params": [params["rest"]], "use_muon": False, "lr": 0.02},
    ]
    optimizer = sn.MuonC(groups, weight_decay=2.0, hold="balance")
    for t in range(300):
        for group in optimizer.param_groups:
            group["lr"] = 0.02 * (1 - t / 400)
        set_gradients(params, t, pull=0.0)
        optimizer.step()
    for group, p in zip(optimizer.param_groups, params.values(), strict=True):
        target = target_norm_sq(group, optimizer.family, p.shape)
        assert target is not None
        assert p.square().sum().item() == pytest.approx(target, rel=0.1), group["use_muon"]
    alpha = 0.05
    hidden = 0.02 * twin.muon_gain(1 - alpha, nesterov=True) / (2 * 2.0) * 32  # lr G / (2 lambda) U^2
    assert target_norm_sq(optimizer.param_groups[0], optimizer.family, (32, 32)) == pytest.approx(hidden)


def test_bf16_momentum_halves_the_state_and_stays_close():
    params, plain = parameters(MATRICES), parameters(MATRICES)
    optimizer = sn.MuonC(params.values(), use_muon=True, momentum_dtype="bfloat16", polar="svd")
    reference = sn.MuonC(plain.values(), use_muon=True, polar="svd")
    fifty_steps((optimizer,), params)
    fifty_steps((reference,), plain)
    for name, p in params.items():
        assert optimizer.state[p]["momentum_buffer"].dtype == torch.bfloat16
        assert 0 < distance(p, plain[name]) < 0.02


def test_halving_the_lr_quarters_the_shrink_of_both_kinds():
    for use_muon in (True, False):
        shrinks = []
        for factor in (1.0, 0.5):
            p = nn.Parameter(torch.ones(4, 4, dtype=FP64))
            optimizer = sn.MuonC([p], lr=0.1, adam_lr=0.1, use_muon=use_muon, weight_decay=1.0)
            optimizer.param_groups[0]["lr"] = 0.1 * factor
            p.grad = torch.zeros_like(p)
            optimizer.step()
            shrinks.append(1 - p[0, 0].item())
        assert shrinks[0] == pytest.approx(0.1) and shrinks[1] == pytest.approx(shrinks[0] / 4)
