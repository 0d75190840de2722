"""Text in, shards out: the same bytes for any number of workers and any number of interruptions."""

import errno
import json
import os
import signal
from functools import partial
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from pyarrow import parquet
from tokenizers import Tokenizer

from steadynorm.cli import main
from steadynorm.lab.data import documents, tokenize
from steadynorm.lab.data.datasets import get
from steadynorm.lab.data.download import DataError
from steadynorm.lab.data.encoders import END_OF_TEXT, Encoder, make_encoder, train_bpe
from steadynorm.lab.data.shards import count_tokens, open_shard, read_token_set, shard_paths
from steadynorm.lab.data.sotu import read_addresses, split_addresses
from steadynorm.lab.data.tokenize import sotu_shards, tokenize_files

TEXTS = ["To be, or not to be", "", "that is the question:\n", "Whether 'tis nobler ü 中文 🎉", "x" * 50]
STREAM = b"".join(b"\xff" + text.encode() for text in TEXTS if text)  # \xff, never in UTF-8, stands for end of text


def jsonl(path, texts=TEXTS):
    path.write_text("".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts), encoding="utf-8")
    return path


def stream(paths):
    """Return the tokens of byte shards as bytes."""
    tokens = np.concatenate([open_shard(path) for path in paths])
    return bytes(np.where(tokens == 256, 255, tokens).astype(np.uint8))


def run(inputs, out, **options):
    defaults = {"tokenizer": "bytes", "shard_tokens": 30, "workers": 1}
    return tokenize_files(inputs, out, **(defaults | options))


def paths(made):
    """Return the shards of a set, validation first."""
    return [made.folder / shard.name for shard in made.shards]


def decode(encoder, tokens):
    backend = Tokenizer.from_str(encoder.definition)
    return backend.decode([int(token) for token in tokens], skip_special_tokens=False)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix in (".bin", ".json")}


def test_all_three_formats_give_the_same_stream_validation_first(tmp_path):
    jsonl(tmp_path / "a.jsonl")
    table = pa.table({"n": list(range(len(TEXTS))), "text": TEXTS})
    parquet.write_table(table, tmp_path / "a.parquet", row_group_size=2)
    (tmp_path / "texts").mkdir()
    for number, text in enumerate(TEXTS):
        (tmp_path / "texts" / f"{number}.txt").write_text(text, encoding="utf-8", newline="")
    for number, source in enumerate(("a.jsonl", "a.parquet", "texts")):
        made = run([tmp_path / source], tmp_path / f"out{number}")
        assert stream(paths(made)) == STREAM
        assert [path.name for path in paths(made)[:2]] == ["text_val_000000.bin", "text_train_000001.bin"]
        assert {count_tokens(path) for path in paths(made)[:-1]} == {30}
        assert shard_paths(made.folder, "val") + shard_paths(made.folder, "train") == paths(made)
        assert made.documents == 4
        assert made.tokens == len(STREAM)


def test_meta_json_names_the_tokeniser_counts_and_checksums(tmp_path):
    made = run([jsonl(tmp_path / "a.jsonl")], tmp_path / "out")
    meta = json.loads((tmp_path / "out" / "meta.json").read_text(encoding="utf-8"))
    assert (meta["tokenizer"], meta["vocab_size"], meta["end_of_text"]) == ("bytes", 257, 256)
    assert read_token_set(tmp_path / "out") == made
    made.check()
    content = bytearray(paths(made)[1].read_bytes())
    content[-1] ^= 1
    paths(made)[1].write_bytes(content)
    made.check(checksums=False)
    with pytest.raises(DataError, match=r"not as meta\.json says"):
        made.check()


@pytest.mark.parametrize(("held_out", "names"), [(10, ["val_000000", "train_000001"]), (0, ["train_000001"])])
def test_a_validation_shard_has_a_size_of_its_own_or_is_left_out(tmp_path, held_out, names):
    made = run([jsonl(tmp_path / "a.jsonl")], tmp_path / "out", shard_tokens=10**6, validation_tokens=held_out)
    assert [each.name for each in made.shards] == [f"text_{name}.bin" for name in names]
    assert made.shards[0].tokens == (held_out or len(STREAM))


def test_having_nothing_left_to_train_on_is_an_error_that_leaves_no_file(tmp_path):
    with pytest.raises(DataError, match=r"nothing left to train on; .*smaller validation_tokens"):
        run([jsonl(tmp_path / "a.jsonl")], tmp_path / "out", shard_tokens=1000)
    assert [path.name for path in (tmp_path / "out").iterdir()] == [".lock"]


