"""Load batches of token sequences from shards, resuming at a position of a few integers."""

from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from itertools import islice
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from steadynorm.files import PathLike, sha256
from steadynorm.lab.data.download import DataError
from steadynorm.lab.data.shards import Tokens, count_tokens, open_shard

_MAPPED = 64  # shards kept open: each mapped file costs a file handle, and a run may have thousands of shards

Batch = tuple[Tensor, Tensor]


class TokenLoader:
    """Iterate over batches of token sequences: (inputs, targets), int64, each (batch / world, length).

    The shards form one stream of N tokens. Sequence i holds tokens i L to (i + 1) L, and its targets lie one token
    further. Sequences may cross from one shard into the next. An epoch has (N - 1) // L sequences; step n takes
    sequences n B to (n + 1) B, and an incomplete last batch is dropped. Each rank takes its slice of the same global
    batch, whatever the world size.

    The position is the epoch and the number of sequences taken in it, so that any number of processes can resume
    exactly.

    Args:
        batch: Sequences per step over all processes; must be divisible by `world`.
        vocab: Upper bound on tokens, checked in each batch.
        shuffle: Seed of a random order of sequences per epoch (8 bytes of memory per sequence), or None for the
            order on disk.
        repeat: Start a new epoch after the last batch instead of stopping.
        checksums: SHA-256 by path (`shard_checksums`); each shard is verified when it is first used.

    >>> import tempfile
    >>> from steadynorm.lab.data.shards import shard_paths, write_shard
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = write_shard(folder / "a_train_000001.bin", range(5)), write_shard(folder / "a_train_000002.bin", range(5, 12))
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
            raise ValueError(f"TokenLoader: batch={batch} counts all processes and must be divisible by world={world}")
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
        if expected is not None and (digest := sha256(path)) != expected:
            raise DataError(
                f"{path}: damaged: sha256 {digest}, meta.json says {expected}; copy it again, or remove the folder and "
                "tokenise again"
            )
        self._unverified.pop(path, None)
        return open_shard(path)

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

    def first(self, eval_tokens: int | None) -> Iterator[Batch]:
        """Iterate from the start of the epoch, in whole batches, over the first `eval_tokens` tokens (None: all)."""
        steps = None if eval_tokens is None else eval_tokens // (self.batch * self.length)
        if steps == 0:
            raise ValueError(
                f"eval_tokens={eval_tokens} is less than a batch of {self.batch} x {self.length}; raise it, or leave it "
                "out to use all"
            )
        self._sequence = 0
        return islice(self, steps)

    def state_dict(self) -> dict[str, int]:
        """Return the position and what identifies the stream, as plain integers that are equal on every rank."""
        return {"epoch": self.epoch, "sequence": self._sequence} | self._identity()

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Resume at a position saved by a loader of the same tokens; batch, rank and world may differ."""
        for key, own in self._identity().items():
            if state.get(key) != own:
                raise DataError(
                    f"TokenLoader: the saved position has {key}={state.get(key)}, this loader {own}; resume with the "
                    "same shards, length and shuffle, or start a new run"
                )
        epoch, sequence = state.get("epoch", -1), state.get("sequence", -1)
        if epoch < 0 or not 0 <= sequence <= self.sequences:
            raise DataError(
                f"TokenLoader: epoch={epoch}, sequence={sequence} is not a position in {self.sequences} sequences"
            )
        self.epoch, self._sequence = int(epoch), int(sequence)

    def _identity(self) -> dict[str, int]:
        shuffle = -1 if self.shuffle is None else self.shuffle
        return {"tokens": self.tokens, "length": self.length, "shuffle": shuffle}

    def _permutation(self, epoch: int) -> npt.NDArray[np.int64]:
        # Philox's raw stream is the same in all versions of numpy; Generator.permutation is not.
        assert self.shuffle is not None
        return np.argsort(np.random.Philox(key=[self.shuffle, epoch]).random_raw(self.sequences), kind="stable")

    def _locate(self, position: int) -> tuple[int, int]:
        index = int(np.searchsorted(self._starts, position, "right")) - 1
        return index, position - int(self._starts[index])

    def _read(self, start: int, count: int) -> Tokens:
        index, offset = self._locate(start)
        parts = [self._shard(index)[offset : offset + count]]
        while left := count - sum(map(len, parts)):
            parts.append(self._shard(index + len(parts))[:left])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _beyond(self, block: Tokens, starts: npt.NDArray[np.int64], vocab: int) -> DataError:
        row, column = (int(indices[0]) for indices in np.nonzero(block >= vocab))
        index, offset = self._locate(int(starts[row]) + column)
        return DataError(
            f"{self.paths[index]}: token {block[row, column]} at position {offset} is beyond "
            f"the vocabulary of {vocab}; the shard was made with another tokeniser, or the model needs a larger vocabulary"
        )
