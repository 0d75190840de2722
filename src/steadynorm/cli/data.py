"""Define `steadynorm data`."""

from dataclasses import dataclass
from pathlib import Path

from tyro.conf import Positional

from steadynorm.cli.subcommands import one_of


@dataclass(frozen=True)
class DataGet:
    """Get a data set, verified by checksum: cifar10, sotu or gpt2-bpe."""

    name: Positional[str]
    """Name of the data set."""
    out: Path | None = None
    """Destination; default: the cache folder."""
    source: Path | None = None
    """Local file or folder to use instead of the network."""

    def __call__(self) -> None:
        """Get the data set and print its folder."""
        from steadynorm.lab.data import datasets

        print(f"{self.name}: {datasets.get(self.name, self.out, source=self.source)}")


@dataclass(frozen=True)
class DataTokenize:
    """Turn text, JSONL or parquet files into token shards."""

    inputs: Positional[tuple[Path, ...]]
    """Files or folders."""
    out: Path
    """Folder for the shards."""
    tokenizer: str = "gpt2"
    """gpt2, bytes, bpe (trained on the text; see --vocab-size), or a tokenizer.json."""
    vocab_size: int | None = None
    """Number of tokens of a BPE that is trained."""
    end_of_text: str | None = None
    """Token put before each document; default: the first of the usual names in the vocabulary of a tokenizer.json."""
    shard_tokens: int = 10**8
    """Tokens per shard."""
    validation_tokens: int | None = None
    """Tokens held out from the beginning for validation; default: one whole shard; 0: none."""
    text_key: str = "text"
    """Key (JSONL) or column (parquet) of the text."""
    workers: int | None = None
    """Number of processes; default: one per core."""

    def __call__(self) -> None:
        """Make the shards and print how many tokens they hold."""
        from steadynorm.lab.data import tokenize

        result = tokenize.tokenize_files(
            self.inputs,
            self.out,
            tokenizer=self.tokenizer,
            vocab_size=self.vocab_size,
            end_of_text=self.end_of_text,
            shard_tokens=self.shard_tokens,
            validation_tokens=self.validation_tokens,
            text_key=self.text_key,
            workers=self.workers,
        )
        print(f"{self.out}: {result.tokens} tokens of {result.documents} documents in {len(result.shards)} shards")


COMMANDS = one_of({"get": DataGet, "tokenize": DataTokenize})
