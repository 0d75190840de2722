"""Train, recording every step and resuming automatically."""

import contextlib
import gc
import math
import random
import signal
import time
import warnings
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from steadynorm import machine, records
from steadynorm.dtensor import local
from steadynorm.files import lock, make_folder, read_json, write_json
from steadynorm.lab import origin
from steadynorm.lab.train import checkpoint, optimizers, parallel, tasks
from steadynorm.lab.train.config import Config, plain, training_part
from steadynorm.lab.train.parallel import Team
from steadynorm.lab.train.progress_line import Display
from steadynorm.lab.train.run_state import RunParts, restore, store
from steadynorm.monitor import Monitor, log_records
from steadynorm.signals import handle_signals


class DivergedError(ValueError):
    """The loss is no longer finite."""


@dataclass(frozen=True)
class Result:
    """Outcome of a run."""

    steps: int
    final: dict[str, float]  # of the last evaluation
    stopped_by: int = 0  # the signal that stopped the run, which then resumes when it is started again; 0: none

    @property
    def finished(self) -> bool:
        """Whether the run took its last step."""
        return not self.stopped_by


def train(config: Config, *, quiet: bool = False) -> Result:
    """Start or resume training in the configuration's folder, under torchrun as one of its processes."""
    config.check()
    with parallel.team(config.device) as team:
        config = _with_known_bf16(config, team)
        result = _run(config, team, quiet)
        gc.collect()  # an object that outlives the process group may hang when it is freed
        team.barrier()
        return result


def _run(config: Config, team: Team, quiet: bool) -> Result:
    with contextlib.ExitStack() as stack:
        if team.is_main:
            busy = f"another process is training in {config.out}; wait for it, or choose another --out"
            stack.enter_context(lock(make_folder(config.out), busy=busy))
            _keep_config(config)
            checkpoint.tidy(config.out / "checkpoints")
        team.barrier()  # the main process checks the folder first
        trainer = stack.enter_context(contextlib.closing(Trainer(config, team, quiet or not team.is_main)))
        stack.enter_context(handle_signals(trainer.stop, signal.SIGTERM, signal.SIGINT))
        return trainer.run()


