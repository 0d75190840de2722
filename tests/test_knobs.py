"""Which knob to turn, and fixed norms as ScionC's settings: against predictions and real optimizers."""

import json
import math

import pytest
import torch

import steadynorm as sn
from steadynorm import theory
from steadynorm.cli import main
from steadynorm.conversion.equivalents import find_equivalents, from_fixed_norm
from steadynorm.conversion.knobs import Knob, describe_setting, find_knobs
from steadynorm.prediction import ParamSetting, predict

SETTINGS = [
    ParamSetting(0.02, 0.1, (64, 64), steady_norm_sq=1.5),
    ParamSetting(0.01, 0.05, (32, 128), nesterov=True, weight_decay=0.1),
    ParamSetting(0.3, 0.5, (50,), weight_decay=0.4),
]


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.shape}")
def test_every_knob_meets_its_wish_and_keeps_what_it_says(setting: ParamSetting):
    """By `predict`, which does not know the knobs."""
    now = describe_setting(setting)
    knobs = find_knobs(
        setting, half_life=3 * now.half_life, rms=0.8 * now.rms, relative_update=0.7 * now.relative_update
    )
    asked = {"half-life": 3 * now.half_life, "RMS": 0.8 * now.rms, "relative update": 0.7 * now.relative_update}
    assert [(knob.wish, knob.kept) for knob in knobs] == [
        ("half-life", "RMS"), ("half-life", "lr"), ("RMS", "lr"),
        ("RMS", "half-life"), ("relative update", "RMS"), ("relative update", "lr"),
    ]  # fmt: skip
    for knob in knobs:
        turned = ParamSetting(
            knob.lr, setting.alpha, setting.shape, nesterov=setting.nesterov, weight_decay=knob.weight_decay
        )
        level = predict(turned).exact
        relative = knob.lr * math.sqrt(setting.update_norm_sq) / level.weight_norm
        seen = {"half-life": level.half_life, "RMS": level.rms, "relative update": relative, "lr": knob.lr}
        kept = {"half-life": now.half_life, "RMS": now.rms, "lr": now.lr}
        assert seen[knob.wish] == pytest.approx(asked[knob.wish], rel=1e-6)
        assert seen[knob.kept] == pytest.approx(kept[knob.kept], rel=1e-6)
        assert knob.steady_norm_sq == pytest.approx(level.steady_norm_sq, rel=1e-9)
        assert (knob.half_life, knob.rms, knob.relative_update) == pytest.approx(
            (level.half_life, level.rms, relative), rel=1e-9
        )


def test_default_wishes_are_twice_the_half_life_twice_the_norm_and_half_the_relative_update():
    setting = SETTINGS[0]
    now, knobs = describe_setting(setting), find_knobs(setting)
    assert knobs[0].half_life == pytest.approx(2 * now.half_life)
    assert knobs[2].rms == pytest.approx(2 * now.rms)
    assert knobs[4].relative_update == pytest.approx(now.relative_update / 2)


@pytest.mark.parametrize(
    ("wish", "message"),
    [
        ({"half_life": 0.0}, "half_life 0.0"),
        ({"rms": -1.0}, "rms -1.0"),
        ({"relative_update": math.nan}, "relative_update nan"),
        ({"relative_update": 1.5}, "unreachable"),
    ],
)
def test_wish_that_cannot_be_met_is_refused(wish: dict[str, float], message: str):
    with pytest.raises(ValueError, match=message):
        find_knobs(SETTINGS[0], **wish)