@pytest.mark.parametrize("unit", [1, 7, 64, 10**6])
def test_lines_are_cut_into_units_without_loss(tmp_path, monkeypatch, unit):
    monkeypatch.setattr(documents, "_UNIT_BYTES", unit)
    source = jsonl(tmp_path / "a.jsonl")
    source.write_bytes(source.read_bytes().replace(b"\n", b"\r\n", 1).rstrip() + b"\n\n  \n")
    made = run([source], tmp_path / "out")
    assert stream(paths(made)) == STREAM


def test_the_output_does_not_depend_on_the_number_of_workers(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_UNIT_BYTES", 500)
    texts = [f"{number} " * (1 + number % 17) + "é" for number in range(300)]
    source = jsonl(tmp_path / "a.jsonl", texts)
    for workers in (1, 2):
        run([source], tmp_path / str(workers), tokenizer="bpe", vocab_size=300, shard_tokens=1000, workers=workers)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    assert len(contents(tmp_path / "1")) > 5


def crashing(number, action):
    """Run `action` in a child that kills itself (SIGKILL) before its `number`th call that changes the disk."""
    if (child := os.fork()) == 0:
        left = [number]

        def fatal(call):
            def counted(*args, **kwargs):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return call(*args, **kwargs)

            return counted

        for name in ("fsync", "replace", "rmdir", "unlink"):
            setattr(os, name, fatal(getattr(os, name)))
        try:
            action()
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


def test_a_call_killed_at_every_step_in_turn_resumes_and_ends_the_same(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_UNIT_BYTES", 40)
    source = jsonl(tmp_path / "a.jsonl")
    expected = contents(run([source], tmp_path / "unbroken", tokenizer="bpe", vocab_size=260).folder)
    number = 1
    options = {"tokenizer": "bpe", "vocab_size": 260}
    while crashing(number, partial(run, [source], out := tmp_path / f"out{number}", **options)):
        if not (out / "meta.json").exists() and out.exists():
            with pytest.raises(DataError):
                shard_paths(out, "train")  # a half-made set cannot be trained on
        assert contents(run([source], out, **options).folder) == expected
        assert not (out / ".partial").exists()
        number += 1
    assert number > 30


def test_finished_shards_are_not_made_again_after_a_stop(tmp_path, monkeypatch):
    monkeypatch.setattr(documents, "_UNIT_BYTES", 20)
    source, seen = jsonl(tmp_path / "a.jsonl"), []
    encode = tokenize._encode_unit

    def full_after_six(unit, *rest):
        seen.append(unit.start)
        if len(seen) == 6:
            raise OSError(errno.ENOSPC, "No space left on device")
        return encode(unit, *rest)

    monkeypatch.setattr(tokenize, "_encode_unit", full_after_six)
    with pytest.raises(OSError, match="No space left"):
        run([source], tmp_path / "out", shard_tokens=20)
    made = run([source], tmp_path / "out", shard_tokens=20)
    assert stream(paths(made)) == STREAM
    assert 0 not in seen[6:]


def test_a_full_disk_while_a_shard_is_written_names_it_and_keeps_the_others(tmp_path, monkeypatch):
    source, synced = jsonl(tmp_path / "a.jsonl"), os.fsync

    def full(handle):
        if ".partial/text_train_000002.bin" in str(Path(f"/proc/self/fd/{handle}").readlink()).replace(".text", "text"):
            raise OSError(errno.ENOSPC, "No space left on device")
        synced(handle)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"text_train_000002\.bin: the disk is full"):
        run([source], tmp_path / "out")
    left = sorted(path.name for path in (tmp_path / "out" / ".partial").iterdir())
    assert left == ["progress.json", "text_train_000001.bin", "text_val_000000.bin"]


def test_a_finished_folder_is_returned_and_not_touched_by_other_settings(tmp_path, monkeypatch):
    source = jsonl(tmp_path / "a.jsonl")
    made = run([source], tmp_path / "out")
    before = contents(tmp_path / "out")
    monkeypatch.setattr(tokenize, "_encode_all", None)  # not needed again
    assert run([source], tmp_path / "out") == made
    with pytest.raises(DataError, match="shards of other inputs or settings"):
        run([source], tmp_path / "out", shard_tokens=31)
    jsonl(source, [*TEXTS, "more"])
    with pytest.raises(DataError, match="shards of other inputs or settings"):
        run([source], tmp_path / "out")
    assert contents(tmp_path / "out") == before
    (tmp_path / "out" / "meta.json").unlink()
    for _ in range(2):
        with pytest.raises(DataError, match="shards of another origin"):
            run([source], tmp_path / "out")
        (tmp_path / "out" / ".partial").mkdir(exist_ok=True)  # of an interrupted call with other settings


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.txt", b"fine\nfine\n\xff\xfe", r"a\.txt, line 3: not UTF-8"),
        ("a.jsonl", b'{"text": "a"}\n{"txt": "b"}\n', r"a\.jsonl, line 2: no text under 'text' \(KeyError"),
        ("a.jsonl", b'{"text": "a"}\n{"text": 5}\n', r"line 2: .*holds int, not text"),
        ("a.jsonl", b'{"text": "a"}\n\n{"text": \n', r"line 3: not JSON .*; fix the line"),
        ("a.jsonl", b'{"text": "\xff"}\n', r"line 1: .*UnicodeDecodeError"),
        ("a.jsonl", b'{"text": "\\ud800"}\n', r"line 1: .*UnicodeEncodeError"),
        ("a.jsonl", b"[1, 2]\n", r"line 1: .*TypeError"),
        ("a.parquet", b"PAR1 broken", r"a\.parquet: not a whole parquet file"),
        ("a.parquet", b"", r"a\.parquet: not a whole parquet file"),
        ("a.csv", b"a,b", r"a\.csv: expected \.txt, \.jsonl, \.parquet"),
        ("a.txt", None, r"a\.txt: no such file"),
    ],
)
def test_unreadable_input_is_named_with_its_line(tmp_path, name, content, says):
    if content is not None:
        (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=says):
        run([tmp_path / name], tmp_path / "out")
    assert not list((tmp_path / "out").glob("*.bin"))


