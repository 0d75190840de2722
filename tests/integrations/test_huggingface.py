"""Hugging Face's Trainer with our optimizers: its schedulers drive the lr, its checkpoints resume, our callback watches."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from architectures import ARCHITECTURES
from following import DECAY, LR, MAKERS, AppliedDecay, Steps, assert_same, warmup_cosine, warmup_linear, weights
from needs import library
from torch.utils.data import Dataset

import steadynorm as sn
from steadynorm import records

library("transformers")
library("accelerate")

from transformers import Trainer, TrainingArguments

from steadynorm.integrations.huggingface import STATE, MonitorCallback
from steadynorm.records.sinks import to_folder

TOTAL, WARMUP = 8, 3
RATIOS = {
    "linear": [warmup_linear(step, WARMUP, TOTAL) for step in range(TOTAL)],
    "cosine": [warmup_cosine(step, WARMUP, TOTAL) for step in range(TOTAL)],
    "constant_with_warmup": [min(1.0, step / WARMUP) for step in range(TOTAL)],
}
pytestmark = pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator:UserWarning")


class Tokens(Dataset):
    """Random sentences that are always the same."""

    def __init__(self, count: int = 32):
        self.ids = torch.randint(0, 32, (count, 8), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, k: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.ids[k], "labels": self.ids[k]}


def trainer_of(
    folder: Path, name: str = "ScionC", *, model: str = "gpt2", callbacks: Any = (), **settings: Any
) -> Trainer:
    torch.manual_seed(0)
    network = ARCHITECTURES[model].make()
    args = TrainingArguments(
        **{
            "output_dir": str(folder),
            "max_steps": TOTAL,
            "warmup_steps": WARMUP,
            "per_device_train_batch_size": 4,
            "max_grad_norm": 0.5,
            "logging_steps": 1,
            "save_steps": 5,
            "report_to": "none",
            "use_cpu": True,
            "disable_tqdm": True,
            "seed": 0,
            "dataloader_pin_memory": False,
        }
        | settings
    )
    return Trainer(
        network,
        args,
        train_dataset=Tokens(),
        optimizers=(MAKERS[name](network), None),  # the whole integration
        callbacks=list(callbacks),
    )


@pytest.mark.parametrize("name", MAKERS)
@pytest.mark.parametrize("schedule", RATIOS)
def test_its_scheduler_drives_the_lr_and_the_decay_follows(tmp_path: Path, name: str, schedule: str):
    trainer = trainer_of(tmp_path, name, lr_scheduler_type=schedule, save_strategy="no")
    steps = Steps(trainer.optimizer)
    before = weights(trainer.model)
    trainer.train()
    steps.check(RATIOS[schedule])
    assert trainer.state.log_history[-1]["train_loss"] > 0
    assert not torch.equal(before["transformer.wte.weight"], trainer.model.state_dict()["transformer.wte.weight"])


@pytest.mark.parametrize("name", MAKERS)
def test_a_run_resumed_from_its_checkpoint_ends_like_an_unbroken_one(tmp_path: Path, name: str):
    whole = trainer_of(tmp_path / "whole", name)
    whole.train()
    resumed = trainer_of(tmp_path / "whole", name)
    steps = Steps(resumed.optimizer)
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    assert_same(weights(whole.model), weights(resumed.model))
    steps.check(RATIOS["linear"][5:])  # peak and base came from the checkpoint, not from the decayed values


def test_a_run_resumed_with_another_lr_keeps_the_peak_of_the_checkpoint(tmp_path: Path):
    """timm's AdamC takes its peak from the constructor, which would change the target silently."""
    whole = trainer_of(tmp_path, "AdamC")
    whole.train()
    resumed = trainer_of(tmp_path, "AdamC")
    for group in resumed.optimizer.param_groups:
        group["lr"] = group["peak_lr"] = 1.0
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-5"))
    assert_same(weights(whole.model), weights(resumed.model))


