"""The paper's recipes at full size: every number is the paper's, and each takes two real steps."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import pytest
import torch
import tyro
from PIL import Image
from torch import nn

from steadynorm import ScionC, records
from steadynorm.cli.commands import command_of
from steadynorm.lab.data.shards import write_shard
from steadynorm.lab.models import GPT, SimpleViT
from steadynorm.lab.paper import baselines
from steadynorm.lab.train import loop, tasks
from steadynorm.lab.train.config import Config, Gpt, OptimizerName, Vit, plain
from steadynorm.lab.train.optimizers import build
from steadynorm.lab.train.recipes import GPT_124M, OPTIMIZERS, RECIPES, VIT_S16, with_optimizer

# What the paper and the code it builds on say, arm by arm, written out: nothing here is read from the recipes.
# Not here: where a run is stored, on what device, and how often it is saved.

NO_SCHEDULE = {
    "momentum": "constant", "alpha_end": 1.0, "decay_by_lr_alone": False, "steady_norm_sq_end": None, "final": 0.0
}  # fmt: skip
COSINE = {"lr": "cosine", "warmup": 0, **NO_SCHEDULE}
WARM_COSINE = {"lr": "cosine", "warmup": 10_000, **NO_SCHEDULE}
PLAIN_SCION = {
    "alpha": 0.1, "output_alpha": None, "nesterov": False, "overlap": "linear", "output_bias": "corrected",
    "correct_output": False, "polar_steps": 5, "weight_decay": None,
}  # fmt: skip
NANOGPT = {
    "kind": "gpt", "length": 1024, "shuffle": False, "eval_tokens": 10_485_760, "data": None, "tokenizer": "bytes",
    "model": {"layers": 12, "width": 768, "heads": 6, "vocab": 50304, "context": 1024, "mlp_ratio": 4, "tied": True},
}  # fmt: skip
NANOGPT_SCION = {
    **PLAIN_SCION, "lr": 50 / 4096, "output_lr": 3000 / 4096, "output_weight_decay": 1 / 3000,
    "steady_norm_sq": 5.79833984375,
}  # fmt: skip
VIT = {
    "kind": "vit", "dataset": "folder", "data": None, "crop_scale": [0.05, 1.0], "randaugment": 2, "magnitude": 10.0,
    "mixup": 0.2, "eval_images": None,
}  # fmt: skip
VIT_MODEL = {"image": 224, "patch": 16, "width": 384, "depth": 12, "heads": 6, "mlp": 1536, "classes": 1000}
VIT_SCION = {**PLAIN_SCION, "lr": 0.01, "output_lr": 0.2, "output_weight_decay": 0.004, "steady_norm_sq": 1.1875}
VIT_ADAM = {"lr": 1e-3, "output_lr": None, "output_weight_decay": None, "betas": [0.9, 0.999], "eps": 1e-8}


class Arm(NamedTuple):
    """One column of the paper's results."""

    recipe: str
    optimizer: str
    task: dict[str, Any]
    optim: dict[str, Any]
    schedule: dict[str, Any]
    clip: float | None
    steps: int
    batch: int
    eval_every: int
    monitor_every: int


_GPT_RUN = (COSINE, None, 381_469, 256, 125, 1)
_SCION_VIT, _ADAM_VIT = (VIT | {"model": VIT_MODEL | {"variant": variant}} for variant in ("scion", "adam"))
_VIT_RUN = (112_603, 1024, 1251, 100)
PAPER = (
    Arm("gpt-124m-fineweb-edu", "scionc", NANOGPT, NANOGPT_SCION, *_GPT_RUN),
    Arm("gpt-124m-fineweb-edu", "scion", NANOGPT, NANOGPT_SCION, *_GPT_RUN),
    Arm("vit-s16-imagenet", "scionc", _SCION_VIT, VIT_SCION, COSINE, None, *_VIT_RUN),
    Arm("vit-s16-imagenet", "scion", _SCION_VIT, VIT_SCION, COSINE, None, *_VIT_RUN),
    Arm("vit-s16-imagenet", "adamw", _ADAM_VIT, VIT_ADAM | {"weight_decay": 0.1}, WARM_COSINE, 1.0, *_VIT_RUN),
    Arm("vit-s16-imagenet", "adamc", _ADAM_VIT, VIT_ADAM | {"weight_decay": 0.2}, WARM_COSINE, 1.0, *_VIT_RUN),
)


