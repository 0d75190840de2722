"""Where a monitor's records go: TensorBoard, Weights & Biases, or a folder for `steadynorm report`.

A sink is any function of a list of records. Steps rise, but after resuming, those since the checkpoint may come again.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from steadynorm import records as files
from steadynorm.records.schema import Record, Records

Sink: TypeAlias = Callable[[Sequence[Record]], None]

_WRITERS: dict[Path, object] = {}  # file -> the monitor whose records this process wrote to it last


class Writer(Protocol):
    """The part of torch.utils.tensorboard.SummaryWriter that `log_records` needs."""

    def add_scalar(self, tag: str, scalar_value: float, global_step: int | None = None) -> None: ...


def scalars(record: Record) -> dict[str, float]:
    """Return a record without its step as tag -> number: layers as `norm/<layer>` and so on, without None.

    >>> scalars({"step": 3, "lr": 0.1, "loss": None, "layers": {"head": {"norm": 2.0}}})
    {'lr': 0.1, 'norm/head': 2.0}
    """
    tags = {key: value for key, value in record.items() if key not in ("step", "layers")}
    for name, quantities in record.get("layers", {}).items():
        tags |= {f"{quantity}/{name}": value for quantity, value in quantities.items()}
    return {tag: value for tag, value in tags.items() if value is not None}


def log_records(writer: Writer, records: Iterable[Record]) -> None:
    """Write the `scalars` of records.

    >>> class Printer:
    ...     def add_scalar(self, tag, scalar_value, global_step=None): print(tag, scalar_value, global_step)
    >>> log_records(Printer(), [{"step": 3, "lr": 0.1, "loss": None, "layers": {"head": {"norm": 2.0}}}])
    lr 0.1 3
    norm/head 2.0 3
    """
    for record in records:
        for tag, value in scalars(record).items():
            writer.add_scalar(tag, value, record["step"])


def to_tensorboard(writer: Writer) -> Sink:
    """Return a sink that writes scalars to a `SummaryWriter`, or to anything with its `add_scalar`."""
    return lambda records: log_records(writer, records)


def to_wandb(run: Any = None, *, prefix: str = "steadynorm") -> Sink:
    """Return a sink that logs `steadynorm/...` to a Weights & Biases run, by default the current one.

    The metrics have their own step, `steadynorm/step`, because W&B drops values for a step before its last, and a trainer
    logs as well.
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
    """Return a sink that keeps records in a folder, which `steadynorm report folder` shows.

    A folder holds one run. If it already has records, they are continued if the monitor was resumed
    (`Monitor.load_state_dict`) and `config` is the same; records since the checkpoint are replaced. Otherwise the first
    write raises RecordError and leaves the folder unchanged. Of several processes only one may write, because all of them
    have the same records.

    Args:
        folder: The run's folder.
        config: The run's configuration, for the header.
        layers: How densely the values of every layer, which make up most of a record, are kept: gaps between steps that
            have them stay below 1/layers of the step number. Of 20,000 steps about 660 have them, including the first
            200; with 144 layers the file takes 50 MB instead of 600. None keeps them in every record.

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
        if not (held and held[0].last < first and held[0].reopen()):  # the first call, or steps come again
            held[:] = [_recorder(path, config or {}, records, layers)]
        if isinstance(records, Records):
            _WRITERS[path.resolve()] = records.source
        with held[0] as recorder:
            for record in records:
                recorder.write(record)

    return sink


def _recorder(path: Path, config: Mapping[str, Any], records: Sequence[Record], layers: int | None) -> files.Recorder:
    """Return a recorder for a new file, or for the run that these records continue."""
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
