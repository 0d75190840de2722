"""The training loop: interrupted runs resume as if nothing had happened; errors are reported and nothing is lost."""

import json
import math
import os
import pickle
import random
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from multiprocessing.process import BaseProcess
from pathlib import Path

import forked
import numpy as np
import pytest
import torch
from tiny_run import before_update, last_weights, tiny_run, write_tokens

from steadynorm import records
from steadynorm.lab.train import checkpoint, loop
from steadynorm.lab.train.config import Config, Optim, Schedule, plain, training_part
from steadynorm.lab.train.optimizers import build
from steadynorm.scheduler import Scheduler

OPTIMIZERS = (
    "scionc", "scion", "muonc", "adamc", "adamw", "renormalized-adamw", "lionc", "sgdc", "muon", "muon-corrected",
)  # fmt: skip


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokens(tmp_path_factory.mktemp("shards"), validation=2000, training=6000)


def config(shards: Path, out: Path, **changes: object) -> Config:
    return tiny_run(shards, out, eval_tokens=640, **({"steps": 24, "eval_every": 8, "save_every": 5} | changes))


def same(one: Path, two: Path) -> bool:
    a, b = last_weights(one), last_weights(two)
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def columns(out: Path) -> dict[str, list[float]]:
    run = records.read(out)
    return {key: values.tolist() for key, values in run.columns.items() if key != "seconds"}


