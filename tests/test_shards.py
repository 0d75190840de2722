"""Shards are the recipe's bytes, whole or absent; the loader's batches depend only on the tokens and the step."""

import errno
import json
import os
import resource
import signal
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from steadynorm.lab.data.download import DataError
from steadynorm.lab.data.shards import (
    count_tokens,
    open_shard,
    read_token_set,
    shard_paths,
    write_shard,
)
from steadynorm.lab.data.token_loader import TokenLoader


def header(magic=20240520, version=1, count=4):
    return np.array([magic, version, count] + [0] * 253, "<i4").tobytes()


def test_a_shard_is_the_recipes_bytes(tmp_path):
    write_shard(tmp_path / "a.bin", np.array([0, 1, 50256, 65535]))
    assert (tmp_path / "a.bin").read_bytes() == header() + b"\0\0\x01\0\x50\xc4\xff\xff"
    assert open_shard(tmp_path / "a.bin").tolist() == [0, 1, 50256, 65535]


def test_tokens_are_memory_mapped_rather_than_read(tmp_path):
    write_shard(tmp_path / "a.bin", np.arange(1000))
    assert isinstance(open_shard(tmp_path / "a.bin"), np.memmap)


@pytest.mark.parametrize("tokens", [[], [-1], [65536], [1.5], [[1, 2]]])
def test_tokens_that_uint16_cannot_hold_are_not_written(tmp_path, tokens):
    with pytest.raises(ValueError, match="shard: "):
        write_shard(tmp_path / "a.bin", tokens)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "an empty file"),
        (b"\x89PNG\r\n\x1a\n" + bytes(2000), "not a token shard"),
        (header(magic=20240801) + bytes(8), "first four bytes are 20240801"),
        (header()[:400], "truncated"),
        (header(version=7) + bytes(8), "version 7"),
        (header(count=0), "0 tokens"),
        (header(count=-4) + bytes(8), "-4 tokens"),
        (header() + bytes(7), "truncated: 1031 bytes, 1032"),
        (header() + bytes(9), "longer than it says"),
    ],
)
def test_a_bad_shard_is_refused_by_name_before_the_first_batch(tmp_path, content, says):
    good, bad = tmp_path / "a_train_000001.bin", tmp_path / "a_train_000002.bin"
    write_shard(good, range(100))
    bad.write_bytes(content)
    for use in (open_shard, count_tokens, lambda path: TokenLoader([good, path], batch=1, length=4)):
        with pytest.raises(DataError, match=says) as raised:
            use(bad)
        assert str(bad) in str(raised.value)


def test_a_full_disk_leaves_the_old_shard_and_no_other_file(tmp_path, monkeypatch):
    write_shard(path := tmp_path / "a.bin", [1, 2, 3])

    def full(_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"a\.bin: the disk is full") as raised:
        write_shard(path, range(1000))
    assert raised.value.errno == errno.ENOSPC
    assert [each.name for each in tmp_path.iterdir()] == ["a.bin"]
    assert open_shard(path).tolist() == [1, 2, 3]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_kill_while_writing_leaves_the_old_shard(tmp_path, call):
    write_shard(path := tmp_path / "a_train_000001.bin", [1, 2, 3])
    if (child := os.fork()) == 0:
        setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        write_shard(path, range(1000))
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    assert [open_shard(each).tolist() for each in shard_paths(tmp_path, "train")] == [[1, 2, 3]]


def write_stream(folder, sizes, vocab=1000, seed=0):
    """Write shards of these sizes; return all their tokens."""
    tokens = np.random.default_rng(seed).integers(0, vocab, sum(sizes))
    cuts = np.cumsum(sizes)[:-1]
    paths = [folder / f"a_train_{i:06d}.bin" for i in range(len(sizes))]
    for path, part in zip(paths, np.split(tokens, cuts), strict=True):
        write_shard(path, part)
    return paths, tokens


