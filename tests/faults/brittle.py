"""Small things to break: a training run, a record file, shards, a data set."""

import hashlib
import io
import json
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from injecting import files_in
from safetensors.torch import load_file

from steadynorm import records
from steadynorm.lab.data.datasets import DataSet
from steadynorm.lab.data.shards import TokenSet
from steadynorm.lab.data.tokenize import tokenize_files
from steadynorm.lab.models import GPTConfig
from steadynorm.lab.train import checkpoint
from steadynorm.lab.train.config import Config, Gpt, Optim, Schedule

A, B = b"first file" * 1000, b"second"
TINY = {"a.bin": hashlib.sha256(A).hexdigest(), "b.bin": hashlib.sha256(B).hexdigest()}
DATA = DataSet(lambda: TINY, (), "Bring a.bin and b.bin")


def texts(folder: Path) -> Path:
    """JSON lines of text that can be learned a little."""
    path, generator = folder / "text.jsonl", np.random.default_rng(0)
    words = ["to", "be", "or", "not", "that", "is"]
    lines = [" ".join(words[k] for k in generator.integers(0, 6, 40)) for _ in range(60)]
    path.write_text("".join(json.dumps({"text": line}) + "\n" for line in lines), encoding="utf-8")
    return path


def tokens(source: Path, out: Path, **options: object) -> TokenSet:
    """Shards of it."""
    defaults = {"tokenizer": "bpe", "vocab_size": 260, "shard_tokens": 1000, "workers": 1, "progress": False}
    return tokenize_files([source], out, **(defaults | options))  # pyright: ignore


def config(data: Path, out: Path, **changes: object) -> Config:
    """A training run of a second."""
    made = Config(
        task=Gpt(
            model=GPTConfig(layers=1, width=16, heads=2, vocab=260, context=16), data=data, length=16, eval_tokens=256
        ),
        out=out,
        steps=12,
        batch=4,
        optim=Optim("scionc", lr=0.02, output_lr=0.2, steady_norm_sq=0.5, polar_steps=3),
        schedule=Schedule(warmup=1),
        eval_every=6,
        save_every=3,
        bf16=False,
        tensorboard=False,
    )
    return replace(made, **changes)


def recorded(folder: Path, steps: int = 20, name: str = "run") -> Path:
    """A run's records."""
    with records.Recorder(
        folder / records.FILE, name=name, config={"lr": 0.1, "steps": steps}, created="2025-01-02"
    ) as out:
        for step in range(1, steps + 1):
            out.write({"step": step, "loss": 1 / step, "layers": {"qkv": {"norm": step / 3, "forecast": 1.5}}})
    return folder / records.FILE


def archive(path: Path) -> Path:
    """The tiny data set as tar.gz, tar.xz, tar.bz2 or zip, by the name."""
    members = {"set/a.bin": A, "set/b.bin": B}
    if path.suffix == ".zip":
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as book:
            for name, content in members.items():
                book.writestr(name, content)
        return path
    with tarfile.open(path, f"w:{path.suffix[1:]}") as tape:  # pyright: ignore
        for name, content in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            tape.addfile(info, io.BytesIO(content))
    return path


def assert_same_run(out: Path, expected: Path) -> None:
    """Weights to the bit, records, and the names of all files."""
    one, two = (
        load_file(checkpoint.list_checkpoints(each / "checkpoints")[-1] / "model.safetensors")
        for each in (out, expected)
    )
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
