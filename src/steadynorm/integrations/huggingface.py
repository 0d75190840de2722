"""Hugging Face: a callback that watches a `transformers.Trainer`.

Trainer(model, args, optimizers=(ScionC(param_groups(model)), None), callbacks=[MonitorCallback(sink)])
"""

from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback  # pyright: ignore[reportMissingImports]
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR  # pyright: ignore[reportMissingImports]

from steadynorm.integrations.watch import Watch
from steadynorm.records.sinks import Sink

STATE = "steadynorm_monitor.pt"  # beside the optimizer's state, in the Trainer's checkpoint


class MonitorCallback(TrainerCallback):
    """Measures every optimizer step, and passes the records to sinks whenever the Trainer logs.

    Its state goes into the Trainer's checkpoints. Resumed from one in `output_dir` it continues as if uninterrupted; from
    one elsewhere its forecast starts again. `loss` is the mean that the Trainer logs, in the last record before it.

    Args:
        *sinks: Functions of a list of records, such as `sinks.to_tensorboard(writer)`, called only in the first process.
        **settings: Settings of `steadynorm.Monitor`: every, flush, alignment, forecast.
    """

    def __init__(self, *sinks: Sink, **settings: Any):
        self.watch = Watch(sinks, settings)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        path = _folder(args, state) / STATE
        if state.global_step and path.exists():
            self.watch.load_state_dict(torch.load(path, map_location="cpu", weights_only=True))  # noqa: TID251
        if not state.is_world_process_zero:
            self.watch.sinks = ()
        self.watch.begin(kwargs["optimizer"], kwargs["model"], steps=state.global_step)

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        logs = kwargs.get("logs") or {}
        self.watch.hand_over(**{key: float(logs[key]) for key in ("loss",) if key in logs})

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        saved = self.watch.state_dict()
        if args.should_save and _folder(args, state).is_dir():
            torch.save(saved, _folder(args, state) / STATE)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.watch.end()


def _folder(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