def twin(tokens, batch, length, steps):
    """Load in one line per batch: token n L B + i L + j is input (i, j) of step n; passes start again at 0."""
    in_a_pass = (len(tokens) - 1) // length // batch
    for step in range(steps):
        rows = range((step % in_a_pass) * batch, (step % in_a_pass + 1) * batch)
        yield [tokens[i * length : (i + 1) * length].tolist() for i in rows]


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_every_world_size_sees_the_twins_batches_and_resumes_exactly(tmp_path_factory, data):
    sizes = data.draw(st.lists(st.integers(1, 60), min_size=1, max_size=5).filter(lambda s: sum(s) >= 50))
    length, shuffle = data.draw(st.integers(1, 12)), data.draw(st.none() | st.integers(0, 3))
    paths, tokens = write_stream(tmp_path_factory.mktemp("shards"), sizes)
    steps, stop = 12, data.draw(st.integers(0, 12))
    whole = list(zip(range(steps), TokenLoader(paths, batch=4, length=length, shuffle=shuffle), strict=False))
    if shuffle is None:
        assert [inputs.tolist() for _, (inputs, _) in whole] == list(twin(tokens, 4, length, steps))
    before, after = data.draw(st.sampled_from([1, 2, 4])), data.draw(st.sampled_from([1, 2, 4]))
    states = []
    for rank in range(before):
        loader = TokenLoader(paths, batch=4, length=length, shuffle=shuffle, rank=rank, world=before)
        for _ in range(stop):
            next(loader)
        states.append(loader.state_dict())
    assert all(state == states[0] for state in states)
    ranks = [TokenLoader(paths, batch=4, length=length, shuffle=shuffle, rank=r, world=after) for r in range(after)]
    for loader in ranks:
        loader.load_state_dict(states[0])
    for _, (inputs, targets) in whole[stop:]:
        parts = [next(loader) for loader in ranks]
        assert torch.equal(torch.cat([each[0] for each in parts]), inputs)
        assert torch.equal(torch.cat([each[1] for each in parts]), targets)


def test_targets_are_the_next_tokens_across_a_shard_boundary(tmp_path):
    paths, tokens = write_stream(tmp_path, [10, 3, 20])
    inputs, targets = next(TokenLoader(paths, batch=2, length=8))
    assert inputs.dtype == targets.dtype == torch.int64
    assert inputs.is_contiguous() and targets.is_contiguous()
    assert inputs.flatten().tolist() == tokens[:16].tolist()
    assert targets.flatten().tolist() == tokens[1:17].tolist()


def test_a_single_pass_stops_and_a_repeated_one_counts_passes(tmp_path):
    paths, _ = write_stream(tmp_path, [41])
    once = TokenLoader(paths, batch=3, length=4, repeat=False)
    assert len(list(once)) == 3  # 10 sequences, one left over
    with pytest.raises(StopIteration):
        next(once)
    again = TokenLoader(paths, batch=3, length=4)
    first = [next(again)[0].tolist() for _ in range(3)]
    assert again.epoch == 0
    assert [next(again)[0].tolist() for _ in range(3)] == first
    assert again.epoch == 1


def test_shuffled_passes_take_every_sequence_once_in_orders_of_their_own(tmp_path):
    paths, tokens = write_stream(tmp_path, [30, 31], vocab=60000)

    def orders(seed):
        loader = TokenLoader(paths, batch=3, length=5, shuffle=seed)
        starts = {int(tokens[i * 5]): i for i in range(12)}
        return [[starts[int(row[0])] for _ in range(4) for row in next(loader)[0]] for _ in range(2)]

    (first, second), (other, _) = orders(7), orders(8)
    assert sorted(first) == sorted(second) == list(range(12))
    assert first != second and first != other
    # fixed for good: a run resumed with another version of numpy goes on in the same order
    assert first == [8, 4, 1, 6, 3, 2, 11, 7, 5, 9, 10, 0]