@pytest.mark.parametrize("arm", PAPER, ids=lambda arm: f"{arm.recipe}-{arm.optimizer}")
def test_every_number_of_the_papers_arms_is_the_papers(arm: Arm):
    """`train RECIPE --optim.name NAME` is the paper's arm: model variant, optimizer, schedule, clipping, lengths."""
    config = from_command_line("train", arm.recipe, "--optim.name", arm.optimizer)
    found = plain(config)
    assert {key: value for key, value in found["task"].items() if key != "workers"} == arm.task
    assert found["optim"]["name"] == arm.optimizer
    assert {key: found["optim"][key] for key in arm.optim} == arm.optim  # the rest this optimizer does not read
    assert found["schedule"] == arm.schedule
    assert (config.clip, config.steps, config.batch) == (arm.clip, arm.steps, arm.batch)
    assert (config.eval_every, config.monitor_every) == (arm.eval_every, arm.monitor_every)
    config.check()


def built(recipe: str, optimizer: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, dict[str, Any]]]:
    """Return the arm's model without storage, its optimizer, and the optimizer's groups by name."""
    config = from_command_line("train", recipe, "--optim.name", optimizer)
    with torch.device("meta"):
        model = GPT(config.task.model) if isinstance(config.task, Gpt) else SimpleViT(config.task.model)
    [(made, _)] = build(model, config.optim, config.schedule, config.steps)
    return model, made, {group["name"]: group for group in made.param_groups}


def first_decay(optimizer: torch.optim.Optimizer, group: dict[str, Any]) -> float:
    return optimizer.weight_decay_of(group["params"][0]) if isinstance(optimizer, ScionC) else group["weight_decay"]


@pytest.mark.parametrize("name", ["scion", "scionc"])
def test_scion_and_scionc_start_from_the_papers_decays(name: str):
    model, optimizer, groups = built("gpt-124m-fineweb-edu", name)
    assert sum(p.numel() for p in model.parameters()) == 123_568_128
    hidden, output = groups["hidden"], groups["output"]
    assert (hidden["lmo"], hidden["lr"], len(hidden["params"])) == ("spectral", 50 / 4096, 72)
    assert (output["lmo"], output["lr"], output["weight_decay"]) == ("sign", 3000 / 4096, 1 / 3000)
    assert first_decay(optimizer, hidden) == pytest.approx(1 / 50)

    model, optimizer, groups = built("vit-s16-imagenet", name)
    output = groups["output"]
    assert (output["lmo"], output["lr"], output["weight_decay"]) == ("sign", 0.2, 0.004)
    assert [p.shape for p in output["params"]] == [(1000, 384)]
    for group in optimizer.param_groups:
        if group is not output:
            assert group["lr"] == 0.01
            assert first_decay(optimizer, group) == pytest.approx(0.08)
    fused = [group for group in optimizer.param_groups if group.get("blocks") == 3]
    assert [len(group["params"]) for group in fused] == [12]


@pytest.mark.parametrize(("name", "decay"), [("adamw", 0.1), ("adamc", 0.2)])
def test_adam_arms_decay_matrices_only_and_keep_the_head_constant(name: str, decay: float):
    model, optimizer, groups = built("vit-s16-imagenet", name)
    decays = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert all(decays[id(p)] == (decay if p.ndim > 1 else 0.0) for p in model.parameters())
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([1e-3 / 10_000] * 3)  # of the first step
    norms = [each for each in model.modules() if isinstance(each, nn.LayerNorm)]
    assert len(norms) == 25 and all(each.eps == 1e-6 and each.elementwise_affine for each in norms)
    if name == "adamc":
        assert [p.shape for p in groups["output"]["params"]] == [(1000, 384)]
        assert (groups["matrix"]["corrected"], groups["output"]["corrected"]) == (True, False)


