"""Declarations, commands and addresses, and the pool with tiny real runs: reuse, resuming, failures, locks."""

import json
import os
import pickle
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import forked
import numpy as np
import pytest
import tyro

from steadynorm import records, theory
from steadynorm.cli import main
from steadynorm.cli.commands import command_of
from steadynorm.files import lock
from steadynorm.lab import origin, paper
from steadynorm.lab.models import GPTConfig
from steadynorm.lab.paper import baselines, metrics, pool, runner, slim_records
from steadynorm.lab.paper.claims import difference
from steadynorm.lab.paper.experiment import Context, Outcome, TrainedExperiment
from steadynorm.lab.paper.experiments.norm_figures import COLUMNS
from steadynorm.lab.paper.plots import table_of_metrics
from steadynorm.lab.paper.runs import Runs, address, slug
from steadynorm.lab.train.config import Config, Gpt, plain, training_part
from steadynorm.lab.train.recipes import RECIPES

TRAINED = [each for each in paper.EXPERIMENTS.values() if isinstance(each, TrainedExperiment)]
STEPS = 6


def declared(name: str) -> TrainedExperiment:
    experiment = paper.get(name)
    assert isinstance(experiment, TrainedExperiment)
    return experiment


def parsed(command: str) -> Config:
    words = shlex.split(command)
    words = words[words.index("train") :]
    config = tyro.cli(command_of(words), args=words)
    assert isinstance(config, Config)
    return config


# Declarations