def test_a_position_is_plain_integers_and_belongs_to_its_data(tmp_path):
    paths, _ = write_stream(tmp_path, [100])
    loader = TokenLoader(paths, batch=2, length=5)
    next(loader)
    state = loader.state_dict()
    assert json.loads(json.dumps(state)) == state
    assert {type(value) for value in state.values()} == {int}
    for other in (
        TokenLoader(paths, batch=2, length=4),
        TokenLoader(paths, batch=2, length=5, shuffle=0),
        TokenLoader(paths * 2, batch=2, length=5),
    ):
        with pytest.raises(DataError, match=r"the saved position has .*resume with the same shards"):
            other.load_state_dict(state)
    for broken in ({**state, "sequence": 99}, {**state, "epoch": -1}, {k: v for k, v in state.items() if k != "epoch"}):
        with pytest.raises(DataError, match="is not a position"):
            loader.load_state_dict(broken)
    assert loader.state_dict() == state


def test_a_token_beyond_the_vocabulary_names_shard_and_position_and_keeps_the_loaders(tmp_path):
    write_shard(first := tmp_path / "a.bin", [1] * 10)
    write_shard(second := tmp_path / "b.bin", [1] * 7 + [500] + [1] * 10)
    loader = TokenLoader([first, second], batch=1, length=4, vocab=500)
    for _ in range(4):
        next(loader)
    state = loader.state_dict()
    with pytest.raises(DataError, match=r"b\.bin: token 500 at position 7 is beyond the vocabulary of 500"):
        next(loader)
    assert loader.state_dict() == state
    loader = TokenLoader([first, second], batch=1, length=4, vocab=501, repeat=False)
    assert len(list(loader)) == 6


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"batch": 3, "world": 2}, "divisible by world=2"),
        ({"batch": 0}, "batch=0"),
        ({"rank": 2, "world": 2}, "rank in 0"),
        ({"length": 0}, "length=0"),
        ({"shuffle": -1}, "seed of 0 or more"),
        ({"batch": 50}, "100 tokens are less than one batch of 50 x 4"),
        ({"paths": []}, "no shards"),
    ],
)
def test_the_error_for_impossible_settings_says_why(tmp_path, options, says):
    paths, _ = write_stream(tmp_path, [100])
    with pytest.raises(ValueError, match=says):
        TokenLoader(**({"paths": paths, "batch": 2, "length": 4} | options))


def test_there_may_be_more_shards_than_file_handles(tmp_path):
    paths, tokens = write_stream(tmp_path, [8] * 150)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(list(Path("/proc/self/fd").iterdir())) + 80, hard))
    try:
        batches = list(TokenLoader(paths, batch=2, length=8, repeat=False))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert torch.cat([inputs.flatten() for inputs, _ in batches]).tolist() == tokens[: 148 * 8].tolist()


def test_validation_takes_the_same_whole_batches_every_time(tmp_path):
    paths, tokens = write_stream(tmp_path, [100, 100])

    def once(**ranks):
        return TokenLoader(paths, batch=4, length=8, repeat=False, **ranks)

    loader = once()
    for _ in range(2):
        seen = list(loader.first(99))
        assert torch.cat([inputs.flatten() for inputs, _ in seen]).tolist() == tokens[:96].tolist()
    for (inputs, _), one, two in zip(seen, *(once(rank=r, world=2).first(99) for r in range(2)), strict=True):
        assert torch.equal(torch.cat([one[0], two[0]]), inputs)
    assert len(list(loader.first(None))) == len(list(loader.first(10**9))) == 6
    with pytest.raises(ValueError, match="eval_tokens=31 is less than a batch of 4 x 8; raise it"):
        loader.first(31)


def test_a_folder_without_shards_or_with_unfinished_ones_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"no \*_val_\*\.bin"):
        shard_paths(tmp_path, "val")
    write_shard(tmp_path / "a_val_000000.bin", [1])
    (tmp_path / ".partial").mkdir()
    with pytest.raises(DataError, match="not finished"):
        shard_paths(tmp_path, "val")


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"shards": [{"x": 1}]}', '{"shards": [], "y": 2}'])
def test_a_damaged_meta_json_is_named(tmp_path, content):
    with pytest.raises(DataError, match=r"meta\.json: missing"):
        read_token_set(tmp_path)
    (tmp_path / "meta.json").write_text(content, encoding="utf-8")
    with pytest.raises(DataError, match=r"meta\.json: damaged"):
        read_token_set(tmp_path)