def test_adam_arms_of_the_experiments_are_those_of_the_recipe():
    baseline = baselines.VIT["paper"]
    assert baseline.adam("adamw") == with_optimizer("vit-s16-imagenet", "adamw")
    assert baseline.adamc() == with_optimizer("vit-s16-imagenet", "adamc")


def test_the_desk_adam_has_the_variant_warmup_and_clipping_of_the_papers():
    desk = from_command_line("train", "vit", "--optim.name", "adamw")
    assert isinstance(desk.task, Vit)
    assert (desk.task.model.variant, desk.clip) == ("adam", 1.0)
    assert desk.schedule.warmup / desk.steps == pytest.approx(10_000 / 112_603, rel=0.01)
    text = from_command_line("train", "gpt", "--optim.name", "adamw")  # the paper trains no GPT with AdamW
    assert text == replace(RECIPES["gpt"], optim=OPTIMIZERS["adamw"])


# Validation


def test_nanogpt_validates_on_the_published_number_of_tokens(tmp_path: Path):
    """The evaluation itself is counted, on a validation shard of 10^8 tokens, for one of the eight processes."""
    write_shard(tmp_path / "a_train_000001.bin", np.zeros(256 * 1024 + 1, np.uint16))
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, 10**8
    with (tmp_path / "a_val_000000.bin").open("wb") as file:
        file.write(header.tobytes())
        file.truncate(1024 + 2 * 10**8)  # a hole: it takes no space
    config = replace(GPT_124M, task=replace(GPT_124M.task, data=tmp_path))
    sums = tasks.make(config, rank=3, world=8).evaluate(lambda *_: torch.zeros(()), torch.device("cpu"))  # pyright: ignore
    assert 8 * sums["count"].item() == 10_485_760


@pytest.mark.parametrize(("recipe", "validated"), [("gpt-124m-fineweb-edu", 10_485_760), ("vit-s16-imagenet", 50_000)])
def test_validation_takes_a_small_part_of_a_full_run(recipe: str, validated: int):
    """A forward pass is about a third of a training step: validation must cost less than an eighth of training."""
    config = RECIPES[recipe]
    each = config.task.length if isinstance(config.task, Gpt) else 1
    budget = config.task.eval_tokens if isinstance(config.task, Gpt) else config.task.eval_images or 50_000
    assert budget == validated
    assert validated / (3 * config.eval_every * config.batch * each) < 1 / 8


@pytest.mark.parametrize("epochs, steps", [(30, 37534), (60, 75068), (90, 112603), (150, 187671), (300, 375342)])
def test_the_budgets_are_the_papers(epochs: int, steps: int):
    assert round(1281167 * epochs / 1024) == steps


def test_the_cosine_is_the_papers():
    """gamma_t = gamma (1 + cos(pi (t - 1) / T)) / 2, t from 1."""
    ratio = VIT_S16.schedule.plan(100).ratio
    assert [ratio(t) for t in range(100)] == pytest.approx([(1 + np.cos(np.pi * t / 100)) / 2 for t in range(100)])


def two_steps(config: Config, out: Path) -> records.Run:
    """Train in fp32: a CPU without bf16 instructions takes minutes for a bf16 step of this size."""
    small = replace(config, out=out, steps=2, batch=1, micro_batch=1, bf16=False, compile=False, tensorboard=False)
    result = loop.train(small, quiet=True)
    assert result.finished
    return records.read(out)


@pytest.mark.parametrize("layers", [1, pytest.param(12, marks=pytest.mark.slow)])
def test_nanogpt_takes_two_steps(tmp_path: Path, layers: int):
    """It has its full width and vocabulary, on shorter sequences."""
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


