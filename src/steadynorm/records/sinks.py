"""Where a monitor's records go: TensorBoard, Weights & Biases, a folder for `steadynorm report`.

A sink is any function of a list of records. Steps rise, but after resuming some may come again: those since the
checkpoint.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeAlias

from steadynorm import records as files
from steadynorm.monitor import Record, Records, Writer, log_records, scalars

Sink: TypeAlias = Callable[[Sequence[Record]], None]

_WRITERS: dict[Path, object] = {}  # file -> the monitor whose records this process wrote to it last


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


def to_folder(
    folder: str | Path, *, config: Mapping[str, Any] | None = None, layers: int | None = files.LAYERS
) -> Sink:
    """Keep records in a folder that `steadynorm report folder` shows.

    A folder holds one run. If it holds records already, they are continued when the monitor was resumed
    (`Monitor.load_state_dict`) and `config` is the same, and records since the checkpoint are replaced. Otherwise
    the first write raises RecordError and leaves the folder as it was.

    layers: how closely steps keep the values of every layer, which make up most of a record: gaps between such steps
    stay below 1/layers of the step number. Of 20,000 steps about 660 keep them, among them the first 200; with 144
    layers the file has 50 MB instead of 600. None keeps them in every record. The other values are always kept.

    Examples:
        >>> import tempfile
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write = to_folder(folder)
        ...     write([{"step": 1, "lr": 0.1}])
        ...     write([{"step": 2, "lr": 0.2}])
        ...     files.read(folder).columns["lr"].tolist()
        [0.1, 0.2]
    """
    path = Path(folder) / files.FILE
    held: list[files.Recorder] = []

    def sink(records: Sequence[Record]) -> None:
        if not records:
            return
        first = records[0]["step"]
        if not (held and held[0].last < first and held[0].reopen()):  # the first time, or steps come again
            held[:] = [_recorder(path, config or {}, records, layers)]
        if isinstance(records, Records):
            _WRITERS[path.resolve()] = records.source
        with held[0] as recorder:
            for record in records:
                recorder.write(record)

    return sink


def _recorder(path: Path, config: Mapping[str, Any], records: Sequence[Record], layers: int | None) -> files.Recorder:
    """A new file, or the one of the run that these records continue."""
    first, resume_at = records[0]["step"], None
    if path.exists():
        last = files.last_step(path)
        resumed, source = (records.resumed, records.source) if isinstance(records, Records) else (False, None)
        another = source is not None and _WRITERS.get(path.resolve()) is not source
        if last and not resumed and (another or first <= last):
            raise files.RecordError(
                f"{path.parent}: holds a run of {last} steps, which a run that begins at step {first} would overwrite; "
                "choose another folder, delete this one, or resume that run: monitor.load_state_dict(<its state_dict>)"
            )
        resume_at = first
    return files.Recorder(path, name=path.parent.name, config=config, resume_at=resume_at, layers=layers)