class Trainer:
    """Run the loop in one process."""

    def __init__(self, config: Config, team: Team, quiet: bool):
        self.config, self.team, self.device, self.stopping = config, team, team.device, 0
        self.micro = _micro_batch(config, team)
        generator = torch.Generator().manual_seed(config.seed)
        random.seed(config.seed)
        torch.manual_seed(config.seed)
        task = tasks.make(config, team.rank, team.world)
        model = task.model(generator).to(self.device)
        self.wrapped = team.wrap(model, config.parallel)  # not compiled: torch.compile hides DDP and FSDP2
        self.called: Any = torch.compile(self.wrapped) if config.compile else self.wrapped
        mesh = team.mesh if config.parallel == "ddp" else None  # FSDP2's parameters carry their own
        pairs = optimizers.build(model, config.optim, config.schedule, config.steps, mesh=mesh)
        self.parts = RunParts(
            model, pairs, [Monitor(optimizer, model, every=config.monitor_every) for optimizer, _ in pairs], task
        )
        self.step, self.seconds, self.final = restore(config.out / "checkpoints", self.parts, team) or (0, 0.0, {})
        self.flushed = self.step, self.seconds  # records reach up to here
        name = config.name or config.out.name
        self.display = Display(config.steps, name, quiet)
        if self.step:
            self.display.say(f"{name}: resumed after step {self.step}")
        self.recorder = self.writer = None
        if team.is_main:
            self.recorder = records.Recorder(
                config.out / records.FILE,
                name=name,
                config=training_part(plain(config)),
                resume_at=self.step + 1,
                origin=origin.describe(self.device),
                layers=records.LAYERS if config.steps > _SHORT * config.monitor_every else None,
            )
            if max(self.recorder.last, 0) < self.step - self.step % config.monitor_every:
                warnings.warn(
                    f"{self.recorder.path}: ends at step {max(self.recorder.last, 0)}, the checkpoint is of step "
                    f"{self.step}: what lies between was lost; remove {config.out} to train it again",
                    stacklevel=2,
                )
            if config.tensorboard:
                from torch.utils.tensorboard import SummaryWriter

                purge_step = self.step + 1 if self.step else None
                self.writer = SummaryWriter(str(config.out / "tensorboard"), purge_step=purge_step)

    def close(self) -> None:
        """Close what the run writes to."""
        for output in (self.display, self.recorder, self.writer):
            if output is not None:
                output.close()

    def stop(self, number: int, _: object) -> None:
        """End the run after the current step, with a checkpoint; a second Ctrl-C ends it at once."""
        if self.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.stopping = number

    def run(self) -> Result:
        """Train until the last step, or until a signal stops the run."""
        config, started = self.config, time.perf_counter() - self.seconds
        batches = self.parts.task.batches()
        while self.step < config.steps:
            loss = self._update(next(batches))
            self.step += 1
            self.seconds = time.perf_counter() - started
            last = self.step == config.steps
            evaluates = last or self.step % config.eval_every == 0
            stopped_by = self._agreed_to_stop()
            saves = last or stopped_by or self.step % config.save_every == 0
            if evaluates or saves or self.step % _FLUSH == 0:
                self._flush(loss, self._evaluate() if evaluates else {})
            if saves:
                self._check_weights()
                if self.recorder is not None:
                    self.recorder.sync()  # after a power cut, no checkpoint may be ahead of the records
                progress = self.step, self.seconds, self.final
                store(config.out / "checkpoints", self.parts, progress, self.team, keep=config.keep)
            if stopped_by and not last:
                self.display.say(f"stopped at step {self.step}; run the same command to resume")
                return Result(self.step, self.final, stopped_by)
        return Result(self.step, self.final)

    def _agreed_to_stop(self) -> int:
        """Return the signal that told any process to stop, or 0; several processes ask only where they synchronize anyway."""
        if self.team.world == 1:
            return self.stopping
        return self.team.max_over_processes(self.stopping) if self.step % _FLUSH == 0 else 0

    def _update(self, batch: tasks.Batch) -> Tensor:
        """Take one step on one batch, in micro-batches, and return the mean loss on the device."""
        self.parts.model.train()
        split = (tensor.to(self.device, non_blocking=True).split(self.micro) for tensor in batch)
        parts = list(zip(*split, strict=True))
        total = torch.zeros((), device=self.device)
        for k, part in enumerate(parts, start=1):
            with self.team.accumulating(self.wrapped, last=k == len(parts)):
                with self._autocast():
                    loss = self.parts.task.loss(self.called, part) / len(parts)
                loss.backward()
            total += loss.detach()
        extra: dict[str, Any] = {"loss": self.team.average(total)}
        if self.config.clip is not None:
            norm = nn.utils.clip_grad_norm_(self.parts.model.parameters(), self.config.clip)
            extra["grad_norm"] = norm.full_tensor() if isinstance(norm, DTensor) else norm
        for (optimizer, scheduler), monitor in zip(self.parts.optimizers, self.parts.monitors, strict=True):
            monitor.log(**extra)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16 is True)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        self.parts.model.eval()
        with self._autocast():
            sums = self.team.totals(self.parts.task.evaluate(self.called, self.device))
        self.team.reshard(self.parts.model)
        count = sums.pop("count")
        self.final = {key: value / count for key, value in sums.items()}
        return self.final

    def _flush(self, loss: Tensor, evaluated: dict[str, float]) -> None:
        """Write the records since the last flush; raise DivergedError if the loss is not finite, before anything is saved."""
        taken, *others = (
            [_with_role(record, monitor) for record in monitor.measure()] for monitor in self.parts.monitors
        )
        for more in others:  # muon's second optimizer
            for record, other in zip(taken, more, strict=True):
                _join(record, other, clipped=self.config.clip is not None)
        if evaluated and taken and taken[-1]["step"] == self.step:
            taken[-1] |= evaluated
        elif evaluated:
            taken.append({"step": self.step, **evaluated})
        (step, seconds), self.flushed = self.flushed, (self.step, self.seconds)
        for record in taken:  # the time between two flushes is spread evenly over their steps
            share = (record["step"] - step) / (self.step - step)
            record |= {
                "seconds": seconds + (self.seconds - seconds) * share,
                "tokens": self.parts.task.tokens * record["step"],
            }
            if self.recorder is not None:
                self.recorder.write(record)
        if self.writer is not None:
            log_records(self.writer, taken)
        bad = next((r["step"] for r in taken if "loss" in r and r["loss"] is None), None)
        if bad is not None or not math.isfinite(loss.item()):
            raise self._diverged(f"the loss of step {bad or self.step} is")
        self.display.update(self.step, taken[-1] if taken else {}, self.final)

    def _check_weights(self) -> None:
        """Raise DivergedError, on all processes, if weights are not finite: the next loss would be, after they were saved."""
        weights = [local(p).detach() for p in self.parts.model.parameters()]
        if self.team.max_over_processes(int(not all(bool(weight.isfinite().all()) for weight in weights))):
            raise self._diverged(f"the weights after step {self.step} are")

    def _diverged(self, what: str) -> DivergedError:
        out, kept = self.config.out, checkpoint.list_checkpoints(self.config.out / "checkpoints")
        good = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        return DivergedError(f"{out}: {what} not finite; {good}; lower the lr, or check the data")