@pytest.mark.parametrize(
    ("name", "depth"),
    [
        ("scionc", 2),
        pytest.param("scionc", 12, marks=pytest.mark.slow),
        pytest.param("adamw", 12, marks=pytest.mark.slow),
    ],
)
def test_the_full_vit_takes_two_steps(tmp_path: Path, name: OptimizerName, depth: int):
    """It has its full width and image size."""
    generator = np.random.default_rng(0)
    for split in ("train", "val"):
        for k in range(4):
            (tmp_path / split / f"n{k:04d}").mkdir(parents=True)
            picture = generator.integers(0, 255, (150, 200, 3), dtype=np.uint8)
            Image.fromarray(picture).save(tmp_path / split / f"n{k:04d}" / f"{k}.jpeg")
    config = replace(with_optimizer("vit-s16-imagenet", name), monitor_every=1)
    task = replace(config.task, data=tmp_path, workers=0, model=replace(config.task.model, classes=4, depth=depth))  # pyright: ignore
    schedule = replace(config.schedule, warmup=min(1, config.schedule.warmup))
    run = two_steps(replace(config, task=task, schedule=schedule), tmp_path / "run")
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
    """The recipe's output_lr of 0.3 is Scion's: at that lr AdamW's tied table took the loss from 6 to 46."""
    with torch.device("meta"):
        model = GPT(RECIPES["gpt"].task.model)  # pyright: ignore
    for words in (["--optim.name", name], [f"--optim.name={name}"], ["--optim.name", "scion", "--optim.name", name]):
        config = from_command_line("train", "gpt", *words)
        assert config.optim == OPTIMIZERS[name]  # pyright: ignore
        made = [each for each, _ in build(model, config.optim, config.schedule, config.steps)]
        lrs = [group["lr"] for each in made for group in each.param_groups]
        assert max(lrs) == config.optim.lr and min(lrs) == (config.optim.output_lr or config.optim.lr)
        assert name != "lionc" or made[0].param_groups[0]["betas"] == (0.9, 0.99)


def test_baseline_settings_are_their_authors_published_ones():
    """Muon has Keller Jordan's 0.02 with momentum 0.95 and Nesterov, AdamW beside it; Lion a tenth of AdamW's lr and
    ten times its decay.
    """
    muon, lion, adam = OPTIMIZERS["muon"], OPTIMIZERS["lionc"], OPTIMIZERS["adamw"]
    assert (muon.lr, 1 - muon.alpha, muon.nesterov, muon.output_lr) == (0.02, 0.95, True, 1e-3)
    assert (adam.lr, adam.weight_decay, adam.betas) == (1e-3, 0.1, (0.9, 0.999))
    assert (lion.lr, lion.weight_decay, lion.betas) == (adam.lr / 10, 10 * adam.weight_decay, (0.9, 0.99))


def test_an_explicit_setting_is_kept_even_where_it_equals_the_recipes():
    given = from_command_line("train", "gpt", "--optim.output-lr", "0.3", "--optim.name", "adamw", "--optim.lr", "2e-3")
    assert (given.optim.lr, given.optim.output_lr, given.optim.betas) == (2e-3, 0.3, (0.9, 0.999))
    assert from_command_line("train", "vit", "--optim.name", "scion") == with_optimizer("vit", "scion")
    assert with_optimizer("vit", "scion").optim == replace(RECIPES["vit"].optim, name="scion")
    assert from_command_line("train", "gpt") == RECIPES["gpt"]
    with pytest.raises(SystemExit):
        from_command_line("train", "gpt", "--optim.name", "adagrad")


@pytest.mark.parametrize(("recipe", "key"), [("gpt", "eval_tokens"), ("vit", "eval_images")])
def test_an_empty_evaluation_is_refused_before_the_first_step(recipe: str, key: str):
    config = RECIPES[recipe]
    config.check()
    with pytest.raises(ValueError, match=rf"task\.{key}=0: must be at least 1"):
        replace(config, task=replace(config.task, **{key: 0})).check()


@pytest.mark.parametrize("end", [-1.0, math.nan])
def test_a_final_target_below_zero_is_refused_before_the_first_step(end: float):
    """The run ended only where the target crossed zero."""
    config = RECIPES["gpt"]
    with pytest.raises(ValueError, match=r"schedule\.steady_norm_sq_end=.*: must be finite and not negative"):
        replace(config, schedule=replace(config.schedule, steady_norm_sq_end=end)).check()


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_that_torch_does_not_take_is_refused(seed: int):
    with pytest.raises(ValueError, match=f"seed={seed}: must be 0 or more"):
        replace(RECIPES["gpt"], seed=seed).check()
