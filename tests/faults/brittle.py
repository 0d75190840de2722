"""Small things to break: a training run, a record file, shards and a data set."""

import json
from pathlib import Path

import numpy as np
import torch
from injecting import files_in
from tiny_run import last_weights, tiny_run

from steadynorm import records
from steadynorm.lab.data.shards import TokenSet
from steadynorm.lab.data.tokenize import tokenize_files
from steadynorm.lab.train.config import Config


def texts(folder: Path) -> Path:
    """Write JSON lines of text that can be learned a little."""
    path, generator = folder / "text.jsonl", np.random.default_rng(0)
    words = ["to", "be", "or", "not", "that", "is"]
    lines = [" ".join(words[k] for k in generator.integers(0, 6, 40)) for _ in range(60)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


def tokens(source: Path, out: Path, **options: object) -> TokenSet:
    """Write shards of this text."""
    defaults = {"tokenizer": "bpe", "vocab_size": 260, "shard_tokens": 1000, "workers": 1}
    return tokenize_files([source], out, **(defaults | options))  # pyright: ignore


def config(data: Path, out: Path, **changes: object) -> Config:
    """A training run of a second."""
    lengths: dict[str, object] = {"steps": 12, "eval_every": 6, "save_every": 3}
    return tiny_run(data, out, vocab=260, eval_tokens=256, **(lengths | changes))


def recorded(folder: Path, steps: int = 20, name: str = "run") -> Path:
    """Write the records of a run."""
    with records.Recorder(
        folder / records.FILE, name=name, config={"lr": 0.1, "steps": steps}, created="2025-01-02"
    ) as out:
        for step in range(1, steps + 1):
            out.write({"step": step, "loss": 1 / step, "layers": {"qkv": {"norm": step / 3, "forecast": 1.5}}})
    return folder / records.FILE


def assert_same_run(out: Path, expected: Path) -> None:
    """Weights to the bit, records, and the names of all files."""
    one, two = last_weights(out), last_weights(expected)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[key], two[key]) for key in one)
    a, b = (records.read(each) for each in (out, expected))
    assert a.steps.tolist() == b.steps.tolist()
    assert a.columns.keys() == b.columns.keys()
    for key in a.columns.keys() - {"seconds"}:
        np.testing.assert_array_equal(a.columns[key], b.columns[key], key)
    kept = {name for name in files_in(out) if not name.startswith("checkpoints/")}
    assert kept == {name for name in files_in(expected) if not name.startswith("checkpoints/")}
    assert not list(out.rglob("*.tmp"))
