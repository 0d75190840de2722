"""The paper's recipes at full size: every number against the paper's, and two real steps of each."""

from dataclasses import replace
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
import torch
import tyro
from PIL import Image

from steadynorm import records
from steadynorm.cli.commands import command_of
from steadynorm.data.shards import write_shard
from steadynorm.models import GPT, SimpleViT
from steadynorm.paper import settings
from steadynorm.train import loop
from steadynorm.train.config import Config, Gpt, OptimizerName, Schedule, Vit
from steadynorm.train.optimizers import build, lr_ratio
from steadynorm.train.recipes import GPT_124M, OPTIMIZERS, RECIPES, VIT_S16, with_optimizer


def test_every_number_of_the_nanogpt_recipe():
    """Copied from the paper's section on Modded-NanoGPT and the facts of its recipe."""
    config, task, optim = GPT_124M, GPT_124M.task, GPT_124M.optim
    assert isinstance(task, Gpt)
    model = task.model
    assert (model.layers, model.width, model.heads, model.vocab, model.mlp_ratio) == (12, 768, 6, 50304, 4)
    assert (config.batch, task.length, config.steps * 256 * 1024) == (256, 1024, pytest.approx(100e9, rel=1e-5))
    assert (optim.name, optim.alpha, optim.nesterov, optim.polar_steps) == ("scionc", 0.1, False, 5)
    assert (optim.lr, optim.output_lr) == (2**-12 * 50, 2**-12 * 3000)
    assert (optim.steady_norm_sq, optim.output_weight_decay) == (5.79833984375, 1 / 3000)
    assert (config.schedule.lr, config.schedule.warmup, config.schedule.final) == ("cosine", 0, 0.0)
    assert (config.clip, config.bf16, config.eval_every) == (None, True, 125)
    with torch.device("meta"):
        meta = GPT(model)
    assert sum(p.numel() for p in meta.parameters()) == 123_568_128
    [(optimizer, _)] = build(meta, optim, config.schedule, config.steps)
    groups = {group["name"]: group for group in optimizer.param_groups}
    hidden, output = groups["hidden"], groups["output"]
    assert (hidden["lmo"], hidden["lr"], len(hidden["params"])) == ("spectral", 2**-12 * 50, 72)
    assert (output["lmo"], output["lr"], output["weight_decay"]) == ("sign", 2**-12 * 3000, 1 / 3000)
    assert optimizer.weight_decay_of(hidden["params"][0]) == pytest.approx(1 / 50)  # pyright: ignore


def test_every_number_of_the_vit_recipe():
    config, task, optim = VIT_S16, VIT_S16.task, VIT_S16.optim
    assert isinstance(task, Vit)
    model = task.model
    assert (model.image, model.patch, model.width, model.depth, model.heads, model.mlp, model.classes) == (
        224, 16, 384, 12, 6, 1536, 1000,
    )  # fmt: skip
    assert model.variant == "scion"
    assert (config.batch, config.steps) == (1024, round(1281167 * 90 / 1024))
    assert (optim.lr, optim.output_lr, optim.alpha, optim.output_weight_decay) == (0.01, 0.2, 0.1, 0.004)
    assert optim.steady_norm_sq == 9.5 * 0.01 / 0.08
    assert (task.crop_scale, task.randaugment, task.magnitude, task.mixup) == ((0.05, 1.0), 2, 10.0, 0.2)
    assert (config.schedule.lr, config.schedule.warmup, config.clip) == ("cosine", 0, None)
    adam = settings.VIT["paper"].adam("adamc")
    assert isinstance(adam.task, Vit)
    assert adam.task.model.variant == "adam"
    assert (adam.optim.name, adam.optim.lr, adam.optim.betas, adam.optim.eps) == ("adamc", 1e-3, (0.9, 0.999), 1e-8)
    assert (adam.optim.weight_decay, adam.schedule.warmup, adam.clip) == (0.1, 10_000, 1.0)
    with torch.device("meta"):
        meta = SimpleViT(model)
    [(optimizer, _)] = build(meta, optim, config.schedule, config.steps)
    groups = {group["name"]: group for group in optimizer.param_groups}
    assert (groups["output"]["lr"], groups["output"]["weight_decay"]) == (0.2, 0.004)
    fused = [group for group in optimizer.param_groups if group.get("blocks") == 3]
    assert [len(group["params"]) for group in fused] == [12]
    assert optimizer.weight_decay_of(fused[0]["params"][0]) == pytest.approx(0.08)  # pyright: ignore


@pytest.mark.parametrize("epochs, steps", [(30, 37534), (60, 75068), (90, 112603), (150, 187671), (300, 375342)])
def test_the_papers_budgets(epochs: int, steps: int):
    assert round(1281167 * epochs / 1024) == steps


def test_the_cosine_is_the_papers():
    """gamma_t = gamma (1 + cos(pi (t - 1) / T)) / 2, t from 1."""
    ratio = lr_ratio(VIT_S16.schedule, 100)
    assert [ratio(t) for t in range(100)] == pytest.approx([(1 + np.cos(np.pi * t / 100)) / 2 for t in range(100)])


def two_steps(config: Config, out: Path) -> records.Run:
    """Train in fp32: a CPU without bf16 instructions takes minutes for a bf16 step of this size."""
    small = replace(config, out=out, steps=2, batch=2, micro_batch=1, bf16=False, compile=False, tensorboard=False)
    result = loop.train(small, quiet=True)
    assert result.finished
    return records.read(out)


