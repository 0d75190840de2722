"""Read and write token shards.

A shard holds 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros), then uint16 tokens.
"""

import hashlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from steadynorm.files import PathLike, atomic_write, read_json, sha256
from steadynorm.lab.data.download import DataError

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 4 * 256
MAX_VOCAB = 1 << 16  # tokens are uint16

Tokens = npt.NDArray[np.uint16]


def write_shard(path: PathLike, tokens: npt.ArrayLike) -> str:
    """Write a shard atomically and return its SHA-256 checksum.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a_train_000001.bin"
    >>> checksum = write_shard(path, [5, 6, 7])
    >>> path.stat().st_size, open_shard(path).tolist()
    (1030, [5, 6, 7])
    """
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"shard: expected a list of at least one integer, got {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= MAX_VOCAB:
        raise ValueError(f"shard: tokens from {array.min()} to {array.max()}; uint16 holds 0 to {MAX_VOCAB - 1}")
    if array.size >= 1 << 31:
        raise ValueError(f"shard: {array.size} tokens; the header's int32 holds less than 2**31, write several shards")
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, array.size
    content = header.tobytes() + array.astype("<u2", copy=False).tobytes()
    with atomic_write(path) as file:
        file.write(content)
    return hashlib.sha256(content).hexdigest()


def count_tokens(path: PathLike) -> int:
    """Return the number of tokens in a shard; raise DataError if its header and its size disagree."""
    path = Path(path)
    if not path.is_file():
        raise DataError(f"{path}: no such file; `steadynorm data tokenize` makes shards")
    size = path.stat().st_size
    with path.open("rb") as file:
        header = np.frombuffer(file.read(HEADER_BYTES).ljust(HEADER_BYTES, b"\0"), "<i4")
    magic, version, count = (int(value) for value in header[:3])
    if magic != MAGIC:
        kind = "an empty file" if size == 0 else f"the first four bytes are {magic}, not {MAGIC}"
        raise DataError(f"{path}: not a token shard ({kind}); make shards with `steadynorm data tokenize`")
    if version != VERSION:
        raise DataError(f"{path}: shard version {version}; only {VERSION} (uint16 tokens) can be read, tokenise again")
    if count <= 0:
        raise DataError(f"{path}: the header says {count} tokens; remove the file or tokenise again")
    if size != (expected := HEADER_BYTES + 2 * count):
        how = "truncated" if size < expected else "longer than it says"
        raise DataError(f"{path}: {how}: {size} bytes, {expected} for its {count} tokens; copy or tokenise it again")
    return count


def open_shard(path: PathLike) -> Tokens:
    """Return the tokens of a shard, mapped into memory: nothing is read until it is used.

    >>> open_shard("missing.bin")
    Traceback (most recent call last):
        ...
    steadynorm.lab.data.download.DataError: missing.bin: no such file; `steadynorm data tokenize` makes shards
    """
    return np.memmap(path, "<u2", "r", HEADER_BYTES, (count_tokens(path),))


def shard_paths(folder: PathLike, split: str) -> list[Path]:
    """Return the shards `*_train_*.bin` (split "train") or `*_val_*.bin` (split "val") of a folder, in order."""
    folder = Path(folder)
    if (folder / ".partial").exists() and not (folder / "meta.json").exists():
        raise DataError(f"{folder}: tokenising was not finished; run the same `steadynorm data tokenize` again")
    if not (paths := sorted(folder.glob(f"*_{split}_*.bin"))):
        raise DataError(f"{folder}: no *_{split}_*.bin; `steadynorm data tokenize` makes shards")
    return paths


def shard_checksums(folder: PathLike) -> dict[Path, str]:
    """Return the SHA-256 of every shard listed in the folder's `meta.json`; empty if there is no such file."""
    if not (Path(folder) / "meta.json").exists():
        return {}
    return {Path(folder) / shard.name: shard.sha256 for shard in read_token_set(folder).shards}


@dataclass(frozen=True)
class Shard:
    """One shard of a set: its file name, split ("val" or "train"), number of tokens and checksum."""

    name: str
    split: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class TokenSet:
    """Content of `meta.json`: the shards of a folder and the tokenizer that made them."""

    folder: Path
    tokenizer: str
    vocab_size: int
    end_of_text: int
    documents: int
    key: str  # of inputs and settings
    shards: tuple[Shard, ...]
    definition_sha256: str = ""  # of tokenizer.json; absent in sets of bytes and in those of earlier versions

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(shard.tokens for shard in self.shards)

    def check(self, *, checksums: bool = True) -> None:
        """Raise DataError if a shard is missing or damaged; `checksums` also reads and verifies every byte."""
        remedy = "not as meta.json says; remove the folder, tokenise again"
        for shard in self.shards:
            path = self.folder / shard.name
            if count_tokens(path) != shard.tokens or (checksums and sha256(path) != shard.sha256):
                raise DataError(f"{path}: {remedy}")
        definition = self.folder / "tokenizer.json"
        if self.definition_sha256 and (not definition.is_file() or sha256(definition) != self.definition_sha256):
            raise DataError(f"{definition}: {remedy}")


def read_token_set(folder: PathLike) -> TokenSet:
    """Return the set of shards in a folder, as its `meta.json` describes it."""
    path = Path(folder) / "meta.json"
    try:
        meta = read_json(path)
        shards = tuple(Shard(**entry) for entry in meta.pop("shards"))
        return TokenSet(Path(folder), shards=shards, **meta)
    except FileNotFoundError:
        raise DataError(f"{path}: missing; make the shards with `steadynorm data tokenize`") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: damaged ({error}); remove the folder and tokenise again") from error
