"""Predictions agree with theory's own functions, the paper's settings, and real optimizers with the converted settings."""

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch

import steadynorm as sn
from steadynorm import prediction as predict
from steadynorm import theory
from steadynorm.cli import main
from steadynorm.conversion import equivalents, translation
from steadynorm.conversion.translation import AdamW, Lion, Muon, Tuned
from steadynorm.prediction import LrPlan, ParamSetting
from steadynorm.theory.updates import MUON_ADJUST

VECTORS = json.loads((Path(__file__).parent / "data" / "theory_vectors.json").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", VECTORS["paper"], ids=lambda case: case["what"])
def test_the_papers_settings_print_the_papers_decay(case: dict, capsys: pytest.CaptureFixture[str]):
    arguments = ["--lr", case["lr"], "--alpha", case["alpha"], "--steady-norm-sq", case["steady_norm_sq"]]
    assert main(["predict", *map(str, arguments), "--shape", "384x1536"]) == 0
    printed = capsys.readouterr().out
    line = next(line for line in printed.splitlines() if "decay, paper's" in line)
    assert float(line.split("│")[2]) == pytest.approx(case["weight_decay"], rel=1e-9)
    assert main(["predict", *map(str, arguments), "--shape", "384x1536", "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["paper"]["weight_decay"] == pytest.approx(case["weight_decay"], rel=1e-12)


@pytest.mark.parametrize("nesterov", [False, True])
@pytest.mark.parametrize("shape", [(64, 64), (32, 128), (100,)])
def test_a_target_is_reached_by_the_exact_decay_and_missed_by_the_papers(shape: tuple[int, ...], nesterov: bool):
    found = predict.predict(ParamSetting(0.02, 0.1, shape, nesterov=nesterov, steady_norm_sq=1.5))
    assert found.exact.steady_norm_sq == pytest.approx(1.5, rel=1e-9)
    assert found.paper.formula_norm_sq == pytest.approx(1.5, rel=1e-9)
    if len(set(shape)) == 1 and len(shape) == 2:  # square: the paper's assumption is furthest off
        assert found.paper.steady_norm_sq < 0.85 * 1.5
    unit = found.setting.update_norm_sq
    assert found.exact.weight_norm == pytest.approx(math.sqrt(1.5 * unit))
    assert found.exact.rms == pytest.approx(math.sqrt(1.5 * unit / math.prod(shape)))
    assert found.exact.half_life == pytest.approx(math.log(2) / found.exact.eta, rel=5e-3)


def test_matching_decays_keep_the_norm():
    setting = ParamSetting(0.01, 0.1, (64, 64), weight_decay=0.08)
    before = predict.predict(setting)
    for match in predict.matches(setting, [0.05, 0.5], [0.002, 0.03]):
        after = predict.predict(ParamSetting(match.lr, match.alpha, (64, 64), weight_decay=match.exact_decay))
        assert after.exact.steady_norm_sq == pytest.approx(before.exact.steady_norm_sq, rel=1e-9)
        after = predict.predict(ParamSetting(match.lr, match.alpha, (64, 64), weight_decay=match.paper_decay))
        assert after.paper.formula_norm_sq == pytest.approx(before.paper.formula_norm_sq, rel=1e-9)


@pytest.mark.parametrize("shape", [(16, 48), (48, 16), (24, 24)])
@pytest.mark.parametrize("adjust", MUON_ADJUST)
def test_converted_settings_make_torch_muon_take_the_same_steps(shape: tuple[int, int], adjust: str):
    setting = ParamSetting(0.02, 0.1, shape, lmo="spectral", weight_decay=0.5)
    other = equivalents.find_equivalents(setting)[f"torch Muon, {adjust}"]
    ours, theirs = (torch.nn.Parameter(torch.full(shape, 0.1)) for _ in range(2))
    scion = sn.Scion([ours], lr=0.02, alpha=0.1, lmo="spectral", weight_decay=0.5, polar="svd")
    settling = {"ns_coefficients": (15 / 8, -10 / 8, 3 / 8), "ns_steps": 30}  # converges, other than Muon's own
    muon = torch.optim.Muon([theirs], adjust_lr_fn=adjust, **settling, **other)
    generator = torch.Generator().manual_seed(0)
    for _ in range(5):
        ours.grad = torch.randn(shape, generator=generator)
        theirs.grad = ours.grad.clone()
        scion.step()
        muon.step()
    assert (ours - theirs).norm() < 0.03 * (ours - 0.1).norm()  # Muon works in bf16
    assert other["lr"] * other["weight_decay"] == pytest.approx(0.02 * 0.5)
    assert equivalents.from_muon(other["lr"], setting, adjust) == pytest.approx(0.02)


def test_the_published_scion_converts_there_and_back():
    setting = ParamSetting(0.01, 0.1, (64, 64), weight_decay=0.08)
    other = equivalents.find_equivalents(setting)["Scion"]
    assert sn.from_radius(other["gamma"], other["rho"]) == pytest.approx({"lr": 0.01, "weight_decay": 0.08})


def test_adamw_settings_have_the_same_half_life_and_the_same_steady_rms():
    setting = ParamSetting(0.001, 0.1, (64, 64), lmo="sign", weight_decay=0.08)
    adam = equivalents.find_equivalents(setting)["AdamW"]
    assert adam["lr"] * adam["weight_decay"] == pytest.approx(0.001 * 0.08)
    rms = math.sqrt(theory.adam_mean_square(adam["lr"], adam["weight_decay"], limit=True))
    formula = predict.predict(setting).paper.formula_norm_sq
    assert rms == pytest.approx(math.sqrt(formula * setting.update_norm_sq / 64**2), rel=1e-6)
    assert equivalents.from_adamw(adam["lr"], setting) == pytest.approx(0.001)


def test_the_forecast_of_a_run_is_the_theorys_with_both_decays():
    setting, plan = ParamSetting(0.05, 0.2, (32, 32), weight_decay=0.1), LrPlan(500, warmup=50, final=0.1)
    found = predict.forecast(setting, plan, start_rms=0.03)
    ratios = np.array([sn.schedule.cosine(500, warmup=50, final=0.1)(t) for t in range(500)])
    start = 0.03**2 * 32 * 32 / 32
    for decay, norms in ((0.1, found.constant), (0.1 * ratios, found.corrected)):
        n = theory.forecast(0.05 * ratios, decay, 0.2, overlap=setting.kernel, start=start)
        np.testing.assert_allclose(norms, np.sqrt(32 * n))
    assert found.constant[-1] < 0.8 * found.corrected[-1]


@pytest.mark.parametrize("schedule", predict.SCHEDULES)
def test_every_schedule_warms_up_to_the_peak(schedule: str):
    ratios = LrPlan(100, warmup=10, schedule=schedule).ratios()
    assert len(ratios) == 100
    assert ratios.max() == pytest.approx(1.0)
    assert ratios[0] < 0.2


def test_a_whole_run_is_shown_in_the_terminal_and_on_a_page(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    where = tmp_path / "forecast.html"
    arguments = (
        "predict --lr 0.05 --weight-decay 0.1 --shape 32x32 64 --steps 400 --tokens-per-step 1000 --steps-per-epoch 10"
    )
    assert main([*arguments.split(), "--page", str(where)]) == 0
    printed = capsys.readouterr().out
    assert "corrected decay" in printed
    assert "half-life, tokens" in printed
    assert "half-life, epochs" in printed
    assert where.stat().st_size > 10**6


# --- settings tuned for another optimizer


TUNED = [
    AdamW(1e-3, 0.1),
    AdamW(0.02, 0.5, (0.8, 0.9)),
    Muon(0.02, 0.1),
    Muon(0.02, 0.1, 0.9, False, "match_rms_adamw"),
]


def live(tuned: Tuned, weight: torch.nn.Parameter) -> torch.optim.Optimizer:
    """Return the optimizer that these settings are for."""
    both = {"lr": tuned.lr, "weight_decay": tuned.weight_decay}
    if isinstance(tuned, Muon):
        return torch.optim.Muon(
            [weight], momentum=tuned.momentum, nesterov=tuned.nesterov, adjust_lr_fn=tuned.adjust, **both
        )
    assert isinstance(tuned, AdamW)
    return torch.optim.AdamW([weight], betas=tuned.betas, **both)


@pytest.mark.parametrize("shape", [(24, 16), (16, 24)])
@pytest.mark.parametrize("tuned", TUNED, ids=str)
def test_settings_are_translated_as_convert_translates_an_optimizer(tuned: Tuned, shape: tuple[int, int]):
    model = torch.nn.Linear(shape[1], shape[0], bias=False)
    optimizer, _ = sn.convert(live(tuned, model.weight), model, to=sn.ScionC, output=False)
    group, ours = optimizer.param_groups[0], translation.to_scionc(tuned, shape)
    assert ours.entry.name == group["lmo"]
    for key in ("lr", "alpha", "nesterov", "steady_norm_sq"):
        assert getattr(ours, key) == pytest.approx(group[key], rel=1e-12), key


@pytest.mark.parametrize("alpha", [None, 0.3])
@pytest.mark.parametrize("tuned", TUNED, ids=str)
def test_translated_settings_come_back_as_they_were(tuned: Tuned, alpha: float | None):
    ours = translation.to_scionc(tuned, (24, 16), alpha=alpha)
    words = f"torch Muon, {tuned.adjust}" if isinstance(tuned, Muon) and alpha is None else "AdamW"
    back = equivalents.find_equivalents(ours)[words]
    assert back["lr"] * back["weight_decay"] == pytest.approx(tuned.lr * tuned.weight_decay)
    if alpha is None:
        assert back["lr"] == pytest.approx(tuned.lr)
    same = equivalents.find_equivalents(translation.to_scionc(tuned, (24, 16)))["AdamW"]
    assert equivalents.find_equivalents(ours)["AdamW"] == pytest.approx(same)  # whatever alpha is


def test_scionc_gets_lions_half_life_and_steady_rms():
    tuned = Lion(1e-4, 1.0)
    ours = translation.to_scionc(tuned, (24, 16), "sign")
    assert ours.alpha == sn.ScionC([torch.nn.Parameter(torch.zeros(2, 2))], lmo="sign").defaults["alpha"]
    assert ours.lr * ours.decay("linear") == pytest.approx(1e-4)
    assert ours.steady_norm_sq is not None
    small = 1e-4 / (2 * 1.0) * theory.lion_gain(0.9, 0.99)  # the limit eta -> 0, as in the paper's formula for ours
    assert ours.steady_norm_sq * ours.update_norm_sq / (24 * 16) == pytest.approx(small)
    assert translation.steady(tuned, (24, 16)).rms ** 2 == pytest.approx(small, rel=0.02)


@pytest.mark.parametrize("corrected", [False, True])
@pytest.mark.parametrize("tuned", [AdamW(0.01, 1.0), Muon(0.05, 0.2, 0.8)], ids=str)
def test_the_forecast_of_a_tuned_optimizer_holds_under_random_gradients(tuned: Tuned, corrected: bool):
    torch.manual_seed(0)
    weight = torch.nn.Parameter(torch.zeros(32, 32))
    optimizer, plan = live(tuned, weight), LrPlan(500, warmup=50)
    if corrected:
        sn.correct(optimizer)
    for ratio in plan.ratios():
        optimizer.param_groups[0]["lr"] = tuned.lr * float(ratio)
        weight.grad = torch.randn(32, 32)
        optimizer.step()
    found = translation.forecast(tuned, (32, 32), plan)
    here, there = (found.corrected, found.constant) if corrected else (found.constant, found.corrected)
    assert weight.norm().item() == pytest.approx(here[-1], rel=0.05)
    assert weight.norm().item() != pytest.approx(there[-1], rel=0.2)


@pytest.mark.parametrize("tuned", [AdamW(0.01, 1.0), Lion(0.005, 2.0), Muon(0.05, 0.2, 0.8)], ids=str)
def test_a_long_run_at_constant_lr_ends_at_the_steady_norm(tuned: Tuned):
    plan, steady = LrPlan(800, schedule="constant"), translation.steady(tuned, (32, 64))
    found = translation.forecast(tuned, (32, 64), plan, start_rms=steady.rms)
    assert found.constant[-1] == found.corrected[-1] == pytest.approx(steady.weight_norm, rel=1e-3)
    assert steady.rms * math.sqrt(32 * 64) == pytest.approx(steady.weight_norm)
    assert steady.half_life == theory.half_life(tuned.lr, tuned.weight_decay)


@pytest.mark.parametrize("tuned", TUNED, ids=str)
def test_the_target_for_correct_gives_the_tuned_decay(tuned: Tuned):
    weight = torch.nn.Parameter(torch.ones(24, 16))
    optimizer = sn.correct(live(tuned, weight), steady_norm_sq=tuned.target)
    weight.grad = torch.zeros_like(weight)
    optimizer.step()
    assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(tuned.weight_decay, rel=1e-9)


def test_the_target_for_a_corrected_lion_gives_the_tuned_decay():
    assert theory.lion_weight_decay_for(Lion(1e-4, 1.0).target, 1e-4, 0.9, 0.99) == pytest.approx(1.0)


@pytest.mark.parametrize("name", translation.TUNED)
def test_predict_prints_the_forecast_and_scioncs_settings(name: str, capsys: pytest.CaptureFixture[str]):
    command = f"predict --optimizer {name} --lr 0.02 --weight-decay 0.1 --shape 24x16 --steps 50".split()
    tuned = translation.TUNED[name](0.02, 0.1)
    steady, ours = translation.steady(tuned, (24, 16)), translation.to_scionc(tuned, (24, 16))
    assert main(command) == 0
    printed = capsys.readouterr().out
    lines = {line.split("│")[1].strip(): line.split("│")[2].strip() for line in printed.splitlines() if "│" in line}
    for label, value in {
        "RMS per element": steady.rms, "weight norm |θ|": steady.weight_norm, "half-life, steps": steady.half_life,
        "correct(steady_norm_sq=...)": steady.target, "lr": ours.lr, "steady_norm_sq (C²)": ours.steady_norm_sq,
    }.items():  # fmt: skip
        assert float(lines[label]) == pytest.approx(value, rel=1e-4), label
    assert "weight norm over 50 steps" in printed and "the same half-life" in printed
    assert main([*command, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert found["scionc"]["steady_norm_sq"] == pytest.approx(ours.steady_norm_sq)
    assert found["steady"]["rms"] == pytest.approx(steady.rms)
    assert len(found["forecast"]["corrected"]) == 50


def test_predict_takes_the_words_of_the_optimizer(capsys: pytest.CaptureFixture[str]):
    def found(words: str) -> dict:
        assert main(f"predict --lr 0.02 --weight-decay 0.1 --shape 24x16 --json {words}".split()) == 0
        return json.loads(capsys.readouterr().out)[0]["scionc"]

    assert found("--optimizer adamw --betas 0.8 0.9")["alpha"] == pytest.approx(0.2)
    assert found("--optimizer lion --betas 0.95 0.98")["lr"] != found("--optimizer lion")["lr"]
    plain = found("--optimizer muon --momentum 0.9 --plain-momentum --adjust match_rms_adamw")
    ours = translation.to_scionc(Muon(0.02, 0.1, 0.9, False, "match_rms_adamw"), (24, 16))
    assert (plain["lr"], plain["nesterov"]) == (pytest.approx(ours.lr), False)
    assert found("--optimizer adamw --alpha 0.3")["alpha"] == 0.3


def test_a_shape_without_translation_says_so(capsys: pytest.CaptureFixture[str]):
    command = ["predict", "--optimizer", "muon", "--lr", "0.02", "--weight-decay", "0.1", "--shape", "24x16", "24"]
    assert main(command) == 0
    assert "24: torch's Muon takes matrices only" in capsys.readouterr().out
    assert main([*command, "--json"]) == 0
    whole, refused = json.loads(capsys.readouterr().out)
    assert "scionc" in whole and "scionc" not in refused and "matrices only" in refused["refusal"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--lr 0.1 --optimizer adam --weight-decay 0.1", "choose one of scionc, adamw, lion, muon"),
        ("--lr 0.1 --optimizer adamw", "pass the --weight-decay you tuned"),
        ("--lr 0.1 --optimizer adamw --steady-norm-sq 1 --weight-decay 0.1", "--steady-norm-sq is ScionC's"),
        ("--lr 0.1 --optimizer adamw --weight-decay 0", "the norm grows forever"),
        ("--lr 0.1 --optimizer adamw --weight-decay 0.1 --momentum 0.9", "--optimizer adamw has no momentum"),
        ("--lr 0.1 --optimizer muon --weight-decay 0.1 --betas 0.9 0.99", "--optimizer muon has no betas"),
        ("--lr 0.1 --optimizer muon --weight-decay 0.1 --adjust other", "original, match_rms_adamw"),
        ("--lr 0.1 --optimizer muon --weight-decay 0.1 --shape 5", "takes matrices only"),
        ("--lr 0.1 --weight-decay 0.1 --betas 0.9 0.99", "name it with --optimizer"),
        ("--lr 0.1 --optimizer lion --weight-decay 0.1 --page x.html", "--steps"),
        ("--lr 0.1", "pass --weight-decay or --steady-norm-sq, and not both"),
        ("--lr 0.1 --weight-decay 0.1 --steady-norm-sq 1", "pass --weight-decay or --steady-norm-sq, and not both"),
        ("--lr 0.1 --weight-decay 0.1 --rms 1e200", "--rms 1e+200: must be above 0 and below 1e+50"),
        ("--lr 0.1 --weight-decay 0.1 --half-life inf", "--half-life inf: must be above 0 and below"),
        ("--lr 0.1 --weight-decay 0.1 --relative-update 3", "--relative-update 3: must be below 1"),
        ("--lr 0.1 --optimizer adamw --weight-decay 0.1 --betas 0.9 1.5", "beta2=1.5 is outside [0, 1)"),
        ("--lr 0.1 --optimizer muon --weight-decay 0.1 --momentum 1.9", "momentum=1.9 is outside [0, 1)"),
        ("--lr 0 --weight-decay 0.1", "lr 0.0: must be above 0"),
        ("--lr nan --weight-decay 0.1", "must be above 0"),
        ("--lr 0.1 --weight-decay 0", "the norm grows forever"),
        ("--lr 0.1 --weight-decay 20", "exceeds 1"),
        ("--lr 0.1 --steady-norm-sq 1e-9", "is unreachable at lr=0.1"),
        ("--lr 0.1 --weight-decay 0.1 --alpha 1.5", "alpha=1.5 is outside"),
        ("--lr 0.1 --weight-decay 0.1 --shape 3xq", "such as 384x1536"),
        ("--lr 0.1 --weight-decay 0.1 --shape 0x3", "at least 1"),
        ("--lr 0.1 --weight-decay 0.1 --lmo nothing", "unknown lmo"),
        ("--lr 0.1 --weight-decay 0.1 --shape 5 --lmo spectral", "needs 2 dimensions"),
        ("--lr 0.1 --weight-decay 0.1 --steps 0", "at least one step"),
        ("--lr 0.1 --weight-decay 0.1 --steps 10 --warmup 10", "shorter warmup"),
        ("--lr 0.1 --weight-decay 0.1 --steps 10 --schedule wave", "constant, cosine, linear"),
        ("--lr 0.1 --weight-decay 0.1 --page x.html", "--steps"),
        ("--lr 0.1 --weight-decay 0.1 --warmup 5 --final 0.1", "--warmup, --final: of a forecast; pass --steps"),
        ("--lr 0.1 --weight-decay 0.1 --shape", "--shape: pass at least one"),
        ("--lr 0.1 --weight-decay 0.1 --steps-per-epoch 0", "steps_per_epoch 0.0: must be above 0"),
        ("--lr 0.1 --weight-decay 0.1 --tokens-per-step -5", "tokens_per_step -5.0: must be above 0"),
        ("--lr 0.1 --weight-decay 0.1 --plain-momentum", "--plain-momentum: an option of another optimizer"),
        ("--lr 0.1 --optimizer adamw --weight-decay 0.1 --half-life 50", "--half-life: ScionC's"),
        ("--lr 0.1 --optimizer lion --weight-decay 0.1 --nesterov", "--nesterov: ScionC's"),
    ],
)
def test_impossible_settings_give_one_line_and_exit_code_2(
    arguments: str, message: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["predict", *arguments.split()]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1
    assert "Traceback" not in error


def test_json_beside_a_page_stays_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    words = ["predict", "--lr", "0.1", "--weight-decay", "0.1", "--shape", "8", "--steps", "3", "--json", "--page"]
    assert main([*words, str(tmp_path)]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)[0]["forecast"]
    assert said.err == f"page: {tmp_path / 'report.html'}\n"
    assert (tmp_path / "report.html").exists()


def test_unknown_options_and_commands_exit_with_2(capsys: pytest.CaptureFixture[str]):
    for arguments in (["predict", "--lr", "x"], ["predict", "--nothing"], ["nothing"]):
        with pytest.raises(SystemExit) as stopped:
            main(arguments)
        assert stopped.value.code == 2
    capsys.readouterr()


def test_an_unreachable_target_is_called_one(capsys: pytest.CaptureFixture[str]):
    assert main(["predict", "--lr", "0.01", "--steady-norm-sq", "1e-6", "--shape", "8x8"]) == 2
    assert "steady_norm_sq=1e-06 is unreachable at lr=0.01" in capsys.readouterr().err
    with pytest.raises(ValueError, match="unreachable"):
        ParamSetting(0.01, 0.1, (8, 8), steady_norm_sq=1e-6).decay("linear")


def test_rows_that_nobody_asked_for_are_left_out_where_they_are_unreachable(capsys: pytest.CaptureFixture[str]):
    setting = ParamSetting(0.9, 0.1, (8, 8), weight_decay=1.1)
    assert [match.lr for match in predict.matches(setting, [])] == [0.225, 0.45]
    with pytest.raises(ValueError, match=r"unreachable at lr=1\.8"):
        predict.matches(setting, [], [1.8])
    # C^2 is 1.06 for the vector and 0.94 for the matrix, so only one of them is in reach of an lr of 1
    assert main(["predict", "--lr", "0.5", "--weight-decay", "0.565", "--alpha", "0.5", "--shape", "8x8", "8"]) == 0
    rows = [line.split("│") for line in capsys.readouterr().out.splitlines() if line.startswith("│     1 │")]
    assert [[bool(cell.strip()) for cell in row[4:6]] for row in rows] == [[False, True]]
