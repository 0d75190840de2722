"""Options of runs that experiments vary: untied embeddings and their rows, polar factors, and what a hold leaves alone."""

import re
from dataclasses import replace
from pathlib import Path
from typing import get_args

import pytest
import torch

from steadynorm import records
from steadynorm.cli import main
from steadynorm.groups.builder import param_groups
from steadynorm.lab.data.encoders import BYTE_VOCAB
from steadynorm.lab.data.shards import write_shard
from steadynorm.lab.models import GPT, GPTConfig
from steadynorm.lab.paper import EXPERIMENTS
from steadynorm.lab.paper.experiment import Context, TrainedExperiment
from steadynorm.lab.train import token_rows
from steadynorm.lab.train.config import Config, Gpt, Optim, OptimizerName, Schedule, plain, training_part
from steadynorm.lab.train.loop import train
from steadynorm.lab.train.optimizers import build
from steadynorm.lab.train.recipes import RECIPES, with_optimizer
from steadynorm.lab.train.unused import refuse_unused

MODEL = GPTConfig(layers=1, width=16, heads=2, vocab=BYTE_VOCAB, context=16)


def built(optim: Optim, model: GPTConfig = MODEL):
    [(optimizer, _)] = build(GPT(model), optim, Schedule(), 10)
    return {group["name"]: group for group in optimizer.param_groups}


def test_an_untied_gpt_has_an_output_layer_of_its_own():
    torch.manual_seed(0)
    untied = GPT(replace(MODEL, tied=False))
    assert untied.get_output_embeddings() is untied.head
    roles = {name: group["name"] for group in param_groups(untied) for name, _ in group["params"]}
    assert (roles["embedding.weight"], roles["head.weight"]) == ("embedding", "output")
    tokens = torch.randint(0, BYTE_VOCAB, (1, 5))
    before = untied(tokens)
    with torch.no_grad():
        assert untied.head is not None
        untied.head.weight.mul_(2)
    torch.testing.assert_close(untied(tokens), 2 * before)
    tied = GPT(MODEL)
    assert tied.get_output_embeddings() is tied.embedding
    assert "head.weight" not in tied.state_dict()


def test_a_run_is_the_same_as_before_these_options_came():
    """The address of a run is a hash of its configuration, so old runs are found only if new options leave it alone."""
    config = Config(task=Gpt(model=MODEL), out=Path("run"), steps=3, batch=2)
    values = training_part(plain(config))
    assert not {"polar", "own_time", "hold"} & values["optim"].keys()
    assert "tied" not in values["task"]["model"] and "tokenizer" not in values["task"]
    untied = replace(config, task=Gpt(model=replace(MODEL, tied=False)), optim=Optim(own_time=False, polar="svd"))
    values = training_part(plain(untied))
    assert values["task"]["model"]["tied"] is False
    assert (values["optim"]["own_time"], values["optim"]["polar"]) == (False, "svd")


@pytest.mark.parametrize("name", ["scion", "scionc"])
def test_polar_factors_and_own_time_reach_every_group(name):
    for group in built(Optim(name, polar="newton-schulz", own_time=False), replace(MODEL, tied=False)).values():
        assert (group["polar"], group["own_time"]) == ("newton-schulz", False)
    assert built(Optim("muonc", polar="svd"))["hidden"]["polar"] == "svd"


@pytest.mark.parametrize("hold", [{"hold": "fixed"}, {"hold": "balance"}, {"cautious": True}], ids=str)
def test_the_output_layer_is_held_only_if_it_is_corrected(hold):
    """With constant decay it has no target, and a fixed norm would pin it at its initial values."""
    [(key, value)] = hold.items()
    groups = built(Optim("scionc", **hold))
    assert groups["hidden"][key] == value
    assert groups["output"][key] != value
    assert built(Optim("scionc", correct_output=True, **hold))["output"][key] == value


CORRECTED = ("scionc", "muonc", "adamc", "lionc", "muon-corrected")  # balance needs a target, which scion has not


@pytest.mark.parametrize(
    ("name", "hold"), [*((name, "balance") for name in CORRECTED), *((name, "fixed") for name in (*CORRECTED, "scion"))]
)
def test_a_hold_reaches_every_optimizer_that_has_it(name, hold):
    (optimizer, _), *_ = build(GPT(MODEL), Optim(name, hold=hold, balance_steps=7, weight_decay=0.1), Schedule(), 10)
    held = [group for group in optimizer.param_groups if group["hold"] == hold]
    assert held and all(group["balance_steps"] == 7 for group in held if hold == "balance")


@pytest.mark.parametrize("name", ["adamw", "renormalized-adamw", "muon"])
@pytest.mark.parametrize("hold", [{"hold": "fixed"}, {"cautious": True}], ids=str)
def test_a_hold_is_refused_by_an_optimizer_that_has_none(name, hold):
    with pytest.raises(ValueError, match=f"{name} has neither"):
        build(GPT(MODEL), Optim(name, **hold), Schedule(), 10)