@pytest.fixture(scope="module")
def unbroken(shards: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("unbroken") / "run"
    assert loop.train(config(shards, out), quiet=True).finished
    return out


def test_the_loss_falls_and_everything_is_recorded(unbroken: Path):
    run = records.read(unbroken)
    assert run.steps.tolist() == list(range(1, 25))
    assert run.columns["loss"][-3:].mean() < run.columns["loss"][:3].mean() - 0.3
    assert np.isfinite(run.columns["val_loss"][[7, 15, 23]]).all()
    assert np.isfinite(run.columns["weight_norm"]).all()
    assert np.isfinite(run.columns["forecast_norm"]).all()
    assert run.columns["tokens"][-1] == 24 * 4 * 16
    assert run.config["optim"]["name"] == "scionc"
    assert len(run.layers) == 7
    assert [path.name for path in checkpoint.list_checkpoints(unbroken / "checkpoints")] == [
        "step-000020",
        "step-000024",
    ]


class StopHereError(Exception):
    pass


def die_at(step: int, made: Config) -> None:
    """Stop a run before this update; an exception is as good as a kill: nothing is written on the way out."""

    def die(_: loop.Trainer) -> None:
        raise StopHereError

    with before_update(die, step), pytest.raises(StopHereError):
        loop.train(made, quiet=True)


@pytest.mark.parametrize("at", [1, 5, 7, 20])
def test_a_resumed_run_equals_an_unbroken_one(shards: Path, tmp_path: Path, unbroken: Path, at: int):
    made = config(shards, tmp_path / "run")
    die_at(at, made)
    assert loop.train(made, quiet=True).finished
    assert same(made.out, unbroken)
    np.testing.assert_equal(columns(made.out), columns(unbroken))


def layered(out: Path) -> list[int]:
    """Return the steps whose records keep the values of single layers."""
    run = records.read(out)
    return run.steps[np.isfinite(next(iter(run.layers.values()))["norm"])].tolist()


def test_a_long_run_thins_its_layers_and_resumes_with_the_same_steps(
    shards: Path, tmp_path: Path, unbroken: Path, monkeypatch: pytest.MonkeyPatch
):
    """`train gpt-124m-fineweb-edu` would write gigabytes, nearly all of it values of single layers."""
    assert layered(unbroken) == list(range(1, 25))  # short: all of them
    monkeypatch.setattr(loop, "_SHORT", 20)
    monkeypatch.setattr(records, "LAYERS", 5)
    whole, killed = (config(shards, tmp_path / name) for name in ("whole", "killed"))
    assert loop.train(whole, quiet=True).finished
    assert layered(whole.out) == [*range(1, 10), 11, 13, 16, 19, 23]
    assert columns(whole.out)["weight_norm"] == columns(unbroken)["weight_norm"]
    die_at(18, killed)
    assert loop.train(killed, quiet=True).finished
    assert layered(killed.out) == layered(whole.out)
    np.testing.assert_equal(columns(killed.out), columns(whole.out))
    every_other = config(shards, tmp_path / "sparse", monitor_every=2)  # 12 records: short
    loop.train(every_other, quiet=True)
    assert layered(every_other.out) == list(range(2, 25, 2))


def wait_for_step(process: BaseProcess, out: Path, step: int) -> None:
    """Wait until a running process has saved a checkpoint of this step or a later one."""
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline and process.exitcode is None:
        if any(checkpoint.step_of(path) >= step for path in checkpoint.list_checkpoints(out / "checkpoints")):
            return
        time.sleep(0.01)
    raise AssertionError("the run did not get there")


def launch(made: Config) -> subprocess.Popen[bytes]:
    """Start the run in its own process."""
    code = (
        "import pickle, sys, torch; torch.set_num_threads(1)\n"
        "from steadynorm.lab.train.loop import train\n"
        "print(train(pickle.load(sys.stdin.buffer), quiet=True).finished)"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdin is not None
    process.stdin.write(pickle.dumps(made))
    process.stdin.close()
    process.stdin = None
    return process


def killed_again_and_again(made: Config, times: int, seed: int) -> None:
    """Kill the run (kill -9) at random moments, this many times, then train to the end."""
    generator = random.Random(seed)
    for _ in range(times):
        process = launch(made)
        time.sleep(generator.uniform(1.5, 6.0))
        process.kill()
        process.communicate()
    out, error = launch(made).communicate(timeout=900)
    assert out.strip() == b"True", error.decode()


@pytest.mark.slow
def test_a_run_killed_at_20_random_moments_resumes(shards: Path, tmp_path: Path):
    longer = config(
        shards, tmp_path / "unbroken", steps=2000, save_every=20, eval_every=100, schedule=Schedule(warmup=50)
    )
    assert loop.train(longer, quiet=True).finished
    made = replace(longer, out=tmp_path / "run")
    killed_again_and_again(made, 20, seed=1)
    assert same(made.out, longer.out)
    np.testing.assert_equal(columns(made.out), columns(longer.out))


def test_sigterm_saves_and_ends_cleanly(shards: Path, tmp_path: Path, unbroken: Path):
    longer = config(shards, tmp_path / "long", steps=1_000_000, save_every=10)  # never done
    log = tmp_path / "log"
    process = forked.start(lambda: print(loop.train(longer, quiet=True).finished), log)
    wait_for_step(process, longer.out, 10)
    process.terminate()
    process.join(600)
    assert process.exitcode == 0
    assert log.read_text(encoding="utf-8") == "False\n"
    last = checkpoint.step_of(checkpoint.list_checkpoints(longer.out / "checkpoints")[-1])
    assert records.read(longer.out).steps[-1] == last  # saved where it was stopped, not at the last multiple
    # and in one process: stop after a step, go on, end with the same weights
    made = config(shards, tmp_path / "run")
    with before_update(lambda _: os.kill(os.getpid(), signal.SIGTERM), 12):
        assert not loop.train(made, quiet=True).finished
    assert loop.train(made, quiet=True).finished
    assert same(made.out, unbroken)


QUICK = ("adamc", "lionc", "muonc", "muon-corrected")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in OPTIMIZERS]
)
def test_every_optimizer_trains_and_resumes(shards: Path, tmp_path: Path, name: str):
    lr = {"sgdc": 0.5, "scionc": 0.02, "scion": 0.02, "muon": 0.02, "muonc": 0.02, "muon-corrected": 0.02}.get(
        name, 3e-3
    )
    made = config(
        shards,
        tmp_path / "one",
        steps=12,
        save_every=6,
        optim=Optim(name, lr=lr, output_lr=10 * lr, steady_norm_sq=0.5),
    )
    assert loop.train(made, quiet=True).finished
    run = records.read(made.out)
    assert run.columns["loss"][-1] < run.columns["loss"][0]
    other = replace(made, out=tmp_path / "two")
    die_at(8, other)
    assert loop.train(other, quiet=True).finished
    assert same(made.out, other.out)


def test_micro_batches_give_the_same_update(shards: Path, tmp_path: Path):
    one, two = (config(shards, tmp_path / str(m), steps=3, micro_batch=m) for m in (4, 2))
    for each in (one, two):
        loop.train(each, quiet=True)
    for a, b in zip(last_weights(one.out).values(), last_weights(two.out).values(), strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=2e-3)  # bf16 polar factors of nearly equal gradients


