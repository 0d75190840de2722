"""Lightning: `configure_optimizers`, its closures, clipping and accumulation, its checkpoints, our callback."""

import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from following import DECAY, LR, MAKERS, AppliedDecay, Steps, assert_same, weights
from needs import library
from small import batch, net
from torch import Tensor, nn

import steadynorm as sn
from steadynorm import records

library("lightning")

with warnings.catch_warnings():  # Lightning and torchmetrics import deprecated things
    warnings.simplefilter("ignore")
    from lightning.pytorch import LightningModule, Trainer

    from steadynorm.integrations.lightning import MonitorCallback

from steadynorm.records.sinks import to_folder

TOTAL = 8
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:.*isinstance.treespec, LeafSpec.*:FutureWarning"
    ),  # Lightning's, with this torch
    pytest.mark.filterwarnings("ignore:Checkpoint directory .* exists and is not empty:UserWarning"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)


class Loader:
    """Load batches by number. It is stateful, as Lightning requires to resume in the middle of an epoch."""

    def __init__(self) -> None:
        self.next = 0

    def __len__(self) -> int:
        return 16

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        while self.next < len(self):
            self.next += 1
            yield batch(self.next)
        self.next = 0

    def state_dict(self) -> dict[str, int]:
        return {"next": self.next}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.next = state["next"]


class Module(LightningModule):
    def __init__(self, name: str):
        super().__init__()
        self.net, self.name = net(), name

    def training_step(self, examples: Any, index: int) -> Tensor:
        x, y = examples
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = MAKERS[self.name](self.net)
        self.steps = Steps(optimizer)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, ratio)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def ratio(step: int) -> float:
    return (step + 1) / 3 if step < 3 else 1 - (step - 2) / 10


def trainer_of(folder: Path, *callbacks: Any, steps: int = TOTAL, **settings: Any) -> Trainer:
    return Trainer(
        **{
            "default_root_dir": str(folder),
            "max_steps": steps,
            "accelerator": "cpu",
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "gradient_clip_val": 0.5,
            "log_every_n_steps": 3,
            "callbacks": list(callbacks),
        }
        | settings
    )


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", MAKERS)
def test_the_lr_and_the_decay_follow_its_scheduler(tmp_path: Path, name: str, accumulate: int):
    module = Module(name)
    trainer_of(tmp_path, accumulate_grad_batches=accumulate).fit(module, Loader())
    module.steps.check([ratio(step) for step in range(TOTAL)])


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_resumed_from_its_checkpoint_ends_like_an_unbroken_one(tmp_path: Path, name: str):
    """The callback's records also continue."""
    whole = Module(name)
    trainer_of(tmp_path, MonitorCallback(to_folder(tmp_path / "a"))).fit(whole, Loader())
    stopped = Module(name)
    trainer = trainer_of(tmp_path, MonitorCallback(to_folder(tmp_path / "b")), steps=5)
    trainer.fit(stopped, Loader())
    trainer.save_checkpoint(tmp_path / "five.ckpt")
    resumed = Module(name)
    trainer = trainer_of(tmp_path, MonitorCallback(to_folder(tmp_path / "b")))
    trainer.fit(resumed, Loader(), ckpt_path=str(tmp_path / "five.ckpt"), weights_only=True)
    assert_same(weights(whole), weights(resumed))
    resumed.steps.check([ratio(step) for step in range(5, TOTAL)])
    one, two = records.read(tmp_path / "a"), records.read(tmp_path / "b")
    assert two.steps.tolist() == one.steps.tolist() == list(range(1, TOTAL + 1))
    assert two.columns["weight_norm"].tolist() == pytest.approx(one.columns["weight_norm"].tolist(), rel=1e-6)


def test_a_correction_with_skip_joins_an_adamw_run_of_200_steps(tmp_path: Path):
    """Lightning saves at step 100, in the middle of an epoch."""

    def long_ratio(step: int) -> float:
        return (step + 1) / 20 if step < 20 else 1 - (step - 19) / 200

    class Long(Module):
        def configure_optimizers(self) -> Any:
            self.optimizer = torch.optim.AdamW(self.net.named_parameters(), lr=LR, weight_decay=DECAY)
            if self.name == "corrected":
                sn.correct(self.optimizer, skip=["head.weight"])
                self.applied = AppliedDecay(self.optimizer)
            scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, long_ratio)
            return {"optimizer": self.optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}

    trainer = trainer_of(tmp_path, steps=100)
    trainer.fit(Long("plain"), Loader())
    trainer.save_checkpoint(tmp_path / "hundred.ckpt")
    module = Long("corrected")
    trainer_of(tmp_path, steps=200).fit(module, Loader(), ckpt_path=str(tmp_path / "hundred.ckpt"), weights_only=True)
    net = module.net
    module.applied.check(lambda step: {net.head.weight: DECAY, net.hidden.weight: DECAY * long_ratio(step)}, 100, 200)
    assert {int(state["step"]) for state in module.optimizer.state.values()} == {200}


def test_the_callback_resumes_from_a_checkpoint_made_in_the_middle(tmp_path: Path):
    """A checkpoint callback saves while the monitor runs, and the forecast continues as if unbroken."""
    from lightning.pytorch.callbacks import ModelCheckpoint

    def watched(run: str) -> Trainer:
        saving = ModelCheckpoint(tmp_path, filename="{step}", every_n_train_steps=5, save_top_k=-1)
        return trainer_of(tmp_path, MonitorCallback(to_folder(tmp_path / run)), saving, enable_checkpointing=True)

    watched("a").fit(Module("ScionC"), Loader())
    watched("b").fit(Module("ScionC"), Loader(), ckpt_path=str(tmp_path / "step=5.ckpt"), weights_only=True)
    one, two = records.read(tmp_path / "a"), records.read(tmp_path / "b")
    assert two.steps.tolist() == [6, 7, 8]
    for key in ("forecast_norm", "weight_norm", "spectral_norm", "lr", "weight_decay"):
        assert two.columns[key].tolist() == pytest.approx(one.columns[key].tolist()[5:], rel=1e-6), key


def test_manual_optimization_takes_the_same_steps(tmp_path: Path):
    class Manual(Module):
        def __init__(self, name: str):
            super().__init__(name)
            self.automatic_optimization = False

        def training_step(self, examples: Any, index: int) -> None:
            optimizer: Any = self.optimizers()
            optimizer.zero_grad()
            self.manual_backward(super().training_step(examples, index))
            self.clip_gradients(optimizer, 0.5, "norm")
            optimizer.step()
            self.lr_schedulers().step()

    automatic, manual = Module("ScionC"), Manual("ScionC")
    trainer_of(tmp_path).fit(automatic, Loader())
    trainer_of(tmp_path, gradient_clip_val=None).fit(manual, Loader())
    assert_same(weights(automatic), weights(manual))
