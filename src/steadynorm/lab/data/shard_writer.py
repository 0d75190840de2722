"""Write a set of token shards so that an interrupted run resumes."""

import contextlib
import hashlib
import shutil
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import numpy as np

from steadynorm.files import atomic_write, read_json, sha256, write_json
from steadynorm.lab.data.download import DataError
from steadynorm.lab.data.encoders import Encoder
from steadynorm.lab.data.shards import Shard, Tokens, TokenSet, read_token_set, write_shard


def check_no_shards(folder: Path) -> None:
    """Raise DataError if a folder holds shards from elsewhere."""
    if shards := sorted(folder.glob("*.bin")):
        raise DataError(f"{shards[0]}: the folder holds shards of another origin; choose a new folder")


class ShardWriter:
    """Turn tokens into whole shards in `.partial`, with a note after each shard of how far the input was read.

    A writer made again with the same key resumes after the last note. `choose` returns the encoder of a new set; it is
    saved, as it may have taken long to train.

    Attributes:
        unit: First unit of input that is still needed.
        encoder: Encoder of this set.
    """

    encoder: Encoder

    def __init__(
        self, out: Path, prefix: str, key: str, shard_tokens: int, held_out: int, choose: Callable[[], Encoder]
    ) -> None:
        self.out, self.folder, self.prefix, self.key = out, out / ".partial", prefix, key
        self.shard_tokens, self.held_out = shard_tokens, held_out
        self.unit, self.skip, self.documents = 0, 0, 0  # next unit, tokens of it already written, documents before it
        self.shards: list[Shard] = []
        self.parts: list[Tokens] = []  # tokens of the next shard
        if not self._resume():
            check_no_shards(out)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)
            self.encoder = choose()
            if self.encoder.definition:
                with atomic_write(self.folder / "tokenizer.json") as file:
                    file.write(self.encoder.definition.encode())
            self._note(0)

    def _resume(self) -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = read_json(self.folder / "progress.json")
            shards = [Shard(**entry) for entry in noted["shards"]]
            name, vocab_size, end_of_text, definition = noted["encoder"]
            checksums = {shard.name: shard.sha256 for shard in shards}
            if definition:
                checksums["tokenizer.json"] = definition
            if noted["key"] == self.key and all(sha256(self._locate(file)) == checksums[file] for file in checksums):
                saved = self._locate("tokenizer.json").read_text(encoding="utf-8") if definition else ""
                self.encoder, self.shards = Encoder(name, vocab_size, end_of_text, saved), shards
                self.unit, self.skip, self.documents = noted["unit"], noted["skip"], noted["documents"]
                return True
        return False

    def _locate(self, name: str) -> Path:
        # If the move to the final folder was interrupted, some files are already there.
        return self.folder / name if (self.folder / name).exists() else self.out / name

    def _note(self, skip: int) -> None:
        note = {"key": self.key, "unit": self.unit, "skip": skip, "documents": self.documents}
        encoder = [self.encoder.name, self.encoder.vocab_size, self.encoder.end_of_text, self._definition()]
        shards = [asdict(shard) for shard in self.shards]
        write_json(self.folder / "progress.json", note | {"encoder": encoder, "shards": shards})

    def _definition(self) -> str:
        """Return the checksum of tokenizer.json."""
        return hashlib.sha256(self.encoder.definition.encode()).hexdigest() if self.encoder.definition else ""

    def add(self, tokens: Tokens, documents: int) -> None:
        """Append the tokens of the next unit."""
        taken, self.skip = self.skip, 0
        while taken < len(tokens):
            room = (self.shard_tokens if self._number else self.held_out) - sum(map(len, self.parts))
            self.parts.append(tokens[taken : taken + room])
            taken += len(self.parts[-1])
            if len(self.parts[-1]) == room:
                self._write()
                self._note(taken)
        self.unit, self.documents = self.unit + 1, self.documents + documents

    @property
    def _number(self) -> int:
        """Number of the next shard; 0 is for validation."""
        return len(self.shards) + (self.held_out == 0)

    def _write(self) -> None:
        split, tokens = "train" if self._number else "val", np.concatenate(self.parts)
        name = f"{self.prefix}_{split}_{self._number:06d}.bin"
        self.shards.append(Shard(name, split, len(tokens), write_shard(self.folder / name, tokens)))
        self.parts = []

    def finish(self) -> TokenSet:
        """Write the last shard and move everything to the final folder, `meta.json` last."""
        if self.parts:
            self._write()
            self._note(0)
        if not any(shard.split == "train" for shard in self.shards):
            shutil.rmtree(self.folder, ignore_errors=True)
            raise DataError(
                f"{self.out}: {sum(shard.tokens for shard in self.shards)} tokens, and the validation shard takes the first "
                f"{self.held_out}: nothing left to train on; give more text, or a smaller validation_tokens"
            )
        for name in [*(shard.name for shard in self.shards), "tokenizer.json"]:
            with contextlib.suppress(FileNotFoundError):  # already moved, or not needed for bytes
                (self.folder / name).replace(self.out / name)
        meta = {
            "tokenizer": self.encoder.name,
            "vocab_size": self.encoder.vocab_size,
            "end_of_text": self.encoder.end_of_text,
            "documents": self.documents,
            "key": self.key,
            "definition_sha256": self._definition(),
            "shards": [asdict(shard) for shard in self.shards],
        }
        write_json(self.out / "meta.json", meta)
        shutil.rmtree(self.folder, ignore_errors=True)
        token_set = read_token_set(self.out)
        token_set.check(checksums=False)
        return token_set
