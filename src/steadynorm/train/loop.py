"""The training loop: resumes by itself, records everything, loses nothing."""

import contextlib
import json
import math
import random
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from steadynorm import records
from steadynorm.data.files import lock
from steadynorm.monitor import Monitor, log_records
from steadynorm.train import checkpoint, optimizers, tasks
from steadynorm.train.config import Config, plain, training_part
from steadynorm.train.display import Display


class DivergedError(ValueError):
    """The loss is not finite any more."""


@dataclass(frozen=True)
class Result:
    """How a run ended."""

    steps: int
    finished: bool  # False: stopped by a signal, goes on when started again
    final: dict[str, float]  # of the last evaluation


def train(config: Config, *, quiet: bool = False) -> Result:
    """Run, or go on with, the training of this configuration in its folder."""
    config.check()
    config.out.mkdir(parents=True, exist_ok=True)
    with lock(config.out, busy=f"another process is training in {config.out}; wait for it, or choose another --out"):
        _keep_config(config)
        with Trainer(config, quiet) as trainer, _signals(trainer):
            return trainer.run()


class Trainer:
    """One run in one process: everything it needs, and the loop."""

    def __init__(self, config: Config, quiet: bool):
        self.config, self.stopping = config, False
        self.device = _device(config.device)
        generator = torch.Generator().manual_seed(config.seed)
        random.seed(config.seed)
        torch.manual_seed(config.seed)
        self.task = tasks.make(config)
        self.model = self.task.model(generator).to(self.device)
        self.optimizers = optimizers.build(self.model, config.optim, config.schedule, config.steps)
        self.monitors = [Monitor(each, self.model, every=config.monitor_every) for each, _ in self.optimizers]
        self.step, self.seconds, self.final = 0, 0.0, dict[str, float]()
        self._resume()
        self.called: Any = torch.compile(self.model) if config.compile else self.model
        name = config.name or config.out.name
        self.recorder = records.Recorder(
            config.out / records.FILE, name=name, config=training_part(plain(config)), resume_at=self.step + 1
        )
        self.writer = _tensorboard(config, self.step)
        self.display = Display(config.steps, name, quiet)

    def __enter__(self) -> "Trainer":
        return self

    def __exit__(self, *_: object) -> None:
        self.display.close()
        self.recorder.close()
        if self.writer is not None:
            self.writer.close()

    def run(self) -> Result:
        """The loop."""
        config, started = self.config, time.perf_counter() - self.seconds
        batches = self.task.batches()
        while self.step < config.steps:
            loss = self._update(next(batches))
            self.step += 1
            self.seconds = time.perf_counter() - started
            last = self.step == config.steps
            evaluates = last or self.step % config.eval_every == 0
            saves = last or self.stopping or self.step % config.save_every == 0
            if evaluates or saves or self.step % _FLUSH == 0:
                self._flush(loss, self._evaluate() if evaluates else {})
            if saves:
                self._save()
            if self.stopping and not last:
                self.display.say(f"stopped at step {self.step}; start it again to go on")
                return Result(self.step, False, self.final)
        return Result(self.step, True, self.final)

    def _update(self, batch: tasks.Batch) -> Tensor:
        """One update from one batch, in micro-batches; the mean loss, on the device."""
        self.model.train()
        micro = self.config.micro_batch or len(batch[0])
        parts = list(zip(*(each.to(self.device, non_blocking=True).split(micro) for each in batch), strict=True))
        total = torch.zeros((), device=self.device)
        for part in parts:
            with self._autocast():
                loss = self.task.loss(self.called, part) / len(parts)
            loss.backward()
            total += loss.detach()
        extra: dict[str, Any] = {"loss": total}
        if self.config.clip is not None:
            extra["grad_norm"] = nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        for (optimizer, scheduler), monitor in zip(self.optimizers, self.monitors, strict=True):
            monitor.log(**extra)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad(set_to_none=True)
        return total

    def _autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.bf16)

    @torch.no_grad()
    def _evaluate(self) -> dict[str, float]:
        self.model.eval()
        with self._autocast():
            sums = self.task.evaluate(self.called, self.device)
        count = float(sums.pop("count"))
        self.final = {key: float(value) / count for key, value in sums.items()}
        return self.final

    def _flush(self, loss: Tensor, evaluated: dict[str, float]) -> None:
        """Records of the steps since the last time; a loss that is not finite ends the run before anything is saved."""
        taken, *others = (monitor.measure() for monitor in self.monitors)
        for more in others:  # muon's second optimizer
            for record, other in zip(taken, more, strict=True):
                _join(record, other)
        if evaluated and taken and taken[-1]["step"] == self.step:
            taken[-1] |= evaluated
        elif evaluated:
            taken.append({"step": self.step, **evaluated})
        for record in taken:
            record |= {
                "seconds": self.seconds * record["step"] / self.step,
                "tokens": self.task.tokens() * record["step"],
            }
            self.recorder.write(record)
        if self.writer is not None:
            log_records(self.writer, taken)
        bad = next((r["step"] for r in taken if "loss" in r and r["loss"] is None), None)
        if bad is not None or not math.isfinite(loss.item()):
            raise DivergedError(self._diverged(bad or self.step))
        self.display.update(self.step, taken[-1] if taken else {}, self.final)

    def _diverged(self, step: int) -> str:
        kept = checkpoint.found(self.config.out / "checkpoints")
        good = f"the last good checkpoint is {kept[-1]}" if kept else "there is no checkpoint yet"
        return f"{self.config.out}: the loss of step {step} is not finite; {good}; lower the lr, or look at the data"

    def _save(self) -> None:
        state = {
            "step": self.step,
            "seconds": self.seconds,
            "optimizers": [optimizer.state_dict() for optimizer, _ in self.optimizers],
            "schedulers": [scheduler.state_dict() for _, scheduler in self.optimizers],
            "monitors": [monitor.state_dict() for monitor in self.monitors],
            "data": self.task.position(),
            "rng": torch.get_rng_state(),
            "final": self.final,
        }
        checkpoint.save(
            self.config.out / "checkpoints", self.step, self.model.state_dict(), state, keep=self.config.keep
        )

    def _resume(self) -> None:
        saved = checkpoint.latest(self.config.out / "checkpoints")
        if saved is None:
            return
        path, weights, state = saved
        try:
            self.model.load_state_dict(weights)
        except RuntimeError as error:
            raise checkpoint.CheckpointError(f"{path}: of another model ({error})") from None
        for (optimizer, scheduler), monitor, one, two, three in zip(
            self.optimizers, self.monitors, state["optimizers"], state["schedulers"], state["monitors"], strict=True
        ):
            optimizer.load_state_dict(one)
            scheduler.load_state_dict(two)
            monitor.load_state_dict(three)
        self.task.go_to(state["data"])
        torch.set_rng_state(state["rng"])
        self.step, self.seconds, self.final = state["step"], state["seconds"], state["final"]