@pytest.mark.parametrize("scale", ["desk", "paper"])
@pytest.mark.parametrize("experiment", TRAINED, ids=lambda each: each.name)
def test_every_declaration_builds_and_its_commands_parse_back(experiment: TrainedExperiment, scale: str):
    plan, resources = (
        experiment.plan(Context(Path(), scale=scale)),
        paper.Resources(data=Path("DATA") if scale == "paper" else None),
    )
    jobs = runner.jobs(plan, resources)
    printed = runner.dry_run(plan, resources)
    assert len(printed) == len(jobs) == len(plan.configs)
    some = list(zip(jobs.values(), printed, strict=True))[:: max(1, len(jobs) // 2)]  # parsing takes its time
    for job, line in some:
        assert parsed(line) == job.config
        assert line.startswith("torchrun --standalone --nproc-per-node 8" if scale == "paper" else "steadynorm train")
    for config in plan.configs.values():
        config.check()


def test_the_paper_scale_has_the_papers_numbers():
    vit, gpt = baselines.VIT["paper"], baselines.GPT["paper"]
    assert [vit.steps(epochs) for epochs in (30, 60, 90, 150, 300)] == [37534, 75068, 112603, 187671, 375342]
    assert vit.target() == 1.1875
    assert vit.target(1.5) == pytest.approx(0.791666, abs=1e-6)
    assert vit.scionc(end=0.25).schedule.steady_norm_sq_end == 0.296875
    assert vit.scion(decay=1.5).optim.output_weight_decay == pytest.approx(0.05 * 0.12)
    assert vit.adam().schedule.warmup == 10_000
    assert (gpt.steps(100), gpt.target()) == (381_469, 5.79833984375)
    assert declared("fig-momentum-linear").arms(vit)["alpha 0.1"].optim.steady_norm_sq == 2.375


def arms_at_paper_scale(name: str) -> list[Config]:
    return list(declared(name).arms(baselines.VIT["paper"]).values())


def test_adamw_and_adamc_are_run_with_both_of_the_papers_decays():
    arms = arms_at_paper_scale("fig-adamc")
    pairs = sorted((each.optim.name, each.optim.weight_decay) for each in arms)
    assert pairs == [("adamc", 0.1), ("adamc", 0.2), ("adamw", 0.1), ("adamw", 0.2)]
    for each in arms:  # nothing but optimizer and decay differs
        assert replace(each, optim=arms[0].optim) == arms[0]
        assert (each.optim.lr, each.optim.betas, each.schedule.warmup, each.clip) == (1e-3, (0.9, 0.999), 10_000, 1.0)


@pytest.mark.parametrize(
    ("name", "start", "lr"),
    [("fig-momentum-gamma-prime", 0.1, 0.01), ("fig-momentum-gamma-prime-slow", 0.02, 1.919e-3)],
)
def test_both_gamma_prime_figures_stop_momentum_at_the_papers_limits(name: str, start: float, lr: float):
    """The paper has alpha_max = 0.2, 0.5 and 1, and the output layer with alpha 0.1, lr 0.2 and decay 0.004."""
    arms = arms_at_paper_scale(name)
    matched = [each for each in arms if each.schedule.momentum == "matched-gamma-prime"]
    assert [each.schedule.alpha_end for each in matched] == [0.2, 0.5, 1.0]
    for each in matched:
        assert (each.optim.alpha, each.optim.lr) == (start, pytest.approx(lr, rel=1e-3))
        assert (each.optim.output_lr, each.optim.output_weight_decay) == (0.2, 0.004)
        assert each.optim.steady_norm_sq == 1.1875
        assert start == 0.1 or each.optim.output_alpha == 0.1
    cosines = [each.optim.alpha for each in arms if each.schedule.momentum == "constant"]
    assert cosines == [0.1, 0.02][: 1 if start == 0.1 else 2]


def test_sweeps_have_three_seeds_at_both_scales(capsys: pytest.CaptureFixture[str]):
    """At paper scale there are 4, 4 + 4 (Scion's again) and 3 settings, 5 budgets and 3 seeds."""
    for name, count in (("table-sweep-scion", 60), ("table-sweep-constant", 120), ("table-sweep-cosine", 45)):
        assert main(["paper", "run", name, "--scale", "paper", "--dry-run"]) == 0
        printed = capsys.readouterr().out.splitlines()
        assert len(set(printed)) == count
        assert sum("--seed 2" in line for line in printed) == count / 3
        assert declared(name).plan(Context(Path())).seeds == (0, 1, 2)


def test_the_listing_names_arms_panels_and_seeds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "400")
    assert main(["paper", "list"]) == 0
    printed = capsys.readouterr().out
    for words in ("AdamC, AdamW's decay", "gamma' matched, alpha 0.02 to 0.5", "1:4, 384 x 1536", "eta 1e-05"):
        assert words in printed
    assert "3 seeds of: Scion, decay x 0.5" in printed


def test_runs_missing_from_a_folder_count_as_not_run_yet(tmp_path: Path):
    """Declared arms, seeds and panels without records are named, also in the tables of those that have some."""
    experiment = tiny(seeds=2)
    plan = experiment.plan(Context(tmp_path))
    empty = runner.read(experiment, Context(tmp_path))
    assert runner.not_run(experiment, Context(tmp_path)) == ["seeds 0, 1 of 2"]
    assert table_of_metrics(empty, {"loss": metrics.LOSS}).rows == [["loss", "not run yet", "not run yet"]]
    for key, config in plan.configs.items():
        if key[0] == "a" and key[2] == 0:
            recorder = records.Recorder(
                tmp_path / "records" / slug(key) / records.FILE, name="a", config=training_part(plain(config))
            )
            with recorder:
                recorder.write({"step": config.steps, "val_loss": 1.0, "seconds": 1.0})
    context = Context(tmp_path, seeds=1, only=("a",))  # how the folder was made does not hide what it lacks
    assert runner.not_run(experiment, context) == ["a (seeds 1)", "b"]
    steady = paper.get("fig-steady-state")
    only = Context(tmp_path, scale="paper", only=("vector", "square"))
    assert runner.not_run(steady, only) == ["1:4, 384 x 1536"]


def test_the_papers_decay_by_lr_only_starts_from_that_of_alpha_0_1():
    """lambda_t = 0.04 gamma_t / gamma, whatever alpha does."""
    config = declared("fig-momentum-linear").arms(baselines.VIT["paper"])["alpha 0.01 to 1, λ by lr alone"]
    assert config.schedule.decay_by_lr_alone
    assert theory.weight_decay_for(config.optim.steady_norm_sq, config.optim.lr, config.optim.alpha) == pytest.approx(
        0.04
    )


def test_the_options_of_every_run_parse_back(tmp_path: Path):
    base = RECIPES["vit"]
    config = replace(
        base, out=tmp_path / "a b", clip=0.5, seed=3, compile=True, bf16=True, micro_batch=8, tensorboard=False, name="x y",
        task=replace(base.task, crop_scale=(0.1, 0.9), eval_images=None, data=Path("some/where")),
        optim=replace(base.optim, name="adamw", betas=(0.8, 0.95), weight_decay=None, nesterov=True, lr=1e-17),
        schedule=replace(base.schedule, lr="linear", steady_norm_sq_end=0.5, decay_by_lr_alone=True),
    )  # fmt: skip
    assert parsed(shlex.join(pool.train_command(config, "vit"))) == config
    with pytest.raises(ValueError, match="a Vit where the recipe has Gpt"):
        pool.options(config, "gpt")


def test_an_address_depends_only_on_what_is_trained():
    config = baselines.VIT["desk"].configure(baselines.VIT["desk"].scionc(), 30, 0)
    moved = replace(config, out=Path("elsewhere"), keep=7, save_every=3, device="cpu", tensorboard=True, name="other")
    assert address(config) == address(moved)
    others = [
        replace(config, seed=1),
        replace(config, steps=config.steps + 1),
        replace(config, optim=replace(config.optim, lr=0.02)),
        replace(config, schedule=replace(config.schedule, steady_norm_sq_end=0.1)),
    ]
    assert len({address(each) for each in (config, *others)}) == 5


def test_experiments_share_runs():
    plans = {each.name: each.plan(Context(Path())) for each in TRAINED}
    folders = {name: {c.out for c in plan.in_pool(Path("p")).values()} for name, plan in plans.items()}
    assert len(folders["fig-scionc"] & folders["fig-output-layer"]) == 3  # Scion, longest budget, 3 seeds
    assert folders["table-sweep-scion"] < folders["table-sweep-constant"]
    count, seconds = runner.estimate(list(plans.values()))
    assert count < sum(map(len, folders.values()))
    assert seconds / 2 < 6 * 3600  # on two cores


def test_the_quick_scale_is_one_seed_of_the_shortest_budget():
    plan = declared("table-vit").plan(Context(Path(), quick=True))
    assert {(budget, seed) for _, budget, seed in plan.configs} == {(30, 0)}
    assert len(plan.configs) == 5


# Judging


def first_verdict(outcome: Outcome) -> str:
    return next(iter(outcome.claims.values())).verdict


def made_up(config: Config, norms_at_end: float, accuracy: float) -> records.Run:
    """Make a run whose norms go from 10 in the middle to this at the end."""
    steps = np.arange(1, 61) * config.steps // 60
    shape = np.where(steps / config.steps < 0.8, 10.0, norms_at_end)
    columns = dict.fromkeys((*COLUMNS, "spectral_norm", "sign_norm"), shape)
    columns |= {"val_accuracy": np.full(60, accuracy), "val_loss": np.full(60, 1.0), "seconds": np.full(60, 1.0)}
    return records.Run("r", training_part(plain(config)), "", None, steps, columns, {})


@pytest.mark.parametrize(("scion_end", "verdict"), [(4.0, "holds"), (9.9, "does not hold")])
def test_stability_needs_a_baseline_that_moves(scion_end: float, verdict: str):
    experiment = declared("fig-scionc")
    plan = experiment.plan(Context(Path()))
    jitter = np.random.default_rng(0)
    found = {
        key: made_up(config, (scion_end if key[0] == "Scion" else 9.9) + 0.01 * jitter.standard_normal(), 0.5)
        for key, config in plan.configs.items()
    }
    assert first_verdict(experiment.judge(Runs(plan, found, {}))) == verdict
    swapped = {key: found["Scion" if key[0] != "Scion" else "ScionC (cosine)", *key[1:]] for key in found}
    if verdict == "holds":  # the effect the other way round: refuted
        assert first_verdict(experiment.judge(Runs(plan, swapped, {}))) == "does not hold"


def test_missing_runs_make_their_claims_untestable_and_leave_the_others():
    experiment = declared("table-vit")
    plan = experiment.plan(Context(Path()))
    jitter = np.random.default_rng(0)
    found = {
        key: made_up(config, 9.0, 0.5 + 0.001 * jitter.standard_normal())
        for key, config in plan.configs.items()
        if key[0] != "AdamC"
    }
    missing = {key: "exit code 2" for key in plan.configs if key[0] == "AdamC"}
    outcome = experiment.judge(Runs(plan, found, missing))
    verdicts = {claim[:10]: finding for claim, finding in outcome.claims.items()}
    assert verdicts["AdamC perf"].verdict == "open"
    assert "exit code 2" in verdicts["AdamC perf"].figure
    assert verdicts["ScionC (co"].verdict == "holds"


# Real runs, tiny


TINY = replace(
    baselines.GPT["desk"],
    base=replace(
        baselines.GPT["desk"].base,
        task=Gpt(model=GPTConfig(layers=1, width=16, heads=2, vocab=257, context=16), length=16, eval_tokens=64),
        batch=2,
        bf16=False,
    ),
    steps_per_unit=1,
)


def tiny(*, broken: bool = False, steps: int = STEPS, seeds: int = 2) -> TrainedExperiment:
    def arms(baseline: baselines.Baseline) -> dict[str, Config]:
        b = baseline.scionc()
        return {"a": baseline.scion(), "b": replace(b, micro_batch=7) if broken else b}

    return TrainedExperiment(
        "tiny",
        "t",
        "f",
        baselines={"desk": TINY, "paper": TINY},
        arms=arms,
        claims={"equal": difference(metrics.LOSS, "a", "b").at_most(9.0, "a - b")},
        show=lambda _: ([], {}),
        columns=COLUMNS,
        budgets=(steps,),
        seeds=seeds,
    )


def fork(job: pool.Job, _: bool) -> forked.Command:
    return forked.Command(job.command[1:], job.folder / pool.LOG)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, runner.Finished]:
    """Train an experiment of four runs, once for all tests here."""
    root = tmp_path_factory.mktemp("paper")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "_popen", fork)
        done = paper.run_experiment(tiny(), Context(root / "out"), paper.Resources(root / "pool"), "the command")
    return root, done


