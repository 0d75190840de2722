"""Where records go: TensorBoard's files, Weights & Biases offline, and a folder for the report; each is read back."""

from pathlib import Path
from typing import Any

import pytest
from following import MAKERS
from needs import library
from small import loss_of, net

import steadynorm as sn
from steadynorm import records
from steadynorm.monitor import scalars
from steadynorm.records.sinks import to_folder, to_tensorboard, to_wandb

library("tensorboard")
library("wandb")


@pytest.fixture(scope="module")
def taken() -> list[dict[str, Any]]:
    model = net()
    optimizer = MAKERS["ScionC"](model)
    monitor = sn.Monitor(optimizer, model)
    for step in range(4):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        monitor.log(loss=loss)
        optimizer.step()
    return monitor.measure()


def test_tensorboard_holds_every_number_of_every_step(tmp_path: Path, taken: list[dict[str, Any]]):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        to_tensorboard(writer)(taken)
    found = EventAccumulator(str(tmp_path), size_guidance={"scalars": 0})
    found.Reload()
    assert set(found.Tags()["scalars"]) == {tag for record in taken for tag in scalars(record)}
    for tag in ("weight_norm", "loss", "lr/output", "norm/hidden.weight"):
        events = found.Scalars(tag)
        assert [event.step for event in events] == [1, 2, 3, 4]
        assert [event.value for event in events] == pytest.approx([scalars(record)[tag] for record in taken])


def test_wandb_offline_has_its_own_step(tmp_path: Path, taken: list[dict[str, Any]]):
    """A trainer that logs at later steps in between does not make W&B drop our records."""
    import wandb

    with wandb.init(mode="offline", dir=str(tmp_path), project="steadynorm") as run:
        sink = to_wandb()
        sink(taken[:2])
        run.log({"trainer": 1.0}, step=1000)
        sink(taken[2:])
        last = dict(run.summary)
    assert last["steadynorm/step"] == 4
    assert last["steadynorm/weight_norm"] == pytest.approx(taken[-1]["weight_norm"])
    assert last["steadynorm/norm/hidden.weight"] == pytest.approx(taken[-1]["layers"]["hidden.weight"]["norm"])
    assert list(tmp_path.rglob("*.wandb"))


def test_wandb_without_a_run_is_an_error(taken: list[dict[str, Any]]):
    with pytest.raises(RuntimeError, match=r"no current run; call wandb\.init\(\)"):
        to_wandb()(taken)


def test_a_folder_becomes_a_report(tmp_path: Path, taken: list[dict[str, Any]]):
    from steadynorm.report.content import report

    sink = to_folder(tmp_path / "run", config={"optimizer": "ScionC"})
    sink(taken[:2])
    sink(taken[2:])
    run = records.read(tmp_path / "run")
    assert run.steps.tolist() == [1, 2, 3, 4]
    assert run.columns["loss"].tolist() == pytest.approx([record["loss"] for record in taken])
    report([tmp_path / "run"], tmp_path / "page.html")
    assert "hidden.weight" in (tmp_path / "page.html").read_text(encoding="utf-8")


def test_a_folder_of_another_configuration_is_refused(tmp_path: Path, taken: list[dict[str, Any]]):
    to_folder(tmp_path, config={"lr": 0.1})(taken[:2])
    with pytest.raises(records.RecordError, match=r"lr \(0\.1 -> 0\.2\)"):
        to_folder(tmp_path, config={"lr": 0.2})(taken[2:])
