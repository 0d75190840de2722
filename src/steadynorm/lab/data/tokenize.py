"""Turn text into token shards: `text_val_000000.bin`, `text_train_000001.bin`, ..., `tokenizer.json`, `meta.json`.

The input is cut into units (a text file, 8 MiB of JSON lines, a row group of parquet) that depend only on the files.
Worker processes encode units and results are joined in order, so the output does not depend on the number of workers.
A finished folder holds `meta.json`. Until then everything lies in `.partial`, where the same call resumes.
"""

import contextlib
import hashlib
import json
import os
import shutil
import signal
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from functools import partial
from multiprocessing import get_context, parent_process
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np

from steadynorm import progress
from steadynorm.files import PathLike, lock, make_folder
from steadynorm.lab.data.documents import Unit, input_files, read_documents, split_units
from steadynorm.lab.data.download import DataError, cache_dir
from steadynorm.lab.data.encoders import Encoder, make_encoder, train_bpe
from steadynorm.lab.data.shard_writer import ShardWriter, check_no_shards
from steadynorm.lab.data.shards import Tokens, TokenSet, read_token_set
from steadynorm.lab.data.sotu import SHA256 as SOTU_SHA256
from steadynorm.lab.data.sotu import split_addresses

_BATCH_CHARS = 1 << 20  # encoded at once: a tokenizer's result takes much more memory than its text
_TRAIN_CHARS = 1 << 30  # a BPE is trained on the first GiB
Encoded = tuple[Tokens, int]  # of a unit: tokens, documents