def test_an_experiment_runs_from_end_to_end(trained: tuple[Path, runner.Finished]):
    root, done = trained
    assert not done.failed
    assert done.page.exists()
    summary = json.loads((root / "out" / "summary.json").read_text(encoding="utf-8"))
    assert (summary["experiment"], summary["command"], summary["runs"]) == ("tiny", "the command", 4)
    assert (summary["seeds"], summary["missing"]) == ([0, 1], [])
    took = [records.read(run).columns["seconds"][-1] for run in (root / "pool").glob("*/*")]
    assert summary["seconds"] == pytest.approx(sum(took), abs=0.1)
    assert first_verdict(done.outcome) == "holds"
    kept = records.read(root / "out" / "records" / "a-6-s0")
    assert kept.steps[-1] == STEPS
    assert kept.origin == {key: summary[key] for key in ("commit", "machine")} == origin.describe()
    assert {"hidden_norm", "weight_norm", "val_loss", "seconds"} <= set(kept.columns)
    assert not kept.layers
    full = records.read(next((root / "pool").glob("*/gpt-scion-6-s0-*")))
    by_hand = np.sqrt(sum(each["norm"][-1] ** 2 for name, each in full.layers.items() if name != "embedding.weight"))
    assert kept.columns["hidden_norm"][-1] == pytest.approx(by_hand, rel=1e-5)
    assert not list((root / "pool").rglob("checkpoints"))