_FLUSH = 20  # steps between transfers from the device
_SHORT = 2000  # records; a run with no more keeps the values of single layers in all of them


def _with_role(record: dict[str, Any], monitor: Monitor) -> dict[str, Any]:
    """Add "weight_norm/hidden" and so on if the monitor omits them because all its parameters have one role."""
    roles = monitor.roles
    return record | ({f"{key}/{roles[0]}": record[key] for key in records.SPLIT} if len(roles) == 1 else {})


def _join(record: dict[str, Any], other: dict[str, Any], *, clipped: bool) -> None:
    """Merge two optimizers' records of one step into the first: combine norms, in total and by role, and join layers.

    If `clipped`, both already hold the gradient norm of all parameters.
    """
    norms = records.SPLIT if clipped else (*records.SPLIT, "grad_norm")
    for key in (key for key in {**record, **other} if key.partition("/")[0] in norms):
        parts = [source[key] for source in (record, other) if key in source]
        record[key] = None if None in parts else math.hypot(*parts)
    record["layers"] = {**record.get("layers", {}), **other.get("layers", {})}


def _with_known_bf16(config: Config, team: Team) -> Config:
    """Decide `bf16="auto"`: a resumed run keeps what it began with, a new run follows the hardware."""
    if config.bf16 != "auto":
        return config
    path = config.out / "config.json"
    with contextlib.suppress(ValueError):  # a damaged file is reported by _keep_config
        began = read_json(path).get("bf16") if path.exists() else None
        if isinstance(began, bool):
            return replace(config, bf16=began)
    return replace(config, bf16=machine.autocast_bf16(team.device))


def _keep_config(config: Config) -> None:
    """Write config.json; raise ValueError if the folder holds a run with other training settings."""
    path, now = config.out / "config.json", plain(config)
    if path.exists():
        try:
            before = read_json(path)
        except ValueError as error:
            raise ValueError(
                f"{error}; restore it from a copy, or remove only this file if the folder is of exactly this configuration"
            ) from None
        old, new = (records.flatten(training_part(config)) for config in (before, now))
        # Without records or checkpoints, the run that wrote the file stopped before its first step.
        has_begun = (config.out / records.FILE).exists() or checkpoint.list_checkpoints(config.out / "checkpoints")
        differing = sorted(key for key in {*old, *new} if old.get(key) != new.get(key))
        if differing and has_begun:
            changes = ", ".join(f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in differing[:5])
            raise ValueError(f"{config.out} holds a run with another configuration ({changes}); choose another --out")
    write_json(path, now)


def _micro_batch(config: Config, team: Team) -> int:
    """Return the number of samples per forward pass in this process."""
    if config.batch % team.world:
        raise ValueError(f"batch={config.batch} cannot be split evenly over {team.world} processes")
    local = config.batch // team.world
    micro = min(config.micro_batch or local, local)
    if local % micro:
        raise ValueError(f"micro_batch={micro} does not divide the {local} samples of each of {team.world} processes")
    return micro
