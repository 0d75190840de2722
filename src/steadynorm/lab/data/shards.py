"""Token shards on disk, and a loader whose position is three integers.

A shard is 256 little-endian int32 (magic 20240520, version 1, number of tokens, zeros) and then uint16 tokens.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steadynorm.files import PathLike, atomic_write, read_json, sha256
from steadynorm.lab.data.download import DataError

MAGIC, VERSION = 20240520, 1
HEADER_BYTES = 4 * 256
MAX_VOCAB = 1 << 16  # tokens are uint16
_MAPPED = 64  # shards kept open: a mapped file costs a file handle, and a run may have thousands of shards

Batch = tuple[Tensor, Tensor]
Tokens = npt.NDArray[np.uint16]


def shard_bytes(tokens: npt.ArrayLike) -> bytes:
    """The content of a shard with these tokens."""
    array = np.asarray(tokens)
    if array.ndim != 1 or array.size == 0 or array.dtype.kind not in "iu":
        raise ValueError(f"shard: expected a list of at least one integer, got {array.dtype} of shape {array.shape}")
    if array.min() < 0 or array.max() >= MAX_VOCAB:
        raise ValueError(f"shard: tokens from {array.min()} to {array.max()}; uint16 holds 0 to {MAX_VOCAB - 1}")
    if array.size >= 1 << 31:
        raise ValueError(f"shard: {array.size} tokens; the header's int32 holds less than 2**31, write several shards")
    header = np.zeros(256, "<i4")
    header[:3] = MAGIC, VERSION, array.size
    return header.tobytes() + array.astype("<u2", copy=False).tobytes()


def write_shard(path: PathLike, tokens: npt.ArrayLike) -> None:
    """Write a shard; the file appears whole or not at all.

    >>> import tempfile
    >>> path = Path(tempfile.mkdtemp()) / "a_train_000001.bin"
    >>> write_shard(path, [5, 6, 7])
    >>> path.stat().st_size, open_shard(path).tolist()
    (1030, [5, 6, 7])
    """
    content = shard_bytes(tokens)
    with atomic_write(path) as file:
        file.write(content)


def count_tokens(path: PathLike) -> int:
    """Number of tokens in a shard, from its header, once header and file size agree."""
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
    """The tokens of a shard, mapped into memory: nothing is read until it is used.

    >>> open_shard("missing.bin")
    Traceback (most recent call last):
        ...
    steadynorm.lab.data.download.DataError: missing.bin: no such file; `steadynorm data tokenize` makes shards
    """
    return np.memmap(path, "<u2", "r", HEADER_BYTES, (count_tokens(path),))


def shard_paths(folder: PathLike, split: str) -> list[Path]:
    """The shards `*_train_*.bin` (split "train") or `*_val_*.bin` (split "val") of a folder, in order."""
    folder = Path(folder)
    if split not in ("train", "val"):
        raise ValueError(f'shard_paths: split={split!r}; pass "train" or "val"')
    if (folder / ".partial").exists() and not (folder / "meta.json").exists():
        raise DataError(f"{folder}: tokenising was not finished; run the same `steadynorm data tokenize` again")
    if not (found := sorted(folder.glob(f"*_{split}_*.bin"))):
        raise DataError(f"{folder}: no *_{split}_*.bin; `steadynorm data tokenize` makes shards")
    return found


def shard_checksums(folder: PathLike) -> dict[Path, str]:
    """sha256 of every shard in a folder, by its `meta.json`; none where shards come without one."""
    if not (Path(folder) / "meta.json").exists():
        return {}
    return {Path(folder) / each.name: each.sha256 for each in read_token_set(folder).shards}


@dataclass(frozen=True)
class Shard:
    """A shard of a set: file name, "val" or "train", tokens, checksum of the file."""

    name: str
    split: str
    tokens: int
    sha256: str


@dataclass(frozen=True)
class TokenSet:
    """What `meta.json` says: the shards of a folder and the tokeniser they were made with."""

    folder: Path
    tokenizer: str
    vocab_size: int
    end_of_text: int
    documents: int
    key: str  # of inputs and settings
    shards: tuple[Shard, ...]
    definition_sha256: str = ""  # of tokenizer.json; sets made by earlier versions, and of bytes, have none

    @property
    def train(self) -> list[Path]:
        """Training shards, in order."""
        return [self.folder / each.name for each in self.shards if each.split == "train"]

    @property
    def validation(self) -> list[Path]:
        """Validation shards."""
        return [self.folder / each.name for each in self.shards if each.split == "val"]

    @property
    def tokens(self) -> int:
        """Tokens in all shards."""
        return sum(each.tokens for each in self.shards)

    def check(self, *, checksums: bool = True) -> None:
        """Raise for a shard that is missing, damaged or (reading all of it) has another checksum."""
        for each in self.shards:
            if count_tokens(self.folder / each.name) != each.tokens or (
                checksums and sha256(self.folder / each.name) != each.sha256
            ):
                raise DataError(f"{self.folder / each.name}: not as meta.json says; remove the folder, tokenise again")
        own = self.folder / "tokenizer.json"
        if self.definition_sha256 and (not own.is_file() or sha256(own) != self.definition_sha256):
            raise DataError(f"{own}: not as meta.json says; remove the folder, tokenise again")


def read_token_set(folder: PathLike) -> TokenSet:
    """The set a folder of shards holds."""
    path = Path(folder) / "meta.json"
    try:
        meta = read_json(path)
        shards = tuple(Shard(**each) for each in meta.pop("shards"))
        return TokenSet(Path(folder), shards=shards, **meta)
    except FileNotFoundError:
        raise DataError(f"{path}: missing; make the shards with `steadynorm data tokenize`") from None
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path}: damaged ({error}); remove the folder and tokenise again") from error


class TokenLoader:
    """Batches of token sequences: (inputs, targets), int64, each (batch / world, length).

    All shards in the order given are one stream of N tokens. Sequence i is its tokens i L to (i + 1) L, targets one
    further; sequences cross from a shard into the next, so no shard is too short. A pass has (N - 1) // L sequences;
    step n takes sequences n B to (n + 1) B, and the rest of a pass, less than a batch, is left out. `batch` is the
    batch of all processes together: rank r of W takes its slice of the same batch, whatever W is.

    The position is the number of sequences taken in this pass and the pass: exact to resume, with any number of
    processes.

    Args:
        paths: the shards.
        batch: sequences a step, over all processes; divisible by `world`.
        length: tokens a sequence.
        rank, world: which process of how many.
        vocab: tokens must be below it; checked in each batch.
        shuffle: a seed; sequences come in a random order that depends on the seed and the pass alone
            (8 bytes of memory a sequence). None: in order.
        repeat: begin again after a pass; otherwise the iteration stops.
        checksums: sha256 by path (`shard_checksums`); a shard that is there is verified when it is first used.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> write_shard(folder / "a_train_000001.bin", range(5)); write_shard(folder / "a_train_000002.bin", range(5, 12))
    >>> loader = TokenLoader(shard_paths(folder, "train"), batch=2, length=2)
    >>> _ = next(loader)
    >>> state = loader.state_dict()
    >>> inputs, targets = next(loader)
    >>> inputs.tolist(), targets.tolist()
    ([[4, 5], [6, 7]], [[5, 6], [7, 8]])
    >>> other = TokenLoader(shard_paths(folder, "train"), batch=2, length=2, rank=1, world=2)
    >>> other.load_state_dict(state); next(other)[0].tolist()
    [[6, 7]]
    """

    def __init__(
        self,
        paths: Iterable[PathLike],
        *,
        batch: int,
        length: int,
        rank: int = 0,
        world: int = 1,
        vocab: int | None = None,
        shuffle: int | None = None,
        repeat: bool = True,
        checksums: Mapping[Path, str] | None = None,
    ) -> None:
        self.paths = [Path(path) for path in ([paths] if isinstance(paths, str | Path) else paths)]
        if not self.paths:
            raise ValueError("TokenLoader: no shards; pass paths=shard_paths(folder, 'train')")
        if batch < 1 or length < 1 or not 0 <= rank < world:
            raise ValueError(
                f"TokenLoader: batch={batch}, length={length}, rank={rank}, world={world}; the first two must be "
                "positive and rank in 0..world-1"
            )
        if batch % world:
            raise ValueError(
                f"TokenLoader: batch={batch} is that of all processes and must be divisible by world={world}"
            )
        if shuffle is not None and shuffle < 0:
            raise ValueError(f"TokenLoader: shuffle={shuffle}; pass a seed of 0 or more, or None for the order on disk")
        self.batch, self.length, self.rank, self.world = batch, length, rank, world
        self.vocab, self.shuffle, self.repeat = vocab, shuffle, repeat
        self._starts = np.cumsum([0, *(count_tokens(path) for path in self.paths)])  # (shards + 1,)
        self.tokens = int(self._starts[-1])
        self.sequences = (self.tokens - 1) // length
        if self.sequences < batch:
            raise DataError(
                f"{self.paths[0]} and on: {self.tokens} tokens are less than one batch of {batch} x {length} + 1; lower "
                "batch or length, or add shards"
            )
        self._unverified = dict(checksums or {})
        self._shard = lru_cache(_MAPPED)(self._open)
        self._order = lru_cache(1)(self._permutation)
        self.epoch, self._sequence = 0, 0

    def _open(self, index: int) -> Tokens:
        path = self.paths[index]
        expected = self._unverified.get(path)
        if expected is not None and (found := sha256(path)) != expected:
            raise DataError(
                f"{path}: damaged: sha256 {found}, meta.json says {expected}; copy it again, or remove the folder and "
                "tokenise again"
            )
        self._unverified.pop(path, None)
        return open_shard(path)

    @property
    def steps_per_epoch(self) -> int:
        """Batches in a pass."""
        return self.sequences // self.batch

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        epoch, sequence = self.epoch, self._sequence
        if sequence + self.batch > self.sequences:
            if not self.repeat:
                raise StopIteration
            epoch, sequence = epoch + 1, 0
        rows = self.batch // self.world
        first = sequence + self.rank * rows
        numbers = np.arange(first, first + rows) if self.shuffle is None else self._order(epoch)[first : first + rows]
        starts = numbers * self.length
        block = np.stack([self._read(int(start), self.length + 1) for start in starts])  # (rows, length + 1)
        if self.vocab is not None and block.max() >= self.vocab:
            raise self._beyond(block, starts, self.vocab)
        self.epoch, self._sequence = epoch, sequence + self.batch
        tokens = torch.from_numpy(block.astype(np.int64))
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def state_dict(self) -> dict[str, int]:
        """The position, and what it is a position in; plain integers, the same in every process."""
        return {"epoch": self.epoch, "sequence": self._sequence} | self._identity()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on at a position saved by a loader of the same tokens; batch, rank and world may differ."""
        for key, own in self._identity().items():
            if state.get(key) != own:
                raise DataError(
                    f"TokenLoader: the saved position has {key}={state.get(key)}, this loader {own}; resume with the "
                    "same shards, length and shuffle, or start a new run"
                )
        epoch, sequence = state.get("epoch", -1), state.get("sequence", -1)
        if epoch < 0 or not 0 <= sequence <= self.sequences:
            raise DataError(
                f"TokenLoader: epoch={epoch}, sequence={sequence} is no position in {self.sequences} sequences"
            )
        self.epoch, self._sequence = int(epoch), int(sequence)

    def _identity(self) -> dict[str, int]:
        shuffle = -1 if self.shuffle is None else self.shuffle
        return {"tokens": self.tokens, "length": self.length, "shuffle": shuffle}

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        # Philox's raw stream is fixed for all versions of numpy; Generator.permutation is not.
        assert self.shuffle is not None
        return np.argsort(np.random.Philox(key=[self.shuffle, epoch]).random_raw(self.sequences), kind="stable")

    def _read(self, start: int, count: int) -> Tokens:
        index = int(np.searchsorted(self._starts, start, "right")) - 1
        parts: list[Tokens] = []
        while count:
            offset = start - int(self._starts[index])
            parts.append(self._shard(index)[offset : offset + count])
            start, count, index = start + len(parts[-1]), count - len(parts[-1]), index + 1
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _beyond(self, block: Tokens, starts: npt.NDArray[np.int64], vocab: int) -> DataError:
        row, column = (int(each[0]) for each in np.nonzero(block >= vocab))
        position = int(starts[row]) + column
        index = int(np.searchsorted(self._starts, position, "right")) - 1
        return DataError(
            f"{self.paths[index]}: token {block[row, column]} at position {position - int(self._starts[index])} is beyond "
            f"the vocabulary of {vocab}; the shard was made with another tokeniser, or the model needs a larger vocabulary"
        )


def validation_batches(
    paths: Iterable[PathLike],
    *,
    batch: int,
    length: int,
    max_tokens: int | None = None,
    rank: int = 0,
    world: int = 1,
    vocab: int | None = None,
    checksums: Mapping[Path, str] | None = None,
) -> Iterator[Batch]:
    """One pass in order over the first `max_tokens` tokens (None: all), in whole batches: the same at every call.

    >>> import tempfile
    >>> write_shard(path := Path(tempfile.mkdtemp()) / "a_val_000000.bin", range(100))
    >>> len(list(validation_batches([path], batch=2, length=8, max_tokens=50)))
    3
    """
    loader = TokenLoader(
        paths, batch=batch, length=length, rank=rank, world=world, vocab=vocab, repeat=False, checksums=checksums
    )
    steps = loader.steps_per_epoch if max_tokens is None else max_tokens // (batch * length)
    if steps < 1:
        raise ValueError(f"validation_batches: max_tokens={max_tokens} is less than a batch of {batch} x {length}")
    return islice(loader, steps)