def test_finished_runs_are_used_again(trained: tuple[Path, runner.Finished], monkeypatch: pytest.MonkeyPatch):
    root, done = trained
    monkeypatch.setattr(pool, "_popen", lambda *_: pytest.fail("nothing is left to train"))
    again = paper.run_experiment(tiny(), Context(root / "again"), paper.Resources(root / "pool"))
    assert again.outcome.claims == done.outcome.claims
    kept = [(root / where / "records" / "b-6-s1" / records.FILE).read_bytes() for where in ("out", "again")]
    assert kept[0] == kept[1]


def test_a_finished_folder_is_judged_without_the_pool(trained: tuple[Path, runner.Finished]):
    root, done = trained
    name, context = runner.context_of(root / "out")
    assert (name, context.kept_only) == ("tiny", True)
    outcome, facts = runner.judge(tiny(), context)
    assert outcome.claims == done.outcome.claims
    assert facts["missing"] == []
    changed = runner.judge(tiny(steps=STEPS + 1), context)  # declared anew: what was kept is of another configuration
    assert first_verdict(changed[0]) == "open"


def test_a_run_that_fails_stops_no_other(
    tmp_path: Path, trained: tuple[Path, runner.Finished], monkeypatch: pytest.MonkeyPatch
):
    """The one that fails is a real command."""
    root, _ = trained
    popen = pool._popen
    monkeypatch.setattr(pool, "_popen", lambda job, one: (popen if job.config.micro_batch == 7 else fork)(job, one))
    done = paper.run_experiment(tiny(broken=True, seeds=1), Context(tmp_path / "out"), paper.Resources(root / "pool2"))
    [why] = done.failed.values()
    assert "does not divide" in why
    summary = json.loads((tmp_path / "out" / "summary.json").read_text(encoding="utf-8"))
    assert summary["missing"] == ["b-6-s0"]
    assert first_verdict(done.outcome) == "open"
    assert (tmp_path / "out" / "records" / "a-6-s0" / records.FILE).exists()