@pytest.mark.parametrize("layers", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_the_nanogpt_takes_two_steps(tmp_path: Path, layers: int):
    """At its full width and vocabulary, on shorter sequences."""
    generator = np.random.default_rng(0)
    for name, count in (("a_val_000000.bin", 3000), ("a_train_000001.bin", 5000)):
        write_shard(tmp_path / name, generator.integers(0, 50257, count))
    assert isinstance(GPT_124M.task, Gpt)
    model = replace(GPT_124M.task.model, layers=layers)
    task = replace(GPT_124M.task, model=model, data=tmp_path, length=128, eval_tokens=256)
    run = two_steps(replace(GPT_124M, task=task), tmp_path / "run")
    assert run.columns["loss"][0] == pytest.approx(16.0, abs=0.5)  # every token predicts itself at first
    assert np.isfinite(run.columns["val_loss"][-1])
    assert run.columns["weight_norm"][0] > 100
    assert len(run.layers) == 1 + 6 * layers


@pytest.mark.parametrize("side", ["scion", "adam"])
def test_the_full_vit_takes_two_steps(tmp_path: Path, side: str):
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for k in range(4):
            (tmp_path / split / f"n{k:04d}").mkdir(parents=True)
            picture = generator.integers(0, 255, (150, 200, 3), dtype=np.uint8)
            Image.fromarray(picture).save(tmp_path / split / f"n{k:04d}" / f"{k}.jpeg")
    assert isinstance(VIT_S16.task, Vit)
    task = replace(VIT_S16.task, data=tmp_path, workers=0, model=replace(VIT_S16.task.model, classes=4))
    config = replace(VIT_S16, task=task, monitor_every=1)
    adam = replace(settings.VIT["paper"].adam(), monitor_every=1)
    task = task if side == "scion" else replace(task, model=replace(task.model, variant="adam"))
    run = two_steps(
        config if side == "scion" else replace(adam, task=task, schedule=Schedule(warmup=1)), tmp_path / "run"
    )
    assert run.columns["loss"][0] == pytest.approx(np.log(4), abs=1e-3)
    assert np.isfinite(run.columns["loss"]).all()
    assert 0 <= run.columns["val_accuracy"][-1] <= 1


def test_desk_recipes_have_ten_half_lives():
    for name in ("gpt", "vit"):
        config = RECIPES[name]
        eta = 9.5 * config.optim.lr**2 / config.optim.steady_norm_sq
        assert config.steps * eta / np.log(2) == pytest.approx(10, abs=0.1)


def from_command_line(*words: str) -> Config:
    return tyro.cli(command_of(words), args=words)


@pytest.mark.parametrize("name", [each for each in get_args(OptimizerName) if each not in ("scion", "scionc")])
def test_another_familys_optimizer_has_its_own_numbers_not_scions(name: str):
    """The recipe's output_lr of 0.3 is Scion's: AdamW's tied table at that lr took the loss from 6 to 46."""
    with torch.device("meta"):
        model = GPT(RECIPES["gpt"].task.model)  # pyright: ignore
    for words in (["--optim.name", name], [f"--optim.name={name}"], ["--optim.name", "scion", "--optim.name", name]):
        config = from_command_line("train", "gpt", *words)
        assert config.optim == OPTIMIZERS[name]  # pyright: ignore
        made = [each for each, _ in build(model, config.optim, config.schedule, config.steps)]
        lrs = [group["lr"] for each in made for group in each.param_groups]
        assert max(lrs) == config.optim.lr and min(lrs) == (config.optim.output_lr or config.optim.lr)
        assert name != "lionc" or made[0].param_groups[0]["betas"] == (0.9, 0.99)


def test_where_other_optimizers_begin_is_what_their_authors_published():
    """Muon: Keller Jordan's 0.02 with momentum 0.95 and Nesterov, AdamW beside it; Lion: a tenth of AdamW's lr, ten times its decay."""
    muon, lion, adam = OPTIMIZERS["muon"], OPTIMIZERS["lionc"], OPTIMIZERS["adamw"]
    assert (muon.lr, 1 - muon.alpha, muon.nesterov, muon.output_lr) == (0.02, 0.95, True, 1e-3)
    assert (adam.lr, adam.weight_decay, adam.betas) == (1e-3, 0.1, (0.9, 0.999))
    assert (lion.lr, lion.weight_decay, lion.betas) == (adam.lr / 10, 10 * adam.weight_decay, (0.9, 0.99))


def test_what_is_given_is_kept_also_where_it_is_the_recipes():
    given = from_command_line("train", "gpt", "--optim.output-lr", "0.3", "--optim.name", "adamw", "--optim.lr", "2e-3")
    assert (given.optim.lr, given.optim.output_lr, given.optim.betas) == (2e-3, 0.3, (0.9, 0.999))
    assert from_command_line("train", "vit", "--optim.name", "scion") == with_optimizer(RECIPES["vit"], "scion")
    assert with_optimizer(RECIPES["vit"], "scion").optim == replace(RECIPES["vit"].optim, name="scion")
    assert from_command_line("train", "gpt") == RECIPES["gpt"]
    with pytest.raises(SystemExit):
        from_command_line("train", "gpt", "--optim.name", "adagrad")


@pytest.mark.parametrize(("recipe", "key"), [("gpt", "eval_tokens"), ("vit", "eval_images")])
def test_an_evaluation_of_nothing_is_refused_before_the_first_step(recipe: str, key: str):
    config = RECIPES[recipe]
    config.check()
    with pytest.raises(ValueError, match=rf"task\.{key}=0: must be at least 1"):
        replace(config, task=replace(config.task, **{key: 0})).check()
