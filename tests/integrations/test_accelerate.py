"""Accelerate: prepared optimizers and schedulers, its clipping and accumulation, its checkpoints."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from following import LR, MAKERS, Steps, assert_same, weights
from needs import library
from small import batch, net
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import steadynorm as sn
from steadynorm.monitor import scalars

library("accelerate")

from accelerate import Accelerator
from accelerate.utils.fsdp_utils import fsdp2_switch_optimizer_parameters

TOTAL = 8


class Run:
    """A loop as users of Accelerate write it."""

    def __init__(self, name: str, *, accumulate: int = 1, monitored: bool = False, one_cycle: bool = False):
        self.accelerator = Accelerator(cpu=True, gradient_accumulation_steps=accumulate)
        model = net()
        self.raw = MAKERS[name](model)
        scheduler: Any = torch.optim.lr_scheduler.CosineAnnealingLR(self.raw, TOTAL)
        if one_cycle:
            peaks = [group["lr"] for group in self.raw.param_groups]
            scheduler = torch.optim.lr_scheduler.OneCycleLR(self.raw, peaks, TOTAL, cycle_momentum=False)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, self.raw, scheduler)
        self.steps = Steps(self.optimizer)
        self.monitor = sn.Monitor(self.optimizer, model) if monitored else None
        if self.monitor is not None:
            self.accelerator.register_for_checkpointing(self.monitor)
        self.accumulate = accumulate

    def train(self, first: int, last: int) -> None:
        for step in range(first, last):
            x, y = batch(step)
            for part in range(self.accumulate):
                with self.accelerator.accumulate(self.model):
                    xs, ys = x.chunk(self.accumulate)[part], y.chunk(self.accumulate)[part]
                    self.accelerator.backward(nn.functional.cross_entropy(self.model(xs), ys))
                    if self.accelerator.sync_gradients:
                        self.accelerator.clip_grad_norm_(self.model.parameters(), 0.5)
                    self.optimizer.step()
                    self.scheduler.step()
                    self.optimizer.zero_grad()


def cosine(step: int) -> float:
    return 0.5 * (1 + torch.cos(torch.tensor(torch.pi * step / TOTAL, dtype=torch.float64)).item())


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_the_lr_and_the_decay_follow_its_scheduler(name: str, accumulate: int):
    run = Run(name, accumulate=accumulate)
    run.train(0, TOTAL)
    run.steps.check([cosine(step) for step in range(TOTAL)])


@pytest.mark.parametrize("name", ["AdamC", "correct(AdamW)"])
def test_one_cycle_counts_from_its_peak(name: str):
    """OneCycleLR lowers lr to 1/25 of the peak and puts `max_lr` into the groups, which is the peak."""
    run = Run(name, one_cycle=True)
    run.train(0, TOTAL)
    for group in run.raw.param_groups:
        assert group["peak_lr"] == pytest.approx(LR)
    lrs = run.steps.lrs()
    assert max(lrs) == pytest.approx(LR, rel=0.05)
    assert min(lrs) < LR / 20
    corrected = next(k for k, group in enumerate(run.raw.param_groups) if group.get("name") in (None, "matrix"))
    for row in run.steps.rows:
        lr, decay = row[corrected]
        assert decay == pytest.approx(run.raw.param_groups[corrected]["base_weight_decay"] * lr / LR)


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_resumed_from_its_checkpoint_ends_like_an_unbroken_one(tmp_path: Path, name: str):
    whole = Run(name, monitored=True)
    whole.train(0, TOTAL)
    stopped = Run(name, monitored=True)
    stopped.train(0, 5)
    stopped.accelerator.save_state(str(tmp_path))
    resumed = Run(name, monitored=True)
    resumed.accelerator.load_state(str(tmp_path))
    resumed.train(5, TOTAL)
    assert_same(weights(whole.model), weights(resumed.model))
    resumed.steps.check([cosine(step) for step in range(5, TOTAL)])
    assert whole.monitor is not None and resumed.monitor is not None
    one, two = whole.monitor.measure(), resumed.monitor.measure()  # those before the stop were saved with it
    assert [record["step"] for record in two] == [record["step"] for record in one]
    for mine, other in zip(one, two, strict=True):
        assert scalars(other) == pytest.approx(scalars(mine), rel=1e-12)


def test_correct_and_monitor_reach_through_its_wrapper():
    """`prepare` wraps the optimizer; hooks on the wrapper would never run."""
    model = net()
    accelerator = Accelerator(cpu=True)
    model, wrapped = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1))
    assert sn.correct(wrapped) is wrapped
    monitor = sn.Monitor(wrapped, model)
    wrapped.param_groups[0]["lr"] = LR / 2
    accelerator.backward(nn.functional.cross_entropy(model(batch(0)[0]), batch(0)[1]))
    wrapped.step()
    assert wrapped.param_groups[0]["weight_decay"] == pytest.approx(0.05)
    assert [record["weight_decay"] for record in monitor.measure()] == pytest.approx([0.05])


@pytest.fixture
def one_process():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield dist.device_mesh.init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


@pytest.mark.parametrize("name", MAKERS)
def test_we_train_the_sharded_parameters_that_its_fsdp2_puts_into_the_groups(one_process: Any, name: str):
    """Take the steps of `Accelerator._prepare_fsdp2`: placeholders, fully_shard, then the switch."""
    plain, model = net(), net()
    optimizer, reference = MAKERS[name](model), MAKERS[name](plain)
    names = {id(p): key for key, p in model.named_parameters()}
    for group in optimizer.param_groups:
        for k, p in enumerate(group["params"]):
            group["params"][k] = torch.empty(1)
            group["params"][k].data_ptr = names[id(p)]
    fully_shard(model, mesh=one_process)
    fsdp2_switch_optimizer_parameters(optimizer, dict(model.named_parameters()))
    for step in range(3):
        for one, both in ((model, optimizer), (plain, reference)):
            both.zero_grad()
            nn.functional.cross_entropy(one(batch(step)[0]), batch(step)[1]).backward()
            both.step()
    assert all(isinstance(p, DTensor) for p in optimizer.state)
    assert len(optimizer.state_dict()["state"]) == len(list(model.parameters()))
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.full_tensor(), q)
