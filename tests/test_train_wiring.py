"""What the training loop passes on: settings to optimizers, the random state to a resumed run, means over micro-batches."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from tiny_run import tiny_run, write_tokens
from torch import nn

from steadynorm import records
from steadynorm.lab.data.augment import Evaluate
from steadynorm.lab.data.images import InMemory
from steadynorm.lab.train import loop, tasks
from steadynorm.lab.train.config import Config, Optim, Schedule
from steadynorm.lab.train.optimizers import build
from steadynorm.lab.train.parallel import Team
from steadynorm.lab.train.run_state import RunParts, restore, store


class Position:
    """A loader that has a position and nothing else."""

    at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, position: dict[str, int]) -> None:
        self.at = position["at"]


def test_a_resumed_run_draws_the_random_numbers_that_the_unbroken_one_draws(tmp_path: Path):
    """Our models draw none while they train, but one with dropout would."""
    loader, alone = Position(), Team(0, 1, torch.device("cpu"))
    task: Any = SimpleNamespace(loader=loader)
    parts = RunParts(nn.Linear(2, 2), [], [], task)
    torch.manual_seed(1)
    loader.at = 7
    store(tmp_path, parts, (3, 0.0, {}), alone, keep=1)
    unbroken = torch.randn(4)
    torch.manual_seed(2)
    loader.at = 0
    progress = restore(tmp_path, parts, alone)
    assert progress is not None and progress[0] == 3 and loader.at == 7
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
    whole = tiny(tmp_path, optim=Optim("adamw", lr=1e-3))
    runs = [whole, replace(whole, out=tmp_path / "parts", micro_batch=1)]
    for each in runs:
        loop.train(each, quiet=True)
    one, two = (records.read(each.out).columns for each in runs)
    for key in ("loss", "grad_norm"):
        assert one[key].tolist() == pytest.approx(two[key].tolist(), rel=1e-4), key


def tiny(folder: Path, **changes: Any) -> Config:
    data = write_tokens(folder, validation=400, training=800)
    return tiny_run(data, folder / "run", eval_tokens=128, **({"steps": 2, "schedule": Schedule()} | changes))


def test_muonc_takes_the_settings_of_the_run():
    settings = Optim(
        "muonc", alpha=0.2, nesterov=True, lr=0.03, output_lr=0.05, weight_decay=0.3, output_weight_decay=0.0,
        betas=(0.8, 0.97), polar_steps=4, hold="balance", balance_steps=7,
    )  # fmt: skip
    [(muonc, _)] = build(model(), settings, Schedule(), 10)
    groups = {group["name"]: group for group in muonc.param_groups}
    hidden, output = groups["hidden"], groups["output"]
    assert (hidden["lr"], hidden["momentum"], hidden["nesterov"], hidden["weight_decay"]) == (0.03, 0.8, True, 0.3)
    assert (hidden["polar_steps"], hidden["hold"], hidden["balance_steps"]) == (4, "balance", 7)
    assert (output["lr"], output["weight_decay"], output["corrected"], output["betas"]) == (
        0.05,
        0.0,
        False,
        (0.8, 0.97),
    )


def test_muons_two_optimizers_record_one_gradient_norm_clipped_or_not(tmp_path: Path):
    """Clipping computes the norm of all gradients, which must not be counted once per optimizer."""
    free = tiny(tmp_path, optim=Optim("muon", lr=0.02, output_lr=1e-3))
    clipped = replace(free, out=tmp_path / "clipped", clip=1e6)
    norms = []
    for each in (free, clipped):
        loop.train(each, quiet=True)
        norms.append(records.read(each.out).columns["grad_norm"].tolist())
    assert norms[1] == pytest.approx(norms[0], rel=1e-5)


def test_muons_two_optimizers_record_their_norms_by_role(tmp_path: Path):
    """Muon has the hidden matrices and AdamW the rest; the report compares measured and forecast norms by role."""
    made = tiny(tmp_path, optim=Optim("muon", lr=0.02, output_lr=1e-3))
    loop.train(made, quiet=True)
    run = records.read(made.out)
    roles = [key.partition("/")[2] for key in run.columns if key.startswith("weight_norm/")]
    assert {"hidden", "output"} <= set(roles)
    for key, quantity in (("weight_norm", "norm"), ("forecast_norm", "forecast")):
        by_role = sum(run.columns[f"{key}/{role}"] ** 2 for role in roles)
        assert np.sqrt(by_role) == pytest.approx(run.columns[key], rel=1e-6)
        hidden = [each[quantity] for each in run.layers.values() if np.isfinite(each["spectral"]).any()]
        assert run.columns[f"{key}/hidden"] == pytest.approx(np.sqrt(sum(np.square(each) for each in hidden)), rel=1e-6)


def test_norms_of_one_role_in_two_optimizers_combine_as_roots_of_sums_of_squares():
    record = {"weight_norm": 5.0, "weight_norm/vectors": 3.0, "forecast_norm": None, "grad_norm": 3.0}
    other = {"weight_norm": 12.0, "weight_norm/vectors": 4.0, "weight_norm/output": 2.0, "forecast_norm": 1.0}
    loop._join(record, other | {"grad_norm": 4.0, "lr": 7.0}, clipped=False)
    assert record == {
        "weight_norm": 13.0, "weight_norm/vectors": 5.0, "weight_norm/output": 2.0, "forecast_norm": None,
        "grad_norm": 5.0, "layers": {},
    }  # fmt: skip


class Compiled(nn.Module):
    """A module like torch.compile's, which does not show what it wraps."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self._orig_mod = module

    def forward(self, *arguments: Any) -> Any:
        return self._orig_mod(*arguments)