def its_own_adamw(folder: Path, **settings: Any) -> Trainer:
    """Return a Trainer that makes its own optimizer."""
    made = trainer_of(folder, learning_rate=LR, weight_decay=DECAY, **settings)
    made.optimizer = None
    return made


def decays_of(trainer: Trainer, ratio: float) -> dict[torch.Tensor, float]:
    """Check that the output layer keeps its decay, a matrix's follows the lr, and a gain has none."""
    block = trainer.model.transformer.h[0]
    output = trainer.model.get_output_embeddings().weight
    return {output: DECAY, block.mlp.c_fc.weight: DECAY * ratio, block.ln_1.weight: 0.0}


@pytest.mark.parametrize("schedule", RATIOS)
def test_its_own_adamw_is_corrected_and_keeps_its_lr_and_its_list_without_decay(tmp_path: Path, schedule: str):
    """This is the first recipe of docs/integrations.md."""
    trainer = its_own_adamw(tmp_path, lr_scheduler_type=schedule, save_strategy="no")
    trainer.create_optimizer()
    before = [{**group, "params": list(group["params"])} for group in trainer.optimizer.param_groups]
    sn.correct(trainer.optimizer, trainer.model)
    made, applied = trainer.optimizer, AppliedDecay(trainer.optimizer)
    trainer.train()
    assert type(made) is torch.optim.AdamW and applied.rows
    assert [group["weight_decay"] for group in before] == [DECAY, 0.0]
    for old, new in zip(before, made.param_groups, strict=True):
        assert [id(p) for p in old["params"]] == [id(p) for p in new["params"]]
        assert (new["initial_lr"], new["peak_lr"]) == (LR, LR)
    applied.check(lambda step: decays_of(trainer, RATIOS[schedule][step]), 0, TOTAL)
    assert [lrs for lrs, _ in applied.rows] == [pytest.approx([LR * ratio] * 2) for ratio in RATIOS[schedule]]


def test_a_correction_with_skip_joins_an_adamw_run_of_200_steps(tmp_path: Path):
    settings = {"max_steps": 200, "warmup_steps": 20, "save_steps": 100, "logging_steps": 100}
    its_own_adamw(tmp_path, **settings).train()
    joined = its_own_adamw(tmp_path, **settings)
    joined.create_optimizer()
    sn.correct(joined.optimizer, skip=[joined.model.get_output_embeddings()])
    optimizer, applied = joined.optimizer, AppliedDecay(joined.optimizer)
    joined.train(resume_from_checkpoint=str(tmp_path / "checkpoint-100"))
    applied.check(lambda step: decays_of(joined, warmup_linear(step, 20, 200)), 100, 200)
    assert {int(state["step"]) for state in optimizer.state.values()} == {200}  # it went on, with its moments


def test_accumulated_gradients_make_one_step_of_ours(tmp_path: Path):
    """Two halves of a batch give what the batch gives: a normalised update sees only the sum."""
    at_once = trainer_of(tmp_path / "a", save_strategy="no", per_device_train_batch_size=8)
    in_two = trainer_of(
        tmp_path / "b", save_strategy="no", per_device_train_batch_size=4, gradient_accumulation_steps=2
    )
    steps = Steps(in_two.optimizer)
    for trainer in (at_once, in_two):
        for p in trainer.model.modules():
            if isinstance(p, torch.nn.Dropout):
                p.p = 0.0
        for group in trainer.optimizer.param_groups:
            group["polar"] = "svd"
        trainer.train()
    steps.check(RATIOS["linear"])
    one, two = weights(at_once.model), weights(in_two.model)
    for key in one:
        torch.testing.assert_close(one[key], two[key], rtol=1e-3, atol=1e-3)


def test_bf16_autocast_trains(tmp_path: Path):
    trainer = trainer_of(tmp_path, bf16=True, save_strategy="no")
    trainer.train()
    assert all(value.isfinite().all() for value in weights(trainer.model).values())


