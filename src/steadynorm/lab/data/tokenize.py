"""Text to token shards: `prefix_val_000000.bin`, `prefix_train_000001.bin`, ..., `tokenizer.json` and `meta.json`.

The input is cut into units (a text file, 8 MiB of JSON lines, a row group of parquet) that depend on the files alone.
Worker processes encode units, and results are joined in order: the output does not depend on how many there are.
A finished folder holds `meta.json`. Until then all lies in its `.partial`, where the same call goes on after a stop.
"""

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from steadynorm import progress as bars
from steadynorm.files import PathLike, atomic_write, lock, make_folder, read_json, sha256, write_json
from steadynorm.lab.data.documents import Unit, documents, input_files, units
from steadynorm.lab.data.download import DataError, cache_dir
from steadynorm.lab.data.encoders import Encoder, make_encoder, saved_encoder, train_bpe
from steadynorm.lab.data.shards import Shard, Tokens, TokenSet, read_token_set, shard_bytes
from steadynorm.lab.data.sotu import SHA256 as SOTU_SHA256
from steadynorm.lab.data.sotu import sotu_split

_BATCH_CHARS = 1 << 20  # encoded at once: what a tokeniser returns takes much more memory than its text
_TRAIN_CHARS = 1 << 30  # a BPE is trained on the first GiB
Encoded = tuple[Tokens, int]  # of a unit: tokens, documents


def tokenize_files(
    inputs: Iterable[PathLike],
    out_dir: PathLike,
    *,
    tokenizer: PathLike = "gpt2",
    vocab_size: int | None = None,
    end_of_text: str | None = None,
    prefix: str = "text",
    text_key: str = "text",
    shard_tokens: int = 10**8,
    validation_tokens: int | None = None,
    workers: int | None = None,
    progress: bool = True,
) -> TokenSet:
    """Turn text files into a folder of shards; the first is for validation, the others for training.

    Each document begins with the end-of-text token; one that does not fit into a shard goes on in the next. Empty
    documents are left out. Called again, it goes on after a stop, or returns at once when all is done.

    Args:
        inputs: files, or folders of files: `.txt` (a file is a document), `.jsonl` (a line), `.parquet` (a row).
        out_dir: a new or empty folder.
        tokenizer: as in `make_encoder`, or "bpe": one of `vocab_size` tokens trained on the first GiB of the input.
        vocab_size: of "bpe" (default 4096).
        end_of_text: as in `make_encoder`.
        prefix: how the names of the shards begin.
        text_key: key of a JSON line, or parquet column, that holds the text.
        shard_tokens: tokens in a shard.
        validation_tokens: tokens in the first shard; None: `shard_tokens`, as in the paper; 0: no validation shard.
        workers: processes (default: one for each core). More than one are spawned, so a script that calls this needs
            `if __name__ == "__main__":`.
        progress: show a bar where there is a terminal.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("To be", encoding="utf-8"), (folder / "b.txt").write_text("or not", encoding="utf-8")
    >>> made = tokenize_files([folder], folder / "out", tokenizer="bytes", validation_tokens=6, workers=1)
    >>> [(each.name, each.tokens) for each in made.shards]
    [('text_val_000000.bin', 6), ('text_train_000001.bin', 7)]
    """
    held_out = shard_tokens if validation_tokens is None else validation_tokens
    if not 0 < shard_tokens < 1 << 31 or not 0 <= held_out < 1 << 31 or (workers is not None and workers < 1):
        raise ValueError(
            f"tokenize_files: shard_tokens={shard_tokens}, validation_tokens={validation_tokens}, workers={workers}; "
            "tokens of a shard must be in 1..2**31-1 and workers at least 1"
        )
    if not re.fullmatch(r"[\w.-]+", prefix) or re.search("_(train|val)_", f"_{prefix}_"):
        raise ValueError(f"tokenize_files: prefix={prefix!r}; use letters, digits, . and -, without train or val")
    files, out = input_files(inputs), Path(out_dir)
    of_tokenizer = _identity(tokenizer, vocab_size, end_of_text)
    of_files = [(str(each.resolve()), each.stat().st_size, each.stat().st_mtime_ns) for each in files]
    key = _key(of_files, of_tokenizer, prefix, text_key, shard_tokens, held_out)
    if (done := _finished(out, key)) is not None:
        return done
    make_folder(out)
    with lock(out):
        if (done := _finished(out, key)) is not None:
            return done
        pieces = [unit for file in files for unit in units(file, text_key)]
        work = _Work(out, prefix, key, shard_tokens, held_out)
        texts = (text for unit in pieces for text in documents(unit, text_key))
        size = min(_TRAIN_CHARS, sum(unit.size for unit in pieces))
        with bars.bar(size, "training a BPE", shown=progress and tokenizer == "bpe", size=True) as advance:
            counted = _counted(texts, advance)
            encoder = work.encoder or work.begin(_choose(tokenizer, vocab_size, end_of_text, counted))
        left = pieces[work.unit :]
        with bars.bar(sum(unit.size for unit in pieces), "tokenising", shown=progress, size=True) as advance:
            advance(sum(unit.size for unit in pieces[: work.unit]))
            with contextlib.closing(_encode_all(left, encoder, text_key, workers or _cores())) as encoded:
                for unit, each in zip(left, encoded, strict=True):
                    work.add(*each)
                    advance(unit.size)
        return work.finish()