@pytest.mark.parametrize(("name", "end"), [("scionc", 0.1), ("scion", None)])
def test_decay_by_lr_alone_is_refused_where_it_would_be_lost(name, end):
    """It is a schedule of ScionC's target, which a final target would be as well."""
    schedule = Schedule(momentum="linear", decay_by_lr_alone=True, steady_norm_sq_end=end)
    with pytest.raises(ValueError, match="decay_by_lr_alone needs scionc without steady_norm_sq_end"):
        build(GPT(MODEL), Optim(name), schedule, 10)


UNUSED: dict[str, tuple[str, ...]] = {
    "optim.weight_decay=0.3: not used by scionc": ("--optim.weight-decay", "0.3"),
    "optim.alpha=0.3: not used by adamw": ("--optim.name", "adamw", "--optim.alpha", "0.3"),
    "optim.balance_steps=7.0: not used by scionc with optim.hold=decay": ("--optim.balance-steps", "7"),
    "optim.polar_steps=3: not used by muonc with .*polar=svd": (
        "--optim.name",
        "muonc",
        "--optim.polar",
        "svd",
        "--optim.polar-steps",
        "3",
    ),
    "optim.overlap=exact: not used by scion ": ("--optim.name", "scion", "--optim.overlap", "exact"),
    "optim.nesterov=True: not used by sgdc": ("--optim.name", "sgdc", "--optim.nesterov"),
    "optim.steady_norm_sq=3.0: not used by muonc": ("--optim.name", "muonc", "--optim.steady-norm-sq", "3"),
    "schedule.alpha_end=0.5: .*schedule.momentum=constant; leave it out": ("--schedule.alpha-end", "0.5"),
    "schedule.decay_by_lr_alone=True: not used": ("--schedule.decay-by-lr-alone",),
    "final 0.5: a constant schedule ends at its peak": ("--schedule.lr", "constant", "--schedule.final", "0.5"),
}


@pytest.mark.parametrize("message", UNUSED)
def test_the_command_line_refuses_an_option_that_the_run_would_ignore(message, tmp_path, capsys):
    """A run with --optim.weight-decay 0.3 was the same as without it."""
    short = ("--steps", "1", "--task.eval-tokens", "1536", "--no-tensorboard", "--out", str(tmp_path / "run"))
    assert main(["train", "gpt", *UNUSED[message], *short]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


def test_no_declared_run_has_an_option_that_it_ignores():
    """Experiments print their runs as commands."""
    trained = [experiment for experiment in EXPERIMENTS.values() if isinstance(experiment, TrainedExperiment)]
    configs = [with_optimizer(recipe, name) for recipe in RECIPES for name in get_args(OptimizerName)]
    for scale in ("desk", "paper"):
        for experiment in trained:
            configs += experiment.plan(Context(Path(), scale=scale)).configs.values()
    for config in {(config.optim, config.schedule): config for config in configs}.values():
        refuse_unused(config)


def test_too_few_eval_tokens_are_refused_before_the_first_step(tmp_path):
    task = Gpt(model=MODEL, length=16, eval_tokens=31)
    config = Config(task=task, out=tmp_path / "run", steps=2, batch=2, tensorboard=False, bf16=False)
    with pytest.raises(ValueError, match="eval_tokens=31 is less than a batch of 2 x 16; raise it"):
        train(config, quiet=True)
    assert not (config.out / records.FILE).exists()


def test_chances_of_a_visit_follow_from_the_text(tmp_path):
    write_shard(tmp_path / "a.bin", [0] * 90 + [1] * 10)
    write_shard(tmp_path / "b.bin", [0] * 100)
    chances = token_rows.visit_chances(sorted(tmp_path.glob("*.bin")), 3, tokens_per_step=2)
    torch.testing.assert_close(chances, torch.tensor([1 - 0.05**2, 1 - 0.95**2, 0.0], dtype=torch.float64))


def test_an_untied_run_records_its_rows_by_frequency_and_a_tied_one_does_not(tmp_path):
    columns = {}
    for tied in (True, False):
        task = Gpt(model=replace(MODEL, tied=tied), length=16, shuffle=True, eval_tokens=64)
        config = Config(task=task, out=tmp_path / str(tied), steps=2, batch=2, tensorboard=False, bf16=False)
        train(config, quiet=True)
        columns[tied] = records.read(config.out)
    rows = {f"{token_rows.COLUMN}/{name}" for name in token_rows.CLASSES}
    assert not rows & columns[True].columns.keys()
    assert rows <= columns[False].columns.keys()
    assert columns[False].columns["row_rms/rare"][-1] > 0
    assert {"commit", "machine"} <= columns[False].origin.keys()
