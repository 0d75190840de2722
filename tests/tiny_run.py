"""A tiny GPT run on tokens that can be learned, and a way to interfere with it."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file

from steadynorm.lab.data.shards import write_shard
from steadynorm.lab.models import GPTConfig
from steadynorm.lab.train import checkpoint, loop
from steadynorm.lab.train.config import Config, Gpt, Optim, Schedule


def write_tokens(folder: Path, validation: int, training: int) -> Path:
    """Write shards in which each token is the one before plus one or two."""
    generator = np.random.default_rng(0)
    for name, count in (("a_val_000000.bin", validation), ("a_train_000001.bin", training)):
        write_shard(folder / name, np.cumsum(generator.integers(1, 3, count)) % 60)
    return folder


def tiny_run(data: Path, out: Path, *, vocab: int = 64, eval_tokens: int, **changes: Any) -> Config:
    """Return a run of about a second."""
    model = GPTConfig(layers=1, width=16, heads=2, vocab=vocab, context=16)
    defaults: dict[str, Any] = {
        "batch": 4,
        "optim": Optim("scionc", lr=0.02, output_lr=0.2, steady_norm_sq=0.5, polar_steps=3),
        "schedule": Schedule(warmup=1),
        "bf16": False,
        "tensorboard": False,
    }
    return Config(task=Gpt(model, data, length=16, eval_tokens=eval_tokens), out=out, **(defaults | changes))


def last_weights(out: Path) -> dict[str, torch.Tensor]:
    """Return the weights in the newest checkpoint of a run."""
    return load_file(checkpoint.list_checkpoints(out / "checkpoints")[-1] / "model.safetensors")


@contextmanager
def before_update(action: Callable[[loop.Trainer], object], *steps: int) -> Iterator[None]:
    """Call `action` with the trainer before the update that follows each of these steps."""
    original = loop.Trainer._update

    def update(self: loop.Trainer, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        if self.step in steps:
            action(self)
        return original(self, batch)

    loop.Trainer._update = update
    try:
        yield
    finally:
        loop.Trainer._update = original