def sotu_shards(
    out_dir: PathLike | None = None, *, tokenizer: PathLike = "bytes", vocab_size: int | None = None
) -> tuple[list[Path], list[Path]]:
    """(training, validation) shards of the State of the Union addresses, whole addresses held out; made once, verified.

    A "bpe" is trained on the training addresses alone.

    >>> import tempfile
    >>> train, validation = sotu_shards(tempfile.mkdtemp())
    >>> from steadynorm.lab.data.shards import count_tokens
    >>> count_tokens(train[0]), count_tokens(validation[0])
    (9785579, 976067)
    """
    name = "-".join(["sotu", Path(tokenizer).stem, *([str(vocab_size)] if vocab_size else [])])
    out = cache_dir() / name if out_dir is None else Path(out_dir)
    key = _key(SOTU_SHA256, _identity(tokenizer, vocab_size, None))
    with contextlib.suppress(DataError):
        if (made := _finished(out, key, checksums=True)) is not None:
            return made.train, made.validation
    make_folder(out)
    with lock(out):
        try:
            made = _finished(out, key, checksums=True)
        except DataError:
            if not (out / "meta.json").exists() or read_token_set(out).key != key:
                raise
            (out / "meta.json").unlink()  # a shard is damaged: make them again
            made = None
        if made is None:
            for stale in out.glob("sotu_*.bin"):
                stale.unlink()
            shutil.rmtree(out / ".partial", ignore_errors=True)
            train, validation = ([each.text for each in part] for part in sotu_split())
            encoder = _choose(tokenizer, vocab_size, None, iter(train))
            held_out, rest = encoder.encode(validation), encoder.encode(train)
            work = _Work(out, "sotu", key, len(rest), len(held_out))
            work.begin(encoder)
            work.add(held_out, len(validation))
            work.add(rest, len(train))
            made = work.finish()
    return made.train, made.validation


def _identity(tokenizer: PathLike, vocab_size: int | None, end_of_text: str | None) -> list[Any]:
    if tokenizer in ("bytes", "gpt2", "bpe"):
        if vocab_size is not None and tokenizer != "bpe":
            raise ValueError(f'vocab_size={vocab_size} is for tokenizer="bpe"; {tokenizer!r} has its own')
        return [tokenizer, vocab_size, end_of_text]
    return [make_encoder(tokenizer, end_of_text=end_of_text).definition, end_of_text]