@pytest.mark.slow
def test_a_killed_run_resumes_and_ends_the_same(tmp_path: Path):
    """SIGTERM goes to the command itself, which stops its run after a save; the same command finishes it."""
    config = replace(TINY.configure(TINY.scionc(), 800, 0), save_every=100, eval_every=200, out=tmp_path / "run")
    job = "from tests_job import job, pool; print(pool.train_all([job], 1))"
    (tmp_path / "tests_job.py").write_text(
        "import pickle, pathlib\nfrom steadynorm.lab.paper import pool\n"
        f"job = pool.Job(*pickle.loads(pathlib.Path({str(tmp_path / 'job')!r}).read_bytes()))\n",
        encoding="utf-8",
    )
    (tmp_path / "job").write_bytes(pickle.dumps((config, pool.train_command(config, "gpt"))))
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])}
    process = subprocess.Popen([sys.executable, "-c", job], env=environment, stderr=subprocess.PIPE, encoding="utf-8")
    deadline = time.monotonic() + 600
    while records.last_step(config.out / records.FILE) < 20 and time.monotonic() < deadline:
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=600)
    assert process.returncode != 0
    assert "1 of 1 runs to go; the same command resumes them" in said
    stopped = records.last_step(config.out / records.FILE)
    assert 20 <= stopped < 800
    assert not pool.finished(config)
    with lock(config.out, busy="the child was left behind"):
        pass
    assert pool.train_all([pool.Job(config, pool.train_command(config, "gpt"))], 1) == {}
    assert pool.finished(config)
    steps = records.read(config.out).steps
    assert len(steps) == len(set(steps.tolist()))