_FLUSH = 20  # steps between transfers from the device


def _join(record: dict[str, Any], other: dict[str, Any]) -> None:
    """Two optimizers' records of one step: norms add up, layers are all of them."""
    for key in ("weight_norm", "grad_norm", "forecast_norm"):
        one, two = record.get(key), other.get(key)
        record[key] = None if one is None or two is None else math.hypot(one, two)
    record["layers"] = {**record.get("layers", {}), **other.get("layers", {})}


def _keep_config(config: Config) -> None:
    """config.json of the folder; an existing one must train the same."""
    path, now = config.out / "config.json", plain(config)
    if path.exists():
        try:
            before = json.loads(path.read_text())
        except ValueError:
            raise ValueError(f"{path}: not readable; remove the folder or choose another --out") from None
        old, new = (records.flatten(training_part(each)) for each in (before, now))
        if differing := sorted(key for key in {*old, *new} if old.get(key) != new.get(key)):
            changes = ", ".join(f"{key} {old.get(key)!r} -> {new.get(key)!r}" for key in differing[:5])
            raise ValueError(f"{config.out} holds a run with another configuration ({changes}); choose another --out")
    records.replace_file(path, [json.dumps(now, indent=1).encode()])


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(name)


def _tensorboard(config: Config, step: int) -> Any:
    if not config.tensorboard:
        return None
    from torch.utils.tensorboard import SummaryWriter

    return SummaryWriter(str(config.out / "tensorboard"), purge_step=step + 1 if step else None)


@contextlib.contextmanager
def _signals(trainer: Trainer) -> Iterator[None]:
    """SIGTERM and the first Ctrl-C end the run after the step under way, with a checkpoint."""

    def stop(number: int, _: FrameType | None) -> None:
        if trainer.stopping and number == signal.SIGINT:
            raise KeyboardInterrupt
        trainer.stopping = True

    before: dict[int, Any] = {}
    with contextlib.suppress(ValueError):  # not in the main thread: somebody else handles signals
        before = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