def _choose(tokenizer: PathLike, vocab_size: int | None, end_of_text: str | None, texts: Iterator[str]) -> Encoder:
    return (
        train_bpe(_limited(texts), 4096 if vocab_size is None else vocab_size)
        if tokenizer == "bpe"
        else make_encoder(tokenizer, end_of_text=end_of_text)
    )


def _counted(texts: Iterator[str], advance: Callable[[int], object]) -> Iterator[str]:
    for text in texts:
        yield text
        advance(len(text))


def _limited(texts: Iterator[str]) -> Iterator[str]:
    left = _TRAIN_CHARS
    for text in texts:
        yield text[:left]
        if (left := left - len(text)) <= 0:
            return


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(["steadynorm shards 1", *parts]).encode()).hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finished(out: Path, key: str, *, checksums: bool = False) -> TokenSet | None:
    if not (out / "meta.json").exists():
        if not (out / ".partial").exists():
            _check_empty(out)
        return None
    made = read_token_set(out)
    if made.key != key:
        raise DataError(f"{out}: holds shards of other inputs or settings; choose another folder, or remove this one")
    made.check(checksums=checksums)
    shutil.rmtree(out / ".partial", ignore_errors=True)
    return made


def _check_empty(out: Path) -> None:
    if there := sorted(out.glob("*.bin")):
        raise DataError(f"{there[0]}: the folder holds shards of another origin; choose a new folder")


