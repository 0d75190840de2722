"""What the training loop hands on: settings to optimizers, the random state to a resumed run, means over micro-batches."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from steadynorm import records
from steadynorm.data.shards import write_shard
from steadynorm.models import GPTConfig
from steadynorm.train import loop
from steadynorm.train.config import Config, Gpt, Optim, Schedule
from steadynorm.train.optimizers import build
from steadynorm.train.parallel import Team
from steadynorm.train.state import Parts, Progress, restore, store


class NoData:
    """A task whose data has a position and nothing else."""

    at = 0

    def position(self) -> dict[str, int]:
        return {"at": self.at}

    def go_to(self, position: dict[str, int]) -> None:
        self.at = position["at"]


def test_a_resumed_run_draws_the_random_numbers_that_the_unbroken_one_draws(tmp_path: Path):
    """Our models draw none while they train, but one with dropout would."""
    task: Any = NoData()
    parts, alone = Parts(nn.Linear(2, 2), [], [], task), Team(0, 1, torch.device("cpu"))
    torch.manual_seed(1)
    task.at = 7
    store(tmp_path, parts, Progress(step=3), alone, keep=1)
    unbroken = torch.randn(4)
    torch.manual_seed(2)
    task.at = 0
    progress = restore(tmp_path, parts, alone)
    assert progress is not None and progress.step == 3 and task.at == 7
    assert torch.equal(torch.randn(4), unbroken)


def model() -> nn.Module:
    made = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 2, bias=False))
    made.get_classifier = lambda: made[1]  # pyright: ignore
    return made


@pytest.mark.parametrize("name", ["muon", "muon-corrected"])
def test_muon_keeps_one_minus_alpha_of_its_momentum(name: Any):
    (muon, _), (others, _) = build(model(), Optim(name, alpha=0.2, nesterov=True, output_lr=0.05), Schedule(), 10)
    group = muon.param_groups[0]
    assert group["momentum"] == pytest.approx(0.8) and group["nesterov"] is True
    assert others.param_groups[0]["lr"] == 0.05 and others.param_groups[0]["weight_decay"] == 0.0


def test_lions_update_keeps_one_minus_alpha_and_its_buffer_beta2():
    [(lion, _)] = build(model(), Optim("lionc", alpha=0.2, betas=(0.5, 0.97)), Schedule(), 10)
    assert lion.param_groups[0]["betas"] == pytest.approx((0.8, 0.97))


def test_micro_batches_are_averaged(tmp_path: Path):
    """Loss and gradient: an optimizer that does not see the gradient's scale would not tell."""
    generator = np.random.default_rng(0)
    for name, count in (("a_val_000000.bin", 400), ("a_train_000001.bin", 800)):
        write_shard(tmp_path / name, np.cumsum(generator.integers(1, 3, count)) % 60)
    whole = Config(
        task=Gpt(GPTConfig(layers=1, width=16, heads=2, vocab=64, context=16), tmp_path, length=16, eval_tokens=128),
        out=tmp_path / "whole", steps=2, batch=4, optim=Optim("adamw", lr=1e-3), bf16=False, tensorboard=False,
    )  # fmt: skip
    runs = [whole, replace(whole, out=tmp_path / "parts", micro_batch=1)]
    for each in runs:
        loop.train(each, quiet=True)
    one, two = (records.read(each.out).columns for each in runs)
    for key in ("loss", "grad_norm"):
        assert one[key].tolist() == pytest.approx(two[key].tolist(), rel=1e-4), key


def test_with_nesterov_the_output_decays_alike_under_scion_and_scionc():
    decays = [
        next(group["weight_decay"] for group in optimizer.param_groups if group["name"] == "output")
        for optimizer, _ in (
            build(model(), Optim(name, nesterov=True), Schedule(), 10)[0] for name in ("scion", "scionc")
        )
    ]
    assert decays[0] == pytest.approx(decays[1], rel=1e-12)
