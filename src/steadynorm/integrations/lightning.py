"""Lightning: a callback that watches the optimizer of a LightningModule.

Trainer(callbacks=[MonitorCallback(sink)])
"""

from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer  # pyright: ignore[reportMissingImports]

from steadynorm.integrations.watch import Watch
from steadynorm.records.sinks import Sink


class MonitorCallback(Callback):
    """Measures every optimizer step, and passes the records to sinks every `log_every_n_steps` of the Trainer.

    Its state is part of Lightning's checkpoints, so a resumed run continues as if uninterrupted.

    Args:
        *sinks: Functions of a list of records, such as `sinks.to_tensorboard(trainer.logger.experiment)`, called only in
            the first process.
        optimizer: The index of the optimizer to watch among those of `configure_optimizers`.
        **settings: Settings of `steadynorm.Monitor`: every, flush, alignment, forecast.
    """

    def __init__(self, *sinks: Sink, optimizer: int = 0, **settings: Any):
        self.watch, self.optimizer = Watch(sinks, settings), optimizer

    @property
    def state_key(self) -> str:
        return self._generate_state_key(optimizer=self.optimizer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            self.watch.sinks = ()
        self.watch.begin(trainer.optimizers[self.optimizer], pl_module, steps=trainer.global_step)

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        monitor = self.watch.monitor
        if monitor is not None and monitor.steps % trainer.log_every_n_steps == 0:  # pyright: ignore[reportAttributeAccessIssue]
            self.watch.hand_over()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.watch.end()

    def state_dict(self) -> dict[str, Any]:
        return self.watch.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.watch.load_state_dict(state_dict)
