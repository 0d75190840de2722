"""Files cut short and bits flipped: the error names the file and a remedy, or the damage is harmless.

Damage is never taken for data.
"""

import json
import shutil
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp
from brittle import config, recorded, texts, tokens
from injecting import damages, files_in, injected
from tiny_set import TINY, archive, tiny_set

from steadynorm import records
from steadynorm.files import read_json, write_json
from steadynorm.lab.data import shards, sotu, token_loader
from steadynorm.lab.data.datasets import DATA_SETS, get
from steadynorm.lab.data.download import DataError
from steadynorm.lab.paper import pool, runner
from steadynorm.lab.train import checkpoint, loop
from steadynorm.lab.train.checkpoint import CheckpointError
from steadynorm.records import RecordError

much = pytest.mark.parametrize("flips", [25, pytest.param(400, marks=pytest.mark.slow)])


def examine(
    path: Path, use: Callable[[], Any], errors: type[Exception], flips: int, names: str | None = None, seed: int = 0
) -> int:
    """Damage a file in every way: `use` must raise an error that names it, or return what it returned before.

    Return how often it raised.
    """
    whole, expected, raised = path.read_bytes(), use(), 0
    for label, content in damages(whole, seed, flips):
        path.write_bytes(content)
        try:
            assert use() == expected, f"{path.name}, {label}: taken for the real thing"
        except errors as error:
            raised += 1
            assert (names or path.name) in str(error), label
    path.write_bytes(whole)
    assert use() == expected
    return raised


# Checkpoints


def saved(folder: Path) -> Path:
    for step in (1, 2):
        model = {"w": torch.arange(300.0) * step, "b": torch.ones(7)}
        state = {"step": step, "momentum": torch.arange(200.0), "rng": torch.get_rng_state()[:50], "name": "x"}
        checkpoint.save(folder, step, state, model, keep=2)
    return folder / "step-000002"


def loaded(path: Path) -> Any:
    _, model, state = checkpoint.load(path)
    plain = {key: each.tolist() if isinstance(each, torch.Tensor) else each for key, each in state.items()}
    return plain, {key: each.tolist() for key, each in (model or {}).items()}


@much
@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "manifest.json"])
def test_a_damaged_checkpoint_is_refused(tmp_path: Path, name: str, flips: int):
    newest = saved(tmp_path)
    raised = examine(newest / name, lambda: loaded(newest), CheckpointError, flips, names="step-000002")
    assert raised >= flips if name != "manifest.json" else raised > flips // 2  # its spaces do not matter


@pytest.mark.parametrize("name", ["model.safetensors", "state.pt", "manifest.json"])
def test_the_checkpoint_before_a_damaged_one_is_used(tmp_path: Path, name: str):
    newest = saved(tmp_path)
    content = (newest / name).read_bytes()
    for label, damaged in damages(content, seed=4, flips=12, cuts=0):
        (newest / name).write_bytes(damaged)
        if name == "manifest.json" and harmless(newest / name, content):
            continue
        with pytest.warns(UserWarning, match="step-000002.*; resuming from the one before"):
            found = checkpoint.latest(tmp_path)
        assert found is not None
        assert found[2]["step"] == 1, label
    (newest / name).write_bytes(content)
    found = checkpoint.latest(tmp_path)
    assert found is not None
    assert found[2]["step"] == 2


def harmless(path: Path, whole: bytes) -> bool:
    """Return whether JSON says the same as before, as when one kind of space became another."""
    try:
        return json.loads(path.read_bytes()) == json.loads(whole)
    except ValueError:
        return False