class _Work:
    """The unfinished set in `.partial`: tokens go in, whole shards come out, each with a note of how far it reaches."""

    def __init__(self, out: Path, prefix: str, key: str, shard_tokens: int, held_out: int) -> None:
        self.out, self.folder, self.prefix, self.key = out, out / ".partial", prefix, key
        self.shard_tokens, self.held_out = shard_tokens, held_out
        self.unit, self.skip, self.documents = 0, 0, 0  # begin at this unit, less its first tokens; documents before it
        self.shards: list[Shard] = []
        self.encoder: Encoder | None = None
        self.parts: list[Tokens] = []  # tokens of the shard to come
        self.filled = 0
        if not self._resume():
            _check_empty(out)
            shutil.rmtree(self.folder, ignore_errors=True)
            self.folder.mkdir(parents=True)

    def _resume(self) -> bool:
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
            noted = read_json(self.folder / "progress.json")
            shards = [Shard(**each) for each in noted["shards"]]
            whole = all(sha256(self._where(each.name)) == each.sha256 for each in shards)
            name, vocab_size, end, definition = noted["encoder"]
            whole = whole and (not definition or sha256(self._where("tokenizer.json")) == definition)
            if whole and noted["key"] == self.key:
                self.encoder = saved_encoder(name, vocab_size, end, self._where("tokenizer.json"))
                self.unit, self.skip, self.documents = noted["unit"], noted["skip"], noted["documents"]
                self.shards = shards
                return True
        return False

    def _where(self, name: str) -> Path:
        # stopped while moving to the final folder, some files are there already
        return self.folder / name if (self.folder / name).exists() else self.out / name

    def _note(self, skip: int) -> None:
        assert self.encoder is not None
        noted = {"key": self.key, "unit": self.unit, "skip": skip, "documents": self.documents}
        encoder = [self.encoder.name, self.encoder.vocab_size, self.encoder.end_of_text, self._definition()]
        shards = [asdict(each) for each in self.shards]
        write_json(self.folder / "progress.json", noted | {"encoder": encoder, "shards": shards})

    def _definition(self) -> str:
        """Checksum of the tokenizer.json to be."""
        assert self.encoder is not None
        return hashlib.sha256(self.encoder.definition.encode()).hexdigest() if self.encoder.definition else ""

    def begin(self, encoder: Encoder) -> Encoder:
        """Keep the encoder, which may have taken long to train."""
        self.encoder = encoder
        if encoder.definition:
            with atomic_write(self.folder / "tokenizer.json") as file:
                file.write(encoder.definition.encode())
        self._note(0)
        return encoder

    def add(self, tokens: Tokens, documents: int) -> None:
        """Take the tokens of the next unit."""
        taken, self.skip = self.skip, 0
        while taken < len(tokens):
            room = (self.shard_tokens if self.shards or not self.held_out else self.held_out) - self.filled
            self.parts.append(tokens[taken : taken + room])
            taken, self.filled = taken + len(self.parts[-1]), self.filled + len(self.parts[-1])
            if len(self.parts[-1]) == room:
                self._write()
                self._note(taken)
        self.unit, self.documents = self.unit + 1, self.documents + documents

    def _write(self) -> None:
        split = "train" if self.shards or not self.held_out else "val"
        name = f"{self.prefix}_{split}_{len(self.shards) + (self.held_out == 0):06d}.bin"
        content = shard_bytes(np.concatenate(self.parts))
        with atomic_write(self.folder / name) as file:
            file.write(content)
        self.shards.append(Shard(name, split, self.filled, hashlib.sha256(content).hexdigest()))
        self.parts, self.filled = [], 0

    def finish(self) -> TokenSet:
        """Write the last shard, move all to the folder, `meta.json` last."""
        if self.parts:
            self._write()
            self._note(0)
        if not any(each.split == "train" for each in self.shards):
            shutil.rmtree(self.folder, ignore_errors=True)
            raise DataError(
                f"{self.out}: {sum(each.tokens for each in self.shards)} tokens, and the validation shard takes the first "
                f"{self.held_out}: nothing left to train on; give more text, or a smaller validation_tokens"
            )
        for name in [*(each.name for each in self.shards), "tokenizer.json"]:
            with contextlib.suppress(FileNotFoundError):  # moved already, or bytes
                (self.folder / name).replace(self.out / name)
        assert self.encoder is not None
        meta = {
            "tokenizer": self.encoder.name,
            "vocab_size": self.encoder.vocab_size,
            "end_of_text": self.encoder.end_of_text,
            "documents": self.documents,
            "key": self.key,
            "definition_sha256": self._definition(),
            "shards": [asdict(each) for each in self.shards],
        }
        write_json(self.out / "meta.json", meta)
        shutil.rmtree(self.folder, ignore_errors=True)
        made = read_token_set(self.out)
        made.check(checksums=False)
        return made


def _encode_unit(unit: Unit, encoder: Encoder, text_key: str) -> Encoded:
    parts: list[Tokens] = []
    batch: list[str] = []
    count, chars = 0, 0
    for text in documents(unit, text_key):
        batch.append(text)
        count, chars = count + 1, chars + len(text)
        if chars >= _BATCH_CHARS:
            parts.append(encoder.encode(batch))
            batch, chars = [], 0
    return np.concatenate([*parts, encoder.encode(batch)]), count


def _encode_all(units: Sequence[Unit], encoder: Encoder, text_key: str, workers: int) -> Generator[Encoded]:
    """Each unit's tokens, in order; at most two units a worker are under way."""
    if workers == 1 or len(units) < 2:
        yield from (_encode_unit(unit, encoder, text_key) for unit in units)
        return
    workers = min(workers, len(units))
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker, (encoder, text_key))
    waiting: deque[Future[Encoded]] = deque()
    try:
        for unit in units:
            waiting.append(pool.submit(_work, unit))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError("a tokenising process was killed, perhaps for want of memory; run again with fewer") from error
    finally:
        pool.shutdown(cancel_futures=True)


_job: tuple[Encoder, str]  # of a worker process


def _start_worker(encoder: Encoder, text_key: str) -> None:
    global _job
    _job = encoder, text_key
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread a process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)


def _work(unit: Unit) -> Encoded:
    return _encode_unit(unit, *_job)
