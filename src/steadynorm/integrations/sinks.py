"""Where a monitor's records go: TensorBoard, Weights & Biases, a folder for `steadynorm report`.

A sink is any function of a list of records. Steps rise, but after resuming some may come again: those since the
checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from steadynorm import records as files
from steadynorm.monitor import Record, Writer, log_records, scalars

Sink: TypeAlias = Callable[[Sequence[Record]], None]


def to_tensorboard(writer: Writer) -> Sink:
    """Scalars of a `torch.utils.tensorboard.SummaryWriter`, or of anything with its `add_scalar`."""
    return lambda records: log_records(writer, records)


def to_wandb(run: Any = None, *, prefix: str = "steadynorm") -> Sink:
    """Metrics `steadynorm/...` of a Weights & Biases run, by default the current one, over `steadynorm/step`.

    They have a step of their own: W&B drops what is logged for an earlier step than its last, and a trainer logs, too.
    """
    defined: list[Any] = []

    def sink(records: Sequence[Record]) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        target = wandb.run if run is None else run
        if target is None:
            raise RuntimeError("to_wandb: there is no current run; call wandb.init() before training, or pass the run")
        if target not in defined:
            target.define_metric(f"{prefix}/step")
            target.define_metric(f"{prefix}/*", step_metric=f"{prefix}/step")
            defined.append(target)
        for record in records:
            values = {f"{prefix}/{tag}": value for tag, value in scalars(record).items()}
            target.log({f"{prefix}/step": record["step"], **values})

    return sink


def to_folder(folder: str | Path, *, config: Mapping[str, Any] | None = None) -> Sink:
    """A run that `steadynorm report folder` shows. A resumed run goes on in the same folder, with the same config.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     to_folder(folder)([{"step": 1, "lr": 0.1}, {"step": 2, "lr": 0.2}])
    ...     to_folder(folder)([{"step": 2, "lr": 0.3}])  # as after a stop: step 2 comes again
    ...     files.read(folder).columns["lr"].tolist()
    [0.1, 0.3]
    """
    path = Path(folder) / files.FILE
    held: list[files.Recorder] = []

    def sink(records: Sequence[Record]) -> None:
        if not records:
            return
        first = records[0]["step"]
        if not (held and held[0].last < first and held[0].reopen()):  # the first time, or steps come again
            resume_at = first if path.exists() else None
            held[:] = [files.Recorder(path, name=path.parent.name, config=config or {}, resume_at=resume_at)]
        with held[0] as recorder:
            for record in records:
                recorder.write(record)

    return sink