def test_a_folder_with_the_name_of_a_file_is_searched_as_a_folder(tmp_path):
    """Some tools name a folder of parts like one file: `text.parquet/part-0.parquet`."""
    (folder := tmp_path / "texts" / "a.txt").mkdir(parents=True)
    (part := folder / "part.txt").write_bytes(b"text")
    assert documents.input_files([tmp_path / "texts"]) == documents.input_files([folder]) == [part]


def test_a_parquet_file_without_the_column_or_with_an_empty_cell_is_named(tmp_path):
    table = pa.table({"n": [1, 2, 3], "body": ["a", "b", None]})
    parquet.write_table(table, source := tmp_path / "a.parquet", row_group_size=1)
    with pytest.raises(DataError, match=r"no column 'text' but n, body; pass text_key="):
        run([source], tmp_path / "out")
    with pytest.raises(DataError, match="column 'n' holds int64, not text"):
        run([source], tmp_path / "out", text_key="n")
    with pytest.raises(DataError, match=r"a\.parquet, row 3: no text in column 'body'"):
        run([source], tmp_path / "out", text_key="body")


def test_the_error_for_impossible_settings_says_why(tmp_path):
    source = jsonl(tmp_path / "a.jsonl")
    for options, says in (
        ({"shard_tokens": 0}, "shard_tokens=0"),
        ({"workers": 0}, "workers=0"),
        ({"vocab_size": 300}, 'is for tokenizer="bpe"'),
        ({"vocab_size": 300, "tokenizer": tmp_path / "t.json"}, 'is for tokenizer="bpe"'),
        ({"end_of_text": "<fin>"}, "is for a tokenizer.json; 'bytes' has its own"),
        ({"end_of_text": "<fin>", "tokenizer": "bpe"}, "is for a tokenizer.json; 'bpe' has its own"),
        ({"tokenizer": "bpe", "vocab_size": 100}, "257 to 65536"),
        ({"tokenizer": "gpt5"}, "gpt5: no such tokeniser"),
        ({"tokenizer": source}, "not a tokenizer.json"),
    ):
        with pytest.raises(ValueError, match=says):
            run([source], tmp_path / "out", **options)
    with pytest.raises(DataError, match="no inputs"):
        run([], tmp_path / "out")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="or a folder of them"):
        run([tmp_path / "empty"], tmp_path / "out")


@pytest.fixture(scope="module")
def bpe():
    return train_bpe(TEXTS * 20, 300)