def test_a_good_checkpoint_is_preferred_to_a_damaged_newer_one(tmp_path: Path):
    """With keep=1 the run returned to step 1, because step 3 is damaged, and saved step 2."""
    state, model = {"step": 1}, {"w": torch.ones(3)}
    checkpoint.save(tmp_path, 1, state, model, keep=2)
    checkpoint.save(tmp_path, 3, {"step": 3}, model, keep=2)
    (tmp_path / "step-000003" / "state.pt").write_bytes(b"")
    injected()
    checkpoint.save(tmp_path, 2, {"step": 2}, model, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000002"]
    assert checkpoint.load(tmp_path / "step-000002")[2] == {"step": 2}


def test_a_damaged_checkpoint_of_many_processes_is_named(tmp_path: Path):
    made = checkpoint.begin(tmp_path, 1, fresh=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch: there is one process only
        dcp.save({"model": {"w": torch.arange(500.0)}}, checkpoint_id=made / checkpoint.SHARDS, no_dist=True)
    newest = checkpoint.save(tmp_path, 1, {"step": 1}, None, keep=1)
    for path in sorted((newest / checkpoint.SHARDS).iterdir()):
        assert examine(path, lambda: loaded(newest), CheckpointError, 10, names="step-000001") >= 15


# Shards


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    return tokens(texts(folder), folder / "shards").folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "shards")


def read_all(folder: Path, split: str = "train") -> list[Any]:
    paths, sums = shards.shard_paths(folder, split), shards.shard_checksums(folder)
    loader = token_loader.TokenLoader(paths, batch=2, length=8, repeat=False, checksums=sums)
    return [inputs.tolist() for inputs, _ in loader]


@much
@pytest.mark.parametrize("split", ["train", "val"])
def test_a_damaged_shard_is_named(folder: Path, split: str, flips: int):
    path = shards.shard_paths(folder, split)[0]
    assert examine(path, lambda: read_all(folder, split), DataError, flips) >= flips


@much
def test_a_damaged_meta_json_or_tokenizer_is_named(folder: Path, flips: int):
    def use() -> Any:
        made = shards.read_token_set(folder)
        made.check()
        return asdict(made)

    assert examine(folder / "meta.json", use, DataError, flips, names=str(folder)) > flips // 2
    assert examine(folder / "tokenizer.json", use, DataError, flips) >= flips


def test_training_names_the_damaged_shard_and_touches_nothing(folder: Path, tmp_path: Path):
    path = shards.shard_paths(folder, "train")[0]
    content = bytearray(path.read_bytes())
    content[-5] ^= 4
    path.write_bytes(content)
    injected()
    with pytest.raises(DataError, match=rf"{path.name}: damaged: sha256 .*tokenise again"):
        loop.train(config(folder, tmp_path / "run"), quiet=True)
    assert not list((tmp_path / "run").glob("checkpoints/*"))


def test_shards_without_meta_json_are_read_without_a_checksum(folder: Path):
    expected = read_all(folder)
    (folder / "meta.json").unlink()
    assert read_all(folder) == expected


def test_tokenising_resumes_only_from_whole_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    source = texts(tmp_path)
    expected = files_in(tokens(source, tmp_path / "unbroken").folder)
    write = write_json

    def stop(path: Path, value: Any) -> None:
        if path.name == "meta.json":
            raise KeyboardInterrupt
        write(path, value)

    for number, name in enumerate(("text_val_000000.bin", "text_train_000002.bin", "tokenizer.json", "progress.json")):
        out = tmp_path / f"out{number}"
        with monkeypatch.context() as patch:
            patch.setattr("steadynorm.lab.data.shard_writer.write_json", stop)
            patch.setattr(
                Path, "replace", lambda self, target: None if ".partial" not in str(target) else self.rename(target)
            )
            with pytest.raises(KeyboardInterrupt):
                tokens(source, out)
        path = out / ".partial" / name
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
        injected()
        assert files_in(tokens(source, out).folder) == expected, name


# Records


def as_read(path: Path) -> tuple[Any, ...]:
    return told(records.read(path))


def told(run: records.Run, count: int | None = None) -> tuple[Any, ...]:
    """Return all of a run, or of its first records."""
    columns = {key: each[:count].tolist() for key, each in run.columns.items()}
    layers = {name: {key: each[:count].tolist() for key, each in layer.items()} for name, layer in run.layers.items()}
    return run.name, dict(run.config), run.created, run.steps[:count].tolist(), columns, layers


@much
def test_damaged_records_are_named(tmp_path: Path, flips: int):
    """What is read is what was written; a torn end is dropped and counted; otherwise the line is named."""
    path = recorded(tmp_path, steps=8)
    whole, expected, raised = path.read_bytes(), records.read(path), 0
    header = whole.index(b"\n")
    for label, content in damages(whole, seed=1, flips=3 * flips, cuts=20):
        path.write_bytes(content)
        cut = len(content) < len(whole)
        try:
            run = records.read(path)
        except RecordError as error:
            raised += 1
            assert f"{path}: " in str(error), label
            assert ";" in str(error), label
            assert not cut or len(content) < header, f"{label}: a torn end is no reason to refuse the rest"
            continue
        count = len(run.steps)
        if count:
            assert told(run) == told(expected, count), label
        assert (run.name, run.config, run.created) == (expected.name, expected.config, expected.created), label
        if cut:
            lines = content.count(b"\n") - 1
            torn = not whole.startswith(content + b"\n") and not content.endswith(b"\n")
            assert (count, run.dropped) == (lines + (not torn), int(torn)), label
        else:
            assert count + run.dropped == 8, f"{label}: lines are missing and nothing says so"
    assert raised > flips
    path.write_bytes(whole)


def test_records_cut_at_any_byte_can_be_read(tmp_path: Path):
    """Of the last two lines, the whole ones are read and a torn one is counted."""
    path = recorded(tmp_path, steps=3)
    whole, expected = path.read_bytes(), records.read(path)
    ends = [at for at, byte in enumerate(whole) if byte == 10]
    for at in range(ends[1], len(whole)):
        path.write_bytes(whole[:at])
        injected()
        run = records.read(path)
        count = sum(at >= end for end in ends[1:])  # without its newline a line is whole
        assert (told(run), run.dropped) == (told(expected, count), int(at not in ends and at - 1 not in ends)), at


def test_a_flipped_digit_is_detected(tmp_path: Path):
    """The result is valid JSON with a plausible number, so only a checksum can detect it."""
    path = recorded(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(whole.replace(b'"loss": 0.25', b'"loss": 0.26'))
    injected()
    with pytest.raises(RecordError, match=r"line 5 is damaged \(its checksum differs\); cut the file before it"):
        records.read(path)
    path.write_bytes(whole.replace(b'"lr": 0.1', b'"lr": 0.2'))
    injected()
    with pytest.raises(RecordError, match="line 1 is damaged"):
        records.read(path)


def test_records_of_earlier_versions_get_checksums_on_resume(tmp_path: Path):
    path = recorded(tmp_path, steps=4)
    sealed, expected = path.read_bytes(), as_read(path)
    plain = [{k: v for k, v in json.loads(line).items() if k != "crc"} for line in sealed.splitlines()]
    path.write_text("".join(json.dumps(line) + "\n" for line in plain), encoding="utf-8")
    assert as_read(path) == expected
    config = {"lr": 0.1, "steps": 4}
    records.Recorder(path, name="run", config=config, resume_at=9).close()
    assert path.read_bytes() == sealed


def test_a_run_whose_records_end_before_its_checkpoint_says_so(made: Path, tmp_path: Path):
    whole = config(made, tmp_path / "run", steps=6)
    loop.train(whole, quiet=True)
    path = whole.out / records.FILE
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:4]))
    injected()
    with pytest.warns(UserWarning, match=r"records\.jsonl: ends at step 3, the checkpoint is of step 6"):
        loop.train(whole, quiet=True)


