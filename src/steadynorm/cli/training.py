"""`steadynorm train` and `steadynorm data`."""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from tyro.conf import AvoidSubcommands, Positional

from steadynorm.cli.subcommands import one_of
from steadynorm.data import get, tokenize
from steadynorm.train.config import Config, OptimizerName
from steadynorm.train.recipes import RECIPES, with_optimizer

_ABOUT = {
    "gpt": "NanoGPT at the size of a desk, on the embedded texts.",
    "vit": "Simple ViT at the size of a desk, on CIFAR-10.",
    "gpt-124m-fineweb-edu": "The paper's NanoGPT: 124M parameters, 100B tokens of FineWeb-Edu.",
    "vit-s16-imagenet": "The paper's Simple ViT-S/16 on ImageNet-1k, 90 epochs; --optim.name adamw or adamc: its other arms.",
}


def spelled_out(argv: Sequence[str]) -> list[str]:
    """Give `--bf16` a value, so that it reads as a flag and as `--bf16 auto` alike.

    >>> spelled_out(["train", "gpt", "--no-bf16"]), spelled_out(["--bf16", "auto", "--bf16", "--steps", "3"])
    (['train', 'gpt', '--bf16', 'False'], ['--bf16', 'auto', '--bf16', 'True', '--steps', '3'])
    """
    words: list[str] = []
    for word, following in zip(argv, [*argv[1:], ""], strict=True):
        if word == "--no-bf16":
            words += ["--bf16", "False"]
        elif word == "--bf16" and following not in ("auto", "True", "False"):
            words += ["--bf16", "True"]
        else:
            words.append(word)
    return words


def commands(argv: Sequence[str] = ()) -> Any:
    """Return the recipes as commands: options left out come from the arm of the optimizer that this command line names."""
    name = _optimizer_of(argv)
    recipes = RECIPES if name is None else {key: with_optimizer(key, name) for key in RECIPES}
    return one_of(dict.fromkeys(recipes, AvoidSubcommands[Config]), _ABOUT, recipes)


def _optimizer_of(argv: Sequence[str]) -> OptimizerName | None:
    """The last --optim.name; None if there is none, or one that the parser will refuse.

    >>> _optimizer_of(["gpt", "--optim.name", "adamw", "--steps", "3"]), _optimizer_of(["gpt", "--optim.name=muon"])
    ('adamw', 'muon')
    """
    words = [word for each in argv for word in each.split("=", 1)]
    named = [value for option, value in pairwise(words) if option == "--optim.name"]
    return next((name for name in get_args(OptimizerName) if named and name == named[-1]), None)


def train(config: Config) -> None:
    """Train and say how it ended."""
    from steadynorm.train.loop import train

    result = train(config)
    if os.environ.get("RANK", "0") != "0":  # one of several processes: the first speaks for all
        return
    final = ", ".join(f"{key} {value:.4f}" for key, value in result.final.items())
    print(f"{config.out}: {'finished' if result.finished else 'stopped'} at step {result.steps}; {final}")


@dataclass(frozen=True)
class DataGet:
    """Get a data set, verified by checksum: cifar10, sotu or gpt2-bpe."""

    name: Positional[str]
    """Which one."""
    out: Path | None = None
    """Where to; default: the cache folder."""
    source: Path | None = None
    """A local file or folder that holds it, instead of the network."""

    def __call__(self) -> None:
        """Get it and say where it is."""
        print(f"{self.name}: {get.get(self.name, self.out, source=self.source)}")


@dataclass(frozen=True)
class DataTokenize:
    """Turn text, JSONL or parquet files into token shards."""

    inputs: Positional[tuple[Path, ...]]
    """Files or folders."""
    out: Path
    """Folder for the shards."""
    tokenizer: str = "gpt2"
    """gpt2, bytes, bpe (trained on the text; give --vocab-size), or a tokenizer.json."""
    vocab_size: int | None = None
    """Of a BPE that is trained."""
    shard_tokens: int = 10**8
    """Tokens a shard."""
    validation_tokens: int | None = None
    """Tokens held out, from the beginning; default: one whole shard; 0: none."""
    text_key: str = "text"
    """Key or column of the text in JSONL and parquet."""
    workers: int | None = None
    """Processes; default: all cores."""

    def __call__(self) -> None:
        """Make them and say how many."""
        made = tokenize.tokenize_files(
            self.inputs,
            self.out,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            shard_tokens=self.shard_tokens,
            validation_tokens=self.validation_tokens,
            text_key=self.text_key,
            workers=self.workers,
        )
        print(f"{self.out}: {made.tokens} tokens of {made.documents} documents in {len(made.shards)} shards")