def test_a_compiled_model_is_told_when_to_exchange_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    told: list[tuple[nn.Module, bool]] = []
    original = Team.accumulating

    def accumulating(self: Team, wrapped: nn.Module, last: bool) -> Any:
        told.append((wrapped, last))
        return original(self, wrapped, last)

    monkeypatch.setattr(torch, "compile", Compiled)
    monkeypatch.setattr(Team, "accumulating", accumulating)
    config = tiny(tmp_path, steps=1, micro_batch=2, optim=Optim("adamw", lr=1e-3), compile=True)
    assert loop.train(config, quiet=True).finished
    assert [last for _, last in told] == [False, True]
    assert not any(isinstance(wrapped, Compiled) for wrapped, _ in told)


@pytest.mark.parametrize("asked, seen", [(None, 9), (7, 7), (100, 9)])
def test_every_process_calls_the_model_for_every_validation_batch(asked: int | None, seen: int):
    """FSDP2 gathers weights in the call, so a process whose part of the last batch is empty must still make it."""
    made: Any = object.__new__(tasks.VitTask)
    made.config = SimpleNamespace(batch=4, micro_batch=2)
    made.task = SimpleNamespace(eval_images=asked, workers=0)
    made.world, made.transform = 2, Evaluate(8, resize=8)
    made.validation = InMemory(np.zeros((9, 8, 8, 3), np.uint8), [0] * 9, classes=("a", "b"))
    calls, sums = [], []
    for made.rank in (0, 1):
        sizes: list[int] = []

        def forward(pictures: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(len(pictures))
            return torch.zeros(len(pictures), 2)

        sums.append(made.evaluate(forward, torch.device("cpu")))
        calls.append(sizes)
    assert len(calls[0]) == len(calls[1]) == -(-seen // 4) and min(*calls[0], *calls[1]) > 0
    total = {key: sum(float(each[key]) for each in sums) for key in sums[0]}
    assert total == pytest.approx({"count": seen, "val_loss": seen * np.log(2), "val_accuracy": seen})


def test_with_nesterov_the_output_decays_alike_under_scion_and_scionc():
    decays = [
        next(group["weight_decay"] for group in optimizer.param_groups if group["name"] == "output")
        for optimizer, _ in (
            build(model(), Optim(name, nesterov=True), Schedule(), 10)[0] for name in ("scion", "scionc")
        )
    ]
    assert decays[0] == pytest.approx(decays[1], rel=1e-12)