def test_clipping_records_the_norm_before_it(shards: Path, tmp_path: Path):
    free, clipped = (
        config(shards, tmp_path / str(c), steps=2, clip=c, optim=Optim("adamw", lr=1e-3)) for c in (None, 0.01)
    )
    for each in (free, clipped):
        loop.train(each, quiet=True)
    norms = [records.read(each.out).columns["grad_norm"] for each in (free, clipped)]
    assert norms[1][0] == pytest.approx(norms[0][0], rel=1e-5)
    assert norms[1][0] > 0.01


def test_a_folder_with_another_configuration_is_refused(shards: Path, unbroken: Path):
    made = config(shards, unbroken)
    with pytest.raises(ValueError, match=r"optim\.lr 0\.02 -> 0\.03.*choose another --out"):
        loop.train(replace(made, optim=replace(made.optim, lr=0.03)), quiet=True)


def test_a_finished_run_is_left_alone(shards: Path, unbroken: Path):
    before = (unbroken / records.FILE).read_bytes()
    assert loop.train(config(shards, unbroken), quiet=True).finished
    assert (unbroken / records.FILE).read_bytes() == before


def test_two_processes_do_not_train_in_one_folder(shards: Path, tmp_path: Path):
    made = config(shards, tmp_path / "run", steps=1_000_000)  # never done
    process = forked.start(lambda: loop.train(made, quiet=True), tmp_path / "log")
    try:
        wait_for_step(process, made.out, 5)
        with pytest.raises((ValueError, OSError), match="another process is training in"):
            loop.train(made, quiet=True)
    finally:
        process.kill()
        process.join()


def test_a_damaged_checkpoint_is_reported_and_the_one_before_it_is_used(shards: Path, tmp_path: Path, unbroken: Path):
    out = tmp_path / "run"
    shutil.copytree(unbroken, out)
    newest = checkpoint.list_checkpoints(out / "checkpoints")[-1] / "state.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(bytes(content))
    with pytest.warns(UserWarning, match=r"state\.pt: damaged.*the one before"):
        assert loop.train(config(shards, out), quiet=True).finished
    assert same(out, unbroken)


