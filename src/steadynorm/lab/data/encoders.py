"""Encode text as tokens: bytes, GPT-2's BPE, a BPE trained here, or any `tokenizer.json`."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from steadynorm.files import PathLike, sha256
from steadynorm.lab.data.datasets import GPT2_FILES, get
from steadynorm.lab.data.download import DataError
from steadynorm.lab.data.shards import MAX_VOCAB, Tokens

if TYPE_CHECKING:
    from tokenizers import Tokenizer

END_OF_TEXT = "<|endoftext|>"
BYTE_VOCAB = 257  # bytes, and one token for the end of a text
_ENDS = (END_OF_TEXT, "<|end_of_text|>", "</s>", "<eos>")  # looked up in a tokenizer.json in this order


@dataclass(frozen=True)
class Encoder:
    """Encode texts, each preceded by the end-of-text token.

    A special token spelled out in a document is encoded as text, so that no document can end itself.

    >>> encoder = make_encoder("bytes")
    >>> encoder.encode(["Hi", "é"]).tolist(), encoder.vocab_size
    ([256, 72, 105, 256, 195, 169], 257)
    """

    name: str
    vocab_size: int
    end_of_text: int
    definition: str = field(default="", repr=False)  # content of tokenizer.json; empty for bytes

    def encode(self, texts: Sequence[str]) -> Tokens:
        """Return the tokens of all texts, concatenated."""
        if self.definition:
            ids = [np.array(encoding.ids, np.uint16) for encoding in _backend(self.definition).encode_batch_fast(texts)]
        else:
            ids = [np.frombuffer(text.encode(), np.uint8).astype(np.uint16) for text in texts]
        end = np.array([self.end_of_text], np.uint16)
        return np.concatenate([part for tokens in ids for part in (end, tokens)]) if ids else end[:0]


@lru_cache(4)
def _backend(definition: str) -> "Tokenizer":
    from tokenizers import Tokenizer

    backend = Tokenizer.from_str(definition)
    backend.no_padding()
    backend.no_truncation()
    backend.encode_special_tokens = True  # as text, if a document spells one out
    return backend


def make_encoder(tokenizer: PathLike, *, end_of_text: str | None = None) -> Encoder:
    """Return an encoder by name or path.

    Args:
        tokenizer: "bytes" (0 to 255, end of text 256); "gpt2" (downloaded if missing); the path of a
            `tokenizer.json`; or of a folder with GPT-2's `encoder.json` and `vocab.bpe`.
        end_of_text: Token put before each document; by default the first of the usual names in the vocabulary.
    """
    if tokenizer == "bytes":
        return Encoder("bytes", BYTE_VOCAB, 256)
    path = get("gpt2-bpe") if tokenizer == "gpt2" else Path(tokenizer)
    if path.is_dir():
        return _described("gpt2", _gpt2(path), end_of_text)
    if not path.is_file():
        raise DataError(f'{path}: no such tokeniser; pass "bytes", "gpt2", "bpe" or the path of a tokenizer.json')
    try:
        definition = path.read_text(encoding="utf-8")
        _backend(definition)
    except ImportError:
        raise
    except Exception as error:  # tokenizers raises Exception itself
        raise DataError(f"{path}: not a tokenizer.json of the `tokenizers` library ({error})") from error
    return _described(path.name, definition, end_of_text)


def _described(name: str, definition: str, end_of_text: str | None) -> Encoder:
    vocabulary = _backend(definition).get_vocab(with_added_tokens=True)
    ends = _ENDS if end_of_text is None else (end_of_text,)
    if not (candidates := [vocabulary[end] for end in ends if end in vocabulary]):
        raise DataError(
            f"{name}: none of {', '.join(ends)} is in its vocabulary; name it by end_of_text, on the command line --end-of-text TOKEN"
        )
    if (size := max(vocabulary.values()) + 1) > MAX_VOCAB:
        raise DataError(f"{name}: {size} tokens; shards hold uint16, choose a vocabulary of at most {MAX_VOCAB}")
    return Encoder(name, size, candidates[0], definition)


def _gpt2(folder: Path) -> str:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    for name, checksum in GPT2_FILES.items():
        if not (folder / name).is_file() or sha256(folder / name) != checksum:
            raise DataError(f"{folder / name}: missing, or not GPT-2's; `steadynorm data get gpt2-bpe` gets it")
    backend = Tokenizer(models.BPE.from_file(str(folder / "encoder.json"), str(folder / "vocab.bpe")))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend.to_str()


def train_bpe(texts: Iterable[str], vocab_size: int) -> Encoder:
    """Train a byte-level BPE of `vocab_size` tokens, which include end of text and all 256 bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if not 257 <= vocab_size <= MAX_VOCAB:
        raise ValueError(f"vocab_size={vocab_size}; a byte-level BPE in uint16 shards has 257 to {MAX_VOCAB} tokens")
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size, special_tokens=[END_OF_TEXT], initial_alphabet=alphabet, show_progress=False
    )
    backend.train_from_iterator(texts, trainer)
    return _described("bpe", backend.to_str(), END_OF_TEXT)