def test_command_says_which_knob_to_turn(capsys: pytest.CaptureFixture[str]):
    options = "--lr 0.01 --alpha 0.1 --steady-norm-sq 1.1875 --shape 384x384 --half-life 4000"
    arguments = ["predict", *options.split()]
    assert main([*arguments, "--json"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    knob = Knob(**row["knobs"][0])
    assert main(arguments) == 0
    printed = capsys.readouterr().out
    assert (
        f"For a half-life of 4000 steps (now {row['exact']['half_life']:.5g}): set lr {knob.lr:.5g} (now 0.01)"
        in printed
    )
    assert "RMS stays" in printed and "target C² " in printed
    assert main(["predict", "--lr", "0.01", "--weight-decay", "0.08", "--shape", "64"]) == 0
    assert "and decay " in capsys.readouterr().out  # another lr needs another decay to keep the norm


# --- fixed norms and cautious decay


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: f"{setting.shape}")
def test_setting_survives_a_fixed_norm_and_back(setting: ParamSetting):
    fixed = find_equivalents(setting)["fixed norm"]
    momentum = {"alpha": setting.alpha, "nesterov": setting.nesterov}
    back = from_fixed_norm(fixed["relative_lr"], fixed["rms"], setting.shape, **momentum)
    assert back.lr == pytest.approx(setting.lr, rel=1e-9)
    assert back.steady_norm_sq == pytest.approx(predict(setting).exact.steady_norm_sq, rel=1e-9)
    assert fixed["relative_lr"] == pytest.approx(describe_setting(setting).relative_update, rel=1e-9)
    assert find_equivalents(back)["fixed norm"] == pytest.approx(fixed)


def test_scionc_with_a_fixed_norm_takes_the_steps_of_hyperball():
    """theta <- R normalise(theta - lr R normalise(u)), with the relative lr and the norm that were converted."""
    shape, relative, steps = (24, 16), 0.05, 6
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(shape, dtype=torch.float64, generator=generator) * 0.1
    radius = start.norm()
    setting = from_fixed_norm(relative, (radius / math.sqrt(24 * 16)).item(), shape, alpha=0.2)
    ours, theta, m = torch.nn.Parameter(start.clone()), start.clone(), torch.zeros(shape, dtype=torch.float64)
    optimizer = sn.ScionC(
        [ours],
        lr=setting.lr,
        alpha=0.2,
        lmo="spectral",
        steady_norm_sq=setting.steady_norm_sq,
        hold="fixed",
        polar="svd",
    )
    for _ in range(steps):
        g = torch.randn(shape, dtype=torch.float64, generator=generator)
        ours.grad = g.clone()
        optimizer.step()
        m = 0.8 * m + 0.2 * g
        left, _, right = torch.linalg.svd(m, full_matrices=False)
        u = left @ right
        theta = theta - relative * radius * u / u.norm()
        theta *= radius / theta.norm()
    torch.testing.assert_close(ours.detach(), theta, rtol=1e-6, atol=1e-9)


def test_cautious_equivalent_reaches_the_same_norm():
    setting = SETTINGS[0]
    cautious = find_equivalents(setting)["cautious decay"]
    reached = theory.cautious_steady_norm_sq(cautious["lr"], cautious["weight_decay"], 0.1, overlap=setting.kernel)
    assert reached == pytest.approx(1.5, rel=1e-6)
    assert cautious["weight_decay"] > 2 * predict(setting).exact.weight_decay


def test_command_translates_a_fixed_norm_for_every_shape(capsys: pytest.CaptureFixture[str]):
    options = "--optimizer hyperball --lr 0.01 --start-rms 0.02 --shape 64x64 64x256"
    arguments = ["predict", *options.split()]
    assert main([*arguments, "--json"]) == 0
    for row, shape in zip(json.loads(capsys.readouterr().out), [(64, 64), (64, 256)], strict=True):
        setting = from_fixed_norm(0.01, 0.02, shape)
        assert (row["setting"]["lr"], row["setting"]["steady_norm_sq"]) == pytest.approx(
            (setting.lr, setting.steady_norm_sq)
        )
        assert row["equivalents"]["fixed norm"] == pytest.approx({"relative_lr": 0.01, "rms": 0.02})
    assert main(arguments) == 0
    assert "ScionC's settings" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ("", "hyperball: pass --start-rms, the RMS"),
        ("--start-rms 0.02 --weight-decay 0.1", "leave decay and target out"),
    ],
)
def test_fixed_norm_needs_a_norm_and_no_decay(extra: str, message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["predict", "--optimizer", "hyperball", "--lr", "0.01", *extra.split()]) != 0
    assert message in " ".join(capsys.readouterr().err.split())