def test_no_whole_checkpoint_is_an_error_that_says_what_to_do(tmp_path: Path):
    folder = tmp_path / "step-000001"
    folder.mkdir()
    (folder / "manifest.json").write_text("{}", encoding="utf-8")
    with (
        pytest.warns(UserWarning, match="cannot be read"),
        pytest.raises(checkpoint.CheckpointError, match="remove the folder"),
    ):
        checkpoint.latest(tmp_path)


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    model = {"w": torch.ones(3)}
    checkpoint.save(tmp_path, 1, {"step": 1}, model, keep=1)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    with pytest.raises(OSError, match="full"):
        checkpoint.save(tmp_path, 2, {"step": 2}, model, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000001"]
    assert checkpoint.load(tmp_path / "step-000001")[2] == {"step": 1}


def test_a_loss_that_is_not_finite_stops_and_names_the_last_good_checkpoint(shards: Path, tmp_path: Path):
    made = config(shards, tmp_path / "run")

    @torch.no_grad()
    def spoil(trainer: loop.Trainer) -> None:
        next(trainer.parts.model.parameters()).fill_(math.nan)

    with before_update(spoil, 7), pytest.raises(loop.DivergedError, match=r"step 8 is not finite.*step-000005"):
        loop.train(made, quiet=True)
    assert [path.name for path in checkpoint.list_checkpoints(made.out / "checkpoints")] == ["step-000005"]
    assert loop.train(made, quiet=True).finished


def test_weights_that_are_not_finite_are_not_saved(shards: Path, tmp_path: Path):
    """A gradient can overflow where the loss does not, and torch's AdamW takes it."""
    made = config(shards, tmp_path / "run", steps=12, optim=Optim("adamw", lr=1e-3))

    def spoil(trainer: loop.Trainer) -> None:
        weight = next(trainer.parts.model.parameters())
        handle = weight.register_hook(lambda grad: (handle.remove(), grad * torch.inf)[1])

    with before_update(spoil, 9), pytest.raises(loop.DivergedError, match=r"after step 10 are not finite.*step-000005"):
        loop.train(made, quiet=True)
    assert [path.name for path in checkpoint.list_checkpoints(made.out / "checkpoints")] == ["step-000005"]
    assert loop.train(made, quiet=True).finished


def advance(optimizer: torch.optim.Optimizer, scheduler: Scheduler, steps: int) -> None:
    for _ in range(steps):
        optimizer.step()  # there are no gradients: nothing moves
        scheduler.step()


def test_schedules_write_what_they_say(shards: Path, tmp_path: Path):
    """Under matched momentum, hidden groups keep lr and raise alpha, and the output layer follows the cosine."""
    optim = Optim("scionc", lr=0.02, output_lr=0.2, steady_norm_sq=0.5)
    model = torch.nn.Sequential(
        torch.nn.Embedding(8, 4), torch.nn.Linear(4, 4, bias=False), torch.nn.Linear(4, 8, bias=False)
    )
    model.get_output_embeddings = lambda: model[2]  # pyright: ignore
    [(optimizer, scheduler)] = build(model, optim, Schedule(momentum="matched", alpha_end=0.5), 100)
    groups = {group["name"]: group for group in optimizer.param_groups}
    advance(optimizer, scheduler, 50)
    assert groups["hidden"]["lr"] == pytest.approx(0.02)
    assert groups["hidden"]["alpha"] == pytest.approx(2 / (1 + 19 / 4))
    assert groups["output"]["lr"] == pytest.approx(0.1)
    assert groups["output"]["alpha"] == 0.1
    [(optimizer, scheduler)] = build(model, optim, Schedule(steady_norm_sq_end=0.1), 100)
    advance(optimizer, scheduler, 50)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert groups["hidden"]["steady_norm_sq"] == pytest.approx(0.3)
    with pytest.raises(ValueError, match="needs scion or scionc"):
        build(model, Optim("adamw"), Schedule(momentum="matched"), 100)


def test_the_third_arm_leaves_the_momentum_factor_out_of_the_decay(shards: Path):
    model = torch.nn.Linear(4, 4, bias=False)
    optim = Optim("scionc", lr=0.02, alpha=0.1, steady_norm_sq=0.5)
    decays = []
    for alone in (False, True):
        model.get_output_embeddings = lambda: None  # pyright: ignore
        holder = torch.nn.Sequential(model, torch.nn.Linear(4, 2, bias=False))
        holder.get_classifier = lambda h=holder: h[1]  # pyright: ignore
        [(optimizer, scheduler)] = build(
            holder, optim, Schedule("constant", momentum="linear", decay_by_lr_alone=alone), 100
        )
        advance(optimizer, scheduler, 99)
        decays.append(optimizer.weight_decay_of(model.weight))  # pyright: ignore
    assert decays[1] == pytest.approx(19 / (2 * 0.5) * 0.02)
    assert decays[0] < 0.1 * decays[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"steps": 0}, "steps=0"),
        ({"micro_batch": 3}, "does not divide batch=4"),
        ({"clip": 0.0}, "must be above 0"),
        ({"schedule": Schedule(warmup=24)}, "less than steps=24"),
        ({"schedule": Schedule(warmup=-3)}, "must be 0 or more"),
    ],
)
def test_impossible_configurations_are_refused(shards: Path, tmp_path: Path, changes: dict, message: str):
    with pytest.raises(ValueError, match=message):
        loop.train(config(shards, tmp_path / "run", **changes), quiet=True)
    assert not (tmp_path / "run").exists()


def test_the_place_of_a_run_is_not_part_of_its_configuration(shards: Path, tmp_path: Path):
    one, two = (training_part(plain(config(shards, tmp_path / name, keep=keep))) for name, keep in (("a", 1), ("b", 3)))
    assert one == two
    assert "optim" in one
    assert json.dumps(one)


def test_a_recipe_without_its_data_is_refused_and_the_folder_can_be_used_again(shards: Path, tmp_path: Path):
    made = config(shards, tmp_path / "run", steps=2)
    with pytest.raises(ValueError, match=r"vocabulary of 64 tokens and needs its data: pass --task.data"):
        loop.train(replace(made, task=replace(made.task, data=None)), quiet=True)
    assert loop.train(made, quiet=True).finished