def tokenize_files(
    inputs: Iterable[PathLike],
    out_dir: PathLike,
    *,
    tokenizer: PathLike = "gpt2",
    vocab_size: int | None = None,
    end_of_text: str | None = None,
    text_key: str = "text",
    shard_tokens: int = 10**8,
    validation_tokens: int | None = None,
    workers: int | None = None,
) -> TokenSet:
    """Turn text files into a folder of shards, the first for validation and the others for training; return the set.

    Each document begins with the end-of-text token and may continue in the next shard. Empty documents are skipped.
    The same call resumes after an interruption, and returns at once if the shards are complete.

    Args:
        inputs: Files or folders of files: `.txt` (a document per file), `.jsonl` (per line), `.parquet` (per row).
        out_dir: New or empty folder.
        tokenizer: As in `make_encoder`, or "bpe" to train one on the first GiB of the input.
        vocab_size: Number of tokens of "bpe" (default 4096).
        end_of_text: As in `make_encoder`.
        text_key: JSON key or parquet column that holds the text.
        shard_tokens: Tokens per shard.
        validation_tokens: Tokens in the first shard; None for `shard_tokens`, as in the paper; 0 for no validation.
        workers: Processes (default: one per core). Several processes are spawned, so a script that calls this needs
            `if __name__ == "__main__":`.

    >>> import tempfile
    >>> folder = Path(tempfile.mkdtemp())
    >>> _ = (folder / "a.txt").write_text("To be", encoding="utf-8"), (folder / "b.txt").write_text("or not", encoding="utf-8")
    >>> result = tokenize_files([folder], folder / "out", tokenizer="bytes", validation_tokens=6, workers=1)
    >>> [(shard.name, shard.tokens) for shard in result.shards]
    [('text_val_000000.bin', 6), ('text_train_000001.bin', 7)]
    """
    held_out = shard_tokens if validation_tokens is None else validation_tokens
    if not 0 < shard_tokens < 1 << 31 or not 0 <= held_out < 1 << 31 or (workers is not None and workers < 1):
        raise ValueError(
            f"tokenize_files: shard_tokens={shard_tokens}, validation_tokens={validation_tokens}, workers={workers}; "
            "tokens of a shard must be in 1..2**31-1 and workers at least 1"
        )
    files, out = input_files(inputs), Path(out_dir)
    tokenizer_id = _identity(tokenizer, vocab_size, end_of_text)
    file_ids = [(str(file.resolve()), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    key = _key(file_ids, tokenizer_id, "text", text_key, shard_tokens, held_out)
    if (finished := _finished(out, key)) is not None:
        return finished
    make_folder(out)
    with lock(out):
        if (finished := _finished(out, key)) is not None:  # another process made it while this one waited
            return finished
        pieces = [unit for file in files for unit in split_units(file, text_key)]
        texts = (text for unit in pieces for text in read_documents(unit, text_key))
        size = min(_TRAIN_CHARS, sum(unit.size for unit in pieces))
        with progress.bar(size, "training a BPE", shown=tokenizer == "bpe", size=True) as advance:
            choose = partial(_choose, tokenizer, vocab_size, end_of_text, _limited(texts, advance))
            writer = ShardWriter(out, "text", key, shard_tokens, held_out, choose)
        left = pieces[writer.unit :]
        with progress.bar(sum(unit.size for unit in pieces), "tokenising", size=True) as advance:
            advance(sum(unit.size for unit in pieces[: writer.unit]))
            with contextlib.closing(_encode_all(left, writer.encoder, text_key, workers or _cores())) as encoded:
                for unit, (tokens, documents_of_unit) in zip(left, encoded, strict=True):
                    writer.add(tokens, documents_of_unit)
                    advance(unit.size)
        return writer.finish()


def sotu_shards(tokenizer: str, out_dir: PathLike | None = None) -> Path:
    """Return the folder with shards of the State of the Union addresses, making them at the first call.

    Whole addresses are held out. Shards are verified at every call and made again if they are damaged.

    >>> import tempfile
    >>> from steadynorm.lab.data.shards import count_tokens, shard_paths
    >>> folder = sotu_shards("bytes", tempfile.mkdtemp())
    >>> [count_tokens(path) for split in ("train", "val") for path in shard_paths(folder, split)]
    [9785579, 976067]
    """
    out = cache_dir() / f"sotu-{tokenizer}" if out_dir is None else Path(out_dir)
    key = _key(SOTU_SHA256, _identity(tokenizer, None, None))
    with contextlib.suppress(DataError):
        if _finished(out, key, checksums=True) is not None:
            return out
    make_folder(out)
    with lock(out):
        try:
            if _finished(out, key, checksums=True) is not None:  # another process made them while this one waited
                return out
        except DataError:
            if not (out / "meta.json").exists() or read_token_set(out).key != key:
                raise
            (out / "meta.json").unlink()  # a shard is damaged: make all of them again
        for stale in out.glob("sotu_*.bin"):
            stale.unlink()
        shutil.rmtree(out / ".partial", ignore_errors=True)
        encoder = make_encoder(tokenizer)
        train, validation = ([address.text for address in part] for part in split_addresses())
        held_out, rest = encoder.encode(validation), encoder.encode(train)
        writer = ShardWriter(out, "sotu", key, len(rest), len(held_out), lambda: encoder)
        writer.add(held_out, len(validation))
        writer.add(rest, len(train))
        writer.finish()
    return out


def _identity(tokenizer: PathLike, vocab_size: int | None, end_of_text: str | None) -> list[Any]:
    if vocab_size is not None and tokenizer != "bpe":
        raise ValueError(f'vocab_size={vocab_size} is for tokenizer="bpe"; {str(tokenizer)!r} has its own')
    if end_of_text is not None and tokenizer in ("bytes", "bpe"):
        raise ValueError(f"end_of_text={end_of_text!r} is for a tokenizer.json; {tokenizer!r} has its own")
    if tokenizer in ("bytes", "gpt2", "bpe"):
        return [tokenizer, vocab_size, end_of_text]
    return [make_encoder(tokenizer, end_of_text=end_of_text).definition, end_of_text]


def _choose(tokenizer: PathLike, vocab_size: int | None, end_of_text: str | None, texts: Iterator[str]) -> Encoder:
    if tokenizer == "bpe":
        return train_bpe(texts, 4096 if vocab_size is None else vocab_size)
    return make_encoder(tokenizer, end_of_text=end_of_text)


def _limited(texts: Iterator[str], advance: Callable[[int], object]) -> Iterator[str]:
    left = _TRAIN_CHARS
    for text in texts:
        yield text[:left]
        advance(len(text))
        if (left := left - len(text)) <= 0:
            return


def _key(*parts: Any) -> str:
    return hashlib.sha256(json.dumps(["steadynorm shards 1", *parts]).encode()).hexdigest()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _finished(out: Path, key: str, *, checksums: bool = False) -> TokenSet | None:
    if not (out / "meta.json").exists():
        if not (out / ".partial").exists():
            check_no_shards(out)
        return None
    token_set = read_token_set(out)
    if token_set.key != key:
        raise DataError(f"{out}: holds shards of other inputs or settings; choose another folder, or remove this one")
    token_set.check(checksums=checksums)
    shutil.rmtree(out / ".partial", ignore_errors=True)
    return token_set


def _encode_unit(unit: Unit, encoder: Encoder, text_key: str) -> Encoded:
    parts: list[Tokens] = []
    batch: list[str] = []
    count, chars = 0, 0
    for text in read_documents(unit, text_key):
        batch.append(text)
        count, chars = count + 1, chars + len(text)
        if chars >= _BATCH_CHARS:
            parts.append(encoder.encode(batch))
            batch, chars = [], 0
    return np.concatenate([*parts, encoder.encode(batch)]), count


def _encode_all(units: Sequence[Unit], encoder: Encoder, text_key: str, workers: int) -> Generator[Encoded]:
    """Yield the tokens of each unit in order, with at most two units per worker under way."""
    if workers == 1 or len(units) < 2:
        yield from (_encode_unit(unit, encoder, text_key) for unit in units)
        return
    workers = min(workers, len(units))
    pool = ProcessPoolExecutor(workers, get_context("spawn"), _start_worker)
    waiting: deque[Future[Encoded]] = deque()
    try:
        for unit in units:
            waiting.append(pool.submit(_encode_unit, unit, encoder, text_key))
            if len(waiting) >= 2 * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "a tokenising process was killed, perhaps for lack of memory; run again with fewer workers"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker() -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one thread per process
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    if (parent := parent_process()) is not None:
        parent.join()
        os._exit(1)
