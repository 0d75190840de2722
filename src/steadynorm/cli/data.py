"""`steadynorm data`."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tyro.conf import Positional

from steadynorm.cli.subcommands import one_of


def command(_: str, argv: Sequence[str]) -> Any:
    """`data` as the parser takes it."""
    return one_of({"get": DataGet, "tokenize": DataTokenize})


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
        from steadynorm.lab.data import datasets as get

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
        from steadynorm.lab.data import tokenize

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