def test_a_command_waits_for_a_run_that_another_command_trains(
    trained: tuple[Path, runner.Finished], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """Its folder is claimed, so we wait and use the finished run without training."""
    root, _ = trained
    job = next(iter(runner.jobs(tiny().plan(Context(root)), paper.Resources(root / "pool")).values()))
    finished, away = job.folder / records.FILE, job.folder / "away"
    other = pool._claim(job.folder)
    assert other is not None
    finished.rename(away)
    monkeypatch.setattr(pool, "_popen", lambda *_: pytest.fail("the other command trains it"))

    def end() -> None:
        away.rename(finished)
        other.close()

    timer = threading.Timer(0.5, end)
    timer.start()
    assert pool.train_all([job], 2) == {}
    timer.join()
    assert "waiting for 1 run" in capsys.readouterr().err


def test_a_claimed_run_belongs_to_one_command(tmp_path: Path):
    held = pool._claim(tmp_path / "run")
    assert held is not None
    assert pool._claim(tmp_path / "run") is None
    held.close()
    with lock(tmp_path / "run"):  # a run that its command left behind
        assert pool._claim(tmp_path / "run") is None


# Bad input


def test_two_commands_share_one_folder(tmp_path: Path):
    with lock(tmp_path), pytest.raises(ValueError, match="another command is writing"):
        paper.run_experiment(tiny(), Context(tmp_path), paper.Resources(tmp_path / "pool"))


@pytest.mark.parametrize(
    ("summary", "said"),
    [
        ('{"experiment": "tiny"}', "another version of steadynorm"),
        ("not json", "summary.json: not whole .*remove it: finished runs are kept"),
        ('{"schema": "steadynorm-experiment", "version": 99, "experiment": "tiny"}', "version 99"),
        ('{"schema": "steadynorm-experiment", "version": 1, "experiment": "fig-x"}', "holds fig-x, not tiny"),
    ],
)
def test_a_folder_of_something_else_is_refused(tmp_path: Path, summary: str, said: str):
    (tmp_path / "summary.json").write_text(summary, encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        paper.run_experiment(tiny(), Context(tmp_path), paper.Resources(tmp_path / "pool"))
    assert (tmp_path / "summary.json").read_text(encoding="utf-8") == summary


def test_missing_data_is_reported_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("STEADYNORM_CACHE", str(tmp_path / "empty"))
    where = ["--out", str(tmp_path / "out"), "--pool", str(tmp_path / "pool")]
    assert main(["paper", "run", "table-vit", "--quick", *where]) == 2
    assert "steadynorm data get cifar10" in capsys.readouterr().err
    assert not (tmp_path / "pool").exists()
    assert main(["paper", "run", "table-vit", "--scale", "paper", *where]) == 2
    assert "--data, ImageNet" in capsys.readouterr().err


def test_bad_words_on_the_command_line_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["paper", "run", "table-vitt"]) == 2
    assert "did you mean 'table-vit'" in capsys.readouterr().err
    assert main(["paper", "run", "table-vit", "--only", "Sgd", "--dry-run"]) == 2
    assert "the arms of table-vit are AdamW" in capsys.readouterr().err
    assert main(["paper", "run", "table-vit", "--seeds", "0"]) == 2
    assert main(["paper", "run", "table-vit", "--jobs", "0", "--out", str(tmp_path)]) == 2
    assert "at least 1" in capsys.readouterr().err
    assert main(["paper", "run", "fig-overlap", "--dry-run"]) == 2
    assert "no commands to print" in capsys.readouterr().err


def test_a_dry_run_of_all_prints_every_run_once(capsys: pytest.CaptureFixture[str]):
    assert main(["paper", "run", "all", "--quick", "--dry-run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == len(set(lines)) > 20
    assert all(line.startswith("steadynorm train ") for line in lines)


def test_kept_records_are_slim(tmp_path: Path):
    steps = np.arange(1, 1001)
    layers = {
        "a.weight": {"norm": np.full(1000, 3.0), "excess": np.full(1000, 0.12345678)},
        "head.weight": {"norm": steps * 1.0},
    }
    columns = {
        "weight_norm": steps * 1.0,
        "loss": steps * 1.0,
        "val_loss": np.where(steps % 500 == 0, 2.0, np.nan),
        "seconds": steps * 0.1,
    }
    run = records.Run("r", {"steps": 1000}, "2026-01-01", None, steps, columns, layers)
    slim_records.keep(run, tmp_path / records.FILE, "slim", ("weight_norm", "hidden_norm"), ("excess",))
    kept = records.read(tmp_path)
    assert len(kept.steps) <= slim_records.MOST_RECORDS
    assert set(kept.columns) == {"weight_norm", "hidden_norm", "val_loss", "seconds"}
    assert np.isfinite(kept.columns["val_loss"]).sum() == 2
    np.testing.assert_allclose(kept.columns["hidden_norm"], 3.0)
    assert kept.layers["a.weight"]["excess"][0] == 0.123457
    assert (kept.created, kept.columns["seconds"][-1]) == ("2026-01-01", 100.0)
    slim_records.keep(run, tmp_path / records.FILE, "slim", ())  # validation alone: two records
    assert len(records.read(tmp_path).steps) == 2