def test_a_run_whose_last_line_is_damaged_is_not_finished(made: Path, tmp_path: Path):
    whole = config(made, tmp_path / "run", steps=4)
    loop.train(whole, quiet=True)
    assert pool.finished(whole)
    path = whole.out / records.FILE
    content = path.read_bytes()
    at = content.rindex(b'"loss": ') + 9
    path.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    injected()
    assert not pool.finished(whole)


# Data sets


@much
@pytest.mark.parametrize("kind", ["tar.gz", "tar.xz", "tar.bz2", "zip"])
def test_a_damaged_archive_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, flips: int):
    monkeypatch.setitem(DATA_SETS, "tiny", tiny_set())
    source, number = archive(tmp_path / f"set.{kind}"), iter(range(10**6))

    def use() -> dict[str, bytes]:
        out = tmp_path / f"out{next(number)}"
        try:
            found = files_in(get("tiny", out, source=source))
        except DataError:
            assert files_in(out) == {}
            raise
        return {name: found[name] for name in TINY}

    assert examine(source, use, DataError, flips) > flips // 4  # some bits do not matter: times, owners


@much
def test_a_damaged_data_set_is_downloaded_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flips: int):
    monkeypatch.setitem(DATA_SETS, "tiny", tiny_set())
    out = get("tiny", tmp_path / "out", source=archive(tmp_path / "set.zip"))
    expected = files_in(out)
    for name in TINY:
        for label, content in damages(expected[name], seed=2, flips=flips):
            (out / name).write_bytes(content)
            assert files_in(get("tiny", out, source=tmp_path / "set.zip")) == expected, label


def test_embedded_texts_are_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = Path(sotu.__file__).with_name("sotu.json.xz").read_bytes()
    monkeypatch.setattr(sotu.resources, "files", lambda _: tmp_path)
    for label, content in damages(whole, seed=3, flips=3, cuts=0):
        (tmp_path / "sotu.json.xz").write_bytes(content)
        with pytest.raises(DataError, match=r"sotu\.json\.xz: .*install steadynorm again"):
            sotu.read_addresses.__wrapped__()
            pytest.fail(label)


# JSON


@much
def test_a_damaged_summary_is_named(tmp_path: Path, flips: int):
    path = tmp_path / "summary.json"
    held = {"schema": runner.SCHEMA, "version": runner.VERSION, "experiment": "tiny", "numbers": {"a": [0.1, 2]}}
    write_json(path, held)
    assert examine(path, lambda: runner.check_folder(tmp_path, "tiny"), ValueError, flips) > flips // 2


@much
def test_a_damaged_configuration_is_named(made: Path, tmp_path: Path, flips: int):
    run = config(made, tmp_path / "run")
    run.out.mkdir()
    loop._keep_config(run)
    path = run.out / "config.json"

    def use() -> Any:
        return read_json(path)

    assert examine(path, use, ValueError, flips) > flips // 2
    path.write_text("[1, 2]", encoding="utf-8")
    injected()
    assert not pool.finished(run)
    with pytest.raises(ValueError, match=r"config\.json: not whole .*restore it from a copy, or remove only this file"):
        loop._keep_config(run)


def test_json_without_a_checksum_is_read_as_it_is(tmp_path: Path):
    (tmp_path / "old.json").write_text('{"a": 1}', encoding="utf-8")
    assert read_json(tmp_path / "old.json") == {"a": 1}
    write_json(tmp_path / "new.json", {"a": np.float64(0.1).item(), "b": None})
    assert read_json(tmp_path / "new.json") == {"a": 0.1, "b": None}