def test_a_trained_bpe_decodes_back_any_text_and_is_kept_with_the_shards(tmp_path, bpe):
    for text in [*TEXTS, "never seen: ñ \t\n 한국어", " lead and trail "]:
        tokens = bpe.encode([text])
        assert tokens[0] == bpe.end_of_text
        assert decode(bpe, tokens[1:]) == text
        assert len(tokens) <= 1 + len(text.encode())
    made = run([jsonl(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer="bpe", vocab_size=300, shard_tokens=9)
    kept = make_encoder(made.folder / "tokenizer.json")
    joined = np.concatenate([open_shard(path) for path in paths(made)])
    assert kept.vocab_size == made.vocab_size == 300
    assert decode(kept, joined) == "".join(END_OF_TEXT + text for text in TEXTS if text)
    # as any tokenizer.json
    again = run([tmp_path / "a.jsonl"], tmp_path / "again", tokenizer=made.folder / "tokenizer.json", shard_tokens=9)
    assert [each.sha256 for each in again.shards] == [each.sha256 for each in made.shards]


def test_a_document_that_spells_end_of_text_does_not_end(bpe):
    tokens = bpe.encode(["a <|endoftext|> b"])
    assert (tokens == bpe.end_of_text).sum() == 1
    assert decode(bpe, tokens[1:]) == "a <|endoftext|> b"


def test_the_end_of_text_token_of_a_foreign_tokeniser_is_found_or_asked_for(tmp_path, bpe):
    (tmp_path / "t.json").write_text(bpe.definition.replace("<|endoftext|>", "<fin>"), encoding="utf-8")
    with pytest.raises(DataError, match="name it by end_of_text, on the command line --end-of-text TOKEN"):
        make_encoder(tmp_path / "t.json")
    assert make_encoder(tmp_path / "t.json", end_of_text="<fin>").end_of_text == bpe.end_of_text
    (tmp_path / "a.txt").write_text("a few words", encoding="utf-8")
    call = ["data", "tokenize", str(tmp_path / "a.txt"), "--out", str(tmp_path / "shards"), "--validation-tokens", "0"]
    call += ["--workers", "1", "--tokenizer", str(tmp_path / "t.json")]
    assert main(call) == 2
    assert main([*call, "--end-of-text", "<fin>"]) == 0
    meta = json.loads((tmp_path / "shards" / "meta.json").read_text(encoding="utf-8"))
    assert meta["end_of_text"] == bpe.end_of_text


def test_a_vocabulary_too_large_for_uint16_is_refused(tmp_path):
    from tokenizers import models

    words = {f"w{number}": number for number in range(65536)} | {"</s>": 65536}
    Tokenizer(models.WordLevel(words, unk_token="w0")).save(str(tmp_path / "t.json"))
    with pytest.raises(DataError, match="65537 tokens; shards hold uint16"):
        make_encoder(tmp_path / "t.json")


def test_gpt2_files_must_be_gpt2s(tmp_path):
    (tmp_path / "encoder.json").write_text("{}", encoding="utf-8")
    (tmp_path / "vocab.bpe").write_text("", encoding="utf-8")
    with pytest.raises(DataError, match=r"encoder\.json: missing, or not GPT-2's"):
        make_encoder(tmp_path)


def test_the_embedded_text_is_held_out_by_whole_addresses():
    train, validation = split_addresses()
    assert {each.name for each in train} | {each.name for each in validation} == {
        each.name for each in read_addresses()
    }
    assert not {each.name for each in train} & {each.name for each in validation}
    years = [int(each.name[:4]) for each in validation]
    assert years[0] < 1810 and years[-1] > 2010
    assert 0.07 < sum(len(each.text) for each in validation) / sum(len(each.text) for each in read_addresses()) < 0.12


def test_embedded_shards_hold_the_split_and_are_cached_and_repaired(tmp_path, monkeypatch):
    assert sotu_shards("bytes", tmp_path) == tmp_path
    for split, addresses in zip(("train", "val"), split_addresses(), strict=True):
        assert stream(shard_paths(tmp_path, split)) == b"".join(b"\xff" + each.text.encode() for each in addresses)
    encode, calls = Encoder.encode, []
    monkeypatch.setattr(Encoder, "encode", lambda self, texts: calls.append(1) or encode(self, texts))
    sotu_shards("bytes", tmp_path)
    assert not calls
    [train] = shard_paths(tmp_path, "train")
    before = train.read_bytes()
    train.write_bytes(before[:-2])
    sotu_shards("bytes", tmp_path)
    assert train.read_bytes() == before
    with pytest.raises(DataError, match="shards of other inputs or settings"):
        sotu_shards("gpt2", tmp_path)
    assert train.read_bytes() == before


def test_the_default_folder_is_in_the_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("STEADYNORM_CACHE", str(tmp_path))
    assert sotu_shards("bytes") == tmp_path / "sotu-bytes"


@pytest.mark.slow
def test_gpt2_gives_the_known_tokens_and_decodes_back(tmp_path):
    folder = get("gpt2-bpe", tmp_path / "gpt2")
    encoder = make_encoder(folder)
    assert (encoder.vocab_size, encoder.end_of_text) == (50257, 50256)
    assert encoder.encode(["Hello world"]).tolist() == [50256, 15496, 995]
    assert encoder.encode(["a <|endoftext|> b"]).tolist().count(50256) == 1
    for text in [read_addresses()[100].text, *TEXTS, "don't I'LL  two\t\n\n 12 x"]:
        assert decode(encoder, encoder.encode([text])[1:]) == text
    made = tokenize_files([jsonl(tmp_path / "a.jsonl")], tmp_path / "out", tokenizer=folder, shard_tokens=9, workers=1)
    assert made.vocab_size == 50257
    assert decode(encoder, open_shard(paths(made)[0])) == "<|endoftext|>To be, or not to be<|endoftext|>"