def test_a_mixture_of_experts_trains(tmp_path: Path):
    trainer = trainer_of(tmp_path, model="mixtral", save_strategy="no")
    before = weights(trainer.model)
    trainer.train()
    after = weights(trainer.model)
    assert not [key for key in before if torch.equal(before[key], after[key])]


# --- the callback


def of(folder: Path, **settings: Any) -> MonitorCallback:
    return MonitorCallback(to_folder(folder), **settings)


def test_the_callback_records_every_step_and_changes_nothing(tmp_path: Path):
    plain = trainer_of(tmp_path / "plain", save_strategy="no")
    plain.train()
    watched = trainer_of(tmp_path / "watched", callbacks=[of(tmp_path / "run")], save_strategy="no")
    steps = Steps(watched.optimizer)
    watched.train()
    assert_same(weights(plain.model), weights(watched.model))
    run = records.read(tmp_path / "run")
    assert run.steps.tolist() == list(range(1, TOTAL + 1))
    hidden = next(
        k for k, group in enumerate(watched.optimizer.param_groups) if group["name"].startswith("hidden-transposed")
    )
    assert run.columns["lr"].tolist() == pytest.approx(steps.lrs(hidden))
    logged = [entry["loss"] for entry in watched.state.log_history if "loss" in entry]
    assert run.columns["loss"].tolist() == pytest.approx(logged)
    assert "transformer.h.0.attn.c_attn.weight" in run.layers
    assert run.columns["forecast_norm/hidden"][-1] > 0
    assert math.isnan(run.columns["forecast_norm"][-1])  # rows of the tables that no token used wait in their own time


def test_the_callback_resumes_as_if_the_run_were_unbroken(tmp_path: Path):
    whole = trainer_of(tmp_path / "whole", callbacks=[of(tmp_path / "a")])
    whole.train()
    assert (tmp_path / "whole" / "checkpoint-5" / STATE).exists()
    before = json.loads((tmp_path / "whole" / "checkpoint-5" / "trainer_state.json").read_text(encoding="utf-8"))
    assert before["global_step"] == 5
    folder = tmp_path / "b"
    stopped = trainer_of(tmp_path / "stopped", callbacks=[of(folder)])
    stopped.add_callback(StopAfter(6))  # one step more than was saved: it is done, and recorded, again
    stopped.train()
    assert records.read(folder).steps.tolist() == list(range(1, 7))
    resumed = trainer_of(tmp_path / "stopped", callbacks=[of(folder)])
    resumed.train(resume_from_checkpoint=str(tmp_path / "stopped" / "checkpoint-5"))
    one, two = records.read(tmp_path / "a"), records.read(folder)
    assert two.steps.tolist() == one.steps.tolist()
    for key in ("weight_norm", "forecast_norm", "spectral_norm", "lr", "weight_decay", "alignment"):
        assert two.columns[key].tolist() == pytest.approx(one.columns[key].tolist(), rel=1e-6, nan_ok=True), key


def StopAfter(step: int) -> Any:  # noqa: N802
    from transformers import TrainerCallback

    class Stop(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            control.should_training_stop = state.global_step >= step

    return Stop()


def test_something_that_is_not_a_sink_is_refused_at_once():
    with pytest.raises(
        TypeError, match=r"'runs/a' is not a function of a list of records; use steadynorm.records.sinks"
    ):
        MonitorCallback("runs/a")


def test_two_lines_of_code_are_enough(tmp_path: Path):
    """As in the README: the model's own roles and Trainer's default schedule."""
    model = ARCHITECTURES["llama"].make()
    args = TrainingArguments(
        output_dir=str(tmp_path), max_steps=3, report_to="none", use_cpu=True, disable_tqdm=True, save_strategy="no"
    )
    trainer = Trainer(model, args, train_dataset=Tokens(), optimizers=(sn.ScionC(sn.param_groups(model)), None))
    assert trainer.train().training_loss > 0
