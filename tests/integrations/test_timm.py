"""timm: our optimizers in its registry, its schedulers, its checkpoints. torchvision's operators are not there (see
conftest.py), so nothing here touches images from disk."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from following import DECAY, LR, MAKERS, Steps, assert_same, weights
from needs import library
from torch import nn

import steadynorm as sn

library("timm")

from timm import create_model
from timm.optim import create_optimizer_v2
from timm.scheduler import CosineLRScheduler
from timm.utils import CheckpointSaver

from steadynorm.integrations.timm import NAMES, register

register()
register()  # twice is no harm
TOTAL, WARMUP = 8, 2


def vit() -> nn.Module:
    torch.manual_seed(0)
    return create_model("vit_tiny_patch16_224", img_size=32, embed_dim=16, depth=1, num_heads=4, num_classes=5)


def make(name: str, model: nn.Module) -> Any:
    groups = partial(sn.param_groups, lr=LR)
    if name == "ScionC":
        return create_optimizer_v2(model, opt="steadyscionc", param_group_fn=groups)
    if name == "AdamC":
        adam = partial(groups, kind="adam", weight_decay=DECAY)
        return create_optimizer_v2(model, opt="steadyadamc", lr=LR, param_group_fn=adam)
    return MAKERS[name](model)


class Run:
    """Step in the order of timm's train.py: step, then step_update of the scheduler with the number of updates."""

    def __init__(self, name: str):
        self.model = vit()
        self.optimizer = make(name, self.model)
        self.scheduler = CosineLRScheduler(
            self.optimizer, t_initial=TOTAL, warmup_t=WARMUP, warmup_lr_init=0.0, t_in_epochs=False
        )
        self.steps = Steps(self.optimizer)

    def train(self, first: int, last: int) -> None:
        self.scheduler.step_update(first)
        for step in range(first, last):
            generator = torch.Generator().manual_seed(step)
            x, y = torch.randn(4, 3, 32, 32, generator=generator), torch.randint(0, 5, (4,), generator=generator)
            self.optimizer.zero_grad()
            nn.functional.cross_entropy(self.model(x), y).backward()
            nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
            self.optimizer.step()
            self.scheduler.step_update(step + 1)


def ratio(step: int) -> float:
    return step / WARMUP if step < WARMUP else 0.5 * (1 + math.cos(math.pi * step / TOTAL))


@pytest.mark.parametrize("name", MAKERS)
def test_the_lr_and_the_decay_follow_its_scheduler(name: str):
    run = Run(name)
    run.train(0, TOTAL)
    run.steps.check([ratio(step) for step in range(TOTAL)])


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_resumed_from_its_checkpoint_ends_like_an_unbroken_one(tmp_path: Path, name: str):
    from timm.models import resume_checkpoint

    whole, stopped, resumed = Run(name), Run(name), Run(name)
    whole.train(0, TOTAL)
    stopped.train(0, 5)
    saver = CheckpointSaver(stopped.model, stopped.optimizer, checkpoint_dir=str(tmp_path))
    saver.save_checkpoint(0, metric=1.0)
    resume_checkpoint(resumed.model, str(tmp_path / "last.pth.tar"), optimizer=resumed.optimizer, log_info=False)
    resumed.train(5, TOTAL)
    assert_same(weights(whole.model), weights(resumed.model))
    resumed.steps.check([ratio(step) for step in range(5, TOTAL)])


@pytest.mark.parametrize("opt", [name for name in NAMES if "scion" not in name])
def test_our_optimizers_can_be_made_by_name_with_timms_own_groups(opt: str):
    """timm's groups have decay on matrices and none on vectors."""
    model = vit()
    optimizer = create_optimizer_v2(model, opt=opt, lr=1e-3, weight_decay=0.1)
    assert type(optimizer) is NAMES[opt]
    assert sorted({group["weight_decay"] for group in optimizer.param_groups}) == [0.0, 0.1]
    assert {group["lr"] for group in optimizer.param_groups} == {1e-3}


@pytest.mark.parametrize("lr", [{"lr": 1e-3}, {}], ids=["an lr", "the optimizer's own lr"])
def test_layer_decay_keeps_a_peak_for_each_group(lr: dict[str, float]):
    """timm's scheduler multiplies a group's lr by its lr_scale: each group decays as requested at its peak, and by
    half at half.
    """
    model = vit()
    optimizer = create_optimizer_v2(model, opt="steadyadamc", weight_decay=0.1, layer_decay=0.5, **lr)
    assert len({group["lr_scale"] for group in optimizer.param_groups}) > 2
    scheduler = CosineLRScheduler(optimizer, t_initial=10, t_in_epochs=False)
    for update, ratio in ((0, 1.0), (5, 0.5)):
        scheduler.step_update(update)
        nn.functional.cross_entropy(model(torch.ones(2, 3, 32, 32)), torch.zeros(2, dtype=torch.long)).backward()
        optimizer.step()
        for group in optimizer.param_groups:
            assert group["lr"] == pytest.approx(1e-3 * group["lr_scale"] * ratio)
            assert group["weight_decay"] == pytest.approx(group["base_weight_decay"] * ratio)


@pytest.mark.parametrize("opt", ["steadysgdc", "steadyscionc"])
def test_a_momentum_that_would_be_lost_is_refused_and_timms_default_is_ours(opt: str):
    groups = partial(sn.param_groups, kind="scion" if opt == "steadyscionc" else "adam", lr=0.01)
    assert create_optimizer_v2(vit(), opt=opt, param_group_fn=groups).param_groups[0]["alpha"] == 0.1
    assert create_optimizer_v2(vit(), opt=opt, param_group_fn=groups, alpha=0.1).param_groups[0]["alpha"] == 0.1
    with pytest.raises(TypeError, match="alpha"):
        create_optimizer_v2(vit(), opt=opt, param_group_fn=groups, momentum=0.95)


def test_scionc_without_roles_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match=r"no lmo; use steadynorm.param_groups"):
        create_optimizer_v2(vit(), opt="steadyscionc", lr=0.01)


def test_an_lr_that_the_groups_override_is_refused():
    with pytest.raises(ValueError, match=r"lr=0\.5 would not be used.*param_group_fn=partial"):
        create_optimizer_v2(vit(), opt="steadyscionc", lr=0.5, param_group_fn=sn.param_groups)
